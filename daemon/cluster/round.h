/*
 * A round: a checkpoint that the nodes of a job save or load together (docs/nodes.md).
 *
 * The node that leads has all nodes, itself among them, enter one phase after the other, and goes on when
 * all have answered. What the nodes do in a phase is their own part (job/saving.h, job/loading.h).
 *
 *   save:  NOW ----------------------> SEE --> WRITE --> (the leader completes it) --> over
 *           '--not as of a commit--> NEXT --^
 *   load:  OPEN --> READ --> over: each node takes what it has read
 *   replica:  NEXT --> WRITE --> COPY --> over: each node has its part and that of the node before it
 *
 * A fault on any node, or a node that is gone, ends it on all: an END with the reason. NOW asks whether all
 * nodes stand still at the same commit; no commit begins meanwhile (ops.hold). NEXT reaches all nodes
 * before the start of the commit that it is about. In SEE and OPEN the leader is the first one, and tells
 * the others what it has made or found. Each phase has a deadline, and names those who have not answered.
 *
 * It does no I/O of its own: messages go through ops. Loop thread only.
 */
#ifndef SHARDD_CLUSTER_ROUND_H
#define SHARDD_CLUSTER_ROUND_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/list.h"
#include "job/job.h"
#include "job/span.h"
#include "peer.pb-c.h"

struct round;

/* The owner's. */
struct round_ops {
	/* Send @m, whose body is set, to node @node: of the leader to any, of others to the leader. */
	void (*send)(struct round *r, unsigned node, Shardd__V1__JobMessage *m);
	/* The leader's: no commit of the job is begun from here on; they go on. */
	void (*hold)(struct round *r, bool on);
	/* The leader's: the last commit that has begun. Return: false: there was none. */
	bool (*last)(struct round *r, uint64_t *ret_step);
	/* Of a replica: take a copy of the part of node @from, of r->step, whose files have @tensors and @tail
	 * bytes: round_copied follows, not from inside this. */
	void (*copy)(struct round *r, unsigned from, uint64_t tensors, uint64_t tail);
	/* The leader's: have all ranks of the epoch left it? No commit is begun any more. */
	bool (*left)(struct round *r);
	/* It is over here; @f: NULL: well. Free it with round_free, not from inside this. */
	void (*over)(struct round *r, const struct fault *f);
};

/* What a node has said in this phase, as the leader knows it. */
struct round_node {
	bool entered, answered;
	uint64_t step, bytes, news_us;
	uint64_t tail, part_bytes, part_tail; /* of a replica: of the files that it has written */
	uint32_t crc;
};

enum round_state { ROUND_ASKED, ROUND_RUNS, ROUND_OVER };

struct round {
	struct list link; /* the owner's */
	const struct round_ops *ops;
	struct job *job; /* borrowed: lives until its part is over */
	uint64_t id;
	uint8_t state;                   /* enum round_state */
	bool leads, loads, asked, begun; /* asked: by somebody here; begun: it has a part here */
	bool memory;                     /* a replica */
	bool pauses; /* the leader's: no commit begins behind the one that it is of, until the owner says so */
	bool did;              /* of a node that follows: the last phase, and well */
	bool busy;             /* the same: the phase is not answered yet */
	uint64_t layout;       /* of a replica: replica_layout, when it began here */
	struct saving *saving; /* borrowed: its part here, once it has begun */
	uint64_t copied;       /* COPY: bytes so far; the owner's to set */
	uint8_t what;          /* JobRoundWhat; ROUND_COMPLETE */
	char *path;            /* owned */
	bool has_step, next, holds, later;
	uint64_t step, bytes_per_s, deadline_us;
	uint32_t keep;
	unsigned n, self, leader;
	char (*names)[SPAN_NAME_BYTES]; /* owned; NULL: of a node that follows */
	struct round_node *nodes;       /* owned; the same */
	unsigned tries;
	uint64_t owner, nonce;
	bool has_after;     /* the leader's, of NOW and NEXT: there was a commit when it began: */
	uint64_t after;     /* its step; else 0 */
	uint64_t since_us;  /* in this phase */
	uint64_t told_us;   /* how far it is */
	struct fault fault; /* of this phase, of all nodes that have one */
};

/* What it is about. */
struct round_options {
	const struct round_ops *ops;
	uint64_t id;
	bool loads;
	bool asked;                        /* somebody here has: its part waits for it */
	const struct saving_options *save; /* else: */
	const struct loading_options *load;
	unsigned n, self, leader;
};

/* Lead one. @names: of its nodes, copied. @owner: of what its folder is named by. Return: NULL without
 * memory. It has not begun: round_begin. */
struct round *round_lead(struct job *job, const struct round_options *o,
			 char (*names)[SPAN_NAME_BYTES], uint64_t owner);
void round_begin(struct round *r);
/* One that the leader is to begin, for somebody here. Return: as round_lead; then round_ask. */
struct round *round_new_asked(struct job *job, const struct round_options *o);
void round_ask(struct round *r);
/* Take part in the one that the leader has begun with @m. Return: as round_lead; then round_on_phase. */
struct round *round_follow(struct job *job, const struct round_ops *ops, unsigned leader,
			   const Shardd__V1__JobRoundPhase *m);
/* It is over. Return: NULL. */
struct round *round_free(struct round *r);

/* Answer a phase of one that this node takes no part in. Fills *ret, which borrows from @m and @f. */
void round_decline(const Shardd__V1__JobRoundPhase *m, const struct fault *f,
		   Shardd__V1__JobRoundAnswer *ret);

/* Messages: of the leader; of node @node; of either. Those that do not fit have no effect. */
void round_on_phase(struct round *r, const Shardd__V1__JobRoundPhase *m);
void round_on_answer(struct round *r, unsigned node, const Shardd__V1__JobRoundAnswer *m);
void round_on_end(struct round *r, unsigned node, const Shardd__V1__JobRoundEnd *m);

/* The end of ops.copy; @f: NULL: it is there, of @bytes bytes. */
void round_copied(struct round *r, uint64_t bytes, const struct fault *f);

/* Node @node, which may be the leader, is gone. */
void round_lost(struct round *r, unsigned node, const char *why);
/* The job's epoch has ended: nothing can be frozen together any more. */
void round_epoch_ended(struct round *r, const char *why);
/* Nobody here wants it any more. */
void round_give_up(struct round *r);
/* End it here, whatever the others do. */
void round_end_here(struct round *r, const struct fault *f);
void round_tick(struct round *r, uint64_t now_us);
/* What it waits for: one sentence. */
void round_waits(const struct round *r, char *buf, size_t bytes);

#endif
