/*
 * arena: memory for the experts of a layer in a file instead of anonymous RAM.
 *
 * An engine that loads experts by itself takes one arena for each layer (and NUMA part) and its weights from it, where it would have called
 * aligned_alloc. The kernel may write the pages to the file and drop them: nothing here counts as memory that only the OOM killer can free.
 *
 *     make && ./arena /var/tmp      # no argument: ordinary memory
 */
#include <berth.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS = 3, EXPERTS = 8, BYTES = 5000000 };

int main(int argc, char **argv) {
    const char *directory = argc > 1 ? argv[1] : NULL;
    struct berth_arena *layers[LAYERS];
    int in_file = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        char name[32];
        snprintf(name, sizeof name, "blk.%d", layer);
        /* Each piece takes up a multiple of 2 MiB. */
        size_t piece = (BYTES + ((size_t) 2 << 20) - 1) >> 21 << 21;
        enum berth_status status = berth_arena_open(directory, name, piece * EXPERTS, -1, &layers[layer]);
        if (status != BERTH_STATUS_OK) {
            fprintf(stderr, "%s: %s\n", berth_status_text(status), berth_last_error());
            return 1;
        }
        for (int expert = 0; expert < EXPERTS; expert++) {
            bool file_backed = false;
            void *weights = berth_arena_alloc(layers[layer], BYTES, &file_backed);
            if (weights == NULL) {
                fprintf(stderr, "%s\n", berth_last_error());
                return 1;
            }
            memset(weights, expert, BYTES); /* here the loader would read them */
            in_file += file_backed;
        }
    }
    printf("%d of %d experts lie in files\n", in_file, LAYERS * EXPERTS);
    for (int layer = 0; layer < LAYERS; layer++) {
        berth_arena_close(layers[layer]);
    }
    return 0;
}
