/*
 * The calls of CUDA and NCCL for the local members of one communicator, in groups. The
 * only file that looks at their results.
 */
#include "engine/nccl_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "backend/backend_impl.h"
#include "core/cleanup.h"

static int nccl_clique_cuda_failed(struct nccl_clique *q, const struct nccl_member *m, CUresult r,
				   const char *nccl_clique_call)
{
	char text[160];

	snprintf(q->why, sizeof(q->why), "%s failed on %s: %s", nccl_clique_call,
		 backend_info(m->backend)->id, cuda_lib_text(q->nccl->cuda, r, text, sizeof(text)));
	return r == CUDA_ERROR_OUT_OF_MEMORY ? -ENOMEM : -EIO;
}

static int nccl_clique_nccl_failed(struct nccl_clique *q, ncclResult_t r,
				   const char *nccl_clique_call)
{
	char text[200];

	snprintf(q->why, sizeof(q->why), "%s: %s", nccl_clique_call,
		 nccl_lib_text(q->nccl->lib, r, text, sizeof(text)));
	return r == ncclInvalidArgument ? -EINVAL : -EIO;
}

static int nccl_clique_enter(struct nccl_clique *q, struct nccl_member *m)
{
	CUresult r = q->nccl->cuda->cuCtxSetCurrent(m->context);

	return r == CUDA_SUCCESS ? 0 : nccl_clique_cuda_failed(q, m, r, "cuCtxSetCurrent");
}

#define FOR_MEMBERS(m, q) for (struct nccl_member *m = (q)->members; m < (q)->members + (q)->n; m++)

/* ------------------------------------------------------- until it has settled */

static void nccl_clique_pause_us(unsigned us)
{
	nanosleep(&(struct timespec){ .tv_nsec = us * 1000l }, NULL);
}

/* The state of all members as NCCL reports it: an error, else whether one is in progress. */
static ncclResult_t nccl_clique_state_of(const struct nccl_clique *q)
{
	ncclResult_t all = ncclSuccess, one, r;

	FOR_MEMBERS(m, q)
	{
		if (!m->comm)
			continue;
		r = q->nccl->lib->ncclCommGetAsyncError(m->comm, &one);
		if (r == ncclSuccess)
			r = one;
		if (r == ncclInProgress)
			all = r;
		else if (r != ncclSuccess)
			return r;
	}
	return all;
}

/* Launches settle within microseconds, connections take up to seconds: so poll at short intervals
 * first, then at longer ones. @r: the result of the call itself. */
static int nccl_clique_settle(struct nccl_clique *q, ncclResult_t r, const char *nccl_clique_call)
{
	unsigned looks = 0;

	while (r == ncclSuccess || r == ncclInProgress) {
		r = nccl_clique_state_of(q);
		if (r == ncclSuccess)
			return 0;
		if (r != ncclInProgress)
			break;
		if (atomic_load(&q->abort) || (looks >= 200 && nccl_meet_is_over(q)))
			return -ECANCELED;
		if (q->deadline && nccl_now_ms() > q->deadline) {
			snprintf(q->why, sizeof(q->why), "%s does not finish", nccl_clique_call);
			return -ETIMEDOUT;
		}
		if (++looks < 200)
			sched_yield();
		else
			nccl_clique_pause_us(looks < 1000 ? 20 : 1000);
	}
	return nccl_clique_nccl_failed(q, r, nccl_clique_call);
}

/* The first failure inside a group counts, but the group is ended in any case. */
static int nccl_clique_end_group(struct nccl_clique *q, ncclResult_t inside,
				 const char *nccl_clique_call)
{
	ncclResult_t r = q->nccl->lib->ncclGroupEnd();

	if (inside != ncclSuccess && inside != ncclInProgress)
		return nccl_clique_nccl_failed(q, inside, nccl_clique_call);
	return nccl_clique_settle(q, r, nccl_clique_call);
}

static bool nccl_clique_goes_on(ncclResult_t r)
{
	return r == ncclSuccess || r == ncclInProgress;
}

/* ------------------------------------------------------------------ resting */

static void nccl_clique_hold(struct nccl_clique *q)
{
	FOR_MEMBERS(m, q)
	for (unsigned which = 0; which < _BACKEND_Q_N; which++)
		backend_cuda_hold(m->backend, (enum backend_queue)which);
}

