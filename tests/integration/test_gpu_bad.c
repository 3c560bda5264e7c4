/*
 * What can be wrong with GPUs before any work is done: drivers, libraries, devices that
 * are not there or not those that were meant, memory that is not enough. One sentence
 * each, and the host backend does not care.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config/args.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "gpufix.h"

TestSuite(gpu_bad, .timeout = 120);

enum { N = 1000, MIB = 1 << 20 };

/* ------------------------------------------------------------------ at the start */

struct setting {
	const char *name, *value;
};

struct bad_start {
	struct setting env[2];
	const char *args[6];
	const char *words[3]; /* in what it says */
};

/* Run shardd until it ends, at most 30 s. Return: exit code; @out: what it said. */
static int run_shardd(const struct bad_start *b, char *out, size_t bytes)
{
	const char *dir = getenv("SHARDD_BIN_DIR");
	char program[4096], socket[] = "/tmp/shardd-bad-XXXXXX";
	const char *argv[16] = { program, "--socket", socket };
	int fds[2], status;
	size_t have = 0;
	ssize_t n;
	pid_t pid;

	close(mkstemp(socket));
	unlink(socket);
	for (size_t i = 0; i < ARRAY_SIZE(b->args) && b->args[i]; i++)
		argv[i + 3] = b->args[i];
	snprintf(program, sizeof(program), "%s/shardd", dir && *dir ? dir : SHARDD_BIN_DIR);
	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0) {
		for (size_t i = 0; i < ARRAY_SIZE(b->env) && b->env[i].name; i++)
			setenv(b->env[i].name, b->env[i].value, 1);
		dup2(fds[1], STDERR_FILENO);
		alarm(30);
		execv(program, (char *const *)argv);
		_exit(127);
	}
	fd_close(fds[1]);
	while (have + 1 < bytes && (n = read(fds[0], out + have, bytes - 1 - have)) > 0)
		have += (size_t)n;
	out[have] = 0;
	fd_close(fds[0]);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	unlink(socket);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static unsigned count_lines(const char *text, const char *words)
{
	unsigned n = 0;

	for (const char *at = text; (at = strstr(at, words)); at++)
		n++;
	return n;
}

static void refuses_to_start(const struct bad_start *b)
{
	char out[8192];
	int code = run_shardd(b, out, sizeof(out));

	cr_assert_eq(code, EXIT_BACKEND, "%s=%s: exit code %d: %s", b->env[0].name, b->env[0].value,
		     code, out);
	for (size_t i = 0; i < ARRAY_SIZE(b->words) && b->words[i]; i++)
		cr_assert(strstr(out, b->words[i]), "%s=%s: no '%s' in: %s", b->env[0].name,
			  b->env[0].value, b->words[i], out);
	cr_assert_eq(count_lines(out, " error server "), 1, "one sentence: %s", out);
	cr_assert(!strstr(out, "Sanitizer") && !strstr(out, "runtime error") &&
			  !strstr(out, "sim: "),
		  "%s", out);
}

static void need_simulator(void)
{
	gpu_set("SHARDD_SIM_DEVICES", "2");
	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
}

Test(gpu_bad, what_is_missing_is_said_at_the_start)
{
	static const struct bad_start rows[] = {
		{ { { "SHARDD_LIBCUDA", "/nonexistent/libcuda.so.1" } },
		  { "--backend", "cuda" },
		  { "/nonexistent/libcuda.so.1" } },
		{ { { "SHARDD_LIBCUDA", "/dev/null" } }, { "--backend", "cuda" }, { "/dev/null" } },
		{ { { "SHARDD_SIM_DRIVER", "12020" } },
		  { "--backend", "cuda" },
		  { "12.2", "13.0" } },
		{ { { "SHARDD_SIM_DEVICES", "2" } },
		  { "--backend", "cuda", "--set",
		    "devices=GPU-00000000-1111-2222-3333-444444444444" },
		  { "GPU-00000000-1111-2222-3333-444444444444" } },
		{ { { "SHARDD_LIBNCCL", "/nonexistent/libnccl.so.2" } },
		  { "--backend", "cuda", "--set", "engine=nccl" },
		  { "/nonexistent/libnccl.so.2" } },
		{ { { "SHARDD_SIM_NCCL", "22005" } },
		  { "--backend", "cuda", "--set", "engine=nccl" },
		  { "2.20.5", "2.27" } },
		{ { { "CUDA_VISIBLE_DEVICES", "" } },
		  { "--backend", "cuda" },
		  { "no GPU", "CUDA_VISIBLE_DEVICES" } },
		{ { { "SHARDD_SIM_FAIL", "cuInit:1:999" } },
		  { "--backend", "cuda" },
		  { "CUDA_ERROR_UNKNOWN" } },
		{ { { "SHARDD_SIM_FAIL", "cuDevicePrimaryCtxRetain:1:2" } },
		  { "--backend", "cuda" },
		  { "cuda:0", "CUDA_ERROR_OUT_OF_MEMORY" } },
		{ { { "SHARDD_SIM_FAIL", "cuModuleLoadData:1:209" } },
		  { "--backend", "cuda" },
		  { "cuda:0", "CUDA_ERROR_NO_BINARY_FOR_GPU" } },
	};

	need_simulator();
	fdcheck_begin();
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		refuses_to_start(&rows[i]);
	fdcheck_end();
}

