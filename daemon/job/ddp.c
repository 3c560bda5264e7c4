/* Making ddps and their assignments; passes are in ddp_pass.c. */
#include "job/ddp.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/buckets.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "job/job_account.h"
#include "job/job_types.h"
#include "job/member.h"
#include "unit/runs.h"

/* Buckets begin at multiples of this many bytes of a rank's buffer. */
#define BUCKET_ALIGN 256u

static void ddp_layout_deinit(struct ddp_buckets *b)
{
	free(b->tensors);
	free(b->begin);
	free(b->of);
	free(b->offset);
	free(b->elements);
	*b = (struct ddp_buckets){ 0 };
}

int ddp_rows_copy(struct job *job, const int64_t *rows, size_t n, struct ddp_rows *ret,
		  struct fault *f)
{
	char holders[440];

	*ret = (struct ddp_rows){ .n = n };
	if (!n)
		return 0;
	if (quota_charge(&job->quota, MEM_CONTROL, n * sizeof(*rows))) {
		job_holders(job, holders, sizeof(holders));
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "cannot keep %zu rows of a sparse gradient: %s", n, holders);
	}
	ret->rows = malloc(n * sizeof(*rows));
	if (!ret->rows) {
		quota_return(&job->quota, MEM_CONTROL, n * sizeof(*rows));
		return fault_errno(f, -ENOMEM, "keeping rows");
	}
	memcpy(ret->rows, rows, n * sizeof(*rows));
	return 0;
}

void ddp_rows_deinit(struct job *job, struct ddp_rows *r)
{
	if (r->rows)
		quota_return(&job->quota, MEM_CONTROL, r->n * sizeof(*r->rows));
	free(r->rows);
	*r = (struct ddp_rows){ 0 };
}

static void ddp_rank_deinit(struct ddp_rank *r)
{
	for (uint32_t i = 0; r->rows && i < r->ddp->n; i++)
		ddp_rows_deinit(r->ddp->job, &r->rows[i]);
	free(r->flags);
	free(r->hooks);
	free(r->left);
	free(r->missing);
	free(r->rows);
}

static void ddp_free(struct ddp *d)
{
	if (!d)
		return;
	if (d->charged)
		quota_return(&d->job->quota, MEM_CONTROL, d->charged);
	for (unsigned i = 0; i < ARRAY_SIZE(d->layouts); i++)
		ddp_layout_deinit(&d->layouts[i]);
	for (uint32_t i = 0; d->ranks && i < d->n_ranks; i++)
		ddp_rank_deinit(&d->ranks[i]);
	free(d->ranks);
	free(d->tensors);
	free(d->arrival);
	free(d->untouched);
	free(d->untouched_of);
	free(d->reduced);
	free(d->limits);
	free(d);
}

static void ddp_freep(struct ddp **d)
{
	ddp_free(*d);
}

/* -------------------------------------------------------------- assignments */

static uint64_t ddp_element_bytes(const struct ddp *d, uint32_t i)
{
	return dtype_size((enum dtype)d->tensors[i].unit->rec->gradient_dtype);
}

/* Compute all offsets from the tensors and sizes of the buckets. */
static void ddp_layout_place(const struct ddp *d, struct ddp_buckets *b, const uint32_t *sizes)
{
	uint64_t at = 0;

	for (uint32_t k = 0; k < b->n; k++) {
		b->begin[k + 1] = b->begin[k] + sizes[k];
		at = (at + BUCKET_ALIGN - 1) / BUCKET_ALIGN * BUCKET_ALIGN;
		for (uint32_t j = b->begin[k]; j < b->begin[k + 1]; j++) {
			uint32_t i = b->tensors[j];
			uint64_t n = d->tensors[i].sparse ? 0 : d->tensors[i].elements;

			b->of[i] = k;
			b->offset[i] = at;
			b->elements[k] += n;
			at += n * ddp_element_bytes(d, i);
		}
	}
	b->bytes = at;
}

static int ddp_layout_alloc(struct ddp_buckets *b, uint32_t n)
{
	b->tensors = calloc(n, sizeof(*b->tensors));
	b->begin = calloc((size_t)n + 1, sizeof(*b->begin));
	b->of = calloc(n, sizeof(*b->of));
	b->offset = calloc(n, sizeof(*b->offset));
	b->elements = calloc(n, sizeof(*b->elements));
	return b->tensors && b->begin && b->of && b->offset && b->elements ? 0 : -ENOMEM;
}

