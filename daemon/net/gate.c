#include "net/gate.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "net/gate_impl.h"

enum {
	GATE_EVENTS = 64, /* of one look: then what the loop asks has its turn */
	GATE_TICK_MS = 250,
	GATE_PACE_MS = 1,
};

/* The pause before the same limit of the same user is logged again. */
#define GATE_LOG_AGAIN_US 10000000u

/* ---------------------------------------------------------------- news */

static void gate_wake(struct gate *g)
{
	static const uint64_t one = 1;

	/* full: it is awake */
	if (write(g->wake_fd, &one, sizeof(one)) < 0)
		CHECK(errno == EAGAIN || errno == EINTR);
}

static void gate_ask(struct gate_conn *gc, unsigned what)
{
	atomic_fetch_or(&gc->asked, what);
	if (atomic_exchange(&gc->queued, true))
		return;
	atomic_fetch_add(&gc->refs, 1);
	mpsc_push(&gc->gate->inbox, &gc->node);
	gate_wake(gc->gate);
}

static void gate_conn_unref(struct gate_conn *gc)
{
	if (atomic_fetch_sub(&gc->refs, 1) > 1)
		return;
	CHECK(!gc->open);
	fd_close(gc->client.fd);
	fd_close(gc->core.fd);
	gc->magic = 0;
	free(gc);
}

/* The entry for @uid and @limit: the existing one, a new one, or else the oldest one. */
static struct gate_logged *gate_logged_get(struct gate *g, uid_t uid, const char *limit)
{
	struct gate_logged *oldest = &g->logged[0];

	for (unsigned i = 0; i < g->n_logged; i++) {
		struct gate_logged *e = &g->logged[i];

		if (e->uid == uid && strcmp(e->limit, limit) == 0)
			return e;
		if (e->at_us < oldest->at_us)
			oldest = e;
	}
	if (g->n_logged < GATE_LOGGED)
		oldest = &g->logged[g->n_logged++];
	*oldest = (struct gate_logged){ .uid = uid, .limit = limit };
	return oldest;
}

static void gate_log(struct gate_conn *gc)
{
	const struct gate_breach *b = &gc->flow.breach;
	struct gate_logged *e = gate_logged_get(gc->gate, gc->uid, b->limit);
	uint64_t now = clock_now_us();
	bool due = !e->at_us || now - e->at_us >= GATE_LOG_AGAIN_US;

	log_write(due ? LOG_WARN : LOG_DEBUG, "net",
		  "connection closed limit=%s value=%llu uid=%u pid=%d why=\"%s\" repeats=%llu",
		  b->limit, (unsigned long long)b->value, gc->uid, gc->pid, b->what,
		  (unsigned long long)e->repeats);
	e->repeats = due ? 0 : e->repeats + 1;
	if (due)
		e->at_us = now;
}

static void gate_on_broken(struct work *work)
{
	struct gate_conn *gc = CONTAINER_OF(work, struct gate_conn, broken);

	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	if (gc->conn) {
		gate_log(gc);
		conn_close(gc->conn);
	}
	gate_conn_unref(gc);
}

void gate_broken(struct gate_conn *gc)
{
	atomic_fetch_add(&gc->refs, 1);
	loopq_post(gc->gate->loopq, &gc->broken, gate_on_broken);
}

/* ------------------------------------------------------------ the thread */

static struct gate_user *gate_user_get(struct gate *g, uid_t uid)
{
	struct gate_user *u, *tmp;

	list_for_each (u, tmp, &g->users, link)
		if (u->uid == uid)
			return u;
	u = calloc(1, sizeof(*u));
	if (!u)
		return NULL;
	u->uid = uid;
	list_init(&u->link);
	list_append(&g->users, &u->link);
	return u;
}

static void gate_user_put(struct gate_user *u)
{
	if (!u || --u->n > 0)
		return;
	CHECK(u->purse.used == 0);
	list_unlink(&u->link);
	free(u);
}

static void gate_add(struct gate_conn *gc, uint64_t now_us)
{
	struct gate *g = gc->gate;

	atomic_fetch_add(&gc->refs, 1); /* the thread's, until gate_remove */
	list_append(&g->conns, &gc->link);
	gc->user = gate_user_get(g, gc->uid);
	if (gc->user) {
		gc->user->n++;
		gc->user->purse.limit = atomic_load(&gc->user_bytes);
	}
	if (gc->user && gate_pipe_open(gc, now_us) == 0)
		return;
	gc->closed = true;
	gc->flow.breach = (struct gate_breach){ "memory", 0, "no memory for a connection" };
	gate_broken(gc);
}

