/*
 * A CUDA driver without a GPU, for tests: the calls Berth makes, over plain memory, failing on command.
 *
 * FAKE_CUDA_LOG=FILE            one line per call: its name and its result
 * FAKE_CUDA_FAIL=NAME:CODE      that call returns that error
 *
 * Prototypes are those of NVIDIA's driver API documentation; a CUresult is an int, 0 is success, 2 is out of memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int done(const char *name, int result) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s %d\n", name, result);
        fclose(log);
    }
    return result;
}

/* The error that FAKE_CUDA_FAIL asks for, or 0. */
static int asked(const char *name) {
    const char *fail = getenv("FAKE_CUDA_FAIL");
    size_t n = strlen(name);
    return fail && strncmp(fail, name, n) == 0 && fail[n] == ':' ? atoi(fail + n + 1) : 0;
}

int cuInit(unsigned flags) {
    (void) flags;
    return done("cuInit", asked("cuInit"));
}

int cuDeviceGet(int *device, int ordinal) {
    int error = asked("cuDeviceGet");
    if (!error) {
        *device = ordinal;
    }
    return done("cuDeviceGet", error);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    int error = asked("cuDevicePrimaryCtxRetain");
    if (!error) {
        *context = (void *) (size_t) (0x1000 + device);
    }
    return done("cuDevicePrimaryCtxRetain", error);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    (void) device;
    return done("cuDevicePrimaryCtxRelease", asked("cuDevicePrimaryCtxRelease"));
}

int cuCtxPushCurrent_v2(void *context) {
    (void) context;
    return done("cuCtxPushCurrent", asked("cuCtxPushCurrent"));
}

int cuCtxPopCurrent_v2(void **context) {
    int error = asked("cuCtxPopCurrent");
    if (!error) {
        *context = NULL;
    }
    return done("cuCtxPopCurrent", error);
}

int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    int error = asked("cuMemHostAlloc");
    (void) flags;
    if (!error) {
        *memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
        error = *memory ? 0 : 2;
    }
    return done("cuMemHostAlloc", error);
}

int cuMemFreeHost(void *memory) {
    int error = asked("cuMemFreeHost");
    if (!error) {
        free(memory);
    }
    return done("cuMemFreeHost", error);
}
