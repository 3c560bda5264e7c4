/*
 * Jobs that get another world size: at every size they train as a fresh job of that size does that has
 * loaded the same state, bit for bit. By shardctl job resize, and by ranks that join an elastic job.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "fdcheck.h"

enum { UNITS = 2, PHASES = 5, STEPS = 2, ROWS = 1003, WIDTH = 5, ELEMENTS = ROWS * (WIDTH + 1) };

static const uint32_t sizes[PHASES] = { 4, 3, 8, 2, 1 };

static char root[64];

static void begin(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	snprintf(root, sizeof(root), "/tmp/shardd-resize-XXXXXX");
	cr_assert(mkdtemp(root));
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	args[1] = set;
	failfix_begin(args);
}

static void end(void)
{
	char command[256];

	failfix_end();
	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	cr_assert_eq(system(command), 0);
}

TestSuite(resize_job, .init = begin, .fini = end, .timeout = 240);

typedef float params[UNITS][ELEMENTS];

struct play {
	char dir[128];
	uint32_t phase; /* its steps are STEPS * phase + 1 and so on */
	bool load;      /* a fresh job: load what the elastic one had before this phase */
	bool elastic;
	bool same_mean; /* for any number of ranks */
	stage joined;   /* ranks, so far */
	stage dies;     /* not 0: ranks wait for their death when they have trained */
	struct told told;
	params at_end;
};

static struct play *play_new(uint32_t phase)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->phase = phase;
	snprintf(p->dir, sizeof(p->dir), "%s/before-%u", root, phase);
	(void)mkdir(p->dir, 0777);
	return p;
}

static struct shardd_job job_of(const struct trainer *t)
{
	const struct play *p = t->arg;

	return (struct shardd_job){ .size = sizeof(struct shardd_job),
				    .name = t->job,
				    .world_size = t->world,
				    .rank = t->rank,
				    .lifetime = SHARDD_KEEP,
				    .op_timeout_ms = 50000,
				    .min_ranks = p->elastic ? 1 : 0,
				    .max_ranks = p->elastic ? 8 : 0 };
}

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	const struct shardd_job job = job_of(t);
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	TRAINER_CHECK(me.world_size == t->world && me.rank == t->rank);
	return me;
}

static void register_units(shardd_client *c, shardd_unit *ret)
{
	static const enum shardd_layout layouts[UNITS] = { SHARDD_LAYOUT_FLAT, SHARDD_LAYOUT_DIM0 };

	for (unsigned i = 0; i < UNITS; i++) {
		const uint64_t shape[] = { ROWS, WIDTH };
		const struct shardd_tensor tensors[] = {
			{ .name = "weight", .shape = shape, .dims = 2 },
			{ .name = "bias", .shape = shape, .dims = 1 },
		};
		const char *const names[UNITS] = { "flat", "dim0" };
		struct shardd_unit_spec spec = {
			.size = sizeof(spec),
			.name = names[i],
			.tensors = tensors,
			.n_tensors = 2,
			.layout = layouts[i],
			.optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.1 },
		};
		struct shardd_unit_info info;

		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		ret[i] = info.unit;
	}
}

static void reduce(shardd_client *c, shardd_unit u, const struct trainer *t, uint64_t seed)
{
	const struct play *p = t->arg;
	float *values = train_numbers(ELEMENTS, p->same_mean ? seed : seed * 64 + t->rank);
	struct shardd_tensor_place places[2];
	const float *from = values;
	void *buffer;

	for (size_t k = 0; p->same_mean && k < ELEMENTS; k++)
		values[k] *= t->rank ? 0 : (float)t->world;
	TRAIN_OK(shardd_gradient(c, u, &buffer, &train_err));
	TRAIN_OK(shardd_tensor_places(c, u, places, 2, &train_err));
	for (unsigned k = 0; k < 2; k++) {
		train_write(c, (float *)buffer + places[k].offset, from,
			    places[k].elements * sizeof(float));
		from += places[k].elements;
	}
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	free(values);
}

static void train(shardd_client *c, const shardd_unit *units, const struct trainer *t)
{
	const struct play *p = t->arg;

	for (uint64_t step = STEPS * p->phase + 1; step <= STEPS * (p->phase + 1); step++) {
		uint64_t blob[2] = { step, t->rank };

		for (unsigned i = UNITS; i-- > 0;)
			reduce(c, units[i], t, step * UNITS + i);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, blob, sizeof(blob), &train_err));
	}
}

