/* DistributedDataParallel: buckets, passes, verification. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/buckets.h"
#include "core/cleanup.h"
#include "op.h"
#include "options.h"

static_assert(sizeof(struct shardd_bucket_tensor) == sizeof(struct bucket_tensor) &&
		      offsetof(struct shardd_bucket_tensor, sparse) ==
			      offsetof(struct bucket_tensor, sparse),
	      "the same tensors");

int shardd_ddp_buckets(const struct shardd_bucket_tensor *tensors, uint32_t n,
		       const uint64_t *limits, unsigned n_limits, const uint32_t *map,
		       uint32_t *ret_tensors, uint32_t *ret_sizes, uint32_t *ret_n,
		       struct shardd_error *err)
{
	int64_t r = buckets_assign((const struct bucket_tensor *)tensors, n, limits, n_limits, map,
				   ret_tensors, ret_sizes);

	if (r < 0)
		return error_memory(err);
	*ret_n = (uint32_t)r;
	return 0;
}

/* ------------------------------------------------------------------ replies */

static void ddp_create_result(const ProtobufCMessage *m, struct shardd_result *ret,
			      const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__DdpCreateResponse *reply = (const Shardd__V1__DdpCreateResponse *)m;

	(void)ret_place;
	ret->ddp = reply->ddp;
	ret->tensors = reply->tensors;
}

static void ddp_forward_result(const ProtobufCMessage *m, struct shardd_result *ret,
			       const Shardd__V1__Placement **ret_place)
{
	(void)ret;
	*ret_place = ((const Shardd__V1__DdpForwardResponse *)m)->place;
}

static int ddp_forward_out(const ProtobufCMessage *m, const struct shardd_result *ret,
			   const struct op_out *to, struct shardd_error *err)
{
	const Shardd__V1__DdpForwardResponse *reply = (const Shardd__V1__DdpForwardResponse *)m;
	struct shardd_ddp_view *views = to->data;

	if (reply->n_views != to->n)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "views",
				 "there is room for %u views, but the ddp has %zu tensors", to->n,
				 reply->n_views);
	for (uint32_t i = 0; i < to->n; i++) {
		const Shardd__V1__DdpView *v = reply->views[i];

		views[i] = (struct shardd_ddp_view){
			.unit = v->unit,
			.tensor = v->tensor,
			.bucket = v->bucket,
			.data = v->elements ? (char *)ret->data + v->offset : NULL,
			.elements = v->elements,
		};
	}
	return 0;
}

static int ddp_finish_out(const ProtobufCMessage *m, const struct shardd_result *ret,
			  const struct op_out *to, struct shardd_error *err)
{
	const Shardd__V1__DdpFinishResponse *reply = (const Shardd__V1__DdpFinishResponse *)m;
	uint8_t *flags = to->data;

	(void)ret;
	memset(flags, 0, to->n);
	for (size_t i = 0; i < reply->n_untouched; i++) {
		if (reply->untouched[i] >= to->n)
			return error_set(err, SHARDD_INTERNAL, NULL,
					 "the daemon names untouched tensor %u, but there is room "
					 "for %u",
					 reply->untouched[i], to->n);
		flags[reply->untouched[i]] = 1;
	}
	return 0;
}

static void ddp_join_result(const ProtobufCMessage *m, struct shardd_result *ret,
			    const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__JoinUnevenResponse *reply = (const Shardd__V1__JoinUnevenResponse *)m;

	(void)ret_place;
	ret->last = reply->last;
	ret->surrogates = reply->surrogates;
}

OP_FULL(verify, VerifyModel, verify_model, NULL, NULL, NULL);
OP_FULL(create, DdpCreate, ddp_create, ddp_create_result, NULL, NULL);
OP_FULL(forward, DdpForward, ddp_forward, ddp_forward_result, NULL, ddp_forward_out);
OP_FULL(backward, DdpBackward, ddp_backward, NULL, NULL, NULL);
OP_FULL(ready, DdpReady, ddp_ready, NULL, NULL, NULL);
OP_FULL(finish, DdpFinish, ddp_finish, NULL, NULL, ddp_finish_out);
OP_FULL(join_uneven, JoinUneven, join_uneven, ddp_join_result, NULL, NULL);
OP_FULL(sparse, ReduceSparse, reduce_sparse, NULL, NULL, NULL);

