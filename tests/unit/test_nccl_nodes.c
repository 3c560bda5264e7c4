/*
 * The nccl engine with members in several processes, each a node of its own: on the simulator, or on one
 * GPU with the real NCCL (tests/gpu/run). There, nodes have one device each, which is the same: NCCL
 * takes it if they say that they are different machines.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "engine/nccl_impl.h"
#include "fdcheck.h"
#include "gloofix.h"
#include "ncclfix.h"

TestSuite(nccl_nodes, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#ifdef SHARDD_CUDA

#define MOST   4u /* nodes */
#define COUNT  100u
#define IN_AT  NCCLFIX_SEND_AT
#define OUT_AT NCCLFIX_RECV_AT

/* What a node sees. */
struct place {
	struct ncclfix f;
	unsigned node, nodes, devices; /* on each node */
	unsigned descriptors;
	struct comm *made[8]; /* so far */
	unsigned n_made;
};

typedef void (*scene)(struct place *p);

static _Atomic bool over; /* what the store says */

static long get(void *userdata, const char *key, unsigned timeout_ms, void *value, size_t capacity)
{
	return atomic_load(&over) ? -ECANCELED
				  : gloofix_get(userdata, key, timeout_ms, value, capacity);
}

static const struct comm_store store = { .set = gloofix_set, .get = get };

static unsigned members(const struct place *p)
{
	return p->nodes * p->devices;
}

static void on_ready(void *userdata, struct comm *comm, int status)
{
	struct place *p = userdata;

	EXPECT(!comm == (status != 0));
	p->made[p->n_made++] = comm;
	p->f.comm = comm;
	p->f.status = status;
	p->f.ready = true;
}

static void on_failed(void *userdata, struct comm *comm, const char *why)
{
	struct place *p = userdata;

	(void)comm;
	snprintf(p->f.why, sizeof(p->f.why), "%s", why);
	p->f.failed++;
}

static void ask(struct place *p, const char *prefix, enum backend_queue queue, unsigned connect_ms)
{
	struct comm_group g = { .size = members(p),
				.member = p->node * p->devices,
				.prefix = prefix,
				.store = &store,
				.connect_ms = connect_ms };
	struct comm_options o = { .name = prefix,
				  .devices = p->f.c.all,
				  .n_devices = p->devices,
				  .queue = queue,
				  .group = &g,
				  .ready = on_ready,
				  .failed = on_failed,
				  .userdata = p };

	p->f.ready = false;
	EXPECT(engine_comm_new(p->f.e, &o) == 0);
	EXPECT(!p->f.ready);
}

/* Return: the status. */
static int meet(struct place *p, const char *prefix, enum backend_queue queue, unsigned connect_ms)
{
	ask(p, prefix, queue, connect_ms);
	looprun_flag(&p->f.c.run, &p->f.ready, NCCLFIX_WAIT_S);
	return p->f.status;
}

static void must_meet(struct place *p, const char *prefix)
{
	int r = meet(p, prefix, BACKEND_Q_MAIN, 20000);

	if (r)
		fprintf(stderr, "node %u: %s\n", p->node, engine_why(p->f.e));
	EXPECT(r == 0 && p->f.comm->size == members(p));
	EXPECT(p->f.comm->member == p->node * p->devices);
}

/* -- processes ------------------------------------------------------------------------ */

static void play_node(scene s, unsigned node, unsigned nodes, unsigned devices)
{
	struct place p = {
		.node = node, .nodes = nodes, .devices = devices, .descriptors = fdcheck_count()
	};

	signal(SIGPIPE, SIG_IGN);
	ncclfix_number("NCCL_HOSTID", node);
	setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
	setenv("NCCL_RUNTIME_CONNECT", "0", 0);
	ncclfix_init(&p.f, devices);
	s(&p);
	ncclfix_deinit(&p.f);
	/* a driver keeps some until the process ends */
	EXPECT(cudafix_on_gpu() || fdcheck_count() == p.descriptors);
}

static void simulator_only(const char *why)
{
	if (cudafix_on_gpu())
		cr_skip_test("%s", why);
}

