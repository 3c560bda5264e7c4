/* Records of steps, and the schedule that one becomes when it repeats.
 *
 * Numbers of keys grow. In a step that repeats each number of a kind and group is larger by the same
 * shift than in the step before. The shift is larger than the distance of the numbers within a step,
 * so that no two steps have a key in common: what a schedule foretells is never foretold twice. */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/fnv.h"
#include "order/order_impl.h"

static bool order_schedule_record_grow(struct order_record *r, uint32_t most)
{
	uint32_t cap = r->cap ? r->cap * 2 : 16;
	struct order_rec *grown;

	if (r->n >= most)
		return false;
	if (r->n < r->cap)
		return true;
	grown = realloc(r->recs, cap * sizeof(*grown));
	if (!grown)
		return false;
	r->recs = grown;
	r->cap = cap;
	return true;
}

void order_history_add(struct order_history *h, const struct order_rec *rec, uint64_t position,
		       uint32_t most)
{
	struct order_record *r = &h->now;

	if (!r->valid)
		return;
	if (!order_schedule_record_grow(r, most)) {
		r->valid = false;
		return;
	}
	r->recs[r->n] = *rec;
	r->recs[r->n++].at = position - r->base;
}

bool order_words_fit(const struct order_rec *rec, const struct order_print *print)
{
	return order_is_joint(&rec->key, rec->flags) ||
	       memcmp(rec->words, print->words, sizeof(rec->words)) == 0;
}

/* Is @b what @a was, with larger numbers? Writes the shifts into @b. */
static bool order_schedule_rec_follows(const struct order_rec *a, struct order_rec *b)
{
	b->shift = b->key.number - a->key.number;
	return a->key.kind == b->key.kind && a->key.group == b->key.group &&
	       a->key.number < b->key.number && a->at == b->at && a->set == b->set &&
	       a->flags == b->flags &&
	       (order_is_joint(&a->key, a->flags) ||
		memcmp(a->words, b->words, sizeof(a->words)) == 0);
}

/* Put the number of @rec into its stream. */
static bool order_schedule_stream_add(struct order_table *streams, const struct order_rec *rec)
{
	struct order_key key = { .kind = rec->key.kind, .group = rec->key.group };
	struct order_stream *s = order_table_find(streams, &key);

	if (!s) {
		s = order_table_add(streams, &key);
		if (!s)
			return false;
		s->low = s->high = rec->key.number;
		s->shift = rec->shift;
	}
	s->low = rec->key.number < s->low ? rec->key.number : s->low;
	s->high = rec->key.number > s->high ? rec->key.number : s->high;
	return s->shift == rec->shift;
}

/* The streams of a step. Return: false if its numbers do not go on regularly. */
static bool order_schedule_streams_of(const struct order_record *r, struct order_table *streams)
{
	for (uint32_t i = 0; i < r->n; i++)
		if (!order_schedule_stream_add(streams, &r->recs[i]))
			return false;
	for (uint32_t i = 0; i < streams->n; i++) {
		const struct order_stream *s = order_table_item(streams, i);

		if (s->high - s->low >= s->shift)
			return false;
	}
	return true;
}

static bool order_schedule_record_follows(const struct order_record *a, struct order_record *b)
{
	_cleanup_(order_table_deinit) struct order_table streams = { .item_size = sizeof(
									     struct order_stream) };

	if (!a->valid || !b->valid || a->n != b->n || a->period != b->period)
		return false;
	for (uint32_t i = 0; i < b->n; i++) {
		const struct order_rec *rec = &b->recs[i];

		if (!order_schedule_rec_follows(&a->recs[i], &b->recs[i]))
			return false;
		/* all nodes must wait at the same places, else none knows how far the others are */
		if (order_is_joint(&rec->key, rec->flags) && rec->set)
			return false;
	}
	return order_schedule_streams_of(b, &streams);
}

void order_history_mark(struct order_history *h, uint64_t position)
{
	h->now.period = position - h->now.base;
	h->repeats = order_schedule_record_follows(&h->last, &h->now) ? h->repeats + 1 : 0;
	SWAP(h->now, h->last);
	h->now.n = 0;
	h->now.valid = true;
	h->now.base = position;
}

