/* Completing what a predecessor has begun. Everything read here may be damaged, and this process may
 * be killed as well: each step leaves the memfd so that the next process can do the rest. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/launch.h"
#include "backend/redo_impl.h"
#include "core/check.h"
#include "core/cleanup.h"

/* Cells for several threads. */
struct redo_crew {
	struct redo_task *task;
	const struct kernels *kernels;
	const struct launch *launches; /* with addresses of this process */
	struct redo_cell *cells;
	size_t n;
	_Atomic size_t next;
};

struct redo_cell {
	uint32_t launch;
	uint64_t begin, end;
};

struct redo_hand {
	pthread_t thread;
	struct redo_crew *crew;
	unsigned slot;
	bool started;
};

static int redo_complete_damaged(struct fault *f, const char *what)
{
	return fault_set(f, FAULT_INVALID, "redo",
			 "the redo file of the previous daemon is damaged: %s", what);
}

/* --------------------------------------------------------------------- opening */

static int redo_complete_open_file(struct redo *r, int fd, unsigned threads, struct fault *f)
{
	struct stat st;
	int e;

	r->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (r->fd < 0 || fstat(r->fd, &st) < 0)
		return fault_errno(f, -errno, "taking over the redo file");
	if (!S_ISREG(st.st_mode))
		return redo_complete_damaged(f, "it is not a file");
	if (st.st_size < (off_t)REDO_FRONT && ftruncate(r->fd, REDO_FRONT) < 0)
		return fault_errno(f, -errno, "taking over the redo file");
	r->bytes = st.st_size < (off_t)REDO_FRONT ? REDO_FRONT : (uint64_t)st.st_size;
	e = redo_map_front(r, threads);
	return e < 0 ? fault_errno(f, e, "mapping the redo file") : 0;
}

int redo_open(int fd, unsigned threads, struct redo **ret, struct fault *f)
{
	struct redo *r = redo_alloc();

	if (!r)
		return fault_errno(f, -ENOMEM, "taking over the redo file");
	/* without a begin: the previous daemon was killed in redo_clear, and no task counts */
	if (redo_complete_open_file(r, fd, threads, f) == 0 && r->front->magic &&
	    r->front->magic != REDO_MAGIC)
		redo_complete_damaged(f, "it does not begin as one");
	if (f->code) {
		redo_free(r);
		return f->code;
	}
	r->foreign = r->front->magic && r->front->format != REDO_FORMAT;
	*ret = r;
	return 0;
}

static const struct redo_entry *redo_complete_find(const struct redo *r, uint64_t number)
{
	for (unsigned i = 0; r->front->magic && number && i < REDO_TASKS; i++)
		if (atomic_load_explicit(&r->front->tasks[i].number, memory_order_acquire) ==
		    number)
			return &r->front->tasks[i];
	return NULL;
}

bool redo_has(const struct redo *r, uint64_t number)
{
	return redo_complete_find(r, number) != NULL;
}

/* --------------------------------------------------------------------- the task */

/* @used: cells of the launches before it, as redo_task_add has it. There are no more phases than launches. */
static bool redo_complete_launch_is_valid(const struct redo_head *h, const struct redo_launch *l,
					  uint64_t used)
{
	return redo_can(&l->launch) && l->phase <= h->n && l->first_cell == used &&
	       redo_cells(l->launch.n) <= h->n_cells - used;
}

static int redo_complete_check_window(const struct redo_task *t, uint64_t bytes, struct fault *f)
{
	const struct redo_head *h = t->head;
	uint64_t used = 0;

	if (h->n > h->room || redo_cells_at(h->room) > bytes ||
	    h->n_cells > bytes - redo_cells_at(h->room))
		return redo_complete_damaged(f, "a task is larger than its window");
	for (uint32_t i = 0; i < h->n; i++) {
		if (!redo_complete_launch_is_valid(h, &h->launches[i], used))
			return redo_complete_damaged(f, "a launch is none");
		used += redo_cells(h->launches[i].launch.n);
	}
	return 0;
}

/* @t: of the window that @e says. */
static int redo_complete_open_task(struct redo *r, const struct redo_entry *e, struct redo_task *t,
				   struct fault *f)
{
	unsigned i = (unsigned)(e - r->front->tasks);

