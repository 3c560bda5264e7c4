/*
 * A unit: parameters that are gathered and reduced together.
 *
 * It has one part on each device of its group; a node has those on its own devices, which are
 * consecutive. The parts of one replica, which lies on
 * `spread` devices, hold the shards of its ranks in order, evenly, wherever the trainers
 * are; on one device all shards lie so that every tensor is in one piece and gather hands
 * out the part itself. The arrays of a part are fp32:
 *   params: [trained: P elements | frozen]    gradients, optimizer state: [P elements]
 * FLAT: part d is elements [d*P, (d+1)*P) of the flat parameter. DIM0: tensor after tensor,
 * the rows of the part's ranks. The gathered unit has the same layout for all ranks:
 *   [trained, all parts | frozen, all parts]
 * in which every tensor is in one piece; without frozen ones its end is cut off, FLAT, where
 * the last tensor ends. A gradient buffer is its first layout.elements. Gaps between tensors (DIM0:
 * padding rows, up to a whole number of rows per rank) and after them are zero in the shards.
 * Persistent state is in the record; the state here is derived from it or lives as long as the
 * trainers. Loop thread only.
 *
 *   uninitialised --initialise--> initialised --(reduce)--> has_gradient
 *                                       ^------(step applied)------'
 */
#ifndef SHARDD_UNIT_UNIT_H
#define SHARDD_UNIT_UNIT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/fault.h"
#include "core/list.h"
#include "mem/pool.h"
#include "unit/reads.h"
#include "store/state.h"
#include "unit/layout.h"

#define UNIT_NAME_MAX 255

/* Numbers as stored in the record, and as in shardd.proto. Until unit_resolve, 0 in the record
 * stands for the first. */
enum optim_kind { OPTIM_NONE = 0, OPTIM_SGD = 1, OPTIM_ADAMW = 2, OPTIM_ADAM = 3, _OPTIM_N };
enum optim_profile {
	OPTIM_EAGER_SINGLE = 1,
	OPTIM_FOREACH = 2,
	OPTIM_FUSED = 3,
	OPTIM_REFERENCE_F64 = 4,
	_OPTIM_PROFILE_N
};
enum optim_when { OPTIM_AT_STEP = 1, OPTIM_IN_BACKWARD = 2, OPTIM_BY_TRAINER = 3, _OPTIM_WHEN_N };
enum unit_layout_kind { LAYOUT_FLAT = 1, LAYOUT_DIM0 = 2, _LAYOUT_N };
enum unit_strategy { STRATEGY_SHARD = 1, STRATEGY_REPLICATE = 2, STRATEGY_HYBRID = 3, _STRATEGY_N };
enum reduce_profile {
	PROFILE_FAIRSCALE = 1,
	PROFILE_XLA = 2,
	PROFILE_FSDP1_HOOK = 3,
	PROFILE_FSDP2 = 4,
	PROFILE_DDP = 5,
	PROFILE_DDP_HOOK = 6,
	PROFILE_DDP_BUCKET_VIEW = 7,
	_PROFILE_N
};
enum unit_reshard {
	RESHARD_AFTER_FORWARD = 1,
	RESHARD_AFTER_BACKWARD = 2,
	RESHARD_NEVER = 3,
	RESHARD_AFTER_FORWARD_ONLY = 4,
	_RESHARD_N
};
/* Division of gradients by a factor: 0 in a record means as PyTorch does on the unit's device. */
enum unit_div_mode { DIV_MODE_TRUE = 1, DIV_MODE_RECIPROCAL = 2, _DIV_MODE_N };
enum buffer_dtype {
	BUFFER_FP32 = 1,
	BUFFER_BF16 = 2,
	BUFFER_FP16 = 3,
	BUFFER_FP64 = 4,
	BUFFER_INT64 = 5,
	BUFFER_INT32 = 6,
	BUFFER_UINT8 = 7,
	_BUFFER_DTYPE_N
};

#define UNIT_MAX_STATES 3u
#define UNIT_MAX_FACTOR 1e9

/* The factors of reductions, as in the record. */
struct unit_factors {
	bool given; /* in place of the record's */
	bool force_sum;
	double pre_divide, post_divide, divide_factor;
};

/* The part of a unit on one device. */
struct unit_part {
	struct device *device; /* borrowed */
	uint64_t begin;        /* of what all parts have, trained, the first element */
	uint64_t n;            /* elements up to the end of the last tensor trained; may be 0 */
	struct region params;  /* the slabs are held by the job */
	struct region grads;   /* unit_pools_gradient: only while they are needed, from a pool */
	struct region state1;  /* Adam, AdamW: m; SGD with momentum: its buffer */
	struct region state2;  /* Adam, AdamW: v */
	struct region state3;  /* amsgrad: the largest v */
	struct region kept;    /* copies of them but grads, in this order (job/kept.h) */
	struct region full;    /* the gathered unit on this device, from the job's pool */
	uint64_t ready;        /* point of the gather queue at which @full is there; 0: it is */
	struct reads reads;    /* streams that may still read what was gathered here */
	/* sums of the replicas on this device whose all-reduce was deferred, from the job's
	 * scratch pool; may be there without being valid */
	struct region partials;
};

