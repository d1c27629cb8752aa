// To be preloaded into a program: it maps the file RANDOM_FILE without reading it and for random access, as llama.cpp does by `--numa distribute` where there
// are several NUMA nodes (on one node it does not).
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static void * map(void * address, size_t length, int protection, int flags, int file, off_t offset) {
    const char * wanted = getenv("RANDOM_FILE");
    char link[64], path[4096] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    int is_it = wanted != NULL && file >= 0 && length > 1 << 20 && readlink(link, path, sizeof path - 1) > 0 && strcmp(path, wanted) == 0;
    // The system call itself: the next library's function has this name too.
    long result = syscall(SYS_mmap, address, length, protection, is_it ? flags & ~MAP_POPULATE : flags, file, offset);
    if (is_it && result != -1) {
        syscall(SYS_madvise, result, length, MADV_RANDOM);
        fprintf(stderr, "map_random: %s\n", path);
    }
    return (void *) result;
}

void * mmap(void * address, size_t length, int protection, int flags, int file, off_t offset) {
    return map(address, length, protection, flags, file, offset);
}

void * mmap64(void * address, size_t length, int protection, int flags, int file, off64_t offset) {
    return map(address, length, protection, flags, file, offset);
}

int posix_madvise(void * address, size_t length, int advice) {
    (void) address, (void) length, (void) advice;
    return 0;
}
