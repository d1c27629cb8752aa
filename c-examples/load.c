/*
 * load: a model's weights in memory, each tensor where the rules say, by a loader without ggml.
 *
 * The create_tensor path of llama.cpp, for any loader: open the model, ask for its tensors, allocate, fill. Every place that was used is printed,
 * with its tensors, bytes, and a checksum of the first bytes of each tensor.
 *
 *     make load && ./load MODEL.gguf 'exps=ARENA'
 */
#include <berth.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { PLACES = 16, FIRST_BYTES = 64 };

/* What lies in one place. */
struct place {
    const char *target;
    enum berth_memory memory;
    size_t tensors, bytes;
    uint32_t checksum;
};

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, berth_last_error());
    return 1;
}

static bool on_progress(uint64_t done, uint64_t total, void *user) {
    int *calls = user;
    ++*calls;
    fprintf(stderr, "\rread %" PRIu64 " of %" PRIu64 " bytes%s", done, total, done == total ? "\n" : "");
    return true; /* false would cancel */
}

/* FNV-1a over the first bytes. Those in a mapping are read from the file here. */
static uint32_t checksum(uint32_t sum, const struct berth_tensor *tensor) {
    const unsigned char *data = tensor->data;
    for (size_t i = 0; i < tensor->bytes && i < FIRST_BYTES; i++) {
        sum = (sum ^ data[i]) * 16777619u;
    }
    return sum;
}

static int load(struct berth_loader *loader) {
    for (size_t i = 0; i < berth_loader_model_count(loader); i++) {
        const struct berth_tensor *tensor = NULL;
        if (berth_create_tensor(loader, berth_loader_model_name(loader, i), 0, &tensor) != BERTH_STATUS_OK) {
            return failed(berth_loader_model_name(loader, i));
        }
        /* NULL: no graph uses it. Else tensor->target, tensor->memory and tensor->reason say where it will be, and why. */
    }
    int calls = 0;
    if (berth_loader_alloc(loader) != BERTH_STATUS_OK || berth_loader_fill(loader, on_progress, &calls) != BERTH_STATUS_OK) {
        return failed("load");
    }

    struct place places[PLACES];
    size_t n = 0;
    for (size_t i = 0; i < berth_loader_tensor_count(loader); i++) {
        const struct berth_tensor *tensor = berth_loader_tensor(loader, i);
        size_t at = 0;
        while (at < n && (strcmp(places[at].target, tensor->target) != 0 || places[at].memory != tensor->memory)) {
            at++;
        }
        if (at == n) {
            if (n == PLACES) {
                return 1;
            }
            places[n++] = (struct place){.target = tensor->target, .memory = tensor->memory, .checksum = 2166136261u};
        }
        places[at].tensors++;
        places[at].bytes += tensor->bytes;
        places[at].checksum = checksum(places[at].checksum, tensor);
    }
    for (size_t i = 0; i < n; i++) {
        const struct place *p = &places[i];
        printf("%s: %zu tensors, %zu bytes, %s, %08" PRIx32 "\n", p->target, p->tensors, p->bytes, berth_memory_text((int)p->memory), p->checksum);
    }
    return calls > 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: load MODEL.gguf [PATTERN=TARGET,...]...\n");
        return 2;
    }
    struct berth_rules *rules = NULL;
    struct berth_loader *loader = NULL;
    if (berth_rules_new(NULL, 0, &rules) != BERTH_STATUS_OK) {
        return failed("rules");
    }
    int result = 0;
    for (int i = 2; i < argc && result == 0; i++) {
        result = berth_rules_parse(rules, argv[i]) == BERTH_STATUS_OK ? 0 : failed(argv[i]);
    }
    if (result == 0) {
        result = berth_loader_open(argv[1], rules, NULL, &loader) == BERTH_STATUS_OK ? load(loader) : failed(argv[1]);
    }
    berth_loader_free(loader);
    berth_rules_free(rules);
    return result;
}
