/*
 * P6: NCCL with two processes on one device.
 *
 * NCCL refuses two ranks of one host on one device; it knows a host by NCCL_HOSTID, so
 * with different ones the two look like two machines that talk over a socket.
 */
#include <errno.h>
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
	ncclComm_t comm;
	CUdeviceptr data;
	size_t n;
	int rank, world;
};

/* Rank 0 makes the id and tells it, the others are told. */
static void meet(struct actor *a, struct member *m)
{
	struct message say = MESSAGE_NULL;
	ncclUniqueId id;

	if (m->rank == 0) {
		nccl_must(a, m->nccl, m->nccl->ncclGetUniqueId(&id), "ncclGetUniqueId");
		memcpy(say.handle, &id, sizeof(id));
		actor_tell(a, &say);
	}
	actor_hear(a, &say);
	memcpy(&id, say.handle, sizeof(id));
	nccl_must(a, m->nccl,
		  m->nccl->ncclCommInitRankConfig(&m->comm, m->world, id, m->rank, NULL),
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
