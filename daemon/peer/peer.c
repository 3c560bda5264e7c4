#include "peer/peer.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "peer/peer_impl.h"

#define PEERS_MAX_LINKS  1024u
#define PEERS_MAX_QUEUED (UINT64_C(16) << 20)
/* Time between two ticks that counts; what is above it is time in which the loop was blocked. */
#define PEERS_LOOK_US 250000u
/* For the other end to take a bye. */
#define PEER_BYE_US 1000000u
#define PEERS_ARGS  16u /* of a channel, at most */
/* For a connection: shorter than the time of a greeting, so that the text is core's, which knows why. */
#define PEER_CONNECT_MS 4000

/* --------------------------------------------------------------------------- life of a link */

void peers_hold(struct peers *ps)
{
	ps->n_live++;
}

void peers_drop(struct peers *ps)
{
	CHECK(ps->n_live);
	if (--ps->n_live)
		return;
	grpc_server_destroy(ps->server);
	ps->server = NULL;
	bulk_hands_shutdown(ps);
	grpc_completion_queue_shutdown(ps->cq); /* the thread ends */
}

struct peer *peer_new(struct peers *ps)
{
	struct peer *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->magic = PEER_MAGIC;
	p->refs = 1;
	p->ps = ps;
	p->state = PEER_ARMED;
	list_init(&p->link);
	list_init(&p->out.waiting);
	peer_stream_init(p);
	peers_hold(ps);
	return p;
}

void peer_unref(struct peer *p)
{
	struct peers *ps = p->ps;

	MAGIC_CHECK(p, PEER_MAGIC);
	CHECK(p->refs);
	if (--p->refs || peer_stream_linger(p))
		return;
	CHECK(p->state == PEER_ARMED || p->state == PEER_ENDED);
	if (p->state != PEER_ARMED)
		ps->n_links--;
	list_unlink(&p->link);
	peer_stream_deinit(p);
	p->magic = 0;
	free(p);
	peers_drop(ps);
}

void peer_begin(struct peer *p)
{
	CHECK(p->state == PEER_ARMED);
	p->state = PEER_GREETING;
	p->begun_us = clock_now_us();
	p->ps->n_links++;
	list_append(&p->ps->links, &p->link);
	peer_stream_begin(p);
}

/* Return: false: it had ended. */
static bool peer_stop(struct peer *p, bool silent, const char *fmt, va_list args)
{
	if (p->state == PEER_ENDED)
		return false;
	p->state = PEER_ENDED;
	p->ended_us = clock_now_us();
	vsnprintf(p->why, sizeof(p->why), fmt, args);
	peer_hello_clean(p->why);
	peer_stream_end(p, silent);
	return true;
}

/* Its end; the reference of it is dropped. */
static void peer_tell(struct peer *p)
{
	const struct peers_ops *ops = p->ps->ops;
	void *userdata = p->ps->userdata;

	CHECK(p->state == PEER_ENDED);
	if (!p->ps->closing && p->shown)
		ops->gone(userdata, p, p->why);
	else if (!p->ps->closing && ops->refused)
		ops->refused(userdata, p->at, p->why);
	peer_unref(p);
}

static void peer_on_gone(struct work *w)
{
	peer_tell(CONTAINER_OF(w, struct peer, gone));
}

void peer_fail(struct peer *p, const char *fmt, ...)
{
	va_list args;
	bool now;

	va_start(args, fmt);
	now = peer_stop(p, false, fmt, args);
	va_end(args);
	if (now)
		peer_tell(p);
}

void peer_fail_later(struct peer *p, const char *fmt, ...)
{
	va_list args;
	bool now;

	va_start(args, fmt);
	now = peer_stop(p, false, fmt, args);
	va_end(args);
	if (now)
		loopq_post(p->ps->loopq, &p->gone, peer_on_gone);
}

