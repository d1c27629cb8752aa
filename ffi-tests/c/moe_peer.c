/*
 * Real ggml as the measure of Berth's MoE arithmetic: it decodes, quantises and multiplies what it reads, and writes what it gets.
 *
 *     moe_peer to_float TYPE COUNT                        blocks -> floats
 *     moe_peer quantize TYPE K ROWS                       floats -> blocks
 *     moe_peer mul_mat_id CPU_LIB TYPE K M E B USED T     blocks, x [K, B, T], ids [USED, T] -> [M, USED, T]
 *     moe_peer chain CPU_LIB TYPE DOWN D F E USED T       gate, up, down, x [D, T], ids -> [D, USED, T], before the weighted sum
 *
 * Input is standard input, output is standard output, both raw. MUL_MAT_ID runs on the CPU backend with two threads, as shipped.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

static void fail(const char *what) {
    fprintf(stderr, "moe_peer: %s\n", what);
    exit(1);
}

static void *input(size_t size) {
    void *bytes = malloc(size > 0 ? size : 1);
    if (bytes == NULL || fread(bytes, 1, size, stdin) != size) {
        fail("input is too short");
    }
    return bytes;
}

static void output(const void *bytes, size_t size) {
    if (fwrite(bytes, 1, size, stdout) != size) {
        fail("cannot write");
    }
}

static void fill(struct ggml_tensor *t) {
    void *bytes = input(ggml_nbytes(t));
    ggml_backend_tensor_set(t, bytes, 0, ggml_nbytes(t));
    free(bytes);
}

int main(int argc, char **argv) {
    int64_t n[16] = {0};
    const int first = argc > 1 && (strcmp(argv[1], "chain") == 0 || strcmp(argv[1], "mul_mat_id") == 0) ? 3 : 2;
    for (int i = first; i < argc && i - first < 16; i++) {
        n[i - first] = atoll(argv[i]);
    }
    if (argc == 4 && strcmp(argv[1], "to_float") == 0) {
        const enum ggml_type type = (enum ggml_type)n[0];
        void *blocks = input(ggml_row_size(type, n[1]));
        float *out = malloc((size_t)n[1] * sizeof(float));
        if (type == GGML_TYPE_F32) {
            memcpy(out, blocks, (size_t)n[1] * sizeof(float)); /* ggml has no function for this */
        } else {
            ggml_get_type_traits(type)->to_float(blocks, out, n[1]);
        }
        output(out, (size_t)n[1] * sizeof(float));
        free(blocks);
        free(out);
        return 0;
    }
    if (argc == 5 && strcmp(argv[1], "quantize") == 0) {
        const enum ggml_type type = (enum ggml_type)n[0];
        float *values = input((size_t)(n[1] * n[2]) * sizeof(float));
        const size_t size = ggml_row_size(type, n[1]) * (size_t)n[2];
        void *blocks = calloc(1, size);
        ggml_quantize_chunk(type, values, blocks, 0, n[2], n[1], NULL);
        output(blocks, size);
        free(values);
        free(blocks);
        return 0;
    }

    const int chain = argc == 10 && strcmp(argv[1], "chain") == 0;
    if (!chain && !(argc == 10 && strcmp(argv[1], "mul_mat_id") == 0)) {
        fail("see the top of moe_peer.c");
    }
    if (ggml_backend_load(argv[2]) == NULL) {
        fail("the CPU backend does not load");
    }
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    if (cpu == NULL) {
        fail("no CPU backend");
    }
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){.mem_size = 64 * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true});
    struct ggml_tensor *in[5], *result;
    int inputs;
    if (chain) {
        const int64_t d = n[2], f = n[3], experts = n[4], used = n[5], tokens = n[6];
        in[0] = ggml_new_tensor_3d(ctx, (enum ggml_type)n[0], d, f, experts);
        in[1] = ggml_new_tensor_3d(ctx, (enum ggml_type)n[0], d, f, experts);
        in[2] = ggml_new_tensor_3d(ctx, (enum ggml_type)n[1], f, d, experts);
        in[3] = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, 1, tokens);
        in[4] = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, tokens);
        inputs = 5;
        struct ggml_tensor *gate = ggml_mul_mat_id(ctx, in[0], in[3], in[4]);
        struct ggml_tensor *up = ggml_mul_mat_id(ctx, in[1], in[3], in[4]);
        result = ggml_mul_mat_id(ctx, in[2], ggml_swiglu_split(ctx, gate, up), in[4]);
    } else {
        in[0] = ggml_new_tensor_3d(ctx, (enum ggml_type)n[0], n[1], n[2], n[3]);
        in[1] = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n[1], n[4], n[6]);
        in[2] = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n[5], n[6]);
        inputs = 3;
        result = ggml_mul_mat_id(ctx, in[0], in[1], in[2]);
    }
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, result);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, cpu);
    if (buffer == NULL) {
        fail("no memory");
    }
    for (int i = 0; i < inputs; i++) {
        fill(in[i]);
    }
    if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) {
        fail("graph_compute");
    }
    float *out = malloc(ggml_nbytes(result));
    ggml_backend_tensor_get(result, out, 0, ggml_nbytes(result));
    output(out, ggml_nbytes(result));
    free(out);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(cpu);
    return 0;
}
