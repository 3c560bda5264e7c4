/* A store in the memory of this process. It keeps every change, so that watches can begin at any. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coord/coord_impl.h"
#include "core/check.h"
#include "core/list.h"

struct fake_key {
	struct list link; /* ordered by key */
	char *key;
	uint8_t *value;
	size_t bytes;
	int64_t created, modified, lease;
};

/* A change, as watches are told it. */
struct fake_change {
	struct list link;
	struct fake_key *kv; /* owned copy */
	bool removed;
};

struct fake_lease {
	struct list link;
	int64_t id, ttl_ms, left_ms;
};

struct coord_fake {
	struct list keys, changes, leases, users;
	int64_t revision, compacted, last_lease;
};

struct fake {
	struct coord coord;
	struct list link;
	struct coord_fake *store;
	struct loopq *loopq;
	enum coord_fake_fate fate;
	struct list lost; /* of struct fake_call */
	struct list watches;
};

struct fake_call {
	struct work work;
	struct list link;
	struct coord_call *call; /* NULL: cancelled */
	struct coord_reply reply;
	struct coord_kv *kvs; /* owned, with its texts */
};

struct fake_watch {
	struct work work;
	struct list link;
	struct fake *u;
	struct coord_watch *w; /* NULL: ended */
	char *prefix;
	int64_t next; /* revision */
	bool posted;
};

static struct fake *fake_of(struct coord *c)
{
	return CONTAINER_OF(c, struct fake, coord);
}

/* ---------------------------------------------------------------------------- the keys */

static void fake_key_free(struct fake_key *k)
{
	free(k->key);
	free(k->value);
	free(k);
}

static struct fake_key *fake_key_new(const char *key, const void *value, size_t bytes)
{
	struct fake_key *k = calloc(1, sizeof(*k));

	CHECK(k);
	list_init(&k->link);
	k->key = strdup(key);
	k->value = malloc(bytes + 1);
	CHECK(k->key && k->value);
	if (bytes)
		memcpy(k->value, value, bytes);
	k->bytes = bytes;
	return k;
}

static struct fake_key *fake_find(struct coord_fake *s, const char *key)
{
	for (struct list *l = s->keys.next; l != &s->keys; l = l->next) {
		struct fake_key *k = CONTAINER_OF(l, struct fake_key, link);

		if (strcmp(k->key, key) == 0)
			return k;
	}
	return NULL;
}

/* The list is in order. */
static void fake_insert(struct coord_fake *s, struct fake_key *k)
{
	struct list *l = s->keys.next;

	while (l != &s->keys && strcmp(CONTAINER_OF(l, struct fake_key, link)->key, k->key) < 0)
		l = l->next;
	list_append(l, &k->link); /* before it */
}

static void fake_note(struct coord_fake *s, const struct fake_key *k, bool removed)
{
	struct fake_change *c = calloc(1, sizeof(*c));

	CHECK(c);
	list_init(&c->link);
	c->kv = fake_key_new(k->key, removed ? NULL : k->value, removed ? 0 : k->bytes);
	c->kv->created = k->created;
	c->kv->modified = s->revision;
	c->kv->lease = k->lease;
	c->removed = removed;
	list_append(&s->changes, &c->link);
}

static void fake_remove(struct coord_fake *s, struct fake_key *k)
{
	fake_note(s, k, true);
	list_unlink(&k->link);
	fake_key_free(k);
}

static struct fake_lease *fake_lease_find(struct coord_fake *s, int64_t id)
{
	for (struct list *l = s->leases.next; l != &s->leases; l = l->next)
		if (CONTAINER_OF(l, struct fake_lease, link)->id == id)
			return CONTAINER_OF(l, struct fake_lease, link);
	return NULL;
}

static void fake_put(struct coord_fake *s, const struct coord_change *change)
{
	struct fake_key *old = fake_find(s, change->key);
	struct fake_key *k = fake_key_new(change->key, change->value, change->bytes);

	k->created = old ? old->created : s->revision;
	k->modified = s->revision;
	k->lease = change->lease;
	if (old) {
		list_unlink(&old->link);
		fake_key_free(old);
	}
	fake_insert(s, k);
	fake_note(s, k, false);
}

/* ----------------------------------------------------------------------------- watches */

static bool fake_begins(const char *key, const char *prefix)
{
	return strncmp(key, prefix, strlen(prefix)) == 0;
}

