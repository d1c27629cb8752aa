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

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ggml's own types, from ggml-backend.h; opaque here. */
struct ggml_backend_reg;
struct ggml_backend_buffer_type;
struct ggml_backend_buffer;

/**
 * The routing weight of a choice multiplies the input of gate and up (their biases come after), not the output of down.
 */
#define BERTH_MOE_WEIGHT_FIRST 1

/**
 * `up` holds `2 * f` rows per expert: those of gate, then those of up. Its bias has as many values; its scale is that of both. `gate` is
 * empty.
 */
#define BERTH_MOE_MERGED_GATE_UP 2

/**
 * The weights lie in a file that may be larger than memory: `berth_moe_forward` asks for those that are missing before it computes. With
 * `BERTH_READAHEAD=off` it does not. Weights that cannot be read (a file that was truncated) are then `BERTH_STATUS_IO` where the kernel can
 * tell, instead of a signal. Where weights are missing of a model larger than memory, memory of up to a 64th of the mapped files and 128 MiB is
 * allocated for them, which is given back when nothing has been missing for 64 calls (not with `BERTH_DIRECT=off`).
 */
#define BERTH_MOE_READ_AHEAD 4

/**
 * Alignment of a workspace, in bytes.
 */
#define BERTH_WORKSPACE_ALIGNMENT 64

/**
 * It may be missing from the model.
 */
#define BERTH_TENSOR_NOT_REQUIRED 1

/**
 * It is used a second time, elsewhere in the model; token embeddings then act as the output matrix.
 */
#define BERTH_TENSOR_DUPLICATED 2

/**
 * It is in the model but not wanted.
 */
#define BERTH_TENSOR_SKIP 4

/**
 * Its rows may be read when they are needed.
 */
#define BERTH_TENSOR_READ_LAZY 8

/**
 * It is not in the model (`berth_decide` only; a loader knows).
 */
#define BERTH_TENSOR_MISSING 16

/**
 * Most threads of a computation.
 */
#define BERTH_MAX_THREADS 1024

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
    /**
     * A file or a tensor of that name does not exist.
     */
    BERTH_STATUS_NOT_FOUND = 11,
    /**
     * A file is damaged, incomplete, or not what it claims to be.
     */
    BERTH_STATUS_BAD_FILE = 12,
};

/**
 * Where the bytes of a tensor lie.
 */
enum berth_memory {
    /**
     * Nowhere: the tensor is not made.
     */
    BERTH_MEMORY_NONE = 0,
    /**
     * In the file's mapping: no copy, and the kernel may drop the pages.
     */
    BERTH_MEMORY_MAPPED = 1,
    /**
     * Copied into ordinary memory.
     */
    BERTH_MEMORY_PAGEABLE = 2,
    /**
     * Copied into page-locked memory.
     */
    BERTH_MEMORY_PINNED = 3,
    /**
     * Copied into a file of Berth.
     */
    BERTH_MEMORY_ARENA = 4,
    /**
     * Copied into ordinary memory in another order, by llama.cpp's CPU backend. Only `berth_decide` says so; a loader keeps the file's order.
     */
    BERTH_MEMORY_REPACKED = 5,
    /**
     * Copied to a device.
     */
    BERTH_MEMORY_DEVICE = 6,
};

/**
 * What is done between the two products of an expert: `g` is a value of the gate product, `u` of the up product.
 */
enum berth_activation {
    /**
     * `silu(g) * u`.
     */
    BERTH_ACTIVATION_SWIGLU = 0,
    /**
     * `m * sigmoid(alpha * m) * (clamp(u, -limit, limit) + 1)` with `m = min(g, limit)`.
     */
    BERTH_ACTIVATION_SWIGLU_OAI = 1,
    /**
     * `silu(min(g, limit)) * clamp(u, -limit, limit)`.
     */
    BERTH_ACTIVATION_SWIGLU_CLAMP = 2,
    /**
     * `gelu(g) * u`, GELU with the hyperbolic tangent.
     */
    BERTH_ACTIVATION_GEGLU = 3,
    /**
     * `gelu(g) * u`, GELU with the error function.
     */
    BERTH_ACTIVATION_GEGLU_ERF = 4,
    /**
     * `g * sigmoid(1.702 * g) * u`.
     */
    BERTH_ACTIVATION_GEGLU_QUICK = 5,
    /**
     * `max(g, 0) * u`.
     */
    BERTH_ACTIVATION_REGLU = 6,
    /**
     * `silu(u)`; there is no gate.
     */
    BERTH_ACTIVATION_SILU = 7,
    /**
     * `gelu(u)` with the hyperbolic tangent; there is no gate.
     */
    BERTH_ACTIVATION_GELU = 8,
    /**
     * `max(u, 0)`; there is no gate.
     */
    BERTH_ACTIVATION_RELU = 9,
    /**
     * `max(u, 0)^2`; there is no gate.
     */
    BERTH_ACTIVATION_RELU_SQR = 10,
};

