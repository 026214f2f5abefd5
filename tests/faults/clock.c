/* The time of day, wrong by what the file CLOCK_FILE says: one double, in seconds. Preloaded into a server by
   tests/faults/test_broker_clock.py; monotonic clocks go on as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *wrong_by;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *map = fd < 0 ? MAP_FAILED : mmap(0, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) wrong_by = map;
}

static time_t seconds(void) { return wrong_by ? (time_t)*wrong_by : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*right)(clockid_t, struct timespec *);
    if (!right) right = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = right(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
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
