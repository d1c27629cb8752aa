/*
 * berth_arena_*: pieces of a file, from C, as an engine takes them for its experts.
 *
 *     arena_peer DIRECTORY BAD SMALL
 *
 * DIRECTORY takes arenas, BAD can have none, SMALL ("-": there is none) is a file system of about 8 MiB. Prints "ok: N checks", or what failed.
 */
#include <berth.h>
#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static unsigned long checks, failures;

#define CHECK(condition)                                                                                                                   \
    do {                                                                                                                                   \
        checks++;                                                                                                                          \
        if (!(condition)) {                                                                                                                \
            failures++;                                                                                                                    \
            printf("FAILED at line %d: %s (%s)\n", __LINE__, #condition, berth_last_error());                                              \
        }                                                                                                                                  \
    } while (0)

static int warnings;
static char last_warning[1024];

static void on_message(int level, const char *line, void *user) {
    (void)user;
    if (level == 2) {
        warnings++;
        snprintf(last_warning, sizeof(last_warning), "%s", line);
    }
}

static struct berth_arena *open_in(const char *directory, const char *name, size_t size) {
    struct berth_arena *arena = NULL;
    CHECK(berth_arena_open(directory, name, size, -1, &arena) == BERTH_STATUS_OK && arena != NULL);
    return arena;
}

static bool report_has(const char *text) {
    char *json = NULL;
    if (berth_report_json(&json) != BERTH_STATUS_OK) {
        return false;
    }
    const bool found = strstr(json, text) != NULL;
    berth_string_free(json);
    return found;
}

static bool all_are(const uint8_t *p, size_t n, uint8_t value) {
    for (size_t i = 0; i < n; i++) {
        if (p[i] != value) {
            return false;
        }
    }
    return true;
}

/* Whether the page at an address is one of a file, as the kernel tells. */
static bool lies_in_a_file(const void *address) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    bool found = false;
    while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
        unsigned long start = 0, end = 0, inode = 0;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s %*s %*s %lu", &start, &end, rights, &inode) == 4 && start <= (uintptr_t)address && (uintptr_t)address < end) {
            found = inode != 0 && rights[3] == 's';
        }
    }
    if (maps != NULL) {
        fclose(maps);
    }
    return found;
}

/* Bytes on disk of the nameless files in a directory that this process has open. */
static size_t reserved_in(const char *directory) {
    DIR *fds = opendir("/proc/self/fd");
    size_t bytes = 0;
    for (struct dirent *entry = fds != NULL ? readdir(fds) : NULL; entry != NULL; entry = readdir(fds)) {
        char link[300], target[4096];
        struct stat file;
        snprintf(link, sizeof(link), "/proc/self/fd/%s", entry->d_name);
        const ssize_t n = readlink(link, target, sizeof(target) - 1);
        if (n > 0 && stat(link, &file) == 0) {
            target[n] = 0;
            bytes += strncmp(target, directory, strlen(directory)) == 0 && file.st_nlink == 0 ? (size_t)file.st_blocks * 512 : 0;
        }
    }
    if (fds != NULL) {
        closedir(fds);
    }
    return bytes;
}

static void pieces_of_a_file(const char *directory) {
    CHECK(reserved_in(directory) == 0);
    const int warned = warnings;
    struct berth_arena *arena = open_in(directory, "blk.0 node 0", 20 * MIB);
    CHECK(reserved_in(directory) >= 20 * MIB); /* reserved, so that no write can fail later */
    const size_t sizes[] = {1, 2 * MIB, 3 * MIB + 1, 64, 5 * MIB};
    uint8_t *pieces[5];
    for (size_t i = 0; i < 5; i++) {
        bool in_file = false;
        pieces[i] = berth_arena_alloc(arena, sizes[i], &in_file);
        CHECK(pieces[i] != NULL && in_file && lies_in_a_file(pieces[i]));
        CHECK((uintptr_t)pieces[i] % 4096 == 0 && all_are(pieces[i], sizes[i], 0));
        memset(pieces[i], (int)i + 1, sizes[i]);
    }
    for (size_t i = 0; i < 5; i++) {
        CHECK(all_are(pieces[i], sizes[i], (uint8_t)(i + 1)));
        CHECK(i == 0 || (size_t)(pieces[i] - pieces[i - 1]) == (sizes[i - 1] + 2 * MIB - 1) / (2 * MIB) * (2 * MIB));
    }
    CHECK(warnings == warned);
    CHECK(report_has("\"name\": \"blk.0 node 0\"") && report_has("\"got\": \"arena\""));
    berth_arena_close(arena);
    CHECK(reserved_in(directory) == 0); /* given back */
}