/**
 * Memory in one file, from which pieces are taken. From any number of threads, until it is closed.
 */
struct berth_arena;

/**
 * A model on its way into memory. One thread at a time.
 */
struct berth_loader;

/**
 * Threads that wait, without using the processor, for work.
 */
struct berth_pool;

/**
 * An ordered list of rules. It may not be changed once a loader uses it, nor by one thread while another uses it.
 */
struct berth_rules;

/**
 * What went wrong in the last call of this thread that failed, and where.
 */
struct berth_error_info {
    /**
     * `sizeof(struct berth_error_info)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Its class.
     */
    enum berth_status status;
    /**
     * Number of the rule that is at fault, from 1, among all: those that were there before the call come first. 0 if none is.
     */
    size_t rule;
    /**
     * Column of the fault in the text of the rules, from 1, in characters; 0 if there is none.
     */
    size_t column;
    /**
     * Offset of the fault in the file, in bytes; meaningful if `in_file`.
     */
    uint64_t offset;
    /**
     * Whether the fault is at a byte of a file; not if the file as a whole is at fault: it cannot be opened, has changed, or is another part.
     */
    bool in_file;
    /**
     * The same as `berth_last_error()`.
     */
    const char *message;
};

/**
 * Gives the address of the function of ggml that is called `name`, or of GNU's `GOMP_parallel`; NULL if there is none. The pointer given with the
 * function.
 */
typedef void *(*berth_symbol_fn)(const char *name, void *user);

/**
 * Takes a message: level 1 error, 2 warning, 3 information; one line without newline, valid during the call; the pointer given with the
 * function.
 */
typedef void (*berth_log_fn)(int level, const char *line, void *user);

/**
 * A device that layers may go to.
 */
struct berth_device {
    /**
     * Name of its buffer type, for example "CUDA0". As in `berth_rules_new`; that of another device, `CPU`, or one of Berth's is an error, in
     * whatever case of letters.
     */
    const char *name;
    /**
     * Name of its page-locked host buffer type, for example "CUDA_Host"; NULL if it has none, and not empty.
     */
    const char *host_type;
    /**
     * Its share of the layers: free memory, or what `--tensor-split` says. Finite and not negative.
     */
    float share;
};

/**
 * The circumstances of a load. `berth_load_init` fills in what llama.cpp starts with on a machine without a GPU.
 */
struct berth_load {
    /**
     * `sizeof(struct berth_load)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Devices in llama.cpp's order; NULL if there are none.
     */
    const struct berth_device *devices;
    /**
     * How many.
     */
    size_t n_devices;
    /**
     * How many layers, counted from the last, and the output behind them go to devices (`-ngl`); -1: all.
     */
    int32_t gpu_layers;
    /**
     * Layers of the model; 0 in a loader: as the model says. With devices, 0 is an error, unless `gpu_layers` is 0.
     */
    uint32_t layers;
    /**
     * Experts per layer; 0 in a loader: as the model says.
     */
    uint32_t experts;
    /**
     * Experts used per token; likewise.
     */
    uint32_t experts_used;
    /**
     * Batches of at least this many tokens are computed on a device even if the weights are in host memory; -1: never.
     */
    int32_t offload_min_batch;
    /**
     * Whether the file is mapped.
     */
    bool mmap;
    /**
     * `--no-host`: a device's host buffer type is not considered.
     */
    bool no_host;
    /**
     * Whether llama.cpp's CPU backend may interleave weights: 0 no, 1 as with AVX2, 2 as with AVX-512. `berth_decide` tells then which ones it
     * would; in a loader, which does not interleave, anything but 0 is an error.
     */
    uint8_t repack;
    /**
     * `--lazy-mode`: 0 auto, 1 off, 2 on.
     */
    uint8_t lazy;
    /**
     * `BERTH_AUTO`: Berth's compute device takes experts that would go to the CPU.
     */
    bool auto_experts;
};

/**
 * A tensor of a loader. It belongs to the loader, and is up to date after every call of it.
 */
