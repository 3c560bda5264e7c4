/* Shared by the files of cluster. */
#ifndef SHARDD_CLUSTER_CLUSTER_IMPL_H
#define SHARDD_CLUSTER_CLUSTER_IMPL_H

#include "cluster/cluster.h"
#include "cluster/rendezvous.h"
#include "coord/decide.h"
#include "coord/follow.h"
#include "coord/membership.h"
#include "core/list.h"
#include "job/replica.h"
#include "job/span.h"
#include "order/order.h"
#include "step/doubt.h"

#define CLUSTER_LEASE_S   10
#define CLUSTER_MAX_RANKS 1024u /* as max_world_size */
#define CLUSTER_REJOIN_US 1000000u
#define CLUSTER_TELL_US   2000000u /* a reason that lasts so long is told */
#define CLUSTER_PAUSE_US  500000u
#define CLUSTER_ANSWER_MS 2000u
#define CLUSTER_KEY_BYTES 160u
/* Of a communicator's key, the job's and the epoch's part included: longer than rendezvous takes. */
#define CLUSTER_FULL_KEY_BYTES 512u
#define CLUSTER_AT_BYTES       272u
/* Two steps, each of this node and of the one before; and what a try to restore has left. */
#define CLUSTER_MAX_REPLICAS 16u
/* Without a byte of a part that is fetched. */
#define CLUSTER_COPY_IDLE_US UINT64_C(60000000)
/* Until replicas are tried again. */
#define CLUSTER_REPLICA_AGAIN_US UINT64_C(5000000)
/* Of an order: more would be a job whose steps take minutes, or that never commits. */
#define CLUSTER_MAX_RECORDED 65536u
/* 100 ms, and how long ago the last tick may be. */
#define CLUSTER_PATIENCE_US 125000u
#define CLUSTER_STUCK_US    10000000u

/* A link to a node that leads jobs, dialled by this one. */
struct cluster_link {
	struct list link; /* cluster->links */
	struct cluster *c;
	char name[SPAN_NAME_BYTES], at[CLUSTER_AT_BYTES];
	struct peer *peer; /* borrowed until it is gone; NULL then */
	bool up;
};

/* A part that a node keeps: see JobReplica. */
struct cluster_part {
	struct replica_id id;
	uint64_t epoch;
	uint64_t bytes[_REPLICA_FILES];
};

/* What a node has of a job: see JobHolding. */
struct cluster_holding {
	uint32_t world, units;
	uint64_t epoch, begun, incarnation, settings, policy, step, position;
	bool has_commit, torn, has_position;
	bool gpus;               /* the node's devices are */
	struct doubt_open doubt; /* the others above are what holds if it is dropped */
	uint32_t ranks, min_ranks, grace_ms;
	uint64_t layout; /* of its units; 0: there are none */
	unsigned n_replicas;
	struct cluster_part replicas[CLUSTER_MAX_REPLICAS];
	bool has_after;
	uint64_t after;              /* the position if the prepared step is applied */
	struct job_step_id *applied; /* owned: the last one of each group; all of one epoch */
	size_t n_applied;
};

/* A node that has ranks of a job, as its leader knows it. */
struct cluster_node {
	struct list link; /* cluster_job.nodes */
	char name[SPAN_NAME_BYTES];
	char at[CLUSTER_AT_BYTES]; /* where other nodes reach it */
	struct peer *peer;         /* borrowed; NULL: this node */
	struct cluster_holding holding;
	bool waits; /* until the job grows: it stays when the epoch ends */
	bool told; /* RESTORING: it takes the state of that step, and has not said that it has it */
	uint32_t
		n; /* ranks that want to join, ascending; of an elastic job, as which they were started */
	uint32_t members; /* of them: that are ranks of the job as it is */
	uint32_t *ranks;
	uint16_t *devices;
	bool *are_members; /* by rank of it */
};

