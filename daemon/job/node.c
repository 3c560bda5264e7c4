#include "job/node.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/state.h"

void node_instance_text(const struct node *node, char ret[2 * NODE_INSTANCE_BYTES + 1])
{
	for (unsigned i = 0; i < NODE_INSTANCE_BYTES; i++)
		snprintf(ret + 2 * (size_t)i, 3, "%02x", node->instance[i]);
}

void node_init(struct node *node, uv_loop_t *loop)
{
	node->loop = loop;
	list_init(&node->comms);
	list_init(&node->line.jobs);
	condition_init(&node->changed, "memory or communicators");
	quarantine_init(&node->quarantine);
	users_init(&node->users);
	host_room_init(&node->room, &HOST_MEMORY_OWN);
	closer_init(&node->closer);
}

/* ------------------------------------------------------------------- devices */

struct device *node_device(struct node *node, const char *name)
{
	for (unsigned i = 0; i < node->n_devices; i++) {
		const struct backend_info *info = backend_info(node->devices[i].backend);

		if (strcmp(info->id, name) == 0 ||
		    (*info->uuid && strcasecmp(info->uuid, name) == 0))
			return &node->devices[i];
	}
	return NULL;
}

bool node_has_gpus(const struct node *node)
{
	return backend_info(node->devices[0].backend)->ordinal >= 0;
}

void node_list_devices(const struct node *node, char *buf, size_t bytes)
{
	size_t at = 0;

	CHECK(bytes > 0);
	buf[0] = '\0';
	for (unsigned i = 0; i < node->n_devices && at < bytes; i++) {
		const struct backend_info *info = backend_info(node->devices[i].backend);
		int n = snprintf(buf + at, bytes - at, "%s%s%s%s%s", i ? ", " : "", info->id,
				 *info->uuid ? " (" : "", info->uuid, *info->uuid ? ")" : "");

		at += n > 0 ? (size_t)n : 0;
	}
}

struct host_room *node_room(struct node *node)
{
	struct host_room *slabs = backend_room(node->devices[0].backend);

	return slabs ? slabs : &node->room;
}

uint64_t node_used(const struct node *node)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < node->n_devices; i++)
		sum += node->devices[i].quota.used;
	return sum;
}

uint64_t node_capacity(const struct node *node)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < node->n_devices; i++)
		sum += node->devices[i].quota.limit;
	return sum;
}

/* -------------------------------------------------------------- communicators */

static void node_sweep(struct node *node);

void node_wake(struct node *node)
{
	node_sweep(node);
	condition_signal(&node->changed);
}

static void node_on_wakes(struct work *w)
{
	struct node *node = CONTAINER_OF(w, struct node, wakes);

	node->waking = false;
	node_wake(node);
}

void node_wake_later(struct node *node)
{
	if (node->waking)
		return;
	node->waking = true;
	loopq_post(node->loopq, &node->wakes, node_on_wakes);
}

static const char *const queue_names[_BACKEND_Q_N] = { "reduce", "gather" };

static struct engine *node_engine_for(struct node *node, unsigned n)
{
	return n > 1 || (node->engine_for_one && node->engine) ? node->engine : node->local;
}

static struct engine *node_engine_of(const struct node_comm *nc)
{
	return nc->spans ? nc->node->nodes_engine : node_engine_for(nc->node, nc->n);
}

static const struct state_row node_comm_states[] = {
	[COMM_MAKING] = { "MAKING", STATE_TO(COMM_READY) | STATE_TO(COMM_BROKEN) },
	[COMM_READY] = { "READY", STATE_TO(COMM_BROKEN) },
	[COMM_BROKEN] = { "BROKEN", STATE_TO(COMM_MAKING) },
};

static void node_state_move(struct node_comm *nc, enum node_comm_state to)
{
	state_move(node_comm_states, &nc->state, (uint8_t)to);
}