static struct coord_kv fake_kv(const struct fake_key *k)
{
	return (struct coord_kv){ .key = k->key,
				  .value = k->value,
				  .bytes = k->bytes,
				  .created = k->created,
				  .modified = k->modified,
				  .lease = k->lease };
}

static void fake_watch_free(struct fake_watch *fw)
{
	list_unlink(&fw->link);
	free(fw->prefix);
	free(fw);
}

static void fake_watch_over(struct fake_watch *fw)
{
	struct coord_watch *w = fw->w;

	coord_watch_over(&fw->u->coord, w);
	fw->w = NULL;
	if (!fw->posted)
		fake_watch_free(fw);
}

/* All of one revision or of several; none is split. */
static void fake_watch_tell(struct fake_watch *fw)
{
	struct coord_fake *s = fw->u->store;
	struct coord_event events[64];
	struct coord_watch *w = fw->w;
	int64_t to = s->revision;
	size_t n = 0;

	for (struct list *l = s->changes.next; l != &s->changes; l = l->next) {
		const struct fake_change *c = CONTAINER_OF(l, struct fake_change, link);

		if (c->kv->modified < fw->next || !fake_begins(c->kv->key, fw->prefix))
			continue;
		CHECK(n < ARRAY_SIZE(events));
		events[n++] = (struct coord_event){ fake_kv(c->kv), c->removed };
	}
	fw->next = to + 1;
	if (n)
		w->ops->events(w, events, n, to);
}

static void fake_watch_on_work(struct work *work)
{
	struct fake_watch *fw = CONTAINER_OF(work, struct fake_watch, work);

	fw->posted = false;
	if (!fw->w) {
		fake_watch_free(fw);
	} else if (fw->u->fate != COORD_FAKE_ANSWERED) {
		return;
	} else if (fw->next <= fw->u->store->compacted) {
		struct coord_watch *w = fw->w;

		fake_watch_over(fw);
		w->ops->ended(w, true, "the changes were compacted");
	} else {
		fake_watch_tell(fw);
	}
}

static void fake_watch_post(struct fake_watch *fw)
{
	if (!fw->posted)
		loopq_post(fw->u->loopq, &fw->work, fake_watch_on_work);
	fw->posted = true;
}

static void fake_tell_user(struct fake *u)
{
	for (struct list *l = u->watches.next; l != &u->watches; l = l->next)
		fake_watch_post(CONTAINER_OF(l, struct fake_watch, link));
}

static void fake_tell(struct coord_fake *s)
{
	for (struct list *l = s->users.next; l != &s->users; l = l->next)
		fake_tell_user(CONTAINER_OF(l, struct fake, link));
}

static int fake_watch_begin(struct coord *c, struct coord_watch *w, const char *prefix,
			    int64_t from)
{
	struct fake_watch *fw = calloc(1, sizeof(*fw));

	CHECK(fw);
	list_init(&fw->link);
	fw->u = fake_of(c);
	fw->w = w;
	fw->prefix = strdup(prefix);
	fw->next = from;
	list_append(&fw->u->watches, &fw->link);
	w->impl = fw;
	fake_watch_post(fw);
	return 0;
}

static void fake_watch_end(struct coord_watch *w)
{
	fake_watch_over(w->impl);
}

/* ------------------------------------------------------------------------------- calls */

static void fake_call_free(struct fake_call *fc)
{
	list_unlink(&fc->link);
	for (size_t i = 0; i < fc->reply.n; i++) {
		free((char *)fc->kvs[i].key);
		free((uint8_t *)fc->kvs[i].value);
	}
	free(fc->kvs);
	free(fc);
}

static void fake_call_on_work(struct work *work)
{
	struct fake_call *fc = CONTAINER_OF(work, struct fake_call, work);

	if (fc->call)
		coord_call_end(fc->call->owner, fc->call, &fc->reply);
	fake_call_free(fc);
}

static struct fake_call *fake_call_new(struct coord *c, struct coord_call *call)
{
	struct fake *u = fake_of(c);
	struct fake_call *fc = calloc(1, sizeof(*fc));

	CHECK(fc);
	list_init(&fc->link);
	fc->call = call;
	call->impl = fc;
	if (u->fate == COORD_FAKE_ANSWERED)
		loopq_post(u->loopq, &fc->work, fake_call_on_work);
	else
		list_append(&u->lost, &fc->link);
	return fc;
}

static void fake_cancel(struct coord_call *call)
{
	struct fake_call *fc = call->impl;

	coord_cancelled(call->owner, call);
	fc->call = NULL;
	if (!list_empty(&fc->link))
		fake_call_free(fc);
}

