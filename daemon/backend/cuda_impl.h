/*
 * Internals of the cuda backend: one struct cuda per device, and the threads that use it.
 *
 * Threads of a device, beside the loop:
 *   executor   takes tasks in the order of each queue, puts them on the queue's stream
 *   reapers    one per queue: wait for events ("marks") on its stream, in their order
 *   setup      makes and frees memory, writes poison
 * No CUDA call is made on the loop thread except at the start and where a function says so.
 *
 * What other processes can block, and what that must never block:
 *   - A stream stands still while a wait of it is not reached. Calls that may wait for
 *     the device (allocate, map, free) would then stand still with it, holding locks of
 *     the driver that the process which should raise the slot needs. So the setup thread works only
 *     while no foreign wait is open: it closes the gate, the executor starts no task with
 *     foreign waits, those that are open end, and then it is quiet.
 *   - A stream takes only so many launches ahead; then launching blocks. The executor
 *     stops before that, so that one stream that stands still does not stop the other.
 *   - Poison goes out by the setup thread on a stream of its own that never waits; while
 *     the gate matters that thread sleeps in no CUDA call.
 *
 * @lock guards what its comment names. It is never held over a CUDA call.
 */
#ifndef SHARDD_BACKEND_CUDA_IMPL_H
#define SHARDD_BACKEND_CUDA_IMPL_H

#include "core/cuda_lib.h"

#ifdef SHARDD_CUDA

#include <pthread.h>
#include <stdatomic.h>

#include "backend/backend_impl.h"
#include "backend/cuda_stage.h"
#include "core/list.h"
#include "cuda_kernels.h"

/* Tasks of a queue that are with the threads; more wait in the loop thread's own list. */
#define CUDA_ITEMS 128u
/* Marks of a queue that are not reached. */
#define CUDA_MARKS 256u
/* Launches on a stream that are not known to be executed: drivers block at about 1000. */
#define CUDA_MAX_AHEAD 512u
/* A mark at least every so many launches, so that this is known. */
#define CUDA_MARK_EVERY 64u
/* Elements of a reduction whose optimizer follows at once: large enough to make the cost of a
 * launch negligible, small enough for the gradient to stay in a device's second-level cache. */
#define CUDA_BLOCK (UINT64_C(1) << 20)
/* Devices in one process. */
#define CUDA_MAX_DEVICES 64u

struct cuda;
struct cuda_queue;

/* One allocation. */
struct cuda_mem {
	struct backend_mem mem; /* first */
	struct list link;       /* cuda.frees, on its way out */
	int fd;                 /* for export; -1: BACKEND_SHARE_IPC */
	CUipcMemHandle ipc;     /* for export, of BACKEND_SHARE_IPC */
};

/* A request for memory. */
struct cuda_request {
	struct list link; /* cuda.requests, cuda.finished or cuda.unclaimed */
	uint64_t bytes;
	enum backend_share share;
	struct cuda_mem *mem; /* if @result is 0 */
	int result;           /* what alloc answers */
	unsigned age;         /* requests that came back after it: shows that nobody takes it */
	uint64_t made_us;     /* when it came back; 0: no tick since */
	bool again;           /* was tried once more, after unclaimed memory was freed */
};

/* The slots of one session. */
struct cuda_signals {
	struct backend_signals base; /* first */
	struct list link;            /* cuda.signals */
	struct list poison_link;     /* cuda.poison, while poison has to be (re)written */
	struct backend_mem *mem;     /* borrowed; NULL when the owner has been told */
	/* EVENTS: BACKEND_EVENT_RING each, or NULL; set by the loop, once, read by the executor */
	CUevent *_Atomic events[BACKEND_SIGNAL_SLOTS];
	unsigned pending;              /* tasks with waits on it; loop thread */
	void (*freed)(void *userdata); /* loop thread, as the next two */
	void *userdata;
	bool freeing;
	/* under the lock */
	bool writing;                              /* the setup thread works on it */
	uint64_t until[_BACKEND_Q_N];              /* marks made by then end the waits on it */
	uint8_t waited[BACKEND_SIGNAL_SLOTS / 8u]; /* slots with waits so far */
	_Atomic bool poisoned;
};

/* A task on its way through the threads. */
struct cuda_item {
	struct work told;  /* executor to loop: issued, and perhaps ended */
	struct work ended; /* reaper to loop */
	struct list link;  /* queue.free or queue.todo */
	struct cuda_queue *queue;
	struct backend_task *task;
	uint64_t ready;
	int status;
	bool tell; /* call issued */
	bool ends; /* ends when told */
	/* the executor's place in it */
	unsigned launch;
	uint64_t at;  /* in a launch that is done in pieces: bytes of a copy, elements of a step */
	bool begun;   /* its waits are counted */
	bool waited;  /* its waits are in the stream */
	bool results; /* something comes back to the host: ends when executed */
};

