/* Which cases there are. */
#include <string.h>

#include "bench.h"

static const struct bench_case whole_cases[] = {
	{ "gather", "Gather", "storage = compute dtype (always fp32): a reference, no copy", 2, 200,
	  case_gather, NULL },
	{ "gather_cast", "Gather", "fp32 to bf16 (or --dtype fp16): the call that casts, and later",
	  2, 20, case_gather_cast, NULL },
	{ "reduce", "Reduce", "the gradients of all ranks into the fp32 shards", 2, 20, case_reduce,
	  NULL },
	{ "adamw", "Step Commit", "a step of AdamW and its commit", 2, 20, case_adamw, NULL },
	{ "sgd", "Step Commit", "a step of SGD without momentum and its commit", 2, 20, case_sgd,
	  NULL },
	{ "reduce_adamw", "Reduce Step Commit",
	  "AdamW in backward, in the reduce; the two apart; with a copy made before it", 4, 20,
	  case_reduce_adamw, NULL },
	{ "norm", "ClipGradNorm", "of all gradient shards, clipping nothing", 2, 20, case_norm,
	  NULL },
	{ "transformer", "Gather Release GradientBuffer Reduce Step Commit",
	  "all ops of a training step of a transformer of 10 million parameters", 4, 20,
	  case_transformer, NULL },
	{ "grpc_rtt", "Barrier", "a barrier of a world of one, against a bare gRPC core echo", 1,
	  5000, case_grpc_rtt, NULL },
	{ "ring_rtt", NULL, "a no-op over the ring, there and back", 1, 20000, case_ring_rtt,
	  NULL },
	{ "ring_rtt_sleeping", NULL,
	  "the same where neither side spins, against a bare eventfd and a bare futex", 1, 20000,
	  case_ring_rtt_sleeping, NULL },
	{ "submit", NULL, "one of many no-ops on one ring, 256 of them under way", 1, 2000,
	  case_submit, NULL },
	{ "attach", NULL, "a restarted trainer: connect, join, register, first gather", 1, 50,
	  case_attach, NULL },
	{ "status", NULL,
	  "StatusService.GetStatus, and the command shardctl --json status, while trainers train",
	  8, 1000, case_status, NULL },
	{ "limits", NULL, "memory bandwidth here and now: copy, triad, read", 1, 1, case_limits,
	  NULL },
	{ "memory", NULL, "bytes held by class against the formula", 2, 1, case_memory, NULL },
	{ "launch", NULL, "a small op in the device's queue: one alone, and of many under way", 1,
	  500, case_launch, NULL },
	{ "attach_units", NULL,
	  "a restarted trainer with many units (--units): the first gathered, all gathered", 1, 20,
	  case_attach_units, NULL },
	{ "reduce_units", NULL,
	  "reductions of many units (--units), all submitted before any is waited for", 2, 20,
	  case_reduce_units, NULL },
	{ "scale", NULL,
	  "many trainers register --units (10000) units at once: that, an op then and with 10 "
	  "units, StatusService.GetStatus meanwhile",
	  64, 20, case_scale, NULL },
	{ "reduce_bare", NULL, "GPUs: reduces on streams against their kernel alone", 4, 30,
	  case_reduce_bare, NULL },
	{ "nccl_direct", NULL, "GPUs: NCCL called by one process, and an all_reduce by the daemon",
	  0, 20, case_nccl_direct, NULL },
	{ "adamw_kept", "Step Commit",
	  "AdamW by a daemon whose step the next one can complete (with a holder), beside one "
	  "without",
	  2, 10, case_adamw_kept, NULL },
	{ "restart", NULL,
	  "the daemon is killed: until a trainer with --units (1000) has them again, and a step", 1,
	  10, case_restart, NULL },
	{ "checkpoint", "Checkpoint",
	  "the longest step while a checkpoint is written, beside a calm one; the writing, beside "
	  "dd",
	  1, 5, case_checkpoint, NULL },
	{ "resize", "ResizeJob",
	  "a job of --units (1000) gets 3 ranks, and 1 again: units that keep their memory, units "
	  "that move; beside shardctl status",
	  1, 10, case_resize, NULL },
	{ "publish", NULL,
	  "a generation in bf16 of fp32 masters; four training steps without publication, with one "
	  "at "
	  "each step, with one at every fourth",
	  2, 20, case_publish, NULL },
	{ "publish_transforms", NULL,
	  "a generation of three matrices in each type, and joined, cut, transposed, padded", 2, 12,
	  case_publish_transforms, NULL },
	{ "publish_delta", NULL,
	  "a generation without and with its delta of 2 % of the values; copying it, applying that",
	  1, 20, case_publish_delta, NULL },
	{ "publish_swap", NULL,
	  "a reader takes the next generation of --units (10000) tensors: at its place, at fixed "
	  "addresses; the system calls of the latter by themselves, with cold and warm caches",
	  1, 100, case_publish_swap, NULL },
	{ .name = NULL },
};

const struct bench_case *const bench_tables[] = { whole_cases, local_cases, group_cases, ddp_cases,
						  NULL };

const struct bench_case *bench_case_named(const char *name)
{
	for (size_t k = 0; bench_tables[k]; k++)
		for (const struct bench_case *c = bench_tables[k]; c->name; c++)
			if (strcmp(name, c->name) == 0)
				return c;
	return NULL;
}