static void node_set_broken(struct node_comm *nc, const char *why)
{
	if (nc->state == COMM_BROKEN)
		return;
	node_state_move(nc, COMM_BROKEN);
	nc->breaks++;
	snprintf(nc->why, sizeof(nc->why), "%s", why);
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		if (nc->comm[q])
			comm_abort(nc->comm[q]);
	if (nc->making > 0 && node_engine_of(nc))
		engine_abandon(node_engine_of(nc), nc);
}

void node_comm_break(struct node_comm *nc, const char *why)
{
	struct node *node = nc->node;

	if (nc->state == COMM_BROKEN)
		return;
	node_set_broken(nc, why);
	if (node->comm_broke)
		node->comm_broke(node, nc, nc->why);
	node_wake(node);
}

static const char *node_reason(const struct node_comm *nc, int status)
{
	const struct engine *e = node_engine_of(nc);
	const char *why = e ? engine_why(e) : "";

	return *why                         ? why
	       : status == ENGINE_E_ABORTED ? "it was aborted"
					    : strerrordesc_np(-status);
}

static void node_on_failed(void *userdata, struct comm *comm, const char *why)
{
	(void)comm;
	node_comm_break(userdata, why);
}

/* One of the two is ready, or has failed. Its queue tells which one. */
static void node_on_ready(struct node_comm *nc, enum backend_queue q, struct comm *comm, int status)
{
	char why[256];

	CHECK(nc->making > 0);
	nc->making--;
	nc->comm[q] = comm;
	if (status) {
		snprintf(why, sizeof(why), "cannot create the communicator for %s: %.150s",
			 queue_names[q], node_reason(nc, status));
		node_set_broken(nc, why);
		nc->tell = true;
	} else if (nc->state == COMM_BROKEN) {
		comm_abort(comm);
	} else if (nc->making == 0) {
		node_state_move(nc, COMM_READY);
		if (nc->made_again)
			nc->made_again(nc);
	}
	if (nc->making == 0)
		node_wake(nc->node);
}

static void node_on_main_ready(void *userdata, struct comm *comm, int status)
{
	node_on_ready(userdata, BACKEND_Q_MAIN, comm, status);
}

static void node_on_gather_ready(void *userdata, struct comm *comm, int status)
{
	node_on_ready(userdata, BACKEND_Q_GATHER, comm, status);
}

static bool node_is_member(const struct node_comm *nc, const struct device *d)
{
	for (unsigned i = 0; i < nc->n; i++)
		if (nc->devices[i] == d)
			return true;
	return false;
}

/* Is @nc equal to @of without its lost devices, in the same order? */
static bool node_survives(const struct node_comm *of, const struct node_comm *nc, bool *ret_gone)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < of->n; i++) {
		ret_gone[i] = *backend_info(of->devices[i]->backend)->lost;
		if (ret_gone[i] == node_is_member(nc, of->devices[i]))
			return false;
		if (!ret_gone[i] && nc->devices[kept++] != of->devices[i])
			return false;
	}
	return kept == nc->n && kept < of->n;
}

/* Derive it from a communicator that lost devices, if there is one: its remaining members are
 * already connected. Return: 0, -EOPNOTSUPP (there is none, or it cannot), or negative errno. */
static int node_shrink_one(struct node_comm *nc, enum backend_queue q, const struct comm_options *o)
{
	struct node_comm *of, *tmp;
	bool gone[NODE_MAX_DEVICES];

	list_for_each (of, tmp, &nc->node->comms, link) {
		if (of == nc || of->spans || of->state != COMM_READY ||
		    !node_survives(of, nc, gone))
			continue;
		return comm_shrink(of->comm[q], gone, o);
	}
	return -EOPNOTSUPP;
}

