/* The time of day as the file CLOCK_FILE says: one or two doubles, in seconds. The first is by how much it is wrong. If
   there is a second one that is not 0, the time stands still when it gets there. Preloaded into servers of tests/faults
   and tests/conformance; monotonic clocks go on as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const volatile double *wrong_by, *stands_at;

/* Of a file with one double the second one is 0: it lies behind the end, on the same page. */
__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *map = fd < 0 ? MAP_FAILED : mmap(0, 2 * sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) stands_at = (wrong_by = map) + 1;
}

static void change(struct timespec *now) {
    if (!wrong_by) return;
    long long changed = now->tv_sec * SECOND + now->tv_nsec + (long long)(*wrong_by * SECOND);
    long long end = (long long)(*stands_at * SECOND);
    if (end && changed > end) changed = end;
    now->tv_sec = changed / SECOND;
    now->tv_nsec = changed % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*right)(clockid_t, struct timespec *);
    if (!right) right = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = right(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) change(now);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (kept) *kept = precise.tv_sec;
    return precise.tv_sec;
}
