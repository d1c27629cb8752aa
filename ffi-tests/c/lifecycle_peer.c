/*
 * Berth's life in a process: loaded many times, unloaded, loaded again, outlived by buffers, used by many threads at once.
 *
 *     lifecycle_peer LIBBERTH SEED reload|outlive|exit|quick|fork|threads [CYCLES]
 *
 * CYCLES is how often it is unloaded and loaded again by `reload`, 10 if it is not given; with 20 or more, the process must not grow either.
 * Linked with the real libggml and libggml-base; loads Berth as GGML_BACKEND_PATH does, with ggml_backend_load.
 */
#include "peer.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_TYPES = 3, N_THREADS = 8, SIZE = 300000 };

static const char *library;

/* One tensor of SIZE bytes in a buffer of its own, and a copy of its bytes. */
struct block {
    ggml_backend_buffer_t buffer;
    struct ggml_context *context;
    struct ggml_tensor *tensor;
    uint8_t *bytes;
};

static struct block make_block(ggml_backend_reg_t reg, size_t type, uint64_t seed) {
    struct block b = {.bytes = malloc(SIZE)};
    b.context = ggml_init((struct ggml_init_params){.mem_size = 2 * ggml_tensor_overhead(), .no_alloc = true});
    b.tensor = ggml_new_tensor_1d(b.context, GGML_TYPE_I8, SIZE);
    b.buffer = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(reg, type)), SIZE);
    REQUIRE(b.buffer != NULL, "no buffer: %s", last_error);
    ggml_backend_tensor_alloc(b.buffer, b.tensor, ggml_backend_buffer_get_base(b.buffer));
    for (size_t i = 0; i < SIZE; i++) {
        b.bytes[i] = (uint8_t)((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
    }
    ggml_backend_tensor_set(b.tensor, b.bytes, 0, SIZE);
    return b;
}

static bool holds(const struct block *b) {
    uint8_t *back = malloc(SIZE);
    ggml_backend_tensor_get(b->tensor, back, 0, SIZE);
    bool same = memcmp(back, b->bytes, SIZE) == 0;
    free(back);
    return same;
}

static void free_block(struct block *b) {
    ggml_backend_buffer_free(b->buffer);
    ggml_free(b->context);
    free(b->bytes);
}

static ggml_backend_reg_t load(void) {
    ggml_backend_reg_t reg = ggml_backend_load(library);
    REQUIRE(reg != NULL, "not loaded: %s", last_error);
    return reg;
}

/* Berth's different devices. Old hosts list a registry, and its devices, once more for every load. */
static size_t count_devices(ggml_backend_reg_t reg) {
    ggml_backend_dev_t seen[2 * N_TYPES];
    size_t n = 0;
    for (size_t i = 0; i < ggml_backend_dev_count() && n < 2 * N_TYPES; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        bool known = ggml_backend_dev_backend_reg(device) != reg;
        for (size_t j = 0; j < n; j++) {
            known |= seen[j] == device;
        }
        if (!known) {
            seen[n++] = device;
        }
    }
    return n;
}

static void unload(ggml_backend_reg_t reg) {
    while (ggml_backend_reg_by_name("BERTH") != NULL) {
        ggml_backend_unload(reg);
    }
}

/* What a process holds that must not grow: KiB of memory, open files, threads, mappings. */
struct held {
    unsigned long resident, files, threads, mappings;
};

static struct held held(void) {
    struct held h = {0};
    /* No buffer of the C library's that is sometimes there: what is measured must not change it. */
    static char line[4096];
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL) {
        sscanf(line, "VmRSS: %lu", &h.resident);
        sscanf(line, "Threads: %lu", &h.threads);
    }
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        h.mappings++;
    }
    DIR *files = opendir("/proc/self/fd");
    while (files != NULL && readdir(files) != NULL) {
        h.files++;
    }
    REQUIRE(status != NULL && maps != NULL && files != NULL && h.resident > 0, "no /proc");
    fclose(status);
    fclose(maps);
    closedir(files);
    h.files -= 5; /* ".", "..", and the three that were open for this */
    return h;
}

static void test_reload(int cycles) {
    ggml_backend_reg_t reg = load();
    struct held half = {0};
    for (int i = 0; i < 10; i++) {
        CHECK(load() == reg, "another registry at load %d", i);
        CHECK(count_devices(reg) == N_TYPES, "%zu devices after load %d", count_devices(reg), i);
    }
    for (int i = 0; i < cycles; i++) {
        if (i == cycles / 2) {
            half = held();
        }
        unload(reg);
        CHECK(count_devices(reg) == 0 && ggml_backend_dev_by_name("ARENA") == NULL, "still there after unload %d", i);
        CHECK(load() == reg, "another registry after unload %d", i);
        CHECK(count_devices(reg) == N_TYPES, "%zu devices after unload %d", count_devices(reg), i);
        for (size_t type = 0; type < N_TYPES; type++) {
            struct block b = make_block(reg, type, random_u64());
            CHECK(holds(&b), "bytes in cycle %d", i);
            free_block(&b);
        }
    }
    struct held end = held();
    printf("%d cycles: RSS %lu to %lu KiB in the second half, %lu to %lu open files, %lu to %lu threads, %lu to %lu mappings\n", cycles, half.resident,
           end.resident, half.files, end.files, half.threads, end.threads, half.mappings, end.mappings);
    CHECK(end.files == half.files && end.threads == half.threads, "open files or threads are left");
    /* The heap takes a step now and then in the first dozens. */
    if (cycles >= 100) {
        CHECK(end.resident * 100 <= half.resident * 102, "memory grew");
        CHECK(end.mappings <= half.mappings, "mappings are left");
    }
}

