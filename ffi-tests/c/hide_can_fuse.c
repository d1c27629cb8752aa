// To be preloaded: this ggml has no ggml_can_fuse_subgraph_ext for those who look it up by name, as ggml before 0.9.4.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

typedef void * (*look_up)(void * library, const char * name);

void * dlsym(void * library, const char * name) {
    static look_up real;
    if (real == NULL) {
        // Where this C library has it: under one version since 2.34, under the machine's first before.
        void * address = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (address == NULL) {
            address = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        }
        memcpy(&real, &address, sizeof address);
    }
    return strcmp(name, "ggml_can_fuse_subgraph_ext") != 0 ? real(library, name) : NULL;
}
