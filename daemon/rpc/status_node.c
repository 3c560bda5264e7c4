/* The node in its cluster, its devices, communicators between them, and memory. */
#include <string.h>

#include "cluster/cluster.h"
#include "rpc/status_fill.h"

void status_fill_cluster(struct arena *a, Shardd__V1__GetStatusResponse *reply)
{
	struct cluster_info info;
	Shardd__V1__ClusterStatus **c;

	if (!cluster_info(&info))
		return;
	c = STATUS_MESSAGES(a, 1, ClusterStatus, cluster_status);
	if (!c)
		return;
	reply->cluster = c[0];
	c[0]->name = status_text(a, info.cluster);
	c[0]->node = status_text(a, info.node);
	c[0]->state = STATUS_STATE(ClusterState, cluster_state, info.state);
	c[0]->why = status_text(a, info.why);
}

static const char *status_node_order_name(enum backend_order order)
{
	static const char *const names[] = { "none", "timeline", "events" };

	return names[order];
}

static void status_node_fill_device(struct arena *a, const struct device *dev,
				    Shardd__V1__DeviceStatus *d)
{
	const struct backend_info *info = backend_info(dev->backend);

	d->id = status_text(a, info->id);
	d->backend = status_text(a, info->name);
	d->capacity_bytes = dev->quota.limit;
	d->used_bytes = dev->quota.used;
	d->quarantined_bytes = dev->quarantined;
	d->classes = status_classes(a, &dev->quota, &d->n_classes);
	d->uuid = status_text(a, info->uuid);
	d->kernels = status_text(a, info->kernels);
	d->detail = status_text(a, info->detail);
	d->order = (char *)status_node_order_name(info->order);
	d->mode = status_text(a, info->mode);
	d->lost = status_text(a, info->lost);
	d->overhead_bytes = info->overhead_bytes;
}

void status_fill_devices(struct arena *a, const struct node *node,
			 Shardd__V1__GetStatusResponse *reply)
{
	reply->devices = STATUS_MESSAGES(a, node->n_devices, DeviceStatus, device_status);
	reply->n_devices = reply->devices ? node->n_devices : 0;
	for (unsigned i = 0; i < reply->n_devices; i++)
		status_node_fill_device(a, &node->devices[i], reply->devices[i]);
}

static void status_node_fill_comm(struct arena *a, const struct node_comm *nc, unsigned q,
				  Shardd__V1__CommStatus *c)
{
	static const Shardd__V1__CommState states[] = {
		SHARDD__V1__COMM_STATE__COMM_STATE_MAKING,
		SHARDD__V1__COMM_STATE__COMM_STATE_READY,
		SHARDD__V1__COMM_STATE__COMM_STATE_BROKEN,
	};
	struct comm_info info = { .name = "", .engine = "", .gather = "", .detail = "" };

	c->devices = arena_take(a, nc->n * sizeof(*c->devices));
	for (unsigned i = 0; c->devices && i < nc->n; i++)
		c->devices[c->n_devices++] =
			status_text(a, backend_info(nc->devices[i]->backend)->id);
	c->state = states[nc->state];
	if (nc->comm[q])
		comm_info(nc->comm[q], &info);
	c->name = status_text(a, info.name);
	c->engine = status_text(a, info.engine);
	c->gather = status_text(a, info.gather);
	c->detail = status_text(a, nc->state == COMM_BROKEN ? nc->why : info.detail);
	c->memory_bytes = info.memory_bytes;
	c->ops = info.ops;
}

void status_fill_comms(struct arena *a, const struct node *node,
		       Shardd__V1__GetStatusResponse *reply)
{
	struct node_comm *nc, *tmp;
	size_t n = 0;

	list_for_each (nc, tmp, (struct list *)&node->comms, link)
		n += _BACKEND_Q_N;
	reply->comms = STATUS_MESSAGES(a, n, CommStatus, comm_status);
	if (!reply->comms)
		return;
	list_for_each (nc, tmp, (struct list *)&node->comms, link)
		for (unsigned q = 0; q < _BACKEND_Q_N; q++)
			status_node_fill_comm(a, nc, q, reply->comms[reply->n_comms++]);
}

/* The job that pays for a slab, if the caller may know it. */
static const struct job *status_node_payer_of(struct jobs *jobs, const struct status_scope *scope,
					      const struct slab *s)
{
	struct list *lists[] = { &jobs->all, &jobs->zombies };
	struct job *job, *tmp;

	for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
		list_for_each (job, tmp, lists[i], link)
			if (&job->quota == s->payer)
				return status_visible(scope, job) ? job : NULL;
	return NULL;
}

void status_fill_slabs(struct arena *a, struct jobs *jobs, const struct status_scope *scope,
		       Shardd__V1__GetStatusResponse *reply)
{
	struct slab *s, *tmp;
	size_t n = 0;

	list_for_each (s, tmp, &jobs->node->devices[0].table->slabs, link)
		n++;
	reply->slabs = STATUS_MESSAGES(a, n, SlabStatus, slab_status);
	if (!reply->slabs)
		return;
	list_for_each (s, tmp, &jobs->node->devices[0].table->slabs, link) {
		const struct job *job = status_node_payer_of(jobs, scope, s);
		Shardd__V1__SlabStatus *r;

		if (!job)
			continue;
		r = reply->slabs[reply->n_slabs++];
		r->slab = s->id;
		r->job = status_text(a, job->rec->name);
		r->uid = job->rec->uid;
		r->class_ = (char *)mem_class_name(s->class);
		r->owner_rank = s->owner_rank;
		r->bytes = s->bytes;
		r->used_bytes = pool_slab_used(s);
		r->quarantined_bytes = s->quarantined;
		r->exported = s->exported;
		r->inode = backend_inode(s->mem);
	}
}
