/*
 * Status under load, and many units. Latencies are printed, not asserted: other work on
 * the machine must not fail a test.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "daemonfix.h"
#include "daemonwatch.h"
#include "fdcheck.h"
#include "longform.h"
#include "rawcall.h"
#include "shardd/shardd.h"
#include "trainfix.h"

TestSuite(load, .timeout = 300, .init = fdcheck_begin, .fini = fdcheck_end);

enum {
	TRAINERS = 8,
	ASKED = 1000,
	CTL_ASKED = LONGFORM_ADDRESSES ? 20 : 200,
	UNITS = 6,
	MANY = LONGFORM_ADDRESSES ? 2000 : 10000,
	WINDOW = 512
};
enum { TURN_MS = 5 }; /* between two looks at a condition that nothing announces */

struct shared {
	atomic_bool asked_enough;
	_Atomic uint64_t stop_at; /* the step at which all ranks end; 0: not known yet */
	_Atomic uint64_t steps;
	uint64_t us[ASKED];
};

#define MUST(call)                                                                         \
	do {                                                                               \
		struct shardd_error err = { 0 };                                           \
		int r_ = (call);                                                           \
		if (r_ < 0)                                                                \
			fprintf(stderr, "%s: %s\n", shardd_code_name(err.code), err.text); \
		TRAINER_CHECK(r_ >= 0);                                                    \
	} while (0)

static shardd_client *joined(const struct trainer *t)
{
	struct shardd_options options = { .size = sizeof(options), .socket = t->socket };
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = t->world, .rank = t->rank
	};
	shardd_client *c;

	MUST(shardd_connect(&options, &c, &err));
	MUST(shardd_join(c, &job, NULL, &err));
	return c;
}

static void register_units(shardd_client *c, size_t n, uint64_t elements, enum shardd_dtype compute,
			   struct shardd_unit_info *ret)
{
	struct shardd_unit_spec *specs = calloc(n, sizeof(*specs));
	char(*names)[32] = calloc(n, sizeof(*names));
	struct shardd_tensor tensor = { .name = "w", .shape = &elements, .dims = 1 };

	TRAINER_CHECK(specs && names);
	for (size_t i = 0; i < n; i++) {
		snprintf(names[i], sizeof(names[i]), "layer%zu", i);
		specs[i] = (struct shardd_unit_spec){
			.size = sizeof(specs[i]),
			.name = names[i],
			.tensors = &tensor,
			.n_tensors = 1,
			.compute_dtype = compute,
			.optimizer = { .kind = SHARDD_SGD, .lr = 0.01 },
		};
	}
	MUST(shardd_register(c, specs, n, ret, &err));
	free(specs);
	free(names);
}

/* ------------------------------------------------------ status while others train */

static void train_step(shardd_client *c, const struct shardd_unit_info *units, uint64_t step)
{
	const void *params;
	void *grads, *copy;

	for (unsigned u = 0; u < UNITS; u++) {
		MUST(shardd_gather(c, units[u].unit, &params, &err));
		MUST(shardd_gradient(c, units[u].unit, &grads, &err));
		copy = train_copy(c, params, units[u].elements * 2);
		train_write(c, grads, copy, units[u].elements * 2);
		free(copy);
		MUST(shardd_release(c, units[u].unit, &err));
		MUST(shardd_reduce(c, units[u].unit, &err));
	}
	MUST(shardd_step(c, SHARDD_WORLD, NULL, &err));
	MUST(shardd_commit(c, step, NULL, 0, &err));
}

/* Nobody begins the next step before rank 0 has committed this one: what it decides
 * here all have seen by then. */
