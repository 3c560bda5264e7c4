#include "checkpoint/spool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"

#define SPOOL_BYTES (UINT64_C(4) << 20)
/* Of memory, places and lengths: what O_DIRECT asks for on disks with blocks of up to that size. */
#define SPOOL_ALIGN   4096u
#define SPOOL_BUFFERS 2u

struct spool_buffer {
	char *at;
	size_t bytes; /* in it; full: 0: the end */
};

struct spool {
	int fd;
	const char *name;
	char *memory;   /* owned: of the buffers */
	uint64_t bytes; /* that were added */
	struct spool_buffer buffers[SPOOL_BUFFERS];
	unsigned next; /* buffer; the caller's */
	sem_t empty, full;
	bool running;
	bool in_memory; /* the caller writes itself */
	pthread_t thread;
	_Atomic int error; /* errno */

	/* the thread's */
	bool direct;
	uint64_t written, given; /* up to @given the pages are given back */
	size_t failed;           /* with @error: bytes of the write that failed, at @written */
};

static int spool_fault(const struct spool *s, int error, const char *doing, struct fault *f)
{
	char what[320];

	snprintf(what, sizeof(what), "%s '%s'", doing, s->name);
	return fault_errno(f, -error, what);
}

/* The thread has set @error. */
static int spool_write_fault(const struct spool *s, struct fault *f)
{
	char what[384];
	int error = atomic_load(&s->error);

	snprintf(what, sizeof(what), "writing %zu bytes at %" PRIu64 " of '%.255s'", s->failed,
		 s->written, s->name);
	return fault_errno(f, -error, what);
}

/* ------------------------------------------------------------------------ the thread */

/* Return: could it be changed? */
static bool spool_set_direct(int fd, bool direct)
{
	int flags = fcntl(fd, F_GETFL);

	flags = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
	return flags >= 0 && fcntl(fd, F_SETFL, flags) == 0;
}

static void spool_leave_direct(struct spool *s)
{
	s->direct = false;
	s->given = s->written;
	(void)spool_set_direct(s->fd, false);
}

/* Without O_DIRECT: what is older than a block goes to the disk and out of the page cache. Only the cache
 * depends on these calls: errors of the disk are found by fsync. */
static void spool_give(struct spool *s)
{
	uint64_t n = s->written - s->given;

	(void)sync_file_range(s->fd, (off_t)s->given, (off_t)n, SYNC_FILE_RANGE_WRITE);
	if (n < 2 * SPOOL_BYTES)
		return;
	n -= SPOOL_BYTES;
	(void)sync_file_range(s->fd, (off_t)s->given, (off_t)n,
			      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
				      SYNC_FILE_RANGE_WAIT_AFTER);
	(void)posix_fadvise(s->fd, (off_t)s->given, (off_t)n, POSIX_FADV_DONTNEED);
	s->given += n;
}

/* Bytes that one write may have: whole blocks, but for the end of a file, which goes through the cache. */
static size_t spool_portion(struct spool *s, const char *data, size_t bytes)
{
	bool aligned = (uintptr_t)data % SPOOL_ALIGN == 0 && s->written % SPOOL_ALIGN == 0;

	if (s->direct && (!aligned || bytes < SPOOL_ALIGN))
		spool_leave_direct(s);
	return s->direct ? bytes / SPOOL_ALIGN * SPOOL_ALIGN : bytes;
}

/* Return: 0 or errno. */
static int spool_write(struct spool *s, const char *data, size_t bytes)
{
	while (bytes) {
		size_t portion = spool_portion(s, data, bytes);
		ssize_t n = write(s->fd, data, portion);

		if (n < 0 && errno == EINVAL && s->direct) {
			spool_leave_direct(s); /* its blocks are larger */
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			s->failed = portion;
			return errno;
		}
		data += n;
		bytes -= (size_t)n;
		s->written += (uint64_t)n;
	}
	if (!s->direct && !s->in_memory)
		spool_give(s);
	return 0;
}

static void spool_wait(sem_t *sem)
{
	while (sem_wait(sem) < 0)
		CHECK(errno == EINTR);
}

