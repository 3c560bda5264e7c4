/* The nccl engine and the cuda backend on the simulator. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "engine/nccl_impl.h"
#include "fdcheck.h"
#include "ncclfix.h"

TestSuite(nccl, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#ifdef SHARDD_CUDA

static float sum(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	float t = 0;

	(void)device;
	(void)count;
	for (unsigned d = 0; d < n; d++)
		t += ncclfix_value(d, i);
	return t;
}

static float part_of_sum(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	return sum(n, device, device * count + i, count);
}

static float largest(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	float t = ncclfix_value(0, i);

	(void)device;
	(void)count;
	for (unsigned d = 1; d < n; d++)
		t = ncclfix_value(d, i) > t ? ncclfix_value(d, i) : t;
	return t;
}

static float least(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	float t = ncclfix_value(0, i);

	(void)device;
	(void)count;
	for (unsigned d = 1; d < n; d++)
		t = ncclfix_value(d, i) < t ? ncclfix_value(d, i) : t;
	return t;
}

static float of_the_last(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	(void)device;
	(void)count;
	return ncclfix_value(n - 1, i);
}

/* -- results ------------------------------------------------------------------------- */

static void check_reduce_scatter(struct ncclfix *f, enum dtype t, uint64_t count)
{
	struct ncclfix_addresses send = ncclfix_all(f, NCCLFIX_SEND_AT, 0),
				 recv = ncclfix_all(f, NCCLFIX_RECV_AT, 0);
	struct ncclfix_addresses own = ncclfix_all(f, NCCLFIX_SEND_AT, count * dtype_size(t));
	struct ncclfix_op op = NCCLFIX_OP, in_place = NCCLFIX_OP;

	ncclfix_fill(f, t, NCCLFIX_SEND_AT, count * f->c.n);
	comm_reduce_scatter(f->comm, &op.op, NCCLFIX_CONST(send), recv.all, count, t);
	comm_reduce_scatter(f->comm, &in_place.op, NCCLFIX_CONST(send), own.all, count, t);
	cr_assert_eq(ncclfix_wait(f, &op), 0);
	cr_assert_eq(ncclfix_wait(f, &in_place), 0);
	ncclfix_expect(f, t, NCCLFIX_RECV_AT, count, part_of_sum, count);
	for (unsigned d = 0; d < f->c.n; d++)
		ncclfix_copy(f, d, BACKEND_Q_MAIN, ncclfix_address(f, d, NCCLFIX_RECV_AT),
			     own.all[d], count * dtype_size(t));
	ncclfix_expect(f, t, NCCLFIX_RECV_AT, count, part_of_sum, count);
}

static void check_all_reduce(struct ncclfix *f, enum dtype t, uint64_t count, enum reduce_op reduce,
			     ncclfix_expected fn)
{
	struct ncclfix_addresses data = ncclfix_all(f, NCCLFIX_SEND_AT, 0);
	struct ncclfix_op op = NCCLFIX_OP;

	ncclfix_fill(f, t, NCCLFIX_SEND_AT, count);
	comm_all_reduce(f->comm, &op.op, data.all, count, t, reduce);
	cr_assert_eq(ncclfix_wait(f, &op), 0);
	ncclfix_expect(f, t, NCCLFIX_SEND_AT, count, fn, count);
}

static void check_broadcast(struct ncclfix *f, uint64_t count)
{
	struct ncclfix_addresses data = ncclfix_all(f, NCCLFIX_SEND_AT, 0);
	struct ncclfix_op op = NCCLFIX_OP;

	ncclfix_fill(f, DTYPE_FP32, NCCLFIX_SEND_AT, count);
	comm_broadcast(f->comm, &op.op, data.all, count * sizeof(float), f->c.n - 1);
	cr_assert_eq(ncclfix_wait(f, &op), 0);
	ncclfix_expect(f, DTYPE_FP32, NCCLFIX_SEND_AT, count, of_the_last, count);
}

static float mean(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	return sum(n, device, i, count) / (float)n;
}

