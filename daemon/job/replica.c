#include "job/replica.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/fnv.h"
#include "job/extents.h"
#include "job/job.h"

/* An index has as much at most (checkpoint/index.h), and the records are shorter. */
#define REPLICA_MAX_TAIL (UINT64_C(2) << 30)

/* Of a file that is closed, at once. */
#define REPLICA_PIECE_BYTES (UINT64_C(64) << 20)

static const char *const replica_file_names[_REPLICA_FILES] = {
	[REPLICA_TENSORS] = "tensors",
	[REPLICA_TAIL] = "tail",
};

/* ---------------------------------------------------------------------------- accounts */

/* The memory is the machine's, also beside GPUs. Return: 0 or a fault code. */
static int replica_charge(struct job *job, uint64_t bytes, struct fault *f)
{
	char why[192] = "its quota, or that of its user, has no room";
	bool here = !extents_in_place(job->node);
	int r = (here ? quota_charge_here : quota_charge)(&job->quota, MEM_CONTROL, bytes);

	if (r == 0 && !host_room_take(node_room(job->node), bytes, why, sizeof(why))) {
		(here ? quota_return_here : quota_return)(&job->quota, MEM_CONTROL, bytes);
		r = QUOTA_E_LIMIT;
	}
	if (r == 0)
		return 0;
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "job '%s' has no memory for a replica, %" PRIu64 " bytes: %s; raise its "
			 "quota or memory_bytes, or set replicas to 0",
			 job->rec->name, bytes, why);
}

/* It has, or will have, @bytes, all of which are charged. */
static void replica_set_charged(struct replica *r, uint64_t bytes)
{
	r->charged = bytes;
	r->promise.bytes = bytes;
}

static void replica_return(struct job *job, uint64_t bytes)
{
	if (!bytes)
		return;
	if (extents_in_place(job->node))
		quota_return(&job->quota, MEM_CONTROL, bytes);
	else
		quota_return_here(&job->quota, MEM_CONTROL, bytes);
}

/* ------------------------------------------------------------------------------ one part */

struct replica *replica_ref(struct replica *r)
{
	r->refs++;
	return r;
}

/* Pages that are gone are no longer leaving: else they count as free twice. So in pieces, of which each is
 * forgotten before it goes. */
static void replica_shrink(struct replica *r, int fd)
{
	struct stat st;
	off_t left = fd >= 0 && fstat(fd, &st) == 0 ? st.st_size : 0;

	while (left && r->leaves) {
		uint64_t piece =
			left < (off_t)REPLICA_PIECE_BYTES ? (uint64_t)left : REPLICA_PIECE_BYTES;

		left -= (off_t)piece;
		piece = piece < r->leaves ? piece : r->leaves;
		r->leaves -= piece;
		atomic_fetch_sub(&r->room->leaving, piece);
		if (ftruncate(fd, left) < 0)
			return; /* closing it does the rest */
	}
}

/* On the closer's thread: it takes long. */
static void replica_close(struct closer_item *item)
{
	struct replica *r = CONTAINER_OF(item, struct replica, closing);

	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		replica_shrink(r, r->fds[i]);
	if (r->leaves)
		atomic_fetch_sub(&r->room->leaving, r->leaves);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		fd_close(r->fds[i]);
	free(r);
}

struct replica *replica_unref(struct replica *r)
{
	if (!r || --r->refs)
		return NULL;
	CHECK(list_empty(&r->link));
	if (closer_is_open(&r->node->closer)) { /* so long there is a room */
		r->leaves = host_room_resident(r->fds, _REPLICA_FILES);
		atomic_fetch_add(&r->room->leaving, r->leaves);
	}
	closer_add(&r->node->closer, &r->closing, replica_close);
	return NULL;
}

struct replica *replica_drop(struct replica *r)
{
	if (!r || list_empty(&r->link))
		return NULL;
	list_unlink(&r->link);
	list_unlink(&r->promise.link);
	replica_return(r->job, r->charged);
	r->job = NULL;
	replica_set_charged(r, 0);
	return replica_unref(r);
}

