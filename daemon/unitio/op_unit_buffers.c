/*
 * UnitBuffers: where a rank's own buffers of a unit are, its to write. BroadcastBuffers: those
 * of one rank to all others; buffers of units that were registered together lie side by side
 * and travel as one.
 */
#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "work/coll.h"
#include "work/share.h"
#include "shardd.pb-c.h"
#include "unitio/buf_args.h"

static int op_unit_buffers_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	op->touches = TOUCH_BUFFERS;
	return op_take_unit(op, ((const Shardd__V1__UnitBuffersRequest *)msg)->unit, f);
}

static int op_unit_buffers_no_buffers(const struct op *op, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, "unit", "unit '%.100s' has no buffers",
			 op->unit->rec->name);
}

static int op_unit_buffers_check(struct op *op, struct fault *f)
{
	if (op_check_in_group(op, f))
		return f->code;
	return op->unit->buffers ? 0 : op_unit_buffers_no_buffers(op, f);
}

static enum res op_unit_buffers_start(struct op *op)
{
	uint32_t index = 0;

	op_begin_run(op);
	CHECK(group_index(op->m->job->groups[op->unit->rec->group], op->m->rank, &index));
	op->result.place = op->unit->buffers[index];
	op->result.writable = true;
	return RES_DONE;
}

static void op_unit_buffers_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__UnitBuffersResponse reply = SHARDD__V1__UNIT_BUFFERS_RESPONSE__INIT;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_unit_buffers = {
	.name = "UnitBuffers",
	.request = &shardd__v1__unit_buffers_request__descriptor,
	.decode = op_unit_buffers_decode,
	.check = op_unit_buffers_check,
	.tick = op_unit_buffers_start,
	.encode = op_unit_buffers_encode,
};

/* ------------------------------------------------------------------ broadcast */

static int op_unit_buffers_decode_broadcast(struct op *op, const ProtobufCMessage *msg,
					    struct fault *f)
{
	const Shardd__V1__BroadcastBuffersRequest *r =
		(const Shardd__V1__BroadcastBuffersRequest *)msg;
	uint32_t index;

	op->touches = TOUCH_BUFFERS;
	buf_args(op)->root = r->root;
	if (r->unit && r->group)
		return fault_set(f, FAULT_INVALID, "group",
				 "unit and group are both given: give one of them");
	if (r->unit && op_take_unit(op, r->unit, f))
		return f->code;
	if (op_take_group(op, r->unit ? op->unit->rec->group : r->group, f))
		return f->code;
	if (!group_index(op->group, r->root, &index))
		return fault_set(f, FAULT_INVALID, "root",
				 "root is %u; it must be a rank of group '%.64s'", r->root,
				 op->group->rec->name);
	return 0;
}

static int op_unit_buffers_check_broadcast(struct op *op, struct fault *f)
{
	if (op->unit && !op->unit->buffers)
		return op_unit_buffers_no_buffers(op, f);
	op_print(op, "BroadcastBuffers of %s%.64s%s from rank %u",
		 op->unit ? "unit '" : "all units", op->unit ? op->unit->rec->name : "",
		 op->unit ? "'" : "", buf_args(op)->root);
	op->entry.print.words[2] = buf_args(op)->root;
	return 0;
}

/* The buffers of one or several units, for every rank in one piece. */
struct stretch {
	uint32_t first; /* unit - 1 */
	uint64_t bytes;
};

static bool op_unit_buffers_takes_part(const struct coll *c, const struct unit *u)
{
	return u->buffers && u->rec->group == c->group->id && (!c->unit || c->unit == u);
}

static bool op_unit_buffers_adjoins(const struct coll *c, const struct stretch *s,
				    const struct unit *u)
{
	const struct region *first = c->job->units[s->first]->buffers;

	CHECK(s->bytes > 0);
	if (group_spans(c->group))
		return false; /* all nodes must say the same */
	for (uint32_t i = 0; i < c->n; i++)
		if (u->buffers[i].slab != first[i].slab ||
		    u->buffers[i].offset != first[i].offset + s->bytes)
			return false;
	return true;
}

/* The next one from unit @at on; @at is then behind it. Return: false: there is none. */
static bool op_unit_buffers_next_stretch(const struct coll *c, uint32_t *at, struct stretch *ret)
{
	ret->bytes = 0;
	for (; *at < c->job->n_units; ++*at) {
		const struct unit *u = c->job->units[*at];

		if (!op_unit_buffers_takes_part(c, u))
			continue;
		if (!ret->bytes)
			ret->first = *at;
		else if (!op_unit_buffers_adjoins(c, ret, u))
			break;
		ret->bytes += unit_buffers_bytes(u->rec);
	}
	return ret->bytes;
}

static void *op_unit_buffers_address(const struct coll *c, const struct stretch *s, uint32_t index)
{
	return region_addr(&c->job->units[s->first]->buffers[group_member_here(c->group, index)]);
}

/* ---- whose buffers */

struct buffers_state {
	struct share share; /* between nodes: a slot of each device */
	uint32_t root;      /* whose they are: index in the group */
};

/* Of the ranks of a device: which have inputs. */
struct buffers_slot {
	uint32_t end;      /* behind the last one, in the group; 0: none */
	uint32_t has_root; /* is the root that was asked for among them? */
};

static struct buffers_state *op_unit_buffers_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct buffers_state));
}

static void op_unit_buffers_free(struct coll *c)
{
	share_end(&op_unit_buffers_of(c)->share);
}