static int train(const struct trainer *t)
{
	struct shared *s = t->arg;
	struct shardd_unit_info units[UNITS];
	shardd_client *c = joined(t);

	register_units(c, UNITS, 100000, SHARDD_BF16, units);
	for (unsigned u = 0; u < UNITS; u++)
		MUST(shardd_init_seed(c, units[u].unit, 1, &err));
	for (uint64_t step = 1; !s->stop_at || step <= s->stop_at; step++) {
		if (t->rank == 0 && s->asked_enough && !s->stop_at)
			s->stop_at = step + 1;
		train_step(c, units, step);
		s->steps = step;
	}
	MUST(shardd_leave(c, &err));
	shardd_close(c);
	return 0;
}

static int ask(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct shared *s = t->arg;

	for (unsigned i = 0; i < ASKED; i++) {
		uint64_t before = clock_now_us();

		raw_done(c, "Status/GetStatus", &r.base);
		s->us[i] = clock_now_us() - before;
	}
	rpc_client_close(c);
	return 0;
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void print_times(const char *what, uint64_t *us, unsigned n)
{
	qsort(us, n, sizeof(*us), by_value);
	fprintf(stderr, "# %s: %u answers, p50 %llu us, p99 %llu us, most %llu us\n", what, n,
		(unsigned long long)us[n / 2], (unsigned long long)us[n * 99 / 100],
		(unsigned long long)us[n - 1]);
}

/* A whole process each time: what a person or a script pays. */
static void ask_by_shardctl(struct daemonfix *d)
{
	static const char *const status[] = { "status", NULL };
	static uint64_t us[CTL_ASKED];

	for (unsigned i = 0; i < CTL_ASKED; i++) {
		uint64_t before = clock_now_us();
		json_t *j = daemonfix_ctl(d, status), *job;

		us[i] = clock_now_us() - before;
		job = json_array_get(json_object_get(j, "jobs"), 0);
		cr_assert_eq(json_array_size(json_object_get(job, "ranks")), TRAINERS);
		json_decref(j);
	}
	print_times("shardctl --json status, process and all", us, CTL_ASKED);
}

static void await_steps(const struct shared *s, uint64_t steps)
{
	uint64_t deadline = clock_now_us() + 60 * 1000000ull;

	while (s->steps < steps) {
		cr_assert(clock_now_us() < deadline, "the trainers do not train");
		daemonwatch_turn(TURN_MS);
	}
}

Test(load, status_always_answers_while_eight_train)
{
	struct shared *s = trainer_shared(sizeof(*s));
	pid_t pids[TRAINERS];
	struct daemonfix d;
	unsigned fds;

	daemonfix_start(&d, NULL);
	fds = daemonfix_fds(&d);
	for (uint32_t r = 0; r < TRAINERS; r++)
		pids[r] = trainer_start(&d, "load", r, TRAINERS, train, s);
	await_steps(s, 3);
	cr_assert_eq(trainer_wait(trainer_start(&d, "load", 0, 1, ask, s), 120), 0);
	print_times("StatusService.GetStatus over one connection", s->us, ASKED);
	ask_by_shardctl(&d);
	s->asked_enough = true;
	for (uint32_t r = 0; r < TRAINERS; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	fprintf(stderr, "# meanwhile %llu steps were trained\n", (unsigned long long)s->steps);
	daemonfix_settles(&d, fds, 0);
	daemonfix_stop(&d);
}

/* ------------------------------------------------------------------ many units */

typedef int (*submit_fn)(shardd_client *c, shardd_unit u, shardd_ticket *t,
			 struct shardd_error *err);

static int submit_init(shardd_client *c, shardd_unit u, shardd_ticket *t, struct shardd_error *err)
{
	return shardd_submit_init(
		c, SHARDD_OPTIONS(init, .unit = u, .seed = 7, .from = SHARDD_FROM_SEED), t, err);
}

static int submit_gather(shardd_client *c, shardd_unit u, shardd_ticket *t,
			 struct shardd_error *err)
{
	return shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), t, err);
}

static int submit_gradient(shardd_client *c, shardd_unit u, shardd_ticket *t,
			   struct shardd_error *err)
{
	return shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u), t, err);
}

