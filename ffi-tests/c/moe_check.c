/*
 * Every function of berth_moe_*, berth_mul_mat_id, berth_glu and berth_pool_* from C, against f64 and against misuse.
 *
 *     moe_check guard|heap SEED ROUNDS    everything; ROUNDS random problems beside the fixed ones
 *     moe_check decode TYPE WEIGHTS       blocks on standard input -> floats on standard output
 *
 * guard: every buffer, weights included, ends at a page that nobody may touch, and has a canary before it. heap: buffers of malloc, whose
 * ends and undefined bytes valgrind knows. With COUNT_ALLOCATIONS defined it counts the calls of malloc during a computation.
 */
#include <berth.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "moe_reference.h"
#include "moe_memory.h"

static uint64_t rng;
static double worst;
static struct group group = {.what = "none"};

static size_t below(size_t n) {
    return (size_t)(moe_random(&rng) % n);
}

/* --- threads ----------------------------------------------------------------------------------------------------------------------- */

struct call {
    berth_task_fn call;
    void *task;
    size_t index;
};

static void *one_call(void *argument) {
    const struct call *c = argument;
    c->call(c->task, c->index);
    return NULL;
}

/* A thread for every call but the first. */
static void run_pthreads(void *context, size_t n, berth_task_fn call, void *task) {
    (void)context;
    pthread_t threads[16];
    struct call calls[16];
    for (size_t i = 1; i < n; i++) {
        calls[i] = (struct call){call, task, i};
        if (pthread_create(&threads[i], NULL, one_call, &calls[i]) != 0) {
            perror("pthread_create");
            exit(1);
        }
    }
    call(task, 0);
    for (size_t i = 1; i < n; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* One after the other, the last first. */
static void run_backwards(void *context, size_t n, berth_task_fn call, void *task) {
    (void)context;
    for (size_t i = n; i-- > 0;) {
        call(task, i);
    }
}

enum { ALONE, POOL, PTHREADS, BACKWARDS, KINDS, THREADS = 3 };
static struct berth_pool *pool;

static const struct berth_threads *threads_of(int kind) {
    static struct berth_threads t;
    t = (struct berth_threads){.struct_size = sizeof(t), .count = THREADS};
    switch (kind) {
    case ALONE: return NULL;
    case POOL: t.pool = pool; break;
    case PTHREADS: t.run = run_pthreads; break;
    default: t.run = run_backwards; break;
    }
    return &t;
}

/* --- problems ---------------------------------------------------------------------------------------------------------------------- */

struct options {
    size_t d, f, d_out, experts, used, tokens;
    const struct moe_format *gate, *up, *down;
    uint32_t activation;
    int biases, scales, weight_first, no_weights;
    int merged;      /* gate and up in one matrix, first all rows of gate */
    int interleaved; /* likewise, row beside row, as two matrices with strides */
    int x_per_choice;
    int ids_gap;  /* ids lie in rows of n_expert, as in ggml */
    int gaps;     /* x, y, weights and biases have gaps between their rows */
    int in_place; /* y is x */
    int same_expert, same_twice;
};

struct problem {
    struct options o;
    struct berth_moe_desc desc;
    struct berth_moe_io io;
    struct projection gate, up, down;
    float *decoded[3];
    float *x, *y, *weights;
    int32_t *ids;
    size_t x_width, y_width; /* of a row with its gap, in floats */
};

static uint8_t *blocks(const struct moe_format *format, size_t k, size_t rows, float *decoded, size_t row_stride, uint8_t *at) {
    for (size_t r = 0; r < rows; r++) {
        uint8_t *block = at + r * row_stride;
        for (size_t i = 0; i < k; i += format->weights, block += format->bytes) {
            moe_random_block(format, &rng, block);
        }
        moe_decode(format, at + r * row_stride, k, decoded + r * k);
    }
    return at;
}

static double rms(const float *values, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)values[i] * (double)values[i];
    }
    return sqrt(sum / (double)n);
}

static float *floats(size_t n, float scale) {
    float *values = take(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        values[i] = scale * moe_random_signed(&rng);
    }
    return values;
}

