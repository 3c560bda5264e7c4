/*
 * What a stream does beside kernels: copies, fills, values written and waited for.
 *
 * Pinned memory is read and written when the stream comes to it. Pageable memory is read
 * when the call is made (large amounts: after everything before it in the stream), and
 * written before the call returns, as CUDA stages it.
 *
 * A wait sleeps on the bell of the memory's head, which only a value written by a stream
 * rings: a store or copy into the word wakes nobody, as on a device.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_impl.h"

#define STAGED_AT_ONCE (64ull << 10)

/* -- copies -------------------------------------------------------------------------- */

enum place { PLACE_DEVICE, PLACE_PINNED, PLACE_PAGEABLE };

struct copy {
	uint64_t dst, src, bytes;
	enum place to, from;
	void *staged;
};

static enum place place_of(uint64_t addr)
{
	const struct range *r = range_find(addr);

	if (addr_is_device(addr))
		return PLACE_DEVICE;
	return r ? PLACE_PINNED : PLACE_PAGEABLE;
}

static void copy_run(struct stream *s, struct item *item)
{
	struct copy *c = (void *)item->payload;
	void *dst = (void *)(uintptr_t)c->dst;
	const void *src = c->staged ? c->staged : (void *)(uintptr_t)c->src;

	(void)s;
	if (c->from != PLACE_PAGEABLE)
		src = item_translate(c->src, c->bytes, false, true);
	if (src && c->to != PLACE_PAGEABLE)
		dst = item_translate(c->dst, c->bytes, true, true);
	if (src && dst)
		memmove(dst, src, c->bytes);
}

static void copy_free(struct item *item)
{
	free(((struct copy *)(void *)item->payload)->staged);
}

/* Addresses that cannot be right are refused when the call is made. */
static bool copy_possible(const struct copy *c, const struct stream *s)
{
	if (c->from != PLACE_PAGEABLE &&
	    !range_usable(s->ctx->device, c->src, c->bytes, false, true))
		return false;
	return c->to == PLACE_PAGEABLE || range_find(c->dst);
}

static void stage(struct stream *s, struct copy *c)
{
	if (c->bytes > STAGED_AT_ONCE)
		stream_wait(s, s->enqueued);
	c->staged = malloc(c->bytes);
	if (!c->staged)
		sim_breach("out of memory");
	memcpy(c->staged, (void *)(uintptr_t)c->src, c->bytes);
}

static CUresult copy_put(struct stream *s, struct copy *c, const char *what)
{
	struct item *item;
	uint64_t seq;

	c->to = place_of(c->dst);
	c->from = place_of(c->src);
	if (!copy_possible(c, s))
		return CUDA_ERROR_INVALID_VALUE;
	if (c->from == PLACE_PAGEABLE && c->to != PLACE_PAGEABLE)
		stage(s, c);
	item = item_new(copy_run, what, sizeof(*c));
	item->free = copy_free;
	*(struct copy *)(void *)item->payload = *c;
	seq = stream_put(s, item);
	if (c->to == PLACE_PAGEABLE)
		stream_wait(s, seq);
	return (CUresult)s->ctx->error;
}

static CUresult copy(const char *function, uint64_t dst, uint64_t src, uint64_t bytes,
		     CUstream stream)
{
	struct copy work = { .dst = dst, .src = src, .bytes = bytes };
	struct ctx *c;
	struct stream *s;
	CUresult r = sim_enter(function, NEED_CTX, &c);

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, function);
	if (!s)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (bytes)
		r = copy_put(s, &work, function);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static bool device_addr(CUdeviceptr addr)
{
	bool r;

	pthread_mutex_lock(&sim_lock);
	r = place_of(addr) != PLACE_PAGEABLE;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
	return copy(__func__, dst, src, bytes, stream);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
	if (bytes && (!device_addr(dst) || addr_is_device((uint64_t)(uintptr_t)src)))
		return CUDA_ERROR_INVALID_VALUE;
	return copy(__func__, dst, (uint64_t)(uintptr_t)src, bytes, stream);
}

CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
	if (bytes && (!device_addr(src) || addr_is_device((uint64_t)(uintptr_t)dst)))
		return CUDA_ERROR_INVALID_VALUE;
	return copy(__func__, (uint64_t)(uintptr_t)dst, src, bytes, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
	if (bytes && (!device_addr(dst) || !device_addr(src)))
		return CUDA_ERROR_INVALID_VALUE;
	return copy(__func__, dst, src, bytes, stream);
}

/* -- fills ----------------------------------------------------------------------------- */

struct fill {
	uint64_t dst, n;
	uint32_t value;
	unsigned width;
};

#define PAGE 4096ull

/* Large areas give their pages back instead: the kernel's zero pages cost nothing until they are used. */
static void fill_zero(char *p, uint64_t bytes)
{
	char *from = (void *)(((uintptr_t)p + PAGE - 1) & ~(PAGE - 1));
	char *to = (void *)(((uintptr_t)p + bytes) & ~(PAGE - 1));

	if (bytes < 64 * PAGE || madvise(from, (size_t)(to - from), MADV_REMOVE) < 0) {
		memset(p, 0, bytes);
		return;
	}
	memset(p, 0, (size_t)(from - p));
	memset(to, 0, (size_t)(p + bytes - to));
}

