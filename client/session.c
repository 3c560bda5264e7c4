/* Joining and leaving a job, and its groups. */
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/cleanup.h"
#include "device.h"
#include "env.h"
#include "methods.h"
#include "op.h"
#include "reconnect.h"
#include "shardd.pb-c.h"

/* A daemon that dies of each join is given up. */
#define JOIN_TRIES   10u
#define PRIORITY_MAX 100

static_assert((int)SHARDD_KEEP == SHARDD__V1__LIFETIME__LIFETIME_KEEP &&
		      (int)SHARDD_BASE == SHARDD__V1__LIFETIME__LIFETIME_BASE,
	      "lifetimes");
static_assert((int)SHARDD_RESUME_APPLIED == SHARDD__V1__RESUME__RESUME_APPLIED, "resume");
static_assert((int)SHARDD_RESUME_COMMITTED == SHARDD__V1__RESUME__RESUME_COMMITTED, "resume");
static_assert((int)SHARDD_RESUME_NO_COPY == SHARDD__V1__RESUME__RESUME_NO_COPY, "resume");
static_assert((int)SHARDD_FRESH == SHARDD__V1__ON_EXISTING__ON_EXISTING_FRESH, "existing state");

/* Is it the job of the launcher? */
static bool session_is_launched(const Shardd__V1__JobSpec *spec)
{
	const char *job = getenv("SHARDD_JOB");

	return job && strcmp(job, spec->name) == 0;
}

/* The range of the launcher's elastic job, if @spec is that. */
static int session_complete_range(Shardd__V1__JobSpec *spec, struct shardd_error *err)
{
	int r;

	if (!session_is_launched(spec) || !getenv("SHARDD_MIN_RANKS"))
		return 0;
	r = env_number("SHARDD_MIN_RANKS", UINT32_MAX - 1, &spec->min_ranks, err);
	if (r == 0)
		r = env_number("SHARDD_MAX_RANKS", UINT32_MAX - 1, &spec->max_ranks, err);
	if (r == 0 && getenv("SHARDD_JOIN_GRACE_MS"))
		r = env_number("SHARDD_JOIN_GRACE_MS", UINT32_MAX - 1, &spec->join_grace_ms, err);
	return r;
}

/* @room: for what @spec then points to. */
static int session_take_checkpoints(const struct shardd_checkpoints *c,
				    Shardd__V1__CheckpointPolicy *room, Shardd__V1__JobSpec *spec,
				    struct shardd_error *err)
{
	int r = c ? client_check_size(c, sizeof(*c), "checkpoints.size", err) : 0;

	if (!c || r < 0)
		return r;
	if (!c->path)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "checkpoints.path",
				 "checkpoints.path is NULL: give the folder");
	room->path = (char *)c->path;
	room->every_steps = c->every_steps;
	room->every_s = c->every_s;
	room->keep = c->keep;
	room->bytes_per_s = c->bytes_per_s;
	spec->checkpoints = room;
	return 0;
}

/* The place of the launcher's job in the line for memory. */
static int session_complete_line(Shardd__V1__JobSpec *spec, struct shardd_error *err)
{
	int r = 0;

	if (!spec->priority && getenv("SHARDD_PRIORITY"))
		r = env_signed("SHARDD_PRIORITY", PRIORITY_MAX, &spec->priority, err);
	if (r == 0 && !spec->wait_for_memory_ms && getenv("SHARDD_WAIT_FOR_MEMORY_MS"))
		r = env_number("SHARDD_WAIT_FOR_MEMORY_MS", UINT32_MAX - 1,
			       &spec->wait_for_memory_ms, err);
	return r;
}

/* What the launcher says, where it also gave the rank. Numbers that do not fit are of another one. */
static int session_complete_local(Shardd__V1__JoinRequest *request, struct shardd_error *err)
{
	uint32_t rank, world;
	int r;

	if (!getenv("LOCAL_RANK") || !getenv("LOCAL_WORLD_SIZE"))
		return 0;
	r = env_number("LOCAL_RANK", UINT32_MAX - 1, &rank, err);
	if (r == 0)
		r = env_number("LOCAL_WORLD_SIZE", UINT32_MAX - 1, &world, err);
	if (r == 0 && rank < world && world <= request->job->world_size) {
		request->local_rank = rank;
		request->local_world_size = world;
	}
	return r;
}