void order_history_reset(struct order_history *h)
{
	h->now.n = h->last.n = 0;
	h->now.valid = h->last.valid = false;
	h->repeats = 0;
}

void order_history_deinit(struct order_history *h)
{
	free(h->now.recs);
	free(h->last.recs);
	*h = (struct order_history){ 0 };
}

static uint64_t order_schedule_rec_hash(const struct order_rec *rec, uint64_t hash)
{
	hash = fnv_add(fnv_add(hash, rec->key.kind), rec->key.group);
	hash = fnv_add(fnv_add(hash, rec->key.number), rec->at);
	hash = fnv_add(fnv_add(hash, rec->shift), rec->flags);
	for (unsigned i = 0; i < ARRAY_SIZE(rec->words); i++)
		hash = fnv_add(hash, rec->words[i]);
	return hash;
}

uint64_t order_record_hash(const struct order *o, const struct order_record *r, uint32_t node,
			   uint32_t *ret_n)
{
	uint64_t hash = fnv_add(FNV_BEGIN, r->period);
	uint32_t n = 0;

	for (uint32_t i = 0; i < r->n; i++) {
		if (!order_set_has(o, r->recs[i].set, node))
			continue;
		hash = order_schedule_rec_hash(&r->recs[i], hash);
		n++;
	}
	*ret_n = n;
	return hash;
}

void order_schedule_deinit(struct order_schedule *s)
{
	free(s->step.recs);
	order_table_deinit(&s->index);
	order_table_deinit(&s->streams);
	*s = (struct order_schedule){ 0 };
}

/* A copy of the last step, and its tables. */
static bool order_schedule_copy(struct order_schedule *s, const struct order_record *last)
{
	s->step = *last;
	s->step.cap = last->n;
	s->step.recs = malloc(last->n * sizeof(*s->step.recs));
	if (!s->step.recs)
		return false;
	memcpy(s->step.recs, last->recs, last->n * sizeof(*s->step.recs));
	for (uint32_t i = 0; i < last->n; i++) {
		struct order_place *p = order_table_add(&s->index, &last->recs[i].key);

		if (!p)
			return false;
		p->i = i;
	}
	return order_schedule_streams_of(last, &s->streams);
}

bool order_schedule_begin(struct order_schedule *s, const struct order_history *h)
{
	CHECK(h->repeats && h->last.n);
	*s = (struct order_schedule){ .index.item_size = sizeof(struct order_place),
				      .streams.item_size = sizeof(struct order_stream),
				      .turn = 1,
				      .base = h->now.base };
	if (order_schedule_copy(s, &h->last))
		return true;
	order_schedule_deinit(s);
	return false;
}

const struct order_rec *order_schedule_next(const struct order_schedule *s)
{
	return &s->step.recs[s->at];
}

struct order_key order_schedule_key(const struct order_schedule *s)
{
	const struct order_rec *rec = order_schedule_next(s);
	struct order_key key = rec->key;

	key.number += s->turn * rec->shift;
	return key;
}

uint64_t order_schedule_position(const struct order_schedule *s)
{
	return s->base + order_schedule_next(s)->at;
}

void order_schedule_advance(struct order_schedule *s)
{
	if (++s->at < s->step.n)
		return;
	s->at = 0;
	s->turn++;
	s->base += s->step.period;
}

void order_schedule_skip(struct order_schedule *s)
{
	/* the mark is one */
	while (!order_is_joint(&order_schedule_next(s)->key, order_schedule_next(s)->flags))
		order_schedule_advance(s);
}

const struct order_rec *order_schedule_find(const struct order_schedule *s,
					    const struct order_key *key)
{
	struct order_key k = { .kind = key->kind, .group = key->group };
	const struct order_stream *stream = order_table_find(&s->streams, &k);
	const struct order_place *p;
	uint64_t turn;

	if (!stream || key->number < stream->low)
		return NULL;
	turn = (key->number - stream->low) / stream->shift;
	k.number = key->number - turn * stream->shift;
	p = order_table_find(&s->index, &k);
	if (!p || turn < s->turn || (turn == s->turn && p->i < s->at))
		return NULL;
	return &s->step.recs[p->i];
}