	if (e->offset < REDO_FRONT || e->offset % REDO_WINDOW || e->offset > r->bytes ||
	    e->bytes < REDO_WINDOW || e->bytes > r->bytes - e->offset)
		return redo_complete_damaged(f, "a task is outside of it");
	if (!r->windows[i].at && redo_map_window(r, i, e->offset, e->bytes) < 0)
		return fault_errno(f, -ENOMEM, "mapping the redo file");
	*t = (struct redo_task){
		.redo = r, .index = i, .number = atomic_load(&e->number), .head = r->windows[i].at
	};
	if (redo_complete_check_window(t, e->bytes, f))
		return f->code;
	t->cells = redo_at(t->head, redo_cells_at(t->head->room));
	return 0;
}

/* What its arrays are in this process. The window keeps its places. */
static int redo_complete_place_launch(const struct redo_launch *from, redo_addr_cb addr, void *arg,
				      struct launch *ret, struct fault *f)
{
	void **arrays[REDO_ARRAYS];
	unsigned n;

	*ret = from->launch;
	n = redo_arrays(ret, arrays);
	for (unsigned i = 0; i < n; i++) {
		const struct redo_place *p = &from->at[i];

		*arrays[i] = p->slab ? addr(arg, *p, ret->n * sizeof(float)) : NULL;
		if (p->slab && !*arrays[i])
			return redo_complete_damaged(f,
						     "a launch works on memory that is not there");
	}
	return *arrays[0] ? 0 : redo_complete_damaged(f, "a launch changes nothing");
}

/* How many of its arrays it changes: the first ones. */
static unsigned redo_complete_changed(const struct launch *l)
{
	if (l->kind == LAUNCH_SGD)
		return l->sgd.mu != 0 ? 2 : 1;
	if (l->kind == LAUNCH_SCALE)
		return 1;
	return (l->kind == LAUNCH_ADAMW ? l->adamw.vmax : l->adam.vmax) ? 4 : 3;
}

/* ---------------------------------------------------------------------- repair */

/* What a thread was doing: put back the block that it was changing, and go on with it. */
static int redo_complete_repair_slot(struct redo_task *t, struct redo_slot *s,
				     const struct kernels *k, const struct launch *launches,
				     struct fault *f)
{
	struct k_undo_block b = k_undo_block_of(&s->undo);
	struct launch own;
	void **at[REDO_ARRAYS];
	float *arrays[K_UNDO_ARRAYS] = { 0 };
	unsigned n;

	if (s->launch >= t->head->n || s->end > launches[s->launch].n || s->begin > s->end ||
	    b.n > K_UNDO_BLOCK || (b.n && (b.at < s->begin || b.at + b.n > s->end)))
		return redo_complete_damaged(f, "a thread was outside of its launch");
	own = launches[s->launch];
	redo_arrays(&own, at);
	n = redo_complete_changed(&own);
	for (unsigned i = 0; i < n; i++) {
		arrays[i] = *at[i];
		if (!arrays[i])
			return redo_complete_damaged(f,
						     "a launch changes memory that is not there");
	}
	if (!atomic_load(&s->done)) {
		uint64_t from = k_undo_restore(&s->undo, arrays, n, s->begin);

		redo_set_undo(&own, &s->undo);
		launch_run(k, &own, from, s->end);
	}
	redo_slot_end(s, t);
	return 0;
}

static int redo_complete_repair(struct redo_task *t, const struct kernels *k,
				const struct launch *launches, struct fault *f)
{
	for (unsigned i = 0; !f->code && i < t->redo->front->slots && i < REDO_SLOTS; i++) {
		struct redo_slot *s = redo_slot(t->redo, i);

		if (atomic_load(&s->number) == t->number)
			redo_complete_repair_slot(t, s, k, launches, f);
	}
	return f->code;
}

/* ------------------------------------------------------------------------ cells */

static void *redo_complete_hand_main(void *arg)
{
	struct redo_hand *h = arg;
	struct redo_crew *c = h->crew;
	size_t i;

	while ((i = atomic_fetch_add(&c->next, 1)) < c->n) {
		const struct redo_cell *cell = &c->cells[i];

		redo_run(c->task, cell->launch, h->slot, c->kernels, &c->launches[cell->launch],
			 cell->begin, cell->end);
	}
	return NULL;
}

