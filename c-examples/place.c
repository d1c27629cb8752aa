/*
 * place: bytes through all three of Berth's places.
 *
 * A tensor is made in CPU_MMAP, copied to CUDA_Host and from there to ARENA by ggml's own functions, read back and compared. Berth's buffer
 * types are ordinary ggml buffer types: whatever takes one takes these.
 *
 *     make && ./place
 */
#include <berth.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 1024, ROWS = 512, PLACES = 3 };

/* A matrix in a buffer of its own. */
struct matrix {
    struct ggml_context *context;
    struct ggml_tensor *tensor;
    ggml_backend_buffer_t buffer;
};

static int make(struct matrix *m, ggml_backend_buffer_type_t place) {
    struct ggml_init_params params = {.mem_size = ggml_tensor_overhead(), .mem_buffer = NULL, .no_alloc = true};
    m->context = ggml_init(params);
    m->tensor = ggml_new_tensor_2d(m->context, GGML_TYPE_F32, COLUMNS, ROWS);
    m->buffer = ggml_backend_buft_alloc_buffer(place, ggml_nbytes(m->tensor));
    if (m->buffer == NULL) {
        fprintf(stderr, "no memory in %s\n", ggml_backend_buft_name(place));
        return 0;
    }
    ggml_backend_tensor_alloc(m->buffer, m->tensor, ggml_backend_buffer_get_base(m->buffer));
    return 1;
}

int main(void) {
    ggml_backend_buffer_type_t places[PLACES] = {berth_buft_cpu_mmap(), berth_buft_cuda_host(), berth_buft_arena()};
    if (places[0] == NULL) {
        fprintf(stderr, "no Berth: %s\n", berth_last_error());
        return 1;
    }

    size_t bytes = sizeof(float) * COLUMNS * ROWS;
    float *before = malloc(bytes), *after = malloc(bytes);
    if (before == NULL || after == NULL) {
        return 1;
    }
    for (int i = 0; i < COLUMNS * ROWS; i++) {
        before[i] = (float)i / 3.0f;
    }

    struct matrix matrices[PLACES];
    for (int i = 0; i < PLACES; i++) {
        if (!make(&matrices[i], places[i])) {
            return 1;
        }
        if (i == 0) {
            ggml_backend_tensor_set(matrices[i].tensor, before, 0, bytes);
        } else {
            ggml_backend_tensor_copy(matrices[i - 1].tensor, matrices[i].tensor);
        }
        printf("%s%s", i > 0 ? " -> " : "", ggml_backend_buft_name(places[i]));
    }
    ggml_backend_tensor_get(matrices[PLACES - 1].tensor, after, 0, bytes);
    int same = memcmp(before, after, bytes) == 0;
    printf(": %zu bytes, %s\n", bytes, same ? "the same" : "DIFFERENT");

    for (int i = 0; i < PLACES; i++) {
        ggml_backend_buffer_free(matrices[i].buffer);
        ggml_free(matrices[i].context);
    }
    free(before);
    free(after);
    return same ? 0 : 1;
}
