/* Passes of a ddp: which tensors are ready, and which buckets can be launched. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "job/ddp.h"
#include "job/job_types.h"

static bool ddp_pass_is_first_static(const struct ddp_rank *r)
{
	return r->hooks && !r->counted;
}

static bool ddp_pass_all_launched(const struct ddp_rank *r)
{
	return r->launched == ddp_buckets_of(r)->n;
}

/* Names of the tensors whose flags have @bits equal to @want, as many as fit.
 * Return: how many there are. */
static uint32_t ddp_pass_name_tensors(const struct ddp_rank *r, uint8_t bits, uint8_t want,
				      char *buf, size_t bytes)
{
	const struct ddp *d = r->ddp;
	size_t at = 0;
	uint32_t n = 0;
	char name[140];

	buf[0] = '\0';
	for (uint32_t i = 0; i < d->n; i++) {
		if ((r->flags[i] & bits) != want)
			continue;
		ddp_tensor_name(d, i, name, sizeof(name));
		if (at + strlen(name) + 8 < bytes)
			at += (size_t)snprintf(buf + at, bytes - at, "%s'%s'", n ? ", " : "", name);
		else if (at + 5 < bytes && buf[at ? at - 1 : 0] != '.')
			at += (size_t)snprintf(buf + at, bytes - at, "...");
		n++;
	}
	return n;
}

static int ddp_pass_fault_unready(const struct ddp_rank *r, const char *what, struct fault *f)
{
	char names[300];
	uint32_t n = ddp_pass_name_tensors(r, DDP_READY, 0, names, sizeof(names));

	return fault_set(f, FAULT_STATE, NULL,
			 "%s: the previous pass has %u tensors without a gradient: %s", what, n,
			 names);
}

/* May rank @r begin another forward or backward? */
static int ddp_pass_check_idle(const struct ddp_rank *r, const char *what, struct fault *f)
{
	if (r->open && !ddp_pass_all_launched(r) && !ddp_pass_is_first_static(r))
		return ddp_pass_fault_unready(r, what, f);
	if (r->open)
		return fault_set(f, FAULT_STATE, NULL,
				 "%s: the previous pass has not ended: call DdpFinish first", what);
	if (r->finishing || r->moving)
		return fault_set(f, FAULT_STATE, NULL, "%s: the previous %s has not been answered",
				 what, r->moving ? "DdpForward" : "DdpFinish");
	if (r->under_way) /* its DdpFinish did not wait until the end */
		return fault_set(f, FAULT_STATE, NULL,
				 "%s: %u buckets of the previous pass are still in progress", what,
				 r->under_way);
	return 0;
}

static bool ddp_pass_is_busy(const struct ddp *d)
{
	for (uint32_t i = 0; i < d->n_ranks; i++) {
		const struct ddp_rank *r = &d->ranks[i];

		if (r->open || r->moving || r->finishing || r->under_way)
			return true;
	}
	return false;
}

bool ddp_unit_is_busy(const struct job *job, const struct unit *u)
{
	for (unsigned k = 0; k < JOB_MAX_DDPS; k++) {
		const struct ddp *d = job->ddps[k];

		for (uint32_t i = 0; d && i < d->n; i++)
			if (d->tensors[i].unit == u && ddp_pass_is_busy(d))
				return true;
	}
	return false;
}

static bool ddp_pass_has_unit(const struct ddp *d, const struct unit *u)
{
	for (uint32_t i = 0; i < d->n; i++)
		if (d->tensors[i].unit == u)
			return true;
	return false;
}

bool ddp_has_unit(const struct job *job, const struct unit *u)
{
	for (unsigned k = 0; k < JOB_MAX_DDPS; k++)
		if (job->ddps[k] && ddp_pass_has_unit(job->ddps[k], u))
			return true;
	return false;
}

/* The state of the rank in the job's @k-th ddp. Return: NULL if there is none of this epoch with @u
 * and @rank. */
static const struct ddp_rank *ddp_pass_rank_with(const struct job *job, unsigned k,
						 const struct unit *u, uint32_t rank)
{
	const struct ddp *d = job->ddps[k];

	if (!d || d->epoch != job->rec->epoch || !ddp_pass_has_unit(d, u))
		return NULL;
	return ddp_rank_of(d, rank);
}

