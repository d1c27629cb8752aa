/*
 * What the C peers share: counted checks, random bytes, the host's log, and Berth loaded as a host loads it.
 *
 * A peer is a C program that knows ggml only through real headers and a real libggml-base, and Berth only as a plug-in. It ends with
 * status 0 and a line "ok: N checks", or with status 1 after a line for every check that failed.
 */
#ifndef PEER_H
#define PEER_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

static unsigned long checks, failures;

#define CHECK(condition, ...)                                                                                                              \
    do {                                                                                                                                   \
        checks++;                                                                                                                          \
        if (!(condition)) {                                                                                                                \
            failures++;                                                                                                                    \
            printf("FAILED at line %d: %s: ", __LINE__, #condition);                                                                       \
            printf(__VA_ARGS__);                                                                                                           \
            printf("\n");                                                                                                                  \
        }                                                                                                                                  \
    } while (0)

/* Ends the program when going on makes no sense. */
#define REQUIRE(condition, ...)                                                                                                            \
    do {                                                                                                                                   \
        CHECK(condition, __VA_ARGS__);                                                                                                     \
        if (failures > 0) {                                                                                                                \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

static inline int finish(void) {
    if (failures > 0) {
        printf("%lu of %lu checks failed\n", failures, checks);
        return 1;
    }
    printf("ok: %lu checks\n", checks);
    return 0;
}

/* splitmix64: any seed is good. */
static uint64_t random_state;

static inline uint64_t random_u64(void) {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A number in [0, n). */
static inline size_t random_below(size_t n) { return n == 0 ? 0 : (size_t)(random_u64() % n); }

static inline void random_bytes(void *to, size_t size) {
    for (size_t i = 0; i < size; i++) {
        ((uint8_t *)to)[i] = (uint8_t)random_u64();
    }
}

/* The host's log: how many lines of each level, and the last one that is an error. */
static unsigned long log_errors, log_warnings;
static char last_error[512];

static inline void on_log(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_WARN) {
        log_warnings++;
    } else if (level == GGML_LOG_LEVEL_ERROR) {
        log_errors++;
        snprintf(last_error, sizeof last_error, "%s", text);
    }
}

/* Runs a statement that Berth must refuse: exactly one error line, and that line is Berth's and contains `word`. */
#define REFUSED(statement, word)                                                                                                           \
    do {                                                                                                                                   \
        unsigned long errors_before = log_errors;                                                                                          \
        last_error[0] = 0;                                                                                                                 \
        statement;                                                                                                                         \
        CHECK(log_errors == errors_before + 1, "%lu error lines from %s", log_errors - errors_before, #statement);                         \
        CHECK(strncmp(last_error, "berth: ", 7) == 0 && strstr(last_error, word), "%s said \"%s\"", #statement, last_error);               \
    } while (0)

/* Opens Berth and gets its registry, in the steps of ggml's own loader. */
static inline ggml_backend_reg_t load_berth(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != NULL, "dlopen: %s", dlerror());
    int (*score)(void) = NULL;
    ggml_backend_reg_t (*init)(void) = NULL;
    *(void **)(&score) = dlsym(library, "ggml_backend_score");
    *(void **)(&init) = dlsym(library, "ggml_backend_init");
    REQUIRE(score != NULL && init != NULL, "the entry points are missing");
    REQUIRE(score() > 0, "refused: %s", last_error);
    ggml_backend_reg_t reg = init();
    REQUIRE(reg != NULL && reg->api_version == GGML_BACKEND_API_VERSION, "no registry of this API version");
    CHECK(init() == reg, "another registry at the second call");
    return reg;
}

#endif
