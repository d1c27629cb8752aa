// To be preloaded into a program: as soon as it has mapped the file CUT_FILE as a whole, the file is cut to CUT_BYTES.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static void * map(void * address, size_t length, int protection, int flags, int file, off_t offset) {
    // The system call itself: the next library's function has this name too.
    long result = syscall(SYS_mmap, address, length, protection, flags, file, offset);
    const char * cut = getenv("CUT_FILE"), * bytes = getenv("CUT_BYTES");
    if (result != -1 && file >= 0 && length > 1 << 20 && cut != NULL && bytes != NULL) {
        char link[64], path[4096] = {0};
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        if (readlink(link, path, sizeof path - 1) > 0 && strcmp(path, cut) == 0 && truncate(path, atoll(bytes)) != 0) {
            perror("truncate");
        }
    }
    return (void *) result;
}

void * mmap(void * address, size_t length, int protection, int flags, int file, off_t offset) {
    return map(address, length, protection, flags, file, offset);
}

void * mmap64(void * address, size_t length, int protection, int flags, int file, off64_t offset) {
    return map(address, length, protection, flags, file, offset);
}
