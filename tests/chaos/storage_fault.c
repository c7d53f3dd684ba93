/* Lets calls on files below CHAOS_STORAGE_ROOT fail while the process runs, as a remounted, broken or vanished mount does.

   CHAOS_STORAGE names a file of two 32-bit numbers, which is mapped: the errno (0: none), and whether reading works. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static volatile const int32_t *fault;
static const char *root;
static size_t length;

#define NEXT(name, ...) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)
#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & (O_CREAT | O_TRUNC)))

__attribute__((constructor)) static void map_fault(void) {
  const char *path = getenv("CHAOS_STORAGE");
  root = getenv("CHAOS_STORAGE_ROOT");
  if (!path || !root) return;
  length = strlen(root);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *mapped = mmap(NULL, 2 * sizeof(int32_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) fault = mapped;
}

/* Whether a call on this path fails; relative ones are of no folder of ours. */
static int fails(const char *path, int writes) {
  if (!fault || !fault[0] || (!writes && fault[1]) || !path || strncmp(path, root, length)) return 0;
  errno = fault[0];
  return 1;
}

static int descriptor_fails(int descriptor, int writes) {
  char link[64], path[PATH_MAX];
  if (!fault || !fault[0] || (!writes && fault[1])) return 0;
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  errno = before;
  if (size <= 0) return 0;
  path[size] = 0;
  return fails(path, writes);
}

#define OPENING(name)                                            \
  int name(const char *path, int flags, ...) {                   \
    va_list rest;                                                \
    va_start(rest, flags);                                       \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                \
    return fails(path, WRITES(flags)) ? -1 : NEXT(name, path, flags, mode); \
  }
#define OPENING_AT(name)                                         \
  int name(int folder, const char *path, int flags, ...) {       \
    va_list rest;                                                \
    va_start(rest, flags);                                       \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                \
    return fails(path, WRITES(flags)) ? -1 : NEXT(name, folder, path, flags, mode); \
  }
#define STREAM(name)                                             \
  FILE *name(const char *path, const char *mode) {               \
    return fails(path, strpbrk(mode, "wa+") != NULL) ? NULL : NEXT(name, path, mode); \
  }

OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)
STREAM(fopen)
STREAM(fopen64)

ssize_t read(int descriptor, void *bytes, size_t count) {
  return descriptor_fails(descriptor, 0) ? -1 : NEXT(read, descriptor, bytes, count);
}
ssize_t write(int descriptor, const void *bytes, size_t count) {
  return descriptor_fails(descriptor, 1) ? -1 : NEXT(write, descriptor, bytes, count);
}
int fsync(int descriptor) { return descriptor_fails(descriptor, 1) ? -1 : NEXT(fsync, descriptor); }
int mkdir(const char *path, mode_t mode) { return fails(path, 1) ? -1 : NEXT(mkdir, path, mode); }
int rename(const char *from, const char *to) { return fails(to, 1) ? -1 : NEXT(rename, from, to); }
int unlink(const char *path) { return fails(path, 1) ? -1 : NEXT(unlink, path); }
int rmdir(const char *path) { return fails(path, 1) ? -1 : NEXT(rmdir, path); }
