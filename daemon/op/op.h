/*
 * An op: one request of one rank, from its arrival to its answer.
 *
 * Ring and gRPC end here. A session's ops are entered in program order (seq);
 * numbering, dependencies and the flight recorder follow that order. An op becomes
 * active when every earlier op of its session that touches the same things is over;
 * a collective op then waits for its peers, and the last to come starts one
 * collective for all (struct coll).
 *
 *   HELD --turn--> DEPS --earlier ops over--> WAIT (peers; collectives only)
 *                   |                          |
 *                   v                          v
 *                 BLOCKED (a cast, a step being applied) --> RUN --> done
 *
 * HELD, DEPS, WAIT and BLOCKED can be ended by cancel, deadline, or the end of the
 * epoch; RUN always ends by itself. The done callback comes exactly once, from
 * op_submit or later, always on the loop thread; the op is freed after it.
 */
#ifndef SHARDD_OP_OP_H
#define SHARDD_OP_OP_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/res.h"
#include "job/job.h"
#include "job/passes.h"
#include "op/queue_task.h"
#include "op/recorder.h"
#include "shardd.pb-c.h"

struct op;
struct coll;

/* Streams of its trainer that an op can name: more than anybody uses at once. */
#define OP_MAX_AFTER 8

enum op_state { OP_HELD, OP_DEPS, OP_WAIT, OP_BLOCKED, OP_RUN, OP_DONE, _OP_N };

/* In place of a rank that has no more inputs; nobody asked for it. By active: gradients are divided by the
 * ranks that have inputs. */
enum op_surrogate { OP_OF_A_RANK, OP_SURROGATE, OP_SURROGATE_BY_ACTIVE };

typedef void (*op_done_cb)(struct op *op, void *userdata);
/* Receives the reply message, which lives until it returns. */
typedef void (*op_reply_cb)(const ProtobufCMessage *reply, void *ctx);

/* One line of the table in app/op_table.c; see the op_*.c files. */
struct op_type {
	const char *name; /* also the method's name */
	bool collective;
	/* It can be done without a rank that has no more inputs (JoinUneven): a surrogate takes
	 * part in its place, with zeros or with nothing (op/surrogate.h). */
	bool surrogates;
	/* (optional) Is that so for @op, too? */
	bool (*surrogate_allowed)(const struct op *op);
	/* (optional) Bytes of op->owned that a surrogate needs a copy of. */
	size_t (*surrogate_owned)(const struct op *op);
	/* (optional) @op is a new surrogate with its peer's arguments: replace those that point
	 * to the peer's memory. */
	void (*surrogate_init)(struct op *op);
	const ProtobufCMessageDescriptor *request; /* its first field is the OpHeader */
	/* (optional, with surrogates) Where all ranks of a node have none: what it must know of @op, in place
	 * of its request. */
	void (*ask)(const struct op *op, uint64_t words[ASKED_WORDS]);
	/* The same there, of a peer's @op with that group: its args. Return: 0 or a fault code. */
	int (*asked)(struct op *op, const uint64_t words[ASKED_WORDS], struct fault *f);
	/* Fields to args: every field checked, whatever the state. Also sets touches,
	 * unit and group. Return: 0 or a fault code. */
	int (*decode)(struct op *op, const ProtobufCMessage *request, struct fault *f);
	/* (optional) It has got its turn among the session's ops, before everything behind it:
	 * what depends on this order alone. May fail the op by op->fault, and op_spawn others,
	 * which come before it. Not for one that has failed already. */
	void (*enter)(struct op *op);
	/* (optional) It ends, however it does. */
	void (*leave)(struct op *op);
	/* (optional, unless collective) Active: is it allowed in the present state? Collectives:
	 * fill op->entry.print. Changes nothing. Return: 0 or a fault code. */
	int (*check)(struct op *op, struct fault *f);
	/* Not collective: do it, until it waits or is over; called when the op becomes active, and
	 * again when what it waits for has changed. RES_WAIT also of one that has submitted
	 * something, which ends with op_end. RES_FAILED: op->fault is set. */
	enum res (*tick)(struct op *op);
	/* Collective: the same for the ops of all ranks (work/coll.h). */
	enum res (*coll_tick)(struct coll *c);
	/* Collective: it is of several units, which ask for their communicators themselves. */
	bool of_units;
	/* Collective: bytes of its own state (coll_own), which are zero at first. */
	size_t coll_bytes;
	/* (optional) Collective: what was submitted is ordered or has failed. Return: true: it was
	 * not the collective's own, so its tick is not called. */
	bool (*coll_arrived)(struct coll *c);
	/* (optional) Collective: all have announced it, and it is about to stand in line. May fail it by
	 * c->fault. */
	void (*coll_begin)(struct coll *c);
	/* (optional) Collective: it ends, however it does, perhaps before its first tick: let go of
	 * what it took for its members. */
	void (*coll_let_go)(struct coll *c);
	/* (optional) Collective: the last: free what devices used until then. */
	void (*coll_free)(struct coll *c);
	/* Build the reply of a successful op and hand it to @send. NULL: it is a @reply, a
	 * message of nothing but OpInfo. */
	void (*encode)(const struct op *op, op_reply_cb send, void *ctx);
	const ProtobufCMessageDescriptor *reply;
	/* What it does to the state of its unit, if that is guarded, or needs of it; without
	 * a unit: of all the rank's units. decode may set op->move instead. Checked before
	 * check, done when the op has ended well (op/guard.c). */
	enum pass_move move;
	/* (optional) Its checks and those of the guard have passed. Return: 0 or a fault code. */
	int (*begin)(struct op *op, struct fault *f);
	/* Of an op that waits for a gathered copy: it is there, or came to nothing (@status of a
	 * backend or an engine). Ends the op. */
	void (*copied)(struct op *op, int status);
	/* (optional) Free what decode has put into args. */
	void (*forget)(struct op *op);
	/* (optional) Of an op without a unit that touches some: does it touch what @other does?
	 * Else it touches all. */
	bool (*meets)(const struct op *op, const struct op *other);
	/* Collective: its result outlasts the epoch (parameters, a commit), so it succeeds even
	 * if a member's epoch ends while it runs. Else it ends with that reason. */
	bool lasts;
	/* Collective: where ranks are on other nodes, the store decides whether it takes effect. When all
	 * ranks here have announced it, this node alone cannot say that it does not. */
	bool decided;
	/* Collective: it reads what ranks write in their streams, so its result is worthless if the
	 * streams of a rank that died were let go. */
	bool reads_inputs;
	/* BeginPass, EndPass: only for guarded units. */
	bool is_pass;
	/* It ends a step of its rank: the learned order of gathers starts again. */
	bool ends_step;
	/* (optional) What of it belongs behind its name in texts: "(FORWARD)". */
	const char *(*detail)(const struct op *op);
	/* May it wait until readers let go of parameters, while it runs, or while it is blocked? */
	bool (*waits_for_readers)(const struct op *op);
};

