/* Replicas: copies of parts between nodes, and when they are made. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/text.h"
#include "job/policy.h"
#include "job/saving.h"
#include "peer/bulk.h"

/* ------------------------------------------------------------------- for other nodes */

static struct job *cluster_replica_job(const struct cluster *c, const char *key)
{
	struct job *job, *tmp;
	struct replica *r;
	enum replica_file file;

	list_for_each (job, tmp, &c->jobs->all, link)
		if (replica_lookup(job, key, &r, &file))
			return job;
	return NULL;
}

static int cluster_replica_open(void *userdata, const char *node, const char *key,
				struct bulk_source *ret, struct fault *f)
{
	const struct cluster *c = userdata;
	struct job *job = cluster_replica_job(c, key);
	enum replica_file file;
	struct replica *r;

	(void)node;
	if (!job || !replica_lookup(job, key, &r, &file))
		return fault_set(f, FAULT_NOT_FOUND, NULL, "node %s does not have it", c->node);
	ret->fd = r->fds[file];
	ret->size = r->bytes[file];
	ret->data = replica_ref(r);
	return 0;
}

/* The account does not pay for one that is not. */
static bool cluster_replica_keeps(void *userdata, const struct bulk_source *source)
{
	const struct replica *r = source->data;

	(void)userdata;
	return r->job;
}

static void cluster_replica_close(void *userdata, struct bulk_source *source)
{
	(void)userdata;
	replica_unref(source->data);
}

void cluster_replica_serve(struct cluster *c)
{
	static const struct bulk_ops ops = { .open = cluster_replica_open,
					     .keeps = cluster_replica_keeps,
					     .close = cluster_replica_close };

	bulk_serve(c->peers, &ops, c);
}

/* ------------------------------------------------------------------- when they are made */

/* All nodes are about to commit. Where checkpoints are as frequent as commits the two take turns. */
bool cluster_replicate(struct job *job, bool due)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	if (!cj || !the_cluster->replicas || !cj->epoch.peers || !cj->epoch.order)
		return false;
	if (due && !cj->replicas.turn && !cj->grows) {
		cj->replicas.turn = true;
		return false;
	}
	if (!cluster_round_replicate(cj, job))
		return false;
	cj->replicas.turn = false;
	return true;
}
