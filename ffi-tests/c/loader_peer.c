/*
 * A loader in C over berth.h: opens a model, creates every tensor, allocates, fills, and compares every byte with the file.
 *
 *   loader_peer MODEL [--rules TEXT] [--no-mmap] [--cancel] [--replace FILE] [--spoil cut|write] [--spoil-late] [--noisy] [--part FILE]...
 *
 * One line per tensor: name, place, memory, rule, overridden, downgraded, reason, bytes, whether all bytes equal the file's. The files of a split
 * model are named by --part, in order. With --replace that file is renamed over the model after it was opened. With --cancel the first fill is cancelled
 * at its first report, and a second one completes it; how far it came is printed. With --spoil the last file is cut to half, or a byte of it is
 * written to in place, before memory is allocated, or, with --spoil-late, after.
 */
#define _POSIX_C_SOURCE 200809L
#include <berth.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void fail(const char *what) {
    struct berth_error_info info = {.struct_size = sizeof info};
    berth_last_error_info(&info);
    printf("ERROR %s: %d rule %zu column %zu: %s\n", what, (int) info.status, info.rule, info.column, info.message);
    exit(1);
}

static void check(enum berth_status status, const char *what) {
    if (status != BERTH_STATUS_OK) {
        fail(what);
    }
}

struct progress {
    uint64_t last, total;
    int calls, cancel;
};

static bool on_progress(uint64_t done, uint64_t total, void *user) {
    struct progress *p = user;
    if (done < p->last || done > total) {
        printf("ERROR progress went from %llu to %llu of %llu\n", (unsigned long long) p->last, (unsigned long long) done,
               (unsigned long long) total);
        exit(1);
    }
    p->last = done;
    p->total = total;
    p->calls++;
    return !p->cancel;
}

/* Cuts a file to half, or writes to one byte of it; its size stays then, and so does the byte. */
static void spoil(const char *path, const char *how) {
    int fd = open(path, O_RDWR);
    off_t size = fd >= 0 ? lseek(fd, 0, SEEK_END) : -1;
    char byte = 0;
    bool done = size > 0;
    if (strcmp(how, "cut") == 0) {
        done = done && ftruncate(fd, size / 2) == 0;
    } else {
        done = done && pread(fd, &byte, 1, size - 1) == 1 && pwrite(fd, &byte, 1, size - 1) == 1;
    }
    if (!done) {
        printf("ERROR %s cannot be spoilt\n", path);
        exit(2);
    }
    close(fd);
}

/* Whether the tensor's bytes are those at its offset of its file. */
static bool equals_file(const struct berth_tensor *t, const char *path) {
    enum { CHUNK = 1 << 20 };
    static char chunk[CHUNK];
    int fd = open(path, O_RDONLY);
    bool same = fd >= 0 && t->data != NULL;
    for (size_t at = 0; same && at < t->bytes;) {
        size_t n = t->bytes - at < CHUNK ? t->bytes - at : CHUNK;
        ssize_t got = pread(fd, chunk, n, (off_t) (t->offset + at));
        same = got > 0 && memcmp(chunk, (const char *) t->data + at, (size_t) got) == 0;
        at += got > 0 ? (size_t) got : 0;
    }
    if (fd >= 0) {
        close(fd);
    }
    return same;
}

