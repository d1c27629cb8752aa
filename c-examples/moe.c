/*
 * moe: the experts of a layer as one operation.
 *
 * Four experts with SwiGLU and weights of random floats, of which each of three tokens uses two. The answer is compared with plain C.
 *
 *     make moe && ./moe
 */
#include <berth.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = 64, F = 96, EXPERTS = 4, USED = 2, TOKENS = 3, THREADS = 2, GGML_TYPE_F32 = 0 };

static float gate[EXPERTS][F][D], up[EXPERTS][F][D], down[EXPERTS][D][F];
static float x[TOKENS][D], y[TOKENS][D];
static const int32_t ids[TOKENS][USED] = {{0, 3}, {2, 1}, {3, 0}};
static const float weights[TOKENS][USED] = {{0.7f, 0.3f}, {0.5f, 0.5f}, {0.9f, 0.1f}};

static void fill(float *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        values[i] = (float) rand() / (float) RAND_MAX - 0.5f;
    }
}

/* One value of one token. */
static double expected(int token, int row) {
    double sum = 0;
    for (int j = 0; j < USED; j++) {
        int e = ids[token][j];
        for (int f = 0; f < F; f++) {
            double g = 0, u = 0;
            for (int d = 0; d < D; d++) {
                g += (double) gate[e][f][d] * x[token][d];
                u += (double) up[e][f][d] * x[token][d];
            }
            sum += weights[token][j] * down[e][row][f] * (g / (1 + exp(-g)) * u);
        }
    }
    return sum;
}

int main(void) {
    fill(&gate[0][0][0], sizeof gate / sizeof(float));
    fill(&up[0][0][0], sizeof up / sizeof(float));
    fill(&down[0][0][0], sizeof down / sizeof(float));
    fill(&x[0][0], sizeof x / sizeof(float));

    struct berth_moe_desc experts = {
        .struct_size = sizeof experts, .d = D, .f = F, .n_expert = EXPERTS, .activation = BERTH_ACTIVATION_SWIGLU,
        .gate = {.data = gate, .size = sizeof gate, .ggml_type = GGML_TYPE_F32},
        .up = {.data = up, .size = sizeof up, .ggml_type = GGML_TYPE_F32},
        .down = {.data = down, .size = sizeof down, .ggml_type = GGML_TYPE_F32},
    };
    struct berth_threads threads = {.struct_size = sizeof threads};
    struct berth_moe_io io = {
        .struct_size = sizeof io, .n_tokens = TOKENS, .n_used = USED,
        .x = &x[0][0], .ids = &ids[0][0], .weights = &weights[0][0], .y = &y[0][0],
    };
    enum berth_status status = berth_moe_workspace_size(&experts, TOKENS, USED, THREADS, &io.workspace_size);
    if (status == BERTH_STATUS_OK) {
        status = berth_pool_new(THREADS, &threads.pool);
    }
    if (status == BERTH_STATUS_OK) {
        size_t rounded = (io.workspace_size + BERTH_WORKSPACE_ALIGNMENT - 1) / BERTH_WORKSPACE_ALIGNMENT * BERTH_WORKSPACE_ALIGNMENT;
        io.workspace = aligned_alloc(BERTH_WORKSPACE_ALIGNMENT, rounded);
        status = io.workspace == NULL ? BERTH_STATUS_OUT_OF_MEMORY : berth_moe_forward(&experts, &io, &threads);
    }
    berth_pool_free(threads.pool);
    free(io.workspace);
    if (status != BERTH_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", berth_status_text(status), berth_last_error());
        return 1;
    }

    double worst = 0;
    for (int t = 0; t < TOKENS; t++) {
        for (int row = 0; row < D; row++) {
            double off = fabs(y[t][row] - expected(t, row));
            worst = off > worst || isnan(off) ? off : worst;
        }
    }
    int right = worst < 1e-4;
    printf("%d tokens, %d of %d experts each: %s\n", TOKENS, USED, EXPERTS, right ? "as in plain C" : "WRONG");
    return right ? 0 : 1;
}
