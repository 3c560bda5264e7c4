/*
 * Backend: memory and kernels of one kind of device, for its users.
 *
 * One backend per device. Asynchronous throughout: a task is submitted from the loop
 * thread, runs on the backend's own threads (or the device), and its callback runs on
 * the loop thread, exactly once, never inside backend_submit.
 *
 * The callback says that the task is *ordered*: everything submitted to the same queue from then on
 * sees its effects. On the host that means executed. A device executes its queues by itself, so
 * there a task is ordered as soon as it is issued. A caller that must know that the task was
 * executed (to read results on the host, to be sure that no process writes any more) sets `sync`.
 * Tasks without such an order between them may run at the same time: a caller that needs one
 * submits the second task from the first one's callback. Everything here: loop thread only.
 */
#ifndef SHARDD_BACKEND_H
#define SHARDD_BACKEND_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/user.h"
#include "kernels.h"

struct backend;
struct backend_mem; /* one exportable allocation */
struct host_room;

struct backend_signals;
struct redo_task; /* backend/redo.h */

/* Errno values of their own meaning in results of allocations; a backend returns no others of
 * these values. */
enum {
	BACKEND_E_FULL = -ENOSPC,  /* the device has no such amount left */
	BACKEND_E_LATER = -EAGAIN, /* it is being allocated: ask again after BACKEND_NEWS_MEMORY */
};

/* Work on a device runs in two concurrent queues, each in its own order. */
enum backend_queue {
	BACKEND_Q_MAIN,   /* reductions, optimizer, everything else */
	BACKEND_Q_GATHER, /* casts and all-gathers into the gathered copies */
	_BACKEND_Q_N
};

/* How work of other processes is ordered before and after ours without a CPU. */
enum backend_order {
	BACKEND_ORDER_NONE,     /* not at all: the host, whose processes wait for answers */
	BACKEND_ORDER_TIMELINE, /* 64-bit slots in device memory, stream memory operations */
	BACKEND_ORDER_EVENTS,   /* interprocess events: where the probe for the first failed */
};

/* How an allocation can be handed to another process. */
enum backend_share {
	BACKEND_SHARE_FD,  /* backend_export: over a socket */
	BACKEND_SHARE_IPC, /* backend_export_ipc: in a message (legacy CUDA IPC) */
};

#define BACKEND_IPC_BYTES 64u
/* Most streams of one session that can be waited for; each has a slot. */
#define BACKEND_SIGNAL_SLOTS 512u
/* Bytes from one slot to the next in a page of signals and in the ready page. */
#define BACKEND_SLOT_STRIDE 64u
/* BACKEND_ORDER_EVENTS: value v of a slot or queue is told by event v % this. */
#define BACKEND_EVENT_RING 16u

enum launch_kind {
	LAUNCH_CAST,
	LAUNCH_REDUCE,
	LAUNCH_ALL_REDUCE,
	LAUNCH_ADAMW,
	LAUNCH_ADAM,
	LAUNCH_SGD,
	LAUNCH_NORM,
	LAUNCH_SCALE,
	LAUNCH_FOUND_INF,
	LAUNCH_FILL,
	LAUNCH_PACK,
	LAUNCH_COPY,
	LAUNCH_CLAMP,
	LAUNCH_UNSCALE,
	LAUNCH_ADD_ROWS,
	LAUNCH_REDUCE_STEP,
	LAUNCH_ASSEMBLE, /* on a device with tables in its memory, also those of a delta */
	_LAUNCH_N
};

/* One kernel on @n elements (LAUNCH_COPY: bytes; LAUNCH_ADD_ROWS: columns; LAUNCH_ASSEMBLE: blocks). Pointers are device addresses. */
struct launch {
	enum launch_kind kind;
	uint64_t n;
	union {
		struct k_cast cast;
		struct k_reduce reduce;
		struct k_all_reduce all_reduce;
		struct k_adamw adamw;
		struct k_adam adam;
		struct k_sgd sgd;
		struct k_norm norm;
		struct k_scale scale;
		struct k_found_inf found_inf;
		struct k_fill fill;
		struct k_pack pack;
		struct k_copy copy;
		struct k_clamp clamp;
		struct k_unscale unscale;
		struct k_add_rows add_rows;
		struct k_reduce_step reduce_step;
		struct k_assemble assemble;
	};
};

