/*
 * bench: how fast this machine computes the experts of a layer, next to what its memory and its processor allow.
 *
 *     bench --geometry 2048,768,128,8 --gate q4_k --down q6_k --tokens 1 --threads 2 --json
 *
 * It makes a layer of random weights, larger than the last-level cache, checks the answer against f64, and then measures in turns: reading
 * memory, vpdpbusd, and berth_moe_forward, all on the same threads. `share` is the time that the limit that binds would take, over the time
 * taken, and all figures are those of the run in the middle by share. With --json it prints one object per number of tokens, else one line.
 */
#include <berth.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "moe_formats.h"

static const char USAGE[] =
    "usage: bench [options]\n"
    "  --geometry D,F,EXPERTS,USED | qwen3 | gpt-oss | deepseek   sizes of a layer (qwen3)\n"
    "  --gate TYPE  --up TYPE  --down TYPE                        block formats (q4_k, as gate, q6_k; gpt-oss: mxfp4)\n"
    "  --tokens N[,N..]                                           tokens of a call (1)\n"
    "  --threads N                                                threads (all processors)\n"
    "  --routing uniform|skewed                                   how tokens choose (uniform)\n"
    "  --seconds S                                                time to measure for (1)\n"
    "  --seed N                                                   of the random numbers (of the clock)\n"
    "  --json                                                     objects in place of lines\n";

static _Noreturn void bad(const char *what, const char *value) {
    fprintf(stderr, "bench: %s: %s\n%s", what, value, USAGE);
    exit(2);
}

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "bench: %s: %s\n", what, berth_last_error());
    exit(1);
}

static void must(enum berth_status status, const char *what) {
    if (status != BERTH_STATUS_OK) {
        fail(what);
    }
}

static void *memory(size_t size) {
    void *p = NULL;
    if (posix_memalign(&p, 64, size > 0 ? size : 1) != 0) {
        fail("out of memory");
    }
    return p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- the two limits ---------------------------------------------------------------------------------------------------------------- */

struct reading {
    const uint8_t *bytes;
    size_t part;
};

static volatile uint64_t sink;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void read_avx512(const uint8_t *bytes, size_t size) {
    __m512i sums[8];
    for (int i = 0; i < 8; i++) {
        sums[i] = _mm512_setzero_si512();
    }
    for (size_t at = 0; at + 512 <= size; at += 512) {
        for (int i = 0; i < 8; i++) {
            _mm_prefetch((const char *)bytes + at + 64 * i + 4096, _MM_HINT_T0);
            sums[i] = _mm512_xor_si512(sums[i], _mm512_loadu_si512(bytes + at + 64 * i));
        }
    }
    for (int i = 1; i < 8; i++) {
        sums[0] = _mm512_xor_si512(sums[0], sums[i]);
    }
    sink = (uint64_t)_mm512_reduce_or_epi64(sums[0]);
}

enum { ROUNDS = 300000, CHAINS = 12 };

__attribute__((target("avx512f,avx512vnni"))) static void multiply(void *unused, size_t index) {
    (void)unused;
    (void)index;
    __m512i sums[CHAINS], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1);
    for (int i = 0; i < CHAINS; i++) {
        sums[i] = _mm512_setzero_si512();
    }
    for (int r = 0; r < ROUNDS; r++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
        }
    }
    for (int i = 1; i < CHAINS; i++) {
        sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    }
    sink = (uint64_t)_mm512_reduce_add_epi32(sums[0]);
}
#endif

static void read_part(void *task, size_t index) {
    const struct reading *r = task;
    const uint8_t *bytes = r->bytes + index * r->part;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        read_avx512(bytes, r->part);
        return;
    }
#endif
    uint64_t sums[4] = {0}, words[4];
    for (size_t at = 0; at + sizeof(words) <= r->part; at += sizeof(words)) {
        memcpy(words, bytes + at, sizeof(words));
        for (int i = 0; i < 4; i++) {
            sums[i] ^= words[i];
        }
    }
    sink = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}

