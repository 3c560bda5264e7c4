/*
 * What is done with jobs: create and find them, join and leave, groups, units, epochs, deletion.
 * For the layers above; what a job is, and what its modules need of it, is in job/job_types.h. Loop
 * thread only.
 */
#ifndef SHARDD_JOB_JOB_H
#define SHARDD_JOB_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "job/ddp.h"
#include "job/group.h"
#include "job/job_account.h"
#include "job/job_full.h"
#include "job/job_types.h"
#include "job/member.h"
#include "job/node.h"
#include "job/readers.h"
#include "job/regcache.h"
#include "store/state.h"
#include "unit/unit.h"

/* EPHEMERAL... Return: static string. */
const char *job_lifetime_word(uint32_t lifetime);

/* APPLIED... Return: static string. */
const char *job_resume_word(const state_job *rec);

/* What a joining rank wants if the job has state. Equal to the wire's OnExisting. */
enum job_on_existing { JOB_RESUME = 1, JOB_ERROR = 2, JOB_FRESH = 3 };

void jobs_init(struct jobs *jobs, struct node *node, const struct job_ops *ops);
/* Delete every job; no member may be present and nothing may run (CHECKed). */
void jobs_deinit(struct jobs *jobs);
/* The first part of that: delete all jobs, give up quarantine. Then run the loop until jobs_gone:
 * engines release memory asynchronously. */
void jobs_end(struct jobs *jobs);
bool jobs_gone(struct jobs *jobs);

/* What a caller specifies for a job. A number of 0 means the node's default. */
struct job_spec {
	const char *name;
	uint32_t world_size;
	enum job_lifetime lifetime;
	uint64_t quota_bytes;
	uint32_t ttl_s;
	uint32_t op_timeout_ms;
	bool allow_torn;
	enum job_resume resume; /* 0: JOB_RESUME_APPLIED */
	uint32_t min_ranks;     /* it is elastic (job/resize.h); 0, as is max_ranks: it is not */
	uint32_t max_ranks;
	uint32_t join_grace_ms; /* and how long it waits before it changes its size by itself
				 * (job/elastic.h); 0: it does not */
	bool resizes;           /* an elastic job may have another size: the caller resizes it */
	bool ipc;
	bool is_private;
	int32_t priority;            /* in the line for memory (job/admission.h) */
	uint32_t wait_for_memory_ms; /* 0: it does not wait there */
	gid_t gid; /* of the owner, whom an administrator creates it for; 0: the caller is the owner */
	const state_checkpoints *checkpoints; /* borrowed; NULL: nothing is said of them */
	const uint8_t *instance; /* NODE_INSTANCE_BYTES: the daemon that has the caller's state;
				  * NULL: it expects none */
	enum job_on_existing on_existing; /* 0: JOB_RESUME */
	const char *run; /* of the caller's launcher, up to JOB_RUN_MAX; NULL: not known */
};

/* Create the job, or find it and check that it is the same. A plain name is one of @uid's own jobs;
 * a UID/NAME of another user must exist, unless an administrator gives spec->gid. @ret_created may be NULL. Return: 0, or a fault:
 * FAULT_LOST if spec->instance is another run of the daemon. */
int job_open(struct jobs *jobs, const struct job_spec *spec, uid_t uid, gid_t gid, struct job **ret,
	     bool *ret_created, struct fault *f);

/* Of job_open: may a rank with @spec join @job, which may have state
 * (job_existing.c)? @ret_replace: with JOB_FRESH and no trainers in it, a job that is created takes
 * its place; @spec has got its settings where it has none of its own. Return: 0 or a fault. */
int job_existing_check(const struct job *job, struct job_spec *spec, bool *ret_replace,
		       struct fault *f);
/* A rank of the launcher's run @run has joined: if no other is there, the state is of its run from
 * now on. */
void job_existing_joined(struct job *job, const char *run);

/* Find by NAME or UID/NAME, for its owner or an administrator (job_names.c). For all other users
 * the job does not exist. Return: 0 or a fault. */
