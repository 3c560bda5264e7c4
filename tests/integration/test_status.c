/*
 * What is said about a daemon in which something goes on: every verb that asks, for
 * people and as JSON.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "daemonfix.h"
#include "daemonwatch.h"
#include "failfix.h"
#include "fdcheck.h"
#include "rawcall.h"
#include "shardd/shardd.h"

TestSuite(status, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

enum { TURN_MS = 5 }; /* between two looks at a condition that nothing announces */

/* 80 bytes: what is cut at 63 is cut inside a character. */
#define LONG_NAME                                                      \
	"\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9" \
	"\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9" \
	"\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9" \
	"\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9"

struct scene {
	atomic_bool set, over;
};

static void gather(struct rpc_client *c, uint32_t unit)
{
	Shardd__V1__GatherRequest r = SHARDD__V1__GATHER_REQUEST__INIT;

	r.unit = unit;
	raw_done(c, "Gather", &r.base);
}

static void gradient(struct rpc_client *c, uint32_t unit)
{
	Shardd__V1__GradientBufferRequest r = SHARDD__V1__GRADIENT_BUFFER_REQUEST__INIT;

	r.unit = unit;
	raw_done(c, "GradientBuffer", &r.base);
}

/* Until the daemon has taken the barrier in. */
static void await_waiting(struct rpc_client *c)
{
	Shardd__V1__OpsRequest r = SHARDD__V1__OPS_REQUEST__INIT;
	uint64_t deadline = clock_now_us() + 20 * 1000000ull;
	bool there = false;

	while (!there) {
		Shardd__V1__OpsResponse *ops = raw_must(c, "Status/Ops", &r.base);

		for (size_t i = 0; i < ops->n_ops; i++)
			there = there || ops->ops[i]->state == SHARDD__V1__OP_STATE__OP_STATE_WAIT;
		shardd__v1__ops_response__free_unpacked(ops, NULL);
		TRAINER_CHECK(clock_now_us() < deadline);
	}
}

/* Two ranks of "full" with units, gathers, a buffer, a refused op and one that waits. */
static int play(const struct trainer *t)
{
	struct rpc_client *w[2] = { raw_trainer(t->socket, "full", 0, 2, true),
				    raw_trainer(t->socket, "full", 1, 2, true) };
	Shardd__V1__BarrierRequest barrier = SHARDD__V1__BARRIER_REQUEST__INIT;
	Shardd__V1__GatherRequest wrong = SHARDD__V1__GATHER_REQUEST__INIT;
	struct scene *s = t->arg;
	struct rpc_pending *waits;
	uint32_t a, b;

	a = raw_register(w[0], "layer one", 1000);
	b = raw_register(w[0], LONG_NAME, 10);
	raw_init(w, 2, a);
	raw_init(w, 2, b);
	gather(w[0], a);
	gather(w[1], a);
	gradient(w[1], b);
	raw_alloc(w[0], 5000);
	wrong.unit = 99;
	raw_refused(w[1], "Gather", &wrong.base, SHARDD_NOT_FOUND, "unit", "no unit 99");
	waits = raw_start(w[0], "Barrier", &barrier.base);
	await_waiting(w[1]);
	s->set = true;
	while (!s->over)
		daemonwatch_turn(TURN_MS);
	rpc_pending_free(waits);
	rpc_client_close(w[0]);
	rpc_client_close(w[1]);
	return 0;
}

/* ------------------------------------------------------------------ as a text */