/* The thread releases it. */
static void gate_finish(struct gate_conn *gc)
{
	gate_pipe_close(gc);
	gate_user_put(gc->user);
	gc->user = NULL;
	list_unlink(&gc->link);
	gate_conn_unref(gc);
}

static void gate_remove(struct gate_conn *gc, uint64_t now_us)
{
	if (gate_pipe_end(gc, now_us))
		list_append(&gc->gate->paced, &gc->waiting);
	else
		gate_finish(gc);
}

static void gate_answer(struct gate_conn *gc, uint64_t now_us)
{
	unsigned asked;

	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	/* in this order: a request that arrives in between is queued once more */
	atomic_store(&gc->queued, false);
	asked = atomic_exchange(&gc->asked, 0);
	if (asked & GATE_ASK_ADD)
		gate_add(gc, now_us);
	if ((asked & GATE_ASK_ATTACHED) && gc->open) {
		gate_flow_attach(&gc->flow);
		gate_pipe_retry(gc, now_us);
	}
	if ((asked & GATE_ASK_LIMIT) && gc->user) {
		gc->user->purse.limit = atomic_load(&gc->user_bytes);
		gate_pipe_retry(gc, now_us);
	}
	if (asked & GATE_ASK_END)
		gate_remove(gc, now_us);
	gate_conn_unref(gc);
}

static void gate_take_news(struct gate *g, uint64_t now_us)
{
	struct gate_limits *limits = atomic_exchange(&g->new_limits, NULL);
	struct mpsc_node *node;

	if (limits)
		g->limits = *limits;
	free(limits);
	while ((node = mpsc_pop(&g->inbox)))
		gate_answer(CONTAINER_OF(node, struct gate_conn, node), now_us);
}

/* In the order in which they began to wait. */
static void gate_retry(struct list *waiting, uint64_t now_us)
{
	struct list all = LIST_INIT(all);

	list_take_all(&all, waiting);
	while (!list_empty(&all)) {
		struct gate_conn *gc = list_first(&all, struct gate_conn, waiting);

		list_unlink(&gc->waiting);
		if (!gc->linger_us)
			gate_pipe_retry(gc, now_us);
		else if (gate_pipe_linger(gc, now_us))
			gate_finish(gc);
		else
			list_append(&gc->gate->paced, &gc->waiting);
	}
}

static void gate_retry_all(struct gate *g, uint64_t now_us)
{
	gate_retry(&g->paced, now_us);
	if (g->returns_seen == g->total.returns)
		return;
	g->returns_seen = g->total.returns;
	gate_retry(&g->waiting, now_us);
}

static void gate_tick_all(struct gate *g, uint64_t now_us)
{
	struct gate_conn *gc, *tmp;

	list_for_each (gc, tmp, &g->conns, link)
		gate_pipe_tick(gc, now_us);
}

static void gate_turn(struct gate *g, const struct epoll_event *events, int n, uint64_t now_us)
{
	uint64_t count;

	for (int i = 0; i < n; i++) {
		if (events[i].data.ptr)
			gate_pipe_ready(events[i].data.ptr, events[i].events, now_us);
		else if (read(g->wake_fd, &count, sizeof(count)) < 0)
			CHECK(errno == EAGAIN || errno == EINTR);
	}
	/* after the events: none of them is of a connection that is freed here */
	gate_take_news(g, now_us);
	gate_retry_all(g, now_us);
}

static void *gate_main(void *userdata)
{
	struct gate *g = userdata;
	struct epoll_event events[GATE_EVENTS];
	uint64_t now = clock_now_us(), tick_at = now;

	while (!atomic_load(&g->stopping)) {
		int n = epoll_wait(g->epoll_fd, events, GATE_EVENTS,
				   list_empty(&g->paced) ? GATE_TICK_MS : GATE_PACE_MS);

		CHECK(n >= 0 || errno == EINTR);
		now = clock_now_us();
		atomic_store_explicit(&g->heartbeat_us, now, memory_order_relaxed);
		gate_turn(g, events, n, now);
		if (now < tick_at)
			continue;
		gate_tick_all(g, now);
		tick_at = now + GATE_TICK_MS * 1000u;
	}
	gate_take_news(g, now); /* those that were ended just before */
	while (!list_empty(&g->paced))
		gate_finish(list_first(&g->paced, struct gate_conn, waiting));
	return NULL;
}

static int gate_start(struct gate *g)
{
	struct epoll_event ev = { .events = EPOLLIN };
	sigset_t all, old;
	int r;

	g->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	g->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (g->epoll_fd < 0 || g->wake_fd < 0 ||
	    epoll_ctl(g->epoll_fd, EPOLL_CTL_ADD, g->wake_fd, &ev) < 0)
		return -errno;
	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&g->thread, NULL, gate_main, g);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r == 0)
		pthread_setname_np(g->thread, "shardd-gate");
	return -r;
}