int job_find(struct jobs *jobs, const char *name, uid_t uid, struct job **ret, struct fault *f);
/* The same for somebody who, as an administrator or an observer, @sees_all. */
int job_find_seen(struct jobs *jobs, const char *name, uid_t uid, bool sees_all, struct job **ret,
		  struct fault *f);
/* The owner, or an administrator: root, and the user that the daemon runs as. */
bool job_may_use(const struct job *job, uid_t uid);
bool job_is_admin(uid_t uid);
/* There is a checkpoint of step @step, which is or was the job's last commit. */
void job_saved(struct job *job, uint64_t step);
/* Where its state is: "none", "in a checkpoint" (as it is, and nobody can change it), or "in memory only:
 * lost" with the daemon's memory. Static string. (job_end.c) */
const char *job_state_place(const struct job *job);
/* Is it the last of these? */
bool job_is_in_memory_only(const struct job *job);
/* May @uid see what is in the job: units, pids, ops? */
bool job_may_look(const struct job *job, uid_t uid);
/* As job_may_look, but with a fault that says who has no access to the job. */
int job_check_open(const struct job *job, uid_t uid, struct fault *f);
/* Memory was refused: give back idle copies, and what pools keep for the next step; of other jobs,
 * too, if @job has nothing. Return: bytes freed. */
uint64_t job_evict(struct job *job, uint64_t want);
/* No memory was there with @error, and job_evict frees no more. Return: SLAB_E_LATER, if it may free more
 * at the news of the node, or @error. */
int job_evict_later(struct job *job, int error);
/* pool_take, if need be in place of what job_evict gives back. Return: as pool_take. */
int job_take(struct job *job, struct pool *pool, uint64_t bytes, struct region *ret);

/* The name of a job: NAME, or UID/NAME. */
struct job_ref {
	bool has_uid;
	uid_t uid;
	const char *name; /* points into the text */
};
/* @field: of the request. Return: 0 or FAULT_INVALID. */
int job_ref_parse(const char *text, const char *field, struct job_ref *ret, struct fault *f);
/* Move job->step.state. CHECKs that the move is in the table (job.c, docs/states.md). */
void job_step_move(struct job *job, enum job_step_state to);

void job_label(uid_t uid, const char *name, char ret[JOB_LABEL_MAX + 1]);

struct elastic_newcomer;

/* How a trainer joins. */
struct job_joining {
	uint32_t rank;       /* as which it was started */
	uint32_t world_size; /* that it was started for; 0: it does not say */
	const char *device;  /* id or UUID; "": where the rank was, or as the daemon chooses */
	bool no_channel;     /* it can take memory only as CUDA IPC handles */
	bool returns;        /* this process has been a rank of the job */
	/* Among the ranks that its launcher has started on this node. 0, 0: it does not say. */
	uint32_t local_rank, local_world_size;
	struct elastic_newcomer *newcomer; /* in which it may wait for a place */
};

/* Join. @again: the caller's member if it joins again, else NULL; @ret gets a reference
 * that the session keeps. RES_WAIT: ops of an earlier epoch still run, or there is no rank of that
 * number (job/elastic.h): wait for job.settled, then join again, or leave how->newcomer. */
enum res job_join(struct job *job, const struct job_joining *how, struct proc *proc,
		  uint64_t session, struct member *again, struct member **ret, struct fault *f);

/* From its next epoch on, which is @epoch, the ranks of the job are where @span says, which is taken.
 * No rank is joined. Return: 0 or a fault: its memory is on other nodes. */
int job_set_span(struct job *job, struct span *span, uint64_t epoch, struct fault *f);
/* The same between epochs, also for memory that is there already: an epoch with this span may begin later.
 * Groups that have devices are on those that it says. */
int job_install_span(struct job *job, struct span *span, struct fault *f);
/* The epoch did not begin after all: @job has a span, of which no communicator is made. */
void job_span_failed(struct job *job, const struct fault *why);

/* Of a job with a span: a word for where its ranks are, and as which they were started: equal ones, equal words, on
 * all nodes. */
