/*
 * Streams: a thread and a queue each.
 *
 * An item runs when those before it in its stream have run, and those of other streams
 * that it comes after by CUDA's rules (events, the legacy default stream). Nothing else
 * orders streams; and now and then a thread lingers before an item for a random time, so
 * that what relies on luck goes wrong. A synchronisation with the stream ends the lingering.
 *
 * When a context breaks, its items are thrown away, as a device does. When a process
 * exits, its threads just stop.
 */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim_impl.h"

#define LINGER_ONE_IN 6   /* items */
#define LINGER_US     150 /* at most */
#define STEP_US       400 /* at most, between two calls of a step */

struct objects stream_objects = { .what = "stream", .size = sizeof(struct stream) };

static _Thread_local struct stream *self;

/* Those whose threads run. Under sim_lock. */
static struct stream *running;

/* -- items ------------------------------------------------------------------------ */

struct item *item_new(item_fn run, const char *what, size_t payload)
{
	struct item *item = calloc(1, sizeof(*item) + payload);

	if (!item)
		sim_breach("out of memory");
	item->run = run;
	item->what = what;
	return item;
}

void item_after(struct item *item, struct stream *s, uint64_t seq)
{
	if (s->executed >= seq)
		return;
	item->deps = realloc(item->deps, (item->n_deps + 1) * sizeof(*item->deps));
	if (!item->deps)
		sim_breach("out of memory");
	item->deps[item->n_deps++] = (struct dep){ s, seq };
}

static void item_end(struct item *item)
{
	if (item->free)
		item->free(item);
	free(item->deps);
	free(item);
}

/* The legacy default stream comes after all blocking streams of its context, and they
 * after it. */
struct legacy_arg {
	struct stream *legacy;
	struct item *item;
};

static void after_blocking(void *object, void *arg)
{
	struct stream *s = object;
	struct legacy_arg *a = arg;

	if (s->ctx == a->legacy->ctx && s != a->legacy && !(s->flags & CU_STREAM_NON_BLOCKING))
		item_after(a->item, s, s->enqueued);
}

uint64_t stream_put(struct stream *s, struct item *item)
{
	struct stream *legacy = s->ctx->legacy;

	if (s->legacy)
		objects_each(&stream_objects, after_blocking, &(struct legacy_arg){ s, item });
	else if (legacy && !(s->flags & CU_STREAM_NON_BLOCKING))
		item_after(item, legacy, legacy->enqueued);
	*s->last = item;
	s->last = &item->next;
	pthread_cond_signal(&s->work);
	return ++s->enqueued;
}

/* -- the thread --------------------------------------------------------------------- */

struct stream *stream_self(void)
{
	return self;
}

bool stream_stopped(const struct stream *s)
{
	return s->killed || s->ctx->error != CUDA_SUCCESS;
}

static void sleep_us(struct stream *s, unsigned us)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	t.tv_nsec += (long)us * 1000;
	t.tv_sec += t.tv_nsec / 1000000000;
	t.tv_nsec %= 1000000000;
	pthread_cond_timedwait(&s->work, &sim_lock, &t);
}

static void linger(struct stream *s)
{
	uint64_t until = sim_clock_us() + sim_random(LINGER_US);
	uint64_t now;

	while (!s->hurry && !stream_stopped(s) && (now = sim_clock_us()) < until)
		sleep_us(s, (unsigned)(until - now) + 1);
}

static void wait_deps(struct stream *s, const struct item *item)
{
	for (unsigned i = 0; i < item->n_deps; i++) {
		struct stream *other = item->deps[i].stream;

		other->hurry++;
		pthread_cond_signal(&other->work);
		while (other->executed < item->deps[i].seq && !stream_stopped(s) && !other->killed)
			pthread_cond_wait(&other->progress, &sim_lock);
		other->hurry--;
	}
}

