#include "backend/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/cleanup.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

/* Below this the kernel has no huge page to give. */
#define HUGE_BYTES (2u << 20)

/* -ENOMEM and -ENOSPC mean the same to users: there is not that much. */
static int memory_error(int err)
{
	return err == ENOMEM || err == ENOSPC ? BACKEND_E_FULL : -err;
}

/* Return: the descriptor, or -1 with errno. */
static int create_fd(void)
{
	const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd = memfd_create("shardd", flags | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create("shardd", flags); /* a kernel without that flag */
	return fd;
}

static int prepare_fd(int fd, uint64_t bytes)
{
	if (ftruncate(fd, (off_t)bytes) < 0)
		return errno == EFBIG ? BACKEND_E_FULL : memory_error(errno);
	if (fchmod(fd, 0600) < 0 || fcntl(fd, F_ADD_SEALS, SIZE_SEALS | F_SEAL_SEAL) < 0)
		return -errno;
	return 0;
}

/* Consumes @fd on success. */
static int map_fd(int *fd, uint64_t bytes, struct memfd **ret)
{
	_cleanup_(freep) struct memfd *m = calloc(1, sizeof(*m));
	void *addr;

	if (!m)
		return -ENOMEM;
	addr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	if (addr == MAP_FAILED)
		return memory_error(errno);
	/* Advice: a kernel that refuses it costs speed, nothing else. State is not
	 * dumped, since a core file of all of it would fill the disk. */
	if (bytes >= HUGE_BYTES)
		madvise(addr, bytes, MADV_HUGEPAGE);
	madvise(addr, bytes, MADV_DONTDUMP);
	m->mem = (struct backend_mem){ .addr = addr, .bytes = bytes };
	m->fd = STEAL_FD(*fd);
	list_init(&m->link);
	*ret = STEAL_PTR(m);
	return 0;
}

int memfd_new(uint64_t bytes, struct memfd **ret)
{
	_cleanup_(fd_closep) int fd = -1;
	int r;

	if (bytes > INT64_MAX)
		return BACKEND_E_FULL;
	fd = create_fd();
	if (fd < 0)
		return memory_error(errno);
	r = prepare_fd(fd, bytes);
	if (r)
		return r;
	return map_fd(&fd, bytes, ret);
}

int memfd_import(int fd, uint64_t bytes, struct memfd **ret)
{
	_cleanup_(fd_closep) int own = -1;
	struct stat st;
	int seals, flags, r;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode) || bytes == 0 || st.st_size < 0 || (uint64_t)st.st_size != bytes)
		return -EINVAL;
	seals = fcntl(fd, F_GET_SEALS); /* fails on what is no memfd */
	flags = fcntl(fd, F_GETFL);
	if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS || (seals & F_SEAL_WRITE) ||
	    flags < 0 || (flags & O_ACCMODE) != O_RDWR)
		return -EINVAL;
	own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (own < 0)
		return -errno;
	r = map_fd(&own, bytes, ret);
	return r > 0 ? -ENOMEM : r;
}

int memfd_export(const struct memfd *m, bool writable, int *ret_fd)
{
	char path[32];
	int fd;

	if (writable) {
		fd = fcntl(m->fd, F_DUPFD_CLOEXEC, 3);
	} else {
		/* A duplicate would share our access mode; a new open file does not. */
		snprintf(path, sizeof(path), "/proc/self/fd/%d", m->fd);
		fd = open(path, O_RDONLY | O_CLOEXEC);
	}
	if (fd < 0)
		return -errno;
	*ret_fd = fd;
	return 0;
}

struct memfd *memfd_free(struct memfd *m)
{
	if (!m)
		return NULL;
	munmap(m->mem.addr, m->mem.bytes);
	fd_close(m->fd);
	free(m);
	return NULL;
}