static bool replica_is(const struct replica *r, const struct replica_id *id)
{
	return r->step == id->step && r->part == id->part && r->parts == id->parts &&
	       r->layout == id->layout;
}

static struct replica *replica_find_any(const struct job *job, const struct replica_id *id)
{
	struct list *all = (struct list *)&job->across.replicas;
	struct replica *r, *tmp;

	list_for_each (r, tmp, all, link)
		if (replica_is(r, id))
			return r;
	return NULL;
}

struct replica *replica_find(const struct job *job, const struct replica_id *id)
{
	struct replica *r = replica_find_any(job, id);

	return r && r->whole ? r : NULL;
}

int replica_new(struct job *job, const struct replica_id *id, uint64_t bytes, struct replica **ret,
		struct fault *f)
{
	struct replica *r;

	replica_drop(replica_find_any(job, id));
	if (replica_charge(job, bytes, f))
		return f->code;
	r = calloc(1, sizeof(*r));
	if (!r) {
		replica_return(job, bytes);
		return fault_errno(f, -ENOMEM, "making a replica");
	}
	*r = (struct replica){ .node = job->node,
			       .job = job,
			       .refs = 1,
			       .step = id->step,
			       .part = id->part,
			       .parts = id->parts,
			       .layout = id->layout,
			       .room = node_room(job->node),
			       .fds = { -1, -1 } };
	list_init(&r->link);
	r->promise.fds = r->fds;
	r->promise.n_fds = _REPLICA_FILES;
	replica_set_charged(r, bytes);
	host_room_promise(r->room, &r->promise);
	list_append(&job->across.replicas, &r->link);
	for (unsigned i = 0; i < _REPLICA_FILES && !f->code; i++) {
		r->fds[i] = memfd_create("shardd-replica", MFD_CLOEXEC);
		if (r->fds[i] < 0)
			fault_errno(f, -errno, "making a replica");
	}
	if (f->code)
		replica_drop(r);
	else
		*ret = r;
	return f->code;
}

int replica_expect(struct replica *r, uint64_t bytes, struct fault *f)
{
	if (!r->job)
		return fault_set(f, FAULT_ABORTED, NULL,
				 "the part of step %" PRIu64 " is not kept any more", r->step);
	if (bytes <= r->charged)
		return 0;
	if (replica_charge(r->job, bytes - r->charged, f))
		return f->code;
	replica_set_charged(r, bytes);
	return 0;
}

int replica_is_whole(struct replica *r, struct fault *f)
{
	uint64_t bytes = 0;
	struct stat st;

	for (unsigned i = 0; i < _REPLICA_FILES; i++) {
		if (fstat(r->fds[i], &st) < 0)
			return fault_errno(f, -errno, "looking at a replica");
		r->bytes[i] = (uint64_t)st.st_size;
		bytes += r->bytes[i];
	}
	if (bytes > r->charged && replica_charge(r->job, bytes - r->charged, f)) {
		replica_drop(r);
		return f->code;
	}
	if (bytes < r->charged)
		replica_return(r->job, r->charged - bytes);
	replica_set_charged(r, bytes);
	r->whole = true;
	return 0;
}

int replica_read_tail(int fd, uint64_t bytes, struct replica_tail *ret, struct fault *f)
{
	uint64_t index_bytes;
	char *data;

	if (bytes < sizeof(index_bytes) || bytes > REPLICA_MAX_TAIL)
		return fault_set(f, FAULT_LOST, NULL, "the tail of a replica has %" PRIu64 " bytes",
				 bytes);
	data = malloc(bytes);
	if (!data)
		return fault_errno(f, -ENOMEM, "reading the tail of a replica");
	for (uint64_t at = 0; at < bytes;) {
		ssize_t n = pread(fd, data + at, bytes - at, (off_t)at);

		if (n <= 0) {
			free(data);
			return fault_errno(f, n < 0 ? -errno : -EIO,
					   "reading the tail of a replica");
		}
		at += (uint64_t)n;
	}
	memcpy(&index_bytes, data + bytes - sizeof(index_bytes), sizeof(index_bytes));
	if (index_bytes > bytes - sizeof(index_bytes)) {
		free(data);
		return fault_set(f, FAULT_LOST, NULL, "the tail of a replica is damaged");
	}
	*ret = (struct replica_tail){ .data = data,
				      .index_bytes = index_bytes,
				      .specs = (uint8_t *)data + index_bytes,
				      .specs_bytes = bytes - sizeof(index_bytes) - index_bytes };
	return 0;
}

