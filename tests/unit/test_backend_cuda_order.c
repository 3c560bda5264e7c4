/* Order between the cuda backend and another process, on the simulator. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "cudafix.h"
#include "cudatrainer.h"
#include "fdcheck.h"

TestSuite(backend_cuda_order, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#ifdef SHARDD_CUDA

#define MIB (UINT64_C(1) << 20)

/* A backend, a trainer, the trainer's signals, and memory that both see. */
struct pair {
	struct cudafix f;
	struct cudatrainer t;
	struct backend_mem *page, *data;
	struct backend_signals *s;
	uint64_t *words; /* of data, a device address */
	bool freed;
};

static void share(struct pair *p, enum cudatrainer_page page, struct backend_mem *mem)
{
	int fd;

	cr_assert_eq(backend_export(p->f.b, mem, true, &fd), 0);
	cudatrainer_map(&p->t, page, fd, backend_bytes(mem));
	close(fd);
}

static void pair_init(struct pair *p)
{
	p->freed = false;
	cudafix_env();
	p->t = cudatrainer_start();
	cudafix_init(&p->f, 1);
	p->page = cudafix_alloc(&p->f, 2 * MIB);
	p->data = cudafix_alloc(&p->f, 2 * MIB);
	p->words = backend_addr(p->data);
	cr_assert_eq(backend_signals_new(p->f.b, p->page, &p->s), 0);
	share(p, TRAINER_SIGNALS, p->page);
	share(p, TRAINER_READY, backend_ready(p->f.b));
	share(p, TRAINER_DATA, p->data);
}

static void on_freed(void *userdata)
{
	struct pair *p = userdata;

	cr_assert(!p->freed);
	p->freed = true;
}

static void on_flag(void *userdata)
{
	*(bool *)userdata = true;
}

static void free_signals(struct pair *p)
{
	backend_signals_free(p->s, on_freed, p);
	cr_assert(!p->freed, "called from inside");
	looprun_flag(&p->f.run, &p->freed, 30);
	backend_free(p->f.b, p->page);
}

static void pair_deinit(struct pair *p)
{
	if (!p->freed)
		free_signals(p);
	backend_free(p->f.b, p->data);
	cudafix_deinit(&p->f);
}

/* Data word @index becomes @value, after (@slot, @after); 0: after nothing. */
struct put {
	struct cudatask t;
	struct launch k;
	struct backend_wait w;
	uint64_t value;
};

static void put(struct pair *p, struct put *u, uint64_t index, uint64_t value, uint32_t slot,
		uint64_t after)
{
	*u = (struct put){ .t = cudatask_new(), .w = { p->s, slot, after }, .value = value };
	u->k = (struct launch){ .kind = LAUNCH_COPY,
				.n = 8,
				.copy = { p->words + index, &u->value } };
	u->t.task.launches = &u->k;
	u->t.task.n_launches = 1;
	u->t.task.waits = &u->w;
	u->t.task.n_waits = after > 0;
}

static uint64_t get(struct pair *p, uint64_t index)
{
	uint64_t word = 0;
	struct launch k = { .kind = LAUNCH_COPY, .n = 8, .copy = { &word, p->words + index } };
	struct cudatask t = cudatask_new();

	t.task.launches = &k;
	t.task.n_launches = 1;
	t.task.queue = BACKEND_Q_GATHER;
	cudatask_submit(p->f.b, &t);
	cr_assert_eq(cudatask_wait(&p->f, &t), 0);
	return word;
}

