/*
 * Requests that are well-formed but not allowed now: out of order, without membership,
 * beyond a limit, for memory that is not there. The answer says in which state things
 * are, and nothing is half-made.
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
#include "trainfix.h"
#include "witness.h"

TestSuite(bad_state, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

#define BAD    SHARDD_INVALID_ARGUMENT
#define ABSENT SHARDD_NOT_FOUND
#define STATE  SHARDD_FAILED_PRECONDITION
#define FULL   SHARDD_RESOURCE_EXHAUSTED

static uint8_t blob[65536];

/* --------------------------------------------------------- what needs a state */

static const char *const all_ops[] = {
	"Initialise",   "Gather",     "Release",      "GradientBuffer", "AllocBuffer",
	"FreeBuffer",   "Reduce",     "AllReduce",    "Broadcast",      "Barrier",
	"ClipGradNorm", "Step",       "Commit",       "UnitBuffers",    "BroadcastBuffers",
	"SummonFull",   "ReturnFull", "ConvertUnits", "DropUnits",      "BeginPass",
	"EndPass",      "SetReshard", "SetPrefetch",  "SetFactors",     "CopyShard",
	"DropGradients"
};

static void all_refused(struct rpc_client *c, int code, const char *words)
{
	for (size_t i = 0; i < ARRAY_SIZE(all_ops); i++)
		raw_refused(c, all_ops[i], request_plain(all_ops[i]), code, NULL, words);
	raw_refused(c, "CreateGroup", request_plain("CreateGroup"), code, NULL, words);
	raw_refused(c, "RegisterUnits", request_plain("RegisterUnits"), code, NULL, words);
}

static int try_before_and_after(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	_cleanup_(freep) char *before = raw_state(c);
	_cleanup_(freep) char *after = NULL;

	all_refused(c, STATE, "call Attach");
	raw_refused(c, "Join", request_plain("Join"), STATE, NULL, "call Attach");
	raw_refused(c, "Leave", request_plain("Leave"), STATE, NULL, "call Attach");
	after = raw_state(c);
	TRAINER_CHECK(raw_same_state(before, after, "ops before attach"));
	raw_attach(c);
	all_refused(c, STATE, "call Join");
	raw_refused(c, "Leave", request_plain("Leave"), STATE, NULL, "call Join");
	raw_join(c, "bad", 0, 1, true);
	raw_done(c, "Leave", request_plain("Leave"));
	all_refused(c, STATE, "join again");
	raw_refused(c, "Leave", request_plain("Leave"), STATE, NULL, "already left");
	rpc_client_close(c);
	return 0;
}

static void delete_job(struct rpc_client *c, const char *name, bool force)
{
	Shardd__V1__DeleteJobRequest r = SHARDD__V1__DELETE_JOB_REQUEST__INIT;

	r.job = (char *)name;
	r.force = force;
	raw_done(c, "DeleteJob", &r.base);
}

/* A session that has left a kept job joins it again: its buffers are new ones. */
static int try_rejoin_after_leave(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bad", 0, 1, true);

	raw_alloc(c, 100);
	raw_done(c, "Leave", request_plain("Leave"));
	raw_join(c, "bad", 0, 1, true);
	raw_alloc(c, 100);
	raw_done(c, "Leave", request_plain("Leave"));
	delete_job(c, "bad", false);
	rpc_client_close(c);
	return 0;
}

static int try_before_and_after_and_clean(const struct trainer *t)
{
	struct rpc_client *c;
	int r = try_before_and_after(t);

	c = raw_connect(t->socket);
	delete_job(c, "bad", true);
	rpc_client_close(c);
	return r;
}

Test(bad_state, ops_before_attach_before_join_and_after_leave)
{
	witness_trainer(NULL, "bad", try_before_and_after_and_clean, 60);
}

Test(bad_state, rejoining_a_kept_job_after_leaving_it)
{
	witness_trainer(NULL, "bad", try_rejoin_after_leave, 60);
}

