/*
 * The daemon dies under shardd-holder, and trainers connect again in the same process: every op ends
 * once, not before the process is connected again; memory stays where it is; training goes on bit
 * for bit. Deaths while a step is being applied are not among these.
 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "failfix.h"
#include "fdcheck.h"
#include "gpufix.h"
#include "rawsock.h"
#include "stopped.h"
#include "trainunits.h"

static void begin(void)
{
	fdcheck_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void end(void)
{
	if (trainfix.pid)
		daemonfix_stop(&trainfix);
	fdcheck_end();
}

TestSuite(reconnect, .init = begin, .fini = end, .timeout = 120);

enum { MAX_WORLD = 4, STEPS = 6 };

/* ------------------------------------------------------------------- what is told */

struct seen {
	atomic_uint n[SHARDD_CONNECTION_GIVEN_UP + 1];
	atomic_uint last;
};

static void on_connection(void *data, const struct shardd_connection_event *e)
{
	struct seen *s = data;

	TRAINER_CHECK(e->size == sizeof(*e) && e->text && *e->text);
	atomic_fetch_add(&s->n[e->state], 1);
	atomic_store(&s->last, e->state);
}

static shardd_client *open_client(const struct trainer *t, uint32_t ms, struct seen *s)
{
	const struct shardd_options options = { .size = sizeof(options),
						.socket = t->socket,
						.reconnect_ms = ms,
						.on_connection = s ? on_connection : NULL,
						.connection_data = s };
	shardd_client *c = NULL;

	TRAIN_OK(shardd_connect(&options, &c, &train_err));
	return c;
}

/* ------------------------------------------------------------------- training */

struct play {
	unsigned world;
	bool calm; /* nobody dies */
	bool one;  /* device: a gather hands out the parameters themselves */
	stage at[MAX_WORLD];
	stage go;
	float params[TRAINUNITS][TRAINUNITS_ELEMENTS];
};

static unsigned count_mappings(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[512];
	unsigned n = 0;

	while (f && fgets(line, sizeof(line), f))
		n += strstr(line, "memfd:") != NULL;
	TRAINER_CHECK(f && fclose(f) == 0);
	return n;
}

/* The parameters of the unit without a cast are where they were, if they are not gathered from several
 * devices, and what they were. */
static void check_address(shardd_client *c, const struct play *p, shardd_unit u, const void **at,
			  const float *want)
{
	struct shardd_result r;
	shardd_ticket t;

	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), &t, &train_err));
	TRAIN_OK(shardd_wait(c, t, -1, &r, &train_err));
	TRAINER_CHECK(!p->one || !*at || *at == r.data);
	*at = r.data;
	if (want && train_on_host())
		TRAIN_SAME(r.data, want, TRAINUNITS_ELEMENTS * sizeof(float));
	TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &t, &train_err));
	TRAIN_OK(shardd_wait(c, t, -1, NULL, &train_err));
}

/* The daemon dies when all have committed @step and, with odd steps, have reduced half of the next
 * one. */
