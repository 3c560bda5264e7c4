/* The beginning and the end of a client, and what it says of itself. */
#include "client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "reconnect.h"
#include "client_error.h"
#include "completion.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "device.h"
#include "env.h"
#include "options.h"

#define CONNECT_TIMEOUT_MS 5000u
#define RECONNECT_MS       60000u
#define NAME_MAX_BYTES     64
/* If the connection ends before the first answer. */
#define CONNECT_TRIES    5u
#define CONNECT_PAUSE_MS 20u /* doubles */

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

static void connect_free_versions(struct shardd_client *c)
{
	struct client_version *v = atomic_load(&c->daemon.version);

	while (v) {
		struct client_version *gone = v;

		v = v->next;
		free(gone);
	}
}

static struct shardd_client *connect_free(struct shardd_client *c)
{
	if (!c)
		return NULL;
	reconnect_stop(c);
	completion_stop(c);
	c->debug = debug_free(c->debug);
	tickets_deinit(&c->tickets);
	reconnect_deinit(c);
	if (c->link)
		ring_close(STEAL_PTR(c->link->ring));
	places_deinit(&c->places);
	device_close(c);
	c->link = link_free(c->link);
	completion_close(c);
	connect_free_versions(c);
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
	reconnect_init(&c->reconnect);
	return c;
}

/* Of the session. A program's name may be longer than what the daemon takes; a name that the caller
 * gives is refused by the daemon instead of being cut. */
static int connect_names(struct shardd_client *c, const struct shardd_options *o, const char *path,
			 struct shardd_error *err)
{
	char own[NAME_MAX_BYTES + 1];

	snprintf(own, sizeof(own), "%s", program_invocation_short_name);
	c->socket = strdup(path);
	c->reconnect.name = strdup(o->name ? o->name : own);
	return c->socket && c->reconnect.name ? 0 : error_memory(err);
}

/* How long to look for a daemon that was there before. */
static int connect_choose_reconnect(struct shardd_client *c, const struct shardd_options *o,
				    struct shardd_error *err)
{
	uint32_t ms = o->reconnect_ms;
	int r = 0;

	if (!ms && getenv("SHARDD_RECONNECT_MS"))
		r = env_number("SHARDD_RECONNECT_MS", INT32_MAX, &ms, err);
	else if (!ms)
		ms = RECONNECT_MS;
	c->reconnect.ms = ms == SHARDD_NO_RECONNECT ? 0 : ms > INT32_MAX ? INT32_MAX : ms;
	c->reconnect.call = o->on_connection;
	c->reconnect.data = o->connection_data;
	return r;
}

/* A daemon that dies while it attaches us has a successor, perhaps. One that does not want us closes
 * the connection, too, so the tries are few. */
static int connect_open_link(const struct link_plan *plan, uint32_t timeout_ms, struct link **ret,
			     struct shardd_error *err)
{
	unsigned pause_ms = CONNECT_PAUSE_MS;
	int r;

	for (unsigned tries = CONNECT_TRIES;; tries--) {
		r = link_open(plan, timeout_ms, timeout_ms, ret, err);
		if (tries == 1 || !error_is_lost(r, err))
			return r;
		poll(NULL, 0, (int)pause_ms);
		pause_ms *= 2;
	}
}

static int connect_attach(struct shardd_client *c, uint32_t timeout_ms, struct shardd_error *err)
{
	bool local = c->handover != SHARDD_HANDOVER_IPC;
	struct link_plan plan = { c->socket, c->reconnect.name, local, NULL };
	int r = connect_open_link(&plan, timeout_ms, &c->link, err);

	if (r == 0) {
		c->link->number = 1;
		r = client_take_link(c, c->link, err);
	}
	if (r == 0 && local)
		map_take_channel(&c->map, &c->link->channel);
	else if (r == 0)
		map_without_channel(&c->map);
	return r;
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
		r = connect_choose_reconnect(c, &o, err);
	if (r == 0)
		r = connect_names(c, &o, path, err);
	if (r == 0)
		r = connect_attach(c, timeout_ms, err);
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
	info.daemon_version = atomic_load(&c->daemon.version)->text;
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