/* A bias as Berth gets it (with a gap) and as the reference reads it (without). */
static const float *bias(struct berth_moe_weights *w, size_t rows, size_t experts, int gap, float scale) {
    const size_t stride = rows + (gap ? 3 : 0);
    float *given = floats((experts - 1) * stride + rows, scale), *packed = take(rows * experts * sizeof(float));
    for (size_t e = 0; e < experts; e++) {
        memcpy(packed + e * rows, given + e * stride, rows * sizeof(float));
    }
    w->bias = given;
    w->bias_stride = gap ? stride * sizeof(float) : 0;
    return packed;
}

static void make(struct problem *p, const struct options *o) {
    memset(p, 0, sizeof(*p));
    p->o = *o;
    const int gated = is_gated(o->activation);
    const size_t experts = o->experts, rows[3] = {o->f, o->f, o->d_out}, k[3] = {o->d, o->d, o->f};
    const struct moe_format *formats[3] = {o->gate, o->up, o->down};
    struct berth_moe_desc *desc = &p->desc;
    *desc = (struct berth_moe_desc){.struct_size = sizeof(*desc), .d = o->d, .f = o->f, .n_expert = experts, .activation = o->activation};
    desc->d_out = o->d_out == o->d ? 0 : o->d_out;
    desc->alpha = 1.702f;
    desc->limit = o->activation == BERTH_ACTIVATION_SWIGLU_CLAMP ? 1.5f : 7.0f;
    desc->flags = (o->weight_first ? BERTH_MOE_WEIGHT_FIRST : 0) | (o->merged ? BERTH_MOE_MERGED_GATE_UP : 0);
    desc->flags |= o->tokens % 2 ? BERTH_MOE_READ_AHEAD : 0;
    struct berth_moe_weights *w[3] = {&desc->gate, &desc->up, &desc->down};
    struct projection *q[3] = {&p->gate, &p->up, &p->down};
    for (int i = 0; i < 3; i++) {
        p->decoded[i] = must(malloc(k[i] * rows[i] * experts * sizeof(float)));
        *q[i] = (struct projection){.format = formats[i], .k = k[i], .rows = rows[i], .experts = experts, .values = p->decoded[i]};
    }
    if (o->merged || o->interleaved) {
        const size_t row = moe_row_bytes(o->up, o->d), expert = 2 * o->f * row, size = expert * experts;
        uint8_t *both = take(size);
        const size_t stride = o->merged ? row : 2 * row, up = o->merged ? o->f * row : row;
        for (size_t e = 0; e < experts; e++) {
            blocks(o->up, o->d, o->f, p->decoded[0] + e * o->f * o->d, stride, both + e * expert);
            blocks(o->up, o->d, o->f, p->decoded[1] + e * o->f * o->d, stride, both + e * expert + up);
        }
        p->gate.format = o->up;
        desc->up = (struct berth_moe_weights){.data = both, .size = size, .ggml_type = o->up->type};
        if (o->interleaved) {
            desc->gate = (struct berth_moe_weights){.data = both, .size = size, .ggml_type = o->up->type, .row_stride = stride};
            desc->up = (struct berth_moe_weights){.data = both + row, .size = size - row, .ggml_type = o->up->type, .row_stride = stride};
        }
    }
    for (int i = 0; i < 3; i++) {
        if (i == 2 || !(o->merged || o->interleaved || (i == 0 && !gated))) {
            const size_t row = moe_row_bytes(formats[i], k[i]) , stride = row + (o->gaps ? 5 : 0);
            const size_t expert = rows[i] * stride + (o->gaps ? 11 : 0), size = (experts - 1) * expert + (rows[i] - 1) * stride + row;
            uint8_t *bytes = take(size);
            for (size_t e = 0; e < experts; e++) {
                blocks(formats[i], k[i], rows[i], p->decoded[i] + e * rows[i] * k[i], stride, bytes + e * expert);
            }
            *w[i] = (struct berth_moe_weights){.data = bytes, .size = size, .ggml_type = formats[i]->type};
            if (o->gaps) {
                w[i]->row_stride = stride;
                w[i]->expert_stride = expert;
            }
        }
    }
    if (o->scales) {
        for (int i = o->merged || !gated; i < 3; i++) {
            w[i]->scale = q[i]->scale = floats(experts, 1);
        }
        if (o->merged) {
            p->gate.scale = p->up.scale;
        }
    }
    if (o->biases) {
        if (o->merged) {
            const float *both = bias(&desc->up, 2 * o->f, experts, o->gaps, 0.5f);
            float *parts[2] = {take(o->f * experts * sizeof(float)), take(o->f * experts * sizeof(float))};
            for (size_t e = 0; e < experts; e++) {
                memcpy(parts[0] + e * o->f, both + 2 * e * o->f, o->f * sizeof(float));
                memcpy(parts[1] + e * o->f, both + (2 * e + 1) * o->f, o->f * sizeof(float));
            }
            p->gate.bias = parts[0];
            p->up.bias = parts[1];
        }
        for (int i = o->merged ? 2 : !gated; i < 3; i++) {
            q[i]->bias = bias(w[i], rows[i], experts, o->gaps, 0.5f);
        }
    }

    /* Tokens of a size that makes the products some 1 to 2. */
    const size_t x_rows = o->x_per_choice ? o->used : 1;
    const float size = (float)(3 / (rms(p->decoded[1], o->d * o->f) * sqrt((double)o->d)));
    p->x_width = o->in_place && o->d_out > o->d ? o->d_out : o->d + (o->gaps ? 7 : 0);
    p->x = floats(o->tokens * x_rows > 0 ? (o->tokens * x_rows - 1) * p->x_width + (o->in_place ? p->x_width : o->d) : 0, size);
    p->y_width = o->d_out + (o->gaps ? 9 : 0);
    if (o->in_place) {
        p->y = p->x;
        p->y_width = p->x_width * x_rows;
    } else {
        p->y = take(o->tokens > 0 ? ((o->tokens - 1) * p->y_width + o->d_out) * sizeof(float) : 0);
    }
    const size_t ids_width = o->ids_gap ? experts > o->used ? experts : o->used : o->used;
    p->ids = take(o->tokens > 0 ? ((o->tokens - 1) * ids_width + o->used) * sizeof(int32_t) : 0);
    memset(p->ids, 0x7f, o->tokens > 0 ? ((o->tokens - 1) * ids_width + o->used) * sizeof(int32_t) : 0);
    const size_t one = below(experts);
    for (size_t t = 0; t < o->tokens; t++) {
        for (size_t j = 0; j < o->used; j++) {
            const size_t any = o->used == experts && !o->same_twice ? (j + t) % experts : below(experts);
            p->ids[t * ids_width + j] = (int32_t)(o->same_expert || (o->same_twice && j < 2) ? one : any);
        }
    }
    p->weights = o->no_weights ? NULL : floats(o->tokens * o->used, 1);
    p->io = (struct berth_moe_io){.struct_size = sizeof(p->io), .n_tokens = o->tokens, .n_used = o->used, .x = p->x, .ids = p->ids, .weights = p->weights, .y = p->y};
    p->io.x_rows = x_rows;
    if (o->gaps || p->x_width != o->d) {
        p->io.x_row_stride = p->x_width * sizeof(float);
        p->io.x_token_stride = p->io.x_row_stride * x_rows;
    }
    if (o->gaps || p->y_width != o->d_out) {
        p->io.y_token_stride = p->y_width * sizeof(float);
    }
    p->io.ids_stride = o->ids_gap ? ids_width * sizeof(int32_t) : 0;
}