static void survive(shardd_client *c, const struct trainer *t, struct play *p,
		    const shardd_unit *units, uint64_t step, uint64_t epoch)
{
	char words[64];

	if (step % 2)
		trainunits_reduce(c, units, t->rank, step + 100);
	stage_set(&p->at[t->rank], (unsigned)step);
	TRAINER_AWAIT(atomic_load(&p->go) >= step, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	told_now("was restarted");
	snprintf(words, sizeof(words), "epoch %llu has ended: join again",
		 (unsigned long long)epoch);
	told_now(words);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	told_now(words);
	TRAIN_FAILS(shardd_leave(c, &train_err), SHARDD_ABORTED);
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = open_client(t, 60000, NULL);
	struct shardd_membership m = train_join_as(c, t, SHARDD_EPHEMERAL);
	shardd_unit units[TRAINUNITS];
	float before[TRAINUNITS_ELEMENTS];
	const void *at = NULL;
	unsigned fds = 0, mappings = 0;

	trainunits_register(c, units);
	trainunits_init(c, units);
	for (uint64_t step = 1; step <= STEPS; step++) {
		trainunits_step(c, units, t->rank, step);
		for (unsigned i = 0; i < TRAINUNITS; i++)
			train_params(c, units[i], before,
				     i == 2 ? TRAINUNITS_ELEMENTS * 2 : TRAINUNITS_ELEMENTS * 4);
		if (p->calm || step == STEPS)
			continue;
		train_params(c, units[0], before, sizeof(before));
		check_address(c, p, units[0], &at, before);
		if (step == 3) {
			fds = fdcheck_count();
			mappings = count_mappings();
		} else if (step > 3) { /* as before the first, and the second death */
			TRAINER_CHECK(fdcheck_count() == fds);
			TRAINER_CHECK(count_mappings() == mappings);
		}
		survive(c, t, p, units, step, m.epoch);
		m = train_join_as(c, t, SHARDD_EPHEMERAL);
		TRAINER_CHECK(trainunits_is_at(&m, t->rank, step));
		trainunits_register(c, units);
		check_address(c, p, units[0], &at, before);
	}
	if (t->rank == 0)
		trainunits_read(c, units, p->params);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static bool all_at(struct play *p, unsigned step)
{
	for (unsigned r = 0; r < p->world; r++)
		if (atomic_load(&p->at[r]) < step)
			return false;
	return true;
}

static void play(struct play *p, unsigned world)
{
	static const int signals[] = { SIGKILL, SIGTERM, SIGUSR2, SIGABRT, SIGKILL };
	struct play *calm = trainer_shared(sizeof(*calm));
	pid_t pids[MAX_WORLD];

	p->world = world;
	p->one = train_on_host() || gpu_count() == 1;
	*calm = (struct play){ .world = world, .calm = true };
	for (uint32_t r = 0; r < world; r++)
		pids[r] = trainer_start(&trainfix, "dies", r, world, trains, p);
	for (unsigned step = 1; step < STEPS; step++) {
		AWAIT(all_at(p, step), 60);
		daemonfix_replace_daemon(&trainfix, signals[step - 1]);
		stage_set(&p->go, step);
	}
	for (unsigned r = 0; r < world; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	trainers_run(&trainfix, "calm", world, trains, calm, 60);
	for (unsigned i = 0; i < TRAINUNITS; i++)
		cr_expect_arr_eq(p->params[i], calm->params[i], sizeof(p->params[i]),
				 "unit %u differs", i);
	cr_expect_neq(p->params[0][0], 0, "something was trained");
	AWAIT(daemonfix_bytes(&trainfix) == 0, 10);
}

/* World size, and whether ops go over the ring. */
struct way {
	unsigned world;
	bool ring;
};

ParameterizedTestParameters(reconnect, training_goes_on_bit_for_bit)
{
	static struct way ways[] = { { 1, true },  { 2, true },  { 4, true },
				     { 1, false }, { 2, false }, { 4, false } };

	return cr_make_param_array(struct way, ways, ARRAY_SIZE(ways));
}

ParameterizedTest(struct way *way, reconnect, training_goes_on_bit_for_bit)
{
	setenv("SHARDD_RING", way->ring ? "on" : "off", 1);
	play(trainer_shared(sizeof(struct play)), way->world);
}

/* ------------------------------------------------------------------- ops in flight */

/* ------------------------------------------------------------------- how soon it is seen */

enum { SOON_ROUNDS = 5, SOON_MS = 60 };

struct soon {
	stage at, go, closed;
	pid_t daemon;
	uint64_t lost_us;
	uint64_t closed_us; /* when a plain socket of the test saw the same end */
};

static void on_soon(void *data, const struct shardd_connection_event *e)
{
	struct soon *s = data;

	if (e->state == SHARDD_CONNECTION_LOST)
		s->lost_us = clock_now_us();
}

/* Rank 0 kills the daemon as it begins to wait for rank 1. Return: how many ms later than a process that
 * sleeps in poll for it knows, since a killed daemon needs time to be gone. */
static uint64_t soon_once(shardd_client *c, struct soon *s, unsigned round)
{
	shardd_ticket t;

	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &t, &train_err));
	stage_set(&s->at, round);
	TRAINER_AWAIT(atomic_load(&s->go) >= round, 60);
	TRAINER_CHECK(kill(s->daemon, SIGKILL) == 0);
	TRAIN_FAILS(shardd_wait(c, t, -1, NULL, &train_err), SHARDD_ABORTED);
	TRAINER_AWAIT(atomic_load(&s->closed) >= round, 60);
	return s->lost_us < s->closed_us ? 0 : (s->lost_us - s->closed_us) / 1000;
}

static int sees_soon(const struct trainer *t)
{
	struct soon *s = t->arg;
	const struct shardd_options options = { .size = sizeof(options),
						.socket = t->socket,
						.reconnect_ms = 30000,
						.on_connection = t->rank ? NULL : on_soon,
						.connection_data = s };
	unsigned late = 0; /* rounds; one may be late on a machine with much to do */
	shardd_client *c = NULL;

	TRAIN_OK(shardd_connect(&options, &c, &train_err));
	for (unsigned round = 1; round <= SOON_ROUNDS; round++) {
		train_join_as(c, t, SHARDD_KEEP);
		if (t->rank == 0) {
			late += soon_once(c, s, round) >= SOON_MS;
			continue;
		}
		TRAINER_AWAIT(atomic_load(&s->at) > round, 60);
	}
	TRAINER_CHECK(late <= SOON_ROUNDS / 2);
	if (t->rank == 0)
		stage_set(&s->at, SOON_ROUNDS + 1);
	shardd_close(c);
	return 0;
}

/* A thread that sleeps for an answer looked ten times a second whether the daemon is there: that was
 * half of the time until the next one had the trainer. */
Test(reconnect, a_sleeping_trainer_sees_the_end_soon)
{
	struct soon *s = trainer_shared(sizeof(*s));
	pid_t pids[2];
	int watch;

	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "soon", r, 2, sees_soon, s);
	for (unsigned round = 1; round <= SOON_ROUNDS; round++) {
		AWAIT(atomic_load(&s->at) == round, 60);
		s->daemon = daemonfix_daemon(&trainfix);
		watch = rawsock_connect(trainfix.socket);
		cr_assert_geq(watch, 0);
		stage_set(&s->go, round);
		cr_assert(rawsock_closed(watch, 60));
		s->closed_us = clock_now_us();
		stage_set(&s->closed, round);
		close(watch);
	}
	for (uint32_t r = 0; r < 2; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
}

/* The table of descriptors grew when the first trainer connected, which took 10 ms. */
Test(reconnect, the_daemon_begins_with_room_for_descriptors)
{
	char path[64], line[256];
	unsigned long room = 0;
	struct rlimit limit;
	FILE *f;

	cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
	snprintf(path, sizeof(path), "/proc/%d/status", (int)daemonfix_daemon(&trainfix));
	f = fopen(path, "re");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "FDSize: %lu", &room) == 1)
			break;
	cr_assert(f && fclose(f) == 0);
	cr_expect_geq(room, limit.rlim_max < 65536 ? limit.rlim_max : 65536);
}

