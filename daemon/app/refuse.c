#include "app/refuse.h"

#include <stdlib.h>
#include <unistd.h>
#include <uv.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/list.h"
#include "core/loopq.h"
#include "net/listener.h"
#include "rpc/rpc_server.h"

/* The end: nobody has come for this long, and all have gone; or the time is up. */
#define REFUSE_QUIET_US 300000u
#define REFUSE_MOST_US  3000000u
#define REFUSE_TICK_MS  20u
#define REFUSE_CONNS    256u

struct refuse {
	uv_loop_t loop;
	struct loopq loopq;
	struct fault why;
	struct rpc_server *rpc;
	struct listener *listener;
	struct list conns; /* of struct refuse_conn */
	uv_timer_t tick;
	uint64_t began_us, news_us;
	bool ending, rpc_closing;
};

struct refuse_conn {
	struct list link;
	struct refuse *refuse;
	struct conn *conn;
};

static void refuse_on_closed(struct conn *c, void *userdata)
{
	struct refuse_conn *rc = userdata;

	rpc_server_forget(rc->refuse->rpc, c);
	if (rc->refuse->listener)
		listener_conn_ended(rc->refuse->listener);
	list_unlink(&rc->link);
	free(rc);
}

static void refuse_on_connection(struct conn *c, void *userdata)
{
	struct refuse *r = userdata;
	struct refuse_conn *rc = calloc(1, sizeof(*rc));

	r->news_us = clock_now_us();
	if (!rc) {
		listener_conn_ended(r->listener);
		conn_close(c);
		return;
	}
	rc->refuse = r;
	rc->conn = c;
	list_init(&rc->link);
	list_append(&r->conns, &rc->link);
	conn_on_closed(c, refuse_on_closed, rc);
	if (conn_protocol(c) != CONN_GRPC || rpc_server_adopt(r->rpc, c, conn_fd(c)) < 0)
		conn_close(c);
}

static void refuse_on_rpc_closed(void *userdata)
{
	struct refuse *r = userdata;

	loopq_close(&r->loopq);
	uv_close((uv_handle_t *)&r->tick, NULL);
}

static void refuse_on_tick(uv_timer_t *timer)
{
	struct refuse *r = timer->data;
	struct refuse_conn *rc, *tmp;
	uint64_t now = clock_now_us();

	if (!r->ending && now - r->began_us < REFUSE_MOST_US &&
	    (now - r->news_us < REFUSE_QUIET_US || listener_connections(r->listener)))
		return;
	if (!r->ending) {
		r->ending = true;
		r->listener = listener_close(r->listener);
		list_for_each (rc, tmp, &r->conns, link)
			conn_close(rc->conn);
	} else if (!r->rpc_closing && list_empty(&r->conns)) {
		r->rpc_closing = true;
		rpc_server_close(r->rpc, refuse_on_rpc_closed, r);
	}
}

/* Return: false: nothing was begun but the loop's queue. */
static bool refuse_begin(struct refuse *r, int socket_fd, const struct config *config)
{
	const struct rpc_options rpc = { .max_message_bytes = 1u << 20,
					 .max_calls_per_conn = 16,
					 .refusal = &r->why };
	struct listener_options options = { .inherited_fd = socket_fd,
					    .max_connections = REFUSE_CONNS,
					    .hello_timeout_us = REFUSE_MOST_US };
	struct fault f = FAULT_NULL;

	if (config) {
		options.allow_uids = config->allow.uids;
		options.n_allow_uids = config->allow.n_uids;
		options.allow_gids = config->allow.gids;
		options.n_allow_gids = config->allow.n_gids;
	}
	if (rpc_server_new(&r->loopq, &rpc, NULL, 0, &r->rpc) < 0)
		return false;
	if (listener_new(&r->loop, &options, refuse_on_connection, r, &r->listener, &f)) {
		close(socket_fd);
		r->ending = true;
	}
	return true;
}

void refuse_clients(int socket_fd, const struct fault *why, const struct config *config)
{
	struct refuse r = { .began_us = clock_now_us(), .news_us = clock_now_us() };

	fault_set(&r.why, FAULT_STATE, NULL, "the daemon does not start: %.400s", why->text);
	list_init(&r.conns);
	CHECK(uv_loop_init(&r.loop) == 0);
	uv_timer_init(&r.loop, &r.tick);
	r.tick.data = &r;
	if (loopq_init(&r.loopq, &r.loop) == 0 && refuse_begin(&r, socket_fd, config)) {
		uv_timer_start(&r.tick, refuse_on_tick, REFUSE_TICK_MS, REFUSE_TICK_MS);
	} else {
		close(socket_fd);
		loopq_close(&r.loopq);
		uv_close((uv_handle_t *)&r.tick, NULL);
	}
	uv_run(&r.loop, UV_RUN_DEFAULT);
	uv_loop_close(&r.loop);
}
