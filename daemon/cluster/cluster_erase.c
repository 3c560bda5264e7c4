/*
 * The keys of a job that is gone. The node that leads it removes them with its part of the job, in one
 * transaction that its token fences: a leader that was replaced removes nothing. What it decides at that
 * time is decided before, and is removed, too, or not at all.
 *
 * Epochs of the next job of this name begin at 1 again, and its incarnation is another one.
 */
#include <errno.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/clock.h"
#include "core/log.h"

/* So long it is tried. A job of the same name waits for it on this node. */
#define ERASE_US 10000000u

static void cluster_erase_on_answer(struct coord_call *call, const struct coord_reply *r)
{
	struct cluster_job *cj = CONTAINER_OF(call, struct cluster_job, erase.call);
	uint64_t now = clock_now_us();

	if (r->status == COORD_OK) {
		log_info("cluster", "keys removed job=%s token=%lld%s", cj->label,
			 (long long)cj->erase.token, r->succeeded ? "" : " fenced=yes");
		cj->erase.until_us = 0;
	} else if (now >= cj->erase.until_us) {
		log_warn("cluster",
			 "keys of a job that is gone stay in the store job=%s why=\"%s\"",
			 cj->label, r->why);
		cj->erase.until_us = 0;
	} else {
		cj->erase.again_us = now + CLUSTER_PAUSE_US;
	}
}

static int cluster_erase_ask(struct cluster_job *cj)
{
	static const char *const names[] = { "leader", "epoch", "step" };
	char keys[ARRAY_SIZE(names)][CLUSTER_KEY_BYTES];
	struct coord_cond cond = { .key = keys[0], .revision = cj->erase.token };
	struct coord_change changes[ARRAY_SIZE(names)];
	struct coord_txn t = {
		.conds = &cond, .n_conds = 1, .changes = changes, .n_changes = ARRAY_SIZE(names)
	};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		cluster_key(cj, names[i], keys[i]);
		changes[i] = (struct coord_change){ .key = keys[i], .remove = true };
	}
	cj->erase.call.done = cluster_erase_on_answer;
	return coord_txn(cj->c->coord, &cj->erase.call, &t, CLUSTER_ANSWER_MS);
}

void cluster_erase_tick(struct cluster_job *cj, uint64_t now_us)
{
	if (!cj->erase.until_us || cj->erase.call.impl || now_us < cj->erase.again_us)
		return;
	cj->erase.again_us = now_us + CLUSTER_PAUSE_US;
	if (cluster_erase_ask(cj) < 0 && now_us >= cj->erase.until_us) {
		log_warn("cluster",
			 "no memory: keys of a job that is gone stay in the store job=%s",
			 cj->label);
		cj->erase.until_us = 0;
	}
}

bool cluster_leads(const struct cluster_job *cj)
{
	return cj->epoch.peers || cj->state == CLUSTER_LEADS || cj->state == CLUSTER_DECIDING ||
	       cj->state == CLUSTER_RESTORING;
}

/* It asks just now whether it leads still, while the job's nodes delete it: the token says. */
static bool cluster_erase_asks(const struct cluster_job *cj)
{
	return cluster_act_is_here(cj) && cj->state == CLUSTER_SEEKING &&
	       strcmp(cj->leader, cj->c->node) == 0;
}

void cluster_erase(struct cluster_job *cj)
{
	follow_end(&cj->dials.key); /* it goes because this node removes it */
	cj->erase.token = cj->token;
	cj->erase.until_us = clock_now_us() + ERASE_US;
	cj->erase.again_us = 0;
	cluster_erase_tick(cj, clock_now_us());
	if (cj->epoch.number)
		return; /* which ends now */
	decide_cancel(&cj->epoch_decision);
	cluster_seek(cj);
}

void cluster_deleted(struct job *job)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	bool leads;

	if (!cj || cluster_job_of(cj) != job)
		return;
	leads = cluster_leads(cj) || cluster_erase_asks(cj);
	cluster_restore_end(cj);
	cj->n_wishes = 0; /* a job that is made under this name has others */
	cluster_tell_wishes(cj);
	cluster_act_job_gone(cj);
	if (!leads)
		return;
	if (cj->incarnation && job->rec->incarnation != cj->incarnation && !cluster_act_is_here(cj))
		return; /* what other nodes have, and keep, is of the job that the keys are of */
	cluster_erase(cj);
}
