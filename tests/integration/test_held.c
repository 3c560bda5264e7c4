/*
 * What a connection, a session or a user leaves behind in the daemon: requests that
 * wait, watches, channels without a session, records of jobs that are gone.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "failfix.h"
#include "fdcheck.h"
#include "methods.h"
#include "rawcall.h"
#include "rawsock.h"
#include "session/session.h"

TestSuite(held, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

static void with_daemon(const char *const *args, trainer_fn fn)
{
	struct daemonfix d;
	unsigned fds;

	daemonfix_start(&d, args);
	chmod(d.dir, 0755); /* trainers of other users */
	fds = daemonfix_fds(&d);
	cr_assert_eq(trainer_wait(trainer_start(&d, "held", 0, 1, fn, NULL), 100), 0);
	daemonfix_settles(&d, fds, 0);
	daemonfix_stop(&d);
}

static void leave(struct rpc_client *c)
{
	Shardd__V1__LeaveRequest r = SHARDD__V1__LEAVE_REQUEST__INIT;

	raw_done(c, "Leave", &r.base);
}

/* ---------------------------------------------------------------- requests */

enum { DATA = 600 << 10, MESSAGE_MAX = 1 << 20, HELD_MAX = 4 * MESSAGE_MAX };

static struct rpc_pending *send_data(struct rpc_client *c, uint32_t unit, uint64_t seq)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__OpHeader header = SHARDD__V1__OP_HEADER__INIT;
	Shardd__V1__Own own = SHARDD__V1__OWN__INIT;
	static uint8_t data[DATA];

	header.seq = seq;
	r.header = &header;
	r.unit = unit;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
	r.own = &own;
	r.data = (ProtobufCBinaryData){ sizeof(data), data };
	return raw_start(c, "Initialise", &r.base);
}

static unsigned pending_ops(struct rpc_client *c)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__GetStatusResponse *reply = raw_must(c, "Status/GetStatus", &r.base);
	unsigned n = 0;

	for (size_t i = 0; i < reply->n_sessions; i++)
		n += reply->sessions[i]->pending_ops;
	shardd__v1__get_status_response__free_unpacked(reply, NULL);
	return n;
}

/* A thousand ops that wait for their turn kept a thousand messages of 64 MiB. */
static int hold_requests(const struct trainer *t)
{
	enum { TAKEN = HELD_MAX / DATA + 1 };
	struct rpc_client *c = raw_trainer(t->socket, t->job, 0, 1, false);
	uint32_t unit = raw_register(c, "u", DATA / 4);
	Shardd__V1__ReleaseRequest first = SHARDD__V1__RELEASE_REQUEST__INIT;
	Shardd__V1__OpHeader header = SHARDD__V1__OP_HEADER__INIT;
	struct rpc_pending *pending[TAKEN];

	for (unsigned i = 0; i < TAKEN; i++) {
		pending[i] = send_data(c, unit, 2 + i); /* 1 is missing */
		TRAINER_AWAIT(pending_ops(c) == i + 1, 20);
	}
	raw_finish_refused(send_data(c, unit, 2 + TAKEN), SHARDD_RESOURCE_EXHAUSTED, NULL,
			   "no large call is accepted");
	TRAINER_CHECK(!rpc_pending_wait(pending[0], 0));
	header.seq = 1;
	first.header = &header;
	first.unit = unit;
	raw_done(c, "Release", &first.base);
	for (unsigned i = 0; i < TAKEN; i++)
		TRAINER_CHECK(raw_finish(pending[i], NULL, &(struct shardd_error){ 0 }) == 0);
	/* what was held is let go: there is room again */
	TRAINER_CHECK(
		raw_finish(send_data(c, unit, 2 + TAKEN), NULL, &(struct shardd_error){ 0 }) == 0);
	leave(c);
	rpc_client_close(c);
	return 0;
}

Test(held, requests_of_a_connection_are_limited)
{
	static const char *const args[] = { "--set", "max_message_bytes=1MiB", NULL };

	with_daemon(args, hold_requests);
}

/* ----------------------------------------------------------------- watches */

static struct rpc_pending *start_watch(struct rpc_client *c)
{
	Shardd__V1__WatchRequest r = SHARDD__V1__WATCH_REQUEST__INIT;
	struct rpc_pending *p = NULL;
	struct shardd_error err;

	TRAINER_CHECK(rpc_client_start(c, METHOD_Watch, &r.base,
				       &shardd__v1__watch_response__descriptor, true, 0, &p,
				       &err) == 0);
	return p;
}

