/* The beginning and the end, links and messages, what is tried again. */
#include "cluster/cluster.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/state.h"
#include "core/text.h"
#include "job/launched.h"

/* Links are ticked four times a second at least, orders some times in CLUSTER_PATIENCE_US. */
#define CLUSTER_TICK_MS 25

/* Slots of jobs carry no userdata. */
struct cluster *the_cluster;

static const struct state_row cluster_states[] = {
	[CLUSTER_SEEKING] = { "SEEKING", STATE_TO(CLUSTER_SEEKING) | STATE_TO(CLUSTER_LEADS) |
						 STATE_TO(CLUSTER_DIALS) },
	[CLUSTER_LEADS] = { "LEADS", STATE_TO(CLUSTER_DECIDING) | STATE_TO(CLUSTER_SEEKING) },
	[CLUSTER_DECIDING] = { "DECIDING", STATE_TO(CLUSTER_RUNS) | STATE_TO(CLUSTER_RESTORING) |
						   STATE_TO(CLUSTER_SEEKING) },
	[CLUSTER_RESTORING] = { "RESTORING", STATE_TO(CLUSTER_LEADS) | STATE_TO(CLUSTER_SEEKING) },
	[CLUSTER_DIALS] = { "DIALS", STATE_TO(CLUSTER_FOLLOWS) | STATE_TO(CLUSTER_SEEKING) },
	[CLUSTER_FOLLOWS] = { "FOLLOWS", STATE_TO(CLUSTER_RUNS) | STATE_TO(CLUSTER_SEEKING) },
	[CLUSTER_RUNS] = { "RUNS", STATE_TO(CLUSTER_SEEKING) },
};

void cluster_state_move(struct cluster_job *cj, enum cluster_job_state to)
{
	state_move(cluster_states, &cj->state, (uint8_t)to);
}

void cluster_say(struct cluster_job *cj, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(cj->why, sizeof(cj->why), format, args);
	va_end(args);
}

struct job *cluster_job_of(const struct cluster_job *cj)
{
	return htab_find(&cj->c->jobs->names, cj->label);
}

struct cluster_job *cluster_find(const struct cluster *c, const char *label)
{
	struct cluster_job *cj, *tmp;

	list_for_each (cj, tmp, &((struct cluster *)c)->all, link)
		if (strcmp(cj->label, label) == 0)
			return cj;
	return NULL;
}

void cluster_key(const struct cluster_job *cj, const char *what, char ret[CLUSTER_KEY_BYTES])
{
	snprintf(ret, CLUSTER_KEY_BYTES, "jobs/%s/%s", cj->label, what);
}

size_t cluster_prefix(const struct cluster_job *cj, char ret[CLUSTER_KEY_BYTES])
{
	int n = snprintf(ret, CLUSTER_KEY_BYTES, "%s/%016llx/%llu/", cj->label,
			 (unsigned long long)cj->epoch.incarnation,
			 (unsigned long long)cj->epoch.number);

	CHECK(n > 0 && (unsigned)n < CLUSTER_KEY_BYTES);
	return (size_t)n;
}

/* --------------------------------------------------------------------- the jobs */

struct cluster_job *cluster_job_new(struct cluster *c, const char *label)
{
	struct cluster_job *cj = calloc(1, sizeof(*cj));

	if (!cj)
		return NULL;
	cj->c = c;
	text_copy(cj->label, sizeof(cj->label), label);
	list_init(&cj->nodes);
	list_init(&cj->later);
	list_init(&cj->link);
	list_append(&c->all, &cj->link);
	cluster_say(cj, "the store is asked which node leads the job");
	return cj;
}

void cluster_drop_keys(struct cluster_job *cj)
{
	char prefix[CLUSTER_KEY_BYTES];

	cluster_prefix(cj, prefix);
	if (cj->epoch.number)
		rendezvous_drop(cj->c->rendezvous, prefix);
}

