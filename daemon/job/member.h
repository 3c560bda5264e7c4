/*
 * A member: one trainer process as one rank of a job, through successive epochs, with everything
 * that it holds there.
 *
 * It outlives its session as long as an op of it runs in the daemon (references).
 * Loop thread only.
 *
 *   JOINED --epoch ends--> STALE --join again--> JOINED
 *     | \                    |
 *     |  '--leave--> LEFT    |
 *     '--connection ends, process dies--> DEAD <--'
 */
#ifndef SHARDD_JOB_MEMBER_H
#define SHARDD_JOB_MEMBER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/fault.h"
#include "core/list.h"
#include "core/proc.h"
#include "core/res.h"
#include "job/prefetch.h"
#include "mem/pool.h"

struct job;
struct member_link;
struct unit;

/* They are looked for one by one. */
#define MEMBER_MAX_BUFFERS 16384u

enum member_state { MEMBER_JOINED, MEMBER_STALE, MEMBER_LEFT, MEMBER_DEAD, _MEMBER_N };

/* BY_TRAINER, from the unit's last Reduce of a backward pass on. */
enum shard_state {
	SHARD_NONE,
	SHARD_COMING,
	SHARD_GOING, /* NextShard copies it, and holds the memory until the trainer has it */
	SHARD_OUT,
	SHARD_BACK, /* ShardDone reads it, and holds the memory */
	SHARD_GIVEN_BACK
};

/* What a member holds of one unit. An op that has begun moves the regions that it reads or writes
 * from here into its own state. At its end it puts the rest back or returns it to the pool. So
 * member_reset gives back only what no op uses. */
struct member_unit {
	bool registered;
	uint32_t gathers;       /* references, releases to come */
	struct region gradient; /* its gradient buffer, from gradient to reduce */

	/* of guarded units */
	uint8_t pass;           /* enum pass_state */
	uint8_t reshard;        /* enum unit_reshard, its own policy; 0: the unit's */
	bool held;              /* one of @gathers is the passes' */
	uint64_t ddp_passes;    /* that had ended when it went into backward */
	bool added;             /* in this backward, and not reduced since: its Accumulate */
	uint32_t uses;          /* how often it let go of it since the last step */
	struct region summoned; /* its copy of the parameters, from summon to return */
	bool is_summoned;       /* that is the trainer's by now */
	/* The sum of gradients that it has accumulated and not reduced, in the dtype of the
	 * unit's reduce plan; @included: what earlier reductions left is in it too. */
	struct region accumulated;
	bool included;
	uint8_t shard_state; /* enum shard_state */
	struct region shard; /* OUT: its copy of its shard: parameters, gradient */
	bool expected;       /* its next use is expected: its gather was begun ahead, or is done */
	struct member_list *ahead[2]; /* of forward and backward; NULL: none */
};

/* The list that SetPrefetch set for one unit and pass. */
#define MEMBER_MAX_AHEAD 16u
struct member_list {
	uint32_t n;
	uint32_t units[MEMBER_MAX_AHEAD];
};

/* Gathers that were begun before they were requested, and statistics about them. */
struct member_ahead {
	struct prefetch learned;
	uint32_t lists;   /* of SetPrefetch; 0: the learned order is used */
	uint64_t started; /* gathers */
	uint64_t skipped; /* there was no memory, or max_inflight_gathers were under way */
	uint64_t hits;    /* uses whose copy was expected, and there or on its way */
	uint64_t misses;  /* uses in such a step whose copy had yet to be begun */
};

/* Slabs that it may have mapped and that are no more: its next join says so. */
struct member_gone {
	uint32_t *slabs; /* owned */
	uint32_t n;
};

/* A buffer of its own (AllocBuffer). Counted: the table has one reference, and each op that names
 * it has one, from its check to its end. The last one returns the memory to the pool. */
struct member_buffer {
	struct list link; /* member.buffers, until it is freed */
	struct member *m; /* borrowed: outlives ops and the table */
	unsigned refs;
	uint64_t id;
	struct region region;
};

/* Of its ops, for texts. */
struct member_last {
	const char *op; /* that came last; static */
	char unit[64];
	uint64_t ended_us; /* when the last one was answered; 0: none was */
};

/* Since it joined first; sums over ops, which may overlap. */
struct member_waits {
	uint64_t us; /* of its ops, for other ranks, readers or memory */
	/* That it has cost: of each collective to which it came last, the time since the first rank came. */
	uint64_t late_us;
	uint64_t since_unix_us; /* when it joined first */
};

/* What it does with its units. */
struct member_now {
	uint64_t *holding; /* a bit for each: it may hold memory for it (member_next_held); owned */
	uint32_t in_pass;  /* how many are in another state than IDLE */
};

struct member {
	uint32_t magic;
	unsigned refs;
	uint8_t state;   /* enum member_state */
	struct job *job; /* borrowed; the job outlives its members */
	uint32_t rank;
	struct proc *proc;  /* a reference */
	struct user *user;  /* whose process it is; a reference */
	uint64_t session;   /* number, for texts and status */
	uint64_t epoch;     /* it joined last */
	struct fault ended; /* STALE: what ended that epoch */

	uint64_t next_seq;      /* of the op that may go next; op/ counts */
	struct list ops;        /* pending ops in program order; owned by op/ */
	struct list held;       /* ops that came before their turn; owned by op/ */
	uint32_t pending;       /* in both lists */
	struct condition casts; /* its turn under max_inflight_gathers */
	struct list cast_turn;  /* in job->copies.turns, while it has such */
	uint64_t ops_total;
	struct member_last last;
	struct member_waits waits;

