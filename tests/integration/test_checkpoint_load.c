/*
 * Checkpoints that are loaded: into jobs of other world sizes, layouts and strategies, with equal bits;
 * training goes on as if there had been no file. What does not fit is refused before anything changes.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "fdcheck.h"

enum { UNITS = 3, SAVED = 3, LAST = 6, MAX_WORLD = 8 };

static char root[64];

static void begin(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	snprintf(root, sizeof(root), "/tmp/shardd-load-XXXXXX");
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

TestSuite(checkpoint_load, .init = begin, .fini = end, .timeout = 180);

static const uint64_t rows[UNITS] = { 7001, 1, 3000 };
static const uint64_t elements[UNITS] = { 4 * 7001, 4, 4 * 3000 };

struct play {
	char dir[128];
	enum shardd_layout layout;
	enum shardd_strategy strategy;
	uint32_t shard_ranks;
	enum shardd_resume resume;
	bool load;      /* else initialise, and save at step SAVED */
	bool sgd, more; /* another optimizer; another unit */
	bool shape;     /* another shape of one tensor */
	uint64_t last;  /* step to train up to */
	stage saved;
	struct told told;              /* of what rank 0 was told when it loaded */
	float params[UNITS][4 * 7001]; /* at the end */
};

static struct play *play_new(const char *dir)
{
	struct play *p = trainer_shared(sizeof(*p));

	snprintf(p->dir, sizeof(p->dir), "%s/%s", root, dir);
	(void)mkdir(p->dir, 0777);
	p->last = LAST;
	return p;
}

static void register_units(shardd_client *c, const struct play *p, shardd_unit *ret)
{
	for (unsigned i = 0; i < UNITS + (p->more ? 1u : 0u); i++) {
		const uint64_t shape[] = { rows[i % UNITS] + (p->shape && i == 2), 3 };
		struct shardd_tensor tensors[] = {
			{ .name = "weight", .shape = shape, .dims = 2 },
			{ .name = "bias", .shape = shape, .dims = 1, .frozen = i == 2 },
		};
		struct shardd_unit_spec spec = {
			.size = sizeof(spec),
			.tensors = tensors,
			.n_tensors = 2,
			.layout = p->layout,
			.strategy = p->strategy,
			.shard_ranks = p->shard_ranks,
			.optimizer = { .kind = i == 1 || p->sgd ? SHARDD_SGD : SHARDD_ADAMW,
				       .lr = 0.01,
				       .momentum = i == 1 || p->sgd ? 0.9 : 0 },
		};
		struct shardd_unit_info info;
		char name[16];

		snprintf(name, sizeof(name), "layer.%u", i);
		spec.name = name;
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		if (ret)
			ret[i] = info.unit;
	}
}

/* The trained tensors of @values, packed, at their places in a gradient buffer. */
static void reduce_packed(shardd_client *c, unsigned i, shardd_unit u, const float *values)
{
	struct shardd_tensor_place places[2];
	void *buffer;

	TRAIN_OK(shardd_gradient(c, u, &buffer, &train_err));
	TRAIN_OK(shardd_tensor_places(c, u, places, 2, &train_err));
	for (unsigned t = 0; t < 2; t++, values += 3 * rows[i])
		if (t == 0 || i != 2)
			train_write(c, (float *)buffer + places[t].offset, values,
				    places[t].elements * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
}

/* Rank 0 has all of the gradient, so that the mean has the same bits for 1, 2, 4 and 8 ranks. */
static void one_step(shardd_client *c, const shardd_unit *units, const struct trainer *t,
		     uint64_t step)
{
	uint64_t blob[2] = { step, t->rank };

	for (unsigned i = UNITS; i-- > 0;) {
		float *values = train_numbers(elements[i], step * UNITS + i);

		for (size_t k = 0; k < elements[i]; k++)
			values[k] *= t->rank ? 0 : (float)t->world;
		reduce_packed(c, i, units[i], values);
		free(values);
	}
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, step, blob, sizeof(blob), &train_err));
}

/* The tensors, packed. */
static void read_packed(shardd_client *c, unsigned i, shardd_unit u, float *ret)
{
	struct shardd_tensor_place places[2];
	const void *full;

	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_tensor_places(c, u, places, 2, &train_err));
	for (unsigned t = 0; t < 2; t++) {
		train_read(c, ret + t * 3 * rows[i], (const float *)full + places[t].offset,
			   places[t].elements * sizeof(float));
	}
	TRAIN_OK(shardd_release(c, u, &train_err));
}

