/*
 * Part of moe_check.c: what must be refused, with the right status, a message, and not a byte written.
 */

static void check_types(void) {
    /* All of ggml's types, and what is none. */
    for (int type = -3; type < 300; type++) {
        int known = 0;
        for (size_t i = 0; i < MOE_FORMATS; i++) {
            known |= type >= 0 && moe_formats[i].type == (uint32_t)type;
        }
        if (berth_moe_type_supported(type) != (known != 0)) {
            fail("type_supported", known ? "a type with kernels is not supported" : "a type without kernels is supported");
        }
    }
    if (berth_moe_type_supported(INT_MAX) || berth_moe_type_supported(INT_MIN)) {
        fail("type_supported", "a number that is no type");
    }
}

/* A sound problem and its copies, of which each attempt changes something. */
static struct problem sound;
static struct berth_moe_desc desc;
static struct berth_moe_io io;
static struct berth_mul_mat_id_desc single;

enum { WHOLE = 1, SINGLE = 2, BOTH = 3 };

static int untouched(const float *y, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!is_marked(y + i)) {
            return 0;
        }
    }
    return 1;
}

/* Calls that were to be refused. */
static size_t misuses;

static void refused(const char *what, enum berth_status status, enum berth_status want, const float *y, size_t n) {
    misuses++;
    if (status != want) {
        fail(what, berth_status_text((int)status));
    } else if (berth_last_error()[0] == 0 || strchr(berth_last_error(), '\n') != NULL) {
        fail(what, "not one line of error");
    }
    if (!untouched(y, n) || !canaries_live()) {
        fail(what, "something was written");
        mark(sound.y, n);
    }
}

static void attempt(const char *what, int which, enum berth_status want) {
    const size_t n = sound.o.tokens * sound.o.used * sound.o.f;
    if (which & WHOLE) {
        refused(what, berth_moe_forward(&desc, &io, NULL), want, sound.y, n);
    }
    if (which & SINGLE) {
        refused(what, berth_mul_mat_id(&single, &io, NULL), want, sound.y, n);
    }
    desc = sound.desc;
    io = sound.io;
    single.weights = sound.desc.up;
    single.k = sound.o.d;
    single.rows = sound.o.f;
    single.n_expert = sound.o.experts;
    single.struct_size = sizeof(single);
}