/* Where a tensor of the record is. In elements. */
struct unit_tensor {
	uint64_t elements;
	uint64_t row;    /* of one row: all dimensions but the first */
	uint64_t piece;  /* DIM0: of one rank, padding included */
	uint64_t at;     /* FLAT: in the flat parameter; DIM0: in a shard */
	uint64_t packed; /* among all tensors in their order, without padding */
	bool frozen;
	bool alias;       /* it has no memory, the fields above are unset */
	uint32_t of_unit; /* then: that tensor; 0: not resolved yet */
	uint32_t of;
};

/* The gathered copies, one a part. */
enum unit_copy {
	UNIT_COPY_NONE,     /* they have no memory */
	UNIT_COPY_KEPT,     /* they have; full_version says what is in it */
	UNIT_COPY_CASTING,  /* being made, not ordered yet: no rank can have it */
	UNIT_COPY_EXECUTING /* ordered, not executed yet: only for ranks that wait by stream */
};

/* From the unit's last Reduce of a backward pass to the Step. */
enum unit_step {
	UNIT_STEP_NONE,
	UNIT_STEP_ARRIVED,  /* its gradient was handled as the plan says */
	UNIT_STEP_DUE,      /* must be stepped when no rank has it gathered any more */
	UNIT_STEP_STEPPING, /* that step is running; outlives an epoch */
	UNIT_STEP_STEPPED   /* it was */
};

/* BY_TRAINER: the shards of a pass, from its last Reduce on. */
enum unit_shards {
	UNIT_SHARDS_NONE,
	UNIT_SHARDS_PROMISED, /* the Reduce runs */
	UNIT_SHARDS_READY,    /* it is over: NextShard hands them out */
	/* they were given back to some of several copies of the unit: it is invalid until all
	 * copies have them; outlives an epoch while STEPPING */
	UNIT_SHARDS_MIXED
};

/* The booleans are independent of each other and of the states. */
enum unit_unsaved { UNIT_SAVED, UNIT_UNSAVED_STEPS, UNIT_UNSAVED_ALL };

/* Copies of a unit that has parts on several nodes: the leader of the job orders them. */
struct unit_turns {
	uint64_t n;       /* begun in this epoch, or in line */
	unsigned in_line; /* of them: have not begun */
	bool wanted;      /* another one */
	bool asked;       /* a rank of this node waits for the last one */
	/* BY_TRAINER: how often in this epoch all ranks of this node have given their shards back */
	uint64_t given;
	/* Some rank leaves tensors of it out of a gradient: with each Reduce that starts from here on the nodes
	 * show each other which ones. In this epoch. */
	bool leaves_out;
};

/* The number of that on all nodes, with the key of the unit. */
static inline uint64_t unit_leaves_out_key(uint64_t key)
{
	return key ^ UINT64_C(0x6c65617665736f75);
}

struct unit {
	uint32_t magic;
	uint32_t id;     /* index in its job, from 1 */
	uint32_t ops;    /* that have been taken in and name it */
	uint64_t key;    /* its number on all nodes: FNV-1a of the name */
	state_unit *rec; /* borrowed from the job's record */
	struct layout layout;
	struct unit_part *parts;     /* owned array: those on this node (unit_position) */
	struct unit_tensor *tensors; /* owned array; as in the record */
	uint64_t packed;             /* elements of all tensors, without padding */
	unsigned n_parts;
	unsigned all_parts;          /* on all nodes */
	unsigned first_part;         /* number of parts[0] among them */
	unsigned spread;             /* how many parts make a whole */
	struct region *buffers;      /* owned array, by rank of the group; NULL: it has none */
	uint64_t version;            /* grows whenever parameters change */
	bool has_gradient;           /* grads holds a reduced gradient since the last step */
	bool has_partials;           /* sums of replicas, since the last all-reduce between them */
	struct unit_factors factors; /* set since the epoch began */
	bool torn;       /* changed after the last commit by a step whose trainer died */
	uint8_t unsaved; /* enum unit_unsaved: what of @rec is not in the journal yet */
	/* by tensor: it has no gradient although the unit has one, since no rank has used it. NULL:
	 * never */
	uint8_t *lacks;
	bool some_lack;

	/* the gathered copies, one a part, where gather cannot hand out the shards */
	uint8_t copy;               /* enum unit_copy */
	uint64_t full_version;      /* parameters they were made from; 0: not valid */
	unsigned copy_reads;        /* ReadBytes that read one of them */
	struct condition cast_done; /* either is over */
	struct list idle;           /* link in the job's list of idle full buffers */
	struct unit_turns turns;
	bool drop; /* free its memory as soon as it is unused: no other rank will use it */