static void forget(struct problem *p, const char *what) {
    for (int i = 0; i < 3; i++) {
        free(p->decoded[i]);
    }
    release(what);
}

static int32_t id_of(const struct problem *p, size_t t, size_t j) {
    return p->ids[t * (p->io.ids_stride > 0 ? p->io.ids_stride / sizeof(int32_t) : p->o.used) + j];
}

/* The vector that choice j of token t reads, as it is rounded for a format. */
static void token(const struct problem *p, const struct moe_format *format, size_t t, size_t j, struct vector x) {
    const size_t row = p->o.x_per_choice ? t * p->o.used + j : t;
    for (size_t i = 0; i < p->o.d; i++) {
        x.value[i] = (double)p->x[row * p->x_width + i];
        x.off[i] = x.noise[i] = 0;
    }
    round_values(format, x, p->o.d);
}

static struct vector reference(const struct problem *p) {
    const struct options *o = &p->o;
    struct vector y = vector_new(o->tokens * o->d_out), x = vector_new(o->d), g = vector_new(o->f), u = vector_new(o->f), h = vector_new(o->f), v = vector_new(o->d_out);
    for (size_t t = 0; t < o->tokens; t++) {
        for (size_t j = 0; j < o->used; j++) {
            const size_t expert = (size_t)id_of(p, t, j);
            const double weight = p->weights != NULL ? (double)p->weights[t * o->used + j] : 1, before = o->weight_first ? weight : 1;
            if (is_gated(o->activation)) {
                token(p, p->gate.format, t, j, x);
                product(&p->gate, expert, x, before, g);
            }
            token(p, p->up.format, t, j, x);
            product(&p->up, expert, x, before, u);
            for (size_t i = 0; i < o->f; i++) {
                activate(o->activation, (double)p->desc.alpha, (double)p->desc.limit, g, u, i, h);
            }
            round_values(p->down.format, h, o->f);
            product(&p->down, expert, h, 1, v);
            const double after = o->weight_first ? 1 : weight;
            for (size_t r = 0; r < o->d_out; r++) {
                y.value[t * o->d_out + r] += after * v.value[r];
                y.off[t * o->d_out + r] += fabs(after) * v.off[r] + 1e-6 * fabs(after * v.value[r]) + 1e-12;
                y.noise[t * o->d_out + r] += squared(after) * v.noise[r] + squared(1e-7 * after * v.value[r]);
            }
        }
    }
    vector_free(x);
    vector_free(g);
    vector_free(u);
    vector_free(h);
    vector_free(v);
    return y;
}

