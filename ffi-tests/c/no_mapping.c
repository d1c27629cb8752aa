/*
 * Preloaded into a process, it lets no file be mapped for reading alone, as models are. What is mapped to be written, an arena, is; and so is
 * all that the dynamic linker maps, which asks the kernel itself.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && protection == PROT_READ) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return (void *) syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap(address, length, protection, flags, fd, offset);
}
