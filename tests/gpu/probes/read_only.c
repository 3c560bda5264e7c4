/* P3: a write through a read-only import: who is hurt? */
#include <stdio.h>
#include <unistd.h>

#include "stage.h"

#define SEED  0x5eed0005
#define BYTES (2 * MIB)

/* Fills, exports; each time it is asked: is the context alive, is the data intact? */
static void owner(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	struct vmm v;

	actor_cuda(a);
	spin_prepare(a);
	vmm_create(a, BYTES, &v);
	pattern_write(a, v.addr, v.bytes, SEED);
	m.fd = vmm_export(a, &v);
	m.value[0] = v.bytes;
	actor_tell(a, &m);
	for (;;) {
		uint64_t wrong = 0;
		CUresult r;

		actor_hear(a, &m);
		spin(a, 1000, 1, a->stream);
		r = pattern_check(a, v.addr, v.bytes, SEED, &wrong);
		actor_done(a, (uint64_t)r, wrong);
	}
}

enum { BY_KERNEL, BY_MEMSET, BY_COPY, BY_STREAM_WRITE, WAYS };
static const char *const way_names[WAYS] = { "kernel", "memset", "copy", "stream_write" };

static CUresult write_by(struct actor *a, unsigned way, CUdeviceptr addr)
{
	struct cuda_fill fill = { .dst = addr, .n = 1024, .a = 1, .kind = 1 };
	static const uint64_t data[64];

	switch (way) {
	case BY_KERNEL:
		return kernel_launch(a, CUDA_FN_FILL, kernel_get(a, CUDA_FN_FILL), 1, &fill,
				     a->stream);
	case BY_MEMSET:
		return a->cuda->cuMemsetD8Async(addr, 7, 4096, a->stream);
	case BY_COPY:
		return a->cuda->cuMemcpyHtoDAsync(addr, data, sizeof(data), a->stream);
	default:
		return word_write(a, a->stream, addr, 7);
	}
}

/* Says what the driver says to the write, and to the wait for it. */
static void writer(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	uint64_t wrong = 0;
	struct vmm v;
	CUresult r;

	actor_cuda(a);
	actor_must(a, vmm_import(a, a->order->fd, a->order->value[0], false, &v), "importing");
	actor_must(a, pattern_check(a, v.addr, v.bytes, SEED, &wrong), "reading");
	m.value[1] = wrong;
	r = write_by(a, (unsigned)a->order->value[1], v.addr);
	if (r == CUDA_SUCCESS)
		r = a->cuda->cuStreamSynchronize(a->stream);
	m.value[0] = (uint64_t)r;
	actor_text(a, r, m.text);
	actor_tell(a, &m);
}

struct outcome {
	bool refused;     /* the driver did not do it */
	bool owner_alive; /* and its data is as it was */
};

static struct outcome try(struct stage *s, struct role *own, const struct message *place,
			  unsigned way)
{
	struct message order = *place, m;
	struct outcome o = { 0 };
	struct role r;
	char name[56], how[64];
	int rc;

	stage_step(s, "a write by %s", way_names[way]);
	order.value[1] = way;
	r = role_start(s, "the writer", writer, &order);
	rc = role_hear(s, &r, 30000, &m);
	snprintf(name, sizeof(name), "write_by_%s", way_names[way]);
	if (rc < 0)
		stage_text(s, name, "the writer %s", role_how(&r, how, sizeof(how)));
	else
		stage_text(s, name, "%s", m.text[0] ? m.text : "done, without an error");
	o.refused = rc < 0 || m.status || m.value[0];
	role_kill(s, &r);
	role_tell(s, own, NULL);
	role_must(s, own, 30000, &m);
	snprintf(name, sizeof(name), "owner_after_%s", way_names[way]);
	o.owner_alive = m.value[0] == 0 && m.value[1] == 0;
	stage_text(s, name, "%s",
		   m.value[0]   ? "its context is broken"
		   : m.value[1] ? "its data is changed"
				: "alive, data intact");
	return o;
}

void probe_read_only(struct stage *s)
{
	struct role own = role_start(s, "the owner", owner, NULL);
	bool refused = true, alive = true;
	struct message place;

	stage_step(s, "allocating");
	role_must(s, &own, 30000, &place);
	for (unsigned way = 0; way < WAYS && alive; way++) {
		struct outcome o = try(s, &own, &place, way);

		refused = refused && o.refused;
		alive = alive && o.owner_alive;
	}
	role_kill(s, &own);
	close(place.fd);
	stage_answer(s, refused ? "Every write through a read-only import is refused"
				: "Not every write through a read-only import is refused");
	stage_answer(s, alive ? "and hurts the writer only." : "and the owner is hurt.");
}