static pid_t start(scene s, unsigned node, unsigned nodes, unsigned devices)
{
	pid_t pid = fork();

	if (pid)
		return pid;
	alarm(100);
	play_node(s, node, nodes, devices);
	_exit(0);
}

/* @killed: so many of the last nodes kill themselves. */
static void play(scene s, unsigned nodes, unsigned devices, unsigned killed)
{
	pid_t pids[MOST];

	if (cudafix_on_gpu()) {
		devices = 1;
		setenv("CUDA_VISIBLE_DEVICES", "0", 0);
	}
	gloofix_make_folder();
	for (unsigned i = 0; i < nodes; i++)
		pids[i] = start(s, i, nodes, devices);
	for (unsigned i = 0; i < nodes; i++)
		gloofix_join(pids[i], i >= nodes - killed);
	gloofix_remove_folder();
}

/* All nodes are here. */
static void sync_nodes(struct place *p, const char *what)
{
	char key[64], value;

	snprintf(key, sizeof(key), "sync/%s%u", what, p->node);
	EXPECT(gloofix_set(NULL, key, "x", 1) == 0);
	for (unsigned i = 0; i < p->nodes; i++) {
		snprintf(key, sizeof(key), "sync/%s%u", what, i);
		EXPECT(gloofix_get(NULL, key, 20000, &value, 1) == 1);
	}
}

/* -- memory --------------------------------------------------------------------------- */

static void fill(struct place *p, uint64_t at, uint64_t count)
{
	float host[4 * COUNT * MOST];

	EXPECT(count <= ARRAY_SIZE(host));
	for (unsigned d = 0; d < p->devices; d++) {
		for (uint64_t i = 0; i < count; i++)
			host[i] = ncclfix_value(p->node * p->devices + d, i);
		ncclfix_copy(&p->f, d, BACKEND_Q_MAIN, ncclfix_address(&p->f, d, at), host,
			     count * sizeof(float));
	}
}

static void expect(struct place *p, uint64_t at, uint64_t count,
		   float (*fn)(const struct place *p, unsigned member, uint64_t i))
{
	float host[4 * COUNT * MOST];

	EXPECT(count <= ARRAY_SIZE(host));
	for (unsigned d = 0; d < p->devices; d++) {
		ncclfix_copy(&p->f, d, BACKEND_Q_MAIN, host, ncclfix_address(&p->f, d, at),
			     count * sizeof(float));
		for (uint64_t i = 0; i < count; i++)
			EXPECT(host[i] == fn(p, p->node * p->devices + d, i));
	}
}

static float gathered(const struct place *p, unsigned member, uint64_t i)
{
	(void)p;
	(void)member;
	return ncclfix_value((unsigned)(i / COUNT), i % COUNT);
}

static float summed(const struct place *p, unsigned member, uint64_t i)
{
	float t = 0;

	(void)member;
	for (unsigned m = 0; m < members(p); m++)
		t += ncclfix_value(m, i);
	return t;
}

static float part_of_sum(const struct place *p, unsigned member, uint64_t i)
{
	return summed(p, member, member * COUNT + i);
}

static float of_the_last(const struct place *p, unsigned member, uint64_t i)
{
	(void)member;
	return ncclfix_value(members(p) - 1, i);
}

/* No node ends before all have got what they wait for. */
static void end_together(struct place *p)
{
	sync_nodes(p, "end");
	comm_abort(p->f.comm);
}

/* -- results -------------------------------------------------------------------------- */

static void gather(struct place *p)
{
	struct ncclfix_addresses send = ncclfix_all(&p->f, IN_AT, 0),
				 recv = ncclfix_all(&p->f, OUT_AT, 0);
	struct ncclfix_op op = NCCLFIX_OP;

	fill(p, IN_AT, COUNT);
	comm_all_gather(p->f.comm, &op.op, NCCLFIX_CONST(send), recv.all, COUNT, DTYPE_FP32);
	EXPECT(ncclfix_wait(&p->f, &op) == 0);
	expect(p, OUT_AT, members(p) * COUNT, gathered);
}

