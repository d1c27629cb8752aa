/*
 * A CUDA driver without a GPU, for tests: the calls Berth makes, over plain memory, failing on command. It never touches memory that it locks.
 *
 * FAKE_CUDA_LOG=FILE             one line per call: process, name, result, and its arguments as numbers
 * FAKE_CUDA_FAIL=NAME:CODE[:N],  that call returns that error, always or the N-th time it is made
 * FAKE_CUDA_SLOW=NAME:MS,        that call takes so long
 * FAKE_CUDA_LARGEST=BYTES        larger pieces are out of memory
 * FAKE_CUDA_IN_ALL=BYTES         more than that in all is out of memory
 * FAKE_CUDA_OFFSET=BYTES         what cuMemHostAlloc gives begins so far behind a page, if it is less than a page
 * FAKE_CUDA_ABILITY=NUMBER:VALUE,  what a device attribute is; 1 otherwise
 *
 * It is as strict as the documentation allows: no call before cuInit, none without a context, whole pages only, no page twice, unlocked with the
 * address that it was locked with; and a copy from memory that is locked in part is refused, as is one of pieces that were locked one by one but
 * have a gap. Prototypes are those of NVIDIA's driver API documentation; a CUresult is an int, 0 is success.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, ALREADY = 712, NOT_REGISTERED = 713 };
enum { MOST = 4096, DEPTH = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized, retained;
static struct {
    uintptr_t start;
    size_t size;
    int ours;
} ranges[MOST];
static size_t n_ranges, locked_bytes;
static _Thread_local void *stack[DEPTH];
static _Thread_local int depth;

/* Calls so far of each name, for "the N-th". */
static struct {
    const char *name;
    long calls;
} counts[64];

static long count(const char *name) {
    for (int i = 0; i < 64; i++) {
        if (counts[i].name == NULL || strcmp(counts[i].name, name) == 0) {
            counts[i].name = name;
            return ++counts[i].calls;
        }
    }
    abort();
}

/* The value after "NAME:" in a list, and the one after that if there is one; false if the name is not in it. */
static int in_list(const char *variable, const char *name, long *value, long *nth) {
    const char *at = getenv(variable);
    size_t n = strlen(name);
    for (; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, name, n) == 0 && at[n] == ':') {
            char *end;
            *value = strtol(at + n + 1, &end, 10);
            *nth = *end == ':' ? strtol(end + 1, NULL, 10) : 0;
            return 1;
        }
    }
    return 0;
}

/* Begins a call: waits if it is to be slow. The result is the error that is asked for, or 0. */
static int begin(const char *name) {
    long value, nth;
    pthread_mutex_lock(&lock);
    long number = count(name);
    pthread_mutex_unlock(&lock);
    if (in_list("FAKE_CUDA_SLOW", name, &value, &nth)) {
        nanosleep(&(struct timespec){.tv_sec = value / 1000, .tv_nsec = value % 1000 * 1000000}, NULL);
    }
    return in_list("FAKE_CUDA_FAIL", name, &value, &nth) && (nth == 0 || nth == number) ? (int)value : 0;
}

static int done(const char *name, int result, uintptr_t a, uintptr_t b) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%d %s %d %zu %zu\n", (int)getpid(), name, result, (size_t)a, (size_t)b);
        fclose(log);
    }
    return result;
}

/* What every call but a few needs. */
static int ready(int error) { return error ? error : !initialized ? NOT_INITIALIZED : 0; }

static int in_context(int error) {
    error = ready(error);
    return error ? error : depth == 0 || stack[depth - 1] == NULL || retained == 0 ? INVALID_CONTEXT : 0;
}

static int too_large(size_t size) {
    const char *largest = getenv("FAKE_CUDA_LARGEST"), *all = getenv("FAKE_CUDA_IN_ALL");
    return (largest && size > strtoull(largest, NULL, 10)) || (all && locked_bytes + size > strtoull(all, NULL, 10));
}

int cuInit(unsigned flags) {
    int error = begin("cuInit");
    initialized = error == 0 && flags == 0;
    return done("cuInit", error, flags, 0);
}

int cuDriverGetVersion(int *version) {
    *version = 12040;
    return done("cuDriverGetVersion", begin("cuDriverGetVersion"), 0, 0);
}