static void cluster_job_free(struct cluster_job *cj)
{
	cluster_act_drop(cj);
	coord_cancel(&cj->erase.call);
	coord_cancel(&cj->call);
	follow_end(&cj->dials.key);
	decide_cancel(&cj->epoch_decision);
	decide_cancel(&cj->commit);
	cluster_drop_keys(cj);
	cluster_epoch_free(cj);
	cluster_forget_nodes(cj);
	list_unlink(&cj->link);
	cluster_survey_free(cj);
	cluster_restore_end(cj);
	free(cj->wishes);
	free(cj->ruled);
	free(cj->placed);
	free(cj);
}

/* Its ranks on this node are gone, and the job with them. A leader's key goes with the lease, or when
 * another node that wants the job finds that this one does not lead it. */
static bool cluster_job_is_over(const struct cluster_job *cj)
{
	return !cluster_job_of(cj) && !cj->epoch.number && !cj->act && !cj->erase.until_us;
}

static bool cluster_wants(const struct cluster_job *cj, uint32_t rank)
{
	for (uint32_t i = 0; i < cj->n_wishes; i++)
		if (cj->wishes[i] == rank)
			return true;
	return false;
}

/* Return: 0 or -ENOMEM. */
static int cluster_wish(struct cluster_job *cj, uint32_t rank)
{
	uint32_t *grown, at = cj->n_wishes;

	if (cluster_wants(cj, rank))
		return 0;
	grown = realloc(cj->wishes, (cj->n_wishes + 1) * sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	for (; at && grown[at - 1] > rank; at--)
		grown[at] = grown[at - 1];
	grown[at] = rank;
	cj->wishes = grown;
	cj->n_wishes++;
	cluster_tell_wishes(cj);
	return 0;
}

static bool cluster_epoch_has(const struct cluster_job *cj, const struct job *job, uint32_t number)
{
	uint32_t rank;
	const struct span *s = job->across.span;

	return cj->epoch.number && s && !s->over && job->rec->epoch == cj->epoch.number &&
	       launched_rank(job, number, &rank) && span_is_here(s, rank);
}

/* Another rank of the job was on this node, and its epoch runs. */
static void cluster_end_for_newcomer(struct job *job, uint32_t rank)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL,
		  "rank %u of job '%s' joins on node %s: epoch %llu has ended, join again", rank,
		  job->rec->name, the_cluster->node, (unsigned long long)job->rec->epoch);
	job_epoch_end(job, &f);
}

enum res cluster_may_join(struct job *job, uint32_t rank, struct fault *f)
{
	struct cluster *c = the_cluster;
	struct cluster_job *cj;
	uint32_t at;

	if (!c && job_is_alone(job))
		return res_of(fault_set(f, FAULT_UNAVAILABLE, NULL,
					"this daemon is not in a cluster any more, and job '%s' is "
					"one of several nodes: set coord, or delete the job",
					job->rec->name));
	if (!c || (job->rec->max_ranks && !job->across.elastic)) /* all its ranks are here */
		return RES_DONE;
	if (c->closing)
		return res_of(fault_set(f, FAULT_UNAVAILABLE, NULL, "the daemon is shutting down"));
	cj = cluster_find(c, job->label);
	if (!cj)
		cj = cluster_job_new(c, job->label);
	if (!cj)
		return res_of(fault_errno(f, -ENOMEM, "joining a job of several nodes"));
	if (cj->refusal.code) {
		*f = cj->refusal;
		return RES_FAILED;
	}
	if (cluster_epoch_has(cj, job, rank))
		return RES_DONE;
	if (cj->epoch.number && !(job->across.elastic && !launched_rank(job, rank, &at)))
		cluster_end_for_newcomer(job, rank);
	if (cluster_wish(cj, rank) < 0)
		return res_of(fault_errno(f, -ENOMEM, "joining a job of several nodes"));
	if (!cluster_wants(cj, rank) && !cj->epoch.number) { /* refused at once, with the others */
		*f = cj->refused;
		return RES_FAILED;
	}
	return RES_WAIT;
}

