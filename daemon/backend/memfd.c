#include "backend/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/memfile.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1 */
#endif

#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

/* Below this the kernel has no huge page to give. */
#define HUGE_BYTES (2u << 20)

/* These mean the same to users: not enough memory. mmap returns EAGAIN at RLIMIT_MEMLOCK. */
static int memfd_memory_error(int err)
{
	return err == ENOMEM || err == ENOSPC || err == EAGAIN ? BACKEND_E_FULL : -err;
}

static int memfd_prepare_fd(int fd, uint64_t bytes)
{
	if (ftruncate(fd, (off_t)bytes) < 0)
		return errno == EFBIG ? BACKEND_E_FULL : memfd_memory_error(errno);
	if (fcntl(fd, F_ADD_SEALS, SIZE_SEALS) < 0)
		return -errno;
	return 0;
}

/* Another open file of the same memory: a duplicate would share the access mode, and the
 * kernel would not count it. Return: the descriptor, or -1 with errno. */
static int memfd_reopen(int fd, int mode)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, mode | O_CLOEXEC);
}

/* The kernel does not count the file that memfd_create returns among the open files, so we open it
 * once more and keep that file. Without /proc we keep the first. */
static int memfd_counted(int *fd)
{
	_cleanup_(fd_closep) int again = memfd_reopen(*fd, O_RDWR);

	if (again < 0)
		return errno == ENOENT ? 0 : memfd_memory_error(errno);
	fd_close(*fd);
	*fd = STEAL_FD(again);
	/* If a process opens the memfd while memfd_is_held holds the lease, the kernel sends
	 * SIGIO, which would end the daemon. SIGURG is ignored. */
	(void)fcntl(*fd, F_SETSIG, SIGURG);
	return 0;
}

/* Take the lease: granted if no other process has it open. Return: 1 granted, 0 not, or negative
 * errno. */
static int memfd_try_lease(int fd)
{
	if (fcntl(fd, F_SETLEASE, F_WRLCK) < 0)
		return errno == EAGAIN ? 0 : -errno;
	(void)fcntl(fd, F_SETLEASE, F_UNLCK);
	return 1;
}

static uint64_t memfd_inode_of(int fd)
{
	struct stat st;

	return fstat(fd, &st) < 0 ? 0 : (uint64_t)st.st_ino;
}

/* Consumes @fd on success. */
static int memfd_map_fd(int *fd, uint64_t bytes, struct memfd **ret)
{
	_cleanup_(freep) struct memfd *m = calloc(1, sizeof(*m));
	void *addr;

	if (!m)
		return -ENOMEM;
	addr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	if (addr == MAP_FAILED)
		return memfd_memory_error(errno);
	/* Advice: a kernel that refuses it costs speed, nothing else. State is excluded from core
	 * files, since all of it would fill the disk. */
	if (bytes >= HUGE_BYTES)
		madvise(addr, bytes, MADV_HUGEPAGE);
	madvise(addr, bytes, MADV_DONTDUMP);
	m->mem = (struct backend_mem){ .addr = addr, .bytes = bytes, .inode = memfd_inode_of(*fd) };
	m->fd = STEAL_FD(*fd);
	list_init(&m->link);
	list_init(&m->live);
	*ret = STEAL_PTR(m);
	return 0;
}

int memfd_new(uint64_t bytes, struct memfd **ret)
{
	_cleanup_(fd_closep) int fd = -1;
	int r;

	if (bytes > INT64_MAX)
		return BACKEND_E_FULL;
	r = memfile_new("shardd", &fd);
	if (r < 0)
		return memfd_memory_error(-r);
	r = memfd_prepare_fd(fd, bytes);
	if (r == 0)
		r = memfd_counted(&fd);
	if (r)
		return r;
	return memfd_map_fd(&fd, bytes, ret);
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
	seals = fcntl(fd, F_GET_SEALS); /* fails on a file that is not a memfd */
	flags = fcntl(fd, F_GETFL);
	if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS ||
	    (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) || flags < 0 ||
	    (flags & O_ACCMODE) != O_RDWR)
		return -EINVAL;
	own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (own < 0)
		return -errno;
	r = memfd_map_fd(&own, bytes, ret);
	if (r == 0)
		(*ret)->exported = true; /* perhaps: by the other daemon */
	return r == BACKEND_E_FULL ? -ENOMEM : r;
}

int memfd_store(const struct memfd *m, int *ret_fd)
{
	int fd = fcntl(m->fd, F_DUPFD_CLOEXEC, 3);

	if (fd < 0)
		return -errno;
	*ret_fd = fd;
	return 0;
}

int memfd_seal(struct memfd *m)
{
	CHECK(!m->exported);
	if (fcntl(m->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) < 0)
		return -errno;
	m->sealed = true;
	return 0;
}

int memfd_export(struct memfd *m, bool writable, int *ret_fd)
{
	int fd;

	CHECK(!(writable && m->sealed));
	/* Seals cannot be added after this: a process that can write could add some. */
	if (!m->exported && fcntl(m->fd, F_ADD_SEALS, F_SEAL_SEAL) < 0 && errno != EPERM)
		return -errno; /* EPERM: an imported memfd that has the seal already */
	fd = memfd_reopen(m->fd, writable ? O_RDWR : O_RDONLY);
	if (fd < 0)
		return -errno;
	m->exported = true;
	*ret_fd = fd;
	return 0;
}

/* Test with a memfd like ours: is a holder visible for as long as it holds the memfd? */
static bool memfd_probe(void)
{
	_cleanup_(fd_closep) int fd = -1;
	_cleanup_(fd_closep) int other = -1;
	bool seen;

	if (memfile_new("shardd", &fd) < 0 || memfd_prepare_fd(fd, 4096) || memfd_counted(&fd) ||
	    memfd_try_lease(fd) != 1)
		return false;
	other = memfd_reopen(fd, O_RDONLY);
	seen = other >= 0 && memfd_try_lease(fd) == 0;
	other = fd_close(other);
	other = memfd_reopen(fd, O_RDWR);
	seen = seen && other >= 0 && memfd_try_lease(fd) == 0;
	other = fd_close(other);
	return seen && memfd_try_lease(fd) == 1;
}

static bool knows_holders;

static void memfd_find_out(void)
{
	knows_holders = memfd_probe();
}

bool memfd_knows_holders(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, memfd_find_out);
	return knows_holders;
}

bool memfd_is_held(const struct memfd *m)
{
	return m->exported && memfd_knows_holders() && memfd_try_lease(m->fd) == 0;
}

uint64_t memfd_resident(const struct memfd *m)
{
	struct stat st;

	/* of 512 bytes each, whatever st_blksize says */
	return fstat(m->fd, &st) < 0 ? 0 : (uint64_t)st.st_blocks * 512;
}

int memfd_empty(const struct memfd *m)
{
	if (m->mem.lasts)
		return -EPERM;
	if (memfd_resident(m) == 0)
		return 0;
	if (fallocate(m->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)m->mem.bytes) <
	    0)
		return -errno;
	return 0;
}

struct memfd *memfd_let_go(struct memfd *m)
{
	if (!m)
		return NULL;
	munmap(m->mem.addr, m->mem.bytes);
	fd_close(m->fd);
	free(m);
	return NULL;
}

struct memfd *memfd_free(struct memfd *m)
{
	if (m && m->exported && !m->mem.stored && (memfd_is_held(m) || !memfd_knows_holders()))
		(void)memfd_empty(m);
	return memfd_let_go(m);
}
