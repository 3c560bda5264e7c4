#include "coord/member.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"

#define MEMBER_PAUSE_US  200000u
#define MEMBER_ANSWER_MS 2000u

static void member_try_later(struct member_node *m, const char *why)
{
	m->again_us = clock_now_us() + MEMBER_PAUSE_US;
	snprintf(m->why, sizeof(m->why), "%s", why);
}

static void member_key(const struct member_node *m, char *ret, size_t bytes)
{
	snprintf(ret, bytes, "members/%s", m->name);
}

/* ------------------------------------------------------------------------------ the leader */

/* What the key says now. */
static void member_set_leader(struct member_node *m, const char *name, int64_t token)
{
	m->token = token;
	m->ops->leader(m, name, token);
}

static void member_look(struct member_node *m, const struct view_key *k)
{
	int64_t token = k && k->lease == m->lease && m->state == MEMBER_IN ? k->created : 0;

	member_set_leader(m, k ? (const char *)k->value : "", token);
}

static void member_on_campaign(struct coord_call *call, const struct coord_reply *r)
{
	/* the view tells who leads; without an answer the next tick tries again */
	(void)call;
	(void)r;
}

/* Nobody leads, as far as is known. */
static void member_stand(struct member_node *m)
{
	struct coord_cond cond = { .key = COORD_LEADER };
	struct coord_change change = {
		.key = COORD_LEADER, .value = m->name, .bytes = strlen(m->name), .lease = m->lease
	};
	struct coord_txn t = { .conds = &cond, .n_conds = 1, .changes = &change, .n_changes = 1 };

	(void)coord_txn(m->c, &m->campaign, &t, MEMBER_ANSWER_MS); /* the next tick tries again */
}

static struct member_node *member_of_view(struct view *v)
{
	return CONTAINER_OF(v, struct member_node, leader);
}

static void member_on_leader(struct view *v, const struct view_key *k, bool removed)
{
	if (strcmp(k->key, COORD_LEADER) == 0)
		member_look(member_of_view(v), removed ? NULL : k);
}

static const struct view_ops member_view_ops = { .changed = member_on_leader };

/* ------------------------------------------------------------------------------ membership */

static void member_stop(struct member_node *m)
{
	coord_cancel(&m->call);
	coord_cancel(&m->campaign);
	view_end(&m->leader);
	m->state = MEMBER_OUT;
	m->token = 0;
	m->lease = 0;
}

static void member_out(struct member_node *m, const char *why)
{
	char text[sizeof(m->why)];

	snprintf(text, sizeof(text), "%s", why);
	member_stop(m);
	m->ops->out(m, text);
}

static void member_on_kept(struct coord_call *call, const struct coord_reply *r)
{
	struct member_node *m = CONTAINER_OF(call, struct member_node, call);

	if (r->status == COORD_NO_LEASE) {
		member_out(m, "its lease has ended: the store has not heard of it in time");
	} else if (r->status != COORD_OK) {
		member_try_later(m, r->why); /* and not only when a third of the lease is over */
	} else {
		m->kept_us = m->asked_us;
		m->again_us = m->asked_us + (uint64_t)m->ttl_s * 1000000 / 3;
		*m->why = 0;
	}
}

static void member_is_in(struct member_node *m)
{
	m->state = MEMBER_IN;
	m->again_us = m->asked_us + (uint64_t)m->ttl_s * 1000000 / 3;
	m->call.done = member_on_kept;
	*m->why = 0;
	if (view_begin(&m->leader, m->c, COORD_LEADER, &member_view_ops) < 0) {
		member_out(m, "there is no memory for it");
		return;
	}
	m->ops->joined(m);
}

static void member_on_joined(struct coord_call *call, const struct coord_reply *r)
{
	struct member_node *m = CONTAINER_OF(call, struct member_node, call);
	char why[200];

	if (r->status == COORD_NO_LEASE) {
		m->state = MEMBER_GRANTING;
		member_try_later(m, r->why);
	} else if (r->status != COORD_OK) {
		member_try_later(m, r->why);
	} else if (r->n && r->kvs[0].lease == m->lease) { /* also if an answer was lost before */
		member_is_in(m);
	} else {
		snprintf(why, sizeof(why),
			 "another node is a member by the name '%s': give each node its own, or "
			 "wait for the end of its lease",
			 m->name);
		member_out(m, why);
	}
}

