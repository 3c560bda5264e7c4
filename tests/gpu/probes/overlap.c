/*
 * P5: how far does work of two processes overlap on one device?
 *
 * Each kind of work runs for a while alone, and then beside another one; what counts is
 * how much of its own rate each keeps. Two that take turns keep 1.0 together, two that
 * run beside each other 2.0 (less where both want the same thing, as the memory's
 * bandwidth). As a control the same two run in one process on two streams.
 *
 * Work is real work: a kernel that only looks at a clock would seem to run while it is
 * off the device.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "stage.h"

#define DEPTH  4 /* operations in the queue */
#define WINDOW 400u

enum { NARROW, WIDE, COPY_DEVICE, COPY_HOST, KINDS, NOTHING = KINDS };
static const char *const kind_names[KINDS] = { "narrow", "wide", "device_copy", "host_copy" };

struct work {
	struct actor *actor;
	unsigned kind;
	CUstream stream;
	CUevent event[DEPTH];
	CUfunction cast;
	struct cuda_cast args;
	unsigned blocks;
	CUdeviceptr dst, src;
	void *host;
	size_t bytes;
	uint64_t begin, end; /* of the window, ns */
	uint64_t done;       /* operations */
	double seconds;
};

static size_t work_bytes(const struct stage *s, unsigned kind)
{
	static const size_t bytes[KINDS] = { 32 * MIB, 1024 * MIB, 1024 * MIB, 64 * MIB };

	return s->small ? MIB / 4 : bytes[kind];
}

/* narrow: few blocks, as a communication kernel; wide: all of the device. */
static void prepare_cast(struct work *w)
{
	struct actor *a = w->actor;
	uint64_t n = w->bytes / sizeof(float);

	w->cast = kernel_get(a, CUDA_FN_CAST);
	w->blocks = w->kind == NARROW ? 4 : kernel_blocks(a, CUDA_FN_CAST, w->cast, n);
	w->args = (struct cuda_cast){
		.dst = w->dst, .src = w->src, .n = n, .dst_dtype = 2, .src_dtype = 1
	};
}

static void issue(struct work *w, unsigned i)
{
	struct actor *a = w->actor;
	CUresult r;

	if (w->kind == COPY_DEVICE)
		r = a->cuda->cuMemcpyDtoDAsync(w->dst, w->src, w->bytes, w->stream);
	else if (w->kind == COPY_HOST)
		r = a->cuda->cuMemcpyHtoDAsync(w->dst, w->host, w->bytes, w->stream);
	else
		r = kernel_launch(a, CUDA_FN_CAST, w->cast, w->blocks, &w->args, w->stream);
	actor_must(a, r, "issuing");
	actor_must(a, a->cuda->cuEventRecord(w->event[i], w->stream), "cuEventRecord");
}

static void prepare(struct work *w, struct actor *a, unsigned kind)
{
	*w = (struct work){ .actor = a, .kind = kind, .bytes = work_bytes(a->stage, kind) };
	w->stream = actor_stream(a);
	for (unsigned i = 0; i < DEPTH; i++)
		actor_must(a, a->cuda->cuEventCreate(&w->event[i], CU_EVENT_DISABLE_TIMING),
			   "cuEventCreate");
	actor_must(a, a->cuda->cuMemAlloc(&w->dst, w->bytes), "cuMemAlloc");
	if (kind == COPY_HOST) {
		actor_must(a, a->cuda->cuMemAllocHost(&w->host, w->bytes), "cuMemAllocHost");
		memset(w->host, 0x5a, w->bytes);
	} else {
		actor_must(a, a->cuda->cuMemAlloc(&w->src, w->bytes), "cuMemAlloc");
		actor_must(a, a->cuda->cuMemsetD8Async(w->src, 0x5a, w->bytes, w->stream),
			   "cuMemsetD8Async");
	}
	if (kind == NARROW || kind == WIDE)
		prepare_cast(w);
	for (unsigned i = 0; i < DEPTH; i++)
		issue(w, i);
	actor_must(a, a->cuda->cuStreamSynchronize(w->stream), "cuStreamSynchronize");
}

/* Keep the queue full from begin to end; count what is finished in that time. */
static void *work_main(void *arg)
{
	struct work *w = arg;
	struct actor *a = w->actor;
	uint64_t now;

	actor_must(a, a->cuda->cuCtxSetCurrent(a->context), "cuCtxSetCurrent");
	while (now_ns() < w->begin)
		;
	for (unsigned i = 0; i < DEPTH; i++)
		issue(w, i);
	w->done = 0;
	do {
		unsigned i = w->done % DEPTH;

		actor_must(a, a->cuda->cuEventSynchronize(w->event[i]), "cuEventSynchronize");
		now = now_ns();
		w->done++;
		issue(w, i);
	} while (now < w->end);
	w->seconds = (double)(now - w->begin) / 1e9;
	actor_must(a, a->cuda->cuStreamSynchronize(w->stream), "cuStreamSynchronize");
	return NULL;
}

/* value: the kinds of one or two works. Runs them whenever told to, from and until the
 * nanosecond that the message names; value[2]: 1 the first only, 2 the second, 3 both. */
