/* Preloaded: the clock that can be set is the true one and as many seconds as the file of SET_CLOCK holds. The monotonic
   clock and sleeps are true. libfaketime 0.9.10 cannot do it: with it Python's time.sleep fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long none = 0, *offset = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SET_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) offset = found;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}

/* Until when somebody waits, for the kernel; no machine has been up for a thousand million seconds. */
static struct timespec true_moment(const struct timespec *at) {
    struct timespec moment = *at;
    if (moment.tv_sec > 1000000000) moment.tv_sec -= *offset;
    return moment;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict at) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec moment = true_moment(at);
    if (!next) *(void **)&next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* an older one is there too */
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return next(cond, mutex, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict at) {
    static int (*next)(sem_t *, const struct timespec *);
    struct timespec moment = true_moment(at);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "sem_timedwait");
    return next(semaphore, &moment);
}