static void member_register(struct member_node *m)
{
	char key[MEMBER_NAME_BYTES + 16];
	struct coord_cond cond = { .key = key };
	struct coord_change change = {
		.key = key, .value = m->value, .bytes = m->bytes, .lease = m->lease
	};
	struct coord_txn t = {
		.conds = &cond, .n_conds = 1, .changes = &change, .n_changes = 1, .read = key
	};

	member_key(m, key, sizeof(key));
	m->state = MEMBER_JOINING;
	m->call.done = member_on_joined;
	if (coord_txn(m->c, &m->call, &t, MEMBER_ANSWER_MS) < 0)
		member_try_later(m, "no memory for a call");
}

static void member_on_granted(struct coord_call *call, const struct coord_reply *r)
{
	struct member_node *m = CONTAINER_OF(call, struct member_node, call);

	if (r->status != COORD_OK) {
		member_try_later(m, r->why);
		return;
	}
	m->lease = r->lease;
	m->ttl_s = r->ttl_s;
	m->kept_us = m->asked_us;
	member_register(m);
}

static void member_ask_lease(struct member_node *m)
{
	m->state = MEMBER_GRANTING;
	m->call.done = member_on_granted;
	m->asked_us = clock_now_us();
	if (coord_grant(m->c, &m->call, m->ttl_s, MEMBER_ANSWER_MS) < 0)
		member_try_later(m, "no memory for a call");
}

static bool member_name_is_good(const char *name)
{
	return *name && strlen(name) < MEMBER_NAME_BYTES && !strchr(name, '/');
}

int member_join(struct member_node *m, struct coord *c, const char *name, const void *value,
		size_t bytes, int64_t ttl_s, bool leads, const struct member_ops *ops)
{
	uint8_t *copy;

	CHECK(m->state == MEMBER_OUT && ttl_s >= 2);
	if (!member_name_is_good(name))
		return -EINVAL;
	copy = malloc(bytes + 1);
	if (!copy)
		return -ENOMEM;
	if (bytes)
		memcpy(copy, value, bytes);
	free(m->value);
	*m = (struct member_node){
		.c = c, .ops = ops, .value = copy, .bytes = bytes, .ttl_s = ttl_s, .leads = leads
	};
	snprintf(m->name, sizeof(m->name), "%s", name);
	m->campaign.done = member_on_campaign;
	member_ask_lease(m);
	return 0;
}

/* The store counts from the moment when it has got the last request, which is not before that when it
 * was sent. */
static bool member_is_late(const struct member_node *m, uint64_t now_us)
{
	return now_us - m->kept_us >= (uint64_t)m->ttl_s * 1000000;
}

/* So that there is time for another try. */
static uint32_t member_answer_ms(const struct member_node *m)
{
	uint64_t third = (uint64_t)m->ttl_s * 1000 / 3;

	return third < MEMBER_ANSWER_MS ? (uint32_t)third : MEMBER_ANSWER_MS;
}

static void member_keep(struct member_node *m, uint64_t now_us)
{
	if (m->call.impl || now_us < m->again_us)
		return;
	m->asked_us = now_us;
	(void)coord_keep(m->c, &m->call, m->lease, member_answer_ms(m));
}

static void member_lead(struct member_node *m)
{
	bool known = m->leader.state == VIEW_WATCHING;

	if (m->leads && known && !m->campaign.impl && !view_find(&m->leader, COORD_LEADER))
		member_stand(m);
}

void member_tick(struct member_node *m, uint64_t now_us)
{
	if (m->state == MEMBER_IN && member_is_late(m, now_us)) {
		member_out(m, *m->why ? m->why
				      : "the store has not answered for the time of the lease");
		return;
	}
	if (m->state == MEMBER_IN) {
		member_keep(m, now_us);
		view_tick(&m->leader, now_us);
		member_lead(m);
	} else if ((m->state == MEMBER_GRANTING || m->state == MEMBER_JOINING) && !m->call.impl &&
		   now_us >= m->again_us) {
		if (m->state == MEMBER_JOINING && !member_is_late(m, now_us))
			member_register(m);
		else
			member_ask_lease(m);
	}
}

static void member_on_left(struct coord_call *call, const struct coord_reply *r)
{
	(void)r; /* else the lease ends by itself */
	member_out(CONTAINER_OF(call, struct member_node, call), "it has left");
}

void member_leave(struct member_node *m)
{
	int64_t lease = m->lease;

	if (m->state == MEMBER_OUT || m->state == MEMBER_LEAVING)
		return;
	member_stop(m);
	m->state = MEMBER_LEAVING;
	m->call.done = member_on_left;
	if (!lease || coord_revoke(m->c, &m->call, lease, MEMBER_ANSWER_MS) < 0)
		member_out(m, "it has left");
}

void member_end(struct member_node *m)
{
	member_stop(m);
	free(m->value);
	m->value = NULL;
}
