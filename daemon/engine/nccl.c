/*
 * Collectives between GPUs by NCCL: the part that runs on the loop. nccl_impl.h describes the
 * threads.
 *
 * A communicator's members are its devices, and perhaps those of other processes.
 */
#include "engine/nccl_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/cleanup.h"
#include "engine/engine_impl.h"

#ifdef SHARDD_CUDA

#include <time.h>

/* NCCL uses copy engines from this driver on. */
#define COPY_ENGINE_DRIVER 12050

int64_t nccl_now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static struct nccl_comm *nccl_to_comm(struct comm *c)
{
	return CONTAINER_OF(c, struct nccl_comm, comm);
}

/* ------------------------------------------------------------------- answers */

static void nccl_free_engine(struct nccl *n)
{
	pthread_cond_destroy(&n->changed);
	pthread_cond_destroy(&n->wake);
	pthread_mutex_destroy(&n->lock);
	free(n);
}

static void nccl_run_answers(struct nccl *n)
{
	struct list mine = LIST_INIT(mine);
	struct nccl_answer *a;

	pthread_mutex_lock(&n->lock);
	list_take_all(&mine, &n->answers);
	pthread_mutex_unlock(&n->lock);
	while (!list_empty(&mine)) {
		a = list_first(&mine, struct nccl_answer, link);
		list_unlink(&a->link);
		a->fn(a);
	}
}

static void nccl_on_tick(struct work *work)
{
	struct nccl *n = CONTAINER_OF(work, struct nccl, tick);

	pthread_mutex_lock(&n->lock);
	n->posted = false;
	pthread_mutex_unlock(&n->lock);
	if (n->closed)
		nccl_free_engine(n);
	else
		nccl_run_answers(n);
}

void nccl_answer(struct nccl *n, struct nccl_answer *a, void (*fn)(struct nccl_answer *))
{
	a->fn = fn;
	list_append(&n->answers, &a->link);
	if (n->posted)
		return;
	n->posted = true;
	loopq_post(n->loopq, &n->tick, nccl_on_tick);
}

/* ------------------------------------------------------------- communicators */

static void nccl_free_clique(struct nccl_clique *q)
{
	free(q->members);
	free(q->warm_own);
	free(q->warm_all);
	free(q->excluded);
	free(q->others);
}

void nccl_on_gone(struct nccl_answer *a)
{
	struct nccl_clique *q = CONTAINER_OF(a, struct nccl_clique, gone);
	struct nccl_comm *c = nccl_comm_of(q);
	struct nccl_slab *slab, *tmp;

	list_for_each (slab, tmp, &c->slabs, link)
		free(slab);
	nccl_free_clique(q);
	free(c);
}

static void nccl_init_item(struct nccl_item *item, struct nccl_clique *q, enum nccl_kind kind)
{
	item->clique = q;
	item->kind = kind;
	list_init(&item->link);
	list_init(&item->answer.link);
}

/* The links and what needs no memory of its own. */
static void nccl_init_clique(struct nccl_clique *q, struct nccl *n)
{
	struct nccl_answer *const answers[] = { &q->ready, &q->broke, &q->gone };

	q->nccl = n;
	q->state = CLIQUE_MAKING;
	list_init(&q->link);
	list_init(&q->slabs);
	list_init(&q->job.link);
	nccl_init_item(&q->warm, q, NCCL_WARM);
	nccl_init_item(&q->end, q, NCCL_END);
	for (unsigned i = 0; i < ARRAY_SIZE(answers); i++)
		list_init(&answers[i]->link);
}

static int nccl_fill_clique(struct nccl_clique *q, const struct comm *c)
{
	q->size = c->size;
	q->first = c->member;
	q->n = c->n_local;
	q->queue = c->queue;
	snprintf(q->name, sizeof(q->name), "%s", c->name);
	q->members = calloc(q->n, sizeof(*q->members));
	q->warm_own = calloc(q->n, sizeof(void *));
	q->warm_all = calloc(q->n, sizeof(void *));
	if (!q->members || !q->warm_own || !q->warm_all)
		return -ENOMEM;
	for (unsigned i = 0; i < q->n; i++) {
		q->members[i].backend = c->devices[i];
		q->members[i].context = backend_cuda_context(c->devices[i]);
	}
	return 0;
}

static bool nccl_group_is_valid(const struct comm_options *options)
{
	const struct comm_group *g = options->group;

	return !g || (g->prefix && g->store && g->member < g->size &&
		      options->n_devices <= g->size - g->member);
}

