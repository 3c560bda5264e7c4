/*
 * Buffers of units in checkpoints: they are those of the commit, whatever the trainers write after it;
 * jobs of other world sizes get them; what does not fit is refused.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failfix.h"
#include "fdcheck.h"

enum { MAX_WORLD = 4, BUFFERS = 4, PLACE = 1024, LARGE = 20 << 20 };

static char root[64];

static void begin(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	snprintf(root, sizeof(root), "/tmp/shardd-buffers-XXXXXX");
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

TestSuite(checkpoint_buffers, .init = begin, .fini = end, .timeout = 120);

/* What a job's trainers do. */
struct play {
	bool none, more, shape, dtype; /* no buffers; one more; other ones */
	uint64_t large;                /* bytes of one more buffer */
	enum shardd_lifetime lifetime;
	bool load;
	char dir[128];
	stage until; /* the step after which they stand still */
	stage leave;
	stage next;          /* step that rank 0 takes, or LAST */
	stage at[MAX_WORLD]; /* committed, + 1 */
	struct told told;
	struct shardd_loaded loaded;
	uint8_t found[MAX_WORLD][PLACE]; /* the buffers after the load */
};

enum { LAST = 1 << 30 };

static struct play *play_new(void)
{
	struct play *p = trainer_shared(sizeof(*p));

	snprintf(p->dir, sizeof(p->dir), "%s/saved", root);
	(void)mkdir(p->dir, 0777);
	return p;
}

static shardd_unit make_unit(shardd_client *c, const struct play *p, size_t *ret_bytes)
{
	static const uint64_t ten[] = { 10 }, two[] = { 2, 3 }, one[] = { 1 };
	const uint64_t many[] = { p->large };
	struct shardd_buffer buffers[] = {
		{ .name = "mean", .shape = p->shape ? one : ten, .dims = 1 },
		{ .name = "count", .dtype = p->dtype ? SHARDD_BUFFER_INT32 : SHARDD_BUFFER_INT64 },
		{ .name = "mask/a", .shape = two, .dims = 2, .dtype = SHARDD_BUFFER_UINT8 },
		{ .name = "var", .shape = ten, .dims = 1, .dtype = SHARDD_BUFFER_FP64 },
		{ .name = p->more ? "more" : "large",
		  .shape = p->more ? one : many,
		  .dims = 1,
		  .dtype = SHARDD_BUFFER_UINT8 },
	};
	struct shardd_tensor weight = { .name = "weight", .shape = ten, .dims = 1 };
	size_t n = p->none ? 0 : BUFFERS + (p->more || p->large);
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "norm.1",
					 .tensors = &weight,
					 .n_tensors = 1,
					 .buffers = n ? buffers : NULL,
					 .n_buffers = n };
	struct shardd_buffer_place places[BUFFERS + 1];
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	*ret_bytes = 0;
	if (n) {
		TRAIN_OK(shardd_buffer_places(c, info.unit, places, n, &train_err));
		*ret_bytes = places[n - 1].offset + places[n - 1].bytes;
	}
	return info.unit;
}

/* Rank 0 decides for all whether there is a step after @step. */
static bool goes_on(struct play *p, uint32_t rank, unsigned step)
{
	if (rank == 0) {
		TRAINER_AWAIT(atomic_load(&p->until) > step || atomic_load(&p->leave), 60);
		stage_set(&p->next, atomic_load(&p->leave) ? LAST : step + 1);
	}
	TRAINER_AWAIT(atomic_load(&p->next) > step, 60);
	return atomic_load(&p->next) != LAST;
}

static uint8_t value_of(unsigned step, uint32_t rank)
{
	return (uint8_t)(16 * (step + 1) + rank);
}

/* On whatever device they are. */
static void fill(shardd_client *c, void *to, uint8_t value, size_t bytes)
{
	void *from = train_alloc(bytes);

	memset(from, value, bytes);
	train_write(c, to, from, bytes);
	free(from);
}

