/*
 * Checkpoints by the daemon: the files of a job that trains on are, bit for bit, those of a job that
 * stands still at the same step.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "checkpoint/place.h"
#include "failfix.h"
#include "fdcheck.h"
#include "safetensors.h"

enum { WORLD = 2, UNITS = 3, BLOB = 77, LAST = 1 << 30 };

static char root[64];

/* Of the first tensor of each unit. On GPUs more than what is copied for the writing thread by itself. */
static uint64_t rows[UNITS] = { 70001, 1, 30000 };

static void test_checkpoints_begin(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	rows[0] = train_on_host() ? 70001 : 700001;

	snprintf(root, sizeof(root), "/tmp/shardd-checkpoints-XXXXXX");
	cr_assert(mkdtemp(root));
	snprintf(set, sizeof(set), "checkpoint_roots=/nowhere:%s", root);
	args[1] = set;
	failfix_begin(args);
}

static void test_checkpoints_remove(const char *dir)
{
	char command[256];

	snprintf(command, sizeof(command), "rm -rf '%s'", dir);
	cr_assert_eq(system(command), 0);
}

static void test_checkpoints_end(void)
{
	failfix_end();
	test_checkpoints_remove(root);
}

TestSuite(checkpoints, .init = test_checkpoints_begin, .fini = test_checkpoints_end,
	  .timeout = 120);

/* Shared between a test and the trainers of one job. */
struct play {
	stage until; /* the step after which they stand still */
	stage leave;
	stage next;      /* step that rank 0 takes, or LAST */
	stage at[WORLD]; /* committed, + 1 */
	enum shardd_optimizer_when when;
	enum shardd_optimizer_kind kind;
	atomic_bool no_blob;
};

static void make_units(shardd_client *c, const struct play *p, shardd_unit *ret)
{
	for (unsigned i = 0; i < UNITS; i++) {
		const uint64_t shape[] = { rows[i], 3 };
		struct shardd_tensor tensors[] = {
			{ .name = "weight", .shape = shape, .dims = 2 },
			{ .name = "fixed", .shape = shape, .dims = 1, .frozen = true },
			{ .name = "bias", .shape = shape, .dims = 1 },
			{ .name = "tied", .shape = shape, .dims = 2, .alias_of = "weight" },
		};
		struct shardd_unit_spec spec = {
			.size = sizeof(spec),
			.tensors = tensors,
			.n_tensors = 4,
			.layout = i % 2 ? SHARDD_LAYOUT_DIM0 : SHARDD_LAYOUT_FLAT,
			.compute_dtype = i == 2 ? SHARDD_BF16 : SHARDD_FP32,
			.gradient_dtype = SHARDD_FP32,
			.optimizer = { .when = p->when,
				       .kind = p->kind,
				       .lr = 0.01,
				       .amsgrad = p->kind == SHARDD_ADAMW && i == 0,
				       .momentum = p->kind == SHARDD_SGD ? 0.9 : 0 },
		};
		struct shardd_unit_info info;
		char name[16];

		snprintf(name, sizeof(name), "layer.%u", i);
		spec.name = name;
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		TRAIN_OK(shardd_init_seed(c, info.unit, i + 1, &train_err));
		ret[i] = info.unit;
	}
}

static void one_step(shardd_client *c, const shardd_unit *units, uint32_t rank, uint64_t step)
{
	for (unsigned i = UNITS; i-- > 0;) {
		size_t n = (size_t)rows[i] * 4;
		float *g = train_numbers(n, step * 8 + rank * 4 + i);

		train_reduce(c, units[i], DTYPE_FP32, g, n);
		free(g);
	}
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
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

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];
	char blob[BLOB];

	make_units(c, p, units);
	for (uint64_t step = 0;; step++) {
		if (step)
			one_step(c, units, t->rank, step);
		memset(blob, (int)(step + t->rank), sizeof(blob));
		TRAIN_OK(shardd_commit(c, step, blob, p->no_blob ? 0 : sizeof(blob), &train_err));
		stage_set(&p->at[t->rank], (unsigned)step + 1);
		if (!goes_on(p, t->rank, (unsigned)step))
			break;
	}
	train_leave(c);
	return 0;
}