static int try_membership(const struct trainer *t)
{
	struct rpc_client *a = raw_trainer(t->socket, "bad", 0, 2, false);
	struct rpc_client *b = raw_connect(t->socket);
	Shardd__V1__JoinRequest r = SHARDD__V1__JOIN_REQUEST__INIT;
	_cleanup_(freep) char *before = NULL;
	_cleanup_(freep) char *after = NULL;

	raw_attach(b);
	before = raw_state(b);
	request_reset();
	r.job = &good.job;
	r.job->name = (char *)"bad";
	raw_refused(b, "Join", &r.base, STATE, NULL, "rank 0 of job 'bad' is taken by pid");
	r.rank = 1;
	r.job->world_size = 3;
	raw_refused(b, "Join", &r.base, STATE, NULL, "has world size 2, not 3");
	r.job->world_size = 2;
	r.job->lifetime = SHARDD__V1__LIFETIME__LIFETIME_KEEP;
	raw_refused(b, "Join", &r.base, STATE, NULL, "has lifetime EPHEMERAL, not KEEP");
	r.job->lifetime = SHARDD__V1__LIFETIME__LIFETIME_UNSPECIFIED;
	r.job->quota_bytes = 4096;
	raw_refused(b, "Join", &r.base, STATE, NULL, "quota");
	after = raw_state(b);
	TRAINER_CHECK(raw_same_state(before, after, "joins that were refused"));
	rpc_client_close(a);
	rpc_client_close(b);
	return 0;
}

Test(bad_state, joins_that_do_not_fit_the_job)
{
	witness_trainer(NULL, "bad", try_membership, 60);
}

/* ------------------------------------------------------------- order and epoch */

static struct rpc_pending *release_with_seq(struct rpc_client *c, uint64_t seq, uint32_t timeout_ms)
{
	ProtobufCMessage *m = request_of_unit("Release", 1);

	good.header.seq = seq;
	good.header.timeout_ms = timeout_ms;
	return raw_start(c, "Release", m);
}

static int try_seq(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bad", 0, 1, false);
	struct rpc_pending *early, *twice;
	struct shardd_error err;

	raw_register(c, "u", 8);
	TRAINER_CHECK(raw_finish(release_with_seq(c, 1, 0), NULL, &err) == 0);
	raw_finish_refused(release_with_seq(c, 1, 0), BAD, "header.seq",
			   "the next one of this session is 2");
	early = release_with_seq(c, 4, 0);
	TRAINER_CHECK(!rpc_pending_wait(early, 0));
	twice = release_with_seq(c, 4, 0);
	raw_finish_refused(twice, BAD, "header.seq", "came twice");
	TRAINER_CHECK(raw_finish(release_with_seq(c, 2, 0), NULL, &err) == 0);
	TRAINER_CHECK(!rpc_pending_wait(early, 0));
	TRAINER_CHECK(raw_finish(release_with_seq(c, 3, 0), NULL, &err) == 0);
	TRAINER_CHECK(raw_finish(early, NULL, &err) == 0);
	/* a gap that is never filled ends with the deadline, and says what is missing */
	raw_finish_refused(release_with_seq(c, 7, 100), SHARDD_DEADLINE_EXCEEDED, NULL, "seq 5");
	raw_finish_refused(release_with_seq(c, UINT64_MAX, 100), SHARDD_DEADLINE_EXCEEDED, NULL,
			   "seq 5");
	TRAINER_CHECK(raw_finish(release_with_seq(c, 5, 0), NULL, &err) == 0);
	rpc_client_close(c);
	return 0;
}

Test(bad_state, numbers_twice_old_and_with_a_gap)
{
	witness_trainer(NULL, "bad", try_seq, 60);
}

/* --------------------------------------------------- refusals of collective ops */

/* Rank 0 is refused with the words given, and its peer hears of it. */
static void refused_for_both(struct rpc_client **w, const char *method,
			     const ProtobufCMessage *of_0, const ProtobufCMessage *of_1, int code,
			     const char *field, const char *words)
{
	struct rpc_pending *peer = raw_start(w[1], method, of_1);

	raw_refused(w[0], method, of_0, code, field, words);
	raw_finish_refused(peer, STATE, NULL, "rank 0 (pid ");
}

