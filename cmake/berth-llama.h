/*
 * berth-llama: Berth as the backend after the CPU, in ggml's own list of what it was built with.
 *
 * berth-llama.cmake has the compiler read this before ggml-backend-reg.cpp, where
 *
 *     register_backend(ggml_backend_cpu_reg());
 *
 * becomes two calls. So Berth is listed when ggml first lists its backends, and nothing runs before main: a constructor would start the
 * drivers of all GPUs there, before a program has set its log, and before global objects of theirs are made.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef BERTH_LLAMA_H
#define BERTH_LLAMA_H

struct ggml_backend_reg;

#ifdef __cplusplus
extern "C"
#endif
struct ggml_backend_reg *berth_llama_reg(void);

#if defined(__cplusplus) && defined(GGML_USE_CPU) && !defined(BERTH_LLAMA_AT_LOAD)
/* First, so that the name is the function's there. */
#include "ggml-cpu.h"
#define ggml_backend_cpu_reg() ggml_backend_cpu_reg()); register_backend(berth_llama_reg()
#endif

#endif /* BERTH_LLAMA_H */