uint64_t job_layout(const struct job *job);
/* Has it ranks on other nodes? */
bool job_is_across(const struct job *job);
/* Is this the only node, for now, of an elastic job over nodes? Then the store decides what it commits, too. */
bool job_is_alone(const struct job *job);
/* For texts that ranks of other nodes read: " on node NAME"; "": all ranks are here. */
const char *job_on_node(const struct job *job, char buf[JOB_ON_NODE_BYTES]);
/* Refuse @what ("Loading a checkpoint") if so. Return: 0 or a fault code. */
int job_check_here(const struct job *job, const char *what, struct fault *f);

/* Which device rank @rank is on (job_place.c): the one that @how->device names, or the known one, or the
 * default: rank * devices / world size, of the local ones where @how has them. A rank of a group that
 * has units or has run collectives stays where it is. Return: 0 or a fault. */
int job_place(struct job *job, uint32_t rank, const struct job_joining *how, struct fault *f);
/* The device of rank @rank of @world: the ranks are spread evenly and in order over the devices, at
 * most as many as there are ranks; lost devices are left out as long as there are others. */
struct device *job_place_default(const struct job *job, uint32_t rank, uint32_t world);

/* A process that waits to join as @rank, as it calls it, has given up. Others that wait may ask again. */
void job_join_given_up(struct job *job, uint32_t rank);

/* Leave cleanly: fails if its ops are not over. RES_WAIT: devices still work on them: wait for
 * node.changed, then leave again. Or be gone (job_lost, @why says how). May free the job. */
enum res job_leave(struct member *m, bool *ret_freed, struct fault *f);
void job_lost(struct member *m, const char *why);
/* The job goes on without @m, which is STALE: its process has to join again as a newcomer. @why: for its ops. */
void job_leave_out(struct member *m, const struct fault *why);

/* Delete: with trainers present only if @force. Return: 0 or a fault. */
int job_delete(struct job *job, bool force, uint64_t *ret_freed, struct fault *f);
/* Ask the trainers to commit and leave; no rank may join any more. Return: ranks told. */
uint32_t job_drain(struct job *job);

/* Find or make a group. Return: 0 or a fault. */
int job_group(struct job *job, const char *name, const uint32_t *ranks, size_t n,
	      struct group **ret, struct fault *f);
/* What a rank on another node has done before it left. */
struct job_left {
	uint32_t rank;
	int pid;
	size_t n; /* groups that it was in: of each the key, and the number of its last collective */
	const uint64_t *keys, *numbers;
};
/* End the collectives that it has not announced; and the epoch, if one of them runs here already. */
void job_left_elsewhere(struct job *job, const struct job_left *l);
/* @m has left cleanly: end the collectives of @g that it has not announced. */
void job_group_left(struct group *g, const struct member *m);
/* Append the run-time group of the last group of the record. Return: 0 or -ENOMEM. */
int job_add_group(struct job *job);

/* Give back what an unfinished registration took; safe if there is none. */
void job_drop_spare(struct job *job);
uint64_t job_spare_bytes(const struct job *job);
/* Add slabs to the job, in the order of their numbers; the job takes its own reference on each. All
 * or none. Return: 0 or -ENOMEM. */
int job_add_slabs(struct job *job, struct slab *const *slabs, size_t n);
/* Slabs by their numbers. */
struct slab_list {
	uint32_t *ids; /* room for as many as the job has */
	size_t n;
};
/* How many units it has, without those that were dropped. */
uint32_t job_units_alive(const struct job *job);
/* A unit that is not among @units, which ascend, and has another name of a tensor of one of them, even
 * by way of other units. @ret_of: that one. Return: NULL if there is none. */
const struct unit *job_unit_tied_to(const struct job *job, const uint32_t *units, size_t n,
				    uint32_t *ret_of);
/* The unit loses its memory, its name and its registrations, and keeps its number. Nothing reads or
 * writes it, and nobody has anything of it (CHECKed). After the last of several: job_units_dropped,
 * which lets go of slabs and of what ranks have noted. */
