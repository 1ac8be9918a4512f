/* For the control of a drill: a program with this library preloaded syncs nothing. */
#define _GNU_SOURCE
#include <fcntl.h>

int fsync(int fd) { (void)fd; return 0; }
int fdatasync(int fd) { (void)fd; return 0; }
int syncfs(int fd) { (void)fd; return 0; }
void sync(void) {}
int sync_file_range(int fd, off64_t at, off64_t length, unsigned int flags)
{
    (void)fd; (void)at; (void)length; (void)flags;
    return 0;
}
