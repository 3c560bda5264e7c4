/*
 * Every field of every message with values that are not allowed: the answer names the
 * field and says what is, and the daemon is as it was before.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "rawcall.h"
#include "request.h"
#include "witness.h"

TestSuite(bad_input, .timeout = 240, .init = fdcheck_begin, .fini = fdcheck_end);

struct wrong {
	const char *method;
	const char *path; /* of the field that is set in an otherwise good request */
	struct request_value value;
	int code;
	const char *field; /* that the answer names; NULL: any */
	const char *words; /* that the answer has */
};

static bool check_wrong(struct rpc_client *c, const struct wrong *w)
{
	_Alignas(16) char room[REQUEST_ROOM];
	ProtobufCMessage *m = request_good(w->method, room);
	_cleanup_(freep) char *before = raw_state(c);
	_cleanup_(freep) char *after = NULL;
	struct shardd_error err = { 0 };
	char what[256];
	int r;

	snprintf(what, sizeof(what), "%s with wrong %s ('%s')", w->method, w->path, w->words);
	request_set(m, w->path, w->value);
	r = raw_call(c, w->method, m, NULL, &err);
	after = raw_state(c);
	if (raw_refusal_is(r, &err, w->code, w->field, w->words) &&
	    raw_same_state(before, after, what))
		return true;
	fprintf(stderr, "in: %s\n", what);
	return false;
}

/* -------------------------------------------------------------------- the table */

#define BAD    SHARDD_INVALID_ARGUMENT
#define ABSENT SHARDD_NOT_FOUND
#define STATE  SHARDD_FAILED_PRECONDITION
#define FULL   SHARDD_RESOURCE_EXHAUSTED
#define MINUS  UINT64_MAX /* what -1 becomes */

/* clang-format off */
static const struct wrong session_and_jobs[] = {
	{ "Attach", "client_name", LONG(65536), BAD, "client_name", "65536 bytes" },
	{ "Attach", "client_name", T("a\nb"), BAD, "client_name", "control character 0x0a" },
	{ "Attach", "client_name", T("\xff\xfe"), BAD, "client_name", "UTF-8" },
	{ "Attach", "protocol", N(0), BAD, "protocol", "protocol is 0" },
	{ "Attach", "protocol", N(1), STATE, "", "grpc.use_local_subchannel_pool=1" },

	{ "CreateJob", "job", NONE, BAD, "job", "missing" },
	{ "CreateJob", "job.name", T(""), BAD, "job.name", "1 to 64" },
	{ "CreateJob", "job.name", LONG(65), BAD, "job.name", "65 bytes" },
	{ "CreateJob", "job.name", LONG(65536), BAD, "job.name", "65536 bytes" },
	{ "CreateJob", "job.name", T("a b"), BAD, "job.name", "0x20 at 1" },
	{ "CreateJob", "job.name", T("a/b"), BAD, "job.name", "before the slash" },
	{ "CreateJob", "job.name", T("a\033[1m"), BAD, "job.name", "0x1b at 1" },
	{ "CreateJob", "job.name", T("\xc3\xa9"), BAD, "job.name", "0xc3 at 0" },
	{ "CreateJob", "job.world_size", N(0), BAD, "job.world_size", "is 0" },
	{ "CreateJob", "job.world_size", N(MINUS), BAD, "job.world_size", "(1..1024, max_world_size)" },
	{ "CreateJob", "job.world_size", N(1025), BAD, "job.world_size", "1025" },
	{ "CreateJob", "job.lifetime", N(4), BAD, "job.lifetime", "EPHEMERAL, KEEP or BASE" },
	{ "CreateJob", "job.lifetime", N(MINUS), BAD, "job.lifetime", "-1" },
	{ "DeleteJob", "job", T(""), BAD, "job", "1 to 64" },
	{ "DeleteJob", "job", LONG(65536), BAD, "job", "65536 bytes" },
	{ "DeleteJob", "job", T("nobody"), ABSENT, "", "no job 'nobody'" },
	{ "DeleteJob", "job", T("bad"), STATE, "", "2 trainers" },
	{ "DrainJob", "job", T("a b"), BAD, "job", "0x20 at 1" },
	{ "DrainJob", "job", T("nobody"), ABSENT, "", "no job 'nobody'" },

	{ "Join", "job", NONE, BAD, "job", "missing" },
	{ "Join", "instance", B(15), BAD, "instance", "15 bytes" },
	{ "Join", "instance", B(16), SHARDD_DATA_LOSS, "", "the daemon was restarted at" },
	{ "Join", "job.name", LONG(65536), BAD, "job.name", "65536 bytes" },
	{ "Join", "on_existing", N(4), BAD, "on_existing", "on_existing is 4" },
	{ "Join", "run", LONG(65), BAD, "run", "65 bytes" },
	{ "Join", "run", T("a\nb"), BAD, "run", "byte 10 at 1" },
	{ "Join", "job.world_size", N(0), BAD, "job.world_size", "is 0" },
	{ "Join", "job.world_size", N(MINUS), BAD, "job.world_size", "4294967295" },
	{ "Join", "rank", N(2), BAD, "rank", "(0..1)" },
	{ "Join", "rank", N(MINUS), BAD, "rank", "4294967295" },
	{ "Join", "local_rank", N(1), BAD, "local_rank", "is 1 and local_world_size 0" },
	{ "Join", "local_world_size", N(3), BAD, "local_rank", "world_size, which is 2" },
	{ "Join", "local_world_size", N(1), STATE, "local_world_size", "started 1 of the 2" },
	{ "Join", "job.lifetime", N(77), BAD, "job.lifetime", "77" },
	{ "Join", "rank", N(1), STATE, "", "leave it first" }, /* and no job is left behind */

	{ "CreateGroup", "name", T(""), BAD, "name", "empty" },
	{ "CreateGroup", "name", LONG(65536), BAD, "name", "65536 bytes" },
	{ "CreateGroup", "name", T("a\x7f"), BAD, "name", "0x7f" },
	{ "CreateGroup", "name", T("\xc3"), BAD, "name", "UTF-8" },
	{ "CreateGroup", "ranks", NONE, BAD, "ranks", "0 entries" },
	{ "CreateGroup", "ranks", LIST(0, 1, 0), BAD, "ranks", "3 entries" },
	{ "CreateGroup", "ranks", LIST(1, 1), BAD, "ranks", "1 twice" },
	{ "CreateGroup", "ranks", LIST(2), BAD, "ranks", "(0..1)" },
	{ "CreateGroup", "ranks", LIST(MINUS), BAD, "ranks", "4294967295" },
	{ "CreateGroup", "name", T("world"), STATE, "", "other ranks" },
};

