/*
 * Blocking work: the maker's and the ender's. While one of them owns a clique, the others do not
 * touch it; the state says so.
 */
#include "engine/nccl_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* The others may look at it again. */
static void nccl_make_hand_over(struct nccl_clique *q, enum nccl_state state)
{
	struct nccl *n = q->nccl;

	pthread_mutex_lock(&n->lock);
	q->state = state;
	pthread_mutex_unlock(&n->lock);
	pthread_cond_signal(&n->wake);
	pthread_cond_broadcast(&n->changed);
}

/* The last action of a thread on it: from now on no thread finds it. */
static void nccl_make_give_back(struct nccl_clique *q, struct nccl_answer *a,
				void (*fn)(struct nccl_answer *))
{
	struct nccl *n = q->nccl;

	pthread_mutex_lock(&n->lock);
	list_unlink(&q->link);
	nccl_answer(n, a, fn);
	pthread_cond_signal(&n->wake); /* the engine stays while the lock is held */
	pthread_cond_broadcast(&n->changed);
	pthread_mutex_unlock(&n->lock);
}

/* -------------------------------------------------------------------- making */

static void nccl_make_on_ready(struct nccl_answer *a)
{
	struct nccl_clique *q = CONTAINER_OF(a, struct nccl_clique, ready);
	struct comm *c = &nccl_comm_of(q)->comm;

	nccl_meet_join(q);
	c->ready(c->userdata, c, 0);
}

static void nccl_make_on_not_made(struct nccl_answer *a)
{
	struct nccl_clique *q = CONTAINER_OF(a, struct nccl_clique, ready);
	struct comm *c = &nccl_comm_of(q)->comm;
	comm_ready_cb ready = c->ready;
	void *userdata = c->userdata;
	int status = q->status;

	nccl_meet_join(q);
	snprintf(c->engine->why, sizeof(c->engine->why), "%s", q->why);
	comm_deinit(c);
	nccl_on_gone(&q->gone);
	ready(userdata, NULL, status);
}

/* Let the issuer warm it up. Return: whether it works. */
static bool nccl_make_warm_up(struct nccl_clique *q)
{
	struct nccl *n = q->nccl;
	bool works;

	pthread_mutex_lock(&n->lock);
	q->state = CLIQUE_WARMING;
	list_append(&n->items, &q->warm.link);
	pthread_cond_signal(&n->wake);
	while (q->state != CLIQUE_READY && q->state != CLIQUE_GONE)
		pthread_cond_wait(&n->changed, &n->lock);
	works = q->state == CLIQUE_READY;
	pthread_mutex_unlock(&n->lock);
	return works;
}

static void nccl_make_not_made(struct nccl_clique *q)
{
	clique_abort(q);
	clique_close(q);
	clique_rouse(q);
	nccl_make_give_back(q, &q->ready, nccl_make_on_not_made);
}

/* Its communicators are there; @r: or not. Its devices rest. */
static void nccl_make_finish_making(struct nccl_clique *q, int r)
{
	struct nccl *n = q->nccl;

	if (r == 0)
		r = clique_scratch(q);
	if (r) {
		q->status = r;
		nccl_make_not_made(q);
		return;
	}
	if (!nccl_make_warm_up(q)) {
		nccl_make_not_made(q);
		return;
	}
	clique_measure(q);
	clique_rouse(q);
	pthread_mutex_lock(&n->lock);
	q->deadline = 0;
	nccl_answer(n, &q->ready, nccl_make_on_ready);
	pthread_mutex_unlock(&n->lock);
}

void nccl_make_failed(struct nccl_clique *q)
{
	nccl_make_give_back(q, &q->ready, nccl_make_on_not_made);
}

void nccl_make(struct nccl_clique *q)
{
	int r;

	q->deadline = nccl_now_ms() + q->nccl->make_ms;
	if (!clique_rest(q, q->deadline)) {
		snprintf(q->why, sizeof(q->why), "its devices did not become idle in time");
		q->status = -ETIMEDOUT;
		nccl_make_failed(q);
		return;
	}
	r = clique_open(q);
	if (r == 0)
		r = clique_init(q);
	nccl_make_finish_making(q, r);
}

/* The work of @q has ended when it is STOPPED, else with the shrinking. */
static int nccl_make_shrink(struct nccl_clique *q, struct nccl_clique *heir)
{
	bool stopped = clique_stop(q);
	int r;

	if (stopped) {
		nccl_make_hand_over(q, CLIQUE_STOPPED);
		clique_rest(q, heir->deadline);
	}
	r = clique_open(heir);
	if (r == 0)
		r = clique_shrink(q, heir, stopped);
	clique_abort(q);
	if (!clique_rest(heir, heir->deadline)) {
		snprintf(heir->why, sizeof(heir->why), "its devices did not become idle in time");
		r = -ETIMEDOUT;
	}
	clique_rouse(q);
	return r;
}