/* An event on a stream and what is over when it is reached. */
struct cuda_mark {
	CUevent event;
	struct cuda_item *item; /* that ends with it, or NULL */
	uint64_t stage;         /* the staging ring is free, and settled, up to here */
	uint64_t launched;      /* that many launches are executed */
	unsigned foreign;       /* that many foreign waits were reached */
	bool recorded;          /* else the whole stream has to be waited for */
};

struct cuda_queue {
	struct cuda *cuda;
	enum backend_queue which;
	CUstream stream;
	CUdeviceptr scratch; /* partials of a norm: CUDA_NORM_PARTIALS doubles */
	struct cuda_stage stage;
	/* loop thread */
	struct list free; /* items */
	struct backend_task *waiting, *waiting_last;
	/* executor */
	uint64_t ready;    /* value of the last task that was issued with one */
	uint64_t launched; /* so far */
	uint64_t marked;   /* of them, before the last mark */
	uint64_t stage_marked;
	unsigned open; /* foreign waits since the last mark */
	/* under the lock */
	struct list todo;
	uint64_t marks_head, marks_tail; /* made and reached */
	uint64_t executed;               /* launches */
	bool starved;                    /* continues only when a mark was reached */
	bool issuing;                    /* the executor is at it */
	unsigned holds;                  /* by the engine */
	pthread_cond_t reap;
	pthread_t reaper;
	bool reaper_runs;
	struct cuda_mark marks[CUDA_MARKS];
	struct cuda_item items[CUDA_ITEMS];
	CUevent ready_events[BACKEND_EVENT_RING]; /* EVENTS */
	CUipcEventHandle ready_handles[BACKEND_EVENT_RING];
};

struct cuda {
	struct backend backend; /* first */
	const struct cuda_lib *lib;
	CUdevice device;
	CUcontext context; /* the primary one, retained; NULL: not yet */
	struct {
		CUmodule module;
		CUfunction fn[_CUDA_FN_N];
		unsigned per_sm[_CUDA_FN_N]; /* resident blocks */
		unsigned sms;
	} kernels;
	struct {
		CUdevice peers[CUDA_MAX_DEVICES]; /* ourselves first */
		unsigned n_peers;
		bool rdma; /* network cards can, too */
	} reach;           /* what may reach our memory */
	CUstream control;  /* never waits for another process */
	CUdeviceptr scratch;
	CUdeviceptr gradient; /* of one block, on its way to the optimizer: CUDA_BLOCK floats */
	uint8_t *pinned;
	struct {
		struct cuda_mem *page;
		struct cuda_mem *page_ipc; /* may be NULL */
		_Atomic bool ipc_used;
	} ready;
	struct cuda_queue queues[_BACKEND_Q_N];
	struct {
		struct cuda_mem *mem; /* NULL: steps are not completed by a successor */
		uint32_t room;        /* threads */
		uint64_t last; /* number of the last launch; executor, at the start the loop */
	} undo;

	/* loop thread */
	struct list unclaimed; /* of struct cuda_request: finished */
	bool closed;           /* freed by the tick that is still on its way, or under way */
	bool ticking;
	bool news_lost; /* told */

	pthread_mutex_t lock;
	bool locks; /* the lock and the conditions exist */
	/* under the lock */
	pthread_cond_t work;  /* for the executor */
	pthread_cond_t setup; /* for the setup thread */
	pthread_cond_t calm;  /* setup has paused, or the executor has left a queue */
	struct list requests, doing, finished; /* of struct cuda_request */
	struct list frees;                     /* of struct cuda_mem */
	struct list signals, poison; /* of struct cuda_signals: all, and those to be poisoned */
	int import_fd;               /* to import while the loop thread waits, or -1 */
	struct cuda_request import;
	bool gate;       /* closed: no new foreign waits */
	bool setting_up; /* the setup thread makes or frees memory */
	bool tick_posted;
	unsigned foreign; /* waits that are open */
	unsigned between; /* of them, those for other nodes */
	char lost_text[160];
	_Atomic bool lost;

	struct work tick;
	struct {
		pthread_t exec, setup;
		bool exec_runs, setup_runs;
		bool stop_exec, stop_reap, stop_setup; /* under the lock */
	} threads;
};

static inline struct cuda *cuda_of(struct backend *b)
{
	return CONTAINER_OF(b, struct cuda, backend);
}

static inline CUdeviceptr cuda_ptr(const void *p)
{
	return (CUdeviceptr)(uintptr_t)p;
}

/* -- cuda_error.c: any thread */

/* Translate a call's result. An error after which the context returns only errors marks the device
 * as lost.
 * Return: 0, -ENOMEM, -EINVAL (the arguments), or -EIO. */
int cuda_result(struct cuda *c, CUresult r, const char *call);
/* Wait for everything on a stream. If that fails the device is lost, because nothing that was in
 * use can be used again. Return: 0 or -EIO. */
int cuda_drain(struct cuda *c, CUstream stream);
/* Fill @f. Return: the fault code. */
int cuda_fault(const struct cuda_lib *lib, struct fault *f, CUresult r, const char *what);
/* Make the loop look at what changed. With the lock held. */
void cuda_tick(struct cuda *c);

