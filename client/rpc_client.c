/* The connection, and who drives its completion queue. */
#include "rpc_client.h"

#include <errno.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client_error.h"
#include "rpc_client_impl.h"
#include "thread.h"

#define FIRST_PAUSE_MS 5 /* between two tries to connect; doubles */
#define MAX_PAUSE_MS   100

/* Connections of process rpc_client_process. A child of a fork has the counts, but no thread of gRPC core. It shares the
 * epoll set in which the parent's sockets are: what it adds there ends the parent, when its addresses come out. */
static atomic_uint rpc_client_open;
static atomic_int rpc_client_process;

/* ------------------------------------------------------------ deadlines */

static struct timespec rpc_client_after_ms(uint64_t ms)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	ts.tv_sec += (time_t)(ms / 1000);
	ts.tv_nsec += (long)(ms % 1000) * 1000000;
	if (ts.tv_nsec >= 1000000000) {
		ts.tv_nsec -= 1000000000;
		ts.tv_sec++;
	}
	return ts;
}

struct deadline deadline_in(int timeout_ms)
{
	if (timeout_ms < 0)
		return (struct deadline){ .never = true };
	return (struct deadline){ .at = rpc_client_after_ms((uint64_t)timeout_ms) };
}

gpr_timespec deadline_gpr(struct deadline d)
{
	if (d.never)
		return gpr_inf_future(GPR_CLOCK_MONOTONIC);
	return (gpr_timespec){ .tv_sec = d.at.tv_sec,
			       .tv_nsec = (int32_t)d.at.tv_nsec,
			       .clock_type = GPR_CLOCK_MONOTONIC };
}

/* ------------------------------------------------- leader and followers */

void client_link(struct rpc_client *c, struct rpc_pending *p)
{
	p->next = c->pendings;
	p->prev = &c->pendings;
	if (p->next)
		p->next->prev = &p->next;
	c->pendings = p;
}

static void rpc_client_wake_waiters(struct rpc_client *c, const struct rpc_pending *p)
{
	for (struct waiter *w = c->waiters; w; w = w->next)
		if (!w->p || w->p == p)
			pthread_cond_signal(&w->wake);
	if (c->server.runs)
		c->server.on_event(c->server.data);
}

static void rpc_client_take_event(struct rpc_client *c, const grpc_event *ev)
{
	struct event *event = ev->tag;
	struct rpc_pending *p = event->p;

	p->n_open--;
	c->n_open--;
	event->fn(p);
	rpc_client_wake_waiters(c, p);
	if (p->abandoned && p->n_open == 0)
		pending_destroy(p);
}

/* Wait for one event with the lock dropped. Return: false: none came in time. */
static bool rpc_client_drive_once(struct rpc_client *c, gpr_timespec until)
{
	grpc_event ev;

	c->driving = true;
	pthread_mutex_unlock(&c->lock);
	ev = grpc_completion_queue_next(c->cq, until, NULL);
	pthread_mutex_lock(&c->lock);
	c->driving = false;
	if (ev.type != GRPC_OP_COMPLETE)
		return false;
	rpc_client_take_event(c, &ev);
	return true;
}

/* Sleep until woken. Return: false when the deadline has passed. */
static bool rpc_client_follow(struct rpc_client *c, struct rpc_pending *p, struct deadline d)
{
	struct waiter w = { .next = c->waiters, .p = p };
	struct waiter **link;
	pthread_condattr_t attr;
	int r;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&w.wake, &attr);
	pthread_condattr_destroy(&attr);
	c->waiters = &w;
	if (d.never)
		r = pthread_cond_wait(&w.wake, &c->lock);
	else
		r = pthread_cond_timedwait(&w.wake, &c->lock, &d.at);
	for (link = &c->waiters; *link != &w; link = &(*link)->next)
		;
	*link = w.next;
	pthread_cond_destroy(&w.wake);
	return r == 0;
}

/* Another waiter must continue to drive the queue. */
static void rpc_client_hand_over(struct rpc_client *c)
{
	if (c->driving)
		return;
	if (c->waiters)
		pthread_cond_signal(&c->waiters->wake);
	client_started(c);
}

void client_drive(struct rpc_client *c, struct rpc_pending *p, pending_test test, struct deadline d)
{
	bool in_time = true;

	while (in_time && !test(p))
		in_time = c->driving ? rpc_client_follow(c, p, d)
				     : rpc_client_drive_once(c, deadline_gpr(d));
	rpc_client_hand_over(c);
}

static bool rpc_client_any(struct rpc_pending *const *p, size_t n, pending_test test)
{
	for (size_t i = 0; i < n; i++)
		if (test(p[i]))
			return true;
	return false;
}