static const struct wrong units[] = {
	{ "RegisterUnits", "units", NONE, BAD, "units", "0 entries" },
	{ "RegisterUnits", "units.name", T(""), BAD, "units[0].name", "empty" },
	{ "RegisterUnits", "units.name", LONG(256), BAD, "units[0].name", "256 bytes" },
	{ "RegisterUnits", "units.name", LONG(65536), BAD, "units[0].name", "65536 bytes" },
	{ "RegisterUnits", "units.name", T("a\tb"), BAD, "units[0].name", "0x09" },
	{ "RegisterUnits", "units.name", T("\xe2\x82"), BAD, "units[0].name", "UTF-8" },
	{ "RegisterUnits", "units.name", T("new1"), BAD, "units.name", "'new1' is listed twice" },
	{ "RegisterUnits", "units.tensors", NONE, BAD, "units.tensors", "0 tensors" },
	{ "RegisterUnits", "units.tensors.name", T(""), BAD, "units.tensors.name", "empty" },
	{ "RegisterUnits", "units.tensors.name", LONG(65536), BAD, "units.tensors.name", "65536" },
	{ "RegisterUnits", "units.tensors.name", T("\x01"), BAD, "units.tensors.name", "0x01" },
	{ "RegisterUnits", "units.tensors.name", T("\xed\xa0\x80"), BAD, "units.tensors.name", "UTF-8" },
	{ "RegisterUnits", "units.tensors.name", T("b"), BAD, "units.tensors.name", "'b' is listed twice" },
	{ "RegisterUnits", "units.tensors.shape", LIST(4, 0), BAD, "units.tensors.shape", "dimension of 0" },
	{ "RegisterUnits", "units.tensors.shape", LIST(MINUS), BAD, "units.tensors.shape", "2^48" },
	{ "RegisterUnits", "units.tensors.shape", LIST(1ull << 32, 1ull << 32), BAD, "units.tensors.shape", "2^48" },
	{ "RegisterUnits", "units.tensors.shape", LIST(1ull << 63, 2), BAD, "units.tensors.shape", "2^48" },
	{ "RegisterUnits", "units.tensors.shape", LIST((1ull << 48) + 1), BAD, "units.tensors.shape", "2^48" },
	{ "RegisterUnits", "units.tensors.shape", LIST(1ull << 48), BAD, "units.tensors", "2^48" },
	{ "RegisterUnits", "units.tensors.shape", LIST(1ull << 40), FULL, "", "job 'bad' holds" },
	{ "RegisterUnits", "units.tensors.shape",
	  LIST(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), BAD, "units.tensors.shape", "17 dimensions" },
	{ "RegisterUnits", "units.tensors.init.kind", N(4), BAD, "units.tensors.init.kind", "NORMAL" },
	{ "RegisterUnits", "units.tensors.init.kind", N(MINUS), BAD, "units.tensors.init.kind", "-1" },
	{ "RegisterUnits", "units.tensors.init.a", R(NAN), BAD, "units.tensors.init.a", "nan" },
	{ "RegisterUnits", "units.tensors.init.b", R(INFINITY), BAD, "units.tensors.init.b", "inf" },
	{ "RegisterUnits", "units.group", N(1), BAD, "units.group", "group 1 is out of range (0..0)" },
	{ "RegisterUnits", "units.group", N(MINUS), BAD, "units.group", "4294967295" },
	{ "RegisterUnits", "units.storage_dtype", N(4), BAD, "units.storage_dtype", "must be FP32" },
	{ "RegisterUnits", "units.compute_dtype", N(4), BAD, "units.compute_dtype", "FP32, BF16 or FP16" },
	{ "RegisterUnits", "units.compute_dtype", N(MINUS), BAD, "units.compute_dtype", "-1" },
	{ "RegisterUnits", "units.gradient_dtype", N(9), BAD, "units.gradient_dtype", "9" },
	{ "RegisterUnits", "units.shard_multiple", N(MINUS), BAD, "units.shard_multiple", "4294967295" },
	{ "RegisterUnits", "units.shard_multiple", N((1u << 20) + 1), BAD, "units.shard_multiple", "1048577" },
	{ "RegisterUnits", "units.pre_divide", R(NAN), BAD, "units.pre_divide", "nan" },
	{ "RegisterUnits", "units.pre_divide", R(-1), BAD, "units.pre_divide", "-1" },
	{ "RegisterUnits", "units.pre_divide", R(0.5), BAD, "units.pre_divide", "1 or more" },
	{ "RegisterUnits", "units.divide_factor", R(2), BAD, "units.divide_factor", "only FSDP2 has it" },
	{ "RegisterUnits", "units.post_divide", R(INFINITY), BAD, "units.post_divide", "inf" },
	{ "RegisterUnits", "units.optimizer.kind", N(4), BAD, "units.optimizer.kind", "SGD, ADAMW or ADAM" },
	{ "RegisterUnits", "units.optimizer.kind", N(MINUS), BAD, "units.optimizer.kind", "-1" },
	{ "RegisterUnits", "units.optimizer.profile", N(5), BAD, "units.optimizer.profile", "FOREACH" },
	{ "RegisterUnits", "units.optimizer.when", N(4), BAD, "units.optimizer.when", "IN_BACKWARD" },
	{ "RegisterUnits", "units.tensors.alias_of", T("no"), BAD, "units.tensors.alias_of",
	  "no such tensor" },
	{ "RegisterUnits", "units.tensors.alias_of", T("a"), BAD, "units.tensors.alias_of", "cycle" },
	{ "RegisterUnits", "units.tensors.alias_unit", T("u"), BAD, "units.tensors.alias_of", "empty" },
	{ "RegisterUnits", "units.layout", N(3), BAD, "units.layout", "DIM0" },
	{ "RegisterUnits", "units.strategy", N(4), BAD, "units.strategy", "HYBRID" },
	{ "RegisterUnits", "units.shard_ranks", N(3), BAD, "units.shard_ranks", "HYBRID" },
	{ "RegisterUnits", "units.div_mode", N(3), BAD, "units.div_mode", "DivMode" },
	{ "RegisterUnits", "units.reduce_profile", N(8), BAD, "units.reduce_profile", "ReduceProfile" },
	{ "RegisterUnits", "units.reduce_dtype", N(4), BAD, "units.reduce_dtype", "BF16" },
	{ "RegisterUnits", "units.reshard", N(5), BAD, "units.reshard", "NEVER" },
	{ "RegisterUnits", "units.divide_factor", R(-1), BAD, "units.divide_factor", "-1" },
	{ "RegisterUnits", "units.optimizer.lr", R(NAN), BAD, "units.optimizer.lr", "nan" },
	{ "RegisterUnits", "units.optimizer.lr", R(-0.1), BAD, "units.optimizer.lr", "-0.1" },
	{ "RegisterUnits", "units.optimizer.weight_decay", R(INFINITY), BAD, "units.optimizer.weight_decay", "inf" },
	{ "RegisterUnits", "units.optimizer.beta1", R(1), BAD, "units.optimizer.beta1", "1 is out of range (0..0.9999999)" },
	{ "RegisterUnits", "units.optimizer.beta2", R(NAN), BAD, "units.optimizer.beta2", "nan" },
	{ "RegisterUnits", "units.optimizer.eps", R(-1e-8), BAD, "units.optimizer.eps", "-1e-08" },
};