static void scene_results(struct place *p)
{
	struct ncclfix_addresses send = ncclfix_all(&p->f, IN_AT, 0),
				 recv = ncclfix_all(&p->f, OUT_AT, 0);
	struct ncclfix_op op = NCCLFIX_OP;

	must_meet(p, "job/1");
	gather(p);
	fill(p, IN_AT, members(p) * COUNT);
	comm_reduce_scatter(p->f.comm, &op.op, NCCLFIX_CONST(send), recv.all, COUNT, DTYPE_FP32);
	EXPECT(ncclfix_wait(&p->f, &op) == 0);
	expect(p, OUT_AT, COUNT, part_of_sum);
	op = NCCLFIX_OP;
	fill(p, OUT_AT, COUNT);
	comm_all_reduce(p->f.comm, &op.op, recv.all, COUNT, DTYPE_FP32, REDUCE_SUM);
	EXPECT(ncclfix_wait(&p->f, &op) == 0);
	expect(p, OUT_AT, COUNT, summed);
	op = NCCLFIX_OP;
	fill(p, OUT_AT, COUNT);
	comm_broadcast(p->f.comm, &op.op, recv.all, COUNT * sizeof(float), members(p) - 1);
	EXPECT(ncclfix_wait(&p->f, &op) == 0);
	expect(p, OUT_AT, COUNT, of_the_last);
	end_together(p);
}

Test(nccl_nodes, results_of_two_nodes_with_two_devices)
{
	play(scene_results, 2, 2, 0);
}

Test(nccl_nodes, results_of_three_nodes)
{
	play(scene_results, 3, 1, 0);
}

/* Two communicators on the same devices, as a job has them: every device does one thing at a time, so
 * an order that differs on one node would hang. */
static void scene_two(struct place *p)
{
	struct ncclfix_addresses send = ncclfix_all(&p->f, IN_AT, 0),
				 recv = ncclfix_all(&p->f, OUT_AT, 0);
	struct comm *both[2];
	static struct ncclfix_op ops[40];

	must_meet(p, "job/1/a");
	both[0] = p->f.comm;
	EXPECT(meet(p, "job/1/b", BACKEND_Q_GATHER, 20000) == 0);
	both[1] = p->f.comm;
	fill(p, IN_AT, COUNT);
	for (unsigned i = 0; i < ARRAY_SIZE(ops); i++) {
		ops[i] = NCCLFIX_OP;
		comm_all_gather(both[i * 7 % 3 == 1], &ops[i].op, NCCLFIX_CONST(send), recv.all,
				COUNT, DTYPE_FP32);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(ops); i++)
		EXPECT(ncclfix_wait(&p->f, &ops[i]) == 0);
	ncclfix_copy(&p->f, 0, BACKEND_Q_GATHER, ncclfix_address(&p->f, 0, IN_AT + 4096),
		     ncclfix_address(&p->f, 0, IN_AT), 4);
	expect(p, OUT_AT, members(p) * COUNT, gathered);
	sync_nodes(p, "end");
	comm_abort(both[0]);
	comm_free(both[0]);
	comm_abort(both[1]);
}

Test(nccl_nodes, two_communicators_on_devices_that_do_one_thing_at_a_time)
{
	ncclfix_number("SHARDD_SIM_NCCL_SERIAL", 1);
	play(scene_two, 2, 2, 0);
}

static bool has_two(void *arg)
{
	return ((struct place *)arg)->n_made == 2;
}

/* Both are asked for at once, and made one after the other, whoever is late. */
static void scene_late(struct place *p)
{
	if (p->node == 1)
		sync_nodes(p, "asked");
	ask(p, "job/1/a", BACKEND_Q_GATHER, 20000);
	ask(p, "job/1/b", BACKEND_Q_MAIN, 20000);
	if (p->node == 0)
		sync_nodes(p, "asked");
	looprun_until(&p->f.c.run, has_two, p, NCCLFIX_WAIT_S);
	EXPECT(p->made[0] && p->made[0]->queue == BACKEND_Q_GATHER);
	EXPECT(p->made[1] && p->made[1]->queue == BACKEND_Q_MAIN);
	gather(p);
	sync_nodes(p, "end");
	for (unsigned i = 0; i < 2; i++)
		comm_abort(p->made[i]);
	comm_free(p->made[0]);
}

