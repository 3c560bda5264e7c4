/*
 * The issuing thread: takes items in their order, except that one which must wait (for
 * its clique to be quiet, or to be gone) holds up only the later ones of its clique.
 */
#include "engine/nccl_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void nccl_issue(struct nccl_item *item)
{
	struct nccl *n = item->clique->nccl;

	pthread_mutex_lock(&n->lock);
	list_append(&n->items, &item->link);
	pthread_mutex_unlock(&n->lock);
	pthread_cond_signal(&n->wake);
}

/* ------------------------------------------------------------------ breaking */

static void nccl_issue_on_broke(struct nccl_answer *a)
{
	struct nccl_clique *q = CONTAINER_OF(a, struct nccl_clique, broke);

	if (!nccl_comm_of(q)->freed)
		comm_broke(&nccl_comm_of(q)->comm, q->why);
}

/* No more calls from here: the ender owns it now, or the maker of its heir. With the lock held. */
static void nccl_issue_break(struct nccl *n, struct nccl_clique *q)
{
	bool known = q->state == CLIQUE_READY || q->state == CLIQUE_REGISTERING;

	q->state = CLIQUE_BROKEN;
	q->running = false;
	q->break_at = 0;
	if (known && !q->asked)
		nccl_answer(n, &q->broke, nccl_issue_on_broke);
	if (q->heir)
		nccl_thread_post(&n->maker, q, nccl_make_heir);
	else
		nccl_thread_post(&n->ender, q, nccl_end_abort);
}

void nccl_break(struct nccl *n, struct nccl_clique *q)
{
	if (q->others && q->state == CLIQUE_READY && !q->asked)
		q->break_at = nccl_now_ms() + NCCL_REASON_MS;
	else
		nccl_issue_break(n, q);
}

static bool nccl_issue_is_ours(const struct nccl_clique *q)
{
	return q->state == CLIQUE_WARMING || q->state == CLIQUE_READY;
}

/* Break the cliques that the loop wants aborted, those that run too long at the end, and those that have
 * failed some time ago. With the lock. */
static void nccl_issue_break_asked(struct nccl *n)
{
	int64_t now = nccl_now_ms();
	bool late = n->close_at && now > n->close_at;
	struct nccl_clique *q, *next;

	list_for_each (q, next, &n->cliques, link) {
		bool asked = atomic_load(&q->abort) || late;

		if (!nccl_issue_is_ours(q) || !(asked || (q->break_at && now >= q->break_at)))
			continue;
		q->asked = q->asked || asked;
		nccl_issue_break(n, q);
	}
}

/* ------------------------------------------------------------------- items */

static void nccl_issue_on_op(struct nccl_answer *a)
{
	struct nccl_item *item = CONTAINER_OF(a, struct nccl_item, answer);
	struct comm *c = &nccl_comm_of(item->clique)->comm;
	struct comm_op *op = item->op;
	int status = item->status;

	free(item);
	comm_complete(c, op, status);
}

void nccl_on_unregistered(struct nccl_answer *a)
{
	struct nccl_slab *slab = CONTAINER_OF(a, struct nccl_item, answer)->slab;
	void (*done)(void *userdata) = slab->done;
	void *userdata = slab->userdata;

	free(slab);
	done(userdata);
}

static bool nccl_issue_is_collective(const struct nccl_item *item)
{
	return item->kind <= NCCL_BROADCAST;
}

/* Registering and ending want nothing to run. */
static bool nccl_issue_must_wait(const struct nccl_item *item)
{
	switch (item->clique->state) {
	case CLIQUE_WARMING:
		return item->kind != NCCL_WARM;
	case CLIQUE_READY:
		return item->clique->break_at ||
		       (!nccl_issue_is_collective(item) && item->clique->running);
	case CLIQUE_STOPPED:
		return !nccl_issue_is_collective(item);
	default:
		return item->clique->state != CLIQUE_GONE;
	}
}

/* Those behind it that use its devices wait, too. */
static void nccl_issue_hold_up(struct nccl *n, struct nccl_clique *q)
{
	struct nccl_clique *p, *next;

	q->skip = true;
	list_for_each (p, next, &n->cliques, link)
		p->skip = p->skip || (q->others && p->others && nccl_meet_shares(p, q));
}

/* Its devices have no memory to make first. */
static bool nccl_issue_may_run(const struct nccl_item *item)
{
	return item->clique->state != CLIQUE_READY || !nccl_issue_is_collective(item) ||
	       item->count == 0 || clique_wait(item->clique);
}

/* The first that need not wait; it stays in the list. @ret_later: one waits for a device. With the
 * lock held. */
static struct nccl_item *nccl_issue_next_item(struct nccl *n, bool *ret_later)
{
	struct nccl_clique *q, *next;
	struct nccl_item *item, *tmp;

	list_for_each (q, next, &n->cliques, link)
		q->skip = false;
	list_for_each (item, tmp, &n->items, link) {
		if (item->clique->skip)
			continue;
		if (nccl_issue_must_wait(item)) {
			item->clique->skip = true;
			continue;
		}
		if (nccl_issue_may_run(item))
			return item;
		*ret_later = true;
		nccl_issue_hold_up(n, item->clique);
	}
	return NULL;
}