/* Each rank writes buffers, commits, and writes something else at once. */
static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	void *data = NULL;
	shardd_unit u;
	size_t bytes;

	(void)train_join_as(c, t, p->lifetime);
	u = make_unit(c, p, &bytes);
	if (bytes)
		TRAIN_OK(shardd_unit_buffers(c, u, &data, &train_err));
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	for (unsigned step = 0;; step++) {
		if (bytes)
			fill(c, data, value_of(step, t->rank), bytes);
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
		if (bytes)
			fill(c, data, 0xee, bytes);
		stage_set(&p->at[t->rank], step + 1);
		if (!goes_on(p, t->rank, step))
			break;
	}
	train_leave(c);
	return 0;
}

struct run {
	struct play *p;
	uint32_t world;
	pid_t ranks[MAX_WORLD];
};

static void run_await(const struct run *r, unsigned step)
{
	for (uint32_t i = 0; i < r->world; i++)
		AWAIT(atomic_load(&r->p->at[i]) > step, 60);
}

/* Trainers of @job that stand still after @step. */
static struct run run_begin(const char *job, struct play *p, uint32_t world, unsigned step)
{
	struct run r = { .p = p, .world = world };

	stage_set(&p->until, step);
	for (uint32_t i = 0; i < world; i++)
		r.ranks[i] = trainer_start(&trainfix, job, i, world, trains, p);
	run_await(&r, step);
	return r;
}

static void run_end(struct run *r)
{
	stage_set(&r->p->leave, 1);
	for (uint32_t i = 0; i < r->world; i++)
		cr_assert_eq(trainer_wait(r->ranks[i], 30), 0);
}

static char out[4096];

static int ctl(const char *const *args)
{
	return daemonfix_ctl_text(&trainfix, args, out, sizeof(out));
}

static void save(const char *job, const struct play *p)
{
	const char *args[] = { "checkpoint", "save", job, p->dir, NULL };

	cr_assert_eq(ctl(args), 0, "%s", out);
}

/* ------------------------------------------------------------------------------- loading */