struct berth_tensor {
    /**
     * Name, as in the model.
     */
    const char *name;
    /**
     * `enum ggml_type`.
     */
    uint32_t ggml_type;
    /**
     * Part of a split model, from 0.
     */
    uint32_t part;
    /**
     * Elements per dimension, innermost first.
     */
    int64_t ne[4];
    /**
     * Stride per dimension in bytes, innermost first.
     */
    size_t nb[4];
    /**
     * Bytes of the data.
     */
    size_t bytes;
    /**
     * Offset of the data in its file.
     */
    uint64_t offset;
    /**
     * The data, after `berth_loader_alloc`; NULL before, and for a tensor on a device. Complete after `berth_loader_fill`; at once, if
     * `memory` is `BERTH_MEMORY_MAPPED`, and then read-only.
     */
    void *data;
    /**
     * Name of the place, as in `-ot`.
     */
    const char *target;
    /**
     * Where its bytes lie.
     */
    enum berth_memory memory;
    /**
     * Index of the rule that won, from 0; -1 if none did.
     */
    int32_t rule;
    /**
     * Whether the place is the one that a rule names, kept as it is.
     */
    bool buft_overridden;
    /**
     * Whether the choice was page-locked memory, and became the mapping because there is one.
     */
    bool downgraded;
    /**
     * Why, as a stable code. Constant.
     */
    const char *reason;
    /**
     * Why, as a sentence. Constant.
     */
    const char *reason_text;
};

/**
 * Takes the bytes read and the bytes to read; returns false to cancel. The pointer given with the function.
 */
typedef bool (*berth_progress_fn)(uint64_t done, uint64_t total, void *user);

/**
 * The weights of one projection, for all experts: rows of quantised blocks in ggml's layout, at any address. Zeros mean that it is not
 * there.
 */
struct berth_moe_weights {
    /**
     * The first block.
     */
    const void *data;
    /**
     * Bytes that may be read from `data` on. No byte behind the last block is read.
     */
    size_t size;
    /**
     * `enum ggml_type`; see `berth_moe_type_supported`.
     */
    uint32_t ggml_type;
    /**
     * Must be 0.
     */
    uint32_t reserved;
    /**
     * Bytes from one row to the next; 0 if they follow each other.
     */
    size_t row_stride;
    /**
     * Bytes from one expert to the next; 0 if they follow each other.
     */
    size_t expert_stride;
    /**
     * A factor of the product per expert, `n_expert` values; NULL is 1.
     */
    const float *scale;
    /**
     * Added to the scaled product: for each expert as many values as it has rows; NULL is 0.
     */
    const float *bias;
    /**
     * Bytes from one expert's bias to the next; 0 if they follow each other.
     */
    size_t bias_stride;
};

/**
 * The experts of one block: `y = sum_j w[j] * down[ids[j]] . act(gate[ids[j]] . x, up[ids[j]] . x)` for each token.
 */
struct berth_moe_desc {
    /**
     * `sizeof(struct berth_moe_desc)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Length of a token's vector, `n_embd`.
     */
    size_t d;
    /**
     * Length of the vector inside an expert, `n_ff_exp`.
     */
    size_t f;
    /**
     * Length of the result; 0 is `d`.
     */
    size_t d_out;
    /**
     * Number of experts.
     */
    size_t n_expert;
    /**
     * `enum berth_activation`.
     */
    uint32_t activation;
    /**
     * `BERTH_MOE_*` bits.
     */
    uint32_t flags;
    /**
     * Of `BERTH_ACTIVATION_SWIGLU_OAI`; finite. Not read otherwise.
     */
    float alpha;
    /**
     * Of `BERTH_ACTIVATION_SWIGLU_OAI` and `BERTH_ACTIVATION_SWIGLU_CLAMP`; above 0. Not read otherwise.
     */
    float limit;
    /**
     * `[d, f, n_expert]`, for gated activations; else empty.
     */
    struct berth_moe_weights gate;
    /**
     * `[d, f, n_expert]`.
     */
    struct berth_moe_weights up;
    /**
     * `[f, d_out, n_expert]`.
     */
    struct berth_moe_weights down;
};

/**
 * The tokens of one call, and its memory. Strides are in bytes, multiples of 4; 0 means that one follows the other.
 */
struct berth_moe_io {
    /**
     * `sizeof(struct berth_moe_io)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Number of tokens; 0 is no work.
     */
    size_t n_tokens;
    /**
     * Experts per token.
     */
    size_t n_used;
    /**
     * The vectors of the tokens.
     */
    const float *x;
    /**
     * Vectors per token: 1 (or 0), read by all its experts, or `n_used`, one for each.
     */
    size_t x_rows;
    /**
     * From one vector of a token to the next.
     */
    size_t x_row_stride;
    /**
     * From one token's first vector to the next token's.
     */
    size_t x_token_stride;
    /**
     * `n_used` expert numbers for each token, each from 0 to `n_expert - 1`; one may occur twice.
     */
    const int32_t *ids;
    /**
     * From one token's ids to the next.
     */
    size_t ids_stride;
    /**
     * A routing weight for each id; NULL is 1. Not read by `berth_mul_mat_id`.
     */
    const float *weights;
    /**
     * From one token's weights to the next.
     */
    size_t weights_stride;
    /**
     * The results: of `berth_moe_forward`, one vector per token; of `berth_mul_mat_id`, `n_used`. May lie on `x`, `ids` and `weights`: all
     * input is read before the first output is written. No byte between the vectors is written.
     */
    float *y;
    /**
     * From one vector of a token to the next. Not read by `berth_moe_forward`.
     */
    size_t y_row_stride;
    /**
     * From one token's first vector to the next token's.
     */
    size_t y_token_stride;
    /**
     * Memory for the time of the call, aligned to `BERTH_WORKSPACE_ALIGNMENT`. What it holds does not matter.
     */
    void *workspace;
    /**
     * Its size; at least what `berth_moe_workspace_size` or `berth_mul_mat_id_workspace_size` says.
     */
    size_t workspace_size;
};