/* It has had its effect, or never will. With the lock held. */
static void nccl_issue_finish(struct nccl *n, struct nccl_item *item, int status)
{
	list_unlink(&item->link);
	item->status = status;
	if (item->clique->others)
		pthread_cond_broadcast(&n->changed); /* a meeter may wait for it */
	if (nccl_issue_is_collective(item))
		nccl_answer(n, &item->answer, nccl_issue_on_op);
	if (item->kind != NCCL_UNREGISTER)
		return;
	list_unlink(&item->slab->registered);
	nccl_answer(n, &item->answer, nccl_on_unregistered);
}

/* For a clique that works. A collective that failed stays queued, and is answered when nothing of
 * its clique runs any more: from then on nothing writes to its memory. With the lock, which it
 * releases. */
static void nccl_issue_start(struct nccl *n, struct nccl_item *item)
{
	struct nccl_clique *q = item->clique;
	int r;

	pthread_mutex_unlock(&n->lock);
	if (item->kind == NCCL_WARM)
		r = clique_warm(q);
	else
		r = item->count > 0 ? clique_issue(q, item) : 0;
	pthread_mutex_lock(&n->lock);
	if (r == 0 || item->kind == NCCL_WARM)
		nccl_issue_finish(n, item, 0);
	if (r == 0)
		return;
	q->status = r;
	nccl_break(n, q);
}

/* With the lock, which it may give up. */
static void nccl_issue_run(struct nccl *n, struct nccl_item *item)
{
	struct nccl_clique *q = item->clique;
	bool works = q->state == CLIQUE_READY || q->state == CLIQUE_WARMING;

	if (works && (nccl_issue_is_collective(item) || item->kind == NCCL_WARM)) {
		nccl_issue_start(n, item);
		return;
	}
	if (works && item->kind != NCCL_END) {
		list_unlink(&item->link);
		q->state = CLIQUE_REGISTERING;
		q->registering = item;
		nccl_thread_post(&n->maker, q, nccl_register);
		return;
	}
	nccl_issue_finish(n, item, ENGINE_E_ABORTED);
	if (item->kind != NCCL_END)
		return;
	q->state = works ? CLIQUE_ENDING : CLIQUE_GONE;
	nccl_thread_post(&n->ender, q, works ? nccl_end_destroy : nccl_end_free);
}

/* ---------------------------------------------------------------- looking */

/* With the lock, which it releases. */
static void nccl_issue_look(struct nccl *n, struct nccl_clique *q)
{
	int r;

	pthread_mutex_unlock(&n->lock);
	r = clique_look(q);
	if (r == CLIQUE_E_RUNS && q->deadline && nccl_now_ms() > q->deadline) {
		snprintf(q->why, sizeof(q->why), "the first collectives do not finish");
		r = -ETIMEDOUT;
	}
	if (r == CLIQUE_E_RUNS && nccl_meet_is_over(q))
		r = -ECANCELED;
	pthread_mutex_lock(&n->lock);
	if (r < 0) {
		q->status = r;
		nccl_break(n, q);
	} else if (r == 0) {
		clique_unwait(q);
	}
	if (r == 0 && q->state == CLIQUE_WARMING) {
		q->state = CLIQUE_READY;
		pthread_cond_broadcast(&n->changed);
	}
}

/* Return: whether anything runs (still, or did until now). With the lock held. */
static bool nccl_issue_look_at_all(struct nccl *n)
{
	struct nccl_clique *q, *next;
	bool any = false;

	list_for_each (q, next, &n->cliques, link)
		q->skip = false;
again:
	list_for_each (q, next, &n->cliques, link) {
		any = any || q->break_at;
		if (q->skip || !nccl_issue_is_ours(q) || !q->running || q->break_at)
			continue;
		q->skip = true;
		any = true;
		nccl_issue_look(n, q);
		goto again; /* others came or went meanwhile */
	}
	return any;
}

static void nccl_issue_sleep_until(struct nccl *n, int64_t ms)
{
	struct timespec at = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

	pthread_cond_timedwait(&n->wake, &n->lock, &at);
}

void *nccl_issue_main(void *arg)
{
	struct nccl *n = arg;
	int64_t look_at = 0;
	struct nccl_item *item;
	bool runs = false, later;

	pthread_mutex_lock(&n->lock);
	while (!n->close_at || !list_empty(&n->cliques)) {
		nccl_issue_break_asked(n);
		if (nccl_now_ms() >= look_at) {
			runs = nccl_issue_look_at_all(n);
			look_at = nccl_now_ms() + NCCL_POLL_MS;
		}
		later = false;
		item = nccl_issue_next_item(n, &later);
		if (item) {
			nccl_issue_run(n, item);
			runs = true;
		} else if (later) {
			nccl_issue_sleep_until(n, nccl_now_ms() + 1);
		} else if (runs || n->close_at) {
			nccl_issue_sleep_until(n, look_at);
		} else {
			pthread_cond_wait(&n->wake, &n->lock);
		}
	}
	pthread_mutex_unlock(&n->lock);
	return NULL;
}

#endif
