#include "cluster/rendezvous_impl.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/list.h"

struct rendezvous_key {
	struct list link; /* rendezvous.keys */
	void *value;      /* owned; NULL: not there yet */
	size_t bytes;
	struct list waiters; /* of struct rendezvous_waiter; the loop's */
	bool is_new;         /* set here, and the leader does not know */
	uint8_t ask;         /* enum rendezvous_ask */
	char key[];
};

/* At the leader: another node waits for the value. */
struct rendezvous_waiter {
	struct list link; /* rendezvous_key.waiters */
	unsigned node;
};

/* A thread here waits for the value. */
enum rendezvous_ask { ASK_NOT, ASK_WANTED, ASK_TOLD };

/* Epochs that are over and whose communicators may still be ending. */
#define RENDEZVOUS_OVER 256u

/* Prefixes of epochs that are over. */
struct rendezvous_over {
	struct list link;
	char prefix[RENDEZVOUS_KEY_BYTES];
};

int rendezvous_new(struct loopq *loopq, const struct rendezvous_ops *ops, void *userdata,
		   struct rendezvous **ret)
{
	struct rendezvous *r = calloc(1, sizeof(*r));
	pthread_condattr_t attr;

	if (!r)
		return -ENOMEM;
	r->loopq = loopq;
	r->ops = ops;
	r->userdata = userdata;
	list_init(&r->keys);
	list_init(&r->exchanges);
	list_init(&r->over);
	pthread_mutex_init(&r->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&r->news, &attr);
	pthread_condattr_destroy(&attr);
	*ret = r;
	return 0;
}

static void rendezvous_waiter_free(struct rendezvous_waiter *w)
{
	list_unlink(&w->link);
	free(w);
}

static void rendezvous_key_free(struct rendezvous_key *k)
{
	struct rendezvous_waiter *w, *tmp;

	list_for_each (w, tmp, &k->waiters, link)
		rendezvous_waiter_free(w);
	list_unlink(&k->link);
	free(k->value);
	free(k);
}

struct rendezvous *rendezvous_free(struct rendezvous *r)
{
	struct rendezvous_key *k, *tmp;
	struct rendezvous_over *o, *next;

	if (!r)
		return NULL;
	CHECK(!r->posted);
	list_for_each (k, tmp, &r->keys, link)
		rendezvous_key_free(k);
	rendezvous_exchanges_drop(r, "");
	list_for_each (o, next, &r->over, link) {
		list_unlink(&o->link);
		free(o);
	}
	pthread_cond_destroy(&r->news);
	pthread_mutex_destroy(&r->lock);
	free(r);
	return NULL;
}

/* -- with the lock held */

static struct rendezvous_key *rendezvous_look(struct rendezvous *r, const char *key)
{
	struct rendezvous_key *k, *tmp;

	list_for_each (k, tmp, &r->keys, link)
		if (strcmp(k->key, key) == 0)
			return k;
	return NULL;
}

static struct rendezvous_key *rendezvous_make(struct rendezvous *r, const char *key)
{
	struct rendezvous_key *k = rendezvous_look(r, key);
	const size_t bytes = strlen(key) + 1;

	if (k || bytes > RENDEZVOUS_KEY_BYTES)
		return k;
	k = calloc(1, sizeof(*k) + bytes);
	if (!k)
		return NULL;
	memcpy(k->key, key, bytes);
	list_init(&k->waiters);
	list_init(&k->link);
	list_append(&r->keys, &k->link);
	return k;
}

bool rendezvous_is_over(struct rendezvous *r, const char *key)
{
	struct rendezvous_over *o, *tmp;

	list_for_each (o, tmp, &r->over, link)
		if (strncmp(key, o->prefix, strlen(o->prefix)) == 0)
			return true;
	return false;
}

static int rendezvous_fill(struct rendezvous *r, struct rendezvous_key *k, const void *value,
			   size_t bytes)
{
	void *copy;

	if (k->value) /* keys are written once, and the loop may be reading it */
		return 0;
	copy = malloc(bytes + 1);
	if (!copy)
		return -ENOMEM;
	memcpy(copy, value, bytes);
	k->value = copy;
	k->bytes = bytes;
	pthread_cond_broadcast(&r->news);
	return 0;
}

static void rendezvous_on_work(struct work *work);

void rendezvous_post(struct rendezvous *r)
{
	if (r->posted)
		return;
	r->posted = true;
	loopq_post(r->loopq, &r->work, rendezvous_on_work);
}

/* -- threads of engines */

static int rendezvous_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	struct rendezvous *r = userdata;
	struct rendezvous_key *k;
	int e = -ECANCELED;

	pthread_mutex_lock(&r->lock);
	if (!rendezvous_is_over(r, key)) {
		k = rendezvous_make(r, key);
		e = k ? rendezvous_fill(r, k, value, bytes) : -ENOMEM;
		if (e == 0) {
			k->is_new = true;
			rendezvous_post(r);
		}
	}
	pthread_mutex_unlock(&r->lock);
	return e;
}

/* What is known of @key now. Return: -EAGAIN: nothing yet. */
static long rendezvous_read(struct rendezvous *r, const char *key, void *value, size_t capacity)
{
	struct rendezvous_key *k;

	if (rendezvous_is_over(r, key))
		return -ECANCELED;
	k = rendezvous_make(r, key);
	if (!k)
		return -ENOMEM;
	if (k->value && k->bytes > capacity)
		return -EMSGSIZE;
	if (k->value) {
		memcpy(value, k->value, k->bytes);
		return (long)k->bytes;
	}
	if (k->ask == ASK_NOT) {
		k->ask = ASK_WANTED;
		rendezvous_post(r);
	}
	return -EAGAIN;
}