/* @w: the world. */
static void buffers_that_do_not_fit(struct rpc_client **w)
{
	Shardd__V1__AllReduceRequest a = SHARDD__V1__ALL_REDUCE_REQUEST__INIT, of_peer;
	uint64_t own = raw_alloc(w[0], 64);

	a.buffer = raw_alloc(w[1], 64);
	a.count = 16;
	a.dtype = SHARDD__V1__DTYPE__DTYPE_FP32;
	a.op = SHARDD__V1__REDUCE_OP__REDUCE_OP_SUM;
	of_peer = a;
	a.buffer = 99;
	refused_for_both(w, "AllReduce", &a.base, &of_peer.base, ABSENT, "buffer", "no buffer 99");
	a.buffer = own;
	a.count = 17;
	refused_for_both(w, "AllReduce", &a.base, &of_peer.base, BAD, "offset",
			 "68 bytes do not fit");
	a.count = 1;
	a.offset = UINT64_MAX - 3;
	refused_for_both(w, "AllReduce", &a.base, &of_peer.base, BAD, "offset", "do not fit");
}

static void bytes_that_do_not_fit(struct rpc_client **w)
{
	Shardd__V1__BroadcastRequest b = SHARDD__V1__BROADCAST_REQUEST__INIT, of_peer;
	uint64_t own = raw_alloc(w[0], 64);

	b.buffer = raw_alloc(w[1], 64);
	b.bytes = 64;
	of_peer = b;
	b.buffer = own;
	b.bytes = 65;
	refused_for_both(w, "Broadcast", &b.base, &of_peer.base, BAD, "offset",
			 "65 bytes do not fit");
	b.bytes = UINT64_MAX;
	b.offset = 8;
	refused_for_both(w, "Broadcast", &b.base, &of_peer.base, BAD, "offset", "do not fit");
}

static void parameters_that_do_not_fit(struct rpc_client **w, uint32_t unit)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Own own = SHARDD__V1__OWN__INIT;

	r.unit = unit;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
	r.own = &own;
	r.buffer = 1;
	for (unsigned i = 0; i < 2; i++)
		raw_refused(w[i], "Initialise", &r.base, BAD, "offset",
			    "400 bytes do not fit buffer");
}

static void reduce_without_gradient(struct rpc_client **w, uint32_t unit)
{
	Shardd__V1__ReduceRequest r = SHARDD__V1__REDUCE_REQUEST__INIT;
	struct shardd_error err;
	struct rpc_pending *p;

	r.unit = unit;
	for (unsigned i = 0; i < 2; i++)
		raw_refused(w[i], "Reduce", &r.base, STATE, NULL, "not initialised");
	raw_init(w, 2, unit);
	raw_done(w[1], "GradientBuffer", request_of_unit("GradientBuffer", unit));
	refused_for_both(w, "Reduce", &r.base, &r.base, STATE, NULL,
			 "this rank has not asked for its gradient buffer");
	/* nothing was taken from the peer: the same again, with both buffers, works */
	raw_done(w[0], "GradientBuffer", request_of_unit("GradientBuffer", unit));
	p = raw_start(w[1], "Reduce", &r.base);
	TRAINER_CHECK(raw_call(w[0], "Reduce", &r.base, NULL, &err) == 0);
	TRAINER_CHECK(raw_finish(p, NULL, &err) == 0);
}

/* Both are told, with both ranks and what they asked for. */
static void ops_that_differ(struct rpc_client **w)
{
	Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;
	struct rpc_pending *p;

	r.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
	r.lr = -1;
	raw_refused(w[0], "Step", &r.base, BAD, "lr", "lr is -1");
	r.lr = NAN;
	raw_refused(w[0], "Step", &r.base, BAD, "lr", "nan");
	r.lr = 0.5;
	p = raw_start(w[0], "Step", &r.base);
	raw_refused(w[1], "Barrier", request_plain("Barrier"), STATE, NULL, "for Step with lr 0.5");
	raw_finish_refused(p, STATE, NULL, "for Step with lr 0.5");
}