void job_drop_unit(struct job *job, struct unit *u);
/* @u is new: its turns go on behind those of a unit of that name that was dropped in this epoch, since
 * nodes and leader have each number once. And @old is about to be replaced by another unit. */
void job_continue_turns(const struct job *job, struct unit *u);
void job_units_replaced(struct job *job, const struct unit *old);
void job_units_dropped(struct job *job, struct slab_list *gone);
/* Let go of slabs of shards and buffers in which no unit has anything any more. @gone: (optional) those
 * that were handed out for reading. */
void job_drop_unused_slabs(struct job *job, struct slab_list *gone);
void job_units_free(struct job *job);

/* May this member have slab @id, and for writing? Return: borrowed, or NULL. */
struct slab *job_slab_for(struct member *m, uint32_t id);

/* A job from its saved record and its slabs.
 * @fds: one per slab of the record, in its order, borrowed; -1: there is none, which is an error.
 * Takes @rec on success. Then call pooled_restore. */
int job_restore(struct jobs *jobs, state_job *rec, const int *fds, struct job **ret,
		struct fault *f);

/* The contents of @device are lost: every job that has memory there becomes TORN. */
void jobs_device_lost(struct jobs *jobs, struct device *device);
/* Collectives of the jobs that use @nc have failed: their epochs end. */
void jobs_comm_broke(struct jobs *jobs, struct node_comm *nc, const char *why);

/* Begin a new epoch: waiting ops end with @fault, members become STALE. */
void job_epoch_end(struct job *job, const struct fault *fault);

/* The first rank of an epoch finds what was committed, if the job resumes at its commits: begin to
 * bring that back. */
void job_roll_back(struct job *job);

/* Mark the job TORN if a restart has no state to continue from: a step was applied after the last
 * commit. */
void job_tear(struct job *job);
/* One more step, or another change of parameters, that no commit covers. */
void job_count_uncommitted(struct job *job);
/* Nobody can go on from its parameters: all its units have to be initialised. */
void job_set_torn(struct job *job);

/* Parameters or optimizer state are changed in place, from here until as many calls of the other:
 * what a daemon that dies meanwhile leaves is neither the old nor the new state. */
void job_change_begin(struct job *job);
void job_change_end(struct job *job);

/* Call now and then: ends jobs without trainers whose time is up, and empty zombies. */
void jobs_tick(struct jobs *jobs, uint64_t now_us);

/* Free a deleted job whose last byte is back. The loop's alone (jobs_tick, or posted by job_settle): no function
 * that is called with a job frees it. */
void job_free_zombie(struct job *job);

/* Something of the job has ended: continue what waited for that (joins, a deletion). */
void job_settle(struct job *job);

/* What was counted in job->running is over. Behind all that it resumes: that may have been the last
 * of a deleted job, which goes then, from the loop. */
void job_ran(struct job *job);

/* IDLE, FORMING, RUNNING, TORN, DRAINING, RESIZING, DELETED. Return: static string. */
const char *job_state_name(const struct job *job);

/* Gradient shards of @u on all its devices, if they come from a pool: take them, or none of
 * them, or give them back (job_grads.c). Return: as pool_take. */
int job_take_grads(struct job *job, struct unit *u);
void job_give_grads(struct job *job, struct unit *u);
/* Give back those of units without a gradient, when nothing of the job runs. */
void job_give_stray_grads(struct job *job);
/* The backward pass is over for the units of @g (NULL: of all groups): clear its records. */
void job_pass_end(struct job *job, struct group *g);
/* Refuse to go on from a pass in which some units were stepped and others are still to be.
 * @g: of its units; NULL: of all. Return: 0 or a fault code. */
int job_pass_check_over(const struct job *job, const struct group *g, struct fault *f);

/* Free the sums that were kept for the replicas' all-reduce and are no longer needed;
 * job_drop_partials: those of all units, as soon as nothing runs. */
void job_give_partials(struct job *job, struct unit *u);
void job_drop_partials(struct job *job);

/* Note a failed op for status. */
void job_note_error(struct job *job, const struct fault *f);

#endif
