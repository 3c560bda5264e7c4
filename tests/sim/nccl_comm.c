/*
 * Communicators: made, asked, ended.
 *
 * What the simulated NCCL holds its users to; each is a breach:
 *   - a communicator is used by one thread at a time, not after its end, and while it is in
 *     progress only asked for its state or aborted
 *   - initialisation stands in no group with other calls
 *   - the members in this process call the same in one group, with the same count, type,
 *     operator and root, and one thread issues what is for a device
 *   - nothing else is put on a stream while NCCL is in progress on it
 *   - memory is there in full, of the member's own device, in place or apart; registered
 *     either by all members or by none
 *   - a window lies in one allocation, aligned to 4096 from its begin; it is registered and
 *     given back while no collective runs, and before ncclCommDestroy
 * What it answers with an error: a device that is a member twice, bad arguments, calls after
 * the end of a communicator's life, a device that failed.
 *
 * Every member takes device memory when it is made and again at its first collective of
 * each kind; the members' memory is freed when the last of them was destroyed or aborted.
 * The numbers of SHARDD_SIM_NCCL_HANG and _ERROR count the collectives of all communicators
 * of the process, those of a warm-up too.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_impl.h"

pthread_mutex_t nccl_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t nccl_changed = PTHREAD_COND_INITIALIZER;

static ncclComm_t comms;
static struct clique *cliques;
static char last_error[256];

void nccl_error(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(last_error, sizeof(last_error), fmt, ap);
	va_end(ap);
}

int type_size(ncclDataType_t type)
{
	switch (type) {
	case ncclInt8:
	case ncclUint8:
		return 1;
	case ncclFloat16:
	case ncclBfloat16:
		return 2;
	case ncclFloat32:
		return 4;
	default:
		return 0;
	}
}

/* ------------------------------------------------------------------ entering */

static ncclComm_t find(ncclComm_t comm, const char *function)
{
	ncclComm_t c;

	for (c = comms; c; c = c->next)
		if (c == comm)
			break;
	if (!c)
		sim_breach("%s: %p is no communicator", function, (void *)comm);
	if (!c->live)
		sim_breach("%s: the communicator of rank %d was destroyed or aborted before",
			   function, c->rank);
	return c;
}

ncclResult_t comm_enter(ncclComm_t comm, const char *function, bool anyway)
{
	ncclComm_t c = find(comm, function);

	if (c->inside && !pthread_equal(c->who, pthread_self()))
		sim_breach("%s: another thread is in a call with the communicator of rank %d",
			   function, c->rank);
	if (!anyway && c->state == ncclInProgress)
		sim_breach("%s: the communicator of rank %d is still in progress", function,
			   c->rank);
	if (!anyway && c->state != ncclSuccess)
		return c->state;
	c->inside = true;
	c->who = pthread_self();
	return ncclSuccess;
}

void comm_leave(ncclComm_t comm)
{
	comm->inside = false;
}

void comm_set(ncclComm_t comm, ncclResult_t state)
{
	if (comm->state == ncclSuccess || comm->state == ncclInProgress)
		comm->state = state;
}

ncclResult_t comm_wait(ncclComm_t comm)
{
	if (!comm->blocking)
		return comm->state;
	while (comm->state == ncclInProgress)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
	return comm->state;
}

/* -------------------------------------------------------------------- making */

static const char *bad_config(const ncclConfig_t *config)
{
	if (config->magic != NCCL_ABI_CONFIG_MAGIC)
		return "the configuration was not initialised";
	if (config->size < offsetof(ncclConfig_t, commName))
		return "the configuration is too small";
	if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 &&
	    config->blocking != 1)
		return "blocking is neither 0 nor 1";
	if (config->CTAPolicy != NCCL_CONFIG_UNDEF_INT &&
	    (config->CTAPolicy < 0 ||
	     config->CTAPolicy > (sim_env("SHARDD_SIM_NCCL", 22809) >= 22800 ? 2 : 1)))
		return "no such CTAPolicy";
	return NULL;
}

ncclComm_t comm_new(int rank, const ncclConfig_t *config, ncclResult_t *ret)
{
	ncclComm_t c;
	CUdevice device;
	CUcontext ctx = NULL;

	*ret = ncclInvalidArgument;
	if (config && bad_config(config)) {
		nccl_error("%s", bad_config(config));
		return NULL;
	}
	*ret = ncclUnhandledCudaError;
	if (cuCtxGetCurrent(&ctx) != CUDA_SUCCESS || !ctx ||
	    cuCtxGetDevice(&device) != CUDA_SUCCESS) {
		nccl_error("no current context");
		return NULL;
	}
	*ret = ncclSystemError;
	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	c->live = 1;
	c->rank = rank;
	c->device = device;
	c->ctx = ctx;
	c->blocking = !config || config->blocking != 0;
	c->state = ncclInProgress;
	c->next = comms;
	comms = c;
	*ret = ncclSuccess;
	return c;
}

struct clique *clique_find(const ncclUniqueId *id, int size)
{
	struct clique *q;

