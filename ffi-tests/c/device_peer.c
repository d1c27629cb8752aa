/*
 * Graphs for the device BERTH that no llama.cpp would send, through the real ggml.
 *
 *     device_peer CPU_LIB BERTH_LIB MOST
 *
 * With "-" as CPU_LIB there is no other backend: no answer is compared with it, and no OpenMP lends threads. MOST is the largest number of
 * threads that is asked for. Prints "ok" and the number of checks, or what is wrong.
 */
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

static int checks, failures, most;

static void check(bool ok, const char *what) {
    checks++;
    if (!ok) {
        failures++;
        printf("FAILED %s\n", what);
    }
}

static void must(bool ok, const char *what) {
    if (!ok) {
        printf("FAILED %s\n", what);
        exit(1);
    }
}

static uint64_t state;

static float uniform(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (float)((state * 0x2545f4914f6cdd1du) >> 40) / 8388608.0f - 1.0f;
}

enum { D = 256, F = 96, EXPERTS = 5, USED = 2 };

static ggml_backend_dev_t device;
static ggml_backend_t cpu;

/* A block of a mixture of experts, with all its tensors in one buffer. */
struct block {
    struct ggml_context *ctx;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *gate, *up, *down, *x, *ids, *routing, *product, *sum;
    struct ggml_cgraph *graph;
};

static void fill_weights(struct ggml_tensor *t) {
    const size_t n = (size_t)ggml_nelements(t);
    float *values = malloc(n * sizeof(float));
    void *blocks = malloc(ggml_nbytes(t));
    must(values != NULL && blocks != NULL, "no memory");
    for (size_t i = 0; i < n; i++) {
        values[i] = 0.1f * uniform();
    }
    ggml_quantize_chunk(t->type, values, blocks, 0, ggml_nrows(t), t->ne[0], NULL);
    ggml_backend_tensor_set(t, blocks, 0, ggml_nbytes(t));
    free(values);
    free(blocks);
}

static void fill(struct ggml_tensor *t, float offset) {
    float *values = malloc(ggml_nbytes(t) + 1);
    must(values != NULL, "no memory");
    for (int64_t i = 0; i < ggml_nelements(t); i++) {
        values[i] = uniform() + offset;
    }
    ggml_backend_tensor_set(t, values, 0, ggml_nbytes(t));
    free(values);
}

/* The same seed makes the same block, wherever it lies. */
static struct block block_new(ggml_backend_buffer_type_t type, enum ggml_type weights, int64_t tokens, uint64_t seed) {
    struct block b;
    const struct ggml_init_params params = {64 * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true};
    b.ctx = ggml_init(params);
    must(b.ctx != NULL, "no context");
    b.gate = ggml_new_tensor_3d(b.ctx, weights, D, F, EXPERTS);
    b.up = ggml_new_tensor_3d(b.ctx, weights, D, F, EXPERTS);
    b.down = ggml_new_tensor_3d(b.ctx, GGML_TYPE_Q8_0, F, D, EXPERTS);
    b.x = ggml_new_tensor_3d(b.ctx, GGML_TYPE_F32, D, 1, tokens);
    b.ids = ggml_new_tensor_2d(b.ctx, GGML_TYPE_I32, USED, tokens);
    b.routing = ggml_new_tensor_3d(b.ctx, GGML_TYPE_F32, 1, USED, tokens);
    b.product = ggml_mul_mat_id(b.ctx, b.gate, b.x, b.ids);
    struct ggml_tensor *up = ggml_mul_mat_id(b.ctx, b.up, b.x, b.ids);
    struct ggml_tensor *down = ggml_mul_mat_id(b.ctx, b.down, ggml_swiglu_split(b.ctx, b.product, up), b.ids);
    struct ggml_tensor *parts = ggml_mul(b.ctx, down, b.routing), *part[USED];
    for (int64_t j = 0; j < USED; j++) {
        part[j] = ggml_view_2d(b.ctx, parts, D, tokens, parts->nb[2], (size_t)j * parts->nb[1]);
    }
    b.sum = ggml_add(b.ctx, part[0], part[1]);
    b.graph = ggml_new_graph(b.ctx);
    ggml_build_forward_expand(b.graph, b.sum);
    b.buffer = ggml_backend_alloc_ctx_tensors_from_buft(b.ctx, type);
    must(b.buffer != NULL, "no buffer");
    state = seed | 1;
    fill_weights(b.gate);
    fill_weights(b.up);
    fill_weights(b.down);
    fill(b.x, 0);
    fill(b.routing, 1);
    for (int64_t i = 0; i < USED * tokens; i++) {
        ((int32_t *)b.ids->data)[i] = (int32_t)((uniform() + 1) / 2 * EXPERTS) % EXPERTS;
    }
    return b;
}

