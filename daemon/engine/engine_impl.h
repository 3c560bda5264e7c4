/*
 * Engine, for those who write one. engine.c checks the contract and calls the
 * slots; all are required, all are called on the loop thread.
 */
#ifndef SHARDD_ENGINE_IMPL_H
#define SHARDD_ENGINE_IMPL_H

#include "backend/backend.h"
#include "core/loopq.h"
#include "engine/engine.h"

struct engine_ops {
	const char *name;
	int (*comm_new)(struct engine *e, unsigned size, unsigned member, comm_ready_cb ready,
			void *userdata);
	void (*comm_free)(struct comm *c);
	void (*abort)(struct comm *c);
	void (*all_gather)(struct comm *c, struct comm_op *op, const void *send, void *recv,
			   uint64_t count, enum dtype dtype);
	void (*reduce_scatter)(struct comm *c, struct comm_op *op, const void *send, void *recv,
			       uint64_t count, enum dtype dtype);
	void (*all_reduce)(struct comm *c, struct comm_op *op, void *data, uint64_t count,
			   enum dtype dtype, enum reduce_op reduce);
	void (*broadcast)(struct comm *c, struct comm_op *op, void *data, uint64_t bytes,
			  unsigned root);
	void (*close)(struct engine *e); /* frees @e */
};

struct engine {
	uint32_t magic;
	const struct engine_ops *ops;
	unsigned comms; /* alive */
};

struct comm {
	uint32_t magic;
	struct engine *engine; /* borrowed */
	unsigned size;
	unsigned member;
	unsigned in_flight;
	bool aborted;
};

/* An op has ended. Loop thread, not from inside the slot that started it. */
void comm_complete(struct comm *c, struct comm_op *op, int status);

/* Fill the common parts; count the communicator as alive. */
void engine_init(struct engine *e, const struct engine_ops *ops);
void comm_init(struct comm *c, struct engine *e, unsigned size, unsigned member);

/* One device: one member; copies where send and recv differ.
 * @loopq, @backend: borrowed. Return: 0 or negative errno. */
int engine_local_new(struct loopq *loopq, struct backend *backend, struct engine **ret);

/* Fails on demand, completes when told. Tests.
 * @n: the n-th operation from now on ends with @status; 0: none. */
int engine_fake_new(struct loopq *loopq, struct engine **ret);
void engine_fake_fail(struct engine *e, unsigned n, int status);
unsigned engine_fake_calls(const struct engine *e);
/* Hold operations back; false lets those held complete, in their order. */
void engine_fake_hold(struct engine *e, bool hold);

#endif