/* The task runs only after a stream of another process has reached this value. */
struct backend_wait {
	struct backend_signals *signals; /* borrowed until the task was executed */
	uint32_t slot;
	uint64_t value;
};

struct backend_task;
/* @status: 0, or negative errno if the device failed the task. */
typedef void (*backend_done_cb)(struct backend_task *task, int status);

/* The user and job that a task belongs to: users share the device's threads by weight, the jobs of
 * a user evenly. */
struct backend_owner {
	uint32_t user;   /* uid */
	uint32_t job;    /* unique among living jobs; 0: the daemon's own work */
	uint32_t weight; /* the user's; 0: BACKEND_WEIGHT */
};

#define BACKEND_WEIGHT USER_WEIGHT_DEFAULT

/* What a task is for, for tools that show it. Texts of the submitter, until @done. */
struct backend_label {
	const char *op; /* NULL: not known */
	const char *job;
	const char *unit; /* "": none, or several */
};

/* Space for a backend's own notes on a task, in units of 8 bytes. */
#define BACKEND_TASK_ROOM 18u

/* A set of kernels that are independent of each other. Embedded by its owner,
 * borrowed by the backend from submit to the last callback, with everything it points
 * to. A task whose fields but @done are all zero is empty: it only takes part in the order. */
struct backend_task {
	struct launch *launches;
	unsigned n_launches;
	enum backend_queue queue;
	const struct backend_wait *waits; /* all must be reached first; none on the host */
	unsigned n_waits;
	bool sync; /* @done only when executed, with everything before it in its queue */
	/* (optional) The launches are those of @redo from number @first_redo on: borrowed. Only for
	 * a backend whose info.redoes is set. */
	struct redo_task *redo;
	unsigned first_redo;
	/* (optional) Ordered, and from here on backend_ready's word of the queue will become
	 * at least @ready when the task has been executed. Before @done; not if it fails. */
	backend_done_cb issued;
	backend_done_cb done;
	uint64_t ready;                   /* set before @issued */
	void *impl;                       /* the backend's own */
	uint64_t room[BACKEND_TASK_ROOM]; /* the backend's own */
	struct backend_owner owner;       /* on the host: for the turns of users and jobs */
	/* (optional) Called just before @done, for a caller that records what ran. */
	backend_done_cb seen;
	void *record;               /* the submitter's own */
	struct backend_label label; /* (optional) */
	/* The times at which its first kernel began and its last one ended (clock_now_us), set
	 * before @seen; 0: not known. */
	uint64_t began_us;
	uint64_t ended_us;
};

enum backend_news {
	BACKEND_NEWS_MEMORY, /* a request that got BACKEND_E_LATER can be repeated */
	BACKEND_NEWS_LOST,   /* the device failed: every task ends with -EIO from now on */
};
typedef void (*backend_news_cb)(void *userdata, enum backend_news news);

struct backend_info {
	char id[32];   /* host:0, cuda:0 */
	char uuid[48]; /* GPU-...; "" for the host */
	int ordinal;   /* the driver's, in this process; -1 for the host */
	enum backend_order order;
	char lost[160];          /* why the device is lost; "" while it works */
	char short_of[192];      /* why the last allocation found no room; "": it found room */
	char mode[160];          /* how kernels of several processes share it, for people */
	const char *name;        /* host, cuda, fake */
	uint64_t capacity_bytes; /* of the device */
	uint64_t overhead_bytes; /* device memory beside allocations: context, modules */
	uint64_t granularity;    /* allocations are multiples of this, bytes */
	unsigned threads;        /* that run kernels */
	bool redoes;             /* a successor can complete its tasks (backend_task.redo) */
	char kernels[32];        /* which implementation */
	char detail[192];        /* for people: processor, NUMA nodes, huge pages */
};

const struct backend_info *backend_info(const struct backend *b);

