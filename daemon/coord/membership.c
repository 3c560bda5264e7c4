#include "coord/membership.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"

#define MEMBERSHIP_PAUSE_US  200000u
#define MEMBERSHIP_ANSWER_MS 2000u
/* Until it looks again for a key that was not there. */
#define MEMBERSHIP_MISSED_US 1000000u

static void membership_try_later(struct membership *m, const char *why)
{
	m->again_us = clock_now_us() + MEMBERSHIP_PAUSE_US;
	snprintf(m->why, sizeof(m->why), "%s", why);
}

static void membership_key(const struct membership *m, char *ret, size_t bytes)
{
	snprintf(ret, bytes, "members/%s", m->name);
}

static void membership_stop(struct membership *m)
{
	coord_cancel(&m->call);
	follow_end(&m->own);
	m->state = MEMBERSHIP_OUT;
	m->lease = 0;
}

static void membership_out(struct membership *m, const char *why)
{
	char text[sizeof(m->why)];

	snprintf(text, sizeof(text), "%s", why);
	membership_stop(m);
	m->ops->out(m, text);
}

/* The lease lives. Does the key hang on it still? A daemon that has its name and address may have taken it
 * for that of an earlier one. */
static void membership_see(struct membership *m, const struct coord_kv *kv)
{
	char why[200];

	if (kv && kv->lease == m->lease) {
		m->missed = false;
		m->taken = false;
		return;
	}
	m->taken = true; /* without a key: the one that has removed it may be about to join */
	if (!kv && !m->missed) { /* then the next look says who it is */
		m->missed = true;
		m->again_us = clock_now_us() + MEMBERSHIP_MISSED_US;
		return;
	}
	snprintf(why, sizeof(why),
		 kv ? "another daemon has joined by the name '%s' and the same address: give each "
		      "node its own"
		    : "the key of node '%s' is no longer in the store",
		 m->name);
	membership_out(m, why);
}

static void membership_on_key(struct follow *f, const struct coord_kv *kv)
{
	struct membership *m = CONTAINER_OF(f, struct membership, own);

	if (kv)
		membership_see(m, kv);
	else if (!m->missed)
		m->again_us = 0; /* has the lease gone, too? */
}

static void membership_on_looked(struct coord_call *call, const struct coord_reply *r)
{
	if (r->status == COORD_OK) /* else it looks again when it keeps the lease again */
		membership_see(CONTAINER_OF(call, struct membership, call),
			       r->n ? &r->kvs[0] : NULL);
}

/* Beside the watch, which may miss something. */
static void membership_look_own(struct membership *m)
{
	char key[NAME_BYTES + 16];
	struct coord_txn t = { .read = key };

	membership_key(m, key, sizeof(key));
	m->call.done = membership_on_looked;
	(void)coord_txn(m->c, &m->call, &t, MEMBERSHIP_ANSWER_MS);
}

static void membership_on_kept(struct coord_call *call, const struct coord_reply *r)
{
	struct membership *m = CONTAINER_OF(call, struct membership, call);

	if (r->status == COORD_NO_LEASE) {
		membership_out(m, "its lease has ended: the store has not heard of it in time");
	} else if (r->status != COORD_OK) {
		membership_try_later(m,
				     r->why); /* and not only when a third of the lease is over */
	} else {
		m->kept_us = m->asked_us;
		m->again_us = m->asked_us + (uint64_t)m->ttl_s * 1000000 / 3;
		*m->why = 0;
		membership_look_own(m);
	}
}

static void membership_is_in(struct membership *m)
{
	char key[NAME_BYTES + 16];

	membership_key(m, key, sizeof(key));
	follow_begin(&m->own, m->c, key, membership_on_key);
	m->state = MEMBERSHIP_IN;
	m->again_us = m->asked_us + (uint64_t)m->ttl_s * 1000000 / 3;
	m->taken = false;
	m->missed = false;
	*m->why = 0;
	m->ops->joined(m);
}

static void membership_register(struct membership *m);

static void membership_on_removed(struct coord_call *call, const struct coord_reply *r)
{
	struct membership *m = CONTAINER_OF(call, struct membership, call);

	if (r->status == COORD_OK)
		membership_register(m);
	else
		membership_try_later(m, r->why);
}

/* A daemon that had the same address has left the key: it has ended, since an address has one daemon. */
static void membership_replace(struct membership *m, const struct coord_kv *kv)
{
	char key[NAME_BYTES + 16];
	struct coord_cond cond = { .key = key, .revision = kv->created };
	struct coord_change change = { .key = key, .remove = true };
	struct coord_txn t = { .conds = &cond, .n_conds = 1, .changes = &change, .n_changes = 1 };

	membership_key(m, key, sizeof(key));
	m->call.done = membership_on_removed;
	if (coord_txn(m->c, &m->call, &t, MEMBERSHIP_ANSWER_MS) < 0)
		membership_try_later(m, "no memory for a call");
}

static bool membership_is_ours(const struct membership *m, const struct coord_kv *kv)
{
	return m->bytes && kv->bytes == m->bytes && memcmp(kv->value, m->value, m->bytes) == 0;
}

