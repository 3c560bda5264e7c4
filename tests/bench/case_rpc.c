/* grpc_rtt, attach and status: cases in which little or nothing is calculated. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "status.pb-c.h"

extern char **environ;

/* A unit for cases whose trainers need one but do not use its size. */
#define SMALL_ELEMENTS 1024

/* --------------------------------------------------------------- grpc_rtt */

static void barrier_main(struct trainer *t)
{
	setenv("SHARDD_RING", "off", 1);
	trainer_enter(t);
	for (int i = 10 * TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		struct shardd_error err;
		shardd_ticket ticket;

		sample_begin(s);
		trainer_must(
			t, shardd_submit_barrier(t->client, SHARDD_OPTIONS(barrier), &ticket, &err),
			&err, "barrier");
		trainer_timed_wait(t, s, ticket, NULL, "barrier");
	}
	trainer_leave(t);
}

static void pause_ms(long ms)
{
	struct timespec ts = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

	nanosleep(&ts, NULL);
}

/* Rank 0 asks; the helper is the server. */
static void echo_main(struct trainer *t)
{
	static const char request[20]; /* as long as that of a barrier */
	struct raw_client *client;

	if (t->rank > 0)
		raw_echo_serve(t->crew->socket);
	raw_await_listener(t->crew->socket);
	client = raw_client_new(t->crew->socket);
	for (int i = 10 * TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);

		sample_begin(s);
		raw_call(client, RAW_ECHO, request, sizeof(request), NULL, NULL);
		sample_end(s);
	}
	raw_call(client, RAW_END, request, sizeof(request), NULL, NULL);
	raw_client_free(client);
}

static int echo_run(struct bench *b, unsigned repeat, struct figures *f)
{
	struct crew *crew = crew_new(b, 1, 1, 1, repeat, 1);
	char socket[108];
	int r;

	if (!crew)
		return -1;
	snprintf(socket, sizeof(socket), "%s/echo.sock", b->dir);
	crew->socket = socket;
	r = crew_run(crew, echo_main);
	if (r == 0)
		figures_calls(f, crew, 0, 0, 1);
	crew_free(crew);
	return r;
}

int case_grpc_rtt(struct bench *b, const struct bench_case *c)
{
	unsigned repeat = bench_repeat(b, c);
	struct crew *crew = crew_new(b, 1, 0, 1, repeat, SMALL_ELEMENTS);
	struct figures f = FIGURES_NULL, echo = FIGURES_NULL;
	int r = crew ? crew_run(crew, barrier_main) : -1;

	if (r == 0)
		r = echo_run(b, repeat, &echo);
	if (r == 0) {
		f.name = "grpc_rtt";
		f.ranks = 1;
		figures_calls(&f, crew, 0, 0, 1);
		f.ratio = echo.p50_us / f.p50_us;
		figures_report(b, &f);
		echo.name = "grpc_echo";
		echo.ranks = 1;
		echo.ran_us = -1;
		figures_report(b, &echo);
	}
	crew_free(crew);
	return r;
}

/* ----------------------------------------------------------------- attach */

enum { ATTACH_CONNECT, ATTACH_JOIN, ATTACH_REGISTER, ATTACH_GATHER, ATTACH_TOTAL, ATTACH_N };

/* A new process in each turn. Turn 0 makes the job. On a GPU it has its context before it
 * connects, as a trainer has: that is none of the daemon's. */
static void attach_main(struct trainer *t)
{
	struct sample *s[ATTACH_N];

	for (unsigned k = 0; k < ATTACH_N; k++)
		s[k] = trainer_sample(t, k, (int)t->crew->turn - 1);
	if (t->crew->on_device)
		device_stream(0);
	sample_begin(s[ATTACH_CONNECT]);
	trainer_connect(t);
	sample_end(s[ATTACH_CONNECT]);
	sample_begin(s[ATTACH_JOIN]);
	trainer_join(t, SHARDD_KEEP);
	sample_end(s[ATTACH_JOIN]);
	sample_begin(s[ATTACH_REGISTER]);
	trainer_register(t);
	sample_end(s[ATTACH_REGISTER]);
	sample_begin(s[ATTACH_GATHER]);
	trainer_gather(t);
	sample_end(s[ATTACH_GATHER]);
	s[ATTACH_TOTAL]->begin_ns = s[ATTACH_CONNECT]->begin_ns;
	s[ATTACH_TOTAL]->end_ns = s[ATTACH_GATHER]->end_ns;
	trainer_release(t);
	trainer_leave(t);
}

