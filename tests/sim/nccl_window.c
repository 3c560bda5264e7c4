/* Registered memory, and communicators made of others' survivors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_impl.h"

bool window_holds(const struct ncclComm *comm, const void *addr, size_t bytes)
{
	uintptr_t a = (uintptr_t)addr;

	for (const struct window *w = comm->windows; w; w = w->next)
		if (a >= w->addr && a + bytes <= w->addr + w->bytes)
			return true;
	return false;
}

static bool overlaps(const struct ncclComm *comm, uintptr_t addr, size_t bytes)
{
	for (const struct window *w = comm->windows; w; w = w->next)
		if (addr < w->addr + w->bytes && w->addr < addr + bytes)
			return true;
	return false;
}

struct registering {
	ncclComm_t comm;
	struct window *window;
	ncclWindow_t *ret;
};

static void register_later(void *arg)
{
	struct registering *r = arg;

	if (r->comm->state == ncclInProgress) {
		r->window->next = r->comm->windows;
		r->comm->windows = r->window;
		*r->ret = (ncclWindow_t)r->window;
	} else {
		free(r->window);
	}
	free(r);
}

static void check_window(ncclComm_t comm, void *addr, size_t bytes)
{
	CUdeviceptr base;
	size_t whole;
	int device;

	if (comm->clique->net)
		sim_breach("ncclCommWindowRegister: not simulated with several processes");
	if (comm->running > 0)
		sim_breach("ncclCommWindowRegister: rank %d has collectives running", comm->rank);
	if (!sim_range(comm->device, (CUdeviceptr)addr, bytes, 1, &device) ||
	    device != comm->device)
		sim_breach("ncclCommWindowRegister: rank %d: that is no memory of its device",
			   comm->rank);
	if (cuMemGetAddressRange(&base, &whole, (CUdeviceptr)addr) != CUDA_SUCCESS ||
	    (CUdeviceptr)addr + bytes > base + whole)
		sim_breach("ncclCommWindowRegister: rank %d: more than one allocation", comm->rank);
	if (((CUdeviceptr)addr - base) % NCCL_WIN_REQUIRED_ALIGNMENT)
		sim_breach("ncclCommWindowRegister: rank %d: not aligned", comm->rank);
}

#pragma GCC visibility push(default)

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *addr, size_t bytes, ncclWindow_t *window,
				    int flags)
{
	int code = ncclSystemError;
	struct registering *later;
	ncclResult_t r;

	pthread_mutex_lock(&nccl_lock);
	r = comm_enter(comm, __func__, false);
	if (r == ncclSuccess && sim_fail(__func__, &code))
		r = (ncclResult_t)code;
	if (r == ncclSuccess && (comm->stopped || comm->finalized))
		r = ncclInvalidUsage;
	if (r == ncclSuccess && (bytes == 0 || flags != NCCL_WIN_COLL_SYMMETRIC ||
				 overlaps(comm, (uintptr_t)addr, bytes)))
		r = ncclInvalidArgument;
	if (r != ncclSuccess) {
		comm_leave(comm);
		pthread_mutex_unlock(&nccl_lock);
		return group_fail(r);
	}
	check_window(comm, addr, bytes);
	later = malloc(sizeof(*later));
	if (!later)
		sim_breach("libnccl: no memory");
	*later = (struct registering){ comm, malloc(sizeof(struct window)), window };
	if (!later->window)
		sim_breach("libnccl: no memory");
	*later->window = (struct window){ NULL, (uintptr_t)addr, bytes };
	r = group_add(comm, E_NOW, register_later, later);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
	int code = ncclSystemError;
	struct window **p, *w = (struct window *)window;
	ncclResult_t r;

	pthread_mutex_lock(&nccl_lock);
	r = comm_enter(comm, __func__, false);
	if (r == ncclSuccess && sim_fail(__func__, &code))
		r = (ncclResult_t)code;
	if (r == ncclSuccess) {
		if (comm->running > 0)
			sim_breach("ncclCommWindowDeregister: rank %d has collectives running",
				   comm->rank);
		for (p = &comm->windows; *p && *p != w; p = &(*p)->next)
			;
		if (!*p)
			sim_breach("ncclCommWindowDeregister: rank %d has no such window",
				   comm->rank);
		*p = w->next;
		free(w);
	}
	comm_leave(comm);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

#pragma GCC visibility pop

/* -------------------------------------------------------------------- survivors */

struct shrinking {
	ncclComm_t parent, child, *ret;
	ncclUniqueId id;
	int size;
};

static void shrink_later(void *arg)
{
	struct shrinking *s = arg;

	if (s->parent->running > 0) {
		worker_post(shrink_later, s);
		return;
	}
	s->parent->jobs--;
	if (s->parent->state == ncclInProgress) {
		*s->ret = s->child;
		clique_join(clique_find(&s->id, s->size), s->child);
		comm_set(s->parent, ncclSuccess);
	} else {
		s->child->live = 0;
	}
	free(s);
}

/* Name and size of what is left, and which rank @comm has in it; -1: none. */
static int survivors(ncclComm_t comm, const int *excluded, int n, struct shrinking *s)
{
	bool gone[NCCL_RANKS] = { false };
	int rank = -1;

	for (int i = 0; i < n; i++)
		if (excluded[i] >= 0 && excluded[i] < comm->clique->size)
			gone[excluded[i]] = true;
	snprintf(s->id.internal, sizeof(s->id.internal), "sim-of-%.80s-",
		 comm->clique->id.internal);
	for (int i = 0; i < comm->clique->size; i++) {
		size_t at = strlen(s->id.internal);

		if (gone[i])
			continue;
		if (i == comm->rank)
			rank = s->size;
		s->size++;
		snprintf(s->id.internal + at, sizeof(s->id.internal) - at, "%d.", i);
	}
	return rank;
}

#pragma GCC visibility push(default)

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int n_excluded, ncclComm_t *ret,
			    ncclConfig_t *config, int flags)
{
	bool aborts = flags == NCCL_SHRINK_ABORT;
	int code = ncclSystemError, rank;
	struct shrinking *s;
	ncclResult_t r;

	*ret = NULL;
	s = calloc(1, sizeof(*s));
	if (!s)
		return group_fail(ncclSystemError);
	pthread_mutex_lock(&nccl_lock);
	r = comm_enter(comm, __func__, aborts);
	if (r == ncclSuccess && sim_fail(__func__, &code))
		r = (ncclResult_t)code;
	if (comm->clique->net)
		sim_breach("ncclCommShrink: not simulated with several processes");
	if (r == ncclSuccess && !aborts && comm->running > 0)
		sim_breach("ncclCommShrink: rank %d has collectives running", comm->rank);
	rank = survivors(comm, excluded, n_excluded, s);
	if (r == ncclSuccess && rank < 0)
		r = ncclInvalidArgument;
	if (r == ncclSuccess)
		s->child = comm_new(rank, config, &r);
	if (r != ncclSuccess) {
		comm_leave(comm);
		free(s);
		pthread_mutex_unlock(&nccl_lock);
		return group_fail(r);
	}
	s->parent = comm;
	s->ret = ret;
	if (aborts)
		comm_stop(comm);
	r = group_add(comm, E_LATE, shrink_later, s);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

#pragma GCC visibility pop