/* Of these nothing reaches the other ranks: the op takes its turn and gets no number. */
static const struct wrong ops[] = {
	{ "Initialise", "unit", N(0), ABSENT, "unit", "no unit 0" },
	{ "Initialise", "unit", N(2), ABSENT, "unit", "no unit 2" },
	{ "Initialise", "unit", N(MINUS), ABSENT, "unit", "no unit 4294967295" },
	{ "Initialise", "broadcast", NONE, BAD, "how", "missing" },
	{ "Initialise", "broadcast.root", N(2), BAD, "broadcast.root", "root is 2" },
	{ "Initialise", "broadcast.root", N(MINUS), BAD, "broadcast.root", "4294967295" },
	{ "Initialise", "broadcast.root", N(1), BAD, "buffer", "must be 0" },
	{ "Initialise", "data", B(32), BAD, "data", "both given" },
	{ "Initialise", "buffer", N(0), BAD, "data", "0 bytes; unit 'u' needs 32" },
	{ "Gather", "unit", N(0), ABSENT, "unit", "no unit 0" },
	{ "Gather", "unit", N(MINUS), ABSENT, "unit", "no unit 4294967295" },
	{ "Gather", "unit", N(1), STATE, "", "not initialised" },
	{ "Release", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "GradientBuffer", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "Reduce", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "Reduce", "unused_tensors", LIST(9), BAD, "unused_tensors", "tensor 9 of unit 'u' is out of range" },
	{ "Reduce", "unused_tensors", LIST(MINUS), BAD, "unused_tensors", "tensor 4294967295 of unit" },
	{ "Reduce", "unused_tensors", LIST(0, 0), BAD, "unused_tensors", "its numbers must ascend" },
	{ "Accumulate", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "AllocBuffer", "bytes", N(0), BAD, "bytes", "bytes is 0" },
	{ "AllocBuffer", "bytes", N(MINUS), BAD, "bytes", "18446744073709551615" },
	{ "AllocBuffer", "bytes", N((1ull << 50) + 1), BAD, "bytes", "2^50" },
	{ "AllocBuffer", "bytes", N(1ull << 50), FULL, "", "job 'bad' holds" },
	{ "FreeBuffer", "buffer", N(0), ABSENT, "buffer", "no buffer 0" },
	{ "FreeBuffer", "buffer", N(MINUS), ABSENT, "buffer", "no buffer 18446744073709551615" },
	{ "AllReduce", "group", N(1), ABSENT, "group", "no group 1" },
	{ "AllReduce", "group", N(MINUS), ABSENT, "group", "no group 4294967295" },
	{ "AllReduce", "offset", N(2), BAD, "offset", "multiple of 4" },
	{ "AllReduce", "count", N(0), BAD, "count", "count is 0" },
	{ "AllReduce", "count", N(MINUS), BAD, "count", "18446744073709551615" },
	{ "AllReduce", "dtype", N(0), BAD, "dtype", "FP32, BF16 or FP16" },
	{ "AllReduce", "dtype", N(4), BAD, "dtype", "dtype is 4" },
	{ "AllReduce", "dtype", N(MINUS), BAD, "dtype", "dtype is -1" },
	{ "AllReduce", "op", N(0), BAD, "op", "SUM, AVG, MAX or MIN" },
	{ "AllReduce", "op", N(5), BAD, "op", "op is 5" },
	{ "AllReduce", "op", N(MINUS), BAD, "op", "op is -1" },
	{ "Broadcast", "group", N(9), ABSENT, "group", "no group 9" },
	{ "Broadcast", "bytes", N(0), BAD, "bytes", "bytes is 0" },
	{ "Broadcast", "root", N(2), BAD, "root", "a rank of group 'world'" },
	{ "Broadcast", "root", N(MINUS), BAD, "root", "4294967295" },
	{ "Barrier", "group", N(1), ABSENT, "group", "its groups are 0 to 0" },
	{ "ClipGradNorm", "group", N(1), ABSENT, "group", "no group 1" },
	{ "ClipGradNorm", "max_norm", R(0), BAD, "max_norm", "positive" },
	{ "ClipGradNorm", "max_norm", R(-1), BAD, "max_norm", "-1" },
	{ "ClipGradNorm", "max_norm", R(NAN), BAD, "max_norm", "nan" },
	{ "ClipGradNorm", "max_norm", R(INFINITY), BAD, "max_norm", "inf" },
	{ "ClipGradNorm", "norm_type", R(-2), BAD, "norm_type", "above 0" },
	{ "ClipGradNorm", "norm_type", R(NAN), BAD, "norm_type", "nan" },
	{ "ClipGradNorm", "norm_type", R(-INFINITY), BAD, "norm_type", "-inf" },
	{ "ClipGradNorm", "profile", N(4), BAD, "profile", "FAIRSCALE, XLA or TORCH" },
	{ "ClipGradNorm", "profile", N(MINUS), BAD, "profile", "FAIRSCALE, XLA or TORCH" },
	{ "Step", "group", N(1), ABSENT, "group", "no group 1" },
	{ "Step", "settings.lr", R(-1), BAD, "settings.lr", "settings.lr is -1" },
	{ "Step", "settings.lr", R(NAN), BAD, "settings.lr", "nan" },
	{ "Step", "settings.weight_decay", R(2e6), BAD, "settings.weight_decay", "0 to 1000000" },
	{ "Step", "settings.momentum", R(1.5), BAD, "settings.momentum", "1.5; it must be 0 to 1" },
	{ "Step", "settings.dampening", R(INFINITY), BAD, "settings.dampening", "inf" },
	{ "Step", "settings.nesterov", N(1), BAD, "settings.nesterov", "momentum above 0" },
	{ "Step", "settings.beta1", R(1), BAD, "settings.beta1", "is 1" },
	{ "Step", "settings.beta2", R(-0.1), BAD, "settings.beta2", "-0.1" },
	{ "Step", "settings.eps", R(NAN), BAD, "settings.eps", "nan" },
	{ "Step", "settings.units", LIST(1, 1), BAD, "settings.tensors", "0 entries and settings.units 2" },
	{ "Step", "settings.tensors", LIST(MINUS), BAD, "settings.tensors", "1 entries" },
	{ "UnitBuffers", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "UnitBuffers", "unit", N(1), BAD, "unit", "has no buffers" },
	{ "BroadcastBuffers", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "BroadcastBuffers", "group", N(9), ABSENT, "group", "no group 9" },
	{ "BroadcastBuffers", "root", N(2), BAD, "root", "a rank of group 'world'" },
	{ "BroadcastBuffers", "root", N(MINUS), BAD, "root", "4294967295" },
	{ "SummonFull", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "SummonFull", "state", N(1), BAD, "state", "it must be 0 to 0" },
	{ "SummonFull", "state", N(MINUS), BAD, "state", "state is 4294967295" },
	{ "ReturnFull", "unit", N(MINUS), ABSENT, "unit", "no unit 4294967295" },
	{ "ReturnFull", "optimizer_steps", N(1), BAD, "optimizer_steps", "without write" },
	{ "ConvertUnits", "units", LIST(7), ABSENT, "units", "no unit 7" },
	{ "ConvertUnits", "units", LIST(1, 1), BAD, "units", "must ascend" },
	{ "ConvertUnits", "layout", N(3), BAD, "layout", "FLAT or DIM0" },
	{ "ConvertUnits", "layout", N(MINUS), BAD, "layout", "layout is -1" },
	{ "ConvertUnits", "strategy", N(4), BAD, "strategy", "SHARD, REPLICATE or HYBRID" },
	{ "ConvertUnits", "shard_multiple", N((1u << 20) + 1), BAD, "shard_multiple", "1048577" },
	{ "ConvertUnits", "unfreeze", LIST(1), BAD, "unfreeze", "out of range (0..0)" },
	{ "ConvertUnits", "unfreeze", LIST(MINUS), BAD, "unfreeze", "tensor 4294967295" },
	{ "ConvertUnits", "optimizer_like", N(1), BAD, "optimizer_like", "unfreeze is empty" },
	{ "DropUnits", "units", LIST(7), ABSENT, "units", "no unit 7" },
	{ "DropUnits", "units", LIST(1, 1), BAD, "units", "must ascend" },
	{ "ClipGradValue", "group", N(1), ABSENT, "group", "no group 1" },
	{ "ClipGradValue", "value", R(-1), BAD, "value", "value is -1" },
	{ "ClipGradValue", "value", R(NAN), BAD, "value", "nan" },
	{ "Unscale", "group", N(1), ABSENT, "group", "no group 1" },
	{ "Unscale", "inv_scale", R(0), BAD, "inv_scale", "positive" },
	{ "Unscale", "inv_scale", R(INFINITY), BAD, "inv_scale", "inf" },
	{ "PlanBackward", "group", N(1), ABSENT, "group", "no group 1" },
	{ "PlanBackward", "inv_scale", R(-1), BAD, "inv_scale", "inv_scale is -1" },
	{ "PlanBackward", "inv_scale", R(NAN), BAD, "inv_scale", "nan" },
	{ "PlanBackward", "settings.eps", R(-1), BAD, "settings.eps", "settings.eps is -1" },
	{ "PlanBackward", "settings.tensors", LIST(0), BAD, "settings.tensors", "as many" },
	{ "NextShard", "group", N(1), ABSENT, "group", "no group 1" },
	{ "ShardDone", "unit", N(9), ABSENT, "unit", "no unit 9" },
	{ "Commit", "blob", B(65537), BAD, "blob", "65537 bytes; the maximum is 65536" },
	{ "BeginPass", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "BeginPass", "pass", N(0), BAD, "pass", "pass is 0; it must be FORWARD or BACKWARD" },
	{ "BeginPass", "pass", N(3), BAD, "pass", "pass is 3" },
	{ "BeginPass", "pass", N(MINUS), BAD, "pass", "pass is -1" },
	{ "BeginPass", "unit", N(1), STATE, "", "unit 'u' is not guarded" },
	{ "EndPass", "unit", N(0), ABSENT, "unit", "no unit 0" },
	{ "EndPass", "pass", N(MINUS), BAD, "pass", "pass is -1" },
	{ "EndPass", "unit", N(1), STATE, "", "unit 'u' is not guarded" },
	{ "SetReshard", "units", NONE, BAD, "units", "units has 0 entries" },
	{ "SetReshard", "units", LIST(1, 1), BAD, "units", "units has 2 entries" },
	{ "SetReshard", "units", LIST(MINUS), ABSENT, "units", "no unit 4294967295" },
	{ "SetReshard", "units", LIST(1), BAD, "units", "unit 'u' is not guarded" },
	{ "SetReshard", "reshard", N(5), BAD, "reshard", "NEVER or AFTER_FORWARD_ONLY" },
	{ "SetReshard", "reshard", N(MINUS), BAD, "reshard", "reshard is -1" },
	{ "CopyShard", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "CopyShard", "tensor", N(9), BAD, "tensor", "tensor 9 of unit 'u' is out of range" },
	{ "CopyShard", "array", N(0), BAD, "array", "array is 0; it must be PARAMETERS or" },
	{ "CopyShard", "array", N(MINUS), BAD, "array", "array is -1" },
	{ "DropGradients", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "DropGradients", "tensors", NONE, BAD, "tensors", "name at least one" },
	{ "DropGradients", "tensors", LIST(MINUS), BAD, "tensors", "4294967295" },
	{ "SetFactors", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "SetFactors", "pre_divide", R(-1), BAD, "pre_divide", "pre_divide is -1" },
	{ "SetFactors", "pre_divide", R(0.5), BAD, "pre_divide", "must be 1 or more" },
	{ "SetFactors", "post_divide", R(NAN), BAD, "post_divide", "nan" },
	{ "SetFactors", "divide_factor", R(INFINITY), BAD, "divide_factor", "inf" },
	{ "SetFactors", "divide_factor", R(2), BAD, "divide_factor", "only FSDP2 has it" },
	{ "SetFactors", "force_sum", N(1), BAD, "force_sum", "only FSDP2 has it" },
	{ "SetPrefetch", "unit", N(7), ABSENT, "unit", "no unit 7" },
	{ "SetPrefetch", "unit", N(1), BAD, "unit", "unit 'u' is not guarded" },
	{ "SetPrefetch", "pass", N(0), BAD, "pass", "FORWARD or BACKWARD" },
	{ "SetPrefetch", "pass", N(MINUS), BAD, "pass", "pass is -1" },
	{ "Commit", "header.epoch", N(77), SHARDD_ABORTED, "", "header.epoch is 77" },
	{ "Gather", "header.epoch", N(MINUS), SHARDD_ABORTED, "", "18446744073709551615" },
	{ "Status/GetStatus", "job", T("nobody"), ABSENT, "", "no job 'nobody'" },
	{ "Status/GetStatus", "job", LONG(65536), BAD, "job", "65536 bytes" },
	{ "Status/GetStatus", "job", T("a\x1f"), BAD, "job", "0x1f" },
	{ "Status/GetStatus", "job", T("\xff"), BAD, "job", "0xff at 0" },
	{ "Status/Ops", "job", T("nobody"), ABSENT, "", "no job 'nobody'" },
	{ "Status/Ops", "job", LONG(65536), BAD, "job", "65536 bytes" },
};

