#include "coord/embedded.h"

#include <errno.h>
#include <netdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "coord/embedded_impl.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/state.h"
#include "core/text.h"

#define EMBEDDED_MAGIC 0x45544344u

#define PAUSE_FIRST_MS 100u
#define PAUSE_MOST_MS  10000u
#define PAUSE_DOUBLES  7u
#define HELD_MS        50u /* until the lock of an earlier one is tried again */
#define TERM_MS        5000u
/* It has served for so long: the next failure is a new one. */
#define STEADY_US (UINT64_C(30) * 1000000)

static const struct state_row embedded_states[] = {
	[EMBEDDED_PAUSED] = { "PAUSED",
			      STATE_TO(EMBEDDED_CLIENT) | STATE_TO(EMBEDDED_PAUSED) |
				      STATE_TO(EMBEDDED_RESOLVING) | STATE_TO(EMBEDDED_JOINING) |
				      STATE_TO(EMBEDDED_WAITING) | STATE_TO(EMBEDDED_STARTING) |
				      STATE_TO(EMBEDDED_CLOSING) },
	[EMBEDDED_CLIENT] = { "CLIENT", STATE_TO(EMBEDDED_CLOSING) },
	[EMBEDDED_RESOLVING] = { "RESOLVING",
				 STATE_TO(EMBEDDED_PAUSED) | STATE_TO(EMBEDDED_JOINING) |
					 STATE_TO(EMBEDDED_WAITING) | STATE_TO(EMBEDDED_STARTING) |
					 STATE_TO(EMBEDDED_STOPPING) },
	[EMBEDDED_JOINING] = { "JOINING",
			       STATE_TO(EMBEDDED_JOINING) | STATE_TO(EMBEDDED_PAUSED) |
				       STATE_TO(EMBEDDED_WAITING) | STATE_TO(EMBEDDED_STARTING) |
				       STATE_TO(EMBEDDED_STOPPING) | STATE_TO(EMBEDDED_CLOSING) },
	[EMBEDDED_WAITING] = { "WAITING", STATE_TO(EMBEDDED_WAITING) | STATE_TO(EMBEDDED_PAUSED) |
						  STATE_TO(EMBEDDED_JOINING) |
						  STATE_TO(EMBEDDED_STARTING) |
						  STATE_TO(EMBEDDED_CLOSING) },
	[EMBEDDED_STARTING] = { "STARTING", STATE_TO(EMBEDDED_SERVING) | STATE_TO(EMBEDDED_PAUSED) |
						    STATE_TO(EMBEDDED_STOPPING) },
	[EMBEDDED_SERVING] = { "SERVING", STATE_TO(EMBEDDED_SERVING) | STATE_TO(EMBEDDED_PAUSED) |
						  STATE_TO(EMBEDDED_STOPPING) },
	[EMBEDDED_STOPPING] = { "STOPPING", STATE_TO(EMBEDDED_CLOSING) },
	[EMBEDDED_CLOSING] = { "CLOSING", 0 },
};

static void embedded_on_timer(uv_timer_t *timer);
static void embedded_on_gone(struct proc_watch *w);

/* ------------------------------------------------------------------------------- its state */

static void embedded_set(struct embedded *e, enum embedded_state to, const char *why)
{
	bool same = e->state == to && strcmp(e->why, why) == 0;

	state_move(embedded_states, &e->state, (uint8_t)to);
	text_copy(e->why, sizeof(e->why), why);
	if (!same)
		e->ops->changed(e, e->userdata);
}

static void embedded_wait(struct embedded *e, uint64_t ms)
{
	int r = uv_timer_start(&e->timer, embedded_on_timer, ms, 0);

	CHECK(r == 0);
}

/* Try again later. */
static void embedded_pause(struct embedded *e, const char *why)
{
	uint64_t ms = PAUSE_FIRST_MS << (e->tries < PAUSE_DOUBLES ? e->tries : PAUSE_DOUBLES);

	e->tries++;
	embedded_wait(e, ms < PAUSE_MOST_MS ? ms : PAUSE_MOST_MS);
	embedded_set(e, EMBEDDED_PAUSED, why);
}

/* ------------------------------------------------------------------------------- its child */

static void embedded_kill(struct embedded *e, int signum)
{
	CHECK(e->pid > 0);
	kill(e->pid, signum); /* ours, and not reaped: the pid is its own */
}