/**
 * What a parallel-for has to call: with `task`, as it was given, and the number of the call.
 */
typedef void (*berth_task_fn)(void *task, size_t index);

/**
 * A parallel-for: calls `call(task, index)` once for each index from 0 to `count - 1`, on any threads, in any order, at once or not, and
 * returns when all these calls have returned. It must not throw, nor leave by longjmp.
 */
typedef void (*berth_run_fn)(void *context, size_t count, berth_task_fn call, void *task);

/**
 * On whose threads a computation runs: a pool of this library, or the caller's. Results do not depend on it.
 */
struct berth_threads {
    /**
     * `sizeof(struct berth_threads)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Threads made by `berth_pool_new`; NULL if `run` is set.
     */
    struct berth_pool *pool;
    /**
     * The caller's parallel-for; NULL if `pool` is set.
     */
    berth_run_fn run;
    /**
     * Handed to `run`.
     */
    void *context;
    /**
     * How many calls `run` is asked for: as many as it has threads, from 1 to `BERTH_MAX_THREADS`. Not read with a pool.
     */
    size_t count;
};

/**
 * One projection alone: ggml's `MUL_MAT_ID`.
 */
struct berth_mul_mat_id_desc {
    /**
     * `sizeof(struct berth_mul_mat_id_desc)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Length of a row of weights and of the vectors it is multiplied with.
     */
    size_t k;
    /**
     * Rows per expert: length of a product.
     */
    size_t rows;
    /**
     * Number of experts.
     */
    size_t n_expert;
    /**
     * `[k, rows, n_expert]`, without scale and bias.
     */
    struct berth_moe_weights weights;
};

/**
 * Activations alone, row by row: ggml's `GLU`. Strides are in bytes, multiples of 4; 0 means that one row follows the other.
 */
struct berth_glu_desc {
    /**
     * `sizeof(struct berth_glu_desc)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Values in a row.
     */
    size_t width;
    /**
     * Number of rows; 0 is no work.
     */
    size_t rows;
    /**
     * `enum berth_activation`.
     */
    uint32_t activation;
    /**
     * Must be 0.
     */
    uint32_t reserved;
    /**
     * As in `struct berth_moe_desc`.
     */
    float alpha;
    /**
     * As in `struct berth_moe_desc`.
     */
    float limit;
    /**
     * The gate product, for gated activations; else NULL.
     */
    const float *gate;
    /**
     * From one row of `gate` to the next.
     */
    size_t gate_stride;
    /**
     * The up product.
     */
    const float *up;
    /**
     * From one row of `up` to the next.
     */
    size_t up_stride;
    /**
     * The result. May be `gate` or `up` itself, with the same stride, also where these lie in one matrix, row beside row.
     */
    float *out;
    /**
     * From one row of `out` to the next.
     */
    size_t out_stride;
};

/**
 * A tensor to be decided on.
 */
struct berth_tensor_desc {
    /**
     * `sizeof(struct berth_tensor_desc)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Name, as in the model.
     */
    const char *name;
    /**
     * Elements per dimension, innermost first; 1 for those it has not. None of them negative.
     */
    int64_t ne[4];
    /**
     * `enum ggml_type`. A format that Berth does not know has no size here, so it is never too large to be read at once.
     */
    uint32_t ggml_type;
    /**
     * `BERTH_TENSOR_*` bits.
     */
    uint32_t flags;
};

/**
 * Where a tensor goes, and why.
 */
struct berth_decision {
    /**
     * `sizeof(struct berth_decision)`, set by the caller.
     */
    size_t struct_size;
    /**
     * Name of the place, as in `-ot`; "" if the tensor is not made. Cut if it is longer than this.
     */
    char target[64];
    /**
     * Where its bytes lie then.
     */
    enum berth_memory memory;
    /**
     * Index of the rule that won, from 0; -1 if none did.
     */
    int32_t rule;
    /**
     * Whether the place is the one that a rule names, kept as it is. Not for `CPU`, which is taken as a wish.
     */
    bool buft_overridden;
    /**
     * Whether the choice was page-locked memory, and became the mapping because there is one.
     */
    bool downgraded;
    /**
     * Why, as a stable code. Constant.
     */
    const char *reason;
    /**
     * Why, as a sentence. Constant.
     */
    const char *reason_text;
    /**
     * Batches of at least this many tokens are computed on a device; 0 if never.
     */
    uint32_t offload_min_batch;
    /**
     * Hint for experts: below this many tokens an expert sees fewer rows on average than that; 0 if it does not apply.
     */
    uint32_t offload_expert_hint;
};