static const uint32_t UNTOUCHED = 0x7fc0dead;

static void mark(float *y, size_t n) {
    for (size_t i = 0; i < n; i++) {
        memcpy(y + i, &UNTOUCHED, sizeof(UNTOUCHED));
    }
}

static int is_marked(const float *y) {
    return memcmp(y, &UNTOUCHED, sizeof(UNTOUCHED)) == 0;
}

/* Reads the rows out of y; what lies between them must be untouched. */
static void gather(const char *what, const float *y, size_t rows, size_t width, size_t stride, int check_gaps, float *out) {
    for (size_t r = 0; r < rows; r++) {
        memcpy(out + r * width, y + r * stride, width * sizeof(float));
        for (size_t i = width; check_gaps && r + 1 < rows && i < stride; i++) {
            if (!is_marked(y + r * stride + i)) {
                fail(what, "something was written between the rows of y");
                return;
            }
        }
    }
}

static void *workspace(size_t size) {
    return take((size + 63) / 64 * 64);
}

static void same_as_first(const char *what, int kind, const float *first, const float *got, size_t n) {
    if (kind > 0 && memcmp(first, got, n * sizeof(float)) != 0) {
        fail(what, "the threads change the result");
    }
}

/* Ends the group of comparisons and begins another. */
static void next_group(const char *name) {
    const char *ended = group.what;
    if (end_group(&group, name, &worst) != 0) {
        fail(ended, "differs from f64 in the mean");
    }
}

/* The whole operation on all kinds of threads: right, and the same bits each time. */
static void check_forward(const char *what, const struct options *o) {
    struct problem p;
    make(&p, o);
    const size_t n = o->tokens * o->d_out, y_floats = o->tokens > 0 ? (o->tokens - 1) * p.y_width + o->d_out : 0;
    struct vector want = reference(&p);
    float *first = must(malloc(n * sizeof(float) + 1)), *got = must(malloc(n * sizeof(float) + 1));
    const size_t x_bytes = o->in_place ? o->tokens * p.y_width * sizeof(float) : 0;
    float *x_copy = must(malloc(x_bytes + 1));
    memcpy(x_copy, p.x, x_bytes);
    if (berth_moe_check(&p.desc) != BERTH_STATUS_OK) {
        fail(what, "check");
    }
    for (int kind = 0; kind < KINDS; kind++) {
        size_t size = 0;
        if (berth_moe_workspace_size(&p.desc, o->tokens, o->used, kind == ALONE ? 1 : THREADS, &size) != BERTH_STATUS_OK) {
            fail(what, "workspace_size");
        }
        p.io.workspace = workspace(size);
        p.io.workspace_size = size;
        if (o->in_place) {
            memcpy(p.x, x_copy, x_bytes);
        } else {
            mark(p.y, y_floats);
        }
        const struct berth_threads *threads = threads_of(kind);
        if (kind != PTHREADS) {
            count_from_here();
        }
        const enum berth_status status = berth_moe_forward(&p.desc, &p.io, threads);
        count_to_here(what);
        if (status != BERTH_STATUS_OK) {
            fail(what, "forward");
            break;
        }
        gather(what, p.y, o->tokens, o->d_out, p.y_width, !o->in_place, kind == 0 ? first : got);
        same_as_first(what, kind, first, got, n);
    }
    if (compare(what, first, n, o->tokens, want, &group) != 0) {
        fail(what, "differs from f64");
    }
    vector_free(want);
    free(first);
    free(got);
    free(x_copy);
    forget(&p, what);
}

