#include "coord/decide.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"

#define DECIDE_PAUSE_US  100000u
#define DECIDE_ANSWER_MS 2000u

static void decide_free(struct decide *d)
{
	free(d->key);
	free(d->value);
	free(d->leader);
	free(d->also);
	d->key = d->leader = d->also = NULL;
	d->value = NULL;
	d->state = DECIDE_IDLE;
}

static void decide_end(struct decide *d, enum decide_outcome outcome, int64_t revision,
		       const char *why)
{
	decide_free(d); /* it may be begun again from there */
	d->done(d, outcome, revision, why);
}

static void decide_doubt(struct decide *d, const char *why)
{
	d->state = DECIDE_DOUBT;
	d->again_us = clock_now_us() + DECIDE_PAUSE_US;
	snprintf(d->why, sizeof(d->why), "%s", why);
}

static bool decide_is_ours(const struct decide *d, const struct coord_kv *kv)
{
	return kv->bytes == d->bytes && memcmp(kv->value, d->value, d->bytes) == 0;
}

/* A condition is not true: which one, and has an earlier try taken effect? */
static void decide_look(struct decide *d, const struct coord_reply *r)
{
	int64_t modified = r->n ? r->kvs[0].modified : 0;

	if (modified == d->last)
		decide_end(d, DECIDE_FENCED, 0, "another node leads now");
	else if (d->tries > 1 && r->n && decide_is_ours(d, &r->kvs[0]))
		decide_end(d, DECIDE_DONE, modified, "");
	else if (d->tries > 1)
		decide_end(d, DECIDE_SUPERSEDED, modified,
			   "it was decided otherwise, perhaps after this had taken effect");
	else
		decide_end(d, DECIDE_OVERTAKEN, modified, "it was decided otherwise before");
}

static void decide_on_answer(struct coord_call *call, const struct coord_reply *r)
{
	struct decide *d = CONTAINER_OF(call, struct decide, call);

	if (r->status == COORD_DOUBT)
		decide_doubt(d, r->why);
	else if (r->status != COORD_OK && d->tries > 1)
		decide_doubt(d, r->why); /* an earlier try may have taken effect */
	else if (r->status != COORD_OK)
		decide_end(d, DECIDE_REFUSED, 0, r->why);
	else if (r->succeeded)
		decide_end(d, DECIDE_DONE, r->revision, "");
	else
		decide_look(d, r);
}

static int decide_ask(struct decide *d)
{
	struct coord_cond conds[] = {
		{ .key = d->leader, .revision = d->token },
		{ .key = d->key, .modified = true, .revision = d->last },
		{ .key = d->also, .modified = true, .revision = d->also_last },
	};
	struct coord_change change = { .key = d->key, .value = d->value, .bytes = d->bytes };
	struct coord_txn t = { .conds = conds,
			       .n_conds = ARRAY_SIZE(conds) - !d->also,
			       .changes = &change,
			       .n_changes = 1,
			       .read = d->key };

	d->state = DECIDE_ASKING;
	d->tries++;
	return coord_txn(d->c, &d->call, &t, DECIDE_ANSWER_MS);
}

int decide_begin(struct decide *d, struct coord *c, const struct decide_what *what, decide_cb done)
{
	int r;

	CHECK(d->state == DECIDE_IDLE && what->token);
	*d = (struct decide){ .c = c,
			      .done = done,
			      .key = strdup(what->key),
			      .leader = strdup(what->leader),
			      .also = what->also ? strdup(what->also) : NULL,
			      .also_last = what->also_last,
			      .value = malloc(what->bytes + 1),
			      .bytes = what->bytes,
			      .token = what->token,
			      .last = what->last };
	d->call.done = decide_on_answer;
	if (d->value && what->bytes)
		memcpy(d->value, what->value, what->bytes);
	r = d->key && d->value && d->leader && !what->also == !d->also ? decide_ask(d) : -ENOMEM;
	if (r)
		decide_free(d);
	return r;
}

void decide_tick(struct decide *d, uint64_t now_us)
{
	if (d->state == DECIDE_DOUBT && now_us >= d->again_us && decide_ask(d))
		decide_doubt(d, "no memory for a call");
}

void decide_cancel(struct decide *d)
{
	if (d->state == DECIDE_IDLE)
		return;
	coord_cancel(&d->call);
	decide_free(d);
}
