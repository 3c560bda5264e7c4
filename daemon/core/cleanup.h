/*
 * Locals that own something: `_cleanup_(fd_closep) int fd = -1;` closes at the
 * end of the scope; STEAL disarms it on success.
 */
#ifndef SHARDD_CORE_CLEANUP_H
#define SHARDD_CORE_CLEANUP_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define _cleanup_(fn) __attribute__((cleanup(fn)))

/* Take the value out of an owning variable and leave @null in it. */
#define STEAL(var, null)                     \
	({                                   \
		__typeof__(var) _v_ = (var); \
		(var) = (null);              \
		_v_;                         \
	})
#define STEAL_PTR(var) STEAL(var, NULL)
#define STEAL_FD(var)  STEAL(var, -1)

/* Exchange two variables of one type. */
#define SWAP(a, b)                      \
	({                              \
		__typeof__(a) _t = (a); \
		(a) = (b);              \
		(b) = _t;               \
	})

/* Close @fd if it is one; keeps errno. Return: -1, for `fd = fd_close(fd)`. */
static inline int fd_close(int fd)
{
	int saved = errno;

	if (fd >= 0)
		close(fd);
	errno = saved;
	return -1;
}

static inline void fd_closep(int *fd)
{
	*fd = fd_close(*fd);
}

static inline void freep(void *ptr)
{
	free(*(void **)ptr);
	*(void **)ptr = NULL;
}

static inline void fclosep(FILE **file)
{
	if (*file)
		fclose(*file);
	*file = NULL;
}

#endif
