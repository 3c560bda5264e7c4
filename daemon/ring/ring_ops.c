/* Turns a submission into an op, and the end of the op into a completion. */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "ring/rings_impl.h"
#include "methods.h"
#include "rpc/codec.h"
#include "rpc/status_map.h"
#include "shardd.pb-c.h"

/* Most memory of an unpacked request: 64 times the longest request. */
#define REQUEST_BUDGET (64u * RING_LONG_BYTES)
/* A request below this size is accepted regardless of its user's limit: others may wait for it. */
#define REQUEST_SMALL 4096u

/* A submission whose op is under way. */
struct ring_call {
	struct ring *ring; /* NULL: it is gone */
	struct list link;
	uint64_t tag;
	struct op *op;                /* NULL: not there yet */
	bool submitting;              /* op_submit is called for it, which may end the op */
	bool ended;                   /* meanwhile: whoever submits frees it */
	struct codec_message request; /* the op borrows it until it is done */
	struct user *payer;           /* a reference; NULL: nobody pays */
	uint64_t paid;                /* for the request */
};

static void ring_ops_forget_tag(const struct ring_call *call)
{
	struct ring *r = call->ring;

	if (r && call->tag < r->q.entries && r->by_tag[call->tag] == call)
		r->by_tag[call->tag] = NULL;
}

static void ring_ops_clear_call(struct ring_call *call)
{
	ring_ops_forget_tag(call);
	if (call->payer)
		user_sub(call->payer, USER_MEMORY, call->paid);
	user_unref(call->payer);
	list_unlink(&call->link);
	codec_message_deinit(&call->request);
}

static void ring_ops_free_call(struct ring_call *call)
{
	ring_ops_clear_call(call);
	free(call);
}

/* The memory of the request is charged to its user. */
static int ring_ops_pay(struct ring_call *call, struct user *u, struct fault *f)
{
	uint64_t bytes = call->request.used;

	if (bytes > REQUEST_SMALL && !user_has_room(u, USER_MEMORY, bytes))
		return user_refuse(u, USER_MEMORY, bytes, f);
	if (!u)
		return 0;
	call->payer = user_ref(u);
	call->paid = bytes;
	user_add(u, USER_MEMORY, bytes);
	return 0;
}

static void ring_ops_post_fault(struct ring *r, uint64_t tag, const struct fault *f)
{
	uint8_t info[RING_LONG_BYTES];
	uint32_t bytes = status_map_info(f, info, sizeof(info));

	ring_post(r, tag, (uint16_t)status_map_code(f->code), info, bytes);
}

static void ring_ops_send_reply(const ProtobufCMessage *reply, void *ctx)
{
	struct ring_call *call = ctx;
	uint8_t bytes[RING_LONG_BYTES];
	size_t n = protobuf_c_message_get_packed_size(reply);

	CHECK(n <= sizeof(bytes)); /* else methods.h would not carry it */
	protobuf_c_message_pack(reply, bytes);
	ring_post(call->ring, call->tag, 0, bytes, (uint32_t)n);
}

static void ring_ops_on_done(struct op *op, void *userdata)
{
	struct ring_call *call = userdata;

	if (call->ring && op->fault.code)
		ring_ops_post_fault(call->ring, call->tag, &op->fault);
	else if (call->ring)
		op_encode(op, ring_ops_send_reply, call);
	call->op = NULL;
	call->ended = true;
	ring_ops_clear_call(call);
	if (!call->submitting)
		free(call);
}

void ring_forget_calls(struct ring *r)
{
	struct ring_call *call, *tmp;

	list_for_each (call, tmp, &r->calls, link) {
		list_unlink(&call->link);
		ring_ops_forget_tag(call);
		call->ring = NULL;
	}
}

/* The op that a number of the ABI means. NULL: none. */
static const struct op_type *ring_ops_type_of(uint16_t number)
{
	static const struct op_type *types[256];
	static bool known;

	if (!known) {
		known = true;
		for (const struct method *m = methods; m->name; m++) {
			CHECK(m->number < ARRAY_SIZE(types));
			if (m->carried)
				types[m->number] = op_type_by_name(m->name);
		}
	}
	return number < ARRAY_SIZE(types) ? types[number] : NULL;
}

static int ring_ops_unpack(struct ring_call *call, const struct op_type *type,
			   const struct ring_submission *s, struct fault *f)
{
	int r = codec_unpack(&call->request, type->request, s->data, s->bytes, REQUEST_BUDGET);

	if (r == CODEC_E_BUDGET)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "%s: the request takes too much memory when unpacked", type->name);
	return r ? fault_set(f, FAULT_INVALID, NULL, "%s: the request is not a valid message",
			     type->name)
		 : 0;
}

/* Return: 0 (it has been or will be answered by on_done, and may be gone) or a fault code. */
static int ring_ops_begin(struct ring_call *call, struct ring *r, const struct ring_submission *s,
			  struct fault *f)
{
	const struct op_type *type = ring_ops_type_of(s->op);
	struct member *m;
	struct op *op;
	int rc;

	if (!type)
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "the ring carries no method with the number %u: call it over gRPC",
				 s->op);
	if (ring_ops_unpack(call, type, s, f) || ring_ops_pay(call, session_account(r->session), f))
		return f->code;
	m = session_member(r->session, f);
	if (!m)
		return f->code;
	r->session->ops_total++;
	call->submitting = true;
	rc = op_submit(m, type, call->request.msg, 0, ring_ops_on_done, call, &op, f);
	call->submitting = false;
	CHECK(rc == 0 || !call->ended);
	if (call->ended)
		free(call);
	else if (rc == 0)
		call->op = op;
	return rc;
}

/* A bit without an op is of one that has ended, which the client will see, or of one that is yet to be
 * taken. Bounded by the number of entries, whatever the client sets. */
static void ring_ops_cancel_tag(struct ring *r, uint32_t tag)
{
	struct ring_call *call = r->by_tag[tag];

	if (!call || !call->op) {
		r->cancels = r->cancels || call || ring_queue_has_more(&r->q);
		return;
	}
	atomic_fetch_and(&r->q.shared->cancels[tag / 64], ~(UINT64_C(1) << tag % 64));
	op_cancel(call->op, FAULT_CANCELLED, "the caller has given up this op");
}

void ring_cancel(struct ring *r)
{
	r->cancels = false;
	for (uint32_t i = 0; i < r->q.entries / 64; i++) {
		/* with the client's: what it submitted before it is there */
		uint64_t bits = atomic_load(&r->q.shared->cancels[i]);

		for (; bits; bits &= bits - 1)
			ring_ops_cancel_tag(r, i * 64 + (uint32_t)__builtin_ctzll(bits));
	}
}

void ring_submit(struct ring *r, const struct ring_submission *s)
{
	struct ring_call *call;
	struct fault f = FAULT_NULL;

	if (s->op == RING_NOP) {
		ring_post(r, s->tag, 0, NULL, 0);
		return;
	}
	call = calloc(1, sizeof(*call));
	if (!call) {
		fault_errno(&f, -ENOMEM, "reading a submission");
		ring_ops_post_fault(r, s->tag, &f);
		return;
	}
	call->ring = r;
	call->tag = s->tag;
	list_init(&call->link);
	list_append(&r->calls, &call->link);
	if (s->tag < r->q.entries && !r->by_tag[s->tag])
		r->by_tag[s->tag] = call;
	if (ring_ops_begin(call, r, s, &f) == 0)
		return;
	ring_ops_post_fault(r, s->tag, &f);
	ring_ops_free_call(call);
}