Test(backend_cuda_order, work_waits_for_another_process_and_the_answer_does_not)
{
	struct pair p;
	struct put a, b;

	pair_init(&p);
	put(&p, &a, 0, 11, 3, 5);
	put(&p, &b, 1, 12, 0, 0);
	b.t.task.sync = true;
	cudatask_submit(p.f.b, &a.t);
	cudatask_submit(p.f.b, &b.t);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0);
	cudatrainer_raise(&p.t, 3, 4);
	for (unsigned i = 0; i < 20; i++)
		cr_assert_eq(get(&p, 0), 0); /* the other queue goes on */
	cr_assert_eq(b.t.issued, 1);
	cr_assert_eq(b.t.done, 0, "executed before what is before it");
	cudatrainer_raise(&p.t, 3, 5);
	cr_assert_eq(cudatask_wait(&p.f, &b.t), 0);
	cr_assert_eq(get(&p, 0), 11);
	cr_assert_eq(get(&p, 1), 12);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, another_process_waits_for_our_work)
{
	struct pair p;
	struct put u;

	pair_init(&p);
	for (uint64_t i = 1; i <= 30; i++) {
		put(&p, &u, 2, 100 + i, 1, i);
		cudatask_submit(p.f.b, &u.t);
		cr_assert_eq(cudatask_wait(&p.f, &u.t), 0);
		cudatrainer_raise(&p.t, 1, i);
		cudatrainer_await(&p.t, BACKEND_Q_MAIN, u.t.task.ready);
		cr_assert_eq(cudatrainer_read(&p.t, 2), 100 + i);
	}
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, the_ready_words_are_there_for_legacy_handles_too)
{
	struct pair p;
	struct put u;
	uint8_t handle[BACKEND_IPC_BYTES];

	pair_init(&p);
	cr_assert_eq(backend_export_ipc(p.f.b, backend_ready_ipc(p.f.b), handle), 0);
	cudatrainer_open(&p.t, TRAINER_READY, handle);
	put(&p, &u, 2, 7, 0, 0);
	u.t.task.queue = BACKEND_Q_GATHER;
	cudatask_submit(p.f.b, &u.t);
	cr_assert_eq(cudatask_wait(&p.f, &u.t), 0);
	cudatrainer_await(&p.t, BACKEND_Q_GATHER, u.t.task.ready);
	cr_assert_eq(cudatrainer_read(&p.t, 2), 7);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, poison_ends_waits_for_the_dead_now_and_later)
{
	struct pair p;
	struct put a, b, c;

	pair_init(&p);
	put(&p, &a, 0, 1, 511, 1000);
	a.t.task.sync = true;
	put(&p, &b, 1, 2, 7, INT64_MAX);
	b.t.task.sync = true;
	b.t.task.queue = BACKEND_Q_GATHER;
	cudatask_submit(p.f.b, &a.t);
	cudatask_submit(p.f.b, &b.t);
	cudatrainer_kill(&p.t);
	backend_signals_poison(p.s);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0);
	cr_assert_eq(cudatask_wait(&p.f, &b.t), 0);
	put(&p, &c, 2, 3, 9, 1);
	c.t.task.sync = true;
	cudatask_submit(p.f.b, &c.t);
	cr_assert_eq(cudatask_wait(&p.f, &c.t), 0);
	backend_signals_poison(p.s); /* twice is once */
	pair_deinit(&p);
}