static double read_rate(struct berth_pool *pool, const uint8_t *bytes, size_t size) {
    struct reading r = {bytes, size / berth_pool_count(pool) / 4096 * 4096};
    const double start = now();
    must(berth_pool_run(pool, read_part, &r), "reading");
    return (double)(r.part * berth_pool_count(pool)) / (now() - start);
}

/* 0 where there is no such instruction. */
static double vnni_rate(struct berth_pool *pool) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni")) {
        const double start = now();
        must(berth_pool_run(pool, multiply, NULL), "vpdpbusd");
        return (double)ROUNDS * CHAINS * 64 * (double)berth_pool_count(pool) / (now() - start);
    }
#endif
    (void)pool;
    return 0;
}

/* --- a layer ----------------------------------------------------------------------------------------------------------------------- */

struct layer {
    size_t d, f, experts, used;
    const struct moe_format *format[3]; /* gate, up, down */
    size_t k[3], rows[3], size[3];
    uint8_t *bytes[3];
    float *bias[3]; /* gpt-oss has them */
    struct berth_moe_desc desc;
    float x_size; /* makes products of some 1 to 2 */
};

/* Some random blocks, again and again: what a cache sees is their address. */
static uint8_t *weights(const struct moe_format *format, size_t size, uint64_t *seed) {
    const size_t unit = (size_t)1021 * format->bytes;
    uint8_t *all = memory(size);
    for (size_t at = 0; at < unit && at < size; at += format->bytes) {
        moe_random_block(format, seed, all + at);
    }
    for (size_t done = unit; done < size; done *= 2) {
        memcpy(all + done, all, done < size - done ? done : size - done);
    }
    return all;
}

static void make_layer(struct layer *l, bool oai, uint64_t *seed) {
    l->desc = (struct berth_moe_desc){.struct_size = sizeof(l->desc), .d = l->d, .f = l->f, .n_expert = l->experts};
    struct berth_moe_weights *w[3] = {&l->desc.gate, &l->desc.up, &l->desc.down};
    for (int i = 0; i < 3; i++) {
        l->bytes[i] = weights(l->format[i], l->size[i], seed);
        *w[i] = (struct berth_moe_weights){.data = l->bytes[i], .size = l->size[i], .ggml_type = l->format[i]->type};
        if (oai) {
            l->bias[i] = memory(l->rows[i] * l->experts * sizeof(float));
            for (size_t j = 0; j < l->rows[i] * l->experts; j++) {
                l->bias[i][j] = 0.1f * moe_random_signed(seed);
            }
            w[i]->bias = l->bias[i];
        }
    }
    if (oai) {
        l->desc.activation = BERTH_ACTIVATION_SWIGLU_OAI;
        l->desc.alpha = 1.702f;
        l->desc.limit = 7;
    }
    float *row = memory(l->d * sizeof(float));
    moe_decode(l->format[1], l->bytes[1], l->d, row);
    double sum = 0;
    for (size_t i = 0; i < l->d; i++) {
        sum += (double)row[i] * (double)row[i];
    }
    l->x_size = (float)(3 / sqrt(sum));
    free(row);
}

/* Row r of an expert, times x. */
static double dot(const struct layer *l, int i, size_t expert, size_t r, const double *x, float *row) {
    const size_t bytes = moe_row_bytes(l->format[i], l->k[i]);
    moe_decode(l->format[i], l->bytes[i] + (expert * l->rows[i] + r) * bytes, l->k[i], row);
    double sum = l->bias[i] != NULL ? (double)l->bias[i][expert * l->rows[i] + r] : 0;
    for (size_t j = 0; j < l->k[i]; j++) {
        sum += (double)row[j] * x[j];
    }
    return sum;
}