/* Length of the UTF-8 character at @s, 0 if it is none or not for a terminal. */
static size_t printable(const unsigned char *s)
{
	size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;

	if (s[0] != '\n' && (s[0] < 0x20 || s[0] == 0x7f || (s[0] >= 0x80 && s[0] < 0xc2)))
		return 0;
	for (size_t i = 1; i < n; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	return n;
}

static void check_text(struct daemonfix *d, const char *const *args, const char *const *words)
{
	static char out[65536];
	int code = daemonfix_ctl_text(d, args, out, sizeof(out));
	size_t n;

	cr_assert_eq(code, 0, "%s: %s", args[0], out);
	for (; *words; words++)
		cr_assert(strstr(out, *words), "%s: no '%s' in:\n%s", args[0], *words, out);
	for (const char *at = out; *at; at += n) {
		n = printable((const unsigned char *)at);
		cr_assert_neq(n, 0, "%s: byte 0x%02x at %zu in:\n%s", args[0], (unsigned char)*at,
			      (size_t)(at - out), out);
		cr_assert(*at != '\n' || at == out || at[-1] != ' ', "%s: a line ends with blanks",
			  args[0]);
	}
}

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static void check_texts(struct daemonfix *d)
{
	check_text(d, WORDS("status"), WORDS("full", "RUNNING", daemonfix_device(), "RANK"));
	check_text(d, WORDS("memory"), WORDS("full", "shard", "grad", "FORMULA", "PEAK"));
	check_text(d, WORDS("jobs"), WORDS("full", "KEEP", "NOT_FOUND", "idle", "IDLE"));
	check_text(d, WORDS("units", "full"), WORDS("layer one", "1000", "0 1"));
	check_text(d, WORDS("sessions"), WORDS("raw", "full"));
	check_text(d, WORDS("ops"), WORDS("Initialise", "Gather", "WAIT", "rank 1 (pid "));
	check_text(d, WORDS("ops", "full", "-n", "3"), WORDS("Barrier"));
	check_text(d, WORDS("health"), WORDS("SERVING"));
}

/* -------------------------------------------------------------------- as JSON */

static void has_keys(json_t *object, const char *what, const char *const *keys)
{
	cr_assert(json_is_object(object), "%s is no object", what);
	for (; *keys; keys++)
		cr_assert(json_object_get(object, *keys), "%s has no %s", what, *keys);
}

static json_t *by_name(json_t *list, const char *name)
{
	size_t i;
	json_t *item;

	json_array_foreach(list, i,
			   item) if (strcmp(json_string_value(json_object_get(item, "name")),
					    name) == 0) return item;
	cr_assert(false, "there is no %s", name);
	return NULL;
}

static void check_status(struct daemonfix *d)
{
	json_t *s = daemonfix_ctl(d, WORDS("status")), *job, *device, *ranks, *classes;
	json_int_t sum = 0;
	const char *class;
	json_t *bytes;

	has_keys(s, "status", WORDS("version", "pid", "uptime_s", "devices", "jobs", "sessions"));
	cr_assert_eq(json_integer_value(json_object_get(s, "pid")), d->pid);
	device = json_array_get(json_object_get(s, "devices"), 0);
	has_keys(device, "device",
		 WORDS("id", "backend", "capacity_bytes", "used_bytes", "classes"));
	classes = json_object_get(device, "classes");
	has_keys(classes, "classes", WORDS("shard", "full", "grad", "control", "published"));
	json_object_foreach(classes, class, bytes) sum += json_integer_value(bytes);
	cr_assert_eq(sum, json_integer_value(json_object_get(device, "used_bytes")));
	job = by_name(json_object_get(s, "jobs"), "full");
	has_keys(job, "job",
		 WORDS("name", "state", "world_size", "step", "epoch", "units", "ranks"));
	cr_assert_str_eq(json_string_value(json_object_get(job, "state")), "RUNNING");
	cr_assert_eq(json_array_size(json_object_get(job, "units")), 2);
	ranks = json_object_get(job, "ranks");
	cr_assert_eq(json_array_size(ranks), 2);
	cr_assert_eq(json_integer_value(json_object_get(json_array_get(ranks, 0), "pending_ops")),
		     1);
	cr_assert_eq(json_array_size(json_object_get(s, "sessions")), 2);
	json_decref(s);
}

static void check_units(struct daemonfix *d)
{
	json_t *j = daemonfix_ctl(d, WORDS("units", "full")), *units = json_object_get(j, "units");
	json_t *one = by_name(units, "layer one");

	by_name(units, LONG_NAME);
	cr_assert_eq(json_array_size(json_object_get(one, "gathered_by")), 2);
	cr_assert_eq(json_integer_value(json_object_get(one, "elements")), 1000);
	cr_assert_eq(json_integer_value(json_object_get(one, "shard_elements")), 500);
	/* parameters and gradients, no optimizer; each in steps of 256 bytes */
	cr_assert_eq(json_integer_value(json_object_get(one, "shard_bytes")), 8192);
	json_decref(j);
}

/* A name that is cut is cut between characters, or the rest of one is replaced: what is
 * sent is text to all languages. */
static void check_ops(struct daemonfix *d)
{
	json_t *j = daemonfix_ctl(d, WORDS("ops", "full")), *ops = json_object_get(j, "ops"), *op;
	unsigned waiting = 0, failed = 0, long_names = 0;
	size_t i;

	has_keys(j, "ops", WORDS("ops", "now_us"));
	json_array_foreach(ops, i, op)
	{
		const char *state = json_string_value(json_object_get(op, "state"));
		const char *unit = json_string_value(json_object_get(op, "unit"));

		has_keys(op, "an op",
			 WORDS("id", "job", "rank", "pid", "op", "number", "announced_us",
			       "started_us", "finished_us", "error", "waits_for"));
		waiting += strcmp(state, "WAIT") == 0;
		failed += strcmp(state, "FAILED") == 0;
		long_names += strncmp(unit, "\u00e9\u00e9", 4) == 0;
	}
	cr_assert(waiting == 1 && failed == 1 && long_names == 3, "%u, %u, %u", waiting, failed,
		  long_names);
	json_decref(j);
	/* what is pending comes first, and is never left out */
	j = daemonfix_ctl(d, WORDS("ops", "full", "-n", "2"));
	ops = json_object_get(j, "ops");
	cr_assert_eq(json_array_size(ops), 3);
	json_array_foreach(ops, i, op) cr_assert_eq(
		strcmp(json_string_value(json_object_get(op, "state")), "WAIT") == 0, i == 0);
	json_decref(j);
}

static void check_lists(struct daemonfix *d)
{
	json_t *j = daemonfix_ctl(d, WORDS("jobs"));

	by_name(json_object_get(j, "jobs"), "idle");
	json_decref(j);
	j = daemonfix_ctl(d, WORDS("sessions"));
	cr_assert_eq(json_array_size(json_object_get(j, "sessions")), 2);
	json_decref(j);
	j = daemonfix_ctl(d, WORDS("memory"));
	cr_assert(json_is_object(j));
	json_decref(j);
	j = daemonfix_ctl(d, WORDS("health"));
	cr_assert_str_eq(json_string_value(json_object_get(j, "status")), "SERVING");
	json_decref(j);
}

static void delete_all(struct daemonfix *d)
{
	json_t *j = daemonfix_ctl(d, WORDS("job", "delete", "--force", "full"));

	cr_assert_gt(json_integer_value(json_object_get(j, "freed_bytes")), 0);
	json_decref(j);
	json_decref(daemonfix_ctl(d, WORDS("job", "delete", "idle")));
}

Test(status, every_verb_while_ops_wait)
{
	struct scene *s = trainer_shared(sizeof(*s));
	uint64_t deadline;
	struct daemonfix d;
	unsigned fds;
	pid_t pid;
	json_t *j;

	daemonfix_start(&d, NULL);
	fds = daemonfix_fds(&d);
	j = daemonfix_ctl(&d, WORDS("job", "create", "idle", "--world-size", "3"));
	cr_assert(json_is_true(json_object_get(j, "created")));
	json_decref(j);
	pid = trainer_start(&d, "full", 0, 2, play, s);
	deadline = clock_now_us() + 30 * 1000000ull;
	while (!s->set) {
		cr_assert(clock_now_us() < deadline, "the scene is not set");
		daemonwatch_turn(TURN_MS);
	}
	check_texts(&d);
	check_status(&d);
	check_units(&d);
	check_ops(&d);
	check_lists(&d);
	s->over = true;
	cr_assert_eq(trainer_wait(pid, 30), 0);
	delete_all(&d);
	daemonfix_settles(&d, fds, 0);
	daemonfix_stop(&d);
}

/* With nothing in it every verb still says something. */
Test(status, every_verb_of_an_idle_daemon)
{
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	check_text(&d, WORDS("status"), WORDS(daemonfix_device()));
	check_text(&d, WORDS("memory"), WORDS(daemonfix_device()));
	check_text(&d, WORDS("jobs"), WORDS("none"));
	check_text(&d, WORDS("sessions"), WORDS("none"));
	check_text(&d, WORDS("ops"), WORDS("none"));
	check_text(&d, WORDS("health"), WORDS("SERVING"));
	daemonfix_stop(&d);
}

/* What a program is told: the same document, through the library. */
static int ask(const struct trainer *t)
{
	struct shardd_options o = { .size = sizeof(o), .socket = t->socket, .name = "asks" };
	struct shardd_job job = { .size = sizeof(job), .name = t->job, .world_size = 1 };
	struct shardd_error err;
	char *text = NULL;
	json_t *said, *session;
	shardd_client *c;

	TRAINER_CHECK(shardd_connect(&o, &c, &err) == 0);
	TRAINER_CHECK(shardd_status(c, t->job, &text, &err) == -SHARDD_NOT_FOUND && !text);
	TRAINER_CHECK(shardd_status(c, NULL, NULL, &err) == -SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(shardd_status(NULL, NULL, &text, NULL) == -SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(shardd_join(c, &job, NULL, &err) == 0);
	TRAINER_CHECK(shardd_status(c, t->job, &text, &err) == 0);
	said = json_loads(text, 0, NULL);
	free(text);
	TRAINER_CHECK(json_array_size(json_object_get(said, "jobs")) == 1);
	TRAINER_CHECK(json_integer_value(json_object_get(said, "pid")) > 0);
	TRAINER_CHECK(!json_object_get(said, "slabs"));
	session = json_array_get(json_object_get(said, "sessions"), 0);
	TRAINER_CHECK(strcmp(json_string_value(json_object_get(session, "client_name")), "asks") ==
		      0);
	json_decref(said);
	TRAINER_CHECK(shardd_leave(c, &err) == 0);
	shardd_close(c);
	return 0;
}

Test(status, a_program_is_told_the_same_by_the_library)
{
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	trainers_run(&d, "asked", 1, ask, NULL, 60);
	daemonfix_stop(&d);
}

static uint32_t open_descriptors(struct rpc_client *c)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__GetStatusResponse *s = raw_must(c, "Status/GetStatus", &r.base);
	uint32_t n = s->open_descriptors;

	protobuf_c_message_free_unpacked(&s->base, NULL);
	return n;
}

static int count(const struct trainer *t)
{
	struct rpc_client *clients[40];

	for (unsigned i = 0; i < ARRAY_SIZE(clients); i++) {
		clients[i] = raw_connect(t->socket);
		(void)open_descriptors(clients[i]);
		if (i != 0 && i + 1 != ARRAY_SIZE(clients))
			continue;
		/* before Linux 6.2 it may be a second old */
		TRAINER_AWAIT(open_descriptors(clients[0]) == daemonfix_fds(t->arg), 20);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(clients); i++)
		rpc_client_close(clients[i]);
	return 0;
}

/* The number is that of the daemon's descriptors, with few connections and with many. */
Test(status, open_descriptors_are_counted)
{
	struct daemonfix d;

	/* a thread that waits in accept has a descriptor reserved, which no folder lists */
	if (strcmp(daemonfix_backend(), "host") != 0)
		cr_skip_test("drivers have descriptors of their own");
	daemonfix_start(&d, NULL);
	trainers_run(&d, "counted", 1, count, &d, 60);
	daemonfix_stop(&d);
}

static int ask_the_wrong_service(const struct trainer *t)
{
	static const char *const paths[] = {
		"/shardd.v1.Shardd/Attach",
		"/shardd.v1.JobService/Attach",
		"/shardd.v1.SessionService/Gather",
	};
	Shardd__V1__AttachRequest attach = SHARDD__V1__ATTACH_REQUEST__INIT;
	struct rpc_client *c = raw_connect(t->socket);

	attach.protocol = 1;
	for (size_t i = 0; i < ARRAY_SIZE(paths); i++) {
		struct shardd_error err = { 0 };
		ProtobufCMessage *reply = NULL;

		TRAINER_CHECK(rpc_client_call(c, paths[i], &attach.base,
					      &shardd__v1__attach_response__descriptor, 20000,
					      &reply, &err) == -SHARDD_UNIMPLEMENTED);
		TRAINER_CHECK(strstr(err.text, "there is no method "));
		TRAINER_CHECK(strstr(err.text, paths[i]));
	}
	rpc_client_close(c);
	return 0;
}

/* Each method is in one service: a path with another's name is no method. */
Test(status, a_path_with_the_wrong_service_is_unimplemented)
{
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	trainers_run(&d, "paths", 1, ask_the_wrong_service, NULL, 60);
	daemonfix_stop(&d);
}