static void node_make_one(struct node_comm *nc, struct engine *engine, enum backend_queue q)
{
	static const comm_ready_cb ready[_BACKEND_Q_N] = { node_on_main_ready,
							   node_on_gather_ready };
	struct backend *backends[NODE_MAX_DEVICES];
	char name[48], prefix[248];
	struct comm_group group = nc->group;
	struct comm_options o = { .name = name,
				  .devices = backends,
				  .n_devices = nc->n,
				  .queue = q,
				  .group = nc->spans ? &group : NULL,
				  .ready = ready[q],
				  .failed = node_on_failed,
				  .userdata = nc };
	int r;

	for (unsigned i = 0; i < nc->n; i++)
		backends[i] = nc->devices[i]->backend;
	snprintf(name, sizeof(name), "%s-%s%s", queue_names[q], backend_info(backends[0])->id,
		 nc->n > 1 ? "..." : "");
	snprintf(prefix, sizeof(prefix), "%s/%s", nc->prefix, queue_names[q]);
	group.prefix = prefix;
	nc->making++;
	r = nc->spans ? -EOPNOTSUPP : node_shrink_one(nc, q, &o);
	if (r == -EOPNOTSUPP)
		r = engine_comm_new(engine, &o);
	if (r < 0)
		node_on_ready(nc, q, NULL, r);
}

static void node_make(struct node_comm *nc)
{
	struct engine *engine = node_engine_of(nc);

	CHECK(nc->state == COMM_MAKING);
	nc->why[0] = '\0';
	nc->making++; /* not done before both were requested */
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		node_make_one(nc, engine, (enum backend_queue)q);
	nc->making--;
}

static bool node_in_use(const struct node_comm *nc)
{
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		if (nc->comm[q] && comm_in_flight(nc->comm[q]))
			return true;
	return nc->making > 0 || nc->ending > 0;
}

static void node_free_comms(struct node_comm *nc)
{
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		nc->comm[q] = comm_free(nc->comm[q]);
	list_unlink(&nc->link);
	free(nc);
}

static bool node_is_unused(const struct node_comm *nc)
{
	return nc->left && !nc->users && (nc->n > 1 || nc->spans) && nc->state != COMM_MAKING &&
	       !node_in_use(nc) && list_empty(&nc->windows);
}

static void node_sweep(struct node *node)
{
	struct node_comm *nc, *tmp;

	list_for_each (nc, tmp, &node->comms, link)
		if (node_is_unused(nc))
			node_free_comms(nc);
}

static void node_make_again(struct node_comm *nc)
{
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		nc->comm[q] = comm_free(nc->comm[q]);
	node_state_move(nc, COMM_MAKING);
	node_make(nc);
}

static struct node_comm *node_find(struct node *node, struct device *const *devices, unsigned n)
{
	struct node_comm *nc, *tmp;

	list_for_each (nc, tmp, &node->comms, link)
		if (!nc->spans && nc->n == n &&
		    memcmp(nc->devices, devices, n * sizeof(*devices)) == 0)
			return nc;
	return NULL;
}

static int node_refuse_lost(struct device *const *devices, unsigned n, struct fault *f)
{
	for (unsigned i = 0; i < n; i++) {
		const struct backend_info *info = backend_info(devices[i]->backend);

		if (*info->lost)
			return fault_set(f, FAULT_UNAVAILABLE, NULL, "%s", info->lost);
	}
	return 0;
}

/* The first request after it broke gets the error; the next request creates it again. */
static enum res node_ask_broken(struct node_comm *nc, struct fault *f)
{
	if (node_in_use(nc))
		return RES_WAIT;
	if (nc->tell) {
		nc->tell = false;
		fault_set(f, FAULT_UNAVAILABLE, NULL, "%s", nc->why);
		return RES_FAILED;
	}
	node_make_again(nc);
	return nc->state == COMM_READY ? RES_DONE : RES_WAIT;
}

static struct node_comm *node_new(struct node *node, struct device *const *devices, unsigned n)
{
	struct node_comm *nc = calloc(1, sizeof(*nc));