void cluster_job_waits(const struct job *job, char *buf, size_t bytes)
{
	const struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	if (cj && cj->epoch.left_us && !cj->epoch.is_left)
		snprintf(buf, bytes, "ranks on other nodes to leave the job, as all here have");
	else
		snprintf(buf, bytes, "%s", cj && cj->n_wishes ? cj->why : "");
}

const char *cluster_job_leader(const struct job *job)
{
	const struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	return cj ? cj->leader : "";
}

bool cluster_info(struct cluster_info *ret)
{
	static const char *const states[] = { [MEMBERSHIP_OUT] = "OUT",
					      [MEMBERSHIP_GRANTING] = "JOINING",
					      [MEMBERSHIP_JOINING] = "JOINING",
					      [MEMBERSHIP_IN] = "IN",
					      [MEMBERSHIP_LEAVING] = "LEAVING" };
	const struct cluster *c = the_cluster;

	if (!c)
		return false;
	*ret = (struct cluster_info){ c->name, c->node, states[c->member.state],
				      *c->member.why                      ? c->member.why
				      : c->member.state == MEMBERSHIP_OUT ? c->why
									  : "",
				      c->replicas };
	return true;
}

/* ------------------------------------------------------------------------ links */

struct peer *cluster_to_leader(const struct cluster_job *cj)
{
	return cj->follows && cj->follows->up ? cj->follows->peer : NULL;
}

void cluster_send(struct cluster_job *cj, struct peer *to, Shardd__V1__JobMessage *m)
{
	Shardd__V1__PeerMessage message = SHARDD__V1__PEER_MESSAGE__INIT;

	if (!to)
		return;
	m->job = cj->label;
	message.body_case = SHARDD__V1__PEER_MESSAGE__BODY_JOB;
	message.job = m;
	peer_send(to, &message);
}

static void cluster_on_up(void *userdata, struct peer *p)
{
	struct cluster_link *l = peer_data(p);

	(void)userdata;
	log_info("cluster", "link up node=%s dialled=%s", peer_name(p),
		 peer_is_dialled(p) ? "yes" : "no");
	if (l)
		cluster_link_up(l);
}

static void cluster_on_gone(void *userdata, struct peer *p, const char *why)
{
	struct cluster *c = userdata;
	struct cluster_link *l = peer_data(p);
	struct cluster_job *cj, *tmp;

	log_info("cluster", "link gone node=%s why=\"%s\"", peer_name(p), why);
	cluster_rounds_peer_gone(c, p, why);
	cluster_acts_peer_gone(c, p, why);
	list_for_each (cj, tmp, &c->all, link)
		cluster_node_gone(cj, p, why);
	if (l)
		cluster_link_gone(l, why);
}

static void cluster_on_refused(void *userdata, const char *from, const char *why)
{
	(void)userdata;
	log_warn("cluster", "link refused from=%s why=\"%s\"", from, why);
}

bool cluster_has_part(struct cluster_job *cj, const struct peer *from)
{
	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] == from)
			return true;
	return !cj->epoch.peers && from == cluster_to_leader(cj);
}

void cluster_deny(struct cluster *c, struct peer *from, const char *label)
{
	struct cluster_job cj = { .c = c };
	Shardd__V1__JobMessage answer = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobNotLeader not_leader = SHARDD__V1__JOB_NOT_LEADER__INIT;

	text_copy(cj.label, sizeof(cj.label), label);
	answer.body_case = SHARDD__V1__JOB_MESSAGE__BODY_NOT_LEADER;
	answer.not_leader = &not_leader;
	cluster_send(&cj, from, &answer);
}

