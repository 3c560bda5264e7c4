/*
 * Helpers for the files that implement ops: fields, checks, texts, replies, memory. Loop thread
 * only.
 */
#ifndef SHARDD_OP_OP_UTIL_H
#define SHARDD_OP_OP_UTIL_H

#include "op/op.h"
#include "shardd.pb-c.h"

/* By the name of its method. Return: NULL: there is none. */
const struct op_type *op_type_by_name(const char *name);

/* Does it wait for other ranks? A node that follows a schedule begins collectives before the ranks of other nodes
 * have come to them. */
bool op_waits_for_ranks(const struct op *op);

/* For how long it has been its turn: not counted is the time that it has waited for earlier ops of its session. */
uint64_t op_waited_us(const struct op *op, uint64_t now_us);

/* waits_for_readers of an op that always writes parameters: unless it is blocked. */
bool op_writes_params(const struct op *op);

/* Decode helpers. Return: 0 or a fault code naming the field. A unit that was dropped is taken like any
 * other: whether an op comes before or after DropUnits is over, it has its number among the
 * collectives, and is refused when it is its turn (guard_check). */
int op_take_unit(struct op *op, uint32_t id, struct fault *f);
int op_take_group(struct op *op, uint32_t id, struct fault *f);
/* A list in the request's field units: at least one, of one group, which becomes op->group; ascending. */
int op_take_units(struct op *op, const uint32_t *units, size_t n, struct fault *f);
/* It is the op's turn: was one of them dropped since they were taken? Of op->unit: guard_check. */
int op_check_all_there(const struct op *op, const uint32_t *units, size_t n, struct fault *f);

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

/* Add to the fingerprint in which order nodes add their ranks (node->order_ranks): word 7, and the text. */
void op_print_order(struct op *op);

/* What stands for @u in fingerprints: nodes of one job may have numbered their units differently. */
uint64_t op_unit_word(const struct op *op, const struct unit *u);

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

/* The reply of @op, which has succeeded, to @send. */
void op_encode(const struct op *op, op_reply_cb send, void *ctx);

/* The result's place, for a reply. @handle: room for BACKEND_IPC_BYTES, as long as @place. */
void op_place(const struct op *op, Shardd__V1__Placement *place, uint8_t *handle);

/* Take memory for what the op's member writes to, if need be in place of copies that
 * nobody uses. Return: as pool_take. */
int op_take_memory(struct op *op, uint64_t bytes, struct region *ret);

/* The same for a tick: @what it is for, in words. */
enum res op_need_memory(struct op *op, uint64_t bytes, const char *what, struct region *ret);

/* Memory that the member's reductions may still read is only for who waits with a stream:
 * others wait until they are over. */
enum res op_wait_for_memory(struct op *op);

/* If a device of the job is lost: say so, and what came of it. */
void op_device_fault(const struct job *job, const char *what, struct fault *f);

/* SLAB_E_QUOTA, SLAB_E_FULL or a negative errno from taking @bytes. Return: a code. */
int op_memory_fault(const struct job *job, int error, uint64_t bytes, const char *what,
		    struct fault *f);

#endif
