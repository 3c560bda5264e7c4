/* Files that are only memory: of this process, or shared with others by their descriptor. Any thread. */
#ifndef SHARDD_CORE_MEMFILE_H
#define SHARDD_CORE_MEMFILE_H

/* An empty memfd that seals can be added to, close-on-exec, which nobody can execute (Linux 6.3) and
 * no other user can open. @name: for /proc. @ret_fd: the caller's to close.
 * Return: 0 or negative errno. */
int memfile_new(const char *name, int *ret_fd);

#endif
