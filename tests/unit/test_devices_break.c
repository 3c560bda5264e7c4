/* Devices of a job that lose contact, and jobs that go, while collectives are under way. */
#include <criterion/criterion.h>
#include <string.h>

#include "fdcheck.h"
#include "job/registration.h"
#include "nodefix.h"

TestSuite(devices_break, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define RANKS 2u
#define N     1003u

/* A rank on each of two devices, with two buffers. Ops are written to until the end. */
static struct world {
	struct nodefix n;
	struct job *job;
	struct member *m[RANKS];
	uint64_t small[RANKS], large[RANKS];
	struct nodefix_op one[RANKS], two[RANKS];
} w;

static uint64_t alloc(unsigned r, uint64_t bytes)
{
	NODEFIX_OK(nodefix_alloc(&w.n, w.m[r], bytes, &w.one[r]), &w.one[r]);
	return w.one[r].result.buffer;
}

static void test_devices_break_begin(void)
{
	const struct nodefix_options o = { .devices = 2 };

	memset(&w, 0, sizeof(w));
	nodefix_begin(&w.n, &o);
	w.job = nodefix_job(&w.n, "job", RANKS, 0);
	for (unsigned r = 0; r < RANKS; r++) {
		w.m[r] = nodefix_join(&w.n, w.job, r);
		w.small[r] = alloc(r, 4096);
		w.large[r] = alloc(r, 8u << 20);
	}
}

static void hold(bool on)
{
	for (unsigned i = 0; i < w.n.node.n_devices; i++)
		backend_fake_hold(w.n.node.devices[i].backend, on);
}

static void all_reduce(const uint64_t *buffers, uint64_t count, struct nodefix_op *ops)
{
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_all_reduce(&w.n, w.m[r], buffers[r], count, &ops[r]);
}

static void wait_for(struct nodefix_op *ops)
{
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_wait(&ops[r]);
}

/* What comes after the first stage needs the communicator. */
Test(devices_break, a_communicator_may_break_during_the_first_stage)
{
	test_devices_break_begin();
	all_reduce(w.small, 100, w.one);
	wait_for(w.one);
	cr_assert(!w.one[0].fault.code, "%s", w.one[0].fault.text);
	hold(true);
	all_reduce(w.small, 100, w.one);
	nodefix_turns(&w.n);
	node_comm_break(w.job->groups[0]->nc, "somebody pulled the cable");
	hold(false);
	wait_for(w.one);
	for (unsigned r = 0; r < RANKS; r++) {
		cr_expect_eq(w.one[r].fault.code, FAULT_ABORTED);
		cr_expect(strstr(w.one[r].fault.text, "cable"), "%s", w.one[r].fault.text);
	}
	nodefix_end(&w.n);
}

/* And by the time it is needed it may be in the making again. */
Test(devices_break, a_gather_finds_the_communicator_being_made_again)
{
	state_unit *spec = nodefix_spec("u", N);
	struct fault f = FAULT_NULL;
	struct node_comm *nc, *again;
	struct unit *u;
	uint64_t charged;
	uint32_t id;

	test_devices_break_begin();
	all_reduce(w.small, 100, w.one); /* makes the communicators */
	wait_for(w.one);
	cr_assert_eq(nodefix_try_register(w.job, &spec, 1, &id, &charged, &f), 0, "%s", f.text);
	u = w.job->units[id - 1];
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_seed(&w.n, w.m[r], u, 1, &w.one[r]);
	wait_for(w.one);
	hold(true);
	nodefix_on_unit(&w.n, w.m[0], "Gather", u, &w.two[0]);
	nodefix_turns(&w.n);
	nc = w.job->groups[0]->nc;
	node_comm_break(nc, "somebody pulled the cable");
	hold(false);
	cr_expect_eq(node_comm(&w.n.node, nc->devices, nc->n, &again, &f), RES_WAIT);
	nodefix_wait(&w.two[0]);
	cr_expect_eq(w.two[0].fault.code, FAULT_ABORTED, "%s", w.two[0].fault.text);
	nodefix_end(&w.n);
}

/* Of two collectives of a deleted job one runs and one waits for memory: the end of the
 * first ends the second, and that the job. */
Test(devices_break, a_job_is_deleted_while_a_collective_waits_for_memory)
{
	struct fault f = FAULT_NULL;

	test_devices_break_begin();
	all_reduce(w.small, 100, w.one);
	wait_for(w.one);
	hold(true);
	all_reduce(w.small, 100, w.one);
	nodefix_turns(&w.n);
	backend_fake_fail(w.n.node.devices[1].backend, 1, BACKEND_E_LATER);
	all_reduce(w.large, 1u << 20, w.two);
	nodefix_turns(&w.n);
	cr_assert(!condition_is_idle(&w.n.node.changed));
	cr_assert_eq(w.job->running, 2);
	while (w.n.n_members)
		nodefix_drop(&w.n, w.n.members[0], "is gone");
	cr_assert_eq(job_delete(w.job, true, NULL, &f), 0);
	hold(false);
	nodefix_turns(&w.n);
	for (unsigned r = 0; r < RANKS; r++)
		cr_expect(w.one[r].over && w.two[r].over);
	cr_expect(list_empty(&w.n.jobs.zombies));
	nodefix_end(&w.n);
}