struct run {
	struct play *p;
	pid_t ranks[WORLD];
};

/* Trainers of job @job, until they have committed @step. They go on to @until. */
static struct run run_begin(const char *job, enum shardd_optimizer_kind kind,
			    enum shardd_optimizer_when when, unsigned step, unsigned until)
{
	struct run r = { .p = trainer_shared(sizeof(*r.p)) };

	r.p->kind = kind;
	r.p->when = when;
	stage_set(&r.p->until, until);
	for (uint32_t i = 0; i < WORLD; i++)
		r.ranks[i] = trainer_start(&trainfix, job, i, WORLD, trains, r.p);
	AWAIT(atomic_load(&r.p->at[0]) > step && atomic_load(&r.p->at[1]) > step, 60);
	return r;
}

static void run_end(struct run *r)
{
	stage_set(&r->p->leave, 1);
	for (uint32_t i = 0; i < WORLD; i++)
		cr_assert_eq(trainer_wait(r->ranks[i], 30), 0);
}

/* A folder below the root. */
static void make_folder(const char *name, char ret[128])
{
	snprintf(ret, 128, "%s/%s", root, name);
	cr_assert_eq(mkdir(ret, 0777), 0);
}

static uint64_t number(const json_t *j, const char *key)
{
	const json_t *n = json_object_get(j, key);

	cr_assert(n, "no %s", key);
	return json_is_string(n) ? strtoull(json_string_value(n), NULL, 10)
				 : (uint64_t)json_integer_value(n);
}

struct saved {
	uint64_t step, bytes, copied;
};

static struct saved save(const char *job, const char *dir, const char *rate)
{
	const char *slow[] = { "checkpoint", "save", job, dir, "--rate", rate, NULL };
	const char *fast[] = { "checkpoint", "save", job, dir, NULL };
	json_t *j = daemonfix_ctl(&trainfix, rate ? slow : fast);
	struct saved s = { number(j, "step"), number(j, "bytes"), number(j, "copied") };

	json_decref(j);
	return s;
}

static char *contents(const char *dir, uint64_t step, size_t *ret_n)
{
	char path[256], *all;
	struct stat st;
	int fd;

	snprintf(path, sizeof(path), "%s/step-%012llu/shard-00000.safetensors", dir,
		 (unsigned long long)step);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	cr_assert_geq(fd, 0, "%s", path);
	cr_assert_eq(fstat(fd, &st), 0);
	all = malloc((size_t)st.st_size);
	cr_assert_eq(read(fd, all, (size_t)st.st_size), st.st_size);
	close(fd);
	*ret_n = (size_t)st.st_size;
	return all;
}

static void check_same(const char *a, const char *b, uint64_t step)
{
	size_t n, m;
	char *x = contents(a, step, &n), *y = contents(b, step, &m);

	cr_assert_eq(n, m);
	for (size_t i = 0; i < n; i++)
		cr_assert(x[i] == y[i], "byte %zu of %zu differs", i, n);
	free(x);
	free(y);
}

static void verify(const char *dir)
{
	const char *args[] = { "checkpoint", "verify", dir, NULL };
	char out[1024];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
}

static void same_as_standing_still(enum shardd_optimizer_kind kind, enum shardd_optimizer_when when)
{
	char live[128], still[128];
	struct run r, s;
	struct saved got, again;

	make_folder("live", live);
	make_folder("still", still);
	r = run_begin("live", kind, when, 3, 1000000);
	got = save("live", live, train_on_host() ? "1M" : "16M");
	run_end(&r);
	cr_assert_geq(got.step, 3);
	cr_assert_gt(got.copied, 0, "no step changed the state while it was written");
	s = run_begin("still", kind, when, (unsigned)got.step, (unsigned)got.step);
	again = save("still", still, NULL);
	run_end(&s);
	cr_assert_eq(again.step, got.step);
	cr_assert_eq(again.copied, 0);
	cr_assert_eq(again.bytes, got.bytes);
	verify(live);
	check_same(live, still, got.step);
}

Test(checkpoints, are_of_one_step_while_steps_change_the_state)
{
	same_as_standing_still(SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP);
}