/* The tensors of a bucket are reduced together, in one dtype. */
static uint32_t ddp_key_of(const state_unit *rec)
{
	return (uint32_t)rec->gradient_dtype << 8 | (uint32_t)rec->reduce_dtype;
}

/* @map: NULL: the first assignment. */
static int64_t ddp_assign(const struct ddp *d, const uint32_t *map, struct ddp_buckets *b,
			  uint32_t *sizes)
{
	/* until the order of arrival is known: as few buckets as possible, unless tensors may be
	 * missing */
	bool whole = !map && !d->limits_hold && (d->static_graph || !d->find_unused);
	_cleanup_(freep) struct bucket_tensor *t = calloc(d->n, sizeof(*t));
	int64_t n;

	if (!t)
		return -ENOMEM;
	for (uint32_t k = 0; k < d->n; k++) {
		uint32_t i = map ? map[k] : k;

		t[k] = (struct bucket_tensor){ d->tensors[i].elements * ddp_element_bytes(d, i),
					       ddp_key_of(d->tensors[i].unit->rec),
					       d->tensors[i].sparse };
	}
	n = buckets_assign(t, d->n, d->limits, whole ? 0 : d->n_limits, map, b->tensors, sizes);
	if (n > 0 && !map && buckets_reverse(b->tensors, sizes, (uint32_t)n) < 0)
		return -ENOMEM;
	return n;
}

static int ddp_layout_make(const struct ddp *d, const uint32_t *map, struct ddp_buckets *ret)
{
	_cleanup_(ddp_layout_deinit) struct ddp_buckets b = { 0 };
	_cleanup_(freep) uint32_t *sizes = calloc(d->n, sizeof(*sizes));
	int64_t n;

	if (!sizes || ddp_layout_alloc(&b, d->n) < 0)
		return -ENOMEM;
	n = ddp_assign(d, map, &b, sizes);
	if (n < 0)
		return (int)n;
	b.n = (uint32_t)n;
	ddp_layout_place(d, &b, sizes);
	*ret = b;
	b = (struct ddp_buckets){ 0 };
	return 0;
}

int ddp_rebuild(struct ddp *d)
{
	CHECK(d->n_arrived == d->n && d->n_layouts == 1);
	if (ddp_layout_make(d, d->arrival, &d->layouts[1]) < 0)
		return -ENOMEM;
	d->n_layouts = 2;
	return 0;
}

bool ddp_rebuilds(const struct ddp *d)
{
	return d->static_graph || !d->find_unused;
}

bool ddp_may_leave_out(const struct ddp *d)
{
	return d->static_graph || d->find_unused;
}

int ddp_arrived_elsewhere(struct ddp *d, const uint32_t *order)
{
	_cleanup_(freep) uint8_t *seen = NULL;

	if (d->n_arrived == d->n)
		return 0;
	seen = calloc(d->n, 1);
	if (!seen)
		return -ENOMEM;
	for (uint32_t k = 0; k < d->n; k++)
		if (order[k] >= d->n || seen[order[k]]++)
			return -EINVAL;
	memcpy(d->arrival, order, d->n * sizeof(*order));
	d->n_arrived = d->n;
	return 0;
}

struct ddp_rank *ddp_rank_of(const struct ddp *d, uint32_t rank)
{
	uint32_t index;

	return group_index_here(d->group, rank, &index) ? &d->ranks[index] : NULL;
}

/* ------------------------------------------------------------------- making */

static bool ddp_has_gradient(const state_tensor *t)
{
	return !t->frozen && !*t->alias_of;
}

static int ddp_check_unit(const struct ddp_spec *s, const struct unit *u, uint32_t id,
			  struct fault *f)
{
	if (!u)
		return fault_set(f, FAULT_NOT_FOUND, "units", "there is no unit %u", id);
	if (u->rec->group != s->group->id)
		return fault_set(f, FAULT_INVALID, "units",
				 "unit '%.100s' is not in the group of the request", u->rec->name);
	if (u->rec->strategy != STRATEGY_REPLICATE)
		return fault_set(f, FAULT_INVALID, "units",
				 "unit '%.100s' is sharded: a ddp needs strategy REPLICATE",
				 u->rec->name);
	if (u->rec->reduce_profile < PROFILE_DDP)
		return fault_set(f, FAULT_INVALID, "units",
				 "unit '%.100s' has the wrong reduce_profile: a ddp needs DDP, "
				 "DDP_HOOK or DDP_BUCKET_VIEW",
				 u->rec->name);
	return 0;
}