/**
 * One rule.
 */
struct berth_rule {
    /**
     * `sizeof(struct berth_rule)`, set by the caller.
     */
    size_t struct_size;
    /**
     * The regular expression (ECMAScript, searched for anywhere in the tensor's name). Valid until the rules are freed.
     */
    const char *pattern;
    /**
     * The name of the place. Valid as long.
     */
    const char *target;
    /**
     * How many tensors this rule has decided so far: every successful `berth_decide`, and in a loader every tensor of it, once.
     */
    uint64_t matches;
};

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
 * Tells more about the last failure than its message.
 *
 * # Safety
 * `info` must be NULL, which is an error, or point at a struct whose `struct_size` is set.
 */
enum berth_status berth_last_error_info(struct berth_error_info *info);

/**
 * Berth as a ggml backend registry, for `ggml_backend_register`. Needs a ggml of version 0.9.0 or newer in the process, as a shared library
 * (`berth_reg_of` needs none). The same pointer at every call. NULL if there is no ggml that fits, or a `BERTH_*` variable has a bad value: see `berth_last_error`.
 */
struct ggml_backend_reg *berth_reg(void);

/**
 * Berth as a ggml backend registry, as `berth_reg`, for a program that links ggml statically, or that knows which of several is meant: `find`
 * gives the functions of that ggml, and nothing is searched. `lib/cmake/berth/berth-llama.c` has the names it is asked for. Afterwards every
 * function of this library that needs a ggml and is called where none can be seen uses this one.
 *
 * May be called while ggml lists its backends for the first time: of ggml's functions only those of its base are called.
 *
 * # Safety
 * `find` must be NULL, which is an error, or callable with `user` from any thread until the process ends; what it returns must be the
 * function of that name, of one ggml.
 */
struct ggml_backend_reg *berth_reg_of(berth_symbol_fn find,
                                      void *user);

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
 * Sends Berth's messages to `function` instead of the host's log, or of standard error where there is no host; NULL goes back to those.
 *
 * # Safety
 * `function` must be NULL or callable from any thread, with `user`, until another one is set.
 */
void berth_log_set(berth_log_fn function,
                   void *user);

/**
 * Opens an arena of `size` bytes (rounded up to 2 MiB) in a new file in `directory`: one for each layer and NUMA part, for example. The
 * file has no name, is readable by this user alone, has all its space reserved, and is gone when the arena is closed or the process ends,
 * however it does. `name` is for messages and the report.
 *
 * `directory` NULL or "" means no file: every piece is ordinary memory, and nothing is said of it. Where a file was asked for and cannot be
 * had (the directory is missing, a link, not writable; the disk is full), the arena opens all the same, with ordinary memory; that is logged once and
 * stands in the report (`berth_report_json`) with its reason. With `BERTH_STRICT=1` it is an error, and so is any `BERTH_*` variable with a bad value.
 *
 * After a `fork`, parent and child share the file: the child must take no piece, and may close the arena.
 *
 * `numa` is the number of a NUMA node, or -1 for none in particular. Ordinary memory then comes from there, as far as it has any. Pages of a file
 * lie on the node of the thread that first writes to them: fill each part from a thread of its node.
 *
 * # Safety
 * `directory` must be NULL or a string, `name` NULL, which is an error, or a string, `arena` NULL, which is an error, or writable.
 */
enum berth_status berth_arena_open(const char *directory,
                                   const char *name,
                                   size_t size,
                                   int numa,
                                   struct berth_arena **arena);

/**
 * Takes `size` bytes, zeroed, which take up a multiple of 2 MiB of the arena and begin at one of its file (in memory, at a page). They are freed when the arena is closed.
 * `file_backed`, unless NULL, gets whether they lie in the file. Pieces for which no space is left are ordinary memory: the first is logged, the sum is in the report.
 * NULL if `size` is 0 or there is no memory, and with `BERTH_STRICT=1` if they would not lie in the file that was asked for.
 *
 * # Safety
 * `arena` must be NULL, which is an error, or open; `file_backed` NULL or writable.
 */
void *berth_arena_alloc(struct berth_arena *arena,
                        size_t size,
                        bool *file_backed);

/**
 * Closes an arena: all its pieces are freed, and the file is gone. NULL is allowed.
 *
 * # Safety
 * `arena` must be NULL, or open and not be used again, nor any of its pieces.
 */