/* -------------------------------------------------------------------- calls */

int shardd_submit_verify_model(shardd_client *c, const struct shardd_verify_model_options *options,
			       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__VerifyModelRequest q = SHARDD__V1__VERIFY_MODEL_REQUEST__INIT;
	struct shardd_verify_model_options room;
	const struct shardd_verify_model_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.group = o->group;
	return op_submit(c, &verify, &q.base, t, err);
}

static int ddp_fill_sparse(const struct shardd_ddp_create_options *spec,
			   Shardd__V1__DdpCreateRequest *q, Shardd__V1__DdpTensor *tensors)
{
	q->sparse = calloc(spec->n_sparse + 1, sizeof(Shardd__V1__DdpTensor *));
	if (!q->sparse)
		return -ENOMEM;
	for (size_t i = 0; i < spec->n_sparse; i++) {
		shardd__v1__ddp_tensor__init(&tensors[i]);
		tensors[i].unit = spec->sparse[i].unit;
		tensors[i].tensor = spec->sparse[i].tensor;
		q->sparse[i] = &tensors[i];
	}
	q->n_sparse = spec->n_sparse;
	return 0;
}

static int ddp_create_check(const struct shardd_ddp_create_options *o, struct shardd_error *err)
{
	if ((!o->n_units || o->units) && (!o->n_sparse || o->sparse) &&
	    (!o->n_bucket_limits || o->bucket_limits))
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, "options",
			 "units, sparse or bucket_limits is NULL");
}

int shardd_submit_ddp_create(shardd_client *c, const struct shardd_ddp_create_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpCreateRequest q = SHARDD__V1__DDP_CREATE_REQUEST__INIT;
	_cleanup_(freep) Shardd__V1__DdpTensor *tensors = NULL;
	struct shardd_ddp_create_options room;
	const struct shardd_ddp_create_options *o = OPTIONS_READ(options, &room, err);
	int r = o ? ddp_create_check(o, err) : -SHARDD_INVALID_ARGUMENT;

	if (r < 0)
		return r;
	tensors = calloc(o->n_sparse + 1, sizeof(*tensors));
	if (!tensors || ddp_fill_sparse(o, &q, tensors) < 0)
		return error_memory(err);
	q.group = o->group;
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	q.bucket_bytes = o->bucket_bytes;
	q.first_bucket_bytes = o->first_bucket_bytes;
	q.bucket_limits = (uint64_t *)o->bucket_limits;
	q.n_bucket_limits = o->n_bucket_limits;
	q.find_unused = o->find_unused;
	q.static_graph = o->static_graph;
	r = op_submit(c, &create, &q.base, t, err);
	free(q.sparse);
	return r;
}

int shardd_submit_ddp_forward(shardd_client *c, const struct shardd_ddp_forward_options *options,
			      shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpForwardRequest q = SHARDD__V1__DDP_FORWARD_REQUEST__INIT;
	struct shardd_ddp_forward_options room;
	const struct shardd_ddp_forward_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (!o->views)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "views", "views is NULL");
	q.ddp = o->ddp;
	return op_submit_out(c, &forward, &q.base, (struct op_out){ o->views, o->n_views }, t, err);
}

static int ddp_check_list(const void *list, size_t n, const char *field, struct shardd_error *err)
{
	if (list || !n)
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, field, "%s is NULL, but there are %zu",
			 field, n);
}