static void nccl_clique_let(struct nccl_clique *q)
{
	FOR_MEMBERS(m, q)
	for (unsigned which = 0; which < _BACKEND_Q_N; which++)
		backend_cuda_let(m->backend, (enum backend_queue)which);
}

void clique_rouse(struct nccl_clique *q)
{
	if (STEAL(q->rests, false))
		nccl_clique_let(q);
}

/* A device that is lost rests too. */
static bool nccl_clique_rests(struct nccl_clique *q)
{
	const struct cuda_lib *cuda = q->nccl->cuda;
	CUstream stream;

	FOR_MEMBERS(m, q)
	for (unsigned which = 0; which < _BACKEND_Q_N; which++) {
		stream = backend_cuda_stream(m->backend, (enum backend_queue)which);
		if (cuda->cuCtxSetCurrent(m->context) == CUDA_SUCCESS &&
		    cuda->cuStreamQuery(stream) == CUDA_ERROR_NOT_READY)
			return false;
	}
	return true;
}

static bool nccl_clique_is_late(struct nccl *n, int64_t now, int64_t deadline)
{
	bool late;

	pthread_mutex_lock(&n->lock);
	late = now >= deadline || (n->close_at && now >= n->close_at);
	pthread_mutex_unlock(&n->lock);
	return late;
}

bool clique_rest(struct nccl_clique *q, int64_t deadline)
{
	int64_t now = nccl_now_ms(), turn;

	do {
		nccl_clique_hold(q);
		turn = now + NCCL_REST_MS;
		for (; now < turn; now = nccl_now_ms()) {
			if (nccl_clique_rests(q)) {
				q->rests = true;
				return true;
			}
			nccl_clique_pause_us(100);
		}
		nccl_clique_let(q);
		nccl_clique_pause_us(20000);
		now = nccl_now_ms();
	} while (!nccl_clique_is_late(q->nccl, now, deadline) && !nccl_meet_is_over(q));
	return false;
}

/* --------------------------------------------------------------- opening */

int clique_open(struct nccl_clique *q)
{
	const struct cuda_lib *cuda = q->nccl->cuda;
	size_t total;
	CUresult r;

	FOR_MEMBERS(m, q)
	{
		m->stream = backend_cuda_stream(m->backend, q->queue);
		if (nccl_clique_enter(q, m))
			return -EIO;
		r = cuda->cuEventCreate(&m->after, CU_EVENT_DISABLE_TIMING);
		if (r != CUDA_SUCCESS)
			return nccl_clique_cuda_failed(q, m, r, "cuEventCreate");
		r = cuda->cuMemGetInfo(&m->free_before, &total);
		if (r != CUDA_SUCCESS)
			return nccl_clique_cuda_failed(q, m, r, "cuMemGetInfo");
	}
	return 0;
}

void clique_close(struct nccl_clique *q)
{
	const struct cuda_lib *cuda = q->nccl->cuda;

	FOR_MEMBERS(m, q)
	{
		CHECK(!m->comm);
		if (nccl_clique_enter(q, m))
			continue;
		if (m->scratch)
			cuda->cuMemFree(m->scratch);
		if (m->after)
			cuda->cuEventDestroy(m->after);
	}
}

static void nccl_clique_configure(const struct nccl_clique *q, ncclConfig_t *config)
{
	nccl_lib_config(config);
	config->blocking = 0;
	config->commName = q->name;
	if (q->queue == BACKEND_Q_GATHER && q->nccl->lib->zero_policy)
		config->CTAPolicy = NCCL_CTA_POLICY_ZERO;
}

int clique_make_id(struct nccl_clique *q, ncclUniqueId *ret)
{
	ncclResult_t r = q->nccl->lib->ncclGetUniqueId(ret);

	return r == ncclSuccess ? 0 : nccl_clique_nccl_failed(q, r, "ncclGetUniqueId");
}