static void fill_run(struct stream *s, struct item *item)
{
	struct fill *f = (void *)item->payload;
	void *p = item_translate(f->dst, f->n * f->width, true, false);
	uint32_t *words = p;

	(void)s;
	if (p && f->width == 1 && f->value == 0)
		fill_zero(p, f->n);
	else if (p && f->width == 1)
		memset(p, (int)f->value, f->n);
	for (uint64_t i = 0; p && f->width == 4 && i < f->n; i++)
		words[i] = f->value;
}

static CUresult fill(const char *function, struct fill f, CUstream stream)
{
	struct item *item;
	struct ctx *c;
	struct stream *s;
	CUresult r = sim_enter(function, NEED_CTX, &c);

	if (r)
		return r;
	if (f.dst % f.width)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, function);
	if (!s)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (f.n && !range_find(f.dst))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r == CUDA_SUCCESS && f.n) {
		item = item_new(fill_run, function, sizeof(f));
		*(struct fill *)(void *)item->payload = f;
		stream_put(s, item);
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, CUstream stream)
{
	return fill(__func__, (struct fill){ dst, n, value, 1 }, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t n, CUstream stream)
{
	return fill(__func__, (struct fill){ dst, n, value, 4 }, stream);
}

/* -- values ------------------------------------------------------------------------------ */

struct value {
	uint64_t addr, value;
	unsigned flags;
};

static bool reached(uint64_t now, const struct value *v)
{
	switch (v->flags & 3) {
	case CU_STREAM_WAIT_VALUE_EQ:
		return now == v->value;
	case CU_STREAM_WAIT_VALUE_AND:
		return (now & v->value) != 0;
	case CU_STREAM_WAIT_VALUE_NOR:
		return ~(now | v->value) != 0;
	default: /* GEQ, cyclic */
		return (int64_t)(now - v->value) >= 0;
	}
}

/* Which of the sleepers of one bell: the words of different slots differ. */
static uint32_t mask_of(uint64_t addr)
{
	return 1u << (addr / 64 % 32);
}

static void write_run(struct stream *s, struct item *item)
{
	struct value *v = (void *)item->payload;
	_Atomic uint32_t *bell;
	_Atomic uint64_t *word = item_word(v->addr, true, &bell);

	(void)s;
	if (!word)
		return;
	atomic_store(word, v->value);
	atomic_fetch_add(bell, 1);
	sim_futex_wake(bell, mask_of(v->addr));
}

static void wait_run(struct stream *s, struct item *item)
{
	struct value *v = (void *)item->payload;
	_Atomic uint32_t *bell;
	_Atomic uint64_t *word = item_word(v->addr, false, &bell);
	uint32_t seen;

	if (!word)
		return;
	seen = atomic_load(bell);
	if (reached(atomic_load(word), v))
		return;
	stream_set_bell(s, bell); /* whoever stops the stream rings it from now on */
	while (!stream_stopped(s)) {
		sim_futex_wait(bell, seen, mask_of(v->addr));
		seen = atomic_load(bell);
		if (reached(atomic_load(word), v))
			break;
	}
	stream_set_bell(s, NULL);
}

static CUresult value(const char *function, item_fn run, CUstream stream, struct value v,
		      unsigned allowed)
{
	struct item *item;
	struct ctx *c;
	struct stream *s;
	CUresult r = sim_enter(function, NEED_CTX, &c);

	if (r)
		return r;
	if (sim_env("SHARDD_SIM_NO_MEMOPS", 0))
		return CUDA_ERROR_NOT_SUPPORTED;
	if (v.addr % 8 || v.flags & ~allowed)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, function);
	if (!s)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (!range_find(v.addr))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r == CUDA_SUCCESS) {
		item = item_new(run, function, sizeof(v));
		*(struct value *)(void *)item->payload = v;
		stream_put(s, item);
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t v, unsigned int flags)
{
	return value(__func__, write_run, stream, (struct value){ addr, v, flags }, 0);
}

CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr addr, cuuint64_t v, unsigned int flags)
{
	return value(__func__, wait_run, stream, (struct value){ addr, v, flags }, 3);
}

bool item_waits(const struct item *item)
{
	const struct value *v = (const void *)item->payload;
	const struct range *r;
	uint64_t now;

	if (item->run != wait_run)
		return false;
	r = range_find(v->addr);
	if (!r)
		return false;
	now = atomic_load((_Atomic uint64_t *)(void *)(r->block->shadow + (v->addr - r->addr)));
	return !reached(now, v);
}

static void check_waits(void *object, void *arg)
{
	struct stream *s = object;

	if (s->ctx->error)
		return;
	for (const struct item *item = s->first; item; item = item->next)
		if (item_waits(item))
			sim_breach("%s while a stream waits for a value: may deadlock",
				   (const char *)arg);
}

void sim_no_waits(const char *function)
{
	static _Thread_local char name[64];
	size_t n = strcspn(function, "_");

	if (sim_env("SHARDD_SIM_ALLOW_WAITS", 0))
		return;
	memcpy(name, function, n < 63 ? n : 63);
	name[n < 63 ? n : 63] = 0;
	objects_each(&stream_objects, check_waits, name);
}
