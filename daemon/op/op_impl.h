/* What the op_*.c files share. Loop thread only. */
#ifndef SHARDD_OP_OP_IMPL_H
#define SHARDD_OP_OP_IMPL_H

#include "op/op.h"
#include "shardd.pb-c.h"

/* End an op: with op->fault as it stands. Its memory is gone afterwards. */
void op_end(struct op *op);
/* It runs from here on: cannot be cancelled, counts as work of the job. */
void op_begin_run(struct op *op);
/* It waits in @list until op->parked.resume is called. */
void op_park(struct op *op, struct list *list, void (*resume)(struct parked *p));

/* Decode helpers. Return: 0 or a fault code naming the field. */
int op_take_unit(struct op *op, uint32_t id, struct fault *f);
int op_take_group(struct op *op, uint32_t id, struct fault *f);

/* The member's buffer, which must hold [offset, offset+bytes): the op holds it from here on to
 * its end. Return: its address, or NULL with @f filled. */
uint8_t *op_buffer_at(struct op *op, uint64_t offset, uint64_t bytes, struct fault *f);
/* Hold buffer @id of the member to the op's end. Return: NULL: there is none. */
struct member_buffer *op_hold_buffer(struct op *op, uint64_t id);
/* The member's epoch, in which the op began, has ended: op->fault says so, unless it says
 * something already. Return: whether it has. */
bool op_told_of_end(struct op *op);

