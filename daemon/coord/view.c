#include "coord/view.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"

#define VIEW_PAUSE_US  200000u
#define VIEW_ANSWER_MS 5000u

static void view_pause(struct view *v, const char *why)
{
	v->state = VIEW_PAUSED;
	v->again_us = clock_now_us() + VIEW_PAUSE_US;
	snprintf(v->why, sizeof(v->why), "%s", why);
}

/* -------------------------------------------------------------------------------- keys */

static void view_key_free(struct view_key *k)
{
	list_unlink(&k->link);
	free(k->key);
	free(k->value);
	free(k);
}

static struct view_key *view_key_of(struct view *v, const char *key)
{
	for (struct list *l = v->keys.next; l != &v->keys; l = l->next) {
		struct view_key *k = CONTAINER_OF(l, struct view_key, link);

		if (strcmp(k->key, key) == 0)
			return k;
	}
	return NULL;
}

const struct view_key *view_find(const struct view *v, const char *key)
{
	return view_key_of((struct view *)v, key);
}

static struct view_key *view_key_new(struct view *v, const char *key)
{
	struct view_key *k = calloc(1, sizeof(*k));

	if (!k)
		return NULL;
	list_init(&k->link);
	k->key = strdup(key);
	if (!k->key) {
		free(k);
		return NULL;
	}
	list_append(&v->keys, &k->link);
	return k;
}

/* Return: 0 or -ENOMEM. */
static int view_put(struct view *v, const struct coord_kv *kv)
{
	struct view_key *k = view_key_of(v, kv->key);
	uint8_t *value;

	if (k)
		k->seen = true;
	if (k && k->modified == kv->modified)
		return 0;
	value = malloc(kv->bytes + 1);
	if (value && !k)
		k = view_key_new(v, kv->key);
	if (!value || !k) {
		free(value);
		return -ENOMEM;
	}
	if (kv->bytes)
		memcpy(value, kv->value, kv->bytes);
	value[kv->bytes] = 0; /* so that texts can be read as such */
	free(k->value);
	k->value = value;
	k->bytes = kv->bytes;
	k->created = kv->created;
	k->modified = kv->modified;
	k->lease = kv->lease;
	k->seen = true;
	v->ops->changed(v, k, false);
	return 0;
}

static void view_drop(struct view *v, struct view_key *k)
{
	v->ops->changed(v, k, true);
	view_key_free(k);
}

static void view_drop_unseen(struct view *v)
{
	struct list *l = v->keys.next;

	while (l != &v->keys) {
		struct view_key *k = CONTAINER_OF(l, struct view_key, link);

		l = l->next;
		if (!k->seen)
			view_drop(v, k);
	}
}

/* ----------------------------------------------------------------------------- watching */

static void view_on_events(struct coord_watch *w, const struct coord_event *events, size_t n,
			   int64_t revision)
{
	struct view *v = CONTAINER_OF(w, struct view, watch);

	for (size_t i = 0; i < n; i++) {
		struct view_key *k = view_key_of(v, events[i].kv.key);

		if (events[i].removed && k) {
			view_drop(v, k);
		} else if (!events[i].removed && view_put(v, &events[i].kv)) {
			coord_watch_end(w);
			view_pause(v, "no memory for a key");
			return;
		}
	}
	v->revision = revision;
}

static void view_on_ended(struct coord_watch *w, bool compacted, const char *why)
{
	(void)compacted; /* all is read again in any case */
	view_pause(CONTAINER_OF(w, struct view, watch), why);
}

static const struct coord_watch_ops view_watch_ops = { view_on_events, view_on_ended };

/* ------------------------------------------------------------------------------ reading */

static void view_take(struct view *v, const struct coord_reply *r)
{
	int e = 0;

	for (struct list *l = v->keys.next; l != &v->keys; l = l->next)
		CONTAINER_OF(l, struct view_key, link)->seen = false;
	for (size_t i = 0; e == 0 && i < r->n; i++)
		e = view_put(v, &r->kvs[i]);
	if (e) {
		view_pause(v, "no memory for a key");
		return;
	}
	view_drop_unseen(v);
	v->revision = r->revision;
	v->state = VIEW_WATCHING;
	if (coord_watch_begin(v->c, &v->watch, v->prefix, r->revision + 1) < 0)
		view_pause(v, "no memory for a watch");
	if (v->ops->complete)
		v->ops->complete(v);
}

static void view_on_read(struct coord_call *call, const struct coord_reply *r)
{
	struct view *v = CONTAINER_OF(call, struct view, call);

	if (r->status == COORD_OK)
		view_take(v, r);
	else
		view_pause(v, r->why);
}

static void view_read(struct view *v)
{
	struct coord_txn t = { .read = v->prefix, .prefix = true };

	v->state = VIEW_READING;
	if (coord_txn(v->c, &v->call, &t, VIEW_ANSWER_MS) < 0)
		view_pause(v, "no memory for a call");
}

int view_begin(struct view *v, struct coord *c, const char *prefix, const struct view_ops *ops)
{
	*v = (struct view){ .c = c, .ops = ops };
	list_init(&v->keys);
	v->prefix = strdup(prefix);
	if (!v->prefix)
		return -ENOMEM;
	v->call.done = view_on_read;
	v->watch.ops = &view_watch_ops;
	view_read(v);
	return 0;
}

void view_tick(struct view *v, uint64_t now_us)
{
	if (v->state == VIEW_PAUSED && now_us >= v->again_us)
		view_read(v);
}

void view_end(struct view *v)
{
	if (v->state == VIEW_OFF)
		return;
	coord_cancel(&v->call);
	coord_watch_end(&v->watch);
	while (!list_empty(&v->keys))
		view_key_free(CONTAINER_OF(v->keys.next, struct view_key, link));
	free(v->prefix);
	*v = (struct view){ .state = VIEW_OFF };
}
