/* The parts of an order: shared by the files of the module, and by its tests. */
#ifndef SHARDD_ORDER_ORDER_IMPL_H
#define SHARDD_ORDER_ORDER_IMPL_H

#include "order/order.h"

#define ORDER_MAX_SETS  4096u
#define ORDER_MAX_UNITS (1u << 20)

/* Items that begin with a struct order_key. */
struct order_table {
	void *items;
	size_t item_size;
	uint32_t *slots; /* index of an item, and 1; 0: empty */
	uint32_t n_slots, n, cap;
};

bool order_key_equal(const struct order_key *a, const struct order_key *b);
void *order_table_item(const struct order_table *t, uint32_t i);
void *order_table_find(const struct order_table *t, const struct order_key *key);
/* @key is not there. Other items may move. Return: the item, all 0 but for its key; NULL: no memory. */
void *order_table_add(struct order_table *t, const struct order_key *key);
/* The last item takes its place. */
void order_table_remove(struct order_table *t, void *item);
void order_table_deinit(struct order_table *t);

/* Nodes that have entries in common. The first one is all nodes. */
struct order_set {
	struct order_nodes nodes;
	uint32_t n;
	uint64_t chain; /* fingerprint of what this node has started with these nodes */
};

/* What has started, as it is recorded and compared with the next step. */
struct order_rec {
	struct order_key key;
	uint64_t at;    /* position behind that of the mark before */
	uint64_t shift; /* once compared: what the number grows by from step to step */
	uint64_t words[8];
	uint32_t set;
	uint8_t flags; /* enum order_flags, ORDER_MSG_ALL */
	bool asked;    /* a gather that this node's ranks had asked for when it started */
};

/* A step: all between a mark (exclusive) and the next one. */
struct order_record {
	struct order_rec *recs;
	uint32_t n, cap;
	bool valid;      /* it has everything since the mark */
	uint64_t base;   /* position of the mark before */
	uint64_t period; /* position of its own mark, behind @base */
};

struct order_history {
	struct order_record now, last;
	uint32_t repeats; /* how often in a row a step was like the one before */
};

/* A recorded step that repeats. */
struct order_schedule {
	struct order_record step;
	struct order_table index;   /* struct order_place: of the keys as recorded */
	struct order_table streams; /* struct order_stream: by kind and group */
	uint32_t at;                /* what is next */
	uint64_t turn;              /* which repetition, from 1 on */
	uint64_t base;              /* position of the mark before it */
};

struct order_place {
	struct order_key key;
	uint32_t i;
};

struct order_stream {
	struct order_key key; /* number: 0 */
	uint64_t low, high;   /* numbers in the recorded step */
	uint64_t shift;
};

enum order_mode { ORDER_NORMAL, ORDER_RECORDED, ORDER_FROZEN, ORDER_CATCH_UP };

enum order_pending_state {
	ORDER_ANNOUNCED,
	ORDER_REFUSED,
	ORDER_FAILED, /* by others, before its owner has announced it */
};

/* What its owner has announced or refused, and what waits for the owner. */
struct order_pending {
	struct order_key key;
	uint8_t state; /* enum order_pending_state */
	uint8_t flags; /* enum order_flags, ORDER_MSG_ALL */
	bool sent;     /* the leader has been told, in this phase */
	uint32_t set;
	uint64_t seq; /* in which order they came */
	struct order_print print;
	uint32_t rank;
	int pid;
	struct fault *fault; /* owned; REFUSED, FAILED */
};

/* The last gather of a unit that was started or failed: earlier ones are over. */
struct order_unit {
	struct order_key key; /* number: 0 */
	uint64_t last;
	uint64_t position;   /* where it started */
	struct fault *fault; /* owned; if it has failed */
};

/* A gather that this node has started by the schedule, and that is not over. */
struct order_watch {
	struct order_key key;
	uint64_t position;
	uint64_t since_us; /* when it was asked for, if it was, and had started */
	bool asked;
};