/* One projection alone, with the up weights of a problem. */
static void check_mul_mat_id(const char *what, const struct options *o) {
    struct problem p;
    make(&p, o);
    struct berth_mul_mat_id_desc desc = {.struct_size = sizeof(desc), .k = o->d, .rows = o->f, .n_expert = o->experts, .weights = p.desc.up};
    const size_t pairs = o->tokens * o->used, n = pairs * o->f, stride = o->f + (o->gaps ? 5 : 0);
    struct berth_moe_io io = p.io;
    io.y = take(pairs > 0 ? ((pairs - 1) * stride + o->f) * sizeof(float) : 0);
    io.y_row_stride = o->gaps ? stride * sizeof(float) : 0;
    io.y_token_stride = o->gaps ? stride * o->used * sizeof(float) : 0;
    struct vector want = vector_new(n), x = vector_new(o->d);
    for (size_t pair = 0; pair < pairs; pair++) {
        const size_t at = pair * o->f;
        token(&p, o->up, pair / o->used, pair % o->used, x);
        product(&p.up, (size_t)id_of(&p, pair / o->used, pair % o->used), x, 1, (struct vector){want.value + at, want.off + at, want.noise + at});
    }
    vector_free(x);
    float *first = must(malloc(n * sizeof(float) + 1)), *got = must(malloc(n * sizeof(float) + 1));
    for (int kind = 0; kind < KINDS; kind++) {
        if (berth_mul_mat_id_workspace_size(&desc, o->tokens, o->used, kind == ALONE ? 1 : THREADS, &io.workspace_size) != BERTH_STATUS_OK) {
            fail(what, "workspace_size");
        }
        io.workspace = workspace(io.workspace_size);
        mark(io.y, pairs > 0 ? (pairs - 1) * stride + o->f : 0);
        const struct berth_threads *threads = threads_of(kind);
        if (kind != PTHREADS) {
            count_from_here();
        }
        const enum berth_status status = berth_mul_mat_id(&desc, &io, threads);
        count_to_here(what);
        if (status != BERTH_STATUS_OK) {
            fail(what, "mul_mat_id");
            break;
        }
        gather(what, io.y, pairs, o->f, stride, 1, kind == 0 ? first : got);
        same_as_first(what, kind, first, got, n);
    }
    if (compare(what, first, n, o->tokens, want, &group) != 0) {
        fail(what, "differs from f64");
    }
    vector_free(want);
    free(first);
    free(got);
    forget(&p, what);
}