/* As peer_fail_later, of one whose other end does not answer. */
static void peer_fail_silent(struct peer *p, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

static void peer_fail_silent(struct peer *p, const char *fmt, ...)
{
	va_list args;
	bool now;

	va_start(args, fmt);
	now = peer_stop(p, true, fmt, args);
	va_end(args);
	if (now)
		loopq_post(p->ps->loopq, &p->gone, peer_on_gone);
}

/* ------------------------------------------------------------------------------------ it is up */

/* One that @p replaces, or NULL. */
static struct peer *peer_older(const struct peer *p)
{
	struct peer *q, *tmp;

	list_for_each (q, tmp, &p->ps->links, link) {
		bool same = memcmp(q->instance, p->instance, PEER_INSTANCE_BYTES) == 0;

		if (q != p && q->state == PEER_UP && strcmp(q->name, p->name) == 0 &&
		    (!same || q->dialled == p->dialled))
			return q;
	}
	return NULL;
}

static void peer_end_older(struct peer *p)
{
	struct peer *q;

	while (p->state != PEER_ENDED && (q = peer_older(p))) {
		bool same = memcmp(q->instance, p->instance, PEER_INSTANCE_BYTES) == 0;

		peer_fail(q,
			  same ? "node '%s' has connected again"
			       : "a newer daemon of node '%s' has connected",
			  p->name);
	}
}

static void peer_send_ping(struct peer *p, uint64_t now_us)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	Shardd__V1__PeerPing ping = SHARDD__V1__PEER_PING__INIT;

	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_PING;
	m.ping = &ping;
	p->pinged_us = now_us;
	peer_stream_send(p, &m);
}

static void peer_become_up(struct peer *p)
{
	/* the other end waits for the first one */
	peer_send_ping(p, clock_now_us());
	peer_end_older(p);
	if (p->state == PEER_ENDED) /* by a callback */
		return;
	p->state = PEER_UP;
	p->shown = true;
	p->ps->ops->up(p->ps->userdata, p);
}

/* ------------------------------------------------------------------------- what has been received */

static void peer_greet(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	char why[PEER_WHY_BYTES];

	if (m->body_case == SHARDD__V1__PEER_MESSAGE__BODY_BYE) {
		peer_fail(p, "it has ended the link: %.300s", m->bye->reason);
	} else if (m->body_case != SHARDD__V1__PEER_MESSAGE__BODY_HELLO) {
		peer_fail(p, "its first message is no hello");
	} else if (peer_hello_check(p, m->hello, why, sizeof(why))) {
		peer_fail(p, "%s", why);
	} else if (p->dialled) {
		peer_become_up(p);
	} else {
		p->state = PEER_AGREED;
		peer_hello_send(p);
	}
}

static void peer_take(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	switch (m->body_case) {
	case SHARDD__V1__PEER_MESSAGE__BODY_PING:
		if (p->state == PEER_AGREED)
			peer_become_up(p);
		break;
	case SHARDD__V1__PEER_MESSAGE__BODY_BYE:
		peer_fail(p, "node '%s' has ended the link: %.300s", p->name, m->bye->reason);
		break;
	case SHARDD__V1__PEER_MESSAGE__BODY_HELLO:
	case SHARDD__V1__PEER_MESSAGE__BODY__NOT_SET:
		peer_fail(p, "node '%s' has sent a message that is not allowed here", p->name);
		break;
	default:
		if (p->state == PEER_UP)
			p->ps->ops->message(p->ps->userdata, p, m);
		else
			peer_fail(p, "node '%s' has sent a message before its first ping", p->name);
	}
}

void peer_on_message(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	CHECK(p->state != PEER_ARMED && p->state != PEER_ENDED);
	p->heard_us = clock_now_us();
	if (p->state == PEER_GREETING)
		peer_greet(p, m);
	else
		peer_take(p, m);
}

/* ----------------------------------------------------------------------------------- the time */

/* What a callback has noted may be later than the time of the tick. */
static uint64_t peer_since(uint64_t at_us, uint64_t now_us)
{
	return now_us > at_us ? now_us - at_us : 0;
}

static uint64_t peer_forgive(uint64_t at_us, uint64_t blocked_us, uint64_t now_us)
{
	return at_us + blocked_us < now_us ? at_us + blocked_us : now_us;
}

static void peer_fail_late(struct peer *p)
{
	if (*p->name)
		peer_fail_silent(p, "node '%s' at %s has not completed its greeting within %u s",
				 p->name, p->at, PEER_GREET_US / 1000000);
	else
		peer_fail_silent(p, "the node at %s has not said hello within %u s", p->at,
				 PEER_GREET_US / 1000000);
}