	uint32_t gathered_ranks; /* ranks that hold at least one gather */
	uint32_t summoned_ranks; /* ranks that have a copy to write to */
	/* who writes parameters now, until that is executed: CopyShard, Initialise, ReturnFull. Nobody
	 * gathers them meanwhile; another node may want to, whose ranks have had their answer */
	uint32_t shard_writes;
	unsigned summoned_state; /* of what: unit_state */

	/* Of a backward pass, from the unit's last Reduce to the Step. */
	uint8_t step;         /* enum unit_step */
	double *norms;        /* ARRIVED: its blocks' norms, if they are wanted; owned */
	uint8_t shards;       /* enum unit_shards */
	uint64_t shards_from; /* number of their Reduce; 0: there was none, or its pass is over */
	/* ranks that have not given their shard back; those on other nodes count as one */
	uint32_t shards_left;
	struct condition
		step_done; /* the parameters are stepped in backward, or nobody reads them */
};

/* Move u->copy, u->step, u->shards. CHECK that the move is in the table (unit.c, docs/states.md). */
void unit_copy_move(struct unit *u, enum unit_copy to);
void unit_step_move(struct unit *u, enum unit_step to);
void unit_shards_move(struct unit *u, enum unit_shards to);

/* Is there memory for the copies? Are they being made? */
static inline bool unit_has_copy(const struct unit *u)
{
	return u->copy != UNIT_COPY_NONE;
}

static inline bool unit_is_copying(const struct unit *u)
{
	return u->copy == UNIT_COPY_CASTING || u->copy == UNIT_COPY_EXECUTING;
}

/* Bytes of one array of a part in a shard slab, padding included, rounded up so that
 * the next one is aligned: of gradients and optimizer state (0 if nothing is trained), and
 * of parameters. */
uint64_t unit_array_bytes(const struct layout *l, unsigned spread);
uint64_t unit_params_bytes(const state_unit *rec, const struct layout *l, unsigned spread);

/* Number of optimizer-state arrays (0 to UNIT_MAX_STATES) that the record needs. */
unsigned unit_state_arrays(const state_unit *rec);
/* An array of @p: 0: the parameters; 1 to UNIT_MAX_STATES: optimizer state, which may not exist. */
struct region *unit_state(struct unit_part *p, unsigned i);
/* Type of its elements: parameters are stored in storage_dtype, state in FP32. */
enum dtype unit_state_dtype(const state_unit *rec, unsigned i);
/* Element @at of array @i, which is @r. */
void *unit_state_at(const state_unit *rec, const struct region *r, unsigned i, uint64_t at);

/* Do gradient shards come from a pool while they are needed, instead of existing always? */
bool unit_pools_gradient(const state_unit *rec);
/* Is it stepped before the Step, and so perhaps before other units (an optimizer in backward, or the
 * trainers' own)? */
bool unit_steps_early(const state_unit *rec);

/* Is it an alias of another tensor? */
bool unit_is_alias(const state_tensor *t);
/* Elements of all tensors except aliases. Return: false on overflow, or if there are none. */
bool unit_elements(const state_unit *rec, uint64_t *ret);

/* Layout from the record for a group of @ranks ranks. Return: false if it does not fit. */
bool unit_layout(const state_unit *rec, uint32_t ranks, struct layout *ret);

/* Where the parts of a unit are. */
struct unit_place {
	struct device *const *devices; /* of the parts on this node, in their order */
	unsigned n;
	unsigned all, first; /* parts on all nodes; number of the first one here among them */
};

/* @rec: borrowed, outlives the unit. Regions of its parts are set by the caller. Return: 0 or
 * -ENOMEM. */
int unit_new(uint32_t id, state_unit *rec, const struct layout *layout,
	     const struct unit_place *place, struct unit **ret);
/* Elements up to the end of the last tensor trained, in the parts at @position. */
uint64_t unit_end_at(const struct unit *u, unsigned position);
/* Which part of a replica is @p, which is one of @u's. */
unsigned unit_position(const struct unit *u, const struct unit_part *p);
/* The tensors of @rec laid out by @layout; the aliases among them are unresolved. Return:
 * owned by the caller, or NULL without memory. */
struct unit_tensor *unit_tensors_new(const state_unit *rec, const struct layout *layout,
				     uint64_t *ret_packed);
/* The element of the gathered unit at which tensor @t, not an alias, begins. */
uint64_t unit_tensor_full(const struct unit *u, const struct unit_tensor *t);