static void check_everything(unsigned devices)
{
	static const enum dtype types[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };
	struct ncclfix f;
	struct comm_info info;

	ncclfix_init(&f, devices);
	cr_assert_eq(ncclfix_make(&f, devices, BACKEND_Q_MAIN), 0, "%s", engine_why(f.e));
	cr_assert_eq(f.comm->size, devices);
	cr_assert_eq(f.comm->n_local, devices);
	for (unsigned i = 0; i < ARRAY_SIZE(types); i++) {
		ncclfix_check_gather(&f, types[i], 1);
		ncclfix_check_gather(&f, types[i], 333);
		check_reduce_scatter(&f, types[i], 77);
		check_all_reduce(&f, types[i], 1001, REDUCE_SUM, sum);
		check_all_reduce(&f, types[i], 5, REDUCE_AVG, mean);
		check_all_reduce(&f, types[i], 5, REDUCE_MAX, largest);
		check_all_reduce(&f, types[i], 5, REDUCE_MIN, least);
	}
	check_broadcast(&f, 999);
	comm_info(f.comm, &info);
	cr_assert_str_eq(info.engine, "nccl");
	cr_assert_str_eq(info.name, "test");
	cr_assert_str_eq(info.gather, devices > 1 ? "kernel" : "copy");
	cr_assert_str_eq(info.detail, "NCCL 2.28.9");
	cr_assert_gt(info.memory_bytes, 0);
	cr_assert_gt(info.ops, 20);
	cr_assert_eq(f.failed, 0);
	ncclfix_deinit(&f);
}

Test(nccl, one_device)
{
	check_everything(1);
}

Test(nccl, two_devices)
{
	check_everything(2);
}

Test(nccl, four_devices)
{
	check_everything(4);
}

Test(nccl, eight_devices)
{
	check_everything(8);
}

static float to_bf16(float f)
{
	return bf16_to_f32(bf16_from_f32(f));
}

/* NCCL's average multiplies by 1/n rounded to the type first: a third is no bf16. Products
 * and sums are rounded too. */
static float mean_of_three_bf16(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	float third = to_bf16(1.0f / 3.0f), t = 0;

	(void)device;
	(void)count;
	for (unsigned d = 0; d < n; d++)
		t = to_bf16(t + to_bf16(ncclfix_value(d, i) * third));
	return t;
}

Test(nccl, averages_are_nccls)
{
	struct ncclfix f;

	ncclfix_init(&f, 3);
	cr_assert_eq(ncclfix_make(&f, 3, BACKEND_Q_MAIN), 0);
	check_all_reduce(&f, DTYPE_BF16, 100, REDUCE_AVG, mean_of_three_bf16);
	ncclfix_deinit(&f);
}

Test(nccl, nothing_to_do_is_done)
{
	struct ncclfix f;
	struct ncclfix_addresses none = { { NULL } };
	struct ncclfix_op op = NCCLFIX_OP;

	ncclfix_init(&f, 2);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	comm_all_gather(f.comm, &op.op, NCCLFIX_CONST(none), none.all, 0, DTYPE_FP32);
	cr_assert_eq(ncclfix_wait(&f, &op), 0);
	ncclfix_deinit(&f);
}

/* -- registered memory ------------------------------------------------------------------ */

static void on_freed(void *userdata)
{
	*(bool *)userdata = true;
}

static void unregister(struct ncclfix *f, struct ncclfix_addresses slab)
{
	bool freed = false;

	comm_unregister(f->comm, slab.all, on_freed, &freed);
	looprun_flag(&f->c.run, &freed, NCCLFIX_WAIT_S);
}

static const char *gather_of(struct ncclfix *f)
{
	static struct comm_info info;

	comm_info(f->comm, &info);
	return info.gather;
}

Test(nccl, gathers_of_registered_memory_use_copy_engines)
{
	struct ncclfix f;
	struct ncclfix_addresses slab;

	ncclfix_init(&f, 4);
	slab = ncclfix_all(&f, 0, 0);
	cr_assert_eq(ncclfix_make(&f, 4, BACKEND_Q_GATHER), 0);
	cr_assert_str_eq(gather_of(&f), "kernel");
	ncclfix_check_gather(&f, DTYPE_FP32, 10);
	comm_register(f.comm, slab.all, NCCLFIX_MEM_BYTES);
	ncclfix_check_gather(&f, DTYPE_BF16, 111); /* behind it in the order */
	cr_assert_str_eq(gather_of(&f), "copy-engine");
	unregister(&f, slab);
	ncclfix_check_gather(&f, DTYPE_BF16, 111);
	cr_assert_str_eq(gather_of(&f), "kernel");
	comm_register(f.comm, slab.all, NCCLFIX_MEM_BYTES); /* freed with it */
	ncclfix_check_gather(&f, DTYPE_BF16, 111);
	ncclfix_deinit(&f);
}

