// Greedy generation with any libllama since April 2025, through its exported functions alone: no header of llama.cpp or ggml is included.
//
//     greedy [-c CONTEXTS] [-t THREADS] [-w 1] LIBLLAMA BACKEND_DIR MODEL PROMPT N [PATTERN=BUFFER_TYPE ...]
//
// Opens LIBLLAMA, lets its ggml load the backends of BACKEND_DIR and the one named by GGML_BACKEND_PATH, loads MODEL with the rules given
// (what `-ot` does in llama.cpp's own tools), and decodes N tokens. PROMPT is text, or "@1,2,3" for token ids. Standard output:
//
//     device NAME BUFFER_TYPE      for every registered device
//     tokens ID ID ...             the N generated tokens
//     threads COUNT                the most threads that this process had after a step
//     logits HASH                  64 bits (FNV-1a) over every logit of every step: equal hashes mean equal arithmetic, bit for bit
//
// Structs without a header. llama.cpp returns and takes its parameter structs by value, and their fields change from version to version.
// Here each is a `blob`: 1 KiB, filled by the library's own `*_default_params` and passed on as it is. On x86-64 System V that is sound:
//
//   - A struct of more than 16 bytes is of class MEMORY. As a result, it is written through a pointer that the caller passes before the
//     arguments (in rdi); the callee writes the bytes of its own struct and no more. So the functions are declared here as what they are to
//     the machine, functions with one more pointer, and room to spare does no harm. `made` checks that there was enough.
//   - As an argument, it is copied onto the stack. The area of stack arguments begins where rsp points at the call, and the callee reads the
//     bytes of its own struct from there. In every call below the blob is the only argument on the stack (the few pointers and integers travel
//     in registers), so a longer copy moves nothing else; and no member, of theirs or of the blob, asks for more than 8-byte alignment.
//
// Two facts about fields are relied upon: `llama_model_params` has begun with the pointers `devices` and `tensor_buft_overrides` since April
// 2025, and `llama_context_params` begins with `uint32_t n_ctx`. Threads are set by a function, not by a field: one thread unless told
// otherwise, because several hosts wait for their threads by spinning, which takes minutes when other tests run on the same cores.
//
// With several contexts each is made and used by a thread of its own, all at the same time and with the same prompt, on one model; each prints
// its lines. With -w 1, a context of its own first decodes the prompt with `llama_set_warmup`: all experts of every layer are computed.

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__x86_64__) || !defined(__LP64__)
#error "passing structs as blobs is argued for x86-64 System V only"
#endif

enum { BLOB_BYTES = 1024, UNTOUCHED = 0x5A, MAX_PROMPT = 1024, MAX_RULES = 15, MAX_STEPS = 256, N_CTX = 512, MAX_CONTEXTS = 8 };

typedef struct {
    unsigned char bytes[BLOB_BYTES];
} blob;

// `struct llama_model_tensor_buft_override`, the element of `tensor_buft_overrides`; the list ends with a NULL pattern.
typedef struct {
    const char * pattern;
    void * buffer_type;
} rule;

// The beginning of `struct llama_model_params`.
typedef struct {
    void ** devices;
    const rule * tensor_buft_overrides;
} model_params_head;

static void (*ggml_backend_load_all_from_path)(const char * dir);
static size_t (*ggml_backend_dev_count)(void);
static void * (*ggml_backend_dev_get)(size_t index);
static const char * (*ggml_backend_dev_name)(void * device);
static void * (*ggml_backend_dev_buffer_type)(void * device);
static const char * (*ggml_backend_buft_name)(void * buffer_type);

static void (*llama_backend_init)(void);
static void (*llama_backend_free)(void);
static void * (*llama_model_default_params)(blob * result);
static void * (*llama_model_load_from_file)(const char * path, blob params);
static void (*llama_model_free)(void * model);
static const void * (*llama_model_get_vocab)(const void * model);
static int32_t (*llama_vocab_n_tokens)(const void * vocab);
static int32_t (*llama_tokenize)(const void * vocab, const char * text, int32_t len, int32_t * tokens, int32_t max, bool special, bool parse);
static void * (*llama_context_default_params)(blob * result);
static void * (*llama_init_from_model)(void * model, blob params);
static void (*llama_set_n_threads)(void * context, int32_t n_threads, int32_t n_threads_batch);
static void * (*llama_batch_get_one)(blob * result, int32_t * tokens, int32_t n_tokens);
static void (*llama_set_warmup)(void * context, bool warmup);
static int32_t (*llama_decode)(void * context, blob batch);
static const float * (*llama_get_logits_ith)(void * context, int32_t index);
static void (*llama_free)(void * context);

static _Noreturn void fail(const char * what, const char * which) {
    fprintf(stderr, "greedy: %s: %s\n", what, which);
    exit(1);
}

