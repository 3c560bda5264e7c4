/* The device on which this rank's memory is, copies to and from it, and its streams. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "cuda_context.h"
#include "map_cuda.h"
#include "stream.h"

/* How long closing, or joining after the daemon has died, waits for streams that still wait for the
 * daemon, or have not come to what an op put on them. */
#define QUIET_TIMEOUT_MS 10000

/* --------------------------------------------------------------------- join */

int device_choose(struct shardd_client *c, const struct shardd_options *options,
		  struct shardd_error *err)
{
	const char *wanted = options->device ? options->device : getenv("SHARDD_DEVICE");

	if (options->handover > SHARDD_HANDOVER_IPC)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.handover",
				 "options.handover is %d, must be a value of enum shardd_handover",
				 (int)options->handover);
	c->handover = options->handover ? options->handover : SHARDD_HANDOVER_FD;
	if (wanted && strlen(wanted) >= sizeof(c->wanted))
		return error_set(
			err, SHARDD_INVALID_ARGUMENT, "options.device",
			"options.device (or SHARDD_DEVICE) has %zu bytes: a GPU's UUID or a "
			"device's id has at most %zu",
			strlen(wanted), sizeof(c->wanted) - 1);
	if (wanted && *wanted)
		snprintf(c->wanted, sizeof(c->wanted), "%s", wanted);
	else if (!cuda_current_uuid(c->wanted))
		c->wanted[0] = 0;
	return 0;
}

void device_ask(struct shardd_client *c, Shardd__V1__JoinRequest *request)
{
	bool ipc = c->handover == SHARDD_HANDOVER_IPC;

	/* The mapped memory is on that GPU: a later epoch must use the same one. */
	request->device = c->device.uuid[0] ? c->device.uuid : c->wanted;
#ifdef SHARDD_CUDA
	request->streams = true;
#endif
	request->no_channel = ipc;
	request->job->ipc = ipc;
}

int device_part(struct shardd_client *c, struct shardd_error *err)
{
	int r = 0;

	if (c->cuda && c->joined_link && c->joined_link != c->link->number)
		r = streams_part(c->streams, QUIET_TIMEOUT_MS, err);
	return r;
}

static void device_copy_text(char *to, size_t bytes, const char *from)
{
	snprintf(to, bytes, "%s", from ? from : "");
}

static bool device_is(const struct shardd_client *c, const char *uuid)
{
#ifdef SHARDD_CUDA
	return strcasecmp(c->cuda->uuid, uuid) == 0;
#else
	(void)c;
	(void)uuid;
	return false;
#endif
}

static int device_use_gpu(struct shardd_client *c, const char *uuid, bool reads,
			  struct shardd_error *err)
{
	struct streams *streams;
	int r;

	if (c->cuda && device_is(c, uuid))
		return 0;
	if (c->cuda)
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this client reads memory of another GPU, and the daemon put this "
				 "rank on %s: connect again",
				 uuid);
	r = cuda_open(uuid, reads, &c->cuda, err);
	if (r < 0)
		return r;
	streams = streams_new(c, c->cuda);
	if (!streams) {
		c->cuda = cuda_close(c->cuda);
		return error_memory(err);
	}
	atomic_store(&c->streams, streams);
	map_use(&c->map, &map_cuda_ops, c->cuda);
	return 0;
}

/* Addresses that were handed out stay what they are, so the device does. */
static int device_check_same(const struct shardd_device *was, const struct shardd_device *is,
			     struct shardd_error *err)
{
	if (!was->id[0] ||
	    (strcmp(was->backend, is->backend) == 0 && strcmp(was->uuid, is->uuid) == 0))
		return 0;
	return error_set(
		err, SHARDD_FAILED_PRECONDITION, NULL,
		"this client's memory is on %s%s%s, but the daemon put this rank on %s%s%s: "
		"connect again",
		was->id, was->uuid[0] ? " " : "", was->uuid, is->id, is->uuid[0] ? " " : "",
		is->uuid);
}

int device_take(struct shardd_client *c, const Shardd__V1__JoinResponse *reply,
		struct shardd_error *err)
{
	struct shardd_device d = { .id = "host:0", .backend = "host" };
	int r;

	if (reply->device) {
		device_copy_text(d.id, sizeof(d.id), reply->device->id);
		device_copy_text(d.backend, sizeof(d.backend), reply->device->backend);
		device_copy_text(d.uuid, sizeof(d.uuid), reply->device->uuid);
	}
	r = device_check_same(&c->device, &d, err);
	if (r == 0 && strcmp(d.backend, "cuda") == 0) {
		pthread_mutex_lock(&c->device_lock); /* a reader of this client may do it, too */
		r = device_use_gpu(c, d.uuid, false, err);
		pthread_mutex_unlock(&c->device_lock);
		if (r == 0)
			r = streams_join(c->streams, reply->streams, err);
		d.streams = r == 0 && streams_linked(c->streams);
	}
	if (r < 0)
		return r;
	pthread_mutex_lock(&c->device_lock);
	c->device = d;
	pthread_mutex_unlock(&c->device_lock);
	return 0;
}