void stream_pin(struct stream *s, struct block *b)
{
	unsigned fixed = sizeof(s->pins) / sizeof(s->pins[0]);

	for (unsigned i = 0; i < s->n_pins && i < fixed; i++)
		if (s->pins[i] == b)
			return;
	b->refs++;
	if (s->n_pins < fixed) {
		s->pins[s->n_pins++] = b;
		return;
	}
	if (s->n_pins - fixed == s->max_more) {
		s->max_more = s->max_more ? 2 * s->max_more : 64;
		s->more_pins = realloc(s->more_pins, s->max_more * sizeof(struct block *));
		if (!s->more_pins)
			sim_breach("out of memory");
	}
	s->more_pins[s->n_pins++ - fixed] = b;
}

void stream_unpin(struct stream *s)
{
	unsigned fixed = sizeof(s->pins) / sizeof(s->pins[0]);

	while (s->n_pins) {
		unsigned i = --s->n_pins;

		block_unref(i < fixed ? s->pins[i] : s->more_pins[i - fixed]);
	}
}

/* Of a function's name without its version. */
static int name_length(const char *name)
{
	const char *version = strstr(name, "_v");

	return (int)(version ? (size_t)(version - name) : strlen(name));
}

void stream_fault(CUresult error, const char *fmt, ...)
{
	char text[256];
	va_list args;

	va_start(args, fmt);
	vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	sim_note("%.*s on device %d: %s", self ? name_length(self->current) : 8,
		 self ? self->current : "a thread", self ? self->ctx->device : 0, text);
	if (self)
		sim_ctx_break(self->ctx, error);
}

static void execute(struct stream *s, struct item *item)
{
	if (!s->hurry && sim_random(LINGER_ONE_IN) == 0)
		linger(s);
	wait_deps(s, item);
	s->current = item->what;
	pthread_mutex_unlock(&sim_lock);
	if (item->always || !stream_stopped(s))
		item->run(s, item);
	pthread_mutex_lock(&sim_lock);
	stream_unpin(s);
}

static void unlink_running(struct stream *s)
{
	struct stream **at = &running;

	while (*at != s)
		at = &(*at)->next;
	*at = s->next;
}

static void *run(void *arg)
{
	struct stream *s = arg;

	self = s;
	pthread_mutex_lock(&sim_lock);
	while (s->first || !s->ending) {
		struct item *item = s->first;

		if (!item) {
			pthread_cond_wait(&s->work, &sim_lock);
			continue;
		}
		execute(s, item);
		s->first = item->next;
		if (!s->first)
			s->last = &s->first;
		s->executed++;
		item_end(item);
		pthread_cond_broadcast(&s->progress);
	}
	free(s->more_pins);
	s->more_pins = NULL;
	unlink_running(s);
	pthread_mutex_unlock(&sim_lock);
	return NULL;
}

/* -- for the API -------------------------------------------------------------------- */

static int start(struct stream *s)
{
	pthread_attr_t attr;
	sigset_t all, before;
	int err;

	sigfillset(&all);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 1 << 20);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	err = pthread_create(&s->thread, &attr, run, s);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	if (!err)
		pthread_setname_np(s->thread, "sim-stream");
	return err;
}

CUresult stream_new(struct ctx *c, unsigned flags, int priority, bool legacy, struct stream **ret)
{
	struct stream *s = objects_new(&stream_objects);
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&s->work, &attr);
	pthread_cond_init(&s->progress, NULL);
	pthread_condattr_destroy(&attr);
	s->ctx = c;
	s->flags = flags;
	s->priority = priority;
	s->legacy = legacy;
	s->last = &s->first;
	s->next = running;
	running = s;
	if (start(s)) {
		unlink_running(s);
		s->live = 0;
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	*ret = s;
	return CUDA_SUCCESS;
}

static struct stream *legacy_stream(struct ctx *c)
{
	if (c && !c->legacy && stream_new(c, 0, 0, true, &c->legacy))
		sim_breach("cannot start a thread");
	return c ? c->legacy : NULL;
}

struct stream *stream_get(CUstream h, struct ctx *c, const char *function)
{
	if (!h || h == CU_STREAM_LEGACY)
		return legacy_stream(c);
	return h == CU_STREAM_PER_THREAD ? NULL : objects_get(&stream_objects, h, function);
}