void client_drive_any(struct rpc_client *c, struct rpc_pending *const *p, size_t n,
		      pending_test test, struct deadline d)
{
	bool in_time = true;

	while (in_time && !rpc_client_any(p, n, test))
		in_time = c->driving ? rpc_client_follow(c, NULL, d)
				     : rpc_client_drive_once(c, deadline_gpr(d));
	rpc_client_hand_over(c);
}

void client_poll(struct rpc_client *c)
{
	while (!c->driving && rpc_client_drive_once(c, gpr_inf_past(GPR_CLOCK_MONOTONIC)))
		;
	rpc_client_hand_over(c);
}

/* -------------------------------------------------------- a thread that drives */

void client_started(struct rpc_client *c)
{
	if (c->server.runs)
		pthread_cond_signal(&c->server.wake);
}

/* While there are calls; then it sleeps. */
static void *rpc_client_serve_thread(void *arg)
{
	struct rpc_client *c = arg;

	pthread_mutex_lock(&c->lock);
	while (!c->server.stop) {
		if (c->driving || c->n_open == 0)
			pthread_cond_wait(&c->server.wake, &c->lock);
		else
			rpc_client_drive_once(c, gpr_inf_future(GPR_CLOCK_MONOTONIC));
	}
	rpc_client_hand_over(c);
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

int rpc_client_serve(struct rpc_client *c, void (*on_event)(void *data), void *data)
{
	int e = 0;

	pthread_mutex_lock(&c->lock);
	if (!c->server.runs) {
		pthread_cond_init(&c->server.wake, NULL);
		c->server.on_event = on_event;
		c->server.data = data;
		e = thread_start(&c->server.id, rpc_client_serve_thread, c);
		c->server.runs = e == 0;
		if (e)
			pthread_cond_destroy(&c->server.wake);
	}
	pthread_mutex_unlock(&c->lock);
	return -e;
}

void rpc_client_stop_serving(struct rpc_client *c)
{
	pthread_mutex_lock(&c->lock);
	if (!c->server.runs) {
		pthread_mutex_unlock(&c->lock);
		return;
	}
	c->server.stop = true;
	for (struct rpc_pending *p = c->pendings; p; p = p->next)
		if (p->n_open > 0)
			grpc_call_cancel(p->call, NULL);
	pthread_cond_signal(&c->server.wake);
	pthread_mutex_unlock(&c->lock);
	pthread_join(c->server.id, NULL);
	c->server.runs = false;
	pthread_cond_destroy(&c->server.wake);
}

/* -------------------------------------------------------------- connect */

static bool rpc_client_worth_retrying(int e)
{
	/* EAGAIN: its backlog is full. */
	return e == ENOENT || e == ECONNREFUSED || e == EAGAIN || e == EINTR;
}

static int rpc_client_connect_once(const struct sockaddr_un *addr, int *ret)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	int e;

	if (fd < 0)
		return errno;
	if (connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0) {
		*ret = fd;
		return 0;
	}
	e = errno;
	close(fd);
	return e;
}

static bool rpc_client_before(const struct timespec *a, const struct timespec *b)
{
	return a->tv_sec != b->tv_sec ? a->tv_sec < b->tv_sec : a->tv_nsec < b->tv_nsec;
}

/* Return: 0 or an errno, the last try's. */
static int rpc_client_connect_retry(const struct sockaddr_un *addr, uint32_t timeout_ms, int *ret)
{
	struct timespec end = rpc_client_after_ms(timeout_ms);
	unsigned pause_ms = FIRST_PAUSE_MS;
	int e;

	while ((e = rpc_client_connect_once(addr, ret)) != 0 && rpc_client_worth_retrying(e)) {
		struct timespec next = rpc_client_after_ms(pause_ms);

		if (rpc_client_before(&end, &next))
			break;
		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL) == EINTR)
			;
		pause_ms = pause_ms * 2 > MAX_PAUSE_MS ? MAX_PAUSE_MS : pause_ms * 2;
	}
	return e;
}

/* Says who may open the socket. */
static int rpc_client_denied(int e, const char *path, struct shardd_error *err)
{
	struct stat st;
	char whose[64] = "";

	if (stat(path, &st) == 0)
		snprintf(whose, sizeof(whose), " (mode %04o, group %u)", st.st_mode & 07777u,
			 (unsigned)st.st_gid);
	return error_os(err, SHARDD_PERMISSION_DENIED, e,
			"uid %u may not open the daemon's socket %s%s", (unsigned)getuid(), path,
			whose);
}

