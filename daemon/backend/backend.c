#include "backend/backend.h"

#include "backend/backend_impl.h"
#include "core/check.h"

#define BACKEND_MAGIC 0x42434b44u

void backend_init(struct backend *b, const struct backend_ops *ops, struct loopq *loopq)
{
	CHECK(ops->alloc && ops->free && ops->export && ops->import && ops->submit && ops->close);
	*b = (struct backend){ .magic = BACKEND_MAGIC, .ops = ops, .loopq = loopq };
}

const struct backend_info *backend_info(const struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	return &b->info;
}

static void count_new(struct backend *b, const struct backend_mem *mem, uint64_t bytes)
{
	CHECK(mem && mem->addr && mem->bytes == bytes);
	b->live++;
}

int backend_alloc(struct backend *b, uint64_t bytes, struct backend_mem **ret)
{
	struct backend_mem *mem = NULL;
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(bytes > 0 && bytes % b->info.granularity == 0);
	r = b->ops->alloc(b, bytes, &mem);
	CHECK(r <= BACKEND_E_FULL);
	if (r)
		return r;
	count_new(b, mem, bytes);
	*ret = mem;
	return 0;
}

int backend_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret)
{
	struct backend_mem *mem = NULL;
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(fd >= 0);
	r = b->ops->import(b, fd, bytes, &mem);
	CHECK(r <= 0);
	if (r)
		return r;
	count_new(b, mem, bytes);
	*ret = mem;
	return 0;
}

void backend_free(struct backend *b, struct backend_mem *mem)
{
	if (!mem)
		return;
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->live > 0);
	b->live--;
	b->ops->free(b, mem);
}

void *backend_addr(const struct backend_mem *mem)
{
	return mem->addr;
}

uint64_t backend_bytes(const struct backend_mem *mem)
{
	return mem->bytes;
}

int backend_export(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd)
{
	int fd = -1;
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(mem);
	r = b->ops->export(b, mem, writable, &fd);
	CHECK(r <= 0);
	if (r)
		return r;
	CHECK(fd >= 0);
	*ret_fd = fd;
	return 0;
}

static void check_kop(const struct kop *kop)
{
	CHECK((unsigned)kop->kind < _KOP_N);
	if (kop->kind == KOP_REDUCE)
		CHECK(kop->reduce.k > 0 && kop->reduce.k <= KERNEL_MAX_INPUTS);
	if (kop->kind == KOP_ALL_REDUCE)
		CHECK(kop->all_reduce.k > 0 && kop->all_reduce.k <= KERNEL_MAX_INPUTS);
}

void backend_submit(struct backend *b, struct backend_task *task)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(task->done);
	CHECK(task->kops || task->n_kops == 0);
	for (unsigned i = 0; i < task->n_kops; i++)
		check_kop(&task->kops[i]);
	b->in_flight++;
	b->submitted++;
	b->ops->submit(b, task);
}

void backend_complete(struct backend *b, struct backend_task *task, int status)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->in_flight > 0);
	CHECK(status <= 0);
	b->in_flight--;
	task->done(task, status);
}

unsigned backend_in_flight(const struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	return b->in_flight;
}

struct backend *backend_close(struct backend *b)
{
	if (!b)
		return NULL;
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->in_flight == 0);
	CHECK(b->live == 0);
	b->magic = 0;
	b->ops->close(b);
	return NULL;
}