	for (q = cliques; q; q = q->next)
		if (memcmp(&q->id, id, sizeof(*id)) == 0)
			return q;
	q = calloc(1, sizeof(*q));
	if (!q)
		sim_breach("libnccl: no memory");
	q->id = *id;
	q->size = size;
	q->next = cliques;
	cliques = q;
	return q;
}

/* Return: why the members cannot work together. */
static ncclResult_t check_members(const struct clique *q)
{
	for (int i = 0; i < q->size; i++)
		for (int j = 0; j < i; j++)
			if (q->members[i]->device == q->members[j]->device) {
				nccl_error("Duplicate GPU detected : rank %d and rank %d both on "
					   "CUDA device %d",
					   j, i, q->members[i]->device);
				return ncclInvalidUsage;
			}
	return ncclSuccess;
}

ncclResult_t comm_take_memory(ncclComm_t c, unsigned which)
{
	CUresult r;

	if (c->memory[which])
		return ncclSuccess;
	r = cuCtxSetCurrent(c->ctx);
	if (r == CUDA_SUCCESS)
		r = cuMemAlloc(&c->memory[which], NCCL_OWN_BYTES);
	if (r == CUDA_SUCCESS)
		return ncclSuccess;
	nccl_error("Cuda failure %d", (int)r);
	return ncclUnhandledCudaError;
}

void clique_join(struct clique *q, ncclComm_t comm)
{
	ncclResult_t r;

	comm->clique = q;
	if (comm->rank < 0 || comm->rank >= q->size || q->members[comm->rank]) {
		nccl_error("rank %d is taken, or not below %d", comm->rank, q->size);
		comm_set(comm, ncclInvalidArgument);
		return;
	}
	comm->joined = true;
	q->members[comm->rank] = comm;
	if (++q->joined < q->size) {
		worker_post(net_begin, q); /* behind the others of this group */
		return;
	}
	if (q->net)
		return;
	net_forget_id(&q->id);
	r = check_members(q);
	for (int i = 0; r == ncclSuccess && i < q->size; i++)
		r = comm_take_memory(q->members[i], 0);
	for (int i = 0; i < q->size; i++)
		comm_set(q->members[i], r);
}

/* --------------------------------------------------------------------- asking */

#pragma GCC visibility push(default)

ncclResult_t ncclGetVersion(int *version)
{
	int code = ncclSystemError;

	if (sim_fail(__func__, &code))
		return (ncclResult_t)code;
	*version = (int)sim_env("SHARDD_SIM_NCCL", 22809);
	return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	int code = ncclSystemError;

	if (sim_fail(__func__, &code))
		return (ncclResult_t)code;
	memset(id, 0, sizeof(*id));
	pthread_mutex_lock(&nccl_lock);
	if (!net_make_id(id))
		code = -1;
	pthread_mutex_unlock(&nccl_lock);
	return code < 0 ? ncclSystemError : ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
	static const char *const texts[] = { "no error",
					     "unhandled cuda error",
					     "unhandled system error",
					     "internal error",
					     "invalid argument",
					     "invalid usage",
					     "remote process exited or there was a network error",
					     "NCCL operation in progress" };

	return (unsigned)result < ncclNumResults ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
	static _Thread_local char copy[sizeof(last_error)];

	(void)comm;
	pthread_mutex_lock(&nccl_lock);
	memcpy(copy, last_error, sizeof(copy));
	pthread_mutex_unlock(&nccl_lock);
	return copy;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *async)
{
	int code = ncclSystemError;

	if (sim_fail(__func__, &code))
		return (ncclResult_t)code;
	pthread_mutex_lock(&nccl_lock);
	*async = find(comm, __func__)->state;
	pthread_mutex_unlock(&nccl_lock);
	return ncclSuccess;
}

#pragma GCC visibility pop

/* ----------------------------------------------------------------------- ending */

/* What all members share goes with the last of them. */
static void nccl_comm_end(ncclComm_t c)
{
	struct clique *q = c->clique;

	if (c->windows && !c->stopped && c->state == ncclSuccess)
		sim_breach("ncclCommDestroy: rank %d has memory registered", c->rank);
	c->live = 0;
	c->ended = true;
	comm_leave(c);
	if (!q || !c->joined)
		return;
	if (++q->ended < q->joined)
		return;
	for (int i = 0; i < q->size; i++) {
		if (!q->members[i])
			continue;
		cuCtxSetCurrent(q->members[i]->ctx);
		for (unsigned j = 0; j < 1 + _K_N; j++)
			if (q->members[i]->memory[j])
				cuMemFree(q->members[i]->memory[j]);
		memset(q->members[i]->memory, 0, sizeof(q->members[i]->memory));
	}
	net_end(q);
}

static void forget_jobs(ncclComm_t c)
{
	while (c->jobs > 0)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
}

static bool outside_of_groups(const char *function)
{
	if (group_open())
		sim_breach("%s inside a group", function);
	return true;
}

static void finalized(void *arg)
{
	ncclComm_t c = arg;

	c->jobs--;
	if (c->running > 0 && !c->stopped) {
		c->jobs++;
		worker_post(finalized, c);
		return;
	}
	comm_set(c, ncclSuccess);
}

