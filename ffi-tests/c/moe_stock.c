/*
 * The experts of a layer by stock ggml and by Berth, in one process, on the same weights, tokens and ids.
 *
 *     moe_stock CPU_LIB D F EXPERTS USED THREADS SECONDS GATE DOWN TOKENS [GATE DOWN TOKENS]..
 *
 * GATE (and up) and DOWN are numbers of enum ggml_type. Stock is what llama.cpp builds: MUL_MAT_ID twice, SWIGLU, MUL_MAT_ID, MUL by the
 * routing weights, ADD, on the CPU backend with weights in a plain buffer (no repacking) and GGML_CPU_TILED_MM as the caller set it. Both answers must
 * agree before anything is timed. Then both take turns for SECONDS; the medians are printed as one JSON object per line:
 * gate, down, tokens, runs, stock_ms, berth_ms, ratio (stock over Berth), nmse. Weights are quantised by ggml from random values, larger than a
 * last-level cache where the sizes are; ids change from turn to turn.
 */
#include <berth.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "moe_stock: %s: %s\n", what, berth_last_error());
    exit(1);
}

static void must(bool ok, const char *what) {
    if (!ok) {
        fail(what);
    }
}

static void *memory(size_t size) {
    void *p = aligned_alloc(64, (size + 63) / 64 * 64 + 64);
    must(p != NULL, "out of memory");
    return p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t state = 0x9e3779b97f4a7c15u;

static float uniform(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (float)((state * 0x2545f4914f6cdd1du) >> 40) / 8388608.0f - 1.0f;
}

static int64_t d, f, experts, used;
static size_t threads;
static double seconds;

enum { SETS = 16, MOST = 20000 };

/* Weights of a tensor: some quantised rows, again and again with a shift, as a cache sees nothing but addresses. */
static void fill_weights(struct ggml_tensor *t) {
    enum { ROWS = 61 };
    const size_t row = ggml_row_size(t->type, t->ne[0]), all = ggml_nbytes(t);
    float *values = memory((size_t)t->ne[0] * ROWS * sizeof(float));
    uint8_t *blocks = memory(row * ROWS);
    for (int64_t i = 0; i < t->ne[0] * ROWS; i++) {
        values[i] = 0.05f * uniform();
    }
    ggml_quantize_chunk(t->type, values, blocks, 0, ROWS, t->ne[0], NULL);
    for (size_t at = 0; at < all; at += row * ROWS) {
        memcpy((uint8_t *)t->data + at, blocks, all - at < row * ROWS ? all - at : row * ROWS);
    }
    free(values);
    free(blocks);
}

/* One token takes the next of a shuffled deck, so that weights come from memory; more of them choose freely, none an expert twice. */
static void choose(int64_t tokens, int32_t *ids, int32_t *deck, int64_t *dealt) {
    for (int64_t t = 0; t < tokens; t++) {
        if (tokens > 1 || *dealt + used > experts) {
            for (int64_t i = experts; i-- > 1;) {
                const int64_t other = (int64_t)((double)(uniform() + 1) / 2 * (double)(i + 1));
                const int32_t swap = deck[i];
                deck[i] = deck[other];
                deck[other] = swap;
            }
            *dealt = 0;
        }
        memcpy(ids + t * used, deck + *dealt, (size_t)used * sizeof(int32_t));
        *dealt += used;
    }
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void weights(struct berth_moe_weights *w, const struct ggml_tensor *t) {
    w->data = t->data;
    w->size = ggml_nbytes(t);
    w->ggml_type = (uint32_t)t->type;
}

struct layer {
    ggml_backend_t cpu;
    struct ggml_cgraph *graph;
    const struct berth_moe_desc *desc;
    const struct berth_moe_io *io;
    const struct berth_threads *threads;
    struct ggml_tensor *ids;
    const int32_t *sets;
    size_t n;
};

/* Seconds that one of the two takes for a set of ids. */
static double once(const struct layer *l, bool ours, int set) {
    memcpy(l->ids->data, l->sets + (size_t)(set % SETS) * l->n, l->n * sizeof(int32_t));
    const double start = now();
    if (ours) {
        must(berth_moe_forward(l->desc, l->io, l->threads) == BERTH_STATUS_OK, "forward");
    } else {
        must(ggml_backend_graph_compute(l->cpu, l->graph) == GGML_STATUS_SUCCESS, "graph_compute");
    }
    return now() - start;
}

static void compare(ggml_backend_t cpu, struct berth_pool *pool, enum ggml_type gate_type, enum ggml_type down_type, int64_t tokens) {
    struct ggml_init_params params = {.mem_size = (64 + 2 * (size_t)used) * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true};
    struct ggml_context *ctx = ggml_init(params);
    struct ggml_tensor *gate = ggml_new_tensor_3d(ctx, gate_type, d, f, experts), *up = ggml_new_tensor_3d(ctx, gate_type, d, f, experts);
    struct ggml_tensor *down = ggml_new_tensor_3d(ctx, down_type, f, d, experts);
    struct ggml_tensor *x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, 1, tokens), *ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, tokens);
    struct ggml_tensor *routing = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, used, tokens);
    struct ggml_tensor *g = ggml_mul_mat_id(ctx, gate, x, ids), *u = ggml_mul_mat_id(ctx, up, x, ids);
    struct ggml_tensor *parts = ggml_mul(ctx, ggml_mul_mat_id(ctx, down, ggml_swiglu_split(ctx, g, u), ids), routing), *sum = NULL;
    for (int64_t j = 0; j < used; j++) {
        struct ggml_tensor *part = ggml_view_2d(ctx, parts, d, tokens, parts->nb[2], (size_t)j * parts->nb[1]);
        sum = sum == NULL ? part : ggml_add(ctx, sum, part);
    }
    if (used == 1) {
        sum = ggml_cont(ctx, sum);
    }
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, sum);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, cpu);
    must(buffer != NULL, "no memory for a layer");
    fill_weights(gate);
    fill_weights(up);
    fill_weights(down);
    for (int64_t i = 0; i < d * tokens; i++) {
        ((float *)x->data)[i] = uniform();
    }
    for (int64_t i = 0; i < used * tokens; i++) {
        ((float *)routing->data)[i] = (uniform() + 1.5f) / (float)used;
    }
    const int64_t n = used * tokens;
    int32_t *sets = memory((size_t)(SETS * n) * sizeof(int32_t)), *deck = memory((size_t)experts * sizeof(int32_t));
    int64_t dealt = experts;
    for (int64_t i = 0; i < experts; i++) {
        deck[i] = (int32_t)i;
    }
    for (int64_t set = 0; set < SETS; set++) {
        choose(tokens, sets + set * n, deck, &dealt);
    }

    struct berth_moe_desc desc = {.struct_size = sizeof(desc), .d = (size_t)d, .f = (size_t)f, .n_expert = (size_t)experts};
    desc.activation = BERTH_ACTIVATION_SWIGLU;
    weights(&desc.gate, gate);
    weights(&desc.up, up);
    weights(&desc.down, down);
    size_t size = 0;
    must(berth_moe_workspace_size(&desc, (size_t)tokens, (size_t)used, threads, &size) == BERTH_STATUS_OK, "workspace");
    float *y = memory((size_t)(d * tokens) * sizeof(float));
    struct berth_moe_io io = {.struct_size = sizeof(io), .n_tokens = (size_t)tokens, .n_used = (size_t)used, .x = x->data, .ids = ids->data};
    io.weights = routing->data;
    io.y = y;
    io.workspace = memory(size);
    io.workspace_size = size;
    const struct berth_threads on = {.struct_size = sizeof(on), .pool = pool};

    struct layer l = {cpu, graph, &desc, &io, &on, ids, sets, (size_t)n};
    double worst = 0;
    for (int set = 0; set < 4; set++) {
        once(&l, false, set);
        once(&l, true, set);
        double error = 0, whole = 0;
        for (int64_t i = 0; i < d * tokens; i++) {
            const double want = (double)((const float *)sum->data)[i], e = (double)y[i] - want;
            error += e * e;
            whole += want * want;
        }
        worst = fmax(worst, error / whole);
        /* Both round activations to 8 bits, twice, each in its own way: 1e-4 to 5e-4 of either. */
        if (!(whole > 0 && error / whole < 2e-3)) {
            fprintf(stderr, "moe_stock: the answers differ: normalised mean square error %g\n", error / whole);
            exit(1);
        }
    }
    /* A set that one has just used is in a cache: the other takes one from the other half. Short calls are timed as decoding makes them, many of
     * a kind one after the other: for some tens of milliseconds after a pause memory is slower, which hides a difference. */
    static double stock[MOST], berth[MOST];
    const int block = tokens <= 8 ? 256 : 1, warm = tokens <= 8 ? 32 : 0;
    int runs = 0;
    const double until = now() + seconds;
    do {
        for (int turn = 0; turn < 2; turn++) {
            const bool ours = (turn + runs / block) % 2 != 0;
            const int half = ours ? SETS / 2 : 0;
            /* The threads of the other spin for some milliseconds after its last call. */
            usleep(30000);
            for (int i = 0; i < warm; i++) {
                once(&l, ours, half + i % (SETS / 2));
            }
            for (int i = 0; i < block; i++) {
                (ours ? berth : stock)[runs + i] = once(&l, ours, half + (runs + i) % (SETS / 2));
            }
        }
        runs += block;
    } while ((now() < until || runs < 3) && runs + block <= MOST);
    qsort(stock, (size_t)runs, sizeof(double), by_value);
    qsort(berth, (size_t)runs, sizeof(double), by_value);
    const double s = stock[runs / 2], b = berth[runs / 2];
    printf("{\"gate\": \"%s\", \"down\": \"%s\", \"tokens\": %lld, \"isa\": \"%s\", \"runs\": %d, \"stock_ms\": %.4f, \"berth_ms\": %.4f, \"ratio\": %.3f, \"nmse\": %.3e}\n",
           ggml_type_name(gate_type), ggml_type_name(down_type), (long long)tokens, berth_isa(), runs, s * 1e3, b * 1e3, s / b, worst);
    fflush(stdout);
    free(io.workspace);
    free(y);
    free(sets);
    free(deck);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

int main(int argc, char **argv) {
    if (argc < 11 || (argc - 8) % 3 != 0) {
        fail("see the top of moe_stock.c");
    }
    d = atoll(argv[2]);
    f = atoll(argv[3]);
    experts = atoll(argv[4]);
    used = atoll(argv[5]);
    threads = (size_t)atoll(argv[6]);
    seconds = atof(argv[7]);
    must(d > 0 && f > 0 && used >= 1 && used <= experts && seconds >= 0, "sizes");
    must(ggml_backend_load(argv[1]) != NULL, "the CPU backend does not load");
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    must(cpu != NULL, "no CPU backend");
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    const ggml_backend_set_n_threads_t set_threads = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    must(set_threads != NULL, "no ggml_backend_set_n_threads");
    set_threads(cpu, (int)threads);
    struct berth_pool *pool = NULL;
    must(berth_pool_new(threads, &pool) == BERTH_STATUS_OK, "threads");
    for (int i = 8; i < argc; i += 3) {
        compare(cpu, pool, (enum ggml_type)atoi(argv[i]), (enum ggml_type)atoi(argv[i + 1]), atoll(argv[i + 2]));
    }
    berth_pool_free(pool);
    ggml_backend_free(cpu);
    return 0;
}