static int submit_release(shardd_client *c, shardd_unit u, shardd_ticket *t,
			  struct shardd_error *err)
{
	return shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), t, err);
}

static int submit_reduce(shardd_client *c, shardd_unit u, shardd_ticket *t,
			 struct shardd_error *err)
{
	return shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u), t, err);
}

/* On all units, up to WINDOW at a time. */
static void on_all(shardd_client *c, const struct shardd_unit_info *units, const char *what,
		   submit_fn submit)
{
	static shardd_ticket tickets[MANY];
	uint64_t begin = clock_now_us();

	for (unsigned i = 0; i < MANY + WINDOW; i++) {
		if (i >= WINDOW)
			MUST(shardd_wait(c, tickets[i - WINDOW], -1, NULL, &err));
		if (i < MANY)
			MUST(submit(c, units[i].unit, &tickets[i], &err));
	}
	fprintf(stderr, "# %s of %d units: %llu ms\n", what, MANY,
		(unsigned long long)(clock_now_us() - begin) / 1000);
}

static int many_units(const struct trainer *t)
{
	static struct shardd_unit_info units[MANY], again[MANY];
	shardd_client *c = joined(t);
	uint64_t begin = clock_now_us();

	register_units(c, MANY, 10, SHARDD_BF16, units);
	fprintf(stderr, "# registration of %d units: %llu ms\n", MANY,
		(unsigned long long)(clock_now_us() - begin) / 1000);
	register_units(c, MANY, 10, SHARDD_BF16, again);
	for (unsigned i = 0; i < MANY; i++)
		TRAINER_CHECK(units[i].unit == i + 1 && again[i].unit == i + 1);
	on_all(c, units, "initialise", submit_init);
	on_all(c, units, "gather", submit_gather);
	on_all(c, units, "gradient", submit_gradient);
	on_all(c, units, "release", submit_release);
	on_all(c, units, "gather", submit_gather);
	/* look at all of it while it is there */
	*(atomic_bool *)t->arg = true;
	while (*(atomic_bool *)t->arg)
		MUST(shardd_barrier(c, SHARDD_WORLD, &err));
	on_all(c, units, "release", submit_release);
	on_all(c, units, "reduce", submit_reduce);
	MUST(shardd_step(c, SHARDD_WORLD, NULL, &err));
	MUST(shardd_commit(c, 1, NULL, 0, &err));
	MUST(shardd_leave(c, &err));
	shardd_close(c);
	return 0;
}

static void await_flag(const atomic_bool *flag)
{
	uint64_t deadline = clock_now_us() + 120 * 1000000ull;

	while (!*flag) {
		cr_assert(clock_now_us() < deadline, "the trainer has not got there");
		daemonwatch_turn(TURN_MS);
	}
}

static void check_units(json_t *j)
{
	json_t *units = json_is_array(j) ? j : json_object_get(j, "units"), *u;
	size_t i;

	cr_assert_eq(json_array_size(units), MANY);
	json_array_foreach(units, i, u)
	{
		cr_assert(json_is_true(json_object_get(u, "initialised")));
		cr_assert_eq(json_array_size(json_object_get(u, "gathered_by")), 1);
		cr_assert_eq(json_integer_value(json_object_get(u, "elements")), 10);
	}
}

Test(load, thousands_of_units_in_one_call)
{
	static const char *const args[] = { "units", "many", NULL };
	atomic_bool *there = trainer_shared(sizeof(*there));
	struct daemonfix d;
	unsigned fds;
	pid_t pid;
	json_t *j;

	daemonfix_start(&d, NULL);
	fds = daemonfix_fds(&d);
	pid = trainer_start(&d, "many", 0, 1, many_units, there);
	await_flag(there);
	j = daemonfix_ctl(&d, args);
	check_units(j);
	json_decref(j);
	*there = false;
	cr_assert_eq(trainer_wait(pid, 120), 0);
	daemonfix_settles(&d, fds, 0);
	daemonfix_stop(&d);
}
