#include "app/devices.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "backend/host_memory.h"
#include "core/check.h"
#include "core/log.h"
#include "engine/engine_impl.h"
#include "engine/nccl_lib.h"

#define MAX_UUIDS 32u

/* One for each device: news carries nothing but its userdata. */
static struct news {
	struct node *node;
	struct device *device;
	void (*lost)(struct node *node, struct device *device);
} news[NODE_MAX_DEVICES];

static void devices_on_news(void *userdata, enum backend_news what)
{
	struct news *n = userdata;
	const struct backend_info *info = backend_info(n->device->backend);

	if (what == BACKEND_NEWS_LOST) {
		log_error("server", "device lost id=%s uuid=%s why=\"%s\"", info->id, info->uuid,
			  info->lost);
		node_device_lost(n->node, n->device);
		n->lost(n->node, n->device);
	}
	node_wake(n->node);
}

/* ------------------------------------------------------------------ backends */

static int devices_start_host(struct loopq *loopq, const struct config *c, struct backend **ret,
			      unsigned *ret_n, struct fault *f)
{
	int r = backend_host_new(loopq, c->threads, 0, strcmp(c->prefault, "yes") == 0, &ret[0]);

	if (r < 0) {
		fault_errno(f, r, "starting the host backend");
		snprintf(f->field, sizeof(f->field), "backend");
		return (int)f->code;
	}
	*ret_n = 1;
	return 0;
}

/* Split "GPU-a, GPU-b" into a list. @text is changed. Return: how many; MAX_UUIDS + 1: too many. */
static unsigned devices_split(char *text, const char **ret)
{
	char *save = NULL;
	unsigned n = 0;

	for (char *w = strtok_r(text, ", \t", &save); w; w = strtok_r(NULL, ", \t", &save)) {
		if (n == MAX_UUIDS)
			return MAX_UUIDS + 1;
		ret[n++] = w;
	}
	return n;
}

static enum backend_order devices_order_of(const struct config *c)
{
	if (strcmp(c->gpu_order, "timeline") == 0)
		return BACKEND_ORDER_TIMELINE;
	return strcmp(c->gpu_order, "events") == 0 ? BACKEND_ORDER_EVENTS : BACKEND_ORDER_NONE;
}

static int devices_start_cuda(struct loopq *loopq, const struct config *c, struct backend **ret,
			      unsigned *ret_n, struct fault *f)
{
	char text[sizeof(c->devices)];
	const char *uuids[MAX_UUIDS];
	struct backend_cuda_options o = { .uuids = uuids,
					  .order = devices_order_of(c),
					  .measure = strcmp(c->gpu_measure_overlap, "yes") == 0,
					  .program = "/proc/self/exe" };

	memcpy(text, c->devices, sizeof(text));
	o.n_uuids = devices_split(text, uuids);
	if (o.n_uuids > MAX_UUIDS)
		return fault_set(f, FAULT_INVALID, "devices",
				 "devices names more than %u GPUs, the maximum", MAX_UUIDS);
	if (backend_cuda_new(loopq, &o, ret, NODE_MAX_DEVICES, ret_n, f))
		snprintf(f->field, sizeof(f->field), "backend");
	return (int)f->code;
}

/* auto: GPUs where there are any, else the host's memory. */
static int devices_start_backends(struct loopq *loopq, const struct config *c, struct backend **ret,
				  unsigned *ret_n, struct fault *f)
{
	struct fault why = FAULT_NULL;

	if (strcmp(c->backend, "host") == 0)
		return devices_start_host(loopq, c, ret, ret_n, f);
	if (strcmp(c->backend, "cuda") == 0)
		return devices_start_cuda(loopq, c, ret, ret_n, f);
	if (devices_start_cuda(loopq, c, ret, ret_n, &why) == 0)
		return 0;
	log_info("server", "no usable GPU: using host memory why=\"%s\"", why.text);
	return devices_start_host(loopq, c, ret, ret_n, f);
}

