#include "reconnect.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"
#include "client_error.h"
#include "completion.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "thread.h"

/* Between two tries: a part of the time since the first one, so that it lengthens the outage by no
 * more than that part. */
#define RECONNECT_PAUSE_PART   8
#define RECONNECT_MIN_PAUSE_MS 2
#define RECONNECT_MAX_PAUSE_MS 100
#define RECONNECT_TELL_MS      1000 /* between two events of a state that lasts */

/* One reconnection, of the thread. */
struct reconnect_try {
	struct shardd_client *c;
	uint64_t began_us, told_us;
	uint32_t attempts;
	struct shardd_error last; /* of the last attempt */
};

void reconnect_init(struct reconnect *r)
{
	pthread_condattr_t attr;

	pthread_mutex_init(&r->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&r->changed, &attr);
	pthread_condattr_destroy(&attr);
}

void reconnect_stop(struct shardd_client *c)
{
	struct reconnect *r = &c->reconnect;

	pthread_mutex_lock(&r->lock);
	atomic_store(&r->stop, true);
	pthread_cond_broadcast(&r->changed);
	pthread_mutex_unlock(&r->lock);
	if (r->made)
		pthread_join(r->thread, NULL);
	r->made = false;
}

void reconnect_deinit(struct shardd_client *c)
{
	struct reconnect *r = &c->reconnect;

	while (r->former) {
		struct link *l = r->former;

		r->former = l->next;
		link_free(l);
	}
	free(STEAL_PTR(r->name));
	pthread_cond_destroy(&r->changed);
	pthread_mutex_destroy(&r->lock);
}

/* ------------------------------------------------------------------- former links */

void reconnect_collect(struct shardd_client *c)
{
	struct link **at = &c->reconnect.former;
	struct link *gone = NULL;

	pthread_mutex_lock(&c->reconnect.lock);
	while (*at) {
		struct link *l = *at;

		if (l->users || tickets_uses(&c->tickets, l)) {
			at = &l->next;
			continue;
		}
		*at = l->next;
		l->next = gone;
		gone = l;
	}
	pthread_mutex_unlock(&c->reconnect.lock);
	while (gone) {
		struct link *l = gone;

		gone = l->next;
		link_free(l);
	}
}

/* ------------------------------------------------------------------- the thread */

static uint32_t reconnect_ms_since(uint64_t began_us)
{
	return (uint32_t)((clock_now_us() - began_us) / 1000);
}

static void reconnect_tell(struct reconnect_try *t, enum shardd_connection_state state,
			   const char *text)
{
	const struct reconnect *r = &t->c->reconnect;
	struct shardd_connection_event event = {
		.size = sizeof(event),
		.state = state,
		.attempt = t->attempts,
		.elapsed_ms = reconnect_ms_since(t->began_us),
		.text = text,
	};

	t->told_us = clock_now_us();
	if (r->call)
		r->call(r->data, &event);
}

/* Return: false: the client is being closed. */
static bool reconnect_pause(struct shardd_client *c, unsigned ms)
{
	struct reconnect *r = &c->reconnect;
	struct timespec at;
	bool goes_on;

	clock_gettime(CLOCK_MONOTONIC, &at);
	at.tv_nsec += (long)ms * 1000000;
	at.tv_sec += at.tv_nsec / 1000000000;
	at.tv_nsec %= 1000000000;
	pthread_mutex_lock(&r->lock);
	while (!atomic_load(&r->stop) &&
	       pthread_cond_timedwait(&r->changed, &r->lock, &at) != ETIMEDOUT)
		;
	goes_on = !atomic_load(&r->stop);
	pthread_mutex_unlock(&r->lock);
	return goes_on;
}