static void fake_refuse(struct coord_reply *r, enum coord_status status, const char *why)
{
	r->status = status;
	r->why = why;
}

static bool fake_is_as_expected(struct coord_fake *s, const struct coord_cond *cond)
{
	const struct fake_key *k = fake_find(s, cond->key);

	return (!k ? 0 : cond->modified ? k->modified : k->created) == cond->revision;
}

static void fake_read(struct coord_fake *s, const struct coord_txn *t, struct fake_call *fc)
{
	for (struct list *l = s->keys.next; t->read && l != &s->keys; l = l->next) {
		const struct fake_key *k = CONTAINER_OF(l, struct fake_key, link);
		struct fake_key *copy;

		if (t->prefix ? !fake_begins(k->key, t->read) : strcmp(k->key, t->read) != 0)
			continue;
		copy = fake_key_new(k->key, k->value, k->bytes);
		fc->kvs = realloc(fc->kvs, (fc->reply.n + 1) * sizeof(*fc->kvs));
		CHECK(fc->kvs);
		fc->kvs[fc->reply.n] = fake_kv(k);
		fc->kvs[fc->reply.n].key = copy->key;
		fc->kvs[fc->reply.n++].value = copy->value;
		free(copy);
	}
	fc->reply.kvs = fc->kvs;
}

/* Return: false: it is refused. */
static bool fake_change_all(struct coord_fake *s, const struct coord_txn *t)
{
	bool any = false;

	for (size_t i = 0; i < t->n_changes; i++)
		if (t->changes[i].lease && !fake_lease_find(s, t->changes[i].lease))
			return false;
	s->revision++;
	for (size_t i = 0; i < t->n_changes; i++) {
		struct fake_key *k = fake_find(s, t->changes[i].key);

		any = any || !t->changes[i].remove || k;
		if (!t->changes[i].remove)
			fake_put(s, &t->changes[i]);
		else if (k)
			fake_remove(s, k);
	}
	s->revision -= !any;
	return true;
}

static int fake_txn(struct coord *c, struct coord_call *call, const struct coord_txn *t,
		    uint32_t timeout_ms)
{
	struct coord_fake *s = fake_of(c)->store;
	struct fake_call *fc = fake_call_new(c, call);
	bool true_all = true;

	(void)timeout_ms;
	if (fake_of(c)->fate == COORD_FAKE_LOST_BEFORE)
		return 0;
	for (size_t i = 0; i < t->n_conds; i++)
		true_all = true_all && fake_is_as_expected(s, &t->conds[i]);
	if (true_all && !fake_change_all(s, t)) {
		fake_refuse(&fc->reply, COORD_NO_LEASE, "requested lease not found");
		return 0;
	}
	fc->reply.succeeded = true_all;
	fake_read(s, t, fc);
	fc->reply.revision = s->revision;
	fake_tell(s);
	return 0;
}

static int fake_grant(struct coord *c, struct coord_call *call, int64_t ttl_s, uint32_t timeout_ms)
{
	struct coord_fake *s = fake_of(c)->store;
	struct fake_call *fc = fake_call_new(c, call);
	struct fake_lease *l;

	(void)timeout_ms;
	if (fake_of(c)->fate == COORD_FAKE_LOST_BEFORE)
		return 0;
	l = calloc(1, sizeof(*l));
	CHECK(l);
	list_init(&l->link);
	l->id = ++s->last_lease;
	l->ttl_ms = l->left_ms = ttl_s * 1000;
	list_append(&s->leases, &l->link);
	fc->reply.lease = l->id;
	fc->reply.ttl_s = ttl_s;
	fc->reply.revision = s->revision;
	return 0;
}

static int fake_keep(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms)
{
	struct coord_fake *s = fake_of(c)->store;
	struct fake_call *fc = fake_call_new(c, call);
	struct fake_lease *l = fake_lease_find(s, lease);

	(void)timeout_ms;
	if (fake_of(c)->fate == COORD_FAKE_LOST_BEFORE)
		return 0;
	fc->reply.lease = lease;
	fc->reply.revision = s->revision;
	if (!l) {
		fake_refuse(&fc->reply, COORD_NO_LEASE, "the lease is gone");
		return 0;
	}
	l->left_ms = l->ttl_ms;
	fc->reply.ttl_s = l->ttl_ms / 1000;
	return 0;
}

