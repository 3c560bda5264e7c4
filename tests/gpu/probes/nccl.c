/*
 * P6: NCCL with two processes on one device; P6b: when an abort ends.
 *
 * NCCL refuses two ranks of one host on one device; it knows a host by NCCL_HOSTID, so
 * with different ones the two look like two machines that talk over a socket.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/nccl_lib.h"
#include "stage.h"

#define TURNS 10u

static const struct nccl_lib *nccl_load(struct actor *a)
{
	const struct nccl_lib *n = NULL;
	char why[128];

	if (nccl_lib_open(&n, why, sizeof(why)) < 0)
		actor_fail(a, -2, "%s", why);
	return n;
}

static void nccl_must(struct actor *a, const struct nccl_lib *n, ncclResult_t r, const char *what)
{
	char text[128];

	if (r != ncclSuccess)
		actor_fail(a, (int)r, "%s: %s", what, nccl_lib_text(n, r, text, sizeof(text)));
}

struct member {
	const struct nccl_lib *nccl;
	bool nonblocking; /* as the daemon's communicators are */
	ncclComm_t comm;
	CUdeviceptr data;
	size_t n;
	int rank, world;
};

#define SETTLE_MS 20000u

/* A call of a communicator that does not block. */
static void nccl_settle(struct actor *a, struct member *m, ncclResult_t r, const char *what)
{
	for (unsigned ms = 0; r == ncclInProgress && ms < SETTLE_MS; ms++) {
		pause_ms(1);
		nccl_must(a, m->nccl, m->nccl->ncclCommGetAsyncError(m->comm, &r), what);
	}
	nccl_must(a, m->nccl, r, what);
}

/* Rank 0 makes the id and tells it, the others are told. */
static void meet(struct actor *a, struct member *m)
{
	ncclConfig_t config;
	struct message say = MESSAGE_NULL;
	ncclUniqueId id;

	if (m->rank == 0) {
		nccl_must(a, m->nccl, m->nccl->ncclGetUniqueId(&id), "ncclGetUniqueId");
		memcpy(say.handle, &id, sizeof(id));
		actor_tell(a, &say);
	}
	actor_hear(a, &say);
	memcpy(&id, say.handle, sizeof(id));
	nccl_lib_config(&config);
	config.blocking = !m->nonblocking;
	nccl_settle(a, m, m->nccl->ncclCommInitRankConfig(&m->comm, m->world, id, m->rank, &config),
		    "ncclCommInitRankConfig");
}

static void all_reduce(struct actor *a, struct member *m)
{
	nccl_must(a, m->nccl,
		  m->nccl->ncclAllReduce((const void *)m->data, (void *)m->data, m->n, ncclFloat32,
					 ncclSum, m->comm, a->stream),
		  "ncclAllReduce");
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "after ncclAllReduce");
}

/* Every element is rank+1: the sum is known. */
static uint64_t wrong_after_sum(struct actor *a, struct member *m)
{
	float mine = (float)(m->rank + 1), want = (float)(m->world * (m->world + 1)) / 2;
	float *host = malloc(m->n * sizeof(float));
	uint64_t wrong = 0;
	unsigned bits;

	if (!host)
		actor_fail(a, -1, "no memory");
	memcpy(&bits, &mine, sizeof(bits));
	actor_must(a, a->cuda->cuMemsetD32Async(m->data, bits, m->n, a->stream), "memset");
	all_reduce(a, m);
	actor_must(a, a->cuda->cuMemcpyDtoHAsync(host, m->data, m->n * 4, a->stream), "reading");
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "reading");
	for (size_t i = 0; i < m->n; i++)
		wrong += host[i] != want;
	free(host);
	return wrong;
}

/* value: rank, world, number for NCCL_HOSTID. Tells wrong elements, nanoseconds of one
 * all-reduce, version. */
static void rank_main(struct actor *a)
{
	struct message say = MESSAGE_NULL;
	struct member m = { .rank = (int)a->order->value[0], .world = (int)a->order->value[1] };
	char host[32];
	uint64_t begin;

	snprintf(host, sizeof(host), "probe-%d", (int)a->order->value[2]);
	setenv("NCCL_HOSTID", host, 1);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	setenv("NCCL_IB_DISABLE", "1", 1);
	actor_cuda(a);
	m.nccl = nccl_load(a);
	m.n = (a->stage->small ? MIB / 16 : 64 * MIB) / sizeof(float);
	actor_must(a, a->cuda->cuMemAlloc(&m.data, m.n * sizeof(float)), "cuMemAlloc");
	meet(a, &m);
	say.value[0] = wrong_after_sum(a, &m);
	all_reduce(a, &m);
	begin = now_ns();
	for (unsigned i = 0; i < TURNS; i++)
		all_reduce(a, &m);
	say.value[1] = (now_ns() - begin) / TURNS;
	say.value[2] = (uint64_t)m.nccl->version;
	actor_tell(a, &say);
	actor_hear(a, &say); /* ranks end together */
	m.nccl->ncclCommDestroy(m.comm);
}