/*
 *   SEEKING --we lead--> LEADS --all ranks are there--> DECIDING --the epoch is decided--> RUNS
 *                            ^                              '--nodes have not the same--> RESTORING --.
 *                            '------------------- all have the state of one step -------------------'
 *      ^ '--another leads--> DIALS --the link is up--> FOLLOWS --the epoch begins--> RUNS
 *      '------------------- an epoch ends; the link is gone; another leads -----------'
 */
enum cluster_job_state {
	CLUSTER_SEEKING,
	CLUSTER_LEADS,
	CLUSTER_DECIDING,
	CLUSTER_RESTORING,
	CLUSTER_DIALS,
	CLUSTER_FOLLOWS,
	CLUSTER_RUNS,
};

/* Its keys are removed. */
struct cluster_erase {
	struct coord_call call;
	int64_t token;
	uint64_t until_us, again_us; /* @until_us: 0: they are not */
};

/* The epoch that runs. */
struct cluster_epoch {
	uint64_t number; /* 0: none */
	uint64_t incarnation;
	unsigned n_nodes, self, leader;
	char (*names)[SPAN_NAME_BYTES]; /* owned, as these */
	char (*ats)[CLUSTER_AT_BYTES];  /* where other nodes reach them */
	const char **name_list;
	struct peer **peers; /* of the leader: by node; NULL: this one, or it is gone */
	struct order *order; /* owned; NULL: all ranks are here */
	bool *left;          /* of the leader: by node: its ranks have left; owned */
	bool is_left;        /* on all nodes */
	uint64_t left_us;    /* the ranks here have: since when; 0: they have not */
	uint64_t key_bytes;  /* of its communicators' keys that came from other nodes */
	bool recorded;       /* @order has followed a schedule, when that was looked at last */
	uint64_t last_step;  /* of the leader: of the last commit that has begun, */
	bool commits;        /* if any has */
	bool holds;          /* of the leader: none may begin */
	bool held;           /* then: one waits, cluster_job.committing */
};

/* Of its leader. */
struct cluster_dials {
	struct follow key; /* the leader's, while that is this node */
	unsigned failed;   /* since a link was up */
	int64_t token;     /* of one that could not be reached, */
	uint64_t since_us; /* since then; 0: there is none */
};

/* Epochs of it, as the store has said. */
struct cluster_known {
	uint64_t epoch;             /* the last one; 0: none */
	struct doubt_ruling commit; /* the last one, and in which; all 0: there is none */
};

struct cluster_replicas {
	uint64_t again_us; /* none is tried before */
	bool turn;         /* a checkpoint was made when they could have been */
};

/* A job that ranks of this node want to join, or have joined. */
struct cluster_job {
	struct list link; /* cluster->all */
	struct cluster *c;
	char label[JOB_LABEL_MAX + 1];
	uint8_t state; /* enum cluster_job_state */
	uint64_t again_us;
	char why[256]; /* what is in the way; "" */
	struct coord_call call;
	bool removes; /* @call removes the key of a leader that cannot be reached */
	struct cluster_dials dials;
	char leader[SPAN_NAME_BYTES], leader_at[CLUSTER_AT_BYTES];
	int64_t token;                /* creation revision of the leader's key */
	int64_t said_token;           /* the log has that it leads, or why it is not dialled */
	struct cluster_link *follows; /* borrowed */

	uint32_t *wishes; /* ranks here that want to join, ascending; owned */
	uint32_t n_wishes;
	struct fault refusal; /* for them, while they are told */
	struct fault refused; /* the last one */

	/* the leader's */
	struct list nodes; /* of struct cluster_node; this one is among them */
	struct list later; /* the same, DECIDING and RESTORING: the epoch begins without them */
	struct decide epoch_decision, commit;
	struct order_key committing;
	int64_t epoch_revision, step_revision;
	struct cluster_known known;
	uint64_t incarnation; /* and of which; 0: it knows none */
	char *placed; /* and where its ranks are and were (cluster_placed.c); owned; NULL: none */
	struct doubt_ruling ruling; /* on what nodes are in doubt about */
	struct job_step_id *ruled;  /* its steps; owned */