/* Fill the open arguments of @job from the environment. */
static int session_complete(const struct shardd_job *job, Shardd__V1__JoinRequest *request,
			    struct shardd_error *err)
{
	Shardd__V1__JobSpec *spec = request->job;
	bool launched = !job->world_size && job->rank == SHARDD_RANK_FROM_ENV;
	const char *name;
	int r = env_job(job->name, &name, err);

	spec->name = (char *)name;
	spec->world_size = job->world_size;
	request->rank = job->rank;
	request->local_rank = job->local_rank;
	request->local_world_size = job->local_world_size;
	if (r == 0 && !job->world_size)
		r = env_number("WORLD_SIZE", UINT32_MAX - 1, &spec->world_size, err);
	if (r == 0 && job->rank == SHARDD_RANK_FROM_ENV)
		r = env_number("RANK", UINT32_MAX - 1, &request->rank, err);
	if (r == 0 && launched && !job->local_world_size)
		r = session_complete_local(request, err);
	spec->lifetime = (Shardd__V1__Lifetime)job->lifetime;
	spec->quota_bytes = job->quota_bytes;
	spec->ttl_s = job->ttl_s;
	spec->op_timeout_ms = job->op_timeout_ms;
	spec->allow_torn = job->allow_torn;
	spec->resume = (Shardd__V1__Resume)job->resume;
	spec->min_ranks = job->min_ranks;
	spec->max_ranks = job->max_ranks;
	spec->join_grace_ms = job->join_grace_ms;
	spec->is_private = job->is_private;
	spec->priority = job->priority;
	spec->wait_for_memory_ms = job->wait_for_memory_ms;
	if (r == 0 && session_is_launched(spec))
		r = session_complete_line(spec, err);
	if (r == 0 && !job->min_ranks && !job->max_ranks)
		r = session_complete_range(spec, err);
	return r;
}

/* The session is in its new epoch. Called with c->order held. */
static int session_joined(struct shardd_client *c, Shardd__V1__JoinResponse *reply,
			  struct shardd_membership *ret)
{
	/* with a debugger's views they stay, to be told of */
	for (size_t i = 0; !c->debug && i < reply->n_slabs_gone; i++)
		map_forget(&c->map, reply->slabs_gone[i]);
	free(c->blob);
	c->blob = NULL;
	/* The message was unpacked with the plain allocator, so its bytes can be kept. */
	if (reply->blob.len)
		c->blob = STEAL_PTR(reply->blob.data);
	c->joined = true;
	c->joined_link = c->link->number;
	c->wait_for_memory_ms = reply->wait_for_memory_ms;
	c->keep = reply->lifetime > SHARDD__V1__LIFETIME__LIFETIME_EPHEMERAL;
	c->epoch = reply->epoch;
	c->seq = 0;
	c->ended_epoch = 0;
	if (c->debug)
		debug_joined(c->debug, reply->rank, c->cuda != NULL);
	atomic_store(&c->draining, false);
	if (ret)
		*ret = (struct shardd_membership){
			.epoch = reply->epoch,
			.world_size = reply->world_size,
			.rank = reply->rank,
			.resumed = reply->resumed,
			.has_step = reply->optional_step_case,
			.has_commit = reply->optional_committed_step_case,
			.committed_step = reply->committed_step,
			.blob_step = reply->blob_step,
			.torn = reply->torn,
			.step = reply->step,
			.blob = c->blob,
			.blob_bytes = reply->blob.len,
			.created = reply->created,
		};
	return 0;
}

/* @ret_link: of call_once; or NULL. Called with c->order held. */
static int session_leave(struct shardd_client *c, uint32_t *ret_link, struct shardd_error *err)
{
	Shardd__V1__LeaveRequest request = SHARDD__V1__LEAVE_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	int r = call_once(c, METHOD_Leave, &request.base, &shardd__v1__leave_response__descriptor,
			  &reply, ret_link, err);

	if (r == 0) {
		if (c->job && !c->keep)
			expect_forget(c->socket, c->job);
		if (c->debug)
			debug_left(c->debug);
		c->joined = false;
		c->epoch = 0;
		c->seq = 0;
	}
	return r;
}

