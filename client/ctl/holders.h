/*
 * Find the processes that hold memory of the daemon, by the inodes of memfds in their mappings and
 * descriptors in /proc. It sees what the caller may see: its own processes, or as root all.
 */
#ifndef SHARDD_CTL_HOLDERS_H
#define SHARDD_CTL_HOLDERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct holder {
	pid_t pid;
	char command[32];
	size_t index; /* of the inode it holds, in the caller's list */
};

struct holders {
	struct holder *all; /* by process, then by inode */
	size_t n;
	unsigned unseen; /* processes that the caller may not look into */
};

#define HOLDERS_NULL ((struct holders){ 0 })

/* Look for @inodes in all processes except this one and @daemon. Reads all of /proc, which takes
 * milliseconds for a hundred processes. @ret: end with holders_deinit.
 * Return: 0 or negative errno. */
int holders_find(const uint64_t *inodes, size_t n, pid_t daemon, struct holders *ret);

void holders_deinit(struct holders *h);

#endif
