#include "coord/follow.h"

#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"

#define FOLLOW_ANSWER_MS 2000u
#define FOLLOW_PAUSE_US  1000000u

static void follow_pause(struct follow *f)
{
	f->again_us = clock_now_us() + FOLLOW_PAUSE_US;
}

/* The last of them that is about the key. Others begin with it. */
static void follow_on_events(struct coord_watch *w, const struct coord_event *events, size_t n,
			     int64_t revision)
{
	struct follow *f = CONTAINER_OF(w, struct follow, watch);

	(void)revision;
	for (size_t i = n; i--;)
		if (strcmp(events[i].kv.key, f->key) == 0) {
			f->changed(f, events[i].removed ? NULL : &events[i].kv);
			return;
		}
}

static void follow_on_ended(struct coord_watch *w, bool compacted, const char *why)
{
	(void)compacted;
	(void)why;
	follow_pause(CONTAINER_OF(w, struct follow, watch)); /* all is read again */
}

static void follow_on_read(struct coord_call *call, const struct coord_reply *r)
{
	static const struct coord_watch_ops ops = { .events = follow_on_events,
						    .ended = follow_on_ended };
	struct follow *f = CONTAINER_OF(call, struct follow, call);

	f->watch.ops = &ops;
	if (r->status != COORD_OK ||
	    coord_watch_begin(f->c, &f->watch, f->key, r->revision + 1) < 0)
		follow_pause(f);
	if (r->status == COORD_OK)
		f->changed(f, r->n ? &r->kvs[0] : NULL);
}

static void follow_read(struct follow *f)
{
	struct coord_txn t = { .read = f->key };

	f->call.done = follow_on_read;
	if (coord_txn(f->c, &f->call, &t, FOLLOW_ANSWER_MS) < 0)
		follow_pause(f);
}

void follow_begin(struct follow *f, struct coord *c, const char *key, follow_cb changed)
{
	CHECK(!f->c && strlen(key) < sizeof(f->key));
	f->c = c;
	f->changed = changed;
	snprintf(f->key, sizeof(f->key), "%s", key);
	f->again_us = 0;
}

void follow_tick(struct follow *f, uint64_t now_us)
{
	if (f->c && !f->call.impl && !f->watch.impl && now_us >= f->again_us)
		follow_read(f);
}

void follow_end(struct follow *f)
{
	if (!f->c)
		return;
	coord_cancel(&f->call);
	coord_watch_end(&f->watch);
	f->c = NULL;
}