uint64_t ddp_unit_passes(const struct job *job, const struct unit *u, uint32_t rank)
{
	uint64_t passes = 0;

	for (unsigned k = 0; k < JOB_MAX_DDPS; k++) {
		const struct ddp_rank *r = ddp_pass_rank_with(job, k, u, rank);

		passes += r ? r->begun - r->open : 0;
	}
	return passes;
}

static bool ddp_pass_all_ready(const struct ddp_rank *r, const struct unit *u)
{
	for (uint32_t i = 0; i < r->ddp->n; i++)
		if (r->ddp->tensors[i].unit == u && !(r->flags[i] & DDP_READY))
			return false;
	return true;
}

bool ddp_unit_is_ready(const struct job *job, const struct unit *u, uint32_t rank)
{
	for (unsigned k = 0; k < JOB_MAX_DDPS; k++) {
		const struct ddp_rank *r = ddp_pass_rank_with(job, k, u, rank);

		if (r && r->open && (ddp_pass_is_first_static(r) || ddp_pass_all_ready(r, u)))
			return true;
	}
	return false;
}

/* A rank that has finished a pass has waited for all ranks, so the first rank had everything ready
 * then. And no rank has new buckets in a pass in which another rank has old ones. */
int ddp_forward(struct ddp_rank *r, unsigned *ret_layout, struct fault *f)
{
	struct ddp *d = r->ddp;

	if (ddp_pass_check_idle(r, "DdpForward", f))
		return f->code;
	/* with a static graph nothing arrives during the first pass: everything comes at its end */
	*ret_layout = r->passes > d->static_graph && d->n_arrived == d->n;
	if (*ret_layout && d->n_layouts == 1 && ddp_rebuild(d) < 0)
		return fault_set(f, FAULT_EXHAUSTED, NULL, "no memory for new buckets");
	r->moving = true;
	return 0;
}

void ddp_moved(struct ddp_rank *r, unsigned layout, uint64_t buffer)
{
	r->layout = layout;
	r->buffer = buffer;
}

/* ------------------------------------------------------------------- a pass */

static bool ddp_pass_is_first(const struct ddp_rank *r)
{
	return r->ddp->has_first && r == r->ddp->ranks;
}

static void ddp_pass_arrived(struct ddp_rank *r, uint32_t i)
{
	struct ddp *d = r->ddp;

	if (ddp_pass_is_first(r) && d->n_layouts == 1 && ddp_rebuilds(d) && d->n_arrived < d->n)
		d->arrival[d->n_arrived++] = i;
}

static void ddp_pass_set_ready(struct ddp_rank *r, uint32_t i)
{
	uint32_t *missing = &r->missing[ddp_buckets_of(r)->of[i]];

	CHECK(!(r->flags[i] & DDP_READY) && *missing > 0);
	r->flags[i] |= DDP_READY;
	--*missing;
	ddp_pass_arrived(r, i);
}

static void ddp_pass_set_unused(struct ddp_rank *r, uint32_t i, bool kept)
{
	r->flags[i] |= kept ? DDP_UNUSED : DDP_UNUSED | DDP_ZERO;
	if (r->rows)
		ddp_rows_deinit(r->ddp->job, &r->rows[i]);
	ddp_pass_set_ready(r, i);
}

static int ddp_pass_check_lists(struct ddp_rank *r, const uint32_t *a, size_t n_a,
				const uint32_t *b, size_t n_b, struct fault *f)
{
	char name[140];

	for (size_t k = 0; k < n_a + n_b; k++) {
		uint32_t i = k < n_a ? a[k] : b[k - n_a];

		if (r->flags[i] & DDP_NAMED) {
			fault_set(f, FAULT_INVALID, "unused",
				  "tensor '%s' is listed twice as unused",
				  ddp_tensor_name(r->ddp, i, name, sizeof(name)));
			break;
		}
		r->flags[i] |= DDP_NAMED;
	}
	for (uint32_t i = 0; i < r->ddp->n; i++)
		r->flags[i] &= (uint8_t)~DDP_NAMED;
	return f->code;
}