/* The mean square error of some outputs of the first and the last token, over that of these outputs. */
static double error_of(const struct layer *l, size_t tokens, const float *x, const int32_t *ids, const float *weight, const float *y) {
    enum { SAMPLES = 64 };
    double error = 0, size = 0, *in = memory(l->d * sizeof(double)), *h = memory(l->f * sizeof(double));
    float *row = memory((l->d > l->f ? l->d : l->f) * sizeof(float));
    for (size_t t = 0; t < tokens; t += tokens > 1 ? tokens - 1 : 1) {
        double want[SAMPLES] = {0};
        for (size_t i = 0; i < l->d; i++) {
            in[i] = (double)x[t * l->d + i];
        }
        for (size_t j = 0; j < l->used; j++) {
            const size_t expert = (size_t)ids[t * l->used + j];
            for (size_t r = 0; r < l->f; r++) {
                double g = dot(l, 0, expert, r, in, row), u = dot(l, 1, expert, r, in, row);
                if (l->desc.activation == BERTH_ACTIVATION_SWIGLU_OAI) {
                    g = fmin(g, 7);
                    h[r] = g / (1 + exp(-(double)l->desc.alpha * g)) * (fmax(fmin(u, 7), -7) + 1);
                } else {
                    h[r] = g / (1 + exp(-g)) * u;
                }
            }
            for (size_t s = 0; s < SAMPLES; s++) {
                want[s] += (double)weight[t * l->used + j] * dot(l, 2, expert, s * l->d / SAMPLES, h, row);
            }
        }
        for (size_t s = 0; s < SAMPLES; s++) {
            const double e = (double)y[t * l->d + s * l->d / SAMPLES] - want[s];
            error += e * e;
            size += want[s] * want[s];
        }
    }
    free(in);
    free(h);
    free(row);
    return error / size;
}

/* Experts of each token, none twice. One token takes the next of a shuffled deck, so that no weights of the runs before are used again. */
static void choose(const struct layer *l, size_t tokens, bool skewed, uint64_t *seed, int32_t *deck, size_t *dealt, int32_t *ids) {
    for (size_t t = 0; t < tokens; t++) {
        for (size_t j = 0; j < l->used;) {
            int32_t id;
            if (tokens == 1 && !skewed) {
                if (*dealt + l->used - j > l->experts) {
                    *dealt = 0;
                    for (size_t i = l->experts; i-- > 1;) {
                        const size_t other = (size_t)(moe_random(seed) % (i + 1));
                        const int32_t swap = deck[i];
                        deck[i] = deck[other];
                        deck[other] = swap;
                    }
                }
                id = deck[(*dealt)++];
            } else {
                const double u = (double)(moe_random(seed) & 0xffffff) / 16777216.0;
                id = (int32_t)((skewed ? u * u * u : u) * (double)l->experts);
            }
            bool twice = false;
            for (size_t i = 0; i < j; i++) {
                twice |= ids[t * l->used + i] == id;
            }
            if (!twice) {
                ids[t * l->used + j++] = id;
            }
        }
    }
}

static size_t distinct(const struct layer *l, const int32_t *ids, size_t n) {
    bool *seen = memory(l->experts);
    size_t count = 0;
    memset(seen, 0, l->experts);
    for (size_t i = 0; i < n; i++) {
        count += !seen[ids[i]];
        seen[ids[i]] = true;
    }
    free(seen);
    return count;
}

struct settings {
    const char *geometry, *routing;
    size_t layers;
    double seconds;
    bool json;
};

/* Rounds in which limits and operation take turns. */
enum { ROUNDS_OF_RUNS = 5 };

struct run {
    double seconds, bytes, share;
    size_t distinct;
    int round;
    bool memory_binds;
};

static int by_share(const void *a, const void *b) {
    const double x = ((const struct run *)a)->share, y = ((const struct run *)b)->share;
    return (x > y) - (x < y);
}

/* Whether nothing is rounded to 8 bits. */
static bool is_float(const struct layer *l) {
    for (int i = 0; i < 3; i++) {
        const char *name = l->format[i]->name;
        if (strcmp(name, "f32") != 0 && strcmp(name, "f16") != 0 && strcmp(name, "bf16") != 0) {
            return false;
        }
    }
    return true;
}