static void block_free(struct block b) {
    ggml_backend_buffer_free(b.buffer);
    ggml_free(b.ctx);
}

static ggml_backend_t backend_new(void) {
    ggml_backend_t backend = ggml_backend_dev_init(device, NULL);
    must(backend != NULL, "no backend");
    return backend;
}

static void set_threads(ggml_backend_t backend, int threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    must(set != NULL, "no ggml_backend_set_n_threads");
    set(backend, threads);
}

static void set_abort(ggml_backend_t backend, ggml_abort_callback callback, void *data) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const ggml_backend_set_abort_callback_t set =
        (ggml_backend_set_abort_callback_t)ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback");
    must(set != NULL, "no ggml_backend_set_abort_callback");
    set(backend, callback, data);
}

static double error_of(const struct ggml_tensor *got, const struct ggml_tensor *want) {
    double error = 0, whole = 0;
    for (int64_t i = 0; i < ggml_nelements(want); i++) {
        const double w = (double)((const float *)want->data)[i], e = (double)((const float *)got->data)[i] - w;
        error += e * e;
        whole += w * w;
    }
    return error / whole;
}

static const uint32_t UNTOUCHED = 0x7fc0dead;

static void mark(struct ggml_tensor *t) {
    for (int64_t i = 0; i < ggml_nelements(t); i++) {
        memcpy((float *)t->data + i, &UNTOUCHED, sizeof(UNTOUCHED));
    }
}

static bool is_marked(const struct ggml_tensor *t) {
    for (int64_t i = 0; i < ggml_nelements(t); i++) {
        if (memcmp((const float *)t->data + i, &UNTOUCHED, sizeof(UNTOUCHED)) != 0) {
            return false;
        }
    }
    return true;
}

static void right_on_any_number_of_threads(void) {
    const enum ggml_type types[] = {GGML_TYPE_Q4_K, GGML_TYPE_Q4_0, GGML_TYPE_F16};
    const int64_t tokens[] = {1, 3, 40};
    const int threads[] = {1, 2, 3, 0, -7, most};
    for (size_t i = 0; i < 9; i++) {
        const uint64_t seed = 77 + i;
        struct block ours = block_new(ggml_backend_dev_buffer_type(device), types[i % 3], tokens[i / 3], seed);
        ggml_backend_t backend = backend_new();
        struct block stock = ours;
        if (cpu != NULL) {
            stock = block_new(ggml_backend_get_default_buffer_type(cpu), types[i % 3], tokens[i / 3], seed);
            must(ggml_backend_graph_compute(cpu, stock.graph) == GGML_STATUS_SUCCESS, "the CPU computes");
        }
        float *first = malloc(ggml_nbytes(ours.sum));
        must(first != NULL, "no memory");
        for (size_t t = 0; t < sizeof(threads) / sizeof(threads[0]); t++) {
            set_threads(backend, threads[t]);
            mark(ours.sum);
            check(ggml_backend_graph_compute(backend, ours.graph) == GGML_STATUS_SUCCESS, "a block is computed");
            if (t == 0) {
                memcpy(first, ours.sum->data, ggml_nbytes(ours.sum));
            }
            check(error_of(ours.sum, stock.sum) < 2e-3, "a block is right");
            check(memcmp(first, ours.sum->data, ggml_nbytes(ours.sum)) == 0, "the number of threads changes nothing");
        }
        free(first);
        ggml_backend_free(backend);
        if (cpu != NULL) {
            block_free(stock);
        }
        block_free(ours);
    }
}

