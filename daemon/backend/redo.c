#include "backend/redo.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/launch.h"
#include "backend/redo_impl.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/memfile.h"

/* Of the window of a task. */
static uint64_t redo_window_bytes(unsigned launches, uint64_t cells)
{
	return redo_cells_at(launches) + cells;
}

bool redo_can(const struct launch *launch)
{
	return launch->kind == LAUNCH_ADAMW || launch->kind == LAUNCH_ADAM ||
	       launch->kind == LAUNCH_SGD || launch->kind == LAUNCH_SCALE;
}

uint64_t redo_cells(uint64_t elements)
{
	return elements / KERNEL_NORM_BLOCK + (elements % KERNEL_NORM_BLOCK != 0);
}

/* The arrays of a launch, the first one that it changes first. */
unsigned redo_arrays(struct launch *l, void **ret[REDO_ARRAYS])
{
	struct k_adamw *w = &l->adamw;
	struct k_adam *a = &l->adam;
	struct k_sgd *s = &l->sgd;

	switch (l->kind) {
	case LAUNCH_ADAMW:
		memcpy(ret,
		       (void **[]){ (void **)&w->p, (void **)&w->m, (void **)&w->v,
				    (void **)&w->vmax, (void **)&w->g },
		       5 * sizeof(*ret));
		return 5;
	case LAUNCH_ADAM:
		memcpy(ret,
		       (void **[]){ (void **)&a->p, (void **)&a->m, (void **)&a->v,
				    (void **)&a->vmax, (void **)&a->g },
		       5 * sizeof(*ret));
		return 5;
	case LAUNCH_SGD:
		memcpy(ret, (void **[]){ (void **)&s->p, (void **)&s->buf, (void **)&s->g },
		       3 * sizeof(*ret));
		return 3;
	default:
		CHECK(l->kind == LAUNCH_SCALE);
		ret[0] = (void **)&l->scale.x;
		return 1;
	}
}

void redo_set_undo(struct launch *l, struct k_undo *undo)
{
	switch (l->kind) {
	case LAUNCH_ADAMW:
		l->adamw.undo = undo;
		break;
	case LAUNCH_ADAM:
		l->adam.undo = undo;
		break;
	case LAUNCH_SGD:
		l->sgd.undo = undo;
		break;
	default:
		CHECK(l->kind == LAUNCH_SCALE);
		l->scale.undo = undo;
	}
}

/* ------------------------------------------------------------------ the memfd */

/* Pages are taken before they are written: a write to one that the kernel does not have would end
 * the process. */
int redo_map_front(struct redo *r, unsigned threads)
{
	void *at;

	CHECK(threads > 0 && threads <= REDO_SLOTS);
	if (fallocate(r->fd, 0, 0, (off_t)REDO_SLOT_AT(threads)) < 0)
		return -errno;
	at = mmap(NULL, REDO_FRONT, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, 0);
	if (at == MAP_FAILED)
		return -errno;
	r->front = at;
	r->threads = threads;
	return 0;
}

struct redo *redo_alloc(void)
{
	struct redo *r = calloc(1, sizeof(*r));

	if (r)
		r->fd = -1;
	return r;
}

/* An empty table. It counts from the last store on. */
void redo_format(struct redo *r)
{
	memset(r->front, 0, sizeof(*r->front));
	for (unsigned i = 0; i < r->threads; i++)
		atomic_store(&redo_slot(r, i)->number, 0);
	r->front->format = REDO_FORMAT;
	r->front->slots = r->threads;
	r->front->next = 1;
	atomic_signal_fence(memory_order_seq_cst);
	r->front->magic = REDO_MAGIC;
}

int redo_new(unsigned threads, struct redo **ret)
{
	struct redo *r = redo_alloc();
	int e;

	if (!r)
		return -ENOMEM;
	e = memfile_new("shardd-redo", &r->fd);
	if (e == 0 && ftruncate(r->fd, REDO_FRONT) < 0)
		e = -errno;
	if (e == 0)
		e = redo_map_front(r, threads);
	if (e < 0) {
		redo_free(r);
		return e;
	}
	r->bytes = REDO_FRONT;
	redo_format(r);
	*ret = r;
	return 0;
}

struct redo *redo_free(struct redo *r)
{
	if (!r)
		return NULL;
	for (unsigned i = 0; i < REDO_TASKS; i++)
		if (r->windows[i].at)
			munmap(r->windows[i].at, r->windows[i].bytes);
	if (r->front)
		munmap(r->front, REDO_FRONT);
	fd_close(r->fd);
	free(r);
	return NULL;
}

int redo_fd(const struct redo *r)
{
	return r->fd;
}

/* --------------------------------------------------------------------- windows */

int redo_map_window(struct redo *r, unsigned i, uint64_t offset, uint64_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, (off_t)offset);

	if (at == MAP_FAILED)
		return -ENOMEM;
	r->windows[i] = (struct redo_window){ .at = at, .offset = offset, .bytes = bytes };
	return 0;
}