/* @blocked_us: so long the loop has not looked. Whatever came then is in the loop's queue, behind this
 * tick. */
static void peer_tick(struct peer *p, uint64_t now_us, uint64_t blocked_us)
{
	p->heard_us = peer_forgive(p->heard_us, blocked_us, now_us);
	p->begun_us = peer_forgive(p->begun_us, blocked_us, now_us);
	if (p->state == PEER_ENDED) {
		if (peer_since(p->ended_us, now_us) >= PEER_BYE_US)
			peer_stream_end(p, true);
	} else if (p->state != PEER_UP) {
		if (peer_since(p->begun_us, now_us) >= PEER_GREET_US)
			peer_fail_late(p);
	} else if (peer_since(p->heard_us, now_us) >= PEER_SILENCE_US) {
		peer_fail_silent(p, "node '%s' has not answered for %.2f s", p->name,
				 PEER_SILENCE_US / 1e6);
	} else if (peer_since(p->pinged_us, now_us) >= PEER_PING_US &&
		   list_empty(&p->out.waiting)) {
		peer_send_ping(p, now_us);
	}
}

void peers_tick(struct peers *ps, uint64_t now_us)
{
	uint64_t gap = peer_since(ps->looked_us, now_us);
	uint64_t blocked_us = gap > PEERS_LOOK_US ? gap - PEERS_LOOK_US : 0;
	struct peer *p, *tmp;

	CHECK(!ps->closing);
	ps->looked_us = now_us;
	peer_server_arm(ps); /* there may be memory now */
	list_for_each (p, tmp, &ps->links, link)
		peer_tick(p, now_us, blocked_us);
	bulk_hands_tick(ps, now_us, blocked_us);
}

/* ----------------------------------------------------------------------------------- to dial */

static grpc_arg peers_arg(const char *key, int value)
{
	return (grpc_arg){ GRPC_ARG_INTEGER, (char *)key, { .integer = value } };
}

grpc_channel *peers_channel_new(const struct peers *ps, const char *name, const char *at,
				const grpc_arg *more, size_t n)
{
	char target[PEER_PLACE_BYTES + 8];
	const grpc_arg all[] = {
		peers_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1), /* a connection of its own */
		peers_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
		peers_arg(GRPC_ARG_ENABLE_RETRIES, 0),
		peers_arg(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
		peers_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, PEER_CONNECT_MS),
		peers_arg(GRPC_ARG_KEEPALIVE_TIME_MS, INT_MAX),
		peers_arg(GRPC_ARG_HTTP2_BDP_PROBE, 0),
		peers_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
	};
	grpc_arg args[PEERS_ARGS];
	grpc_channel_args list = { ARRAY_SIZE(all) + n, args };

	CHECK(list.num_args < PEERS_ARGS);
	memcpy(args, all, sizeof(all));
	memcpy(args + ARRAY_SIZE(all), more, n * sizeof(*more));
	if (ps->certs)
		args[list.num_args++] = (grpc_arg){ GRPC_ARG_STRING,
						    (char *)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
						    { .string = (char *)name } };
	snprintf(target, sizeof(target), "dns:///%s", at);
	return grpc_channel_create(target, ps->dial_creds, &list);
}

int peers_check_connect(const struct peers *ps, const char *name, const char *at, struct fault *f)
{
	if (!name_is_good(name))
		return fault_set(f, FAULT_INVALID, "peer",
				 "'%.100s' is not a valid node name: use " NAME_RULE, name);
	if (strcmp(name, ps->node) == 0)
		return fault_set(f, FAULT_INVALID, "peer", "node '%s' cannot have a link to itself",
				 name);
	if (!peer_hello_is_allowed(ps, name))
		return fault_set(f, FAULT_DENIED, "peer",
				 "node '%s' is not among the nodes that may connect: add it to "
				 "them",
				 name);
	return peer_address_check(ps, at, 1, f);
}

