/*
 * scale: many trainers register a whole model of many small units, all at once. Measured
 * are that, StatusService.GetStatus while they do it and after, and an op of one trainer then; and the same
 * op with few units, in turns that alternate with those. Beside StatusService.GetStatus a bare gRPC server that
 * does nothing is asked at the same time: what any answer takes while so many processes want a core.
 */
#include <stdio.h>
#include <time.h>

#include "bench.h"

#define UNITS    10000u /* by default */
#define FEW      10u    /* what they are compared with */
#define OPS      10u    /* measured in a turn, each on another unit; at most FEW */
#define ASKS     40u    /* of the status in a turn */
#define PAUSE_MS 10     /* between these */

enum { SCALE_REGISTER, SCALE_OP, SCALE_STATUS = SCALE_OP + OPS, SCALE_N = SCALE_STATUS + ASKS };

/* Helpers, behind the ranks. */
enum { ASK_STATUS, SERVE_ECHO, ASK_ECHO, HELPERS };

static char echo_socket[108];

static void gather_each(struct trainer *t, const shardd_unit *units)
{
	/* Some that do not count come first. */
	for (int k = TRAINER_WARM_UP; k < (int)OPS; k++) {
		struct sample *s = trainer_sample(t, k < 0 ? SCALE_OP : SCALE_OP + (unsigned)k,
						  k < 0 ? k : (int)t->crew->turn - 1);
		struct shardd_error err;
		shardd_ticket ticket;

		t->unit = units[k < 0 ? 0 : k];
		sample_begin(s);
		trainer_must(t,
			     shardd_submit_gather(t->client,
						  SHARDD_OPTIONS(gather, .unit = t->unit), &ticket,
						  &err),
			     &err, "gather");
		trainer_timed_wait(t, s, ticket, NULL, "gather");
		trainer_release(t);
	}
}

static void train(struct trainer *t)
{
	struct sample *s = trainer_sample(t, SCALE_REGISTER, (int)t->crew->turn - 1);
	unsigned units = t->crew->units;
	shardd_unit some[OPS];
	struct shardd_error err;
	struct model m;

	model_make(&m, t->crew);
	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	trainer_meet(t);
	atomic_fetch_add(&t->crew->ready, 1);
	sample_begin(s);
	trainer_must(t, shardd_register(t->client, m.spec, units, m.info, &err), &err, "register");
	sample_end(s);
	for (unsigned k = 0; k < OPS; k++) {
		some[k] = m.info[(uint64_t)k * (units - 1) / (OPS - 1)].unit;
		trainer_must(t, shardd_init_seed(t->client, some[k], 1, &err), &err, "initialise");
	}
	trainer_meet(t);
	if (t->rank == 0)
		gather_each(t, some);
	trainer_meet(t);
	trainer_leave(t);
}

static void pause_ms(long ms)
{
	struct timespec ts = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

	nanosleep(&ts, NULL);
}

static void ask(struct trainer *t, struct raw_client *client, const char *method)
{
	while (atomic_load(&t->crew->ready) == 0)
		pause_ms(1);
	for (unsigned k = 0; k < ASKS; k++) {
		struct sample *s = trainer_sample(t, SCALE_STATUS + k, (int)t->crew->turn - 1);

		sample_begin(s);
		raw_call(client, method, "", 0, NULL, NULL);
		sample_end(s);
		pause_ms(PAUSE_MS);
	}
}

static void ask_status(struct trainer *t)
{
	struct raw_client *client = raw_client_new(t->crew->socket);

	ask(t, client, "/shardd.v1.StatusService/GetStatus");
	raw_client_free(client);
}

static void ask_echo(struct trainer *t)
{
	struct raw_client *client;

	raw_await_listener(echo_socket);
	client = raw_client_new(echo_socket);
	ask(t, client, RAW_ECHO);
	raw_call(client, RAW_END, "", 0, NULL, NULL);
	raw_client_free(client);
}

static void scale_main(struct trainer *t)
{
	if (t->rank < t->crew->ranks)
		train(t);
	else if (t->rank == t->crew->ranks + ASK_STATUS)
		ask_status(t);
	else if (t->rank == t->crew->ranks + SERVE_ECHO)
		raw_echo_serve(echo_socket);
	else
		ask_echo(t);
}

/* Turn 0 does not count. */
static int turns(struct crew *many, struct crew *few)
{
	char name[40];
	int r = 0;

	snprintf(name, sizeof(name), "%.39s", many->job);
	for (unsigned turn = 0; r == 0 && turn <= many->repeat; turn++)
		for (unsigned k = 0; r == 0 && k < 2; k++) {
			struct crew *crew = k ? few : many;

			crew->turn = turn;
			atomic_store(&crew->ready, 0);
			snprintf(crew->job, sizeof(crew->job), "%s-%u-%u", name, turn, k);
			r = crew_run(crew, scale_main);
		}
	return r;
}

static void report(const struct bench *b, const struct crew *crew, const char *name,
		   unsigned series, unsigned n_series, unsigned member)
{
	struct figures f = FIGURES_NULL;

	f.name = name;
	f.ranks = crew->ranks;
	f.units = crew->units;
	if (series == SCALE_REGISTER)
		figures_collective(&f, crew, series);
	else
		figures_series(&f, crew, series, n_series, member);
	if (series != SCALE_OP)
		f.ran_us = -1;
	figures_report(b, &f);
}

int case_scale(struct bench *b, const struct bench_case *c)
{
	unsigned ranks = bench_ranks(b, c), repeat = bench_repeat(b, c);
	struct crew *many = crew_new(b, ranks, HELPERS, SCALE_N, repeat, ranks);
	struct crew *few = crew_new(b, ranks, HELPERS, SCALE_N, repeat, ranks);
	int r = -1;

	snprintf(echo_socket, sizeof(echo_socket), "%s/echo.sock", b->dir);
	if (many && few) {
		many->units = bench_units(b, UNITS);
		few->units = many->units < FEW ? many->units : FEW;
		r = turns(many, few);
	}
	if (r == 0) {
		report(b, many, "scale_register", SCALE_REGISTER, 1, 0);
		report(b, many, "scale_op", SCALE_OP, OPS, 0);
		report(b, few, "scale_op_few", SCALE_OP, OPS, 0);
		report(b, many, "scale_status", SCALE_STATUS, ASKS, ranks + ASK_STATUS);
		report(b, many, "scale_echo", SCALE_STATUS, ASKS, ranks + ASK_ECHO);
	}
	crew_free(many);
	crew_free(few);
	return r;
}