/* The host closes the library; what it handed out goes on working. */
static void test_outlive(void) {
    ggml_backend_reg_t reg = load();
    struct block blocks[N_TYPES];
    for (size_t i = 0; i < N_TYPES; i++) {
        blocks[i] = make_block(reg, i, random_u64());
    }
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), NULL);
    unload(reg);
    CHECK(strcmp(ggml_backend_name(backend), "BERTH") == 0, "the backend's name");
    ggml_backend_free(backend);
    for (size_t i = 0; i < N_TYPES; i++) {
        CHECK(holds(&blocks[i]), "bytes of type %zu after the unload", i);
        ggml_backend_buffer_clear(blocks[i].buffer, 9);
        memset(blocks[i].bytes, 9, SIZE);
        CHECK(holds(&blocks[i]), "clear of type %zu after the unload", i);
    }
    free_block(&blocks[0]);
    CHECK(load() == reg, "another registry");
    for (size_t i = 1; i < N_TYPES; i++) {
        CHECK(holds(&blocks[i]), "bytes of type %zu after the second load", i);
        free_block(&blocks[i]);
    }
}

/* The process ends with buffers alive: by return from main, and by _exit, which runs no destructor. */
static void leave_alive(void) {
    static struct block blocks[N_TYPES];
    ggml_backend_reg_t reg = load();
    for (size_t i = 0; i < N_TYPES; i++) {
        blocks[i] = make_block(reg, i, random_u64());
        CHECK(holds(&blocks[i]), "bytes of type %zu", i);
    }
}

/* A child of fork frees what it inherited and ends; the parent's buffers stay. */
static void test_fork(void) {
    struct block blocks[N_TYPES];
    ggml_backend_reg_t reg = load();
    for (size_t i = 0; i < N_TYPES; i++) {
        blocks[i] = make_block(reg, i, random_u64());
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < N_TYPES; i++) {
            CHECK(holds(&blocks[i]), "the child's bytes of type %zu", i);
            free_block(&blocks[i]);
        }
        struct block own = make_block(reg, 2, random_u64());
        CHECK(holds(&own), "the child's own bytes");
        free_block(&own);
        exit(failures > 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x", (unsigned)status);
    for (size_t i = 0; i < N_TYPES; i++) {
        CHECK(holds(&blocks[i]), "bytes of type %zu after the child", i);
        free_block(&blocks[i]);
    }
}

static pthread_barrier_t barrier;
static void *first_reg[N_THREADS];
static unsigned long wrong;

static void *first_load(void *index) {
    /* ggml's own list of backends is not for many threads at once before Berth is in it, so the entry points are called directly. */
    pthread_barrier_wait(&barrier);
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void *(*init)(void) = NULL;
    *(void **)(&init) = dlsym(handle, "ggml_backend_init");
    first_reg[(size_t)index] = init();
    pthread_barrier_wait(&barrier);
    dlclose(handle);
    return NULL;
}

static void *work(void *index) {
    pthread_barrier_wait(&barrier);
    for (size_t i = 0; i < 12; i++) {
        ggml_backend_reg_t reg = ggml_backend_load(library);
        if (reg != (ggml_backend_reg_t)first_reg[0]) {
            __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
            break;
        }
        struct block b = make_block(reg, (i + (size_t)index) % N_TYPES, (size_t)index * 1000 + i);
        if (!holds(&b)) {
            __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
        }
        free_block(&b);
    }
    return NULL;
}

static void on_all_threads(void *(*body)(void *)) {
    pthread_t threads[N_THREADS];
    for (size_t i = 0; i < N_THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, body, (void *)i) == 0, "no thread");
    }
    for (size_t i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void test_threads(void) {
    pthread_barrier_init(&barrier, NULL, N_THREADS);
    on_all_threads(first_load);
    for (size_t i = 0; i < N_THREADS; i++) {
        CHECK(first_reg[i] != NULL && first_reg[i] == first_reg[0], "thread %zu got another registry", i);
    }
    CHECK(load() == first_reg[0], "another registry through the host");
    on_all_threads(work);
    CHECK(wrong == 0, "%lu threads read wrong bytes or another registry", wrong);
    pthread_barrier_destroy(&barrier);
}

int main(int argc, char **argv) {
    REQUIRE(argc == 4 || argc == 5, "usage: lifecycle_peer LIBBERTH SEED TEST [CYCLES]");
    library = argv[1];
    random_state = strtoull(argv[2], NULL, 10);
    ggml_log_set(on_log, NULL);
    const char *test = argv[3];
    if (strcmp(test, "reload") == 0) {
        int cycles = argc == 5 ? atoi(argv[4]) : 10;
        REQUIRE(cycles >= 2, "%d cycles", cycles);
        test_reload(cycles);
    } else if (strcmp(test, "outlive") == 0) {
        test_outlive();
    } else if (strcmp(test, "exit") == 0) {
        leave_alive();
    } else if (strcmp(test, "quick") == 0) {
        leave_alive();
        int status = finish();
        fflush(stdout);
        _exit(status);
    } else if (strcmp(test, "fork") == 0) {
        test_fork();
    } else if (strcmp(test, "threads") == 0) {
        test_threads();
    } else {
        REQUIRE(false, "no test %s", test);
    }
    CHECK(log_errors == 0, "an error line: %s", last_error);
    return finish();
}