static int ddp_count_tensors(struct job *job, const struct ddp_spec *s, uint32_t *ret,
			     struct fault *f)
{
	_cleanup_(freep) uint8_t *seen = calloc((size_t)job->n_units + 1, 1);

	*ret = 0;
	if (!seen)
		return fault_errno(f, -ENOMEM, "making a ddp");
	for (size_t i = 0; i < s->n_units; i++) {
		const struct unit *u = job_unit_by_id(job, s->units[i]);

		if (ddp_check_unit(s, u, s->units[i], f))
			return f->code;
		if (seen[u->id - 1]++)
			return fault_set(f, FAULT_INVALID, "units", "unit '%.100s' is listed twice",
					 u->rec->name);
		for (size_t k = 0; k < u->rec->n_tensors; k++)
			*ret += ddp_has_gradient(u->rec->tensors[k]);
	}
	if (*ret)
		return 0;
	return fault_set(f, FAULT_INVALID, "units", "its units have no tensor with a gradient");
}

static void ddp_fill_tensors(struct ddp *d, const struct ddp_spec *s)
{
	uint32_t at = 0;

	for (size_t i = 0; i < s->n_units; i++) {
		struct unit *u = job_unit_by_id(d->job, s->units[i]);

		for (uint32_t k = 0; k < u->rec->n_tensors; k++) {
			const state_tensor *t = u->rec->tensors[k];
			struct ddp_tensor *dt = &d->tensors[at];

			if (!ddp_has_gradient(t))
				continue;
			*dt = (struct ddp_tensor){ .unit = u, .tensor = k };
			CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &dt->elements));
			dt->sparse = s->is_sparse && s->is_sparse(s->arg, u->id, k);
			d->in_backward =
				d->in_backward || u->rec->optimizer->when == OPTIM_IN_BACKWARD;
			d->any_sparse = d->any_sparse || dt->sparse;
			at++;
		}
	}
	CHECK(at == d->n);
}

static int ddp_rank_init(struct ddp_rank *r, struct ddp *d)
{
	r->ddp = d;
	r->flags = calloc(d->n, 1);
	r->missing = calloc(d->n, sizeof(*r->missing));
	if (d->any_sparse)
		r->rows = calloc(d->n, sizeof(*r->rows));
	if (d->static_graph) {
		r->hooks = calloc(d->n, sizeof(*r->hooks));
		r->left = calloc(d->n, sizeof(*r->left));
	}
	return r->flags && r->missing && (r->rows || !d->any_sparse) &&
			       (!d->static_graph || (r->hooks && r->left))
		       ? 0
		       : -ENOMEM;
}

/* Approximate size of all of it. */
static uint64_t ddp_bytes_of(const struct ddp *d)
{
	uint64_t of_rank = sizeof(struct ddp_rank) + d->n * (sizeof(uint8_t) + sizeof(uint32_t));
	uint64_t of_tensor = sizeof(struct ddp_tensor) + sizeof(uint32_t) + sizeof(uint8_t) +
			     sizeof(uint64_t) + 2 * (3 * sizeof(uint32_t) + 2 * sizeof(uint64_t));

	if (d->any_sparse)
		of_rank += d->n * sizeof(struct ddp_rows);
	if (d->static_graph)
		of_rank += d->n * 2 * sizeof(uint32_t);
	return sizeof(*d) + d->n_limits * sizeof(*d->limits) + of_tensor * d->n +
	       of_rank * d->n_ranks;
}

static int ddp_charge(struct ddp *d, struct fault *f)
{
	uint64_t bytes = ddp_bytes_of(d);
	char holders[440];

	if (quota_charge(&d->job->quota, MEM_CONTROL, bytes) == 0) {
		d->charged = bytes;
		return 0;
	}
	job_holders(d->job, holders, sizeof(holders));
	return fault_set(f, FAULT_EXHAUSTED, NULL, "cannot allocate %llu bytes for a ddp: %s",
			 (unsigned long long)bytes, holders);
}

static int ddp_fill(struct ddp *d, const struct ddp_spec *s)
{
	d->arrival = calloc(d->n, sizeof(*d->arrival));
	d->untouched = calloc(d->n, 1);
	d->untouched_of = calloc(d->n, sizeof(*d->untouched_of));
	d->reduced = calloc(d->n, sizeof(*d->reduced));
	d->ranks = calloc(d->n_ranks, sizeof(*d->ranks));
	d->limits = calloc(s->n_limits, sizeof(*d->limits));
	for (uint32_t i = 0; i < d->n; i++)
		if (unit_track_gradients(d->tensors[i].unit) < 0)
			return -ENOMEM;
	if (!d->arrival || !d->untouched || !d->untouched_of || !d->reduced || !d->ranks ||
	    !d->limits)
		return -ENOMEM;
	memcpy(d->limits, s->limits, s->n_limits * sizeof(*d->limits));
	for (uint32_t i = 0; i < d->n_ranks; i++)
		if (ddp_rank_init(&d->ranks[i], d) < 0)
			return -ENOMEM;
	if (ddp_layout_make(d, NULL, &d->layouts[0]) < 0)
		return -ENOMEM;
	d->n_layouts = 1;
	return 0;
}