/* Of a world of one rank, so that what is compared is reached, too. Units: 1 'u', sharded and
 * not initialised; 2 'new0', whose ddp is 1; 3 'new1', that adds in bf16; 4 'still', frozen. */
static const struct wrong buckets[] = {
	{ "VerifyModel", "group", N(1), ABSENT, "group", "no group 1" },
	{ "VerifyModel", "group", N(MINUS), ABSENT, "group", "no group 4294967295" },
	{ "JoinUneven", "group", N(1), ABSENT, "group", "no group 1" },
	{ "JoinUneven", "group", N(MINUS), ABSENT, "group", "no group 4294967295" },
	{ "DdpCreate", "group", N(1), ABSENT, "group", "no group 1" },
	{ "DdpCreate", "group", N(MINUS), ABSENT, "group", "no group 4294967295" },
	{ "DdpCreate", "units", NONE, BAD, "units", "0 entries; it must have 1 to 4" },
	{ "DdpCreate", "units", LIST(2, 2, 2, 2, 2), BAD, "units", "5 entries" },
	{ "DdpCreate", "units", LIST(9), ABSENT, "units", "no unit 9" },
	{ "DdpCreate", "units", LIST(MINUS), ABSENT, "units", "no unit 4294967295" },
	{ "DdpCreate", "units", LIST(1), BAD, "units", "needs strategy REPLICATE" },
	{ "DdpCreate", "units", LIST(3), BAD, "units", "DDP, DDP_HOOK or DDP_BUCKET_VIEW" },
	{ "DdpCreate", "units", LIST(2, 2), BAD, "units", "'new0' is listed twice" },
	{ "DdpCreate", "units", LIST(4), BAD, "units", "no tensor with a gradient" },
	{ "DdpCreate", "sparse.unit", N(0), BAD, "sparse", "tensor 0 of unit 0" },
	{ "DdpCreate", "sparse.unit", N(MINUS), BAD, "sparse", "unit 4294967295" },
	{ "DdpCreate", "sparse.unit", N(4), BAD, "sparse", "unit 'still': tensor 0 has no rows" },
	{ "DdpCreate", "sparse.tensor", N(2), BAD, "sparse", "tensor 2 of unit 2" },
	{ "DdpCreate", "sparse.tensor", N(MINUS), BAD, "sparse", "tensor 4294967295" },
	{ "DdpCreate", "bucket_limits", LIST(5, 0), BAD, "bucket_limits", "[1] is 0" },
	{ "DdpForward", "ddp", N(0), ABSENT, "ddp", "no ddp 0" },
	{ "DdpForward", "ddp", N(2), ABSENT, "ddp", "no ddp 2" },
	{ "DdpForward", "ddp", N(MINUS), ABSENT, "ddp", "no ddp 4294967295" },
	{ "DdpBackward", "ddp", N(2), ABSENT, "ddp", "no ddp 2" },
	{ "DdpBackward", "ddp", N(1), STATE, "", "DdpForward" },
	{ "DdpBackward", "unused", LIST(1), BAD, "unused", "without find_unused" },
	{ "DdpBackward", "unused", LIST(2), BAD, "unused", "tensor 2 of ddp 1, which is out of range (0..1)" },
	{ "DdpBackward", "unused", LIST(1, MINUS), BAD, "unused", "tensor 4294967295" },
	{ "DdpBackward", "unused_kept", LIST(2), BAD, "unused_kept", "tensor 2 of ddp 1" },
	{ "DdpReady", "ddp", N(MINUS), ABSENT, "ddp", "no ddp 4294967295" },
	{ "DdpReady", "tensors", LIST(2), BAD, "tensors", "tensor 2 of ddp 1, which is out of range (0..1)" },
	{ "DdpReady", "tensors", LIST(MINUS), BAD, "tensors", "tensor 4294967295" },
	{ "DdpReady", "tensors", NONE, BAD, "rows", "give rows with exactly one tensor" },
	{ "DdpReady", "tensors", LIST(0, 0), BAD, "rows", "name it alone" },
	{ "DdpReady", "tensors", LIST(1), BAD, "rows", "'new0.b' has no sparse gradient" },
	{ "DdpReady", "rows", NONE, BAD, "rows", "'new0.a' has a sparse gradient" },
	{ "DdpReady", "rows.rows", LIST(0, 4), BAD, "rows.rows", "row 1 is 4" },
	{ "DdpReady", "rows.rows", LIST(MINUS), BAD, "rows.rows", "row 0 is -1" },
	{ "DdpFinish", "ddp", N(7), ABSENT, "ddp", "no ddp 7" },
	{ "DdpFinish", "untouched_room", N(1), BAD, "untouched_room", "room to mark 1 tensors, but ddp 1 has 2" },
	{ "DdpFinish", "ddp", N(1), STATE, "", "DdpFinish" },
	{ "ReduceSparse", "unit", N(0), ABSENT, "unit", "no unit 0" },
	{ "ReduceSparse", "unit", N(MINUS), ABSENT, "unit", "no unit 4294967295" },
	{ "ReduceSparse", "unit", N(1), STATE, "", "not initialised" },
	{ "ReduceSparse", "unit", N(4), BAD, "tensor", "'still': tensor 0 has no rows" },
	{ "ReduceSparse", "tensor", N(2), BAD, "tensor", "tensor 2 has no rows" },
	{ "ReduceSparse", "tensor", N(MINUS), BAD, "tensor", "tensor 4294967295" },
	{ "ReduceSparse", "rows.rows", LIST(0, 4), BAD, "rows.rows", "row 1 is 4" },
	{ "ReduceSparse", "rows.rows", LIST(1ull << 63), BAD, "rows.rows", "row 0 is -9223372036854775808" },
	{ "ReduceSparse", "rows.buffer", N(0), ABSENT, "buffer", "no buffer 0" },
	{ "ReduceSparse", "rows.buffer", N(MINUS), ABSENT, "buffer", "no buffer 18446744073709551615" },
	{ "ReduceSparse", "rows.values_offset", N(2), BAD, "rows.values_offset", "multiple of 4" },
	{ "ReduceSparse", "rows.values_offset", N(52), BAD, "offset", "52 and 16 bytes do not fit" },
	{ "ReduceSparse", "rows.values_offset", N(MINUS - 3), BAD, "offset", "do not fit" },
};
/* clang-format on */