static void measure(const struct layer *layers, const struct settings *s, size_t tokens, struct berth_pool *pool, uint64_t *seed) {
    const struct layer *l = &layers[0];
    enum { SETS = 16, MOST = 100000 };
    const size_t n = tokens * l->used, sets = tokens > 64 ? 4 : SETS;
    float *x = memory(tokens * l->d * sizeof(float)), *y = memory(tokens * l->d * sizeof(float)), *weight = memory(n * sizeof(float));
    int32_t *ids = memory(sets * n * sizeof(int32_t)), *deck = memory(l->experts * sizeof(int32_t));
    size_t fetched[SETS], dealt = l->experts, size = 0;
    for (size_t i = 0; i < l->experts; i++) {
        deck[i] = (int32_t)i;
    }
    for (size_t i = 0; i < tokens * l->d; i++) {
        x[i] = l->x_size * moe_random_signed(seed);
    }
    for (size_t i = 0; i < n; i++) {
        weight[i] = (moe_random_signed(seed) + 1.5f) / (float)l->used;
    }
    for (size_t set = 0; set < sets; set++) {
        choose(l, tokens, strcmp(s->routing, "skewed") == 0, seed, deck, &dealt, ids + set * n);
        fetched[set] = distinct(l, ids + set * n, n);
    }
    must(berth_moe_workspace_size(&l->desc, tokens, l->used, berth_pool_count(pool), &size), "workspace");
    struct berth_moe_io io = {.struct_size = sizeof(io), .n_tokens = tokens, .n_used = l->used, .x = x, .ids = ids, .weights = weight, .y = y};
    io.workspace = memory(size);
    io.workspace_size = size;
    struct berth_threads threads = {.struct_size = sizeof(threads), .pool = pool};
    must(berth_moe_forward(&l->desc, &io, &threads), "forward");
    const double error = error_of(l, tokens, x, ids, weight, y);
    /* Rounding activations to 8 bits makes 1e-4 to 5e-4 (docs/moe.md); floats are not rounded, and differ by the order of additions alone. */
    if (!(error < (is_float(l) ? 1e-9 : 2e-3))) {
        fprintf(stderr, "bench: wrong answer: normalised mean square error %g\n", error);
        exit(1);
    }

    const size_t expert_bytes = (l->size[0] + l->size[1] + l->size[2]) / l->experts;
    const double macs = (double)n * 3 * (double)l->d * (double)l->f;
    static struct run runs[MOST];
    double bandwidth[ROUNDS_OF_RUNS] = {0}, peak[ROUNDS_OF_RUNS] = {0}, mean = 0;
    size_t count = 0;
    for (int round = 0; round < ROUNDS_OF_RUNS; round++) {
        for (int i = 0; i < 2; i++) {
            bandwidth[round] = fmax(bandwidth[round], read_rate(pool, l->bytes[i], l->size[i]));
            peak[round] = fmax(peak[round], vnni_rate(pool));
        }
        const double until = now() + s->seconds / ROUNDS_OF_RUNS;
        do {
            struct run *run = &runs[count];
            const size_t set = count % sets;
            io.ids = ids + set * n;
            const double start = now();
            must(berth_moe_forward(&layers[count % s->layers].desc, &io, &threads), "forward");
            run->seconds = now() - start;
            run->bytes = (double)(fetched[set] * expert_bytes);
            run->distinct = fetched[set];
            run->round = round;
            /* Against the limits of the same round: a shared machine is not always as fast. */
            const double read = run->bytes / bandwidth[round], compute = peak[round] > 0 ? macs / peak[round] : 0;
            run->memory_binds = read >= compute;
            run->share = fmax(read, compute) / run->seconds;
            mean += run->seconds;
            count++;
        } while (now() < until && count < MOST);
    }
    mean /= (double)count;
    qsort(runs, count, sizeof(runs[0]), by_share);
    const struct run *middle = &runs[count / 2];
    const double seconds = middle->seconds, bytes = middle->bytes, read = bandwidth[middle->round], vnni = peak[middle->round];
    if (s->json) {
        printf("{\"geometry\": \"%s\", \"d\": %zu, \"f\": %zu, \"experts\": %zu, \"used\": %zu, \"gate\": \"%s\", \"up\": \"%s\", \"down\": \"%s\", \"tokens\": %zu, "
               "\"threads\": %zu, \"routing\": \"%s\", \"layers\": %zu, \"distinct\": %zu, \"isa\": \"%s\", \"checked\": true, \"nmse\": %.3e, \"runs\": %zu, "
               "\"ms\": %.4f, \"ms_mean\": %.4f, \"gb_per_s\": %.3f, \"gmac_per_s\": %.3f, \"read_gb_per_s\": %.3f, \"vnni_gmac_per_s\": %.3f, \"limit\": \"%s\", \"share\": %.4f}\n",
               s->geometry, l->d, l->f, l->experts, l->used, l->format[0]->name, l->format[1]->name, l->format[2]->name, tokens, berth_pool_count(pool), s->routing,
               s->layers, middle->distinct, berth_isa(), error, count, seconds * 1e3, mean * 1e3, bytes / seconds / 1e9, macs / seconds / 1e9, read / 1e9, vnni / 1e9,
               middle->memory_binds ? "memory" : "compute", middle->share);
    } else {
        printf("%s %s/%s/%s %s T=%-5zu %9.3f ms  %6.1f GB/s of %.1f  %7.1f GMAC/s of %.0f  %3.0f %% of %s  (%zu runs, nmse %.1e)\n", s->geometry, l->format[0]->name,
               l->format[1]->name, l->format[2]->name, berth_isa(), tokens, seconds * 1e3, bytes / seconds / 1e9, read / 1e9, macs / seconds / 1e9, vnni / 1e9, middle->share * 100,
               middle->memory_binds ? "memory" : "compute", count, error);
    }
    fflush(stdout);
    free(x);
    free(y);
    free(weight);
    free(ids);
    free(deck);
    free(io.workspace);
}