/* What an op reads or changes: two ops of one session that share something run one
 * after the other. */
enum {
	TOUCH_PARAMS = 1, /* of its unit, or of all when unit is NULL */
	TOUCH_GRADS = 2,
	TOUCH_BUFFERS = 8, /* of its unit, or of all */
	TOUCH_ALL = 4,     /* after everything before it, before everything after it */
};

/* Room for the arguments of any op. */
#define OP_ARGS_BYTES 160u
/* Room for what its reply has beside memory. */
#define OP_OUTCOME_BYTES 24u

/* In the flight recorder. */
struct op_recorded {
	uint64_t id;
	struct list link;   /* recorder.pending, until it is answered */
	uint32_t last_rank; /* of a collective: who came last here, and 1; 0: not known */
};

struct op {
	uint32_t magic;
	uint8_t state; /* enum op_state */
	const struct op_type *type;
	enum pass_move move;
	struct member *m;
	struct list link;  /* m->ops or m->held */
	struct list ready; /* in the queue of ops to be activated */
	uint64_t seq;      /* 0: as it came */
	uint64_t deadline_us;
	uint64_t announced_us; /* when it came */
	uint64_t active_us;    /* when it became active; 0: not yet */
	uint64_t started_us;   /* when it began to run; 0: not yet */
	unsigned deps;         /* earlier ops to wait for */
	unsigned touches;
	const ProtobufCMessage *request; /* borrowed until done; NULL: nobody has asked for it */
	struct unit *unit;               /* NULL: none, or all */
	uint64_t buffer;                 /* id; 0: none */
	struct member_buffer *held;      /* a reference to that, from its check on; NULL: not yet */
	struct group *group;             /* collectives */
	struct match_entry entry;
	bool numbered;
	bool announced;
	uint8_t surrogate; /* enum op_surrogate */
	bool answered;     /* done was called; it only keeps its turn */
	bool stream;       /* answer when it is ordered on the device, with result.ready */
	struct backend_wait after[OP_MAX_AFTER]; /* streams of the trainer it must come after */
	unsigned n_after;
	struct waiter waiter;
	const struct waiter *runner; /* in OP_RUN: its collective's; NULL: @waiter */
	bool ticking;                /* its start runs now */
	bool woken;                  /* what it waits for came meanwhile */
	struct op_recorded recorded;

	/* The type's arguments, by its decode: a struct of the files that implement it. */
	uint64_t args[OP_ARGS_BYTES / sizeof(uint64_t)];
	void *owned; /* of the arguments; freed with the op */

	struct {
		struct region place;
		bool writable;
		uint32_t references;
		bool copied;
		bool kept;
		uint64_t buffer;
		enum backend_queue queue; /* where @ready is a point of */
		uint64_t ready;           /* 0: there is nothing to wait for */
	} result;                         /* memory that it hands out, and when */
	uint64_t outcome[OP_OUTCOME_BYTES / sizeof(uint64_t)]; /* the type's: op_outcome */
	struct fault fault;                                    /* FAULT_NONE: it succeeded */

	op_done_cb done;
	void *userdata;
};

/* The arguments of @op: the caller knows its type, and which struct they are. */
static inline void *op_args(const struct op *op)
{
	return (void *)op->args;
}

/* The same for what comes of it; zero at first. */
static inline void *op_outcome(const struct op *op)
{
	return (void *)op->outcome;
}

/* The table of all ops (app/op_table.c), ended by a NULL. */
extern const struct op_type *const op_table[];

#endif
