/* The leader of a job: the node whose key the store has; and the links to such nodes. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/text.h"

/* A link that cannot be made is tried so often before another node takes the leader's place. */
#define SEEK_DIALS 2u
/* A leader whose ranks are not all there asks so often whether it leads still. */
#define SEEK_LEADS_US 2000000u

void cluster_seek(struct cluster_job *cj)
{
	cluster_state_move(cj, CLUSTER_SEEKING);
	cluster_elastic_together(cj);
	coord_cancel(&cj->call);
	cj->follows = NULL;
	cj->again_us = 0;
}

static void cluster_seek_later(struct cluster_job *cj, const char *why)
{
	cj->again_us = clock_now_us() + CLUSTER_PAUSE_US;
	cluster_say(cj, "the store does not say which node leads the job: %.180s", why);
}

/* ----------------------------------------------------------------------- links */

static struct cluster_link *cluster_seek_link_find(struct cluster *c, const char *name,
						   const char *at)
{
	struct cluster_link *l, *tmp;

	list_for_each (l, tmp, &c->links, link)
		if (strcmp(l->name, name) == 0 && strcmp(l->at, at) == 0)
			return l;
	return NULL;
}

static struct cluster_link *cluster_seek_link_new(struct cluster *c, const char *name,
						  const char *at)
{
	struct cluster_link *l = calloc(1, sizeof(*l));

	if (!l)
		return NULL;
	l->c = c;
	text_copy(l->name, sizeof(l->name), name);
	text_copy(l->at, sizeof(l->at), at);
	list_init(&l->link);
	list_append(&c->links, &l->link);
	return l;
}

static int cluster_seek_dial(struct cluster_link *l, struct fault *f)
{
	if (l->peer)
		return 0;
	if (peers_connect(l->c->peers, l->name, l->at, &l->peer, f))
		return f->code;
	peer_set_data(l->peer, l);
	return 0;
}

int cluster_seek_connect(struct cluster *c, const char *name, const char *at, struct fault *f)
{
	struct cluster_link *l = cluster_seek_link_find(c, name, at);

	if (!l)
		l = cluster_seek_link_new(c, name, at);
	return l ? cluster_seek_dial(l, f) : fault_errno(f, -ENOMEM, "beginning a link");
}

/* The leader is not in peer_allow, for example. The log has it once for each leader. */
static void cluster_seek_not_dialled(struct cluster_job *cj, const char *why)
{
	cj->again_us = clock_now_us() + CLUSTER_PAUSE_US;
	cluster_say(cj, "node %s, which leads the job, is not connected to: %.180s", cj->leader,
		    why);
	if (cj->said_token != cj->token)
		log_warn("cluster", "leader not dialled job=%s node=%s why=\"%s\"", cj->label,
			 cj->leader, why);
	cj->said_token = cj->token;
}

static void cluster_seek_follow(struct cluster_job *cj)
{
	struct cluster_link *l = cluster_seek_link_find(cj->c, cj->leader, cj->leader_at);
	struct fault f = FAULT_NULL;

	if (!l)
		l = cluster_seek_link_new(cj->c, cj->leader, cj->leader_at);
	if (!l || cluster_seek_dial(l, &f)) {
		cluster_seek_not_dialled(cj, l ? f.text : "there is no memory for a link");
		return;
	}
	cj->follows = l;
	cluster_state_move(cj, CLUSTER_DIALS);
	cluster_say(cj, "node %s at %.120s, which leads the job, is being connected to", l->name,
		    l->at);
	if (!l->up)
		return;
	cluster_state_move(cj, CLUSTER_FOLLOWS);
	cluster_say(cj, "node %s, which leads the job, waits for its other ranks", l->name);
	cluster_tell_wishes(cj);
}

void cluster_link_up(struct cluster_link *l)
{
	struct cluster_job *cj, *tmp;

	l->up = true;
	list_for_each (cj, tmp, &l->c->all, link) {
		if (cj->follows != l || cj->state != CLUSTER_DIALS)
			continue;
		cj->dials.failed = 0;
		cj->dials.since_us = 0;
		cluster_state_move(cj, CLUSTER_FOLLOWS);
		cluster_say(cj, "node %s, which leads the job, waits for its other ranks", l->name);
		cluster_tell_wishes(cj);
	}
}

void cluster_link_gone(struct cluster_link *l, const char *why)
{
	struct cluster_job *cj, *tmp;

	l->peer = NULL;
	l->up = false;
	list_for_each (cj, tmp, &l->c->all, link)
		if (cj->follows == l)
			cluster_leader_lost(cj, why);
	list_unlink(&l->link);
	free(l);
}