/* -------------------------------------------------------------------------- all of a job */

void replica_completed(struct job *job, uint64_t step, uint64_t layout)
{
	struct replica *r, *tmp;

	list_for_each (r, tmp, &job->across.replicas, link)
		if (r->step == step && r->layout == layout && r->whole)
			r->complete = true;
		else
			replica_drop(r);
}

/* The newest of those that are complete, or whole. Return: NULL: there are none. */
static const struct replica *replica_newest(struct job *job, bool complete)
{
	const struct replica *newest = NULL;
	struct replica *r, *tmp;

	list_for_each (r, tmp, &job->across.replicas, link)
		if ((complete ? r->complete : r->whole) && (!newest || r->step > newest->step))
			newest = r;
	return newest;
}

static bool replica_is_with(const struct replica *r, const struct replica *other)
{
	return other && r->step == other->step && r->layout == other->layout;
}

void replica_tidy(struct job *job)
{
	const struct replica *complete = replica_newest(job, true);
	const struct replica *whole = replica_newest(job, false);
	struct replica *r, *tmp;

	list_for_each (r, tmp, &job->across.replicas, link)
		if (!r->whole || (!replica_is_with(r, complete) && !replica_is_with(r, whole))) {
			CHECK(r != complete && r != whole);
			replica_drop(r);
		}
}

uint64_t replica_layout(const struct job *job, uint64_t round)
{
	return fnv_add(fnv_add(job_layout(job), job->rec->incarnation), round);
}

void replica_forget(struct job *job)
{
	struct replica *r, *tmp;

	list_for_each (r, tmp, &job->across.replicas, link)
		replica_drop(r);
}

bool replica_report(const struct job *job, uint64_t *ret_step, uint64_t *ret_bytes)
{
	struct list *all = (struct list *)&job->across.replicas;
	struct replica *r, *tmp;
	bool any = false;

	*ret_step = *ret_bytes = 0;
	list_for_each (r, tmp, all, link) {
		*ret_bytes += r->charged;
		if (!r->complete)
			continue;
		any = true;
		*ret_step = r->step > *ret_step ? r->step : *ret_step;
	}
	return any;
}

/* ------------------------------------------------------------------------------- names */

void replica_key(const char *label, const struct replica_id *id, enum replica_file file,
		 char ret[REPLICA_KEY_BYTES])
{
	CHECK(file < _REPLICA_FILES);
	snprintf(ret, REPLICA_KEY_BYTES, "replica/%s/%" PRIu64 "/%016" PRIx64 "/%" PRIu32 "/%s",
		 label, id->step, id->layout, id->part, replica_file_names[file]);
}

bool replica_lookup(const struct job *job, const char *key, struct replica **ret,
		    enum replica_file *ret_file)
{
	struct list *all = (struct list *)&job->across.replicas;
	struct replica *r, *tmp;
	char name[REPLICA_KEY_BYTES];

	list_for_each (r, tmp, all, link) {
		const struct replica_id id = { r->step, r->layout, r->part, r->parts };

		for (unsigned i = 0; r->whole && i < _REPLICA_FILES; i++) {
			replica_key(job->label, &id, (enum replica_file)i, name);
			if (strcmp(name, key) != 0)
				continue;
			*ret = r;
			*ret_file = (enum replica_file)i;
			return true;
		}
	}
	return false;
}