int peers_connect(struct peers *ps, const char *name, const char *at, struct peer **ret,
		  struct fault *f)
{
	const grpc_arg more[] = {
		peers_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)PEER_MESSAGE_BYTES),
		peers_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 20),
	};
	struct peer *p;

	CHECK(!ps->closing);
	if (peers_check_connect(ps, name, at, f))
		return (int)f->code;
	if (ps->n_links >= ps->max_links)
		return fault_set(f, FAULT_EXHAUSTED, "peer",
				 "there are %u links to other nodes, the limit: raise it, or end "
				 "some",
				 ps->max_links); /* n_links has those that are being refused, too */
	p = peer_new(ps);
	if (!p)
		return fault_errno(f, -ENOMEM, "connecting to another node");
	p->dialled = true;
	p->shown = true;
	text_copy(p->name, sizeof(p->name), name);
	text_copy(p->at, sizeof(p->at), at);
	p->channel = peers_channel_new(ps, name, at, more, ARRAY_SIZE(more));
	p->call = grpc_channel_create_call(p->channel, NULL, GRPC_PROPAGATE_DEFAULTS, ps->cq,
					   grpc_slice_from_static_string(PEER_METHOD), NULL,
					   gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
	peer_begin(p);
	peer_hello_send(p);
	*ret = p;
	return 0;
}

/* ------------------------------------------------------------------------------------- its owner */

struct peer *peers_find(struct peers *ps, const char *name)
{
	struct peer *p, *tmp;

	list_for_each (p, tmp, &ps->links, link)
		if (p->state == PEER_UP && strcmp(p->name, name) == 0)
			return p;
	return NULL;
}

void peer_send(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	MAGIC_CHECK(p, PEER_MAGIC);
	CHECK(p->state == PEER_UP || p->state == PEER_ENDED);
	if (p->state == PEER_UP)
		peer_stream_send(p, m);
}

void peer_end(struct peer *p, const char *why)
{
	MAGIC_CHECK(p, PEER_MAGIC);
	peer_fail_later(p, "%s", why);
}

const char *peer_name(const struct peer *p)
{
	return p->name;
}

bool peer_is_dialled(const struct peer *p)
{
	return p->dialled;
}

void peer_set_data(struct peer *p, void *data)
{
	p->data = data;
}

void *peer_data(const struct peer *p)
{
	return p->data;
}

uint16_t peers_port(const struct peers *ps)
{
	return ps->port;
}

/* --------------------------------------------------------------------------- begin and end */

static void peers_free(struct peers *ps)
{
	for (size_t i = 0; i < ps->n_allowed; i++)
		free(ps->allowed[i]);
	free(ps->allowed);
	free(ps->cluster);
	free(ps->node);
	bulk_hands_free(ps);
	peer_tls_deinit(ps);
	free(ps);
	grpc_shutdown();
}

static void peers_on_over(struct work *w)
{
	struct peers *ps = CONTAINER_OF(w, struct peers, over);
	peers_closed_cb closed = ps->closed;
	void *data = ps->closed_data;

	CHECK(list_empty(&ps->links) && !ps->n_links && !ps->n_armed);
	pthread_join(ps->thread, NULL); /* it has posted its last work */
	grpc_completion_queue_destroy(ps->cq);
	peers_free(ps);
	if (closed)
		closed(data);
}

static void *peers_main(void *peers)
{
	struct peers *ps = peers;

	peer_stream_main(ps);
	loopq_post(ps->loopq, &ps->over, peers_on_over);
	return NULL;
}

static void peers_on_down(struct work *w)
{
	peers_drop(CONTAINER_OF(w, struct peers, down.work));
}

/*
 * The server stops and its calls are cancelled; so are those of links that were dialled. Each batch ends
 * and drops its reference. When the last link is freed and the server is down nothing can begin a batch
 * any more: the queue is shut down, and the thread ends.
 */
void peers_close(struct peers *ps, peers_closed_cb done, void *userdata)
{
	struct peer *p, *tmp;

	CHECK(!ps->closing);
	ps->closing = true;
	ps->closed = done;
	ps->closed_data = userdata;
	list_for_each (p, tmp, &ps->links, link) {
		if (p->state == PEER_ENDED)
			peer_stream_end(p, true);
		else /* told to nobody */
			peer_fail_silent(p, "the daemon of node '%s' ends", ps->node);
	}
	bulk_hands_close(ps);
	grpc_server_shutdown_and_notify(ps->server, ps->cq, &ps->down);
	grpc_server_cancel_all_calls(ps->server);
}

