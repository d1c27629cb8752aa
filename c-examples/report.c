/*
 * report: what was asked, what was got, and why.
 *
 * Berth never changes a place silently. A loader can take Berth's messages itself, and read everything that happened as JSON. Here ARENA is
 * asked for; set BERTH_ARENA_DIR to something that is no directory to see a fallback.
 *
 *     make && BERTH_ARENA_DIR=/dev/null ./report
 */
#include <berth.h>
#include <ggml-backend.h>
#include <stdio.h>
#include <string.h>

static void on_message(int level, const char *line, void *user) {
    int *warnings = user;
    *warnings += level == 2;
    printf("%s: %s\n", level == 1 ? "error" : level == 2 ? "warning" : "note", line);
}

int main(void) {
    int warnings = 0;
    berth_log_set(on_message, &warnings);

    ggml_backend_buffer_type_t arena = berth_buft_arena();
    if (arena == NULL) {
        fprintf(stderr, "no Berth: %s\n", berth_last_error());
        return 1;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(arena, 1 << 20);
    if (buffer == NULL) {
        return 1; /* BERTH_STRICT=1: the message says why */
    }

    char *json = NULL;
    enum berth_status status = berth_report_json(&json);
    if (status != BERTH_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", berth_status_text(status), berth_last_error());
        return 1;
    }
    puts(json);
    int fell_back = strstr(json, "\"got\": \"arena\"") == NULL;
    berth_string_free(json);

    ggml_backend_buffer_free(buffer);
    berth_log_set(NULL, NULL);
    /* A fallback comes with a warning, and only a fallback does. */
    return fell_back == (warnings > 0) ? 0 : 1;
}