	if (!nc)
		return NULL;
	nc->node = node;
	nc->n = n;
	memcpy(nc->devices, devices, n * sizeof(*devices));
	list_init(&nc->link);
	list_init(&nc->windows);
	list_append(&node->comms, &nc->link);
	return nc;
}

static struct node_comm *node_add(struct node *node, struct device *const *devices, unsigned n)
{
	struct node_comm *nc = node_new(node, devices, n);

	if (nc)
		node_make(nc);
	return nc;
}

struct node_comm *node_comm_new(struct node *node, struct device *const *devices, unsigned n,
				const struct comm_group *group)
{
	struct node_comm *nc = node_new(node, devices, n);

	if (!nc)
		return NULL;
	nc->spans = true;
	nc->group = *group;
	snprintf(nc->prefix, sizeof(nc->prefix), "%s", group->prefix);
	nc->users = 1;
	node_make(nc);
	return nc;
}

enum res node_comm_there(struct node_comm *nc, struct fault *f)
{
	CHECK(nc->spans);
	if (nc->state == COMM_BROKEN)
		return res_of(fault_set(f, FAULT_ABORTED, NULL, "%s", nc->why));
	return nc->state == COMM_READY ? RES_DONE : RES_WAIT;
}

/* The devices of @nc that still work. */
static unsigned node_survivors(const struct node_comm *nc, struct device **ret)
{
	unsigned n = 0;

	for (unsigned i = 0; i < nc->n; i++)
		if (!*backend_info(nc->devices[i]->backend)->lost)
			ret[n++] = nc->devices[i];
	return n;
}

void node_device_lost(struct node *node, struct device *device)
{
	struct node_comm *nc, *tmp;
	char why[200];

	snprintf(why, sizeof(why), "device %s is lost", backend_info(device->backend)->id);
	list_for_each (nc, tmp, &node->comms, link) {
		struct device *left[NODE_MAX_DEVICES];
		unsigned n;

		if (!node_is_member(nc, device) || nc->state == COMM_BROKEN)
			continue;
		n = node_survivors(nc, left);
		if (!nc->spans && nc->state == COMM_READY && n > 1 && !node_find(node, left, n))
			(void)node_add(node, left, n); /* from this one, before it is aborted */
		node_set_broken(nc, why);
	}
}

enum res node_comm(struct node *node, struct device *const *devices, unsigned n,
		   struct node_comm **ret, struct fault *f)
{
	struct node_comm *nc = node_find(node, devices, n);
	enum res r = RES_DONE;

	if (node_refuse_lost(devices, n, f))
		return RES_FAILED;
	if (!node_engine_for(node, n)) {
		fault_set(f, FAULT_UNAVAILABLE, NULL,
			  "ranks on %u devices need NCCL, which is not available: %s", n,
			  node->engine_why);
		return RES_FAILED;
	}
	nc = nc ? nc : node_add(node, devices, n);
	if (!nc) {
		fault_errno(f, -ENOMEM, "making a communicator");
		return RES_FAILED;
	}
	if (nc->state == COMM_BROKEN)
		r = node_ask_broken(nc, f);
	else if (nc->state == COMM_MAKING)
		r = RES_WAIT;
	if (r != RES_FAILED)
		*ret = nc;
	return r;
}

void node_comm_leave(struct node_comm *nc)
{
	CHECK(nc->users > 0);
	nc->users--;
	nc->left = true;
	node_sweep(nc->node); /* what is still in use now is freed at the next change */
}

void node_comm_end(struct node_comm *nc, const char *why)
{
	CHECK(nc->spans);
	node_set_broken(nc, why);
	node_comm_leave(nc);
}

void node_deinit(struct node *node)
{
	struct node_comm *nc, *tmp;

	list_for_each (nc, tmp, &node->comms, link) {
		CHECK(!nc->making && !nc->ending && list_empty(&nc->windows));
		node_free_comms(nc);
	}
	closer_deinit(&node->closer);
	users_deinit(&node->users);
}
