/*
 * Files of a part of a job, from another node.
 *
 * Nodes have few places for fetches (peer/bulk.h). A file for which there is none is asked for again after a
 * pause, until nothing of the part has come for a minute: a node with two parts of a large job is asked for them by all others at once.
 */
#include <errno.h>
#include <stdlib.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "peer/bulk.h"

struct cluster_copy_file {
	struct bulk_fetch *fetch; /* borrowed until its end; NULL: none is under way */
	uint64_t want;            /* bytes; 0: it is not wanted */
	uint64_t again_us;        /* there was no place: when to ask again; 0: it does not wait */
};

struct cluster_copy {
	struct list link; /* c->copies */
	struct cluster *c;
	struct replica *replica; /* owned ref */
	char label[JOB_LABEL_MAX + 1], node[SPAN_NAME_BYTES], at[CLUSTER_AT_BYTES];
	struct cluster_copy_file files[_REPLICA_FILES];
	unsigned pending; /* fetches */
	uint64_t bytes;   /* of those that are over */
	/* Since there is no place for a file: when bytes of any came last, and how many had come then. */
	uint64_t still_us; /* 0: there is a place */
	uint64_t still_bytes;
	bool cancelled, posted;
	struct work over;
	struct fault f;
	cluster_copy_cb done;
	void *userdata;
};

static void cluster_copy_over(struct cluster_copy *x)
{
	cluster_copy_cb done = x->done;
	const struct cluster_copy was = *x;

	CHECK(!x->pending);
	list_unlink(&x->link);
	replica_unref(x->replica);
	free(x);
	if (done)
		done(was.userdata, was.bytes, was.f.code ? &was.f : NULL);
}

static void cluster_copy_on_over(struct work *w)
{
	cluster_copy_over(CONTAINER_OF(w, struct cluster_copy, over));
}

static bool cluster_copy_waits(const struct cluster_copy *x)
{
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		if (x->files[i].again_us)
			return true;
	return false;
}

static void cluster_copy_stop_fetches(struct cluster_copy *x)
{
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		if (x->files[i].fetch)
			bulk_cancel(x->files[i].fetch);
}

/* Nothing of it goes on. */
static bool cluster_copy_is_over(struct cluster_copy *x)
{
	if (x->pending || x->posted)
		return false;
	if (x->cancelled && !x->f.code && cluster_copy_waits(x))
		fault_set(&x->f, FAULT_CANCELLED, NULL,
			  "the part of node %s is not wanted any more", x->node);
	return x->f.code || !cluster_copy_waits(x);
}

/* It may be over, and its owner does not expect that here. */
static void cluster_copy_settle_later(struct cluster_copy *x)
{
	if (!cluster_copy_is_over(x))
		return;
	x->posted = true;
	loopq_post(x->c->loopq, &x->over, cluster_copy_on_over);
}

/* Of a fetch that has ended behind @bytes: there was no place for it? A shortage of memory is none of
 * places: it does not pass by itself. */
static bool cluster_copy_had_no_place(const struct fault *f, uint64_t bytes)
{
	return f->code == FAULT_EXHAUSTED && f->domain != FAULT_DOMAIN_OS && !bytes;
}

/* There was no place: may it be asked for again? The other file may come meanwhile, for hours. */
static bool cluster_copy_may_wait(struct cluster_copy *x)
{
	uint64_t now = clock_now_us(), bytes = cluster_copy_bytes(x);

	if (x->f.code || x->cancelled)
		return false;
	if (!x->still_us || bytes != x->still_bytes) {
		x->still_us = now;
		x->still_bytes = bytes;
	}
	return now - x->still_us < CLUSTER_COPY_IDLE_US;
}

/* It has failed behind @bytes. */
static void cluster_copy_refused(struct cluster_copy *x, struct cluster_copy_file *file,
				 uint64_t bytes, const struct fault *f)
{
	bool no_place = cluster_copy_had_no_place(f, bytes);

	if (no_place && cluster_copy_may_wait(x)) {
		file->again_us = clock_now_us() + CLUSTER_PAUSE_US;
		return;
	}
	if (!x->f.code) {
		x->f = *f;
		if (no_place) /* they come back */
			x->f.code = FAULT_UNAVAILABLE;
	}
	cluster_copy_stop_fetches(x);
}