void berth_arena_close(struct berth_arena *arena);

/**
 * Opens a model (the first part of a split one) and reads its headers. `rules` may be NULL: then there are none; else they must not be changed
 * while the loader lives, and their matches are counted. `load` may be NULL: then as `berth_load_init` says; its `repack` must be 0, since every
 * tensor keeps the order of the file. Free with `berth_loader_free`.
 *
 * # Safety
 * `path` must be NULL, which is an error, or NUL-terminated; `rules` NULL or valid; `load` NULL or valid with all it points at; `loader` NULL,
 * which is an error, or writable.
 */
enum berth_status berth_loader_open(const char *path,
                                    const struct berth_rules *rules,
                                    const struct berth_load *load,
                                    struct berth_loader **loader);

/**
 * How many tensors the model has; 0 for NULL.
 *
 * # Safety
 * `loader` must be NULL or valid.
 */
size_t berth_loader_model_count(const struct berth_loader *loader);

/**
 * The name of the model's tensor at `index`, from 0, in file order; NULL if there is none. It lives as long as the loader.
 *
 * # Safety
 * `loader` must be NULL or valid.
 */
const char *berth_loader_model_name(const struct berth_loader *loader,
                                    size_t index);

/**
 * Decides where the tensor `name` goes, and wants it. `flags` are `BERTH_TENSOR_*` bits. `*tensor` is NULL if it is not made: it is missing and
 * not required, or skipped. A second use of a tensor in the same place, asked for as duplicated, is the same tensor.
 *
 * # Safety
 * `loader` must be NULL, which is an error, or valid; `name` NULL, which is an error, or NUL-terminated; `tensor` NULL, which is an error, or
 * writable.
 */
enum berth_status berth_create_tensor(struct berth_loader *loader,
                                      const char *name,
                                      uint32_t flags,
                                      const struct berth_tensor **tensor);

/**
 * How many tensors were created; 0 for NULL.
 *
 * # Safety
 * `loader` must be NULL or valid.
 */
size_t berth_loader_tensor_count(const struct berth_loader *loader);

/**
 * The tensor at `index`, from 0, in the order of creation; NULL if there is none.
 *
 * # Safety
 * `loader` must be NULL or valid.
 */
const struct berth_tensor *berth_loader_tensor(const struct berth_loader *loader, size_t index);

/**
 * Gets memory for every tensor: one buffer per place. Where page-locked memory or an arena cannot be had, the tensors stay in the file's mapping
 * if the file is mapped, and get ordinary memory if it is not (as a backend in llama.cpp, which cannot give a mapping instead, Berth always
 * takes ordinary memory); with `BERTH_STRICT=1` that is an error. A file that was cut or written to since it was opened is
 * `BERTH_STATUS_BAD_FILE`, and named. After an error nothing is allocated, and it may be tried again.
 *
 * # Safety
 * `loader` must be NULL, which is an error, or valid.
 */
enum berth_status berth_loader_alloc(struct berth_loader *loader);

/**
 * Reads the bytes of every tensor that does not stay in the mapping. `progress` may be NULL; it is called on this thread, after every 8 MiB or
 * 100 ms and at the end. After a cancel or an error this may be called again. A file that was cut or written to since it was opened,
 * or while it is read, is `BERTH_STATUS_BAD_FILE`, and named.
 *
 * # Safety
 * `loader` must be NULL, which is an error, or valid; `progress` NULL or callable with `user`.
 */
enum berth_status berth_loader_fill(struct berth_loader *loader,
                                    berth_progress_fn progress,
                                    void *user);

/**
 * A ggml buffer over the memory that holds `tensor`, of the buffer type of its place, for `ggml_backend_tensor_alloc`. Needs a ggml in the
 * process, and `berth_loader_alloc` before. The caller frees it with `ggml_backend_buffer_free`, before the loader.
 *
 * # Safety
 * `loader` must be NULL, which is an error, or valid; `tensor` one of its tensors; `buffer` NULL, which is an error, or writable.
 */
enum berth_status berth_loader_ggml_buffer(struct berth_loader *loader,
                                           const struct berth_tensor *tensor,
                                           struct ggml_backend_buffer **buffer);

/**
 * Frees a loader, its tensors and their memory. NULL is allowed.
 *
 * # Safety
 * `loader` must be NULL, or valid and not be used again, nor any tensor of it.
 */
void berth_loader_free(struct berth_loader *loader);

/**
 * The instruction set of the kernels: "avx512", "avx2" or "scalar". Chosen at the first call of this or any other function that computes:
 * the best of this processor, or a lower one in `BERTH_ISA`. NULL if that has a bad value: see `berth_last_error`. Constant.
 */
const char *berth_isa(void);