static void ids_that_are_no_experts(void) {
    struct block b = block_new(ggml_backend_dev_buffer_type(device), GGML_TYPE_Q4_K, 7, 5);
    ggml_backend_t backend = backend_new();
    set_threads(backend, 2);
    const int32_t bad[] = {-1, EXPERTS, INT_MAX, INT_MIN};
    for (size_t i = 0; i < 4; i++) {
        const size_t at = i * 4;
        const int32_t good = ((int32_t *)b.ids->data)[at];
        ((int32_t *)b.ids->data)[at] = bad[i];
        mark(b.sum);
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_FAILED, "an id that is no expert fails");
        check(is_marked(b.sum), "an id that is no expert writes nothing");
        ((int32_t *)b.ids->data)[at] = good;
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS, "the next graph is computed");
    }
    ggml_backend_free(backend);
    block_free(b);
}

/* The host's allocator gives the memory of an operand that no later node reads to the result: operands are read before anything is written. */
static void results_in_the_memory_of_an_operand(void) {
    const enum ggml_type types[] = {GGML_TYPE_Q4_K, GGML_TYPE_Q4_0, GGML_TYPE_F16, GGML_TYPE_F32};
    const int64_t tokens[] = {1, 3, 40, 130};
    ggml_backend_t backend = backend_new();
    for (size_t i = 0; i < 16; i++) {
        struct block b = block_new(ggml_backend_dev_buffer_type(device), types[i % 4], tokens[i / 4], 50 + i);
        const size_t size = ggml_nbytes(b.sum), row = (size_t)D * sizeof(float), moved = size + 4 * row;
        char *memory = aligned_alloc(64, moved);
        void *want = malloc(size), *ids = malloc(ggml_nbytes(b.ids)), *routing = malloc(ggml_nbytes(b.routing)), *x = malloc(size);
        must(memory != NULL && want != NULL && ids != NULL && routing != NULL && x != NULL, "no memory");
        set_threads(backend, 1 + (int)i % 3);
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS, "a result elsewhere");
        memcpy(want, b.sum->data, size);
        memcpy(x, b.x->data, size);
        memcpy(ids, b.ids->data, ggml_nbytes(b.ids));
        memcpy(routing, b.routing->data, ggml_nbytes(b.routing));
        struct ggml_tensor *const operands[] = {b.x, b.ids, b.routing};
        const void *const bytes[] = {x, ids, routing};
        void *const own = b.sum->data;
        /* Exactly there, and a row or two away from there, either way. */
        for (size_t o = 0; o < 3; o++) {
            void *const kept = operands[o]->data;
            for (size_t at = 0; at <= 4; at++) {
                operands[o]->data = memory + 2 * row;
                b.sum->data = memory + at * row;
                memset(memory, 0x55, moved);
                memcpy(operands[o]->data, bytes[o], ggml_nbytes(operands[o]));
                check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS, "a result in the memory of an operand");
                check(memcmp(b.sum->data, want, size) == 0, "a result in the memory of an operand is the one elsewhere");
            }
            operands[o]->data = kept;
        }
        b.sum->data = own;
        free(x);
        free(routing);
        free(ids);
        free(want);
        free(memory);
        block_free(b);
    }
    ggml_backend_free(backend);
}

static bool stop(void *asked) {
    return ++*(int *)asked > 0;
}

static bool go_on(void *asked) {
    ++*(int *)asked;
    return false;
}

