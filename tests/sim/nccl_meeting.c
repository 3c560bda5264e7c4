/* Collectives on streams: the members' threads meet, the last one computes for all. */
#include <stdlib.h>

#include "nccl_impl.h"

static long long meetings; /* so far, in this process */
/* SHARDD_SIM_NCCL_SERIAL: of each device, in the order of their launches. */
static struct call *lines[64];

static void line_enter(struct call *c)
{
	struct call **p = &lines[c->comm->device];

	while (*p)
		p = &(*p)->next;
	*p = c;
	c->next = NULL;
}

static void line_leave(struct call *c)
{
	struct call **p = &lines[c->comm->device];

	while (*p && *p != c)
		p = &(*p)->next;
	if (*p)
		*p = c->next;
}

static void leave(struct call *c)
{
	struct meeting *m = c->meeting, **p;

	c->comm->running--;
	line_leave(c);
	pthread_cond_broadcast(&nccl_changed);
	if (!m->done)
		m->hangs = true; /* the others wait for ever, as kernels do */
	if (++m->gone < m->clique->joined)
		return;
	for (p = &m->clique->meetings; *p != m; p = &(*p)->next)
		;
	*p = m->next;
	for (int i = 0; i < m->clique->size; i++) {
		if (m->calls[i] && !m->calls[i]->comm)
			free(m->calls[i]->in);
		free(m->calls[i]);
	}
	free(m);
}

static size_t times(const struct call *c, bool all)
{
	return c->count * (size_t)type_size(c->type) * (all ? (size_t)c->comm->clique->size : 1);
}

static bool sends(const struct call *c)
{
	return c->kind != K_BROADCAST || c->comm->rank == c->root;
}

size_t call_input(const struct call *c)
{
	return sends(c) ? times(c, c->kind == K_REDUCE_SCATTER) : 0;
}

/* Return: false if memory is not there. */
static bool come(struct call *c)
{
	struct meeting *m = c->meeting;

	c->out = sim_translate((CUdeviceptr)c->recv, times(c, c->kind == K_ALL_GATHER), 1);
	c->in = sends(c) ? sim_translate((CUdeviceptr)c->send,
					 times(c, c->kind == K_REDUCE_SCATTER), 0)
			 : c->out;
	if (!c->in || !c->out)
		return false;
	c->come = true;
	m->come++;
	net_send(c);
	return true;
}

/* All are there; the memory of all of them stays while none has left. */
static int meet(struct meeting *m)
{
	static long long broken = -1;

	if (broken < 0)
		broken = sim_env("SHARDD_SIM_NCCL_ERROR", 0);
	if (broken > 0 && (long long)m->number == broken) {
		m->hangs = true;
		for (int i = 0; i < m->clique->size; i++)
			if (m->clique->members[i])
				comm_set(m->clique->members[i], ncclRemoteError);
		nccl_error("the network is gone");
		return 0;
	}
	if (sim_random(3)) /* late */
		return 0;
	m->computing = true;
	pthread_mutex_unlock(&nccl_lock);
	compute(m);
	pthread_mutex_lock(&nccl_lock);
	m->computing = false;
	m->done = true;
	sim_kick();
	return 1;
}

/* Stream thread. */
static int step(void *arg)
{
	struct call *c = arg;
	struct meeting *m = c->meeting;
	int over = 0;

	pthread_mutex_lock(&nccl_lock);
	if (m->done) {
		over = 1;
	} else if (m->computing) {
		over = 0;
	} else if (c->comm->stopped) {
		over = 1;
	} else if (lines[c->comm->device] && lines[c->comm->device] != c) {
		over = 0; /* another one has the device */
	} else if (sim_step_error() != CUDA_SUCCESS || (!c->come && !come(c))) {
		nccl_error("Cuda failure in a collective of rank %d", c->comm->rank);
		comm_set(c->comm, ncclUnhandledCudaError);
		over = 1;
	} else if (m->come == m->clique->size && !m->hangs) {
		over = meet(m);
	}
	if (over)
		leave(c);
	pthread_mutex_unlock(&nccl_lock);
	return over;
}

/* ------------------------------------------------------------------- launching */

static bool same(const struct call *a, const struct call *b)
{
	return a->kind == b->kind && a->count == b->count && a->type == b->type && a->op == b->op &&
	       a->root == b->root;
}