static void membership_on_joined(struct coord_call *call, const struct coord_reply *r)
{
	struct membership *m = CONTAINER_OF(call, struct membership, call);
	char why[200];

	if (r->status == COORD_NO_LEASE) {
		m->state = MEMBERSHIP_GRANTING;
		membership_try_later(m, r->why);
	} else if (r->status != COORD_OK) {
		membership_try_later(m, r->why);
	} else if (r->n && r->kvs[0].lease == m->lease) { /* also if an answer was lost before */
		membership_is_in(m);
	} else if (r->n && !m->taken && membership_is_ours(m, &r->kvs[0])) {
		membership_replace(m, &r->kvs[0]);
	} else {
		snprintf(why, sizeof(why),
			 "another node is a member by the name '%s': give each node its own, or "
			 "wait for the end of its lease",
			 m->name);
		membership_out(m, why);
	}
}

static void membership_register(struct membership *m)
{
	char key[NAME_BYTES + 16];
	struct coord_cond cond = { .key = key };
	struct coord_change change = {
		.key = key, .value = m->value, .bytes = m->bytes, .lease = m->lease
	};
	struct coord_txn t = {
		.conds = &cond, .n_conds = 1, .changes = &change, .n_changes = 1, .read = key
	};

	membership_key(m, key, sizeof(key));
	m->state = MEMBERSHIP_JOINING;
	m->call.done = membership_on_joined;
	if (coord_txn(m->c, &m->call, &t, MEMBERSHIP_ANSWER_MS) < 0)
		membership_try_later(m, "no memory for a call");
}

static void membership_on_granted(struct coord_call *call, const struct coord_reply *r)
{
	struct membership *m = CONTAINER_OF(call, struct membership, call);

	if (r->status != COORD_OK) {
		membership_try_later(m, r->why);
		return;
	}
	m->lease = r->lease;
	m->ttl_s = r->ttl_s;
	m->kept_us = m->asked_us;
	membership_register(m);
}

static void membership_ask_lease(struct membership *m)
{
	m->state = MEMBERSHIP_GRANTING;
	m->call.done = membership_on_granted;
	m->asked_us = clock_now_us();
	if (coord_grant(m->c, &m->call, m->ttl_s, MEMBERSHIP_ANSWER_MS) < 0)
		membership_try_later(m, "no memory for a call");
}

int membership_join(struct membership *m, struct coord *c, const char *name, const void *value,
		    size_t bytes, int64_t ttl_s, const struct membership_ops *ops)
{
	bool taken = m->taken;
	uint8_t *copy;

	CHECK(m->state == MEMBERSHIP_OUT && ttl_s >= 2);
	if (!name_is_good(name))
		return -EINVAL;
	copy = malloc(bytes + 1);
	if (!copy)
		return -ENOMEM;
	if (bytes)
		memcpy(copy, value, bytes);
	free(m->value);
	*m = (struct membership){
		.c = c, .ops = ops, .value = copy, .bytes = bytes, .ttl_s = ttl_s, .taken = taken
	};
	snprintf(m->name, sizeof(m->name), "%s", name);
	membership_ask_lease(m);
	return 0;
}

/* The store counts from the moment when it has got the last request, which is not before that when it
 * was sent. */
static bool membership_is_late(const struct membership *m, uint64_t now_us)
{
	return now_us - m->kept_us >= (uint64_t)m->ttl_s * 1000000;
}

/* So that there is time for another try. */
static uint32_t membership_answer_ms(const struct membership *m)
{
	uint64_t third = (uint64_t)m->ttl_s * 1000 / 3;

	return third < MEMBERSHIP_ANSWER_MS ? (uint32_t)third : MEMBERSHIP_ANSWER_MS;
}

static void membership_keep(struct membership *m, uint64_t now_us)
{
	if (m->call.impl || now_us < m->again_us)
		return;
	m->asked_us = now_us;
	m->call.done = membership_on_kept;
	(void)coord_keep(m->c, &m->call, m->lease, membership_answer_ms(m));
}

void membership_tick(struct membership *m, uint64_t now_us)
{
	follow_tick(&m->own, now_us);
	if (m->state == MEMBERSHIP_IN && membership_is_late(m, now_us)) {
		membership_out(m, *m->why ? m->why
					  : "the store has not answered for the time of the lease");
		return;
	}
	if (m->state == MEMBERSHIP_IN) {
		membership_keep(m, now_us);
	} else if ((m->state == MEMBERSHIP_GRANTING || m->state == MEMBERSHIP_JOINING) &&
		   !m->call.impl && now_us >= m->again_us) {
		if (m->state == MEMBERSHIP_JOINING && !membership_is_late(m, now_us))
			membership_register(m);
		else
			membership_ask_lease(m);
	}
}

static void membership_on_left(struct coord_call *call, const struct coord_reply *r)
{
	(void)r; /* else the lease ends by itself */
	membership_out(CONTAINER_OF(call, struct membership, call), "it has left");
}

void membership_leave(struct membership *m)
{
	int64_t lease = m->lease;

	if (m->state == MEMBERSHIP_OUT || m->state == MEMBERSHIP_LEAVING)
		return;
	membership_stop(m);
	m->state = MEMBERSHIP_LEAVING;
	m->call.done = membership_on_left;
	if (!lease || coord_revoke(m->c, &m->call, lease, MEMBERSHIP_ANSWER_MS) < 0)
		membership_out(m, "it has left");
}

void membership_end(struct membership *m)
{
	membership_stop(m);
	free(m->value);
	m->value = NULL;
}
