#include "job/extents.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/job_types.h"

struct extents_copy_part {
	struct backend_task task;
	struct extents_copy *copy;
	struct launch *launches; /* owned */
	unsigned n, room;
};

/* Ranges of which one follows the other are one. */
static bool extents_join(struct extents *x, struct device *device, const char *at, uint64_t bytes)
{
	struct extent *last = x->n ? &x->all[x->n - 1] : NULL;

	if (!last || last->device != device || last->at + last->bytes != at)
		return false;
	last->bytes += bytes;
	return true;
}

int extents_add(struct extents *x, struct device *device, void *at, uint64_t bytes, uint64_t *ret)
{
	*ret = x->bytes;
	if (!bytes)
		return 0;
	if (!extents_join(x, device, at, bytes)) {
		if (x->n == x->room) {
			size_t room = x->room ? 2 * x->room : 64;
			struct extent *more = reallocarray(x->all, room, sizeof(*more));

			if (!more)
				return -ENOMEM;
			x->all = more;
			x->room = room;
		}
		x->all[x->n++] = (struct extent){ device, at, x->bytes, bytes };
	}
	x->bytes += bytes;
	return 0;
}

void extents_deinit(struct extents *x)
{
	free(x->all);
	*x = EXTENTS_NULL;
}

bool extents_in_place(const struct node *node)
{
	return backend_info(node->devices[0].backend)->order == BACKEND_ORDER_NONE;
}

/* The range that has byte @at. */
static size_t extents_find(const struct extents *x, uint64_t at)
{
	size_t lo = 0, hi = x->n;

	CHECK(at < x->bytes);
	while (hi - lo > 1) {
		size_t mid = lo + (hi - lo) / 2;

		if (x->all[mid].begin <= at)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

/* The piece of one range at @at, at most @bytes. Return: its bytes. */
static uint64_t extents_piece(const struct extent *e, uint64_t at, uint64_t bytes, char **ret)
{
	uint64_t n = e->begin + e->bytes - at;

	*ret = e->at + (at - e->begin);
	return n < bytes ? n : bytes;
}

void extents_read(const struct extents *x, uint64_t at, void *to, uint64_t bytes)
{
	char *out = to, *from;

	for (size_t i = bytes ? extents_find(x, at) : 0; bytes; i++) {
		uint64_t n = extents_piece(&x->all[i], at, bytes, &from);

		memcpy(out, from, n);
		out += n;
		at += n;
		bytes -= n;
	}
}

/* ------------------------------------------------------------------------- copies */

void extents_copy_init(struct extents_copy *c, struct job *job, extents_copy_cb done)
{
	*c = (struct extents_copy){ .job = job, .done = done };
}

static struct launch *extents_copy_launch(struct extents_copy_part *p)
{
	if (p->n == p->room) {
		unsigned room = p->room ? 2 * p->room : 16;
		struct launch *more = reallocarray(p->launches, room, sizeof(*more));

		if (!more)
			return NULL;
		p->launches = more;
		p->room = room;
	}
	return &p->launches[p->n++];
}

static int extents_copy_piece(struct extents_copy *c, const struct device *device, char *at,
			      uint64_t bytes, enum extents_way way, char *host)
{
	struct launch *l = extents_copy_launch(&c->parts[device->index]);

	if (!l)
		return -ENOMEM;
	*l = (struct launch){ .kind = LAUNCH_COPY, .n = bytes };
	l->copy = way == EXTENTS_OUT ? (struct k_copy){ .dst = host, .src = at }
				     : (struct k_copy){ .dst = at, .src = host };
	return 0;
}

int extents_copy_add(struct extents_copy *c, const struct extents *x, uint64_t at, uint64_t bytes,
		     enum extents_way way, void *host)
{
	char *to = host, *from;

	if (!c->parts)
		c->parts = calloc(c->job->node->n_devices, sizeof(*c->parts));
	if (!c->parts)
		return -ENOMEM;
	for (size_t i = bytes ? extents_find(x, at) : 0; bytes; i++) {
		uint64_t n = extents_piece(&x->all[i], at, bytes, &from);

		if (extents_copy_piece(c, x->all[i].device, from, n, way, to))
			return -ENOMEM;
		to += n;
		at += n;
		bytes -= n;
	}
	return 0;
}

bool extents_copy_is_empty(const struct extents_copy *c)
{
	for (unsigned d = 0; c->parts && d < c->job->node->n_devices; d++)
		if (c->parts[d].n)
			return false;
	return true;
}

static void extents_copy_on_done(struct backend_task *task, int status)
{
	struct extents_copy *c = CONTAINER_OF(task, struct extents_copy_part, task)->copy;

	/* -ENOMEM is that the job has no memory for it */
	status = status == -ENOMEM ? -EIO : status;
	c->status = c->status ? c->status : status;
	CHECK(c->pending > 0);
	if (--c->pending)
		return;
	for (unsigned d = 0; d < c->job->node->n_devices; d++)
		c->parts[d].n = 0;
	c->done(c, c->status);
}

void extents_copy_submit(struct extents_copy *c)
{
	CHECK(!extents_copy_is_empty(c) && !c->pending);
	c->status = 0;
	for (unsigned d = 0; d < c->job->node->n_devices; d++)
		c->pending += c->parts[d].n > 0;
	for (unsigned d = 0; d < c->job->node->n_devices; d++) {
		struct extents_copy_part *p = &c->parts[d];

		if (!p->n)
			continue;
		p->copy = c;
		p->task = (struct backend_task){ .launches = p->launches,
						 .n_launches = p->n,
						 .sync = true,
						 .done = extents_copy_on_done,
						 .owner = job_as_owner(c->job) };
		backend_submit(c->job->node->devices[d].backend, &p->task);
	}
}

void extents_copy_deinit(struct extents_copy *c)
{
	CHECK(!c->pending);
	for (unsigned d = 0; c->parts && d < c->job->node->n_devices; d++)
		free(c->parts[d].launches);
	free(c->parts);
	c->parts = NULL;
}