int device_open(struct shardd_client *c, const char *uuid, struct shardd_error *err)
{
	const char *wanted = strncasecmp(c->wanted, "GPU-", 4) == 0 ? c->wanted : uuid;
	int r = 0;

	pthread_mutex_lock(&c->device_lock);
	if (!c->cuda)
		r = device_use_gpu(c, wanted, true, err);
	pthread_mutex_unlock(&c->device_lock);
	return r;
}

const char *device_uuid(const struct shardd_client *c)
{
#ifdef SHARDD_CUDA
	return c->cuda ? c->cuda->uuid : "";
#else
	(void)c;
	return "";
#endif
}

int device_wait(struct shardd_client *c, struct shardd_error *err)
{
#ifdef SHARDD_CUDA
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	CUstream stream;
	CUresult cr;
	int r = c->cuda ? cuda_enter(c->cuda, &scope, err) : 0;

	if (!c->cuda || r < 0)
		return r;
	cr = stream_of_thread(c->streams, &stream) ? c->cuda->lib->cuStreamSynchronize(stream)
						   : c->cuda->lib->cuCtxSynchronize();
	return cr == CUDA_SUCCESS ? 0
				  : cuda_error(c->cuda, cr, err, "waiting for the work of GPU %s",
					       c->cuda->uuid);
#else
	(void)c;
	(void)err;
	return 0;
#endif
}

void device_close(struct shardd_client *c)
{
	if (!c->cuda) {
		map_deinit(&c->map);
		return;
	}
	/* A stream that waits for ever, for a daemon that is gone, keeps what it reads; one that
	 * does not come so far keeps what it writes. */
	if (!streams_settle(c->streams, QUIET_TIMEOUT_MS)) {
		map_abandon(&c->map);
		map_deinit(&c->map);
		return;
	}
	map_deinit(&c->map);
	streams_free(c->streams);
	c->streams = NULL;
	c->cuda = cuda_close(c->cuda);
}

/* ------------------------------------------------------------------ what it is */

int device_get(const struct shardd_client *c, struct shardd_device *ret, struct shardd_error *err)
{
	struct shardd_client *own = (struct shardd_client *)c;
	int r = client_check(c, err);

	if (r < 0)
		return r;
	CHECK(c); /* or client_check had refused it */
	pthread_mutex_lock(&own->device_lock);
	if (c->device.id[0])
		*ret = c->device;
	else
		r = error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			      "this client has not joined a job yet: call shardd_join first");
	pthread_mutex_unlock(&own->device_lock);
	return r;
}

/* ------------------------------------------------------------------- copies */

static int device_check(const struct shardd_client *c, const void *dst, const void *src,
			size_t bytes, struct shardd_error *err)
{
	int r = client_check(c, err);

	if (r == 0 && bytes && (!dst || !src))
		r = error_set(err, SHARDD_INVALID_ARGUMENT, dst ? "src" : "dst", "%s is NULL",
			      dst ? "src" : "dst");
	return r;
}

int shardd_copy(shardd_client *c, enum shardd_direction direction, void *dst, const void *src,
		size_t bytes, struct shardd_error *err)
{
	int r = device_check(c, dst, src, bytes, err);
	const void *to = dst;

	if (r < 0)
		return r;
	switch (direction) {
	case SHARDD_TO_DEVICE:
		if (c->debug)
			r = debug_under(c->debug, &to, bytes, true, "dst", err);
		return r < 0 ? r : map_write(&c->map, (void *)to, src, bytes, err);
	case SHARDD_FROM_DEVICE:
		if (c->debug)
			r = debug_under(c->debug, &src, bytes, false, "src", err);
		return r < 0 ? r : map_read(&c->map, dst, src, bytes, err);
	}
	return error_set(err, SHARDD_INVALID_ARGUMENT, "direction",
			 "direction is %d; it must be TO_DEVICE or FROM_DEVICE", (int)direction);
}

/* ------------------------------------------------------------------- streams */

int shardd_set_stream(shardd_client *c, void *stream, struct shardd_error *err)
{
	struct streams *streams = c ? atomic_load(&c->streams) : NULL;
	struct shardd_device device = { 0 };
	int r;

	if (c && stream == SHARDD_NO_STREAM) {
		if (streams)
			streams_clear(streams);
		return 0;
	}
	r = device_get(c, &device, err);
	if (r < 0)
		return r;
	if (!streams || !device.streams)
		return error_set(
			err, SHARDD_FAILED_PRECONDITION, NULL,
			"the daemon orders no ops with streams on %s: it answers an op when "
			"the op has been executed",
			device.id);
	return streams_set(streams, stream, err);
}