int clique_init(struct nccl_clique *q)
{
	const struct nccl_lib *lib = q->nccl->lib;
	ncclConfig_t config;
	ncclUniqueId id;
	ncclResult_t r;
	int rank = (int)q->first;

	if (q->others)
		id = q->others->id;
	else if (clique_make_id(q, &id))
		return -EIO;
	nccl_clique_configure(q, &config);
	r = lib->ncclGroupStart();
	if (r != ncclSuccess)
		return nccl_clique_nccl_failed(q, r, "ncclGroupStart");
	FOR_MEMBERS(m, q)
	{
		if (!nccl_clique_goes_on(r) || nccl_clique_enter(q, m))
			break;
		r = lib->ncclCommInitRankConfig(&m->comm, (int)q->size, id, rank++, &config);
	}
	if (rank != (int)(q->first + q->n) && nccl_clique_goes_on(r)) {
		lib->ncclGroupEnd();
		return -EIO;
	}
	return nccl_clique_end_group(q, r, "ncclCommInitRankConfig");
}

static bool nccl_clique_is_excluded(const struct nccl_clique *heir, int rank)
{
	for (int i = 0; i < heir->n_excluded; i++)
		if (heir->excluded[i] == rank)
			return true;
	return false;
}

/* NCCL writes the heir's communicators from its own thread when it has created them: until the
 * parent has settled we do not read them. */
int clique_shrink(struct nccl_clique *q, struct nccl_clique *heir, bool stopped)
{
	const struct nccl_lib *lib = q->nccl->lib;
	struct nccl_member *to = heir->members;
	ncclConfig_t config;
	ncclResult_t r;

	nccl_clique_configure(heir, &config);
	r = lib->ncclGroupStart();
	if (r != ncclSuccess)
		return nccl_clique_nccl_failed(heir, r, "ncclGroupStart");
	FOR_MEMBERS(m, q)
	{
		int rank = (int)(q->first + (unsigned)(m - q->members));

		if (!nccl_clique_goes_on(r) || nccl_clique_is_excluded(heir, rank))
			continue;
		CHECK(to < heir->members + heir->n && to->backend == m->backend);
		q->nccl->cuda->cuCtxSetCurrent(m->context);
		r = lib->ncclCommShrink(m->comm, heir->excluded, heir->n_excluded, &to++->comm,
					&config, stopped ? NCCL_SHRINK_DEFAULT : NCCL_SHRINK_ABORT);
	}
	return nccl_clique_end_group(heir, r, "ncclCommShrink");
}

/* ------------------------------------------------------------- collectives */

static ncclDataType_t nccl_clique_type_of(enum dtype t)
{
	switch (t) {
	case DTYPE_BF16:
		return ncclBfloat16;
	case DTYPE_FP16:
		return ncclFloat16;
	case DTYPE_FP32:
		return ncclFloat32;
	default:
		return ncclUint8;
	}
}

static ncclRedOp_t nccl_clique_op_of(enum reduce_op op)
{
	static const ncclRedOp_t ops[_REDUCE_N] = { [REDUCE_SUM] = ncclSum,
						    [REDUCE_AVG] = ncclAvg,
						    [REDUCE_MAX] = ncclMax,
						    [REDUCE_MIN] = ncclMin };

	return ops[op];
}

static ncclResult_t nccl_clique_call(const struct nccl_lib *lib, const struct nccl_member *m,
				     const struct nccl_item *item, const void *send, void *recv)
{
	ncclDataType_t type = nccl_clique_type_of(item->dtype);

	switch (item->kind) {
	case NCCL_ALL_GATHER:
		return lib->ncclAllGather(send, recv, item->count, type, m->comm, m->stream);
	case NCCL_REDUCE_SCATTER:
		return lib->ncclReduceScatter(send, recv, item->count, type, ncclSum, m->comm,
					      m->stream);
	case NCCL_ALL_REDUCE:
		return lib->ncclAllReduce(send, recv, item->count, type,
					  nccl_clique_op_of(item->reduce), m->comm, m->stream);
	default:
		CHECK(item->kind == NCCL_BROADCAST);
		return lib->ncclBroadcast(send, recv, item->count, ncclUint8, (int)item->root,
					  m->comm, m->stream);
	}
}

static int nccl_clique_call_all(struct nccl_clique *q, const struct nccl_item *item)
{
	static const char *const names[] = { [NCCL_ALL_GATHER] = "ncclAllGather",
					     [NCCL_REDUCE_SCATTER] = "ncclReduceScatter",
					     [NCCL_ALL_REDUCE] = "ncclAllReduce",
					     [NCCL_BROADCAST] = "ncclBroadcast" };
	const struct nccl_lib *lib = q->nccl->lib;
	ncclResult_t r = lib->ncclGroupStart();
	unsigned i = 0;

	if (r != ncclSuccess)
		return nccl_clique_nccl_failed(q, r, "ncclGroupStart");
	FOR_MEMBERS(m, q)
	{
		if (nccl_clique_goes_on(r))
			r = nccl_clique_call(lib, m, item, item->send[i], item->recv[i]);
		i++;
	}
	return nccl_clique_end_group(q, r, names[item->kind]);
}