static int nccl_new_comm(struct nccl *n, const struct comm_options *options, struct nccl_comm **ret)
{
	const struct comm_group *g = options->group;
	struct nccl_comm *c;
	int r;

	if (!nccl_group_is_valid(options))
		return -EINVAL;
	for (unsigned i = 0; i < options->n_devices; i++)
		if (strcmp(backend_info(options->devices[i])->name, "cuda") != 0)
			return -EINVAL; /* NCCL knows no other memory */
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	nccl_init_clique(&c->clique, n);
	list_init(&c->slabs);
	list_init(&c->failed_answer.link);
	r = comm_init(&c->comm, &n->engine, options, g ? g->size : options->n_devices,
		      g ? g->member : 0);
	if (r) {
		free(c);
		return r;
	}
	r = nccl_fill_clique(&c->clique, &c->comm);
	if (r == 0 && g)
		r = nccl_meet_init(&c->clique, g);
	if (r) {
		comm_deinit(&c->comm);
		nccl_on_gone(&c->clique.gone);
		return r;
	}
	*ret = c;
	return 0;
}

static void nccl_enter_clique(struct nccl *n, struct nccl_clique *q)
{
	pthread_mutex_lock(&n->lock);
	list_append(&n->cliques, &q->link);
	pthread_mutex_unlock(&n->lock);
}

/* No thread has it. */
static void nccl_forget(struct nccl_comm *c)
{
	struct nccl *n = c->clique.nccl;

	pthread_mutex_lock(&n->lock);
	list_unlink(&c->clique.link);
	pthread_mutex_unlock(&n->lock);
	comm_deinit(&c->comm);
	nccl_on_gone(&c->clique.gone);
}

static int nccl_comm_new(struct engine *e, const struct comm_options *options)
{
	struct nccl *n = nccl_of(e);
	struct nccl_comm *c;
	int r = nccl_new_comm(n, options, &c);

	if (r)
		return r;
	nccl_enter_clique(n, &c->clique);
	if (!options->group)
		nccl_thread_post(&n->maker, &c->clique, nccl_make);
	else if ((r = nccl_meet_start(&c->clique)) < 0)
		nccl_forget(c);
	return r;
}

static int nccl_exclude(struct nccl_clique *q, const struct comm *parent, const bool *gone)
{
	q->excluded = calloc(parent->size, sizeof(int));
	if (!q->excluded)
		return -ENOMEM;
	for (unsigned i = 0; i < parent->size; i++)
		if (gone[i])
			q->excluded[q->n_excluded++] = (int)i;
	return parent->size - (unsigned)q->n_excluded == q->size ? 0 : -EINVAL;
}

/* Whether the issuer will pass @parent to the maker, with its heir. */
static bool nccl_bequeath(struct nccl_clique *parent, struct nccl_clique *heir)
{
	struct nccl *n = parent->nccl;
	bool able;

	pthread_mutex_lock(&n->lock);
	able = n->lib->shrink && parent->state == CLIQUE_READY && !parent->heir &&
	       !atomic_load(&parent->abort);
	if (able)
		parent->heir = heir;
	parent->asked = true;
	atomic_store(&parent->abort, true);
	pthread_mutex_unlock(&n->lock);
	pthread_cond_signal(&n->wake);
	return able;
}

static int nccl_shrink(struct comm *parent, const bool *gone, const struct comm_options *options)
{
	struct nccl *n = nccl_of(parent->engine);
	struct nccl_comm *c;
	int r;

	if (options->group || nccl_to_comm(parent)->clique.others)
		return -EOPNOTSUPP;
	r = nccl_new_comm(n, options, &c);
	if (r)
		return r;
	r = nccl_exclude(&c->clique, parent, gone);
	if (r) {
		comm_deinit(&c->comm);
		nccl_on_gone(&c->clique.gone);
		return r;
	}
	parent->aborted = true;
	nccl_enter_clique(n, &c->clique);
	/* without its parent it is created like any other */
	if (!nccl_bequeath(&nccl_to_comm(parent)->clique, &c->clique))
		nccl_thread_post(&n->maker, &c->clique, nccl_make);
	return 0;
}

static void nccl_comm_free(struct comm *c)
{
	nccl_to_comm(c)->freed = true;
	nccl_issue(&nccl_to_comm(c)->clique.end);
}

static void nccl_abort(struct comm *c)
{
	struct nccl_clique *q = &nccl_to_comm(c)->clique;

	pthread_mutex_lock(&q->nccl->lock);
	q->asked = true;
	atomic_store(&q->abort, true);
	pthread_mutex_unlock(&q->nccl->lock);
	pthread_cond_signal(&q->nccl->wake);
}