/* Return: 0 it works, else why is in @ret->text. */
static int hear_rank(struct stage *s, struct role *r, unsigned ms, struct message *ret)
{
	char how[64];
	int rc = role_hear(s, r, ms, ret);

	if (rc == -ETIMEDOUT)
		snprintf(ret->text, sizeof(ret->text), "hung");
	else if (rc < 0)
		snprintf(ret->text, sizeof(ret->text), "%s", role_how(r, how, sizeof(how)));
	return rc < 0 ? rc : ret->status;
}

/* Return: 0 it works, and is in the figures. */
static int try(struct stage *s, const char *name, unsigned world, bool same_host)
{
	struct message order = MESSAGE_NULL, m;
	unsigned limit_ms = s->small ? 3000 : 45000;
	struct role r[2] = { 0 };
	char figure[56];
	int rc;

	stage_step(s, "%s", name);
	for (unsigned i = 0; i < world; i++) {
		order.value[0] = i;
		order.value[1] = world;
		order.value[2] = same_host ? 0 : i;
		r[i] = role_start(s, "a rank", rank_main, &order);
	}
	rc = hear_rank(s, &r[0], limit_ms, &m);
	for (unsigned i = 0; i < world && rc == 0; i++)
		role_tell(s, &r[i], &m);
	for (unsigned i = 0; i < world && rc == 0; i++)
		rc = hear_rank(s, &r[i], limit_ms, &m);
	if (rc) {
		stage_text(s, name, "%s", m.text);
	} else {
		stage_number(s, name, "words wrong", (double)m.value[0]);
		snprintf(figure, sizeof(figure), "%s_all_reduce", name);
		stage_number(s, figure, "GB/s",
			     (double)(s->small ? MIB / 16 : 64 * MIB) / (double)m.value[1]);
		stage_text(s, "version", "%u.%u.%u", (unsigned)m.value[2] / 10000,
			   (unsigned)m.value[2] / 100 % 100, (unsigned)m.value[2] % 100);
	}
	for (unsigned i = 0; i < world; i++)
		role_kill(s, &r[i]);
	if (rc == -1)
		stage_fail(s, "%s", m.text);
	if (rc == -2)
		stage_skip(s, "%s", m.text);
	return rc ? rc : m.value[0] ? -1 : 0;
}

static const char *outcome(int rc)
{
	return rc == 0 ? "share the device" : rc == -ETIMEDOUT ? "hang" : "are refused or fail";
}

void probe_nccl(struct stage *s)
{
	int one = try(s, "one_process", 1, true);
	int two = try(s, "two_processes_two_hosts", 2, false);
	int refused = try(s, "two_processes_one_host", 2, true);

	stage_answer(s, one == 0 ? "A communicator of one works."
				 : "A communicator of one does not work.");
	stage_answer(s, "With different NCCL_HOSTID two processes %s; as one host they %s.",
		     outcome(two), outcome(refused));
}

/* -- P6b ------------------------------------------------------------------------------- */

#define ABORT_MS 10000u /* so long an abort is waited for */
#define ALONE_MS 2000u  /* and so long, while the other communicator's work runs */

struct aborting {
	struct member m;
	CUcontext context;
	const struct cuda_lib *cuda;
	pthread_t thread;
	uint64_t begin;
	_Atomic uint64_t took_ns; /* 0: it has not ended */
};

static void *abort_main(void *arg)
{
	struct aborting *b = arg;

	b->cuda->cuCtxSetCurrent(b->context);
	b->m.nccl->ncclCommAbort(b->m.comm);
	atomic_store(&b->took_ns, now_ns() - b->begin);
	return NULL;
}

static void abort_begin(struct actor *a, struct aborting *b)
{
	b->context = a->context;
	b->cuda = a->cuda;
	b->begin = now_ns();
	if (pthread_create(&b->thread, NULL, abort_main, b))
		actor_fail(a, -1, "no thread");
}

/* Return: nanoseconds; 0: not within @ms. */
static uint64_t abort_wait(struct aborting *b, unsigned ms)
{
	for (unsigned i = 0; i < ms && !atomic_load(&b->took_ns); i++)
		pause_ms(1);
	return atomic_load(&b->took_ns);
}