Test(nccl, what_cannot_be_registered_is_used_all_the_same)
{
	struct ncclfix f;
	struct ncclfix_addresses odd;

	ncclfix_init(&f, 2);
	odd = ncclfix_all(&f, 256, 0);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_GATHER), 0);
	comm_register(f.comm, odd.all, 4096);
	unregister(&f, odd);
	ncclfix_check_gather(&f, DTYPE_FP32, 9);
	cr_assert_str_eq(gather_of(&f), "kernel");
	ncclfix_deinit(&f);
}

Test(nccl, older_versions_have_no_copy_engines)
{
	struct ncclfix f;
	struct ncclfix_addresses slab;

	setenv("SHARDD_SIM_NCCL", "22703", 1);
	ncclfix_init(&f, 2);
	slab = ncclfix_all(&f, 0, 0);
	cr_assert_str_eq(f.e->detail, "NCCL 2.27.3");
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_GATHER), 0);
	comm_register(f.comm, slab.all, NCCLFIX_MEM_BYTES);
	ncclfix_check_gather(&f, DTYPE_FP32, 10);
	cr_assert_str_eq(gather_of(&f), "kernel");
	ncclfix_deinit(&f);
}

/* -- order ------------------------------------------------------------------------------- */

/* Rounds in which every device scales its part by another factor and all are summed, each
 * step started when the one before is ordered: nobody waits for anything to be executed. */
struct pipeline {
	struct ncclfix *f;
	struct comm *comm;
	struct side {
		struct backend_task task;
		struct pipeline *p;
		struct launch launch;
	} sides[2];
	struct comm_op op;
	unsigned filled, rounds;
	uint64_t at;
	bool done;
};

#define ROUNDS   8u
#define ELEMENTS 1000u

static void on_scaled(struct backend_task *task, int status)
{
	struct pipeline *p = CONTAINER_OF(task, struct side, task)->p;

	cr_assert_eq(status, 0);
	if (++p->filled == 2)
		comm_all_reduce(p->comm, &p->op, ncclfix_all(p->f, p->at, 0).all, ELEMENTS,
				DTYPE_FP32, REDUCE_SUM);
}

static void scale_both(struct pipeline *p)
{
	p->filled = 0;
	for (unsigned i = 0; i < 2; i++) {
		struct side *side = &p->sides[i];

		side->p = p;
		side->launch = (struct launch){ .kind = LAUNCH_SCALE,
						.n = ELEMENTS,
						.scale = { .x = ncclfix_address(p->f, i, p->at),
							   .factor = i ? 0.5f : 0.25f } };
		side->task = (struct backend_task){ .launches = &side->launch,
						    .n_launches = 1,
						    .queue = p->comm->queue,
						    .done = on_scaled };
		backend_submit(p->f->c.all[i], &side->task);
	}
}

static void on_summed(struct comm_op *op, int status)
{
	struct pipeline *p = CONTAINER_OF(op, struct pipeline, op);

	cr_assert_eq(status, 0);
	p->done = --p->rounds == 0;
	if (!p->done)
		scale_both(p);
}

static void run_pipelines(struct ncclfix *f, struct comm *a, struct comm *b)
{
	struct pipeline p[2] = { { .f = f, .comm = a, .at = NCCLFIX_SEND_AT },
				 { .f = f, .comm = b, .at = NCCLFIX_RECV_AT } };
	float x[ELEMENTS], want = 1;

	for (unsigned i = 0; i < ELEMENTS; i++)
		x[i] = (float)i;
	for (unsigned i = 0; i < 2; i++) {
		for (unsigned d = 0; d < 2; d++)
			ncclfix_copy(f, d, BACKEND_Q_MAIN, ncclfix_address(f, d, p[i].at), x,
				     sizeof(x));
		p[i].op.done = on_summed;
		p[i].rounds = ROUNDS;
		scale_both(&p[i]);
	}
	for (unsigned i = 0; i < ROUNDS; i++)
		want *= 0.75f;
	for (unsigned i = 0; i < 2; i++) {
		looprun_flag(&f->c.run, &p[i].done, NCCLFIX_WAIT_S);
		for (unsigned d = 0; d < 2; d++) {
			ncclfix_copy(f, d, p[i].comm->queue, x, ncclfix_address(f, d, p[i].at),
				     sizeof(x));
			for (unsigned j = 0; j < ELEMENTS; j++)
				cr_assert_eq(x[j], (float)j * want);
		}
	}
}