int cuDeviceGetCount(int *n) {
    *n = 2;
    return done("cuDeviceGetCount", ready(begin("cuDeviceGetCount")), 0, 0);
}

int cuGetErrorName(int error, const char **name) {
    static const struct {
        int code;
        const char *name;
    } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].code == error) {
            *name = names[i].name;
            return OK;
        }
    }
    *name = NULL;
    return INVALID_VALUE;
}

int cuDeviceGet(int *device, int ordinal) {
    int error = ready(begin("cuDeviceGet"));
    error = error ? error : ordinal < 0 || ordinal > 1 ? 101 : 0;
    if (!error) {
        *device = ordinal;
    }
    return done("cuDeviceGet", error, (uintptr_t)ordinal, 0);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int error = ready(begin("cuDeviceGetAttribute"));
    char name[16];
    long asked, nth;
    snprintf(name, sizeof name, "%d", attribute);
    *value = in_list("FAKE_CUDA_ABILITY", name, &asked, &nth) ? (int)asked : 1;
    return done("cuDeviceGetAttribute", error, (uintptr_t)attribute, (uintptr_t)device);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    int error = ready(begin("cuDevicePrimaryCtxRetain"));
    if (!error) {
        *context = (void *)(size_t)(0x1000 + device);
        retained++;
    }
    return done("cuDevicePrimaryCtxRetain", error, (uintptr_t)device, 0);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    int error = ready(begin("cuDevicePrimaryCtxRelease"));
    if (!error) {
        error = retained > 0 ? 0 : INVALID_CONTEXT;
        retained--;
    }
    return done("cuDevicePrimaryCtxRelease", error, (uintptr_t)device, 0);
}

int cuCtxPushCurrent_v2(void *context) {
    int error = ready(begin("cuCtxPushCurrent"));
    if (!error) {
        error = depth < DEPTH && context ? 0 : INVALID_CONTEXT;
        if (!error) {
            stack[depth++] = context;
        }
    }
    return done("cuCtxPushCurrent", error, (uintptr_t)context, (uintptr_t)depth);
}

int cuCtxPopCurrent_v2(void **context) {
    int error = ready(begin("cuCtxPopCurrent"));
    if (!error) {
        error = depth > 0 ? 0 : INVALID_CONTEXT;
        *context = depth > 0 ? stack[--depth] : NULL;
    }
    return done("cuCtxPopCurrent", error, 0, (uintptr_t)depth);
}

int cuCtxGetCurrent(void **context) {
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return done("cuCtxGetCurrent", ready(begin("cuCtxGetCurrent")), (uintptr_t)*context, 0);
}

/* Adds a range; `ours` says who allocated it. */
static int add(void *start, size_t size, int ours) {
    uintptr_t a = (uintptr_t)start;
    int error = n_ranges == MOST ? OUT_OF_MEMORY : 0;
    for (size_t i = 0; i < n_ranges && !error; i++) {
        if (a < ranges[i].start + ranges[i].size && ranges[i].start < a + size) {
            error = ALREADY;
        }
    }
    if (!error) {
        ranges[n_ranges].start = a;
        ranges[n_ranges].size = size;
        ranges[n_ranges++].ours = ours;
        locked_bytes += size;
    }
    return error;
}

static int take(void *start, int ours, size_t *size) {
    for (size_t i = 0; i < n_ranges; i++) {
        if (ranges[i].start == (uintptr_t)start && ranges[i].ours == ours) {
            *size = ranges[i].size;
            locked_bytes -= *size;
            ranges[i] = ranges[--n_ranges];
            return 0;
        }
    }
    return NOT_REGISTERED;
}

int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    int error = in_context(begin("cuMemHostAlloc"));
    pthread_mutex_lock(&lock);
    if (!error) {
        const char *offset = size < 4096 ? getenv("FAKE_CUDA_OFFSET") : NULL;
        size_t skip = offset ? strtoull(offset, NULL, 10) : 0;
        error = too_large(size) ? OUT_OF_MEMORY : flags != 1 ? INVALID_VALUE : 0;
        char *got = error ? NULL : aligned_alloc(4096, (skip + size + 4095) / 4096 * 4096);
        *memory = got ? got + skip : NULL;
        error = error ? error : *memory ? add(*memory, size, 1) : OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return done("cuMemHostAlloc", error, error ? 0 : (uintptr_t)*memory, size);
}

