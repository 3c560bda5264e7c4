/* Files of a part of a job, from another node. */
#include <errno.h>
#include <stdlib.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "peer/bulk.h"

struct cluster_copy {
	struct replica *replica;                    /* owned ref */
	struct bulk_fetch *fetches[_REPLICA_FILES]; /* borrowed until their ends; NULL: none */
	unsigned pending;
	uint64_t bytes; /* of those that are over */
	struct fault f;
	cluster_copy_cb done;
	void *userdata;
};

static void cluster_copy_over(struct cluster_copy *x)
{
	cluster_copy_cb done = x->done;
	const struct cluster_copy was = *x;

	replica_unref(x->replica);
	free(x);
	if (done)
		done(was.userdata, was.bytes, was.f.code ? &was.f : NULL);
}

static void cluster_copy_ended(struct cluster_copy *x, enum replica_file file, uint64_t bytes,
			       const struct fault *f)
{
	x->fetches[file] = NULL;
	x->bytes += bytes;
	if (f && !x->f.code) {
		x->f = *f;
		cluster_copy_cancel(x);
	}
	if (--x->pending == 0)
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
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		if (x->fetches[i])
			bulk_cancel(x->fetches[i]);
}

uint64_t cluster_copy_bytes(const struct cluster_copy *x)
{
	uint64_t bytes = x->bytes;

	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		bytes += x->fetches[i] ? bulk_bytes(x->fetches[i]) : 0;
	return bytes;
}

static int cluster_copy_fetch(struct cluster *c, struct cluster_copy *x,
			      const struct cluster_copy_want *want, enum replica_file file,
			      struct fault *f)
{
	const struct replica *r = want->replica;
	const struct replica_id id = { r->step, r->layout, r->part, r->parts };
	char key[REPLICA_KEY_BYTES];
	struct bulk_want w = { .node = want->node,
			       .address = want->at,
			       .key = key,
			       .bytes = want->bytes[file],
			       .fd = r->fds[file],
			       .idle_us = CLUSTER_COPY_IDLE_US };

	replica_key(want->label, &id, file, key);
	if (bulk_fetch(c->peers, &w,
		       file == REPLICA_TAIL ? cluster_copy_on_tail : cluster_copy_on_tensors, x,
		       &x->fetches[file], f))
		return f->code;
	x->pending++;
	return 0;
}

int cluster_copy_begin(struct cluster *c, const struct cluster_copy_want *want,
		       cluster_copy_cb done, void *userdata, struct cluster_copy **ret,
		       struct fault *f)
{
	struct cluster_copy *x = calloc(1, sizeof(*x));

	if (!x)
		return fault_errno(f, -ENOMEM, "copying a part of a job");
	x->replica = replica_ref(want->replica);
	x->done = done;
	x->userdata = userdata;
	for (unsigned i = 0; i < _REPLICA_FILES && !f->code; i++)
		if (want->bytes[i])
			cluster_copy_fetch(c, x, want, (enum replica_file)i, f);
	if (!f->code) {
		CHECK(x->pending);
		*ret = x;
		return 0;
	}
	if (x->pending) { /* its end comes later, and nobody hears of it */
		x->done = NULL;
		cluster_copy_cancel(x);
		return f->code;
	}
	replica_unref(x->replica);
	free(x);
	return f->code;
}