Test(nccl, two_communicators_each_keep_their_order)
{
	struct ncclfix f;
	struct comm *main_comm;

	ncclfix_init(&f, 2);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	main_comm = f.comm;
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_GATHER), 0);
	run_pipelines(&f, main_comm, f.comm);
	comm_free(main_comm);
	ncclfix_deinit(&f);
}

/* -- the end of things ---------------------------------------------------------------------- */

/* The first is ordered and hangs; what comes after it ends with the abort. */
Test(nccl, abort_ends_a_hung_collective_and_what_follows)
{
	struct ncclfix f;
	struct ncclfix_op ops[3];

	ncclfix_number("SHARDD_SIM_NCCL_HANG", NCCLFIX_WARM_MAIN + 1);
	ncclfix_init(&f, 4);
	cr_assert_eq(ncclfix_make(&f, 4, BACKEND_Q_MAIN), 0);
	ncclfix_start_gather(&f, &ops[0]);
	cr_assert_eq(ncclfix_wait(&f, &ops[0]), 0, "it is in the queues");
	ncclfix_start_gather(&f, &ops[1]);
	cr_assert_eq(ncclfix_wait(&f, &ops[1]), 0);
	comm_abort(f.comm);
	ncclfix_start_gather(&f, &ops[2]);
	cr_assert_eq(ncclfix_wait(&f, &ops[2]), ENGINE_E_ABORTED);
	cr_assert_eq(f.failed, 0, "it was asked for");
	f.comm = comm_free(f.comm);
	/* the queues go on, and so does a new communicator */
	cr_assert_eq(ncclfix_make(&f, 4, BACKEND_Q_MAIN), 0, "%s", engine_why(f.e));
	ncclfix_check_gather(&f, DTYPE_FP32, 100);
	ncclfix_deinit(&f);
}

static bool has_failed(void *arg)
{
	return ((struct ncclfix *)arg)->failed > 0;
}

Test(nccl, an_asynchronous_error_is_told_and_aborts)
{
	struct ncclfix f;
	struct ncclfix_op op, after;

	ncclfix_number("SHARDD_SIM_NCCL_ERROR", NCCLFIX_WARM_MAIN + 1);
	ncclfix_init(&f, 2);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	ncclfix_start_gather(&f, &op);
	ncclfix_wait(&f, &op); /* ordered before it broke, or not */
	looprun_until(&f.c.run, has_failed, &f, NCCLFIX_WAIT_S);
	cr_assert_eq(f.failed, 1);
	cr_assert(strstr(f.why, "network error (6)"), "%s", f.why);
	ncclfix_start_gather(&f, &after);
	cr_assert_eq(ncclfix_wait(&f, &after), ENGINE_E_ABORTED);
	f.comm = comm_free(f.comm);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	ncclfix_check_gather(&f, DTYPE_FP32, 100);
	cr_assert_eq(f.failed, 1);
	ncclfix_deinit(&f);
}

/* Kernels run on the device until it is lost. Return: whether it was. */
static bool wear_out(struct ncclfix *f, unsigned device)
{
	struct launch launch = { .kind = LAUNCH_SCALE,
				 .n = 4,
				 .scale = { .x = ncclfix_address(f, device, 0), .factor = 1 } };

	for (unsigned i = 0; i < 200; i++) {
		if (cudafix_run(&f->c, f->c.all[device], &launch, 1) < 0)
			return true;
	}
	return false;
}

Test(nccl, a_lost_device_breaks_its_communicators)
{
	struct ncclfix f;
	struct ncclfix_op op;

	setenv("SHARDD_SIM_LOSE", "1:100", 1);
	ncclfix_init(&f, 2);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	cr_assert(wear_out(&f, 1));
	ncclfix_start_gather(&f, &op);
	ncclfix_wait(&f, &op);
	looprun_until(&f.c.run, has_failed, &f, NCCLFIX_WAIT_S);
	cr_assert(strlen(f.why) > 0);
	ncclfix_deinit(&f);
}

/* What hangs when the engine is closed is aborted then. */
Test(nccl, closing_does_not_wait_for_ever)
{
	struct ncclfix f;
	struct ncclfix_op op;

	ncclfix_number("SHARDD_SIM_NCCL_HANG", NCCLFIX_WARM_MAIN + 1);
	ncclfix_init(&f, 2);
	engine_nccl_patience(f.e, NCCL_MAKE_MS, 50);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	ncclfix_start_gather(&f, &op);
	cr_assert_eq(ncclfix_wait(&f, &op), 0);
	ncclfix_deinit(&f);
}