static const enum berth_status BAD = BERTH_STATUS_INVALID_ARGUMENT;
#define REFUSE(which, ...) do { __VA_ARGS__; attempt(#__VA_ARGS__, which, BAD); } while (0)
/* The same for the weights of both. */
#define REFUSE_WEIGHTS(...) \
    do { \
        struct berth_moe_weights *w = &desc.gate; \
        __VA_ARGS__; \
        attempt("gate: " #__VA_ARGS__, WHOLE, BAD); \
        w = &desc.down; \
        __VA_ARGS__; \
        attempt("down: " #__VA_ARGS__, WHOLE, BAD); \
        w = &desc.up; \
        __VA_ARGS__; \
        single.weights = desc.up; \
        attempt("up: " #__VA_ARGS__, BOTH, BAD); \
    } while (0)

static void *moved(const void *pointer, ptrdiff_t bytes) {
    return (uint8_t *)(uintptr_t)pointer + bytes;
}

static void check_bad_input(const struct options *plain) {
    struct options o = *plain;
    o.f = 512; /* unlike d, so that exchanged sizes are seen */
    o.d_out = 300;
    o.x_per_choice = 1; /* then the workspace is of exactly the size that is needed */
    make(&sound, &o);
    const size_t tokens = o.tokens, used = o.used, y_floats = tokens * used * o.f;
    sound.y = take(y_floats * sizeof(float));
    sound.io.y = sound.y;
    mark(sound.y, y_floats);
    single = (struct berth_mul_mat_id_desc){.struct_size = sizeof(single), .k = o.d, .rows = o.f, .n_expert = o.experts, .weights = sound.desc.up};
    size_t size = 0, other = 0, unchanged = 77;
    desc = sound.desc;
    if (berth_moe_workspace_size(&desc, tokens, used, 1, &size) != BERTH_STATUS_OK ||
        berth_mul_mat_id_workspace_size(&single, tokens, used, 1, &other) != BERTH_STATUS_OK || other > size) {
        fail("workspace_size", "of sound sizes");
    }
    sound.io.workspace = workspace(size);
    sound.io.workspace_size = size;
    io = sound.io;

    /* Structs. */
    refused("desc NULL", berth_moe_forward(NULL, &io, NULL), BAD, sound.y, y_floats);
    refused("io NULL", berth_moe_forward(&desc, NULL, NULL), BAD, sound.y, y_floats);
    refused("desc NULL", berth_mul_mat_id(NULL, &io, NULL), BAD, sound.y, y_floats);
    refused("io NULL", berth_mul_mat_id(&single, NULL, NULL), BAD, sound.y, y_floats);
    refused("check NULL", berth_moe_check(NULL), BAD, sound.y, y_floats);
    const int32_t strange = (int32_t)o.experts;
    refused("prefetch for NULL", berth_moe_prefetch(NULL, io.ids, 1), BAD, sound.y, y_floats);
    refused("prefetch of NULL", berth_moe_prefetch(&desc, NULL, 1), BAD, sound.y, y_floats);
    refused("prefetch of no expert", berth_moe_prefetch(&desc, &strange, 1), BAD, sound.y, y_floats);
    refused("size of NULL", berth_moe_workspace_size(NULL, 1, 1, 1, &unchanged), BAD, sound.y, y_floats);
    refused("size to NULL", berth_moe_workspace_size(&desc, 1, 1, 1, NULL), BAD, sound.y, y_floats);
    refused("size to NULL", berth_mul_mat_id_workspace_size(&single, 1, 1, 1, NULL), BAD, sound.y, y_floats);
    refused("misaligned", berth_moe_check(moved(&desc, 4)), BAD, sound.y, y_floats);
    REFUSE(WHOLE, desc.struct_size = 0);
    REFUSE(WHOLE, desc.struct_size = 8);
    REFUSE(WHOLE, desc.struct_size = 72); /* an older caller, who knows no weights */
    REFUSE(SINGLE, single.struct_size = 0);
    REFUSE(BOTH, io.struct_size = 0);
    REFUSE(BOTH, io.struct_size = 24);
    REFUSE(WHOLE, desc.struct_size -= 1);
    REFUSE(WHOLE, desc.struct_size -= 8); /* in the middle of down */
    REFUSE(WHOLE, desc.struct_size += 1);
    REFUSE(SINGLE, single.struct_size -= 8);
    REFUSE(BOTH, io.struct_size -= 1);
    REFUSE(BOTH, io.struct_size -= 4);
    REFUSE(BOTH, io.struct_size += 4);

    /* Sizes of the workspace. */
    const struct { size_t tokens, used, threads; } sizes[] = {
        {SIZE_MAX, 2, 1}, {SIZE_MAX / 2, 2, 1}, {(size_t)1 << 40, 2, 1}, {1, (size_t)1 << 40, 1}, {1, 1, 0}, {1, 1, 1025}, {1, 1, SIZE_MAX},
    };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        refused("workspace_size", berth_moe_workspace_size(&desc, sizes[i].tokens, sizes[i].used, sizes[i].threads, &unchanged), BAD, sound.y, y_floats);
        refused("workspace_size", berth_mul_mat_id_workspace_size(&single, sizes[i].tokens, sizes[i].used, sizes[i].threads, &unchanged), BAD, sound.y, y_floats);
    }
    if (unchanged != 77) {
        fail("workspace_size", "wrote its output on an error");
    }

    /* Sizes of the experts. */
    const size_t bad_sizes[] = {0, 1, 255, 257, 1 << 20, (size_t)1 << 40, (size_t)1 << 62, (SIZE_MAX >> 8) << 8, SIZE_MAX};
    for (size_t i = 0; i < sizeof(bad_sizes) / sizeof(bad_sizes[0]); i++) {
        REFUSE(BOTH, desc.d = single.k = bad_sizes[i]);
        REFUSE(WHOLE, desc.f = bad_sizes[i]);
        if (bad_sizes[i] == 0 || bad_sizes[i] > 300) {
            REFUSE(BOTH, desc.n_expert = single.n_expert = bad_sizes[i]);
            REFUSE(SINGLE, single.rows = bad_sizes[i] == 1 << 20 ? (size_t)1 << 30 : bad_sizes[i]);
        }
        if (bad_sizes[i] > 300) {
            REFUSE(WHOLE, desc.d_out = bad_sizes[i]);
        }
    }
    REFUSE(WHOLE, desc.flags = 8);
    REFUSE(WHOLE, desc.flags = UINT32_MAX);
    REFUSE(WHOLE, desc.flags = BERTH_MOE_MERGED_GATE_UP);
    REFUSE(WHOLE, desc.flags = BERTH_MOE_MERGED_GATE_UP; memset(&desc.gate, 0, sizeof(desc.gate)));
    REFUSE(WHOLE, memset(&desc.gate, 0, sizeof(desc.gate)));
    REFUSE(WHOLE, memset(&desc.up, 0, sizeof(desc.up)));
    REFUSE(WHOLE, memset(&desc.down, 0, sizeof(desc.down)));
    REFUSE(WHOLE, desc.activation = 11);
    REFUSE(WHOLE, desc.activation = UINT32_MAX);
    REFUSE(WHOLE, desc.activation = BERTH_ACTIVATION_RELU);
    const float bad_floats[] = {NAN, INFINITY, -INFINITY, 0, -1};
    for (size_t i = 0; i < sizeof(bad_floats) / sizeof(bad_floats[0]); i++) {
        if (i < 3) {
            REFUSE(WHOLE, desc.activation = BERTH_ACTIVATION_SWIGLU_OAI; desc.alpha = bad_floats[i]);
        }
        if (i != 1) {
            REFUSE(WHOLE, desc.activation = BERTH_ACTIVATION_SWIGLU_OAI; desc.limit = bad_floats[i]);
            REFUSE(WHOLE, desc.activation = BERTH_ACTIVATION_SWIGLU_CLAMP; desc.limit = bad_floats[i]);
        }
    }

    /* Weights. */
    const uint32_t unsupported[] = {4, 5, 9, 15, 16, 17, 18, 19, 21, 22, 24, 25, 26, 27, 28, 29, 31, 32, 33, 34, 35, 36, 37, 38, 40, 41, 42, 43, 1000, INT32_MAX, (uint32_t)INT32_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof(unsupported) / sizeof(unsupported[0]); i++) {
        desc.gate.ggml_type = unsupported[i];
        if (berth_moe_check(&desc) != BERTH_STATUS_UNSUPPORTED) {
            fail("check", "an unsupported type");
        }
        attempt("an unsupported gate", WHOLE, BERTH_STATUS_UNSUPPORTED);
        desc.down.ggml_type = unsupported[i];
        attempt("an unsupported down", WHOLE, BERTH_STATUS_UNSUPPORTED);
        desc.up.ggml_type = single.weights.ggml_type = unsupported[i];
        attempt("an unsupported up", BOTH, BERTH_STATUS_UNSUPPORTED);
    }
    REFUSE_WEIGHTS(w->data = NULL);
    REFUSE_WEIGHTS(w->size = 0);
    REFUSE_WEIGHTS(w->size -= 1);
    REFUSE_WEIGHTS(w->size = SIZE_MAX);
    REFUSE_WEIGHTS(w->size = (size_t)1 << 63);
    REFUSE_WEIGHTS(w->data = (void *)(uintptr_t)(UINTPTR_MAX - 100));
    REFUSE_WEIGHTS(w->reserved = 1);
    REFUSE_WEIGHTS(w->row_stride = 1);
    REFUSE_WEIGHTS(w->row_stride = w->size);
    REFUSE_WEIGHTS(w->row_stride = SIZE_MAX);
    REFUSE_WEIGHTS(w->row_stride = SIZE_MAX / 4);
    REFUSE_WEIGHTS(w->expert_stride = 1);
    REFUSE_WEIGHTS(w->expert_stride = w->size);
    REFUSE_WEIGHTS(w->expert_stride = SIZE_MAX);
    REFUSE_WEIGHTS(w->ggml_type = 0);
    REFUSE_WEIGHTS(w->scale = moved(sound.x, 2));
    REFUSE_WEIGHTS(w->bias = moved(sound.x, 1));
    REFUSE(WHOLE, desc.up.scale = (void *)(UINTPTR_MAX - 7)); /* more of them than there is memory behind it */
    REFUSE(WHOLE, desc.down.scale = (void *)(UINTPTR_MAX - 7));
    REFUSE(WHOLE, desc.gate.bias = (void *)(UINTPTR_MAX - 1023));
    REFUSE(WHOLE, desc.down.bias = (void *)(UINTPTR_MAX - 1023));
    REFUSE_WEIGHTS(w->bias = sound.x; w->bias_stride = 6);
    REFUSE_WEIGHTS(w->bias = sound.x; w->bias_stride = 4);
    REFUSE_WEIGHTS(w->bias = sound.x; w->bias_stride = SIZE_MAX - 3);
    REFUSE(SINGLE, single.weights.scale = sound.x);
    REFUSE(SINGLE, single.weights.bias = sound.x);

    /* Tokens. */
    REFUSE(BOTH, io.n_used = 0);
    REFUSE(BOTH, io.n_used = SIZE_MAX);
    REFUSE(BOTH, io.n_tokens = SIZE_MAX);
    REFUSE(BOTH, io.n_tokens = (size_t)1 << 33);
    REFUSE(WHOLE, io.n_tokens = tokens + 1); /* more than the workspace is for */
    REFUSE(BOTH, io.x = NULL);
    REFUSE(BOTH, io.x = moved(io.x, 1));
    REFUSE(BOTH, io.x = moved(io.x, 2));
    REFUSE(BOTH, io.x_rows = 3);
    REFUSE(BOTH, io.x_rows = SIZE_MAX);
    REFUSE(BOTH, io.x_token_stride = 1022);
    REFUSE(BOTH, io.x_token_stride = SIZE_MAX - 3);
    REFUSE(BOTH, io.x_row_stride = SIZE_MAX / 2 + 1);
    REFUSE(BOTH, io.ids = NULL);
    REFUSE(BOTH, io.ids = moved(io.ids, 1));
    REFUSE(BOTH, io.ids_stride = 4);
    REFUSE(BOTH, io.ids_stride = 10);
    REFUSE(BOTH, io.ids_stride = SIZE_MAX - 3);
    REFUSE(WHOLE, io.weights = moved(io.weights, 3));
    REFUSE(WHOLE, io.weights_stride = 4);
    REFUSE(WHOLE, io.weights_stride = SIZE_MAX - 3);
    REFUSE(BOTH, io.y = NULL);
    REFUSE(BOTH, io.y = moved(io.y, 2));
    REFUSE(BOTH, io.y_token_stride = 6);
    REFUSE(BOTH, io.y_token_stride = 1024);
    REFUSE(BOTH, io.y_token_stride = SIZE_MAX - 3);
    REFUSE(SINGLE, io.y_row_stride = 1024);
    const int32_t bad_ids[] = {-1, (int32_t)o.experts, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        for (size_t at = 0; at < 3; at++) {
            int32_t *id = &sound.ids[at == 0 ? 0 : at == 1 ? 7 : tokens * used - 1];
            const int32_t was = *id;
            *id = bad_ids[i];
            attempt("an id out of range", BOTH, BAD);
            *id = was;
        }
    }

    /* The workspace. */
    REFUSE(BOTH, io.workspace = NULL);
    REFUSE(BOTH, io.workspace = moved(io.workspace, 1); io.workspace_size -= 64);
    REFUSE(BOTH, io.workspace = moved(io.workspace, 8); io.workspace_size -= 64);
    REFUSE(BOTH, io.workspace = moved(io.workspace, 32); io.workspace_size -= 64);
    REFUSE(WHOLE, io.workspace_size -= 1);
    REFUSE(SINGLE, io.workspace_size = other - 1);
    REFUSE(BOTH, io.workspace_size = 0);
    REFUSE(BOTH, io.workspace_size = 64);
    REFUSE(BOTH, io.workspace_size = SIZE_MAX);
    REFUSE(BOTH, io.workspace = (void *)(uintptr_t)sound.desc.up.data);
    REFUSE(BOTH, io.workspace = moved(io.workspace, 64); io.workspace_size -= 64; io.x = moved(io.workspace, 0));
    REFUSE(BOTH, io.y = moved(io.workspace, (ptrdiff_t)size - 4));
    REFUSE(BOTH, io.ids = io.workspace);
    REFUSE(WHOLE, io.weights = io.workspace);
    REFUSE(BOTH, io.y = (float *)((uintptr_t)sound.desc.up.data / 4 * 4));
    if (sound.desc.down.data != NULL) {
        REFUSE(WHOLE, desc.down.bias = sound.y);
        REFUSE(WHOLE, desc.down.scale = io.workspace);
    }

    /* And after all that, the sound one runs; and nothing is asked of a call without tokens. */
    if (berth_moe_forward(&desc, &io, NULL) != BERTH_STATUS_OK || berth_mul_mat_id(&single, &io, NULL) != BERTH_STATUS_OK) {
        fail("sound input", "refused");
    }
    if (berth_moe_prefetch(&desc, io.ids, o.used) != BERTH_STATUS_OK || berth_moe_prefetch(&desc, NULL, 0) != BERTH_STATUS_OK) {
        fail("prefetch", "refused");
    }
    io = (struct berth_moe_io){.struct_size = sizeof(io)};
    if (berth_moe_forward(&desc, &io, NULL) != BERTH_STATUS_OK || berth_mul_mat_id(&single, &io, NULL) != BERTH_STATUS_OK) {
        fail("no tokens", "refused");
    }
    /* A caller with a newer header. */
    desc.struct_size += 64;
    if (berth_moe_check(moved(memcpy(take(sizeof(desc) + 72), &desc, sizeof(desc)), 0)) != BERTH_STATUS_OK) {
        fail("a longer struct", "refused");
    }
    forget(&sound, "bad input");
}

static void check_bad_glu(void) {
    enum { WIDTH = 20, ROWS = 4 };
    float *gate = floats(WIDTH * ROWS, 1), *up = floats(WIDTH * ROWS, 1), *out = take(WIDTH * ROWS * sizeof(float));
    mark(out, WIDTH * ROWS);
    const struct berth_glu_desc good = {.struct_size = sizeof(good), .width = WIDTH, .rows = ROWS, .gate = gate, .up = up, .out = out};
    struct berth_glu_desc g = good;
#define REFUSE_GLU(...) \
    do { \
        __VA_ARGS__; \
        refused("glu: " #__VA_ARGS__, berth_glu(&g, NULL), BAD, out, WIDTH * ROWS); \
        g = good; \
    } while (0)
    /* Nothing is asked of no rows. */
    const struct berth_glu_desc empty = {.struct_size = sizeof(empty), .width = WIDTH};
    if (berth_glu(&empty, NULL) != BERTH_STATUS_OK) {
        fail("glu", "no rows are refused");
    }
    refused("glu NULL", berth_glu(NULL, NULL), BAD, out, WIDTH * ROWS);
    REFUSE_GLU(g.struct_size = 0);
    REFUSE_GLU(g.struct_size -= 4);
    REFUSE_GLU(g.width = 0);
    REFUSE_GLU(g.width = SIZE_MAX);
    REFUSE_GLU(g.width = SIZE_MAX / 4);
    REFUSE_GLU(g.rows = SIZE_MAX);
    REFUSE_GLU(g.reserved = 1);
    REFUSE_GLU(g.activation = 11);
    REFUSE_GLU(g.activation = BERTH_ACTIVATION_SWIGLU_OAI);
    REFUSE_GLU(g.activation = BERTH_ACTIVATION_GELU);
    REFUSE_GLU(g.gate = NULL);
    REFUSE_GLU(g.up = NULL);
    REFUSE_GLU(g.out = NULL);
    REFUSE_GLU(g.gate = moved(gate, 2));
    REFUSE_GLU(g.up = moved(up, 1));
    REFUSE_GLU(g.out = moved(out, 3));
    REFUSE_GLU(g.gate_stride = 6);
    REFUSE_GLU(g.up_stride = SIZE_MAX - 3);
    REFUSE_GLU(g.out_stride = 4);
    REFUSE_GLU(g.out = gate + 1; g.rows = 3);
    REFUSE_GLU(g.out = gate + WIDTH; g.rows = 3);
    REFUSE_GLU(g.gate = out + WIDTH; g.rows = 3);
    REFUSE_GLU(g.out = up; g.out_stride = 4 * (WIDTH + 1); g.rows = 3);
    if (berth_glu(&g, NULL) != BERTH_STATUS_OK) {
        fail("glu", "sound input is refused");
    }
    release("glu");
}

/* --- a caller's parallel-for that breaks its promise ------------------------------------------------------------------------------- */

enum { NEVER, SKIPS_LAST, SKIPS_FIRST, TWICE, TWICE_AT_ONCE, ONE_MORE, FAR_AWAY, NULL_TASK, BREAKS };
struct broken {
    int how;
    int from; /* the first call of it that is broken */
    int calls;
};

static void run_broken(void *context, size_t n, berth_task_fn call, void *task) {
    struct broken *b = context;
    if (b->calls++ < b->from) {
        run_backwards(NULL, n, call, task);
        return;
    }
    if (b->how == NEVER) {
        return;
    }
    for (size_t i = b->how == SKIPS_FIRST ? 1 : 0; i + (b->how == SKIPS_LAST ? 1 : 0) < n; i++) {
        call(task, i);
    }
    switch (b->how) {
    case TWICE: call(task, 0); break;
    case ONE_MORE: call(task, n); break;
    case FAR_AWAY: call(task, SIZE_MAX); break;
    case NULL_TASK: call(NULL, 0); break;
    case TWICE_AT_ONCE: {
        struct call again[2] = {{call, task, n - 1}, {call, task, n - 1}};
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) {
            if (pthread_create(&threads[i], NULL, one_call, &again[i]) != 0) {
                exit(1);
            }
        }
        for (int i = 0; i < 2; i++) {
            pthread_join(threads[i], NULL);
        }
        break;
    }
    default: break;
    }
}

static void check_bad_threads(const struct options *plain) {
    struct problem p;
    make(&p, plain);
    const size_t n = plain->tokens * plain->d_out;
    size_t size = 0;
    if (berth_moe_workspace_size(&p.desc, plain->tokens, plain->used, THREADS, &size) != BERTH_STATUS_OK) {
        fail("workspace_size", "of sound sizes");
    }
    p.io.workspace = workspace(size);
    p.io.workspace_size = size;
    float *want = must(malloc(n * sizeof(float)));
    if (berth_moe_forward(&p.desc, &p.io, NULL) != BERTH_STATUS_OK) {
        fail("forward", "on sound input");
    }
    memcpy(want, p.y, n * sizeof(float));
    mark(p.y, n);

    const struct berth_threads good = {.struct_size = sizeof(good), .run = run_pthreads, .count = THREADS};
    struct berth_threads t = good;
#define REFUSE_THREADS(...) \
    do { \
        __VA_ARGS__; \
        refused("threads: " #__VA_ARGS__, berth_moe_forward(&p.desc, &p.io, &t), BAD, p.y, n); \
        t = good; \
    } while (0)
    REFUSE_THREADS(t.struct_size = 0);
    REFUSE_THREADS(t.run = NULL);
    REFUSE_THREADS(t.pool = pool);
    REFUSE_THREADS(t.count = 0);
    REFUSE_THREADS(t.count = 1025);
    REFUSE_THREADS(t.count = SIZE_MAX);
    REFUSE_THREADS(t.count = 16); /* more than the workspace is for */

    for (int how = 0; how < BREAKS; how++) {
        /* Quantisation, gate and up, down: with the last, y may have been written. */
        for (int from = 0; from < 3; from++) {
            char what[64];
            snprintf(what, sizeof(what), "parallel-for broken in way %d from region %d", how, from);
            struct broken broken = {.how = how, .from = from};
            t = (struct berth_threads){.struct_size = sizeof(t), .run = run_broken, .context = &broken, .count = THREADS};
            const enum berth_status status = berth_moe_forward(&p.desc, &p.io, &t);
            /* A call with NULL does nothing, and all others were made. */
            if (status != (how == NULL_TASK ? BERTH_STATUS_OK : BAD)) {
                fail(what, berth_status_text((int)status));
            }
            if (how != NULL_TASK && from < 2 && !untouched(p.y, n)) {
                fail(what, "y was written");
            }
            if (!canaries_live()) {
                fail(what, "memory was written");
            }
            if (berth_moe_forward(&p.desc, &p.io, &good) != BERTH_STATUS_OK || memcmp(want, p.y, n * sizeof(float)) != 0) {
                fail(what, "a sound call after it differs");
            }
            mark(p.y, n);
        }
        struct berth_glu_desc glu = {.struct_size = sizeof(glu), .width = 4096, .rows = 8};
        glu.gate = glu.up = glu.out = floats(4096 * 8, 1);
        struct broken broken = {.how = how};
        t = (struct berth_threads){.struct_size = sizeof(t), .run = run_broken, .context = &broken, .count = THREADS};
        if (berth_glu(&glu, &t) != (how == NULL_TASK ? BERTH_STATUS_OK : BAD)) {
            fail("glu", "with a broken parallel-for");
        }
    }
    free(want);
    forget(&p, "bad threads");
}

/* --- the pool ---------------------------------------------------------------------------------------------------------------------- */

static atomic_size_t made[THREADS];

static void record(void *task, size_t index) {
    if (task == &pool && index < THREADS) {
        atomic_fetch_add(&made[index], 1);
    }
}

/* The pool from inside a call that it makes: an error in place of waiting for itself. */
static atomic_int refusals;

static void use_again(void *task, size_t index) {
    (void)index;
    struct berth_pool *same = task;
    float values[4] = {0};
    const struct berth_glu_desc glu = {.struct_size = sizeof(glu), .width = 4, .rows = 1, .gate = values, .up = values, .out = values};
    const struct berth_threads threads = {.struct_size = sizeof(threads), .pool = same};
    if (berth_pool_run(same, use_again, task) == BAD && berth_glu(&glu, &threads) == BAD && berth_last_error()[0] != 0) {
        atomic_fetch_add(&refusals, 1);
    }
}

static void check_pool(void) {
    struct berth_pool *none = NULL;
    float nothing = 0;
    const size_t bad[] = {0, 1025, SIZE_MAX};
    for (size_t i = 0; i < 3; i++) {
        refused("pool_new", berth_pool_new(bad[i], &none), BAD, &nothing, 0);
    }
    refused("pool_new to NULL", berth_pool_new(1, NULL), BAD, &nothing, 0);
    refused("pool_run of NULL", berth_pool_run(NULL, record, &pool), BAD, &nothing, 0);
    refused("pool_run with NULL", berth_pool_run(pool, NULL, &pool), BAD, &nothing, 0);
    if (none != NULL || berth_pool_count(NULL) != 0) {
        fail("pool", "NULL");
    }
    if (berth_pool_run(pool, use_again, pool) != BERTH_STATUS_OK || atomic_load(&refusals) != THREADS) {
        fail("pool_run", "the pool inside of a call of the pool");
    }
    for (size_t round = 1; round <= 20; round++) {
        if (berth_pool_run(pool, record, &pool) != BERTH_STATUS_OK) {
            fail("pool_run", "refused");
        }
        for (size_t i = 0; i < THREADS; i++) {
            if (atomic_load(&made[i]) != round) {
                fail("pool_run", "not one call of each index");
            }
        }
    }
}
