/*
 * The daemon dies, is replaced and is told to end, with shardd-holder: parameters, optimizer state,
 * commits and blobs are the next one's, bit for bit, and what was freed does not come back. A step that
 * is half applied is completed. Trainers connect again themselves.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "failfix.h"
#include "fdcheck.h"
#include "gpufix.h"
#include "stopped.h"
#include "trainunits.h"

static void begin(void)
{
	fdcheck_begin();
	setenv("SHARDD_RECONNECT_MS", "0", 1); /* test_reconnect.c has the other case */
	daemonfix_start_held(&trainfix, NULL);
}

static void end(void)
{
	if (trainfix.pid)
		daemonfix_stop(&trainfix);
	fdcheck_end();
}

TestSuite(daemon_death, .init = begin, .fini = end, .timeout = 120);

enum { WORLD = 2, STEPS = 6 };

struct play {
	stage at[WORLD]; /* the last commit of each rank */
	stage go;        /* commits that they may make */
	float params[2][TRAINUNITS][TRAINUNITS_ELEMENTS];
	uint64_t epochs[STEPS + 1];
};

struct run {
	struct play *play;
	bool calm; /* nobody dies */
};

static shardd_client *connect_again(const struct trainer *t)
{
	const struct shardd_options options = { .size = sizeof(options),
						.socket = t->socket,
						.connect_timeout_ms = 30000 };
	shardd_client *c = NULL;

	TRAIN_OK(shardd_connect(&options, &c, &train_err));
	return c;
}

/* Until the call is told that the daemon has died. */
static shardd_client *lose_daemon(shardd_client *c, const struct trainer *t)
{
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_UNAVAILABLE);
	shardd_close(c);
	return connect_again(t);
}

static int trains(const struct trainer *t)
{
	struct run *run = t->arg;
	struct play *p = run->play;
	shardd_client *c = train_connect(t);
	struct shardd_membership m = train_join_as(c, t, SHARDD_EPHEMERAL);
	shardd_unit units[TRAINUNITS];

	trainunits_register(c, units);
	trainunits_init(c, units);
	for (uint64_t step = 1; step <= STEPS; step++) {
		trainunits_step(c, units, t->rank, step);
		if (run->calm || step == STEPS)
			continue;
		stage_set(&p->at[t->rank], (unsigned)step);
		TRAINER_AWAIT(atomic_load(&p->go) >= step, 60);
		c = lose_daemon(c, t);
		m = train_join_as(c, t, SHARDD_EPHEMERAL);
		TRAINER_CHECK(trainunits_is_at(&m, t->rank, step));
		p->epochs[step] = m.epoch;
		trainunits_register(c, units);
	}
	if (t->rank == 0)
		trainunits_read(c, units, p->params[run->calm]);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static void start_all(const char *job, struct run *run, pid_t *pids)
{
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, job, r, WORLD, trains, run);
}

static bool all_at(struct play *p, unsigned step)
{
	for (unsigned r = 0; r < WORLD; r++)
		if (atomic_load(&p->at[r]) < step)
			return false;
	return true;
}

/* Every death is at another place: SIGKILL, SIGTERM as a service manager's restart, a new version
 * by the holder. */