Test(nccl_nodes, a_node_that_is_late_is_waited_for)
{
	play(scene_late, 2, 2, 0);
}

/* -- who does not come ------------------------------------------------------------------ */

static void scene_alone(struct place *p)
{
	if (p->node == 0) {
		EXPECT(meet(p, "job/1", BACKEND_Q_MAIN, 200) == -ETIMEDOUT);
		EXPECT(strstr(engine_why(p->f.e), "member 1 did not come in time"));
	} else {
		EXPECT(meet(p, "other/1", BACKEND_Q_MAIN, 200) == -ETIMEDOUT);
		EXPECT(strstr(engine_why(p->f.e), "did not come in time"));
	}
}

Test(nccl_nodes, a_node_that_does_not_come_is_named)
{
	play(scene_alone, 2, 1, 0);
}

static void scene_other(struct place *p)
{
	const char *says = p->f.c.n == 1 ? "SHDGLOO1" : "nccl 1.2.3";

	EXPECT(gloofix_set(NULL, "job/1/1", says, strlen(says)) == 0);
	p->nodes = 2;
	EXPECT(meet(p, "job/1", BACKEND_Q_MAIN, 20000) == -EPROTO);
	EXPECT(strstr(engine_why(p->f.e), "member 1 does not use NCCL"));
	EXPECT(gloofix_set(NULL, "job/2/1", "nccl 1.2.3", 10) == 0);
	EXPECT(meet(p, "job/2", BACKEND_Q_MAIN, 20000) == -EPROTO);
	EXPECT(strstr(engine_why(p->f.e), "member 1 has nccl 1.2.3, and this node has nccl 2"));
}

Test(nccl_nodes, a_node_with_another_engine_is_refused)
{
	play(scene_other, 1, 1, 0);
}

/* The other one wants it, and never calls NCCL. */
static void scene_over(struct place *p)
{
	EXPECT(gloofix_set(NULL, "job/1/1", "nccl 2.28.9", 11) == 0);
	p->nodes = 2;
	ask(p, "job/1", BACKEND_Q_MAIN, 20000);
	for (unsigned i = 0; i < 300; i++)
		uv_run(&p->f.c.run.loop, UV_RUN_NOWAIT);
	EXPECT(!p->f.ready);
	atomic_store(&over, true);
	looprun_flag(&p->f.c.run, &p->f.ready, NCCLFIX_WAIT_S);
	EXPECT(p->f.status == -ECANCELED);
	atomic_store(&over, false);
	p->nodes = 1;
	must_meet(p, "job/2");
	gather(p);
	comm_abort(p->f.comm);
}

Test(nccl_nodes, making_ends_when_its_epoch_does)
{
	simulator_only("it has another version of NCCL");
	play(scene_over, 1, 1, 0);
}

/* -- the end ---------------------------------------------------------------------------- */

static void start_gather(struct place *p, struct ncclfix_op *op)
{
	struct ncclfix_addresses send = ncclfix_all(&p->f, IN_AT, 0),
				 recv = ncclfix_all(&p->f, OUT_AT, 0);

	*op = NCCLFIX_OP;
	comm_all_gather(p->f.comm, &op->op, NCCLFIX_CONST(send), recv.all, COUNT, DTYPE_FP32);
}

static bool has_failed(void *arg)
{
	return ((struct place *)arg)->f.failed > 0;
}

/* The neighbours of the one that dies hear of it, all others are told to abort. */
static void scene_killed(struct place *p)
{
	unsigned last = p->nodes - 1;
	struct ncclfix_op op;

	must_meet(p, "job/1");
	gather(p);
	sync_nodes(p, "met");
	if (p->node == last)
		raise(SIGKILL);
	start_gather(p, &op);
	if (p->node == 0 || p->node == last - 1) {
		looprun_until(&p->f.c.run, has_failed, p, NCCLFIX_WAIT_S);
		EXPECT(strstr(p->f.why, "remote process exited"));
	}
	comm_abort(p->f.comm);
	ncclfix_wait(&p->f, &op);
	p->f.comm = comm_free(p->f.comm);
	p->nodes--;
	must_meet(p, "job/2");
	gather(p);
	end_together(p);
}