/* 10 MiB are five pieces; what comes after them is ordinary memory. */
static void a_full_arena(const char *directory) {
    const int warned = warnings;
    struct berth_arena *arena = open_in(directory, "full", 9 * MIB);
    for (int i = 0; i < 8; i++) {
        bool in_file = i >= 5;
        uint8_t *piece = berth_arena_alloc(arena, 3000, &in_file);
        CHECK(piece != NULL && in_file == (i < 5) && lies_in_a_file(piece) == in_file && all_are(piece, 3000, 0));
    }
    CHECK(warnings == warned + 1 && strstr(last_warning, "'full'") != NULL);
    CHECK(report_has("\"reason\": \"arena_full\"") && report_has("\"bytes\": 9000"));
    /* A larger one than all that is left does not spoil what would fit. */
    berth_arena_close(arena);
    arena = open_in(directory, "large", 4 * MIB);
    bool in_file = true;
    CHECK(berth_arena_alloc(arena, 6 * MIB, &in_file) != NULL && !in_file);
    CHECK(berth_arena_alloc(arena, 4 * MIB, &in_file) != NULL && in_file);
    berth_arena_close(arena);
}

static void no_file_asked_for(void) {
    const int warned = warnings;
    for (int i = 0; i < 2; i++) {
        struct berth_arena *arena = open_in(i == 0 ? NULL : "", "unset", MIB);
        bool in_file = true;
        uint8_t *piece = berth_arena_alloc(arena, 5 * MIB, &in_file); /* as much as there is memory */
        CHECK(piece != NULL && !in_file && !lies_in_a_file(piece) && all_are(piece, 5 * MIB, 0));
        memset(piece, 7, 5 * MIB);
        CHECK(berth_arena_alloc(arena, 64, NULL) != NULL);
        CHECK(!report_has("\"name\": \"unset\""));
        berth_arena_close(arena);
    }
    CHECK(warnings == warned);
}

static void no_file_to_be_had(const char *directory, size_t size, const char *reason) {
    const int warned = warnings;
    struct berth_arena *arena = open_in(directory, "refused", size);
    CHECK(warnings == warned + 1);
    bool in_file = true;
    uint8_t *piece = berth_arena_alloc(arena, MIB, &in_file);
    CHECK(piece != NULL && !in_file && all_are(piece, MIB, 0));
    char text[64];
    snprintf(text, sizeof(text), "\"reason\": \"%s\"", reason);
    CHECK(report_has(text));
    CHECK(warnings == warned + 1);
    berth_arena_close(arena);
}

/* Calls that were to be refused. */
static unsigned long misuses;

#define REFUSED(condition)                                                                                                                 \
    do {                                                                                                                                   \
        misuses++;                                                                                                                         \
        CHECK(condition);                                                                                                                  \
    } while (0)

static void misuse(const char *directory) {
    struct berth_arena *arena = NULL;
    REFUSED(berth_arena_open(directory, NULL, MIB, -1, &arena) == BERTH_STATUS_INVALID_ARGUMENT);
    REFUSED(berth_arena_open(directory, "\xff\xfe", MIB, -1, &arena) == BERTH_STATUS_INVALID_ARGUMENT);
    REFUSED(berth_arena_open(directory, "x", 0, -1, &arena) == BERTH_STATUS_INVALID_ARGUMENT);
    REFUSED(berth_arena_open(directory, "x", MIB, -2, &arena) == BERTH_STATUS_INVALID_ARGUMENT);
    REFUSED(berth_arena_open(directory, "x", MIB, 4000, &arena) == BERTH_STATUS_INVALID_ARGUMENT);
    CHECK(strstr(berth_last_error(), "4000") != NULL);
    REFUSED(berth_arena_open(directory, "x", MIB, -1, NULL) == BERTH_STATUS_INVALID_ARGUMENT);
    REFUSED(berth_arena_open(directory, "x", SIZE_MAX, -1, &arena) == BERTH_STATUS_OUT_OF_MEMORY);
    char *name = malloc(100001);
    CHECK(name != NULL);
    memset(name, 'x', 100000);
    name[100000] = 0;
    REFUSED(berth_arena_open(directory, name, MIB, -1, &arena) == BERTH_STATUS_INVALID_ARGUMENT && strlen(berth_last_error()) < 500);
    free(name);
    CHECK(arena == NULL);
    REFUSED(berth_arena_alloc(NULL, MIB, NULL) == NULL);
    berth_arena_close(NULL);
    CHECK(berth_arena_open(directory, "node 0", MIB, 0, &arena) == BERTH_STATUS_OK);
    bool in_file = true;
    REFUSED(berth_arena_alloc(arena, 0, &in_file) == NULL && in_file);
    REFUSED(berth_arena_alloc(arena, SIZE_MAX, &in_file) == NULL && in_file);
    REFUSED(berth_arena_alloc(arena, (size_t)1 << 60, &in_file) == NULL && in_file);
    CHECK(berth_arena_alloc(arena, MIB, &in_file) != NULL && in_file);
    berth_arena_close(arena);
    arena = NULL;
    CHECK(berth_arena_open(NULL, "plain on node 0", MIB, 0, &arena) == BERTH_STATUS_OK);
    CHECK(berth_arena_alloc(arena, 3 * MIB, NULL) != NULL);
    berth_arena_close(arena);
}

