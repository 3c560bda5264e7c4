/*
 * Internals of the nccl engine: what its threads share, and what each does.
 *
 *   loop      owns struct nccl_comm's loop part; puts items into the engine's queue
 *   issuer    the one thread from which all collectives and registrations are issued, for
 *             every communicator: NCCL wants grouped calls and each device to be served by
 *             one thread, and communicators on one device in the same order everywhere
 *   maker     creates communicators, one after the other (blocks on other members)
 *   ender     aborts and destroys them (blocks on devices)
 *   meeters   one for each communicator with members in other processes, in place of the maker, until
 *             it is made (nccl_meet.c)
 *
 * A clique is what the threads see of a communicator: its local members. At any time one thread
 * owns it, and only that one calls NCCL for it; the state says which:
 *
 *   MAKING      maker           ->  WARMING, or its end when it failed
 *   WARMING     issuer          ->  READY (executed), BROKEN
 *   READY       issuer          ->  REGISTERING, BROKEN, ENDING
 *   REGISTERING maker           ->  READY, BROKEN
 *   BROKEN      ender: abort    ->  STOPPED  (maker instead, when it has an heir: shrink)
 *   STOPPED     the same        ->  GONE     nothing runs any more
 *   ENDING      ender: destroy
 *   GONE        nobody: no communicator is left; the END item frees what else there is
 *
 * Collectives are put on the backends' own streams. Nothing else may enter a stream while
 * NCCL launches on it, which it does from threads of its own: so the queue is held from
 * before the call until NCCL has settled, and then the operation is ordered.
 *
 * Where NCCL takes, maps or frees memory (making, registering, ending) no stream of the
 * devices may stand still for another process: the driver could then wait for the device
 * inside, with locks that this process needs. So both queues are held until they are empty,
 * and for as long as it takes: a device rests.
 *
 * Members in other processes: a collective ends only if all processes issue theirs, and so do the making
 * of a communicator and whatever stands behind it in a device's queues. So all processes must make the
 * communicators of a device, and start the collectives on it, in one order: their users see to it. The
 * issuer keeps that order, since no such clique is ever REGISTERING: an item of a READY one waits only
 * for memory that its device has to make first, and then those behind it that use the device do, too.
 * Memory is made only while nothing runs there that waits for another process. Such communicators end by abort, never by destruction, and have no heirs.
 *
 * The event `after` says when an operation was executed: until then the issuer looks every
 * few milliseconds whether NCCL reports an error.
 */
#ifndef SHARDD_ENGINE_NCCL_IMPL_H
#define SHARDD_ENGINE_NCCL_IMPL_H

#include "core/cuda_lib.h"

#ifdef SHARDD_CUDA

#include <pthread.h>
#include <stdatomic.h>

#include "core/list.h"
#include "engine/engine_impl.h"
#include "engine/nccl_lib.h"

/* How often the issuer looks for errors while something runs. */
#define NCCL_POLL_MS 4
/* Initialisation and warm-up of one communicator. */
#define NCCL_MAKE_MS 60000
/* A communicator with members elsewhere breaks so much later: its owner may hear in another way why, and
 * abort it. */
#define NCCL_REASON_MS 1000
/* Grace period at the close of the engine; after it running work is aborted. */
#define NCCL_CLOSE_MS 5000
/* How long a device is held to become idle before others get their turn again. */
#define NCCL_REST_MS 500
/* A clique that ends waits this long for idle devices, and then continues without. */
#define NCCL_END_MS 60000

struct nccl;
struct nccl_clique;

/* Members in other processes. */
struct nccl_others {
	struct comm_store store;
	char prefix[224];
	unsigned connect_ms;
	pthread_t meeter;
	ncclUniqueId id;
};

/* Something for the loop; embedded in what it is about. */
struct nccl_answer {
	struct list link; /* nccl.answers */
	void (*fn)(struct nccl_answer *answer);
};

enum nccl_kind {
	NCCL_ALL_GATHER,
	NCCL_REDUCE_SCATTER,
	NCCL_ALL_REDUCE,
	NCCL_BROADCAST,
	NCCL_REGISTER,
	NCCL_UNREGISTER,
	NCCL_WARM,
	NCCL_END,
};

/* Something for the issuer, in order. */
struct nccl_item {
	struct list link; /* nccl.items */
	struct nccl_clique *clique;
	enum nccl_kind kind;
	struct nccl_answer answer;
	int status;
	struct nccl_slab *slab; /* REGISTER, UNREGISTER */
	/* collectives */
	struct comm_op *op;
	const void *const *send; /* one per local member, behind the struct */
	void *const *recv;
	uint64_t count; /* BROADCAST: bytes */
	enum dtype dtype;
	enum reduce_op reduce;
	unsigned root;
};