	struct cluster_epoch epoch;
	struct cluster_survey *survey; /* the last one; owned; NULL: none */
	struct cluster_act *act;       /* owned; NULL: none */
	struct cluster_erase erase;
	struct cluster_replicas replicas; /* the leader's */
	uint64_t restore_id;              /* RESTORING: of the try */
	uint64_t changed_us;              /* the leader's: when the last wish came, or went */
	bool grows; /* RUNS, the leader's: others than its ranks want to join */
	struct cluster_restore *restore; /* of this node, under way; owned; NULL: none */
};

struct cluster {
	uv_timer_t timer;
	struct loopq *loopq;
	struct jobs *jobs;
	struct coord *coord;
	struct membership member;
	char name[SPAN_NAME_BYTES], node[SPAN_NAME_BYTES], at[CLUSTER_AT_BYTES];
	struct peers *peers;
	struct list links;  /* of struct cluster_link */
	struct list all;    /* of struct cluster_job */
	struct list rounds; /* of struct cluster_round */
	struct list copies; /* of struct cluster_copy */
	struct list ended;  /* orders that are over, to be freed by the next tick */
	struct rendezvous *rendezvous;
	char why[256];     /* why it is no member */
	char told[256];    /* why it has not become one, as the log says it */
	uint64_t since_us; /* the reason is this one; 0: there is none */
	uint64_t again_us; /* then it tries again */
	bool schedules;    /* jobs that this node leads may follow recorded schedules */
	unsigned replicas; /* of jobs that this node leads: 0 or 1 */
	bool closing, peers_closed, timer_closed;
	void (*done)(void *userdata);
	void *userdata;
};

extern struct cluster *the_cluster;

struct job *cluster_job_of(const struct cluster_job *cj);
struct cluster_job *cluster_find(const struct cluster *c, const char *label);
/* Return: NULL without memory. */
struct cluster_job *cluster_job_new(struct cluster *c, const char *label);
void cluster_key(const struct cluster_job *cj, const char *what, char ret[CLUSTER_KEY_BYTES]);
/* Note the value of the key "epoch", of @bytes; 0: there is none. */
void cluster_placed_set(struct cluster_job *cj, const void *value, size_t bytes);
/* That of the next epoch: the nodes that want to be in it, and those of earlier ones. Return: the caller's; NULL: no
 * memory. */
char *cluster_placed_new(const struct cluster_job *cj, uint64_t epoch);
/* Does what was decided name the nodes that are here now? Ranks of others may have come meanwhile. */
bool cluster_placed_is_true(const struct cluster_job *cj);
/* The nodes of such a value, one after the other: @at is cluster_placed_begin at first. @ret_ranks: of the last
 * epoch. Return: false: there is none more. */
const char *cluster_placed_begin(const char *value);
bool cluster_placed_next(const char **at, char name[SPAN_NAME_BYTES], uint32_t *ret_ranks);
/* "LABEL/INCARNATION/EPOCH/": what the keys of the communicators of the epoch that runs begin with, which
 * no other epoch has. Return: its length. */