/* The activation alone: apart, in place on either input, and between the rows of a merged product. */
static void check_glu(uint32_t activation, size_t width, size_t rows) {
    char what[64];
    snprintf(what, sizeof(what), "glu %u, %zu x %zu", activation, width, rows);
    enum { APART, ON_GATE, ON_UP, MERGED, LAYOUTS };
    const int gated = is_gated(activation);
    for (int layout = 0; layout < LAYOUTS; layout++) {
        for (int kind = 0; kind < KINDS; kind++) {
            if ((!gated && (layout == ON_GATE || layout == MERGED)) || rows == 0) {
                continue;
            }
            const size_t stride = layout == MERGED ? 2 * width : width + (layout == APART ? 3 : 0);
            float *both = floats((rows - 1) * stride + (layout == MERGED ? 2 * width : width), 9), *gate = both, *up = both + width;
            if (layout != MERGED) {
                up = floats((rows - 1) * stride + width, 9);
            }
            float *out = layout == ON_UP ? up : layout == APART ? take(((rows - 1) * (width + 5) + width) * sizeof(float)) : gate;
            const size_t out_stride = layout == APART ? width + 5 : stride;
            struct berth_glu_desc desc = {.struct_size = sizeof(desc), .width = width, .rows = rows, .activation = activation, .alpha = 1.702f, .limit = 7};
            desc.gate = gated ? gate : NULL;
            desc.up = up;
            desc.out = out;
            desc.gate_stride = desc.up_stride = stride * sizeof(float);
            desc.out_stride = out_stride * sizeof(float);
            if (layout == APART) {
                mark(out, (rows - 1) * out_stride + width);
            }
            struct vector want = vector_new(rows * width), g = vector_new(rows * width), u = vector_new(rows * width);
            for (size_t i = 0; i < rows * width; i++) {
                const size_t at = i / width * stride + i % width;
                g.value[i] = (double)gate[at];
                u.value[i] = (double)up[at];
                activate(activation, (double)desc.alpha, (double)desc.limit, g, u, i, want);
            }
            vector_free(g);
            vector_free(u);
            float *up_copy = must(malloc(width * rows * sizeof(float))), *got = must(malloc(width * rows * sizeof(float)));
            gather(what, up, rows, width, stride, 0, up_copy);
            const struct berth_threads *threads = threads_of(kind);
            if (kind != PTHREADS) {
                count_from_here();
            }
            const enum berth_status status = berth_glu(&desc, threads);
            count_to_here(what);
            if (status != BERTH_STATUS_OK) {
                fail(what, "glu");
            }
            gather(what, out, rows, width, out_stride, layout == APART, got);
            if (compare(what, got, rows * width, rows, want, &group) != 0) {
                fail(what, "differs from f64");
            }
            if (layout == MERGED) {
                gather(what, up, rows, width, stride, 0, got);
                if (memcmp(got, up_copy, width * rows * sizeof(float)) != 0) {
                    fail(what, "the up half was changed");
                }
            }
            vector_free(want);
            free(up_copy);
            free(got);
            release(what);
        }
    }
}

#include "moe_misuse.h"

static const struct moe_format *any_format(void) {
    return &moe_formats[below(MOE_FORMATS)];
}

static size_t whole(size_t n, const struct moe_format *a, const struct moe_format *b) {
    const size_t unit = a->weights > b->weights ? a->weights : b->weights;
    return (n + unit - 1) / unit * unit;
}

static void random_problem(size_t number) {
    struct options o = {.gate = any_format(), .up = any_format(), .down = any_format()};
    o.d = whole(1 + below(600), o.gate, o.up);
    o.f = whole(1 + below(600), o.down, o.down);
    o.d_out = below(3) == 0 ? o.d : 1 + below(140);
    o.experts = 1 + below(9);
    o.used = below(4) == 0 ? o.experts : 1 + below(4);
    o.tokens = below(3) == 0 ? below(90) : below(10);
    o.activation = (uint32_t)below(11);
    o.biases = below(2) == 0;
    o.scales = below(2) == 0;
    o.weight_first = below(3) == 0;
    o.no_weights = below(5) == 0;
    o.merged = is_gated(o.activation) && below(4) == 0;
    o.interleaved = is_gated(o.activation) && !o.merged && below(4) == 0;
    o.x_per_choice = below(4) == 0;
    o.ids_gap = below(2) == 0;
    o.gaps = below(3) == 0;
    o.in_place = o.d_out <= o.d && below(4) == 0;
    o.same_expert = below(8) == 0;
    o.same_twice = below(4) == 0;
    if (o.gaps && (o.merged || o.interleaved)) {
        o.in_place = 0;
    }
    char what[200];
    snprintf(what, sizeof(what), "random %zu: %zu, %zu, %zu, %zu experts, %zu used, %zu tokens, %s %s %s, activation %u", number, o.d, o.f, o.d_out, o.experts, o.used, o.tokens, o.gate->name, o.up->name, o.down->name, o.activation);
    check_forward(what, &o);
    if (!o.merged && !o.scales && !o.biases) {
        check_mul_mat_id(what, &o);
    }
}

