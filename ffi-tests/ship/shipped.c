/*
 * shipped: a program that has Berth from an installed prefix: it decides, takes memory from an arena and computes experts. Valid C and C++.
 */
#include <berth.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 32, F = 64, EXPERTS = 4, USED = 2 };

/* GGML_TYPE_Q8_0: 32 values as a half-precision scale and a byte each. */
enum { Q8_0 = 8, BLOCK = 32, BLOCK_BYTES = 34 };

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, berth_last_error());
    return 1;
}

static int decide(void) {
    struct berth_rules *rules = NULL;
    struct berth_load load;
    struct berth_tensor_desc tensor;
    struct berth_decision decision;
    memset(&load, 0, sizeof load);
    memset(&tensor, 0, sizeof tensor);
    memset(&decision, 0, sizeof decision);
    load.struct_size = sizeof load;
    tensor.struct_size = sizeof tensor;
    decision.struct_size = sizeof decision;
    tensor.name = "blk.3.ffn_up_exps.weight";
    tensor.ne[0] = D, tensor.ne[1] = F, tensor.ne[2] = EXPERTS, tensor.ne[3] = 1;
    tensor.ggml_type = Q8_0;
    if (berth_rules_new(NULL, 0, &rules) != BERTH_STATUS_OK || berth_rules_parse(rules, "exps=ARENA") != BERTH_STATUS_OK
        || berth_load_init(&load) != BERTH_STATUS_OK || berth_decide(&tensor, rules, &load, &decision) != BERTH_STATUS_OK) {
        berth_rules_free(rules);
        return failed("decide");
    }
    printf("%s -> %s (%s)\n", tensor.name, decision.target, berth_memory_text((int32_t) decision.memory));
    int bad = berth_rules_parse(rules, "exps=ARENAA") != BERTH_STATUS_INVALID_ARGUMENT;
    berth_rules_free(rules);
    return bad;
}

/* Each expert is a matrix of one number: its blocks have the scale 1 and equal bytes. */
static void *matrices(struct berth_arena *arena, size_t rows, size_t columns, int first, size_t *bytes) {
    size_t row = columns / BLOCK * BLOCK_BYTES;
    *bytes = row * rows * EXPERTS;
    unsigned char *data = (unsigned char *) berth_arena_alloc(arena, *bytes, NULL);
    for (size_t block = 0; data != NULL && block < *bytes / BLOCK_BYTES; block++) {
        unsigned char *b = data + block * BLOCK_BYTES;
        b[0] = 0x00, b[1] = 0x3c; /* 1.0 */
        memset(b + 2, first + (int) (block * BLOCK_BYTES / (row * rows)), BLOCK);
    }
    return data;
}

static int moe(struct berth_arena *arena) {
    struct berth_moe_desc desc;
    struct berth_moe_io io;
    struct berth_threads threads;
    memset(&desc, 0, sizeof desc);
    memset(&io, 0, sizeof io);
    memset(&threads, 0, sizeof threads);
    desc.struct_size = sizeof desc;
    io.struct_size = sizeof io;
    threads.struct_size = sizeof threads;
    desc.d = D, desc.f = F, desc.n_expert = EXPERTS;
    desc.activation = BERTH_ACTIVATION_RELU;
    desc.up.ggml_type = desc.down.ggml_type = Q8_0;
    desc.up.data = matrices(arena, F, D, 1, &desc.up.size);
    desc.down.data = matrices(arena, D, F, 2, &desc.down.size);
    if (desc.up.data == NULL || desc.down.data == NULL) {
        return failed("arena");
    }
    float x[D], y[D], weights[USED] = {0.5f, 2.0f};
    int32_t ids[USED] = {3, 1};
    for (int i = 0; i < D; i++) {
        x[i] = 1.0f;
        y[i] = 0.0f;
    }
    io.n_tokens = 1, io.n_used = USED;
    io.x = x, io.y = y, io.ids = ids, io.weights = weights;
    if (berth_pool_new(2, &threads.pool) != BERTH_STATUS_OK
        || berth_moe_workspace_size(&desc, 1, USED, 2, &io.workspace_size) != BERTH_STATUS_OK) {
        return failed("workspace");
    }
    size_t rounded = (io.workspace_size + BERTH_WORKSPACE_ALIGNMENT - 1) / BERTH_WORKSPACE_ALIGNMENT * BERTH_WORKSPACE_ALIGNMENT;
    io.workspace = aligned_alloc(BERTH_WORKSPACE_ALIGNMENT, rounded);
    enum berth_status status = io.workspace == NULL ? BERTH_STATUS_OUT_OF_MEMORY : berth_moe_forward(&desc, &io, &threads);
    free(io.workspace);
    berth_pool_free(threads.pool);
    if (status != BERTH_STATUS_OK) {
        return failed("moe");
    }
    /* Expert e: up gives D * (e + 1), down F * (e + 2) times that. All inputs are equal, so that quantised ones are exact but for their scale. */
    float expected = weights[0] * D * 4 * F * 5 + weights[1] * D * 2 * F * 3;
    for (int i = 0; i < D; i++) {
        float off = y[i] / expected - 1.0f;
        if (!(off < 0.01f && off > -0.01f)) {
            fprintf(stderr, "y[%d] is %g, not %g\n", i, (double) y[i], (double) expected);
            return 1;
        }
    }
    printf("experts: %s, as expected\n", berth_moe_type_supported(Q8_0) ? "Q8_0" : "?");
    return 0;
}

int main(int argc, char **argv) {
    struct berth_arena *arena = NULL;
    printf("berth %s\n", berth_version());
    if (decide() != 0) {
        return 1;
    }
    if (berth_arena_open(argc > 1 ? argv[1] : NULL, "shipped", (size_t) 8 << 20, -1, &arena) != BERTH_STATUS_OK) {
        return failed("arena");
    }
    bool in_file = false;
    if (berth_arena_alloc(arena, 100, &in_file) == NULL) {
        return failed("arena");
    }
    printf("arena: %s\n", in_file ? "in a file" : "in memory");
    int result = moe(arena);
    berth_arena_close(arena);
    return result;
}