struct waits {
	stage at[2], go;
	stage dead, waited; /* rank 0 has waited while no daemon was there */
	struct seen seen[2];
	bool by_descriptor;
};

/* Until an op has ended, without blocking. */
static int poll_for(shardd_client *c, shardd_ticket t)
{
	struct pollfd p = { .events = POLLIN };
	uint64_t n;
	int r;

	TRAIN_OK(shardd_completion_fd(c, &p.fd, &train_err));
	for (;;) {
		r = shardd_wait(c, t, 0, NULL, &train_err);
		if (r != -SHARDD_DEADLINE_EXCEEDED || train_err.native != EAGAIN)
			return r;
		TRAINER_CHECK(poll(&p, 1, 30000) == 1);
		TRAINER_CHECK(read(p.fd, &n, sizeof(n)) == sizeof(n));
	}
}

/* Rank 0 waits for rank 1, which never comes, and holds a gather meanwhile. */
static int waits(const struct trainer *t)
{
	struct waits *w = t->arg;
	struct seen *s = &w->seen[t->rank];
	shardd_client *c = open_client(t, 30000, s);
	struct shardd_membership m = train_join_as(c, t, SHARDD_EPHEMERAL), again;
	shardd_unit u = train_zero_unit(c, "u", TRAINUNITS_ELEMENTS, NULL);
	struct shardd_result r;
	shardd_ticket gather, barrier[2];
	size_t which;

	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), &gather, &train_err));
	TRAIN_OK(shardd_wait(c, gather, -1, &r, &train_err));
	for (unsigned i = 0; t->rank == 0 && i < 2; i++)
		TRAIN_OK(
			shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &barrier[i], &train_err));
	stage_set(&w->at[t->rank], 1);
	if (t->rank == 0 && w->by_descriptor) {
		TRAINER_CHECK(poll_for(c, barrier[1]) == -SHARDD_ABORTED);
	} else if (t->rank == 0) {
		TRAINER_AWAIT(atomic_load(&w->dead) == 1, 60);
		TRAIN_FAILS(shardd_wait(c, barrier[0], 50, NULL, &train_err),
			    SHARDD_DEADLINE_EXCEEDED);
		stage_set(&w->waited, 1);
		TRAIN_OK(shardd_wait_any(c, barrier, 2, -1, &which, &train_err));
		TRAIN_FAILS(shardd_wait(c, barrier[1], -1, NULL, &train_err), SHARDD_ABORTED);
	}
	TRAINER_AWAIT(atomic_load(&w->go) == 1, 60);
	if (t->rank == 0) {
		TRAINER_CHECK(atomic_load(&s->n[SHARDD_CONNECTION_BACK]) > 0);
		TRAIN_FAILS(shardd_wait(c, barrier[0], 0, NULL, &train_err), SHARDD_ABORTED);
		told_now("join again");
		TRAIN_FAILS(shardd_wait(c, barrier[0], 0, NULL, &train_err), /* it ended once */
			    SHARDD_INVALID_ARGUMENT);
	} else { /* it was idle */
		TRAINER_CHECK(atomic_load(&s->last) == 0);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	}
	if (train_on_host())
		TRAINER_CHECK(((const float *)r.data)[TRAINUNITS_ELEMENTS - 1] ==
			      0); /* still mapped */
	again = train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(again.epoch > m.epoch && again.has_commit && again.step == 1);
	TRAINER_CHECK(atomic_load(&s->n[SHARDD_CONNECTION_LOST]) ==
		      atomic_load(&s->n[SHARDD_CONNECTION_BACK]));
	TRAINER_CHECK(atomic_load(&s->n[SHARDD_CONNECTION_GIVEN_UP]) == 0);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* The next daemon is not there before rank 0 has waited. */