/* What this node does. */
struct order_member {
	enum order_mode mode;
	uint32_t phase;
	uint64_t position; /* of what has started last */
	uint64_t asked;    /* of what has started last of what its own ranks had asked for */
	uint64_t target;   /* CATCH_UP */
	uint64_t seq;
	bool stopped;      /* FROZEN, and the leader knows how far it is */
	bool waits;        /* something is ready, and the schedule has another entry next... */
	uint64_t since_us; /* ...since then */
	uint32_t n_refused, n_failed;
	struct order_table pending; /* struct order_pending */
	struct order_table units;   /* struct order_unit */
	struct order_history history;
	struct order_schedule schedule;
	struct order_watch *watches;
	uint32_t n_watches, cap_watches;
};

enum order_open_state {
	ORDER_OPEN,
	ORDER_DECIDING,
	ORDER_FAILING, /* all were told; some node has not announced it yet */
};

/* An entry that the leader has heard of. */
struct order_open {
	struct order_key key;
	uint8_t state; /* enum order_open_state */
	uint8_t flags;
	uint32_t set;
	uint32_t n_heard;
	struct order_nodes heard; /* those that have announced or refused it */
	uint64_t seq;
	uint32_t first; /* the node that did it first, and what it has announced */
	uint32_t rank;
	int pid;
	struct order_print print;
};

/* What the first node has said that it has started with a set of nodes. */
struct order_compared {
	struct order_key key; /* group: the set; number: order_open.seq of the joint entry */
	uint64_t value;
	uint32_t node;
};

enum order_leading { ORDER_LEADS, ORDER_LETS_REPEAT, ORDER_STOPS };

/* What the leader does beside. */
struct order_leader {
	enum order_leading state;
	uint32_t phase;
	uint64_t
		position; /* LEADS: the last one; else: that of the last entry it has started itself */
	uint64_t seq;
	uint32_t n_deciding, n_failing;
	uint32_t need;            /* repeats before the next schedule */
	struct order_table open;  /* struct order_open */
	struct order_table units; /* struct order_unit */
	struct order_history history;
	struct order_schedule schedule;
	uint32_t *ahead;           /* by node: OPEN entries that it has announced */
	struct order_nodes caught; /* LEADS: nodes that are where the order goes on */
	uint32_t n_caught;
	struct order_nodes told; /* STOPS: nodes that have said how far they are... */
	uint32_t n_told;
	uint64_t reached;            /* ...and the farthest */
	struct order_table compared; /* struct order_compared: LETS_REPEAT */
};

struct order_queued {
	uint32_t from;
	struct order_msg msg;
};

struct order {
	struct order_options options;
	struct order_ops ops;
	void *userdata;
	uint64_t now_us;
	bool running;               /* a caller further up takes what is queued */
	bool over;                  /* the epoch has ended */
	struct order_queued *queue; /* messages to this node, from itself or while it is running */
	uint32_t queue_at, queue_n, queue_cap;
	struct order_set *sets;
	uint32_t n_sets, cap_sets;
	struct order_member me;
	struct order_leader lead;
};

/* order.c */

