/* DistributedDataParallel: buckets, passes, verification. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/buckets.h"
#include "core/cleanup.h"
#include "op.h"

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

struct created {
	shardd_ddp ddp;
	uint32_t tensors;
};

static int create_out(const ProtobufCMessage *m, const struct shardd_result *ret, void *out,
		      struct shardd_error *err)
{
	const Shardd__V1__DdpCreateReply *reply = (const Shardd__V1__DdpCreateReply *)m;

	(void)ret;
	(void)err;
	*(struct created *)out = (struct created){ reply->ddp, reply->tensors };
	return 0;
}

struct views {
	struct shardd_ddp_view *views;
	uint32_t n;
};

static void forward_result(const ProtobufCMessage *m, struct shardd_result *ret,
			   const Shardd__V1__Placement **ret_place)
{
	(void)ret;
	*ret_place = ((const Shardd__V1__DdpForwardReply *)m)->place;
}

static int forward_out(const ProtobufCMessage *m, const struct shardd_result *ret, void *out,
		       struct shardd_error *err)
{
	const Shardd__V1__DdpForwardReply *reply = (const Shardd__V1__DdpForwardReply *)m;
	const struct views *to = out;

	if (reply->n_views != to->n)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "views",
				 "there is room for %u views, but the ddp has %zu tensors", to->n,
				 reply->n_views);
	for (uint32_t i = 0; i < to->n; i++) {
		const Shardd__V1__DdpView *v = reply->views[i];

		to->views[i] = (struct shardd_ddp_view){
			.unit = v->unit,
			.tensor = v->tensor,
			.bucket = v->bucket,
			.data = v->elements ? (char *)ret->data + v->offset : NULL,
			.elements = v->elements,
		};
	}
	return 0;
}

struct untouched {
	uint8_t *flags;
	uint32_t n;
};

static int finish_out(const ProtobufCMessage *m, const struct shardd_result *ret, void *out,
		      struct shardd_error *err)
{
	const Shardd__V1__DdpFinishReply *reply = (const Shardd__V1__DdpFinishReply *)m;
	const struct untouched *to = out;

	(void)ret;
	(void)err;
	memset(to->flags, 0, to->n);
	for (size_t i = 0; i < reply->n_untouched; i++)
		if (reply->untouched[i] < to->n)
			to->flags[reply->untouched[i]] = 1;
	return 0;
}

struct joined {
	uint32_t *last;
	uint64_t *shadowed;
};

static int join_out(const ProtobufCMessage *m, const struct shardd_result *ret, void *out,
		    struct shardd_error *err)
{
	const Shardd__V1__JoinUnevenReply *reply = (const Shardd__V1__JoinUnevenReply *)m;
	const struct joined *to = out;

	(void)ret;
	(void)err;
	if (to->last)
		*to->last = reply->last;
	if (to->shadowed)
		*to->shadowed = reply->shadowed;
	return 0;
}

OP_FULL(verify, VerifyModel, verify_model, NULL, NULL, NULL);
OP_FULL(create, DdpCreate, ddp_create, NULL, NULL, create_out);
OP_FULL(forward, DdpForward, ddp_forward, forward_result, NULL, forward_out);
OP_FULL(backward, DdpBackward, ddp_backward, NULL, NULL, NULL);
OP_FULL(ready, DdpReady, ddp_ready, NULL, NULL, NULL);
OP_FULL(finish, DdpFinish, ddp_finish, NULL, NULL, finish_out);
OP_FULL(join_uneven, JoinUneven, join_uneven, NULL, NULL, join_out);
OP_FULL(sparse, ReduceSparse, reduce_sparse, NULL, NULL, NULL);

/* -------------------------------------------------------------------- calls */

int shardd_verify_model(shardd_client *c, shardd_group g, struct shardd_error *err)
{
	Shardd__V1__VerifyModelRequest q = SHARDD__V1__VERIFY_MODEL_REQUEST__INIT;

	q.group = g;
	return op_call(c, &verify, &q.base, NULL, NULL, err);
}

static int fill_sparse(const struct shardd_ddp_spec *spec, Shardd__V1__DdpCreateRequest *q,
		       Shardd__V1__DdpTensor *tensors)
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

static int check_spec(const struct shardd_ddp_spec *spec, struct shardd_error *err)
{
	int r = client_check_size(spec->size, sizeof(*spec), "spec.size", err);

	if (r == 0 && ((spec->n_units && !spec->units) || (spec->n_sparse && !spec->sparse) ||
		       (spec->n_bucket_limits && !spec->bucket_limits)))
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "spec",
			      "units, sparse or bucket_limits is NULL");
	return r;
}