static int next_event(struct rpc_pending *p, struct shardd_error *err)
{
	ProtobufCMessage *event = NULL;
	int r = rpc_pending_next(p, 20000, &event, err);

	if (event)
		protobuf_c_message_free_unpacked(event, NULL);
	return r;
}

/* Each keeps 256 events of half a KiB for a client that does not read, and there could
 * be as many watches as calls. */
static int set_watches(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	struct rpc_pending *watches[SESSION_MAX_WATCHES], *more;
	struct shardd_error err = { 0 };

	raw_attach(c);
	for (unsigned i = 0; i < SESSION_MAX_WATCHES; i++) {
		watches[i] = start_watch(c);
		TRAINER_CHECK(next_event(watches[i], &err) == 1);
	}
	more = start_watch(c);
	TRAINER_CHECK(next_event(more, &err) == -SHARDD_RESOURCE_EXHAUSTED);
	TRAINER_CHECK(strstr(err.text, "the maximum"));
	rpc_pending_free(more);
	/* one that is given up makes room, as soon as the daemon has heard of it */
	rpc_pending_free(watches[0]);
	TRAINER_AWAIT(next_event(watches[0] = start_watch(c), &err) == 1 ||
			      (rpc_pending_free(watches[0]), false),
		      20);
	for (unsigned i = 0; i < SESSION_MAX_WATCHES; i++)
		rpc_pending_free(watches[i]);
	rpc_client_close(c);
	return 0;
}

Test(held, watches_of_a_session_are_limited)
{
	with_daemon(NULL, set_watches);
}

/* ---------------------------------------------------- channels of no session */

static unsigned connections(struct daemonfix *d)
{
	static const char *const status[] = { "status", NULL };
	json_t *s = daemonfix_ctl(d, status);
	unsigned n = (unsigned)json_integer_value(json_object_get(s, "connections"));

	json_decref(s);
	return n;
}

/* It outlived the server, which its end was then told to. */
Test(held, a_channel_without_a_session_ends_with_the_daemon)
{
	static const char *const args[] = { "--set", "hello_timeout_ms=3600000", NULL };
	_cleanup_(fd_closep) int fd = -1;
	struct daemonfix d;
	unsigned before;

	daemonfix_start(&d, args);
	before = connections(&d);
	fd = rawsock_connect(d.socket);
	cr_assert_eq(rawsock_send(fd, "SHD1", 4), 4);
	AWAIT(connections(&d) > before, 20);
	daemonfix_stop(&d);
	cr_assert(rawsock_closed(fd, 5));
}

/* ------------------------------------------------------------- two users */

static void become(uid_t uid)
{
	TRAINER_CHECK(setgid(uid) == 0 && setuid(uid) == 0);
}

static int was_alice(const struct trainer *t)
{
	struct rpc_client *c;

	become(30001);
	c = raw_trainer(t->socket, t->job, 0, 1, false);
	raw_init(&c, 1, raw_register(c, "secret", 10));
	leave(c);
	rpc_client_close(c);
	return 0;
}

static bool sees_secret(struct rpc_client *c)
{
	Shardd__V1__OpsRequest r = SHARDD__V1__OPS_REQUEST__INIT;
	Shardd__V1__OpsResponse *reply = raw_must(c, "Status/Ops", &r.base);
	bool seen = false;

	for (size_t i = 0; i < reply->n_ops; i++)
		seen |= strcmp(reply->ops[i]->unit, "secret") == 0;
	shardd__v1__ops_response__free_unpacked(reply, NULL);
	return seen;
}

/* Was: the owner of a new job of the same name was shown the ops of the deleted one. */
static int is_bob(const struct trainer *t)
{
	struct rpc_client *c;

	become(30002);
	c = raw_trainer(t->socket, t->job, 0, 1, false);
	TRAINER_CHECK(!sees_secret(c));
	leave(c);
	rpc_client_close(c);
	return 0;
}

static int is_alice_again(const struct trainer *t)
{
	struct rpc_client *c;

	become(30001);
	c = raw_connect(t->socket);
	TRAINER_CHECK(sees_secret(c));
	rpc_client_close(c);
	return 0;
}

Test(held, records_of_a_job_that_is_gone_are_its_owners)
{
	static const char *const args[] = { "--set", "socket_mode=0666", NULL };
	static const trainer_fn in_turn[] = { was_alice, is_bob, is_alice_again };
	struct daemonfix d;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	daemonfix_start(&d, args);
	chmod(d.dir, 0755);
	for (size_t i = 0; i < ARRAY_SIZE(in_turn); i++)
		cr_assert_eq(trainer_wait(trainer_start(&d, "same", 0, 1, in_turn[i], NULL), 60),
			     0);
	daemonfix_stop(&d);
}