int main(int argc, char **argv) {
    const char *rules_text = NULL, *parts[64];
    size_t n_parts = 0;
    bool cancel = false, noisy = false, all_same = true;
    const char *replace = NULL, *spoiling = NULL;
    bool late = false;
    struct berth_load load = {.struct_size = sizeof load};
    check(berth_load_init(&load), "berth_load_init");
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "--rules") == 0 && i + 1 < argc) {
            rules_text = argv[++i];
        } else if (strcmp(argv[i], "--part") == 0 && i + 1 < argc && n_parts < 64) {
            parts[n_parts++] = argv[++i];
        } else if (strcmp(argv[i], "--replace") == 0 && i + 1 < argc) {
            replace = argv[++i];
        } else if (strcmp(argv[i], "--spoil") == 0 && i + 1 < argc) {
            spoiling = argv[++i];
        } else if (strcmp(argv[i], "--spoil-late") == 0) {
            late = true;
        } else if (strcmp(argv[i], "--noisy") == 0) {
            noisy = true;
        } else if (strcmp(argv[i], "--no-mmap") == 0) {
            load.mmap = false;
        } else if (strcmp(argv[i], "--cancel") == 0) {
            cancel = true;
        }
    }
    if (argc < 2) {
        return 2;
    }
    if (n_parts == 0) {
        parts[n_parts++] = argv[1];
    }

    struct berth_rules *rules = NULL;
    check(berth_rules_new(NULL, 0, &rules), "berth_rules_new");
    if (rules_text) {
        check(berth_rules_parse(rules, rules_text), "berth_rules_parse");
    }
    struct berth_loader *loader = NULL;
    check(berth_loader_open(argv[1], rules, &load, &loader), "berth_loader_open");
    for (size_t i = 0; i < berth_loader_model_count(loader); i++) {
        const struct berth_tensor *tensor = NULL;
        check(berth_create_tensor(loader, berth_loader_model_name(loader, i), 0, &tensor), "berth_create_tensor");
        if (!tensor || tensor->data) {
            printf("ERROR tensor %zu: %s\n", i, tensor ? "has data before it is allocated" : "was not made");
            return 1;
        }
    }
    if (replace && rename(replace, argv[1]) != 0) {
        return 2;
    }
    if (spoiling && !late) {
        spoil(parts[n_parts - 1], spoiling);
    }
    check(berth_loader_alloc(loader), "berth_loader_alloc");
    if (spoiling && late) {
        spoil(parts[n_parts - 1], spoiling);
    }
    struct progress progress = {0, 0, 0, cancel};
    enum berth_status filled = berth_loader_fill(loader, on_progress, &progress);
    if (cancel) {
        if (filled != BERTH_STATUS_CANCELLED) {
            printf("ERROR a cancelled fill returned %d\n", (int) filled);
            return 1;
        }
        printf("CANCELLED at %llu of %llu\n", (unsigned long long) progress.last, (unsigned long long) progress.total);
        progress = (struct progress){0, 0, 0, 0};
        filled = berth_loader_fill(loader, on_progress, &progress);
    }
    check(filled, "berth_loader_fill");
    if (progress.calls < 1 || progress.last != progress.total) {
        printf("ERROR progress ended at %llu of %llu\n", (unsigned long long) progress.last, (unsigned long long) progress.total);
        return 1;
    }
    /* What a program prints lands in whatever has the number of its stream. */
    for (int stream = 0; noisy && stream < 3; stream++) {
        ssize_t written = write(stream, "a message", 9);
        (void) written;
    }
    for (size_t i = 0; i < berth_loader_tensor_count(loader); i++) {
        const struct berth_tensor *t = berth_loader_tensor(loader, i);
        bool same = t->part < n_parts && equals_file(t, parts[t->part]);
        all_same = all_same && same;
        printf("%s\t%s\t%s\t%d\t%d\t%d\t%s\t%zu\t%s\n", t->name, t->target, berth_memory_text((int) t->memory), t->rule, t->buft_overridden,
               t->downgraded, t->reason, t->bytes, same ? "same" : "DIFFERENT");
    }
    for (size_t i = 0; i < berth_rules_count(rules); i++) {
        struct berth_rule rule = {.struct_size = sizeof rule};
        check(berth_rules_get(rules, i, &rule), "berth_rules_get");
        printf("RULE %s=%s %llu\n", rule.pattern, rule.target, (unsigned long long) rule.matches);
    }
    berth_loader_free(loader);
    berth_rules_free(rules);
    return all_same ? 0 : 1;
}
