/*
 * The order of what the nodes of a job do together in one epoch (docs/nodes.md).
 *
 * A node announces an entry when it is ready for it. One node leads: it gives entries their positions,
 * and tells all nodes to start them. When a step has repeated, the nodes start its entries by themselves:
 *
 *            schedule                      stop, or deviates
 *   NORMAL -----------> RECORDED (replays) -----------------> FROZEN
 *     ^                                                          | all have told how far they are
 *     '------------------------- CATCH_UP <----------------------'
 *          at the target             to the farthest of them
 *
 * This is a state machine and nothing else: messages leave by a callback and arrive by order_receive,
 * time comes by order_tick. There is one for each node, job and epoch, also on the node that leads. The
 * links between a node and the leader must keep the order of messages and lose none; an epoch ends with
 * its links. A peer that sends what no correct peer sends ends the epoch, with the reason.
 *
 * A callback may call any function here but order_free. Loop thread only; nothing blocks.
 */
#ifndef SHARDD_ORDER_ORDER_H
#define SHARDD_ORDER_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

#define ORDER_MAX_NODES 1024u

enum order_kind {
	ORDER_COLLECTIVE = 1, /* @group: of ranks; @number: of its collective, each is used once */
	ORDER_GATHER,     /* @group: the unit; @number grows with each gather that is a new one */
	ORDER_APPLY,      /* @group: of ranks; @number: of the Step that is applied */
	ORDER_APPLY_UNIT, /* @group: a unit that its trainers step; @number: how often they have */
	_ORDER_KIND_N,
};

struct order_key {
	uint32_t kind; /* enum order_kind */
	uint64_t group;
	uint64_t number;
};

/* A set of nodes. */
struct order_nodes {
	uint64_t words[ORDER_MAX_NODES / 64];
};

static inline bool order_nodes_has(const struct order_nodes *s, uint32_t node)
{
	return s->words[node / 64] >> node % 64 & 1;
}

/* Return: true if it was not there. */
static inline bool order_nodes_add(struct order_nodes *s, uint32_t node)
{
	bool had = order_nodes_has(s, node);

	s->words[node / 64] |= UINT64_C(1) << node % 64;
	return !had;
}

/* What must be equal on all nodes, and its description for people. */
struct order_print {
	uint64_t words[8];
	char text[192];
};

enum order_flags {
	/* The leader decides it, between the last announcement and the start: a commit. */
	ORDER_DECISION = 1,
	/* A step ends with it: all nodes take part. What repeats is what lies between two of these. */
	ORDER_MARK = 2,
	/* Only the leader starts it, in a schedule, too. As with the other two, its fingerprint may be another
	 * one in each step. */
	ORDER_JOINT = 32,
};

#define ORDER_FLAGS (ORDER_DECISION | ORDER_MARK | ORDER_JOINT)

/* An entry, as its owner on one node knows it. */
struct order_entry {
	struct order_key key;
	uint32_t flags;                  /* enum order_flags; 0 for a gather */
	const struct order_nodes *nodes; /* those that take part, this one too; NULL: all */
	const struct order_print *print; /* NULL for a gather: its key says it all */
	uint32_t rank;                   /* whose op it is, for texts */
	int pid;
};

struct order_started {
	struct order_key key;
	uint64_t position; /* grows; what has no part of this node has positions, too */
	/* Of all that this set of nodes has started up to here. It travels beside the data: where
	 * it differs, nodes disagree. */
	uint64_t fingerprint;
};

struct order_msg;

struct order_ops {
	/* Send @msg (borrowed) to @node. If the link is gone the owner ends the epoch later. */
	void (*send)(void *userdata, uint32_t node, const struct order_msg *msg);
	/* It is this entry's turn. It cannot be refused any more. A gather may be one that this node
	 * has not asked for. */
	void (*start)(void *userdata, const struct order_started *started);
	/* An entry that this node has announced or refused does not take place, on any node. */
	void (*fail)(void *userdata, const struct order_key *key, const struct fault *fault);
	/* Only the leader's: call order_decided, now or later. */
	void (*decide)(void *userdata, const struct order_key *key);
	/* The order cannot go on. Nothing more is called, and open entries are not told. */
	void (*ended)(void *userdata, const struct fault *fault);
};

struct order_options {
	uint32_t n_nodes; /* 1..ORDER_MAX_NODES */
	uint32_t self, leader;
	const char *const *names; /* of the nodes, for texts; borrowed */
	uint32_t max_ahead;       /* entries that a node has announced and that have not started */
	uint32_t max_recorded;    /* entries of a step that may be recorded; 0: none ever is */
	bool no_schedules;        /* the leader's: no step becomes a schedule */
	uint64_t patience_us; /* how long a schedule may keep waiting what is ready, or needed */
	uint64_t
		stuck_us; /* the same where others have gone on already: it ends the epoch; 0: never */
};

struct order;

