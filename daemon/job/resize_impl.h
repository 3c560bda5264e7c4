/* Shared by the files of resize: resize.c (its course), resize_layout.c (the new layout, and the copies
 * into it), resize_exchange.c (the job becomes one of the new size). */
#ifndef SHARDD_JOB_RESIZE_IMPL_H
#define SHARDD_JOB_RESIZE_IMPL_H

#include "core/loopq.h"
#include "job/job_types.h"
#include "job/relayout.h"
#include "job/resize.h"

/* A rank of the new world: its device, and memory for its buffers. */
struct resize_rank {
	struct device *device;
	uint64_t bytes, at;
	struct slab *slab; /* owned; NULL: none is needed */
};

/* The copies to one device. */
struct resize_part {
	struct backend_task task;
	struct resize *resize;
	size_t room;
	struct launch *launches; /* owned */
};

/* Of ranks that stay. */
struct resize_stay {
	uint32_t *numbers;       /* owned, as is the next; by new rank */
	struct device **devices; /* of new ones; NULL: as the daemon chooses */
	uint32_t launched;
	struct fault told;
};

struct resize {
	struct job *job;
	uint32_t world;
	uint32_t *from;           /* owned, by new rank: which one it was; RESIZE_NEW: none */
	struct resize_stay *stay; /* owned; NULL: nobody is in the job */
	uint8_t stage;
	uint64_t until_us;
	struct relayout *units; /* owned, by unit of the job; dropped: all NULL */
	bool *moves;            /* owned, by unit */
	bool moves_kept;        /* one does: then all copies of the commit do, which share slabs */
	struct relayout_memory mem;
	uint64_t kept_bytes[NODE_MAX_DEVICES], kept_at[NODE_MAX_DEVICES];
	struct slab *kept[NODE_MAX_DEVICES]; /* owned; of copies (job/kept.h) */
	struct resize_rank *ranks;           /* owned, by new rank */
	struct device *devices[NODE_MAX_DEVICES];
	unsigned n_devices;
	struct resize_part parts[NODE_MAX_DEVICES];
	unsigned pending;
	int status;
	struct resize_report report;
	state_group *group_rec; /* owned, as is the next: of the new world */
	struct group *group;
	struct work begun;
	bool posted;          /* @begun is */
	struct waiter waiter; /* for readers */
	bool writes;          /* counted in the job's readers.writing */
	bool ended;           /* the epoch is */
	resize_cb done;       /* NULL: nobody waits */
	void *userdata;
};

/* Can all units be laid out for @world ranks? Return: 0 or a fault code. */
int resize_check_units(const struct job *job, uint32_t world, struct fault *f);

/* Lay all units out, and sum the memory that they need. Return: 0 or -ENOMEM. */
int resize_lay_out(struct resize *r);
/* Take the memory; call again after SLAB_E_LATER. Return: 0, SLAB_E_*, or negative errno. */
int resize_take(struct resize *r);
/* A place for everything, in the units and in their records. Return: 0 or -ENOMEM. */
int resize_place(struct resize *r);
/* The copies, by device (r->parts). Return: 0 or -ENOMEM. */
int resize_list_copies(struct resize *r);

/* Is new rank @i one that stays in the job? */
static inline bool resize_rank_stays(const struct resize *r, uint32_t i)
{
	return r->stay && r->from[i] != RESIZE_NEW;
}

/* The world group, as it will be. Return: 0 or -ENOMEM. */
int resize_make_group(struct resize *r);
/* The job becomes one of the new size. Return: 0 or negative errno: nothing has changed. */
int resize_exchange(struct resize *r);

#endif
