// Delays flushes and large writes of files, for LD_PRELOAD: a slow disk for the processes that call the C library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static const long FLUSH_MS = 500, WRITE_MS = 100;
static const size_t LARGE = 1 << 16;

static void rest(long ms) {
  struct timespec left = {ms / 1000, ms % 1000 * 1000000};
  while (nanosleep(&left, &left)) {}
}

static int is_file(int fd) {
  struct stat about;
  return fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int fsync(int fd) { NEXT(fsync); rest(FLUSH_MS); return next(fd); }
int fdatasync(int fd) { NEXT(fdatasync); rest(FLUSH_MS); return next(fd); }

ssize_t write(int fd, const void *data, size_t size) {
  NEXT(write);
  if (size >= LARGE && is_file(fd)) rest(WRITE_MS);
  return next(fd, data, size);
}