/* A thread that cannot be started is missed by nobody. */
static void redo_complete_run_crew(struct redo_crew *c, struct redo_hand *hands, unsigned threads)
{
	for (unsigned i = 0; i < threads; i++) {
		hands[i] = (struct redo_hand){ .crew = c, .slot = i };
		hands[i].started = i > 0 && c->n > i &&
				   pthread_create(&hands[i].thread, NULL, redo_complete_hand_main,
						  &hands[i]) == 0;
	}
	redo_complete_hand_main(&hands[0]);
	for (unsigned i = 1; i < threads; i++)
		if (hands[i].started)
			pthread_join(hands[i].thread, NULL);
}

static size_t redo_complete_count_cells(const struct redo_task *t)
{
	size_t n = 0;

	for (uint64_t c = 0; c < t->head->n_cells; c++)
		n += !atomic_load_explicit(&t->cells[c], memory_order_relaxed);
	return n;
}

static void redo_complete_take_cells(struct redo_crew *c, uint32_t i, const struct redo_launch *l)
{
	for (uint64_t k = 0; k < redo_cells(l->launch.n); k++) {
		uint64_t begin = k * KERNEL_NORM_BLOCK, end = begin + KERNEL_NORM_BLOCK;

		if (!atomic_load_explicit(&c->task->cells[l->first_cell + k], memory_order_relaxed))
			c->cells[c->n++] =
				(struct redo_cell){ i, begin,
						    end < l->launch.n ? end : l->launch.n };
	}
}

uint32_t redo_complete_phases(const struct redo_head *h)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < h->n; i++)
		n = h->launches[i].phase >= n ? h->launches[i].phase + 1 : n;
	return n;
}

static int redo_complete_run_cells(struct redo_task *t, const struct kernels *k,
				   const struct launch *launches, unsigned threads, struct fault *f)
{
	_cleanup_(freep) struct redo_hand *hands = calloc(threads, sizeof(*hands));
	_cleanup_(freep) struct redo_cell *cells =
		calloc(redo_complete_count_cells(t) + 1, sizeof(*cells));

	if (!hands || !cells)
		return fault_errno(f, -ENOMEM, "completing a step");
	for (uint32_t phase = 0; phase < redo_complete_phases(t->head); phase++) {
		struct redo_crew c = { t, k, launches, cells, 0, 0 };

		for (uint32_t i = 0; i < t->head->n; i++)
			if (t->head->launches[i].phase == phase)
				redo_complete_take_cells(&c, i, &t->head->launches[i]);
		redo_complete_run_crew(&c, hands, threads);
	}
	return 0;
}

int redo_complete_load(struct redo *r, uint64_t number, redo_addr_cb addr, void *arg,
		       struct redo_task *ret, struct launch **ret_launches, struct fault *f)
{
	const struct redo_entry *e = redo_complete_find(r, number);
	struct launch *launches;

	CHECK(e);
	if (r->foreign)
		return fault_set(f, FAULT_INVALID, "redo",
				 "the step was begun by a shardd whose redo file has format %u; "
				 "this one completes format %u",
				 r->front->format, REDO_FORMAT);
	if (redo_complete_open_task(r, e, ret, f))
		return f->code;
	launches = *ret_launches = calloc(ret->head->n + 1u, sizeof(*launches));
	if (!launches)
		return fault_errno(f, -ENOMEM, "completing a step");
	for (uint32_t i = 0; !f->code && i < ret->head->n; i++)
		redo_complete_place_launch(&ret->head->launches[i], addr, arg, &launches[i], f);
	return f->code;
}

/* The same, and what was being changed put back. */
static int redo_complete_begin(struct redo *r, uint64_t number, const struct kernels *k,
			       redo_addr_cb addr, void *arg, struct redo_task *ret,
			       struct launch **ret_launches, struct fault *f)
{
	if (redo_complete_load(r, number, addr, arg, ret, ret_launches, f))
		return f->code;
	return redo_complete_repair(ret, k, *ret_launches, f);
}