static void cluster_on_job(struct cluster_job *cj, struct peer *from,
			   const Shardd__V1__JobMessage *m)
{
	bool from_leader = from == cluster_to_leader(cj);

	switch (m->body_case) {
	case SHARDD__V1__JOB_MESSAGE__BODY_ORDER:
		if (m->epoch == cj->epoch.number)
			cluster_on_order(cj, from, &m->order);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_WISH:
		cluster_on_wish(cj, from, m->wish);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_BEGIN:
		if (from_leader)
			cluster_on_begin(cj, m);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_END:
		cluster_on_end(cj, from, m);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_REFUSAL:
		if (from_leader) {
			struct fault f = FAULT_NULL;

			fault_set(&f,
				  m->refusal->code && m->refusal->code < _FAULT_N ? m->refusal->code
										  : FAULT_INTERNAL,
				  NULL, "%s", m->refusal->text);
			cluster_refused(cj, &f);
		}
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_NOT_LEADER:
		if (from_leader)
			cluster_leader_resigned(cj);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_SET:
	case SHARDD__V1__JOB_MESSAGE__BODY_GET:
	case SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE:
		cluster_on_key(cj, from, m);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_LEFT:
		if (m->epoch == cj->epoch.number)
			cluster_on_rank_left(cj, from, m->left);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_NO_INPUTS:
	case SHARDD__V1__JOB_MESSAGE__BODY_COLLECTIVE:
		if (m->epoch == cj->epoch.number)
			cluster_on_uneven(cj, from, m);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_WRITE:
		if (m->epoch == cj->epoch.number)
			cluster_on_write(cj, from, m);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_ASK:
		cluster_on_ask(cj, from, m->ask);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_TOLD:
		cluster_on_told(cj, from, m->told);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_ACTED:
		cluster_on_acted(cj, from, m->acted);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_RESTORE:
		if (from_leader)
			cluster_on_restore(cj, m->restore);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_RESTORED:
		cluster_on_restored(cj, from, m->restored);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_POLICY:
		cluster_on_policy(cj, from, m);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ASK:
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_PHASE:
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER:
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_END:
	case SHARDD__V1__JOB_MESSAGE__BODY_ACT:
		CHECK_NOT_REACHED(); /* cluster_on_message */
	case SHARDD__V1__JOB_MESSAGE__BODY__NOT_SET:
	case _SHARDD__V1__JOB_MESSAGE__BODY__CASE_IS_INT_SIZE:
		peer_end(from, "it has sent a message about a job that says nothing");
		return;
	}
}

/* A round may outlive its job. */
static bool cluster_is_of_round(const Shardd__V1__JobMessage *m)
{
	return m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ASK ||
	       m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_PHASE ||
	       m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER ||
	       m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_END;
}

static void cluster_on_message(void *userdata, struct peer *p, const Shardd__V1__PeerMessage *m)
{
	struct cluster *c = userdata;
	struct cluster_job *cj;

	if (m->body_case != SHARDD__V1__PEER_MESSAGE__BODY_JOB)
		return;
	if (cluster_is_of_round(m->job)) {
		cluster_on_round(c, p, m->job);
		return;
	}
	if (m->job->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ACT) {
		cluster_on_act(c, p, m->job);
		return;
	}
	cj = cluster_find(c, m->job->job);
	if (cj)
		cluster_on_job(cj, p, m->job);
	else if (m->job->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ASK)
		cluster_answer_nothing(c, p, m->job);
	else if (m->job->body_case == SHARDD__V1__JOB_MESSAGE__BODY_WISH)
		cluster_deny(c, p, m->job->job);
}

/* ------------------------------------------------------------------- membership */

static void cluster_join_store(struct cluster *c);
static void cluster_on_tick(uv_timer_t *timer);

static void cluster_on_joined(struct membership *m)
{
	struct cluster *c = CONTAINER_OF(m, struct cluster, member);

	*c->why = *c->told = 0;
	log_info("cluster", "joined node=%s", c->node);
}

static void cluster_on_out(struct membership *m, const char *why)
{
	struct cluster *c = CONTAINER_OF(m, struct cluster, member);
	struct cluster_job *cj, *tmp;

	if (c->closing) { /* not from inside a call of the store */
		uv_timer_start(&c->timer, cluster_on_tick, 0, 0);
		return;
	}
	text_copy(c->why, sizeof(c->why), why);
	log_warn("cluster", "not a member node=%s why=\"%s\"", c->node, why);
	list_for_each (cj, tmp, &c->all, link)
		if (cj->state == CLUSTER_LEADS)
			cluster_seek(cj);
	c->again_us = clock_now_us() + CLUSTER_REJOIN_US;
}