static void told_to_stop(void) {
    struct block b = block_new(ggml_backend_dev_buffer_type(device), GGML_TYPE_Q4_0, 3, 6);
    ggml_backend_t backend = backend_new();
    for (int threads = 1; threads <= 2; threads++) {
        int asked = 0;
        set_threads(backend, threads);
        set_abort(backend, stop, &asked);
        mark(b.sum);
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_ABORTED && asked == 1 && is_marked(b.sum), "a graph is stopped");
        set_abort(backend, go_on, &asked);
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS && asked > 1, "a graph that may go on does");
        set_abort(backend, NULL, NULL);
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS, "nobody is asked any more");
    }
    ggml_backend_free(backend);
    block_free(b);
}

/* What was never claimed, and what is broken, is an error: the tensors that a graph has are its maker's, so each is bent in place. */
static void graphs_that_cannot_be_computed(void) {
    ggml_backend_t backend = backend_new();
    set_threads(backend, 2);
    struct block b = block_new(ggml_backend_dev_buffer_type(device), GGML_TYPE_Q4_K, 2, 7);
#define BENT(what, target, value) do { \
        __typeof__(target) kept = target; \
        target = value; \
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_FAILED, what); \
        check(!ggml_backend_dev_supports_op(device, b.product), what ", and is not claimed"); \
        target = kept; \
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS, "after " what); \
        check(ggml_backend_dev_supports_op(device, b.product), "claimed after " what); \
    } while (0)
    BENT("no weights", b.product->src[0], NULL);
    BENT("no tokens", b.product->src[1], NULL);
    BENT("no ids", b.product->src[2], NULL);
    BENT("tokens of another type", b.x->type, GGML_TYPE_F16);
    BENT("tokens that are too short", b.x->ne[0], D / 2);
    BENT("tokens in columns", b.x->nb[0], 8);
    BENT("ids of another type", b.ids->type, GGML_TYPE_F32);
    BENT("weights without kernels", b.gate->type, GGML_TYPE_IQ1_S);
    BENT("weights in no type at all", b.gate->type, (enum ggml_type)9999);
    BENT("rows that are no whole blocks", b.gate->ne[0], D - 1);
#undef BENT
    /* Without memory, or with less than it says: claimed or not, it is not computed. */
#define LOST(what, target, value) do { \
        __typeof__(target) kept = target; \
        target = value; \
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_FAILED, what); \
        target = kept; \
        check(ggml_backend_graph_compute(backend, b.graph) == GGML_STATUS_SUCCESS, "after " what); \
    } while (0)
    LOST("weights nowhere", b.gate->data, NULL);
    LOST("tokens nowhere", b.x->data, NULL);
    LOST("ids nowhere", b.ids->data, NULL);
    LOST("a result nowhere", b.sum->data, NULL);
    LOST("routing weights nowhere", b.routing->data, NULL);
    LOST("a negative number of tokens", b.x->ne[2], -1);
    LOST("more tokens than ids", b.x->ne[2], 3);
    LOST("ids of too many", b.ids->ne[1], INT64_MAX);
    LOST("a step of rows that wraps", b.gate->nb[1], SIZE_MAX);
    LOST("an unaligned token", b.x->data, (char *)b.x->data + 1);
