/*
 * Checkpoints of GPUs: the files are, byte for byte, those of host memory, whatever the number of devices
 * is; and what fails on the way costs the checkpoint and nothing else.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "gpufix.h"

enum { UNITS = 4, MAX_WORLD = 4 };

static char root[64];
static char roots[96];

TestSuite(gpu_checkpoints, .timeout = 180);

static const char *const *root_args(void)
{
	static const char *args[] = { "--set", roots, NULL };

	return args;
}

static void root_begin(unsigned devices)
{
	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
	snprintf(root, sizeof(root), "/tmp/shardd-gpu-ckpt-XXXXXX");
	cr_assert(mkdtemp(root));
	snprintf(roots, sizeof(roots), "checkpoint_roots=%s", root);
	gpu_begin(devices, root_args());
}

static void root_end(void)
{
	char command[128];

	gpu_end();
	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	cr_assert_eq(system(command), 0);
}

/* Another daemon, on so many of the simulator's devices; 0: on host memory. */
static void root_again(unsigned devices)
{
	char text[16];

	snprintf(text, sizeof(text), "%u", devices);
	setenv("SHARDD_TEST_BACKEND", devices ? "cuda" : "host", 1);
	if (devices)
		gpu_set("SHARDD_SIM_DEVICES", text);
	daemonfix_restart(&trainfix, root_args());
	failfix_again();
}

/* ------------------------------------------------------------------------ a job */

struct play {
	char dir[128];       /* to load from; "": initialised and trained */
	stage at[MAX_WORLD]; /* has committed so many steps */
	stage until;
	stage leave;
	struct told loaded;
	bool fails; /* the load does */
};

/* Odd numbers, so that ranks and devices have ragged ends and padding; a tensor smaller than a row each. */
static void register_units(shardd_client *c, shardd_unit *ret)
{
	static const uint64_t rows[UNITS] = { 7001, 1, 301, 5 };
	static const enum shardd_strategy strategies[UNITS] = { SHARDD_SHARD, SHARDD_SHARD,
								SHARDD_REPLICATE, SHARDD_SHARD };

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
			.strategy = strategies[i],
			.gradient_dtype = SHARDD_FP32,
			.optimizer = { .kind = i == 1 ? SHARDD_SGD : SHARDD_ADAMW,
				       .lr = 0.01,
				       .amsgrad = i == 0,
				       .momentum = i == 1 ? 0.9 : 0 },
		};
		struct shardd_unit_info info;
		char name[16];

		snprintf(name, sizeof(name), "layer.%u", i);
		spec.name = name;
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		ret[i] = info.unit;
	}
}

/* A gradient of each trained tensor, at its place in the buffer, which depends on the layout. */
static void reduce(shardd_client *c, shardd_unit u, uint64_t seed)
{
	struct shardd_tensor_place places[4];
	void *buffer;

	TRAIN_OK(shardd_gradient(c, u, &buffer, &train_err));
	TRAIN_OK(shardd_tensor_places(c, u, places, 4, &train_err));
	for (unsigned t = 0; t < 4; t += 2) {
		float *g = train_numbers(places[t].elements, seed + t);

		train_write(c, (float *)buffer + places[t].offset, g,
			    places[t].elements * sizeof(float));
		free(g);
	}
	TRAIN_OK(shardd_reduce(c, u, &train_err));
}

static void one_step(shardd_client *c, const shardd_unit *units, const struct trainer *t,
		     uint64_t step)
{
	for (unsigned i = UNITS; i-- > 0;)
		reduce(c, units[i], step * 100 + t->rank * 20 + i * 4);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
}

static void commit(shardd_client *c, const struct trainer *t, uint64_t step)
{
	struct play *p = t->arg;
	char blob[33];

	memset(blob, (int)(step + t->rank), sizeof(blob));
	TRAIN_OK(shardd_commit(c, step, blob, sizeof(blob), &train_err));
	stage_set(&p->at[t->rank], (unsigned)step + 1);
}

