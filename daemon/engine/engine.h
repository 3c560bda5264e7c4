/*
 * Engine: collectives between devices, for its users.
 *
 * One member per device, whatever the number of trainers on it: a kernel has already reduced the
 * contributions of the ranks of one device. This daemon acts for all members on its node: every
 * operation takes one address per local member, in member order.
 *
 * Asynchronous: an operation is started from the loop thread and its callback runs on
 * the loop thread, exactly once, never inside the call. As with a backend's task it says that the
 * operation is *ordered*: everything submitted from then on to the communicator's queue of a
 * member's backend sees its effects. Before an operation is started, its inputs must be ordered in
 * that queue. Operations on one communicator take place in the order in which they were started.
 * Loop thread only.
 */
#ifndef SHARDD_ENGINE_H
#define SHARDD_ENGINE_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"

struct engine;
struct comm;

enum {
	ENGINE_E_ABORTED = -ECONNABORTED, /* a member is gone: the communicator is unusable */
};

struct comm_op;
/* @status: 0, ENGINE_E_ABORTED, or another negative errno. */
typedef void (*comm_done_cb)(struct comm_op *op, int status);

/* One started collective; embedded by its owner, borrowed until the callback. */
struct comm_op {
	comm_done_cb done;
	/* Of a group: what must be equal at all members, so that no member takes another operation's data
	 * for this one's. Where it differs the communicator is aborted. */
	uint64_t place;
	void *impl; /* the engine's own */
};

typedef void (*comm_ready_cb)(void *userdata, struct comm *comm, int status);

/* Something broke after operations were called ordered (a network, another member's
 * device): the communicator is aborted, and the results are garbage. Called once, on the loop. */
typedef void (*comm_failed_cb)(void *userdata, struct comm *comm, const char *why);

/* What all members of a communicator give each other: of each a value, all of one size. The members call
 * it with the same @key, @size and @bytes. */
struct comm_exchange {
	const char *key; /* never used before */
	unsigned size;   /* members */
	unsigned member; /* this one */
	size_t bytes;    /* of a value */
	const void *value;
	void *all;   /* out: room for @size values; that of member i is at i * @bytes */
	bool late;   /* it is not called again: whose value is missing shall be found out */
	int missing; /* out, after -ETIMEDOUT: a member that has given none; -1: not known */
};

/* Where members in other processes are met: keys with values that are written once. Called on
 * threads of the engine, several at a time; may block; lives until the engine is closed. */
struct comm_store {
	/* Return: 0 or negative errno. */
	int (*set)(void *userdata, const char *key, const void *value, size_t bytes);
	/* Wait for @key up to @timeout_ms. Return: bytes of the value, -ETIMEDOUT (it is asked
	 * for again), or another negative errno (the communicator is not made: also to give up). */
	long (*get)(void *userdata, const char *key, unsigned timeout_ms, void *value,
		    size_t capacity);
	/* Give a value, and wait for those of all members up to @timeout_ms.
	 * Return: 0, -ETIMEDOUT (it is called again with the same values), -EPROTO: members do not agree on
	 * their number, -EEXIST: somebody else has given a value as this member, or another negative errno. */
	int (*exchange)(void *userdata, struct comm_exchange *x, unsigned timeout_ms);
	void *userdata;
};

/* Members in several processes. */
struct comm_group {
	unsigned size;                  /* members in all of them */
	unsigned member;                /* number of the first local one */
	const char *prefix;             /* of all keys, never used before; copied */
	const struct comm_store *store; /* copied */
	unsigned connect_ms;            /* to meet; 0: the engine's default */
};

/* Options of a communicator. The backends live until the engine is closed. */
struct comm_options {
	const char *name;               /* for logs and NCCL; copied */
	struct backend *const *devices; /* of the local members, in member order; copied */
	unsigned n_devices;             /* local members, 1 or more */
	enum backend_queue queue;       /* of all operations */
	const struct comm_group *group; /* NULL: all members are local; copied */
	comm_ready_cb ready;
	comm_failed_cb failed; /* may be NULL */
	void *userdata;
};

/* For status. Strings are the engine's, valid until the next call. */
struct comm_info {
	const char *name;
	const char *engine;    /* local, nccl, gloo... */
	const char *gather;    /* how all-gathers are done: copy, kernel, copy-engine */
	const char *detail;    /* version, transport, for people; "" */
	uint64_t memory_bytes; /* device memory it took, of all local members */
	unsigned size;
	uint64_t ops; /* started so far */
};

/* Why the last failed communicator could not be created, in one sentence; "" if none failed. */
const char *engine_why(const struct engine *e);

/* Whether communicators with members in other processes are made in one order in all of them, with
 * nothing running on their devices that waits for an operation which another process has not started
 * yet; and whether the operations of all such communicators on a device are started in one order in all
 * of them. Else each process waits for the others for ever. */
bool engine_in_order(const struct engine *e);