#pragma GCC visibility push(default)

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
	int code = ncclSystemError;
	ncclResult_t r;

	pthread_mutex_lock(&nccl_lock);
	r = comm_enter(comm, __func__, false);
	if (r == ncclSuccess && sim_fail(__func__, &code))
		r = group_fail((ncclResult_t)code);
	if (r == ncclSuccess && (comm->stopped || comm->finalized))
		r = group_fail(ncclInvalidUsage);
	if (r == ncclSuccess) {
		comm->finalized = true;
		r = group_add(comm, E_LATE, finalized, comm);
	} else {
		comm_leave(comm);
	}
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

/* Return at once where all has ended, else when it has. */
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
	int code = ncclSystemError;
	ncclResult_t r = ncclSuccess;

	outside_of_groups(__func__);
	pthread_mutex_lock(&nccl_lock);
	comm_enter(comm, __func__, true);
	if (comm->state == ncclInProgress)
		sim_breach("ncclCommDestroy: rank %d is still in progress", comm->rank);
	if (sim_fail(__func__, &code))
		r = (ncclResult_t)code; /* it is gone all the same */
	forget_jobs(comm);
	comm_drain(comm);
	nccl_comm_end(comm);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

static bool others_run(ncclComm_t comm)
{
	for (ncclComm_t c = comms; c; c = c->next)
		if (c != comm && c->device == comm->device && c->running > 0)
			return true;
	return false;
}

/* Its memory is freed, which waits for the device, as cudaFree does: for what another communicator has
 * running there, too. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
	int code = ncclSystemError;
	ncclResult_t r = ncclSuccess;

	outside_of_groups(__func__);
	pthread_mutex_lock(&nccl_lock);
	comm_enter(comm, __func__, true);
	if (sim_fail(__func__, &code))
		r = (ncclResult_t)code;
	comm_stop(comm);
	forget_jobs(comm);
	comm_drain(comm);
	while (others_run(comm))
		pthread_cond_wait(&nccl_changed, &nccl_lock);
	nccl_comm_end(comm);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

static void revoked(void *arg)
{
	ncclComm_t c = arg;

	c->jobs--;
	if (c->running > 0) {
		c->jobs++;
		worker_post(revoked, c);
		return;
	}
	c->state = ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)
{
	int code = ncclSystemError;
	ncclResult_t r = ncclSuccess;

	outside_of_groups(__func__);
	pthread_mutex_lock(&nccl_lock);
	comm_enter(comm, __func__, true);
	if (sim_fail(__func__, &code))
		r = (ncclResult_t)code;
	else if (flags || comm->stopped)
		r = ncclInvalidArgument;
	if (r == ncclSuccess) {
		comm_stop(comm);
		comm->state = ncclInProgress;
		comm->jobs++;
		worker_post(revoked, comm);
		r = comm_wait(comm);
	}
	comm_leave(comm);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

#pragma GCC visibility pop

/* ------------------------------------------------------------------- initialising */

struct init {
	ncclComm_t comm;
	ncclUniqueId id;
	int size;
};

static void init_later(void *arg)
{
	struct init *init = arg;
	struct clique *q = clique_find(&init->id, init->size);

	init->comm->jobs--;
	if (q->size != init->size) {
		nccl_error("%d ranks, but another rank says %d", init->size, q->size);
		comm_set(init->comm, ncclInvalidArgument);
	} else if (init->comm->state == ncclInProgress) {
		clique_join(q, init->comm);
	} else {
		net_forget_id(&init->id);
	}
	free(init);
}

static ncclResult_t init_rank(ncclComm_t *ret, int size, const ncclUniqueId *id, int rank,
			      const ncclConfig_t *config)
{
	struct init *init;
	ncclResult_t r;
	ncclComm_t c;

	if (size < 1 || size > NCCL_RANKS || rank < 0 || rank >= size) {
		nccl_error("rank %d of %d", rank, size);
		return group_fail(ncclInvalidArgument);
	}
	if (strncmp(id->internal, "sim-", 4) != 0)
		sim_breach("ncclCommInitRank: that is no id of the simulator");
	c = comm_new(rank, config, &r);
	if (!c)
		return group_fail(r);
	init = malloc(sizeof(*init));
	if (!init)
		sim_breach("libnccl: no memory");
	*init = (struct init){ c, *id, size };
	*ret = c;
	c->inside = true;
	c->who = pthread_self();
	return group_add(c, E_INIT, init_later, init);
}

#pragma GCC visibility push(default)

ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int size, ncclUniqueId id, int rank,
				    ncclConfig_t *config)
{
	int code = ncclSystemError;
	ncclResult_t r;

	pthread_mutex_lock(&nccl_lock);
	*ret = NULL;
	if (sim_fail("ncclCommInitRankConfig", &code))
		r = group_fail((ncclResult_t)code);
	else
		r = init_rank(ret, size, &id, rank, config);
	if (r != ncclSuccess && r != ncclInProgress)
		net_forget_own();
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

#pragma GCC visibility pop