/* Another run of the daemon is there, and has nothing of ours. */
static int reconnect_is_other(struct shardd_client *c, struct shardd_error *err)
{
	uint8_t expected[EXPECT_BYTES];
	_cleanup_(freep) char *job = NULL;
	bool any = false;

	pthread_mutex_lock(&c->reconnect.lock);
	job = c->job ? strdup(c->job) : NULL;
	pthread_mutex_unlock(&c->reconnect.lock);
	if (job && expect_find(c->socket, job, expected, &any, NULL) == 0 && any)
		return error_set(err, SHARDD_DATA_LOSS, NULL,
				 "the daemon at %s was restarted without its state: the state of "
				 "job '%.64s' is gone; restore a checkpoint, or start the whole "
				 "run again from step 0. If other nodes have copies of it "
				 "(replicas: 1), start this process with SHARDD_INSTANCE=any",
				 c->socket, job);
	return error_set(err, SHARDD_UNAVAILABLE, NULL,
			 "the daemon at %s was restarted without its state: connect again",
			 c->socket);
}

/* One attempt. Return: 0, 1 (try again), or a negative code: give up. */
static int reconnect_attempt(struct reconnect_try *t, struct link **ret)
{
	struct shardd_client *c = t->c;
	struct link_plan plan = { c->socket, c->reconnect.name, true, &c->reconnect.stop };
	uint32_t past = reconnect_ms_since(t->began_us);
	uint32_t left = past < c->reconnect.ms ? c->reconnect.ms - past : 1;
	struct link *l = NULL;
	int r;

	t->attempts++;
	r = link_open(&plan, 0, left, &l, &t->last);
	if (r == -SHARDD_UNIMPLEMENTED)
		return r;
	if (r < 0)
		return 1;
	if (memcmp(l->instance, c->daemon.instance, EXPECT_BYTES) != 0) {
		link_free(l);
		return reconnect_is_other(c, &t->last);
	}
	*ret = l;
	return 0;
}

static int reconnect_late(struct reconnect_try *t)
{
	struct shardd_error why = t->last;

	return error_set(&t->last, SHARDD_UNAVAILABLE, NULL,
			 "the daemon at %s ended and did not come back within %u ms (%u attempts, "
			 "the last: %.200s): what was committed is safe if its state was kept; "
			 "connect again",
			 t->c->socket, t->c->reconnect.ms, t->attempts, why.text);
}

static unsigned reconnect_pause_ms(uint32_t elapsed_ms)
{
	uint32_t part = elapsed_ms / RECONNECT_PAUSE_PART;

	if (part < RECONNECT_MIN_PAUSE_MS)
		return RECONNECT_MIN_PAUSE_MS;
	return part < RECONNECT_MAX_PAUSE_MS ? part : RECONNECT_MAX_PAUSE_MS;
}

/* Return: 0, or a negative code: given up. */
static int reconnect_try_all(struct reconnect_try *t, struct link **ret)
{
	int r;

	while ((r = reconnect_attempt(t, ret)) > 0) {
		uint32_t elapsed = reconnect_ms_since(t->began_us);

		if (elapsed >= t->c->reconnect.ms)
			return reconnect_late(t);
		if (t->attempts == 1 || clock_now_us() - t->told_us >= RECONNECT_TELL_MS * 1000)
			reconnect_tell(t, SHARDD_CONNECTION_RETRYING, t->last.text);
		if (!reconnect_pause(t->c, reconnect_pause_ms(elapsed)))
			return error_set(&t->last, SHARDD_UNAVAILABLE, NULL,
					 "the client is being closed");
	}
	return r;
}

/* Completions are taken by a thread of the new link, too, if they were of the former one. */
static void reconnect_install(struct reconnect_try *t, struct link *l)
{
	struct shardd_client *c = t->c;
	struct link *former;

	pthread_mutex_lock(&c->order);
	pthread_mutex_lock(&c->reconnect.lock);
	former = c->link;
	l->number = former->number + 1;
	former->next = c->reconnect.former;
	c->reconnect.former = former;
	c->reconnect.took_ms = reconnect_ms_since(t->began_us);
	c->link = l;
	atomic_fetch_add(&c->reconnect.count, 1);
	pthread_mutex_unlock(&c->reconnect.lock);
	if (c->joined)
		c->ended_epoch = c->epoch;
	c->joined = false;
	(void)client_take_link(c, l, NULL); /* without memory the version stays */
	map_reconnected(&c->map, &l->channel);
	reconnect_collect(c);
	pthread_mutex_unlock(&c->order);
	completion_follow(c);
}