/* May an op of its epoch still read it? Such an op prevents its rank from joining again, but does
 * not prevent others from creating a ddp of another group. */
static bool ddp_is_read(const struct ddp *d)
{
	for (uint32_t i = 0; i < group_size(d->group); i++) {
		const struct member *m = d->job->ranks[d->group->rec->ranks[i]];

		if (m && m->pending && (m->state != MEMBER_JOINED || m->epoch == d->epoch))
			return true;
	}
	return false;
}

/* Find a place for one more; ddps of ended epochs are freed when nothing reads them. */
static struct ddp **ddp_find_place(struct job *job)
{
	struct ddp **free_place = NULL;

	for (unsigned i = 0; i < JOB_MAX_DDPS; i++) {
		struct ddp **d = &job->ddps[i];

		if (*d && (*d)->epoch != job->rec->epoch && !ddp_is_read(*d)) {
			ddp_free(*d);
			*d = NULL;
		}
		if (!*d && !free_place)
			free_place = d;
	}
	return free_place;
}

int ddp_new(struct job *job, const struct ddp_spec *spec, struct ddp **ret, struct fault *f)
{
	_cleanup_(ddp_freep) struct ddp *d = NULL;
	struct ddp **place = ddp_find_place(job);
	uint32_t n;

	if (ddp_count_tensors(job, spec, &n, f))
		return f->code;
	if (!place)
		return fault_set(f, FAULT_EXHAUSTED, NULL, "job '%s' has %u ddps, the maximum",
				 job->rec->name, JOB_MAX_DDPS);
	d = calloc(1, sizeof(*d));
	if (!d)
		return fault_errno(f, -ENOMEM, "making a ddp");
	d->job = job;
	d->group = spec->group;
	d->n_ranks = spec->group->here;
	d->has_first = group_member_here(spec->group, 0) == 0;
	d->number = spec->number;
	d->n = n;
	d->tensors = calloc(n, sizeof(*d->tensors));
	if (!d->tensors)
		return fault_errno(f, -ENOMEM, "making a ddp");
	ddp_fill_tensors(d, spec);
	d->find_unused = spec->find_unused;
	d->static_graph = spec->static_graph;
	d->n_limits = spec->n_limits;
	d->limits_hold = spec->limits_hold;
	if (ddp_charge(d, f))
		return f->code;
	if (ddp_fill(d, spec) < 0)
		return fault_errno(f, -ENOMEM, "making a ddp");
	d->id = (uint32_t)(place - job->ddps) + 1;
	d->epoch = job->rec->epoch;
	*ret = *place = STEAL_PTR(d);
	return 0;
}

void ddps_free(struct job *job)
{
	for (unsigned i = 0; i < JOB_MAX_DDPS; i++) {
		ddp_free(job->ddps[i]);
		job->ddps[i] = NULL;
	}
}

struct ddp *ddp_by_id(struct job *job, uint32_t id, uint64_t epoch)
{
	struct ddp *d = id && id <= JOB_MAX_DDPS ? job->ddps[id - 1] : NULL;

	return d && d->epoch == epoch ? d : NULL;
}

const char *ddp_tensor_name(const struct ddp *d, uint32_t i, char *buf, size_t bytes)
{
	const struct ddp_tensor *t = &d->tensors[i];

	snprintf(buf, bytes, "%.64s.%.64s", t->unit->rec->name,
		 t->unit->rec->tensors[t->tensor]->name);
	return buf;
}

struct unit_run ddp_run(const struct ddp *d, unsigned part, uint32_t tensor)
{
	const struct ddp_tensor *t = &d->tensors[tensor];
	struct unit_run run = { 0 };

	if (!unit_part_run(t->unit, &t->unit->parts[part], t->tensor, &run))
		run.n = 0;
	return run;
}

const struct ddp_buckets *ddp_buckets_of(const struct ddp_rank *r)
{
	return &r->ddp->layouts[r->layout];
}