/* A limit above what the machine has is a mistake. A limit above what is available now may be
 * intended: other processes may end. */
static int devices_check_memory(const struct config *c, const struct host_memory *m,
				struct fault *f)
{
	unsigned long long want = c->memory_bytes, total = host_memory_total(m);

	if (want > total)
		return fault_set(f, FAULT_INVALID, "memory_bytes",
				 "memory_bytes is %llu, but %s has %llu bytes: set it to at most "
				 "that, or to 0 for four fifths of it",
				 want, m->limit < m->machine ? "the control group" : "the machine",
				 total);
	if (want > host_memory_left(m))
		log_warn("server",
			 "memory_bytes is more than what is available now memory_bytes=%llu "
			 "available=%llu group_left=%lld total=%llu",
			 want, (unsigned long long)m->available,
			 m->left == UINT64_MAX ? -1 : (long long)m->left, total);
	return 0;
}

/* For host memory 0 means a share, since trainers need memory of the same machine; for a GPU it
 * means all of it. @ret: 0: all. */
static int devices_limit(const struct backend *b, const struct config *c, uint64_t *ret,
			 struct fault *f)
{
	struct host_memory m;

	*ret = c->memory_bytes;
	if (backend_info(b)->ordinal >= 0 || host_memory_read(&HOST_MEMORY_OWN, &m) < 0)
		return 0;
	if (!c->memory_bytes)
		*ret = host_memory_share(&m);
	return c->memory_bytes ? devices_check_memory(c, &m, f) : 0;
}

static void devices_add_device(struct node *node, struct backend *b, uint64_t limit, bool seals,
			       void (*lost)(struct node *node, struct device *device))
{
	struct device *d = &node->devices[node->n_devices];
	const struct backend_info *info = backend_info(b);

	slab_device_init(d, b, limit);
	d->seals = seals;
	if (node->n_devices)
		slab_device_follow(d, &node->devices[0], node->n_devices);
	news[node->n_devices] = (struct news){ node, d, lost };
	backend_on_news(b, devices_on_news, &news[node->n_devices]);
	node->n_devices++;
	log_info("server", "device id=%s%s%s capacity_mib=%llu kernels=%s detail=\"%s\"%s%s%s",
		 info->id, *info->uuid ? " uuid=" : "", info->uuid,
		 (unsigned long long)(d->quota.limit >> 20), info->kernels, info->detail,
		 *info->mode ? " mode=\"" : "", info->mode, *info->mode ? "\"" : "");
}

/* On a node of GPUs. */
static int devices_add_pages(struct node *node, struct loopq *loopq)
{
	struct backend *b;
	int r = node_has_gpus(node) ? backend_pages_new(loopq, &b) : -ENODEV;

	if (r)
		return r == -ENODEV ? 0 : r;
	slab_device_init(&node->pages, b, 0);
	slab_device_follow(&node->pages, &node->devices[0], NODE_MAX_DEVICES);
	return 0;
}

/* ------------------------------------------------------------------- engines */

static bool devices_is_cuda(const struct node *node)
{
	return backend_info(node->devices[0].backend)->ordinal >= 0;
}

/* It uses the network interface that Gloo would use. */
static void devices_prepare_nccl(const struct config *c)
{
	char address[HOSTPORT_HOST_BYTES];

	nccl_lib_environment();
	if (config_store(c) == CONFIG_STORE_NONE)
		return;
	config_data_address(c, address);
	nccl_lib_between_nodes(*c->peer.data_interface ? c->peer.data_interface : NULL, address);
}

/* NCCL is needed between GPUs. A node with one GPU, or whose jobs use one GPU each, works without
 * it. */
static int devices_start_engine(struct node *node, struct loopq *loopq, const struct config *c,
				struct fault *f)
{
	struct fault why = FAULT_NULL;
	bool must = strcmp(c->engine, "nccl") == 0;

