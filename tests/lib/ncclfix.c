#include "ncclfix.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "convert.h"
#include "core/check.h"

#define MOST 4096u /* elements that are compared */

void ncclfix_init(struct ncclfix *f, unsigned devices)
{
	struct fault fault = FAULT_NULL;

	*f = (struct ncclfix){ 0 };
	if (!cudafix_on_gpu())
		setenv("SHARDD_LIBNCCL", SHARDD_SIM_DIR "/libnccl.so.2", 1);
	cudafix_init(&f->c, devices);
	for (unsigned i = 0; i < devices; i++)
		cr_assert_eq(cudafix_ask(&f->c, f->c.all[i], NCCLFIX_MEM_BYTES, BACKEND_SHARE_FD,
					 &f->mem[i]),
			     0);
	cr_assert_eq(engine_nccl_new(&f->c.run.queue, &f->e, &fault), 0, "%s", fault.text);
}

void ncclfix_deinit(struct ncclfix *f)
{
	f->comm = comm_free(f->comm);
	f->e = engine_close(f->e);
	for (unsigned i = 0; i < f->c.n; i++)
		backend_free(f->c.all[i], f->mem[i]);
	cudafix_deinit(&f->c);
}

static void on_ready(void *userdata, struct comm *comm, int status)
{
	struct ncclfix *f = userdata;

	cr_assert_eq(!comm, status != 0);
	f->comm = comm;
	f->status = status;
	f->ready = true;
}

static void on_failed(void *userdata, struct comm *comm, const char *why)
{
	struct ncclfix *f = userdata;

	cr_assert_eq(comm, f->comm);
	snprintf(f->why, sizeof(f->why), "%s", why);
	f->failed++;
}

struct comm_options ncclfix_options(struct ncclfix *f, unsigned n, enum backend_queue queue)
{
	return (struct comm_options){ .name = "test",
				      .devices = f->c.all,
				      .n_devices = n,
				      .queue = queue,
				      .ready = on_ready,
				      .failed = on_failed,
				      .userdata = f };
}

int ncclfix_make(struct ncclfix *f, unsigned n, enum backend_queue queue)
{
	struct comm_options o = ncclfix_options(f, n, queue);

	f->ready = false;
	cr_assert_eq(engine_comm_new(f->e, &o), 0);
	cr_assert_not(f->ready, "ready was called inside");
	looprun_flag(&f->c.run, &f->ready, NCCLFIX_WAIT_S);
	return f->status;
}

void ncclfix_on_done(struct comm_op *op, int status)
{
	struct ncclfix_op *o = CONTAINER_OF(op, struct ncclfix_op, op);

	cr_assert_not(o->done, "completed twice");
	o->done = true;
	o->status = status;
}

int ncclfix_wait(struct ncclfix *f, struct ncclfix_op *o)
{
	looprun_flag(&f->c.run, &o->done, NCCLFIX_WAIT_S);
	return o->status;
}

/* -- device memory ------------------------------------------------------------ */

void *ncclfix_address(struct ncclfix *f, unsigned device, uint64_t at)
{
	return (char *)backend_addr(f->mem[device]) + at;
}

struct ncclfix_addresses ncclfix_all(struct ncclfix *f, uint64_t at, uint64_t step)
{
	struct ncclfix_addresses a = { { NULL } };

	for (unsigned i = 0; i < f->c.n; i++)
		a.all[i] = ncclfix_address(f, i, at + i * step);
	return a;
}

void ncclfix_copy(struct ncclfix *f, unsigned device, enum backend_queue queue, void *dst,
		  const void *src, uint64_t bytes)
{
	struct launch launch = { .kind = LAUNCH_COPY,
				 .n = bytes,
				 .copy = { .dst = dst, .src = src } };
	struct cudatask t = cudatask_new();

	t.task.launches = &launch;
	t.task.n_launches = 1;
	t.task.queue = queue;
	t.task.sync = true;
	cudatask_submit(f->c.all[device], &t);
	cr_assert_eq(cudatask_wait(&f->c, &t), 0);
}

/* -- elements of any type ------------------------------------------------------- */

