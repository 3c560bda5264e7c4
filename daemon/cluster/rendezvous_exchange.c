/*
 * Values that all members of a communicator give each other. Here are those of the members of this node, and at the
 * leader those of all; the others come from there all at once.
 *
 * Values that are there do not change. Only the loop removes exchanges, so it reads them without the lock.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/rendezvous_impl.h"
#include "core/check.h"
#include "core/clock.h"

/* Whether a member's value is there, and whether the leader knows what was given here. */
enum rendezvous_value { VALUE_NONE, VALUE_NEW, VALUE_TOLD };

struct rendezvous_member {
	uint16_t node; /* RENDEZVOUS_NODE_NONE, or of the epoch: the one that has given the value */
	uint8_t value; /* enum rendezvous_value */
};

#define RENDEZVOUS_NODE_NONE UINT16_MAX

struct rendezvous_exchange {
	struct list link; /* rendezvous.exchanges */
	char key[RENDEZVOUS_KEY_BYTES];
	unsigned size, n; /* members; those whose value is there */
	size_t bytes;     /* of a value */
	int missing;      /* as the leader says; -1: it has not */
	bool asked;       /* it is asked who is missing */
	bool any_new;     /* some member's value is VALUE_NEW */
	bool finished;    /* rendezvous_finish */
	uint8_t *values;  /* behind the members */
	struct rendezvous_member members[];
};

/* -- with the lock held */

struct rendezvous_exchange *rendezvous_exchange_look(struct rendezvous *r, const char *key)
{
	struct rendezvous_exchange *x, *tmp;

	list_for_each (x, tmp, &r->exchanges, link)
		if (strcmp(x->key, key) == 0)
			return x;
	return NULL;
}

static void rendezvous_exchange_free(struct rendezvous_exchange *x)
{
	list_unlink(&x->link);
	free(x);
}

void rendezvous_exchanges_drop(struct rendezvous *r, const char *prefix)
{
	struct rendezvous_exchange *x, *tmp;

	list_for_each (x, tmp, &r->exchanges, link)
		if (strncmp(x->key, prefix, strlen(prefix)) == 0)
			rendezvous_exchange_free(x);
}

/* Return: 0, RENDEZVOUS_E_WRONG, -ECANCELED, or -ENOMEM. */
static int rendezvous_exchange_make(struct rendezvous *r, const struct rendezvous_gift *g,
				    struct rendezvous_exchange **ret)
{
	struct rendezvous_exchange *x = rendezvous_exchange_look(r, g->key);
	const size_t key = strlen(g->key) + 1;

	if (g->size > RENDEZVOUS_MEMBERS || g->member >= g->size || g->bytes == 0 ||
	    g->bytes > RENDEZVOUS_VALUE_BYTES ||
	    (x && (x->size != g->size || x->bytes != g->bytes)))
		return RENDEZVOUS_E_WRONG;
	if (rendezvous_is_over(r, g->key))
		return -ECANCELED;
	if (!x && key <= RENDEZVOUS_KEY_BYTES) {
		x = calloc(1, sizeof(*x) + g->size * (sizeof(x->members[0]) + g->bytes));
		if (!x)
			return -ENOMEM;
		memcpy(x->key, g->key, key);
		x->size = g->size;
		x->bytes = g->bytes;
		x->missing = -1;
		x->values = (uint8_t *)&x->members[g->size];
		for (unsigned i = 0; i < x->size; i++)
			x->members[i].node = RENDEZVOUS_NODE_NONE;
		list_init(&x->link);
		list_append(&r->exchanges, &x->link);
	}
	*ret = x;
	return x ? 0 : -ENOMEM;
}

/* Return: 0, or RENDEZVOUS_E_KNOWN or _WRONG: the member has given one. */
static int rendezvous_exchange_fill(struct rendezvous *r, struct rendezvous_exchange *x,
				    unsigned member, const void *value, enum rendezvous_value state)
{
	uint8_t *at = x->values + member * x->bytes;

	if (x->members[member].value != VALUE_NONE)
		return memcmp(at, value, x->bytes) == 0 ? RENDEZVOUS_E_KNOWN : RENDEZVOUS_E_WRONG;
	memcpy(at, value, x->bytes);
	x->members[member].value = (uint8_t)state;
	if (++x->n == x->size)
		pthread_cond_broadcast(&r->news);
	return 0;
}

static unsigned rendezvous_exchange_missing(const struct rendezvous_exchange *x)
{
	unsigned i = 0;

	while (i < x->size && x->members[i].value != VALUE_NONE)
		i++;
	return i;
}

/* -- threads of engines */

static void rendezvous_exchange_news(struct rendezvous *r, struct rendezvous_exchange *x,
				     unsigned member)
{
	x->members[member].value = VALUE_NEW;
	x->any_new = true;
	rendezvous_post(r);
}

/* Return: -EAGAIN: values are missing. */
static int rendezvous_exchange_try(struct rendezvous *r, struct comm_exchange *e)
{
	const struct rendezvous_gift gift = { e->key, e->size, e->member, e->value, e->bytes };
	struct rendezvous_exchange *x;
	int got;

	got = rendezvous_exchange_make(r, &gift, &x);
	if (got)
		return got == RENDEZVOUS_E_WRONG ? -EPROTO : got;
	got = rendezvous_exchange_fill(r, x, e->member, e->value, VALUE_NEW);
	if (got == RENDEZVOUS_E_WRONG)
		return -EEXIST;
	if (got == 0)
		rendezvous_exchange_news(r, x, e->member);
	if (x->n == x->size) {
		memcpy(e->all, x->values, x->size * x->bytes);
		return 0;
	}
	if (!e->late)
		return -EAGAIN;
	if (!x->asked) { /* what it has said before may be over */
		x->asked = true;
		x->missing = -1;
		rendezvous_exchange_news(r, x, e->member);
	}
	e->missing = x->missing;
	return e->missing >= 0 ? -ETIMEDOUT : -EAGAIN;
}