/* The epoch ends, because of this. */
void order_break(struct order *o, enum fault_code code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* ... because @node sends what it must not: "a start of what was not announced". */
void order_break_peer(struct order *o, uint32_t node, const char *what);
void order_break_memory(struct order *o);
void order_send(struct order *o, uint32_t node, const struct order_msg *msg);
/* Take what is queued and start what is next, unless a caller further up does. */
void order_run(struct order *o);
/* Index of a set. Return: -1 if it is none, or there are too many (the epoch has ended). */
int32_t order_set_find(struct order *o, uint32_t from, bool all, const struct order_nodes *nodes);
bool order_set_has(const struct order *o, uint32_t set, uint32_t node);
/* Is it started by the leader alone, also while a schedule is followed? */
bool order_is_joint(const struct order_key *key, uint32_t flags);
/* The unit of a gather, made if it is not there. Return: NULL if it cannot be (the epoch has ended). */
struct order_unit *order_unit_of(struct order *o, struct order_table *t,
				 const struct order_key *key);
/* Is it a gather of a unit of which this or a later one has had its turn? */
bool order_unit_is_over(const struct order_table *t, const struct order_key *key);
/* Why a gather fails that another one has overtaken. */
void order_overtaken_fault(struct fault *f);

/* order_schedule.c */

/* Something has started. A record that has no room is not valid. */
void order_history_add(struct order_history *h, const struct order_rec *rec, uint64_t position,
		       uint32_t most);
/* The mark that was added last ends the step. */
void order_history_mark(struct order_history *h, uint64_t position);
void order_history_reset(struct order_history *h);
void order_history_deinit(struct order_history *h);
/* Of the part of it that @node has. @ret_n: its entries. */
uint64_t order_record_hash(const struct order *o, const struct order_record *r, uint32_t node,
			   uint32_t *ret_n);
/* Follow the last step of @h from now on. Return: false if there is no memory. */
bool order_schedule_begin(struct order_schedule *s, const struct order_history *h);
/* May what has this fingerprint stand for what was recorded? What is joint is compared by the leader. */
bool order_words_fit(const struct order_rec *rec, const struct order_print *print);
void order_schedule_deinit(struct order_schedule *s);
const struct order_rec *order_schedule_next(const struct order_schedule *s);
struct order_key order_schedule_key(const struct order_schedule *s);
uint64_t order_schedule_position(const struct order_schedule *s);
void order_schedule_advance(struct order_schedule *s);
/* Go on to the next joint entry, perhaps this one. */
void order_schedule_skip(struct order_schedule *s);
/* What the schedule has, now or later, for @key. Return: NULL if it has it no more, or not at all. */
const struct order_rec *order_schedule_find(const struct order_schedule *s,
					    const struct order_key *key);

/* order_member.c */

void order_member_receive(struct order *o, const struct order_msg *msg);
/* Start what is there: all is as it must be. */
void order_member_start(struct order *o, const struct order_rec *rec, uint64_t position);
/* Tell the leader of what is pending, or all of it, in this phase. */
void order_member_tell(struct order *o, struct order_pending *p);
void order_member_tell_all(struct order *o);
void order_member_deinit(struct order_member *m);

/* order_replay.c */

/* Start what the schedule has next. Return: true if that changed anything. */
bool order_replay_advance(struct order *o);
/* RECORDED: @p is new. */
void order_replay_check(struct order *o, const struct order_pending *p);
/* This node cannot follow the schedule. */
void order_replay_deviate(struct order *o);
void order_replay_on_schedule(struct order *o, const struct order_msg *msg);
void order_replay_on_stop(struct order *o, const struct order_msg *msg);
void order_replay_on_resume(struct order *o, const struct order_msg *msg);
void order_replay_watch(struct order *o, const struct order_key *key, uint64_t position,
			bool asked);
void order_replay_tick(struct order *o);

/* order_leader.c */

int order_leader_init(struct order *o);
void order_leader_deinit(struct order_leader *l);
void order_leader_receive(struct order *o, uint32_t from, const struct order_msg *msg);
void order_leader_send_all(struct order *o, uint32_t set, const struct order_msg *msg);
/* Forget all entries that wait: their nodes tell of them again in the next phase. */
void order_leader_forget_open(struct order *o);
/* Start what can be started, because more nodes are where the order goes on. */
void order_leader_start_ready(struct order *o);

/* order_leader_stop.c */

/* A step has ended: is it a schedule? */
void order_leader_mark(struct order *o);
void order_leader_stop(struct order *o);
/* Where does the order go on, once everybody has told? */
void order_leader_resume(struct order *o);
void order_leader_on_told(struct order *o, uint32_t from, const struct order_msg *msg);
void order_leader_on_caught_up(struct order *o, uint32_t from);

#endif
