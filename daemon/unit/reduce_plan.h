/*
 * The plan of a reduction: where a gradient is divided and in which dtype it is added, in the order
 * of the system whose profile the unit has. Pure arithmetic, any thread.
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

/* The device of PyTorch's tensors, since its arithmetic differs by device:
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
	/* Dtype of gradients that a rank accumulates without a reduction; the reduction then takes
	 * these. */
	enum dtype accumulate_dtype;
	/* DDP, and FSDP1 and fairscale where they do not shard: the result of earlier reductions is
	 * each rank's own gradient. The next one is added to it before the reduction, so the result
	 * is divided and added again. */
	bool adds_before;
};

void reduce_plan_make(const struct reduce_setting *s, struct reduce_plan *ret);

/* Of a resolved record, in a group of @ranks ranks. */
struct reduce_setting reduce_setting_of(const state_unit *rec, uint32_t ranks,
					enum reduce_device device);
/* The same with the factors that @u has now. */
struct reduce_setting reduce_setting_now(const struct unit *u, uint32_t ranks,
					 enum reduce_device device);

/* The equivalent of x.div_(@by) in the unit's system, in @t; nothing if @by is 1. */
struct k_factor reduce_divide_by(const struct reduce_setting *s, double by, enum dtype t);

/* The factor of the two that does something: at most one may (CHECKed). */
struct k_factor reduce_either(struct k_factor a, struct k_factor b);

/* Replace the reduction settings that were left open in @rec, including those of the strategy, and
 * refuse those that its profile does not have. Return: 0 or a fault code. */
int reduce_resolve(state_unit *rec, uint32_t ranks, struct fault *f);
/* Replace the factors that were left open (0) in @factors by their values for a unit of the
 * resolved @rec, and refuse those that its profile does not have. Return: 0 or a fault code, of a
 * field of @factors. */
int reduce_resolve_factors(const state_unit *rec, uint32_t ranks, struct unit_factors *factors,
			   struct fault *f);
/* Call before a resolved record is resolved again: it reopens the settings that its profile does
 * not have. */
void reduce_reopen(state_unit *rec);
/* The same before it is resolved for another number of ranks: reopens also the factors that are the
 * profile's own for @ranks ranks, and the post_divide that makes a mean of them. */
void reduce_reopen_factors(state_unit *rec, uint32_t ranks);

#endif
