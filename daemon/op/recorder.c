#include "op/recorder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"

struct recorder recorder;

/* -------------------------------------------------------------------- stores */

static struct record_head *recorder_store_at(const struct recorder_store *s, size_t i)
{
	return (struct record_head *)(void *)(s->records + i * s->bytes);
}

static int recorder_store_init(struct recorder_store *s, size_t size, size_t bytes)
{
	*s = (struct recorder_store){ .size = size, .bytes = bytes, .next_id = 1 };
	list_init(&s->empty);
	list_init(&s->trails);
	list_init(&s->spare);
	s->records = calloc(size ? size : 1, bytes);
	s->all_trails = calloc(size ? size : 1, sizeof(*s->all_trails));
	if (!s->records || !s->all_trails)
		return -ENOMEM;
	for (size_t i = 0; i < size; i++) {
		list_init(&recorder_store_at(s, i)->link);
		list_append(&s->empty, &recorder_store_at(s, i)->link);
		list_init(&s->all_trails[i].link);
		list_init(&s->all_trails[i].records);
		list_append(&s->spare, &s->all_trails[i].link);
	}
	return 0;
}

static void recorder_store_deinit(struct recorder_store *s)
{
	free(s->records);
	free(s->all_trails);
}

static bool recorder_trail_is_of(const struct recorder_trail *t, const char *job, uid_t uid)
{
	const struct record_head *r = list_first(&t->records, struct record_head, link);

	return r->uid == uid && strcmp(r->job, job) == 0;
}

/* The jobs that have recorded something lately come first. */
static struct recorder_trail *recorder_store_find(struct recorder_store *s, const char *job,
						  uid_t uid)
{
	struct recorder_trail *t, *tmp;

	list_for_each (t, tmp, &s->trails, link) {
		if (!recorder_trail_is_of(t, job, uid))
			continue;
		if (s->trails.next != &t->link) {
			list_unlink(&t->link);
			list_append(s->trails.next, &t->link);
		}
		return t;
	}
	return NULL;
}

static struct recorder_trail *recorder_store_longest(struct recorder_store *s)
{
	struct recorder_trail *t, *tmp, *longest = NULL;

	list_for_each (t, tmp, &s->trails, link)
		if (!longest || t->n >= longest->n)
			longest = t;
	return longest;
}

/* Take @r out of its trail. */
static void recorder_trail_remove(struct recorder_store *s, struct recorder_trail *t,
				  struct record_head *r)
{
	list_unlink(&r->link);
	if (--t->n)
		return;
	list_unlink(&t->link);
	list_append(&s->spare, &t->link);
	s->n_trails--;
}

/* So many jobs have a share; the records of those before them go first. */
static size_t recorder_store_most(const struct recorder_store *s)
{
	return s->size / 64 > 4 ? s->size / 64 : 4;
}

/* The oldest record of the job that has most: this one's, if it has its share; of several that of the job that has
 * recorded nothing for the longest time. */
static struct record_head *recorder_store_evict(struct recorder_store *s,
						struct recorder_trail *own, bool *ret_own)
{
	struct recorder_trail *t;
	struct record_head *r;

	if (!s->n_trails)
		return NULL;
	if (s->n_trails > recorder_store_most(s))
		t = list_entry(s->trails.prev, struct recorder_trail, link);
	else
		t = own && own->n >= s->size / s->n_trails ? own : recorder_store_longest(s);
	*ret_own = t == own;
	r = list_first(&t->records, struct record_head, link);
	recorder_trail_remove(s, t, r);
	return r;
}

/* Return: an empty one, in no list, in which the id is set. @ret_own: it was of the same job. */
static struct record_head *recorder_store_take(struct recorder_store *s, uint64_t id,
					       struct recorder_trail *own, bool *ret_own)
{
	struct record_head *r;

	*ret_own = false;
	if (list_empty(&s->empty)) {
		r = recorder_store_evict(s, own, ret_own);
		if (!r)
			return NULL;
	} else {
		r = list_first(&s->empty, struct record_head, link);
		list_unlink(&r->link);
	}
	r->id = id;
	return r;
}

static void recorder_head_fill(struct record_head *r, const char *job, uid_t uid)
{
	r->uid = uid;
	text_copy(r->job, sizeof(r->job), job);
}