Test(checkpoints, are_of_one_step_while_units_are_stepped_in_backward)
{
	same_as_standing_still(SHARDD_ADAMW, SHARDD_OPTIM_IN_BACKWARD);
}

Test(checkpoints, are_of_one_step_with_momentum)
{
	same_as_standing_still(SHARDD_SGD, SHARDD_OPTIM_AT_STEP);
}

/* ------------------------------------------------------------------------ what they hold */

struct look {
	char path[2][256]; /* of the files of steps 0 and 1 */
};

static struct safetensors_tensor find(const struct safetensors *f, const char *array,
				      const char *unit, const char *tensor)
{
	struct safetensors_tensor t = { 0 };
	char key[128];

	snprintf(key, sizeof(key), "%s/%s/%s", array, unit, tensor);
	TRAINER_CHECK(safetensors_tensor(f, key, &t));
	return t;
}

/* A step of SGD with momentum: the place of each element in both arrays shows. */
static void check_step(struct safetensors *const *f, const struct shardd_published_tensor *t)
{
	const char *name = strrchr(t->name, '.') + 1;
	char unit[64];
	struct safetensors_tensor before, after;
	const float *x, *y, *m;

	snprintf(unit, sizeof(unit), "%.*s", (int)(name - 1 - t->name), t->name);
	before = find(f[0], "param", unit, name);
	after = find(f[1], "param", unit, name);
	x = before.data;
	y = after.data;
	TRAINER_CHECK(after.dims == t->dims && after.elements * sizeof(float) == t->bytes);
	TRAINER_CHECK(memcmp(after.shape, t->shape, t->dims * sizeof(*t->shape)) == 0);
	TRAIN_SAME(y, t->data, t->bytes);
	if (strcmp(name, "fixed") == 0) {
		TRAIN_SAME(y, x, t->bytes);
		return;
	}
	m = find(f[1], "momentum_buffer", unit, name).data;
	for (uint64_t i = 0; i < after.elements; i++) {
		float d = y[i] - (x[i] - 0.01f * m[i]);

		TRAINER_CHECK(m[i] != 0 && d < 1e-6f && d > -1e-6f);
	}
}

static int compares(const struct trainer *t)
{
	const struct look *l = t->arg;
	struct safetensors *f[2];
	struct shardd_generation g;
	shardd_client *c = train_connect(t);
	shardd_live *live;
	const char *why = "";

	for (unsigned i = 0; i < 2; i++) {
		f[i] = safetensors_open(l->path[i], &why);
		TRAINER_CHECK(f[i]);
	}
	TRAIN_OK(shardd_publication_declare(c, t->job, "{\"name\": \"look\"}", NULL, &train_err));
	TRAIN_OK(shardd_publication_publish(c, t->job, "look", 10000, NULL, &train_err));
	TRAIN_OK(shardd_live_open(c, t->job, "look", 0, &live, &train_err));
	TRAIN_OK(shardd_live_acquire(live, 0, &g, &train_err));
	TRAINER_CHECK(g.step == 1 && g.n_tensors >= UNITS);
	for (size_t i = 0; i < g.n_tensors; i++)
		if (!strstr(g.tensors[i].name, "tied"))
			check_step(f, &g.tensors[i]);
	shardd_live_close(live);
	shardd_close(c);
	for (unsigned i = 0; i < 2; i++)
		safetensors_free(f[i]);
	return 0;
}

Test(checkpoints, hold_each_tensor_and_its_optimizer_state)
{
	struct look *l = trainer_shared(sizeof(*l));
	char dir[128];
	struct run r = { .p = trainer_shared(sizeof(*r.p)) };

	if (!train_on_host())
		cr_skip_test("publications are of host memory");
	make_folder("both", dir);
	r.p->kind = SHARDD_SGD;
	atomic_store(&r.p->no_blob, true);
	for (uint32_t i = 0; i < WORLD; i++)
		r.ranks[i] = trainer_start(&trainfix, "live", i, WORLD, trains, r.p);
	for (unsigned i = 0; i < 2; i++) {
		stage_set(&r.p->until, i);
		AWAIT(atomic_load(&r.p->at[0]) == i + 1 && atomic_load(&r.p->at[1]) == i + 1, 30);
		cr_assert_eq(save("live", dir, NULL).step, i);
		snprintf(l->path[i], sizeof(l->path[i]), "%s/step-%012u/shard-00000.safetensors",
			 dir, i);
	}
	trainers_run(&trainfix, "live", 1, compares, l, 30);
	run_end(&r);
}