Test(nccl, a_warm_up_that_hangs_is_given_up)
{
	struct ncclfix f;

	ncclfix_number("SHARDD_SIM_NCCL_HANG", 2);
	ncclfix_init(&f, 2);
	engine_nccl_patience(f.e, 200, NCCL_CLOSE_MS);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), -ETIMEDOUT);
	cr_assert_str_eq(engine_why(f.e), "the first collectives do not finish");
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	ncclfix_check_gather(&f, DTYPE_FP32, 100);
	ncclfix_deinit(&f);
}

/* -- beside streams that stand still --------------------------------------------------------- */

/* A queue of the first device that waits for another process. */
struct still {
	struct backend_mem *page;
	struct backend_signals *signals;
	struct backend_wait wait;
	struct cudatask task;
	bool freed;
};

static void prepare_still(struct ncclfix *f, struct still *s)
{
	*s = (struct still){ .task = cudatask_new() };
	cr_assert_eq(cudafix_ask(&f->c, f->c.b, NCCLFIX_MEM_BYTES, BACKEND_SHARE_FD, &s->page), 0);
	cr_assert_eq(backend_signals_new(f->c.b, s->page, &s->signals), 0);
}

static void stop_queue(struct ncclfix *f, struct still *s, enum backend_queue queue)
{
	s->wait = (struct backend_wait){ s->signals, 0, 1 };
	s->task.task.queue = queue;
	s->task.task.waits = &s->wait;
	s->task.task.n_waits = 1;
	cudatask_submit(f->c.b, &s->task);
	cr_assert_eq(cudatask_wait(&f->c, &s->task), 0);
}

static void stand_still(struct ncclfix *f, struct still *s, enum backend_queue queue)
{
	prepare_still(f, s);
	stop_queue(f, s, queue);
}

static void go_on(struct still *s)
{
	backend_signals_poison(s->signals);
}

static void free_still(struct ncclfix *f, struct still *s)
{
	backend_signals_free(s->signals, on_freed, &s->freed);
	looprun_flag(&f->c.run, &s->freed, NCCLFIX_WAIT_S);
	backend_free(f->c.b, s->page);
}

/* A task of the other queue gets its turn, however long a device is waited for. */
static void others_get_their_turn(struct ncclfix *f, enum backend_queue other)
{
	char x[4];

	for (unsigned i = 0; i < 3; i++)
		ncclfix_copy(f, 0, other, x, ncclfix_address(f, 0, 0), sizeof(x));
}

/* The simulator would end the process if memory were taken meanwhile. */
Test(nccl, a_communicator_is_made_when_the_devices_rest)
{
	struct ncclfix f;
	struct still s;
	struct comm_options o;

	ncclfix_init(&f, 2);
	stand_still(&f, &s, BACKEND_Q_MAIN);
	o = ncclfix_options(&f, 2, BACKEND_Q_MAIN);
	cr_assert_eq(engine_comm_new(f.e, &o), 0);
	others_get_their_turn(&f, BACKEND_Q_GATHER);
	cr_assert_not(f.ready);
	go_on(&s);
	looprun_flag(&f.c.run, &f.ready, NCCLFIX_WAIT_S);
	cr_assert_eq(f.status, 0, "%s", engine_why(f.e));
	ncclfix_check_gather(&f, DTYPE_FP32, 10);
	free_still(&f, &s);
	ncclfix_deinit(&f);
}

Test(nccl, who_does_not_let_devices_rest_gets_no_communicator)
{
	struct ncclfix f;
	struct still s;

	ncclfix_init(&f, 2);
	engine_nccl_patience(f.e, 100, NCCL_CLOSE_MS);
	stand_still(&f, &s, BACKEND_Q_MAIN);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), -ETIMEDOUT);
	cr_assert_str_eq(engine_why(f.e), "its devices did not become idle in time");
	go_on(&s);
	free_still(&f, &s);
	ncclfix_deinit(&f);
}