int shardd_submit_ddp_backward(shardd_client *c, const struct shardd_ddp_backward_options *options,
			       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpBackwardRequest q = SHARDD__V1__DDP_BACKWARD_REQUEST__INIT;
	struct shardd_ddp_backward_options room;
	const struct shardd_ddp_backward_options *o = OPTIONS_READ(options, &room, err);

	if (!o || ddp_check_list(o->unused, o->n_unused, "unused", err) < 0 ||
	    ddp_check_list(o->kept, o->n_kept, "kept", err) < 0)
		return -SHARDD_INVALID_ARGUMENT;
	q.ddp = o->ddp;
	q.unused = (uint32_t *)o->unused;
	q.n_unused = o->n_unused;
	q.unused_kept = (uint32_t *)o->kept;
	q.n_unused_kept = o->n_kept;
	return op_submit(c, &backward, &q.base, t, err);
}

static int ddp_ready_check(const struct shardd_ddp_ready_options *o, struct shardd_error *err)
{
	if (!o->sparse && (o->rows || o->n_rows || o->buffer || o->values_offset))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.sparse",
				 "rows, buffer or values_offset is given, but sparse is not set");
	if (o->sparse && o->n_tensors != 1)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.n_tensors",
				 "sparse is set, but n_tensors is %zu: mark one sparse tensor at "
				 "a time",
				 o->n_tensors);
	if (ddp_check_list(o->tensors, o->n_tensors, "tensors", err) < 0)
		return -SHARDD_INVALID_ARGUMENT;
	return ddp_check_list(o->rows, o->n_rows, "rows", err);
}

int shardd_submit_ddp_ready(shardd_client *c, const struct shardd_ddp_ready_options *options,
			    shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpReadyRequest q = SHARDD__V1__DDP_READY_REQUEST__INIT;
	Shardd__V1__SparseRows rows = SHARDD__V1__SPARSE_ROWS__INIT;
	struct shardd_ddp_ready_options room;
	const struct shardd_ddp_ready_options *o = OPTIONS_READ(options, &room, err);
	int r = o ? ddp_ready_check(o, err) : -SHARDD_INVALID_ARGUMENT;

	if (r < 0)
		return r;
	rows.rows = (int64_t *)o->rows;
	rows.n_rows = o->n_rows;
	rows.buffer = o->buffer;
	rows.values_offset = o->values_offset;
	q.ddp = o->ddp;
	q.tensors = (uint32_t *)o->tensors;
	q.n_tensors = o->n_tensors;
	q.rows = o->sparse ? &rows : NULL;
	return op_submit(c, &ready, &q.base, t, err);
}

int shardd_submit_reduce_sparse(shardd_client *c,
				const struct shardd_reduce_sparse_options *options,
				shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ReduceSparseRequest q = SHARDD__V1__REDUCE_SPARSE_REQUEST__INIT;
	struct shardd_reduce_sparse_options room;
	const struct shardd_reduce_sparse_options *o = OPTIONS_READ(options, &room, err);
	Shardd__V1__SparseRows rows = SHARDD__V1__SPARSE_ROWS__INIT;

	if (!o || ddp_check_list(o->rows, o->n_rows, "rows", err) < 0)
		return -SHARDD_INVALID_ARGUMENT;
	rows.rows = (int64_t *)o->rows;
	rows.n_rows = o->n_rows;
	rows.buffer = o->buffer;
	rows.values_offset = o->values_offset;
	q.unit = o->unit;
	q.tensor = o->tensor;
	q.rows = &rows;
	return op_submit(c, &sparse, &q.base, t, err);
}

int shardd_submit_ddp_finish(shardd_client *c, const struct shardd_ddp_finish_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpFinishRequest q = SHARDD__V1__DDP_FINISH_REQUEST__INIT;
	struct shardd_ddp_finish_options room;
	const struct shardd_ddp_finish_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (!o->untouched != !o->n_untouched)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.n_untouched",
				 "n_untouched is %u and untouched is %s: give both or neither",
				 o->n_untouched, o->untouched ? "set" : "NULL");
	q.ddp = o->ddp;
	q.untouched_room = o->n_untouched;
	return op_submit_out(c, &finish, &q.base, (struct op_out){ o->untouched, o->n_untouched },
			     t, err);
}