/* ---------------------------------------------------------------------------- refusals */

static void refused(const char *job, const char *path, const char *words)
{
	const char *args[] = { "checkpoint", "save", job, path, NULL };
	char out[2048];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 1, "%s", out);
	cr_assert(strstr(out, words), "no '%s' in: %s", words, out);
}

Test(checkpoints, stay_below_the_roots)
{
	char inside[128], path[256], link[256];
	struct run r;

	make_folder("inside", inside);
	r = run_begin("live", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 0, 0);
	refused("live", "/tmp", "below none of the daemon's checkpoint_roots");
	snprintf(path, sizeof(path), "%s-more", root);
	refused("live", path, "below none of the daemon's checkpoint_roots");
	snprintf(path, sizeof(path), "%s/absent", root);
	refused("live", path, "there is no such folder: make it first");
	snprintf(path, sizeof(path), "%s/absent/../..", root);
	refused("live", path, "there is no such folder");
	/* shardctl itself would resolve these two: the daemon is told as it is */
	snprintf(link, sizeof(link), "%s/link", root);
	cr_assert_eq(symlink("/tmp", link), 0);
	refused("live", link, "below none of the daemon's checkpoint_roots");
	refused("nobody", inside, "no job 'nobody'");
	save("live", inside, NULL);
	refused("live", inside, "there is a checkpoint 'step-000000000000' already");
	run_end(&r);
}

/* Asks the daemon by itself, so that nobody resolves the path before it does. */
static int asks_for_a_link(const struct trainer *t)
{
	const char *at = t->arg;
	struct fault f = FAULT_NULL;
	char path[256];

	snprintf(path, sizeof(path), "%s/link/deeper", at);
	TRAINER_CHECK(place_open(at, path, &f) < 0);
	TRAINER_CHECK(f.code == FAULT_INVALID && strstr(f.text, "no symbolic link"));
	f = FAULT_NULL;
	snprintf(path, sizeof(path), "%s/../etc", at);
	TRAINER_CHECK(place_open(at, path, &f) < 0);
	TRAINER_CHECK(f.code == FAULT_INVALID && strstr(f.text, "no way out of it"));
	f = FAULT_NULL;
	TRAINER_CHECK(place_open("", at, &f) < 0);
	TRAINER_CHECK(f.code == FAULT_STATE && strstr(f.text, "set checkpoint_roots"));
	return 0;
}

Test(checkpoints, follow_no_link_behind_a_root)
{
	char link[256], *at = trainer_shared(sizeof(root));

	memcpy(at, root, sizeof(root));
	snprintf(link, sizeof(link), "%s/link", root);
	cr_assert_eq(symlink("/etc", link), 0);
	trainers_run(&trainfix, "none", 1, asks_for_a_link, at, 20);
}

/* --------------------------------------------------------------- while one is written */

struct slow {
	char dir[128];
	bool faster; /* it ends within some seconds */
	struct told told;
};

/* A byte a second: it does not end by itself. */
static int saves_slowly(const struct trainer *t)
{
	struct slow *s = t->arg;
	const char *rate = !s->faster ? "1" : train_on_host() ? "1M" : "8M";
	const char *args[] = { "checkpoint", "save", t->job, s->dir, "--rate", rate, NULL };

	return daemonfix_ctl_text(&trainfix, args, s->told.text, sizeof(s->told.text));
}

static bool checkpoint_is(const char *job, const char *state)
{
	static const char *const args[] = { "status", NULL };
	json_t *j = daemonfix_ctl(&trainfix, args), *one;
	bool yes = false;
	size_t i;

	json_array_foreach(json_object_get(j, "jobs"), i, one)
	{
		const json_t *c = json_object_get(one, "checkpoint");
		const char *is = json_string_value(json_object_get(c, "state"));

		if (strcmp(json_string_value(json_object_get(one, "name")), job) == 0)
			yes = is && strcmp(is, state) == 0;
	}
	json_decref(j);
	return yes;
}