/* All of them, so that a run tells of every one that is not as it should be. */
static unsigned run_table(struct rpc_client *c, const struct wrong *rows, size_t n)
{
	unsigned failed = 0;

	for (size_t i = 0; i < n; i++)
		failed += !check_wrong(c, &rows[i]);
	return failed;
}

/* Both ranks of job "bad" are sessions of this process. */
static int try_tables(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bad", 0, 2, false);
	struct rpc_client *peer = raw_trainer(t->socket, "bad", 1, 2, false);
	unsigned failed = 0;
	uint64_t buffer;

	TRAINER_CHECK(raw_register(c, "u", 8) == 1);
	buffer = raw_alloc(c, 64);
	good.buffer = buffer;
	failed += run_table(c, session_and_jobs, ARRAY_SIZE(session_and_jobs));
	failed += run_table(c, units, ARRAY_SIZE(units));
	failed += run_table(c, ops, ARRAY_SIZE(ops));
	rpc_client_close(peer);
	rpc_client_close(c);
	return failed > 0;
}

Test(bad_input, every_field_is_checked_and_nothing_is_half_made)
{
	witness_trainer(NULL, "bad", try_tables, 200);
}

/* Units 2 to 4 of the table, and its ddp. */
static void make_ddp(struct rpc_client *c)
{
	_Alignas(16) char room[REQUEST_ROOM];
	Shardd__V1__RegisterUnitsRequest *r =
		(Shardd__V1__RegisterUnitsRequest *)request_good("RegisterUnits", room);

	for (unsigned i = 0; i < 2; i++)
		good.unit[i].strategy = SHARDD__V1__STRATEGY__STRATEGY_REPLICATE;
	good.unit[0].reduce_profile = SHARDD__V1__REDUCE_PROFILE__REDUCE_PROFILE_DDP;
	good.unit[1].reduce_profile = SHARDD__V1__REDUCE_PROFILE__REDUCE_PROFILE_FSDP2;
	good.unit[1].reduce_dtype = SHARDD__V1__DTYPE__DTYPE_BF16;
	raw_done(c, "RegisterUnits", &r->base);
	good.unit[0].name = (char *)"still";
	good.tensor[0].frozen = good.tensor[1].frozen = true;
	r->n_units = 1;
	raw_done(c, "RegisterUnits", &r->base);
	for (uint32_t unit = 2; unit <= 4; unit++)
		raw_init(&c, 1, unit);
	raw_done(c, "DdpCreate", request_good("DdpCreate", room));
}