static void embedded_reap(struct embedded *e, int *ret_status)
{
	*ret_status = 0;
	/* it has ended: this does not block */
	while (waitpid(e->pid, ret_status, 0) < 0 && errno == EINTR)
		;
	e->pid = 0;
}

static void embedded_watch(struct embedded *e)
{
	int r = proc_new_pid(e->loop, e->pid, geteuid(), getegid(), &e->proc), status;
	char why[EMBEDDED_WHY_BYTES];

	if (r == 0) {
		proc_watch(e->proc, &e->gone, embedded_on_gone);
		e->began_us = clock_now_us();
		embedded_set(e, EMBEDDED_STARTING, "etcd does not serve yet");
		return;
	}
	embedded_kill(e, SIGKILL);
	embedded_reap(e, &status);
	e->log = embedded_log_close(e->log);
	snprintf(why, sizeof(why), "etcd cannot be watched: %s", strerror(-r));
	embedded_pause(e, why);
}

static void embedded_start(struct embedded *e)
{
	char why[EMBEDDED_WHY_BYTES];
	int r = embedded_child_start(e, why);

	if (r == EMBEDDED_E_HELD) {
		embedded_wait(e, HELD_MS);
		embedded_set(e, EMBEDDED_WAITING, why);
	} else if (r < 0) {
		embedded_pause(e, why);
	} else {
		embedded_watch(e);
	}
}

void embedded_on_line(struct embedded *e, enum log_level level, const char *text)
{
	if (e->ops->logged)
		e->ops->logged(e, level, text, e->userdata);
}

void embedded_on_serving(struct embedded *e)
{
	if (e->state != EMBEDDED_STARTING)
		return;
	if (e->setup.seeds.n > 1) {
		embedded_wait(e, 0);
		embedded_set(e, EMBEDDED_SERVING, "it may have no vote yet");
	} else {
		embedded_set(e, EMBEDDED_SERVING, "");
	}
}

void embedded_on_vote(struct embedded *e, bool has, const char *why, uint64_t ms)
{
	e->has_vote = has;
	embedded_wait(e, has ? 0 : ms);
	if (strcmp(e->why, why) != 0)
		embedded_set(e, EMBEDDED_SERVING, why);
}

/* One sentence of how it has ended and what it has said last. */
static void embedded_describe(const struct embedded *e, int status, char why[EMBEDDED_WHY_BYTES])
{
	const char *said = e->log->error;
	bool port = strstr(said, "address already in use") != NULL;
	bool signalled = WIFSIGNALED(status);

	snprintf(why, EMBEDDED_WHY_BYTES, "etcd has ended %s %d%s%s%s",
		 signalled ? "by signal" : "with code",
		 signalled ? WTERMSIG(status) : WEXITSTATUS(status), *said ? ": " : "", said,
		 port ? "; another program has the port: end it, or set coord_client_port and "
			"coord_peer_port"
		      : "");
}

static void embedded_close(struct embedded *e);

static void embedded_on_gone(struct proc_watch *w)
{
	struct embedded *e = CONTAINER_OF(w, struct embedded, gone);
	char why[EMBEDDED_WHY_BYTES];
	int status;

	MAGIC_CHECK(e, EMBEDDED_MAGIC);
	e->proc = proc_unref(e->proc);
	embedded_log_drain(e->log); /* whose reader may stop us: the pid is still its own */
	embedded_reap(e, &status);
	embedded_describe(e, status, why);
	e->log = embedded_log_close(e->log);
	embedded_join_end(e);
	if (e->state == EMBEDDED_STOPPING) {
		embedded_close(e);
		return;
	}
	if (e->state == EMBEDDED_SERVING && clock_now_us() - e->began_us >= STEADY_US)
		e->tries = 0;
	embedded_pause(e, why);
}

/* ------------------------------------------------------------------------------- its store */

static void embedded_join(struct embedded *e)
{
	char why[EMBEDDED_WHY_BYTES];

	if (embedded_join_begin(e, why) < 0)
		embedded_pause(e, why);
	else if (e->state != EMBEDDED_JOINING)
		embedded_set(e, EMBEDDED_JOINING,
			     "asking the other members of etcd whether there is a store");
}

void embedded_on_joined(struct embedded *e)
{
	embedded_start(e);
}

void embedded_on_not_joined(struct embedded *e, const char *why, uint64_t ms)
{
	embedded_wait(e, ms);
	embedded_set(e, EMBEDDED_JOINING, why);
}