static void play_long_death(struct waits *w)
{
	pid_t old = daemonfix_daemon(&trainfix);

	stopped_stop(trainfix.pid);
	kill(old, SIGKILL);
	stage_set(&w->dead, 1);
	AWAIT(w->by_descriptor || atomic_load(&w->waited) == 1, 60);
	kill(trainfix.pid, SIGCONT);
	AWAIT(daemonfix_daemon(&trainfix) != old, 30);
}

/* @deaths: of one daemon after the other, without waiting for trainers. */
static void play_waits(struct waits *w, unsigned deaths)
{
	char state[32];
	pid_t pids[2];

	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "waits", r, 2, waits, w);
	AWAIT(atomic_load(&w->at[0]) && atomic_load(&w->at[1]), 30);
	AWAIT(fail_op_text(&trainfix, "waits", 0, "Barrier", "state", state, sizeof(state)), 30);
	play_long_death(w);
	for (unsigned i = 1; i < deaths; i++)
		daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&w->go, 1);
	for (unsigned r = 0; r < 2; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
}

Test(reconnect, ops_in_flight_end_once_when_the_connection_is_back)
{
	play_waits(trainer_shared(sizeof(struct waits)), 1);
}

Test(reconnect, several_deaths_in_a_row_are_one_outage_or_more)
{
	play_waits(trainer_shared(sizeof(struct waits)), 4);
}

Test(reconnect, a_completion_descriptor_is_readable_when_it_is_over)
{
	struct waits *w = trainer_shared(sizeof(*w));

	w->by_descriptor = true;
	play_waits(w, 1);
}

/* ------------------------------------------------------------- answers of the dead daemon */

enum { GATHER, CAST, GRADIENT, OTHER, N_ANSWERED };

/* What the answers name is not the next daemon's memory, or other memory there. */
static void answered_all(shardd_client *c, const shardd_unit *u, shardd_ticket *t)
{
	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u[0]), &t[GATHER],
				      &train_err));
	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u[2]), &t[CAST],
				      &train_err));
	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u[1]), &t[GRADIENT],
					&train_err));
	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u[0]), &t[OTHER],
					&train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* they have been answered */
}

