#include "backend/fake_queue.h"

#include <stdlib.h>
#include <string.h>

#include "backend/launch.h"
#include "backend/memfd.h"
#include "core/check.h"
#include "core/clock.h"

/* ------------------------------------------------------------------- signals */

struct fake_signals {
	struct backend_signals signals; /* first */
	struct backend_mem *mem;        /* borrowed */
	unsigned users;                 /* waits in queues */
	bool poisoned;
	bool ended;
	void (*freed)(void *userdata);
	void *userdata;
};

static struct fake_signals *fake_queue_signals_of(struct backend_signals *s)
{
	return CONTAINER_OF(s, struct fake_signals, signals);
}

int fake_signals_new(struct backend *b, struct backend_mem *mem, struct backend_signals **ret)
{
	struct fake_signals *s = calloc(1, sizeof(*s));

	CHECK(s);
	s->signals.backend = b;
	s->mem = mem;
	*ret = &s->signals;
	return 0;
}

void fake_signals_poison(struct backend_signals *s)
{
	fake_queue_signals_of(s)->poisoned = true;
	backend_fake_look(s->backend);
}

static void fake_queue_signals_end(struct fake_signals *s)
{
	if (!s->ended || s->users)
		return;
	if (s->freed)
		s->freed(s->userdata);
	free(s);
}

void fake_signals_free(struct backend_signals *signals, void (*freed)(void *userdata),
		       void *userdata)
{
	struct fake_signals *s = fake_queue_signals_of(signals);

	s->ended = true;
	s->freed = freed;
	s->userdata = userdata;
	fake_queue_signals_end(s);
}

static bool fake_queue_is_reached(const struct backend_wait *w)
{
	const struct fake_signals *s = fake_queue_signals_of(w->signals);
	const char *page = s->mem->addr;
	uint64_t word;

	if (s->poisoned)
		return true;
	memcpy(&word, page + (size_t)w->slot * BACKEND_SLOT_STRIDE, sizeof(word));
	return word >= w->value;
}

/* -------------------------------------------------------------------- issuing */

static void *fake_queue_copy_of(const void *from, size_t bytes)
{
	void *to = malloc(bytes ? bytes : 1);

	CHECK(to); /* tests only: no way to continue */
	if (bytes)
		memcpy(to, from, bytes);
	return to;
}

/* Return: where a kernel keeps its list of inputs, or NULL if it has none. */
static const void *const **fake_queue_inputs_of(struct launch *launch, unsigned *ret_n)
{
	struct k_reduce *r = launch->kind == LAUNCH_REDUCE        ? &launch->reduce
			     : launch->kind == LAUNCH_REDUCE_STEP ? &launch->reduce_step.reduce
								  : NULL;

	*ret_n = launch->kind == LAUNCH_ALL_REDUCE ? launch->all_reduce.k : r ? r->k : 0;
	if (launch->kind == LAUNCH_ALL_REDUCE)
		return &launch->all_reduce.in;
	return r ? &r->in : NULL;
}

static struct list fake_queue_memory =
	LIST_INIT(fake_queue_memory); /* of struct memfd: all devices' */

void fake_queues_own(struct memfd *m)
{
	list_append(&fake_queue_memory, &m->live);
}

static bool fake_queue_is_device(const void *p)
{
	const struct memfd *m, *tmp;

	list_for_each (m, tmp, &fake_queue_memory, live)
		if ((const char *)p >= (const char *)m->mem.addr &&
		    (const char *)p < (const char *)m->mem.addr + m->mem.bytes)
			return true;
	return false;
}

static void fake_queue_stage(struct fake_exec *e, unsigned i)
{
	struct launch *l = &e->launches[i];

	if (l->kind != LAUNCH_COPY || fake_queue_is_device(l->copy.src))
		return;
	e->sources[i] = fake_queue_copy_of(l->copy.src, l->n);
	l->copy.src = e->sources[i];
}

static void fake_queue_copy_launches(struct fake_exec *e, const struct backend_task *task)
{
	unsigned n;

	e->launches = fake_queue_copy_of(task->launches, task->n_launches * sizeof(*e->launches));
	e->n_launches = task->n_launches;
	e->sources = calloc(e->n_launches + 1, sizeof(*e->sources));
	CHECK(e->sources);
	for (unsigned i = 0; i < e->n_launches; i++) {
		fake_queue_stage(e, i);
		const void *const **in = fake_queue_inputs_of(&e->launches[i], &n);

		if (in)
			*in = fake_queue_copy_of(*in, n * sizeof(**in));
	}
}