/* Return: the step that was loaded. */
static uint64_t load(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	struct play *p = t->arg;
	struct shardd_membership m;

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 0)
		told_note(&p->loaded,
			  shardd_load_checkpoint(c, t->job, p->dir, NULL, NULL, &train_err));
	if (p->fails)
		return 0;
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	m = train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(m.has_commit && !m.torn);
	register_units(c, units);
	stage_set(&p->at[t->rank], (unsigned)m.step + 1);
	return m.step;
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];
	uint64_t step = 0;

	register_units(c, units);
	if (*p->dir) {
		step = load(c, t, units);
	} else {
		for (unsigned i = 0; i < UNITS; i++)
			TRAIN_OK(shardd_init_seed(c, units[i], i + 1, &train_err));
		commit(c, t, 0);
	}
	for (;;) {
		TRAINER_AWAIT(atomic_load(&p->until) > step || atomic_load(&p->leave), 100);
		if (atomic_load(&p->until) <= step)
			break;
		one_step(c, units, t, ++step);
		commit(c, t, step);
	}
	train_leave(c);
	return 0;
}

struct run {
	struct play *p;
	uint32_t world;
	pid_t ranks[MAX_WORLD];
};

static struct run run_begin(const char *job, uint32_t world, const char *dir, unsigned until)
{
	struct run r = { .p = trainer_shared(sizeof(*r.p)), .world = world };

	snprintf(r.p->dir, sizeof(r.p->dir), "%s", dir);
	stage_set(&r.p->until, until);
	for (uint32_t i = 0; i < world; i++)
		r.ranks[i] = trainer_start(&trainfix, job, i, world, trains, r.p);
	return r;
}

static void run_at(struct run *r, unsigned step)
{
	for (uint32_t i = 0; i < r->world; i++)
		AWAIT(atomic_load(&r->p->at[i]) > step, 60);
}

static void run_end(struct run *r)
{
	stage_set(&r->p->leave, 1);
	for (uint32_t i = 0; i < r->world; i++)
		cr_assert_eq(trainer_wait(r->ranks[i], 60), 0);
}

/* ------------------------------------------------------------------------ files */

static void folder(const char *name, char ret[128])
{
	snprintf(ret, 128, "%s/%s", root, name);
	(void)mkdir(ret, 0777);
}

static int try_save(const char *job, const char *dir, const char *rate, char *out, size_t bytes)
{
	const char *args[] = { "checkpoint", "save", job, dir, rate ? "--rate" : NULL, rate, NULL };

	return daemonfix_ctl_text(&trainfix, args, out, bytes);
}

static void save(const char *job, const char *dir)
{
	char out[1024];

	cr_assert_eq(try_save(job, dir, NULL, out, sizeof(out)), 0, "%s", out);
}

static char *contents(const char *dir, uint64_t step, size_t *ret_n)
{
	char path[256], *all;
	struct stat st;
	_cleanup_(fd_closep) int fd = -1;

	snprintf(path, sizeof(path), "%s/step-%012llu/shard-00000.safetensors", dir,
		 (unsigned long long)step);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	cr_assert_geq(fd, 0, "%s", path);
	cr_assert_eq(fstat(fd, &st), 0);
	all = malloc((size_t)st.st_size);
	cr_assert_eq(read(fd, all, (size_t)st.st_size), st.st_size);
	*ret_n = (size_t)st.st_size;
	return all;
}

static void expect_same(const char *a, const char *b, uint64_t step)
{
	size_t n, m;
	char *x = contents(a, step, &n), *y = contents(b, step, &m);

	cr_assert_eq(n, m, "%s and %s", a, b);
	for (size_t i = 0; i < n; i++)
		cr_assert(x[i] == y[i], "byte %zu of %zu differs: %s and %s", i, n, a, b);
	free(x);
	free(y);
}

/* Load the checkpoint of step 3 in @from into a job of @world ranks, and save that: the same file, but for
 * blobs of ranks that it does not have. */
static void load_and_save(const char *from, const char *to, uint32_t world)
{
	char in[128], out[128];
	struct run r;

	folder(from, in);
	folder(to, out);
	r = run_begin(to, world, in, 0);
	run_at(&r, 3);
	cr_assert_eq(r.p->loaded.rc, 0, "%s", r.p->loaded.text);
	save(to, out);
	run_end(&r);
	expect_same(in, out, 3);
}

