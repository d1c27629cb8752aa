/*
 * A loader in C over berth.h: opens a model, creates every tensor, allocates, fills, and compares every byte with the file.
 *
 *   loader_peer MODEL [--rules TEXT] [--no-mmap] [--cancel] [--replace FILE] [--spoil cut|write] [--spoil-late|--spoil-during] [--noisy]
 *               [--part FILE]... [--only TEXT] [--flags]
 *
 * One line per tensor: name, place, memory, rule, overridden, downgraded, reason, bytes, type, part, offset, elements and stride of each dimension,
 * whether all bytes equal the file's. The files of a split model are named by --part, in order; with --only, tensors whose names do not contain
 * that text are not created. With --replace that file is renamed over the model after it was opened. With --cancel the first fill is cancelled at
 * its first report, and a second one completes it; how far it came is printed. With --spoil the last file is cut to half, or a byte of it is
 * written to in place, before memory is allocated, or, with --spoil-late, after, or, with --spoil-during, at the first report of the fill. With
 * --flags every flag of berth_create_tensor is tried instead.
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
    /* What is to be spoilt at the first report, and how; NULL for nothing. */
    const char *path, *how;
};

static void spoil(const char *path, const char *how);

static bool on_progress(uint64_t done, uint64_t total, void *user) {
    struct progress *p = user;
    if (done < p->last || done > total) {
        printf("ERROR progress went from %llu to %llu of %llu\n", (unsigned long long) p->last, (unsigned long long) done,
               (unsigned long long) total);
        exit(1);
    }
    if (p->calls == 0 && p->path) {
        spoil(p->path, p->how);
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

static int checks, faults;

static void expect(bool fine, const char *what) {
    checks++;
    if (!fine) {
        faults++;
        printf("FAILED %s\n", what);
    }
}

/* What was to be refused, and whether it was. */
static int misuses;

static void misused(bool refused_so, const char *what) {
    misuses++;
    expect(refused_so, what);
}

/* A loader that nothing was created with. */
static struct berth_loader *fresh(const char *model, const struct berth_rules *rules, const struct berth_load *load) {
    struct berth_loader *loader = NULL;
    check(berth_loader_open(model, rules, load, &loader), "berth_loader_open");
    return loader;
}

/* Whether one tensor is made with these flags as these circumstances have it. No target: it is not made. */
static bool made(const char *model, const struct berth_rules *rules, const struct berth_load *load, const char *name, uint32_t flags,
                 const char *target, enum berth_memory memory, int rule, const char *reason) {
    struct berth_loader *loader = fresh(model, rules, load);
    static const struct berth_tensor none;
    const struct berth_tensor *t = &none;
    bool fine = berth_create_tensor(loader, name, flags, &t) == BERTH_STATUS_OK;
    size_t count = berth_loader_tensor_count(loader);
    if (!target) {
        fine = fine && t == NULL && count == 0;
    } else {
        fine = fine && t && t != &none && count == 1 && strcmp(t->target, target) == 0 && t->memory == memory && t->rule == rule &&
               strcmp(t->reason, reason) == 0 && !t->downgraded;
    }
    berth_loader_free(loader);
    return fine;
}

/* Whether a tensor is refused with that status, and nothing is written. */
static bool refused(struct berth_loader *loader, const char *name, uint32_t flags, enum berth_status status) {
    static const struct berth_tensor none;
    const struct berth_tensor *t = &none;
    size_t before = berth_loader_tensor_count(loader);
    return berth_create_tensor(loader, name, flags, &t) == status && t == &none && berth_loader_tensor_count(loader) == before;
}

/* Whether the first two rules have decided so many tensors. */
static bool counts(const struct berth_rules *rules, uint64_t first, uint64_t second) {
    struct berth_rule one = {.struct_size = sizeof one}, two = one;
    return berth_rules_get(rules, 0, &one) == BERTH_STATUS_OK && berth_rules_get(rules, 1, &two) == BERTH_STATUS_OK && one.matches == first &&
           two.matches == second;
}

/* Every flag of berth_create_tensor, alone and with others. */
static int try_flags(const char *model, struct berth_load load) {
    enum { OPTIONAL = BERTH_TENSOR_NOT_REQUIRED, TWICE = BERTH_TENSOR_DUPLICATED, SKIP = BERTH_TENSOR_SKIP, LAZY = BERTH_TENSOR_READ_LAZY };
    static const char up[] = "blk.0.ffn_up_exps.weight", embd[] = "token_embd.weight", absent[] = "blk.0.not_in_the_model.weight";
    struct berth_rules *rules = NULL;
    check(berth_rules_new(NULL, 0, &rules), "berth_rules_new");
    check(berth_rules_parse(rules, "exps=ARENA,token_embd=CPU_MMAP"), "berth_rules_parse");

    /* Required or not. */
    struct berth_loader *loader = fresh(model, rules, &load);
    misused(refused(loader, absent, 0, BERTH_STATUS_NOT_FOUND), "a required tensor that is missing");
    misused(refused(loader, absent, SKIP, BERTH_STATUS_NOT_FOUND), "a required tensor that is missing, and would be skipped");
    misused(refused(loader, absent, LAZY | TWICE, BERTH_STATUS_NOT_FOUND), "a required tensor that is missing, lazy and duplicated");
    misused(refused(loader, up, BERTH_TENSOR_MISSING, BERTH_STATUS_INVALID_ARGUMENT), "a loader knows what is missing");
    misused(refused(loader, up, 1u << 31, BERTH_STATUS_INVALID_ARGUMENT), "an unknown flag");
    berth_loader_free(loader);
    for (uint32_t others = 0; others < 16; others++) {
        if (others & OPTIONAL) {
            expect(made(model, rules, &load, absent, others, NULL, 0, 0, NULL), "a tensor that is not required and missing");
        }
        if (others & SKIP) {
            expect(made(model, rules, &load, up, others, NULL, 0, 0, NULL), "a skipped tensor");
        }
    }
    expect(made(model, rules, &load, up, 0, "ARENA", BERTH_MEMORY_ARENA, 0, "rule_host"), "a required tensor");
    expect(made(model, rules, &load, up, OPTIONAL, "ARENA", BERTH_MEMORY_ARENA, 0, "rule_host"), "a tensor that is not required, and there");
    expect(made(model, rules, &load, up, TWICE, "ARENA", BERTH_MEMORY_ARENA, 0, "duplicated"), "a duplicated tensor");

    /* A second use: the same tensor in the same place, another one elsewhere; not asked for, an error. */
    loader = fresh(model, rules, &load);
    const struct berth_tensor *first = NULL, *second = NULL;
    expect(berth_create_tensor(loader, embd, 0, &first) == BERTH_STATUS_OK && first, "the first use");
    misused(refused(loader, embd, 0, BERTH_STATUS_INVALID_ARGUMENT), "a second use that is not asked for as one");
    misused(refused(loader, embd, OPTIONAL, BERTH_STATUS_INVALID_ARGUMENT), "nor as not required");
    expect(berth_create_tensor(loader, embd, TWICE, &second) == BERTH_STATUS_OK && second == first, "a second use in the same place");
    expect(berth_loader_tensor_count(loader) == 1, "is the same tensor");
    berth_loader_free(loader);
    struct berth_device cuda = {.name = "CUDA0", .host_type = NULL, .share = 1.0f};
    struct berth_load with_device = load;
    with_device.devices = &cuda;
    with_device.n_devices = 1;
    loader = fresh(model, NULL, &with_device);
    expect(berth_create_tensor(loader, embd, 0, &first) == BERTH_STATUS_OK && first && strcmp(first->target, "CPU") == 0, "embeddings on the CPU");
    expect(berth_create_tensor(loader, embd, TWICE | OPTIONAL, &second) == BERTH_STATUS_OK && second && second != first, "as the output");
    expect(second && strcmp(second->target, "CUDA0") == 0 && strcmp(second->reason, "duplicated") == 0, "on the device");
    expect(first && strcmp(first->target, "CPU") == 0 && berth_loader_tensor_count(loader) == 2, "beside the first");
    berth_loader_free(loader);

    /* Page-locked memory that was chosen, not named: the mapping instead, said so before and after it is allocated. Named, it is no downgrade. */
    struct berth_device gpu = {.name = "CUDA0", .host_type = "CUDA_Host", .share = 1.0f};
    struct berth_load chosen = load;
    chosen.devices = &gpu;
    chosen.n_devices = 1;
    chosen.gpu_layers = 0;
    loader = fresh(model, rules, &chosen);
    expect(berth_create_tensor(loader, "output_norm.weight", 0, &first) == BERTH_STATUS_OK && first, "a tensor with a host type to choose");
    expect(berth_create_tensor(loader, embd, 0, &second) == BERTH_STATUS_OK && second, "and one that a rule names a place for");
    for (int allocated = 0; first && second && allocated < 2; allocated++) {
        expect(first->downgraded && first->memory == BERTH_MEMORY_MAPPED && strcmp(first->reason, "auto_host_mapped") == 0, "is downgraded");
        expect(!first->buft_overridden && second->buft_overridden && !second->downgraded, "and no other is");
        expect(berth_loader_alloc(loader) == (allocated ? BERTH_STATUS_INVALID_ARGUMENT : BERTH_STATUS_OK), "memory is allocated once");
    }
    berth_loader_free(loader);

    /* A rule counts the tensors it decided: each once, and neither what is refused nor what is not made. */
    struct berth_rules *counting = NULL;
    check(berth_rules_new(NULL, 0, &counting), "berth_rules_new");
    check(berth_rules_parse(counting, "exps=ARENA,embd=CPU"), "berth_rules_parse");
    loader = fresh(model, counting, &load);
    expect(berth_create_tensor(loader, up, 0, &first) == BERTH_STATUS_OK && first, "a tensor that a rule decides");
    expect(counts(counting, 1, 0), "is one match");
    misused(refused(loader, up, 0, BERTH_STATUS_INVALID_ARGUMENT) && refused(loader, up, OPTIONAL, BERTH_STATUS_INVALID_ARGUMENT), "refused uses");
    misused(berth_create_tensor(loader, embd, 0, NULL) == BERTH_STATUS_INVALID_ARGUMENT, "nowhere to write to");
    for (int i = 0; i < 2; i++) {
        expect(berth_create_tensor(loader, up, TWICE, &second) == BERTH_STATUS_OK && second == first, "further uses");
        expect(berth_create_tensor(loader, "blk.1.ffn_up_exps.weight", SKIP, &second) == BERTH_STATUS_OK && !second, "skipped");
    }
    expect(counts(counting, 1, 0), "are no matches");
    expect(berth_create_tensor(loader, "blk.1.ffn_up_exps.weight", TWICE, &second) == BERTH_STATUS_OK && second, "a first use as a second one");
    expect(counts(counting, 2, 0), "is a match");
    misused(berth_loader_alloc(loader) == BERTH_STATUS_OK && refused(loader, embd, 0, BERTH_STATUS_INVALID_ARGUMENT), "too late");
    expect(berth_loader_fill(loader, NULL, NULL) == BERTH_STATUS_OK && counts(counting, 2, 0), "is no match, nor is what comes after");
    berth_loader_free(loader);
    berth_rules_free(counting);

    /* Lazy: never, when it is large (this one is not), always; then no rule is asked, and it is mapped whatever the load mode. */
    for (int mapped = 0; mapped < 2; mapped++) {
        load.mmap = mapped;
        enum berth_memory ruled = mapped ? BERTH_MEMORY_MAPPED : BERTH_MEMORY_PAGEABLE;
        load.lazy = 0;
        expect(made(model, rules, &load, embd, LAZY, "CPU_MMAP", ruled, 1, "rule_host"), "a small tensor is not read lazily");
        load.lazy = 1;
        expect(made(model, rules, &load, embd, LAZY, "CPU_MMAP", ruled, 1, "rule_host"), "no tensor is read lazily");
        load.lazy = 2;
        expect(made(model, rules, &load, embd, LAZY, "CPU", BERTH_MEMORY_MAPPED, -1, "lazy"), "a tensor that is read lazily");
        expect(made(model, rules, &load, embd, 0, "CPU_MMAP", ruled, 1, "rule_host"), "a tensor that may not be read lazily");
    }

    /* What is handed out is in the file's order, so no loader is to be had that calls it another. */
    load.mmap = true;
    load.lazy = 0;
    for (load.repack = 0; load.repack <= 3; load.repack++) {
        loader = NULL;
        enum berth_status opened = berth_loader_open(model, NULL, &load, &loader);
        bool fine = load.repack == 0 ? opened == BERTH_STATUS_OK && loader : opened == BERTH_STATUS_INVALID_ARGUMENT && !loader;
        expect(fine && (!load.repack || strstr(berth_last_error(), "repack")), "a loader that would have to interleave");
        berth_loader_free(loader);
    }
    berth_rules_free(rules);
    printf("misuse: %d cases\n%d checks, %d failed\n", misuses, checks, faults);
    return faults != 0;
}

int main(int argc, char **argv) {
    const char *rules_text = NULL, *parts[64];
    size_t n_parts = 0;
    bool cancel = false, noisy = false, flags = false, all_same = true;
    const char *replace = NULL, *spoiling = NULL;
    const char *only = NULL;
    bool late = false, during = false;
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
        } else if (strcmp(argv[i], "--spoil-during") == 0) {
            during = true;
        } else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--noisy") == 0) {
            noisy = true;
        } else if (strcmp(argv[i], "--flags") == 0) {
            flags = true;
        } else if (strcmp(argv[i], "--no-mmap") == 0) {
            load.mmap = false;
        } else if (strcmp(argv[i], "--cancel") == 0) {
            cancel = true;
        }
    }
    if (argc < 2) {
        return 2;
    }
    if (flags) {
        return try_flags(argv[1], load);
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
        const char *name = berth_loader_model_name(loader, i);
        if (only && !strstr(name, only)) {
            continue;
        }
        check(berth_create_tensor(loader, name, 0, &tensor), "berth_create_tensor");
        if (!tensor || tensor->data) {
            printf("ERROR tensor %zu: %s\n", i, tensor ? "has data before it is allocated" : "was not made");
            return 1;
        }
    }
    if (replace && rename(replace, argv[1]) != 0) {
        return 2;
    }
    if (spoiling && !late && !during) {
        spoil(parts[n_parts - 1], spoiling);
    }
    check(berth_loader_alloc(loader), "berth_loader_alloc");
    if (spoiling && late) {
        spoil(parts[n_parts - 1], spoiling);
    }
    struct progress progress = {.cancel = cancel, .path = during ? parts[n_parts - 1] : NULL, .how = spoiling};
    enum berth_status filled = berth_loader_fill(loader, on_progress, &progress);
    if (cancel) {
        if (filled != BERTH_STATUS_CANCELLED) {
            printf("ERROR a cancelled fill returned %d\n", (int) filled);
            return 1;
        }
        printf("CANCELLED at %llu of %llu\n", (unsigned long long) progress.last, (unsigned long long) progress.total);
        progress = (struct progress){.cancel = 0};
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
        printf("%s\t%s\t%s\t%d\t%d\t%d\t%s\t%zu\t%u\t%u\t%llu\t", t->name, t->target, berth_memory_text((int) t->memory), t->rule,
               t->buft_overridden, t->downgraded, t->reason, t->bytes, (unsigned) t->ggml_type, (unsigned) t->part, (unsigned long long) t->offset);
        printf("%lld,%lld,%lld,%lld\t", (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3]);
        printf("%zu,%zu,%zu,%zu\t%s\n", t->nb[0], t->nb[1], t->nb[2], t->nb[3], same ? "same" : "DIFFERENT");
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
