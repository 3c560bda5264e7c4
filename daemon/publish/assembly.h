/*
 * An assembly: a view (publish/view.h) of the units of a job, as tables for the kernel that makes
 * generations of it (k_assemble). Its sources are the tensors of the job's units, under their names in the
 * model. Loop thread only.
 */
#ifndef SHARDD_PUBLISH_ASSEMBLY_H
#define SHARDD_PUBLISH_ASSEMBLY_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/user.h"
#include "publish/making.h"
#include "publish/tables.h"
#include "publish/view.h"

struct job;

/* What the passes before the last one need: of tensors of type e4m3, and of their scales. */
struct assembly_scales {
	struct k_assemble_scales *all; /* owned, as are all pointers here */
	uint32_t *amax;
	struct k_assemble_block *cleared, *measured;
	uint32_t n, n_cleared, n_measured;
	uint64_t n_amax;
};

struct assembly {
	unsigned refs;
	struct user_charge cost; /* of its memory, until its last reference is gone */
	uint64_t layout;         /* its number: no other one of this daemon has it */
	struct view *view;       /* owned */
	struct k_assemble_tensor *tensors;
	struct k_assemble_box *boxes;
	struct k_assemble_block *blocks;
	uint32_t n_blocks, n_boxes;
	struct device *device; /* borrowed: whose memory generations are in */
	bool others;           /* some of what it reads is in the memory of other devices */
	struct tables tables;  /* of @device, if it is a GPU */
	struct assembly_scales *scales; /* owned; NULL: no tensor has any */
	bool *reads;                    /* by the job's units: it reads their masters */
	uint32_t n_units;
	uint64_t bytes;      /* of a generation */
	uint64_t moves;      /* bytes read and written for a block, on average */
	uint64_t delta_room; /* bytes of the changes of a delta; 0: there are none */
};

/* What @p makes of the units that the job has now. They are whole on this node. The job's owner pays for it, until the
 * last reference is gone: buffers and streams keep it when the units have changed. @ret: assembly_unref.
 * Return: 0 or a fault code. */
int assembly_new(const struct job *job, const view_declaration *p, struct assembly **ret,
		 struct fault *f);
/* NULL is allowed. Return: NULL. */
struct assembly *assembly_unref(struct assembly *a);
struct assembly *assembly_ref(struct assembly *a);
/* Do the units that it reads have values, which are one whole? @job: as it was. Return: 0 or FAULT_STATE. */
int assembly_check_values(const struct assembly *a, const struct job *job, struct fault *f);
/* The backends beside that of its device whose memory it reads. @ret: room for MAKING_FENCES. Return: how many. */
unsigned assembly_others(const struct assembly *a, const struct job *job,
			 struct backend *ret[MAKING_FENCES]);
/* On a GPU: have its tables there, in memory that @payer pays. Return: as tables_take. */
int assembly_take_tables(struct assembly *a, const struct board_payer *payer);
/* On a GPU: room for the changes of a delta in the tables, which are let go of; 0: generations have no deltas from now
 * on. Nothing is made with the tables now. */
void assembly_set_delta_room(struct assembly *a, uint64_t bytes);
/* What is done for a generation, pass by pass; dst of the tensors is counted from its begin. */
void assembly_passes(const struct assembly *a, struct making_pass ret[MAKING_PASSES]);
/* Memory of the daemon that it takes, about. */
uint64_t assembly_own_bytes(const struct assembly *a);

#endif
