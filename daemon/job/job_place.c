/* On which device each rank is. */
#include <errno.h>
#include <stdio.h>

#include "core/check.h"
#include "job/events.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/mesh.h"
#include "job/span.h"

struct device *job_place_default(const struct job *job, uint32_t rank, uint32_t world)
{
	struct device *there[NODE_MAX_DEVICES];
	struct node *node = job->node;
	unsigned n = 0;

	for (unsigned i = 0; i < node->n_devices; i++)
		if (!*backend_info(node->devices[i].backend)->lost)
			there[n++] = &node->devices[i];
	if (!n)
		return &node->devices[0];
	n = n < world ? n : world;
	return there[(uint64_t)rank * n / world];
}

/* Memory or communicators of the rank's groups exist on its device. */
static bool job_place_is_fixed(const struct job *job, uint32_t rank)
{
	uint32_t index;

	for (uint32_t i = 0; i < job->n_groups; i++)
		if (job->groups[i]->n_devices && group_index(job->groups[i], rank, &index))
			return true;
	return false;
}

static int job_place_refuse_unknown(const struct job *job, const char *name, struct fault *f)
{
	char list[300];

	node_list_devices(job->node, list, sizeof(list));
	return fault_set(f, FAULT_INVALID, "device",
			 "there is no device '%.60s' on this node: it has %.300s", name, list);
}

static int job_place_set(struct job *job, uint32_t rank, struct device *d, struct fault *f)
{
	if (job->placed[rank] == d)
		return 0;
	if (state_job_set_device(job->rec, rank, backend_lasting_name(d->backend)) < 0)
		return fault_errno(f, -ENOMEM, "placing a rank");
	job->placed[rank] = d;
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	return 0;
}

/* The ranks of an elastic job change their numbers. On several nodes the launcher's say which of them are here. */
static struct device *job_place_choose(const struct job *job, uint32_t rank,
				       const struct job_joining *how)
{
	if (how->local_world_size && (!job->rec->max_ranks || job->across.elastic))
		return job_place_default(job, how->local_rank, how->local_world_size);
	return job_place_default(job, rank, job->rec->world_size);
}

int job_place(struct job *job, uint32_t rank, const struct job_joining *how, struct fault *f)
{
	struct device *now = job->placed[rank];
	struct device *d = now ? now : job_place_choose(job, rank, how);
	const struct backend_info *info;

	if (*how->device) {
		d = node_device(job->node, how->device);
		if (!d)
			return job_place_refuse_unknown(job, how->device, f);
	}
	info = backend_info(d->backend);
	if (now && d != now && job_place_is_fixed(job, rank))
		return fault_set(
			f, FAULT_STATE, NULL,
			"rank %u of job '%s' computes on %s, but its memory is on %s since "
			"units were registered: start it there, or delete the job",
			rank, job->rec->name, info->id, backend_info(now->backend)->id);
	if (*info->lost)
		return fault_set(f, FAULT_UNAVAILABLE, NULL, "%s", info->lost);
	return job_place_set(job, rank, d, f);
}

/* ------------------------------------------------------- devices that fail */

static bool job_place_has_memory_on(const struct job *job, const struct device *device)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		for (unsigned d = 0; d < job->units[i]->n_parts; d++)
			if (job->units[i]->parts[d].device == device)
				return true;
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r] && job->placed[r] == device)
			return true;
	return false;
}

void jobs_device_lost(struct jobs *jobs, struct device *device)
{
	const struct backend_info *info = backend_info(device->backend);
	struct job *job, *tmp;

	list_for_each (job, tmp, &jobs->all, link) {
		struct fault f = FAULT_NULL;

		if (!job_place_has_memory_on(job, device))
			continue;
		fault_set(&f, FAULT_ABORTED, NULL, "%s (%s): what job '%s' had there is gone",
			  info->lost, info->uuid, job->rec->name);
		events_add(job, EVENTS_DEVICE_LOST, "%s", f.text);
		job_set_torn(job);
		job_epoch_end(job, &f);
	}
}

static bool job_place_uses(const struct job *job, const struct node_comm *nc)
{
	for (uint32_t i = 0; i < job->n_groups; i++)
		if (job->groups[i]->nc == nc || mesh_uses(job->groups[i], nc))
			return true;
	return false;
}

/* The node of the member that @why names: "member 2 has left". NULL: it names none. */
static const char *job_place_node_of(const struct job *job, const struct node_comm *nc,
				     const char *why)
{
	unsigned member;

	if (!nc->spans || sscanf(why, "member %u", &member) != 1)
		return NULL;
	for (uint32_t i = 0; i < job->n_groups; i++) {
		const struct group *g = job->groups[i];
		unsigned device = member;

		if (g->nc != nc && !mesh_device_of(g, nc, member, &device))
			continue;
		for (uint32_t k = 0; k < group_size(g); k++)
			if (group_device_number(g, k) == device)
				return job->across.span
					->nodes[span_node_of(job->across.span, g->rec->ranks[k])]
					.name;
	}
	return NULL;
}

void jobs_comm_broke(struct jobs *jobs, struct node_comm *nc, const char *why)
{
	struct job *job, *tmp;
	char here[JOB_ON_NODE_BYTES];
	const char *node;

	list_for_each (job, tmp, &jobs->all, link) {
		struct fault f = FAULT_NULL;

		if (!job_place_uses(job, nc) || !job->present)
			continue;
		node = job_place_node_of(job, nc, why);
		fault_set(&f, FAULT_ABORTED, NULL,
			  "the devices of job '%s'%s lost contact%s%s: %s: epoch %llu has ended, "
			  "join again",
			  job->rec->name, job_on_node(job, here), node ? " with node " : "",
			  node ? node : "", why, (unsigned long long)job->rec->epoch);
		job_tear(job);
		job_epoch_end(job, &f);
	}
}