static void fake_lease_ends(struct coord_fake *s, struct fake_lease *lease)
{
	struct list *l = s->keys.next;
	bool first = true;

	while (l != &s->keys) {
		struct fake_key *k = CONTAINER_OF(l, struct fake_key, link);

		l = l->next;
		if (k->lease != lease->id)
			continue;
		s->revision += first;
		first = false;
		fake_remove(s, k);
	}
	list_unlink(&lease->link);
	free(lease);
	fake_tell(s);
}

static int fake_revoke(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms)
{
	struct coord_fake *s = fake_of(c)->store;
	struct fake_call *fc = fake_call_new(c, call);
	struct fake_lease *l = fake_lease_find(s, lease);

	(void)timeout_ms;
	if (fake_of(c)->fate == COORD_FAKE_LOST_BEFORE)
		return 0;
	if (l)
		fake_lease_ends(s, l);
	else
		fake_refuse(&fc->reply, COORD_NO_LEASE, "the lease is gone");
	fc->reply.revision = s->revision;
	return 0;
}

static void fake_close(struct coord *c)
{
	struct fake *u = fake_of(c);

	CHECK(list_empty(&u->lost));
	while (!list_empty(&u->watches)) { /* ended, but posted */
		struct fake_watch *fw = CONTAINER_OF(u->watches.next, struct fake_watch, link);

		CHECK(!fw->w);
		list_unlink(&fw->link);
	}
	list_unlink(&u->link);
	free(u);
}

static const struct coord_impl fake_impl = {
	.txn = fake_txn,
	.grant = fake_grant,
	.keep = fake_keep,
	.revoke = fake_revoke,
	.cancel = fake_cancel,
	.watch_begin = fake_watch_begin,
	.watch_end = fake_watch_end,
	.close = fake_close,
};

/* --------------------------------------------------------------------------- for tests */

int coord_fake_new(struct coord_fake **ret)
{
	struct coord_fake *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	list_init(&s->keys);
	list_init(&s->changes);
	list_init(&s->leases);
	list_init(&s->users);
	s->revision = 1;
	*ret = s;
	return 0;
}

static void fake_forget_changes(struct coord_fake *s)
{
	while (!list_empty(&s->changes)) {
		struct fake_change *c = CONTAINER_OF(s->changes.next, struct fake_change, link);

		list_unlink(&c->link);
		fake_key_free(c->kv);
		free(c);
	}
}

void coord_fake_free(struct coord_fake *s)
{
	CHECK(list_empty(&s->users));
	fake_forget_changes(s);
	while (!list_empty(&s->keys)) {
		struct fake_key *k = CONTAINER_OF(s->keys.next, struct fake_key, link);

		list_unlink(&k->link);
		fake_key_free(k);
	}
	while (!list_empty(&s->leases)) {
		struct fake_lease *l = CONTAINER_OF(s->leases.next, struct fake_lease, link);

		list_unlink(&l->link);
		free(l);
	}
	free(s);
}

int coord_fake_open(struct coord_fake *s, struct loopq *loopq, struct coord **ret)
{
	struct fake *u = calloc(1, sizeof(*u));

	if (!u)
		return -ENOMEM;
	u->coord.impl = &fake_impl;
	u->store = s;
	u->loopq = loopq;
	list_init(&u->link);
	list_init(&u->lost);
	list_init(&u->watches);
	list_append(&s->users, &u->link);
	*ret = &u->coord;
	return 0;
}

void coord_fake_pass(struct coord_fake *s, uint64_t ms)
{
	struct list *l = s->leases.next;

	while (l != &s->leases) {
		struct fake_lease *lease = CONTAINER_OF(l, struct fake_lease, link);

		l = l->next;
		lease->left_ms -= (int64_t)ms;
		if (lease->left_ms <= 0)
			fake_lease_ends(s, lease);
	}
}

void coord_fake_fate(struct coord *c, enum coord_fake_fate fate)
{
	fake_of(c)->fate = fate;
	if (fate == COORD_FAKE_ANSWERED)
		fake_tell_user(fake_of(c));
}

void coord_fake_lose(struct coord *c)
{
	struct fake *u = fake_of(c);

	while (!list_empty(&u->lost)) {
		struct fake_call *fc = CONTAINER_OF(u->lost.next, struct fake_call, link);

		list_unlink(&fc->link);
		fake_refuse(&fc->reply, COORD_DOUBT, "the answer was lost");
		loopq_post(u->loopq, &fc->work, fake_call_on_work);
	}
}

void coord_fake_compact(struct coord_fake *s)
{
	fake_forget_changes(s);
	s->compacted = s->revision;
}