/* The name under which a successor finds the device again, whatever it numbers: the UUID, or the id
 * where there is none. */
static inline const char *backend_lasting_name(const struct backend *b)
{
	const struct backend_info *info = backend_info(b);

	return *info->uuid ? info->uuid : info->id;
}

/* Report news to @fn, on the loop. Set once, before any other call. */
void backend_on_news(struct backend *b, backend_news_cb fn, void *userdata);

/* Take @bytes (a multiple of the granularity), zero-filled, mapped for the
 * daemon. The host does not touch the pages. @ret: the caller's, backend_free.
 * A device allocates memory on its own thread, and only while none of its queues waits for another
 * process: the first call with an amount answers BACKEND_E_LATER, and a call with the same amount
 * after BACKEND_NEWS_MEMORY gets it.
 * Return: 0, BACKEND_E_FULL, BACKEND_E_LATER, or negative errno. */
int backend_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
		  struct backend_mem **ret);

/* Where the room for its allocations is counted: for what else takes memory of the host.
 * Return: borrowed; NULL: it has none. */
struct host_room *backend_room(struct backend *b);

/* Called before a new request: clears info.short_of, which describes the previous one. */
void backend_forget_shortage(struct backend *b);

/* Give the memory back. Unmapping large memory takes long, so it happens on a
 * helper thread. NULL is allowed. */
void backend_free(struct backend *b, struct backend_mem *mem);

/* The daemon's address of the allocation (a device address on a GPU). */
void *backend_addr(const struct backend_mem *mem);
uint64_t backend_bytes(const struct backend_mem *mem);

/* A descriptor for another process, close-on-exec, the caller's to close.
 * @writable: false gives one that cannot be mapped for writing.
 * Return: 0 or negative errno. */
int backend_export(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd);

/* Does a process that received a descriptor of @mem, directly or from another process, still have
 * it open or mapped? False where the backend cannot know. */
bool backend_is_held(struct backend *b, struct backend_mem *mem);
/* The contents of @mem are no longer needed, but other processes hold it: give its pages back on a
 * helper thread, repeatedly if necessary. backend_free must still follow. Sealed memory keeps its
 * pages. */
void backend_empty(struct backend *b, struct backend_mem *mem);
/* From now on nobody can map or open @mem for writing, not even root; the daemon's own mapping
 * stays. For memory of which no descriptor was handed out yet, and of which a writable one never
 * will be.
 * Return: 0 (also where a backend has nothing like it) or negative errno. */
int backend_seal(struct backend *b, struct backend_mem *mem);
/* From now on its contents stay as they are while a process has it mapped, whatever is called. */
void backend_last(struct backend *b, struct backend_mem *mem);
/* Can kernels on @b read memory of @other that is shared by @share? */
bool backend_reaches(const struct backend *b, const struct backend *other,
		     enum backend_share share);
/* The inode that /proc shows for a process that holds it; 0: none. */
uint64_t backend_inode(const struct backend_mem *mem);

/* The handle with which another process opens legacy CUDA IPC memory: of the whole allocation,
 * which begins at offset 0. Only for BACKEND_SHARE_IPC.
 * Return: 0 or negative errno. */
int backend_export_ipc(struct backend *b, struct backend_mem *mem,
		       uint8_t ret_handle[BACKEND_IPC_BYTES]);

/* A descriptor that keeps the memory for another daemon process: close-on-exec, the caller's to
 * close. From here on backend_free leaves the contents as they are, until backend_unstore.
 * Return: 0, -EOPNOTSUPP (not BACKEND_SHARE_FD) or another negative errno. */
int backend_store(struct backend *b, struct backend_mem *mem, int *ret_fd);
void backend_unstore(struct backend *b, struct backend_mem *mem);
/* Such a descriptor exists: memory was imported from it. */
void backend_stored(struct backend *b, struct backend_mem *mem);

/* The inverse, for memory that another daemon process allocated: checks size, seals and kind of @fd
 * (borrowed), maps it for writing.
 * Return: 0 or negative errno (-EINVAL: not memory of ours). */
int backend_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret);

/* Start @task; its callback comes later, from the loop, in every case. */
void backend_submit(struct backend *b, struct backend_task *task);

