/*
 * Communicators with members in other processes: how these meet. Each has a thread of its own until it
 * is made, the meeter: it may wait for others as long as they wait for their users, and a maker that
 * several communicators share would wait for them in another order in each process.
 *
 * Keys, below the prefix of the communicator:
 *   N    of member N: "nccl VERSION"; its process wants the communicator
 *   id   NCCL's, made by the process of member 0 when it has seen all of them
 *
 * So no device rests before all processes are there. Then they rest, and the communicator is made and
 * warmed up; those of one device one after the other, in the order in which they were asked for.
 */
#include "engine/nccl_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Milliseconds of a wait, to see that it is late. */
#define NCCL_MEET_SLICE 100

__attribute__((format(printf, 3, 4))) static int nccl_meet_fail(struct nccl_clique *q, int r,
								const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(q->why, sizeof(q->why), format, args);
	va_end(args);
	return r;
}

static void nccl_meet_key(const struct nccl_clique *q, const char *what, char *key, size_t bytes)
{
	snprintf(key, bytes, "%s/%s", q->others->prefix, what);
}

static void nccl_meet_member_key(const struct nccl_clique *q, unsigned member, char *key,
				 size_t bytes)
{
	snprintf(key, bytes, "%s/%u", q->others->prefix, member);
}

bool nccl_meet_is_over(struct nccl_clique *q)
{
	const struct nccl_others *o = q->others;
	char key[256];
	ncclUniqueId id;

	if (!o || !q->deadline)
		return false;
	nccl_meet_key(q, "id", key, sizeof(key));
	if (o->store.get(o->store.userdata, key, 0, &id, sizeof(id)) != -ECANCELED)
		return false;
	nccl_meet_fail(q, -ECANCELED, "it is not wanted any more");
	return true;
}

/* Return: bytes, -ETIMEDOUT, or another negative errno. */
static long nccl_meet_get(struct nccl_clique *q, const char *key, void *value, size_t bytes)
{
	const struct comm_store *store = &q->others->store;
	long got = -ETIMEDOUT;

	while (got == -ETIMEDOUT && nccl_now_ms() < q->deadline)
		got = store->get(store->userdata, key, NCCL_MEET_SLICE, value, bytes);
	return got;
}

static int nccl_meet_set(struct nccl_clique *q, const char *key, const void *value, size_t bytes)
{
	const struct comm_store *store = &q->others->store;
	int r = store->set(store->userdata, key, value, bytes);

	return r ? nccl_meet_fail(q, r, "%s cannot be published: %s", key, strerror(-r)) : 0;
}

/* ------------------------------------------------------------------------ the members */

static void nccl_meet_text(const struct nccl_clique *q, char *buf, size_t bytes)
{
	char version[32];

	snprintf(buf, bytes, "nccl %s", nccl_lib_version(q->nccl->lib, version, sizeof(version)));
}

static int nccl_meet_publish(struct nccl_clique *q)
{
	char key[256], text[48];
	int r = 0;

	nccl_meet_text(q, text, sizeof(text));
	for (unsigned i = 0; i < q->n && r == 0; i++) {
		nccl_meet_member_key(q, q->first + i, key, sizeof(key));
		r = nccl_meet_set(q, key, text, strlen(text));
	}
	return r;
}

/* NCCL does not work between its versions. */
static int nccl_meet_look_up(struct nccl_clique *q, unsigned member)
{
	char key[256], text[48], own[48];
	long got;

	nccl_meet_member_key(q, member, key, sizeof(key));
	got = nccl_meet_get(q, key, text, sizeof(text) - 1);
	if (got == -ETIMEDOUT)
		return nccl_meet_fail(q, (int)got, "member %u did not come in time", member);
	if (got < 0 && got != -EMSGSIZE)
		return nccl_meet_fail(q, (int)got, "what member %u says cannot be read: %s", member,
				      strerror((int)-got));
	text[got < 0 ? 0 : got] = '\0';
	nccl_meet_text(q, own, sizeof(own));
	if (strncmp(text, "nccl ", 5) != 0)
		return nccl_meet_fail(q, -EPROTO,
				      "member %u does not use NCCL: its node has no GPU", member);
	if (strcmp(text, own) != 0)
		return nccl_meet_fail(q, -EPROTO, "member %u has %s, and this node has %s", member,
				      text, own);
	return 0;
}