/* ------------------------------------------------------------ the host backend */

static int trains_on_the_host(const struct trainer *t)
{
	const struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = train_join(t);
	float x[N], got[N];
	struct shardd_info info = { .size = sizeof(info) };
	shardd_unit u;

	TRAIN_OK(shardd_get_info(c, &info, &train_err));
	TRAINER_CHECK(strcmp(info.device.id, "host:0") == 0 && !info.device.streams &&
		      !*info.device.uuid);
	TRAIN_FAILS(shardd_set_stream(c, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	u = train_zero_unit(c, "u", N, &like);
	for (size_t i = 0; i < N; i++)
		x[i] = 2;
	train_reduce(c, u, DTYPE_FP32, x, N);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, got, sizeof(got));
	TRAINER_CHECK(got[0] == -2 && got[N - 1] == -2);
	train_leave(c);
	return 0;
}

static void serves_on_the_host(const char *backend)
{
	const char *args[] = { "--backend", backend, NULL };

	failfix_begin(args);
	trainers_run(&trainfix, "host", 2, trains_on_the_host, NULL, 60);
	failfix_end();
}

Test(gpu_bad, auto_without_a_driver_is_the_host)
{
	need_simulator();
	setenv("SHARDD_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
	serves_on_the_host("auto");
}

Test(gpu_bad, auto_with_an_old_driver_is_the_host)
{
	need_simulator();
	setenv("SHARDD_SIM_DRIVER", "12020", 1);
	serves_on_the_host("auto");
}

Test(gpu_bad, auto_without_a_device_is_the_host)
{
	need_simulator();
	setenv("CUDA_VISIBLE_DEVICES", "", 1);
	serves_on_the_host("auto");
}

Test(gpu_bad, the_host_backend_does_not_look_at_gpus)
{
	need_simulator();
	setenv("SHARDD_SIM_FAIL", "cuInit:1:999", 1);
	setenv("SHARDD_LIBNCCL", "/nonexistent/libnccl.so.2", 1);
	serves_on_the_host("host");
}

Test(gpu_bad, the_host_backend_beside_devices)
{
	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
	serves_on_the_host("host");
}

/* ------------------------------------------------------------- the wrong device */

static char uuids[2][48];

/* Connect, saying @device (NULL: nothing), and join. Return: as they do. */
static int join_saying(const struct trainer *t, const char *device, shardd_client **ret)
{
	struct shardd_options o = {
		.size = sizeof(o), .socket = t->socket, .name = "test", .device = device
	};
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = t->world, .rank = t->rank
	};
	shardd_client *c = NULL;
	int r = shardd_connect(&o, &c, &train_err);

	r = r < 0 ? r : shardd_join(c, &job, NULL, &train_err);
	if (r < 0) {
		shardd_close(c);
		c = NULL;
	}
	*ret = c;
	return r;
}

static void must_refuse(const struct trainer *t, const char *device, const char *const *words)
{
	shardd_client *c;
	int r = join_saying(t, device, &c);

	fprintf(stderr, "# %s: %s: %s\n", device, shardd_code_name(r), r ? train_err.text : "");
	TRAINER_CHECK(r == -SHARDD_INVALID_ARGUMENT || r == -SHARDD_FAILED_PRECONDITION ||
		      r == -SHARDD_NOT_FOUND);
	for (; *words; words++)
		told_now(*words);
}

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static int says_what_is_not_there(const struct trainer *t)
{
	static const char none[] = "GPU-00000000-1111-2222-3333-444444444444";

	must_refuse(t, none, WORDS(none, uuids[0]));
	must_refuse(t, "cuda:9", WORDS("cuda:9", "cuda:0"));
	must_refuse(t, "nonsense", WORDS("nonsense"));
	must_refuse(t, "host:0", WORDS("host:0"));
	return 0;
}

Test(gpu_bad, a_device_that_the_daemon_has_not)
{
	gpu_begin(1, NULL);
	gpu_uuid(0, uuids[0]);
	cr_assert_eq(
		trainer_wait(trainer_start(&trainfix, "none", 0, 1, says_what_is_not_there, NULL),
			     30),
		0);
	gpu_end();
}

/* The context is on the second device, and the first is said. */
static int computes_elsewhere(const struct trainer *t)
{
	struct gpu g;

	gpu_open(&g, 1);
	must_refuse(t, uuids[0], WORDS(uuids[0], uuids[1]));
	return 0;
}

/* Nothing is said: the context says it. */
static int says_by_its_context(const struct trainer *t)
{
	struct shardd_info info = { .size = sizeof(info) };
	shardd_client *c;
	struct gpu g;

	gpu_open(&g, 1);
	TRAIN_OK(join_saying(t, NULL, &c));
	TRAIN_OK(shardd_get_info(c, &info, &train_err));
	TRAINER_CHECK(strcmp(info.device.uuid, uuids[1]) == 0 &&
		      strcmp(info.device.id, "cuda:1") == 0);
	train_leave(c);
	return 0;
}

/* No context and nothing said: the daemon chooses, the library makes itself at home. */
static int says_nothing(const struct trainer *t)
{
	struct shardd_info info = { .size = sizeof(info) };
	shardd_client *c;
	float got[N];

	TRAIN_OK(join_saying(t, NULL, &c));
	TRAIN_OK(shardd_get_info(c, &info, &train_err));
	TRAINER_CHECK(strcmp(info.device.uuid, uuids[0]) == 0 && info.device.streams);
	train_params(c, train_zero_unit(c, "u", N, NULL), got, sizeof(got));
	TRAINER_CHECK(got[N - 1] == 0);
	train_leave(c);
	return 0;
}

/* By its UUID in small letters, which is the same. */
static int says_it_in_small_letters(const struct trainer *t)
{
	char name[48];
	shardd_client *c;

	for (size_t i = 0; i < sizeof(name); i++)
		name[i] = (char)(uuids[1][i] >= 'A' && uuids[1][i] <= 'Z' ? uuids[1][i] | 32
									  : uuids[1][i]);
	TRAIN_OK(join_saying(t, name, &c));
	train_leave(c);
	return 0;
}

/* It sees the second device only, and the daemon gives it the first. */
static int sees_another(const struct trainer *t)
{
	setenv("CUDA_VISIBLE_DEVICES", uuids[1], 1);
	must_refuse(t, "cuda:0", WORDS(uuids[0], "CUDA_VISIBLE_DEVICES"));
	return 0;
}

/* The daemon has GPUs, this process has no driver. */
static int has_no_driver(const struct trainer *t)
{
	setenv("SHARDD_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
	must_refuse(t, "cuda:0", WORDS("/nonexistent/libcuda.so.1"));
	return 0;
}

static void by_a_trainer(trainer_fn fn)
{
	static const char *const delete[] = { "job", "delete", "--force", "where", NULL };
	char out[512];

	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "where", 0, 1, fn, NULL), 30), 0);
	/* what was refused in the library had joined before */
	AWAIT(daemonfix_ctl_text(&trainfix, delete, out, sizeof(out)) == 0 ||
		      strstr(out, "there is no job"),
	      20);
}