static void cluster_copy_ended(struct cluster_copy *x, enum replica_file file, uint64_t bytes,
			       const struct fault *f)
{
	x->files[file].fetch = NULL;
	x->bytes += f ? 0 : bytes;
	x->pending--;
	if (f)
		cluster_copy_refused(x, &x->files[file], bytes, f);
	else
		x->still_us = 0;
	if (cluster_copy_is_over(x))
		cluster_copy_over(x);
}

static void cluster_copy_on_tensors(void *userdata, const struct fault *f, uint64_t bytes)
{
	cluster_copy_ended(userdata, REPLICA_TENSORS, bytes, f);
}

static void cluster_copy_on_tail(void *userdata, const struct fault *f, uint64_t bytes)
{
	cluster_copy_ended(userdata, REPLICA_TAIL, bytes, f);
}

void cluster_copy_cancel(struct cluster_copy *x)
{
	x->cancelled = true;
	cluster_copy_stop_fetches(x);
	cluster_copy_settle_later(x);
}

uint64_t cluster_copy_bytes(const struct cluster_copy *x)
{
	uint64_t bytes = x->bytes;

	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		bytes += x->files[i].fetch ? bulk_bytes(x->files[i].fetch) : 0;
	return bytes;
}

static void cluster_copy_fetch(struct cluster_copy *x, enum replica_file file)
{
	const struct replica *r = x->replica;
	const struct replica_id id = { r->step, r->layout, r->part, r->parts };
	struct cluster_copy_file *to = &x->files[file];
	char key[REPLICA_KEY_BYTES];
	struct bulk_want w = { .node = x->node,
			       .address = x->at,
			       .key = key,
			       .bytes = to->want,
			       .fd = r->fds[file],
			       .idle_us = CLUSTER_COPY_IDLE_US };
	struct fault f = FAULT_NULL;

	to->again_us = 0;
	replica_key(x->label, &id, file, key);
	if (bulk_fetch(x->c->peers, &w,
		       file == REPLICA_TAIL ? cluster_copy_on_tail : cluster_copy_on_tensors, x,
		       &to->fetch, &f))
		cluster_copy_refused(x, to, 0, &f);
	else
		x->pending++;
}

/* Return: NULL: no memory. */
static struct cluster_copy *cluster_copy_new(struct cluster *c,
					     const struct cluster_copy_want *want)
{
	struct cluster_copy *x = calloc(1, sizeof(*x));

	if (!x)
		return NULL;
	x->c = c;
	x->replica = replica_ref(want->replica);
	text_copy(x->label, sizeof(x->label), want->label);
	text_copy(x->node, sizeof(x->node), want->node);
	text_copy(x->at, sizeof(x->at), want->at);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		x->files[i].want = want->bytes[i];
	list_init(&x->link);
	list_append(&c->copies, &x->link);
	return x;
}

int cluster_copy_begin(struct cluster *c, const struct cluster_copy_want *want,
		       cluster_copy_cb done, void *userdata, struct cluster_copy **ret,
		       struct fault *f)
{
	struct cluster_copy *x = cluster_copy_new(c, want);

	if (!x)
		return fault_errno(f, -ENOMEM, "copying a part of a job");
	for (unsigned i = 0; i < _REPLICA_FILES && !x->f.code; i++)
		if (want->bytes[i])
			cluster_copy_fetch(x, (enum replica_file)i);
	if (!x->f.code) {
		CHECK(x->pending || cluster_copy_waits(x));
		x->done = done;
		x->userdata = userdata;
		*ret = x;
		return 0;
	}
	*f = x->f;
	if (!x->pending) /* else its end comes later, and nobody hears of it */
		cluster_copy_over(x);
	return f->code;
}

static void cluster_copy_tick(struct cluster_copy *x, uint64_t now_us)
{
	for (unsigned i = 0; i < _REPLICA_FILES && !x->f.code && !x->cancelled; i++)
		if (x->files[i].again_us && now_us >= x->files[i].again_us)
			cluster_copy_fetch(x, (enum replica_file)i);
	cluster_copy_settle_later(x);
}

void cluster_copies_tick(struct cluster *c, uint64_t now_us)
{
	struct cluster_copy *x, *tmp;

	list_for_each (x, tmp, &c->copies, link)
		cluster_copy_tick(x, now_us);
}