/* After an error the rest is taken and not written. */
static void *spool_main(void *arg)
{
	struct spool *s = arg;

	for (unsigned i = 0;; i = (i + 1) % SPOOL_BUFFERS) {
		struct spool_buffer *b = &s->buffers[i];

		spool_wait(&s->full);
		if (!b->bytes)
			return NULL;
		if (!atomic_load(&s->error))
			atomic_store(&s->error, spool_write(s, b->at, b->bytes));
		b->bytes = 0;
		sem_post(&s->empty);
	}
}

/* ------------------------------------------------------------------------ the caller */

int spool_open(int fd, const char *name, struct spool **ret, struct fault *f)
{
	struct spool *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return fault_errno(f, -ENOMEM, "writing a file");
	s->fd = fd;
	s->name = name;
	sem_init(&s->full, 0, 0);
	sem_init(&s->empty, 0, SPOOL_BUFFERS - 1); /* the caller has one */
	s->memory = aligned_alloc(SPOOL_ALIGN, SPOOL_BUFFERS * SPOOL_BYTES);
	for (unsigned i = 0; s->memory && i < SPOOL_BUFFERS; i++)
		s->buffers[i].at = s->memory + i * SPOOL_BYTES;
	s->direct = spool_set_direct(fd, true);
	r = s->memory ? pthread_create(&s->thread, NULL, spool_main, s) : ENOMEM;
	if (r) {
		spool_fault(s, r, "writing", f);
		spool_free(s);
		return f->code;
	}
	s->running = true;
	*ret = s;
	return 0;
}

int spool_open_memory(int fd, const char *name, struct spool **ret, struct fault *f)
{
	struct spool *s = calloc(1, sizeof(*s));

	if (!s)
		return fault_errno(f, -ENOMEM, "writing a file in memory");
	s->fd = fd;
	s->name = name;
	s->in_memory = true;
	sem_init(&s->full, 0, 0);
	sem_init(&s->empty, 0, 0);
	*ret = s;
	return 0;
}

static int spool_add_memory(struct spool *s, const void *data, size_t bytes, struct fault *f)
{
	int r = spool_write(s, data, bytes);

	atomic_store(&s->error, r);
	s->bytes += bytes;
	return r ? spool_write_fault(s, f) : 0;
}

uint64_t spool_bytes(const struct spool *s)
{
	return s->bytes;
}

/* The buffer is the thread's. */
static void spool_hand(struct spool *s)
{
	s->next = (s->next + 1) % SPOOL_BUFFERS;
	sem_post(&s->full);
}

int spool_add(struct spool *s, const void *data, size_t bytes, struct fault *f)
{
	if (s->in_memory)
		return spool_add_memory(s, data, bytes, f);
	while (bytes) {
		struct spool_buffer *b = &s->buffers[s->next];
		size_t n = SPOOL_BYTES - b->bytes;

		n = n < bytes ? n : bytes;
		memcpy(b->at + b->bytes, data, n);
		b->bytes += n;
		s->bytes += n;
		data = (const char *)data + n;
		bytes -= n;
		if (b->bytes < SPOOL_BYTES)
			break;
		spool_hand(s);
		spool_wait(&s->empty);
	}
	return atomic_load(&s->error) ? spool_write_fault(s, f) : 0;
}

/* Let the thread write what there is, and end. */
static void spool_stop(struct spool *s)
{
	if (!s->running)
		return;
	if (s->buffers[s->next].bytes) {
		spool_hand(s);
		spool_wait(&s->empty);
	}
	spool_hand(s); /* nothing: the end */
	pthread_join(s->thread, NULL);
	s->running = false;
	(void)spool_set_direct(s->fd, false); /* as it was */
}

int spool_end(struct spool *s, struct fault *f)
{
	spool_stop(s);
	if (atomic_load(&s->error))
		return spool_write_fault(s, f);
	if (s->in_memory)
		return 0;
	if (fsync(s->fd) < 0)
		return spool_fault(s, errno, "syncing", f);
	(void)posix_fadvise(s->fd, 0, 0, POSIX_FADV_DONTNEED);
	return 0;
}

struct spool *spool_free(struct spool *s)
{
	if (!s)
		return NULL;
	if (s->running) {
		atomic_store(&s->error, ECANCELED); /* what is left need not be written */
		spool_stop(s);
	}
	sem_destroy(&s->empty);
	sem_destroy(&s->full);
	free(s->memory);
	free(s);
	return NULL;
}
