/* Connections to nodes for fetches: one for each node and address, which all fetches from it share. */
#include <grpc/support/time.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "peer/bulk_impl.h"

/* Shorter than the time after which the other end closes it: a fetch never finds it just closed. */
#define BULK_DIAL_IDLE_US 1000000u
/* As for links: a connection that is being made is waited for. */
#define BULK_DIAL_LINGER_MS 500
/* What may be under way to this node, or wait for the hands, of each stream: 1 ms of 25 Gbit/s is 3 MB. */
#define BULK_DIAL_AHEAD (4 << 20)
#define BULK_DIAL_FRAME (1 << 20)

static grpc_arg bulk_dial_arg(const char *key, int value)
{
	return (grpc_arg){ GRPC_ARG_INTEGER, (char *)key, { .integer = value } };
}

static grpc_channel *bulk_dial_open(const struct peers *ps, const char *node, const char *at)
{
	const grpc_arg more[] = {
		bulk_dial_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)BULK_MESSAGE_BYTES),
		bulk_dial_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, BULK_DIAL_AHEAD),
		bulk_dial_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, BULK_DIAL_FRAME),
	};

	return peers_channel_new(ps, node, at, more, ARRAY_SIZE(more));
}

static void bulk_dial_free(struct bulk_channel *c)
{
	struct peers *ps = c->ps;

	grpc_channel_destroy(c->channel);
	free(c);
	peers_drop(ps);
}

static void bulk_dial_on_gone(struct work *w)
{
	bulk_dial_free(CONTAINER_OF(w, struct bulk_channel, gone));
}

/* On a hand. */
static void bulk_dial_on_watched(void *channel, bool ok)
{
	struct bulk_channel *c = channel;

	(void)ok;
	loopq_post(c->ps->loopq, &c->gone, bulk_dial_on_gone);
}

/* It has no users. */
static void bulk_dial_end(struct bulk_channel *c)
{
	gpr_timespec wait = gpr_time_from_millis(BULK_DIAL_LINGER_MS, GPR_TIMESPAN);

	CHECK(!c->users);
	list_unlink(&c->link);
	if (grpc_channel_check_connectivity_state(c->channel, 0) != GRPC_CHANNEL_CONNECTING) {
		bulk_dial_free(c);
		return;
	}
	c->watched = (struct bulk_tag){ bulk_dial_on_watched, c };
	grpc_channel_watch_connectivity_state(c->channel, GRPC_CHANNEL_CONNECTING,
					      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), wait),
					      c->ps->bulk->cq, &c->watched);
}

static bool bulk_dial_is_idle(const struct bulk_channel *c, uint64_t now_us)
{
	return !c->users && now_us >= c->idle_us + BULK_DIAL_IDLE_US;
}

static struct bulk_channel *bulk_dial_find(struct bulk *b, const char *node, const char *at)
{
	uint64_t now = clock_now_us();
	struct bulk_channel *c, *tmp;

	list_for_each (c, tmp, &b->channels, link) {
		c->spoiled = c->spoiled || bulk_dial_is_idle(c, now);
		if (!c->spoiled && strcmp(c->node, node) == 0 && strcmp(c->at, at) == 0)
			return c;
	}
	return NULL;
}

struct bulk_channel *bulk_dial_get(struct bulk *b, const char *node, const char *at)
{
	struct bulk_channel *c = bulk_dial_find(b, node, at);

	if (!c) {
		c = calloc(1, sizeof(*c));
		if (!c)
			return NULL;
		c->ps = b->ps;
		text_copy(c->node, sizeof(c->node), node);
		text_copy(c->at, sizeof(c->at), at);
		c->channel = bulk_dial_open(b->ps, node, at);
		list_init(&c->link);
		list_append(&b->channels, &c->link);
		peers_hold(b->ps);
	}
	c->users++;
	return c;
}

void bulk_dial_put(struct bulk_channel *c, bool failed)
{
	CHECK(c->users);
	c->spoiled = c->spoiled || failed;
	c->idle_us = clock_now_us();
	if (--c->users == 0 && (c->spoiled || c->ps->closing))
		bulk_dial_end(c);
}

void bulk_dial_tick(struct bulk *b, uint64_t now_us)
{
	struct bulk_channel *c, *tmp;

	list_for_each (c, tmp, &b->channels, link)
		if (bulk_dial_is_idle(c, now_us))
			bulk_dial_end(c);
}

void bulk_dial_close(struct bulk *b)
{
	struct bulk_channel *c, *tmp;

	list_for_each (c, tmp, &b->channels, link)
		if (!c->users)
			bulk_dial_end(c);
}