/* -- cuda_find.c, cuda_device.c: at the start, any thread */

/* Devices for @options, in the driver's order. Return: 0 or a fault code. */
int cuda_find(const struct cuda_lib *lib, const struct backend_cuda_options *options, CUdevice *ret,
	      unsigned max, unsigned *ret_n, struct fault *f);
/* Context, streams, kernels, staging, info. Objects created before a failure are freed by
 * cuda_device_close. The context is current when it succeeds. Return: 0 or a fault code. */
int cuda_device_open(struct cuda *c, CUdevice device, struct fault *f);
/* Safe for a device that was never opened. */
void cuda_device_close(struct cuda *c);

/* -- cuda_mem.c: setup thread, and the thread that opens and closes */

/* The properties for cuMemCreate. */
CUmemAllocationProp cuda_mem_properties(const struct cuda *c);
/* Return: 0, BACKEND_E_FULL, or negative errno. */
int cuda_mem_make(struct cuda *c, uint64_t bytes, enum backend_share share, struct cuda_mem **ret);
int cuda_mem_import(struct cuda *c, int fd, uint64_t bytes, struct cuda_mem **ret);
/* Nothing may use it any more. NULL is allowed. Return: NULL. */
struct cuda_mem *cuda_mem_unmake(struct cuda *c, struct cuda_mem *m);

/* -- cuda_setup.c: loop thread but for the thread's own function */

void *cuda_setup_main(void *cuda);
void cuda_setup_tick(struct backend *b, uint64_t now_us);
int cuda_setup_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
		     struct backend_mem **ret);
int cuda_setup_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret);
void cuda_setup_free(struct backend *b, struct backend_mem *mem);
/* Take what is finished. Return: whether there is news. */
bool cuda_setup_collect(struct cuda *c);
/* Free what nobody claimed; the thread has ended. */
void cuda_setup_deinit(struct cuda *c);

/* -- cuda_exec.c, cuda_reap.c */

void *cuda_exec_main(void *cuda);
void *cuda_reap_main(void *queue);
void cuda_exec_init(struct cuda *c);
void cuda_exec_submit(struct backend *b, struct backend_task *task);
/* Loop thread: the item's task has ended. */
void cuda_exec_ended(struct work *work);

/* -- cuda_launch.c: executor */

enum cuda_step {
	CUDA_STEP_DONE, /* or it failed, and no more will come */
	CUDA_STEP_MARK, /* continues when a mark was made */
	CUDA_STEP_FULL, /* continues when a mark was reached */
};
/* Put the rest of the item's kernels on the stream; item->status says what failed. */
enum cuda_step cuda_launch(struct cuda *c, struct cuda_queue *q, struct cuda_item *item);

/* One of redo_can, which keeps what it changes. */
CUresult cuda_launch_undo(struct cuda *c, struct cuda_queue *q, const struct launch *k,
			  uint64_t number);

/* -- cuda_undo.c: loop thread, at the start, but for cuda_undo_of */

int cuda_undo_open(struct backend *b, int fd, struct backend_mem **ret);
void cuda_undo_close(struct cuda *c);
uint64_t cuda_undo_last(struct backend *b);
int cuda_undo_run(struct backend *b, const struct launch *launch, uint64_t number);
/* What launch number @launch is given. */
struct cuda_undo cuda_undo_of(const struct cuda *c, uint64_t launch);

/* -- cuda_order.c */

/* Probe, make the ready page. Return: 0 or a fault code. */
int cuda_order_open(struct cuda *c, enum backend_order order, struct fault *f);
void cuda_order_close(struct cuda *c);
/* Executor: make the stream wait. */
CUresult cuda_order_wait(struct cuda *c, struct cuda_queue *q, const struct backend_wait *w);
/* Executor: make the stream report that the queue has reached q->ready. */
CUresult cuda_order_raise(struct cuda *c, struct cuda_queue *q);
/* Loop thread, at the start. */
int cuda_order_release(struct backend *b, struct backend_mem *page);
/* Setup thread, no lock held: write the poison of the first of cuda.poison. */
void cuda_order_write_poison(struct cuda *c, struct cuda_signals *s);
/* Loop thread. */
int cuda_signals_new(struct backend *b, struct backend_mem *mem, struct backend_signals **ret);
int cuda_signals_events(struct backend_signals *s, uint32_t slot, const uint8_t *const *handles);
void cuda_signals_poison(struct backend_signals *s);
void cuda_signals_free(struct backend_signals *s, void (*freed)(void *userdata), void *userdata);
/* Tell the owners of those signals that nothing waits for any more. */
void cuda_signals_collect(struct cuda *c);
static inline struct cuda_signals *cuda_signals_of(const struct backend_wait *w)
{
	return CONTAINER_OF(w->signals, struct cuda_signals, base);
}

/* -- cuda_overlap.c: at the start, blocks */

/* Fill info.mode. @program: ours, for an experiment with another process; NULL: none. */
void cuda_overlap(struct cuda *c, const char *program);

#endif
#endif
