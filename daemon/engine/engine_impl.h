/*
 * Engine, for implementations. engine.c checks the contract and calls the slots; all are required,
 * all are called on the loop thread.
 */
#ifndef SHARDD_ENGINE_IMPL_H
#define SHARDD_ENGINE_IMPL_H

#include "backend/backend.h"
#include "core/fault.h"
#include "core/loopq.h"
#include "engine/engine.h"

struct engine_ops {
	const char *name;
	bool groups;   /* connects members of several processes (comm_options.group) */
	bool in_order; /* engine_in_order */
	int (*comm_new)(struct engine *e, const struct comm_options *options);
	void (*comm_free)(struct comm *c);
	void (*abort)(struct comm *c);
	void (*all_gather)(struct comm *c, struct comm_op *op, const void *const *send,
			   void *const *recv, uint64_t count, enum dtype dtype);
	void (*reduce_scatter)(struct comm *c, struct comm_op *op, const void *const *send,
			       void *const *recv, uint64_t count, enum dtype dtype);
	void (*all_reduce)(struct comm *c, struct comm_op *op, void *const *data, uint64_t count,
			   enum dtype dtype, enum reduce_op reduce);
	void (*broadcast)(struct comm *c, struct comm_op *op, void *const *data, uint64_t bytes,
			  unsigned root);
	void (*close)(struct engine *e); /* frees @e */
	/* (optional) */
	void (*sum)(struct comm *c, struct comm_op *op, const struct comm_sum *sum,
		    const struct comm_fold *fold, void *const *recv);
	unsigned (*leaving)(const struct engine *e); /* default: 0 */
	void (*abandon)(struct engine *e, const void *userdata);
	void (*info)(const struct comm *c, struct comm_info *ret);
	void (*reg)(struct comm *c, void *const *addr, uint64_t bytes);
	/* calls @done exactly once, now or later */
	void (*unreg)(struct comm *c, void *const *addr, void (*done)(void *userdata),
		      void *userdata);
	int (*shrink)(struct comm *c, const bool *gone, const struct comm_options *options);
};

struct engine {
	uint32_t magic;
	const struct engine_ops *ops;
	unsigned comms; /* alive */
	char detail[96];
	char why[256]; /* the last communicator was not made */
};

struct comm {
	uint32_t magic;
	struct engine *engine; /* borrowed */
	char name[48];
	struct backend **devices; /* of the local members; owned array, borrowed backends */
	unsigned n_local;
	unsigned size;
	unsigned member; /* of the first local one */
	enum backend_queue queue;
	comm_ready_cb ready;
	comm_failed_cb failed;
	void *userdata;
	unsigned in_flight;
	bool aborted;
	uint64_t ops;
};

/* An op has ended. Loop thread, not from inside the slot that started it. */
void comm_complete(struct comm *c, struct comm_op *op, int status);

/* It failed by itself: aborted from here on; notify the owner. Loop thread. */
void comm_broke(struct comm *c, const char *why);

/* Fill the common parts; count the communicator as alive. comm_deinit (by comm_free in engine.c, or
 * after a partial failure) frees what comm_init allocated.
 * Return: 0 or -ENOMEM. */
void engine_init(struct engine *e, const struct engine_ops *ops);
int comm_init(struct comm *c, struct engine *e, const struct comm_options *options, unsigned size,
	      unsigned member);
void comm_deinit(struct comm *c);

/* One device: one member; copies where send and recv differ.
 * @loopq: borrowed. Return: 0 or negative errno. */
int engine_local_new(struct loopq *loopq, struct engine **ret);

/* GPUs: NCCL, loaded with dlopen; every member is a cuda backend. @f describes in one sentence what
 * is missing (the library, its version). @loopq: borrowed.
 * Return: 0 or a fault code. */
int engine_nccl_new(struct loopq *loopq, struct engine **ret, struct fault *f);

/* The host's memory on several nodes: Gloo, over TCP (gloo_shim.h describes it and whom it
 * trusts). One local member, on a device that is host memory; every communicator needs a
 * group. */
struct gloo_options {
	const char *iface;   /* network interface to use; NULL: that of @address */
	const char *address; /* IP address or host name of this node, not a wildcard */
	/* A communicator that breaks is reported, and its operations end, so much later, unless
	 * comm_abort comes first: who makes it may hear in another way why it breaks. */
	unsigned reason_ms;
};
/* Strings are copied. Whether the address is usable shows when a communicator is made. @loopq:
 * borrowed. Return: 0 or negative errno. */
int engine_gloo_new(struct loopq *loopq, const struct gloo_options *options, struct engine **ret);

/* Fails on demand, completes when told. Tests.
 * @n: the n-th operation from now on ends with @status; 0: none. */
int engine_fake_new(struct loopq *loopq, struct engine **ret);
void engine_fake_fail(struct engine *e, unsigned n, int status);
unsigned engine_fake_calls(const struct engine *e);
/* Hold operations back; false lets those held complete, in their order. */
void engine_fake_hold(struct engine *e, bool hold);
/* Held back: let the oldest operation through. Return: false: there is none. */
bool engine_fake_step(struct engine *e);

#endif
