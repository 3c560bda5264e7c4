/* The beginning and the end of a client, and what it says of itself. */
#include "client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client_error.h"
#include "completion.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "device.h"
#include "env.h"
#include "methods.h"
#include "options.h"
#include "shardd.pb-c.h"

#define PROTOCOL           1u
#define CONNECT_TIMEOUT_MS 5000u
#define NAME_MAX_BYTES     64

/* A page that contains 1, and 0 in a child after fork. Each call of the library reads it; a getpid
 * instead would cost half as much as a no-op. Return: NULL: not available. */
static const uint32_t *connect_mark_here(void)
{
	uint32_t *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		return NULL;
	if (madvise(page, (size_t)sysconf(_SC_PAGESIZE), MADV_WIPEONFORK) < 0) {
		munmap(page, (size_t)sysconf(_SC_PAGESIZE));
		return NULL;
	}
	*page = 1;
	return page;
}

static struct shardd_client *connect_free(struct shardd_client *c)
{
	if (!c)
		return NULL;
	completion_stop(c);
	c->debug = debug_free(c->debug);
	tickets_deinit(&c->tickets);
	ring_close(c->ring);
	places_deinit(&c->places);
	device_close(c);
	rpc_client_close(c->rpc);
	completion_close(c);
	free(c->daemon.version);
	free(c->socket);
	free(c->job);
	free(c->blob);
	c->magic = 0;
	if (c->here)
		munmap((void *)c->here, (size_t)sysconf(_SC_PAGESIZE));
	free(c);
	return NULL;
}

static void connect_freep(struct shardd_client **c)
{
	*c = connect_free(*c);
}

static struct shardd_client *connect_new(void)
{
	struct shardd_client *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->magic = CLIENT_MAGIC;
	c->pid = getpid();
	c->here = connect_mark_here();
	pthread_mutex_init(&c->order, NULL);
	pthread_mutex_init(&c->device_lock, NULL);
	pthread_mutex_init(&c->failure.lock, NULL);
	pthread_mutex_init(&c->completion.lock, NULL);
	atomic_init(&c->completion.fd, -1);
	map_init(&c->map);
	tickets_init(&c->tickets);
	places_init(&c->places);
	return c;
}

static void connect_take_instance(struct shardd_client *c, const Shardd__V1__AttachResponse *a)
{
	if (a->instance.len == EXPECT_BYTES)
		memcpy(c->daemon.instance, a->instance.data, EXPECT_BYTES);
	for (unsigned i = 0; i < EXPECT_BYTES; i++)
		snprintf(c->daemon.instance_text + 2 * (size_t)i, 3, "%02x", c->daemon.instance[i]);
	c->daemon.started_unix_s = a->started_unix_s;
}

/* What the daemon answered to Attach; binds the local channel. */
static int connect_attached(struct shardd_client *c, const char *path,
			    const Shardd__V1__AttachResponse *a, struct shardd_error *err)
{
	int r;

	if (a->protocol != PROTOCOL || a->token.len != SHD1_TOKEN_BYTES)
		return error_set(err, SHARDD_UNIMPLEMENTED, NULL,
				 "daemon %s speaks protocol %u, this library %u", a->version,
				 a->protocol, PROTOCOL);
	c->session = a->session;
	c->daemon.max_ops = a->max_inflight_ops;
	c->daemon.max_message = a->max_message_bytes;
	c->daemon.version = strdup(a->version);
	c->socket = strdup(path);
	if (!c->daemon.version || !c->socket)
		return error_memory(err);
	connect_take_instance(c, a);
	if (c->handover == SHARDD_HANDOVER_IPC) {
		map_without_channel(&c->map);
		return 0;
	}
	r = map_open(&c->map, path, a->token.data, a->session, err);
	if (r < 0 || a->ring != RING_VERSION || env_no_ring())
		return r;
	return ring_open(&c->map.channel, path, &c->ring, err);
}

static int connect_attach(struct shardd_client *c, const char *path, const char *name,
			  uint32_t timeout_ms, struct shardd_error *err)
{
	Shardd__V1__AttachRequest request = SHARDD__V1__ATTACH_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	char own[NAME_MAX_BYTES + 1];
	int r;

	/* A program's name may be longer than what the daemon takes; a name that the
	 * caller gives is refused by the daemon instead of being cut. */
	snprintf(own, sizeof(own), "%s", program_invocation_short_name);
	request.client_name = name ? (char *)name : own;
	request.protocol = PROTOCOL;
	r = rpc_client_call(c->rpc, METHOD_Attach, &request.base,
			    &shardd__v1__attach_response__descriptor, timeout_ms, &reply, err);
	if (r < 0)
		return r;
	return connect_attached(c, path, (const Shardd__V1__AttachResponse *)reply, err);
}

int shardd_connect(const struct shardd_options *options, shardd_client **ret,
		   struct shardd_error *err)
{
	struct shardd_options o = { .size = sizeof(o) };
	_cleanup_(connect_freep) struct shardd_client *c = NULL;
	struct shardd_error scratch;
	const char *path;
	uint32_t timeout_ms;
	int r;

	err = err ? err : &scratch;
	if (!ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (options) {
		r = client_check_size(options, sizeof(o), "options.size", err);
		if (r < 0)
			return r;
		o = *options;
		if (!o.on_stall != !o.stall_ms)
			return error_set(err, SHARDD_INVALID_ARGUMENT, "options.stall_ms",
					 "stall_ms is %u and on_stall is %s: give both or neither",
					 o.stall_ms, o.on_stall ? "set" : "NULL");
	}
	env_warn("libshardd");
	path = env_socket(o.socket);
	timeout_ms = o.connect_timeout_ms ? o.connect_timeout_ms : CONNECT_TIMEOUT_MS;
	c = connect_new();
	if (!c)
		return error_memory(err);
	c->on_stall.call = o.on_stall;
	c->on_stall.data = o.stall_data;
	c->on_stall.ms = o.stall_ms;
	r = debug_new(&c->debug, err);
	if (r == 0)
		r = device_choose(c, &o, err);
	if (r == 0)
		r = rpc_client_connect(path, timeout_ms, &c->rpc, err);
	if (r < 0)
		return r;
	r = connect_attach(c, path, o.name, timeout_ms, err);
	if (r < 0)
		return r;
	*ret = STEAL_PTR(c);
	return 0;
}

void shardd_close(shardd_client *c)
{
	/* In a child after fork the connection is the parent's: it must not end. */
	if (c && client_check(c, NULL) == 0)
		connect_free(c);
}

int shardd_get_info(const shardd_client *c, struct shardd_info *ret, struct shardd_error *err)
{
	struct shardd_info info = { .size = sizeof(info) };

	if (!c || !ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, c ? "ret" : "client",
				 c ? "ret is NULL" : "the client is NULL");
	if (ret->size < sizeof(info) || ret->size > OPTIONS_MAX_BYTES)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret.size",
				 "ret.size is %zu: set it to the size of the struct, %zu",
				 ret->size, sizeof(info));
	info.size = ret->size;
	info.session = c->session;
	info.daemon_version = c->daemon.version;
	info.instance = c->daemon.instance_text;
	info.daemon_started = c->daemon.started_unix_s;
	info.draining = atomic_load(&c->draining);
	(void)device_get(c, &info.device, NULL);
	memset(ret, 0, info.size);
	*ret = info;
	return 0;
}

void shardd_interrupt(shardd_client *c)
{
	if (c)
		atomic_fetch_add(&c->interrupts, 1);
}

void shardd_set_timeout(shardd_client *c, uint32_t ms)
{
	if (c)
		atomic_store(&c->timeout_ms, ms);
}
