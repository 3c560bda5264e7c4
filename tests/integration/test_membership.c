/* Commit, leave and join again: what a job keeps and what it forgets. */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 2003 };

static const struct shardd_unit_spec adamw_like = {
	.compute_dtype = SHARDD_FP32,
	.optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.1 },
};

static void delete_job(const char *name)
{
	const char *args[] = { "job", "delete", name, NULL };
	char out[1024];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
}

/* Those that can be joined: a deleted one stays in sight until its memory is unmapped. */
static unsigned count_jobs(void)
{
	static const char *const args[] = { "status", NULL };
	json_t *status = daemonfix_ctl(&trainfix, args), *job;
	unsigned n = 0;
	size_t i;

	json_array_foreach(json_object_get(status, "jobs"), i, job) n +=
		strcmp(json_string_value(json_object_get(job, "state")), "DELETED") != 0;
	json_decref(status);
	return n;
}

/* All of @t's world meet, without the daemon; @count grows by one a trainer. */
static void meet(const struct trainer *t, atomic_uint *count)
{
	unsigned round = atomic_fetch_add(count, 1) / t->world;

	while (atomic_load(count) < (round + 1) * t->world)
		sched_yield();
}

/* ---------------------------------------------------------------------- blobs */

static const size_t blob_sizes[] = { 0, 1, 65535, SHARDD_MAX_BLOB };

/* Rank r stores blob_sizes[(r+k) % 4] with commit k. */
static size_t make_blob(uint8_t *blob, uint32_t rank, unsigned k)
{
	size_t n = blob_sizes[(rank + k) % ARRAY_SIZE(blob_sizes)];

	for (size_t i = 0; i < n; i++)
		blob[i] = (uint8_t)(i * 131 + rank * 7 + k);
	return n;
}

static int blob_trainer(const struct trainer *t)
{
	static uint8_t blob[SHARDD_MAX_BLOB];
	shardd_client *c = train_connect(t);

	for (unsigned k = 0; k < 6; k++) {
		struct shardd_membership me = train_join_as(c, t, SHARDD_KEEP);
		size_t n;

		TRAINER_CHECK(me.has_commit == (k > 0) && !me.torn);
		if (k > 0) {
			n = make_blob(blob, t->rank, k - 1);
			TRAINER_CHECK(me.resumed && me.step == k * 10 && me.blob_bytes == n);
			TRAINER_CHECK(n == 0 || memcmp(me.blob, blob, n) == 0);
		}
		n = make_blob(blob, t->rank, k);
		TRAIN_OK(shardd_commit(c, (k + 1) * 10, blob, n, &train_err));
		TRAIN_FAILS(shardd_commit(c, (k + 1) * 10, blob, n, &train_err),
			    SHARDD_INVALID_ARGUMENT); /* steps grow */
		meet(t, t->arg); /* nobody leaves before the others are through */
		TRAIN_OK(shardd_leave(c, &train_err));
		meet(t, t->arg);
	}
	shardd_close(c);
	return 0;
}

Test(membership, blobs_come_back, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(3, blob_trainer, trainer_shared(sizeof(atomic_uint)));
	delete_job("test");
}

static int too_much_trainer(const struct trainer *t)
{
	static uint8_t blob[SHARDD_MAX_BLOB + 1];
	shardd_client *c = train_join(t);

	TRAIN_FAILS(shardd_commit(c, 1, blob, sizeof(blob), &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_commit(c, 1, blob, sizeof(blob) - 1, &train_err));
	train_leave(c);
	return 0;
}

Test(membership, a_blob_beyond_64_KiB_is_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, too_much_trainer, NULL);
}

/* -------------------------------------------------------------- leave and join */

struct life {
	unsigned number; /* which life of the job it is */
	float params[N];
	float after[N]; /* one more step */
};

static void train_one(shardd_client *c, const struct trainer *t, shardd_unit u, unsigned step)
{
	float values[N];

	train_fill(values, N, step * 100 + t->rank);
	train_reduce(c, u, DTYPE_FP32, values, N);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, step, &step, sizeof(step), &train_err));
}