/* Registered memory. It contains both items, so that unregistering never fails. */
struct nccl_slab {
	struct list link;       /* nccl_comm.slabs; loop thread */
	struct list registered; /* nccl_clique.slabs while it has windows; issuer */
	struct nccl_item reg, unreg;
	void (*done)(void *userdata); /* it is no longer registered */
	void *userdata;
	uint64_t bytes;
	void **addr;           /* one per local member, behind the struct */
	ncclWindow_t *windows; /* likewise */
};

/* Something for the maker or the ender. */
struct nccl_job {
	struct list link;
	void (*fn)(struct nccl_clique *q);
	struct nccl_clique *clique;
};

struct nccl_thread {
	pthread_t id;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list jobs;
	bool stop;
	bool runs;
};

enum nccl_state {
	CLIQUE_MAKING,
	CLIQUE_WARMING,
	CLIQUE_READY,
	CLIQUE_REGISTERING,
	CLIQUE_BROKEN,
	CLIQUE_STOPPED,
	CLIQUE_ENDING,
	CLIQUE_GONE,
};

struct nccl_member {
	struct backend *backend;
	CUcontext context;
	CUstream stream; /* the backend's, of our queue */
	CUevent after;
	CUdeviceptr scratch; /* for the warm-up */
	size_t free_before;  /* device memory, before it was made */
	ncclComm_t comm;
};

struct nccl_clique {
	struct list link; /* nccl.cliques */
	struct nccl *nccl;
	char name[48];
	unsigned size, first, n; /* members of the communicator; first local one; local ones */
	enum backend_queue queue;
	struct nccl_others *others; /* owned; NULL: all members are here */
	struct nccl_member *members;
	void **warm_own, **warm_all; /* each member's part of the scratch, and all of it */

	/* under the engine's lock */
	enum nccl_state state;
	struct nccl_clique *heir; /* to be created from the survivors when this one breaks */

	_Atomic bool abort; /* stop waiting for it */
	bool asked;         /* by the loop: no news for it */
	bool rests;         /* its devices rest, by clique_rest; used by the owner */
	unsigned waits; /* issued since all was executed: backend_cuda_wait_begin; @others; owner */
	bool running;   /* issuer: issued, not known to be executed */
	bool skip;      /* issuer: an earlier item waits */
	int64_t deadline;   /* MAKING, WARMING: milliseconds, CLOCK_MONOTONIC */
	int64_t rest_until; /* STOPPED: likewise */
	int64_t break_at;   /* READY: likewise, it has failed; 0: it works */
	int status;         /* why it could not be made */
	char why[256];
	int *excluded; /* when made by shrinking: members of @parent that are gone */
	int n_excluded;
	struct nccl_clique *parent;
	struct list slabs;        /* of struct nccl_slab.registered; issuer, then ender */
	_Atomic unsigned windows; /* slabs with windows */
	uint64_t memory_bytes;
	struct nccl_job job;
	pthread_t aborter; /* of nccl_make_abort_beside; ender */
	bool has_aborter;
	struct nccl_item *registering; /* what the maker must do */
	struct nccl_item warm, end;
	struct nccl_answer ready, broke, gone;
};

struct nccl_comm {
	struct comm comm; /* first */
	struct nccl_clique clique;
	/* loop thread */
	struct list slabs;      /* of struct nccl_slab */
	struct comm_op *failed; /* no memory to issue these; linked by impl */
	struct nccl_answer failed_answer;
	bool freed; /* comm_free was called */
};

struct nccl {
	struct engine engine; /* first */
	struct loopq *loopq;
	const struct nccl_lib *lib;
	const struct cuda_lib *cuda;
	struct nccl_thread maker, ender;
	pthread_t issuer;
	int64_t make_ms, close_ms;

	pthread_mutex_t lock;
	/* under the lock */
	pthread_cond_t wake;    /* for the issuer: an item, a state */
	pthread_cond_t changed; /* for the maker: a state */
	struct list items, cliques, answers;
	int64_t close_at; /* 0: open */
	bool posted;      /* @tick */

	bool closed; /* loop thread: freed by the tick that is on its way */
	struct work tick;
};

static inline struct nccl *nccl_of(struct engine *e)
{
	return CONTAINER_OF(e, struct nccl, engine);
}

static inline struct nccl_comm *nccl_comm_of(struct nccl_clique *q)
{
	return CONTAINER_OF(q, struct nccl_comm, clique);
}

int64_t nccl_now_ms(void);

/* Tests: shorter patience. Before the first communicator. */
void engine_nccl_patience(struct engine *e, int64_t make_ms, int64_t close_ms);