/* Remember that the job has state here from now on. Out of memory, this is not remembered. */
static void session_note_job(struct shardd_client *c, const char *name)
{
	char *copy = strdup(name), *former;

	expect_note(c->socket, name, c->daemon.instance);
	pthread_mutex_lock(&c->reconnect.lock);
	former = c->job;
	c->job = copy;
	pthread_mutex_unlock(&c->reconnect.lock);
	free(former);
}

/* Called with c->order held. */
static int session_join(struct shardd_client *c, const Shardd__V1__JoinRequest *request,
			struct shardd_membership *ret, uint32_t *ret_link, struct shardd_error *err)
{
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	uint8_t expected[EXPECT_BYTES] = { 0 };
	Shardd__V1__JoinRequest asks = *request;
	bool any, resumed;
	int r = expect_find(c->socket, request->job->name, expected, &any, err);

	if (r < 0)
		return r;
	if (any)
		asks.instance = (ProtobufCBinaryData){ EXPECT_BYTES, expected };
	reconnect_collect(c); /* a former session of this rank ends with its connection */
	r = device_part(c, err);
	if (r < 0)
		return r;
	r = call_once(c, METHOD_Join, &asks.base, &shardd__v1__join_response__descriptor, &reply,
		      ret_link, err);
	if (r < 0)
		return r;
	session_note_job(c, request->job->name);
	resumed = ((const Shardd__V1__JoinResponse *)reply)->resumed;
	r = device_take(c, (const Shardd__V1__JoinResponse *)reply, err);
	if (r == 0)
		r = map_check(&c->map, err);
	if (r == 0)
		return session_joined(c, (Shardd__V1__JoinResponse *)reply, ret);
	/* This process can do nothing there, and its peers are not to wait for it. But leaving could
	 * end the job that it was to continue: then it ends with the connection. */
	if (!resumed)
		session_leave(c, NULL, NULL);
	c->joined = false;
	return r;
}

/* Ops of other threads wait here: they belong to the new epoch. */
static int session_join_ordered(struct shardd_client *c, Shardd__V1__JoinRequest *request,
				struct shardd_membership *ret, uint32_t *ret_link,
				struct shardd_error *err)
{
	int r;

	pthread_mutex_lock(&c->order);
	*ret_link = c->link->number;
	request->returns =
		(c->joined || c->ended_epoch) && c->job && strcmp(c->job, request->job->name) == 0;
	device_ask(c, request);
	r = session_join(c, request, ret, ret_link, err);
	if (r == 0) { /* they belong to the earlier epoch */
		pthread_mutex_lock(&c->failure.lock);
		c->failure.is_there = false;
		pthread_mutex_unlock(&c->failure.lock);
	}
	pthread_mutex_unlock(&c->order);
	return r;
}

/* A join that was not answered is repeated when the daemon is back. */
static int session_join_again(struct shardd_client *c, Shardd__V1__JoinRequest *request,
			      struct shardd_membership *ret, struct shardd_error *err)
{
	uint32_t link;
	int r;

	for (unsigned tries = JOIN_TRIES;; tries--) {
		r = session_join_ordered(c, request, ret, &link, err);
		if (!error_is_lost(r, err) || !reconnect_is_on(c))
			return r;
		r = call_after_loss(c, link, r, err);
		if (r != -SHARDD_ABORTED || tries == 1)
			return r;
	}
}

/* What ranks work on is mapped. */
static int session_check_here(struct shardd_client *c, struct shardd_error *err)
{
	struct link *l = client_use_link(c);
	bool forwarded = l->forwarded;

	client_unuse_link(c, l);
	return forwarded
		       ? error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				   "the daemon's socket %.200s is forwarded: only processes of its "
				   "own host can join, which map its memory",
				   c->socket)
		       : 0;
}

int shardd_join(shardd_client *c, const struct shardd_job *job, struct shardd_membership *ret,
		struct shardd_error *err)
{
	Shardd__V1__CheckpointPolicy checkpoints = SHARDD__V1__CHECKPOINT_POLICY__INIT;
	Shardd__V1__JobSpec spec = SHARDD__V1__JOB_SPEC__INIT;
	Shardd__V1__JoinRequest request = SHARDD__V1__JOIN_REQUEST__INIT;
	struct shardd_error scratch;
	int r;