static int loads(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	struct shardd_membership m;
	void *data = NULL;
	size_t bytes;
	shardd_unit u = make_unit(c, p, &bytes);
	int rc;

	if (bytes) {
		TRAIN_OK(shardd_unit_buffers(c, u, &data, &train_err));
		fill(c, data, 0x11, bytes);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* all have registered */
	if (t->rank == 0) {
		p->loaded.size = sizeof(p->loaded);
		rc = shardd_load_checkpoint(c, t->job, p->dir, NULL, &p->loaded, &train_err);
		told_note(&p->told, rc);
		if (rc) {
			train_leave(c);
			return 0;
		}
	}
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	m = train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(m.has_commit);
	u = make_unit(c, p, &bytes);
	if (bytes) {
		TRAIN_OK(shardd_unit_buffers(c, u, &data, &train_err));
		train_read(c, p->found[t->rank], data, bytes < PLACE ? bytes : PLACE);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* Where the bytes of the four buffers are: test_layouts has the rule. */
static void expect_buffers(const struct play *p, uint32_t rank, uint8_t value)
{
	static const struct {
		unsigned at, bytes;
	} places[BUFFERS] = { { 0, 40 }, { 64, 8 }, { 128, 6 }, { 192, 80 } };

	for (unsigned i = 0; i < BUFFERS; i++)
		for (unsigned k = 0; k < places[i].bytes; k++)
			cr_assert_eq(p->found[rank][places[i].at + k], value,
				     "rank %u buffer %u byte %u: %02x, not %02x", rank, i, k,
				     p->found[rank][places[i].at + k], value);
}

static struct play *load(const char *job, uint32_t world)
{
	struct play *p = play_new();

	trainers_run(&trainfix, job, world, loads, p, 60);
	return p;
}

/* A checkpoint of step 2 of a job of 2 ranks that has gone on writing. */
static void save_two_ranks(void)
{
	struct run r = run_begin("saved", play_new(), 2, 2);

	save("saved", r.p);
	cr_expect_not(strstr(out, "as its trainers have left them"), "%s", out);
	run_end(&r);
}

Test(checkpoint_buffers, are_those_of_the_commit_on_each_rank)
{
	const char *verify[] = { "checkpoint", "verify", NULL, NULL };
	struct play *p;

	save_two_ranks();
	p = load("two", 2);
	verify[2] = p->dir;
	cr_expect_eq(ctl(verify), 0, "%s", out);
	cr_expect(strstr(out, "9 tensors"), "%s", out); /* the weight, and 4 buffers twice */
	for (uint32_t rank = 0; rank < 2; rank++)
		expect_buffers(p, rank, value_of(2, rank));
	cr_expect_eq(p->loaded.buffers_left_out + p->loaded.buffers_missing, 0);
}

Test(checkpoint_buffers, of_rank_0_are_for_ranks_that_were_not_there)
{
	struct play *p;

	save_two_ranks();
	p = load("four", 4);
	expect_buffers(p, 0, value_of(2, 0));
	expect_buffers(p, 1, value_of(2, 1));
	expect_buffers(p, 2, value_of(2, 0));
	expect_buffers(p, 3, value_of(2, 0));
	p = load("one", 1);
	expect_buffers(p, 0, value_of(2, 0));
	cr_expect_eq(p->loaded.buffers_left_out, BUFFERS);
}

Test(checkpoint_buffers, are_as_they_were_if_the_checkpoint_has_none)
{
	struct run r;
	struct play *p;

	p = play_new();
	p->none = true;
	r = run_begin("saved", p, 2, 2);
	save("saved", p);
	run_end(&r);
	p = load("two", 2);
	expect_buffers(p, 0, 0x11);
	expect_buffers(p, 1, 0x11);
	cr_expect_eq(p->loaded.buffers_missing, BUFFERS);
	cr_expect(fail_logged(&trainfix, "buffers_missing=4"));
}

static void refused(struct play *p, const char *words)
{
	pid_t pid = trainer_start(&trainfix, "refused", 0, 1, loads, p);

	told_check(&p->told, SHARDD_FAILED_PRECONDITION, words);
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", words);
}

Test(checkpoint_buffers, that_do_not_fit_are_refused)
{
	struct play *p;

	save_two_ranks();
	p = play_new();
	p->more = true;
	refused(p, "the checkpoint has no buffer 'more' of unit 'norm.1', which the job needs");
	p = play_new();
	p->none = true;
	refused(p, "the checkpoint has buffer of tensor 'count' of unit 'norm.1', which the job "
		   "does not");
	p = play_new();
	p->shape = true;
	refused(p, "buffer 'mean' of unit 'norm.1' has another shape in the checkpoint");
	p = play_new();
	p->dtype = true;
	refused(p, "buffer of tensor 'count' of unit 'norm.1' is I64 in the checkpoint and I32 in");
}

/* Rank 0's, under the names of PyTorch's state_dict. */
Test(checkpoint_buffers, are_in_one_file_of_parameters)
{
	char file[160], head[2048] = "";
	const char *args[] = { "checkpoint", "consolidate", NULL, "--out", file, NULL };
	struct play *p;
	FILE *f;

	save_two_ranks();
	p = play_new();
	snprintf(file, sizeof(file), "%s/one.safetensors", root);
	args[2] = p->dir;
	cr_assert_eq(ctl(args), 0, "%s", out);
	f = fopen(file, "rb");
	cr_assert(f);
	cr_assert_eq(fseek(f, 8, SEEK_SET), 0);
	cr_assert_gt(fread(head, 1, sizeof(head) - 1, f), 0);
	fclose(f);
	cr_expect(strstr(head, "\"norm.1.mean\":{\"dtype\":\"F32\",\"shape\":[10]"), "%s", head);
	cr_expect(strstr(head, "\"norm.1.count\":{\"dtype\":\"I64\",\"shape\":[]"), "%s", head);
	cr_expect(strstr(head, "\"norm.1.mask/a\":{\"dtype\":\"U8\",\"shape\":[2,3]"), "%s", head);
	cr_expect(strstr(head, "\"norm.1.weight\""), "%s", head);
}

/* ---------------------------------------------------------------- when there is no copy yet */

static int saves(const struct trainer *t)
{
	struct play *p = t->arg;
	const char *args[] = { "checkpoint", "save", t->job, p->dir, NULL };

	return daemonfix_ctl_text(&trainfix, args, p->told.text, sizeof(p->told.text));
}

static bool waits(const char *job)
{
	static const char *const args[] = { "status", NULL };

	return ctl(args) == 0 && strstr(out, job) && strstr(out, "SAVE") && strstr(out, "WAITING");
}

/* Large ones are copied only by a commit that somebody waits for. */
Test(checkpoint_buffers, that_are_large_are_those_of_the_next_commit)
{
	struct play *p, *s;
	struct run r;
	pid_t pid;

	p = play_new();
	p->large = LARGE;
	r = run_begin("large", p, 2, 0);
	s = play_new();
	pid = trainer_start(&trainfix, "large", 0, 1, saves, s);
	AWAIT(waits("large"), 30);
	stage_set(&p->until, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", s->told.text);
	cr_expect(strstr(s->told.text, "step 1 of job large saved"), "%s", s->told.text);
	run_end(&r);
	s = play_new();
	s->large = LARGE;
	trainers_run(&trainfix, "again", 2, loads, s, 60);
	expect_buffers(s, 1, value_of(1, 1));
}

/* A job of another size has no copy of its last commit, and nobody who writes. */
Test(checkpoint_buffers, without_trainers_are_as_they_have_left_them)
{
	static const char *const resize[] = { "job", "resize", "kept", "3", NULL };
	static const char *const delete[] = { "job", "delete", "kept", NULL };
	struct play *p;
	struct run r;

	p = play_new();
	p->lifetime = SHARDD_KEEP;
	r = run_begin("kept", p, 2, 1);
	run_end(&r);
	cr_assert_eq(ctl(resize), 0, "%s", out);
	save("kept", p);
	cr_expect(strstr(out, "as its trainers have left them, not of that commit"), "%s", out);
	p = load("three", 3);
	for (uint32_t rank = 0; rank < 3; rank++)
		expect_buffers(p, rank, 0xee);
	cr_assert_eq(ctl(delete), 0, "%s", out);
}

/* The commit is made all the same. */
Test(checkpoint_buffers, without_memory_for_a_copy_keep_the_checkpoint_from_its_begin)
{
	const char *create[] = { "job", "create",  "tight", "--ephemeral", "--world-size",
				 "2",   "--quota", NULL,    NULL };
	struct play *p, *s;
	char quota[32];
	struct run r;
	pid_t pid;

	p = play_new();
	p->large = LARGE;
	r = run_begin("roomy", p, 2, 0);
	snprintf(quota, sizeof(quota), "%llu",
		 (unsigned long long)fail_job_number(&trainfix, "roomy", "peak_bytes") + 1048576);
	run_end(&r);
	create[7] = quota;
	cr_assert_eq(ctl(create), 0, "%s", out);
	p = play_new();
	p->large = LARGE;
	r = run_begin("tight", p, 2, 0);
	s = play_new();
	pid = trainer_start(&trainfix, "tight", 0, 1, saves, s);
	AWAIT(waits("tight"), 30);
	stage_set(&p->until, 1);
	cr_assert_eq(trainer_wait(pid, 60), 1);
	cr_expect(strstr(s->told.text, "no memory for a copy of its units' buffers"), "%s",
		  s->told.text);
	run_await(&r, 1);
	run_end(&r);
}