static int nccl_meet_invite(struct nccl_clique *q)
{
	char key[256];
	int r = 0;

	for (unsigned i = 0; i < q->size && r == 0; i++)
		if (i < q->first || i >= q->first + q->n)
			r = nccl_meet_look_up(q, i);
	if (r == 0)
		r = clique_make_id(q, &q->others->id);
	if (r)
		return r;
	nccl_meet_key(q, "id", key, sizeof(key));
	return nccl_meet_set(q, key, &q->others->id, sizeof(q->others->id));
}

static int nccl_meet_accept(struct nccl_clique *q)
{
	char key[256];
	long got;

	nccl_meet_key(q, "id", key, sizeof(key));
	got = nccl_meet_get(q, key, &q->others->id, sizeof(q->others->id));
	if (got == sizeof(q->others->id))
		return 0;
	if (got == -ETIMEDOUT)
		return nccl_meet_fail(q, (int)got,
				      "other members did not come in time, or member 0 did not");
	return nccl_meet_fail(q, got < 0 ? (int)got : -EBADMSG, "there is no valid id: %s",
			      got < 0 ? strerror((int)-got) : "its size is wrong");
}

/* ---------------------------------------------------------------------------- the turn */

bool nccl_meet_shares(const struct nccl_clique *a, const struct nccl_clique *b)
{
	for (unsigned i = 0; i < a->n; i++)
		for (unsigned k = 0; k < b->n; k++)
			if (a->members[i].backend == b->members[k].backend)
				return true;
	return false;
}

/* Has one that shares a device operations that are not issued yet? Other nodes may have issued theirs. With
 * the lock held. */
static bool nccl_meet_has_items(struct nccl *n, const struct nccl_clique *q)
{
	struct nccl_item *item, *next;

	list_for_each (item, next, &n->items, link)
		if (item->kind <= NCCL_BROADCAST && item->clique->others &&
		    nccl_meet_shares(item->clique, q))
			return true;
	return false;
}

/* With the lock held. */
static bool nccl_meet_must_wait(struct nccl *n, const struct nccl_clique *q)
{
	struct nccl_clique *p, *next;

	list_for_each (p, next, &n->cliques, link) {
		if (p == q)
			break;
		if (p->others && (p->state == CLIQUE_MAKING || p->state == CLIQUE_WARMING) &&
		    nccl_meet_shares(p, q))
			return true;
	}
	return nccl_meet_has_items(n, q);
}

static int nccl_meet_take_turn(struct nccl_clique *q)
{
	struct nccl *n = q->nccl;
	bool over = false;

	pthread_mutex_lock(&n->lock);
	while (!over && nccl_meet_must_wait(n, q)) {
		int64_t ms = nccl_now_ms() + NCCL_MEET_SLICE;
		struct timespec at = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

		pthread_cond_timedwait(&n->changed, &n->lock, &at);
		pthread_mutex_unlock(&n->lock);
		over = nccl_meet_is_over(q);
		pthread_mutex_lock(&n->lock);
	}
	pthread_mutex_unlock(&n->lock);
	return over ? -ECANCELED : 0;
}

/* -------------------------------------------------------------------------- the thread */

static void *nccl_meet_main(void *arg)
{
	struct nccl_clique *q = arg;
	int r = nccl_meet_publish(q);

	if (r == 0)
		r = q->first == 0 ? nccl_meet_invite(q) : nccl_meet_accept(q);
	if (r == 0)
		r = nccl_meet_take_turn(q);
	if (r == 0) {
		nccl_make(q);
		return NULL;
	}
	q->status = r;
	nccl_make_failed(q);
	return NULL;
}

int nccl_meet_init(struct nccl_clique *q, const struct comm_group *group)
{
	struct nccl_others *o = calloc(1, sizeof(*o));

	if (!o)
		return -ENOMEM;
	o->store = *group->store;
	o->connect_ms = group->connect_ms ? group->connect_ms : (unsigned)q->nccl->make_ms;
	q->others = o;
	if (strlen(group->prefix) >= sizeof(o->prefix))
		return -ENAMETOOLONG;
	snprintf(o->prefix, sizeof(o->prefix), "%s", group->prefix);
	return 0;
}

int nccl_meet_start(struct nccl_clique *q)
{
	q->deadline = nccl_now_ms() + q->others->connect_ms;
	return nccl_thread_create(&q->others->meeter, "shardd-nccl-met", nccl_meet_main, q);
}

void nccl_meet_join(struct nccl_clique *q)
{
	if (q->others)
		pthread_join(q->others->meeter, NULL);
}

#endif