/* First life: 3 steps, and a fourth that shows how it would go on. */
static int first_trainer(const struct trainer *t)
{
	struct life *life = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = train_join_as(c, t, SHARDD_KEEP);
	shardd_unit u;

	TRAINER_CHECK(!me.resumed && !me.has_commit && !me.blob_bytes);
	u = train_zero_unit(c, "unit", N, &adamw_like);
	for (unsigned step = 1; step <= 3; step++)
		train_one(c, t, u, step);
	if (t->rank == 0)
		train_params(c, u, life->params, sizeof(life->params));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (life->number == 1) {
		train_one(c, t, u, 4);
		if (t->rank == 0)
			train_params(c, u, life->after, sizeof(life->after));
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	train_leave(c);
	return 0;
}

/* Second life, other processes: parameters, step, blob and the optimizer's state. */
static int second_trainer(const struct trainer *t)
{
	struct life *life = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = train_join_as(c, t, SHARDD_KEEP);
	struct shardd_unit_info info;
	float got[N];
	unsigned step;

	TRAINER_CHECK(me.resumed && me.has_commit && !me.torn && me.step == 3);
	TRAINER_CHECK(me.blob_bytes == sizeof(step));
	memcpy(&step, me.blob, sizeof(step));
	TRAINER_CHECK(step == 3);
	info = train_register(c, "unit", N, &adamw_like);
	TRAINER_CHECK(info.initialised && info.optimizer_steps == 3);
	train_params(c, info.unit, got, sizeof(got));
	TRAIN_SAME(got, life->params, sizeof(got));
	train_one(c, t, info.unit, 4);
	train_params(c, info.unit, got, sizeof(got));
	TRAIN_SAME(got, life->after, sizeof(got));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(membership, a_kept_job_goes_on_bitwise, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct life *life = trainer_shared(sizeof(*life));

	life->number = 1;
	trainers_run(&trainfix, "straight", 2, first_trainer, life, 60);
	delete_job("straight");
	life->number = 2;
	trainfix_run(2, first_trainer, life);
	cr_assert_eq(count_jobs(), 1);
	trainfix_run(2, second_trainer, life);
	delete_job("test");
	cr_assert_eq(count_jobs(), 0);
}

static int ephemeral_trainer(const struct trainer *t)
{
	shardd_client *c = train_connect(t);

	for (unsigned life = 0; life < 3; life++) {
		struct shardd_membership me = train_join_as(c, t, SHARDD_EPHEMERAL);
		struct shardd_unit_info info;

		TRAINER_CHECK(!me.resumed && !me.has_commit && me.epoch == 1);
		info = train_register(c, "unit", N, &adamw_like);
		TRAINER_CHECK(!info.initialised && info.optimizer_steps == 0);
		TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
		train_one(c, t, info.unit, 1);
		TRAIN_OK(shardd_leave(c, &train_err));
	}
	shardd_close(c);
	return 0;
}

Test(membership, an_ephemeral_job_is_gone_after_the_last_rank, .timeout = 60,
     .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(1, ephemeral_trainer, NULL);
	cr_assert_eq(count_jobs(), 0);
}

/* The same session joins again: ids and mapped addresses stay. */
static int again_trainer(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	const void *at = NULL, *data;

	for (unsigned life = 0; life < 4; life++) {
		struct shardd_membership me = train_join_as(c, t, SHARDD_KEEP);
		struct shardd_unit_info info = train_register(c, "unit", N, &adamw_like);

		TRAINER_CHECK(me.epoch == life + 1 && info.unit == 1);
		TRAINER_CHECK(info.initialised == (life > 0));
		if (life == 0)
			TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
		TRAIN_OK(shardd_gather(c, info.unit, &data, &train_err));
		TRAINER_CHECK(life == 0 || data == at);
		at = data;
		if (life % 2) /* else joining drops it */
			TRAIN_OK(shardd_leave(c, &train_err));
	}
	shardd_close(c);
	return 0;
}

Test(membership, joining_again_keeps_ids_and_addresses, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, again_trainer, NULL);
	delete_job("test");
}

/* Leaving with ops under way is refused; ops after leaving too. */
static int leaving_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket ticket;

	if (t->rank == 0) {
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		TRAIN_FAILS(shardd_leave(c, &train_err), SHARDD_FAILED_PRECONDITION);
		atomic_store(turn, 1);
		TRAIN_OK(shardd_wait(c, ticket, -1, NULL, &train_err));
	} else {
		while (!atomic_load(turn))
			sched_yield();
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	TRAIN_OK(shardd_leave(c, &train_err));
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_FAILED_PRECONDITION);
	shardd_close(c);
	return 0;
}

Test(membership, leaving_with_ops_under_way_is_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, leaving_trainer, trainer_shared(sizeof(atomic_uint)));
}