static int peers_copy_allowed(struct peers *ps, const struct peers_options *o)
{
	if (!o->allowed)
		return 0;
	ps->allowed = calloc(o->n_allowed + 1, sizeof(*ps->allowed));
	if (!ps->allowed)
		return -ENOMEM;
	for (; ps->n_allowed < o->n_allowed; ps->n_allowed++) {
		ps->allowed[ps->n_allowed] = strdup(o->allowed[ps->n_allowed]);
		if (!ps->allowed[ps->n_allowed])
			return -ENOMEM;
	}
	return 0;
}

static int peers_copy(struct peers *ps, const struct peers_options *o)
{
	memcpy(ps->instance, o->instance, PEER_INSTANCE_BYTES);
	ps->plain_anywhere = o->insecure;
	ps->max_links = o->max_links ? o->max_links : PEERS_MAX_LINKS;
	ps->max_queued = o->max_queued ? o->max_queued : PEERS_MAX_QUEUED;
	ps->cluster = strdup(o->cluster);
	ps->node = strdup(o->node);
	if (!ps->cluster || !ps->node)
		return -ENOMEM;
	return peers_copy_allowed(ps, o);
}

static int peers_check(const struct peers_options *o, struct fault *f)
{
	if (!*o->cluster || strlen(o->cluster) >= NAME_BYTES)
		return fault_set(f, FAULT_INVALID, "cluster",
				 "'%.100s' is not a valid cluster name: use 1 to %d bytes",
				 o->cluster, NAME_BYTES - 1);
	if (!name_is_good(o->node))
		return fault_set(f, FAULT_INVALID, "node",
				 "'%.100s' is not a valid node name: use " NAME_RULE, o->node);
	return 0;
}

static int peers_start_thread(struct peers *ps)
{
	sigset_t all, old;
	int r;

	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&ps->thread, NULL, peers_main, ps);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r == 0)
		pthread_setname_np(ps->thread, "shardd-peer");
	return -r;
}

/* No thread was started: what core has is taken here. */
static void peers_abort(struct peers *ps)
{
	gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);

	if (ps->server) {
		grpc_server_shutdown_and_notify(ps->server, ps->cq, &ps->down);
		CHECK(grpc_completion_queue_next(ps->cq, never, NULL).type == GRPC_OP_COMPLETE);
		grpc_server_destroy(ps->server);
	}
	bulk_hands_shutdown(ps);
	if (ps->cq) {
		grpc_completion_queue_shutdown(ps->cq);
		CHECK(grpc_completion_queue_next(ps->cq, never, NULL).type == GRPC_QUEUE_SHUTDOWN);
		grpc_completion_queue_destroy(ps->cq);
	}
	peers_free(ps);
}

static int peers_start(struct peers *ps, const struct peers_options *o, struct fault *f)
{
	int r = peers_copy(ps, o);

	if (r)
		return fault_errno(f, r, "listening for other nodes");
	if (peer_tls_init(ps, o, f) || peer_address_check(ps, o->listen, 0, f))
		return (int)f->code;
	ps->cq = grpc_completion_queue_create_for_next(NULL);
	if (bulk_hands_new(ps, f) || peer_server_listen(ps, o->listen, f))
		return (int)f->code;
	r = bulk_hands_start(ps);
	if (r == 0)
		r = peers_start_thread(ps);
	return r ? fault_errno(f, r, "starting the thread of the links to other nodes") : 0;
}

int peers_new(struct loopq *loopq, const struct peers_options *o, const struct peers_ops *ops,
	      void *userdata, struct peers **ret, struct fault *f)
{
	struct peers *ps;

	CHECK(ops->up && ops->message && ops->gone);
	if (peers_check(o, f))
		return (int)f->code;
	ps = calloc(1, sizeof(*ps));
	if (!ps)
		return fault_errno(f, -ENOMEM, "listening for other nodes");
	ps->loopq = loopq;
	ps->ops = ops;
	ps->userdata = userdata;
	ps->n_live = 1;
	ps->looked_us = clock_now_us();
	ps->down.fn = peers_on_down;
	list_init(&ps->links);
	grpc_init();
	if (peers_start(ps, o, f)) {
		peers_abort(ps);
		return (int)f->code;
	}
	peer_server_arm(ps);
	bulk_hands_arm(ps);
	*ret = ps;
	return 0;
}