int case_attach(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "attach_connect", "attach_join", "attach_register",
					     "attach_gather", "attach" };
	struct crew *crew = crew_new(b, 1, 0, ATTACH_N, bench_repeat(b, c), b->o.bytes / 4);

	return figures_turns(b, crew, attach_main, names, ATTACH_N);
}

/* ----------------------------------------------------------------- status */

static void train(struct trainer *t)
{
	uint64_t number = 0;

	trainer_enter(t);
	for (;;) {
		trainer_meet(t);
		if (t->rank == 0)
			t->crew->agreed = atomic_load(&t->crew->stop);
		trainer_meet(t);
		if (t->crew->agreed)
			break;
		trainer_gather(t);
		trainer_gradient(t);
		trainer_release(t);
		trainer_reduce(t);
		trainer_step(t, ++number);
		if (number == 1)
			atomic_fetch_add(&t->crew->ready, 1);
	}
	trainer_leave(t);
}

static void ask_status(struct trainer *t)
{
	struct raw_client *client = raw_client_new(t->crew->socket);

	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		Shardd__V1__GetStatusResponse *reply;
		size_t bytes;
		uint8_t *data;

		sample_begin(s);
		raw_call(client, "/shardd.v1.StatusService/GetStatus", "", 0, &data, &bytes);
		reply = shardd__v1__get_status_response__unpack(NULL, bytes, data);
		sample_end(s);
		if (!reply || reply->n_jobs == 0) {
			fputs("shardd-bench: StatusService.GetStatus does not show the job\n",
			      stderr);
			_exit(1);
		}
		shardd__v1__get_status_response__free_unpacked(reply, NULL);
		free(data);
	}
	raw_client_free(client);
}

static void run_command(struct trainer *t, const char *program,
			const posix_spawn_file_actions_t *actions)
{
	char *argv[] = { (char *)program,         "--json", "--socket",
			 (char *)t->crew->socket, "status", NULL };
	int status = 0;
	pid_t pid;

	if (posix_spawnp(&pid, program, actions, NULL, argv, environ) != 0 ||
	    waitpid(pid, &status, 0) != pid || status != 0) {
		fprintf(stderr, "shardd-bench: %s --json status did not end with 0\n", program);
		_exit(1);
	}
}

static void ask_command(struct trainer *t)
{
	posix_spawn_file_actions_t actions;
	char program[PATH_MAX];

	bench_program("shardctl", program, sizeof(program));
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 1, i);

		sample_begin(s);
		run_command(t, program, &actions);
		sample_end(s);
	}
	posix_spawn_file_actions_destroy(&actions);
}

static void status_main(struct trainer *t)
{
	if (t->rank < t->crew->ranks) {
		train(t);
		return;
	}
	while (atomic_load(&t->crew->ready) < t->crew->ranks)
		pause_ms(1);
	ask_status(t);
	ask_command(t);
	atomic_store(&t->crew->stop, true);
}

int case_status(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "status", "status_command" };
	unsigned ranks = bench_ranks(b, c);
	struct crew *crew = crew_new(b, ranks, 1, 2, bench_repeat(b, c), b->o.bytes / 4);
	int r;

	if (!crew)
		return -1;
	crew->optimizer = SHARDD_ADAMW;
	r = crew_run(crew, status_main);
	for (unsigned k = 0; k < 2 && r == 0; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = ranks;
		f.bytes = b->o.bytes;
		f.dtype = "fp32";
		figures_calls(&f, crew, k, ranks, 1);
		f.ran_us = -1;
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