	snprintf(node->engine_why, sizeof(node->engine_why), "the key engine is %s", c->engine);
	if (must && !devices_is_cuda(node))
		return fault_set(f, FAULT_INVALID, "engine",
				 "engine is nccl, but the backend is host memory: set engine to "
				 "auto or local");
	if (strcmp(c->engine, "local") == 0 || !devices_is_cuda(node))
		return 0;
	if (engine_nccl_new(loopq, &node->engine, &why)) {
		snprintf(node->engine_why, sizeof(node->engine_why), "%.255s", why.text);
		if (must)
			return fault_set(f, FAULT_UNAVAILABLE, "engine", "%s", why.text);
		log_warn("server", "NCCL is not available: a job can use only one GPU why=\"%s\"",
			 why.text);
		return 0;
	}
	node->engine_for_one = must;
	return 0;
}

/* Done now so that the first job does not wait for it. If it fails, jobs on one device still
 * work. */
static void devices_warm_up(struct node *node)
{
	struct device *all[NODE_MAX_DEVICES];
	struct node_comm *nc;
	struct fault f = FAULT_NULL;
	enum res r = RES_WAIT;

	for (unsigned i = 0; i < node->n_devices; i++)
		all[i] = &node->devices[i];
	if (node->n_devices > 1 && !node->engine)
		return;
	while (r == RES_WAIT) {
		r = node_comm(node, all, node->n_devices, &nc, &f);
		if (r == RES_WAIT)
			uv_run(node->loop, UV_RUN_ONCE);
	}
	if (r == RES_DONE)
		nc->users++; /* they stay warm */
	else
		log_warn("server", "devices cannot communicate with each other why=\"%s\"", f.text);
}

int devices_start(struct node *node, struct loopq *loopq, const struct config *config,
		  void (*lost)(struct node *node, struct device *device), struct fault *f)
{
	struct backend *backends[NODE_MAX_DEVICES];
	uint64_t limit = 0;
	unsigned n = 0;
	int r;

	devices_prepare_nccl(config);
	if (devices_start_backends(loopq, config, backends, &n, f))
		return (int)f->code;
	for (unsigned i = 0; i < n; i++) {
		if (!f->code)
			(void)devices_limit(backends[i], config, &limit, f);
		devices_add_device(node, backends[i], limit,
				   strcmp(config->seal_parameters, "yes") == 0, lost);
	}
	if (f->code)
		return (int)f->code; /* devices_end closes them */
	r = devices_add_pages(node, loopq);
	if (r < 0)
		return fault_errno(f, r, "starting the backend for pages of the host");
	r = engine_local_new(loopq, &node->local);
	if (r < 0)
		return fault_errno(f, r, "starting the local engine");
	if (devices_start_engine(node, loopq, config, f))
		return (int)f->code;
	devices_warm_up(node);
	return 0;
}

void devices_tick(struct node *node, uint64_t now_us)
{
	for (unsigned i = 0; i < node->n_devices; i++)
		backend_tick(node->devices[i].backend, now_us);
}

bool devices_idle(const struct node *node)
{
	const struct node_comm *nc, *tmp;

	for (unsigned i = 0; i < node->n_devices; i++)
		if (node->devices[i].quota.used || backend_in_flight(node->devices[i].backend))
			return false;
	if (node->pages.quota.used)
		return false;
	list_for_each (nc, tmp, &node->comms, link)
		if (nc->making)
			return false;
	return (!node->engine || engine_leaving(node->engine) == 0) &&
	       (!node->nodes_engine || engine_leaving(node->nodes_engine) == 0);
}

void devices_end(struct node *node)
{
	node_deinit(node);
	if (node->nodes_engine != node->engine)
		engine_close(node->nodes_engine);
	node->nodes_engine = NULL;
	engine_close(node->engine);
	engine_close(node->local);
	if (node->pages.backend) {
		slab_device_deinit(&node->pages);
		node->pages.backend = backend_close(node->pages.backend);
	}
	for (unsigned i = node->n_devices; i-- > 0;) {
		struct backend *b = node->devices[i].backend;

		slab_device_deinit(&node->devices[i]);
		backend_close(b);
	}
	node->n_devices = 0;
}