void embedded_on_probed(struct embedded *e)
{
	struct embedded_probe *p = &e->join.probe;

	if (e->state == EMBEDDED_STOPPING)
		embedded_close(e);
	else
		p->done(e, p->accepts);
}

/* With data it is a member. A single one without them makes the store. */
static void embedded_begin(struct embedded *e)
{
	char why[EMBEDDED_WHY_BYTES];
	bool has_data = false;

	e->has_vote = false;
	free(e->join.initial);
	e->join.initial = NULL;
	if (embedded_child_own_data(e, &has_data, why) < 0)
		embedded_pause(e, why);
	else if (has_data)
		embedded_start(e);
	else if (e->setup.seeds.n > 1)
		embedded_join(e);
	else if (embedded_join_found(e) < 0)
		embedded_pause(e, "cannot create an etcd store: the kernel gave no random number");
	else
		embedded_start(e);
}

/* ---------------------------------------------------------------------------- its own host */

static void embedded_on_resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *list)
{
	struct embedded *e = req->data;
	char why[EMBEDDED_WHY_BYTES];
	int r = status;

	MAGIC_CHECK(e, EMBEDDED_MAGIC);
	if (r == 0 && !e->setup.listen_given)
		r = getnameinfo(list->ai_addr, list->ai_addrlen, e->setup.listen,
				sizeof(e->setup.listen), NULL, 0, NI_NUMERICHOST)
			    ? UV_EAI_FAIL
			    : 0;
	uv_freeaddrinfo(list);
	if (e->state == EMBEDDED_STOPPING) {
		embedded_close(e);
	} else if (r == 0) {
		embedded_begin(e);
	} else {
		snprintf(why, sizeof(why),
			 "the host '%.200s' of this node in coord_seeds cannot be resolved: %s",
			 e->setup.own->host, uv_strerror(r));
		embedded_pause(e, why);
	}
}

/* etcd resolves it, too, and ends if it cannot: a name of a pod may be known later than the pod runs. */
static void embedded_resolve(struct embedded *e)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM };
	int r;

	e->resolver.data = e;
	r = uv_getaddrinfo(e->loop, &e->resolver, embedded_on_resolved, e->setup.own->host, NULL,
			   &hints);
	if (r < 0)
		embedded_pause(e, "there is no memory to resolve the host of this node");
	else
		embedded_set(e, EMBEDDED_RESOLVING,
			     "the host of this node in coord_seeds is being resolved");
}

static void embedded_try(struct embedded *e)
{
	if (hostport_is_numeric(e->setup.own->host))
		embedded_begin(e);
	else
		embedded_resolve(e);
}

static void embedded_on_timer(uv_timer_t *timer)
{
	struct embedded *e = timer->data;

	MAGIC_CHECK(e, EMBEDDED_MAGIC);
	switch ((enum embedded_state)e->state) {
	case EMBEDDED_PAUSED:
		embedded_try(e);
		break;
	case EMBEDDED_JOINING:
	case EMBEDDED_WAITING:
		embedded_begin(e); /* its data may be gone now */
		break;
	case EMBEDDED_SERVING:
		if (e->has_vote)
			embedded_join_end(e);
		else
			embedded_join_look(e);
		break;
	case EMBEDDED_STOPPING:
		if (e->pid)
			embedded_kill(e, SIGKILL);
		break;
	default:
		CHECK_NOT_REACHED();
	}
}

/* --------------------------------------------------------------------------- begin and end */

static void embedded_free(struct embedded *e)
{
	e->magic = 0;
	fd_close(e->daemon_lock);
	free(e->setup.etcd);
	free(e->setup.dir);
	free(e->setup.ca);
	free(e->setup.cert);
	free(e->setup.key);
	free(e->join.initial);
	free(e);
}

static void embedded_on_closed(uv_handle_t *handle)
{
	struct embedded *e = handle->data;

	MAGIC_CHECK(e, EMBEDDED_MAGIC);
	CHECK(!e->pid && !e->log && !e->proc);
	e->daemon_lock = fd_close(e->daemon_lock);
	e->stopped(e->userdata);
	embedded_free(e);
}

static void embedded_close(struct embedded *e)
{
	embedded_join_end(e);
	embedded_set(e, EMBEDDED_CLOSING, "");
	uv_close((uv_handle_t *)&e->timer, embedded_on_closed);
}