Test(nccl_nodes, a_killed_node_ends_it_and_the_others_go_on)
{
	play(scene_killed, 4, 1, 1);
}

Test(nccl_nodes, a_killed_node_of_two)
{
	play(scene_killed, 2, 2, 1);
}

/* One has issued what the other never does. */
static void scene_abort(struct place *p)
{
	struct ncclfix_op op = NCCLFIX_OP;

	for (unsigned i = 0; i < 3; i++) {
		char prefix[16], what[16];

		snprintf(prefix, sizeof(prefix), "job/%u", i);
		snprintf(what, sizeof(what), "now%u", i);
		must_meet(p, prefix);
		gather(p);
		if (p->node == 0)
			start_gather(p, &op);
		sync_nodes(p, what);
		comm_abort(p->f.comm);
		if (p->node == 0)
			ncclfix_wait(&p->f, &op);
		op = NCCLFIX_OP;
		start_gather(p, &op);
		EXPECT(ncclfix_wait(&p->f, &op) == ENGINE_E_ABORTED);
		p->f.comm = comm_free(p->f.comm);
	}
	must_meet(p, "job/last");
	gather(p);
	end_together(p);
}

Test(nccl_nodes, an_abort_ends_what_waits_for_the_other_node)
{
	play(scene_abort, 2, 2, 0);
}

/* Memory is not made, nor its making begun, while a queue waits for another node: that would have to end
 * before an abort could begin. */
static void scene_memory(struct place *p)
{
	struct backend_mem *mem = NULL;
	struct ncclfix_op ops[2];

	for (unsigned turn = 0; turn < 2; turn++) {
		char what[16];

		snprintf(what, sizeof(what), "job/%u", turn);
		must_meet(p, what);
		gather(p);
		if (p->node == 0) {
			start_gather(p, &ops[0]);
			EXPECT(ncclfix_wait(&p->f, &ops[0]) == 0);
			EXPECT(backend_alloc(p->f.c.b, 8 << 20, BACKEND_SHARE_FD, &mem) ==
			       BACKEND_E_LATER);
			start_gather(p, &ops[1]);
			for (unsigned i = 0; i < 100; i++)
				uv_run(&p->f.c.run.loop, UV_RUN_NOWAIT);
			EXPECT(backend_alloc(p->f.c.b, 8 << 20, BACKEND_SHARE_FD, &mem) ==
			       BACKEND_E_LATER);
			EXPECT(!ops[1].done);
		}
		snprintf(what, sizeof(what), "waits%u", turn);
		sync_nodes(p, what);
		if (turn == 0 && p->node == 1) {
			start_gather(p, &ops[0]);
			start_gather(p, &ops[1]);
		}
		if (turn == 1)
			comm_abort(p->f.comm);
		if (p->node == 0 || turn == 0)
			ncclfix_wait(&p->f, &ops[1]);
		if (p->node == 0) {
			EXPECT(cudafix_ask(&p->f.c, p->f.c.b, 8 << 20, BACKEND_SHARE_FD, &mem) ==
			       0);
			backend_free(p->f.c.b, mem);
		}
		if (turn == 0) {
			expect(p, OUT_AT, members(p) * COUNT, gathered);
			end_together(p);
		}
		p->f.comm = comm_free(p->f.comm);
	}
}

Test(nccl_nodes, memory_waits_for_what_waits_for_another_node)
{
	play(scene_memory, 2, 1, 0);
}

/* Two communicators wait for the other node in both queues, and their devices rest for neither while the
 * other one runs. */
