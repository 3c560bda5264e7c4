/* P8: what a launch costs from another thread, and what memory costs to make. */
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stage.h"

#define LAUNCHES 1000u
#define SMALL    50u

/* A thread that issues, woken by a futex: as a daemon's device thread is. */
struct issuer {
	struct actor *actor;
	CUfunction scale;
	struct cuda_scale args;
	_Atomic unsigned asked; /* the futex: launches asked for */
	_Atomic unsigned issued;
	_Atomic bool stop;
};

static void futex_wait(_Atomic unsigned *word, unsigned seen)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic unsigned *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *issuer_main(void *arg)
{
	struct issuer *w = arg;
	unsigned done = 0, asked;

	actor_must(w->actor, w->actor->cuda->cuCtxSetCurrent(w->actor->context), "cuCtxSetCurrent");
	while (!atomic_load(&w->stop)) {
		asked = atomic_load(&w->asked);
		if (asked == done)
			futex_wait(&w->asked, asked);
		for (; done != asked; done++) {
			actor_must(w->actor,
				   kernel_launch(w->actor, CUDA_FN_SCALE, w->scale, 1, &w->args,
						 w->actor->stream),
				   "cuLaunchKernel");
			atomic_fetch_add(&w->issued, 1);
		}
	}
	return NULL;
}

static double since_us(uint64_t begin)
{
	return (double)(now_ns() - begin) / 1e3;
}

static void await_issued(struct issuer *w, unsigned n)
{
	while (atomic_load(&w->issued) < n)
		;
}

static void ask(struct issuer *w)
{
	atomic_fetch_add(&w->asked, 1);
	futex_wake(&w->asked);
}

/* One after the other, each from a sleeping thread: until issued, and until executed. */
static void single(struct issuer *w, unsigned n, double *issued, double *executed)
{
	for (unsigned i = 0; i < n; i++) {
		uint64_t begin;

		pause_ms(1); /* it sleeps again */
		begin = now_ns();
		ask(w);
		await_issued(w, i + 1);
		issued[i] = since_us(begin);
		actor_must(w->actor, stream_spin(w->actor, w->actor->stream, 5000), "the launch");
		executed[i] = since_us(begin);
	}
}

/* value: issued median, p99, executed median, p99, each launch of a full queue;
 * nanoseconds. */
static void launcher(struct actor *a)
{
	struct issuer w = { .actor = a };
	CUdeviceptr x;
	unsigned n = a->stage->small ? SMALL : LAUNCHES;
	static double issued[LAUNCHES], executed[LAUNCHES];
	struct message m = MESSAGE_NULL;
	pthread_t thread;
	uint64_t begin;

	actor_cuda(a);
	actor_must(a, a->cuda->cuMemAlloc(&x, 4096), "cuMemAlloc");
	w.args = (struct cuda_scale){ .x = x, .n = 1024, .factor = 1 };
	actor_must(a, a->cuda->cuMemsetD8Async(x, 0, 4096, a->stream), "memset");
	w.scale = kernel_get(a, CUDA_FN_SCALE);
	actor_must(a, kernel_launch(a, CUDA_FN_SCALE, w.scale, 1, &w.args, a->stream), "launch");
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "cuStreamSynchronize");
	if (pthread_create(&thread, NULL, issuer_main, &w))
		actor_fail(a, -1, "no thread");
	single(&w, n, issued, executed);
	begin = now_ns();
	for (unsigned i = 0; i < n; i++)
		ask(&w);
	await_issued(&w, 2 * n);
	m.value[4] = (now_ns() - begin) / n;
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "cuStreamSynchronize");
	m.value[5] = (now_ns() - begin) / n;
	atomic_store(&w.stop, true);
	ask(&w);
	pthread_join(thread, NULL);
	m.value[0] = (uint64_t)(stage_quantile(issued, n, 0.5) * 1e3);
	m.value[1] = (uint64_t)(stage_quantile(issued, n, 0.99) * 1e3);
	m.value[2] = (uint64_t)(stage_quantile(executed, n, 0.5) * 1e3);
	m.value[3] = (uint64_t)(stage_quantile(executed, n, 0.99) * 1e3);
	actor_tell(a, &m);
}