static int nccl_clique_mark(struct nccl_clique *q)
{
	CUresult r;

	FOR_MEMBERS(m, q)
	{
		if (nccl_clique_enter(q, m))
			return -EIO;
		r = q->nccl->cuda->cuEventRecord(m->after, m->stream);
		if (r != CUDA_SUCCESS)
			return nccl_clique_cuda_failed(q, m, r, "cuEventRecord");
	}
	q->running = true;
	return 0;
}

int clique_issue(struct nccl_clique *q, const struct nccl_item *item)
{
	int r;

	FOR_MEMBERS(m, q)
	backend_cuda_hold(m->backend, q->queue);
	r = nccl_clique_call_all(q, item);
	if (r == 0)
		r = nccl_clique_mark(q);
	FOR_MEMBERS(m, q)
	backend_cuda_let(m->backend, q->queue);
	return r;
}

int clique_scratch(struct nccl_clique *q)
{
	CUresult r;

	FOR_MEMBERS(m, q)
	{
		unsigned i = (unsigned)(m - q->members);

		if (nccl_clique_enter(q, m))
			return -EIO;
		r = q->nccl->cuda->cuMemAlloc(&m->scratch, (size_t)q->size * sizeof(float));
		if (r != CUDA_SUCCESS)
			return nccl_clique_cuda_failed(q, m, r, "cuMemAlloc");
		q->warm_all[i] = (void *)(uintptr_t)m->scratch;
		q->warm_own[i] = (float *)q->warm_all[i] + q->first + i;
	}
	return 0;
}

/* All in place: parts are gathered from @own and reduced into it. */
static void nccl_clique_fill_warm(const struct nccl_clique *q, enum nccl_kind kind,
				  struct nccl_item *ret)
{
	void **own = q->warm_own, **all = q->warm_all;

	*ret = (struct nccl_item){ .kind = kind,
				   .send = (const void *const *)(kind == NCCL_ALL_GATHER ? own
											 : all),
				   .recv = kind == NCCL_REDUCE_SCATTER ? own : all,
				   .count = 1,
				   .dtype = DTYPE_FP32,
				   .reduce = REDUCE_SUM };
}

int clique_warm(struct nccl_clique *q)
{
	unsigned last = q->queue == BACKEND_Q_GATHER ? NCCL_ALL_GATHER : NCCL_BROADCAST;
	struct nccl_item item;
	int r = 0;

	for (unsigned kind = NCCL_ALL_GATHER; r == 0 && kind <= last; kind++) {
		nccl_clique_fill_warm(q, (enum nccl_kind)kind, &item);
		r = clique_issue(q, &item);
	}
	return r;
}

void clique_measure(struct nccl_clique *q)
{
	const struct cuda_lib *cuda = q->nccl->cuda;
	size_t free_now, total;

	q->memory_bytes = 0;
	FOR_MEMBERS(m, q)
	{
		if (nccl_clique_enter(q, m))
			continue;
		if (m->scratch)
			cuda->cuMemFree(m->scratch);
		m->scratch = 0;
		if (cuda->cuMemGetInfo(&free_now, &total) != CUDA_SUCCESS)
			continue;
		if (free_now < m->free_before)
			q->memory_bytes += m->free_before - free_now;
	}
}

int clique_look(struct nccl_clique *q)
{
	ncclResult_t state = nccl_clique_state_of(q);
	CUresult r;

	if (!nccl_clique_goes_on(state))
		return nccl_clique_nccl_failed(q, state, "a collective failed");
	FOR_MEMBERS(m, q)
	{
		if (nccl_clique_enter(q, m))
			return -EIO;
		r = q->nccl->cuda->cuEventQuery(m->after);
		if (r == CUDA_ERROR_NOT_READY)
			return CLIQUE_E_RUNS;
		if (r != CUDA_SUCCESS)
			return nccl_clique_cuda_failed(q, m, r, "a collective");
	}
	q->running = false;
	return 0;
}

