/*
 * Kernel threads under load, for the thread sanitizer: bursts of tasks of all
 * sizes are submitted from a loop, some of them from callbacks; every result is
 * checked. Beside them memory comes and goes whose pages are being made.
 * Prints "workers ok" and exits with 0.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "backend/backend_impl.h"
#include "core/check.h"

#define THREADS  4
#define ROUNDS   30
#define TASKS    300 /* of a round; more than the threads take at once */
#define LAUNCHES 3
#define MEMORY   4                   /* pieces that are there in a round */
#define BYTES    (UINT64_C(9) << 20) /* of one */

struct item {
	struct backend_task task;
	struct launch launches[LAUNCHES];
	float *data; /* LAUNCHES parts of n elements */
	uint64_t n;
	unsigned passes; /* left; each multiplies by 2 */
	unsigned callbacks;
	struct stress *stress; /* back pointer */
};

struct stress {
	uv_loop_t loop;
	struct loopq queue;
	struct backend *backend;
	unsigned round;
	unsigned open; /* tasks of this round */
	struct item items[TASKS];
	struct backend_mem *memory[MEMORY];
};

static void start_round(struct stress *s);

static void drop_memory(struct stress *s)
{
	for (unsigned i = 0; i < MEMORY; i++)
		if (s->memory[i])
			backend_free(s->backend, s->memory[i]);
}

/* Touched at both ends: what is made behind our back must be zero, and stay ours. */
static void take_memory(struct stress *s)
{
	for (unsigned i = 0; i < MEMORY; i++) {
		char *at;

		CHECK(backend_alloc(s->backend, BYTES, BACKEND_SHARE_FD, &s->memory[i]) == 0);
		at = backend_addr(s->memory[i]);
		CHECK(at[0] == 0 && at[BYTES - 1] == 0);
		at[BYTES - 1] = 1;
	}
}

/* Part @part of the item was 1, and has been doubled in each of two passes. */
static void check_item(const struct item *it)
{
	CHECK(it->callbacks == 2);
	for (uint64_t i = 0; i < it->n * LAUNCHES; i++)
		CHECK(it->data[i] == 4.0f);
}

static void on_done(struct backend_task *task, int status)
{
	struct item *it = CONTAINER_OF(task, struct item, task);
	struct stress *s = it->stress;

	CHECK(status == 0);
	it->callbacks++;
	if (--it->passes > 0) {
		backend_submit(s->backend, task);
		return;
	}
	check_item(it);
	free(it->data);
	if (--s->open > 0)
		return;
	if (++s->round < ROUNDS) {
		start_round(s);
		return;
	}
	CHECK(backend_in_flight(s->backend) == 0);
	drop_memory(s);
	s->backend = backend_close(s->backend);
	loopq_close(&s->queue);
}

/* Sizes from nothing to more than a chunk for every thread. */
static uint64_t size_of(unsigned round, unsigned index)
{
	if (index < 4)
		return round % 5 == 0 ? 900001 : 200001;
	return index % 7 == 0 ? 0 : index * 13u % 997u;
}

static void prepare(struct stress *s, struct item *it, uint64_t n)
{
	*it = (struct item){ .n = n, .passes = 2, .stress = s };
	it->data = malloc((n * LAUNCHES + 1) * sizeof(float));
	CHECK(it->data);
	for (uint64_t i = 0; i < n * LAUNCHES; i++)
		it->data[i] = 1.0f;
	for (unsigned k = 0; k < LAUNCHES; k++)
		it->launches[k] = (struct launch){ .kind = LAUNCH_SCALE,
						   .n = n,
						   .scale = { it->data + k * n, 2.0f, NULL } };
	it->task = (struct backend_task){ .launches = it->launches,
					  .n_launches = LAUNCHES,
					  .done = on_done };
}

static void start_round(struct stress *s)
{
	drop_memory(s);
	take_memory(s);
	s->open = TASKS;
	for (unsigned i = 0; i < TASKS; i++) {
		prepare(s, &s->items[i], size_of(s->round, i));
		/* several large ones, so that threads go from one user's to another's */
		s->items[i].task.owner = (struct backend_owner){ i % 3, i % 5, 1 + i % 200 };
		backend_submit(s->backend, &s->items[i].task);
	}
}

int main(void)
{
	static struct stress s;

	CHECK(uv_loop_init(&s.loop) == 0);
	CHECK(loopq_init(&s.queue, &s.loop) == 0);
	CHECK(backend_host_new(&s.queue, THREADS, 0, true, &s.backend) == 0);
	start_round(&s);
	uv_run(&s.loop, UV_RUN_DEFAULT);
	CHECK(s.round == ROUNDS && !s.backend);
	CHECK(uv_loop_close(&s.loop) == 0);
	puts("workers ok");
	return 0;
}
