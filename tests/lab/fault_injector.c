/*
 * A library for LD_PRELOAD that lets the n-th change of the file system, or the n-th read, fail, counted over all
 * processes.
 *
 * FAULT_ROOT is the folder whose calls count. FAULT_CONTROL is a file that every process maps: the counter, n and
 * the fault. A library sees calls of the C library alone: not those of static programs, and no raw system calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define KILL (-1)
/* Instead of whether a call needs space: it reads. */
#define READS 2

/* tests/lab/faults.py writes and reads this. */
struct control {
    int64_t count;  /* calls below FAULT_ROOT so far */
    int64_t wanted; /* the call that fails, from 1; 0 for none */
    int32_t fault;  /* an errno, or KILL */
    int32_t stays;  /* whether all later calls that need space fail too, as on a full disk */
    int32_t hit;    /* whether the fault was there */
    int32_t pid;    /* of the process that saw it */
    int64_t reads;  /* whether reads count, and no changes */
    char call[32];
    char path[1024];
    char only[256]; /* a pattern of paths: no others count; "" for all */
};

static struct control *control;
static char root[PATH_MAX];
static size_t root_length;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("FAULT_CONTROL"), *folder = getenv("FAULT_ROOT");
    if (!file || !folder)
        return;
    int handle = open(file, O_RDWR | O_CLOEXEC);
    if (handle < 0)
        return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    if (found == MAP_FAILED)
        return;
    root_length = (size_t)snprintf(root, sizeof root, "%s", folder);
    control = found;
}