/* Create a communicator, warmed up. ready is called later with the communicator (owned by the
 * caller), or with NULL and a status, which engine_why explains.
 * Return: 0, -EOPNOTSUPP (a group, and the engine is inside one process), or another negative errno
 * (then ready is not called). */
int engine_comm_new(struct engine *e, const struct comm_options *options);

/* Ends the ops in flight with ENGINE_E_ABORTED, later; further ops end likewise. Work on devices is
 * stopped on a helper thread. */
void comm_abort(struct comm *c);

/* Free, when nothing is in flight; blocking work happens on a helper thread. NULL is allowed.
 * Return: NULL. */
struct comm *comm_free(struct comm *c);

/* Operations started whose callback has not run. */
unsigned comm_in_flight(const struct comm *c);
void comm_info(const struct comm *c, struct comm_info *ret);

/* Register memory that collectives of this communicator will use repeatedly: one slab of @bytes per
 * local member, the same amount at each. Advice: makes them faster if the engine can register
 * memory. The caller unregisters it before freeing it. */
void comm_register(struct comm *c, void *const *addr, uint64_t bytes);
/* @done is called when the memory may be freed: later, or at once if nothing was registered. */
void comm_unregister(struct comm *c, void *const *addr, void (*done)(void *userdata),
		     void *userdata);

/* Every member sends @count elements; recv[i] gets them all in member order.
 * In place when send[i] == recv[i] + member*count. The arrays are copied. */
void comm_all_gather(struct comm *c, struct comm_op *op, const void *const *send, void *const *recv,
		     uint64_t count, enum dtype dtype);

/* send[i]: size*count elements; recv[i]: the sum over members of that member's segment
 * (local, gloo: member order, left fold, rounded to @dtype at every addition; nccl: the
 * same in its own order).
 * In place when recv[i] == send[i] + member*count. */
void comm_reduce_scatter(struct comm *c, struct comm_op *op, const void *const *send,
			 void *const *recv, uint64_t count, enum dtype dtype);

/* In place over @count elements of each data[i]. */
void comm_all_reduce(struct comm *c, struct comm_op *op, void *const *data, uint64_t count,
		     enum dtype dtype, enum reduce_op reduce);

/* What a member adds to the values of a sum. */
struct comm_fold {
	/* Add to the @n values of the elements from @first of the whole on. @begin: there are none
	 * yet, and @values holds nothing. Called for ranges that do not overlap and are together the
	 * whole, one at a time, perhaps on a thread of the engine; not after the operation's
	 * callback, nor for all ranges if that says an error. */
	void (*fn)(void *userdata, void *values, uint64_t first, uint64_t n, bool begin);
	void *userdata;
};

/* A sum of what members make when the engine asks them for it, a range at a time, so that the
 * network is busy meanwhile. As a reduce-scatter: size*@count elements, recv[i]: @count values, those
 * of that member's segment. @whole: as an all-reduce: @count elements, recv[i]: all their values. */
struct comm_sum {
	uint64_t count;
	enum dtype dtype;
	bool whole;
	/* A left fold through the members, in their order: member 0 begins the running values, each
	 * next member adds to them, so the bits are those of one fold over all ranks if each member
	 * folds its ranks one after the other. Else each member begins values of its own, and the
	 * bits are those of comm_reduce_scatter and comm_all_reduce of these. */
	bool chained;
};

/* fold[i]: of local member i. @sum and the arrays are copied. What the folds read must be complete,
 * not only ordered; recv[i] is nothing that they read. */
void comm_sum(struct comm *c, struct comm_op *op, const struct comm_sum *sum,
	      const struct comm_fold *fold, void *const *recv);

/* Whether comm_sum may be called: its engine works on memory that the CPU reads. */
bool comm_can_sum(const struct comm *c);

/* @bytes from member @root to all others, in place. */
void comm_broadcast(struct comm *c, struct comm_op *op, void *const *data, uint64_t bytes,
		    unsigned root);

/* A new communicator of @c's members without those that are @gone (one flag per member, at
 * least one is set), renumbered in their order; every surviving member must call this. Operations
 * that run on @c are aborted with it; the caller still frees @c. The local members that stay are
 * options->devices, in member order. Ready is called as after engine_comm_new.
 * Return: 0, -EOPNOTSUPP (the engine cannot: make a new one), or negative errno. */
int comm_shrink(struct comm *c, const bool *gone, const struct comm_options *options);

/* Those of @userdata that are being made are not wanted any more: where the engine can it gives up meeting
 * their members, and calls ready with a failure soon. */
void engine_abandon(struct engine *e, const void *userdata);

/* Communicators that are freed, and whose threads still take leave of other members. */
unsigned engine_leaving(const struct engine *e);

/* All communicators must be freed. No callback follows. Does not block, but for nccl, which waits for
 * its threads. Members of a group that take leave go on without the engine, with memory of their
 * own, for a few seconds at most: before a process ends it waits until engine_leaving is 0. NULL is
 * allowed. Return: NULL. */
struct engine *engine_close(struct engine *e);

#endif