/* The shards of ranks [lo, hi) of a replica, on the part at @position. */
struct unit_ranks {
	uint32_t lo, hi;
	unsigned position;
};
/* Those of all ranks of the part at @position. */
struct unit_ranks unit_part_ranks(const struct unit *u, unsigned position);
/* Elements [*ret_begin, *ret_end) of @t that are in @r; none: both are equal. */
void unit_tensor_cut(const struct unit *u, const struct unit_tensor *t, const struct unit_ranks *r,
		     uint64_t *ret_begin, uint64_t *ret_end);
/* The place of element @first of @t in the arrays of the part of @r. */
uint64_t unit_tensor_at(const struct unit *u, const struct unit_tensor *t,
			const struct unit_ranks *r, uint64_t first);
/* The end of the last trained tensor in the arrays of the parts at @position. */
uint64_t unit_tensors_end(const struct unit *u, unsigned position);
/* Lay @u out by @layout, as its tensors already are. @devices: NULL: unchanged. */
void unit_lay_out(struct unit *u, const struct layout *layout, struct device *const *devices);
/* The part on @device, which must be one of the unit's (CHECKed). */
struct unit_part *unit_part_on(struct unit *u, const struct device *device);
/* Elements of each part, padding included: of what is trained, of what is frozen. */
uint64_t unit_part_elements(const struct unit *u);
uint64_t unit_frozen_elements(const struct unit *u);
/* flat, dim0; shard, replicate, hybrid. Static strings. */
const char *unit_layout_name(uint32_t layout);
const char *unit_strategy_name(uint32_t strategy);
/* Elements of its frozen tensors, without padding. */
uint64_t unit_frozen_numel(const struct unit *u);
/* Is any of its tensors trained? */
bool unit_is_trained(const struct unit *u);

/* Does any rank, or the daemon, still read the parameters? */
bool unit_is_read(const struct unit *u);

/* No shard of this pass is promised any more, or handed out. */
void unit_shards_drop(struct unit *u);
/* Clear the records of a backward pass. */
void unit_pass_end(struct unit *u);

/* Nothing may be gathered or casting (CHECKed); the full buffer must have been
 * given back. NULL is allowed. Return: NULL. */
struct unit *unit_free(struct unit *u);

/* Where the buffer behind buffer @i begins in a rank's region of buffers, if @i begins at @offset
 * (the first at 0). */
uint64_t unit_buffer_next(const state_unit *rec, size_t i, uint64_t offset);
uint64_t unit_buffer_bytes(const state_buffer *b);
/* Of all buffers, a multiple of POOL_ALIGN. */
uint64_t unit_buffers_bytes(const state_unit *rec);
/* Return: false if they are too large together. */
bool unit_buffers_fit(const state_unit *rec);

/* Does gather hand out the shards themselves? Only if each device has all of them. */
bool unit_is_direct(const struct unit *u);

/* Elements and bytes of the gathered unit, bytes of a gradient buffer (0: nothing is
 * trained). */
uint64_t unit_full_elements(const struct unit *u);
uint64_t unit_full_bytes(const struct unit *u);
uint64_t unit_gradient_bytes(const struct unit *u);

/* Bytes of the copy's memory on each device: including the padding, which an all-gather between
 * devices moves, too. */
uint64_t unit_full_room(const struct unit *u);

/* Bytes of parameters, gradients and optimizer state of all ranks. */
uint64_t unit_shard_bytes(const struct unit *u);

/* Is the tensor neither frozen nor an alias? */
bool unit_trains(const struct unit *u, uint32_t tensor);

/* Tensor @tensor alone has a gradient from here on; unit_track_gradients before. */
void unit_got_gradient(struct unit *u, uint32_t tensor);
/* Return: 0 or -ENOMEM. */
int unit_track_gradients(struct unit *u);
/* Has the tensor no gradient? Then the optimizer does not change it. */
bool unit_lacks_gradient(const struct unit *u, uint32_t tensor);

/* The optimizer has stepped @u on the gradient it had. A tensor without one has missed the step:
 * PyTorch counts the steps of each parameter, and bias correction and the first step's momentum
 * follow that count. */
void unit_stepped(struct unit *u);
/* Number of optimizer steps of the tensor. */
uint64_t unit_steps(const struct unit *u, uint32_t tensor);
/* Reset the count of steps. */
void unit_forget_steps(struct unit *u);

/* The memory that gather hands out on @p if unit_is_direct. */
struct region unit_direct_region(const struct unit *u, const struct unit_part *p);

/* Replace the settings that were left open in @rec (0) by their values in a group of @ranks ranks:
 * records are compared after this. Return: 0 or a fault code (shard_ranks does not fit). */
int unit_resolve(state_unit *rec, uint32_t ranks, struct fault *f);

/* Do the two records describe the same part of the model? Otherwise fill @f with the first
 * difference. Regions, steps and initialised are not compared. */
bool unit_same_spec(const state_unit *have, const state_unit *want, struct fault *f);

#endif