static void *reconnect_thread(void *arg)
{
	struct shardd_client *c = arg;
	struct reconnect *r = &c->reconnect;
	struct reconnect_try t = { .c = c, .began_us = clock_now_us() };
	struct link *l = NULL;
	int rc;

	reconnect_tell(&t, SHARDD_CONNECTION_LOST, "the connection to the daemon has broken");
	rc = reconnect_try_all(&t, &l);
	if (rc == 0)
		reconnect_install(&t, l);
	reconnect_tell(&t, rc == 0 ? SHARDD_CONNECTION_BACK : SHARDD_CONNECTION_GIVEN_UP,
		       rc == 0 ? "the daemon is back, with its state" : t.last.text);
	pthread_mutex_lock(&r->lock);
	r->failed = t.last;
	r->state = rc == 0 ? RECONNECT_IDLE : RECONNECT_GAVE_UP;
	pthread_cond_broadcast(&r->changed);
	pthread_mutex_unlock(&r->lock);
	completion_tell(c);
	return NULL;
}

/* ------------------------------------------------------------------- waiting for it */

bool reconnect_is_on(const struct shardd_client *c)
{
	return c->reconnect.ms && atomic_load(&c->reconnect.outlives) && !c->debug &&
	       c->handover != SHARDD_HANDOVER_IPC;
}

/* Lock held. */
static void reconnect_begin(struct shardd_client *c)
{
	struct reconnect *r = &c->reconnect;
	int e;

	if (r->made) /* it has ended */
		pthread_join(r->thread, NULL);
	e = thread_start(&r->thread, reconnect_thread, c);
	r->made = e == 0;
	r->state = e ? RECONNECT_GAVE_UP : RECONNECT_RUNS;
	if (e)
		error_os(&r->failed, SHARDD_RESOURCE_EXHAUSTED, e,
			 "the connection to the daemon has broken, and the thread that connects "
			 "again cannot start");
}

bool reconnect_wait(struct shardd_client *c, uint32_t link, int timeout_ms)
{
	struct reconnect *r = &c->reconnect;
	struct timespec at;
	bool ended, late = false;

	clock_gettime(CLOCK_MONOTONIC, &at);
	if (timeout_ms > 0) {
		at.tv_sec += timeout_ms / 1000;
		at.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
		at.tv_sec += at.tv_nsec / 1000000000;
		at.tv_nsec %= 1000000000;
	}
	pthread_mutex_lock(&r->lock);
	for (;;) {
		if (r->state == RECONNECT_IDLE && c->link->number == link)
			reconnect_begin(c);
		ended = r->state != RECONNECT_RUNS;
		if (ended || late)
			break;
		if (timeout_ms < 0)
			pthread_cond_wait(&r->changed, &r->lock);
		else
			late = pthread_cond_timedwait(&r->changed, &r->lock, &at) == ETIMEDOUT;
	}
	pthread_mutex_unlock(&r->lock);
	return ended;
}

int reconnect_outcome(struct shardd_client *c, uint32_t link, uint64_t epoch,
		      struct shardd_error *err)
{
	struct reconnect *r = &c->reconnect;
	struct shardd_error failed;
	bool back;
	uint32_t ms;

	pthread_mutex_lock(&r->lock);
	back = c->link->number != link;
	ms = r->took_ms;
	failed = r->failed;
	pthread_mutex_unlock(&r->lock);
	if (!back) {
		if (err)
			*err = failed;
		return -failed.code;
	}
	if (!epoch)
		return error_set(err, SHARDD_ABORTED, NULL,
				 "the daemon at %s was restarted; this process is connected to it "
				 "again after %u ms: repeat the call",
				 c->socket, ms);
	return error_set(err, SHARDD_ABORTED, NULL,
			 "the daemon at %s was restarted; this process is connected to it again "
			 "after %u ms, and epoch %llu has ended: join again and continue from the "
			 "step that Join returns; gradients of the step in progress are dropped",
			 c->socket, ms, (unsigned long long)epoch);
}