int redo_repair(struct redo *r, uint64_t number, const struct kernels *k, redo_addr_cb addr,
		void *arg, struct fault *f)
{
	_cleanup_(freep) struct launch *launches = NULL;
	struct redo_task t;

	return redo_complete_begin(r, number, k, addr, arg, &t, &launches, f);
}

int redo_complete(struct redo *r, uint64_t number, const struct kernels *k, unsigned threads,
		  redo_addr_cb addr, void *arg, struct fault *f)
{
	_cleanup_(freep) struct launch *launches = NULL;
	struct redo_task t;

	CHECK(threads > 0 && threads <= r->threads);
	if (redo_complete_begin(r, number, k, addr, arg, &t, &launches, f))
		return f->code;
	return redo_complete_run_cells(&t, k, launches, threads, f);
}

static bool redo_complete_keeps(struct redo *r, const struct redo_entry *e, const uint64_t *numbers,
				size_t n)
{
	uint64_t number = atomic_load(&e->number);
	struct fault f = FAULT_NULL;
	struct redo_task t;
	bool wanted = false;

	for (size_t i = 0; number && i < n; i++)
		wanted = wanted || numbers[i] == number;
	return wanted && redo_complete_open_task(r, e, &t, &f) == 0;
}

void redo_keep(struct redo *r, const uint64_t *numbers, size_t n)
{
	bool any = false;

	for (unsigned i = 0; r->front->magic && !r->foreign && i < REDO_TASKS; i++) {
		struct redo_entry *e = &r->front->tasks[i];

		r->windows[i].busy = redo_complete_keeps(r, e, numbers, n);
		any = any || r->windows[i].busy;
		if (!r->windows[i].busy)
			atomic_store_explicit(&e->number, 0, memory_order_release);
	}
	if (!any) {
		redo_clear(r);
		return;
	}
	for (unsigned i = 0; i < r->threads; i++)
		atomic_store(&redo_slot(r, i)->number, 0);
	r->front->slots = r->threads;
}

void redo_drop(struct redo *r, uint64_t number)
{
	const struct redo_entry *e = redo_complete_find(r, number);
	unsigned i = e ? (unsigned)(e - r->front->tasks) : 0;

	if (!e)
		return;
	atomic_store_explicit(&r->front->tasks[i].number, 0, memory_order_release);
	r->windows[i].busy = false;
}

int redo_complete_some(struct redo *r, uint64_t number, const struct kernels *k, unsigned slot,
		       size_t cells, redo_addr_cb addr, void *arg, bool *ret_left, struct fault *f)
{
	_cleanup_(freep) struct launch *launches = NULL;
	_cleanup_(freep) struct redo_cell *all = NULL;
	struct redo_hand hand = { .slot = slot };
	struct redo_crew c = { .kernels = k };
	struct redo_task t;

	*ret_left = false;
	if (redo_complete_load(r, number, addr, arg, &t, &launches, f))
		return f->code;
	all = calloc(redo_complete_count_cells(&t) + 1, sizeof(*all));
	if (!all)
		return fault_errno(f, -ENOMEM, "completing a step");
	c = (struct redo_crew){ &t, k, launches, all, 0, 0 };
	for (uint32_t phase = 0; phase < redo_complete_phases(t.head); phase++)
		for (uint32_t i = 0; i < t.head->n; i++)
			if (t.head->launches[i].phase == phase)
				redo_complete_take_cells(&c, i, &t.head->launches[i]);
	*ret_left = c.n > cells;
	c.n = c.n < cells ? c.n : cells; /* in the order of the phases */
	hand.crew = &c;
	redo_complete_hand_main(&hand);
	return 0;
}

void redo_clear(struct redo *r)
{
	for (unsigned i = 0; i < REDO_TASKS; i++) {
		if (r->windows[i].at)
			munmap(r->windows[i].at, r->windows[i].bytes);
		r->windows[i] = (struct redo_window){ 0 };
	}
	r->front->magic = 0; /* if we are killed here, no task counts */
	atomic_signal_fence(memory_order_seq_cst);
	if (ftruncate(r->fd, REDO_FRONT) == 0)
		r->bytes = REDO_FRONT;
	r->foreign = false;
	redo_format(r);
}