void nccl_make_heir(struct nccl_clique *q)
{
	struct nccl_clique *heir = q->heir;
	int r;

	heir->deadline = nccl_now_ms() + q->nccl->make_ms;
	r = nccl_make_shrink(q, heir);
	nccl_make_hand_over(q, CLIQUE_GONE);
	nccl_make_finish_making(heir, r);
}

/* --------------------------------------------------------------- registering */

static int nccl_make_change(struct nccl_clique *q, struct nccl_item *item)
{
	struct nccl_slab *slab = item->slab;
	int r;

	if (item->kind == NCCL_REGISTER) {
		r = clique_register(q, slab);
		if (r)
			return r;
		list_append(&q->slabs, &slab->registered);
		atomic_fetch_add(&q->windows, 1);
		return 0;
	}
	if (list_empty(&slab->registered))
		return 0;
	list_unlink(&slab->registered);
	atomic_fetch_sub(&q->windows, 1);
	return clique_unregister(q, slab);
}

/* Without idle devices nothing is registered: it is only advice. Unregistering is not advice. */
void nccl_register(struct nccl_clique *q)
{
	struct nccl *n = q->nccl;
	struct nccl_item *item = q->registering;
	bool rested = clique_rest(q, nccl_now_ms() + NCCL_END_MS);
	int r = 0;

	if (rested || item->kind == NCCL_UNREGISTER)
		r = nccl_make_change(q, item);
	clique_rouse(q);
	pthread_mutex_lock(&n->lock);
	if (item->kind == NCCL_UNREGISTER)
		nccl_answer(n, &item->answer, nccl_on_unregistered);
	if (r == 0) {
		q->state = CLIQUE_READY;
	} else {
		q->status = r;
		nccl_break(n, q);
	}
	pthread_mutex_unlock(&n->lock);
	pthread_cond_signal(&n->wake);
}

/* -------------------------------------------------------------------- ending */

static bool nccl_make_is_closing(struct nccl *n)
{
	bool late;

	pthread_mutex_lock(&n->lock);
	late = n->close_at && nccl_now_ms() >= n->close_at;
	pthread_mutex_unlock(&n->lock);
	return late;
}

static void *nccl_make_aborter(void *arg)
{
	struct nccl_clique *q = arg;

	clique_abort(q);
	clique_unwait(q);
	clique_rouse(q);
	nccl_make_hand_over(q, CLIQUE_GONE);
	return NULL;
}

/* Its devices do not rest: that waits for what others have running there. So it is done by a thread of its own,
 * and the ender can stop and abort the others. nccl_end_free joins the thread. */
static void nccl_make_abort_beside(struct nccl_clique *q)
{
	q->has_aborter = true;
	if (nccl_thread_create(&q->aborter, "nccl-abort", nccl_make_aborter, q) == 0)
		return;
	q->has_aborter = false;
	nccl_make_aborter(q);
}

/* Others with members elsewhere may run on its devices, and end only when they are stopped, too: that
 * is behind this in the ender's queue. */
static void nccl_make_end_stopped(struct nccl_clique *q)
{
	int64_t now = nccl_now_ms();

	if (!clique_rest(q, now) && now < q->rest_until && !nccl_make_is_closing(q->nccl))
		nccl_thread_post(&q->nccl->ender, q, nccl_make_end_stopped);
	else if (q->rests)
		nccl_make_aborter(q);
	else
		nccl_make_abort_beside(q);
}

/* Aborting also frees memory. If NCCL can stop running work without freeing memory, that comes first: then
 * the devices can become idle. If it cannot (before 2.28.7), the first thing that each abort does is to stop
 * the work of its clique, for which others may wait. While a clique is being warmed up the devices are
 * already held, and the maker ends that. */
void nccl_end_abort(struct nccl_clique *q)
{
	bool makers = q->rests;

	if (clique_stop(q) && !makers) {
		clique_unwait(q);
		nccl_make_hand_over(q, CLIQUE_STOPPED);
		q->rest_until = nccl_now_ms() + NCCL_END_MS;
		nccl_make_end_stopped(q);
	} else if (makers) {
		clique_abort(q);
		clique_unwait(q);
		nccl_make_hand_over(q, CLIQUE_GONE);
	} else {
		nccl_make_abort_beside(q);
	}
}

void nccl_end_destroy(struct nccl_clique *q)
{
	clique_rest(q, nccl_now_ms() + NCCL_END_MS);
	clique_destroy(q);
	clique_rouse(q);
	nccl_end_free(q);
}

void nccl_end_free(struct nccl_clique *q)
{
	if (q->has_aborter)
		pthread_join(q->aborter, NULL);
	clique_close(q);
	nccl_make_give_back(q, &q->gone, nccl_on_gone);
}

#endif