int shardd_ddp_create(shardd_client *c, const struct shardd_ddp_spec *spec, shardd_ddp *ret,
		      uint32_t *ret_tensors, struct shardd_error *err)
{
	Shardd__V1__DdpCreateRequest q = SHARDD__V1__DDP_CREATE_REQUEST__INIT;
	_cleanup_(freep) Shardd__V1__DdpTensor *tensors = NULL;
	struct created out = { 0 };
	int r = check_spec(spec, err);

	if (r < 0)
		return r;
	tensors = calloc(spec->n_sparse + 1, sizeof(*tensors));
	if (!tensors || fill_sparse(spec, &q, tensors) < 0)
		return error_memory(err);
	q.group = spec->group;
	q.units = (uint32_t *)spec->units;
	q.n_units = spec->n_units;
	q.bucket_bytes = spec->bucket_bytes;
	q.first_bucket_bytes = spec->first_bucket_bytes;
	q.bucket_limits = (uint64_t *)spec->bucket_limits;
	q.n_bucket_limits = spec->n_bucket_limits;
	q.find_unused = spec->find_unused;
	q.static_graph = spec->static_graph;
	r = op_call(c, &create, &q.base, &out, NULL, err);
	free(q.sparse);
	if (r == 0 && ret)
		*ret = out.ddp;
	if (r == 0 && ret_tensors)
		*ret_tensors = out.tensors;
	return r;
}

int shardd_ddp_forward(shardd_client *c, shardd_ddp d, struct shardd_ddp_view *views, uint32_t n,
		       struct shardd_error *err)
{
	Shardd__V1__DdpForwardRequest q = SHARDD__V1__DDP_FORWARD_REQUEST__INIT;
	struct views out = { views, n };

	if (!views)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "views", "views is NULL");
	q.ddp = d;
	return op_call(c, &forward, &q.base, &out, NULL, err);
}

int shardd_ddp_backward_submit(shardd_client *c, shardd_ddp d, const uint32_t *unused,
			       size_t n_unused, const uint32_t *kept, size_t n_kept,
			       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpBackwardRequest q = SHARDD__V1__DDP_BACKWARD_REQUEST__INIT;

	q.ddp = d;
	q.unused = (uint32_t *)unused;
	q.n_unused = n_unused;
	q.unused_kept = (uint32_t *)kept;
	q.n_unused_kept = n_kept;
	return op_submit(c, &backward, &q.base, t, err);
}

int shardd_ddp_backward(shardd_client *c, shardd_ddp d, const uint32_t *unused, size_t n_unused,
			const uint32_t *kept, size_t n_kept, struct shardd_error *err)
{
	shardd_ticket t;
	int r = shardd_ddp_backward_submit(c, d, unused, n_unused, kept, n_kept, &t, err);

	return op_finish(c, r, &t, NULL, err);
}

int shardd_ddp_ready_submit(shardd_client *c, shardd_ddp d, const uint32_t *tensors, size_t n,
			    shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DdpReadyRequest q = SHARDD__V1__DDP_READY_REQUEST__INIT;

	q.ddp = d;
	q.tensors = (uint32_t *)tensors;
	q.n_tensors = n;
	return op_submit(c, &ready, &q.base, t, err);
}

int shardd_ddp_ready(shardd_client *c, shardd_ddp d, const uint32_t *tensors, size_t n,
		     struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_ddp_ready_submit(c, d, tensors, n, &t, err), &t, NULL, err);
}

int shardd_ddp_ready_rows(shardd_client *c, shardd_ddp d, uint32_t tensor, const int64_t *rows,
			  size_t n, uint64_t buffer, uint64_t values_offset,
			  struct shardd_error *err)
{
	Shardd__V1__DdpReadyRequest q = SHARDD__V1__DDP_READY_REQUEST__INIT;
	Shardd__V1__SparseRows r = SHARDD__V1__SPARSE_ROWS__INIT;

	r.rows = (int64_t *)rows;
	r.n_rows = n;
	r.buffer = buffer;
	r.values_offset = values_offset;
	q.ddp = d;
	q.tensors = &tensor;
	q.n_tensors = 1;
	q.rows = &r;
	return op_call(c, &ready, &q.base, NULL, NULL, err);
}

int shardd_reduce_sparse_submit(shardd_client *c, shardd_unit u, uint32_t tensor,
				const int64_t *rows, size_t n, uint64_t buffer,
				uint64_t values_offset, shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ReduceSparseRequest q = SHARDD__V1__REDUCE_SPARSE_REQUEST__INIT;
	Shardd__V1__SparseRows r = SHARDD__V1__SPARSE_ROWS__INIT;

	r.rows = (int64_t *)rows;
	r.n_rows = n;
	r.buffer = buffer;
	r.values_offset = values_offset;
	q.unit = u;
	q.tensor = tensor;
	q.rows = &r;
	return op_submit(c, &sparse, &q.base, t, err);
}