Test(nccl, memory_is_registered_and_freed_when_the_devices_rest)
{
	struct ncclfix f;
	struct still s;
	struct ncclfix_addresses slab;
	struct ncclfix_op op;

	ncclfix_init(&f, 2);
	slab = ncclfix_all(&f, 0, 0);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_GATHER), 0);
	stand_still(&f, &s, BACKEND_Q_MAIN);
	comm_register(f.comm, slab.all, NCCLFIX_MEM_BYTES);
	ncclfix_start_gather(&f, &op); /* behind it */
	others_get_their_turn(&f, BACKEND_Q_GATHER);
	cr_assert_not(op.done);
	cr_assert_str_eq(gather_of(&f), "kernel");
	go_on(&s);
	cr_assert_eq(ncclfix_wait(&f, &op), 0);
	cr_assert_str_eq(gather_of(&f), "copy-engine");
	free_still(&f, &s);
	stand_still(&f, &s, BACKEND_Q_MAIN);
	f.comm = comm_free(f.comm);
	others_get_their_turn(&f, BACKEND_Q_GATHER);
	go_on(&s);
	free_still(&f, &s);
	ncclfix_deinit(&f);
}

/* Behind a hung collective stands a wait: what hangs is stopped first, its memory is freed
 * when the wait has ended. */
Test(nccl, abort_answers_before_the_devices_rest)
{
	struct ncclfix f;
	struct still s;
	struct ncclfix_op ops[2];

	ncclfix_number("SHARDD_SIM_NCCL_HANG", NCCLFIX_WARM_MAIN + 1);
	ncclfix_init(&f, 2);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0);
	prepare_still(&f, &s);
	ncclfix_start_gather(&f, &ops[0]);
	cr_assert_eq(ncclfix_wait(&f, &ops[0]), 0);
	stop_queue(&f, &s, BACKEND_Q_MAIN);
	comm_abort(f.comm);
	ncclfix_start_gather(&f, &ops[1]);
	cr_assert_eq(ncclfix_wait(&f, &ops[1]), ENGINE_E_ABORTED);
	f.comm = comm_free(f.comm);
	others_get_their_turn(&f, BACKEND_Q_GATHER);
	go_on(&s);
	free_still(&f, &s);
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0, "%s", engine_why(f.e));
	ncclfix_check_gather(&f, DTYPE_FP32, 10);
	ncclfix_deinit(&f);
}

/* -- survivors -------------------------------------------------------------------------------- */

static void shrink_to_two(struct ncclfix *f)
{
	struct comm *parent = f->comm;
	struct comm_options o = ncclfix_options(f, 2, BACKEND_Q_MAIN);
	const bool gone[3] = { false, false, true };
	struct ncclfix_op op;

	ncclfix_start_gather(f, &op);
	cr_assert_eq(ncclfix_wait(f, &op), 0); /* it hangs */
	f->ready = false;
	cr_assert_eq(comm_shrink(parent, gone, &o), 0);
	ncclfix_start_gather(f, &op);
	cr_assert_eq(ncclfix_wait(f, &op), ENGINE_E_ABORTED);
	looprun_flag(&f->c.run, &f->ready, NCCLFIX_WAIT_S);
	cr_assert_eq(f->status, 0, "%s", engine_why(f->e));
	cr_assert_eq(f->comm->size, 2);
	comm_free(parent);
	cr_assert_eq(f->failed, 0);
	/* the third device has its part of the memory, but none in the sum */
	f->c.n = 2;
	check_all_reduce(f, DTYPE_FP32, 100, REDUCE_SUM, sum);
	f->c.n = 3;
}

Test(nccl, survivors_go_on_without_the_others)
{
	struct ncclfix f;

	ncclfix_number("SHARDD_SIM_NCCL_HANG", NCCLFIX_WARM_MAIN + 1);
	ncclfix_init(&f, 3);
	cr_assert_eq(ncclfix_make(&f, 3, BACKEND_Q_MAIN), 0);
	shrink_to_two(&f);
	ncclfix_deinit(&f);
}

Test(nccl, survivors_start_anew_where_nccl_cannot_shrink)
{
	struct ncclfix f;

	ncclfix_number("SHARDD_SIM_NCCL_HANG", NCCLFIX_WARM_MAIN + 1);
	setenv("SHARDD_SIM_NCCL", "22702", 1);
	ncclfix_init(&f, 3);
	cr_assert_eq(ncclfix_make(&f, 3, BACKEND_Q_MAIN), 0);
	shrink_to_two(&f);
	ncclfix_deinit(&f);
}

#else

Test(nccl, a_build_without_cuda_says_so)
{
	struct fault fault = FAULT_NULL;
	struct engine *e = NULL;

	cr_assert_eq(engine_nccl_new(NULL, &e, &fault), FAULT_UNAVAILABLE);
	cr_assert(strstr(fault.text, "without the CUDA Toolkit"), "%s", fault.text);
}

#endif
