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

/* The member's buffer, which must hold [offset, offset+bytes). Return: its address, or
 * NULL with @f filled. */
uint8_t *op_buffer_at(struct op *op, uint64_t offset, uint64_t bytes, struct fault *f);

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
 * here) into the parameters: there in the order of the gathered unit, or @packed,
 * tensor after tensor as they were registered. Then @after. */
void own_write(struct coll *c, const float *(*source)(const struct coll *c, uint32_t i),
	       bool packed, void (*after)(struct coll *c));

/* -- the prepared step ------------------------------------------------------ */

/* Is the prepared step (if any) applied? If not: begin to apply it, put @p into the
 * list of those that wait, to be resumed. Return: true if there is nothing to wait for. */
bool apply_ensure(struct job *job, struct parked *p, void (*resume)(struct parked *p));

/* Before parameters are written: is everything over that reads or writes them, on all
 * devices of the job, also in trainers' streams that have said how far they must come? If
 * not, @resume is called with @p then. Only devices with queues of their own have to be
 * asked; gathers that nobody has asked for are waited for anywhere. Return: 0 (nothing to wait for), DRAIN_E_WAIT, or -ENOMEM. */
enum { DRAIN_E_WAIT = 1 };
int drain_ensure(struct job *job, struct parked *p, void (*resume)(struct parked *p));
/* No gather that nobody has asked for is under way any more: those that wait go on. */
void drain_go_on(struct job *job);

/* -- gathered copies ----------------------------------------------------- */

/* Memory was refused: give idle copies back. Return: bytes freed. */
uint64_t full_evict(struct job *job, uint64_t want);
/* Parameters of @u have changed: an idle copy is of no use any more. */
void full_invalidate(struct job *job, struct unit *u);

#endif