static void launches(struct stage *s)
{
	static const char *const names[] = { "wake_and_issue_median",     "wake_and_issue_p99",
					     "wake_issue_execute_median", "wake_issue_execute_p99",
					     "issue_each_of_many",        "execute_each_of_many" };
	struct role r = role_start(s, "the launcher", launcher, NULL);
	struct message m;

	stage_step(s, "launching");
	role_must(s, &r, 60000, &m);
	for (unsigned i = 0; i < 6; i++)
		stage_number(s, names[i], "us", (double)m.value[i] / 1e3);
	role_end(s, &r);
	stage_answer(s,
		     "A launch by a thread woken for it is issued after %.1f us (median) and "
		     "executed after %.1f us; of many, each takes %.2f us to issue.",
		     (double)m.value[0] / 1e3, (double)m.value[2] / 1e3, (double)m.value[4] / 1e3);
}

/* ------------------------------------------------------------------ memory */

static CUmemAllocationProp kind_of(struct actor *a)
{
	return (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = a->device },
	};
}

/* value[0]: bytes. Tells create, map, zero, export in nanoseconds, and the descriptor; then
 * what giving it back takes. */
static void maker(struct actor *a)
{
	struct vmm v = { .bytes = 0 };
	CUmemAllocationProp kind;
	struct message m = MESSAGE_NULL;
	uint64_t begin;

	actor_cuda(a);
	kind = kind_of(a);
	v.bytes = vmm_round(a, a->order->value[0]);
	begin = now_ns();
	actor_must(a, a->cuda->cuMemCreate(&v.handle, v.bytes, &kind, 0), "cuMemCreate");
	m.value[0] = now_ns() - begin;
	begin = now_ns();
	vmm_map(a, &v, true);
	m.value[1] = now_ns() - begin;
	begin = now_ns();
	actor_must(a, a->cuda->cuMemsetD8Async(v.addr, 0, v.bytes, a->stream), "memset");
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "memset");
	m.value[2] = now_ns() - begin;
	begin = now_ns();
	m.fd = vmm_export(a, &v);
	m.value[3] = now_ns() - begin;
	actor_tell(a, &m);
	actor_hear(a, &m);
	begin = now_ns();
	vmm_free(a, &v);
	actor_done(a, now_ns() - begin, 0);
}

static void importer(struct actor *a)
{
	uint64_t begin, taken;
	struct vmm v;

	actor_cuda(a);
	begin = now_ns();
	actor_must(a, vmm_import(a, a->order->fd, a->order->value[0], true, &v), "importing");
	taken = now_ns() - begin;
	begin = now_ns();
	vmm_free(a, &v);
	actor_done(a, taken, now_ns() - begin);
}

static void number(struct stage *s, const char *what, uint64_t bytes, uint64_t ns)
{
	char name[56];

	snprintf(name, sizeof(name), "%s_%llu_MiB", what, (unsigned long long)(bytes / MIB));
	stage_number(s, name, "us", (double)ns / 1e3);
}

/* Return: microseconds of create and map. */
static double memory(struct stage *s, uint64_t bytes)
{
	static const char *const names[] = { "create", "reserve_map_access", "zero", "export" };
	struct message order = MESSAGE_NULL, made, m;
	struct role make, import;

	stage_step(s, "making %llu MiB", (unsigned long long)(bytes / MIB));
	order.value[0] = bytes;
	make = role_start(s, "the maker", maker, &order);
	role_must(s, &make, 60000, &made);
	for (unsigned i = 0; i < 4; i++)
		number(s, names[i], bytes, made.value[i]);
	order.fd = made.fd;
	import = role_start(s, "the importer", importer, &order);
	role_must(s, &import, 60000, &m);
	number(s, "import_map_access", bytes, m.value[0]);
	number(s, "unmap_import", bytes, m.value[1]);
	role_end(s, &import);
	close(made.fd);
	role_tell(s, &make, NULL);
	role_must(s, &make, 60000, &m);
	number(s, "unmap_release", bytes, m.value[0]);
	role_end(s, &make);
	return (double)(made.value[0] + made.value[1]) / 1e3;
}

void probe_cost(struct stage *s)
{
	static const uint64_t sizes[] = { 2 * MIB, 64 * MIB, 1024 * MIB };

	launches(s);
	for (unsigned i = 0; i < (s->small ? 2 : 3); i++) {
		double us = memory(s, sizes[i]);

		stage_answer(s, "%llu MiB: %.0f us.", (unsigned long long)(sizes[i] / MIB), us);
	}
}
