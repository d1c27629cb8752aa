// To be preloaded: where the process spends its time. At each tick of processor time (1 to 10 ms), the address at which the running thread is goes to
// a list; at the end the list and the map of the process are written to the file that SAMPLE_TO names. For machines without `perf`.

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <ucontext.h>

enum { MOST = 1 << 21 };
static unsigned long samples[MOST];
static atomic_size_t count;

static void sample(int signal, siginfo_t * info, void * context) {
    (void) signal;
    (void) info;
    const int kept = errno;
    const size_t i = atomic_fetch_add(&count, 1);
    if (i < MOST) {
        samples[i] = (unsigned long) ((const ucontext_t *) context)->uc_mcontext.gregs[REG_RIP];
    }
    errno = kept;
}

static void every(long microseconds) {
    const struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_PROF, &timer, NULL);
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {0};
    action.sa_sigaction = sample;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    sigaction(SIGPROF, &action, NULL);
    every(1000);
}

__attribute__((destructor)) static void end(void) {
    every(0);
    const char * path = getenv("SAMPLE_TO");
    FILE * out = path != NULL ? fopen(path, "w") : NULL;
    FILE * maps = fopen("/proc/self/maps", "r");
    if (out == NULL || maps == NULL) {
        fprintf(stderr, "sample: SAMPLE_TO or /proc/self/maps cannot be opened\n");
        return;
    }
    const size_t n = count < MOST ? count : MOST;
    for (size_t i = 0; i < n; i++) {
        fprintf(out, "%lx\n", samples[i]);
    }
    for (int c = fgetc(maps); c != EOF; c = fgetc(maps)) {
        fputc(c, out);
    }
    fclose(maps);
    fclose(out);
}