static void ddp_pass_begin(struct ddp_rank *r)
{
	const struct ddp_buckets *b = ddp_buckets_of(r);
	struct ddp *d = r->ddp;

	r->open = true;
	r->begun++;
	r->launched = 0;
	r->n_waits = 0;
	r->fault = FAULT_NULL;
	memset(r->flags, 0, d->n);
	for (uint32_t k = 0; k < b->n; k++)
		r->missing[k] = b->begin[k + 1] - b->begin[k];
	if (ddp_pass_is_first(r) && d->n_arrived < d->n)
		d->n_arrived = 0;
	if (r->left)
		memcpy(r->left, r->hooks, d->n * sizeof(*r->left));
}

int ddp_backward(struct ddp_rank *r, const uint32_t *unused, size_t n_unused, const uint32_t *kept,
		 size_t n_kept, struct fault *f)
{
	const struct ddp *d = r->ddp;

	if (ddp_pass_check_idle(r, "DdpBackward", f))
		return f->code;
	if ((n_unused || n_kept) && (!d->find_unused || d->static_graph))
		return fault_set(f, FAULT_INVALID, "unused",
				 "unused tensors are listed, but the ddp %s",
				 d->static_graph ? "has static_graph, which finds them itself"
						 : "was made without find_unused");
	if (!r->buffer && d->layouts[0].bytes)
		return fault_set(f, FAULT_STATE, NULL,
				 "DdpBackward: this rank has not asked for its gradients: call "
				 "DdpForward first");
	if (ddp_pass_check_lists(r, unused, n_unused, kept, n_kept, f))
		return f->code;
	ddp_pass_begin(r);
	for (size_t k = 0; k < n_unused; k++)
		ddp_pass_set_unused(r, unused[k], false);
	for (size_t k = 0; k < n_kept; k++)
		ddp_pass_set_unused(r, kept[k], true);
	for (uint32_t i = 0; r->left && r->counted && i < d->n; i++)
		if (!r->left[i])
			ddp_pass_set_unused(r, i, false);
	return 0;
}

static int ddp_pass_fault_twice(struct ddp_rank *r, struct fault *f)
{
	char names[300];
	uint32_t n = ddp_pass_name_tensors(r, DDP_READY | DDP_NAMED, DDP_READY | DDP_NAMED, names,
					   sizeof(names));

	return fault_set(f, FAULT_STATE, NULL,
			 "DdpReady: %u tensors were already ready in this pass: %s", n, names);
}

static int ddp_pass_fault_changed(const struct ddp_rank *r, uint32_t i, struct fault *f)
{
	char name[140];

	return fault_set(f, FAULT_STATE, NULL,
			 "DdpReady: the graph has changed, but the ddp has static_graph: tensor "
			 "'%s' got its "
			 "gradient %u times in the first pass and more often now",
			 ddp_tensor_name(r->ddp, i, name, sizeof(name)), r->hooks[i]);
}

/* A tensor twice in one list is as wrong as in two. */
static int ddp_pass_check_once(struct ddp_rank *r, const uint32_t *tensors, size_t n,
			       struct fault *f)
{
	const uint8_t both = DDP_READY | DDP_NAMED;
	bool again = false;
	char name[140];

	for (size_t k = 0; k < n; k++) {
		if (r->flags[tensors[k]] & DDP_NAMED)
			fault_set(f, FAULT_STATE, NULL,
				  "DdpReady: tensor '%s' is listed twice in one request",
				  ddp_tensor_name(r->ddp, tensors[k], name, sizeof(name)));
		r->flags[tensors[k]] |= DDP_NAMED;
		again = again || (r->flags[tensors[k]] & both) == both;
	}
	if (again)
		ddp_pass_fault_twice(r, f);
	for (size_t k = 0; k < n; k++)
		r->flags[tensors[k]] &= (uint8_t)~DDP_NAMED;
	return f->code;
}

/* Static graph: count each gradient that arrives. */
static int ddp_pass_count_down(struct ddp_rank *r, const uint32_t *tensors, size_t n,
			       struct fault *f)
{
	size_t k;

	for (k = 0; k < n && r->left[tensors[k]]; k++)
		r->left[tensors[k]]--;
	if (k == n)
		return 0;
	ddp_pass_fault_changed(r, tensors[k], f);
	while (k--)
		r->left[tensors[k]]++;
	return f->code;
}