static pid_t slow_begin(struct slow **ret, const char *job, const char *dir, bool faster)
{
	struct slow *s = trainer_shared(sizeof(*s));
	pid_t pid;

	snprintf(s->dir, sizeof(s->dir), "%s", dir);
	s->faster = faster;
	pid = trainer_start(&trainfix, job, 0, 1, saves_slowly, s);
	AWAIT(checkpoint_is(job, "WRITING"), 30);
	*ret = s;
	return pid;
}

Test(checkpoints, are_made_one_at_a_time_and_end_when_their_job_is_deleted)
{
	const char *delete[] = { "job", "delete", "live", "--force", NULL };
	char dir[128], out[1024];
	struct slow *s;
	struct run r;
	pid_t pid;

	make_folder("slow", dir);
	r = run_begin("live", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 0, 0);
	pid = slow_begin(&s, "live", dir, false);
	refused("live", dir, "a checkpoint of job 'live' is being made");
	stage_set(&r.p->until, 9); /* the job trains on */
	AWAIT(atomic_load(&r.p->at[0]) == 10 && atomic_load(&r.p->at[1]) == 10, 30);
	cr_assert(checkpoint_is("live", "WRITING"));
	cr_assert_eq(daemonfix_ctl_text(&trainfix, delete, out, sizeof(out)), 0, "%s", out);
	cr_assert_eq(trainer_wait(pid, 30), 1);
	cr_assert(strstr(s->told.text, "cancelled"), "%s", s->told.text);
	for (uint32_t i = 0; i < WORLD; i++)
		fail_kill(r.ranks[i]);
	cr_assert_eq(rmdir(dir), 0, "something of it is left");
}

Test(checkpoints, of_a_job_that_ends_are_completed)
{
	char dir[128];
	struct slow *s;
	struct run r;
	pid_t pid;

	make_folder("last", dir);
	r = run_begin("live", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 0, 0);
	pid = slow_begin(&s, "live", dir, true);
	run_end(&r); /* and with its trainers the job, which is ephemeral */
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", s->told.text);
	verify(dir);
}

Test(checkpoints, of_a_daemon_that_is_killed_leave_the_one_before)
{
	const char *prune[] = { "checkpoint", "prune", NULL, "--keep", "9", NULL };
	const char *args[] = { "--set", NULL, NULL };
	char dir[128], set[128], out[1024];
	struct slow *s;
	struct run r;
	pid_t pid;

	make_folder("both", dir);
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	args[1] = set;
	prune[2] = dir;
	r = run_begin("live", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 0, 0);
	cr_assert_eq(save("live", dir, NULL).step, 0);
	stage_set(&r.p->until, 1);
	AWAIT(atomic_load(&r.p->at[0]) == 2 && atomic_load(&r.p->at[1]) == 2, 30);
	pid = slow_begin(&s, "live", dir, false);
	for (uint32_t i = 0; i < WORLD; i++)
		fail_kill(r.ranks[i]);
	daemonfix_restart(&trainfix, args);
	cr_assert_neq(trainer_wait(pid, 30), 0);
	verify(dir);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, prune, out, sizeof(out)), 0, "%s", out);
	cr_assert(strstr(out, "0 checkpoints removed, 1 leftover of"), "%s", out);
	failfix_again();
}