size_t cluster_prefix(const struct cluster_job *cj, char ret[CLUSTER_KEY_BYTES]);
void cluster_state_move(struct cluster_job *cj, enum cluster_job_state to);
void cluster_say(struct cluster_job *cj, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* The search for its leader (cluster_seek.c). */
void cluster_seek(struct cluster_job *cj);
/* Follow the leader's key, which this node has. */
void cluster_seek_watch_key(struct cluster_job *cj);
void cluster_seek_tick(struct cluster_job *cj, uint64_t now_us);
/* The leader cannot be reached, or does not lead any more. */
void cluster_leader_lost(struct cluster_job *cj, const char *why);
/* It says so itself: its place is free. */
void cluster_leader_resigned(struct cluster_job *cj);
/* A link to node @name, if there is none yet: cluster_link_up. Return: 0 or a fault code. */
int cluster_seek_connect(struct cluster *c, const char *name, const char *at, struct fault *f);
void cluster_link_up(struct cluster_link *l);
void cluster_link_gone(struct cluster_link *l, const char *why);

/* What nodes have of a job (cluster_holding.c). */
/* Return: 0 or -ENOMEM; else cluster_holding_deinit follows. */
int cluster_holding_of(const struct job *job, struct cluster_holding *ret);
void cluster_holding_deinit(struct cluster_holding *h);
/* Is that the state of @step, with units of @layout, whatever is ruled? */
bool cluster_holding_is_at(const struct cluster_holding *h, uint64_t step, uint64_t layout);
/* Is it the same job on both nodes, whatever they have of it? Return: 0 or a fault code. */
int cluster_holding_check_job(const struct cluster_job *cj, const struct cluster_node *a,
			      const struct cluster_node *b, struct fault *f);
/* Of which incarnation of the job is the next epoch? cj->incarnation. Return: 0, or a fault code: nodes have
 * different ones. */
int cluster_holding_incarnation(struct cluster_job *cj, struct fault *f);
/* The next epoch is decided, and @reply has the key of the last committed step: cj->ruling. Return: 0, or a fault
 * code: with it the nodes are not at the same step. */
int cluster_holding_rule(struct cluster_job *cj, const struct coord_reply *reply, struct fault *f);
/* The node with memory of the job that was in the latest epoch; NULL: none has any. */
const struct cluster_node *cluster_holding_newest(struct cluster_job *cj);
/* The last commit, as its key says. @kv: NULL: there is none. Return: all 0: none, or it is not readable. */
struct doubt_ruling cluster_holding_read_step(const struct coord_kv *kv);
/* The last epoch that has begun here. */
uint64_t cluster_holding_begun(const state_job *rec);
/* What the node has when the ruling has ended its doubts. */
void cluster_holding_settle(struct cluster_holding *h, const struct doubt_ruling *r);
/* After cluster_holding_rule: did others, none of which is here, make the last commit? A part of an elastic
 * job that was cut off must not go back to an earlier one. Return: 0 or a fault code. */
int cluster_holding_check_newer(struct cluster_job *cj, struct fault *f);
/* What is in doubt here ends, as the leader has said. */
/* Return: 0 or -ENOMEM: nothing has ended. */
int cluster_holding_resolve(struct job *job, const Shardd__V1__JobBegin *b);
/* What a message has of a holding. */
struct cluster_packed {
	Shardd__V1__JobStep prepared;
	Shardd__V1__JobReplica replicas[CLUSTER_MAX_REPLICAS], *list[CLUSTER_MAX_REPLICAS];
};
/* @at, @with: the message's; @applied: its array, of cluster_holding_pack_steps. */
void cluster_holding_pack(const struct cluster_holding *h, Shardd__V1__JobHolding *at,
			  struct cluster_packed *with, Shardd__V1__JobStep **applied);
/* Return: an array for a message, in one block that is the caller's; NULL without memory. */
Shardd__V1__JobStep **cluster_holding_pack_steps(const struct job_step_id *ids, size_t n);
/* Return: 0 or -ENOMEM. */
int cluster_holding_unpack(struct cluster_node *n, const Shardd__V1__JobHolding *s);

/* Ranks that want to join (cluster_wish.c). */
void cluster_tell_wishes(struct cluster_job *cj);
void cluster_on_wish(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobWish *w);
/* It no longer leads: its nodes are told. */
void cluster_forget_nodes(struct cluster_job *cj);
void cluster_wish_node_free(struct cluster_node *n);

/* Epochs (cluster_epoch.c). */
void cluster_on_begin(struct cluster_job *cj, const Shardd__V1__JobMessage *m);
void cluster_on_end(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m);
void cluster_refused(struct cluster_job *cj, const struct fault *f);
void cluster_node_gone(struct cluster_job *cj, struct peer *p, const char *why);
void cluster_epoch_free(struct cluster_job *cj);
void cluster_epoch_tick(struct cluster_job *cj, uint64_t now_us);
/* All ranks want to join: decide the epoch. */
void cluster_form(struct cluster_job *cj);

/* The message about @cj's nodes. Owned memory is in *ret_block. Return: NULL without memory. */
Shardd__V1__JobNode **cluster_list_nodes(struct cluster_job *cj, size_t *ret_n, void **ret_block);
/* Nobody goes on. */
void cluster_refuse_all(struct cluster_job *cj, const struct fault *f);

/* Elastic jobs (cluster_elastic.c). The leader: not all ranks are there that were started. May those go on
 * that are? Else it says what is waited for. */
bool cluster_elastic_is_due(struct cluster_job *cj, uint32_t launched, uint32_t n);
/* Why those that are there do not go on, whatever the grace. "": nothing. */
const char *cluster_elastic_lacks(struct cluster_job *cj);
/* The leader, before an epoch is decided: ranks that have come since the last one come into a later one, if the
 * others have what they had, and no replicas of that. */
void cluster_elastic_set_apart(struct cluster_job *cj);
/* It is not decided: all nodes are in cj->nodes again. */
void cluster_elastic_together(struct cluster_job *cj);
/* The leader of the job cannot be reached, and this node is in no epoch with it. May it take its place? Not while
 * the leader goes on without it: both would take it from each other for ever. @had_link: to that leader. */
bool cluster_elastic_may_replace(struct cluster_job *cj, bool had_link);
/* Is a node's memory laid out for other ranks than those that want to join now? Return: 0 or a fault code. */
int cluster_elastic_check_layout(struct cluster_job *cj, struct fault *f);
/* The leader, an epoch runs: do all that want to join with @w wait until the job grows? Then it goes on. */
bool cluster_elastic_waits(struct cluster_job *cj, const Shardd__V1__JobWish *w);
/* An epoch begins: all that want to join are in it, or wait until the job grows. */
void cluster_elastic_taken(struct cluster_job *cj);
/* Replicas of the last commit are complete, and the next one is held: those that wait may be taken in. */
void cluster_elastic_grow(struct cluster_job *cj, struct job *job);

/* From replicas (cluster_restore.c). The leader, DECIDING: the nodes have not the same, @why. Return: whether
 * they are RESTORING now. */
bool cluster_restore_begin(struct cluster_job *cj, const struct fault *why);
/* The leader: a part of the newest commit of which all parts are there. Return: NULL: there is none. */
const struct cluster_part *cluster_restore_newest(struct cluster_job *cj);
void cluster_on_restore(struct cluster_job *cj, const Shardd__V1__JobRestore *m);
/* @from: NULL: this node. */
void cluster_on_restored(struct cluster_job *cj, struct peer *from,
			 const Shardd__V1__JobRestored *m);
/* A node has answered, or is gone: go on if no other one is waited for. */
void cluster_restore_look(struct cluster_job *cj);
/* The job or the cluster ends. */
void cluster_restore_end(struct cluster_job *cj);

/* Ranks that leave, or give up joining (cluster_left.c). */
void cluster_on_rank_left(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobLeft *l);
/* Entries of the order that a node may announce ahead (cluster_order.c). */
uint32_t cluster_order_ahead(const struct job *job);
/* Of an epoch that runs (cluster_order.c). NULL: none. */
struct cluster_job *cluster_order_running(const struct job *job);
const struct order_nodes *cluster_order_nodes_of(const struct group *g, struct order_nodes *ret);
struct unit *cluster_order_unit_of(struct job *job, uint64_t key);
void cluster_order_tell(struct cluster_job *cj, const struct job *job, const struct order_entry *e);
/* To all nodes of the epoch but @except, from the leader; else to the leader (cluster_uneven.c). */
void cluster_tell_others(struct cluster_job *cj, Shardd__V1__JobMessage *m,
			 const struct peer *except);
/* Which node of the epoch @from is. Return: false: none. */
bool cluster_node_of(const struct cluster_job *cj, const struct peer *from, unsigned *ret);
/* Is @rank of @g on @node? The leader knows whose rank it is; the others believe it. */
bool cluster_is_rank_of(const struct cluster_job *cj, const struct group *g, unsigned node,
			uint32_t rank);
/* Parameters that a rank writes by itself (cluster_writes.c): a message write of this epoch. */
void cluster_on_write(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m);
/* Ranks without inputs (cluster_uneven.c): a message no_inputs or collective of this epoch. */
void cluster_on_uneven(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m);
/* None of this node wants to join any more: the leader is told. */
void cluster_withdraw(struct cluster_job *cj);

/* What all ranks do (cluster_survey.c). */
void cluster_on_ask(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobAsk *ask);
void cluster_on_told(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobTold *told);
/* @from asks for a job that is not here. */
void cluster_answer_nothing(struct cluster *c, struct peer *from, const Shardd__V1__JobMessage *m);
void cluster_survey_tick(struct cluster_job *cj, uint64_t now_us);
void cluster_survey_free(struct cluster_job *cj);
/* The link to a node that this one leads. NULL: none. */
struct peer *cluster_survey_peer(struct cluster_job *cj, const char *name);
/* Its keys in the store (cluster_erase.c). */
void cluster_erase_tick(struct cluster_job *cj, uint64_t now_us);
/* This node leads the job, which is deleted on all nodes: its keys are removed. */
void cluster_erase(struct cluster_job *cj);
/* This node decides about it, or will. */
bool cluster_leads(const struct cluster_job *cj);

/* It is deleted, or drains, on all nodes (cluster_act.c). */
void cluster_on_act(struct cluster *c, struct peer *from, const Shardd__V1__JobMessage *m);
void cluster_on_acted(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobActed *acted);
void cluster_acts_peer_gone(struct cluster *c, const struct peer *p, const char *why);
void cluster_act_tick(struct cluster_job *cj, uint64_t now_us);
/* It wants to know who leads the job; this node leads it. */
bool cluster_act_seeks(const struct cluster_job *cj);
bool cluster_act_is_here(const struct cluster_job *cj);
/* The job is deleted here. */
void cluster_act_job_gone(struct cluster_job *cj);
void cluster_act_drop(struct cluster_job *cj);

/* One node's part of it (cluster_told.c). Return: shardd__v1__job_told__free_unpacked; NULL without
 * memory. */
Shardd__V1__JobTold *cluster_told_new(const struct job *job, const char *node);

/* The order (cluster_order.c). */
int cluster_order_begin(struct cluster_job *cj);
void cluster_on_order(struct cluster_job *cj, struct peer *from, const ProtobufCBinaryData *bytes);
void cluster_order_tick(struct cluster_job *cj, uint64_t now_us);
void cluster_orders_free(struct cluster *c);
void cluster_order_end(struct cluster_job *cj);

/* The leader begins no commit of the job, or goes on with what waits. */
void cluster_order_hold(struct cluster_job *cj, bool on);

/* Checkpoints (cluster_round.c). */
void cluster_on_round(struct cluster *c, struct peer *from, const Shardd__V1__JobMessage *m);
void cluster_on_policy(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m);
void cluster_rounds_peer_gone(struct cluster *c, const struct peer *p, const char *why);
void cluster_rounds_epoch_ended(struct cluster_job *cj, const char *why);
void cluster_rounds_restore(struct cluster_job *cj);
void cluster_rounds_tick(struct cluster *c, uint64_t now_us);
void cluster_rounds_end(struct cluster *c);
void cluster_rounds_free(struct cluster *c);

/* Files of a part, from another node (cluster_copy.c). */
struct cluster_copy;
struct cluster_copy_want {
	struct replica *replica; /* a reference is taken */
	const char *label, *node, *at;
	uint64_t bytes[_REPLICA_FILES]; /* 0: this file is not wanted */
};
/* @f: NULL: all of them are there, of @bytes bytes; UNAVAILABLE also if there was no place for a fetch and
 * nothing came for CLUSTER_COPY_IDLE_US; EXHAUSTED: a shortage of memory, which ends it at once. Not called by cluster_copy_begin. */
typedef void (*cluster_copy_cb)(void *userdata, uint64_t bytes, const struct fault *f);
/* Return: 0 or a fault code. */
int cluster_copy_begin(struct cluster *c, const struct cluster_copy_want *want,
		       cluster_copy_cb done, void *userdata, struct cluster_copy **ret,
		       struct fault *f);
/* Its callback comes soon, not from here. Safe twice. */
void cluster_copy_cancel(struct cluster_copy *x);
uint64_t cluster_copy_bytes(const struct cluster_copy *x);
/* Ask again for what there was no place for. */
void cluster_copies_tick(struct cluster *c, uint64_t now_us);
/* Other nodes may fetch parts from here on. */
void cluster_replica_serve(struct cluster *c);
/* The leader: begin a round of replicas of the next commit, if it is time (cluster_round.c). Return: it has begun. */
bool cluster_round_replicate(struct cluster_job *cj, struct job *job);

/* Where members of communicators meet (cluster_keys.c): a message set, get or exchange. @from: NULL: this node. */
void cluster_on_key(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m);
/* The slots of struct rendezvous_ops. */
void cluster_keys_set(void *userdata, const char *key, const void *value, size_t bytes);
void cluster_keys_get(void *userdata, const char *key);
void cluster_keys_give_here(void *userdata, const struct rendezvous_gift *g);

/* Is @from a node of the epoch, at the leader, or else the leader? */
bool cluster_has_part(struct cluster_job *cj, const struct peer *from);
/* Its communicators meet no more. */
void cluster_drop_keys(struct cluster_job *cj);
/* Send a message about the job. */
void cluster_send(struct cluster_job *cj, struct peer *to, Shardd__V1__JobMessage *m);
/* @from asks this node, which does not lead the job. */
void cluster_deny(struct cluster *c, struct peer *from, const char *label);
/* The link to the leader, if this node follows and it is up. */
struct peer *cluster_to_leader(const struct cluster_job *cj);

/* The slots of struct job_ops (cluster_set_slots). */
enum res cluster_may_join(struct job *job, uint32_t rank, struct fault *f);
void cluster_announce(struct group *g, uint64_t number, const struct match_entry *first);
void cluster_prepared(struct group *g, uint64_t number);
void cluster_refuse(struct group *g, uint64_t number, const struct fault *fault);
void cluster_want(struct job *job, struct unit *u, uint64_t turn);
void cluster_asked(struct job *job, struct unit *u, uint64_t turn);
void cluster_give(struct job *job, struct unit *u, uint64_t turn);
void cluster_leave_out(struct job *job, struct unit *u);
void cluster_made(struct job *job, uint64_t position);
void cluster_no_inputs(struct group *g, uint64_t number, uint64_t last_number, uint32_t last);
void cluster_writes(struct job *job, const struct across_write *w);
void cluster_write_allowed(struct job *job, const struct across_write *w);
void cluster_write_refused(struct job *job, const struct across_write *w, const struct fault *f);
void cluster_asks(struct group *g, const struct asked *a);
void cluster_op_waits(const struct group *g, uint64_t number, char *buf, size_t bytes);
void cluster_rank_left(struct job *job, const struct member *m);
void cluster_left(struct job *job);
enum res cluster_leaves(const struct job *job);
void cluster_deleted(struct job *job);
void cluster_gave_up(struct job *job, uint32_t rank);
bool cluster_is_awaited(const struct job *job);
void cluster_epoch_ended(struct job *job, const struct fault *why);
int cluster_save(struct job *job, const struct saving_options *o, struct fault *f);
int cluster_load(struct job *job, const struct loading_options *o, struct fault *f);
void cluster_give_up(struct job *job, bool loads);
void cluster_policy(struct job *job);
bool cluster_replicate(struct job *job, bool due);

#endif
