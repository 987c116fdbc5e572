/* A library to preload: it records every change of a directory tree, makes fsync cost nothing, and lets calls fail.

   recorder_start names the tree, the log, and which call fails. A record is a `struct record`, two paths and the bytes
   written. One lock covers a call and its record, so that the log has the order in which things happened. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct record {
    uint32_t op, error, path, other;
    uint64_t inode, offset, bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static int log_fd = -1, fault_error;
static long calls, first_fault, last_fault;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* Record the tree `where` to the file `log`. Calls number [first, last) fail with `error`; writes are cut short if it
   is 0. */
void recorder_start(const char *where, const char *log, long first, long last, int error)
{
    log_fd = REAL(open)(log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    calls = 0, first_fault = first, last_fault = last, fault_error = error;
    snprintf(root, sizeof root, "%s", where);
}

static int inside(const char *path)
{
    size_t n = strlen(root);
    return log_fd >= 0 && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

/* The path with symbolic links resolved but for its last part; whether it lies in the tree. */
static int resolve(int dir, const char *path, char *out)
{
    char whole[2 * PATH_MAX] = "", parent[PATH_MAX];
    if (log_fd < 0)
        return 0;
    if (path[0] != '/' && dir == AT_FDCWD && getcwd(whole, PATH_MAX))
        strcat(whole, "/");
    else if (path[0] != '/') {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        if (readlink(link, whole, PATH_MAX - 2) < 0)
            return 0;
        strcat(whole, "/");
    }
    strncat(whole, path, PATH_MAX - 1);
    while (strlen(whole) > 1 && whole[strlen(whole) - 1] == '/')
        whole[strlen(whole) - 1] = 0;
    char *last = strrchr(whole, '/');
    *last = 0;
    if (!realpath(last == whole ? "/" : whole, parent))
        return 0;
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", parent, last + 1);
    return inside(out);
}

/* The file or directory behind a descriptor, if it lies in the tree. */
static int behind(int fd, struct stat *status)
{
    char link[64], path[PATH_MAX] = "";
    if (log_fd < 0 || fstat(fd, status) || !(S_ISREG(status->st_mode) || S_ISDIR(status->st_mode)))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, PATH_MAX - 1) > 0 && inside(path);
}

static void record(int op, int error, const char *path, const char *other, uint64_t inode, uint64_t offset,
                   const struct iovec *data, int count, uint64_t bytes)
{
    struct record r = {op, error, strlen(path), strlen(other), inode, offset, bytes};
    struct iovec head[3] = {{&r, sizeof r}, {(void *)path, r.path}, {(void *)other, r.other}};
    int saved = errno;
    if (REAL(writev)(log_fd, head, 3) < 0)
        abort();
    for (int i = 0; data && i < count && bytes; i++) {
        uint64_t part = data[i].iov_len < bytes ? data[i].iov_len : bytes;
        if (REAL(write)(log_fd, data[i].iov_base, part) != (ssize_t)part)
            abort();
        bytes -= part;
    }
    errno = saved;
}

/* Whether the next call is one that is to fail. */
static int fails(void)
{
    long call = calls++;
    return call >= first_fault && call < last_fault;
}

/* A call that changes names, or a file's size: record it, or let it fail. */
#define CHANGE(op, watched, call, path, other, inode, offset, bytes)                                                  \
    do {                                                                                                               \
        if (!(watched))                                                                                                \
            return call;                                                                                               \
        pthread_mutex_lock(&lock);                                                                                     \
        int wrong = fails() ? (fault_error ? fault_error : EIO) : 0, done = -1;                                        \
        if (wrong)                                                                                                     \
            errno = wrong;                                                                                             \
        else                                                                                                           \
            done = call;                                                                                               \
        if (done >= 0 || wrong)                                                                                        \
            record(op, wrong, path, other, inode, offset, NULL, 0, bytes);                                             \
        pthread_mutex_unlock(&lock);                                                                                   \
        return done;                                                                                                   \
    } while (0)

static uint64_t inode_at(int dir, const char *path, int flags)
{
    struct stat status;
    return fstatat(dir, path, &status, flags) ? 0 : status.st_ino;
}

static int opened(int dir, const char *path, int flags, mode_t mode)
{
    char where[PATH_MAX];
    struct stat status;
    int unnamed = (flags & O_TMPFILE) == O_TMPFILE;
    if (!(flags & (O_CREAT | O_TRUNC) || unnamed) || !resolve(dir, path, where))
        return REAL(openat)(dir, path, flags, mode);
    pthread_mutex_lock(&lock);
    int is_new = unnamed || fstatat(dir, path, &status, 0), fd = -1;
    int wrong = fails() ? (fault_error ? fault_error : EIO) : 0;
    if (wrong)
        errno = wrong;
    else
        fd = REAL(openat)(dir, path, flags, mode);
    if (wrong || (fd >= 0 && !fstat(fd, &status) && (S_ISREG(status.st_mode) || unnamed)))
        if (is_new || flags & O_TRUNC || wrong)
            record(unnamed ? 'n' : is_new ? 'c' : 't', wrong, where, "", wrong ? 0 : status.st_ino, 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                                         \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }
int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE(flags) return opened(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE(flags) return opened(dir, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* As C++ streams open a file, which then write to its descriptor. */
FILE *fopen(const char *path, const char *mode)
{
    char where[PATH_MAX];
    if (mode[0] != 'w' || !resolve(AT_FDCWD, path, where))
        return REAL(fopen)(path, mode);
    int fd = opened(AT_FDCWD, path, O_CREAT | O_TRUNC | (strchr(mode, '+') ? O_RDWR : O_WRONLY), 0666);
    return fd < 0 ? NULL : fdopen(fd, mode);
}
FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }

/* Bytes to a file, from `offset` on, or where it stands if that is negative. */
static ssize_t written(int fd, const struct iovec *data, int count, off_t offset)
{
    struct stat status;
    struct iovec part[IOV_MAX];
    int wrong = 0, watched = behind(fd, &status);
    ssize_t total = 0, done;
    if (watched) {
        pthread_mutex_lock(&lock);
        wrong = fails() ? (fault_error ? fault_error : -1) : 0;
    }
    for (int i = 0; i < count; i++)
        total += data[i].iov_len;
    if (wrong == -1) { /* half of it, in whole blocks if there are such */
        ssize_t left = total / 2 >= 4096 ? total / 2 & ~4095 : (total + 1) / 2;
        if (fcntl(fd, F_GETFL) & O_DIRECT && left < 4096)
            wrong = ENOSPC;
        for (int i = 0; i < count; i++) {
            part[i] = data[i];
            part[i].iov_len = (ssize_t)data[i].iov_len < left ? data[i].iov_len : (size_t)left;
            left -= part[i].iov_len;
        }
        data = part;
    }
    if (wrong > 0)
        errno = wrong, done = -1;
    else
        done = offset < 0 ? REAL(writev)(fd, data, count) : REAL(pwritev)(fd, data, count, offset);
    if (watched) {
        int saved = errno;
        if (done > 0 && offset < 0)
            offset = lseek(fd, 0, SEEK_CUR) - done;
        if (done > 0 || wrong)
            record('w', wrong > 0 ? wrong : 0, "", "", status.st_ino, offset < 0 ? 0 : offset, data, count,
                   done > 0 ? done : 0);
        errno = saved;
        pthread_mutex_unlock(&lock);
    }
    return done;
}

#define ONE struct iovec one = {(void *)data, bytes}
#define MANY (void)flags; return written(fd, data, count, at)
ssize_t write(int fd, const void *data, size_t bytes) { ONE; return written(fd, &one, 1, -1); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) { ONE; return written(fd, &one, 1, at); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t at) { ONE; return written(fd, &one, 1, at); }
ssize_t writev(int fd, const struct iovec *data, int count) { return written(fd, data, count, -1); }
ssize_t pwritev(int fd, const struct iovec *data, int count, off_t at) { return written(fd, data, count, at); }
ssize_t pwritev64(int fd, const struct iovec *data, int count, off_t at) { return written(fd, data, count, at); }
ssize_t pwritev2(int fd, const struct iovec *data, int count, off_t at, int flags) { MANY; }
ssize_t pwritev64v2(int fd, const struct iovec *data, int count, off_t at, int flags) { MANY; }

static int resized(int fd, off_t size)
{
    struct stat status;
    CHANGE('s', behind(fd, &status), REAL(ftruncate)(fd, size), "", "", status.st_ino, size, 0);
}
int ftruncate(int fd, off_t size) { return resized(fd, size); }
int ftruncate64(int fd, off_t size) { return resized(fd, size); }

static int reserved(int fd, off_t at, off_t bytes)
{
    struct stat status;
    CHANGE('r', behind(fd, &status), (errno = REAL(posix_fallocate)(fd, at, bytes)) ? -1 : 0, "", "", status.st_ino,
           at + bytes, 0);
}
int posix_fallocate(int fd, off_t at, off_t bytes) { return reserved(fd, at, bytes) ? errno : 0; }
int posix_fallocate64(int fd, off_t at, off_t bytes) { return reserved(fd, at, bytes) ? errno : 0; }

static int synced(int fd)
{
    struct stat status;
    CHANGE('f', behind(fd, &status), 0, "", "", status.st_ino, 0, 0);
}
int fsync(int fd) { struct stat s; return behind(fd, &s) ? synced(fd) : REAL(fsync)(fd); }
int fdatasync(int fd) { struct stat s; return behind(fd, &s) ? synced(fd) : REAL(fdatasync)(fd); }

int renameat(int from, const char *path, int to, const char *other)
{
    char a[PATH_MAX], b[PATH_MAX];
    CHANGE('m', resolve(to, other, b) && resolve(from, path, a), REAL(renameat)(from, path, to, other), a, b, 0, 0, 0);
}
int rename(const char *path, const char *other) { return renameat(AT_FDCWD, path, AT_FDCWD, other); }

int linkat(int from, const char *path, int to, const char *other, int flags)
{
    char where[PATH_MAX];
    CHANGE('l', resolve(to, other, where), REAL(linkat)(from, path, to, other, flags), where, "",
           inode_at(from, path, flags & AT_SYMLINK_FOLLOW ? 0 : AT_SYMLINK_NOFOLLOW), 0, 0);
}
int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }

int unlinkat(int dir, const char *path, int flags)
{
    char where[PATH_MAX];
    CHANGE('u', resolve(dir, path, where), REAL(unlinkat)(dir, path, flags), where, "", 0, 0, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dir, const char *path, mode_t mode)
{
    char where[PATH_MAX];
    CHANGE('d', resolve(dir, path, where), REAL(mkdirat)(dir, path, mode), where, "",
           inode_at(dir, path, AT_SYMLINK_NOFOLLOW), 0, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
