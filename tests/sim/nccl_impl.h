/*
 * The inner parts of the software libnccl.so.2. The members of a communicator are in this process,
 * each on a device of its own, or in several processes (nccl_net.c).
 *
 * One lock (nccl_lock) protects everything. What NCCL does on threads of its own (making a
 * communicator, launching) a worker thread does, a moment later: until then the state is
 * ncclInProgress, also for blocking communicators, whose calls wait for it.
 *
 *   clique   the members of one communicator; these have ended when every one here has
 *   comm     one member: struct ncclComm
 *   meeting  one collective: the members' stream threads come together in it, the last
 *            one computes
 *
 * Comms are never freed, so that one used after its end is recognised.
 */
#ifndef SHARDD_TESTS_SIM_NCCL_IMPL_H
#define SHARDD_TESTS_SIM_NCCL_IMPL_H

#pragma GCC visibility push(default)
#include <cuda.h>

#include "engine/nccl_abi.h"
#pragma GCC visibility pop

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "sim.h"

#define NCCL_RANKS 32
/* Device memory that a member takes, and one more for each kind of collective it has used. */
#define NCCL_OWN_BYTES (2u << 20)

enum kind { K_ALL_GATHER, K_REDUCE_SCATTER, K_ALL_REDUCE, K_BROADCAST, _K_N };

struct clique;
struct net;

struct window {
	struct window *next;
	uintptr_t addr, bytes;
};

struct ncclComm {
	uint32_t live;
	struct clique *clique;
	int rank, device;
	CUcontext ctx;
	bool blocking;
	ncclResult_t state;
	bool joined;    /* in its clique */
	bool stopped;   /* aborted or revoked: what runs ends, nothing more is taken */
	bool finalized; /* ncclCommFinalize was called */
	bool ended;     /* destroyed or aborted */
	bool inside;    /* a thread is in a call or group with it */
	pthread_t who;
	unsigned jobs;    /* of the worker, pending */
	unsigned running; /* parts of collectives on streams */
	uint64_t seq;     /* collectives so far */
	CUdeviceptr memory[1 + _K_N];
	struct window *windows;
	struct ncclComm *next; /* of all */
};

struct clique {
	ncclUniqueId id;
	int size;
	ncclComm_t members[NCCL_RANKS]; /* of this process */
	int joined, ended;              /* of them */
	struct net *net;                /* to those in other processes; NULL: there are none */
	struct meeting *meetings;
	struct clique *next;
};

/* One call of a collective. */
struct call {
	enum kind kind;
	int rank;
	ncclComm_t comm; /* NULL: in another process */
	const char *send;
	char *recv;
	size_t count;
	ncclDataType_t type;
	ncclRedOp_t op;
	int root;
	CUstream stream;
	uint64_t enqueued;             /* on the stream when it was called */
	bool send_window, recv_window; /* in registered memory */
	struct meeting *meeting;
	char *in, *out; /* where the CPU sees them, once it has come; another's: its own; no out */
	bool come;
	struct call *next; /* on its device */
};

struct meeting {
	struct clique *clique;
	uint64_t seq;
	long long number; /* in this process, from 1 */
	struct call *calls[NCCL_RANKS];
	int come;
	int gone; /* of this process */
	bool hangs, computing, done;
	struct meeting *next;
};

extern pthread_mutex_t nccl_lock;
extern pthread_cond_t nccl_changed; /* a state, a part that ended */

/* -- nccl_comm.c: with the lock held ------------------------------------------- */

/* A call with @comm begins; a breach if it may not be made now. @anyway: also while one is
 * in progress, or after an error. Return: ncclSuccess, or what the call answers. */
ncclResult_t comm_enter(ncclComm_t comm, const char *function, bool anyway);
void comm_leave(ncclComm_t comm);
/* Blocking: until it has settled. */
ncclResult_t comm_wait(ncclComm_t comm);
/* The first error stays. */
void comm_set(ncclComm_t comm, ncclResult_t state);
ncclComm_t comm_new(int rank, const ncclConfig_t *config, ncclResult_t *ret);
struct clique *clique_find(const ncclUniqueId *id, int size);
/* @comm is a member from now on. When all are, they are told whether it works. */
void clique_join(struct clique *q, ncclComm_t comm);
/* Device memory for what it uses from now on; @which: below 1 + _K_N. */
ncclResult_t comm_take_memory(ncclComm_t comm, unsigned which);
int type_size(ncclDataType_t type); /* 0: unknown */
void nccl_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* -- nccl_net.c: with the lock held ---------------------------------------------- */

/* An id at which other processes may call this one. Return: false: last_error says why. */
bool net_make_id(ncclUniqueId *id);
/* Nobody calls. Safe for any id. */
void net_forget_id(const ncclUniqueId *id);
/* A call of this thread fails on purpose: those that it has made and not used. */
void net_forget_own(void);
/* Worker: @clique has members that did not join in this process, if it is not complete by now. */
void net_begin(void *clique);
/* All members here have ended. Waits for the thread. */
void net_end(struct clique *q);
/* Send what @c brings to the other processes, if there are any. */
void net_send(const struct call *c);
/* Do other processes have to make such a call first? Asked again and again. */
bool net_must_connect(const struct call *c);

/* -- nccl_worker.c -------------------------------------------------------------- */

/* Have the worker call @fn later, with the lock held. With the lock held. */
void worker_post(void (*fn)(void *arg), void *arg);

/* -- nccl_group.c ---------------------------------------------------------------- */

/* Is the calling thread between ncclGroupStart and ncclGroupEnd? */
bool group_open(void);
enum entry {
	E_INIT, /* may stand with nothing else; says itself when it has settled */
	E_LATE, /* likewise says when */
	E_CALL, /* has settled when all of the group was done; @arg is a struct call */
	E_NOW,  /* likewise */
};
/* Belongs to the group of the calling thread; alone it is a group of its own. @fn: called
 * by the worker with the lock held, in the order of the group; also when the group failed:
 * then @comm is in that state. With the lock held, which waiting gives up. */
ncclResult_t group_add(ncclComm_t comm, enum entry kind, void (*fn)(void *arg), void *arg);
/* The call failed: so does its group. */
ncclResult_t group_fail(ncclResult_t r);

/* -- nccl_meeting.c --------------------------------------------------------------- */

/* Bytes that a member brings. */
size_t call_input(const struct call *c);
/* What a member in another process brings; @c is the meeting's from now on. */
void meeting_add_remote(struct clique *q, uint64_t seq, struct call *c);
/* What a group asks of its calls together. With the lock held. */
void calls_check(struct call *const *calls, unsigned n);
/* Nothing else came onto their streams since. Worker, with the lock held. */
void calls_check_streams(struct call *const *calls, unsigned n);
/* Stop what runs for @comm, wait until it has left its streams. With the lock held. */
void comm_stop(ncclComm_t comm);
void comm_drain(ncclComm_t comm);

/* -- nccl_window.c -- */

bool window_holds(const struct ncclComm *comm, const void *addr, size_t bytes);

/* -- nccl_math.c -------------------------------------------------------------------- */

/* What the members' calls come to, all inputs and outputs being there. */
void compute(const struct meeting *m);

#endif
