/*
 * CUDA_Host as an engine with a CUDA backend uses it: tensors are set, read, and copied to a device; the current context is the engine's own.
 *
 *     pin_peer LIBBERTH use BYTES TENSORS [BUFFERS]   buffers of that size, filled, checked, copied, freed
 *     pin_peer LIBBERTH mapping FILE                  tensors in a mapping, two buffers over it, freed before it is unmapped
 *     pin_peer LIBBERTH race FILE                     one thread frees a buffer over a mapping while another locks it
 *     pin_peer LIBBERTH fork BYTES                    a child frees what its parent has locked
 *     pin_peer LIBBERTH leave BYTES                   ends without freeing
 *
 * PEER_COPY=0: nothing is copied to a device. PEER_LOG=1: lines of the level INFO are printed.
 */
#include "peer.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static ggml_backend_dev_t device, berth;
static ggml_backend_buffer_type_t type;

/* The driver, if there is one; a context of our own is current. */
static int (*copy)(unsigned long long to, const void *from, size_t size);
static int (*current)(void **context);
static void *context;

static void open_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    const char *wanted = getenv("PEER_COPY");
    if (!driver || (wanted && wanted[0] == '0')) {
        return;
    }
    int (*init)(unsigned) = NULL, (*retain)(void **, int) = NULL, (*push)(void *) = NULL;
    *(void **)(&init) = dlsym(driver, "cuInit");
    *(void **)(&retain) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)(&push) = dlsym(driver, "cuCtxPushCurrent_v2");
    *(void **)(&copy) = dlsym(driver, "cuMemcpyHtoD_v2");
    *(void **)(&current) = dlsym(driver, "cuCtxGetCurrent");
    REQUIRE(init && retain && push && copy && current, "functions of the driver are missing");
    REQUIRE(init(0) == 0 && retain(&context, 1) == 0 && push(context) == 0, "no context");
}

/* The engine's context is as it was. */
static void same_context(void) {
    void *now = NULL;
    if (copy) {
        CHECK(current(&now) == 0 && now == context, "the current context is %p, not %p", now, context);
    }
}

static void copy_whole(const struct ggml_tensor *t) {
    if (copy) {
        int error = copy(0, t->data, ggml_nbytes(t));
        CHECK(error == 0, "%s: the copy to a device failed: %d", t->name, error);
        same_context();
    }
}

enum { STEP = 8 << 20 };
static uint8_t *bytes, *back;

static uint8_t pattern(size_t buffer, size_t tensor, size_t at) { return (uint8_t)(at / STEP * 31 + tensor * 7 + buffer * 3 + 1); }

/* Sets a tensor, or compares it, in pieces. */
static void each_piece(struct ggml_tensor *t, size_t buffer, size_t tensor, bool set) {
    for (size_t at = 0, n; at < ggml_nbytes(t); at += n) {
        n = ggml_nbytes(t) - at < STEP ? ggml_nbytes(t) - at : STEP;
        memset(bytes, pattern(buffer, tensor, at), n);
        if (set) {
            ggml_backend_tensor_set(t, bytes, at, n);
        } else {
            ggml_backend_tensor_get(t, back, at, n);
            CHECK(memcmp(back, bytes, n) == 0, "%s: other bytes at %zu", t->name, at);
        }
    }
}

/* Whether something lies at an address. */
static bool is_mapped(void *at) {
    unsigned char there;
    return mincore((void *)((uintptr_t)at / 4096 * 4096), 1, &there) == 0;
}

static void on_line(enum ggml_log_level level, const char *text, void *user) {
    if (level == GGML_LOG_LEVEL_INFO) {
        printf("info: %s", text);
    }
    on_log(level, text, user);
}

