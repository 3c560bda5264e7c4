/*
 * The daemon's own descriptor of host memory, as a process has it that the daemon passed it to
 * (what keeps memory for the next daemon): the same open file, not one of its own, so that
 * nothing counts as held by others. backend_export gives clients files of their own.
 */
#ifndef SHARDD_TESTS_OWNFD_H
#define SHARDD_TESTS_OWNFD_H

#include <criterion/criterion.h>
#include <fcntl.h>

#include "backend/memfd.h"

/* Return: the caller's to close. */
static inline int own_fd(struct backend_mem *mem)
{
	int fd = fcntl(CONTAINER_OF(mem, struct memfd, mem)->fd, F_DUPFD_CLOEXEC, 3);

	cr_assert_geq(fd, 0);
	return fd;
}

#endif
