// Tokens per second in ik_llama.cpp through its own libllama, measured as llama-bench does: for each number of tokens, a prompt of as many
// random tokens (0: 32 tokens generated one by one) on an empty cache, once unmeasured, then `repeats` times. Flash attention and the fused
// operations of experts are on, as ik_llama.cpp advises.
//
// ik_bench MODEL THREADS REPEATS REPACK TOKENS...     prints what llama-bench prints: [{"n_prompt": 512, "n_gen": 0, "avg_ts": 123.4}, ...]

#include <llama.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BATCH = 2048, CONTEXT = 2048, GENERATED = 32 };

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

// One run: its seconds, or less than 0 if it failed.
static double run(struct llama_context * context, int32_t vocabulary, int prompt) {
    static llama_token tokens[BATCH];
    llama_kv_cache_clear(context);
    const int steps = prompt > 0 ? 1 : GENERATED;
    const int count = prompt > 0 ? prompt : 1;
    const double begin = now();
    for (int s = 0; s < steps; s++) {
        for (int i = 0; i < count; i++) {
            tokens[i] = rand() % vocabulary;
        }
        if (llama_decode(context, llama_batch_get_one(tokens, count, s, 0)) != 0) {
            return -1;
        }
        llama_synchronize(context);
    }
    return now() - begin;
}

int main(int argc, char ** argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: ik_bench MODEL THREADS REPEATS REPACK TOKENS...\n");
        return 2;
    }
    const int threads = atoi(argv[2]);
    const int repeats = atoi(argv[3]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params model_params = llama_model_default_params();
    model_params.repack_tensors = atoi(argv[4]) != 0;
    model_params.use_mmap = !model_params.repack_tensors;
    struct llama_model * model = llama_model_load_from_file(argv[1], model_params);
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = CONTEXT;
    params.n_batch = BATCH;
    params.n_threads = (uint32_t) threads;
    params.n_threads_batch = (uint32_t) threads;
    params.flash_attn = true;
    params.fused_moe_up_gate = true;
    params.fused_up_gate = true;
    struct llama_context * context = model != NULL ? llama_init_from_model(model, params) : NULL;
    if (context == NULL || threads < 1 || repeats < 1) {
        fprintf(stderr, "ik_bench: no model, or nothing to do\n");
        return 1;
    }
    const int32_t vocabulary = llama_n_vocab(model);
    for (int a = 5; a < argc; a++) {
        const int prompt = atoi(argv[a]);
        if (prompt < 0 || prompt > CONTEXT) {
            fprintf(stderr, "ik_bench: %s tokens are too many\n", argv[a]);
            return 2;
        }
        const int count = prompt > 0 ? prompt : GENERATED;
        double rate = 0;
        for (int r = -1; r < repeats; r++) {
            const double seconds = run(context, vocabulary, prompt);
            if (seconds < 0) {
                fprintf(stderr, "ik_bench: llama_decode failed\n");
                return 1;
            }
            rate += r < 0 ? 0 : count / seconds / repeats;
        }
        printf("%s{\"n_prompt\": %d, \"n_gen\": %d, \"avg_ts\": %.3f}", a == 5 ? "[" : ", ", prompt, prompt > 0 ? 0 : GENERATED, rate);
    }
    printf("]\n");
    llama_free(context);
    llama_free_model(model);
    return 0;
}
