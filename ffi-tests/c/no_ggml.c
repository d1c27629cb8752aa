/*
 * A program without ggml opens Berth: every entry point must refuse with one clear line, and closing it again must leave nothing behind.
 *
 *     no_ggml LIBBERTH [thread]
 *
 * Includes no header of ggml or Berth: what is called is all that a loader knows.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const char *path;
static int failures;

static void expect(int condition, const char *what) {
    if (!condition) {
        printf("FAILED: %s\n", what);
        failures++;
    }
}

static void *ask(void *unused) {
    (void)unused;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("FAILED: %s\n", dlerror());
        failures++;
        return NULL;
    }
    int (*score)(void) = NULL;
    void *(*init)(void) = NULL, *(*pointers[4])(void) = {NULL};
    const char *(*last)(void) = NULL, *(*version)(void) = NULL;
    const char *const names[] = {"berth_reg", "berth_buft_cpu_mmap", "berth_buft_cuda_host", "berth_buft_arena"};
    *(void **)(&score) = dlsym(library, "ggml_backend_score");
    *(void **)(&init) = dlsym(library, "ggml_backend_init");
    *(void **)(&last) = dlsym(library, "berth_last_error");
    *(void **)(&version) = dlsym(library, "berth_version");
    expect(last()[0] == 0, "an error of this thread before any call");
    expect(strlen(version()) >= 5, "no version");
    expect(score() == 0, "a score above 0");
    expect(init() == NULL, "a registry");
    for (int i = 0; i < 4; i++) {
        *(void **)(&pointers[i]) = dlsym(library, names[i]);
        expect(pointers[i]() == NULL, names[i]);
        expect(strstr(last(), "no ggml in this process") != NULL, last());
        expect(strchr(last(), '\n') == NULL, "more than one line");
    }
    expect(dlclose(library) == 0, "dlclose");
    return NULL;
}

int main(int argc, char **argv) {
    path = argc > 1 ? argv[1] : "libberth.so";
    if (argc > 2) {
        /* What Berth keeps for a thread is given back when the thread ends, which here is after the library was closed. */
        pthread_t thread;
        expect(pthread_create(&thread, NULL, ask, NULL) == 0 && pthread_join(thread, NULL) == 0, "no thread");
    }
    ask(NULL);
    printf(failures == 0 ? "ok\n" : "failed\n");
    return failures != 0;
}