/* Windows are powers of two, so that a job that grows leaves little behind. */
static int redo_add_window(struct redo *r, unsigned i, uint64_t need)
{
	uint64_t bytes = REDO_WINDOW;
	int e;

	while (bytes < need)
		bytes *= 2;
	if (fallocate(r->fd, 0, (off_t)r->bytes, (off_t)bytes) < 0)
		return -ENOMEM;
	e = redo_map_window(r, i, r->bytes, bytes);
	if (e == 0)
		r->bytes += bytes;
	return e;
}

/* Return: the index of a window of @need bytes that no task has; REDO_TASKS: there is no memory for
 * one. */
static unsigned redo_find_window(struct redo *r, uint64_t need)
{
	unsigned i;

	for (i = 0; i < REDO_TASKS && r->windows[i].at; i++)
		if (!r->windows[i].busy && r->windows[i].bytes >= need)
			return i;
	return i < REDO_TASKS && redo_add_window(r, i, need) == 0 ? i : REDO_TASKS;
}

/* ----------------------------------------------------------------------- tasks */

struct redo_task *redo_task_new(struct redo *r, unsigned launches, uint64_t cells)
{
	_cleanup_(freep) struct redo_task *t = calloc(1, sizeof(*t));
	unsigned i = redo_find_window(r, redo_window_bytes(launches, cells));

	if (!t || i == REDO_TASKS)
		return NULL;
	r->windows[i].busy = true;
	*t = (struct redo_task){ .redo = r, .index = i, .head = r->windows[i].at };
	*t->head = (struct redo_head){ .room = launches, .n_cells = cells };
	t->cells = (_Atomic uint8_t *)redo_at(t->head, redo_cells_at(launches));
	for (uint64_t c = 0; c < cells; c++)
		atomic_store_explicit(&t->cells[c], 0, memory_order_relaxed);
	return STEAL_PTR(t);
}

void redo_task_add(struct redo_task *t, unsigned phase, const struct launch *launch,
		   redo_place_cb place, void *arg)
{
	struct redo_launch *to = &t->head->launches[t->head->n];
	void **arrays[REDO_ARRAYS];
	unsigned n;

	CHECK(t->head->n < t->head->room && !t->number && redo_can(launch));
	*to = (struct redo_launch){ .launch = *launch, .phase = phase, .first_cell = t->used };
	n = redo_arrays(&to->launch, arrays);
	for (unsigned i = 0; i < n; i++)
		if (*arrays[i])
			to->at[i] = place(arg, *arrays[i]);
	t->used += redo_cells(launch->n);
	CHECK(t->used <= t->head->n_cells);
	t->head->n++;
}

uint64_t redo_task_publish(struct redo_task *t)
{
	struct redo_front *front = t->redo->front;
	struct redo_entry *e = &front->tasks[t->index];

	if (t->number)
		return t->number;
	t->number = front->next++;
	e->offset = t->redo->windows[t->index].offset;
	e->bytes = t->redo->windows[t->index].bytes;
	/* with what was written before it: read in redo_open */
	atomic_store_explicit(&e->number, t->number, memory_order_release);
	return t->number;
}

struct redo_task *redo_task_free(struct redo_task *t)
{
	if (!t)
		return NULL;
	atomic_store_explicit(&t->redo->front->tasks[t->index].number, 0, memory_order_release);
	t->redo->windows[t->index].busy = false;
	free(t);
	return NULL;
}

/* --------------------------------------------------------------------- workers */

void redo_mark_cells(struct redo_task *t, unsigned i, uint64_t begin, uint64_t end)
{
	uint64_t first = t->head->launches[i].first_cell;

	for (uint64_t c = begin / KERNEL_NORM_BLOCK; c < redo_cells(end); c++)
		atomic_store_explicit(&t->cells[first + c], 1, memory_order_relaxed);
}

/* Each step takes effect before the next one begins, whatever instruction it ends at. */
void redo_slot_begin(struct redo_slot *s, const struct redo_task *t, unsigned i, uint64_t begin,
		     uint64_t end)
{
	atomic_store_explicit(&s->number, 0, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
	s->launch = i;
	s->begin = begin;
	s->end = end;
	s->done = 0;
	k_undo_begin(&s->undo);
	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&s->number, t->number, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
}

void redo_slot_end(struct redo_slot *s, struct redo_task *t)
{
	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&s->done, 1, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
	redo_mark_cells(t, s->launch, s->begin, s->end);
	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&s->number, 0, memory_order_release);
}

void redo_run(struct redo_task *t, unsigned i, unsigned slot, const struct kernels *k,
	      const struct launch *launch, uint64_t begin, uint64_t end)
{
	struct redo_slot *s = redo_slot(t->redo, slot);
	struct launch own = *launch;

	CHECK(slot < t->redo->threads && i < t->head->n && begin % KERNEL_NORM_BLOCK == 0);
	redo_slot_begin(s, t, i, begin, end);
	redo_set_undo(&own, &s->undo);
	launch_run(k, &own, begin, end);
	redo_slot_end(s, t);
}

void redo_number(struct redo_task *t, unsigned i, uint64_t number)
{
	CHECK(t->number && i < t->head->n);
	atomic_store_explicit(&t->head->launches[i].number, number, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst); /* before the launch */
}
