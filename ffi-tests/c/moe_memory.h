/*
 * Memory of moe_check.c: buffers that nobody may leave, and a count of the allocations during a call.
 */
#ifndef MOE_MEMORY_H
#define MOE_MEMORY_H

/* Whether buffers end at a page that nobody may touch. */
static int guarded;
static int failures;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "FAILED %s: %s (%s)\n", what, why, berth_last_error());
    failures++;
}

enum { MOST_BUFFERS = 64, CANARY = 0xa5 };
static struct {
    uint8_t *start, *data;
    size_t size, mapped;
} buffers[MOST_BUFFERS];
static size_t n_buffers;

/* Memory whose first byte behind the end cannot be touched. Aligned to 64 if the size is a multiple of 64. */
static void *take(size_t size) {
    if (n_buffers == MOST_BUFFERS) {
        fprintf(stderr, "too many buffers\n");
        exit(1);
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), i = n_buffers++;
    if (guarded) {
        const size_t pages = (size + page) / page * page; /* at least a byte before it for the canary, unless it is whole pages */
        uint8_t *map = mmap(NULL, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED || mprotect(map + pages, page, PROT_NONE) != 0) {
            perror("mmap");
            exit(1);
        }
        memset(map, CANARY, pages - size);
        buffers[i].start = map;
        buffers[i].data = map + pages - size;
        buffers[i].mapped = pages + page;
    } else {
        void *data = NULL;
        if (posix_memalign(&data, 64, size > 0 ? size : 1) != 0) {
            must(NULL);
        }
        buffers[i].start = buffers[i].data = data;
        buffers[i].mapped = 0;
    }
    buffers[i].size = size;
    return buffers[i].data;
}

static int canaries_live(void) {
    for (size_t i = 0; i < n_buffers; i++) {
        for (uint8_t *at = buffers[i].start; at < buffers[i].data; at++) {
            if (*at != CANARY) {
                return 0;
            }
        }
    }
    return 1;
}

static void release(const char *what) {
    if (!canaries_live()) {
        fail(what, "something was written before a buffer");
    }
    for (size_t i = 0; i < n_buffers; i++) {
        if (buffers[i].mapped > 0) {
            munmap(buffers[i].start, buffers[i].mapped);
        } else {
            free(buffers[i].start);
        }
    }
    n_buffers = 0;
}

#ifdef COUNT_ALLOCATIONS
/* The program's own functions are found before those of the C library, by libberth.so too. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static atomic_int counting, allocations;
static void count(void) {
    if (atomic_load(&counting)) {
        atomic_fetch_add(&allocations, 1);
    }
}
void *malloc(size_t n) {
    count();
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t m) {
    count();
    return __libc_calloc(n, m);
}
void *realloc(void *p, size_t n) {
    count();
    return __libc_realloc(p, n);
}
int posix_memalign(void **p, size_t a, size_t n) {
    count();
    *p = __libc_memalign(a, n);
    return *p == NULL;
}
void *aligned_alloc(size_t a, size_t n) {
    count();
    return __libc_memalign(a, n);
}
static void count_from_here(void) {
    atomic_store(&allocations, 0);
    atomic_store(&counting, 1);
}
static void count_to_here(const char *what) {
    atomic_store(&counting, 0);
    if (atomic_load(&allocations) != 0) {
        fail(what, "allocated");
    }
}
#else
static void count_from_here(void) {
}
static void count_to_here(const char *what) {
    (void)what;
}
#endif

#endif
