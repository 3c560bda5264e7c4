/*
 * What a reduction does with a gradient: where it is divided, in which dtype it is added,
 * in the order of the system whose profile the unit has. Pure arithmetic, any thread.
 *
 *   each rank's gradient, or what it has accumulated without a reduction
 *     --pre--> added over the ranks of a replica, in sum_dtype, rounded at every addition
 *     --partial--> what the replica has; kept where the all-reduce is deferred
 *     --replica--> added over the replicas, in sum_dtype
 *     --post--> widened to fp32, added to the gradient shard
 *
 * Without replicas (one of all ranks, or one rank each) the third line does nothing.
 */
#ifndef SHARDD_UNIT_REDUCE_PLAN_H
#define SHARDD_UNIT_REDUCE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "kernels.h"
#include "unit/unit.h"

/* Where PyTorch's tensors would be, whose arithmetic differs:
 *   AVG       gloo adds and then divides; NCCL multiplies each contribution by the inverse of
 *             their number, rounded to their type
 *   x.div_(d) x / d on a CPU; x * fp32(1 / d), the inverse taken in fp64, on a GPU
 *             (BinaryDivTrueKernel.cu), unless the unit's div_mode says which */
enum reduce_device { REDUCE_AS_ON_CPU, REDUCE_AS_ON_GPU };

struct reduce_setting {
	enum reduce_profile profile;
	enum dtype gradient_dtype, reduce_dtype;
	uint32_t ranks;       /* that reduce together, replicas too */
	uint32_t shard_ranks; /* of one replica: divides @ranks */
	/* FAIRSCALE, XLA, FSDP1_HOOK: as resolved, so neither is 0 */
	double pre_divide, post_divide;
	double divide_factor; /* FSDP2: the user's; 0: none */
	bool force_sum;       /* FSDP2 */
	enum reduce_device device;
	enum unit_div_mode div_mode; /* 0: of the device */
};

struct reduce_plan {
	enum dtype sum_dtype; /* of partials too */
	struct k_factor pre;
	struct k_factor partial;
	struct k_factor replica;
	struct k_factor post;
	/* Of what a rank accumulates without a reduction; it is what is reduced then. */
	enum dtype accumulate_dtype;
	/* DDP, and FSDP1 and fairscale where they do not shard: what earlier reductions have
	 * left is each rank's own gradient, to which the next is added before it is reduced, so
	 * that it is divided and added again. */
	bool adds_before;
};

void reduce_plan_make(const struct reduce_setting *s, struct reduce_plan *ret);

/* Of a resolved record, in a group of @ranks ranks. */
struct reduce_setting reduce_setting_of(const state_unit *rec, uint32_t ranks,
					enum reduce_device device);
/* The same with the factors that @u has now. */
struct reduce_setting reduce_setting_now(const struct unit *u, uint32_t ranks,
					 enum reduce_device device);

/* What x.div_(@by) of the unit's system is, in @t; nothing where @by is 1. */
struct k_factor reduce_divide_by(const struct reduce_setting *s, double by, enum dtype t);

/* The one of two factors that is more than nothing: at most one may be (CHECKed). */
struct k_factor reduce_either(struct k_factor a, struct k_factor b);

/* Replace the settings of reductions that were left open in @rec, the strategy's too, and
 * refuse those that its profile does not have. Return: 0 or a fault code. */
int reduce_resolve(state_unit *rec, uint32_t ranks, struct fault *f);
/* Replace the factors that were left open (0) in @factors by what they stand for in a unit of
 * the resolved @rec, and refuse those that its profile does not have. Return: 0 or a fault
 * code, of a field of @factors. */
int reduce_resolve_factors(const state_unit *rec, uint32_t ranks, struct unit_factors *factors,
			   struct fault *f);
/* Before a resolved record is resolved again: what its profile does not have is open. */
void reduce_reopen(state_unit *rec);

#endif