int cuMemFreeHost(void *memory) {
    int error = in_context(begin("cuMemFreeHost"));
    size_t size = 0;
    pthread_mutex_lock(&lock);
    if (!error) {
        error = take(memory, 1, &size) ? INVALID_VALUE : 0;
        if (!error) {
            free((void *)((uintptr_t)memory / 4096 * 4096));
        }
    }
    pthread_mutex_unlock(&lock);
    return done("cuMemFreeHost", error, (uintptr_t)memory, size);
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    int error = in_context(begin("cuMemHostRegister"));
    pthread_mutex_lock(&lock);
    if (!error) {
        int whole = (uintptr_t)memory % 4096 == 0 && size % 4096 == 0 && size > 0;
        error = !whole || (flags & 1) == 0 ? INVALID_VALUE : too_large(size) ? OUT_OF_MEMORY : add(memory, size, 0);
    }
    pthread_mutex_unlock(&lock);
    return done(flags & 8 ? "cuMemHostRegister-ro" : "cuMemHostRegister", error, (uintptr_t)memory, size);
}

int cuMemHostUnregister(void *memory) {
    int error = in_context(begin("cuMemHostUnregister"));
    size_t size = 0;
    pthread_mutex_lock(&lock);
    error = error ? error : take(memory, 0, &size);
    pthread_mutex_unlock(&lock);
    return done("cuMemHostUnregister", error, (uintptr_t)memory, size);
}

/* Bytes from `at` on that are locked, up to `size`. */
static size_t locked_from(uintptr_t at, size_t size) {
    size_t found = 0;
    for (int more = 1; more && found < size;) {
        more = 0;
        for (size_t i = 0; i < n_ranges; i++) {
            if (ranges[i].start <= at + found && at + found < ranges[i].start + ranges[i].size) {
                found = ranges[i].start + ranges[i].size - at;
                more = 1;
            }
        }
    }
    return found < size ? found : size;
}

int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    int error = ready(begin("cuPointerGetAttribute"));
    pthread_mutex_lock(&lock);
    /* 2: the type of memory; 1 is the host's. Memory that it does not know is an error. */
    if (!error) {
        error = attribute == 2 && locked_from((uintptr_t)pointer, 1) == 1 ? 0 : INVALID_VALUE;
        if (!error) {
            *(unsigned *)data = 1;
        }
    }
    pthread_mutex_unlock(&lock);
    return done("cuPointerGetAttribute", error, (uintptr_t)pointer, (uintptr_t)attribute);
}

int cuMemAlloc_v2(unsigned long long *pointer, size_t size) {
    int error = in_context(begin("cuMemAlloc"));
    if (!error) {
        *pointer = (unsigned long long)(uintptr_t)malloc(size);
        error = *pointer ? 0 : OUT_OF_MEMORY;
    }
    return done("cuMemAlloc", error, size, 0);
}

int cuMemFree_v2(unsigned long long pointer) {
    int error = in_context(begin("cuMemFree"));
    if (!error) {
        free((void *)(uintptr_t)pointer);
    }
    return done("cuMemFree", error, (uintptr_t)pointer, 0);
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) {
    int error = in_context(begin("cuMemcpyHtoD"));
    pthread_mutex_lock(&lock);
    if (!error && size > 0) {
        size_t first = locked_from((uintptr_t)from, size);
        int any = first > 0;
        for (size_t i = 0; i < n_ranges; i++) {
            any |= (uintptr_t)from < ranges[i].start + ranges[i].size && ranges[i].start < (uintptr_t)from + size;
        }
        error = any && first < size ? INVALID_VALUE : 0;
    }
    pthread_mutex_unlock(&lock);
    if (!error && to) {
        memcpy((void *)(uintptr_t)to, from, size);
    }
    return done("cuMemcpyHtoD", error, (uintptr_t)from, size);
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
    int error = in_context(begin("cuMemcpyDtoH"));
    if (!error) {
        memcpy(to, (const void *)(uintptr_t)from, size);
    }
    return done("cuMemcpyDtoH", error, (uintptr_t)to, size);
}

int cuCtxSynchronize(void) { return done("cuCtxSynchronize", in_context(begin("cuCtxSynchronize")), 0, 0); }