Test(gpu_bad, the_device_of_a_trainer_is_the_one_it_computes_on)
{
	gpu_begin(2, NULL);
	gpu_uuid(0, uuids[0]);
	gpu_uuid(1, uuids[1]);
	by_a_trainer(computes_elsewhere);
	by_a_trainer(says_by_its_context);
	by_a_trainer(says_nothing);
	by_a_trainer(says_it_in_small_letters);
	by_a_trainer(sees_another);
	gpu_end();
}

Test(gpu_bad, a_trainer_without_a_driver)
{
	if (!gpu_simulated())
		cr_skip_test("the library that is asked for is the simulator's");
	gpu_begin(1, NULL);
	by_a_trainer(has_no_driver);
	gpu_end();
}

/* ------------------------------------------------------------------------ NCCL */

/* Of a job on both devices. */
static int wants_both(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, t->rank);
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = t->world, .rank = t->rank
	};
	uint64_t n = N;
	const struct shardd_tensor w = { .name = "w", .shape = &n, .dims = 1 };
	const struct shardd_unit_spec spec = { sizeof(spec), "u", &w, 1, .group = SHARDD_WORLD };
	struct shardd_unit_info info;
	int r = shardd_join(c, &job, NULL, &train_err);

	r = r ? r : shardd_register(c, &spec, 1, &info, &train_err);
	r = r ? r : shardd_init_seed(c, info.unit, 1, &train_err);
	r = r ? r : shardd_barrier(c, SHARDD_WORLD, &train_err);
	told_note((struct told *)t->arg + t->rank, r);
	shardd_close(c);
	return 0;
}