/* Both take part, if @both: then it ends. */
static void reduce_on(struct actor *a, struct member *m, CUstream stream, bool both)
{
	nccl_settle(a, m,
		    m->nccl->ncclAllReduce((const void *)m->data, (void *)m->data, m->n,
					   ncclFloat32, ncclSum, m->comm, stream),
		    "ncclAllReduce");
	if (both)
		actor_must(a, a->cuda->cuStreamSynchronize(stream), "after ncclAllReduce");
}

static void abort_meet(struct actor *a, struct aborting *b, const struct member *like)
{
	b->m = *like;
	meet(a, &b->m);
	reduce_on(a, &b->m, a->stream, true);
}

/* value: rank. Rank 0 has work that rank 1 does not take part in. Rank 0 tells nanoseconds: of an abort
 * while its own work runs; of one while another communicator's runs, too, in the time before that one is
 * aborted, and in all; of the other's. */
static void abort_rank(struct actor *a)
{
	struct member like = { .rank = (int)a->order->value[0], .world = 2, .nonblocking = true };
	static struct aborting one, two, three;
	struct message say = MESSAGE_NULL;
	CUstream other;
	char host[32];

	snprintf(host, sizeof(host), "probe-%d", like.rank);
	setenv("NCCL_HOSTID", host, 1);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	setenv("NCCL_IB_DISABLE", "1", 1);
	actor_cuda(a);
	other = actor_stream(a);
	like.nccl = nccl_load(a);
	like.n = 1024;
	actor_must(a, a->cuda->cuMemAlloc(&like.data, like.n * sizeof(float)), "cuMemAlloc");
	abort_meet(a, &one, &like);
	abort_meet(a, &two, &like);
	abort_meet(a, &three, &like);
	if (like.rank == 0) {
		reduce_on(a, &one.m, a->stream, false);
		pause_ms(50);
		abort_begin(a, &one);
		say.value[0] = abort_wait(&one, ABORT_MS);
		if (say.value[0]) {
			reduce_on(a, &two.m, a->stream, false);
			reduce_on(a, &three.m, other, false);
			pause_ms(50);
			abort_begin(a, &two);
			say.value[1] = abort_wait(&two, ALONE_MS);
			abort_begin(a, &three);
			say.value[3] = abort_wait(&three, ABORT_MS);
			say.value[2] = abort_wait(&two, ABORT_MS);
		}
		say.value[4] = like.nccl->revoke;
		actor_tell(a, &say);
	}
	actor_hear(a, &say); /* nobody ends before */
}

static void abort_figure(struct stage *s, const char *name, uint64_t ns, unsigned ms)
{
	if (ns)
		stage_number(s, name, "ms", (double)ns / 1e6);
	else
		stage_text(s, name, "not within %u s", ms / 1000);
}

void probe_nccl_abort(struct stage *s)
{
	struct message order = MESSAGE_NULL, m;
	struct role r[2];

	for (unsigned i = 0; i < 2; i++) {
		order.value[0] = i;
		r[i] = role_start(s, "a rank", abort_rank, &order);
	}
	for (unsigned i = 0; i < 3; i++) {
		stage_step(s, "communicator %u", i + 1);
		if (role_hear(s, &r[0], SETTLE_MS, &m) < 0 || m.status == -2)
			stage_skip(s, "%s", m.status == -2 ? m.text : "no communicator of two");
		if (m.status)
			stage_fail(s, "%s", m.text);
		for (unsigned k = 0; k < 2; k++)
			role_tell(s, &r[k], &m);
	}
	stage_step(s, "the aborts");
	role_must(s, &r[0], 4 * ABORT_MS, &m);
	abort_figure(s, "own_work_runs", m.value[0], ABORT_MS);
	if (m.value[0]) {
		abort_figure(s, "another_s_runs_too", m.value[1], ALONE_MS);
		abort_figure(s, "when_both_are_aborted", m.value[2], ABORT_MS);
		abort_figure(s, "the_other_one", m.value[3], ABORT_MS);
	}
	stage_text(s, "ncclCommRevoke", "%s", m.value[4] ? "is there" : "is not there");
	for (unsigned i = 0; i < 2; i++)
		role_kill(s, &r[i]);
	stage_answer(s, "An abort while its own work waits for another process %s.",
		     m.value[0] ? "ends" : "does not end");
	if (m.value[0])
		stage_answer(
			s,
			"While another communicator's work waits, too, it %s; aborted together "
			"they %s.",
			m.value[1] ? "ends" : "waits for that one",
			m.value[2] && m.value[3] ? "end" : "do not end");
}
