#include "coord/coord.h"

#include <errno.h>
#include <string.h>

#include "coord/coord_impl.h"
#include "core/check.h"

static bool coord_fits(const struct coord_txn *t)
{
	uint64_t bytes = t->read ? strlen(t->read) : 0;

	for (size_t i = 0; i < t->n_conds; i++)
		bytes += strlen(t->conds[i].key);
	for (size_t i = 0; i < t->n_changes; i++)
		bytes += strlen(t->changes[i].key) + t->changes[i].bytes;
	return t->n_conds + t->n_changes + 1 <= COORD_MAX_OPS && bytes <= COORD_MAX_BYTES;
}

/* Of what was begun with @r. */
static int coord_count(struct coord *c, int r)
{
	c->running += r == 0;
	return r;
}

static void coord_prepare(struct coord *c, struct coord_call *call)
{
	CHECK(!call->impl && call->done);
	call->owner = c;
}

int coord_txn(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
	      uint32_t timeout_ms)
{
	coord_prepare(c, call);
	if (!coord_fits(txn))
		return -EINVAL;
	return coord_count(c, c->impl->txn(c, call, txn, timeout_ms));
}

int coord_grant(struct coord *c, struct coord_call *call, int64_t ttl_s, uint32_t timeout_ms)
{
	CHECK(ttl_s > 0);
	coord_prepare(c, call);
	return coord_count(c, c->impl->grant(c, call, ttl_s, timeout_ms));
}

int coord_keep(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms)
{
	CHECK(lease);
	coord_prepare(c, call);
	return coord_count(c, c->impl->keep(c, call, lease, timeout_ms));
}

int coord_revoke(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms)
{
	CHECK(lease);
	coord_prepare(c, call);
	return coord_count(c, c->impl->revoke(c, call, lease, timeout_ms));
}

void coord_cancel(struct coord_call *call)
{
	if (call->impl)
		call->owner->impl->cancel(call);
}

void coord_watch_end(struct coord_watch *w)
{
	if (w->impl)
		w->owner->impl->watch_end(w);
}

void coord_call_end(struct coord *c, struct coord_call *call, const struct coord_reply *reply)
{
	CHECK(c->running);
	c->running--;
	call->impl = NULL;
	call->done(call, reply);
}

void coord_cancelled(struct coord *c, struct coord_call *call)
{
	CHECK(c->running);
	c->running--;
	call->impl = NULL;
}

int coord_watch_begin(struct coord *c, struct coord_watch *w, const char *prefix, int64_t from)
{
	CHECK(!w->impl && w->ops);
	w->owner = c;
	return coord_count(c, c->impl->watch_begin(c, w, prefix, from));
}

void coord_watch_over(struct coord *c, struct coord_watch *w)
{
	CHECK(c->running);
	c->running--;
	w->impl = NULL;
}

struct coord *coord_close(struct coord *c)
{
	if (!c)
		return NULL;
	CHECK(!c->running);
	c->impl->close(c);
	return NULL;
}
