/* Shifts the wall clock of single processes, as ntpd or an operator may. For LD_PRELOAD.

   The file that TRINITY_TEST_CLOCK names has slots of two 64-bit integers: a pid, and nanoseconds to add. Absolute
   deadlines on the wall clock are shifted back before the kernel sees them, for its clock does not jump. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 64
#define SECOND 1000000000LL

static volatile int64_t *slots;

__attribute__((constructor)) static void map_slots(void) {
  const char *name = getenv("TRINITY_TEST_CLOCK");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  void *place = file < 0 ? MAP_FAILED : mmap(NULL, 16 * SLOTS, PROT_READ, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  if (place != MAP_FAILED) slots = place;
}

static int64_t offset(void) {
  int64_t pid = 0;
  for (int i = 0; slots && i < SLOTS && slots[2 * i]; i++) {
    if (!pid) pid = getpid();
    if (slots[2 * i] == pid) return slots[2 * i + 1];
  }
  return 0;
}

static struct timespec plus(const struct timespec *at, int64_t nanoseconds) {
  int64_t all = at->tv_sec * SECOND + at->tv_nsec + nanoseconds;
  if (all < 0) all = 0;
  return (struct timespec){.tv_sec = all / SECOND, .tv_nsec = all % SECOND};
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  int result = real(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *now = plus(now, offset());
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec at;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &at);
  now->tv_sec = at.tv_sec, now->tv_usec = at.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (now) *now = at.tv_sec;
  return at.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  struct timespec at = *until, now;  /* deadlines on the monotonic clock are nearer to its beginning */
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (until->tv_sec > 2 * now.tv_sec + 100000000) at = plus(until, -offset());
  return REAL(pthread_cond_timedwait)(condition, mutex, &at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  struct timespec at = plus(until, -offset());
  return REAL(sem_timedwait)(semaphore, &at);
}

long syscall(long number, ...) {
  long a[6];
  struct timespec at;
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] && offset()) {
    at = plus((struct timespec *)a[3], -offset());
    a[3] = (long)&at;
  }
  return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