/* -- nccl.c */

/* Hand @a to the loop. With the lock held. */
void nccl_answer(struct nccl *n, struct nccl_answer *a, void (*fn)(struct nccl_answer *a));

/* -- nccl_thread.c */

/* Return: 0 or negative errno. */
int nccl_thread_start(struct nccl_thread *t, const char *name);
void nccl_thread_post(struct nccl_thread *t, struct nccl_clique *q,
		      void (*fn)(struct nccl_clique *));
/* Does what is posted, ends. Safe if it was never started. */
void nccl_thread_stop(struct nccl_thread *t);
/* pthread_create with all signals blocked. Return: 0 or negative errno. */
int nccl_thread_create(pthread_t *ret, const char *name, void *(*fn)(void *), void *arg);

/* -- nccl_issue.c */

void *nccl_issue_main(void *nccl);
/* Put it at the end of the queue. Loop thread. */
void nccl_issue(struct nccl_item *item);
/* The thread that owns it gives it up, since a call failed: now, or later. With the lock held. */
void nccl_break(struct nccl *n, struct nccl_clique *q);
void nccl_on_unregistered(struct nccl_answer *a); /* loop: free its memory */

/* -- nccl_meet.c */

/* Note whom it meets. Return: 0 or negative errno. */
int nccl_meet_init(struct nccl_clique *q, const struct comm_group *group);
/* Start its meeter. Return: 0 or negative errno. */
int nccl_meet_start(struct nccl_clique *q);
/* Loop: it says that it has ended. Safe without one. */
void nccl_meet_join(struct nccl_clique *q);
/* Have both members on one device? */
bool nccl_meet_shares(const struct nccl_clique *a, const struct nccl_clique *b);
/* While it is made: does nobody want it any more? The store knows. */
bool nccl_meet_is_over(struct nccl_clique *q);

/* -- nccl_make.c: what the maker and the ender do */

void nccl_make(struct nccl_clique *q);        /* maker, or a meeter */
void nccl_make_failed(struct nccl_clique *q); /* likewise: before anything was made */
void nccl_register(struct nccl_clique *q);    /* maker */
void nccl_make_heir(struct nccl_clique *q);   /* maker; @q is the parent */
void nccl_end_abort(struct nccl_clique *q);   /* ender */
void nccl_end_destroy(struct nccl_clique *q); /* ender; then as nccl_end_free */
void nccl_end_free(struct nccl_clique *q);    /* ender: what is left; answers gone */
void nccl_on_gone(struct nccl_answer *a);     /* loop: free its memory */

/* -- nccl_clique.c: the calls, on the thread that has the clique. A failure is described in q->why;
 * return: 0 or negative errno (-ECANCELED: q->abort). */

/* Hold the devices' queues until they are empty. @deadline: milliseconds; the engine's end
 * may come before.
 * Return: whether they rest; then until clique_rouse, which is safe in any case. */
bool clique_rest(struct nccl_clique *q, int64_t deadline);
void clique_rouse(struct nccl_clique *q);

int clique_open(struct nccl_clique *q);
void clique_close(struct nccl_clique *q);
int clique_make_id(struct nccl_clique *q, ncclUniqueId *ret);
int clique_init(struct nccl_clique *q);
/* @stopped: nothing runs in @q. */
int clique_shrink(struct nccl_clique *q, struct nccl_clique *heir, bool stopped);
/* Memory for the warm-up. */
int clique_scratch(struct nccl_clique *q);
/* Issue one of every operation, so that the allocations and connections of their first use happen
 * now. */
int clique_warm(struct nccl_clique *q);
/* It was executed: free its memory, measure the device memory in use. */
void clique_measure(struct nccl_clique *q);
int clique_issue(struct nccl_clique *q, const struct nccl_item *item);
enum { CLIQUE_E_RUNS = 1 };
/* Return: 0 (everything was executed), CLIQUE_E_RUNS, or negative errno. */
int clique_look(struct nccl_clique *q);
int clique_register(struct nccl_clique *q, struct nccl_slab *slab);
int clique_unregister(struct nccl_clique *q, struct nccl_slab *slab);
/* With members elsewhere: whether a collective may be put on the devices now; then clique_unwait must
 * follow when nothing runs any more. */
bool clique_wait(struct nccl_clique *q);
void clique_unwait(struct nccl_clique *q);
/* Stop running work, without freeing anything. Return: whether NCCL can do that. */
bool clique_stop(struct nccl_clique *q);
void clique_abort(struct nccl_clique *q);
/* Nothing may run. Aborts what cannot be destroyed normally. */
void clique_destroy(struct nccl_clique *q);

#endif
#endif