static void train_and_save(const char *to, uint32_t world)
{
	char dir[128];
	struct run r = run_begin("first", world, "", 3);

	folder(to, dir);
	run_at(&r, 3);
	save("first", dir);
	run_end(&r);
}

/* Host memory, 1, 2 and 3 devices, there and back: no byte is lost or added on the way. */
Test(gpu_checkpoints, of_any_number_of_devices_are_equal)
{
	root_begin(2);
	if (!gpu_simulated())
		train_not_here("other numbers of devices");
	train_and_save("two", 4);
	load_and_save("two", "again", 4);
	root_again(1);
	load_and_save("again", "one", 4);
	root_again(3);
	load_and_save("one", "three", 4);
	root_again(0);
	load_and_save("three", "host", 4);
	root_again(2);
	load_and_save("host", "back", 4);
	root_end();
}

/* What the host trains, two devices go on with: the sums of two ranks round alike. */
Test(gpu_checkpoints, of_host_memory_are_trained_on)
{
	char dir[128], host[128], gpu[128];
	struct run r;

	root_begin(2);
	if (!gpu_simulated())
		train_not_here("host memory");
	root_again(0);
	folder("begin", dir);
	folder("host", host);
	folder("gpu", gpu);
	r = run_begin("host", 2, "", 3);
	run_at(&r, 3);
	save("host", dir);
	stage_set(&r.p->until, 6);
	run_at(&r, 6);
	save("host", host);
	run_end(&r);
	root_again(2);
	r = run_begin("gpu", 2, dir, 6);
	run_at(&r, 6);
	save("gpu", gpu);
	run_end(&r);
	expect_same(host, gpu, 6);
	root_end();
}

/* ---------------------------------------------------------------------- what fails */

/* From here on the simulator counts the calls that are to fail. */
static void begin_failing(unsigned devices, const char *call, char flag[128])
{
	gpu_set("SHARDD_SIM_FAIL", call);
	snprintf(flag, 128, "/tmp/shardd-gpu-fail-%d", (int)getpid());
	gpu_set("SHARDD_SIM_FAIL_FROM", flag);
	root_begin(devices);
}

static void fail_now(const char *flag)
{
	int fd = open(flag, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

	cr_assert_geq(fd, 0);
	close(fd);
}

/* A call fails, and the device goes on: so do the job and its next checkpoint. */
Test(gpu_checkpoints, whose_copy_fails_are_not_made)
{
	char flag[128], dir[128], out[1024];
	struct run r;

	begin_failing(2, "cuMemcpyDtoHAsync:3:2", flag);
	folder("fails", dir);
	r = run_begin("live", 2, "", 1);
	run_at(&r, 1);
	fail_now(flag);
	cr_expect_eq(try_save("live", dir, NULL, out, sizeof(out)), 1, "%s", out);
	cr_expect(strstr(out, "a device failed while it copied the state of job 'live'"), "%s",
		  out);
	cr_expect_eq(rmdir(dir), 0, "something of it is left");
	folder("fails", dir);
	stage_set(&r.p->until, 3);
	run_at(&r, 3);
	save("live", dir);
	run_end(&r);
	unlink(flag);
	root_end();
}

Test(gpu_checkpoints, whose_load_fails_leave_the_job_empty)
{
	char flag[128], dir[128];
	struct run r;

	begin_failing(2, "cuMemcpyHtoDAsync:4:2", flag);
	train_and_save("good", 2);
	folder("good", dir);
	r = (struct run){ .p = trainer_shared(sizeof(*r.p)), .world = 1 };
	snprintf(r.p->dir, sizeof(r.p->dir), "%s", dir);
	r.p->fails = true;
	fail_now(flag);
	r.ranks[0] = trainer_start(&trainfix, "broken", 0, 1, trains, r.p);
	told_check(&r.p->loaded, SHARDD_INTERNAL,
		   "a device failed while the checkpoint was copied");
	run_end(&r);
	load_and_save("good", "again", 2);
	unlink(flag);
	root_end();
}

static bool is_lost(unsigned device)
{
	static const char *const status[] = { "status", NULL };
	json_t *s = daemonfix_ctl(&trainfix, status);
	json_t *d = json_array_get(json_object_get(s, "devices"), device);
	const char *why = json_string_value(json_object_get(d, "lost"));
	bool lost = why && *why;

	json_decref(s);
	return lost;
}

/* The device is lost while it copies: the checkpoint ends, and the one before it can be loaded on the
 * devices that are left. */
Test(gpu_checkpoints, of_a_device_that_is_lost_end)
{
	char flag[128], dir[128], out[1024];
	struct run r;

	begin_failing(2, "cuMemcpyDtoHAsync:2:214", flag);
	folder("lost", dir);
	r = run_begin("live", 2, "", 1);
	run_at(&r, 1);
	save("live", dir);
	stage_set(&r.p->until, 2);
	run_at(&r, 2);
	fail_now(flag);
	cr_expect_eq(try_save("live", dir, NULL, out, sizeof(out)), 1, "%s", out);
	cr_expect(strstr(out, "a device failed while it copied the state of job 'live'"), "%s",
		  out);
	AWAIT(is_lost(0) || is_lost(1), 20);
	for (unsigned i = 0; i < 2; i++)
		fail_kill(r.ranks[i]);
	gpu_set("SHARDD_SIM_FAIL", NULL);
	root_again(1);
	r = run_begin("again", 2, dir, 0);
	run_at(&r, 1);
	cr_expect_eq(r.p->loaded.rc, 0, "%s", r.p->loaded.text);
	run_end(&r);
	unlink(flag);
	root_end();
}

/* ---------------------------------------------------------------------- buffers of units */

enum { LATE_US = 200000, BUFFER = 4096, EARLY = 0x11, LATE = 0x5a };

static shardd_unit register_buffer(shardd_client *c)
{
	const uint64_t shape[] = { BUFFER };
	struct shardd_buffer buffer = {
		.name = "late", .shape = shape, .dims = 1, .dtype = SHARDD_BUFFER_UINT8
	};
	struct shardd_tensor weight = { .name = "weight", .shape = shape, .dims = 1 };
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "norm",
					 .tensors = &weight,
					 .n_tensors = 1,
					 .buffers = &buffer,
					 .n_buffers = 1 };
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	return info.unit;
}