/* Return whether the call fails; errno is set then. `needs`: it needs space on the disk. */
static int fails(const char *call, const char *path, int needs) {
    if (!control || strncmp(path, root, root_length) || (path[root_length] && path[root_length] != '/'))
        return 0;
    if (control->reads != (needs == READS))
        return 0;
    if (control->only[0] && fnmatch(control->only, path + root_length, 0))
        return 0;
    int64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (!control->wanted || number < control->wanted || (number > control->wanted && !(control->stays && needs)))
        return 0;
    if (number == control->wanted) {
        snprintf(control->call, sizeof control->call, "%s", call);
        snprintf(control->path, sizeof control->path, "%s", path + root_length);
        control->pid = getpid();
        __atomic_store_n(&control->hit, 1, __ATOMIC_SEQ_CST);
    }
    if (control->fault == KILL) {
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
    errno = control->fault;
    return 1;
}

static int fails_at(const char *call, int folder, const char *path, int needs) {
    char full[2 * PATH_MAX], base[PATH_MAX];
    int kept = errno;
    if (!control || !path)
        return 0;
    if (path[0] == '/') {
        snprintf(full, sizeof full, "%s", path);
    } else {
        char link[64];
        ssize_t length;
        if (folder == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(link, base, sizeof base - 1);
        if (length < 0) {
            errno = kept;
            return 0;
        }
        base[length] = 0;
        snprintf(full, sizeof full, "%s/%s", base, path);
    }
    errno = kept;
    return fails(call, full, needs);
}

static int fails_on(const char *call, int handle, int needs) {
    char link[64], full[PATH_MAX];
    int kept = errno;
    if (!control)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, full, sizeof full - 1);
    errno = kept;
    if (length < 0)
        return 0;
    full[length] = 0;
    return fails(call, full, needs);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define ON(result, name, needs, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        return fails_on(#name, handle, needs) ? -1 : real arguments; \
    }

#define AT(name, folder, path, needs, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        return fails_at(#name, folder, path, needs) ? -1 : real arguments; \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        mode_t mode = 0; \
        va_list more; \
        va_start(more, flags); \
        if (flags & (O_CREAT | __O_TMPFILE)) \
            mode = va_arg(more, mode_t); \
        va_end(more); \
        REAL(name); \
        if (flags & (O_CREAT | O_TRUNC) && fails_at(#name, AT_FDCWD, path, 1)) \
            return -1; \
        if (!(flags & (O_CREAT | O_TRUNC)) && fails_at(#name, AT_FDCWD, path, READS)) \
            return -1; \
        return real(path, flags, mode); \
    }

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        mode_t mode = 0; \
        va_list more; \
        va_start(more, flags); \
        if (flags & (O_CREAT | __O_TMPFILE)) \
            mode = va_arg(more, mode_t); \
        va_end(more); \
        REAL(name); \
        if (flags & (O_CREAT | O_TRUNC) && fails_at(#name, folder, path, 1)) \
            return -1; \
        if (!(flags & (O_CREAT | O_TRUNC)) && fails_at(#name, folder, path, READS)) \
            return -1; \
        return real(folder, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ON(ssize_t, read, READS, (int handle, void *data, size_t size), (handle, data, size))
ON(ssize_t, pread, READS, (int handle, void *data, size_t size, off_t at), (handle, data, size, at))
ON(ssize_t, pread64, READS, (int handle, void *data, size_t size, off64_t at), (handle, data, size, at))
ON(ssize_t, readv, READS, (int handle, const struct iovec *parts, int count), (handle, parts, count))
ON(ssize_t, preadv, READS, (int handle, const struct iovec *parts, int count, off_t at), (handle, parts, count, at))
ON(ssize_t, preadv64, READS, (int handle, const struct iovec *parts, int count, off64_t at), (handle, parts, count, at))

ON(ssize_t, write, 1, (int handle, const void *data, size_t size), (handle, data, size))
ON(ssize_t, pwrite, 1, (int handle, const void *data, size_t size, off_t at), (handle, data, size, at))
ON(ssize_t, pwrite64, 1, (int handle, const void *data, size_t size, off64_t at), (handle, data, size, at))
ON(ssize_t, writev, 1, (int handle, const struct iovec *parts, int count), (handle, parts, count))
ON(ssize_t, pwritev, 1, (int handle, const struct iovec *parts, int count, off_t at), (handle, parts, count, at))
ON(ssize_t, pwritev64, 1, (int handle, const struct iovec *parts, int count, off64_t at), (handle, parts, count, at))
ON(ssize_t, sendfile, 1, (int handle, int from, off_t *at, size_t size), (handle, from, at, size))
ON(ssize_t, sendfile64, 1, (int handle, int from, off64_t *at, size_t size), (handle, from, at, size))
ON(ssize_t, copy_file_range, 1,
   (int from, off64_t *at, int handle, off64_t *to, size_t size, unsigned flags), (from, at, handle, to, size, flags))
ON(int, ftruncate, 1, (int handle, off_t size), (handle, size))
ON(int, ftruncate64, 1, (int handle, off64_t size), (handle, size))
ON(int, fsync, 1, (int handle), (handle))
ON(int, fdatasync, 1, (int handle), (handle))

AT(rename, AT_FDCWD, to, 0, (const char *from, const char *to), (from, to))
AT(renameat, folder, to, 0, (int old, const char *from, int folder, const char *to), (old, from, folder, to))
AT(renameat2, folder, to, 0,
   (int old, const char *from, int folder, const char *to, unsigned flags), (old, from, folder, to, flags))
AT(link, AT_FDCWD, to, 1, (const char *from, const char *to), (from, to))
AT(linkat, folder, to, 1,
   (int old, const char *from, int folder, const char *to, int flags), (old, from, folder, to, flags))
AT(symlink, AT_FDCWD, to, 1, (const char *from, const char *to), (from, to))
AT(symlinkat, folder, to, 1, (const char *from, int folder, const char *to), (from, folder, to))
AT(mkdir, AT_FDCWD, path, 1, (const char *path, mode_t mode), (path, mode))
AT(mkdirat, folder, path, 1, (int folder, const char *path, mode_t mode), (folder, path, mode))
AT(unlink, AT_FDCWD, path, 0, (const char *path), (path))
AT(unlinkat, folder, path, 0, (int folder, const char *path, int flags), (folder, path, flags))
AT(rmdir, AT_FDCWD, path, 0, (const char *path), (path))