static void nccl_info(const struct comm *c, struct comm_info *ret)
{
	const struct nccl_comm *nc = CONTAINER_OF(c, const struct nccl_comm, comm);
	const struct nccl *n = nc->clique.nccl;
	/* the conditions that NCCL 2.28 checks silently: a node, registered memory, the policy, the
	 * driver */
	bool engines = c->queue == BACKEND_Q_GATHER && n->lib->zero_policy &&
		       n->cuda->driver_version >= COPY_ENGINE_DRIVER &&
		       atomic_load(&nc->clique.windows) > 0;

	if (c->size > 1)
		ret->gather = engines ? "copy-engine" : "kernel";
	ret->memory_bytes = nc->clique.memory_bytes;
}

/* ------------------------------------------------------------ registered memory */

static bool nccl_is_aligned(void *const *addr, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if ((uintptr_t)addr[i] % NCCL_WIN_REQUIRED_ALIGNMENT)
			return false;
	return true;
}

static void nccl_reg(struct comm *c, void *const *addr, uint64_t bytes)
{
	struct nccl_clique *q = &nccl_to_comm(c)->clique;
	struct nccl_slab *slab;

	/* processes register in orders of their own, and all members of one would have to */
	if (!q->nccl->lib->windows || q->others || !nccl_is_aligned(addr, q->n))
		return;
	slab = calloc(1, sizeof(*slab) + q->n * (sizeof(void *) + sizeof(ncclWindow_t)));
	if (!slab)
		return; /* it was advice */
	slab->bytes = bytes;
	slab->addr = (void **)(slab + 1);
	slab->windows = (ncclWindow_t *)(slab->addr + q->n);
	memcpy(slab->addr, addr, q->n * sizeof(void *));
	nccl_init_item(&slab->reg, q, NCCL_REGISTER);
	nccl_init_item(&slab->unreg, q, NCCL_UNREGISTER);
	slab->reg.slab = slab;
	slab->unreg.slab = slab;
	list_init(&slab->registered);
	list_init(&slab->link);
	list_append(&nccl_to_comm(c)->slabs, &slab->link);
	nccl_issue(&slab->reg);
}

static void nccl_unreg(struct comm *c, void *const *addr, void (*done)(void *userdata),
		       void *userdata)
{
	struct nccl_slab *slab, *tmp;

	list_for_each (slab, tmp, &nccl_to_comm(c)->slabs, link) {
		if (memcmp(slab->addr, addr, c->n_local * sizeof(void *)) != 0)
			continue;
		list_unlink(&slab->link);
		slab->done = done;
		slab->userdata = userdata;
		nccl_issue(&slab->unreg);
		return;
	}
	done(userdata); /* it was never registered */
}

/* ---------------------------------------------------------------- operations */

static void nccl_on_failed(struct nccl_answer *a)
{
	struct nccl_comm *c = CONTAINER_OF(a, struct nccl_comm, failed_answer);
	struct comm_op *op = STEAL_PTR(c->failed), *next;

	for (; op; op = next) {
		next = op->impl;
		comm_complete(&c->comm, op, -ENOMEM); /* the last may free @c */
	}
}

static void nccl_no_memory(struct nccl_comm *c, struct comm_op *op)
{
	struct nccl *n = c->clique.nccl;

	op->impl = c->failed;
	if (!c->failed) {
		pthread_mutex_lock(&n->lock);
		nccl_answer(n, &c->failed_answer, nccl_on_failed);
		pthread_mutex_unlock(&n->lock);
	}
	c->failed = op;
}

static void nccl_start(struct comm *c, struct comm_op *op, const void *const *send,
		       void *const *recv, const struct nccl_item *values)
{
	size_t bytes = c->n_local * sizeof(void *);
	struct nccl_item *item = malloc(sizeof(*item) + 2 * bytes);

	if (!item) {
		nccl_no_memory(nccl_to_comm(c), op);
		return;
	}
	*item = *values;
	nccl_init_item(item, &nccl_to_comm(c)->clique, values->kind);
	item->op = op;
	item->send = memcpy(item + 1, send, bytes);
	item->recv = memcpy((char *)(item + 1) + bytes, recv, bytes);
	nccl_issue(item);
}

static void nccl_all_gather(struct comm *c, struct comm_op *op, const void *const *send,
			    void *const *recv, uint64_t count, enum dtype dtype)
{
	nccl_start(c, op, send, recv,
		   &(struct nccl_item){ .kind = NCCL_ALL_GATHER, .count = count, .dtype = dtype });
}

static void nccl_reduce_scatter(struct comm *c, struct comm_op *op, const void *const *send,
				void *const *recv, uint64_t count, enum dtype dtype)
{
	nccl_start(
		c, op, send, recv,
		&(struct nccl_item){ .kind = NCCL_REDUCE_SCATTER, .count = count, .dtype = dtype });
}