void stream_wait(struct stream *s, uint64_t seq)
{
	s->hurry++;
	pthread_cond_signal(&s->work);
	while (s->executed < seq && !stream_stopped(s))
		pthread_cond_wait(&s->progress, &sim_lock);
	s->hurry--;
}

void stream_set_bell(struct stream *s, _Atomic uint32_t *bell)
{
	pthread_mutex_lock(&sim_lock);
	s->bell = bell;
	pthread_mutex_unlock(&sim_lock);
}

static void wake(struct stream *s, const struct ctx *c)
{
	pthread_cond_broadcast(&s->progress);
	if (s->ctx != c)
		return;
	pthread_cond_broadcast(&s->work);
	if (s->bell) { /* asleep in a wait for a value */
		atomic_fetch_add(s->bell, 1);
		sim_futex_wake(s->bell, UINT32_MAX);
	}
}

void stream_wake_all(struct ctx *c)
{
	for (struct stream *s = running; s; s = s->next)
		wake(s, c);
}

static void end_one(void *object, void *arg)
{
	struct stream *s = object;

	if (s->ctx == arg)
		s->live = 0;
}

void stream_kill_all(struct ctx *c)
{
	/* also those that were destroyed while they wait for a value that never comes */
	for (struct stream *s = running; s; s = s->next)
		if (s->ctx == c)
			s->killed = s->ending = true;
	stream_wake_all(c);
	objects_each(&stream_objects, end_one, c);
	c->legacy = NULL;
}

/* -- steps of the NCCL simulator ------------------------------------------------------- */

struct step {
	int (*fn)(void *arg);
	void *arg;
};

static void step_run(struct stream *s, struct item *item)
{
	struct step *step = (void *)item->payload;

	while (!step->fn(step->arg)) {
		if (s->killed)
			return;
		pthread_mutex_lock(&sim_lock);
		if (!s->kicked)
			sleep_us(s, STEP_US);
		s->kicked = false;
		pthread_mutex_unlock(&sim_lock);
	}
}

CUresult sim_stream_enqueue(CUstream stream, int (*fn)(void *arg), void *arg)
{
	struct ctx *c = sim_current();
	struct item *item = item_new(step_run, "a collective", sizeof(struct step));
	struct stream *s;

	*(struct step *)item->payload = (struct step){ fn, arg };
	item->always = true;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, __func__);
	if (s)
		stream_put(s, item);
	pthread_mutex_unlock(&sim_lock);
	if (!s)
		free(item);
	return s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static void kick(void *object, void *arg)
{
	struct stream *s = object;

	(void)arg;
	s->kicked = true;
	pthread_cond_signal(&s->work);
}

void sim_kick(void)
{
	pthread_mutex_lock(&sim_lock);
	objects_each(&stream_objects, kick, NULL);
	pthread_mutex_unlock(&sim_lock);
}

CUresult sim_step_error(void)
{
	return self ? (CUresult)self->ctx->error : CUDA_SUCCESS;
}

void sim_step_fail(CUresult error)
{
	if (self)
		sim_ctx_break(self->ctx, error);
}

int sim_stream_device(CUstream stream)
{
	struct stream *s;

	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, sim_current(), __func__);
	pthread_mutex_unlock(&sim_lock);
	return s ? s->ctx->device : -1;
}

void sim_stream_count(CUstream stream, uint64_t *ret_enqueued, uint64_t *ret_executed)
{
	struct stream *s;

	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, sim_current(), __func__);
	*ret_enqueued = s ? s->enqueued : 0;
	*ret_executed = s ? s->executed : 0;
	pthread_mutex_unlock(&sim_lock);
}

bool sim_stream_waits(CUstream stream)
{
	struct stream *s;
	bool waits;

	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, sim_current(), __func__);
	waits = s && s->bell;
	pthread_mutex_unlock(&sim_lock);
	return waits;
}