int shardd_reduce_sparse(shardd_client *c, shardd_unit u, uint32_t tensor, const int64_t *rows,
			 size_t n, uint64_t buffer, uint64_t values_offset,
			 struct shardd_error *err)
{
	shardd_ticket t;
	int r = shardd_reduce_sparse_submit(c, u, tensor, rows, n, buffer, values_offset, &t, err);

	return op_finish(c, r, &t, NULL, err);
}

int shardd_ddp_finish(shardd_client *c, shardd_ddp d, uint8_t *untouched, uint32_t n,
		      struct shardd_error *err)
{
	Shardd__V1__DdpFinishRequest q = SHARDD__V1__DDP_FINISH_REQUEST__INIT;
	struct untouched out = { untouched, n };

	q.ddp = d;
	return op_call(c, &finish, &q.base, untouched ? &out : NULL, NULL, err);
}

int shardd_join_uneven_submit(shardd_client *c, shardd_group g, bool divide_by_active,
			      shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__JoinUnevenRequest q = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	q.group = g;
	q.divide_by_active = divide_by_active;
	return op_submit(c, &join_uneven, &q.base, t, err);
}

int shardd_join_even_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
			    struct shardd_error *err)
{
	Shardd__V1__JoinUnevenRequest q = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	q.group = g;
	q.error_if_uneven = true;
	return op_submit(c, &join_uneven, &q.base, t, err);
}

int shardd_join_even(shardd_client *c, shardd_group g, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_join_even_submit(c, g, &t, err), &t, NULL, err);
}

int shardd_join_uneven(shardd_client *c, shardd_group g, bool divide_by_active, uint32_t *last,
		       uint64_t *shadowed, struct shardd_error *err)
{
	Shardd__V1__JoinUnevenRequest q = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;
	struct joined out = { last, shadowed };

	q.group = g;
	q.divide_by_active = divide_by_active;
	return op_call(c, &join_uneven, &q.base, &out, NULL, err);
}

/* ------------------------------------------------ parameters at the start */

/* Bytes of buffers at a time: as DistributedDataParallel coalesces them. */
#define BROADCAST_BYTES (UINT64_C(250) << 20)

/* A unit on its way. */
struct sent {
	uint64_t buffer; /* 0: not the root's */
	shardd_ticket t;
};

static int wait_sent(shardd_client *c, struct sent *s, size_t n, int r, struct shardd_error *err)
{
	for (size_t i = 0; i < n; i++) {
		int w = shardd_wait(c, s[i].t, -1, NULL, r < 0 ? NULL : err);

		r = r < 0 ? r : w;
		w = s[i].buffer ? shardd_free(c, s[i].buffer, r < 0 ? NULL : err) : 0;
		r = r < 0 ? r : w;
	}
	return r;
}

static int send_unit(shardd_client *c, shardd_unit u, uint32_t root, const float *data,
		     uint64_t bytes, struct sent *s, struct shardd_error *err)
{
	void *to = NULL;
	int r = data ? shardd_alloc(c, bytes, &s->buffer, &to, err) : 0;

	if (r == 0 && data)
		r = shardd_write(c, to, data, bytes, err);
	if (r == 0)
		r = shardd_init_broadcast_submit(c, u, root, s->buffer, &s->t, err);
	if (r < 0 && s->buffer)
		(void)shardd_free(c, s->buffer, NULL);
	return r;
}

int shardd_init_broadcast_all(shardd_client *c, const shardd_unit *units, const uint64_t *elements,
			      size_t n, uint32_t root, const float *const *data,
			      struct shardd_error *err)
{
	_cleanup_(freep) struct sent *sent = calloc(n + 1, sizeof(*sent));
	uint64_t bytes = 0;
	size_t first = 0;
	int r = 0;

	if (!sent)
		return error_memory(err);
	for (size_t i = 0; r == 0 && i < n; i++) {
		uint64_t need = elements[i] * sizeof(float);

		if (i > first && bytes + need > BROADCAST_BYTES) {
			r = wait_sent(c, sent + first, i - first, 0, err);
			first = i;
			bytes = 0;
		}
		bytes += need;
		if (r == 0)
			r = send_unit(c, units[i], root, data ? data[i] : NULL, need, &sent[i],
				      err);
		if (r < 0)
			return wait_sent(c, sent + first, i - first, r, err);
	}
	return wait_sent(c, sent + first, n - first, r, err);
}
