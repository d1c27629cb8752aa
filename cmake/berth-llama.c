/*
 * berth-llama: hands the functions of the ggml that this is compiled into over to Berth, and gives Berth's registry back.
 *
 * Compiled into llama.cpp's own library `ggml` by berth-llama.cmake. All names are weak: those that this version of ggml lacks are NULL, and
 * Berth decides what that means. C, and none of ggml's headers: for Berth an address is enough.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <berth.h>
#include <stdio.h>
#include <string.h>

#include "berth-llama.h"

/* What Berth asks for (src/abi/; a test compares the lists). */
#define BERTH_LLAMA_NAMES(X) \
    X(ggml_version) \
    X(ggml_init) \
    X(ggml_free) \
    X(ggml_new_tensor_4d) \
    X(ggml_set_name) \
    X(ggml_get_data) \
    X(ggml_set_output) \
    X(ggml_nbytes) \
    X(ggml_op_name) \
    X(ggml_glu_op_name) \
    X(ggml_unary_op_name) \
    X(ggml_type_name) \
    X(ggml_add) \
    X(ggml_add_id) \
    X(ggml_mul) \
    X(ggml_mul_mat_id) \
    X(ggml_view_1d) \
    X(ggml_reshape_2d) \
    X(ggml_permute) \
    X(ggml_transpose) \
    X(ggml_cont) \
    X(ggml_reglu) \
    X(ggml_geglu) \
    X(ggml_swiglu) \
    X(ggml_geglu_erf) \
    X(ggml_geglu_quick) \
    X(ggml_swiglu_oai) \
    X(ggml_silu) \
    X(ggml_gelu) \
    X(ggml_relu) \
    X(ggml_sqr) \
    X(ggml_repeat) \
    X(ggml_get_rows) \
    X(ggml_clamp) \
    X(ggml_graph_n_nodes) \
    X(ggml_graph_node) \
    X(ggml_backend_buffer_is_host) \
    X(ggml_backend_buft_is_host) \
    X(ggml_backend_buffer_get_type) \
    X(ggml_backend_buffer_get_size) \
    X(ggml_backend_buffer_get_usage) \
    X(ggml_backend_buffer_init) \
    X(ggml_backend_tensor_set_2d) \
    X(ggml_backend_buft_alloc_buffer_n) \
    X(ggml_log_internal) \
    X(ggml_swiglu_clamp) \
    X(ggml_can_fuse_subgraph_ext) \
    X(ggml_backend_cpu_init) \
    X(GOMP_parallel) \
    X(ggml_backend_dev_count) \
    X(ggml_backend_dev_get) \
    X(ggml_backend_dev_type) \
    X(ggml_backend_reg_by_name) \
    X(ggml_backend_dev_by_type) \
    X(ggml_backend_dev_init) \
    X(ggml_backend_dev_backend_reg) \
    X(ggml_backend_dev_supports_op) \
    X(ggml_backend_reg_get_proc_address) \
    X(ggml_backend_free) \
    X(ggml_backend_graph_compute) \
    X(ggml_backend_buffer_get_base) \
    X(ggml_graph_overhead_custom) \
    X(ggml_new_graph_custom) \
    X(ggml_graph_add_node) \
    X(ggml_blck_size) \
    X(ggml_type_size)

#define BERTH_LLAMA_DECLARE(name) extern void name(void) __attribute__((weak));
BERTH_LLAMA_NAMES(BERTH_LLAMA_DECLARE)

/* A function as a plain address, which Berth calls by its real type. */
typedef void (*berth_llama_function)(void);

static void *berth_llama_find(const char *name, void *user) {
    static const struct {
        const char *name;
        berth_llama_function function;
    } names[] = {
#define BERTH_LLAMA_ENTRY(name) {#name, name},
        BERTH_LLAMA_NAMES(BERTH_LLAMA_ENTRY)
    };
    void *address = NULL;
    (void) user;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i].name, name) == 0) {
            memcpy(&address, &names[i].function, sizeof address);
        }
    }
    return address;
}

struct ggml_backend_reg *berth_llama_reg(void) {
    struct ggml_backend_reg *reg = berth_reg_of(berth_llama_find, NULL);
    if (reg == NULL) {
        fprintf(stderr, "berth: not loaded: %s\n", berth_last_error());
    }
    return reg;
}

#ifdef BERTH_LLAMA_AT_LOAD
/* The backends of this build are loaded at run time, so ggml's list is empty and may be begun here: no driver is touched before main. */
extern void ggml_backend_register(struct ggml_backend_reg *reg);

__attribute__((constructor)) static void berth_llama_register(void) {
    struct ggml_backend_reg *reg = berth_llama_reg();
    if (reg != NULL) {
        ggml_backend_register(reg);
    }
}
#endif