/* Asks for the commit long before its stream writes the buffer. */
static int writes_late(const struct trainer *t)
{
	struct play *p = t->arg;
	struct gpu g;
	CUstream stream;
	shardd_client *c;
	shardd_unit u;
	void *data, *pinned;

	gpu_open(&g, 0);
	stream = gpu_stream(&g);
	pinned = gpu_pinned(&g, BUFFER);
	c = gpu_join(t, 0);
	u = register_buffer(c);
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	TRAIN_OK(shardd_unit_buffers(c, u, &data, &train_err));
	memset(pinned, EARLY, BUFFER);
	train_write(c, data, pinned, BUFFER);
	memset(pinned, LATE, BUFFER);
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	gpu_spin(&g, stream, LATE_US);
	gpu_put(&g, stream, data, pinned, BUFFER);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	stage_set(&p->at[0], 1);
	TRAINER_AWAIT(atomic_load(&p->leave), 100);
	gpu_drain(&g, stream);
	TRAIN_OK(shardd_set_stream(c, SHARDD_NO_STREAM, &train_err));
	train_leave(c);
	return 0;
}

/* Bytes of @value that follow one another, at most. */
static size_t longest(const char *all, size_t n, char value)
{
	size_t run = 0, most = 0;

	for (size_t i = 0; i < n; i++) {
		run = all[i] == value ? run + 1 : 0;
		most = run > most ? run : most;
	}
	return most;
}

Test(gpu_checkpoints, buffers_are_as_the_streams_before_the_commit_leave_them)
{
	struct play *p;
	char dir[128], *all;
	pid_t pid;
	size_t n;

	root_begin(1);
	p = trainer_shared(sizeof(*p));
	folder("late", dir);
	pid = trainer_start(&trainfix, "late", 0, 1, writes_late, p);
	AWAIT(atomic_load(&p->at[0]), 60);
	save("late", dir);
	stage_set(&p->leave, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
	all = contents(dir, 1, &n);
	cr_expect_geq(longest(all, n, LATE), BUFFER);
	cr_expect_lt(longest(all, n, EARLY), BUFFER);
	free(all);
	root_end();
}