/* @resigned: it has said so itself. */
static void cluster_seek_lose(struct cluster_job *cj, const char *why, bool resigned)
{
	bool had_link = cj->follows && cj->follows->up;
	bool was_up = had_link || cj->state != CLUSTER_DIALS;
	bool was_in = cj->epoch.number;
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "node %s, which leads job '%s', is gone: %.300s",
		  cj->leader, cj->label, why);
	if (cj->epoch.number && job)
		job_epoch_end(job, &f); /* to cluster_epoch_ended */
	cj->dials.failed = was_up ? 0 : cj->dials.failed + 1;
	if (cj->state != CLUSTER_SEEKING)
		cluster_seek(cj);
	cj->follows = NULL;
	cluster_say(cj, "%.240s", f.text);
	cj->removes =
		was_up || cj->dials.failed >= SEEK_DIALS; /* of this leader alone: by its token */
	if (cj->removes && !resigned && !was_in)
		cj->removes = cluster_elastic_may_replace(cj, was_up);
	if (!was_up || !cj->removes)
		cj->again_us = clock_now_us() + CLUSTER_PAUSE_US;
	if (was_up || cj->dials.failed <= SEEK_DIALS)
		log_warn("cluster", "leader lost job=%s node=%s why=\"%s\"", cj->label, cj->leader,
			 why);
}

void cluster_leader_lost(struct cluster_job *cj, const char *why)
{
	cluster_seek_lose(cj, why, false);
}

void cluster_leader_resigned(struct cluster_job *cj)
{
	cluster_seek_lose(cj, "it does not lead the job any more", true);
}

/* -------------------------------------------------------------- this node as the leader */

static bool cluster_seek_is_leader(const struct cluster_job *cj)
{
	return cj->epoch.number ? cj->epoch.self == cj->epoch.leader : cj->state == CLUSTER_LEADS;
}

/* Its decisions are refused from now on. In a step it need not wait for that. */
static void cluster_seek_deposed(struct cluster_job *cj, const struct coord_kv *kv)
{
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;

	log_warn("cluster", "no longer leads job=%s token=%lld why=\"%s\"", cj->label,
		 (long long)cj->token,
		 kv ? "another node leads it" : "its key is no longer in the store");
	fault_set(&f, FAULT_ABORTED, NULL, "node %s no longer leads job '%s': %s", cj->c->node,
		  cj->label,
		  kv ? "the store says that another node leads it"
		     : "its key is no longer in the store");
	if (cj->epoch.number && job)
		job_epoch_end(job, &f); /* to cluster_epoch_ended */
	else
		cluster_seek(cj);
}

static void cluster_seek_on_key(struct follow *f, const struct coord_kv *kv)
{
	struct cluster_job *cj = CONTAINER_OF(f, struct cluster_job, dials.key);

	if (kv && kv->created == cj->token)
		return;
	follow_end(f);
	if (cluster_seek_is_leader(cj))
		cluster_seek_deposed(cj, kv);
}

void cluster_seek_watch_key(struct cluster_job *cj)
{
	char key[CLUSTER_KEY_BYTES];

	follow_end(&cj->dials.key);
	cluster_key(cj, "leader", key);
	follow_begin(&cj->dials.key, cj->c->coord, key, cluster_seek_on_key);
}

/* ----------------------------------------------------------------------- the store */

/* "NODE HOST:PORT" */
static bool cluster_seek_read_leader(struct cluster_job *cj, const struct coord_kv *kv)
{
	char text[SPAN_NAME_BYTES + CLUSTER_AT_BYTES];
	char *at;

	if (kv->bytes >= sizeof(text))
		return false;
	memcpy(text, kv->value, kv->bytes);
	text[kv->bytes] = '\0';
	at = strchr(text, ' ');
	if (!at || at - text >= SPAN_NAME_BYTES)
		return false;
	*at++ = '\0';
	text_copy(cj->leader, sizeof(cj->leader), text);
	text_copy(cj->leader_at, sizeof(cj->leader_at), at);
	cj->token = kv->created;
	return true;
}

/* As in cluster_placed.c. */
static void cluster_seek_read_epoch(struct cluster_job *cj, const struct coord_kv *kv)
{
	unsigned long long epoch = 0, incarnation = 0;
	char text[64] = "";

	memcpy(text, kv->value, kv->bytes < sizeof(text) - 1 ? kv->bytes : sizeof(text) - 1);
	(void)sscanf(text, "%llu %16llx ", &epoch, &incarnation);
	cluster_placed_set(cj, kv->value, kv->bytes);
	cj->epoch_revision = kv->modified;
	cj->known.epoch = epoch;
	cj->incarnation = incarnation;
}