static void worker(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	unsigned n = a->order->value[1] == NOTHING ? 1 : 2;
	pthread_t thread[2];
	struct work work[2];

	actor_cuda(a);
	for (unsigned i = 0; i < n; i++)
		prepare(&work[i], a, (unsigned)a->order->value[i]);
	actor_tell(a, &m);
	for (;;) {
		uint64_t who;

		actor_hear(a, &m);
		who = m.value[2];
		for (unsigned i = 0; i < n; i++) {
			work[i].begin = m.value[0];
			work[i].end = m.value[1];
			work[i].done = 0;
			work[i].seconds = 1;
			if (who & 1u << i && pthread_create(&thread[i], NULL, work_main, &work[i]))
				actor_fail(a, -1, "no thread");
		}
		for (unsigned i = 0; i < n; i++) {
			if (who & 1u << i)
				pthread_join(thread[i], NULL);
			m.value[i] = (uint64_t)((double)work[i].done / work[i].seconds * 1000);
		}
		actor_tell(a, &m);
	}
}

/* ---------------------------------------------------------------- director */

struct window {
	uint64_t begin, end;
};

static struct window window_next(const struct stage *s)
{
	uint64_t begin = now_ns() + 5000000;

	return (struct window){ begin, begin + UINT64_C(1000000) * (s->small ? 40 : WINDOW) };
}

static void order_run(struct stage *s, struct role *r, struct window w, uint64_t who)
{
	struct message m = MESSAGE_NULL;

	m.value[0] = w.begin;
	m.value[1] = w.end;
	m.value[2] = who;
	role_tell(s, r, &m);
}

/* Operations a second, of the two of one pair. */
struct rates {
	double first, second;
};

static struct rates hear_rates(struct stage *s, struct role *r)
{
	struct message m;

	role_must(s, r, 30000, &m);
	return (struct rates){ (double)m.value[0] / 1000, (double)m.value[1] / 1000 };
}

static struct role start(struct stage *s, const char *name, unsigned first, unsigned second)
{
	struct message order = MESSAGE_NULL;
	struct role r;

	order.value[0] = first;
	order.value[1] = second;
	r = role_start(s, name, worker, &order);
	role_must(s, &r, 60000, NULL);
	return r;
}

/* Both in one process, on two streams. */
static void pair_in_one(struct stage *s, unsigned first, unsigned second, struct rates *alone,
			struct rates *beside)
{
	struct role r = start(s, "the process", first, second);

	order_run(s, &r, window_next(s), 1);
	alone->first = hear_rates(s, &r).first;
	order_run(s, &r, window_next(s), 2);
	alone->second = hear_rates(s, &r).second;
	order_run(s, &r, window_next(s), 3);
	*beside = hear_rates(s, &r);
	role_end(s, &r);
}

static void pair_in_two(struct stage *s, unsigned first, unsigned second, struct rates *alone,
			struct rates *beside)
{
	struct role a = start(s, "the first process", first, NOTHING);
	struct role b = start(s, "the second process", second, NOTHING);
	struct window w;

	order_run(s, &a, window_next(s), 1);
	alone->first = hear_rates(s, &a).first;
	order_run(s, &b, window_next(s), 1);
	alone->second = hear_rates(s, &b).first;
	w = window_next(s);
	order_run(s, &a, w, 1);
	order_run(s, &b, w, 1);
	beside->first = hear_rates(s, &a).first;
	beside->second = hear_rates(s, &b).first;
	role_end(s, &a);
	role_end(s, &b);
}

/* Return: how much of their own rates both keep, together. */
static double pair(struct stage *s, const char *mode, bool one, unsigned first, unsigned second)
{
	struct rates alone, beside;
	char name[56];
	double a, b;

	stage_step(s, "%s: %s and %s", mode, kind_names[first], kind_names[second]);
	(one ? pair_in_one : pair_in_two)(s, first, second, &alone, &beside);
	a = beside.first / alone.first;
	b = beside.second / alone.second;
	snprintf(name, sizeof(name), "%s.%s+%s", mode, kind_names[first], kind_names[second]);
	stage_text(s, name,
		   "%.2f together: %.2f and %.2f of their own rates (alone %.0f/s, %.0f/s)", a + b,
		   a, b, alone.first, alone.second);
	return a + b;
}

static double mode(struct stage *s, const char *name, bool one)
{
	static const unsigned pairs[][2] = {
		{ NARROW, NARROW },      { NARROW, WIDE },      { WIDE, WIDE },
		{ NARROW, COPY_DEVICE }, { NARROW, COPY_HOST }, { WIDE, COPY_DEVICE },
		{ WIDE, COPY_HOST },
	};
	double narrow = 0;

	for (unsigned i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
		double sum = pair(s, name, one, pairs[i][0], pairs[i][1]);

		narrow = i == 0 ? sum : narrow;
	}
	return narrow;
}

static const char *verdict(double sum)
{
	return sum > 1.6 ? "run beside each other" : sum > 1.2 ? "overlap in part" : "take turns";
}

void probe_overlap(struct stage *s)
{
	double control, two, mps;
	char why[128];

	mps_avoid();
	control = mode(s, "one_process", true);
	stage_answer(s, "Two narrow kernels: in one process they %s (%.2f);", verdict(control),
		     control);
	two = mode(s, "two_processes", false);
	stage_answer(s, "in two processes without MPS they %s (%.2f);", verdict(two), two);
	stage_step(s, "starting MPS");
	if (mps_start(s, why, sizeof(why)) < 0) {
		stage_answer(s, "with MPS: not tried, %s.", why);
		return;
	}
	mps = mode(s, "mps", false);
	stage_answer(s, "with MPS they %s (%.2f).", verdict(mps), mps);
	stage_step(s, "stopping MPS");
	mps_stop(s);
}
