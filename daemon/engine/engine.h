/*
 * Engine: collectives between devices, for its users.
 *
 * One member per device, whatever the number of trainers on it: what the ranks
 * of one device contribute has been reduced by a kernel before. Asynchronous: an
 * operation is started from the loop thread and its callback runs on the loop
 * thread, exactly once, never inside the call. Operations on one communicator
 * take place in the order in which they were started, on every member in the
 * same order. Loop thread only.
 */
#ifndef SHARDD_ENGINE_H
#define SHARDD_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

struct engine;
struct comm;

enum {
	ENGINE_E_ABORTED = 1, /* a member is gone: the communicator is unusable */
};

struct comm_op;
/* @status: 0, ENGINE_E_ABORTED, or negative errno. */
typedef void (*comm_done_cb)(struct comm_op *op, int status);

/* One started collective; embedded by its owner, borrowed until the callback. */
struct comm_op {
	comm_done_cb done;
	void *impl; /* the engine's own */
};

typedef void (*comm_ready_cb)(void *userdata, struct comm *comm, int status);

/* local, gloo, nccl, fake. Return: static string. */
const char *engine_name(const struct engine *e);

/* Make a communicator of @size members, this one being @member. @ready is called
 * later with the communicator (the caller's) or a status.
 * Return: 0, or negative errno (then @ready is not called). */
int engine_comm_new(struct engine *e, unsigned size, unsigned member, comm_ready_cb ready,
		    void *userdata);

/* Ends what is in flight with ENGINE_E_ABORTED, later; more ops end likewise. */
void comm_abort(struct comm *c);

/* Free; nothing may be in flight. NULL is allowed. Return: NULL. */
struct comm *comm_free(struct comm *c);

unsigned comm_size(const struct comm *c);
/* Which member this one is. */
unsigned comm_member(const struct comm *c);

/* Every member sends @count elements; @recv gets them all in member order.
 * In place when send == recv + member*count. */
void comm_all_gather(struct comm *c, struct comm_op *op, const void *send, void *recv,
		     uint64_t count, enum dtype dtype);

/* @send: size*count elements; @recv: the sum over members (member order, left
 * fold in fp32) of segment @member. In place when recv == send + member*count. */
void comm_reduce_scatter(struct comm *c, struct comm_op *op, const void *send, void *recv,
			 uint64_t count, enum dtype dtype);

/* In place over @count elements. */
void comm_all_reduce(struct comm *c, struct comm_op *op, void *data, uint64_t count,
		     enum dtype dtype, enum reduce_op reduce);

/* @bytes from member @root to all others, in place. */
void comm_broadcast(struct comm *c, struct comm_op *op, void *data, uint64_t bytes, unsigned root);

/* All communicators must be freed. NULL is allowed. Return: NULL. */
struct engine *engine_close(struct engine *e);

#endif