/* Of two processes the real one notices nothing. */
static void agree(struct meeting *m, const struct call *a, const struct call *b)
{
	bool here = a->comm && b->comm;

	if (!here && !same(a, b)) {
		sim_note("collective %llu hangs: ranks %d and %d call for different things",
			 (unsigned long long)m->seq, a->rank, b->rank);
		m->hangs = true;
	}
	if (!here)
		return;
	if (!same(a, b))
		sim_breach("collective %llu: ranks %d and %d call for different things",
			   (unsigned long long)m->seq, a->rank, b->rank);
	if (a->send_window != b->send_window || a->recv_window != b->recv_window)
		sim_breach("collective %llu: only one of the ranks %d and %d uses registered "
			   "memory",
			   (unsigned long long)m->seq, a->rank, b->rank);
}

static struct meeting *find(struct clique *q, uint64_t seq)
{
	struct meeting *m;

	for (m = q->meetings; m; m = m->next)
		if (m->seq == seq)
			return m;
	m = calloc(1, sizeof(*m));
	if (!m)
		sim_breach("libnccl: no memory");
	m->clique = q;
	m->seq = seq;
	m->number = ++meetings;
	m->hangs = (long long)m->number == sim_env("SHARDD_SIM_NCCL_HANG", 0);
	m->next = q->meetings;
	q->meetings = m;
	return m;
}

static void add(struct meeting *m, struct call *c)
{
	for (int i = 0; i < m->clique->size; i++)
		if (m->calls[i])
			agree(m, m->calls[i], c);
	m->calls[c->rank] = c;
	c->meeting = m;
}

void meeting_add_remote(struct clique *q, uint64_t seq, struct call *c)
{
	struct meeting *m = find(q, seq);

	add(m, c);
	m->come++;
	sim_kick();
}

/* Worker, with the lock held. */
static void launch(void *arg)
{
	struct call *c = arg;
	ncclComm_t comm = c->comm;
	ncclResult_t r;

	if (comm->state != ncclInProgress || comm->stopped) {
		free(c);
		return;
	}
	r = comm_take_memory(comm, 1 + c->kind);
	if (r != ncclSuccess) {
		comm_set(comm, r);
		free(c);
		return;
	}
	add(find(comm->clique, comm->seq++), c);
	comm->running++;
	if (sim_env("SHARDD_SIM_NCCL_SERIAL", 0))
		line_enter(c);
	if (cuCtxSetCurrent(comm->ctx) == CUDA_SUCCESS &&
	    sim_stream_enqueue(c->stream, step, c) == CUDA_SUCCESS)
		return;
	nccl_error("Cuda failure: no launch");
	comm_set(comm, ncclUnhandledCudaError);
	leave(c);
}

void calls_check_streams(struct call *const *calls, unsigned n)
{
	uint64_t enqueued, executed;

	for (unsigned i = 0; i < n; i++) {
		if (calls[i]->comm->state != ncclInProgress)
			continue;
		cuCtxSetCurrent(calls[i]->comm->ctx);
		sim_stream_count(calls[i]->stream, &enqueued, &executed);
		if (enqueued != calls[i]->enqueued)
			sim_breach("rank %d: something was put on the stream while a call of NCCL "
				   "was in progress",
				   calls[i]->comm->rank);
	}
}

/* ------------------------------------------------------------------ what is checked */

static void one_thread_per_device(const struct call *c)
{
	static struct {
		bool known;
		pthread_t who;
	} devices[64];
	int d = c->comm->device;

	if (devices[d].known && !pthread_equal(devices[d].who, pthread_self()))
		sim_breach("two threads issue collectives on device %d", d);
	devices[d].known = true;
	devices[d].who = pthread_self();
}

/* One thread serves the ranks of this process: whatever one of them calls alone would never end. */
void calls_check(struct call *const *calls, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		const struct clique *q = calls[i]->comm->clique;
		unsigned of[NCCL_RANKS] = { 0 };
		int first = calls[i]->rank;

		one_thread_per_device(calls[i]);
		for (unsigned j = 0; j < n; j++)
			if (calls[j]->comm->clique == q)
				of[calls[j]->comm->rank]++;
		for (int r = 0; r < q->size; r++)
			if (q->members[r] && of[r] != of[first])
				sim_breach("ncclGroupEnd: rank %d calls %u collectives, rank %d %u",
					   r, of[r], first, of[first]);
	}
}

static void check_memory(const struct call *c, const char *name, const void *addr, size_t bytes,
			 bool write)
{
	int device;

	if (!sim_range(c->comm->device, (CUdeviceptr)addr, bytes, write, &device))
		sim_breach("%s: rank %d: %zu bytes at %p are not there in full", name,
			   c->comm->rank, bytes, addr);
	if (device != c->comm->device)
		sim_breach("%s: rank %d: memory of device %d, not %d", name, c->comm->rank, device,
			   c->comm->device);
}