enum {
	/* a gather that was started before, perhaps for another node; or a later one of its unit was */
	ORDER_E_STARTED = 1,
	ORDER_E_AHEAD,     /* max_ahead entries wait already: try again when one has started */
	ORDER_E_ENDED,     /* the epoch has ended */
	ORDER_E_MALFORMED, /* bytes that are no message */
};

/* @options and @ops are copied. Return: 0 or -ENOMEM. */
int order_new(const struct order_options *options, const struct order_ops *ops, void *userdata,
	      struct order **ret);
struct order *order_free(struct order *o);

/* This node is ready for @e (copied). Exactly one of start and fail follows, possibly before this returns,
 * unless the epoch ends. A gather may be announced again while it waits.
 * Return: 0, ORDER_E_STARTED, ORDER_E_AHEAD (nothing changed), ORDER_E_ENDED. */
int order_announce(struct order *o, const struct order_entry *e);

/* This node cannot take part in @e, announced or not. It is a request: fail follows, or start if that was
 * under way. Afterwards it is not announced. @fault becomes the reason on all nodes. Flags and fingerprint
 * do not count if it was not announced: this node may not know what it is.
 * Return: 0, ORDER_E_STARTED, ORDER_E_ENDED. */
int order_refuse(struct order *o, const struct order_entry *e, const struct fault *fault);

/* The leader's decision about an entry that decide was called for. @fault: if not @done. */
void order_decided(struct order *o, const struct order_key *key, bool done,
		   const struct fault *fault);

/* The operations between nodes of what has started at @position are over, on this node. A gather that this node
 * has asked for, and that is not over for long, stops the schedule that makes others wait. */
void order_done(struct order *o, uint64_t position);
/* A rank of this node waits for the gather @key, which was started before that. */
void order_asked(struct order *o, const struct order_key *key);

/* A message from @from has arrived. @msg: borrowed, as order_unpack has made it. */
void order_receive(struct order *o, uint32_t from, const struct order_msg *msg);

/* Call some times in @patience_us. @now_us: any clock that does not go back. */
void order_tick(struct order *o, uint64_t now_us);

/* The owner has ended the epoch: nothing more is called. */
void order_end(struct order *o);

/* Does this node follow a recorded schedule? For status. */
bool order_is_recorded(const struct order *o);

enum order_msg_type {
	ORDER_MSG_ANNOUNCE = 1, /* to the leader: ready for @entry */
	ORDER_MSG_REFUSE,       /* to the leader: cannot do @entry, because of @fault */
	ORDER_MSG_START,        /* from the leader: @entry is next, at @position */
	ORDER_MSG_FAIL,         /* from the leader: @entry does not take place, because of @fault */
	ORDER_MSG_SCHEDULE,     /* from the leader: go on by yourself, as in the last step */
	ORDER_MSG_DEVIATE,      /* to the leader: cannot follow the schedule after @position */
	ORDER_MSG_STOP,         /* from the leader: start nothing more, and tell how far you are */
	ORDER_MSG_REACHED,      /* to the leader: has started all up to @position */
	ORDER_MSG_RESUME, /* from the leader: follow the schedule up to @position, then ask again */
	ORDER_MSG_CAUGHT_UP, /* to the leader: has come there */
	_ORDER_MSG_N,
};

/* Beside those of enum order_flags. */
enum order_msg_flags {
	ORDER_MSG_ALL = 4, /* all nodes take part */
	/* ANNOUNCE: of an entry that is known to fail; the leader may forget it when all have. */
	ORDER_MSG_KNOWN = 8,
	/* REFUSE: of an entry that was announced in this phase. */
	ORDER_MSG_AGAIN = 16,
};

/* Sets of nodes whose fingerprints a message has at most. */
#define ORDER_MSG_CHAINS 16u

/* order_started.fingerprint of what a node has started last with a set of nodes. */
struct order_chain {
	uint64_t set; /* a hash of the nodes */
	uint64_t value;
};

struct order_msg {
	uint8_t type;   /* enum order_msg_type */
	uint8_t flags;  /* enum order_flags, enum order_msg_flags */
	uint32_t phase; /* how many times the way of ordering has changed */
	struct order_key key;
	struct order_nodes nodes; /* without ORDER_MSG_ALL */
	struct order_print print;
	uint32_t rank;
	int32_t pid;
	/* ANNOUNCE, in a schedule: of the first sets that the node has entries with */
	uint32_t n_chains;
	struct order_chain chains[ORDER_MSG_CHAINS];
	uint64_t position;
	uint64_t hash; /* SCHEDULE: of what the receiver has recorded... */
	uint32_t n;    /* ...and how many entries that is */
	struct fault fault;
};

/* Bytes that any message takes at most. */
#define ORDER_MSG_MAX 1024u

/* Return: bytes written, at most ORDER_MSG_MAX. Any thread. */
size_t order_pack(const struct order_msg *msg, uint8_t out[ORDER_MSG_MAX]);

/* @ret: written only on success. Return: 0 or ORDER_E_MALFORMED. Any thread. */
int order_unpack(const uint8_t *bytes, size_t n, struct order_msg *ret);

#endif
