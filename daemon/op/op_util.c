/* Helpers for the op files: fields, texts, replies. */
#include "op/op_util.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_run.h"
#include "shardd.pb-c.h"

const struct op_type *op_type_by_name(const char *name)
{
	for (size_t i = 0; op_table[i]; i++)
		if (strcmp(op_table[i]->name, name) == 0)
			return op_table[i];
	return NULL;
}

bool op_waits_for_ranks(const struct op *op)
{
	return op->group &&
	       (op->state == OP_WAIT || (op->state == OP_RUN && group_spans(op->group)));
}

uint64_t op_waited_us(const struct op *op, uint64_t now_us)
{
	uint64_t since = op->active_us ? op->active_us : op->announced_us;

	return now_us > since ? now_us - since : 0;
}

bool op_writes_params(const struct op *op)
{
	return op->state != OP_BLOCKED;
}

static int op_no_unit(const struct op *op, uint32_t id, const char *field, struct fault *f)
{
	return fault_set(f, FAULT_NOT_FOUND, field,
			 "there is no unit %u in job '%s': its units are 1 to %u", id,
			 op->m->job->rec->name, op->m->job->n_units);
}

int op_take_unit(struct op *op, uint32_t id, struct fault *f)
{
	op->unit = job_unit_by_number(op->m->job, id);
	return op->unit ? 0 : op_no_unit(op, id, "unit", f);
}

int op_check_all_there(const struct op *op, const uint32_t *units, size_t n, struct fault *f)
{
	for (size_t i = 0; i < n; i++)
		if (guard_check_there(op, job_unit_by_number(op->m->job, units[i]), f))
			return f->code;
	return 0;
}

static int op_take_unit_of(struct op *op, const uint32_t *units, size_t i, struct fault *f)
{
	struct unit *u = job_unit_by_number(op->m->job, units[i]);

	if (!u)
		return op_no_unit(op, units[i], "units", f);
	if (i && units[i] <= units[i - 1])
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %u after %u; its numbers must ascend", units[i],
				 units[i - 1]);
	if (i && u->rec->group != op->group->id)
		return fault_set(f, FAULT_INVALID, "units",
				 "unit '%.100s' is of another group than the first one; all must "
				 "be of one group",
				 u->rec->name);
	op->group = job_group_by_id(op->m->job, u->rec->group);
	return 0;
}

int op_take_units(struct op *op, const uint32_t *units, size_t n, struct fault *f)
{
	if (!n)
		return fault_set(f, FAULT_INVALID, "units",
				 "units is empty; it must name at least one unit");
	for (size_t i = 0; i < n; i++)
		if (op_take_unit_of(op, units, i, f))
			return f->code;
	return 0;
}

int op_take_group(struct op *op, uint32_t id, struct fault *f)
{
	op->group = job_group_by_id(op->m->job, id);
	if (op->group)
		return 0;
	return fault_set(f, FAULT_NOT_FOUND, "group",
			 "there is no group %u in job '%s': its groups are 0 to %u", id,
			 op->m->job->rec->name, op->m->job->n_groups - 1);
}

struct member_buffer *op_hold_buffer(struct op *op, uint64_t id)
{
	struct member_buffer *b = op->held ? NULL : member_buffer_find(op->m, id);

	if (b)
		op->held = member_buffer_ref(b);
	CHECK(!op->held || op->held->id == id);
	return op->held;
}

bool op_told_of_end(struct op *op)
{
	const struct member *m = op->m;

	if (m->state == MEMBER_JOINED && m->epoch == m->job->rec->epoch)
		return false;
	fault_set(&op->fault, FAULT_ABORTED, NULL, "%s", m->ended.text);
	return true;
}

uint8_t *op_buffer_at(struct op *op, uint64_t offset, uint64_t bytes, struct fault *f)
{
	const struct member_buffer *b = op_hold_buffer(op, op->buffer);

	if (!b) {
		fault_set(f, FAULT_NOT_FOUND, "buffer", "there is no buffer %llu in this session",
			  (unsigned long long)op->buffer);
		return NULL;
	}
	if (offset > b->region.bytes || bytes > b->region.bytes - offset) {
		fault_set(f, FAULT_INVALID, "offset",
			  "offset %llu and %llu bytes do not fit buffer %llu of %llu bytes",
			  (unsigned long long)offset, (unsigned long long)bytes,
			  (unsigned long long)op->buffer, (unsigned long long)b->region.bytes);
		return NULL;
	}
	return (uint8_t *)region_addr(&b->region) + offset;
}

/* The type's place in the table, so that equal words mean equal ops. */
static uint64_t op_type_word(const struct op_type *type)
{
	uint64_t i = 0;

	while (op_table[i] && op_table[i] != type)
		i++;
	return i + 1;
}

uint64_t op_unit_word(const struct op *op, const struct unit *u)
{
	/* nodes that have its replicas on other devices must not work together on it */
	return job_is_across(op->m->job) ? u->key ^ u->layout.sets : u->id;
}

void op_print(struct op *op, const char *fmt, ...)
{
	struct fingerprint *p = &op->entry.print;
	va_list ap;

	p->words[0] = op_type_word(op->type);
	p->words[1] = op->unit ? op_unit_word(op, op->unit) : 0;
	va_start(ap, fmt);
	vsnprintf(p->text, sizeof(p->text), fmt, ap);
	va_end(ap);
}