static int rpc_client_connect_error(int e, const char *path, struct shardd_error *err)
{
	switch (e) {
	case EACCES:
	case EPERM:
		return rpc_client_denied(e, path, err);
	case EMFILE:
	case ENFILE:
	case ENOMEM:
	case ENOBUFS:
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, e, "cannot create a socket for %s",
				path);
	case EAGAIN:
		return error_os(err, SHARDD_UNAVAILABLE, e,
				"the daemon at %s does not accept connections", path);
	default:
		return error_os(err, SHARDD_UNAVAILABLE, e, "no daemon answers at %s", path);
	}
}

static grpc_channel *rpc_client_channel_new(int fd)
{
	grpc_arg args[] = {
		/* The daemon is trusted; a reply may be large. */
		{ GRPC_ARG_INTEGER,
		  (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
		  { .integer = -1 } },
		{ GRPC_ARG_INTEGER, (char *)GRPC_ARG_MAX_METADATA_SIZE, { .integer = 65536 } },
		{ GRPC_ARG_INTEGER, (char *)GRPC_ARG_HTTP2_BDP_PROBE, { .integer = 0 } },
		{ GRPC_ARG_INTEGER,
		  (char *)GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES,
		  { .integer = 1 << 20 } },
		{ GRPC_ARG_INTEGER, (char *)GRPC_ARG_KEEPALIVE_TIME_MS, { .integer = INT_MAX } },
	};
	grpc_channel_args list = { sizeof(args) / sizeof(args[0]), args };
	grpc_channel_credentials *creds = grpc_insecure_credentials_create();
	grpc_channel *channel = grpc_channel_create_from_fd("shardd", fd, creds, &list);

	grpc_channel_credentials_release(creds);
	return channel;
}

/* May this process use gRPC core? */
static int rpc_client_check_fork(struct shardd_error *err)
{
	int process = atomic_load(&rpc_client_process);

	if (!atomic_load(&rpc_client_open) || process == (int)getpid())
		return 0;
	return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			 "process %d was connected when it forked this one, which gRPC does not "
			 "allow: close the connection before the fork, or start this process with "
			 "exec (in Python: multiprocessing's spawn)",
			 process);
}

int rpc_client_connect(const char *path, uint32_t timeout_ms, struct rpc_client **ret,
		       struct shardd_error *err)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	struct rpc_client *c;
	int fd = -1, e;

	e = rpc_client_check_fork(err);
	if (e)
		return e;
	if (strlen(path) >= sizeof(addr.sun_path))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "socket",
				 "the socket path has %zu bytes; the maximum is %zu: %s",
				 strlen(path), sizeof(addr.sun_path) - 1, path);
	memcpy(addr.sun_path, path, strlen(path) + 1);
	e = rpc_client_connect_retry(&addr, timeout_ms, &fd);
	if (e)
		return rpc_client_connect_error(e, path, err);
	c = calloc(1, sizeof(*c));
	if (!c) {
		close(fd);
		return error_memory(err);
	}
	memcpy(c->path, path, strlen(path) + 1);
	c->uid = getuid();
	pthread_mutex_init(&c->lock, NULL);
	atomic_store(&rpc_client_process, (int)getpid());
	atomic_fetch_add(&rpc_client_open, 1);
	grpc_init();
	c->cq = grpc_completion_queue_create_for_next(NULL);
	c->channel = rpc_client_channel_new(fd);
	*ret = c;
	return 0;
}

/* End every call; what the user has not freed yet stays, without a client. */
static void rpc_client_cancel_all(struct rpc_client *c)
{
	for (struct rpc_pending *p = c->pendings; p; p = p->next)
		if (p->n_open > 0)
			grpc_call_cancel(p->call, NULL);
	while (c->n_open > 0)
		rpc_client_drive_once(c, gpr_inf_future(GPR_CLOCK_MONOTONIC));
	for (struct rpc_pending *p = c->pendings; p; p = p->next) {
		p->c = NULL;
		grpc_call_unref(p->call);
		p->call = NULL;
		p->prev = NULL;
	}
}

void rpc_client_close(struct rpc_client *c)
{
	if (!c)
		return;
	rpc_client_stop_serving(c);
	pthread_mutex_lock(&c->lock);
	rpc_client_cancel_all(c);
	pthread_mutex_unlock(&c->lock);
	grpc_channel_destroy(c->channel);
	grpc_completion_queue_shutdown(c->cq);
	while (grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
	       GRPC_QUEUE_SHUTDOWN)
		;
	grpc_completion_queue_destroy(c->cq);
	grpc_shutdown();
	atomic_fetch_sub(&rpc_client_open, 1);
	pthread_mutex_destroy(&c->lock);
	free(c);
}