static struct berth_arena *shared;

static void *take(void *mark) {
    for (int i = 0; i < 20; i++) {
        uint8_t *piece = berth_arena_alloc(shared, 10000, NULL);
        if (piece == NULL || !all_are(piece, 10000, 0)) {
            return "a piece that was not new";
        }
        memset(piece, *(const uint8_t *)mark, 10000);
    }
    return NULL;
}

static void many_threads(const char *directory) {
    pthread_t threads[4];
    uint8_t marks[4] = {1, 2, 3, 4};
    shared = open_in(directory, "shared", 60 * MIB); /* 30 of the 80 pieces */
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, take, &marks[i]) == 0);
    }
    for (int i = 0; i < 4; i++) {
        void *wrong = NULL;
        CHECK(pthread_join(threads[i], &wrong) == 0 && wrong == NULL);
    }
    CHECK(report_has("\"bytes\": 500000"));
    berth_arena_close(shared);
}

/* With BERTH_STRICT=1, instead of all else. */
static void strict(const char *directory, const char *bad) {
    struct berth_arena *arena = NULL;
    CHECK(berth_arena_open(bad, "strict", MIB, -1, &arena) == BERTH_STATUS_UNSUPPORTED && arena == NULL);
    arena = open_in(directory, "strict", 2 * MIB);
    CHECK(berth_arena_alloc(arena, 64, NULL) != NULL);
    CHECK(berth_arena_alloc(arena, 64, NULL) == NULL && strstr(berth_last_error(), "BERTH_STRICT") != NULL);
    berth_arena_close(arena);
    arena = open_in(NULL, "strict", 2 * MIB); /* nobody asked for a file */
    CHECK(berth_arena_alloc(arena, 64, NULL) != NULL);
    berth_arena_close(arena);
}

/* With BERTH_TEST_BAD_SETTING and a variable of a bad value, instead of all else. */
static void bad_setting(const char *directory) {
    struct berth_arena *arena = NULL;
    CHECK(berth_arena_open(directory, "bad", MIB, -1, &arena) == BERTH_STATUS_CONFIG);
    CHECK(berth_arena_open(NULL, "bad", MIB, -1, &arena) == BERTH_STATUS_CONFIG);
    CHECK(arena == NULL);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "see the top of arena_peer.c\n");
        return 2;
    }
    berth_log_set(on_message, NULL);
    if (getenv("BERTH_TEST_BAD_SETTING") != NULL) {
        bad_setting(argv[1]);
    } else if (getenv("BERTH_STRICT") != NULL) {
        strict(argv[1], argv[2]);
    } else {
        pieces_of_a_file(argv[1]);
        a_full_arena(argv[1]);
        no_file_asked_for();
        no_file_to_be_had(argv[2], 4 * MIB, "arena_directory");
        no_file_to_be_had(argv[1], (size_t)1 << 60, "arena_no_space");
        if (strcmp(argv[3], "-") != 0) {
            no_file_to_be_had(argv[3], 64 * MIB, "arena_no_space");
        }
        misuse(argv[1]);
        many_threads(argv[1]);
    }
    berth_log_set(NULL, NULL);
    if (misuses > 0) {
        printf("misuse: %lu cases\n", misuses);
    }
    printf("%s: %lu checks\n", failures == 0 ? "ok" : "FAILED", checks);
    return failures != 0;
}
