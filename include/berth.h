/*
 * Berth: gives every tensor of a mixture-of-experts model its place in host memory.
 *
 * Conventions
 *   - Functions that can fail return an enum berth_status, or a pointer that is NULL on failure; berth_last_error() then says why, for this
 *     thread. Outputs are written only on success.
 *   - Every function may be called from any thread. None aborts or exits the process or throws.
 *   - Numbers of this header never change their meaning and are never reused.
 *   - No ggml is needed in the process, except by functions that return a ggml type.
 *
 * Generated from src/capi by `cargo xtask header`. SPDX-License-Identifier: MIT OR Apache-2.0
 */

#ifndef BERTH_H
#define BERTH_H

#include <stddef.h>
#include <stdint.h>

/* ggml's own types, from ggml-backend.h; opaque here. */
struct ggml_backend_reg;
struct ggml_backend_buffer_type;

/**
 * Outcome of an exported function, as C sees it. Numbers are part of the ABI: they are never changed and never reused.
 */
enum berth_status {
    /**
     * Done.
     */
    BERTH_STATUS_OK = 0,
    /**
     * An argument is NULL, out of range, misaligned or contradicts another one.
     */
    BERTH_STATUS_INVALID_ARGUMENT = 1,
    /**
     * The memory asked for cannot be had.
     */
    BERTH_STATUS_OUT_OF_MEMORY = 2,
    /**
     * The operating system refused an operation on a file or directory.
     */
    BERTH_STATUS_IO = 3,
    /**
     * The file system has too little free space.
     */
    BERTH_STATUS_NO_SPACE = 4,
    /**
     * Asked for something that this build, machine or driver cannot do.
     */
    BERTH_STATUS_UNSUPPORTED = 5,
    /**
     * The ggml in this process does not fit, or there is none.
     */
    BERTH_STATUS_HOST_MISMATCH = 6,
    /**
     * A `BERTH_*` environment variable has a value that is not understood.
     */
    BERTH_STATUS_CONFIG = 7,
    /**
     * A defect of Berth itself, caught before it could reach the host.
     */
    BERTH_STATUS_INTERNAL = 8,
    /**
     * The CUDA driver refused an operation.
     */
    BERTH_STATUS_DRIVER = 9,
    /**
     * The caller's own function asked to stop.
     */
    BERTH_STATUS_CANCELLED = 10,
};

/**
 * Takes a message: level 1 error, 2 warning, 3 information; one line without newline, valid during the call; the pointer given with the
 * function.
 */
typedef void (*berth_log_fn)(int level, const char *line, void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Version of this library, "major.minor.patch". Constant.
 */
const char *berth_version(void);

/**
 * A status in words, without a full stop; "unknown status" for a number that is none. Constant.
 */
const char *berth_status_text(int status);

/**
 * What went wrong in the last call of this thread that failed: one line, "" if none did. It stays valid until the next call that fails on
 * this thread, or the thread ends.
 */
const char *berth_last_error(void);

/**
 * Berth as a ggml backend registry, for `ggml_backend_register`. Needs a ggml of version 0.9.0 or newer in the process, as a shared library.
 * The same pointer at every call. NULL if there is no ggml that fits, or a `BERTH_*` variable has a bad value: see `berth_last_error`.
 */
struct ggml_backend_reg *berth_reg(void);

/**
 * The ggml buffer type `CPU_MMAP`: zero copy over a mapping of the model (through `ggml_backend_dev_buffer_from_host_ptr` with its
 * device), plain host memory otherwise. NULL like `berth_reg`.
 */
struct ggml_backend_buffer_type *berth_buft_cpu_mmap(void);

/**
 * The ggml buffer type `CUDA_Host`: page-locked by the CUDA driver; pageable, with a reason in the report, where that fails. NULL like
 * `berth_reg`.
 */
struct ggml_backend_buffer_type *berth_buft_cuda_host(void);

/**
 * The ggml buffer type `ARENA`: one shared file per buffer in `BERTH_ARENA_DIR`; pageable, with a reason in the report, where that fails.
 * NULL like `berth_reg`.
 */
struct ggml_backend_buffer_type *berth_buft_arena(void);

/**
 * What was asked, got and why, for every buffer of this process, as one JSON object. `*json` is freed with `berth_string_free`.
 *
 * # Safety
 * `json` must be NULL, which is an error, or writable.
 */
enum berth_status berth_report_json(char **json);

/**
 * Frees a string that a function of this library returned. NULL is allowed.
 *
 * # Safety
 * `string` must be NULL, or come from this library and not have been freed.
 */
void berth_string_free(char *string);

/**
 * Sends Berth's messages to `function` instead of standard error or the host's log; NULL goes back to standard error.
 *
 * # Safety
 * `function` must be NULL or callable from any thread, with `user`, until another one is set.
 */
void berth_log_set(berth_log_fn function, void *user);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BERTH_H */
