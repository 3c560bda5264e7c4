#include "backend/backend.h"

#include "backend/backend_impl.h"
#include "core/check.h"

#define BACKEND_MAGIC 0x42434b44u

void backend_init(struct backend *b, const struct backend_ops *ops, struct loopq *loopq)
{
	CHECK(ops->alloc && ops->free && ops->export && ops->import && ops->submit && ops->close);
	CHECK(!ops->is_held == !ops->empty && !ops->is_held == !ops->seal);
	CHECK(!ops->ready || (ops->signals_new && ops->signals_poison && ops->signals_free));
	*b = (struct backend){ .magic = BACKEND_MAGIC, .ops = ops, .loopq = loopq };
}

const struct backend_info *backend_info(const struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	return &b->info;
}

static void backend_count_new(struct backend *b, const struct backend_mem *mem, uint64_t bytes)
{
	CHECK(mem && mem->addr && mem->bytes == bytes);
	b->live++;
}

void backend_on_news(struct backend *b, backend_news_cb fn, void *userdata)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	b->news = fn;
	b->news_userdata = userdata;
}

void backend_tell(struct backend *b, enum backend_news news)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	if (b->news)
		b->news(b->news_userdata, news);
}

int backend_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
		  struct backend_mem **ret)
{
	struct backend_mem *mem = NULL;
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(bytes > 0 && bytes % b->info.granularity == 0);
	CHECK(share == BACKEND_SHARE_FD || b->ops->export_ipc);
	r = b->ops->alloc(b, bytes, share, &mem);
	CHECK(r <= 0);
	if (r)
		return r;
	backend_count_new(b, mem, bytes);
	CHECK(mem->share == share);
	*ret = mem;
	return 0;
}

bool backend_reaches(const struct backend *b, const struct backend *other, enum backend_share share)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	MAGIC_CHECK(other, BACKEND_MAGIC);
	if (b->ops != other->ops)
		return false;
	return b == other || !b->ops->reaches || b->ops->reaches(b, other, share);
}

struct host_room *backend_room(struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	return b->ops->room ? b->ops->room(b) : NULL;
}

void backend_forget_shortage(struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	b->info.short_of[0] = '\0';
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
	backend_count_new(b, mem, bytes);
	*ret = mem;
	return 0;
}

int backend_release(struct backend *b, int fd)
{
	struct backend_mem *page;
	int r = backend_import(b, fd, b->info.granularity, &page);

	if (r)
		return r;
	r = b->ops->release ? b->ops->release(b, page) : 0;
	CHECK(r <= 0);
	backend_free(b, page);
	return r;
}

bool backend_numbers_redo(const struct backend *b)
{
	return b->ops->redo_open != NULL;
}

int backend_redo_open(struct backend *b, int fd, struct backend_mem **ret)
{
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	r = b->ops->redo_open(b, fd, ret);
	CHECK(r <= 0);
	return r;
}

uint64_t backend_redo_last(struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	return b->ops->redo_last(b);
}

int backend_redo_run(struct backend *b, const struct launch *launch, uint64_t number)
{
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->info.redoes && number > 0 && number >= backend_redo_last(b));
	r = b->ops->redo_run(b, launch, number);
	CHECK(r <= 0);
	return r;
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

bool backend_is_held(struct backend *b, struct backend_mem *mem)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	return b->ops->is_held && b->ops->is_held(b, mem);
}

void backend_empty(struct backend *b, struct backend_mem *mem)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	if (b->ops->empty)
		b->ops->empty(b, mem);
}

int backend_store(struct backend *b, struct backend_mem *mem, int *ret_fd)
{
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	if (mem->share != BACKEND_SHARE_FD)
		return -EOPNOTSUPP;
	r = b->ops->store(b, mem, ret_fd);
	if (r == 0)
		mem->stored = true;
	return r;
}

void backend_unstore(struct backend *b, struct backend_mem *mem)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	mem->stored = false;
}

void backend_stored(struct backend *b, struct backend_mem *mem)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	mem->stored = true;
}

int backend_seal(struct backend *b, struct backend_mem *mem)
{
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	r = b->ops->seal ? b->ops->seal(b, mem) : 0;
	CHECK(r <= 0);
	return r;
}

void backend_last(struct backend *b, struct backend_mem *mem)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	mem->lasts = true;
}

uint64_t backend_inode(const struct backend_mem *mem)
{
	return mem->inode;
}

int backend_export_ipc(struct backend *b, struct backend_mem *mem,
		       uint8_t ret_handle[BACKEND_IPC_BYTES])
{
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(mem && mem->share == BACKEND_SHARE_IPC && b->ops->export_ipc);
	r = b->ops->export_ipc(b, mem, ret_handle);
	CHECK(r <= 0);
	return r;
}

/* ---------------------------------------------------- order between processes */

struct backend_mem *backend_ready(struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->info.order != BACKEND_ORDER_NONE);
	return b->ops->ready(b);
}

struct backend_mem *backend_ready_ipc(struct backend *b)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->info.order != BACKEND_ORDER_NONE);
	return b->ops->ready_ipc ? b->ops->ready_ipc(b) : NULL;
}

int backend_ready_event(struct backend *b, enum backend_queue queue, unsigned i,
			uint8_t ret_handle[BACKEND_IPC_BYTES])
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->info.order == BACKEND_ORDER_EVENTS);
	CHECK(queue < _BACKEND_Q_N && i < BACKEND_EVENT_RING);
	return b->ops->ready_event(b, queue, i, ret_handle);
}

