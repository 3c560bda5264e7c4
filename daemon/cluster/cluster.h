/*
 * The cluster: this daemon among those of other nodes, and the jobs that they have together
 * (docs/nodes.md).
 *
 * A member of the store (coord/), which decides who leads a job and which epochs there are; and links
 * (peer/) between the nodes of a job and its leader, over which ranks ask to join, the order of
 * collectives is made (order/), and members of communicators meet. Slots of struct job_ops connect it to
 * the jobs.
 *
 * Loop thread only. Its own timer ticks it.
 */
#ifndef SHARDD_CLUSTER_CLUSTER_H
#define SHARDD_CLUSTER_CLUSTER_H

#include <uv.h>

#include "coord/coord.h"
#include "core/fault.h"
#include "core/list.h"
#include "core/loopq.h"
#include "core/res.h"
#include "job/job.h"
#include "peer/peer.h"

struct cluster;

struct cluster_options {
	const char *node;           /* its name, unique in the cluster */
	const char *advertise;      /* HOST:PORT at which others reach it */
	struct peers_options peers; /* node and instance are set from the others */
	bool schedules;    /* jobs that this node leads may follow recorded schedules (order/) */
	unsigned replicas; /* of each part of a job that this node leads (job/replica.h): 0 or 1 */
};

/* Begin to be a member. @coord: taken over, also on failure; @loopq, @jobs: borrowed. Strings of @o are
 * copied. Return: 0 or a fault code. */
int cluster_new(uv_loop_t *loop, struct loopq *loopq, struct jobs *jobs, struct coord *coord,
		const struct cluster_options *o, struct cluster **ret, struct fault *f);
/* Leave: no job is asked for any more. @done is called later. Once. */
void cluster_stop(struct cluster *c, void (*done)(void *userdata), void *userdata);
/* It has stopped, and engines that meet by its store are closed. NULL is allowed. Return: NULL. */
struct cluster *cluster_free(struct cluster *c);

/* Set the slots of @ops that are the cluster's: of jobs whose ranks may be on several nodes. For the daemon's
 * one cluster; without one every job is on this node. */
void cluster_set_slots(struct job_ops *ops);

/* For status. Valid until the next turn of the loop. */
struct cluster_info {
	const char *cluster; /* its name */
	const char *node;
	const char *state; /* of its membership: IN... */
	const char *why;   /* what is in the way; "" */
	unsigned replicas; /* of the jobs that this node leads */
};
/* Return: false: there is none. */
bool cluster_info(struct cluster_info *ret);
/* What the joins of @job wait for: one sentence; "": nothing. */
void cluster_job_waits(const struct job *job, char *buf, size_t bytes);
/* What its checkpoint, that is made or (@loads) loaded, waits for: one sentence; "": there is none, or all is
 * on this node. */
void cluster_checkpoint_waits(const struct job *job, bool loads, char *buf, size_t bytes);
/* The node that leads @job, as this one has last heard; "": not known. Valid until the next turn of the
 * loop. */
const char *cluster_job_leader(const struct job *job);

/* A wait for what all nodes of a job say of their ranks. The owner's. */
struct cluster_ask {
	struct list link;
	void (*done)(struct cluster_ask *a); /* once: all have answered, or their time is over */
	void *userdata;
};

/* Ask them. Return: true: there is nothing to wait for, and done is not called. */
bool cluster_ask(struct cluster_ask *a, struct job *job);
void cluster_ask_cancel(struct cluster_ask *a);
/* A wait until a job was deleted on all its nodes, or drains there. The owner's. */
struct cluster_acting {
	struct list link;
	bool drain, force;                      /* else it is deleted; also with trainers */
	void (*done)(struct cluster_acting *w); /* once, with what follows, which it borrows */
	void *userdata;
	struct fault f; /* code 0: it is done, but on these nodes */
	const struct cluster_missed *missed;
	size_t n_missed;
	uint32_t ranks; /* that were told to leave */
	uint64_t bytes; /* that were freed */
};

struct cluster_missed {
	const char *node, *why;
};

/* Delete or drain @job on all its nodes. Return: RES_DONE: it is on this node alone, and nothing was done;
 * RES_WAIT: done is called later, within 10 s; RES_FAILED: @f. */
enum res cluster_act(struct cluster_acting *w, struct job *job, struct fault *f);
/* done is not called; it goes on. */
void cluster_act_cancel(struct cluster_acting *w);

/* What node @node has said of @job when it was asked last, borrowed; NULL: nothing, with @ret_why (valid
 * until the next turn of the loop). */
const Shardd__V1__JobTold *cluster_told(const struct job *job, const char *node,
					const char **ret_why);
/* What this node says; without a cluster, too. Return: shardd__v1__job_told__free_unpacked; NULL without
 * memory. */
Shardd__V1__JobTold *cluster_told_here(const struct job *job);

#endif