	struct device *device;    /* where its buffers are and what it gathers comes to */
	struct member_link *link; /* its streams; NULL: answers are all it waits for */
	uint64_t ready;           /* point of the main queue at which all its reductions are over */
	uint32_t executing;       /* of its collectives: ordered, and their memory given back */
	uint32_t marking;         /* of these: @ready does not tell of them yet */
	struct pool pool;         /* its gradient and other buffers */
	struct member_unit *units; /* by unit id - 1 */
	uint32_t n_units;
	uint32_t gathered; /* of them */
	struct member_ahead ahead;
	struct member_now now;
	struct list buffers; /* of struct member_buffer */
	uint32_t n_buffers;
	uint64_t next_buffer;

	uint32_t *registered; /* unit ids, in the order in which it has registered them; owned */
	uint32_t n_registered;
	uint32_t room_registered;

	struct member_gone gone;

	bool retiring; /* the pool goes when the last op has ended */
	void *watcher; /* the session, for job_event */
};

/* Join @rank of @job's present epoch. Called by job_join only.
 * Return: 0 or -ENOMEM. */
int member_new(struct job *job, uint32_t rank, struct proc *proc, uint64_t session,
	       struct member **ret);
struct member *member_ref(struct member *m);
/* Return: NULL. NULL is allowed. */
struct member *member_unref(struct member *m);

/* Move m->state, mu->shard_state. CHECK that the move is in the table (member.c, docs/states.md). */
void member_state_move(struct member *m, enum member_state to);
void member_shard_move(struct member_unit *mu, enum shard_state to);
/* Move mu->shard_state to NONE, from any state. Its memory is the caller's affair. */
void member_shard_drop(struct member_unit *mu);
const char *member_state_name(enum member_state s);
int member_pid(const struct member *m);

/* Its entry for @u, made on first use. Return: NULL without memory. */
struct member_unit *member_unit(struct member *m, const struct unit *u);
/* The same, but NULL if it never used the unit. */
struct member_unit *member_unit_find(struct member *m, const struct unit *u);

/* To be called when what @m holds for a unit has changed: its gradient buffer, sum, copy or shard. */
void member_note_held(struct member *m, const struct member_unit *mu);
/* Units that it holds memory for, and some that it held some for: there may be ten thousand that it does
 * not. Return: the index of the first of them from @from on; n_units: there are no more. */
uint32_t member_next_held(const struct member *m, uint32_t from);

/* Count a gather, or a release. */
void member_gathered(struct member *m, struct unit *u, struct member_unit *mu);
void member_released(struct member *m, struct unit *u, struct member_unit *mu);
/* The member has no copy of @u any more. */
void member_unsummon(struct member *m, struct unit *u, struct member_unit *mu);
/* Set the list of a unit and pass (0: forward), or take it away (@n 0). @n: up to
 * MEMBER_MAX_AHEAD. Return: 0, QUOTA_E_LIMIT, or -ENOMEM. */
int member_set_ahead(struct member *m, struct member_unit *mu, unsigned pass, const uint32_t *units,
		     uint32_t n);

/* Record that it has registered unit @id; nothing changes if it has done so before. Return: 0 or
 * -ENOMEM. */
int member_registered(struct member *m, uint32_t id);
/* The unit is dropped: its registration goes, and what was learned of the order of uses. The member
 * has nothing of it (CHECKed). After the last of several: member_units_forgotten. */
void member_forget_unit(struct member *m, const struct unit *u);
void member_units_forgotten(struct member *m);
/* Units it holds gathered. */
uint64_t member_gathered_units(const struct member *m);

/* Buffers by id. Return: NULL if there is none. */
struct member_buffer *member_buffer_find(struct member *m, uint64_t id);
struct member_buffer *member_buffer_add(struct member *m, const struct region *r);
/* Take it out of the table. Its memory stays as long as an op holds it. */
void member_buffer_free(struct member *m, struct member_buffer *b);
struct member_buffer *member_buffer_ref(struct member_buffer *b);
/* Return: NULL. NULL is allowed. */
struct member_buffer *member_buffer_unref(struct member_buffer *b);

/* An op of the member exists, or is over: op/ counts its ops with these. */
void member_op_begun(struct member *m);
void member_op_ended(struct member *m);

/* Give it signals, so that its ops can be ordered with its streams (member_link.c). They stay
 * for the life of the member. RES_WAIT: wait for node.changed, then ask again. */
enum res member_link(struct member *m, struct fault *f);
/* Its signals: NULL, if it has none. */
struct backend_signals *member_signals(const struct member *m);
struct slab *member_signals_slab(const struct member *m);
/* It has broken its promise: what waits for its streams continues, now and later. */
void member_poison(struct member *m);

/* Three events of a collective: it is ordered and has returned its memory, although the device
 * still works on it; it will be over from @ready on; it is over. The member and its memory stay
 * until then. */
void member_will_execute(struct member *m);
void member_marked(struct member *m, uint64_t ready);
void member_executed(struct member *m);

/* Drop every reference and buffer that no op holds; the process lives and stays: the memory
 * may be handed to it again. */
void member_reset(struct member *m);

/* The job has another layout, and the process is rank @rank of it. It has nothing of its units any more
 * (member_reset). */
void member_renumber(struct member *m, uint32_t rank);

/* Its next join tells it of these slabs, too. Without memory it is not told: they stay mapped. */
void member_slabs_gone(struct member *m, const uint32_t *slabs, uint32_t n);

/* The same as member_reset for a process that is gone or leaves: memory to which it could write goes to quarantine,
 * as soon as no op runs on it, until the pidfd proves the end of the process. */
void member_retire(struct member *m);

#endif