static void scene_abort_both(struct place *p)
{
	struct comm *both[2];
	struct ncclfix_op ops[2];

	must_meet(p, "job/1/a");
	both[0] = p->f.comm;
	EXPECT(meet(p, "job/1/b", BACKEND_Q_GATHER, 20000) == 0);
	both[1] = p->f.comm;
	for (unsigned i = 0; i < 2; i++) {
		p->f.comm = both[i];
		if (p->node == 0)
			start_gather(p, &ops[i]);
	}
	for (unsigned i = 0; p->node == 0 && i < 2; i++)
		EXPECT(ncclfix_wait(&p->f, &ops[i]) == 0); /* it is ordered */
	sync_nodes(p, "now");
	comm_abort(both[0]);
	for (unsigned i = 0; i < 100; i++)
		uv_run(&p->f.c.run.loop, UV_RUN_NOWAIT);
	comm_abort(both[1]);
	comm_free(both[0]);
	comm_free(both[1]);
	must_meet(p, "job/2");
	gather(p);
	end_together(p);
}

Test(nccl_nodes, two_that_wait_are_aborted_together)
{
	play(scene_abort_both, 2, 1, 0);
}

/* An NCCL without ncclCommRevoke frees memory when it aborts: that waits for the other communicator. */
Test(nccl_nodes, two_that_wait_are_aborted_together_by_an_older_nccl)
{
	ncclfix_number("SHARDD_SIM_NCCL", 22803);
	play(scene_abort_both, 2, 1, 0);
}

/* -- what the simulator must show ------------------------------------------------------- */

/* The wrong order hangs, as it does with the real one. */
static void scene_wrong_order(struct place *p)
{
	struct comm *both[2];
	struct ncclfix_op ops[2];
	struct cudatask t = cudatask_new();

	must_meet(p, "job/1/a");
	both[0] = p->f.comm;
	must_meet(p, "job/1/b");
	both[1] = p->f.comm;
	for (unsigned i = 0; i < 2; i++) {
		p->f.comm = both[(i + p->node) % 2];
		start_gather(p, &ops[i]);
		EXPECT(ncclfix_wait(&p->f, &ops[i]) == 0);
	}
	t.task.sync = true;
	cudatask_submit(p->f.c.all[0], &t);
	sync_nodes(p, "issued");
	for (unsigned i = 0; i < 300; i++) {
		uv_run(&p->f.c.run.loop, UV_RUN_NOWAIT);
		nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
	}
	EXPECT(!t.done);
	sync_nodes(p, "seen");
	for (unsigned i = 0; i < 2; i++)
		comm_abort(both[i]);
	comm_free(both[0]);
	comm_free(both[1]);
	p->f.comm = NULL;
	cudatask_wait(&p->f.c, &t);
}

Test(nccl_nodes, another_order_on_one_node_hangs)
{
	simulator_only("small kernels of a device may run beside each other");
	play(scene_wrong_order, 2, 1, 0);
}

/* Unless it is told to connect when it is made, a call waits for the other node where others would wait
 * behind it. */
static void scene_connects_late(struct place *p)
{
	struct ncclfix_addresses all = ncclfix_all(&p->f, OUT_AT, 0);
	struct ncclfix_op op = NCCLFIX_OP;

	must_meet(p, "job/1");
	if (p->node == 1)
		sync_nodes(p, "waits");
	comm_all_reduce(p->f.comm, &op.op, all.all, 100 * COUNT, DTYPE_FP32, REDUCE_SUM);
	for (unsigned i = 0; p->node == 0 && i < 100; i++) {
		uv_run(&p->f.c.run.loop, UV_RUN_NOWAIT);
		nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
	}
	EXPECT(p->node == 1 || !op.done);
	if (p->node == 0)
		sync_nodes(p, "waits");
	EXPECT(ncclfix_wait(&p->f, &op) == 0);
	end_together(p);
}

Test(nccl_nodes, connections_that_are_made_late_are_waited_for)
{
	simulator_only("when NCCL connects is its own choice");
	ncclfix_number("NCCL_RUNTIME_CONNECT", 1);
	play(scene_connects_late, 2, 1, 0);
}

/* Two nodes that say they are one machine, with the same device. */
static void scene_same_machine(struct place *p)
{
	setenv("NCCL_HOSTID", "one", 1);
	EXPECT(meet(p, "job/1", BACKEND_Q_MAIN, 20000) == -EIO);
	EXPECT(strstr(engine_why(p->f.e), "Duplicate GPU"));
}

Test(nccl_nodes, the_same_device_twice_is_refused)
{
	play(scene_same_machine, 2, 1, 0);
}

#endif