static void read_params(shardd_client *c, const shardd_unit *units, const struct trainer *t)
{
	struct play *p = t->arg;

	for (unsigned i = 0; i < UNITS; i++) {
		struct shardd_tensor_place places[2];
		float *to = p->at_end[i];
		const void *full;

		TRAIN_OK(shardd_gather(c, units[i], &full, &train_err));
		TRAIN_OK(shardd_tensor_places(c, units[i], places, 2, &train_err));
		for (unsigned k = 0; t->rank == 0 && k < 2; to += places[k++].elements)
			train_read(c, to, (const float *)full + places[k].offset,
				   places[k].elements * sizeof(float));
		TRAIN_OK(shardd_release(c, units[i], &train_err));
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
}

static void load(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	struct play *p = t->arg;

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* all have registered */
	if (t->rank == 0)
		TRAIN_OK(shardd_load_checkpoint(c, t->job, p->dir, NULL, NULL, &train_err));
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	(void)join(c, t);
	register_units(c, units);
}

/* Ranks that there have been since the start: blobs of the others are gone. */
static uint32_t least(uint32_t phase)
{
	return sizes[phase - 1];
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit units[UNITS];
	struct shardd_membership m = join(c, t);

	atomic_fetch_add(&p->joined, 1);
	if (p->phase && !p->load) {
		TRAINER_CHECK(m.resumed && m.has_commit && !m.torn);
		TRAINER_CHECK(m.step == STEPS * p->phase);
		TRAINER_CHECK(p->same_mean || m.blob_bytes == (t->rank < least(p->phase) ? 16 : 0));
	}
	register_units(c, units);
	if (p->load)
		load(c, t, units);
	for (unsigned i = 0; !p->phase && i < UNITS; i++)
		TRAIN_OK(shardd_init_seed(c, units[i], i + 1, &train_err));
	train(c, units, t);
	read_params(c, units, t);
	while (atomic_load(&p->dies))
		pause();
	train_leave(c);
	return 0;
}

static void ctl_ok(const char *const *args, const char *words)
{
	char out[2048];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
	cr_expect(strstr(out, words), "%s: %s", words, out);
}

static void ctl_fails(const char *const *args, int code, const char *words)
{
	char out[2048];
	int r = daemonfix_ctl_text(&trainfix, args, out, sizeof(out));

	cr_expect_eq(r, code, "%d: %s", r, out);
	cr_expect(strstr(out, words), "%s: %s", words, out);
}

static void delete (const char *job)
{
	ctl_ok((const char *const[]){ "job", "delete", job, NULL }, "deleted");
}

static void resize(const char *job, uint32_t world, const char *words)
{
	char n[16];

	snprintf(n, sizeof(n), "%u", world);
	ctl_ok((const char *const[]){ "job", "resize", job, n, NULL }, words);
}

static void expect_equal(const struct play *p, const struct play *want, const char *what)
{
	for (unsigned i = 0; i < UNITS; i++)
		cr_expect_arr_eq(p->at_end[i], want->at_end[i], sizeof(p->at_end[i]),
				 "%s, %u ranks: unit %u differs", what, sizes[p->phase], i);
}

static void expect_as_fresh_jobs(bool elastic)
{
	for (uint32_t i = 0; i < PHASES; i++) {
		struct play *p = play_new(i), *fresh = play_new(i);

		p->elastic = elastic;
		if (i && !elastic)
			resize("walks", sizes[i], "stayed in place");
		if (i)
			ctl_ok((const char *const[]){ "checkpoint", "save", "walks", p->dir, NULL },
			       "");
		trainers_run(&trainfix, "walks", sizes[i], trains, p, 60);
		fresh->load = i > 0;
		trainers_run(&trainfix, i ? "fresh" : "first", sizes[i], trains, fresh, 60);
		delete (i ? "fresh" : "first");
		expect_equal(p, fresh, elastic ? "elastic" : "resized");
	}
	delete ("walks");
}

Test(resize_job, trains_at_every_size_as_a_fresh_job)
{
	expect_as_fresh_jobs(false);
}

Test(resize_job, of_ranks_that_join_an_elastic_job)
{
	expect_as_fresh_jobs(true);
}

static pid_t start(const char *job, uint32_t world, uint32_t rank, struct play *p)
{
	return trainer_start(&trainfix, job, rank, world, trains, p);
}

/* Ranks that were killed leave their size behind; those that come with another number wait for the end
 * of those that are still there. */
Test(resize_job, of_an_elastic_job_whose_ranks_die)
{
	struct play *p = play_new(0), *q = play_new(1);
	pid_t old[4], new[3];

	p->elastic = q->elastic = true;
	q->same_mean = true; /* no blobs are expected */
	stage_set(&p->dies, 1);
	for (uint32_t r = 0; r < 4; r++)
		old[r] = start("walks", 4, r, p);
	AWAIT(fail_job_number(&trainfix, "walks", "step") == STEPS, 30);
	for (uint32_t r = 0; r < 3; r++)
		new[r] = start("walks", 3, r, q);
	AWAIT(fail_job_is(&trainfix, "walks", "RESIZING"), 20);
	for (uint32_t r = 0; r < 4; r++) {
		kill(old[r], SIGKILL);
		(void)trainer_wait(old[r], 20);
	}
	for (uint32_t r = 0; r < 3; r++)
		cr_assert_eq(trainer_wait(new[r], 30), 0);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "world_size"), 3);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "step"), 2 * STEPS);
	delete ("walks");
}