Test(daemon_death, training_goes_on_bit_for_bit)
{
	static const int signals[] = { SIGKILL, SIGTERM, SIGUSR2, SIGABRT, SIGKILL };
	struct run *runs = trainer_shared(2 * sizeof(*runs));
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pids[WORLD];

	runs[0] = (struct run){ p, false };
	runs[1] = (struct run){ p, true };
	start_all("dies", &runs[0], pids);
	for (unsigned step = 1; step < STEPS; step++) {
		AWAIT(all_at(p, step), 60);
		daemonfix_replace_daemon(&trainfix, signals[step - 1]);
		stage_set(&p->go, step);
	}
	for (unsigned r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	for (unsigned step = 2; step < STEPS; step++)
		cr_expect_gt(p->epochs[step], p->epochs[step - 1]);
	trainers_run(&trainfix, "calm", WORLD, trains, &runs[1], 60);
	for (unsigned i = 0; i < TRAINUNITS; i++) {
		cr_expect_arr_eq(p->params[0][i], p->params[1][i], sizeof(p->params[0][i]),
				 "unit %u differs", i);
		cr_expect_neq(p->params[0][i][0], 0, "something was trained");
	}
	AWAIT(!fail_has_job(&trainfix, "dies"), 10); /* it was ephemeral */
	AWAIT(daemonfix_bytes(&trainfix) == 0, 10);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_not(fail_has_job(&trainfix, "dies"));
	cr_expect_eq(daemonfix_bytes(&trainfix), 0, "what was freed does not come back");
}

/* ------------------------------------------------------------------- what it has */

static int keeps(const struct trainer *t)
{
	static const uint32_t first[] = { 0 };
	shardd_client *c = train_connect(t);
	shardd_unit units[TRAINUNITS];
	shardd_group g;

	train_join_as(c, t, SHARDD_KEEP);
	trainunits_register(c, units);
	for (unsigned i = 0; i < TRAINUNITS; i++)
		TRAIN_OK(shardd_init_seed(c, units[i], 1, &train_err));
	TRAIN_OK(shardd_group_create(c, "first", first, 1, &g, &train_err));
	trainunits_step(c, units, t->rank, 1);
	train_leave(c);
	return 0;
}

static json_t *status(void)
{
	static const char *const args[] = { "status", NULL };

	return daemonfix_ctl(&trainfix, args);
}

static uint64_t number(const char *key)
{
	json_t *s = status();
	uint64_t n = (uint64_t)json_integer_value(json_object_get(s, key));

	json_decref(s);
	return n;
}

Test(daemon_death, jobs_of_nobody_stay)
{
	static const char *const delete[] = { "job", "delete", "two", NULL };
	uint64_t bytes, stored, others;
	char out[512], words[64];

	trainers_run(&trainfix, "one", WORLD, keeps, NULL, 60);
	trainers_run(&trainfix, "two", WORLD, keeps, NULL, 60);
	daemonfix_replace_daemon(&trainfix, SIGKILL); /* pools are the first daemon's */
	bytes = daemonfix_bytes(&trainfix);
	cr_expect_gt(bytes, 0);
	stored = number("store_used");
	cr_expect_gt(stored, 5);
	cr_expect_gt(number("store_max"), stored);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_eq(daemonfix_bytes(&trainfix), bytes);
	cr_expect_eq(number("store_used"), stored);
	cr_expect_eq(fail_job_number(&trainfix, "one", "step"), 1);
	cr_expect(fail_job_is(&trainfix, "two", "IDLE"));
	cr_assert_eq(daemonfix_ctl_text(&trainfix, delete, out, sizeof(out)), 0, "%s", out);
	AWAIT(daemonfix_bytes(&trainfix) == bytes / 2, 10);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect(fail_has_job(&trainfix, "one"));
	cr_expect_not(fail_has_job(&trainfix, "two"));
	cr_expect_eq(daemonfix_bytes(&trainfix), bytes / 2);
	/* beside the slabs, the journal's files, the redo file, the history, and two pages of each GPU */
	others = train_on_host() ? 4 : 4 + 2 * gpu_count();
	AWAIT(number("store_used") == (stored - others) / 2 + others, 10);
	snprintf(words, sizeof(words), "job restored job=%d/one", (int)getuid());
	cr_expect(fail_logged(&trainfix, words));
}

/* The holder ends with the daemon, and says so. */
Test(daemon_death, told_to_end_it_ends_for_good)
{
	int code;

	trainers_run(&trainfix, "one", WORLD, keeps, NULL, 60);
	daemonfix_may_end(&trainfix);
	kill(trainfix.pid, SIGTERM);
	code = trainer_wait(trainfix.pid, 30);
	cr_expect_eq(code, 0);
	cr_expect(fail_logged(&trainfix, "the daemon has ended with exit code 0"));
	cr_expect_not(fail_logged(&trainfix, "left for the next daemon"));
	trainfix.pid = 0;
	unlink(trainfix.log);
	rmdir(trainfix.dir);
}

/* At any instant of the next daemon's start. */
Test(daemon_death, told_to_end_while_the_next_one_starts)
{
	enum { INSTANTS = 12, APART_US = 2000 };

	for (unsigned i = 0; i < INSTANTS; i++) {
		struct timespec instant = { .tv_nsec = (long)i * APART_US * 1000 };
		int code;

		if (i)
			daemonfix_start_held(&trainfix, NULL);
		trainers_run(&trainfix, "one", WORLD, keeps, NULL, 60);
		daemonfix_may_end(&trainfix);
		kill(daemonfix_daemon(&trainfix), SIGKILL);
		nanosleep(&instant, NULL);
		kill(trainfix.pid, SIGTERM);
		code = trainer_wait(trainfix.pid, 30);
		/* 1: the holder was told before it knew of the death */
		cr_expect_eq(code == 0, fail_logged(&trainfix, "it is started again"),
			     "%u us after its start", i * APART_US);
		trainfix.pid = 0;
		unlink(trainfix.log);
		rmdir(trainfix.dir);
	}
}

/* A daemon that dies at once again and again is started again, and nothing is lost. */
Test(daemon_death, several_in_a_row)
{
	trainers_run(&trainfix, "one", WORLD, keeps, NULL, 60);
	for (unsigned i = 0; i < 10; i++)
		daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_eq(fail_job_number(&trainfix, "one", "step"), 1);
}

/* ------------------------------------------------------ trainers that keep their mappings */

struct keeper_of_maps {
	stage at, go;
};

/* What it has mapped stays as it is, whatever the daemon does with it when it ends. */
static int keeps_mappings(const struct trainer *t)
{
	struct keeper_of_maps *k = t->arg;
	shardd_client *c = train_connect(t), *first;
	float params[TRAINUNITS_ELEMENTS], again[TRAINUNITS_ELEMENTS];
	shardd_unit units[TRAINUNITS];
	const void *mapped;

	train_join_as(c, t, SHARDD_EPHEMERAL);
	trainunits_register(c, units);
	TRAIN_OK(shardd_init_seed(c, units[0], 7, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	train_params(c, units[0], params, sizeof(params));
	TRAIN_OK(shardd_gather(c, units[0], &mapped, &train_err));
	for (unsigned i = 1; i <= 3; i++) {
		stage_set(&k->at, i);
		TRAINER_AWAIT(atomic_load(&k->go) == i, 60);
		if (train_on_host())
			TRAIN_SAME(mapped, params, sizeof(params));
	}
	first = c; /* not closed: its mappings stay */
	c = connect_again(t);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	trainunits_register(c, units);
	train_params(c, units[0], again, sizeof(again));
	TRAIN_SAME(again, params, sizeof(params));
	train_leave(c);
	shardd_close(first);
	return 0;
}

Test(daemon_death, memory_that_is_mapped_elsewhere_keeps_its_contents)
{
	static const int signals[] = { SIGTERM, SIGUSR2, SIGKILL };
	struct keeper_of_maps *k = trainer_shared(sizeof(*k));
	pid_t pid = trainer_start(&trainfix, "maps", 0, 1, keeps_mappings, k);

	for (unsigned i = 1; i <= ARRAY_SIZE(signals); i++) {
		AWAIT(atomic_load(&k->at) == i, 60);
		daemonfix_replace_daemon(&trainfix, signals[i - 1]);
		stage_set(&k->go, i);
	}
	cr_assert_eq(trainer_wait(pid, 60), 0);
}

/* ---------------------------------------------------------------- a slow keeper */

struct many {
	stage registered, go, leave;
	uint32_t n;
};

static int registers_many(const struct trainer *t)
{
	struct many *m = t->arg;
	shardd_client *c = train_connect(t);

	train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_AWAIT(atomic_load(&m->go) == 1, 60);
	for (uint32_t i = 0; i < m->n; i++) {
		char name[16];

		snprintf(name, sizeof(name), "u%u", i);
		train_register(c, name, 16, NULL);
		stage_set(&m->registered, i + 1);
	}
	TRAINER_AWAIT(atomic_load(&m->leave) == 1, 60);
	train_leave(c);
	return 0;
}

static unsigned queue_length(void)
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/sys/net/unix/max_dgram_qlen", "re");
	unsigned n = 0;

	cr_assert(f && fscanf(f, "%u", &n) == 1);
	return n;
}

/* Has it registered no unit for half a second (a timer, since nothing tells of an absence)? */
static bool stands_still(struct many *m)
{
	unsigned before = atomic_load(&m->registered);
	struct timespec pause = { 0, 500000000 };

	nanosleep(&pause, NULL);
	return before && before == atomic_load(&m->registered);
}

/* Registrations that wait for the holder, which does not read, go on when it reads. */
Test(daemon_death, a_holder_that_is_late_is_waited_for)
{
	struct many *m = trainer_shared(sizeof(*m));
	pid_t pid;

	if (!train_on_host()) {
		train_not_here("so many slabs at once");
		return;
	}
	m->n = queue_length() + 20;
	stage_set(&m->leave, 1);
	pid = trainer_start(&trainfix, "many", 0, 1, registers_many, m);
	stopped_stop(trainfix.pid);
	stage_set(&m->go, 1);
	AWAIT(stands_still(m), 60);
	cr_expect_lt(atomic_load(&m->registered), m->n, "it waits for the holder");
	cr_assert_eq(kill(trainfix.pid, SIGCONT), 0);
	cr_assert_eq(trainer_wait(pid, 60), 0);
}

/* Descriptors of slabs that the process has. */
static unsigned count_slabs(pid_t pid)
{
	char path[64], to[64];
	struct dirent *e;
	unsigned n = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	dir = opendir(path);
	while (dir && (e = readdir(dir))) {
		ssize_t bytes = readlinkat(dirfd(dir), e->d_name, to, sizeof(to) - 1);

		to[bytes > 0 ? bytes : 0] = '\0';
		n += strncmp(to, "/memfd:shardd (", 15) == 0;
	}
	if (dir)
		closedir(dir);
	return n;
}

/* The job is gone, and the holder has not heard of it when the daemon dies. The next daemon used to
 * keep descriptors of that memory until its end. */
Test(daemon_death, memory_that_was_freed_just_before_is_not_kept)
{
	struct many *m = trainer_shared(sizeof(*m));
	pid_t pid;

	if (!train_on_host()) {
		train_not_here("so many slabs at once");
		return;
	}
	m->n = queue_length() + 20;
	stage_set(&m->go, 1);
	pid = trainer_start(&trainfix, "many", 0, 1, registers_many, m);
	AWAIT(atomic_load(&m->registered) == m->n, 60);
	AWAIT(count_slabs(trainfix.pid) >= m->n, 60);
	stopped_stop(trainfix.pid);
	stage_set(&m->leave, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
	AWAIT(!fail_has_job(&trainfix, "many"), 60);
	cr_assert_eq(kill(daemonfix_daemon(&trainfix), SIGKILL), 0);
	cr_assert_eq(kill(trainfix.pid, SIGCONT), 0);
	AWAIT(count_slabs(trainfix.pid) == 0, 60); /* the next daemon has told it */
	cr_expect_eq(count_slabs(daemonfix_daemon(&trainfix)), 0);
}

/* Nice value of thread @id of the process. */
static int nice_of(pid_t pid, const char *id)
{
	char path[64], line[512] = "";
	_cleanup_(fclosep) FILE *f = NULL;
	int nice = INT_MAX;

	snprintf(path, sizeof(path), "/proc/%d/task/%.16s/stat", (int)pid, id);
	f = fopen(path, "re");
	if (!f || !fgets(line, sizeof(line), f))
		return 0; /* it has ended */
	cr_assert_eq(sscanf(strrchr(line, ')') + 1,
			    " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %d",
			    &nice),
		     1, "%s", line);
	return nice;
}

/* A process ends when its last thread has had a processor. One with nice 19 kept dead daemons, and their
 * sockets, for up to 8 s on a busy machine. */
Test(daemon_death, no_thread_has_a_lower_priority)
{
	pid_t pid = daemonfix_daemon(&trainfix);
	char path[64];
	struct dirent *e;
	unsigned threads = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	dir = opendir(path);
	cr_assert(dir);
	while ((e = readdir(dir))) {
		if (e->d_name[0] == '.')
			continue;
		cr_expect_leq(nice_of(pid, e->d_name), getpriority(PRIO_PROCESS, 0), "thread %s",
			      e->d_name);
		threads++;
	}
	closedir(dir);
	cr_expect_gt(threads, 5);
}

/* ------------------------------------------------------------ a step, half applied */

/* Elements: so many that a step takes about as long as the rest of a commit. */
enum { LARGE_HOST = 24 << 20, LARGE_GPU = 64 << 20, ROUNDS = 40, ENOUGH = 3 };

struct large {
	stage committing; /* step that is being committed; that many have ended */
	stage ended;
	stage end; /* train no more */
	stage dies;
	bool plans; /* the optimizer is in backward, and waits for the norm: its gradient is pooled */
	uint64_t steps;
	uint64_t apply_us; /* of an undisturbed commit, about */
	float first[LARGE_GPU], last[LARGE_GPU];
};

static uint64_t large(void)
{
	return train_on_host() ? LARGE_HOST : LARGE_GPU;
}

enum { PERIOD = 97, INVERSE_OF_7 = 14 };

/* i * 7 % PERIOD - 48 at i, of large() + PERIOD. */
static const float *large_values(void)
{
	static float *all;
	uint64_t n = large() + PERIOD;

	if (all)
		return all;
	all = train_alloc(n * sizeof(*all));
	for (uint64_t i = 0; i < n; i++)
		all[i] = (float)(i * 7 % PERIOD) - 48;
	return all;
}

/* (i * 7 + step * 31) % PERIOD - 48 at i: the same numbers, begun elsewhere, in each step. */
static void large_write(shardd_client *c, void *g, uint64_t step)
{
	train_write(c, g, large_values() + step * 31 * INVERSE_OF_7 % PERIOD,
		    large() * sizeof(float));
}

/* Return: false: the daemon died meanwhile. */
static bool large_step(shardd_client *c, shardd_unit u, uint64_t step, struct large *p)
{
	const struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 1 };
	const struct shardd_plan_backward_options plan = { .size = sizeof(plan), .clip = &clip };
	uint64_t began;
	void *g;

	if ((p->plans && shardd_plan_backward(c, &plan, &train_err) < 0) ||
	    shardd_gradient(c, u, &g, &train_err) < 0)
		return false;
	large_write(c, g, step);
	if (shardd_reduce(c, u, &train_err) < 0 ||
	    shardd_step(c, SHARDD_WORLD, NULL, &train_err) < 0)
		return false;
	began = clock_now_us();
	stage_set(&p->committing, (unsigned)step);
	if (shardd_commit(c, step, NULL, 0, &train_err) < 0)
		return false;
	p->apply_us = clock_now_us() - began;
	return true;
}

static shardd_unit large_register(shardd_client *c, const struct large *p)
{
	const struct shardd_unit_spec like = {
		.size = sizeof(like),
		.optimizer = { .kind = SHARDD_ADAMW,
			       .lr = 0.01,
			       .weight_decay = 0.1,
			       .when = p->plans ? SHARDD_OPTIM_IN_BACKWARD : SHARDD_OPTIM_AT_STEP }
	};

	return train_register(c, "large", large(), &like).unit;
}

/* Dies and comes back; a commit whose answer was lost was made, or was not. */
static int trains_large(const struct trainer *t)
{
	struct large *p = t->arg;
	bool dies = atomic_load(&p->dies);
	shardd_client *c = train_connect(t);
	shardd_unit u;

	train_join_as(c, t, SHARDD_EPHEMERAL);
	u = large_register(c, p);
	TRAIN_OK(shardd_init_seed(c, u, 7, &train_err));
	for (uint64_t step = 1; dies ? !atomic_load(&p->end) : step <= p->steps; step++) {
		if (!large_step(c, u, step, p)) {
			struct shardd_membership m;

			shardd_close(c);
			c = connect_again(t);
			m = train_join_as(c, t, SHARDD_EPHEMERAL);
			TRAINER_CHECK(!m.torn && !m.created);
			TRAINER_CHECK(m.step == step || m.step == step - 1);
			step = m.step;
			u = large_register(c, p);
		}
		if (dies)
			p->steps = step;
		stage_set(&p->ended, atomic_load(&p->ended) + 1);
	}
	train_params(c, u, dies ? p->last : p->first, large() * sizeof(float));
	train_leave(c);
	return 0;
}

/* Killed at all times of a commit, most of which is the step. */
static void play_large(bool plans)
{
	struct large *p = trainer_shared(sizeof(*p));
	unsigned round, completed = 0;
	pid_t pid;

	if (!train_on_host() && gpu_simulated()) {
		train_not_here("so large a step: test_gpu_redo has it");
		return;
	}
	p->plans = plans;
	stage_set(&p->dies, 1);
	pid = trainer_start(&trainfix, "dies", 0, 1, trains_large, p);
	AWAIT(atomic_load(&p->ended) >= 2, 60);
	for (round = 0; round < ROUNDS && completed < ENOUGH; round++) {
		unsigned ended = atomic_load(&p->ended), step = atomic_load(&p->committing);
		struct timespec pause;

		AWAIT(atomic_load(&p->committing) != step, 60);
		pause.tv_sec = 0;
		pause.tv_nsec = (long)(p->apply_us * 1000 * (round % 8) / 8);
		nanosleep(&pause, NULL); /* anywhere in it */
		daemonfix_replace_daemon(&trainfix, SIGKILL);
		AWAIT(atomic_load(&p->ended) > ended + 1, 60);
		completed = fail_times_logged(&trainfix, "step completed job=");
	}
	stage_set(&p->end, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
	cr_expect_eq(completed, ENOUGH, "of %u deaths", round);
	stage_set(&p->dies, 0);
	trainers_run(&trainfix, "calm", 1, trains_large, p, 200);
	cr_expect_eq(memcmp(p->first, p->last, large() * sizeof(float)), 0, "after %u deaths",
		     round);
}

Test(daemon_death, a_step_that_is_half_applied_is_completed, .timeout = 300)
{
	play_large(false);
}

/* Its gradient shards come from a pool: they ended with the daemon, and the job was TORN. */
Test(daemon_death, a_step_of_pooled_gradients_is_completed, .timeout = 300)
{
	play_large(true);
}