/* Run @launch, and return when it was executed: on the calling thread, which those of the backend that
 * have nothing else to do help. Only of memory that the CPU reads, and until backend_close. Any thread;
 * the loop's should not block for so long. */
void backend_run(struct backend *b, struct launch *launch, struct backend_owner owner);

/* -- steps that a successor completes, on a device (on the host they are in the redo file alone) -- */

/* Are launches of backend_task.redo numbered, and run again by backend_redo_run? */
bool backend_numbers_redo(const struct backend *b);
/* The memory in which kernels keep what they change, which a successor needs: that of @fd (borrowed),
 * or new (-1). info.redoes is set from here on. At the start only: blocks. @ret: the backend's own.
 * Return: 0, -ESTALE (it is not of these kernels on this device), or another negative errno. */
int backend_redo_open(struct backend *b, int fd, struct backend_mem **ret);
/* The number of the launch that was under way when the predecessor was killed, or of its last one; 0:
 * none. Launches of lower numbers are complete, those of higher ones had not begun. */
uint64_t backend_redo_last(struct backend *b);
/* Run @launch, with device addresses, to its end: continue it if @number is backend_redo_last. Else
 * @number is above. At the start only: blocks. May be killed, and called again by the next process
 * with the same number. Return: 0 or negative errno. */
int backend_redo_run(struct backend *b, const struct launch *launch, uint64_t number);

/* -- order between processes: only where info.order is not NONE --------------- */

/* The progress words of the queues: 64-bit, that of queue q at q * BACKEND_SLOT_STRIDE. Other
 * processes map it read-only. The backend's own. */
struct backend_mem *backend_ready(struct backend *b);
/* @fd is of the ready page of a daemon that has ended: streams of other processes that wait for one
 * of its words continue. Like an import, at the start only: blocks. Return: 0 or negative errno. */
int backend_release(struct backend *b, int fd);
/* The same words in memory of BACKEND_SHARE_IPC, raised for what is submitted after the
 * first such call. NULL: the device cannot share memory in this way. The backend's own. */
struct backend_mem *backend_ready_ipc(struct backend *b);
/* BACKEND_ORDER_EVENTS: the handle of event @i (below BACKEND_EVENT_RING) of a queue,
 * CU_IPC_HANDLE_SIZE bytes. Return: 0 or negative errno. */
int backend_ready_event(struct backend *b, enum backend_queue queue, unsigned i,
			uint8_t ret_handle[BACKEND_IPC_BYTES]);

/* The signals of one session: @mem holds BACKEND_SIGNAL_SLOTS words, zero-filled, which
 * the session's streams raise; borrowed until backend_signals_free.
 * Return: 0 or negative errno. */
int backend_signals_new(struct backend *b, struct backend_mem *mem, struct backend_signals **ret);
/* BACKEND_ORDER_EVENTS: the session's events of @slot, all or none of them; @handles:
 * BACKEND_IPC_BYTES each. Return: 0, -EEXIST (they are there) or another negative errno. */
int backend_signals_events(struct backend_signals *s, uint32_t slot,
			   const uint8_t *const handles[BACKEND_EVENT_RING]);
/* The session is gone or has broken its promise: everything that waits for it continues, now and
 * later. Such tasks leave garbage; the caller handles that. */
void backend_signals_poison(struct backend_signals *s);
/* Free, when no task waits on it any more (the backend keeps it until then). Only after
 * poisoning, or when nothing waits. @freed: called on the loop when @mem is free.
 * NULL is allowed. */
void backend_signals_free(struct backend_signals *s, void (*freed)(void *userdata), void *userdata);

/* Call now and then: frees memory that a device allocated and nobody claimed. */
void backend_tick(struct backend *b, uint64_t now_us);

/* Tasks submitted whose callback has not run. */
unsigned backend_in_flight(const struct backend *b);

/* Stop the threads. No task may be in flight and all memory must be freed
 * (CHECKed). Blocks for the helper threads. NULL is allowed. Return: NULL. */
struct backend *backend_close(struct backend *b);

#endif