static int try_collectives(const struct trainer *t)
{
	struct rpc_client *w[2] = { raw_trainer(t->socket, "bad", 0, 2, false),
				    raw_trainer(t->socket, "bad", 1, 2, false) };
	uint32_t unit = raw_register(w[0], "u", 100);

	buffers_that_do_not_fit(w);
	bytes_that_do_not_fit(w);
	parameters_that_do_not_fit(w, unit);
	reduce_without_gradient(w, unit);
	ops_that_differ(w);
	rpc_client_close(w[0]);
	rpc_client_close(w[1]);
	return 0;
}

Test(bad_state, a_refused_collective_is_told_to_its_peers)
{
	witness_trainer(NULL, "bad", try_collectives, 60);
}

/* -------------------------------------------------------------- what is too much */

static const char *const small_limits[] = { "--set", "max_jobs=2",
					    "--set", "max_units_per_job=10",
					    "--set", "max_world_size=4",
					    "--set", "max_inflight_ops=8",
					    "--set", "max_message_bytes=1MiB",
					    NULL };

static void fill_jobs(struct rpc_client *c)
{
	Shardd__V1__CreateJobRequest r = SHARDD__V1__CREATE_JOB_REQUEST__INIT;

	request_reset();
	r.job = &good.job;
	r.job->world_size = 5;
	raw_refused(c, "CreateJob", &r.base, BAD, "job.world_size", "(1..4, max_world_size)");
	r.job->world_size = 4;
	raw_done(c, "CreateJob", &r.base);
	r.job->name = (char *)"third";
	raw_refused(c, "CreateJob", &r.base, FULL, NULL,
		    "2 jobs, 2 of them yours, which is the limit (max_jobs)");
	delete_job(c, "other", false);
}

static void fill_units(struct rpc_client *c)
{
	Shardd__V1__RegisterUnitsRequest r = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	Shardd__V1__UnitSpec spec[11], *specs[11];
	char names[11][8];

	request_reset();
	for (unsigned i = 0; i < 11; i++) {
		spec[i] = good.unit[0];
		snprintf(names[i], sizeof(names[i]), "n%u", i);
		spec[i].name = names[i];
		specs[i] = &spec[i];
	}
	r.units = specs;
	r.n_units = 11;
	raw_refused(c, "RegisterUnits", &r.base, BAD, "units", "11 entries; it must have 1 to 10");
	r.n_units = 6;
	raw_done(c, "RegisterUnits", &r.base);
	r.units = specs + 5;
	raw_refused(c, "RegisterUnits", &r.base, FULL, NULL,
		    "would have 11 units; the limit is 10 (max_units_per_job)");
	r.n_units = 5;
	raw_done(c, "RegisterUnits", &r.base);
}

static void fill_inflight(struct rpc_client *c)
{
	struct rpc_pending *held[8];
	struct shardd_error err;

	for (unsigned i = 0; i < 8; i++)
		held[i] = release_with_seq(c, 100 + i, 300);
	raw_finish_refused(release_with_seq(c, 200, 0), FULL, NULL,
			   "8 ops of this session are unanswered");
	for (unsigned i = 0; i < 8; i++)
		raw_finish_refused(held[i], SHARDD_DEADLINE_EXCEEDED, NULL, "waits for");
	/* they keep their turns; whoever the first of them waits for is let in nevertheless */
	for (uint64_t seq = 1; seq < 100; seq++)
		TRAINER_CHECK(raw_finish(release_with_seq(c, seq, 0), NULL, &err) == 0);
	TRAINER_CHECK(raw_finish(release_with_seq(c, 108, 0), NULL, &err) == 0);
}