void op_print_order(struct op *op)
{
	struct fingerprint *p = &op->entry.print;
	size_t n = strlen(p->text);

	if (!op->m->job->node->order_ranks || !job_is_across(op->m->job))
		return;
	p->words[7] = 1;
	snprintf(p->text + n, sizeof(p->text) - n, " with order: ranks");
}

int op_check_in_group(const struct op *op, struct fault *f)
{
	const struct job *job = op->m->job;
	uint32_t index;

	if (group_index(job->groups[op->unit->rec->group], op->m->rank, &index))
		return 0;
	return fault_set(f, FAULT_INVALID, "unit",
			 "rank %u is no member of the group of unit '%.100s'", op->m->rank,
			 op->unit->rec->name);
}

int op_check_initialised(const struct op *op, struct fault *f)
{
	if (op->unit->rec->initialised)
		return 0;
	return fault_set(f, FAULT_STATE, NULL, "unit '%.100s' is not initialised",
			 op->unit->rec->name);
}

int op_check_trained(const struct op *op, struct fault *f)
{
	if (unit_is_trained(op->unit))
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "unit '%.100s' has no gradient: all its tensors are frozen",
			 op->unit->rec->name);
}

int op_check_not_summoned(const struct op *op, struct fault *f)
{
	if (!op->unit->summoned_ranks)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "%s: unit '%.100s' is summoned by %u ranks: return it first",
			 op->type->name, op->unit->rec->name, op->unit->summoned_ranks);
}

int op_check_not_torn(const struct op *op, struct fault *f)
{
	const struct job *job = op->m->job;

	if (!job->life.torn)
		return 0;
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' is TORN: %llu steps were applied after the last commit (%llu) when a "
		"trainer died, or the device failed one: initialise all units again",
		job->rec->name, (unsigned long long)job->rec->uncommitted_steps,
		(unsigned long long)job->rec->step);
}

void op_send(const struct op *op, const ProtobufCMessage *reply, Shardd__V1__OpInfo **info,
	     op_reply_cb send, void *ctx)
{
	Shardd__V1__OpInfo i = SHARDD__V1__OP_INFO__INIT;
	Shardd__V1__StreamPoint ready = SHARDD__V1__STREAM_POINT__INIT;
	uint64_t now = clock_now_us();

	i.number = op->entry.number;
	i.waited_us = (op->started_us ? op->started_us : now) - op->announced_us;
	i.ran_us = op->started_us ? now - op->started_us : 0;
	i.draining = op->m->job->life.draining || op->m->job->jobs->draining;
	if (op->result.ready) {
		ready.slot = op->result.queue;
		ready.value = op->result.ready;
		i.ready = &ready;
	}
	*info = &i;
	send(reply, ctx);
}

void op_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	const ProtobufCMessageDescriptor *d = op->type->reply;
	struct {
		ProtobufCMessage base;
		Shardd__V1__OpInfo *info;
	} reply;

	if (op->type->encode) {
		op->type->encode(op, send, ctx);
		return;
	}
	CHECK(d->sizeof_message == sizeof(reply) && strcmp(d->fields[0].name, "info") == 0);
	protobuf_c_message_init(d, &reply);
	op_send(op, &reply.base, &reply.info, send, ctx);
}

void op_place(const struct op *op, Shardd__V1__Placement *place, uint8_t *handle)
{
	const struct region *r = &op->result.place;

	CHECK(r->slab && r->offset <= r->slab->bytes && r->bytes <= r->slab->bytes - r->offset);
	shardd__v1__placement__init(place);
	place->slab = op->result.place.slab->id;
	place->offset = op->result.place.offset;
	place->bytes = op->result.place.bytes;
	place->writable = op->result.writable;
	place->slab_bytes = op->result.place.slab->bytes;
	if (op->m->job->rec->ipc && slab_export_ipc(op->result.place.slab, handle) == 0)
		place->ipc_handle = (ProtobufCBinaryData){ BACKEND_IPC_BYTES, handle };
}

int op_take_memory(struct op *op, uint64_t bytes, struct region *ret)
{
	return job_take(op->m->job, &op->m->pool, bytes, ret);
}

enum res op_need_memory(struct op *op, uint64_t bytes, const char *what, struct region *ret)
{
	int r = op_take_memory(op, bytes, ret);

	if (r == SLAB_E_LATER)
		return op_wait(op, &op->m->job->node->changed);
	if (r)
		op_memory_fault(op->m->job, r, bytes, what, &op->fault);
	return r ? RES_FAILED : RES_DONE;
}

enum res op_wait_for_memory(struct op *op)
{
	CHECK(op->m->executing >= op->m->marking);
	if (op->stream ? !op->m->marking : !op->m->executing)
		return RES_DONE;
	return op_wait(op, &op->m->job->node->changed);
}

void op_device_fault(const struct job *job, const char *what, struct fault *f)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		const struct backend_info *info =
			job->placed[r] ? backend_info(job->placed[r]->backend) : NULL;

		if (info && *info->lost)
			fault_set(f, FAULT_ABORTED, NULL, "%s: %s (%s)", what, info->lost,
				  info->uuid);
	}
}

int op_memory_fault(const struct job *job, int error, uint64_t bytes, const char *what,
		    struct fault *f)
{
	char holders[440];

	if (!slab_is_short(error) && error != -ENOMEM)
		return fault_errno(f, error, what);
	if (error == SLAB_E_QUOTA && job_owner_fault(job, bytes, f))
		return f->code;
	job_holders(job, holders, sizeof(holders));
	return fault_set(f, FAULT_EXHAUSTED, NULL, "cannot allocate %llu bytes for %s: %s",
			 (unsigned long long)bytes, what, holders);
}
