/*
 * The daemon's core in the test process: a node with fake backends and one of the
 * engines, its jobs, and members that are this very process. No sockets; nothing
 * happens but in nodefix_turns and nodefix_wait.
 */
#ifndef SHARDD_TESTS_NODEFIX_H
#define SHARDD_TESTS_NODEFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend_impl.h"
#include "engine/engine_impl.h"
#include "looprun.h"
#include "op/op_list.h"
#include "shardd.pb-c.h"

#define NODEFIX_MEMBERS 64

struct nodefix_options {
	unsigned devices;  /* 0: one; several have the fake engine between them */
	uint64_t capacity; /* of each device, bytes; 0: plenty */
	bool fake_engine;  /* else the local one */
	bool queues;       /* devices order tasks as GPUs do */
	size_t recorder;   /* records; 0: 64 */
	bool beside;       /* another fixture is there, which ends later */
};

struct nodefix {
	struct looprun run;
	bool beside;
	struct node node;
	struct jobs jobs;
	struct journal *journal; /* of @jobs; nodefix_end compares them */
	struct proc *proc;       /* this process */
	struct member *members[NODEFIX_MEMBERS];
	unsigned n_members;
	/* of jobs that span nodes: as the slots of struct job_ops */
	void (*announce)(struct nodefix *n, struct group *g, uint64_t number,
			 const struct match_entry *first);
	void (*refuse)(struct nodefix *n, struct group *g, uint64_t number, const struct fault *f);
	void (*want)(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn);
	void (*give)(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn);
	void (*leave_out)(struct nodefix *n, struct job *job, struct unit *u);
	void (*made)(struct nodefix *n, struct job *job, uint64_t position);
	void (*joined)(struct nodefix *n, struct group *g, uint64_t number, uint64_t last_number,
		       uint32_t last);
	void (*asks)(struct nodefix *n, struct group *g, const struct asked *a);
	void (*writes)(struct nodefix *n, struct job *job, const struct across_write *w);
	void (*write_allowed)(struct nodefix *n, struct job *job, const struct across_write *w);
	void (*write_refused)(struct nodefix *n, struct job *job, const struct across_write *w,
			      const struct fault *f);
	void (*prepared)(struct nodefix *n, struct group *g, uint64_t number);
	void *userdata;
	struct {
		unsigned n;
		enum job_event_kind kind; /* of the last one */
		struct member *m;         /* NULL: it is of a job */
		struct job *job;          /* of a stall */
		char text[512];
	} events;
};

/* Limits are roomy and may be changed afterwards. */
void nodefix_begin(struct nodefix *n, const struct nodefix_options *o);
/* Drop all members, end everything; fails the test if a byte, an allocation or a
 * handle is left. */
void nodefix_end(struct nodefix *n);

/* The test has written to a record itself: the journal gets it, too. */
void nodefix_wrote(struct nodefix *n);

/* Make a job of @world ranks that is kept, with a quota (0: none). */
struct job *nodefix_job(struct nodefix *n, const char *name, uint32_t world, uint64_t quota);
/* Join; the fixture keeps the session's reference. Fails the test if it is refused. */
struct member *nodefix_join(struct nodefix *n, struct job *job, uint32_t rank);
/* The same, but gives back what job_join said; @again: the member, or NULL.
 * @proc: NULL: this process. */
enum res nodefix_try_join(struct nodefix *n, struct job *job, uint32_t rank, struct proc *proc,
			  struct member *again, struct member **ret, struct fault *f);
/* The session of @m ends: it is gone (and lost, if it was in a job). */
void nodefix_drop(struct nodefix *n, struct member *m, const char *why);

/* Another process: a child that sleeps until it is killed and reaped. */
struct nodefix_child {
	pid_t pid;
	struct proc *proc;
};
void nodefix_fork(struct nodefix *n, struct nodefix_child *c);
/* Kill it and turn the loop until its end is known. */
void nodefix_kill(struct nodefix *n, struct nodefix_child *c);
void nodefix_unref(struct nodefix_child *c);

/* A unit's record: @elements in one tensor, fp32, AdamW with lr 0.1; for changes. */
state_unit *nodefix_spec(const char *name, uint64_t elements);
/* Register units, all or none, in one piece (the daemon does it in pieces). @specs: taken over as by
 * registration_new. @ids: gets @n. */
enum res nodefix_try_register(struct job *job, state_unit **specs, size_t n, uint32_t *ids,
			      uint64_t *ret_charged, struct fault *f);