Test(backend_cuda_order, poison_outlasts_a_trainer_that_goes_on_writing)
{
	struct pair p;
	struct put a;

	pair_init(&p);
	put(&p, &a, 0, 1, 2, 10);
	a.t.task.sync = true;
	cudatask_submit(p.f.b, &a.t);
	cudatrainer_hammer(&p.t, 2, 9);
	backend_signals_poison(p.s);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

/* The stream gets to the wait only after the poison has been overwritten. */
Test(backend_cuda_order, poison_is_written_again_while_something_waits)
{
	struct backend_signals *other;
	struct pair p;
	struct put a, b;
	bool freed = false;

	pair_init(&p);
	cr_assert_eq(backend_signals_new(p.f.b, p.page, &other), 0);
	put(&p, &a, 0, 1, 1, 1);
	a.w.signals = other;
	put(&p, &b, 1, 2, 2, 10);
	b.t.task.sync = true;
	cudatask_submit(p.f.b, &a.t);
	cudatask_submit(p.f.b, &b.t);
	while (b.t.issued == 0)
		uv_run(&p.f.run.loop, UV_RUN_ONCE);
	backend_signals_poison(p.s);
	for (unsigned i = 0; i < 20; i++)
		get(&p, 2);
	cudatrainer_raise(&p.t, 2, 3);
	cudatrainer_raise(&p.t, 1, 1);
	cr_assert_eq(cudatask_wait(&p.f, &b.t), 0);
	backend_signals_free(other, on_flag, &freed);
	looprun_flag(&p.f.run, &freed, 30);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

/* The owner hears of it only when nothing on the device refers to the page any more. */
Test(backend_cuda_order, signals_are_kept_while_something_waits_on_them)
{
	struct pair p;
	struct put a;

	pair_init(&p);
	put(&p, &a, 0, 1, 4, 10);
	cudatask_submit(p.f.b, &a.t);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0); /* issued, not executed */
	backend_signals_free(p.s, on_freed, &p);
	for (unsigned i = 0; i < 20; i++)
		get(&p, 1);
	cr_assert(!p.freed);
	cudatrainer_raise(&p.t, 4, 10);
	looprun_flag(&p.f.run, &p.freed, 30);
	backend_free(p.f.b, p.page);
	cr_assert_eq(get(&p, 0), 1);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, memory_is_made_and_freed_only_while_nothing_waits)
{
	struct pair p;
	struct put a, b;
	struct backend_mem *mem = NULL, *old;
	unsigned news;

	pair_init(&p);
	old = cudafix_alloc(&p.f, 4 * MIB);
	news = p.f.memory;
	put(&p, &a, 0, 1, 4, 10);
	cudatask_submit(p.f.b, &a.t);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0);
	backend_free(p.f.b, old); /* the simulator aborts if it were unmapped now */
	cr_assert_eq(backend_alloc(p.f.b, 2 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_LATER);
	put(&p, &b, 1, 2, 5, 1);
	cudatask_submit(p.f.b, &b.t);
	for (unsigned i = 0; i < 20; i++)
		get(&p, 1);
	cr_assert_eq(p.f.memory, news);
	cr_assert_eq(b.t.done, 0, "a new wait before the quiet that memory needs");
	cudatrainer_raise(&p.t, 4, 10);
	cr_assert_eq(cudatask_wait(&p.f, &b.t), 0); /* when the memory was made */
	cr_assert_eq(p.f.memory, news + 1);
	cr_assert_eq(backend_alloc(p.f.b, 2 * MIB, BACKEND_SHARE_FD, &mem), 0);
	cudatrainer_raise(&p.t, 5, 1);
	backend_free(p.f.b, mem);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, memory_is_not_made_while_something_waits)
{
	struct pair p;
	struct put a;
	struct backend_mem *mem = NULL;
	unsigned news;

	pair_init(&p);
	news = p.f.memory;
	put(&p, &a, 0, 1, 4, 10);
	cudatask_submit(p.f.b, &a.t);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0);
	cr_assert_eq(backend_alloc(p.f.b, 2 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_LATER);
	for (unsigned i = 0; i < 100; i++)
		get(&p, 1);
	cr_assert_eq(p.f.memory, news);
	cudatrainer_raise(&p.t, 4, 10);
	cr_assert_eq(cudafix_ask(&p.f, p.f.b, 2 * MIB, BACKEND_SHARE_FD, &mem), 0);
	backend_free(p.f.b, mem);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

/* Many more than a driver takes before it blocks. */
Test(backend_cuda_order, work_behind_a_wait_does_not_hold_up_the_other_queue)
{
	enum { N = 3000 };
	struct put *u = calloc(N, sizeof(*u));
	struct pair p;

	pair_init(&p);
	for (unsigned i = 0; i < N; i++) {
		put(&p, &u[i], i, i + 1, 6, i == 0);
		cudatask_submit(p.f.b, &u[i].t);
	}
	for (unsigned i = 0; i < 20; i++)
		cr_assert_eq(get(&p, 0), 0);
	cr_assert_eq(u[N - 1].t.done, 0);
	cudatrainer_raise(&p.t, 6, 1);
	for (unsigned i = 0; i < N; i++)
		cr_assert_eq(cudatask_wait(&p.f, &u[i].t), 0);
	while (get(&p, N - 1) != N)
		;
	free(u);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

static void *hold(void *backend)
{
	backend_cuda_hold(backend, BACKEND_Q_MAIN);
	return NULL;
}

Test(backend_cuda_order, nothing_is_issued_on_a_queue_that_is_held)
{
	struct pair p;
	struct put a;
	pthread_t t;

	pair_init(&p);
	pthread_create(&t, NULL, hold, p.f.b);
	pthread_join(t, NULL);
	put(&p, &a, 0, 1, 0, 0);
	cudatask_submit(p.f.b, &a.t);
	for (unsigned i = 0; i < 20; i++)
		get(&p, 1);
	cr_assert_eq(a.t.issued, 0);
	backend_cuda_let(p.f.b, BACKEND_Q_MAIN);
	cr_assert_eq(cudatask_wait(&p.f, &a.t), 0);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

/* --------------------------------------------------------------------- events */

/* All or none: after a refusal the same slot is handed in again. */
static void share_events(struct pair *p, uint32_t slot)
{
	uint8_t handles[BACKEND_EVENT_RING][BACKEND_IPC_BYTES], bad[BACKEND_IPC_BYTES] = { 1, 2 };
	const uint8_t *list[BACKEND_EVENT_RING];

	for (uint32_t i = 0; i < BACKEND_EVENT_RING; i++) {
		cudatrainer_event(&p->t, slot, i, handles[i]);
		list[i] = handles[i];
	}
	list[BACKEND_EVENT_RING - 1] = bad;
	cr_assert_lt(backend_signals_events(p->s, slot, list), 0);
	list[BACKEND_EVENT_RING - 1] = handles[BACKEND_EVENT_RING - 1];
	cr_assert_eq(backend_signals_events(p->s, slot, list), 0);
	cr_assert_eq(backend_signals_events(p->s, slot, list), -EEXIST);
}

Test(backend_cuda_order, events_take_over_where_memory_operations_do_not_work)
{
	struct pair p;
	struct put u;
	uint8_t handle[BACKEND_IPC_BYTES];

	setenv("SHARDD_SIM_NO_MEMOPS", "1", 1);
	pair_init(&p);
	cr_assert_eq(backend_info(p.f.b)->order, BACKEND_ORDER_EVENTS);
	share_events(&p, 1);
	cudatrainer_record(&p.t, 1, 5);
	put(&p, &u, 2, 77, 1, 16 + 5);
	cudatask_submit(p.f.b, &u.t);
	cr_assert_eq(cudatask_wait(&p.f, &u.t), 0);
	cr_assert_eq(backend_ready_event(p.f.b, BACKEND_Q_MAIN, u.t.task.ready % BACKEND_EVENT_RING,
					 handle),
		     0);
	cudatrainer_await_event(&p.t, handle);
	cr_assert_eq(cudatrainer_read(&p.t, 2), 77);
	/* an event that was never shown is the caller's mistake, not a wait for ever */
	put(&p, &u, 2, 78, 3, 6);
	cudatask_submit(p.f.b, &u.t);
	cr_assert_lt(cudatask_wait(&p.f, &u.t), 0);
	backend_signals_poison(p.s);
	put(&p, &u, 2, 79, 3, 6);
	u.t.task.sync = true;
	cudatask_submit(p.f.b, &u.t);
	cr_assert_eq(cudatask_wait(&p.f, &u.t), 0);
	cr_assert_eq(get(&p, 2), 79);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, a_handle_that_is_no_event_is_refused)
{
	struct pair p;
	uint8_t handle[BACKEND_IPC_BYTES] = { 1, 2, 3 };
	const uint8_t *list[BACKEND_EVENT_RING];

	setenv("SHARDD_SIM_NO_MEMOPS", "1", 1);
	pair_init(&p);
	for (unsigned i = 0; i < BACKEND_EVENT_RING; i++)
		list[i] = handle;
	cr_assert_lt(backend_signals_events(p.s, 0, list), 0);
	cudatrainer_stop(&p.t);
	pair_deinit(&p);
}

Test(backend_cuda_order, the_way_of_ordering_can_be_forced)
{
	struct backend_cuda_options o = { .order = BACKEND_ORDER_EVENTS };
	struct fault fault = FAULT_NULL;
	struct cudafix f;

	cudafix_env();
	cr_assert_eq(cudafix_try(&f, &o, &fault), 0, "%s", fault.text);
	cr_assert_eq(backend_info(f.b)->order, BACKEND_ORDER_EVENTS);
	cudafix_deinit(&f);
	o.order = BACKEND_ORDER_TIMELINE;
	cr_assert_eq(cudafix_try(&f, &o, &fault), 0, "%s", fault.text);
	cr_assert_eq(backend_info(f.b)->order, BACKEND_ORDER_TIMELINE);
	cudafix_deinit(&f);
}

Test(backend_cuda_order, what_does_not_work_is_not_forced)
{
	struct backend_cuda_options o = { .order = BACKEND_ORDER_TIMELINE };
	struct fault fault = FAULT_NULL;
	struct cudafix f;

	cudafix_env();
	setenv("SHARDD_SIM_NO_MEMOPS", "1", 1);
	cr_assert_eq(cudafix_try(&f, &o, &fault), FAULT_INTERNAL);
	cr_assert(strstr(fault.text, "cuda:0 cannot order its work with other processes"), "%s",
		  fault.text);
	cr_assert_eq(fault.domain, FAULT_DOMAIN_CUDA);
	cudafix_deinit(&f);
}

#endif