int rendezvous_exchange(void *userdata, struct comm_exchange *e, unsigned timeout_ms)
{
	const struct timespec until = clock_in(timeout_ms);
	struct rendezvous *r = userdata;
	int got;

	e->missing = -1;
	pthread_mutex_lock(&r->lock);
	while ((got = rendezvous_exchange_try(r, e)) == -EAGAIN)
		if (pthread_cond_timedwait(&r->news, &r->lock, &until) == ETIMEDOUT) {
			got = -ETIMEDOUT;
			break;
		}
	pthread_mutex_unlock(&r->lock);
	return got;
}

/* -- the loop */

/* Return: whether the leader does not know of a value. */
static bool rendezvous_exchange_next(struct rendezvous *r, struct rendezvous_gift *ret)
{
	struct rendezvous_exchange *x, *tmp;
	bool found = false;

	pthread_mutex_lock(&r->lock);
	list_for_each (x, tmp, &r->exchanges, link) {
		for (unsigned i = 0; x->any_new && !found && i < x->size; i++) {
			if (x->members[i].value != VALUE_NEW)
				continue;
			x->members[i].value = VALUE_TOLD;
			*ret = (struct rendezvous_gift){ x->key, x->size, i,
							 x->values + i * x->bytes, x->bytes };
			found = true;
		}
		if (found)
			break;
		x->any_new = false;
	}
	pthread_mutex_unlock(&r->lock);
	return found;
}

void rendezvous_exchanges_tell(struct rendezvous *r)
{
	struct rendezvous_gift gift;

	while (rendezvous_exchange_next(r, &gift))
		r->ops->give(r->userdata, &gift);
}

int rendezvous_give(struct rendezvous *r, const struct rendezvous_gift *g, unsigned node)
{
	struct rendezvous_exchange *x;
	int got;

	CHECK(node < RENDEZVOUS_NODE_NONE);
	pthread_mutex_lock(&r->lock);
	got = rendezvous_exchange_make(r, g, &x);
	if (got == 0)
		got = rendezvous_exchange_fill(r, x, g->member, g->value, VALUE_TOLD);
	if (got == 0)
		x->members[g->member].node = (uint16_t)node;
	pthread_mutex_unlock(&r->lock);
	return got;
}

bool rendezvous_see(struct rendezvous *r, const char *key, struct rendezvous_all *ret)
{
	struct rendezvous_exchange *x;

	pthread_mutex_lock(&r->lock);
	x = rendezvous_exchange_look(r, key);
	if (x)
		*ret = (struct rendezvous_all){ x->size, x->n, rendezvous_exchange_missing(x),
						x->bytes, x->values };
	pthread_mutex_unlock(&r->lock);
	return x != NULL;
}

unsigned rendezvous_from(struct rendezvous *r, const char *key, unsigned member)
{
	unsigned node = RENDEZVOUS_NODE_NONE;
	struct rendezvous_exchange *x;

	pthread_mutex_lock(&r->lock);
	x = rendezvous_exchange_look(r, key);
	if (x && member < x->size)
		node = x->members[member].node;
	pthread_mutex_unlock(&r->lock);
	return node == RENDEZVOUS_NODE_NONE ? UINT_MAX : node;
}

bool rendezvous_finish(struct rendezvous *r, const char *key)
{
	struct rendezvous_exchange *x;
	bool now;

	pthread_mutex_lock(&r->lock);
	x = rendezvous_exchange_look(r, key);
	now = x && x->n == x->size && !x->finished;
	if (now)
		x->finished = true;
	pthread_mutex_unlock(&r->lock);
	return now;
}

/* With the lock held. */
static int rendezvous_exchange_take(struct rendezvous *r, struct rendezvous_exchange *x,
				    unsigned first, const uint8_t *values, size_t bytes)
{
	if (bytes % x->bytes || bytes / x->bytes > x->size - first)
		return RENDEZVOUS_E_WRONG;
	for (size_t i = 0; i < bytes / x->bytes; i++)
		if (rendezvous_exchange_fill(r, x, first + (unsigned)i, values + i * x->bytes,
					     VALUE_TOLD) == RENDEZVOUS_E_WRONG)
			return RENDEZVOUS_E_WRONG;
	return 0;
}

int rendezvous_take(struct rendezvous *r, const char *key, unsigned size, unsigned first,
		    const void *values, size_t bytes)
{
	struct rendezvous_exchange *x;
	int got = 0;

	pthread_mutex_lock(&r->lock);
	x = rendezvous_exchange_look(r, key);
	if (x && (x->size != size || first >= size)) {
		got = RENDEZVOUS_E_WRONG;
	} else if (x && bytes) {
		got = rendezvous_exchange_take(r, x, first, values, bytes);
	} else if (x) {
		x->missing = (int)first;
		pthread_cond_broadcast(&r->news);
	}
	pthread_mutex_unlock(&r->lock);
	return got;
}