static void save_here(struct play *p, const struct trainer *t, uint64_t step)
{
	if (p->load || step != SAVED)
		return;
	if (t->rank == 0)
		stage_set(&p->saved, 1); /* the test saves */
	TRAINER_AWAIT(atomic_load(&p->saved) == 2, 60);
}

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	struct play *p = t->arg;
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .op_timeout_ms = 50000,
				  .resume = p->resume };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	return me;
}

/* Return: the step to continue after. */
static uint64_t load(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	struct play *p = t->arg;
	struct shardd_loaded loaded = { .size = sizeof(loaded) };
	struct shardd_membership m;
	uint64_t step = 0;

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* all have registered */
	if (t->rank == 0) {
		TRAIN_OK(shardd_load_checkpoint(c, t->job, p->dir, NULL, &loaded, &train_err));
		step = loaded.step;
		TRAINER_CHECK(step == SAVED && loaded.bytes && loaded.world_size == 2);
	}
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	told_now("a checkpoint of step 3 was loaded into job");
	m = join(c, t);
	TRAINER_CHECK(m.has_commit && m.step == SAVED && m.committed_step == SAVED && !m.torn);
	TRAINER_CHECK(m.blob_bytes == (t->rank < 2 ? 16 : 0));
	TRAINER_CHECK(t->rank >= 2 || ((const uint64_t *)m.blob)[1] == t->rank);
	register_units(c, p, units);
	return step ? step : m.step;
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit units[UNITS + 1];
	uint64_t step = 0;

	(void)join(c, t);
	register_units(c, p, units);
	if (p->load)
		step = load(c, t, units);
	for (unsigned i = 0; !p->load && i < UNITS; i++)
		TRAIN_OK(shardd_init_seed(c, units[i], i + 1, &train_err));
	while (step < p->last) {
		one_step(c, units, t, ++step);
		save_here(p, t, step);
	}
	for (unsigned i = 0; i < UNITS; i++) {
		float *x = train_alloc(elements[i] * sizeof(*x));

		read_packed(c, i, units[i], x);
		if (t->rank == 0)
			memcpy(p->params[i], x, elements[i] * sizeof(*x));
		free(x);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static void ctl_ok(const char *const *args)
{
	char out[2048];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
}

/* Train 2 ranks, with a checkpoint of step SAVED in its folder. */
static struct play *train_and_save(void)
{
	struct play *p = play_new("saved");
	const char *args[] = { "checkpoint", "save", "first", p->dir, NULL };
	pid_t pids[2];

	p->layout = SHARDD_LAYOUT_FLAT;
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "first", r, 2, trains, p);
	AWAIT(atomic_load(&p->saved) == 1, 60);
	AWAIT(fail_job_number(&trainfix, "first", "step") == SAVED, 20);
	ctl_ok(args);
	stage_set(&p->saved, 2);
	for (unsigned r = 0; r < 2; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	return p;
}

static void expect_params(const struct play *p, const struct play *first, const char *what)
{
	for (unsigned i = 0; i < UNITS; i++)
		cr_expect_arr_eq(p->params[i], first->params[i], elements[i] * sizeof(float),
				 "%s: unit %u differs", what, i);
}

/* Parameters, optimizer state, counts of steps: after three more steps all bits are those of the job
 * that was saved. */
Test(checkpoint_load, goes_on_in_another_world_size_layout_and_strategy)
{
	static const struct {
		uint32_t world;
		enum shardd_layout layout;
		enum shardd_strategy strategy;
		enum shardd_resume resume;
	} cases[] = {
		{ 1, SHARDD_LAYOUT_FLAT, SHARDD_SHARD, 0 },
		{ 2, SHARDD_LAYOUT_FLAT, SHARDD_SHARD, SHARDD_RESUME_COMMITTED },
		{ 2, SHARDD_LAYOUT_DIM0, SHARDD_SHARD, 0 },
		{ 4, SHARDD_LAYOUT_FLAT, SHARDD_REPLICATE, 0 },
		{ 4, SHARDD_LAYOUT_FLAT, SHARDD_HYBRID, 0 },
		{ 8, SHARDD_LAYOUT_DIM0, SHARDD_HYBRID, SHARDD_RESUME_COMMITTED },
		{ 8, SHARDD_LAYOUT_DIM0, SHARDD_SHARD, 0 },
	};
	struct play *first;

	first = train_and_save();
	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		struct play *p = play_new("saved");
		char job[32];

		snprintf(job, sizeof(job), "case-%u", i);
		p->load = true;
		p->layout = cases[i].layout;
		p->strategy = cases[i].strategy;
		p->shard_ranks = cases[i].strategy == SHARDD_HYBRID ? cases[i].world / 2 : 0;
		p->resume = cases[i].resume;
		trainers_run(&trainfix, job, cases[i].world, trains, p, 90);
		expect_params(p, first, job);
	}
	cr_expect_neq(first->params[0][0], 0);
}

/* Of a job of three ranks the mean rounds differently: its state at the step of the checkpoint. */
Test(checkpoint_load, has_the_state_that_was_saved)
{
	struct play *p, *first, *again;

	first = train_and_save();
	p = play_new("saved");
	again = play_new("saved");
	p->load = again->load = true;
	p->last = again->last = SAVED;
	p->layout = SHARDD_LAYOUT_DIM0;
	trainers_run(&trainfix, "three", 3, trains, p, 60);
	trainers_run(&trainfix, "one", 1, trains, again, 60);
	expect_params(p, again, "three ranks");
	cr_expect_neq(memcmp(p->params[0], first->params[0], sizeof(p->params[0])), 0);
}

/* ----------------------------------------------------------------------- what is refused */

static int is_refused(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit units[UNITS + 1];

	(void)join(c, t);
	register_units(c, p, units);
	if (!p->load)
		for (unsigned i = 0; i < UNITS; i++)
			TRAIN_OK(shardd_init_seed(c, units[i], 1, &train_err));
	if (p->last)
		TRAIN_OK(shardd_commit(c, p->last, NULL, 0, &train_err));
	told_note(&p->told, shardd_load_checkpoint(c, t->job, p->dir, NULL, NULL, &train_err));
	/* as before */
	register_units(c, p, units);
	TRAIN_OK(shardd_init_seed(c, units[0], 1, &train_err));
	train_leave(c);
	return 0;
}

static void expect_refused(struct play *p, enum shardd_code code, const char *words)
{
	pid_t pid;

	p->told = (struct told){ 0 };
	pid = trainer_start(&trainfix, "refused", 0, 1, is_refused, p);

	told_check(&p->told, code, words);
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", words);
}

Test(checkpoint_load, refuses_what_does_not_fit)
{
	struct play *p;

	(void)train_and_save();
	p = play_new("saved");
	p->load = true;
	p->last = 0;
	p->sgd = true;
	expect_refused(
		p, SHARDD_FAILED_PRECONDITION,
		"the checkpoint has no momentum_buffer of tensor 'weight' of unit 'layer.0'");
	p->sgd = false;
	p->more = true;
	expect_refused(p, SHARDD_FAILED_PRECONDITION, "of unit 'layer.3', which the job needs");
	p->more = false;
	p->shape = true;
	expect_refused(p, SHARDD_FAILED_PRECONDITION,
		       "tensor 'weight' of unit 'layer.2' has another shape in the checkpoint");
	p->shape = false;
	p->load = false;
	p->last = 7;
	expect_refused(p, SHARDD_FAILED_PRECONDITION, "job 'refused' has state of its own, step 7");
	p->load = true;
	p->last = 0;
	snprintf(p->dir, sizeof(p->dir), "%s/none", root);
	expect_refused(p, SHARDD_NOT_FOUND, "there is no such folder");
	snprintf(p->dir, sizeof(p->dir), "%s", root);
	expect_refused(p, SHARDD_NOT_FOUND, "there is no checkpoint in");
	snprintf(p->dir, sizeof(p->dir), "/etc");
	expect_refused(p, SHARDD_INVALID_ARGUMENT, "below none of the daemon's checkpoint_roots");
}

/* Units that nobody has initialised stay so; those that were have to be initialised again. */
Test(checkpoint_load, refuses_what_is_damaged)
{
	struct play *p, *first;
	char path[256];
	char byte;
	int fd;

	first = train_and_save();
	snprintf(path, sizeof(path), "%s/step-%012d/shard-00000.safetensors", first->dir, SAVED);
	fd = open(path, O_RDWR | O_CLOEXEC);
	cr_assert_geq(fd, 0);
	cr_assert_eq(pread(fd, &byte, 1, 40000), 1);
	byte ^= 1;
	cr_assert_eq(pwrite(fd, &byte, 1, 40000), 1);
	close(fd);
	p = play_new("saved");
	p->load = true;
	p->last = 0;
	expect_refused(p, SHARDD_DATA_LOSS, "is damaged: its checksum is");
	cr_expect_not(fail_logged(&trainfix, "checkpoint loaded job="));
}
