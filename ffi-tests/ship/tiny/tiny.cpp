// Lists the backends and their devices, as they are at first and after loading others, and takes memory in ARENA.
#include "ggml-backend.h"

#include <cstdio>
#include <cstring>

static void list(const char * when) {
    printf("%s:", when);
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        ggml_backend_reg_t reg = ggml_backend_reg_get(i);
        printf(" %s", ggml_backend_reg_name(reg));
        for (size_t j = 0; j < ggml_backend_reg_dev_count(reg); j++) {
            printf(" %s", ggml_backend_dev_name(ggml_backend_reg_dev_get(reg, j)));
        }
    }
    printf("\n");
}

static void log_line(enum ggml_log_level, const char * text, void *) {
    if (strstr(text, "berth")) {
        printf("log: %s", text);
    }
}

int main() {
    ggml_log_set(log_line, nullptr);
    printf("main\n");
    list("first");
    ggml_backend_load_all();
    list("loaded");
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        if (strcmp(ggml_backend_buft_name(type), "ARENA") == 0) {
            ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, 1 << 20);
            printf("ARENA: %s\n", buffer ? "a buffer" : "nothing");
            ggml_backend_buffer_free(buffer);
        }
    }
    return 0;
}
