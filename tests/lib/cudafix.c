#include "cudafix.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"

#define WAIT_S 60u

bool cudafix_on_gpu(void)
{
	const char *backend = getenv("SHARDD_TEST_BACKEND"), *library = getenv("SHARDD_LIBCUDA");

	return backend && !strcmp(backend, "cuda") && !(library && *library);
}

void cudafix_env(void)
{
	if (cudafix_on_gpu())
		return;
	setenv("SHARDD_LIBCUDA", SHARDD_SIM_DIR "/libcuda.so.1", 1);
	/* else pages of the programs that other tests run would count as memory of ours */
	setenv("SHARDD_SIM_MEMORY", "268435456", 0);
}

static void on_news(void *userdata, enum backend_news news)
{
	struct cudafix *f = userdata;

	if (news == BACKEND_NEWS_MEMORY)
		f->memory++;
	else
		f->lost++;
}

int cudafix_try(struct cudafix *f, const struct backend_cuda_options *o, struct fault *fault)
{
	int r;

	*f = (struct cudafix){ 0 };
	looprun_init(&f->run);
	r = backend_cuda_new(&f->run.queue, o, f->all, CUDAFIX_DEVICES, &f->n, fault);
	f->b = f->all[0];
	for (unsigned i = 0; i < f->n; i++)
		backend_on_news(f->all[i], on_news, f);
	return r;
}

void cudafix_init(struct cudafix *f, unsigned devices)
{
	const struct backend_cuda_options none = { 0 };
	struct fault fault = FAULT_NULL;
	char text[16];

	cudafix_env();
	snprintf(text, sizeof(text), "%u", devices);
	setenv("SHARDD_SIM_DEVICES", text, 1);
	cr_assert_eq(cudafix_try(f, &none, &fault), 0, "%s", fault.text);
	cr_assert_eq(f->n, devices);
}

void cudafix_deinit(struct cudafix *f)
{
	for (unsigned i = 0; i < f->n; i++)
		f->all[i] = backend_close(f->all[i]);
	looprun_deinit(&f->run);
}

struct asking {
	struct backend *b;
	uint64_t bytes;
	enum backend_share share;
	struct backend_mem **ret;
	int r;
};

static bool asked(void *arg)
{
	struct asking *a = arg;

	a->r = backend_alloc(a->b, a->bytes, a->share, a->ret);
	return a->r != BACKEND_E_LATER;
}

int cudafix_ask(struct cudafix *f, struct backend *b, uint64_t bytes, enum backend_share share,
		struct backend_mem **ret)
{
	struct asking a = { b, bytes, share, ret, 0 };

	looprun_until(&f->run, asked, &a, WAIT_S);
	return a.r;
}

struct backend_mem *cudafix_alloc(struct cudafix *f, uint64_t bytes)
{
	struct backend_mem *mem = NULL;

	cr_assert_eq(cudafix_ask(f, f->b, bytes, BACKEND_SHARE_FD, &mem), 0);
	return mem;
}

static void on_issued(struct backend_task *task, int status)
{
	struct cudatask *t = CONTAINER_OF(task, struct cudatask, task);

	cr_assert_eq(status, 0);
	cr_assert_eq(t->done, 0);
	t->issued++;
}

static void on_done(struct backend_task *task, int status)
{
	struct cudatask *t = CONTAINER_OF(task, struct cudatask, task);

	t->done++;
	t->status = status;
}

struct cudatask cudatask_new(void)
{
	return (struct cudatask){ .task = { .issued = on_issued, .done = on_done } };
}

void cudatask_submit(struct backend *b, struct cudatask *t)
{
	backend_submit(b, &t->task);
	cr_assert_eq(t->done, 0, "the callback ran inside submit");
}

static bool is_done(void *arg)
{
	return ((struct cudatask *)arg)->done > 0;
}

int cudatask_wait(struct cudafix *f, struct cudatask *t)
{
	looprun_until(&f->run, is_done, t, WAIT_S);
	cr_assert_eq(t->done, 1);
	cr_assert_leq(t->issued, 1);
	if (t->status == 0)
		cr_assert_eq(t->issued, t->task.issued ? 1 : 0);
	return t->status;
}

int cudafix_run(struct cudafix *f, struct backend *b, struct launch *launches, unsigned n)
{
	struct cudatask t = cudatask_new();

	t.task.launches = launches;
	t.task.n_launches = n;
	t.task.sync = true;
	cudatask_submit(b, &t);
	return cudatask_wait(f, &t);
}

void cudafix_copy(struct cudafix *f, void *dst, const void *src, uint64_t bytes)
{
	struct launch k = { .kind = LAUNCH_COPY, .n = bytes, .copy = { dst, src } };

	cr_assert_eq(cudafix_run(f, f->b, &k, 1), 0);
}