static void use(size_t size, size_t tensors, size_t n) {
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = (n * tensors + 1) * ggml_tensor_overhead(), .no_alloc = true});
    ggml_backend_buffer_t buffers[16];
    struct ggml_tensor **all = calloc(n * tensors, sizeof *all);
    size_t align = ggml_backend_buft_get_alignment(type);
    for (size_t b = 0; b < n; b++) {
        buffers[b] = ggml_backend_buft_alloc_buffer(type, size);
        REQUIRE(buffers[b] != NULL, "no buffer: %s", last_error);
        same_context();
        uint8_t *at = ggml_backend_buffer_get_base(buffers[b]);
        /* Sizes that end nowhere near a page. */
        size_t step = size / tensors / align * align, length = step > align ? step - 7 : step;
        for (size_t i = 0; i < tensors; i++, at += step) {
            struct ggml_tensor *t = all[b * tensors + i] = ggml_new_tensor_1d(context, GGML_TYPE_I8, (int64_t)length);
            ggml_format_name(t, "blk.%zu.ffn_up_exps.%zu", i, b);
            CHECK(ggml_backend_tensor_alloc(buffers[b], t, at) == GGML_STATUS_SUCCESS, "tensor %zu", i);
        }
    }
    for (size_t i = 0; i < n * tensors; i++) {
        each_piece(all[i], i / tensors, i % tensors, true);
    }
    for (size_t i = 0; i < n * tensors; i++) {
        each_piece(all[i], i / tensors, i % tensors, false);
        copy_whole(all[i]);
    }
    size_t stay = 0;
    for (size_t b = 0; b < n; b++) {
        void *base = ggml_backend_buffer_get_base(buffers[b]);
        ggml_backend_buffer_free(buffers[b]);
        stay += is_mapped(base);
        same_context();
    }
    printf("still mapped: %zu\n", stay);
    ggml_free(context);
    free(all);
}

static void mapping(const char *file) {
    int fd = open(file, O_RDONLY);
    struct stat stat;
    REQUIRE(fd >= 0 && fstat(fd, &stat) == 0, "%s", file);
    size_t size = (size_t)stat.st_size, page = 4096;
    uint8_t *base = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    REQUIRE(base != MAP_FAILED, "mmap");
    close(fd);
    /* Eight tensors one after the other, none on a page; the first and the last are others', as for a GPU. */
    enum { N = 8 };
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = (N + 1) * ggml_tensor_overhead(), .no_alloc = true});
    size_t length = (size - 100) / N;
    struct ggml_tensor *all[N];
    for (int i = 0; i < N; i++) {
        all[i] = ggml_new_tensor_1d(context, GGML_TYPE_I8, (int64_t)length);
        ggml_format_name(all[i], "blk.%d.ffn_up_exps", i);
    }
    /* Two buffers that share a page: tensors 1 to 3 and 4 to 6. */
    ggml_backend_buffer_t buffers[2];
    for (int b = 0; b < 2; b++) {
        uint8_t *start = base + 100 + (size_t)(1 + 3 * b) * length;
        buffers[b] = ggml_backend_dev_buffer_from_host_ptr(device, start, 3 * length, length);
        REQUIRE(buffers[b] != NULL, "no buffer over the mapping: %s", last_error);
        for (int i = 1 + 3 * b; i < 4 + 3 * b; i++) {
            CHECK(ggml_backend_tensor_alloc(buffers[b], all[i], base + 100 + (size_t)i * length) == GGML_STATUS_SUCCESS, "tensor %d", i);
        }
    }
    all[0]->data = base + 100;
    all[N - 1]->data = base + 100 + (N - 1) * length;
    /* While the model is loaded others are copied to a device, and then the host unmaps what it does not need: the last pages here. */
    for (int i = 0; i < N; i++) {
        copy_whole(all[i]);
    }
    size_t unmapped = size / page * page - 2 * page;
    REQUIRE(munmap(base + unmapped, size - unmapped) == 0, "munmap");
    ggml_backend_t backend = ggml_backend_dev_init(berth, NULL);
    REQUIRE(backend != NULL, "no backend");
    same_context();
    for (int i = 0; i < N - 1; i++) {
        copy_whole(all[i]);
    }
    for (int b = 0; b < 2; b++) {
        ggml_backend_buffer_free(buffers[b]);
        for (int i = 0; i < N - 1; i++) {
            copy_whole(all[i]);
        }
    }
    ggml_backend_free(backend);
    munmap(base, unmapped);
    ggml_free(context);
}