/* -------------------------------------------------------------- the loop's */

static void gate_free(struct gate *g)
{
	fd_close(g->epoll_fd);
	fd_close(g->wake_fd);
	free(atomic_exchange(&g->new_limits, NULL));
	g->magic = 0;
	free(g);
}

int gate_new(struct loopq *loopq, const struct gate_limits *limits, struct gate **ret)
{
	struct gate *g = calloc(1, sizeof(*g));
	int r;

	if (!g)
		return -ENOMEM;
	g->magic = GATE_MAGIC;
	g->loopq = loopq;
	g->limits = *limits;
	g->epoll_fd = g->wake_fd = -1;
	mpsc_init(&g->inbox);
	list_init(&g->conns);
	list_init(&g->waiting);
	list_init(&g->paced);
	list_init(&g->users);
	atomic_init(&g->heartbeat_us, clock_now_us());
	r = gate_start(g);
	if (r < 0) {
		gate_free(g);
		return r;
	}
	*ret = g;
	return 0;
}

void gate_reconfigure(struct gate *g, const struct gate_limits *limits)
{
	struct gate_limits *copy = malloc(sizeof(*copy));

	MAGIC_CHECK(g, GATE_MAGIC);
	if (!copy) {
		log_error("net", "no memory: the limits of gRPC connections are unchanged");
		return;
	}
	*copy = *limits;
	free(atomic_exchange(&g->new_limits, copy));
	gate_wake(g);
}

/* @ret: core's end of a new pair, and in @gc the other one and a duplicate of the socket. */
static int gate_connect(struct gate_conn *gc, struct conn *c, int *ret)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	gc->client.fd = fcntl(conn_fd(c), F_DUPFD_CLOEXEC, 3);
	if (gc->client.fd < 0) {
		int r = -errno;

		fd_close(pair[0]);
		fd_close(pair[1]);
		return r;
	}
	gc->core.fd = pair[0];
	*ret = pair[1];
	return 0;
}

int gate_open(struct gate *g, struct conn *c, uint64_t user_bytes, int *ret_fd,
	      struct gate_conn **ret)
{
	struct gate_conn *gc = calloc(1, sizeof(*gc));
	int r;

	MAGIC_CHECK(g, GATE_MAGIC);
	if (!gc)
		return -ENOMEM;
	gc->magic = GATE_CONN_MAGIC;
	atomic_init(&gc->refs, 1);
	gc->gate = g;
	gc->conn = c;
	gc->uid = proc_uid(conn_proc(c));
	gc->pid = proc_pid(conn_proc(c));
	atomic_init(&gc->user_bytes, user_bytes);
	gc->client = (struct gate_side){ .gc = gc, .fd = -1 };
	gc->core = (struct gate_side){ .gc = gc, .fd = -1 };
	list_init(&gc->link);
	list_init(&gc->waiting);
	r = gate_connect(gc, c, ret_fd);
	if (r < 0) {
		gate_conn_unref(gc);
		return r;
	}
	*ret = gc;
	conn_leave_shutdown(c);
	gate_ask(gc, GATE_ASK_ADD);
	return 0;
}

void gate_attached(struct gate_conn *gc)
{
	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	gate_ask(gc, GATE_ASK_ATTACHED);
}

void gate_set_user_bytes(struct gate_conn *gc, uint64_t user_bytes)
{
	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	if (atomic_exchange(&gc->user_bytes, user_bytes) != user_bytes)
		gate_ask(gc, GATE_ASK_LIMIT);
}

uint64_t gate_held_bytes(const struct gate_conn *gc)
{
	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	return atomic_load_explicit(&gc->held, memory_order_relaxed);
}

void gate_conn_end(struct gate_conn *gc)
{
	if (!gc)
		return;
	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	CHECK(gc->conn);
	gc->conn = NULL;
	gate_ask(gc, GATE_ASK_END);
	gate_conn_unref(gc);
}

uint64_t gate_heartbeat_us(const struct gate *g)
{
	return atomic_load_explicit(&g->heartbeat_us, memory_order_relaxed);
}

struct gate *gate_close(struct gate *g)
{
	if (!g)
		return NULL;
	MAGIC_CHECK(g, GATE_MAGIC);
	atomic_store(&g->stopping, true);
	gate_wake(g);
	pthread_join(g->thread, NULL);
	CHECK(list_empty(&g->conns) && list_empty(&g->users));
	loopq_drain(g->loopq); /* news of breaches that were still queued */
	gate_free(g);
	return NULL;
}