static void answered_expect_ended(shardd_client *c, shardd_ticket t)
{
	TRAIN_FAILS(shardd_wait(c, t, -1, NULL, &train_err), SHARDD_ABORTED);
	told_now("was restarted");
}

static int answered(const struct trainer *t)
{
	struct waits *w = t->arg;
	shardd_client *c = open_client(t, 30000, NULL);
	shardd_unit u[TRAINUNITS];
	shardd_ticket tickets[N_ANSWERED], again, some[2];
	size_t which;

	train_join_as(c, t, SHARDD_EPHEMERAL);
	trainunits_register(c, u);
	trainunits_init(c, u);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	answered_all(c, u, tickets);
	stage_set(&w->at[0], 1);
	TRAINER_AWAIT(atomic_load(&w->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	answered_expect_ended(c, tickets[GATHER]);
	answered_expect_ended(c, tickets[GRADIENT]);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	trainunits_register(c, u);
	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u[1]), &again,
					&train_err));
	TRAIN_OK(shardd_wait(c, again, -1, NULL, &train_err));
	some[0] = tickets[CAST];
	some[1] = tickets[OTHER];
	TRAIN_OK(shardd_wait_any(c, some, 2, -1, &which, &train_err));
	answered_expect_ended(c, tickets[CAST]);
	answered_expect_ended(c, tickets[OTHER]);
	train_leave(c);
	return 0;
}

Test(reconnect, answers_of_the_dead_daemon_name_no_memory)
{
	struct waits *w = trainer_shared(sizeof(*w));
	pid_t pid = trainer_start(&trainfix, "answered", 0, 1, answered, w);

	AWAIT(atomic_load(&w->at[0]), 30);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&w->go, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
}

/* ------------------------------------------------------------------- given up */

struct vain {
	stage at, go;
	uint32_t ms;
	enum shardd_code code;
	const char *words;
	struct seen seen;
};

static int in_vain(const struct trainer *t)
{
	struct vain *v = t->arg;
	shardd_client *c = open_client(t, v->ms, &v->seen);
	bool off = v->ms == SHARDD_NO_RECONNECT;

	train_join_as(c, t, SHARDD_KEEP);
	stage_set(&v->at, 1);
	TRAINER_AWAIT(atomic_load(&v->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), v->code);
	told_now(v->words);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), v->code); /* for good */
	TRAINER_CHECK(atomic_load(&v->seen.last) == (off ? 0 : SHARDD_CONNECTION_GIVEN_UP));
	TRAINER_CHECK(atomic_load(&v->seen.n[SHARDD_CONNECTION_GIVEN_UP]) == !off);
	shardd_close(c);
	return 0;
}

static bool has_ended(pid_t pid)
{
	char path[64], text[512] = "";
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	f = fopen(path, "re");
	if (!f)
		return true;
	if (!fgets(text, sizeof(text), f))
		text[0] = 0;
	fclose(f);
	return strstr(text, ") Z ") || strstr(text, ") X ");
}

static void kill_all(void)
{
	pid_t daemon = daemonfix_daemon(&trainfix);

	daemonfix_may_end(&trainfix);
	kill(trainfix.pid, SIGKILL);
	trainer_wait(trainfix.pid, 30);
	kill(daemon, SIGKILL);
	AWAIT(has_ended(daemon), 30);
	trainfix.pid = 0;
}

static pid_t start_in_vain(struct vain *v)
{
	pid_t pid = trainer_start(&trainfix, "vain", 0, 1, in_vain, v);

	AWAIT(atomic_load(&v->at) == 1, 30);
	return pid;
}

Test(reconnect, it_is_given_up_after_its_time)
{
	struct vain *v = trainer_shared(sizeof(*v));
	pid_t pid;

	*v = (struct vain){ .ms = 300, .code = SHARDD_UNAVAILABLE };
	v->words = "did not come back within 300 ms";
	pid = start_in_vain(v);
	kill_all();
	stage_set(&v->go, 1);
	cr_expect_eq(trainer_wait(pid, 60), 0);
	unlink(trainfix.socket);
	unlink(trainfix.log);
	rmdir(trainfix.dir);
}