/* Register it (consumed) and give the unit. Fails the test if it is refused. */
struct unit *nodefix_register(struct job *job, state_unit *spec);
/* Register and initialise from a seed, on all of @n_members. */
struct unit *nodefix_unit(struct nodefix *n, struct job *job, state_unit *spec,
			  struct member **members, uint32_t n_members);

/* One op: what the test says of it, and what came of it. The first five may be set
 * before it is submitted; the rest is cleared then. Written to until the op is over, in
 * nodefix_end at the latest. */
struct nodefix_op {
	uint64_t seq;
	uint64_t epoch;
	uint32_t timeout_ms;
	bool stream;    /* answered when it is ordered */
	uint64_t after; /* it comes after this point of the rank's slot 0; 0: after nothing */

	struct nodefix *n;
	struct op *op; /* NULL: over */
	bool over;
	int submitted; /* op_submit's result */
	struct fault fault;
	unsigned order; /* how many of the test's ops were over before it */
	uint64_t number;
	bool started;
	__typeof__(((struct op *)0)->result) result;
	__typeof__(((struct op *)0)->outcome) outcome; /* see NODEFIX_OUTCOME */
	__typeof__(((struct op *)0)->args) args;       /* as they were when it was over */
	ProtobufCMessage *request;                     /* owned, until it is over */
	size_t reply_bytes;  /* of the packed reply, and 1; 0: none was made */
	uint8_t reply[4096]; /* it, if it fits */
};

/* What came of it beside memory: a struct of the module, say, shards_outcome. */
#define NODEFIX_OUTCOME(type, op) ((const struct type *)(const void *)(op)->outcome)

/* Ops that were over until now, for nodefix_op.order. */
extern unsigned nodefix_ended;

/* Submit; ops that take a unit, a group, or nothing else. @type as in the table. */
int nodefix_submit(struct nodefix *n, struct member *m, const char *type, ProtobufCMessage *msg,
		   struct nodefix_op *op);
int nodefix_on_unit(struct nodefix *n, struct member *m, const char *type, const struct unit *u,
		    struct nodefix_op *op);
/* Reduce with its all-reduce deferred. */
int nodefix_defer(struct nodefix *n, struct member *m, const struct unit *u, struct nodefix_op *op);
int nodefix_reduce(struct nodefix *n, struct member *m, const struct unit *u, bool more,
		   struct nodefix_op *op);
/* Reduce of a rank that has not used *@tensor, which stays until the op is over. */
int nodefix_leave_out(struct nodefix *n, struct member *m, const struct unit *u,
		      const uint32_t *tensor, struct nodefix_op *op);
int nodefix_seed(struct nodefix *n, struct member *m, const struct unit *u, uint64_t seed,
		 struct nodefix_op *op);
int nodefix_own(struct nodefix *n, struct member *m, const struct unit *u, uint64_t buffer,
		struct nodefix_op *op);
int nodefix_alloc(struct nodefix *n, struct member *m, uint64_t bytes, struct nodefix_op *op);
int nodefix_free(struct nodefix *n, struct member *m, uint64_t buffer, struct nodefix_op *op);
int nodefix_all_reduce(struct nodefix *n, struct member *m, uint64_t buffer, uint64_t count,
		       struct nodefix_op *op);
int nodefix_broadcast(struct nodefix *n, struct member *m, uint64_t buffer, uint64_t bytes,
		      struct nodefix_op *op);
int nodefix_barrier(struct nodefix *n, struct member *m, uint32_t group, struct nodefix_op *op);
int nodefix_clip(struct nodefix *n, struct member *m, double max_norm, struct nodefix_op *op);
int nodefix_step(struct nodefix *n, struct member *m, struct nodefix_op *op);
int nodefix_commit(struct nodefix *n, struct member *m, uint64_t step, size_t blob_bytes,
		   struct nodefix_op *op);

/* Submit, wait, and fail the test unless it ended well. */
void nodefix_ok(struct nodefix_op *op, const char *what);
#define NODEFIX_OK(call, op) ((call), nodefix_ok((op), #call))

/* Turn its loop once, without waiting. */
void nodefix_turn(struct nodefix *n);
/* Turn the loop until @op is over. */
void nodefix_wait(struct nodefix_op *op);
/* Turn the loop until nothing moves any more (held completions stay held). */
void nodefix_turns(struct nodefix *n);

/* Write @value to every element of an fp32 region. */
void nodefix_write(const struct region *r, float value);
/* All elements of the unit's parameters as they are now. */
const float *nodefix_params(const struct unit *u);

#endif