Test(checkpoints, without_memory_for_the_copy_end_and_the_job_trains_on)
{
	const char *create[] = { "job", "create",  "tight", "--ephemeral", "--world-size",
				 "2",   "--quota", NULL,    NULL };
	char dir[128], quota[32], out[1024];
	struct slow *s = trainer_shared(sizeof(*s));
	struct run r;
	pid_t pid;

	make_folder("tight", dir);
	r = run_begin("roomy", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 3, 3);
	snprintf(quota, sizeof(quota), "%llu",
		 (unsigned long long)fail_job_number(&trainfix, "roomy", "peak_bytes") + 1048576);
	run_end(&r);
	create[7] = quota;
	cr_assert_eq(daemonfix_ctl_text(&trainfix, create, out, sizeof(out)), 0, "%s", out);
	r = run_begin("tight", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 0, 0);
	snprintf(s->dir, sizeof(s->dir), "%s", dir);
	pid = trainer_start(&trainfix, "tight", 0, 1, saves_slowly, s);
	AWAIT(checkpoint_is("tight", "WRITING"), 30);
	stage_set(&r.p->until, 5);
	AWAIT(atomic_load(&r.p->at[0]) == 6 && atomic_load(&r.p->at[1]) == 6, 30);
	cr_assert_eq(trainer_wait(pid, 30), 1);
	cr_assert(strstr(s->told.text, "has no memory for its copy"), "%s", s->told.text);
	cr_assert(checkpoint_is("tight", "FAILED"));
	run_end(&r);
	cr_assert_eq(rmdir(dir), 0, "something of it is left");
}

/* A file system of its own, which takes root. */
static bool mount_small(const char *dir)
{
	return unshare(CLONE_NEWNS) == 0 &&
	       mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
	       mount("none", dir, "tmpfs", 0, "size=256k") == 0;
}

static void test_checkpoints_begin_full(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	snprintf(root, sizeof(root), "/tmp/shardd-checkpoints-XXXXXX");
	cr_assert(mkdtemp(root));
	if (!mount_small(root)) {
		test_checkpoints_remove(root);
		cr_skip_test("only root can mount a file system");
	}
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	args[1] = set;
	failfix_begin(args);
}

static void test_checkpoints_end_full(void)
{
	failfix_end();
	cr_assert_eq(umount(root), 0);
	test_checkpoints_remove(root);
}

Test(checkpoints_full, on_a_full_disk_end_and_the_job_trains_on,
     .init = test_checkpoints_begin_full, .fini = test_checkpoints_end_full, .timeout = 120)
{
	struct run r;

	r = run_begin("live", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 0, 0);
	refused("live", root, "No space left on device");
	refused("live", root, "checkpoint of step 0 in '/tmp/shardd-checkpoints-");
	refused("live", root, "of 'shard-00000.safetensors': No space left");
	cr_assert(checkpoint_is("live", "FAILED"));
	stage_set(&r.p->until, 5);
	AWAIT(atomic_load(&r.p->at[0]) == 6 && atomic_load(&r.p->at[1]) == 6, 30);
	cr_assert_eq(mount("none", root, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
	refused("live", root, "Read-only file system");
	run_end(&r);
}

/* The daemon is root here, and the job another user's. */
static int trains_as_nobody(const struct trainer *t)
{
	TRAINER_CHECK(setgid(65534) == 0 && setuid(65534) == 0);
	return trains(t);
}

Test(checkpoints, are_written_with_the_rights_of_the_owner)
{
	struct run r = { .p = trainer_shared(sizeof(*r.p)) };
	char mine[128], own[128], path[256];
	struct stat st;

	if (geteuid() != 0)
		cr_skip_test("only a daemon of root can write as another user");
	cr_assert_eq(chmod(root, 0755), 0);
	make_folder("mine", mine);
	cr_assert_eq(chmod(mine, 0755), 0);
	make_folder("own", own);
	cr_assert_eq(chown(own, 65534, 65534), 0);
	cr_assert_eq(chmod(trainfix.dir, 0755), 0);
	cr_assert_eq(chmod(trainfix.socket, 0666), 0);
	r.p->kind = SHARDD_ADAMW;
	for (uint32_t i = 0; i < WORLD; i++)
		r.ranks[i] = trainer_start(&trainfix, "theirs", i, WORLD, trains_as_nobody, r.p);
	AWAIT(atomic_load(&r.p->at[0]) > 0 && atomic_load(&r.p->at[1]) > 0, 60);
	refused("65534/theirs", mine, "Permission denied");
	cr_assert_eq(save("65534/theirs", own, NULL).step, 0);
	snprintf(path, sizeof(path), "%s/step-000000000000/shard-00000.safetensors", own);
	cr_assert_eq(stat(path, &st), 0);
	cr_assert(st.st_uid == 65534 && st.st_gid == 65534);
	run_end(&r);
}

/* ------------------------------------------------------------------------- regularly */

static bool has_step(const char *dir, unsigned step)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/step-%012u", dir, step);
	return access(path, F_OK) == 0;
}

static bool has_step_from(const char *dir, unsigned first, unsigned last)
{
	for (unsigned step = first; step <= last; step++)
		if (has_step(dir, step))
			return true;
	return false;
}

static void set_policy(const char *job, const char *dir, const char *option, const char *value)
{
	const char *args[] = {
		"checkpoint", "policy", job, dir, option, value, "--keep", "2", NULL
	};
	char out[1024];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
	cr_expect(strstr(out, dir), "%s", out);
}

static void step_to(struct run *r, unsigned step)
{
	stage_set(&r->p->until, step);
	AWAIT(atomic_load(&r->p->at[0]) > step && atomic_load(&r->p->at[1]) > step, 60);
}

/* The first commit in each 3 steps, also if commits are not made at each step; two stay. */
Test(checkpoints, are_made_by_the_policy_of_the_job)
{
	static const char *const off[] = { "checkpoint", "policy", "regular", "off", NULL };
	static const unsigned due[] = { 3, 6, 9, 12 };
	char dir[128], out[256];
	struct run r;

	make_folder("regular", dir);
	r = run_begin("regular", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 1, 1);
	set_policy("regular", dir, "--every-steps", "3");
	for (unsigned i = 0; i < ARRAY_SIZE(due); i++) {
		step_to(&r, due[i] + 1);
		AWAIT(has_step(dir, due[i]), 30);
		AWAIT(checkpoint_is("regular", "DONE"), 30); /* else the next one may be late */
		AWAIT(i < 2 || !has_step(dir, due[i - 2]), 30);
	}
	cr_expect(has_step(dir, 9));
	verify(dir);
	AWAIT(fail_logged(&trainfix, "checkpoint job="), 10);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, off, out, sizeof(out)), 0, "%s", out);
	step_to(&r, 17);
	run_end(&r);
	cr_expect_not(has_step(dir, 15));
}