static int decode(uint32_t type, size_t weights) {
    for (size_t i = 0; i < MOE_FORMATS; i++) {
        const struct moe_format *format = &moe_formats[i];
        if (format->type == type) {
            const size_t size = moe_row_bytes(format, weights);
            uint8_t *bytes = must(malloc(size));
            float *values = must(malloc(weights * sizeof(float)));
            if (fread(bytes, 1, size, stdin) != size) {
                return 1;
            }
            moe_decode(format, bytes, weights, values);
            const int done = fwrite(values, sizeof(float), weights, stdout) == weights;
            free(bytes);
            free(values);
            return !done;
        }
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "decode") == 0) {
        return decode((uint32_t)strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
    }
    if (argc != 4 || (strcmp(argv[1], "guard") != 0 && strcmp(argv[1], "heap") != 0)) {
        fprintf(stderr, "see the top of moe_check.c\n");
        return 2;
    }
    guarded = strcmp(argv[1], "guard") == 0;
    rng = strtoull(argv[2], NULL, 10) | 1;
    const size_t rounds = strtoul(argv[3], NULL, 10);
    const char *isa = berth_isa();
    if (isa == NULL) {
        fail("isa", "NULL");
        return 1;
    }
    if (berth_pool_new(THREADS, &pool) != BERTH_STATUS_OK || berth_pool_count(pool) != THREADS) {
        fail("pool", "new");
        return 1;
    }

    for (size_t i = 0; i < MOE_FORMATS; i++) {
        const struct moe_format *format = &moe_formats[i];
        next_group(format->name);
        /* One column, few, the least for a panel, and more than one group of columns. */
        const size_t tokens[] = {1, 3, 5, rounds >= 10 ? 70 : 17};
        for (size_t t = 0; t < 4; t += rounds < 2 ? 3 : 1) { /* under valgrind, the ends */
            struct options o = {.d = 256, .f = 256 + (format->weights == 256 ? 256 : 32), .d_out = 70, .experts = 3, .used = 2, .tokens = tokens[t]};
            o.gate = o.up = o.down = format;
            o.ids_gap = (int)(t % 2);
            char what[64];
            snprintf(what, sizeof(what), "%s, %zu tokens", format->name, o.tokens);
            check_forward(what, &o);
            o.x_per_choice = t == 1;
            o.gaps = t == 2;
            check_mul_mat_id(what, &o);
        }
    }
    next_group("activations");
    for (uint32_t activation = 0; activation < 11; activation++) {
        struct options o = {.d = 96, .f = 288, .d_out = 33, .experts = 4, .used = 3, .tokens = 4, .activation = activation, .biases = 1, .scales = 1};
        o.gate = moe_format_named("q8_0");
        o.up = moe_format_named("mxfp4");
        o.down = moe_format_named("q5_0");
        o.weight_first = (int)(activation % 2);
        char what[64];
        snprintf(what, sizeof(what), "activation %u", activation);
        check_forward(what, &o);
    }
    next_group("glu");
    for (uint32_t activation = 0; activation < 11; activation++) {
        check_glu(activation, 5, 3);
        check_glu(activation, 600, 40);
        check_glu(activation, 3, 0);
    }
    next_group("variants and random problems");
    const struct moe_format *q4 = moe_format_named("q4_K");
    const struct options plain = {.d = 256, .f = 256, .d_out = 256, .experts = 6, .used = 2, .tokens = 9, .gate = q4, .up = q4, .down = q4};
#define VARIANT(...) do { struct options o = plain; __VA_ARGS__; check_forward(#__VA_ARGS__, &o); } while (0)
    VARIANT(o.tokens = 0);
    VARIANT(o.same_expert = 1; o.tokens = 40);
    VARIANT(o.same_twice = 1);
    VARIANT(o.used = o.experts);
    VARIANT(o.experts = o.used = 1; o.tokens = 1);
    VARIANT(o.used = 7; o.experts = 3; o.same_twice = 1);
    VARIANT(o.x_per_choice = 1; o.ids_gap = 1);
    VARIANT(o.in_place = 1);
    VARIANT(o.in_place = 1; o.x_per_choice = 1; o.tokens = 2);
    VARIANT(o.gaps = 1; o.biases = 1; o.scales = 1);
    VARIANT(o.merged = 1; o.biases = 1; o.scales = 1);
    VARIANT(o.interleaved = 1; o.biases = 1; o.scales = 1);
    VARIANT(o.weight_first = 1; o.no_weights = 1);
    VARIANT(o.experts = 40; o.tokens = 3);
    for (size_t i = 0; i < rounds; i++) {
        random_problem(i);
    }
    next_group("none");

    check_types();
    check_bad_input(&plain);
    check_bad_glu();
    check_bad_threads(&plain);
    check_pool();
    berth_pool_free(pool);
    berth_pool_free(NULL);
    printf("%s: %s, largest mean square error of a group %.2f times that of independent roundings\n", isa, failures == 0 ? "ok" : "FAILED", worst);
    printf("misuse: %zu cases\n", misuses);
    return failures != 0;
}