// Looks a function up in libllama and the ggml it depends on. The address is copied as bytes: ISO C has no cast from `void *` to a function.
static void find(void * library, const char * name, void * function) {
    void * address = dlsym(library, name);
    if (address == NULL) {
        fail("libllama and its ggml have no function", name);
    }
    memcpy(function, &address, sizeof address);
}

#define FIND(name) find(library, #name, (void *) &name)

static void find_all(const char * path) {
    // Everything stays open until the process ends. RTLD_LOCAL is how Python and Node load it.
    void * library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fail("cannot open libllama", dlerror());
    }
    FIND(ggml_backend_load_all_from_path);
    FIND(ggml_backend_dev_count);
    FIND(ggml_backend_dev_get);
    FIND(ggml_backend_dev_name);
    FIND(ggml_backend_dev_buffer_type);
    FIND(ggml_backend_buft_name);
    FIND(llama_backend_init);
    FIND(llama_backend_free);
    FIND(llama_model_default_params);
    FIND(llama_model_load_from_file);
    FIND(llama_model_free);
    FIND(llama_model_get_vocab);
    FIND(llama_vocab_n_tokens);
    FIND(llama_tokenize);
    FIND(llama_context_default_params);
    FIND(llama_init_from_model);
    FIND(llama_set_n_threads);
    FIND(llama_set_warmup);
    FIND(llama_batch_get_one);
    FIND(llama_decode);
    FIND(llama_get_logits_ith);
    FIND(llama_free);
}

static blob blank(void) {
    blob b;
    memset(b.bytes, UNTOUCHED, sizeof b.bytes);
    return b;
}

// Checks that a struct just written to a blank blob ended before the blob did.
static void made(const blob * b, const char * what) {
    for (size_t i = BLOB_BYTES - 64; i < BLOB_BYTES; i++) {
        if (b->bytes[i] != UNTOUCHED) {
            fail("a struct is larger than the blob kept for it", what);
        }
    }
}

static void list_devices(void) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        void * device = ggml_backend_dev_get(i);
        void * type = ggml_backend_dev_buffer_type(device);
        printf("device %s %s\n", ggml_backend_dev_name(device), type != NULL ? ggml_backend_buft_name(type) : "none");
    }
}

static void * buffer_type_named(const char * name) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        void * type = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        if (type != NULL && strcmp(ggml_backend_buft_name(type), name) == 0) {
            return type;
        }
    }
    fail("no device has a buffer type of the name", name);
}

// Splits PATTERN=BUFFER_TYPE at the last '=' (a pattern may contain one) and writes a NUL there.
static rule parse_rule(char * text) {
    char * equals = strrchr(text, '=');
    if (equals == NULL) {
        fail("not PATTERN=BUFFER_TYPE", text);
    }
    *equals = '\0';
    return (rule) { text, buffer_type_named(equals + 1) };
}

static long parse_number(const char * text, long low, long high, const char ** end) {
    char * stop;
    errno = 0;
    long value = strtol(text, &stop, 10);
    if (stop == text || errno != 0 || value < low || value > high) {
        fail("not a number in range", text);
    }
    *end = stop;
    return value;
}

static int32_t parse_prompt(const void * vocab, const char * prompt, int32_t * tokens) {
    int32_t n = 0;
    if (prompt[0] != '@') {
        n = llama_tokenize(vocab, prompt, (int32_t) strlen(prompt), tokens, MAX_PROMPT, true, false);
    } else {
        const char * at = prompt;
        do {
            if (n == MAX_PROMPT) {
                fail("prompt too long", prompt);
            }
            tokens[n++] = (int32_t) parse_number(at + 1, 0, llama_vocab_n_tokens(vocab) - 1, &at);
        } while (*at == ',');
    }
    if (n <= 0) {
        fail("cannot make tokens of the prompt", prompt);
    }
    return n;
}