int shardd_submit_join_uneven(shardd_client *c, const struct shardd_join_uneven_options *options,
			      shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__JoinUnevenRequest q = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;
	struct shardd_join_uneven_options room;
	const struct shardd_join_uneven_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (o->require_even && o->divide_by_active)
		return error_set(
			err, SHARDD_INVALID_ARGUMENT, "options.divide_by_active",
			"divide_by_active is true; it must be false with require_even, which "
			"stops all ranks as soon as one has no more inputs");
	q.group = o->group;
	q.divide_by_active = o->divide_by_active;
	q.error_if_uneven = o->require_even;
	return op_submit(c, &join_uneven, &q.base, t, err);
}

/* ------------------------------------------------ parameters at the start */

/* Bytes of buffers at a time: as DistributedDataParallel coalesces them. */
#define BROADCAST_BYTES (UINT64_C(250) << 20)

/* A unit on its way. */
struct sent {
	uint64_t buffer; /* 0: not the root's */
	shardd_ticket t;
};

/* The failure of an op that was detached before would be returned in place of freeing it. */
static int ddp_free_sent(shardd_client *c, uint64_t buffer, int r, struct shardd_error *err)
{
	struct shardd_error scratch;
	int w = op_detached(c, false, r < 0 ? &scratch : err);

	r = r < 0 ? r : w;
	w = shardd_free(c, buffer, r < 0 ? &scratch : err);
	return r < 0 ? r : w;
}

/* Their buffers are in use until they have ended, so no interrupt ends a wait. */
static int ddp_wait_sent(shardd_client *c, struct sent *s, size_t n, int r,
			 struct shardd_error *err)
{
	for (size_t i = 0; i < n; i++) {
		struct shardd_error e;
		int w;

		do
			w = shardd_wait(c, s[i].t, -1, NULL, &e);
		while (w == -SHARDD_CANCELLED && e.native == EINTR);
		if (w < 0 && r == 0) {
			r = w;
			if (err)
				*err = e;
		}
		if (s[i].buffer)
			r = ddp_free_sent(c, s[i].buffer, r, err);
	}
	return r;
}

static int ddp_send_unit(shardd_client *c, shardd_unit u, uint32_t root, const void *data,
			 uint64_t bytes, struct sent *s, struct shardd_error *err)
{
	void *to = NULL;
	int r = data ? shardd_alloc(c, bytes, &s->buffer, &to, err) : 0;

	if (r == 0 && data)
		r = shardd_write(c, to, data, bytes, err);
	if (r == 0)
		r = shardd_submit_init(c,
				       SHARDD_OPTIONS(init, .unit = u, .from = SHARDD_FROM_ROOT,
						      .root = root, .buffer = s->buffer),
				       &s->t, err);
	if (r < 0 && s->buffer)
		r = ddp_free_sent(c, s->buffer, r, err);
	return r;
}

int shardd_init_broadcast_all(shardd_client *c, const shardd_unit *units, const uint64_t *bytes,
			      size_t n, uint32_t root, const void *const *data,
			      struct shardd_error *err)
{
	_cleanup_(freep) struct sent *sent = calloc(n + 1, sizeof(*sent));
	uint64_t sum = 0;
	size_t first = 0;
	int r = 0;

	if (!sent)
		return error_memory(err);
	for (size_t i = 0; r == 0 && i < n; i++) {
		if (i > first && sum + bytes[i] > BROADCAST_BYTES) {
			r = ddp_wait_sent(c, sent + first, i - first, 0, err);
			first = i;
			sum = 0;
		}
		sum += bytes[i];
		if (r == 0)
			r = ddp_send_unit(c, units[i], root, data ? data[i] : NULL, bytes[i],
					  &sent[i], err);
		if (r < 0)
			return ddp_wait_sent(c, sent + first, i - first, r, err);
	}
	return ddp_wait_sent(c, sent + first, n - first, r, err);
}