static void ddp_pass_store_rows(struct ddp_rank *r, uint32_t i, struct ddp_rows *rows)
{
	if (!r->rows || !rows)
		return;
	ddp_rows_deinit(r->ddp->job, &r->rows[i]);
	r->rows[i] = *rows;
	*rows = (struct ddp_rows){ 0 };
}

int ddp_ready(struct ddp_rank *r, const uint32_t *tensors, size_t n, struct ddp_rows *rows,
	      struct fault *f)
{
	if (!r->open)
		return fault_set(f, FAULT_STATE, NULL,
				 "DdpReady: no pass is open: call DdpBackward first");
	if (ddp_pass_is_first_static(r)) {
		for (size_t k = 0; k < n; k++)
			r->hooks[tensors[k]]++;
	} else if (r->left ? ddp_pass_count_down(r, tensors, n, f)
			   : ddp_pass_check_once(r, tensors, n, f)) {
		return f->code;
	}
	for (size_t k = 0; k < n; k++) {
		ddp_pass_store_rows(r, tensors[k], rows);
		if (!ddp_pass_is_first_static(r) && !(r->left && r->left[tensors[k]]) &&
		    !(r->flags[tensors[k]] & DDP_READY))
			ddp_pass_set_ready(r, tensors[k]);
	}
	return 0;
}

int ddp_finish(struct ddp_rank *r, struct fault *f)
{
	if (!r->open)
		return fault_set(f, FAULT_STATE, NULL,
				 "DdpFinish: no pass is open: call DdpBackward first");
	if (!ddp_pass_is_first_static(r) && !ddp_pass_all_launched(r))
		return ddp_pass_fault_unready(r, "DdpFinish", f);
	return 0;
}

void ddp_end_first_static(struct ddp_rank *r)
{
	if (!ddp_pass_is_first_static(r))
		return;
	r->counted = true;
	for (uint32_t i = 0; i < r->ddp->n; i++) {
		uint32_t *missing = &r->missing[ddp_buckets_of(r)->of[i]];

		r->flags[i] |= DDP_READY;
		if (!r->hooks[i])
			r->flags[i] |= DDP_UNUSED | DDP_ZERO;
		--*missing;
	}
}

/* All ranks that have inputs are in the same pass while its buckets are under way. The number of
 * passes that a rank has begun does not identify a pass: a rank without inputs for a while has
 * begun fewer. */
static uint64_t ddp_pass_of(const struct ddp *d)
{
	uint64_t begun = d->stood_in;

	for (uint32_t i = 0; i < d->n_ranks; i++)
		begun += d->ranks[i].begun;
	return begun;
}

/* The tensors of a unit are adjacent. */
bool ddp_reduced(struct ddp *d, uint32_t i)
{
	const struct unit *u = d->tensors[i].unit;
	uint64_t pass = ddp_pass_of(d);
	uint32_t k = i;

	d->reduced[i] = pass;
	while (k && d->tensors[k - 1].unit == u)
		k--;
	while (k < d->n && d->tensors[k].unit == u && d->reduced[k] == pass)
		k++;
	return k == d->n || d->tensors[k].unit != u;
}

int64_t ddp_launch(struct ddp_rank *r)
{
	if (!r->open || ddp_pass_all_launched(r) || r->missing[r->launched])
		return -1;
	return r->launched++;
}

/* Points of one stream only grow, so the latest of each is enough. */
int ddp_wait(struct ddp_rank *r, const struct backend_wait *waits, unsigned n, struct fault *f)
{
	for (unsigned i = 0; i < n; i++) {
		unsigned k = 0;

		while (k < r->n_waits && r->waits[k].slot != waits[i].slot)
			k++;
		if (k == DDP_MAX_WAITS)
			return fault_set(f, FAULT_INVALID, "header.after",
					 "a pass waits for more than %u streams; the maximum is %u",
					 DDP_MAX_WAITS, DDP_MAX_WAITS);
		if (k == r->n_waits)
			r->waits[r->n_waits++] = waits[i];
		else if (waits[i].value > r->waits[k].value)
			r->waits[k] = waits[i];
	}
	return 0;
}
