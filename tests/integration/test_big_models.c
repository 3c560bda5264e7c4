/* Models of so many units that they are registered in slices, on a thread, or are known. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

enum { UNITS = 3000, MANY = 20000 };

/* Unit i has i + 1 elements, cut by the ranks. */
struct model {
	uint64_t shape[MANY];
	char name[MANY][16];
	struct shardd_tensor tensor[MANY];
	struct shardd_unit_spec spec[MANY];
	struct shardd_unit_info info[MANY];
};

static struct model *model_new(unsigned n)
{
	struct model *m = train_alloc(sizeof(*m));

	for (unsigned i = 0; i < n; i++) {
		snprintf(m->name[i], sizeof(m->name[i]), "layer.%u", i);
		m->shape[i] = i + 1;
		m->tensor[i] =
			(struct shardd_tensor){ .name = "w", .shape = &m->shape[i], .dims = 1 };
		m->spec[i] = (struct shardd_unit_spec){ .size = sizeof(m->spec[i]),
							.name = m->name[i],
							.tensors = &m->tensor[i],
							.n_tensors = 1,
							.group = SHARDD_WORLD };
	}
	return m;
}

static struct shardd_tensor_place place_of(shardd_client *c, shardd_unit u)
{
	struct shardd_tensor_place p;

	TRAIN_OK(shardd_tensor_places(c, u, &p, 1, &train_err));
	return p;
}

/* Every rank, what it registers whole and again, and what it registers alone, is told the
 * same; and the same units are everybody's. */
static int same_trainer(const struct trainer *t)
{
	static const unsigned some[] = { 0, 1, 126, 127, 128, 1999, UNITS - 1 };
	struct model *m = model_new(UNITS);
	shardd_client *c = train_join(t);

	for (unsigned turn = 0; turn < 2; turn++) {
		memset(m->info, 0, sizeof(m->info));
		TRAIN_OK(shardd_register(c, m->spec, UNITS, m->info, &train_err));
		for (unsigned i = 0; i < UNITS; i++)
			TRAINER_CHECK(m->info[i].unit == i + 1 && m->info[i].elements == i + 1 &&
				      m->info[i].shard_elements == i / t->world + 1);
	}
	for (unsigned k = 0; k < ARRAY_SIZE(some); k++) {
		struct shardd_tensor_place known = place_of(c, some[k] + 1), alone;
		uint64_t shard = some[k] / t->world + 1, first = shard * t->rank;
		uint64_t left = first < some[k] + 1 ? some[k] + 1 - first : 0;
		struct shardd_unit_info info;

		TRAIN_OK(shardd_register(c, &m->spec[some[k]], 1, &info, &train_err));
		TRAINER_CHECK(info.unit == some[k] + 1 && info.elements == some[k] + 1 &&
			      info.shard_elements == shard);
		alone = place_of(c, some[k] + 1);
		TRAINER_CHECK(known.unit == alone.unit && known.offset == alone.offset &&
			      known.elements == alone.elements &&
			      known.shard_offset == alone.shard_offset &&
			      known.shard_elements == alone.shard_elements);
		TRAINER_CHECK(known.shard_elements == (left < shard ? left : shard));
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	free(m);
	return 0;
}

Test(big_models, every_rank_is_told_the_same, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, same_trainer, NULL);
}

/* Almost what is known: one byte in the middle, the end, an entry less. */
static int other_trainer(const struct trainer *t)
{
	struct model *m = model_new(UNITS);
	shardd_client *c = train_join(t);

	TRAIN_OK(shardd_register(c, m->spec, UNITS, m->info, &train_err));
	m->shape[UNITS / 2]++;
	TRAIN_FAILS(shardd_register(c, m->spec, UNITS, m->info, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "layer.1500"));
	m->shape[UNITS / 2]--;
	m->shape[UNITS - 1]++;
	TRAIN_FAILS(shardd_register(c, m->spec, UNITS, m->info, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "layer.2999"));
	m->shape[UNITS - 1]--;
	strcpy(m->name[UNITS - 1], m->name[0]);
	TRAIN_FAILS(shardd_register(c, m->spec, UNITS, m->info, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_register(c, m->spec, UNITS - 1, m->info, &train_err));
	TRAINER_CHECK(m->info[UNITS - 2].unit == UNITS - 1);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	free(m);
	return 0;
}

Test(big_models, one_that_differs_is_refused, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, other_trainer, NULL);
}

/* ------------------------------------------------------------ death in the middle */

static unsigned count_units(void)
{
	static const char *const args[] = { "status", NULL };
	json_t *status = daemonfix_ctl(&trainfix, args), *job;
	unsigned n = 0;
	size_t i;

	json_array_foreach(json_object_get(status, "jobs"), i, job) n =
		(unsigned)json_integer_value(json_object_get(job, "unit_count"));
	json_decref(status);
	return n;
}

static void pause_us(long us)
{
	struct timespec ts = { .tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000 };

	nanosleep(&ts, NULL);
}

struct victim {
	pid_t pid;
	int begins; /* a pipe: one byte, when it is about to register */
};

static struct victim victim_start(const struct trainer *t, struct model *m)
{
	struct victim v = { 0 };
	int ends[2];

	TRAINER_CHECK(pipe(ends) == 0);
	v.pid = fork();
	if (v.pid == 0) {
		shardd_client *c = train_connect(t);

		train_join_as(c, t, SHARDD_KEEP);
		TRAINER_CHECK(write(ends[1], "b", 1) == 1);
		TRAIN_OK(shardd_register(c, m->spec, MANY, m->info, &train_err));
		pause();
		_exit(1);
	}
	close(ends[1]);
	v.begins = ends[0];
	return v;
}

static int dying_trainer(const struct trainer *t)
{
	struct model *m = model_new(MANY);
	shardd_client *c;
	unsigned n;
	char byte;

	for (long us = 500; us < 300000; us = us * 3 / 2) {
		struct victim v = victim_start(t, m);

		TRAINER_CHECK(v.pid > 0 && read(v.begins, &byte, 1) == 1);
		pause_us(us);
		kill(v.pid, SIGKILL);
		TRAINER_CHECK(waitpid(v.pid, NULL, 0) == v.pid);
		close(v.begins);
		n = count_units();
		TRAINER_CHECK(n == 0 || n == MANY);
	}
	c = train_connect(t);
	train_join_as(c, t, SHARDD_KEEP);
	TRAIN_OK(shardd_register(c, m->spec, MANY, m->info, &train_err));
	TRAINER_CHECK(m->info[MANY - 1].unit == MANY);
	TRAIN_OK(shardd_leave(c, &train_err));
	shardd_close(c);
	free(m);
	return 0;
}

/* A rank that dies while it registers leaves all units or none, and blocks nobody. */
Test(big_models, death_in_the_middle_leaves_all_or_none, .timeout = 180, .init = trainfix_begin,
     .fini = trainfix_end)
{
	const char *args[] = { "job", "delete", "test", NULL };
	char out[1024];

	trainfix_run(1, dying_trainer, NULL);
	cr_expect_eq(count_units(), MANY);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
}