static int try_limits(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bad", 0, 1, false);
	Shardd__V1__InitialiseRequest in = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Own own = SHARDD__V1__OWN__INIT;
	static uint8_t large[2 << 20];

	fill_jobs(c);
	fill_units(c);
	fill_inflight(c);
	in.unit = 1;
	in.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
	in.own = &own;
	in.data = (ProtobufCBinaryData){ 63, large };
	raw_refused(c, "Initialise", &in.base, BAD, "data",
		    "data has 63 bytes; unit 'n0' needs 64");
	in.data.len = 65;
	raw_refused(c, "Initialise", &in.base, BAD, "data", "data has 65 bytes");
	in.data.len = sizeof(large);
	raw_refused(c, "Initialise", &in.base, FULL, NULL, "larger than max");
	in.data.len = 64;
	raw_done(c, "Initialise", &in.base);
	rpc_client_close(c);
	return 0;
}

Test(bad_state, limits_of_the_configuration)
{
	witness_trainer(small_limits, "bad", try_limits, 60);
}

/* ----------------------------------------------------------------- the quota */

static void join_with_quota(struct rpc_client *c, uint64_t quota)
{
	Shardd__V1__JoinRequest r = SHARDD__V1__JOIN_REQUEST__INIT;

	request_reset();
	r.job = &good.job;
	r.job->name = (char *)"bad";
	r.job->world_size = 1;
	r.job->quota_bytes = quota;
	raw_done(c, "Join", &r.base);
}

static void same_after(struct rpc_client *c, const char *method, const ProtobufCMessage *m,
		       const char *words)
{
	_cleanup_(freep) char *before = raw_state(c);
	_cleanup_(freep) char *after = NULL;

	raw_refused(c, method, m, FULL, NULL, words);
	after = raw_state(c);
	TRAINER_CHECK(raw_same_state(before, after, method));
}

static int try_quota(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	Shardd__V1__RegisterUnitsRequest r = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	Shardd__V1__AllocBufferRequest a = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;
	Shardd__V1__CommitRequest commit = SHARDD__V1__COMMIT_REQUEST__INIT;
	uint64_t shape[1] = { 1 << 20 };
	uint64_t buffer;
	struct shardd_error err;

	raw_attach(c);
	join_with_quota(c, 8 << 20);
	/* 4 MiB of parameters would fit, with gradients and AdamW's state they do not */
	request_reset();
	good.tensor[0].shape = shape;
	good.tensor[0].n_shape = 1;
	good.unit[0].n_tensors = 1;
	r.units = good.units;
	r.n_units = 1;
	same_after(c, "RegisterUnits", &r.base, "job 'bad' holds 0 bytes (shard 0, full 0, grad 0");
	/* of several units none */
	r.n_units = 2;
	same_after(c, "RegisterUnits", &r.base, "of its 8388608");
	shape[0] = 1 << 18;
	r.n_units = 1;
	raw_done(c, "RegisterUnits", &r.base);
	a.bytes = 5 << 20;
	/* slabs of a GPU are larger: its memory comes in multiples of 2 MiB */
	same_after(c, "AllocBuffer", &a.base,
		   train_on_host() ? "job 'bad' holds 4194304 bytes (shard 4194304"
				   : "job 'bad' holds 6291456 bytes (shard 6291456");
	a.bytes = 1 << 20;
	buffer = raw_alloc(c, a.bytes);
	TRAINER_CHECK(buffer);
	while (raw_call(c, "AllocBuffer", &a.base, NULL, &err) == 0)
		;
	TRAINER_CHECK(err.code == FULL);
	raw_init(&c, 1, 1);
	same_after(c, "GradientBuffer", request_of_unit("GradientBuffer", 1),
		   "for a gradient buffer");
	commit.step = 1;
	commit.blob = (ProtobufCBinaryData){ 65536, blob };
	same_after(c, "Commit", &commit.base, "65536 bytes for a blob");
	commit.blob.len = 0;
	raw_done(c, "Commit", &commit.base);
	rpc_client_close(c);
	return 0;
}

Test(bad_state, a_quota_that_is_too_small_says_who_holds_what)
{
	witness_trainer(NULL, "bad", try_quota, 60);
}
