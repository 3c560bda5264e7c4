/*
 * Memory of the device in which the threads of a step keep what they change (kernels/cuda/undo.cuh),
 * and the completion of a launch that a predecessor was killed in.
 *
 *   head | a word per thread | what they keep
 *
 * The head says what the memory is for: which thread keeps what depends on the kernels and on how
 * many of their blocks the device takes. Launches are numbered in the order in which they are on the
 * main queue, from a number on that is above all that the words have; so the highest one in the words
 * is that of the launch that was under way, if one was, and all before it are complete.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

/* Raise it when a kernel of these, or the walk over memory, changes. */
#define UNDO_FORMAT 1u
#define UNDO_MAGIC  UINT64_C(0x304f444e55524853) /* "SHRUNDO0" */

struct cuda_undo_head {
	uint64_t magic;
	uint32_t format, room;
	uint32_t per_sm[CUDA_FN_SCALE_UNDO - CUDA_FN_ADAM_UNDO + 1];
	uint32_t threads, sms;
};

/* Of the words behind it. */
#define UNDO_HEAD_BYTES 256u
_Static_assert(sizeof(struct cuda_undo_head) <= UNDO_HEAD_BYTES, "head");

static struct cuda_undo_head cuda_undo_head(const struct cuda *c)
{
	struct cuda_undo_head h = { .magic = UNDO_MAGIC,
				    .format = UNDO_FORMAT,
				    .threads = cuda_fn_threads(CUDA_FN_ADAM_UNDO),
				    .sms = c->kernels.sms };
	unsigned most = 0;

	for (unsigned i = 0; i < sizeof(h.per_sm) / sizeof(h.per_sm[0]); i++) {
		h.per_sm[i] = c->kernels.per_sm[CUDA_FN_ADAM_UNDO + i];
		most = h.per_sm[i] > most ? h.per_sm[i] : most;
	}
	h.room = h.sms * most * h.threads;
	return h;
}

static uint64_t cuda_undo_bytes(const struct cuda *c, uint32_t room)
{
	uint64_t unit = c->backend.info.granularity;
	uint64_t bytes = UNDO_HEAD_BYTES + (uint64_t)room * CUDA_UNDO_BYTES;

	return (bytes + unit - 1) / unit * unit;
}

static int cuda_undo_write_head(struct cuda *c, const struct cuda_undo_head *h)
{
	CUresult r = c->lib->cuMemcpyHtoDAsync(cuda_ptr(c->undo.mem->mem.addr), h, sizeof(*h),
					       c->control);
	int e = cuda_result(c, r, "a copy");

	return e ? e : cuda_drain(c, c->control);
}

static int cuda_undo_read(struct cuda *c, void *to, uint64_t at, uint64_t bytes)
{
	CUresult r = c->lib->cuMemcpyDtoHAsync(to, cuda_ptr(c->undo.mem->mem.addr) + at, bytes,
					       c->control);
	int e = cuda_result(c, r, "a copy");

	return e ? e : cuda_drain(c, c->control);
}

/* The highest launch in the words. */
static int cuda_undo_find_last(struct cuda *c, uint32_t room)
{
	_cleanup_(freep) uint64_t *words = calloc(room, sizeof(*words));
	int e = words ? cuda_undo_read(c, words, UNDO_HEAD_BYTES, (uint64_t)room * sizeof(*words))
		      : -ENOMEM;

	for (uint32_t i = 0; e == 0 && i < room; i++) {
		uint64_t launch = words[i] >> CUDA_UNDO_LAUNCH_SHIFT;

		c->undo.last = launch > c->undo.last ? launch : c->undo.last;
	}
	return e;
}

/* Return: 0, -ESTALE (it is of other kernels, or of another device), or another negative errno. */
static int cuda_undo_take_over(struct cuda *c, int fd, const struct cuda_undo_head *own)
{
	struct cuda_undo_head head;
	int e = cuda_mem_import(c, fd, cuda_undo_bytes(c, own->room), &c->undo.mem);

	if (e)
		return e == -EINVAL ? -ESTALE : e;
	e = cuda_undo_read(c, &head, 0, sizeof(head));
	if (e == 0 && memcmp(&head, own, sizeof(head)) != 0)
		e = -ESTALE;
	return e ? e : cuda_undo_find_last(c, own->room);
}

static int cuda_undo_make(struct cuda *c, const struct cuda_undo_head *own)
{
	int e = cuda_mem_make(c, cuda_undo_bytes(c, own->room), BACKEND_SHARE_FD, &c->undo.mem);

	return e ? e : cuda_undo_write_head(c, own);
}

static int cuda_undo_entered(struct cuda *c, int fd)
{
	const struct cuda_undo_head own = cuda_undo_head(c);
	int e = fd >= 0 ? cuda_undo_take_over(c, fd, &own) : cuda_undo_make(c, &own);

	if (e) {
		c->undo.mem = cuda_mem_unmake(c, c->undo.mem);
		c->undo.last = 0;
		return e;
	}
	c->undo.room = own.room;
	c->backend.info.redoes = true;
	c->backend.info.overhead_bytes += c->undo.mem->mem.bytes;
	return 0;
}

int cuda_undo_open(struct backend *b, int fd, struct backend_mem **ret)
{
	struct cuda *c = cuda_of(b);
	CUcontext old = NULL;
	int e;

	CHECK(!c->undo.mem);
	c->lib->cuCtxGetCurrent(&old);
	e = cuda_result(c, c->lib->cuCtxSetCurrent(c->context), "cuCtxSetCurrent");
	if (e == 0)
		e = cuda_undo_entered(c, fd);
	c->lib->cuCtxSetCurrent(old);
	if (e == 0)
		*ret = &c->undo.mem->mem;
	return e;
}

void cuda_undo_close(struct cuda *c)
{
	c->undo.mem = cuda_mem_unmake(c, c->undo.mem);
}

struct cuda_undo cuda_undo_of(const struct cuda *c, uint64_t launch)
{
	CUdeviceptr words = cuda_ptr(c->undo.mem->mem.addr) + UNDO_HEAD_BYTES;

	CHECK(launch > 0 && launch <= UINT64_MAX >> CUDA_UNDO_LAUNCH_SHIFT);
	return (struct cuda_undo){ .words = words,
				   .old = words + (uint64_t)c->undo.room * CUDA_UNDO_WORD,
				   .launch = launch,
				   .room = c->undo.room };
}

uint64_t cuda_undo_last(struct backend *b)
{
	return cuda_of(b)->undo.last;
}

/* The executor has nothing to do yet: its queue is ours. */
int cuda_undo_run(struct backend *b, const struct launch *launch, uint64_t number)
{
	struct cuda *c = cuda_of(b);
	struct cuda_queue *q = &c->queues[BACKEND_Q_MAIN];
	CUcontext old = NULL;
	int e;

	CHECK(c->undo.mem && b->in_flight == 0);
	if (atomic_load(&c->lost))
		return -EIO;
	if (number > c->undo.last)
		c->undo.last = number;
	c->lib->cuCtxGetCurrent(&old);
	e = cuda_result(c, c->lib->cuCtxSetCurrent(c->context), "cuCtxSetCurrent");
	if (e == 0)
		e = cuda_result(c, cuda_launch_undo(c, q, launch, number), "a kernel");
	if (e == 0)
		e = cuda_drain(c, q->stream);
	c->lib->cuCtxSetCurrent(old);
	return e;
}

#endif