/**
 * Whether there are kernels for weights of this `enum ggml_type`, in every instruction set. If not, every function here refuses them with
 * `BERTH_STATUS_UNSUPPORTED`.
 */
bool berth_moe_type_supported(int ggml_type);

/**
 * Whether the experts can be computed: everything that `berth_moe_forward` checks of them.
 *
 * # Safety
 * `desc` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers are NULL or as described there.
 */
enum berth_status berth_moe_check(const struct berth_moe_desc *desc);

/**
 * Bytes of workspace for up to `n_tokens` tokens with up to `n_used` experts each, on up to `threads` threads.
 *
 * # Safety
 * `desc` as in `berth_moe_check`; `bytes` must be NULL, which is an error, or writable.
 */
enum berth_status berth_moe_workspace_size(const struct berth_moe_desc *desc,
                                           size_t n_tokens,
                                           size_t n_used,
                                           size_t threads,
                                           size_t *bytes);

/**
 * Computes the experts of all tokens. `threads` may be NULL: the calling thread alone. Results do not depend on the threads. Allocates
 * nothing. On an error nothing has been written to `y`, unless a function in `threads` broke its promise during the last of its calls.
 *
 * # Safety
 * `desc` as in `berth_moe_check`; `io` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers
 * are NULL or point at as much as the numbers say; `threads` must be NULL or point at a struct whose `struct_size` is set.
 */
enum berth_status berth_moe_forward(const struct berth_moe_desc *desc,
                                    const struct berth_moe_io *io,
                                    const struct berth_threads *threads);

/**
 * Asks for the weights of experts that are not in memory, and does not wait: for who knows the ids early, while something else is computed.
 * Gate and up of all of them come before down. Nothing to do for weights in memory that no file is behind, and with `BERTH_READAHEAD=off`. What is
 * asked for costs some 0.7 ms per MB of the calling thread's time, on the machine where that was measured; what is in memory some microseconds per
 * expert. Allocates nothing. `berth_moe_forward` does the same with `BERTH_MOE_READ_AHEAD`.
 *
 * # Safety
 * `desc` as in `berth_moe_check`; `ids` must point at `n` numbers, or `n` be 0.
 */
enum berth_status berth_moe_prefetch(const struct berth_moe_desc *desc,
                                     const int32_t *ids,
                                     size_t n);

/**
 * Bytes of workspace for `berth_mul_mat_id`, as `berth_moe_workspace_size`.
 *
 * # Safety
 * `desc` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers are NULL or as described there;
 * `bytes` must be NULL, which is an error, or writable.
 */
enum berth_status berth_mul_mat_id_workspace_size(const struct berth_mul_mat_id_desc *desc,
                                                  size_t n_tokens,
                                                  size_t n_used,
                                                  size_t threads,
                                                  size_t *bytes);

/**
 * Computes `y[t][j] = weights[ids[t][j]] . x[t][j]`, or with `x[t]` where there is one vector per token. As `berth_moe_forward` otherwise.
 *
 * # Safety
 * As `berth_moe_forward`.
 */
enum berth_status berth_mul_mat_id(const struct berth_mul_mat_id_desc *desc,
                                   const struct berth_moe_io *io,
                                   const struct berth_threads *threads);

/**
 * Computes `out = act(gate, up)`, value by value. `threads` may be NULL: the calling thread alone. Allocates nothing and needs no workspace.
 * On an error nothing has been written to `out`, unless a function in `threads` broke its promise.
 *
 * # Safety
 * `desc` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers are NULL or point at as much as
 * the numbers say; `threads` must be NULL or point at a struct whose `struct_size` is set.
 */
enum berth_status berth_glu(const struct berth_glu_desc *desc,
                            const struct berth_threads *threads);

/**
 * Fills in the circumstances as llama.cpp starts on a machine without a GPU: mapped, all layers to devices if there are any. The batch size
 * for computing on a device is 32, or what `GGML_OP_OFFLOAD_MIN_BATCH` says.
 *
 * # Safety
 * `load` must be NULL, which is an error, or point at a struct whose `struct_size` is set.
 */
enum berth_status berth_load_init(struct berth_load *load);

/**
 * Decides where one tensor goes, and, if that succeeds, counts a match for the rule that wins. `rules` may be NULL: then there are none.
 *
 * # Safety
 * `tensor`, `load` and `decision` must be NULL, which is an error, or point at structs whose `struct_size` is set and whose pointers are
 * valid; `rules` must be NULL or valid.
 */
enum berth_status berth_decide(const struct berth_tensor_desc *tensor,
                               const struct berth_rules *rules,
                               const struct berth_load *load,
                               struct berth_decision *decision);

/**
 * The name of a kind of memory. Constant.
 */
const char *berth_memory_text(int32_t memory);