static int wants_one(const struct trainer *t)
{
	shardd_client *c = gpu_join(t, 1);

	train_zero_unit(c, "u", N, NULL);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* One device needs no NCCL; two say what is wrong with it. */
static void without_nccl(const char *const *words)
{
	static const char *const delete[] = { "job", "delete", "--force", "both", NULL };
	struct told *told = trainer_shared(2 * sizeof(*told));
	bool said = false;
	char out[512];

	gpu_begin(2, NULL);
	trainers_run(&trainfix, "one", 2, wants_one, NULL, 60);
	trainers_run(&trainfix, "both", 2, wants_both, told, 60);
	for (unsigned r = 0; r < 2; r++) {
		bool all = true;

		fprintf(stderr, "# rank %u: %d: %s\n", r, -told[r].rc, told[r].text);
		cr_assert_lt(told[r].rc, 0);
		for (const char *const *word = words; *word; word++)
			all = all && strstr(told[r].text, *word);
		said = said || all;
	}
	cr_assert(said);
	daemonfix_ctl_text(&trainfix, delete, out, sizeof(out));
	gpu_end();
}

Test(gpu_bad, nccl_is_missing)
{
	gpu_set("SHARDD_LIBNCCL", "/nonexistent/libnccl.so.2");
	without_nccl(WORDS("/nonexistent/libnccl.so.2"));
}

Test(gpu_bad, nccl_is_too_old)
{
	gpu_set("SHARDD_SIM_NCCL", "22005");
	without_nccl(WORDS("2.20.5", "2.27"));
}

/* ---------------------------------------------------------------- out of memory */

struct memory {
	stage held, over;
};

static int holds_most(const struct trainer *t)
{
	struct memory *m = t->arg;
	shardd_client *c = gpu_join(t, 0);
	uint64_t buffer;
	void *at;

	TRAIN_OK(shardd_alloc(c, 160 * MIB, &buffer, &at, &train_err));
	stage_set(&m->held, 1);
	TRAINER_AWAIT(atomic_load(&m->over) == 1, 60);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	train_leave(c);
	stage_set(&m->held, 2);
	return 0;
}

static int wants_more(const struct trainer *t)
{
	struct memory *m = t->arg;
	shardd_client *c = gpu_join(t, 0);
	uint64_t buffer;
	void *at;
	int r = 0;

	TRAIN_FAILS(shardd_alloc(c, 120 * MIB, &buffer, &at, &train_err),
		    SHARDD_RESOURCE_EXHAUSTED);
	fprintf(stderr, "# %s\n", train_err.text);
	told_now("'holder' 167772160");
	/* less goes, and all of it once the other one is gone */
	TRAIN_OK(shardd_alloc(c, 8 * MIB, &buffer, &at, &train_err));
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	stage_set(&m->over, 1);
	TRAINER_AWAIT(atomic_load(&m->held) == 2, 60);
	TRAINER_AWAIT((r = shardd_alloc(c, 120 * MIB, &buffer, &at, &train_err)) !=
			      -SHARDD_RESOURCE_EXHAUSTED,
		      30);
	TRAIN_OK(r);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	train_leave(c);
	return 0;
}

Test(gpu_bad, who_holds_the_memory_is_named)
{
	struct memory *m = trainer_shared(sizeof(*m));
	pid_t holder;

	gpu_set("SHARDD_SIM_MEMORY", "268435456");
	gpu_begin(1, NULL);
	holder = trainer_start(&trainfix, "holder", 0, 1, holds_most, m);
	AWAIT(atomic_load(&m->held) == 1, 30);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "more", 0, 1, wants_more, m), 60), 0);
	cr_assert_eq(trainer_wait(holder, 30), 0);
	gpu_end();
}

/* Somebody else has taken it: the driver refuses what the accounts would allow. */
static int is_refused_once(const struct trainer *t)
{
	shardd_client *c = gpu_join(t, 0);
	unsigned refused = 0;

	for (unsigned i = 0; i < 40; i++) {
		uint64_t buffer;
		void *at;
		int r = shardd_alloc(c, (8 + 2 * i) * MIB, &buffer, &at, &train_err);

		if (r == 0) {
			TRAIN_OK(shardd_free(c, buffer, &train_err));
			continue;
		}
		TRAIN_FAILS(r, SHARDD_RESOURCE_EXHAUSTED);
		fprintf(stderr, "# %s\n", train_err.text);
		refused++;
	}
	TRAINER_CHECK(refused == 1);
	train_leave(c);
	return 0;
}

Test(gpu_bad, the_driver_has_no_memory_left)
{
	gpu_set("SHARDD_SIM_FAIL", "cuMemCreate:20:2");
	gpu_begin(1, NULL);
	cr_assert_eq(
		trainer_wait(trainer_start(&trainfix, "once", 0, 1, is_refused_once, NULL), 60), 0);
	gpu_end();
}
