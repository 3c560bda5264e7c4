/* DdpCreate: gradients of replicated units that are reduced in buckets. All ranks must ask for
 * the same, or are told the first difference. */
#include <errno.h>
#include <stdlib.h>

#include "core/buckets.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/fnv.h"
#include "ddp/op_ddp.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_util.h"
#include "reduce/sparse.h"
#include "shardd.pb-c.h"
#include "work/coll.h"

struct create_args {
	const struct Shardd__V1__DdpCreateRequest *create; /* valid until done */
};

static inline struct create_args *create_args(const struct op *op)
{
	_Static_assert(sizeof(struct create_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

typedef Shardd__V1__DdpCreateRequest request;

/* One without rows could never be ready. */
static int op_ddp_create_check_sparse(struct job *job, const Shardd__V1__DdpTensor *t,
				      struct fault *f)
{
	const struct unit *u = job_unit_by_id(job, t->unit);
	struct fault no_rows = FAULT_NULL;

	if (!u || t->tensor >= u->rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "sparse",
				 "sparse names tensor %u of unit %u, which does not exist",
				 t->tensor, t->unit);
	if (op_sparse_check_rows(u, t->tensor, NULL, 0, &no_rows))
		return fault_set(f, FAULT_INVALID, "sparse", "%s", no_rows.text);
	return 0;
}

static int op_ddp_create_check_limits(const request *r, struct fault *f)
{
	if (r->n_bucket_limits > DDP_MAX_LIMITS)
		return fault_set(f, FAULT_INVALID, "bucket_limits",
				 "bucket_limits has %zu entries; the maximum is %u",
				 r->n_bucket_limits, DDP_MAX_LIMITS);
	if (r->n_bucket_limits && (r->bucket_bytes || r->first_bucket_bytes))
		return fault_set(f, FAULT_INVALID, "bucket_limits",
				 "bucket_limits is given with bucket_bytes or first_bucket_bytes: "
				 "give one of the two forms");
	for (size_t i = 0; i < r->n_bucket_limits; i++)
		if (!r->bucket_limits[i])
			return fault_set(f, FAULT_INVALID, "bucket_limits",
					 "bucket_limits[%zu] is 0; it must be at least 1", i);
	return 0;
}

static int op_ddp_create_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const request *r = (const request *)msg;

	create_args(op)->create = r;
	op->touches = TOUCH_GRADS;
	if (r->n_units > op->m->job->n_units || !r->n_units)
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %zu entries; it must have 1 to %u", r->n_units,
				 op->m->job->n_units);
	if (op_ddp_create_check_limits(r, f))
		return f->code;
	for (size_t i = 0; i < r->n_sparse; i++)
		if (op_ddp_create_check_sparse(op->m->job, r->sparse[i], f))
			return f->code;
	return op_take_group(op, r->group, f);
}

static uint64_t op_ddp_create_hash_units(const struct job *job, const request *r)
{
	uint64_t hash = FNV_BEGIN;

	for (size_t i = 0; i < r->n_units; i++) {
		const struct unit *u = job_unit_by_id((struct job *)job, r->units[i]);

		hash = fnv_add(hash, u ? u->key : 0);
	}
	return hash;
}

static uint64_t op_ddp_create_hash_limits(const request *r)
{
	uint64_t hash = fnv_add(fnv_add(FNV_BEGIN, r->bucket_bytes), r->first_bucket_bytes);

	for (size_t i = 0; i < r->n_bucket_limits; i++)
		hash = fnv_add(hash, r->bucket_limits[i]);
	return hash;
}

static uint64_t op_ddp_create_hash_sparse(const struct job *job, const request *r)
{
	uint64_t hash = FNV_BEGIN;

	for (size_t i = 0; i < r->n_sparse; i++) {
		const struct unit *u = job_unit_by_id((struct job *)job, r->sparse[i]->unit);

		hash = fnv_add(hash, u ? u->key : 0);
		hash = fnv_add(hash, r->sparse[i]->tensor);
	}
	return hash;
}

static const char *op_ddp_create_unit_name(const struct job *job, const request *r, size_t i)
{
	const struct unit *u =
		i < r->n_units ? job_unit_by_id((struct job *)job, r->units[i]) : NULL;

	return u ? u->rec->name : "none";
}

/* Ranks of one node are told where their lists differ; those of several, what each asks for. */
static void op_ddp_create_print(struct op *op)
{
	const request *r = create_args(op)->create;
	const struct job *job = op->m->job;
	uint64_t *words = op->entry.print.words;

	if (!job_is_across(job)) {
		op_print(op, "DdpCreate");
		return;
	}
	words[2] = op_ddp_create_hash_units(job, r);
	words[3] = op_ddp_create_hash_limits(r);
	words[4] = (uint64_t)r->find_unused << 1 | r->static_graph;
	words[5] = op_ddp_create_hash_sparse(job, r);
	op_print(op,
		 "DdpCreate (%zu units '%.20s' to '%.20s', hash %08x; bucket_bytes %llu, %llu, "
		 "hash %08x; %zu sparse, hash %08x%s%s)",
		 r->n_units, op_ddp_create_unit_name(job, r, 0),
		 op_ddp_create_unit_name(job, r, r->n_units - 1), (uint32_t)words[2],
		 (unsigned long long)r->bucket_bytes, (unsigned long long)r->first_bucket_bytes,
		 (uint32_t)words[3], r->n_sparse, (uint32_t)words[5],
		 r->find_unused ? "; find_unused" : "", r->static_graph ? "; static_graph" : "");
}

static int op_ddp_create_check(struct op *op, struct fault *f)
{
	if (op_check_not_torn(op, f))
		return f->code;
	op_ddp_create_print(op);
	return 0;
}

/* Where two lists first differ; SIZE_MAX: nowhere. */
static size_t op_ddp_create_first_difference(const uint32_t *a, size_t n_a, const uint32_t *b,
					     size_t n_b)
{
	size_t i = 0;

	while (i < n_a && i < n_b && a[i] == b[i])
		i++;
	return i == n_a && i == n_b ? SIZE_MAX : i;
}

static bool op_ddp_create_same_limits(const request *a, const request *b)
{
	if (a->n_bucket_limits != b->n_bucket_limits)
		return false;
	for (size_t i = 0; i < a->n_bucket_limits; i++)
		if (a->bucket_limits[i] != b->bucket_limits[i])
			return false;
	return true;
}

static bool op_ddp_create_same_sparse(const request *a, const request *b)
{
	if (a->n_sparse != b->n_sparse)
		return false;
	for (size_t i = 0; i < a->n_sparse; i++)
		if (a->sparse[i]->unit != b->sparse[i]->unit ||
		    a->sparse[i]->tensor != b->sparse[i]->tensor)
			return false;
	return true;
}

static int op_ddp_create_compare(const struct coll *c, const struct op *a, const struct op *b,
				 struct fault *f)
{
	const request *x = create_args(a)->create, *y = create_args(b)->create;
	size_t at = op_ddp_create_first_difference(x->units, x->n_units, y->units, y->n_units);

	if (at != SIZE_MAX)
		return fault_set(f, FAULT_STATE, NULL,
				 "DdpCreate: units differ at position %zu: rank %u (pid %d) has "
				 "'%.100s', rank %u (pid %d) '%.100s'",
				 at, a->m->rank, member_pid(a->m),
				 op_ddp_create_unit_name(c->job, x, at), b->m->rank,
				 member_pid(b->m), op_ddp_create_unit_name(c->job, y, at));
	if (x->bucket_bytes != y->bucket_bytes || x->first_bucket_bytes != y->first_bucket_bytes ||
	    !op_ddp_create_same_limits(x, y) || x->find_unused != y->find_unused ||
	    x->static_graph != y->static_graph)
		return fault_set(f, FAULT_STATE, NULL,
				 "DdpCreate: bucket_bytes, first_bucket_bytes, bucket_limits, "
				 "find_unused or static_graph of rank %u (pid %d) and rank %u (pid "
				 "%d) differ",
				 a->m->rank, member_pid(a->m), b->m->rank, member_pid(b->m));
	if (!op_ddp_create_same_sparse(x, y))
		return fault_set(
			f, FAULT_STATE, NULL,
			"DdpCreate: sparse tensors of rank %u (pid %d) and rank %u (pid %d) "
			"differ",
			a->m->rank, member_pid(a->m), b->m->rank, member_pid(b->m));
	return 0;
}

/* Which tensors of the job are sparse: a byte each, those of a unit from begin[id - 1] on. */
struct marks {
	uint32_t *begin; /* owned, with @flags */
	uint8_t *flags;
};

static void op_ddp_create_marks_deinit(struct marks *m)
{
	free(m->begin);
	free(m->flags);
}

static int op_ddp_create_marks_init(struct marks *m, const struct job *job, const request *r)
{
	uint32_t n = 0;

	m->begin = calloc((size_t)job->n_units + 1, sizeof(*m->begin));
	for (uint32_t i = 0; m->begin && i < job->n_units; i++) {
		m->begin[i] = n;
		n += (uint32_t)job->units[i]->rec->n_tensors;
	}
	m->flags = calloc((size_t)n + 1, 1);
	for (size_t i = 0; m->begin && m->flags && i < r->n_sparse; i++)
		m->flags[m->begin[r->sparse[i]->unit - 1] + r->sparse[i]->tensor] = 1;
	return m->begin && m->flags ? 0 : -ENOMEM;
}

static bool op_ddp_create_is_sparse(const void *arg, uint32_t unit, uint32_t tensor)
{
	const struct marks *m = arg;

	return m->flags[m->begin[unit - 1] + tensor];
}

/* As PyTorch: a small first bucket only if the user has set nothing. */
static uint64_t op_ddp_create_first_limit(const request *r)
{
	if (r->first_bucket_bytes)
		return r->first_bucket_bytes;
	return r->bucket_bytes ? r->bucket_bytes : BUCKETS_FIRST_BYTES;
}

/* The views that a rank gets of a unit are noted in its record of the unit, which it may not have
 * yet. */
static bool op_ddp_create_know_units(const struct coll *c, const request *r)
{
	for (uint32_t i = 0; i < c->n; i++)
		for (size_t k = 0; k < r->n_units; k++) {
			const struct unit *u = job_unit_by_id(c->job, r->units[k]);

			if (u && !member_unit(c->members[i], u))
				return false;
		}
	return true;
}

static enum res op_ddp_create_tick(struct coll *c)
{
	const request *r = create_args(c->ops[0])->create;
	_cleanup_(op_ddp_create_marks_deinit) struct marks marks = { 0 };
	const uint64_t two[] = { op_ddp_create_first_limit(r),
				 r->bucket_bytes ? r->bucket_bytes : BUCKETS_CAP_BYTES };
	struct ddp_spec spec = {
		.group = c->group,
		.units = r->units,
		.n_units = r->n_units,
		.is_sparse = op_ddp_create_is_sparse,
		.arg = &marks,
		.limits = r->n_bucket_limits ? r->bucket_limits : two,
		.n_limits = r->n_bucket_limits ? (unsigned)r->n_bucket_limits : ARRAY_SIZE(two),
		.limits_hold = r->n_bucket_limits != 0,
		.find_unused = r->find_unused,
		.static_graph = r->static_graph,
		.number = c->ops[0]->entry.number,
	};
	struct ddp *d = NULL;

	for (uint32_t i = 1; i < c->n; i++)
		if (op_ddp_create_compare(c, c->ops[0], c->ops[i], c->fault))
			return RES_FAILED;
	if (!op_ddp_create_know_units(c, r) || op_ddp_create_marks_init(&marks, c->job, r) < 0)
		fault_errno(c->fault, -ENOMEM, "making a ddp");
	if (c->fault->code || ddp_new(c->job, &spec, &d, c->fault))
		return RES_FAILED;
	for (uint32_t i = 0; i < c->n; i++)
		ddp_args(c->ops[i])->d = d;
	return RES_DONE;
}

static void op_ddp_create_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__DdpCreateResponse reply = SHARDD__V1__DDP_CREATE_RESPONSE__INIT;

	reply.ddp = ddp_args(op)->d->id;
	reply.tensors = ddp_args(op)->d->n;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_ddp_create = {
	.name = "DdpCreate",
	.collective = true,
	.request = &shardd__v1__ddp_create_request__descriptor,
	.decode = op_ddp_create_decode,
	.check = op_ddp_create_check,
	.coll_tick = op_ddp_create_tick,
	.encode = op_ddp_create_encode,
};