/* All keys of the job. Return: that of the leader, or NULL. */
static const struct coord_kv *cluster_seek_read_keys(struct cluster_job *cj,
						     const struct coord_reply *r)
{
	char leader[CLUSTER_KEY_BYTES], epoch[CLUSTER_KEY_BYTES], step[CLUSTER_KEY_BYTES];
	const struct coord_kv *found = NULL;

	cluster_key(cj, "leader", leader);
	cluster_key(cj, "epoch", epoch);
	cluster_key(cj, "step", step);
	cj->epoch_revision = cj->step_revision = 0;
	cj->known = (struct cluster_known){ 0 };
	cj->incarnation = 0;
	cluster_placed_set(cj, NULL, 0);
	for (size_t i = 0; i < r->n; i++) {
		const struct coord_kv *kv = &r->kvs[i];

		if (strcmp(kv->key, leader) == 0) {
			found = kv;
		} else if (strcmp(kv->key, epoch) == 0) {
			cluster_seek_read_epoch(cj, kv);
		} else if (strcmp(kv->key, step) == 0) {
			cj->known.commit = cluster_holding_read_step(kv);
			cj->step_revision = kv->modified;
		}
	}
	return found;
}

static void cluster_seek_lead(struct cluster_job *cj)
{
	cluster_state_move(cj, CLUSTER_LEADS);
	cj->again_us = clock_now_us() + SEEK_LEADS_US;
	cj->dials.failed = 0;
	if (cj->said_token != cj->token || !cj->dials.key.c)
		cluster_seek_watch_key(cj);
	if (cj->said_token != cj->token) /* it asks again while ranks are missing */
		log_info("cluster", "leads job=%s token=%lld", cj->label, (long long)cj->token);
	cj->said_token = cj->token;
	cluster_tell_wishes(cj);
}

static void cluster_seek_on_sought(struct coord_call *call, const struct coord_reply *r)
{
	struct cluster_job *cj = CONTAINER_OF(call, struct cluster_job, call);
	const struct coord_kv *leader;

	if (r->status != COORD_OK) {
		cluster_seek_later(cj, r->why);
		return;
	}
	leader = cluster_seek_read_keys(cj, r);
	if (!leader)
		return; /* it was removed: the next tick tries to be it */
	if (!cluster_seek_read_leader(cj, leader)) {
		cluster_seek_later(cj, "its key for the leader is not readable");
	} else if (strcmp(cj->leader, cj->c->node) != 0) {
		follow_end(&cj->dials.key);
		cluster_forget_nodes(cj); /* who asks this one is told that it does not lead */
		cluster_seek_follow(cj);
	} else if (leader->lease == cj->c->member.lease) {
		cluster_seek_lead(cj);
	} else {
		cj->removes = true; /* that of an earlier daemon of this node */
	}
}

static int cluster_seek_ask_to_lead(struct cluster_job *cj)
{
	char leader[CLUSTER_KEY_BYTES], all[CLUSTER_KEY_BYTES];
	char value[SPAN_NAME_BYTES + CLUSTER_AT_BYTES];
	struct coord_cond cond = { .key = leader, .revision = cj->removes ? cj->token : 0 };
	struct coord_change change = { .key = leader, .remove = cj->removes };
	struct coord_txn t = { .conds = &cond,
			       .n_conds = 1,
			       .changes = &change,
			       .n_changes = 1,
			       .read = all,
			       .prefix = true };

	cluster_key(cj, "leader", leader);
	cluster_key(cj, "", all);
	snprintf(value, sizeof(value), "%s %s", cj->c->node, cj->c->at);
	if (!cj->removes) {
		change.value = value;
		change.bytes = strlen(value);
		change.lease = cj->c->member.lease;
	}
	cj->removes = false;
	cj->call.done = cluster_seek_on_sought;
	return coord_txn(cj->c->coord, &cj->call, &t, CLUSTER_ANSWER_MS);
}

void cluster_seek_tick(struct cluster_job *cj, uint64_t now_us)
{
	follow_tick(&cj->dials.key, now_us);
	if (cj->state == CLUSTER_LEADS && now_us >= cj->again_us)
		cluster_seek(cj);
	if (cj->state != CLUSTER_SEEKING || cj->call.impl || now_us < cj->again_us)
		return;
	if ((!cj->n_wishes && list_empty(&cj->nodes) && !cluster_act_seeks(cj)) ||
	    cj->erase.until_us)
		return;
	if (cj->c->member.state != MEMBERSHIP_IN) {
		cluster_say(cj, "this node is no member of the cluster: %.200s",
			    *cj->c->member.why ? cj->c->member.why : cj->c->why);
		return;
	}
	if (cluster_seek_ask_to_lead(cj) < 0)
		cluster_seek_later(cj, "there is no memory for a call");
}
