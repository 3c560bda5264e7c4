/* Groups: calls between ncclGroupStart and ncclGroupEnd are one, done by the worker. */
#include <stdlib.h>
#include <string.h>

#include "nccl_impl.h"

struct member {
	ncclComm_t comm;
	enum entry kind;
	void (*fn)(void *arg);
	void *arg;
};

struct group {
	unsigned n;
	struct call *calls[256];
	unsigned n_calls;
	struct member members[256];
};

static _Thread_local unsigned depth;
static _Thread_local ncclResult_t failure;
static _Thread_local struct group *current;

bool group_open(void)
{
	return depth > 0;
}

ncclResult_t group_fail(ncclResult_t r)
{
	if (depth > 0 && failure == ncclSuccess)
		failure = r;
	return r;
}

static void run(void *arg)
{
	struct group *g = arg;
	bool waits = false;

	for (unsigned i = 0; i < g->n_calls; i++)
		waits = net_must_connect(g->calls[i]) || waits;
	if (waits) {
		worker_post(run, g);
		return;
	}
	calls_check_streams(g->calls, g->n_calls);
	for (unsigned i = 0; i < g->n; i++)
		g->members[i].fn(g->members[i].arg);
	for (unsigned i = 0; i < g->n; i++) {
		if (g->members[i].kind < E_CALL)
			continue;
		g->members[i].comm->jobs--;
		comm_set(g->members[i].comm, ncclSuccess);
	}
	free(g);
}

static void check_mix(const struct group *g)
{
	for (unsigned i = 1; i < g->n; i++)
		if ((g->members[i].kind == E_INIT) != (g->members[0].kind == E_INIT))
			sim_breach("ncclGroupEnd: initialisation is merged with other calls");
}

/* Return: what ncclGroupEnd answers. */
static ncclResult_t nccl_group_end(struct group *g, ncclResult_t r)
{
	ncclComm_t comms[256];
	unsigned n = g->n;

	check_mix(g);
	if (r == ncclSuccess)
		calls_check(g->calls, g->n_calls);
	for (unsigned i = 0; i < n; i++) {
		comms[i] = g->members[i].comm;
		comms[i]->jobs++;
		comms[i]->state = r == ncclSuccess ? ncclInProgress : r;
		comm_leave(comms[i]);
	}
	worker_post(run, g);
	for (unsigned i = 0; r == ncclSuccess && i < n; i++) {
		ncclResult_t one = comm_wait(comms[i]);

		r = one == ncclSuccess ? r : one;
	}
	/* without blocking the states are looked at later */
	for (unsigned i = 0; i < n; i++)
		if (r == ncclSuccess && !comms[i]->blocking)
			r = ncclInProgress;
	return r;
}

static void add(struct group *g, const struct member *m)
{
	if (g->n == sizeof(g->members) / sizeof(*g->members))
		sim_breach("a group of more than %u calls", g->n);
	if (m->kind == E_CALL)
		g->calls[g->n_calls++] = m->arg;
	g->members[g->n++] = *m;
}

ncclResult_t group_add(ncclComm_t comm, enum entry kind, void (*fn)(void *arg), void *arg)
{
	struct member m = { comm, kind, fn, arg };
	struct group *g = current ? current : calloc(1, sizeof(*g));

	if (!g)
		sim_breach("libnccl: no memory");
	add(g, &m);
	if (depth == 0)
		return nccl_group_end(g, ncclSuccess);
	current = g;
	return ncclSuccess;
}

#pragma GCC visibility push(default)

ncclResult_t ncclGroupStart(void)
{
	int code = ncclSystemError;

	if (sim_fail(__func__, &code)) {
		pthread_mutex_lock(&nccl_lock);
		net_forget_own();
		pthread_mutex_unlock(&nccl_lock);
		return (ncclResult_t)code;
	}
	if (depth++ == 0)
		failure = ncclSuccess;
	return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
	struct group *g = current;
	int code = ncclSystemError;
	ncclResult_t r;

	if (depth == 0)
		return ncclInvalidUsage;
	if (sim_fail(__func__, &code))
		group_fail((ncclResult_t)code);
	if (--depth > 0)
		return ncclSuccess;
	current = NULL;
	pthread_mutex_lock(&nccl_lock);
	if (!g) {
		net_forget_own();
		pthread_mutex_unlock(&nccl_lock);
		return failure;
	}
	r = nccl_group_end(g, failure);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

#pragma GCC visibility pop