static void nccl_all_reduce(struct comm *c, struct comm_op *op, void *const *data, uint64_t count,
			    enum dtype dtype, enum reduce_op reduce)
{
	nccl_start(c, op, (const void *const *)data, data,
		   &(struct nccl_item){ .kind = NCCL_ALL_REDUCE,
					.count = count,
					.dtype = dtype,
					.reduce = reduce });
}

static void nccl_broadcast(struct comm *c, struct comm_op *op, void *const *data, uint64_t bytes,
			   unsigned root)
{
	nccl_start(c, op, (const void *const *)data, data,
		   &(struct nccl_item){ .kind = NCCL_BROADCAST, .count = bytes, .root = root });
}

/* ------------------------------------------------------------------- the engine */

/* Cliques that are still ending end now: work that runs too long is aborted. */
static void nccl_close(struct engine *e)
{
	struct nccl *n = nccl_of(e);

	pthread_mutex_lock(&n->lock);
	n->close_at = nccl_now_ms() + n->close_ms;
	pthread_mutex_unlock(&n->lock);
	pthread_cond_signal(&n->wake);
	pthread_join(n->issuer, NULL);
	nccl_thread_stop(&n->maker);
	nccl_thread_stop(&n->ender);
	nccl_run_answers(n);
	CHECK(list_empty(&n->items) && list_empty(&n->cliques));
	n->closed = true;
	if (!n->posted)
		nccl_free_engine(n);
}

static const struct engine_ops nccl_ops = {
	.name = "nccl",
	.groups = true,
	.in_order = true,
	.comm_new = nccl_comm_new,
	.comm_free = nccl_comm_free,
	.abort = nccl_abort,
	.all_gather = nccl_all_gather,
	.reduce_scatter = nccl_reduce_scatter,
	.all_reduce = nccl_all_reduce,
	.broadcast = nccl_broadcast,
	.close = nccl_close,
	.info = nccl_info,
	.reg = nccl_reg,
	.unreg = nccl_unreg,
	.shrink = nccl_shrink,
};

void engine_nccl_patience(struct engine *e, int64_t make_ms, int64_t close_ms)
{
	CHECK(e->ops == &nccl_ops);
	nccl_of(e)->make_ms = make_ms;
	nccl_of(e)->close_ms = close_ms;
}

static void nccl_init_locks(struct nccl *n)
{
	pthread_condattr_t monotonic;

	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_mutex_init(&n->lock, NULL);
	pthread_cond_init(&n->wake, &monotonic);
	pthread_cond_init(&n->changed, &monotonic);
	pthread_condattr_destroy(&monotonic);
}

static int nccl_start_threads(struct nccl *n)
{
	int r = nccl_thread_start(&n->maker, "shardd-nccl-new");

	if (r == 0)
		r = nccl_thread_start(&n->ender, "shardd-nccl-end");
	if (r == 0)
		r = nccl_thread_create(&n->issuer, "shardd-nccl", nccl_issue_main, n);
	if (r) {
		nccl_thread_stop(&n->ender);
		nccl_thread_stop(&n->maker);
	}
	return r;
}

static int nccl_open_libraries(struct nccl *n, struct fault *f)
{
	char why[256], version[32];

	if (cuda_lib_open(&n->cuda, why, sizeof(why)) || nccl_lib_open(&n->lib, why, sizeof(why)))
		return fault_set(f, FAULT_UNAVAILABLE, NULL, "%s", why);
	snprintf(n->engine.detail, sizeof(n->engine.detail), "NCCL %s",
		 nccl_lib_version(n->lib, version, sizeof(version)));
	return 0;
}

int engine_nccl_new(struct loopq *loopq, struct engine **ret, struct fault *f)
{
	_cleanup_(freep) struct nccl *n = calloc(1, sizeof(*n));
	int r;

	if (!n)
		return fault_errno(f, -ENOMEM, "starting NCCL");
	engine_init(&n->engine, &nccl_ops);
	n->loopq = loopq;
	n->make_ms = NCCL_MAKE_MS;
	n->close_ms = NCCL_CLOSE_MS;
	list_init(&n->items);
	list_init(&n->cliques);
	list_init(&n->answers);
	r = nccl_open_libraries(n, f);
	if (r)
		return r;
	nccl_init_locks(n);
	r = nccl_start_threads(n);
	if (r) {
		nccl_free_engine(STEAL_PTR(n));
		return fault_errno(f, r, "starting the threads of NCCL");
	}
	*ret = &n->engine;
	STEAL_PTR(n);
	return 0;
}

#else

int engine_nccl_new(struct loopq *loopq, struct engine **ret, struct fault *f)
{
	(void)loopq;
	(void)ret;
	return fault_set(f, FAULT_UNAVAILABLE, NULL,
			 "this build has no CUDA support: it was built without the CUDA Toolkit");
}

#endif