/**
 * New, empty rules. `devices` are the names of device buffer types that rules may name beside `CPU`, `CPU_MMAP`, `CUDA_Host` and `ARENA`, for
 * example "CUDA0"; a name that is empty or contains `,`, `;`, `=` or a control character is an error, and so is one that is there twice, `CPU`, or
 * one of Berth's, in whatever case of letters. Free with `berth_rules_free`.
 *
 * # Safety
 * `devices` must point at `n_devices` strings, or be NULL if that is 0; `rules` must be NULL, which is an error, or writable.
 */
enum berth_status berth_rules_new(const char *const *devices,
                                  size_t n_devices,
                                  struct berth_rules **rules);

/**
 * Appends the rules of one `-ot` argument of llama.cpp: `pattern=TARGET,pattern=TARGET`. On an error nothing is appended, and
 * `berth_last_error_info` tells rule and column.
 *
 * # Safety
 * `rules` must be NULL, which is an error, or valid; `text` must be NULL, which is an error, or NUL-terminated.
 */
enum berth_status berth_rules_parse(struct berth_rules *rules,
                                    const char *text);

/**
 * Appends the rules of one `-ot` argument of llama-bench: `pattern=TARGET;pattern=TARGET`. A `,` there separates runs with rules of their own;
 * `run`, from 0, says which one is wanted. On an error, in whichever run, nothing is appended.
 *
 * # Safety
 * As `berth_rules_parse`.
 */
enum berth_status berth_rules_parse_bench(struct berth_rules *rules,
                                          const char *text,
                                          size_t run);

/**
 * Appends one rule. Nothing is split off, so the pattern may contain `,`, `;` and `=`.
 *
 * # Safety
 * `rules` must be NULL, which is an error, or valid; `pattern` and `target` must be NULL, which is an error, or NUL-terminated.
 */
enum berth_status berth_rules_push(struct berth_rules *rules,
                                   const char *pattern,
                                   const char *target);

/**
 * Appends what `--cpu-moe` means: all experts to `CPU`.
 *
 * # Safety
 * `rules` must be NULL, which is an error, or valid.
 */
enum berth_status berth_rules_cpu_moe(struct berth_rules *rules);

/**
 * Appends what `--n-cpu-moe n` means: the experts of the first `n` layers to `CPU`.
 *
 * # Safety
 * `rules` must be NULL, which is an error, or valid.
 */
enum berth_status berth_rules_n_cpu_moe(struct berth_rules *rules, uint32_t n);

/**
 * Appends what `--n-cpu-ffn n` means: the dense feed-forward weights of the first `n` layers to `CPU`.
 *
 * # Safety
 * `rules` must be NULL, which is an error, or valid.
 */
enum berth_status berth_rules_n_cpu_ffn(struct berth_rules *rules, uint32_t n);

/**
 * How many rules there are; 0 for NULL.
 *
 * # Safety
 * `rules` must be NULL or valid.
 */
size_t berth_rules_count(const struct berth_rules *rules);

/**
 * The rule at `index`, from 0, and how often it has decided.
 *
 * # Safety
 * `rules` must be NULL, which is an error, or valid; `rule` must be NULL, which is an error, or point at a struct whose `struct_size` is set.
 */
enum berth_status berth_rules_get(const struct berth_rules *rules,
                                  size_t index,
                                  struct berth_rule *rule);

/**
 * Frees rules. NULL is allowed. A loader that uses them keeps what it needs.
 *
 * # Safety
 * `rules` must be NULL, or valid and not be used again.
 */
void berth_rules_free(struct berth_rules *rules);

/**
 * Makes a pool of `count` threads, one of which is whoever computes with it. Between computations its threads are blocked. Free with
 * `berth_pool_free`. It belongs to the process that made it: after a `fork` the child must neither use nor free it.
 *
 * # Safety
 * `pool` must be NULL, which is an error, or writable.
 */
enum berth_status berth_pool_new(size_t count,
                                 struct berth_pool **pool);

/**
 * How many threads the pool has; 0 for NULL.
 *
 * # Safety
 * `pool` must be NULL or valid.
 */
size_t berth_pool_count(const struct berth_pool *pool);

/**
 * Calls `call(task, index)` once for each index below `berth_pool_count(pool)`, on the pool's threads, and returns when all have returned.
 * `call` must not throw. Using the same pool inside of it is an error.
 *
 * # Safety
 * `pool` must be NULL, which is an error, or valid; `call` NULL, which is an error, or callable with `task` from any thread.
 */
enum berth_status berth_pool_run(struct berth_pool *pool,
                                 berth_task_fn call,
                                 void *task);

/**
 * Ends the pool's threads and frees it. NULL is allowed.
 *
 * # Safety
 * `pool` must be NULL, or valid, not in use, and not be used again.
 */
void berth_pool_free(struct berth_pool *pool);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BERTH_H */