void fake_queues_issue(struct fake_queues *q, struct backend *b, struct backend_task *task,
		       int status)
{
	struct fake_exec *e = calloc(1, sizeof(*e));

	CHECK(e);
	e->task = task->sync ? task : NULL;
	e->queue = task->queue;
	e->status = status;
	e->point = ++q->issued[task->queue];
	e->waits = fake_queue_copy_of(task->waits, task->n_waits * sizeof(*e->waits));
	e->n_waits = task->n_waits;
	for (unsigned i = 0; i < e->n_waits; i++)
		fake_queue_signals_of(e->waits[i].signals)->users++;
	fake_queue_copy_launches(e, task);
	list_init(&e->link);
	list_append(&q->tasks[task->queue], &e->link);
	q->pending++;
	if (task->issued && status == 0)
		backend_issued(b, task, e->point);
}

/* ------------------------------------------------------------------ executing */

static bool fake_queue_can_run(const struct fake_exec *e)
{
	for (unsigned i = 0; i < e->n_waits; i++)
		if (!fake_queue_is_reached(&e->waits[i]))
			return false;
	return true;
}

static struct fake_exec *fake_queue_first_ready(const struct fake_queues *q)
{
	for (unsigned i = 0; q->on && i < _BACKEND_Q_N; i++) {
		struct fake_exec *e;

		if (list_empty(&q->tasks[i]))
			continue;
		e = list_first(&q->tasks[i], struct fake_exec, link);
		if (fake_queue_can_run(e))
			return e;
	}
	return NULL;
}

bool fake_queues_can(const struct fake_queues *q)
{
	return fake_queue_first_ready(q);
}

struct fake_exec *fake_queues_next(struct fake_queues *q)
{
	struct fake_exec *e = fake_queue_first_ready(q);

	if (e)
		list_unlink(&e->link);
	return e;
}

static void fake_queue_exec_free(struct fake_exec *e)
{
	unsigned n;

	for (unsigned i = 0; i < e->n_launches; i++) {
		const void *const **in = fake_queue_inputs_of(&e->launches[i], &n);

		if (in)
			free((void *)*in);
		free(e->sources[i]);
	}
	for (unsigned i = 0; i < e->n_waits; i++) {
		struct fake_signals *s = fake_queue_signals_of(e->waits[i].signals);

		CHECK(s->users > 0);
		s->users--;
		fake_queue_signals_end(s);
	}
	free(e->launches);
	free(e->sources);
	free(e->waits);
	free(e);
}

static void fake_queue_free_all(struct fake_queues *q)
{
	struct memfd *m, *tmp;

	list_for_each (m, tmp, &q->frees, link) {
		list_unlink(&m->link);
		list_unlink(&m->live);
		memfd_free(m);
	}
}

void fake_queues_execute(struct fake_queues *q, struct backend *b, struct fake_exec *e)
{
	struct backend_task *task = e->task;
	uint64_t began = clock_now_us();
	int status = e->status;
	char *word = (char *)q->ready->mem.addr + e->queue * BACKEND_SLOT_STRIDE;

	for (unsigned i = 0; status == 0 && i < e->n_launches; i++)
		launch_run(kernels_ref(), &e->launches[i], 0, e->launches[i].n);
	memcpy(word, &e->point, sizeof(e->point));
	fake_queue_exec_free(e);
	CHECK(q->pending > 0);
	if (--q->pending == 0)
		fake_queue_free_all(q);
	if (!task)
		return;
	task->began_us = began;
	task->ended_us = clock_now_us();
	backend_complete(b, task, status);
}

void fake_queues_free(struct fake_queues *q, struct memfd *m)
{
	if (!q->on || !q->pending) {
		list_unlink(&m->live);
		memfd_free(m);
		return;
	}
	list_init(&m->link);
	list_append(&q->frees, &m->link);
}

void fake_queues_deinit(struct fake_queues *q)
{
	CHECK(!q->pending);
	q->ready = memfd_free(q->ready);
}