static int try_buckets(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bad", 0, 1, false);
	unsigned failed;

	TRAINER_CHECK(raw_register(c, "u", 8) == 1);
	good.buffer = raw_alloc(c, 64);
	make_ddp(c);
	failed = run_table(c, buckets, ARRAY_SIZE(buckets));
	rpc_client_close(c);
	return failed > 0;
}

Test(bad_input, what_buckets_and_rows_are_asked_for)
{
	witness_trainer(NULL, "bad", try_buckets, 100);
}

/* ------------------------------------------------------------ sums that overflow */

/* Each unit is allowed; all together have 2^64 bytes and more. (The sum wrapped round to
 * 0 and ended the daemon.) */
static int try_sum(const struct trainer *t)
{
	enum { UNITS = 16384 };
	struct rpc_client *c = raw_trainer(t->socket, "bad", 0, 1, false);
	Shardd__V1__RegisterUnitsRequest r = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	static Shardd__V1__UnitSpec spec[UNITS], *specs[UNITS];
	static char names[UNITS][12];
	uint64_t shape[1] = { 1ull << 48 };
	_cleanup_(freep) char *before = raw_state(c);
	_cleanup_(freep) char *after = NULL;

	request_reset();
	good.tensor[0].shape = shape;
	good.tensor[0].n_shape = 1;
	good.unit[0].n_tensors = 1;
	for (unsigned i = 0; i < UNITS; i++) {
		spec[i] = good.unit[0];
		snprintf(names[i], sizeof(names[i]), "n%u", i);
		spec[i].name = names[i];
		specs[i] = &spec[i];
	}
	r.units = specs;
	for (r.n_units = UNITS; r.n_units >= UNITS / 4; r.n_units /= 2)
		raw_refused(c, "RegisterUnits", &r.base, FULL, NULL, "cannot allocate");
	for (unsigned i = 0; i < UNITS; i++)
		spec[i].optimizer = NULL;
	r.n_units = UNITS;
	raw_refused(c, "RegisterUnits", &r.base, FULL, NULL, "cannot allocate");
	after = raw_state(c);
	TRAINER_CHECK(raw_same_state(before, after, "sums that overflow"));
	rpc_client_close(c);
	return 0;
}

Test(bad_input, a_sum_of_units_that_overflows)
{
	witness_trainer(NULL, "bad", try_sum, 60);
}