static uint64_t fnv1a(uint64_t hash, const void * data, size_t size) {
    const unsigned char * bytes = data;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static int32_t largest(const float * logits, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 0; i < n; i++) {
        if (isnan(logits[i])) {
            fail("a logit is", "not a number");
        }
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return best;
}

// How many threads this process has.
static int32_t count_threads(void) {
    DIR * tasks = opendir("/proc/self/task");
    if (tasks == NULL) {
        fail("cannot list", "/proc/self/task");
    }
    int32_t n = 0;
    for (const struct dirent * task = readdir(tasks); task != NULL; task = readdir(tasks)) {
        n += task->d_name[0] != '.';
    }
    closedir(tasks);
    return n;
}

// What a context does, and what came of it.
typedef struct {
    void * model;
    const char * path;
    const char * prompt;
    int32_t n_threads;
    bool warmup;
    int32_t steps;
    int32_t generated[MAX_STEPS];
    int32_t most_threads;
    uint64_t hash;
} job;

static void * generate(void * argument) {
    job * j = argument;
    const uint32_t n_ctx = N_CTX;
    blob context_params = blank();
    llama_context_default_params(&context_params);
    made(&context_params, "llama_context_params");
    memcpy(context_params.bytes, &n_ctx, sizeof n_ctx);
    void * context = llama_init_from_model(j->model, context_params);
    if (context == NULL) {
        fail("cannot make a context for", j->path);
    }
    llama_set_n_threads(context, j->n_threads, j->n_threads);
    llama_set_warmup(context, j->warmup);

    const void * vocab = llama_model_get_vocab(j->model);
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    int32_t tokens[MAX_PROMPT];
    int32_t n_tokens = parse_prompt(vocab, j->prompt, tokens);
    j->hash = UINT64_C(0xcbf29ce484222325);
    for (int32_t step = 0; step < j->steps; step++) {
        blob batch = blank();
        llama_batch_get_one(&batch, tokens, n_tokens);
        made(&batch, "llama_batch");
        if (llama_decode(context, batch) != 0) {
            fail("cannot decode", j->path);
        }
        const float * logits = llama_get_logits_ith(context, -1);
        if (logits == NULL) {
            fail("no logits from", j->path);
        }
        const int32_t n_now = count_threads();
        j->most_threads = n_now > j->most_threads ? n_now : j->most_threads;
        j->hash = fnv1a(j->hash, logits, (size_t) n_vocab * sizeof *logits);
        j->generated[step] = largest(logits, n_vocab);
        tokens[0] = j->generated[step];
        n_tokens = 1;
    }
    llama_free(context);
    return NULL;
}

// The value of an option that may come first, which is removed from the arguments.
static long option(int * argc, char *** argv, const char * name, long low, long high) {
    if (*argc < 3 || strcmp((*argv)[1], name) != 0) {
        return low;
    }
    const char * rest;
    long value = parse_number((*argv)[2], low, high, &rest);
    *argc -= 2;
    *argv += 2;
    return value;
}

int main(int argc, char ** argv) {
    const int32_t n_contexts = (int32_t) option(&argc, &argv, "-c", 1, MAX_CONTEXTS);
    const int32_t n_threads = (int32_t) option(&argc, &argv, "-t", 1, 64);
    const bool warmup = option(&argc, &argv, "-w", 0, 1) != 0;
    if (argc < 6 || argc > 6 + MAX_RULES) {
        fprintf(stderr, "usage: greedy [-c CONTEXTS] [-t THREADS] [-w 1] LIBLLAMA BACKEND_DIR MODEL PROMPT N [PATTERN=BUFFER_TYPE ...]\n");
        return 2;
    }
    const char * rest;
    int32_t steps = (int32_t) parse_number(argv[5], 1, MAX_STEPS, &rest);

    find_all(argv[1]);
    ggml_backend_load_all_from_path(argv[2]);
    llama_backend_init();
    list_devices();

    rule rules[MAX_RULES + 1] = { { NULL, NULL } };
    for (int i = 6; i < argc; i++) {
        rules[i - 6] = parse_rule(argv[i]);
    }
    blob model_params = blank();
    llama_model_default_params(&model_params);
    made(&model_params, "llama_model_params");
    memcpy(model_params.bytes + offsetof(model_params_head, tensor_buft_overrides), &(const rule *) { rules }, sizeof(const rule *));
    void * model = llama_model_load_from_file(argv[3], model_params);
    if (model == NULL) {
        fail("cannot load the model", argv[3]);
    }

    if (warmup) {
        static job first;
        first = (job) { .model = model, .path = argv[3], .prompt = argv[4], .n_threads = n_threads, .warmup = true, .steps = 1 };
        generate(&first);
    }
    static job jobs[MAX_CONTEXTS];
    for (int32_t i = 0; i < n_contexts; i++) {
        jobs[i] = (job) { .model = model, .path = argv[3], .prompt = argv[4], .n_threads = n_threads, .steps = steps };
    }
    pthread_t threads[MAX_CONTEXTS];
    for (int32_t i = 1; i < n_contexts; i++) {
        if (pthread_create(&threads[i], NULL, generate, &jobs[i]) != 0) {
            fail("cannot make a thread for", argv[3]);
        }
    }
    generate(&jobs[0]);
    for (int32_t i = 1; i < n_contexts; i++) {
        pthread_join(threads[i], NULL);
    }

    for (int32_t i = 0; i < n_contexts; i++) {
        printf("tokens");
        for (int32_t step = 0; step < steps; step++) {
            printf(" %d", jobs[i].generated[step]);
        }
        printf("\nthreads %d\nlogits %016llx\n", jobs[i].most_threads, (unsigned long long) jobs[i].hash);
    }
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