static const struct membership_ops cluster_member_ops = { .joined = cluster_on_joined,
							  .out = cluster_on_out };

static void cluster_join_store(struct cluster *c)
{
	int r = membership_join(&c->member, c->coord, c->node, c->at, strlen(c->at),
				CLUSTER_LEASE_S, &cluster_member_ops);

	if (r < 0)
		snprintf(c->why, sizeof(c->why), "joining the store: %s", strerror(-r));
}

/* Why it does not become a member, if that lasts: each reason once. */
static void cluster_tell_why(struct cluster *c, uint64_t now)
{
	const char *why = c->member.why;
	bool tries =
		c->member.state == MEMBERSHIP_GRANTING || c->member.state == MEMBERSHIP_JOINING;

	if (!tries || !*why || strcmp(why, c->told) == 0) {
		c->since_us = 0;
		return;
	}
	if (!c->since_us)
		c->since_us = now;
	if (now < c->since_us + CLUSTER_TELL_US)
		return;
	text_copy(c->told, sizeof(c->told), why);
	log_warn("cluster", "not a member yet node=%s why=\"%s\"", c->node, why);
}

/* ------------------------------------------------------------------------- tick */

static void cluster_tick_job(struct cluster_job *cj, uint64_t now)
{
	decide_tick(&cj->epoch_decision, now);
	decide_tick(&cj->commit, now);
	cluster_erase_tick(cj, now);
	cluster_seek_tick(cj, now);
	cluster_act_tick(cj, now);
	cluster_epoch_tick(cj, now);
	cluster_order_tick(cj, now);
	cluster_survey_tick(cj, now);
	if (cj->state == CLUSTER_LEADS)
		cluster_form(cj);
}

static void cluster_has_stopped(struct cluster *c)
{
	if (c->peers_closed && c->timer_closed)
		c->done(c->userdata);
}

static void cluster_on_timer_closed(uv_handle_t *handle)
{
	struct cluster *c = handle->data;

	c->timer_closed = true;
	cluster_has_stopped(c);
}

static void cluster_on_left(struct cluster *c)
{
	if (c->member.state != MEMBERSHIP_OUT || uv_is_closing((uv_handle_t *)&c->timer))
		return;
	membership_end(&c->member);
	c->coord = coord_close(c->coord);
	uv_close((uv_handle_t *)&c->timer, cluster_on_timer_closed);
}

static void cluster_on_tick(uv_timer_t *timer)
{
	struct cluster *c = timer->data;
	uint64_t now = clock_now_us();
	struct cluster_job *cj, *tmp;

	if (c->closing) {
		cluster_on_left(c);
		return;
	}
	cluster_orders_free(c);
	membership_tick(&c->member, now);
	if (c->member.state == MEMBERSHIP_OUT && now >= c->again_us)
		cluster_join_store(c);
	cluster_tell_why(c, now);
	peers_tick(c->peers, now);
	cluster_rounds_tick(c, now);
	cluster_copies_tick(c, now);
	list_for_each (cj, tmp, &c->all, link) {
		if (!cluster_job_is_over(cj)) {
			cluster_tick_job(cj, now);
			continue;
		}
		if (cj->n_wishes)
			cluster_withdraw(cj);
		cluster_job_free(cj);
	}
}

/* ----------------------------------------------------------- the beginning and the end */

static int cluster_start(struct cluster *c, const struct cluster_options *o, struct fault *f)
{
	static const struct peers_ops peers_ops = { .up = cluster_on_up,
						    .message = cluster_on_message,
						    .gone = cluster_on_gone,
						    .refused = cluster_on_refused };
	static const struct rendezvous_ops rendezvous_ops = { .set = cluster_keys_set,
							      .get = cluster_keys_get,
							      .give = cluster_keys_give_here };
	struct peers_options p = o->peers;

	p.node = c->node;
	memcpy(p.instance, c->jobs->node->instance, sizeof(p.instance));
	if (rendezvous_new(c->loopq, &rendezvous_ops, c, &c->rendezvous) < 0)
		return fault_errno(f, -ENOMEM, "beginning a cluster");
	return peers_new(c->loopq, &p, &peers_ops, c, &c->peers, f);
}