/* Either they do not overlap, or they are in place as they should. */
static void check_place(const struct call *c, const char *name)
{
	size_t in = times(c, c->kind == K_REDUCE_SCATTER), out = times(c, c->kind == K_ALL_GATHER);
	size_t part = times(c, false) * (size_t)c->comm->rank;
	const char *expected = c->recv;

	if (c->send + in <= c->recv || c->recv + out <= c->send)
		return;
	if (c->kind == K_ALL_GATHER)
		expected = c->recv + part;
	else if (c->kind == K_REDUCE_SCATTER)
		expected = c->recv - part;
	if (c->send != expected)
		sim_breach("%s: rank %d: send and receive overlap", name, c->comm->rank);
}

static ncclResult_t nccl_meeting_check(const struct call *c, const char *name)
{
	bool reduces = c->kind == K_ALL_REDUCE || c->kind == K_REDUCE_SCATTER;

	if (c->comm->stopped || c->comm->finalized)
		return ncclInvalidUsage;
	if (!type_size(c->type) || (unsigned)c->op >= ncclNumOps || c->root < 0 ||
	    c->root >= c->comm->clique->size || !c->recv)
		return ncclInvalidArgument;
	if (reduces && (c->type == ncclInt8 || c->type == ncclUint8))
		sim_breach("%s: reductions of bytes are not simulated", name);
	if (sim_stream_device(c->stream) != c->comm->device)
		sim_breach("%s: rank %d: the stream is not of its device", name, c->comm->rank);
	check_memory(c, name, c->recv, times(c, c->kind == K_ALL_GATHER), true);
	if (!sends(c))
		return ncclSuccess;
	check_memory(c, name, c->send, times(c, c->kind == K_REDUCE_SCATTER), false);
	check_place(c, name);
	return ncclSuccess;
}

static void fill(struct call *c)
{
	uint64_t executed;

	sim_stream_count(c->stream, &c->enqueued, &executed);
	c->recv_window = window_holds(c->comm, c->recv, times(c, c->kind == K_ALL_GATHER));
	c->send_window =
		sends(c) && window_holds(c->comm, c->send, times(c, c->kind == K_REDUCE_SCATTER));
	if (c->kind == K_BROADCAST)
		c->send_window = c->recv_window;
}

static ncclResult_t collective(const char *name, const struct call *values)
{
	int code = ncclSystemError;
	struct call *c;
	ncclResult_t r;

	pthread_mutex_lock(&nccl_lock);
	r = comm_enter(values->comm, name, false);
	if (r == ncclSuccess && sim_fail(name, &code))
		r = (ncclResult_t)code;
	if (r == ncclSuccess && values->count > 0) /* nothing to do is no call */
		r = nccl_meeting_check(values, name);
	if (r != ncclSuccess || values->count == 0) {
		comm_leave(values->comm);
		pthread_mutex_unlock(&nccl_lock);
		return group_fail(r);
	}
	c = malloc(sizeof(*c));
	if (!c)
		sim_breach("libnccl: no memory");
	*c = *values;
	c->rank = c->comm->rank;
	fill(c);
	r = group_add(c->comm, E_CALL, launch, c);
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

#pragma GCC visibility push(default)

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
			   ncclComm_t comm, cudaStream_t stream)
{
	return collective(__func__, &(struct call){ .kind = K_ALL_GATHER,
						    .comm = comm,
						    .send = send,
						    .recv = recv,
						    .count = count,
						    .type = type,
						    .stream = stream });
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
			       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
	return collective(__func__, &(struct call){ .kind = K_REDUCE_SCATTER,
						    .comm = comm,
						    .send = send,
						    .recv = recv,
						    .count = count,
						    .type = type,
						    .op = op,
						    .stream = stream });
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
			   ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
	return collective(__func__, &(struct call){ .kind = K_ALL_REDUCE,
						    .comm = comm,
						    .send = send,
						    .recv = recv,
						    .count = count,
						    .type = type,
						    .op = op,
						    .stream = stream });
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
			   int root, ncclComm_t comm, cudaStream_t stream)
{
	return collective(__func__, &(struct call){ .kind = K_BROADCAST,
						    .comm = comm,
						    .send = send,
						    .recv = recv,
						    .count = count,
						    .type = type,
						    .root = root,
						    .stream = stream });
}

#pragma GCC visibility pop

/* ----------------------------------------------------------------------- the end */

void comm_stop(ncclComm_t comm)
{
	comm->stopped = true;
	sim_kick();
}

void comm_drain(ncclComm_t comm)
{
	while (comm->running > 0)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
}