/* It may be overwritten from now on. @t: of its job; NULL: there is none yet. */
static void recorder_store_keep(struct recorder_store *s, struct recorder_trail *t,
				struct record_head *r)
{
	if (!t) {
		t = list_first(&s->spare, struct recorder_trail, link);
		list_unlink(&t->link);
		list_append(s->trails.next, &t->link);
		s->n_trails++;
	}
	list_append(&t->records, &r->link);
	t->n++;
}

/* ---------------------------------------------------------------------- ops */

int recorder_init(size_t size)
{
	size_t published = size / 4 > 16 ? size / 4 : size ? 16 : 0;

	list_init(&recorder.pending);
	return recorder_store_init(&recorder.ops, size, sizeof(struct record)) ||
			       recorder_store_init(&recorder.devices, size,
						   sizeof(struct device_record)) ||
			       recorder_store_init(&recorder.published, published,
						   sizeof(struct published_record))
		       ? -ENOMEM
		       : 0;
}

void recorder_deinit(void)
{
	recorder_store_deinit(&recorder.ops);
	recorder_store_deinit(&recorder.devices);
	recorder_store_deinit(&recorder.published);
	recorder = (struct recorder){ 0 };
}

uint64_t recorder_next_op(void)
{
	return recorder.ops.next_id++;
}

struct record *recorder_add(uint64_t id, const char *job, uid_t uid)
{
	struct recorder_store *s = &recorder.ops;
	struct recorder_trail *own = recorder_store_find(s, job, uid);
	bool is_own;
	struct record_head *r = recorder_store_take(s, id, own, &is_own);

	if (!r)
		return NULL;
	if (own && !own->n)
		own = NULL; /* that was its only one */
	if (!is_own)
		recorder_head_fill(r, job, uid);
	recorder_store_keep(s, own, r);
	return (struct record *)r;
}

/* ------------------------------------------------------------------- devices */

struct device_record *recorder_add_device(const char *job, uid_t uid)
{
	struct recorder_store *s = &recorder.devices;
	uint64_t id = s->next_id;
	bool is_own;
	struct record_head *r =
		recorder_store_take(s, id, recorder_store_find(s, job, uid), &is_own);

	if (!r)
		return NULL;
	s->next_id++;
	memset(r, 0, s->bytes);
	list_init(&r->link);
	r->id = id;
	recorder_head_fill(r, job, uid);
	return (struct device_record *)r;
}

void recorder_end_device(struct device_record *r)
{
	struct recorder_store *s = &recorder.devices;

	recorder_store_keep(s, recorder_store_find(s, r->head.job, r->head.uid), &r->head);
}

void recorder_resume_device(struct device_record *r)
{
	struct recorder_store *s = &recorder.devices;

	recorder_trail_remove(s, recorder_store_find(s, r->head.job, r->head.uid), &r->head);
}

/* ------------------------------------------------------------------ publications */

struct published_record *recorder_add_published(const char *job, uid_t uid)
{
	struct recorder_store *s = &recorder.published;
	struct recorder_trail *own = recorder_store_find(s, job, uid);
	uint64_t id = s->next_id;
	bool is_own;
	struct record_head *r = recorder_store_take(s, id, own, &is_own);

	if (!r)
		return NULL;
	s->next_id++;
	if (own && !own->n)
		own = NULL; /* that was its only one */
	memset(r, 0, s->bytes);
	list_init(&r->link);
	r->id = id;
	recorder_head_fill(r, job, uid);
	recorder_store_keep(s, own, r);
	return (struct published_record *)r;
}

/* ------------------------------------------------------------------ all of them */

size_t recorder_size(void)
{
	return recorder.ops.size;
}

const struct record *recorder_op_at(size_t i)
{
	const struct record_head *r = recorder_store_at(&recorder.ops, i);

	return r->id ? (const struct record *)r : NULL;
}

const struct device_record *recorder_device_at(size_t i)
{
	const struct record_head *r = recorder_store_at(&recorder.devices, i);

	return r->id ? (const struct device_record *)r : NULL;
}

const struct published_record *recorder_published_at(size_t i)
{
	const struct record_head *r =
		i < recorder.published.size ? recorder_store_at(&recorder.published, i) : NULL;

	return r && r->id ? (const struct published_record *)r : NULL;
}