#undef LOST
    block_free(b);

    const struct ggml_init_params params = {16 * ggml_tensor_overhead() + 2 * ggml_graph_overhead(), NULL, true};
    struct ggml_context *ctx = ggml_init(params);
    struct ggml_cgraph *empty = ggml_new_graph(ctx), *foreign = ggml_new_graph(ctx);
    check(ggml_backend_graph_compute(backend, empty) == GGML_STATUS_SUCCESS, "an empty graph");
    struct ggml_tensor *x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 2), *soft = ggml_soft_max(ctx, x);
    ggml_build_forward_expand(foreign, soft);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(device));
    must(buffer != NULL, "no buffer");
    fill(x, 0);
    mark(soft);
    check(!ggml_backend_dev_supports_op(device, soft), "what is no expert's is not claimed");
    if (cpu == NULL) {
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_FAILED && is_marked(soft), "and not computed without a CPU backend");
    } else {
        /* An RPC server sends what it was never told that it could send. */
        float want[128];
        must(ggml_backend_graph_compute(cpu, foreign) == GGML_STATUS_SUCCESS, "the CPU computes");
        memcpy(want, soft->data, sizeof(want));
        mark(soft);
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_SUCCESS, "and computed by the CPU backend");
        check(memcmp(soft->data, want, sizeof(want)) == 0, "as it computes");
        void *const kept = x->data;
        mark(soft);
        x->data = NULL;
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_FAILED && is_marked(soft), "what is broken does not get there");
        x->data = (char *)kept + ggml_backend_buffer_get_size(buffer);
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_FAILED && is_marked(soft), "nor what lies beyond its buffer");
        x->data = kept;
        x->nb[1] = SIZE_MAX;
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_FAILED && is_marked(soft), "nor a step that wraps");
        x->nb[1] = 64 * sizeof(float);
        x->type = (enum ggml_type)40000;
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_FAILED && is_marked(soft), "nor a type that is none");
        x->type = GGML_TYPE_F32;
        check(ggml_backend_graph_compute(backend, foreign) == GGML_STATUS_SUCCESS, "the next graph is computed");
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(backend);
}

struct worker {
    pthread_t thread;
    struct block block;
    float *want;
    int threads, wrong;
};

static void *compute(void *argument) {
    struct worker *w = argument;
    ggml_backend_t backend = backend_new();
    set_threads(backend, w->threads);
    for (int i = 0; i < 40; i++) {
        mark(w->block.sum);
        w->wrong += ggml_backend_graph_compute(backend, w->block.graph) != GGML_STATUS_SUCCESS;
        w->wrong += memcmp(w->want, w->block.sum->data, ggml_nbytes(w->block.sum)) != 0;
    }
    ggml_backend_free(backend);
    return NULL;
}

static void backends_on_threads_of_their_own(void) {
    struct worker workers[4];
    for (size_t i = 0; i < 4; i++) {
        struct worker *w = &workers[i];
        w->block = block_new(ggml_backend_dev_buffer_type(device), i % 2 == 0 ? GGML_TYPE_Q4_K : GGML_TYPE_Q8_0, 1 + (int64_t)i * 5, 9 + i);
        w->threads = 1 + (int)i % 3;
        w->wrong = 0;
        w->want = malloc(ggml_nbytes(w->block.sum));
        must(w->want != NULL, "no memory");
        ggml_backend_t backend = backend_new();
        set_threads(backend, 1);
        check(ggml_backend_graph_compute(backend, w->block.graph) == GGML_STATUS_SUCCESS, "a block alone");
        memcpy(w->want, w->block.sum->data, ggml_nbytes(w->block.sum));
        ggml_backend_free(backend);
    }
    for (size_t i = 0; i < 4; i++) {
        must(pthread_create(&workers[i].thread, NULL, compute, &workers[i]) == 0, "no thread");
    }
    for (size_t i = 0; i < 4; i++) {
        pthread_join(workers[i].thread, NULL);
        check(workers[i].wrong == 0, "a block beside others");
        free(workers[i].want);
        block_free(workers[i].block);
    }
}

int main(int argc, char **argv) {
    must(argc == 4, "see the top of device_peer.c");
    most = atoi(argv[3]);
    if (strcmp(argv[1], "-") != 0) {
        must(ggml_backend_load(argv[1]) != NULL, "the CPU backend does not load");
        cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
        must(cpu != NULL, "no CPU backend");
    }
    must(ggml_backend_load(argv[2]) != NULL, "Berth does not load");
    device = ggml_backend_dev_by_name("BERTH");
    must(device != NULL, "no device BERTH");
    right_on_any_number_of_threads();
    ids_that_are_no_experts();
    results_in_the_memory_of_an_operand();
    told_to_stop();
    graphs_that_cannot_be_computed();
    backends_on_threads_of_their_own();
    if (cpu != NULL) {
        ggml_backend_free(cpu);
    }
    printf("%s, %d checks\n", failures == 0 ? "ok" : "FAILED", checks);
    return failures != 0;
}