/* --- the command line -------------------------------------------------------------------------------------------------------------- */

/* Up to `most` numbers above 0 with commas between them. */
static size_t numbers(const char *what, const char *text, size_t *out, size_t most) {
    size_t n = 0;
    const char *at = text;
    do {
        char *end = NULL;
        errno = 0;
        const unsigned long long value = strtoull(at, &end, 10);
        if (n == most || *at < '0' || *at > '9' || errno != 0 || value == 0 || value > 1u << 20 || (*end != 0 && *end != ',')) {
            bad(what, text);
        }
        out[n++] = (size_t)value;
        at = *end == ',' ? end + 1 : end;
        if (*end == ',' && *at == 0) {
            bad(what, text);
        }
    } while (*at != 0);
    return n;
}

static const struct moe_format *format(const char *what, const char *name) {
    const struct moe_format *found = moe_format_named(name);
    if (found == NULL || !berth_moe_type_supported((int)found->type)) {
        bad(what, name);
    }
    return found;
}

int main(int argc, char **argv) {
    struct layer l = {.d = 2048, .f = 768, .experts = 128, .used = 8};
    struct settings s = {.geometry = "qwen3", .routing = "uniform", .seconds = 1};
    size_t tokens[32] = {1}, n_tokens = 1, threads = (size_t)sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t seed = (uint64_t)(now() * 1e9) | 1;
    bool oai = false;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--json") == 0) {
            s.json = true;
            continue;
        }
        if (strcmp(name, "--help") == 0) {
            fputs(USAGE, stdout);
            return 0;
        }
        const char *value = i + 1 < argc ? argv[++i] : NULL;
        if (value == NULL) {
            bad("unknown, or without a value", name);
        }
        if (strcmp(name, "--geometry") == 0) {
            static const struct { const char *name; size_t sizes[4]; } presets[] = {
                {"qwen3", {2048, 768, 128, 8}}, {"gpt-oss", {2880, 2880, 32, 4}}, {"deepseek", {7168, 2048, 256, 8}},
            };
            size_t sizes[4] = {0};
            s.geometry = value;
            for (size_t p = 0; p < 3; p++) {
                if (strcmp(value, presets[p].name) == 0) {
                    memcpy(sizes, presets[p].sizes, sizeof(sizes));
                }
            }
            if (sizes[0] == 0 && numbers("--geometry takes D,F,EXPERTS,USED or a name", value, sizes, 4) != 4) {
                bad("--geometry takes D,F,EXPERTS,USED or a name", value);
            }
            oai = strcmp(value, "gpt-oss") == 0;
            l.d = sizes[0];
            l.f = sizes[1];
            l.experts = sizes[2];
            l.used = sizes[3];
        } else if (strcmp(name, "--gate") == 0) {
            l.format[0] = format("--gate: no such format", value);
        } else if (strcmp(name, "--up") == 0) {
            l.format[1] = format("--up: no such format", value);
        } else if (strcmp(name, "--down") == 0) {
            l.format[2] = format("--down: no such format", value);
        } else if (strcmp(name, "--tokens") == 0) {
            n_tokens = numbers("--tokens takes numbers above 0", value, tokens, 32);
        } else if (strcmp(name, "--threads") == 0) {
            if (numbers("--threads takes a number above 0", value, &threads, 1) != 1 || threads > BERTH_MAX_THREADS) {
                bad("--threads takes 1 to 1024", value);
            }
        } else if (strcmp(name, "--seed") == 0) {
            seed = strtoull(value, NULL, 10) | 1;
        } else if (strcmp(name, "--seconds") == 0) {
            char *end = NULL;
            s.seconds = strtod(value, &end);
            if (*end != 0 || !(s.seconds > 0 && s.seconds < 1e4)) {
                bad("--seconds takes a number above 0", value);
            }
        } else if (strcmp(name, "--routing") == 0) {
            if (strcmp(value, "uniform") != 0 && strcmp(value, "skewed") != 0) {
                bad("--routing takes uniform or skewed", value);
            }
            s.routing = value;
        } else {
            bad("unknown option", name);
        }
    }
    if (l.used > l.experts) {
        bad("--geometry: more experts used than there are", s.geometry);
    }
    if (l.format[2] == NULL) {
        l.format[2] = l.format[0] != NULL ? l.format[0] : moe_format_named(oai ? "mxfp4" : "q6_k");
    }
    if (l.format[0] == NULL) {
        l.format[0] = moe_format_named(oai ? "mxfp4" : "q4_k");
    }
    if (l.format[1] == NULL) {
        l.format[1] = l.format[0];
    }
    if (berth_isa() == NULL) {
        fail("BERTH_ISA");
    }

    /* As many experts as fit into half of what is free; as many layers as make it four times the last-level cache. */
    size_t expert = 0;
    for (int i = 0; i < 3; i++) {
        l.k[i] = i < 2 ? l.d : l.f;
        l.rows[i] = i < 2 ? l.f : l.d;
        l.size[i] = moe_row_bytes(l.format[i], l.k[i]) * l.rows[i];
        if (l.size[i] == 0) {
            bad("a row of the geometry is not whole blocks of", l.format[i]->name);
        }
        expert += l.size[i];
    }
    const size_t room = (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) / 2;
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    size_t wanted = (size_t)(cache > 0 ? cache : 64 << 20) * 4;
    wanted = wanted < (size_t)512 << 20 ? (size_t)512 << 20 : wanted;
    if (l.experts * expert > room) {
        l.experts = room / expert > l.used ? room / expert : l.used;
    }
    s.layers = (wanted + l.experts * expert - 1) / (l.experts * expert);
    while (s.layers > 1 && s.layers * l.experts * expert > room) {
        s.layers--;
    }
    for (int i = 0; i < 3; i++) {
        l.size[i] *= l.experts;
    }
    struct layer *layers = memory(s.layers * sizeof(l));
    for (size_t i = 0; i < s.layers; i++) {
        layers[i] = l;
        make_layer(&layers[i], oai, &seed);
    }
    struct berth_pool *pool = NULL;
    must(berth_pool_new(threads, &pool), "threads");
    for (size_t i = 0; i < n_tokens; i++) {
        measure(layers, &s, tokens[i], pool, &seed);
    }
    berth_pool_free(pool);
    for (size_t i = 0; i < s.layers; i++) {
        for (int j = 0; j < 3; j++) {
            free(layers[i].bytes[j]);
            free(layers[i].bias[j]);
        }
    }
    free(layers);
    return 0;
}
