/*
 * The least that a host does with a plug-in: opens a libggml and asks it to load Berth. No header, so any version of ggml will do.
 *
 *     load_peer LIBGGML LIBBERTH
 *
 * Prints "accepted" or "refused", and goes on.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

int main(int argc, char **argv) {
    void *ggml = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : NULL;
    if (ggml == NULL) {
        fprintf(stderr, "usage: load_peer LIBGGML LIBBERTH: %s\n", argc == 3 ? dlerror() : "two arguments are needed");
        return 2;
    }
    void *(*load)(const char *) = NULL;
    size_t (*count)(void) = NULL;
    *(void **)(&load) = dlsym(ggml, "ggml_backend_load");
    *(void **)(&count) = dlsym(ggml, "ggml_backend_dev_count");
    void *first = load(argv[2]), *second = load(argv[2]);
    printf("%s\n", first == NULL ? "refused" : "accepted");
    if (first != second || (count() > 0) != (first != NULL)) {
        printf("the second load differs, or there are devices without a registry\n");
        return 1;
    }
    return 0;
}