void embedded_stop(struct embedded *e, void (*stopped)(void *userdata))
{
	MAGIC_CHECK(e, EMBEDDED_MAGIC);
	CHECK(!e->stopped);
	e->stopped = stopped;
	switch ((enum embedded_state)e->state) {
	case EMBEDDED_JOINING:
		if (!e->join.probe.runs) {
			embedded_close(e);
			break;
		}
		embedded_join_end(e);
		embedded_set(e, EMBEDDED_STOPPING, "waiting for a connection to end");
		break;
	case EMBEDDED_RESOLVING:
		uv_cancel((uv_req_t *)&e->resolver); /* it runs: its end is waited for */
		embedded_set(e, EMBEDDED_STOPPING, "the resolver is being ended");
		break;
	case EMBEDDED_STARTING:
	case EMBEDDED_SERVING:
		embedded_join_end(e);
		embedded_kill(e, SIGTERM);
		embedded_wait(e, TERM_MS);
		embedded_set(e, EMBEDDED_STOPPING, "etcd is being ended");
		break;
	default:
		embedded_close(e);
	}
}

static char *embedded_copy(const char *text, bool *lacks)
{
	char *copy = text && *text ? strdup(text) : NULL;

	*lacks = *lacks || (text && *text && !copy);
	return copy;
}

static int embedded_copy_options(struct embedded *e, const struct embedded_options *o)
{
	struct embedded_setup *s = &e->setup;
	bool lacks = false;

	text_copy(s->node, sizeof(s->node), o->node);
	text_copy(s->cluster, sizeof(s->cluster), o->cluster);
	s->seeds = *o->seeds;
	s->own = seeds_find(&s->seeds, s->node);
	s->dir = embedded_copy(o->dir, &lacks);
	s->ca = embedded_copy(o->ca, &lacks);
	s->cert = embedded_copy(o->cert, &lacks);
	s->key = embedded_copy(o->key, &lacks);
	s->listen_given = o->listen && *o->listen;
	if (s->listen_given || s->own)
		text_copy(s->listen, sizeof(s->listen), s->listen_given ? o->listen : s->own->host);
	CHECK(lacks || (s->dir && !s->cert == !s->ca && !s->cert == !s->key));
	return lacks ? -ENOMEM : 0;
}

static void embedded_list_endpoints(struct embedded *e)
{
	for (size_t i = 0; i < e->setup.seeds.n; i++) {
		const struct seed *s = &e->setup.seeds.members[i];

		hostport_format(s->host, s->client_port, e->texts[i]);
		e->endpoints[i] = e->texts[i];
	}
}

int embedded_new(uv_loop_t *loop, struct loopq *loopq, const struct embedded_options *o,
		 const struct embedded_ops *ops, void *userdata, struct embedded **ret,
		 struct fault *f)
{
	struct embedded *e = calloc(1, sizeof(*e));
	int r;

	CHECK(o->seeds->n && name_is_good(o->node) && name_is_good(o->cluster));
	if (!e)
		return fault_errno(f, -ENOMEM, "the embedded etcd");
	e->magic = EMBEDDED_MAGIC;
	e->loop = loop;
	e->loopq = loopq;
	e->ops = ops;
	e->userdata = userdata;
	e->daemon_lock = -1;
	list_init(&e->gone.link);
	r = embedded_copy_options(e, o);
	if (r < 0)
		fault_errno(f, r, "the embedded etcd");
	else if (e->setup.own)
		r = embedded_child_find(o->etcd, &e->setup.etcd, f);
	if (r) {
		embedded_free(e);
		return (int)f->code;
	}
	embedded_list_endpoints(e);
	r = uv_timer_init(loop, &e->timer);
	CHECK(r == 0);
	e->timer.data = e;
	if (e->setup.own)
		embedded_wait(e, 0);
	else
		state_move(embedded_states, &e->state, EMBEDDED_CLIENT);
	*ret = e;
	return 0;
}

/* ------------------------------------------------------------------------------ what it is */

enum embedded_state embedded_state(const struct embedded *e)
{
	return (enum embedded_state)e->state;
}

const char *embedded_state_name(enum embedded_state s)
{
	return s < ARRAY_SIZE(embedded_states) ? embedded_states[s].name : "?";
}

const char *embedded_why(const struct embedded *e)
{
	return e->why;
}

pid_t embedded_pid(const struct embedded *e)
{
	return e->pid;
}

const char *const *embedded_endpoints(const struct embedded *e, size_t *ret_n)
{
	*ret_n = e->setup.seeds.n;
	return e->endpoints;
}
