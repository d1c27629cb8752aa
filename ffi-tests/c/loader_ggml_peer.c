/*
 * A loader over berth.h that puts its tensors into ggml: every tensor gets the buffer of berth_loader_ggml_buffer, and is read back through it.
 *
 *   loader_ggml_peer MODEL RULES MMAP(0|1)
 */
#include "peer.h"

#include <berth.h>

#define OK(call) REQUIRE((call) == BERTH_STATUS_OK, "%s", berth_last_error())

int main(int argc, char **argv) {
    REQUIRE(argc == 4, "arguments");
    struct berth_load load = {.struct_size = sizeof load};
    struct berth_rules *rules = NULL;
    struct berth_loader *loader = NULL;
    OK(berth_load_init(&load));
    load.mmap = argv[3][0] == '1';
    OK(berth_rules_new(NULL, 0, &rules));
    OK(berth_rules_parse(rules, argv[2]));
    OK(berth_loader_open(argv[1], rules, &load, &loader));
    size_t n = berth_loader_model_count(loader);
    for (size_t i = 0; i < n; i++) {
        const struct berth_tensor *made = NULL;
        OK(berth_create_tensor(loader, berth_loader_model_name(loader, i), 0, &made));
        ggml_backend_buffer_t early = NULL;
        CHECK(berth_loader_ggml_buffer(loader, made, &early) == BERTH_STATUS_INVALID_ARGUMENT && !early, "before memory is allocated");
    }
    OK(berth_loader_alloc(loader));
    OK(berth_loader_fill(loader, NULL, NULL));

    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = 64 * ggml_tensor_overhead(), .no_alloc = true});
    for (size_t i = 0; i < n; i++) {
        const struct berth_tensor *t = berth_loader_tensor(loader, i);
        ggml_backend_buffer_t buffer = NULL;
        OK(berth_loader_ggml_buffer(loader, t, &buffer));
        /* Berth's own types are named in their buffers; plain CPU memory has the type that can hold anything. */
        const char *name = ggml_backend_buft_name(ggml_backend_buffer_get_type(buffer)), *wanted = t->target;
        CHECK(strcmp(name, strcmp(wanted, "CPU") == 0 ? "CPU_MMAP" : wanted) == 0, "%s: %s for %s", t->name, name, wanted);
        CHECK(ggml_backend_buffer_get_size(buffer) > 0, "%s", t->name);
        struct ggml_tensor *tensor = ggml_new_tensor_4d(context, (enum ggml_type) t->ggml_type, t->ne[0], t->ne[1], t->ne[2], t->ne[3]);
        ggml_set_name(tensor, t->name);
        CHECK(memcmp(tensor->ne, t->ne, sizeof t->ne) == 0 && memcmp(tensor->nb, t->nb, sizeof t->nb) == 0, "%s: strides", t->name);
        CHECK(ggml_nbytes(tensor) == t->bytes, "%s: %zu bytes, not %zu", t->name, ggml_nbytes(tensor), t->bytes);
        CHECK(ggml_backend_tensor_alloc(buffer, tensor, t->data) == GGML_STATUS_SUCCESS, "%s", t->name);
        char read[4096];
        REQUIRE(t->bytes <= sizeof read, "%s is too large for this test", t->name);
        ggml_backend_tensor_get(tensor, read, 0, t->bytes);
        CHECK(memcmp(read, t->data, t->bytes) == 0, "%s", t->name);
        ggml_backend_buffer_free(buffer);
    }
    ggml_free(context);
    berth_loader_free(loader);
    berth_rules_free(rules);
    return finish();
}
