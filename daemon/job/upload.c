#include "job/upload.h"

#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/loopq.h"
#include "job/extents.h"
#include "job/job_types.h"
#include "job/staging.h"

enum { UPLOAD_BUFFERS = 2 };

struct upload_buffer {
	struct upload *upload;
	void *room; /* owned: staging */
	sem_t is_free;
	struct work put;
	struct extents_copy copy;
	/* of upload_put */
	uint64_t at, bytes, apart;
	unsigned times;
};

struct upload {
	struct job *job;
	uint64_t room;
	struct extents all;
	_Atomic int status;
	unsigned next; /* buffer; the thread's */
	struct upload_buffer buffers[UPLOAD_BUFFERS];
};

static void upload_on_copied(struct extents_copy *copy, int status);

struct upload *upload_new(struct job *job, uint64_t room)
{
	struct upload *u = calloc(1, sizeof(*u));

	if (!u)
		return NULL;
	u->job = job;
	u->room = room;
	for (unsigned i = 0; i < UPLOAD_BUFFERS; i++) {
		u->buffers[i].upload = u;
		sem_init(&u->buffers[i].is_free, 0, 1);
		extents_copy_init(&u->buffers[i].copy, job, upload_on_copied);
	}
	return u;
}

int upload_add(struct upload *u, struct device *device, void *at, uint64_t bytes)
{
	uint64_t begin;

	CHECK(!u->buffers[0].room);
	return extents_add(&u->all, device, at, bytes, &begin);
}

uint64_t upload_bytes(const struct upload *u)
{
	return u->all.bytes;
}

int upload_begin(struct upload *u)
{
	for (unsigned i = 0; i < UPLOAD_BUFFERS; i++) {
		int r = staging_take(u->job, u->room, &u->buffers[i].room);

		if (r)
			return r;
	}
	return 0;
}

struct upload *upload_free(struct upload *u)
{
	if (!u)
		return NULL;
	for (unsigned i = 0; i < UPLOAD_BUFFERS; i++) {
		struct upload_buffer *b = &u->buffers[i];

		extents_copy_deinit(&b->copy);
		staging_give(u->job, b->room, u->room);
		sem_destroy(&b->is_free);
	}
	extents_deinit(&u->all);
	free(u);
	return NULL;
}

/* ------------------------------------------------------------------------- the loop */

static void upload_end_buffer(struct upload_buffer *b, int status)
{
	if (status)
		atomic_store(&b->upload->status, status);
	sem_post(&b->is_free);
}

static void upload_on_copied(struct extents_copy *copy, int status)
{
	upload_end_buffer(CONTAINER_OF(copy, struct upload_buffer, copy), status);
}

static void upload_on_put(struct work *w)
{
	struct upload_buffer *b = CONTAINER_OF(w, struct upload_buffer, put);
	struct upload *u = b->upload;
	int r = 0;

	for (unsigned i = 0; r == 0 && i < b->times; i++)
		r = extents_copy_add(&b->copy, &u->all, b->at + i * b->apart, b->bytes, EXTENTS_IN,
				     b->room);
	if (r) {
		extents_copy_deinit(&b->copy);
		upload_end_buffer(b, r);
		return;
	}
	extents_copy_submit(&b->copy);
}

/* ----------------------------------------------------------------------- the thread */

static void upload_wait(struct upload_buffer *b)
{
	while (sem_wait(&b->is_free) < 0)
		CHECK(errno == EINTR);
}

void *upload_room(struct upload *u)
{
	struct upload_buffer *b = &u->buffers[u->next];

	upload_wait(b);
	sem_post(&b->is_free); /* nobody else takes it */
	return b->room;
}

void upload_put(struct upload *u, uint64_t at, uint64_t bytes, unsigned times, uint64_t apart)
{
	struct upload_buffer *b = &u->buffers[u->next];

	CHECK(bytes > 0 && bytes <= u->room && times > 0);
	upload_wait(b);
	b->at = at;
	b->bytes = bytes;
	b->times = times;
	b->apart = apart;
	u->next = (u->next + 1) % UPLOAD_BUFFERS;
	loopq_post(u->job->node->loopq, &b->put, upload_on_put);
}

int upload_settle(struct upload *u)
{
	for (unsigned i = 0; i < UPLOAD_BUFFERS; i++)
		upload_wait(&u->buffers[i]);
	return upload_status(u);
}

int upload_status(const struct upload *u)
{
	return atomic_load(&u->status);
}