Test(reconnect, it_can_be_turned_off)
{
	struct vain *v = trainer_shared(sizeof(*v));
	pid_t pid;

	*v = (struct vain){ .ms = SHARDD_NO_RECONNECT, .code = SHARDD_UNAVAILABLE };
	v->words = "closed the connection";
	pid = start_in_vain(v);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&v->go, 1);
	cr_expect_eq(trainer_wait(pid, 60), 0);
}

Test(reconnect, a_daemon_without_the_state_is_data_loss)
{
	struct vain *v = trainer_shared(sizeof(*v));
	pid_t pid, daemon;

	*v = (struct vain){ .ms = 30000, .code = SHARDD_DATA_LOSS };
	v->words = "the state of job 'vain' is gone";
	pid = start_in_vain(v);
	daemon = daemonfix_daemon(&trainfix);
	stopped_stop(trainfix.pid); /* it starts none */
	kill(daemon, SIGKILL);
	AWAIT(has_ended(daemon), 30);
	daemonfix_restart(&trainfix, NULL);
	stage_set(&v->go, 1);
	cr_expect_eq(trainer_wait(pid, 60), 0);
}

/* ------------------------------------------------------------- between two connections */

/* In front of the daemon: what connects here is connected there. Before the second connection, the local
 * channel of a session, another daemon comes. */
struct front {
	stage holds, go;
	char path[128];
	const char *socket;
	int fd;
};

struct front_pair {
	int a, b;
};

static bool front_pass_on(int from, int to)
{
	char data[4096];
	ssize_t n = read(from, data, sizeof(data));

	return n > 0 && rawsock_send(to, data, (size_t)n) == (size_t)n;
}

static void *front_pump(void *arg)
{
	struct front_pair *p = arg;
	struct pollfd of[] = { { .fd = p->a, .events = POLLIN }, { .fd = p->b, .events = POLLIN } };
	bool open = true;

	while (open && poll(of, 2, -1) > 0) {
		open = !of[0].revents || front_pass_on(p->a, p->b);
		open = open && (!of[1].revents || front_pass_on(p->b, p->a));
	}
	fd_close(p->a);
	fd_close(p->b);
	free(p);
	return NULL;
}

static void *front_main(void *arg)
{
	struct front *w = arg;

	for (unsigned i = 0;; i++) {
		struct front_pair *p = malloc(sizeof(*p));
		pthread_t thread;

		CHECK(p);
		p->a = accept(w->fd, NULL, NULL);
		if (p->a < 0) {
			free(p);
			return NULL;
		}
		if (i == 1) {
			stage_set(&w->holds, 1);
			TRAINER_AWAIT(atomic_load(&w->go) == 1, 60);
		}
		p->b = rawsock_connect(w->socket);
		TRAINER_CHECK(p->b >= 0);
		TRAINER_CHECK(pthread_create(&thread, NULL, front_pump, p) == 0);
		pthread_detach(thread);
	}
}

static int connects_to_two(const struct trainer *t)
{
	struct shardd_options options = { .size = sizeof(options) };
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	struct front *w = t->arg;
	shardd_client *c = NULL;
	pthread_t thread;

	setenv("SHARDD_RING", "off", 1); /* no descriptors come this way */
	w->socket = t->socket;
	snprintf(w->path, sizeof(w->path), "%s.front", t->socket);
	strcpy(sa.sun_path, w->path);
	w->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	TRAINER_CHECK(bind(w->fd, (struct sockaddr *)&sa, sizeof(sa)) == 0);
	TRAINER_CHECK(listen(w->fd, 8) == 0);
	TRAINER_CHECK(pthread_create(&thread, NULL, front_main, w) == 0);
	options.socket = w->path;
	TRAIN_OK(shardd_connect(&options, &c, &train_err));
	shardd_close(c);
	shutdown(w->fd, SHUT_RDWR);
	pthread_join(thread, NULL);
	fd_close(w->fd);
	unlink(w->path);
	return 0;
}

/* The token is of a session that the first one had: the second one does not know it. */
Test(reconnect, a_daemon_that_ends_while_it_is_connected_to_has_a_successor)
{
	struct front *w = trainer_shared(sizeof(*w));
	pid_t pid = trainer_start(&trainfix, "front", 0, 1, connects_to_two, w);

	AWAIT(atomic_load(&w->holds) == 1, 30);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&w->go, 1);
	cr_expect_eq(trainer_wait(pid, 60), 0);
}