	request.job = &spec;
	err = err ? err : &scratch;
	r = client_check(c, err);
	if (r == 0 && !job)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "job", "the job is NULL");
	if (r == 0)
		r = client_check_size(job, sizeof(*job), "job.size", err);
	if (r == 0)
		r = session_check_here(c, err);
	if (r == 0)
		r = session_complete(job, &request, err);
	if (r == 0)
		r = session_take_checkpoints(job->checkpoints, &checkpoints, &spec, err);
	if (r < 0)
		return r;
	request.on_existing = (Shardd__V1__OnExisting)job->on_existing;
	if (job->run)
		request.run = (char *)job->run;
	return session_join_again(c, &request, ret, err);
}

int shardd_leave(shardd_client *c, struct shardd_error *err)
{
	uint32_t link = 0;
	struct shardd_error e = { 0 };
	uint64_t epoch;
	int r = client_check(c, err);

	if (r == 0)
		r = op_detached(c, true, err);
	if (r == 0)
		r = call_check_epoch(c, err);
	if (r < 0)
		return r;
	pthread_mutex_lock(&c->order);
	epoch = c->epoch;
	r = session_leave(c, &link, &e);
	pthread_mutex_unlock(&c->order);
	if (link && error_is_lost(r, &e) && reconnect_is_on(c)) {
		reconnect_wait(c, link, -1);
		r = reconnect_outcome(c, link, epoch, &e);
	}
	if (r < 0 && err)
		*err = e;
	return r;
}

int shardd_group_create(shardd_client *c, const char *name, const uint32_t *ranks, size_t n,
			shardd_group *ret, struct shardd_error *err)
{
	Shardd__V1__CreateGroupRequest request = SHARDD__V1__CREATE_GROUP_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	int r = client_check(c, err);

	if (r == 0 && (!name || !ret || (n && !ranks)))
		r = error_set(err, SHARDD_INVALID_ARGUMENT,
			      !name  ? "name"
			      : !ret ? "ret"
				     : "ranks",
			      "the argument is NULL");
	if (r < 0)
		return r;
	r = call_check_epoch(c, err);
	if (r < 0)
		return r;
	request.name = (char *)name;
	request.ranks = (uint32_t *)ranks;
	request.n_ranks = n;
	r = call_make(c, METHOD_CreateGroup, &request.base,
		      &shardd__v1__create_group_response__descriptor, &reply, err);
	if (r == 0)
		*ret = ((const Shardd__V1__CreateGroupResponse *)reply)->group;
	return r;
}

static void session_loaded(const Shardd__V1__LoadCheckpointResponse *reply,
			   struct shardd_loaded *ret)
{
	ret->step = reply->step;
	ret->bytes = reply->bytes;
	ret->world_size = reply->world_size;
	ret->blobs_left_out = reply->blobs_left_out;
	ret->buffers_left_out = reply->buffers_left_out;
	ret->buffers_missing = reply->buffers_missing;
}

int shardd_load_checkpoint(shardd_client *c, const char *job, const char *path,
			   const uint64_t *step, struct shardd_loaded *ret,
			   struct shardd_error *err)
{
	Shardd__V1__LoadCheckpointRequest request = SHARDD__V1__LOAD_CHECKPOINT_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	const char *name;
	int r = client_check(c, err);

	if (r == 0 && !path)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "path", "the argument is NULL");
	if (r == 0 && ret)
		r = client_check_size(ret, sizeof(*ret), "ret.size", err);
	if (r == 0)
		r = env_job(job, &name, err);
	if (r < 0)
		return r;
	request.job = (char *)name;
	request.path = (char *)path;
	request.step = step ? *step : 0;
	if (step)
		request.optional_step_case =
			SHARDD__V1__LOAD_CHECKPOINT_REQUEST__OPTIONAL_STEP_STEP;
	r = call_make(c, METHOD_LoadCheckpoint, &request.base,
		      &shardd__v1__load_checkpoint_response__descriptor, &reply, err);
	if (r == 0 && ret)
		session_loaded((const Shardd__V1__LoadCheckpointResponse *)reply, ret);
	return r;
}