static long rendezvous_get(void *userdata, const char *key, unsigned timeout_ms, void *value,
			   size_t capacity)
{
	const struct timespec until = clock_in(timeout_ms);
	struct rendezvous *r = userdata;
	long n;

	pthread_mutex_lock(&r->lock);
	while ((n = rendezvous_read(r, key, value, capacity)) == -EAGAIN)
		if (pthread_cond_timedwait(&r->news, &r->lock, &until) == ETIMEDOUT) {
			n = -ETIMEDOUT;
			break;
		}
	pthread_mutex_unlock(&r->lock);
	return n;
}

struct comm_store rendezvous_store(struct rendezvous *r)
{
	return (struct comm_store){ rendezvous_set, rendezvous_get, rendezvous_exchange, r };
}

/* -- the loop */

/* What the leader does not know of yet. Only the loop removes keys, so it stays while it is told without
 * the lock. */
static struct rendezvous_key *rendezvous_next(struct rendezvous *r, bool *ret_set)
{
	struct rendezvous_key *k, *tmp, *found = NULL;

	pthread_mutex_lock(&r->lock);
	list_for_each (k, tmp, &r->keys, link) {
		if (found || (!k->is_new && k->ask != ASK_WANTED))
			continue;
		found = k;
		*ret_set = k->is_new;
		k->is_new = false;
		k->ask = k->ask == ASK_NOT ? ASK_NOT : ASK_TOLD; /* who has set it has it */
	}
	pthread_mutex_unlock(&r->lock);
	return found;
}

static void rendezvous_on_work(struct work *work)
{
	struct rendezvous *r = CONTAINER_OF(work, struct rendezvous, work);
	struct rendezvous_key *k;
	bool set;

	pthread_mutex_lock(&r->lock);
	r->posted = false;
	pthread_mutex_unlock(&r->lock);
	while ((k = rendezvous_next(r, &set))) {
		if (set)
			r->ops->set(r->userdata, k->key, k->value, k->bytes);
		else
			r->ops->get(r->userdata, k->key);
	}
	rendezvous_exchanges_tell(r);
}

int rendezvous_put(struct rendezvous *r, const char *key, const void *value, size_t bytes)
{
	struct rendezvous_key *k;
	int e = 0;

	pthread_mutex_lock(&r->lock);
	if (!rendezvous_is_over(r, key)) {
		k = rendezvous_make(r, key);
		e = k ? rendezvous_fill(r, k, value, bytes) : -ENOMEM;
	}
	pthread_mutex_unlock(&r->lock);
	return e;
}

const void *rendezvous_find(struct rendezvous *r, const char *key, size_t *ret_bytes)
{
	const struct rendezvous_key *k;
	const void *value;

	pthread_mutex_lock(&r->lock);
	k = rendezvous_look(r, key);
	value = k ? k->value : NULL;
	if (value)
		*ret_bytes = k->bytes;
	pthread_mutex_unlock(&r->lock);
	return value;
}

bool rendezvous_is_known(struct rendezvous *r, const char *key)
{
	bool known;

	pthread_mutex_lock(&r->lock);
	known = rendezvous_look(r, key) || rendezvous_exchange_look(r, key);
	pthread_mutex_unlock(&r->lock);
	return known;
}

int rendezvous_await(struct rendezvous *r, const char *key, unsigned node)
{
	struct rendezvous_waiter *w = calloc(1, sizeof(*w));
	struct rendezvous_key *k = NULL;
	bool over;

	if (!w)
		return -ENOMEM;
	w->node = node;
	list_init(&w->link);
	pthread_mutex_lock(&r->lock);
	over = rendezvous_is_over(r, key);
	if (!over)
		k = rendezvous_make(r, key);
	if (k)
		list_append(&k->waiters, &w->link);
	pthread_mutex_unlock(&r->lock);
	if (!k)
		free(w);
	return k ? 0 : over ? -ECANCELED : -ENOMEM;
}

bool rendezvous_next_waiter(struct rendezvous *r, const char *key, unsigned *ret_node)
{
	struct rendezvous_waiter *w;
	struct rendezvous_key *k;

	pthread_mutex_lock(&r->lock);
	k = rendezvous_look(r, key);
	pthread_mutex_unlock(&r->lock);
	if (!k || list_empty(&k->waiters))
		return false;
	w = list_first(&k->waiters, struct rendezvous_waiter, link);
	*ret_node = w->node;
	rendezvous_waiter_free(w);
	return true;
}

void rendezvous_drop(struct rendezvous *r, const char *prefix)
{
	struct rendezvous_over *o = calloc(1, sizeof(*o));
	struct rendezvous_key *k, *tmp;

	pthread_mutex_lock(&r->lock);
	list_for_each (k, tmp, &r->keys, link)
		if (strncmp(k->key, prefix, strlen(prefix)) == 0)
			rendezvous_key_free(k);
	rendezvous_exchanges_drop(r, prefix);
	if (o && strlen(prefix) < sizeof(o->prefix)) {
		memcpy(o->prefix, prefix, strlen(prefix) + 1);
		list_init(&o->link);
		list_append(&r->over, &o->link);
		o = NULL;
		if (++r->n_over > RENDEZVOUS_OVER) {
			o = list_first(&r->over, struct rendezvous_over, link);
			list_unlink(&o->link);
			r->n_over--;
		}
	}
	pthread_cond_broadcast(&r->news);
	pthread_mutex_unlock(&r->lock);
	free(o);
}
