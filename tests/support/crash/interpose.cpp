// Loaded before libc. Counts the calls of this process that change files, and kills it before one of them.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {
long counted = -1;  // negative: not counting
long fatal = -1;
int log_fd = -1;

void step(const char* name, int fd = 1 << 30) {
    if (counted < 0 || fd <= 2) return;
    struct stat what;
    if (fd != 1 << 30 && (fstat(fd, &what) != 0 || !S_ISREG(what.st_mode)) && name[0] == 'w') return;  // pipes
    if (++counted == fatal) kill(getpid(), SIGKILL);
}
}  // namespace

extern "C" {
void crash_arm(long at) { counted = 0; fatal = at; }
long crash_count() { return counted; }

#define NEXT(name) static auto next = reinterpret_cast<decltype(&name)>(dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void* data, size_t size) { NEXT(write); step("write", fd); return next(fd, data, size); }
ssize_t writev(int fd, const iovec* parts, int count) { NEXT(writev); step("writev", fd); return next(fd, parts, count); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) { NEXT(pwrite); step("write", fd); return next(fd, data, size, at); }
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) { NEXT(pwrite64); step("write", fd); return next(fd, data, size, at); }
int fsync(int fd) { NEXT(fsync); step("fsync", fd); return next(fd); }
int fdatasync(int fd) { NEXT(fdatasync); step("fsync", fd); return next(fd); }
int rename(const char* from, const char* to) noexcept { NEXT(rename); step("rename"); return next(from, to); }
int renameat(int a, const char* from, int b, const char* to) noexcept { NEXT(renameat); step("rename"); return next(a, from, b, to); }
int unlink(const char* path) noexcept { NEXT(unlink); step("unlink"); return next(path); }
int unlinkat(int at, const char* path, int flags) noexcept { NEXT(unlinkat); step("unlink"); return next(at, path, flags); }
int rmdir(const char* path) noexcept { NEXT(rmdir); step("rmdir"); return next(path); }
int mkdir(const char* path, mode_t mode) noexcept { NEXT(mkdir); step("mkdir"); return next(path, mode); }

int open(const char* path, int flags, ...) {
    NEXT(open);
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    if (flags & (O_CREAT | O_TRUNC)) step("open");
    return next(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
    NEXT(open64);
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    if (flags & (O_CREAT | O_TRUNC)) step("open");
    return next(path, flags, mode);
}
}