Test(checkpoints, are_made_by_the_policy_as_time_passes)
{
	char dir[128];
	struct run r;
	unsigned step = 1;

	make_folder("timed", dir);
	r = run_begin("timed", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, step, step);
	set_policy("timed", dir, "--every-s", "1");
	AWAIT((step_to(&r, ++step), has_step_from(dir, 2, step)), 30);
	run_end(&r);
}

/* A folder that is gone: the job trains on, and status has the error. */
Test(checkpoints, that_the_policy_cannot_make_are_told)
{
	char dir[128];
	struct run r;

	make_folder("gone", dir);
	r = run_begin("gone", SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP, 1, 1);
	set_policy("gone", dir, "--every-steps", "2");
	cr_assert_eq(rmdir(dir), 0);
	step_to(&r, 5);
	AWAIT(fail_logged(&trainfix, "checkpoint_failed job="), 30);
	cr_expect(fail_logged(&trainfix, "there is no such folder"));
	run_end(&r);
}

Test(checkpoints, a_policy_that_says_nothing_is_refused)
{
	static const char *const none[] = { "checkpoint", "policy", "job", "/tmp", NULL };
	static const char *const both[] = { "checkpoint", "policy", "job", "off",
					    "--every-s",  "1",      NULL };
	static const char *const out_of[] = { "checkpoint", "policy", "made", "/etc",
					      "--every-s",  "1",      NULL };
	static const char *const make[] = { "job", "create", "made", "--world-size", "1", NULL };
	char out[1024];

	cr_expect_eq(daemonfix_ctl_text(&trainfix, none, out, sizeof(out)), 2);
	cr_expect(strstr(out, "needs --every-steps N or --every-s S"), "%s", out);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, both, out, sizeof(out)), 2);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, make, out, sizeof(out)), 0, "%s", out);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, out_of, out, sizeof(out)), 1);
	cr_expect(strstr(out, "below none of the daemon's checkpoint_roots"), "%s", out);
}