/* ----------------------------------------------------------- registering */

int clique_register(struct nccl_clique *q, struct nccl_slab *slab)
{
	const struct nccl_lib *lib = q->nccl->lib;
	ncclResult_t r = lib->ncclGroupStart();
	unsigned i = 0;

	if (r != ncclSuccess)
		return nccl_clique_nccl_failed(q, r, "ncclGroupStart");
	FOR_MEMBERS(m, q)
	{
		if (nccl_clique_goes_on(r))
			r = lib->ncclCommWindowRegister(m->comm, slab->addr[i], slab->bytes,
							&slab->windows[i], NCCL_WIN_COLL_SYMMETRIC);
		i++;
	}
	return nccl_clique_end_group(q, r, "ncclCommWindowRegister");
}

int clique_unregister(struct nccl_clique *q, struct nccl_slab *slab)
{
	ncclResult_t r = ncclSuccess;
	unsigned i = 0;

	FOR_MEMBERS(m, q)
	{
		if (nccl_clique_goes_on(r) && slab->windows[i])
			r = q->nccl->lib->ncclCommWindowDeregister(m->comm, slab->windows[i]);
		slab->windows[i++] = NULL;
		if (nccl_clique_goes_on(r) && nccl_clique_settle(q, r, "ncclCommWindowDeregister"))
			return -EIO;
	}
	return nccl_clique_goes_on(r) ? 0
				      : nccl_clique_nccl_failed(q, r, "ncclCommWindowDeregister");
}

/* ------------------------------------------------------- waits for other nodes */

bool clique_wait(struct nccl_clique *q)
{
	if (!q->others)
		return true;
	FOR_MEMBERS(m, q)
	{
		if (backend_cuda_wait_begin(m->backend))
			continue;
		while (m > q->members)
			backend_cuda_wait_end((--m)->backend);
		return false;
	}
	q->waits++;
	return true;
}

void clique_unwait(struct nccl_clique *q)
{
	for (; q->waits > 0; q->waits--)
		FOR_MEMBERS(m, q)
	backend_cuda_wait_end(m->backend);
}

/* --------------------------------------------------------------- the end */

bool clique_stop(struct nccl_clique *q)
{
	const struct nccl_lib *lib = q->nccl->lib;
	int64_t until = nccl_now_ms() + q->nccl->close_ms;
	bool able = lib->revoke;

	FOR_MEMBERS(m, q)
	if (able && m->comm)
		able = nccl_clique_goes_on(lib->ncclCommRevoke(m->comm, 0));
	while (able && nccl_clique_state_of(q) == ncclInProgress && nccl_now_ms() < until)
		nccl_clique_pause_us(500);
	return able && nccl_clique_state_of(q) == ncclSuccess;
}

/* NCCL's results do not matter any more. It frees what the members share when the last of them is
 * aborted, so all are aborted. */
void clique_abort(struct nccl_clique *q)
{
	FOR_MEMBERS(m, q)
	{
		if (!m->comm)
			continue;
		q->nccl->cuda->cuCtxSetCurrent(m->context);
		q->nccl->lib->ncclCommAbort(m->comm);
		m->comm = NULL;
	}
}

static int nccl_clique_finalize(struct nccl_clique *q)
{
	const struct nccl_lib *lib = q->nccl->lib;
	ncclResult_t r = lib->ncclGroupStart();

	if (r != ncclSuccess)
		return -EIO;
	FOR_MEMBERS(m, q)
	if (nccl_clique_goes_on(r))
		r = lib->ncclCommFinalize(m->comm);
	return nccl_clique_end_group(q, r, "ncclCommFinalize");
}

void clique_destroy(struct nccl_clique *q)
{
	struct nccl_slab *slab, *tmp;
	int r = 0;

	list_for_each (slab, tmp, &q->slabs, registered)
		if (r == 0)
			r = clique_unregister(q, slab);
	q->deadline = nccl_now_ms() + q->nccl->close_ms;
	if (r == 0)
		r = nccl_clique_finalize(q);
	if (r) {
		clique_abort(q);
		return;
	}
	FOR_MEMBERS(m, q)
	{
		q->nccl->cuda->cuCtxSetCurrent(m->context);
		q->nccl->lib->ncclCommDestroy(m->comm);
		m->comm = NULL;
	}
}

#endif