int backend_signals_new(struct backend *b, struct backend_mem *mem, struct backend_signals **ret)
{
	int r;

	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->info.order != BACKEND_ORDER_NONE);
	CHECK(mem->bytes >= BACKEND_SIGNAL_SLOTS * BACKEND_SLOT_STRIDE);
	r = b->ops->signals_new(b, mem, ret);
	CHECK(r <= 0);
	if (r)
		return r;
	CHECK((*ret)->backend == b);
	b->signals++;
	return 0;
}

int backend_signals_events(struct backend_signals *s, uint32_t slot,
			   const uint8_t *const handles[BACKEND_EVENT_RING])
{
	CHECK(s->backend->info.order == BACKEND_ORDER_EVENTS);
	CHECK(slot < BACKEND_SIGNAL_SLOTS);
	return s->backend->ops->signals_events(s, slot, handles);
}

void backend_signals_poison(struct backend_signals *s)
{
	MAGIC_CHECK(s->backend, BACKEND_MAGIC);
	s->backend->ops->signals_poison(s);
}

void backend_signals_free(struct backend_signals *s, void (*freed)(void *userdata), void *userdata)
{
	if (!s)
		return;
	MAGIC_CHECK(s->backend, BACKEND_MAGIC);
	CHECK(s->backend->signals > 0);
	s->backend->signals--;
	s->backend->ops->signals_free(s, freed, userdata);
}

/* -------------------------------------------------------------------- tasks */

static bool backend_is_dtype(enum dtype t)
{
	return t > DTYPE_NONE && t < _DTYPE_N;
}

static void backend_check_reduce(const struct k_reduce *r)
{
	CHECK(r->k > 0 && r->k <= KERNEL_MAX_INPUTS);
	CHECK(backend_is_dtype(r->in_dtype) && backend_is_dtype(r->sum_dtype) &&
	      backend_is_dtype(r->out_dtype));
	CHECK(!r->pre.how || backend_is_dtype(r->pre.dtype));
	CHECK(!r->post.how || backend_is_dtype(r->post.dtype));
}

static void backend_check_add_rows(const struct launch *launch)
{
	const struct k_add_rows *a = &launch->add_rows;

	CHECK(backend_is_dtype(a->dtype) && launch->n == a->row_elements);
	CHECK(a->first_row <= a->row_limit && a->row_limit <= INT64_MAX);
	CHECK(!a->pre.how || backend_is_dtype(a->pre.dtype));
}

static void backend_check_step(const struct k_step *s)
{
	CHECK((unsigned)s->kind < _K_STEP_N);
	if (s->kind == K_STEP_ADAM)
		CHECK(s->adam.profile < _K_PROFILE_N);
	else if (s->kind == K_STEP_ADAMW)
		CHECK(s->adamw.profile < _K_PROFILE_N);
	else
		CHECK(s->sgd.profile < K_REFERENCE_F64);
}

static void backend_check_reduce_step(const struct k_reduce_step *a)
{
	backend_check_reduce(&a->reduce);
	backend_check_step(&a->step);
	CHECK(a->reduce.out_dtype == DTYPE_FP32 && (a->reduce.out || !a->reduce.accumulate));
}

static void backend_check_launch(const struct launch *launch)
{
	CHECK((unsigned)launch->kind < _LAUNCH_N);
	if (launch->kind == LAUNCH_REDUCE)
		backend_check_reduce(&launch->reduce);
	if (launch->kind == LAUNCH_ADAM)
		CHECK(launch->adam.profile < _K_PROFILE_N);
	if (launch->kind == LAUNCH_ADAMW)
		CHECK(launch->adamw.profile < _K_PROFILE_N);
	if (launch->kind == LAUNCH_SGD)
		CHECK(launch->sgd.profile < K_REFERENCE_F64);
	if (launch->kind == LAUNCH_NORM)
		CHECK(launch->n == 0 || launch->norm.p > 0);
	if (launch->kind == LAUNCH_REDUCE_STEP)
		backend_check_reduce_step(&launch->reduce_step);
	if (launch->kind == LAUNCH_ADD_ROWS)
		backend_check_add_rows(launch);
	if (launch->kind == LAUNCH_ALL_REDUCE)
		CHECK(launch->all_reduce.k > 0 && launch->all_reduce.k <= KERNEL_MAX_INPUTS);
}

void backend_submit(struct backend *b, struct backend_task *task)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(task->done);
	CHECK(task->launches || task->n_launches == 0);
	CHECK(task->queue < _BACKEND_Q_N);
	CHECK(!task->redo || b->info.redoes);
	for (unsigned i = 0; i < task->n_waits; i++)
		CHECK(task->waits[i].signals->backend == b &&
		      task->waits[i].slot < BACKEND_SIGNAL_SLOTS);
	for (unsigned i = 0; i < task->n_launches; i++)
		backend_check_launch(&task->launches[i]);
	task->began_us = 0;
	task->ended_us = 0;
	b->in_flight++;
	b->submitted++;
	b->ops->submit(b, task);
}

void backend_run(struct backend *b, struct launch *launch, struct backend_owner owner)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->ops->run);
	backend_check_launch(launch);
	b->ops->run(b, launch, owner);
}

void backend_issued(struct backend *b, struct backend_task *task, uint64_t ready)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(task->issued);
	task->ready = ready;
	task->issued(task, 0);
}

void backend_complete(struct backend *b, struct backend_task *task, int status)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	CHECK(b->in_flight > 0);
	CHECK(status <= 0);
	b->in_flight--;
	if (task->seen)
		task->seen(task, status);
	task->done(task, status);
}

void backend_tick(struct backend *b, uint64_t now_us)
{
	MAGIC_CHECK(b, BACKEND_MAGIC);
	if (b->ops->tick)
		b->ops->tick(b, now_us);
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
	CHECK(b->live == 0 && b->signals == 0);
	b->magic = 0;
	b->ops->close(b);
	return NULL;
}
