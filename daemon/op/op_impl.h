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

/* Refuse an op while the job is torn (Initialise heals it). */
int op_check_not_torn(const struct op *op, struct fault *f);

/* Hand @reply to @send, with times and number in its info (whose address is @info). */
void op_send(const struct op *op, const ProtobufCMessage *reply, Shardd__V1__OpInfo **info,
	     op_reply_cb send, void *ctx);
/* The result's place, for a reply. */
void op_place(const struct op *op, Shardd__V1__Placement *place);

/* Take memory for what the op's member writes to, if need be in place of copies that
 * nobody uses. Return: as pool_take. */
int op_take_memory(struct op *op, uint64_t bytes, struct region *ret);

/* SLAB_E_QUOTA, SLAB_E_FULL or a negative errno from taking @bytes. Return: a code. */
int op_memory_fault(const struct job *job, int error, uint64_t bytes, const char *what,
		    struct fault *f);

/* -- collectives that run ------------------------------------------------- */

/* All ops of the collective end: with @fault, or well when it is NULL or FAULT_NONE. */
void coll_end(struct coll *c, const struct fault *fault);
/* The same for a negative status of backend or engine. */
void coll_end_status(struct coll *c, int status, const char *what);

/* For a collective that waited while a step was applied: has its epoch ended meanwhile
 * (what its members brought may be gone), or was the job torn and does that matter?
 * Then it ends so. Return: whether it has ended. */
bool coll_overtaken(struct coll *c, bool torn_matters);

/* Run @n kops (c->kops), then @next; a failure ends the collective. */
void coll_kernels(struct coll *c, unsigned n, void (*next)(struct coll *c));
/* For comm_* calls: c->comm_op set up so that @next follows. */
struct comm_op *coll_comm(struct coll *c, void (*next)(struct coll *c));

/* Room for @n kops in c->kops. Return: false: no memory, the collective has ended. */
bool coll_need_kops(struct coll *c, size_t n);

/* The member index of rank @root. CHECKs that it is one. */
uint32_t coll_index(const struct coll *c, uint32_t root);

/* -- the prepared step ------------------------------------------------------ */

/* Is the prepared step (if any) applied? If not: begin to apply it, put @p into the
 * list of those that wait, to be resumed. Return: true if there is nothing to wait for. */
bool apply_ensure(struct job *job, struct parked *p, void (*resume)(struct parked *p));

/* -- gathered copies ----------------------------------------------------- */

/* Memory was refused: give idle copies back. Return: bytes freed. */
uint64_t full_evict(struct job *job, uint64_t want);
/* Parameters of @u have changed: an idle copy is of no use any more. */
void full_invalidate(struct job *job, struct unit *u);

#endif