/* ----------------------------------------------------------------------- what is refused */

static int is_refused(const struct trainer *t)
{
	struct play *p = t->arg;
	const struct shardd_job job = job_of(t);
	shardd_client *c = train_connect(t);

	told_note(&p->told, shardd_join(c, &job, NULL, &train_err));
	shardd_close(c);
	return 0;
}

static void expect_refused(struct play *p, uint32_t world, enum shardd_code code, const char *words)
{
	pid_t pid;

	p->told = (struct told){ 0 };
	pid = trainer_start(&trainfix, "walks", 0, world, is_refused, p);
	told_check(&p->told, code, words);
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", words);
}

Test(resize_job, refuses_what_it_cannot_do)
{
	struct play *p = play_new(0);
	pid_t pids[2];

	stage_set(&p->dies, 1);
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = start("walks", 2, r, p);
	AWAIT(fail_job_number(&trainfix, "walks", "step") == STEPS, 30);
	ctl_fails((const char *const[]){ "job", "resize", "walks", "3", NULL }, 1,
		  "has 2 trainers: its world size can change only while no rank is in it");
	ctl_fails((const char *const[]){ "job", "resize", "walks", "3", "--timeout", "1", NULL }, 1,
		  "has 2 trainers");
	ctl_fails((const char *const[]){ "job", "resize", "nobody", "3", NULL }, 1, "no job");
	ctl_fails((const char *const[]){ "job", "resize", "walks", "0", NULL }, 2,
		  "is not a number of ranks");
	ctl_fails((const char *const[]){ "job", "resize", "walks", NULL }, 2,
		  "takes the name of one job and a number of ranks");
	for (uint32_t r = 0; r < 2; r++) {
		kill(pids[r], SIGKILL);
		(void)trainer_wait(pids[r], 20);
	}
	expect_refused(p, 3, SHARDD_FAILED_PRECONDITION, "has world size 2, not 3");
	p->elastic = true;
	expect_refused(p, 2, SHARDD_FAILED_PRECONDITION, "job 'walks' is not elastic");
	expect_refused(p, 9, SHARDD_INVALID_ARGUMENT, "with job.world_size 9 between them");
	ctl_fails((const char *const[]){ "job", "resize", "walks", "5000", NULL }, 1,
		  "world_size 5000 is out of range (1..");
	delete ("walks");
}

/* Also where there are no checkpoints: the mean has the same bits for 4, 2, 8 and 1 ranks. */
Test(resize_job, goes_on_as_if_nothing_had_happened)
{
	static const uint32_t walk[] = { 4, 2, 8, 1 };
	struct play *still = NULL, *p = NULL;

	for (uint32_t i = 0; i < ARRAY_SIZE(walk); i++) {
		p = play_new(i);
		still = play_new(i);
		p->same_mean = still->same_mean = true;
		p->load = still->load = false;
		if (i)
			resize("walks", walk[i], " now, ");
		trainers_run(&trainfix, "walks", walk[i], trains, p, 60);
		trainers_run(&trainfix, "still", 1, trains, still, 60);
		expect_equal(p, still, "walks");
	}
	cr_expect_neq(p->at_end[0][0], 0);
	delete ("walks");
	delete ("still");
}

/* -------------------------------------------------------------- the daemon dies, too */

static void begin_held(void)
{
	fdcheck_begin();
	snprintf(root, sizeof(root), "/tmp/shardd-resize-XXXXXX");
	cr_assert(mkdtemp(root));
	daemonfix_start_held(&trainfix, NULL);
}

static void end_held(void)
{
	char command[256];

	daemonfix_stop(&trainfix);
	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	cr_assert_eq(system(command), 0);
	fdcheck_end();
}

TestSuite(resize_held, .init = begin_held, .fini = end_held, .timeout = 240);

/* A successor finds the job in its new size, with all of its state. */
Test(resize_held, outlives_the_daemon)
{
	static const uint32_t walk[] = { 4, 2, 8, 1 };
	struct play *still = NULL, *p = NULL;

	for (uint32_t i = 0; i < ARRAY_SIZE(walk); i++) {
		p = play_new(i);
		still = play_new(i);
		p->same_mean = still->same_mean = true;
		if (i) {
			resize("walks", walk[i], " now, ");
			daemonfix_replace_daemon(&trainfix, SIGKILL);
			cr_expect_eq(fail_job_number(&trainfix, "walks", "world_size"), walk[i]);
		}
		trainers_run(&trainfix, "walks", walk[i], trains, p, 60);
		trainers_run(&trainfix, "still", 1, trains, still, 60);
		expect_equal(p, still, "held");
	}
	delete ("walks");
	delete ("still");
}