static void element_set(enum dtype t, void *p, uint64_t i, float x)
{
	if (t == DTYPE_FP32)
		((float *)p)[i] = x;
	else
		((uint16_t *)p)[i] = t == DTYPE_BF16 ? bf16_from_f32(x) : fp16_from_f32(x);
}

static float element(enum dtype t, const void *p, uint64_t i)
{
	if (t == DTYPE_FP32)
		return ((const float *)p)[i];
	return t == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)p)[i])
			       : fp16_to_f32(((const uint16_t *)p)[i]);
}

float ncclfix_value(unsigned d, uint64_t i)
{
	return (float)((d * 5 + i * 3) % 16) - 4;
}

void ncclfix_fill(struct ncclfix *f, enum dtype t, uint64_t at, uint64_t count)
{
	static char host[MOST * 4];

	cr_assert_leq(count, MOST);
	for (unsigned d = 0; d < f->c.n; d++) {
		for (uint64_t i = 0; i < count; i++)
			element_set(t, host, i, ncclfix_value(d, i));
		ncclfix_copy(f, d, BACKEND_Q_MAIN, ncclfix_address(f, d, at), host,
			     count * dtype_size(t));
	}
}

void ncclfix_expect(struct ncclfix *f, enum dtype t, uint64_t at, uint64_t count,
		    ncclfix_expected fn, uint64_t of)
{
	static char host[MOST * 4];

	for (unsigned d = 0; d < f->c.n; d++) {
		ncclfix_copy(f, d, f->comm ? f->comm->queue : BACKEND_Q_MAIN, host,
			     ncclfix_address(f, d, at), count * dtype_size(t));
		for (uint64_t i = 0; i < count; i++)
			cr_assert_eq(element(t, host, i), fn(f->c.n, d, i, of),
				     "%s: device %u, element %lu: %g, not %g", dtype_name(t), d,
				     (unsigned long)i, (double)element(t, host, i),
				     (double)fn(f->c.n, d, i, of));
	}
}

static float gathered(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	(void)n;
	(void)device;
	return ncclfix_value((unsigned)(i / count), i % count);
}

static float gathered_in_place(unsigned n, unsigned device, uint64_t i, uint64_t count)
{
	(void)n;
	(void)device;
	return ncclfix_value((unsigned)(i / count), i);
}

void ncclfix_check_gather(struct ncclfix *f, enum dtype t, uint64_t count)
{
	uint64_t bytes = count * dtype_size(t);
	struct ncclfix_addresses send = ncclfix_all(f, NCCLFIX_SEND_AT, 0),
				 recv = ncclfix_all(f, NCCLFIX_RECV_AT, 0);
	struct ncclfix_op op = NCCLFIX_OP;

	ncclfix_fill(f, t, NCCLFIX_SEND_AT, count);
	comm_all_gather(f->comm, &op.op, NCCLFIX_CONST(send), recv.all, count, t);
	cr_assert_not(op.done, "completed inside the call");
	cr_assert_eq(ncclfix_wait(f, &op), 0);
	ncclfix_expect(f, t, NCCLFIX_RECV_AT, count * f->c.n, gathered, count);

	op = NCCLFIX_OP;
	ncclfix_fill(f, t, NCCLFIX_RECV_AT, count * f->c.n);
	send = ncclfix_all(f, NCCLFIX_RECV_AT, bytes);
	comm_all_gather(f->comm, &op.op, NCCLFIX_CONST(send), recv.all, count, t);
	cr_assert_eq(ncclfix_wait(f, &op), 0);
	ncclfix_expect(f, t, NCCLFIX_RECV_AT, count * f->c.n, gathered_in_place, count);
}

void ncclfix_number(const char *name, unsigned n)
{
	char text[16];

	snprintf(text, sizeof(text), "%u", n);
	setenv(name, text, 1);
}

void ncclfix_start_gather(struct ncclfix *f, struct ncclfix_op *op)
{
	struct ncclfix_addresses send = ncclfix_all(f, NCCLFIX_SEND_AT, 0),
				 recv = ncclfix_all(f, NCCLFIX_RECV_AT, 0);

	*op = NCCLFIX_OP;
	comm_all_gather(f->comm, &op->op, NCCLFIX_CONST(send), recv.all, 16, DTYPE_FP32);
}