/* Begin the fingerprint: words[0] the type, words[1] the unit; text from @fmt. */
void op_print(struct op *op, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Refuse an op on a unit whose group this rank is no member of, or without parameters. */
int op_check_in_group(const struct op *op, struct fault *f);
int op_check_initialised(const struct op *op, struct fault *f);

/* Refuse an op that is about gradients of a unit in which all tensors are frozen. */
int op_check_trained(const struct op *op, struct fault *f);

/* Refuse an op while ranks have the unit summoned. */
int op_check_not_summoned(const struct op *op, struct fault *f);

/* Refuse an op while the job is torn (Initialise heals it). */
int op_check_not_torn(const struct op *op, struct fault *f);

/* Hand @reply to @send, with times and number in its info (whose address is @info). */
void op_send(const struct op *op, const ProtobufCMessage *reply, Shardd__V1__OpInfo **info,
	     op_reply_cb send, void *ctx);
/* The result's place, for a reply. @handle: room for BACKEND_IPC_BYTES, as long as @place. */
void op_place(const struct op *op, Shardd__V1__Placement *place, uint8_t *handle);

/* Take memory for what the op's member writes to, if need be in place of copies that
 * nobody uses. Return: as pool_take. */
int op_take_memory(struct op *op, uint64_t bytes, struct region *ret);
/* Memory that the member's reductions may still read is only for who waits with a stream:
 * others are resumed when they are over. Return: whether the op waits. */
bool op_wait_for_memory(struct op *op, void (*resume)(struct parked *p));

/* If a device of the job is lost: say so, and what came of it. */
void op_device_fault(const struct job *job, const char *what, struct fault *f);

/* SLAB_E_QUOTA, SLAB_E_FULL or a negative errno from taking @bytes. Return: a code. */
int op_memory_fault(const struct job *job, int error, uint64_t bytes, const char *what,
		    struct fault *f);

/* The trainer's streams may read the op's unit until they come to the op's points. Return: 0 or
 * -ENOMEM (nothing was noted that matters). */
int op_note_reads(struct op *op);
/* In @type's enter: have the daemon itself do an op for @by's rank, before @by: with its
 * deadline and its way of answering. @fill sets args, group, buffer and streams; @arg is
 * handed to it. @done is called when it is over. Return: 0 or -ENOMEM. */
int op_spawn(struct op *by, const struct op_type *type, void (*fill)(struct op *op, void *arg),
	     void *arg, op_done_cb done, void *userdata);
/* After op_spawn of a collective failed, for want of @why: it is over for this rank, and its
 * peers, who would wait for it, are told. */
void op_give_up(struct op *by, const struct op_type *type, struct group *g,
		const struct fault *why);

/* Active JoinUneven @join: it is in its group's list. In its place take part in what its
 * peers have asked for and will ask for (join.c). */
void shadow_begin(struct op *join);
/* @op has got its number: so do the shadows of those who have joined. If they cannot do
 * without them, op->fault says so. */
void shadow_number(struct op *op);
/* Have those who have joined asked for error_if_uneven? Then there are no shadows. */
bool uneven_strict(const struct group *g);
/* @op is about to be announced: if they have no inputs for it nobody goes on, and op->fault says
 * so. Return: 0 or op->fault.code. */
int uneven_announce(struct op *op);
/* As shadow_begin, with error_if_uneven. @join may be gone afterwards. */
void uneven_begin(struct op *join);
/* Before @op, a collective, gets a number: has its rank still to be told? Then op->fault says
 * so. Return: 0 or op->fault.code. */
int uneven_check(struct op *op);
/* The same for a JoinUneven, after which it is told. */
int uneven_told(struct op *join);
/* The collective at @number has failed: those who have joined have no part in it. */
void shadow_skip(struct group *g, uint64_t number);
/* @op is about to be announced: so are its shadows. */
void shadow_announce(struct op *op);
/* @op, which had @number in @g, is refused: so are its shadows. It may be gone by now and is
 * only compared. */
void shadow_refuse(struct group *g, uint64_t number, const struct op *op,
		   const struct fault *fault);
/* op.c's: an op of nobody, in place of @op. Return: NULL without memory. */
struct op *op_shadow(struct op *join, struct op *of);
void op_announce(struct op *op);

/* -- collectives that run ------------------------------------------------- */

/* All ops of the collective end: with @fault, or well when it is NULL or FAULT_NONE. What
 * was submitted is ordered by now, not executed: memory goes back to pools of its queue. */
void coll_end(struct coll *c, const struct fault *fault);
/* The same for a negative status of backend or engine. */
void coll_end_status(struct coll *c, int status);

/* For a collective that waited while a step was applied: has its epoch ended meanwhile
 * (what its members brought may be gone), or was the job torn and does that matter?
 * Then it ends so. Return: whether it has ended. */
bool coll_overtaken(struct coll *c, bool torn_matters);

/* Did it wait for streams of its members? Then, if its epoch has ended, they may have been
 * let go of, and what was read is garbage. */
bool coll_promised(const struct coll *c);

/* Room for @n kops on each part, none of them used. Return: false: no memory, the collective
 * has ended. */
bool coll_need_kops(struct coll *c, size_t n);
/* The next of them. */
struct kop *coll_kop(struct coll_part *p, enum kop_kind kind, uint64_t n);
/* Run the kops of all parts, then @next when they are ordered everywhere, or, sync, when
 * they were executed and the host can read what they say. A failure ends the collective. */
void coll_kernels(struct coll *c, void (*next)(struct coll *c));
void coll_kernels_sync(struct coll *c, void (*next)(struct coll *c));

/* Can the group's devices talk? If not yet, @again is called with c->parked later; if they
 * cannot, the collective has ended. Return: true: go on. */
bool coll_ready(struct coll *c, void (*again)(struct parked *p));
/* Can they still, at a later stage? If not, the collective has ended. Return: true: go on. */
bool coll_can_talk(struct coll *c);
/* The communicator of the group's devices; one address per part. After coll_can_talk. */
struct comm *coll_between(const struct coll *c);
/* For comm_* calls: c->comm_op set up so that @next follows. */
struct comm_op *coll_comm(struct coll *c, void (*next)(struct coll *c));

/* Memory on every device until the end of the collective: p->scratch[@k] of @bytes.
 * Return: as coll_ready. */
bool coll_need_scratch(struct coll *c, unsigned k, uint64_t bytes, void (*again)(struct parked *p));

/* The member index of rank @root. CHECKs that it is one. */
uint32_t coll_index(const struct coll *c, uint32_t root);
/* The part that member @index is on. */
struct coll_part *coll_part(const struct coll *c, uint32_t index);

/* All parts' array of c->unit (one region a part; frozen: what follows the trained in the
 * parameters) into scratch[0] of every device, as unit/pack.h says; then @next. Where there is
 * none of it, @next at once. */
void coll_gather_array(struct coll *c, const struct region *const *arrays, bool frozen,
		       void (*next)(struct coll *c));

/* -- every rank brings its own shard (own.c) -------------------------------- */

/* Is there on each device what own_write needs? Return: as coll_ready. */
bool own_ready(struct coll *c, void (*again)(struct parked *p));
/* What each rank owns of c->unit, from @source's memory of member @i (on its device; asked
 * here) into the parameters, or with @state that array of what is trained: there in the order
 * of the gathered unit, or @packed, tensor after tensor as they were registered. Then @after. */
void own_write(struct coll *c, const float *(*source)(const struct coll *c, uint32_t i),
	       bool packed, unsigned state, void (*after)(struct coll *c));
/* -- gradient shards (shards.c) ------------------------------------------------ */

/* Those that a collective works on: of its unit, or of the units of its group that have a
 * gradient and, if it names some, are among them. */
bool shards_take_part(const struct coll *c, const struct unit *u);
/* The part of @u on the device of the collective's part @d. Return: NULL: it has none. */
const struct unit_part *shards_part(const struct coll *c, const struct unit *u, unsigned d);
/* Take @units of a request into the op: of its group, each once. Return: 0 or a fault. */
int shards_take_units(struct op *op, const uint32_t *units, size_t n, struct fault *f);
/* A word for the fingerprint: equal units, equal words. */
uint64_t shards_word(const struct op *op);
/* Refuse what needs all gradients of the group when some of them were used in backward
 * already, or handed out to the trainer's own optimizer. Return: 0 or a fault code. */
int shards_check_whole(const struct coll *c, struct fault *f);

/* How a request says what to clip by, with the names of its fields for texts. */
struct clip_fields {
	double max_norm, norm_type;
	uint32_t profile;
	bool error_if_nonfinite;
	const char *field_max_norm, *field_norm_type, *field_profile;
};
/* Check them (op_clip.c). Return: 0 or a fault code. */
int clip_decode(const struct clip_fields *r, struct clip *ret, struct fault *f);

/* -- what a request says of settings (step_settings.c) --------------------------- */

/* Take @n of them into @rates, after lr and the op's group: all is checked. Return: 0 or a fault
 * code. */
int rates_take(const struct op *op, Shardd__V1__StepSettings *const *list, size_t n,
	       struct step_rates *rates, struct fault *f);
int rates_check_lr(const struct step_rates *rates, struct fault *f);
/* Of the fingerprint: what to say of them, behind a text. @buf: room for RATES_TEXT bytes. */
#define RATES_TEXT 192
const char *rates_text(const struct step_rates *rates, char *buf);

/* Multiply all of them by @inv, noting in the group whether one held an infinity or NaN
 * before that; then @next. coll_need_scratch of COLL_FOUND_INF has been asked for. */
void shards_unscale(struct coll *c, float inv, void (*next)(struct coll *c));
/* Bytes of that scratch. */
#define SHARDS_FOUND_BYTES 256u

/* Norms of all of them, block by block, in the order of devices, then units; then @next with
 * them in c->partials. */
void shards_norm(struct coll *c, double type, void (*next)(struct coll *c));
/* What they add up to. */
double shards_total(const struct coll *c, double type);

/* -- the prepared step ------------------------------------------------------ */

/* Is the prepared step (if any) applied, and no optimizer runs in backward? If not: begin to
 * apply it, put @p into the list of those that wait, to be resumed. Return: true if there is
 * nothing to wait for. */
bool apply_ensure(struct job *job, struct parked *p, void (*resume)(struct parked *p));
/* The same for an op on one unit that looks after what runs in backward itself: only for the
 * prepared step. */
bool apply_ensure_step(struct job *job, struct parked *p, void (*resume)(struct parked *p));
/* An optimizer that ran in backward has ended: who waited goes on. */
void apply_go_on(struct job *job);
/* The device failed to change parameters as a whole: the job is TORN. */
void apply_failed(struct job *job);

/* -- optimizers in backward (backward.c) ------------------------------------- */

/* A Reduce of c->unit begins, or a bucket of a ddp with gradients of it. Has the unit been reduced for the last time in this pass? Then
 * @c has ended. Is there memory for its gradient shards, and what the plan needs? If not,
 * @again is called with c->parked, or @c has ended. Return: true: go on. */
bool backward_prepare(struct coll *c, void (*again)(struct parked *p));
/* Is there anything that the plan says of the gradient of c->unit? */
bool backward_is_planned(const struct coll *c);
/* The reduced gradient is in the shards: deal with it as the plan says, then @next. */
void backward_arrive(struct coll *c, void (*next)(struct coll *c));
/* At the end of the Reduce, when unit.has_gradient says how it ended: step the unit, now or
 * when nobody has it gathered any more; or offer its shards to the trainers. */
void backward_reduced(struct coll *c);
/* A Reduce of c->unit that no rank has anything for. If it is the last of its pass, what those
 * before it have left is the trainers' now. Return: 0, or the code of @f: it cannot be the last. */
int backward_end_unused(struct coll *c, struct fault *f);
/* Somebody has let go of @u: step it if that is due. */
void backward_released(struct job *job, struct unit *u);
/* Before a gather: are the parameters of the pass before stepped? Return: 0; 1: it waits,
 * @resume is called with op->parked; or a fault code, op->fault filled. */
enum { BACKWARD_WAITS = 1000 };
int backward_gather(struct op *op, void (*resume)(struct parked *p));
/* Refuse to go on from a pass in which some units were stepped and others are still to be.
 * @g: of its units; NULL: of all. Return: 0 or a fault code. */
int backward_check_over(const struct job *job, const struct group *g, struct fault *f);
/* The pass is noted as changing parameters: who dies now leaves them torn. */
void backward_mark(struct job *job);
/* At what @u is stepped in backward: the plan's. */
const struct step_rates *backward_rates(const struct job *job, const struct unit *u);
/* From here on nobody begins to read the parameters of @u, until backward_let_go; its gradient
 * shards go back to their pool then. */
void backward_hold(struct job *job, struct unit *u);
void backward_let_go(struct job *job, struct unit *u);
/* In between: it was stepped. @in_time: in the epoch that is. @status: the device's. */
void backward_stepped(struct job *job, struct unit *u, bool in_time, int status);

/* -- a Reduce whose last kernel steps the unit (fused.c) ------------------------- */

struct unit_run;

/* c->fused: may it be so? @c has its run, and perhaps the room for the optimizer's kops. */
void fused_plan(struct coll *c);
/* All it needs is there: it begins. */
void fused_begin(struct coll *c);
/* The last kernel of part @d comes. Return: false: it must not step any more, and there is no
 * gradient to be had. */
bool fused_ready(struct coll *c, unsigned d);
/* @r, which is of @span of the part, and the steps of its elements. */
void fused_kops(struct coll *c, unsigned d, const struct unit_run *span, const struct k_reduce *r);
/* At the end of the Reduce; and if it has ended without that. */
void fused_end(struct coll *c);
void fused_failed(struct coll *c);

/* -- the trainer's own optimizer (lend.c) --------------------------------------- */

/* A Reduce of c->unit has begun, for the last time in its pass; and is over. */
void lend_begin(struct coll *c);
void lend_ready(struct coll *c);
/* It has ended, perhaps without that. */
void lend_failed(struct coll *c);

/* Before parameters are written: is everything over that reads or writes them, on all
 * devices of the job, also in trainers' streams that have said how far they must come? If
 * not, @resume is called with @p then. Only devices with queues of their own have to be
 * asked; gathers that nobody has asked for are waited for anywhere. Return: 0 (nothing to wait for), DRAIN_E_WAIT, or -ENOMEM. */
enum { DRAIN_E_WAIT = 1 };
int drain_ensure(struct job *job, struct parked *p, void (*resume)(struct parked *p));
/* No gather that nobody has asked for is under way any more: those that wait go on. */
void drain_go_on(struct job *job);
/* @c is about to change parameters, or will lead to that: may it, or do readers hold them? If not,
 * @again is called with c->parked, and asks again. From true on until its end none will. */
bool coll_may_write(struct coll *c, void (*again)(struct parked *p));

/* -- gathered copies ----------------------------------------------------- */

/* Memory was refused: give back idle copies, and what pools keep for the next step; of other jobs,
 * too, if @job has nothing. Return: bytes freed. */
uint64_t full_evict(struct job *job, uint64_t want);
/* Parameters of @u have changed: an idle copy is of no use any more. */
void full_invalidate(struct job *job, struct unit *u);

#endif