void cluster_set_slots(struct job_ops *ops)
{
	ops->announce = cluster_announce;
	ops->prepared = cluster_prepared;
	ops->refuse = cluster_refuse;
	ops->want = cluster_want;
	ops->asked = cluster_asked;
	ops->give = cluster_give;
	ops->leave_out = cluster_leave_out;
	ops->joined = cluster_no_inputs;
	ops->asks = cluster_asks;
	ops->writes = cluster_writes;
	ops->write_allowed = cluster_write_allowed;
	ops->write_refused = cluster_write_refused;
	ops->made = cluster_made;
	ops->may_join = cluster_may_join;
	ops->gave_up = cluster_gave_up;
	ops->leaves = cluster_leaves;
	ops->deleted = cluster_deleted;
	ops->is_awaited = cluster_is_awaited;
	ops->across.waits = cluster_op_waits;
	ops->across.rank_left = cluster_rank_left;
	ops->across.left = cluster_left;
	ops->across.ended = cluster_epoch_ended;
	ops->across.save = cluster_save;
	ops->across.load = cluster_load;
	ops->across.give_up = cluster_give_up;
	ops->across.policy = cluster_policy;
	ops->across.replicate = cluster_replicate;
}

int cluster_new(uv_loop_t *loop, struct loopq *loopq, struct jobs *jobs, struct coord *coord,
		const struct cluster_options *o, struct cluster **ret, struct fault *f)
{
	struct cluster *c = calloc(1, sizeof(*c));

	if (!c) {
		coord_close(coord);
		return fault_errno(f, -ENOMEM, "beginning a cluster");
	}
	CHECK(!the_cluster);
	c->loopq = loopq;
	c->jobs = jobs;
	c->coord = coord;
	c->schedules = o->schedules;
	c->replicas = o->replicas;
	text_copy(c->name, sizeof(c->name), o->peers.cluster);
	text_copy(c->node, sizeof(c->node), o->node);
	text_copy(c->at, sizeof(c->at), o->advertise);
	list_init(&c->links);
	list_init(&c->all);
	list_init(&c->ended);
	list_init(&c->rounds);
	list_init(&c->copies);
	if (cluster_start(c, o, f)) {
		rendezvous_free(c->rendezvous);
		coord_close(coord);
		free(c);
		return f->code;
	}
	the_cluster = c;
	cluster_replica_serve(c);
	cluster_join_store(c);
	uv_timer_init(loop, &c->timer);
	c->timer.data = c;
	uv_timer_start(&c->timer, cluster_on_tick, 0, CLUSTER_TICK_MS);
	*ret = c;
	return 0;
}

struct cluster *cluster_free(struct cluster *c)
{
	struct cluster_link *l, *tmp;

	if (!c)
		return NULL;
	CHECK(c->peers_closed && c->timer_closed && list_empty(&c->copies));
	list_for_each (l, tmp, &c->links, link) {
		list_unlink(&l->link);
		free(l);
	}
	rendezvous_free(c->rendezvous);
	cluster_rounds_free(c);
	the_cluster = NULL;
	free(c);
	return NULL;
}

static void cluster_on_peers_closed(void *userdata)
{
	struct cluster *c = userdata;

	c->peers_closed = true;
	cluster_has_stopped(c);
}

void cluster_stop(struct cluster *c, void (*done)(void *userdata), void *userdata)
{
	struct cluster_job *cj, *tmp;

	CHECK(!c->closing);
	c->closing = true;
	c->done = done;
	c->userdata = userdata;
	cluster_rounds_end(c);
	list_for_each (cj, tmp, &c->all, link)
		cluster_job_free(cj);
	cluster_orders_free(c);
	peers_close(c->peers, cluster_on_peers_closed, c);
	membership_leave(&c->member); /* two seconds at most */
	if (c->member.state == MEMBERSHIP_OUT)
		uv_timer_start(&c->timer, cluster_on_tick, 0, 0);
}