static ggml_backend_buffer_t racing;

/* Frees the buffer as soon as its pages are being locked, notes that in the log of the driver, and unmaps what it lay over. */
static void *free_while_locked(void *base) {
    const char *path = getenv("FAKE_CUDA_LOG");
    REQUIRE(path != NULL, "no log");
    for (bool under_way = false; !under_way; usleep(1000)) {
        char line[256];
        FILE *log = fopen(path, "r");
        while (log && fgets(line, sizeof line, log)) {
            under_way |= strstr(line, "cuCtxPushCurrent") != NULL;
        }
        if (log) {
            fclose(log);
        }
    }
    ggml_backend_buffer_free(racing);
    FILE *log = fopen(path, "a");
    REQUIRE(log != NULL, "%s", path);
    fprintf(log, "%d freed 0 0 0\n", (int)getpid());
    fclose(log);
    munmap(base, 1 << 20);
    return NULL;
}

static void race(const char *file) {
    int fd = open(file, O_RDONLY);
    REQUIRE(fd >= 0, "%s", file);
    void *base = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, fd, 0);
    REQUIRE(base != MAP_FAILED, "mmap");
    close(fd);
    racing = ggml_backend_dev_buffer_from_host_ptr(device, base, 1 << 20, 1 << 20);
    REQUIRE(racing != NULL, "no buffer over the mapping: %s", last_error);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, free_while_locked, base) == 0, "no thread");
    ggml_backend_t backend = ggml_backend_dev_init(berth, NULL);
    REQUIRE(backend != NULL, "no backend");
    pthread_join(thread, NULL);
    ggml_backend_free(backend);
}

static void in_a_child(size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, size);
    REQUIRE(buffer != NULL, "no buffer: %s", last_error);
    pid_t child = fork();
    if (child == 0) {
        ggml_backend_buffer_free(buffer);
        ggml_backend_buffer_t another = ggml_backend_buft_alloc_buffer(type, size);
        CHECK(another != NULL, "no buffer in the child: %s", last_error);
        ggml_backend_buffer_clear(another, 1);
        ggml_backend_buffer_free(another);
        _exit(failures > 0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %d", status);
    ggml_backend_buffer_free(buffer);
}

int main(int argc, char **argv) {
    REQUIRE(argc >= 4, "usage: see the top of the file");
    ggml_log_set(getenv("PEER_LOG") ? on_line : on_log, NULL);
    bytes = malloc(STEP);
    back = malloc(STEP);
    open_driver();
    ggml_backend_reg_t reg = load_berth(argv[1]);
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
        ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, i);
        berth = i == 0 ? dev : berth;
        if (strcmp(ggml_backend_buft_name(ggml_backend_dev_buffer_type(dev)), "CUDA_Host") == 0) {
            device = dev;
            type = ggml_backend_dev_buffer_type(dev);
        }
    }
    REQUIRE(type != NULL, "no CUDA_Host");
    if (strcmp(argv[2], "use") == 0) {
        use(strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10), argc > 5 ? strtoull(argv[5], NULL, 10) : 1);
    } else if (strcmp(argv[2], "mapping") == 0) {
        mapping(argv[3]);
    } else if (strcmp(argv[2], "race") == 0) {
        race(argv[3]);
    } else if (strcmp(argv[2], "fork") == 0) {
        in_a_child(strtoull(argv[3], NULL, 10));
    } else {
        CHECK(ggml_backend_buft_alloc_buffer(type, strtoull(argv[3], NULL, 10)) != NULL, "no buffer: %s", last_error);
    }
    printf("warnings: %lu\nerrors: %lu\n", log_warnings, log_errors);
    free(bytes);
    free(back);
    return finish();
}
