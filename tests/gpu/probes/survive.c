/* P1: the memory of a daemon that was killed, held by nothing but a descriptor. */
#include <unistd.h>

#include "stage.h"

#define SEED 0x5eed0001

static size_t size_of(const struct stage *s)
{
	return s->small ? 4 * MIB : 256 * MIB;
}

/* Allocates, fills, exports, and waits to be killed. */
static void allocator(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	struct vmm v;

	actor_cuda(a);
	vmm_create(a, size_of(a->stage), &v);
	pattern_write(a, v.addr, v.bytes, SEED);
	m.fd = vmm_export(a, &v);
	m.value[0] = v.bytes;
	actor_tell(a, &m);
	actor_hear(a, &m);
}

/* A process that knows nothing but the descriptor. */
static void finder(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	uint64_t wrong = 0;
	struct vmm v;
	CUresult r;

	actor_cuda(a);
	r = vmm_import(a, a->order->fd, a->order->value[0], true, &v);
	actor_must(a, r, "cuMemImportFromShareableHandle");
	actor_must(a, pattern_check(a, v.addr, v.bytes, SEED, &wrong), "reading");
	m.value[0] = wrong;
	actor_tell(a, &m);
}

/* Free memory of the device, asked for again and again. */
static void accountant(struct actor *a)
{
	struct message m;
	size_t available, total;

	actor_cuda(a);
	for (;;) {
		actor_must(a, a->cuda->cuMemGetInfo(&available, &total), "cuMemGetInfo");
		actor_done(a, available, total);
		actor_hear(a, &m);
	}
}

static double free_mib(struct stage *s, struct role *r, bool first)
{
	struct message m;

	if (!first)
		role_tell(s, r, NULL);
	role_must(s, r, 20000, &m);
	return (double)m.value[0] / (double)MIB;
}

/* Return: words that are wrong, or below 0: why is in a figure. */
static double found(struct stage *s, const char *name, int fd, size_t bytes)
{
	struct message m = MESSAGE_NULL;
	struct role r;
	char how[64];
	int rc;

	stage_step(s, "reading it again, %s", name);
	m.fd = fd;
	m.value[0] = bytes;
	r = role_start(s, "a new process", finder, &m);
	rc = role_hear(s, &r, 30000, &m);
	if (rc < 0 || m.status) {
		role_kill(s, &r);
		stage_text(s, name, "%s", rc == 0 ? m.text : role_how(&r, how, sizeof(how)));
		return -1;
	}
	role_end(s, &r);
	stage_number(s, name, "words wrong", (double)m.value[0]);
	return (double)m.value[0];
}

/* Memory comes back a little after the last descriptor is closed. */
static double returned_mib(struct stage *s, struct role *count, double held)
{
	double most = 0;

	for (int i = 0; i < 200 && most < 1; i++) {
		most = free_mib(s, count, false) - held;
		pause_ms(10);
	}
	return most;
}

/* Nobody but the holder of the descriptor has the device open meanwhile: what a driver
 * without persistence does then belongs to the question. Return: the data is there. */
static bool alone(struct stage *s)
{
	struct role owner = role_start(s, "the allocator", allocator, NULL);
	double at_once, later, ms;
	struct message m;

	stage_step(s, "allocating");
	role_must(s, &owner, 60000, &m);
	stage_number(s, "allocated", "MiB", (double)m.value[0] / (double)MIB);
	ms = role_kill(s, &owner);
	if (ms < 0)
		stage_fail(s, "the allocator does not die");
	stage_number(s, "gone_after_kill", "ms", ms);
	pause_ms(s->small ? 50 : 3000);
	at_once = found(s, "read_by_a_new_process", m.fd, m.value[0]);
	pause_ms(s->small ? 50 : 1000);
	later = found(s, "read_by_another_one", m.fd, m.value[0]);
	close(m.fd);
	return at_once == 0 && later == 0;
}

/* Return: MiB that come back when the descriptor is closed. @ret_counted: the driver counts
 * what other processes hold. */
static double accounted(struct stage *s, bool *ret_counted)
{
	struct role count = role_start(s, "the accountant", accountant, NULL);
	double before = free_mib(s, &count, true), held, back;
	struct role owner = role_start(s, "the allocator", allocator, NULL);
	struct message m;

	stage_step(s, "allocating again");
	role_must(s, &owner, 60000, &m);
	role_kill(s, &owner);
	pause_ms(s->small ? 50 : 1000);
	held = free_mib(s, &count, false);
	*ret_counted = before - held >= 1;
	stage_number(s, "held_by_the_descriptor", "MiB", before - held);
	stage_step(s, "closing the descriptor");
	close(m.fd);
	back = *ret_counted ? returned_mib(s, &count, held) : 0;
	stage_number(s, "returned_after_close", "MiB", back);
	role_end(s, &count);
	return back;
}

void probe_survive(struct stage *s)
{
	bool kept = alone(s), counted;
	double back = accounted(s, &counted);

	stage_answer(s, kept ? "Yes: a descriptor alone keeps it, data intact."
			     : "No: a descriptor alone does not keep it.");
	if (!counted)
		stage_answer(s, "What is free does not show what other processes hold.");
	else
		stage_answer(s, back >= 1 ? "Closing the descriptor gives it back."
					  : "Closing the descriptor gave nothing back within 2 s.");
}