static uint32_t op_unit_buffers_asked_root(const struct coll *c)
{
	uint32_t index = 0;

	CHECK(group_index(c->group, buf_args(c->ops[0])->root, &index));
	return index;
}

static void op_unit_buffers_fill_slot(const struct coll *c, const struct coll_part *p,
				      struct buffers_slot *slot)
{
	for (uint32_t k = 0; k < p->n; k++) {
		uint32_t i = p->members[k];

		if (c->ops[i]->surrogate)
			continue;
		slot->end = group_member_here(c->group, i) + 1;
		slot->has_root |= slot->end == op_unit_buffers_asked_root(c) + 1;
	}
}

/* The last rank of the group that has inputs, where the root has none: its own are the newest. */
static enum res op_unit_buffers_find_root(struct coll *c)
{
	struct buffers_state *s = op_unit_buffers_of(c);
	uint32_t end = 0;
	bool there = false;

	if (!s->share.all) {
		RES_TRY(share_begin(c, &s->share, sizeof(struct buffers_slot)));
		for (unsigned d = 0; d < c->n_parts; d++)
			op_unit_buffers_fill_slot(c, &c->parts[d], share_own(c, &s->share, d));
	}
	RES_TRY(share_tick(c, &s->share));
	for (unsigned d = 0; d < coll_devices(c); d++) {
		const struct buffers_slot *slot = share_slot(&s->share, d);

		end = slot->end > end ? slot->end : end;
		there = there || slot->has_root;
	}
	s->root = there ? op_unit_buffers_asked_root(c) : end - 1;
	if (s->root < coll_size(c))
		return RES_DONE;
	fault_set(c->fault, FAULT_INTERNAL, NULL,
		  "no node has said which of its ranks have inputs");
	return RES_FAILED;
}

/* On this node, or COLL_ELSEWHERE. */
static uint32_t op_unit_buffers_root_of(const struct coll *c)
{
	uint32_t here;

	return group_is_here(c->group, op_unit_buffers_of(c)->root, &here) ? here : COLL_ELSEWHERE;
}

static unsigned op_unit_buffers_root_device(const struct coll *c)
{
	return group_device_number(c->group, op_unit_buffers_of(c)->root);
}

/* Whose buffers on a device get them first: the root's, or the first member's. */
static uint32_t op_unit_buffers_first_on(const struct coll *c, const struct coll_part *p)
{
	uint32_t root = op_unit_buffers_root_of(c);

	return root != COLL_ELSEWHERE && coll_part(c, root) == p ? root : p->members[0];
}

static void op_unit_buffers_copy_stretch(struct coll *c, struct coll_part *p,
					 const struct stretch *s)
{
	uint32_t from = op_unit_buffers_first_on(c, p);

	for (uint32_t i = 0; i < p->n; i++)
		if (p->members[i] != from)
			coll_launch(p, LAUNCH_COPY, s->bytes)->copy =
				(struct k_copy){ op_unit_buffers_address(c, s, p->members[i]),
						 op_unit_buffers_address(c, s, from) };
}

static enum res op_unit_buffers_to_others(struct coll *c)
{
	struct stretch s;
	size_t n = 0;

	for (uint32_t at = 0; op_unit_buffers_next_stretch(c, &at, &s);)
		n++;
	RES_TRY(coll_need_launches(c, n * c->n));
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t at = 0; op_unit_buffers_next_stretch(c, &at, &s);)
			op_unit_buffers_copy_stretch(c, &c->parts[d], &s);
	return coll_kernels(c);
}

static enum res op_unit_buffers_to_other_devices(struct coll *c, const struct stretch *s)
{
	void *data[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = op_unit_buffers_address(c, s, op_unit_buffers_first_on(c, &c->parts[d]));
	coll_broadcast(c, data, s->bytes, op_unit_buffers_root_device(c));
	return RES_WAIT;
}

enum op_unit_buffers_stage { BUFFERS_BEGIN, BUFFERS_ROOT, BUFFERS_BETWEEN, BUFFERS_DONE };

static enum res op_unit_buffers_tick(struct coll *c)
{
	struct stretch s;

	switch ((enum op_unit_buffers_stage)c->stage) {
	case BUFFERS_BEGIN:
		RES_TRY(coll_check_epoch(c, false));
		if (!coll_is_alone(c))
			RES_TRY(coll_ready(c));
		RES_TRY(coll_need_launches(c, 0));
		c->stage = BUFFERS_ROOT;
		return coll_kernels(c); /* none: for the streams that wrote the buffers */
	case BUFFERS_ROOT:
		RES_TRY(op_unit_buffers_find_root(c));
		c->stage = BUFFERS_BETWEEN;
		fallthrough;
	case BUFFERS_BETWEEN: /* one stretch after the other */
		if (!coll_is_alone(c) && op_unit_buffers_next_stretch(c, &c->turn, &s))
			return op_unit_buffers_to_other_devices(c, &s);
		c->stage = BUFFERS_DONE;
		return op_unit_buffers_to_others(c);
	case BUFFERS_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_broadcast_buffers = {
	.name = "BroadcastBuffers",
	.collective = true,
	.surrogates = true,
	.request = &shardd__v1__broadcast_buffers_request__descriptor,
	.decode = op_unit_buffers_decode_broadcast,
	.check = op_unit_buffers_check_broadcast,
	.coll_tick = op_unit_buffers_tick,
	.coll_bytes = sizeof(struct buffers_state),
	.coll_free = op_unit_buffers_free,
	.reply = &shardd__v1__broadcast_buffers_response__descriptor,
	.reads_inputs = true,
};
