#include "reduce/reduce_run.h"

#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/mesh.h"
#include "op/op.h"
#include "reduce/fused_steps.h"
#include "unit/pack.h"
#include "work/coll.h"

enum reduce_device reduce_device_of(const struct unit *u)
{
	const struct backend_info *info = backend_info(u->parts[0].device->backend);

	return strcmp(info->name, "host") ? REDUCE_AS_ON_GPU : REDUCE_AS_ON_CPU;
}

static struct reduce_plan reduce_run_plan_by(const struct unit *u, uint32_t ranks)
{
	struct reduce_setting s = reduce_setting_now(u, ranks, reduce_device_of(u));
	struct reduce_plan plan;

	reduce_plan_make(&s, &plan);
	return plan;
}

struct reduce_plan reduce_plan_for(const struct job *job, const struct unit *u)
{
	return reduce_run_plan_by(u, group_size(job->groups[u->rec->group]));
}

static void *reduce_run_address(const struct region *r)
{
	return r->slab ? region_addr(r) : NULL;
}

static enum dtype reduce_run_gradient_dtype(const struct unit *u)
{
	return (enum dtype)u->rec->gradient_dtype;
}

/* ------------------------------------------------------- one rank's gradients */

/* out += *in, rounded to @out_dtype once, whatever the two are. */
static struct k_reduce reduce_run_add_to(void *out, enum dtype out_dtype, const void **in,
					 enum dtype in_dtype)
{
	return (struct k_reduce){ .out = out,
				  .out_dtype = out_dtype,
				  .in = in,
				  .k = 1,
				  .in_dtype = in_dtype,
				  .sum_dtype = DTYPE_FP32,
				  .accumulate = true };
}

void reduce_convert_launch(const struct unit *u, const struct reduce_plan *plan, void *to,
			   const void *from, struct launch *launch)
{
	*launch = (struct launch){ .kind = LAUNCH_CAST, .n = u->layout.elements };
	launch->cast = (struct k_cast){ .dst = to,
					.src = from,
					.dst_dtype = plan->accumulate_dtype,
					.src_dtype = reduce_run_gradient_dtype(u) };
}

void reduce_add_launch(const struct unit *u, const struct reduce_plan *plan, void *to,
		       const void **from, struct launch *launch)
{
	*launch = (struct launch){ .kind = LAUNCH_REDUCE, .n = u->layout.elements };
	launch->reduce =
		reduce_run_add_to(to, plan->accumulate_dtype, from, reduce_run_gradient_dtype(u));
}

void reduce_include_launch(const struct unit *u, const struct unit_part *p, const void **shard,
			   const void *to, struct launch *launch)
{
	*shard = region_addr(&p->grads);
	*launch = (struct launch){ .kind = LAUNCH_REDUCE, .n = u->layout.elements };
	launch->reduce =
		reduce_run_add_to((void *)to, reduce_run_gradient_dtype(u), shard, DTYPE_FP32);
}

/* ----------------------------------------------------------------- the stages */

static const struct reduce_input *reduce_run_given(const struct coll *c, uint32_t member)
{
	return &reduce_of(c)->run->inputs[member];
}

/* A rank without inputs contributes zeros, whatever it has. */
static bool reduce_run_is_surrogate(const struct coll *c, uint32_t member)
{
	return c->ops[member]->surrogate;
}

static void reduce_run_take_input(struct reduce_input *in, struct member *m, struct member_unit *mu)
{
	CHECK(mu->gradient.slab || mu->accumulated.slab); /* since it was checked: its ops wait */
	*in = (struct reduce_input){ region_steal(&mu->gradient), region_steal(&mu->accumulated),
				     mu->included };
	mu->included = false;
	member_note_held(m, mu);
}

static void reduce_run_take_inputs(const struct coll *c, struct reduce_run *run)
{
	for (uint32_t i = 0; i < c->n; i++)
		if (!reduce_run_is_surrogate(c, i))
			reduce_run_take_input(&run->inputs[i], c->members[i],
					      member_unit_find(c->members[i], c->unit));
}

static void reduce_run_give_input(struct reduce_input *in, struct member *m)
{
	pool_give(&m->pool, &in->gradient);
	pool_give(&m->pool, &in->accumulated);
}

void reduce_give_inputs(struct coll *c)
{
	for (uint32_t i = 0; reduce_of(c)->run && i < c->n; i++)
		reduce_run_give_input(&reduce_of(c)->run->inputs[i], c->members[i]);
}

static void reduce_run_put_input_back(struct reduce_input *in, struct member *m,
				      struct member_unit *mu)
{
	CHECK(!mu->gradient.slab && !mu->accumulated.slab); /* ops on them come behind this one */
	mu->gradient = region_steal(&in->gradient);
	mu->accumulated = region_steal(&in->accumulated);
	mu->included = in->included;
	member_note_held(m, mu);
}

void reduce_put_back(struct coll *c)
{
	for (uint32_t i = 0; reduce_of(c)->run && i < c->n; i++) {
		struct reduce_input *in = &reduce_of(c)->run->inputs[i];
		struct member *m = c->members[i];

		if (!in->gradient.slab && !in->accumulated.slab)
			continue;
		if (m->state == MEMBER_JOINED && m->epoch == c->job->rec->epoch)
			reduce_run_put_input_back(in, m, member_unit_find(m, c->unit));
		else
			reduce_run_give_input(in, m);
	}
}

/* The address of a rank's gradient, and its type. */
static const void *reduce_run_input_of(const struct coll *c, uint32_t member, enum dtype *dtype)
{
	const struct reduce_input *in = reduce_run_given(c, member);
	bool accumulated = in->accumulated.slab;

	*dtype = accumulated ? reduce_of(c)->run->plan.accumulate_dtype
			     : reduce_run_gradient_dtype(c->unit);
	if (reduce_run_is_surrogate(c, member))
		return reduce_run_address(&c->parts[c->part_of[member]].scratch[REDUCE_ZEROS]);
	return reduce_run_address(accumulated ? &in->accumulated : &in->gradient);
}

/* Some ranks have accumulated, others have not, and the types are not the same. */
static bool reduce_run_is_lonely(const struct coll *c, uint32_t member)
{
	return reduce_of(c)->run->lonely_bytes && !reduce_run_given(c, member)->accumulated.slab;
}

static unsigned reduce_run_factors(const struct k_factor *a, const struct k_factor *b,
				   const struct k_factor *c)
{
	return (a->how != K_FACTOR_NONE) + (b->how != K_FACTOR_NONE) +
	       (c && c->how != K_FACTOR_NONE);
}

/* One fold is enough for one replica, or replicas of one rank each, whose factors one kernel
 * can apply, and for one replica a device. */
static bool reduce_run_must_be_apart(const struct coll *c, const struct reduce_run *run)
{
	const struct reduce_plan *p = &run->plan;

	if (run->defer || run->had_partials || run->crossed)
		return true;
	if (run->sets)
		return reduce_run_factors(&p->partial, &p->replica, NULL);
	if (run->replicas == 1)
		return reduce_run_factors(&p->partial, &p->post, NULL) > 1;
	if (run->shard_ranks == 1)
		return reduce_run_factors(&p->pre, &p->partial, &p->replica) > 1;
	return run->here > 1 || coll_is_alone(c) ||
	       reduce_run_factors(&p->partial, &p->replica, NULL) > 1;
}

static uint64_t reduce_run_rounded_up(uint64_t bytes)
{
	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

/* Room for what lonely ranks have to convert, on the device that has most of them. */
static uint64_t reduce_run_lonely_bytes(const struct coll *c, const struct reduce_run *run)
{
	uint32_t most = 0, all = 0;

	if (run->plan.accumulate_dtype == reduce_run_gradient_dtype(c->unit))
		return 0;
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint32_t lonely = 0;

		for (uint32_t i = 0; i < c->parts[d].n; i++)
			lonely += !run->inputs[c->parts[d].members[i]].accumulated.slab;
		most = lonely > most ? lonely : most;
		all += lonely;
	}
	return all == c->n ? 0
			   : most * reduce_run_rounded_up(c->unit->layout.elements *
							  dtype_size(run->plan.accumulate_dtype));
}

bool reduce_whole_replicas(const struct coll *c)
{
	uint32_t shard_ranks = c->unit->rec->shard_ranks;

	for (uint32_t i = 0; i < coll_size(c); i++)
		if (group_device_number(c->group, i) !=
		    group_device_number(c->group, i - i % shard_ranks))
			return false;
	return true;
}

static uint32_t reduce_run_partials_on(const struct coll *c, const struct reduce_run *run,
				       unsigned d)
{
	if (run->crossed)
		return run->replicas;
	return run->whole ? c->parts[d].n / run->shard_ranks : 1;
}

static void reduce_run_measure(const struct coll *c, struct reduce_run *like)
{
	const struct unit *u = c->unit;

	like->shard_ranks = u->rec->shard_ranks;
	like->replicas = coll_size(c) / like->shard_ranks;
	like->whole = reduce_whole_replicas(c);
	like->sets = mesh_is_needed(u);
	like->plan = reduce_run_plan_by(u, coll_divide_by(c));
	like->crossed = like->replicas > 1 && !like->whole && !like->sets &&
			(like->plan.partial.how || like->plan.replica.how);
	like->here = like->crossed ? like->replicas
		     : like->whole ? c->group->most / like->shard_ranks
				   : 1;
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint32_t n = unit_spans(u, &u->parts[d], like->span);

		like->spans = n > like->spans ? n : like->spans;
	}
	like->launches = c->n + 1 > u->rec->n_tensors ? c->n + 1 : u->rec->n_tensors;
}

static uint64_t reduce_run_zero_bytes(const struct coll *c)
{
	bool any = false;

	for (uint32_t i = 0; i < c->n; i++)
		any = any || reduce_run_is_surrogate(c, i);
	return any ? reduce_run_rounded_up(c->unit->layout.elements *
					   dtype_size(reduce_run_gradient_dtype(c->unit)))
		   : 0;
}

static void reduce_run_begin(const struct coll *c, struct reduce_run *run)
{
	run->added = &run->partials[run->here * c->n_parts];
	run->pieces = &run->added[c->n];
	run->defer = reduce_args(c->ops[0])->defer;
	run->had_partials = c->unit->has_partials;
	run->apart = reduce_run_must_be_apart(c, run);
	run->chained = chain_is_wanted(c->group) ||
		       (chain_is_used(c) && !run->crossed && (!run->apart || run->sets));
	run->stride = reduce_run_rounded_up(
		(run->crossed || run->sets ? reduce_segment(c) : c->unit->layout.elements) *
		dtype_size(run->plan.sum_dtype));
	run->zero_bytes = reduce_run_zero_bytes(c);
	CHECK(!run->zero_bytes || run->plan.accumulate_dtype == reduce_run_gradient_dtype(c->unit));
	run->lonely_bytes = reduce_run_lonely_bytes(c, run);
}

struct reduce_run *reduce_run_free(struct reduce_run *run)
{
	if (run) {
		free(run->span);
		fused_steps_deinit(&run->steps);
	}
	free(run);
	return NULL;
}

struct reduce_run *reduce_run_new(struct coll *c)
{
	struct reduce_run like = { 0 }, *run;
	size_t pointers;

	like.span = calloc(c->unit->rec->n_tensors, sizeof(*like.span));
	if (!like.span)
		return NULL;
	CHECK(coll_size(c) % c->unit->rec->shard_ranks == 0);
	reduce_run_measure(c, &like);
	pointers = (size_t)like.here * c->n_parts + c->n +
		   (size_t)like.spans * (c->n + 1 + (like.crossed ? like.here * c->n_parts : 0));
	run = calloc(1, sizeof(*run) + pointers * sizeof(run->partials[0]) +
				c->n * sizeof(run->inputs[0]));
	if (!run) {
		free(like.span);
		return NULL;
	}
	*run = like;
	run->inputs = (struct reduce_input *)&run->partials[pointers];
	reduce_run_take_inputs(c, run);
	reduce_run_begin(c, run);
	return run;
}

uint64_t reduce_scratch(const struct coll *c, unsigned which)
{
	const struct reduce_run *run = reduce_of(c)->run;

	if (which == REDUCE_PARTIALS)
		return run->apart && !c->unit->parts[0].partials.slab ? run->here * run->stride : 0;
	if (which == REDUCE_CONVERTED)
		return run->zero_bytes ? run->zero_bytes : run->lonely_bytes;
	if (coll_is_alone(c) || (run->defer && !run->crossed && !run->sets))
		return 0;
	if (which == REDUCE_PACKED && !unit_is_packed(c->unit))
		return 0;
	return unit_part_elements(c->unit) * c->unit->spread * dtype_size(run->plan.sum_dtype);
}

static void reduce_run_zero(struct coll *c, unsigned d)
{
	struct coll_part *p = &c->parts[d];

	if (reduce_of(c)->run->zero_bytes)
		coll_launch(p, LAUNCH_FILL, reduce_of(c)->run->zero_bytes / sizeof(float))->fill =
			(struct k_fill){ .dst = region_addr(&p->scratch[REDUCE_ZEROS]),
					 .kind = FILL_CONSTANT };
}

/* What is new, added to what was accumulated. */
static void reduce_run_add_new(struct coll *c, unsigned d)
{
	struct coll_part *p = &c->parts[d];

	for (uint32_t i = 0; i < p->n; i++) {
		const struct reduce_input *in = reduce_run_given(c, p->members[i]);
		const void **new = &reduce_of(c)->run->added[p->members[i]];

		if (!in->accumulated.slab || !in->gradient.slab)
			continue;
		*new = region_addr(&in->gradient);
		reduce_add_launch(c->unit, &reduce_of(c)->run->plan, region_addr(&in->accumulated),
				  new, coll_launch(p, LAUNCH_REDUCE, 0));
	}
}

/* DDP: each rank's gradient is the one that earlier reductions left, and more. */
static void reduce_run_include(struct coll *c, unsigned d)
{
	struct coll_part *p = &c->parts[d];
	enum dtype dtype;

	if (!reduce_of(c)->run->plan.adds_before || !reduce_of(c)->run->accumulate)
		return;
	for (uint32_t i = 0; i < p->n; i++)
		if (!reduce_run_is_surrogate(c, p->members[i]) &&
		    !reduce_run_given(c, p->members[i])->included)
			reduce_include_launch(c->unit, &c->unit->parts[d],
					      &reduce_of(c)->run->added[p->members[i]],
					      reduce_run_input_of(c, p->members[i], &dtype),
					      coll_launch(p, LAUNCH_REDUCE, 0));
}

/* Those that did not accumulate, in the type of those that did. */
static void reduce_run_convert(struct coll *c, unsigned d)
{
	struct coll_part *p = &c->parts[d];
	enum dtype to = reduce_of(c)->run->plan.accumulate_dtype, from;
	char *at = reduce_run_address(&p->scratch[REDUCE_CONVERTED]);

	for (uint32_t i = 0; i < p->n; i++) {
		p->inputs[i] = reduce_run_input_of(c, p->members[i], &from);
		if (!reduce_run_is_lonely(c, p->members[i]))
			continue;
		reduce_convert_launch(c->unit, &reduce_of(c)->run->plan, at, p->inputs[i],
				      coll_launch(p, LAUNCH_CAST, 0));
		p->inputs[i] = at;
		at += reduce_run_rounded_up(c->unit->layout.elements * dtype_size(to));
	}
}

/* After convert all inputs have one type. */
enum dtype reduce_input_dtype(const struct coll *c)
{
	enum dtype dtype;

	(void)reduce_run_input_of(c, 0, &dtype);
	return reduce_of(c)->run->lonely_bytes ? reduce_of(c)->run->plan.accumulate_dtype : dtype;
}

/* Each replica's sum, added to those that were kept. */
static void reduce_run_fold_replicas(struct coll *c, unsigned d)
{
	struct reduce_run *run = reduce_of(c)->run;
	struct coll_part *p = &c->parts[d];
	const struct unit_part *up = &c->unit->parts[d];
	char *at = reduce_run_address(up->partials.slab ? &up->partials
							: &p->scratch[REDUCE_PARTIALS]);
	uint32_t here = reduce_run_partials_on(c, run, d), k = p->n / here;

	CHECK(here <= run->here && here * k == p->n); /* each replica is whole */
	for (uint32_t j = 0; run->apart && !run->sets && j < here; j++) {
		run->partials[d * run->here + j] = at + j * run->stride;
		coll_launch(p, LAUNCH_REDUCE, c->unit->layout.elements)->reduce =
			(struct k_reduce){ .out = at + j * run->stride,
					   .out_dtype = run->plan.sum_dtype,
					   .in = &p->inputs[j * k],
					   .k = k,
					   .in_dtype = reduce_input_dtype(c),
					   .pre = run->plan.pre,
					   .sum_dtype = run->plan.sum_dtype,
					   .post = run->plan.partial,
					   .accumulate = run->had_partials };
	}
}

/* Before the devices' sums are added: on one device that is all. */
struct k_factor reduce_tail(const struct coll *c)
{
	const struct reduce_run *run = reduce_of(c)->run;
	struct k_factor none = { .how = K_FACTOR_NONE }, post = run->plan.post;

	if (!run->apart && run->replicas == 1)
		post = reduce_either(run->plan.partial, post);
	if (coll_is_alone(c))
		return post;
	return !run->apart && run->replicas > 1 && run->shard_ranks > 1
		       ? reduce_either(run->plan.partial, run->plan.replica)
		       : none;
}

struct k_factor reduce_head(const struct coll *c)
{
	const struct reduce_run *run = reduce_of(c)->run;

	if (run->sets)
		return run->plan.pre;
	if (run->apart)
		return run->plan.replica;
	if (run->replicas == 1)
		return run->plan.pre;
	if (run->shard_ranks == 1)
		return reduce_either(reduce_either(run->plan.pre, run->plan.partial),
				     run->plan.replica);
	return run->plan.pre;
}

/* @r, which is of whole arrays, by the pieces of tensors: what lies between them is not the
 * trainers' to write, and stays 0 in the shards. */
void reduce_by_span(struct coll *c, unsigned d, const struct k_reduce *r)
{
	struct unit_run *spans = reduce_of(c)->run->span;
	const void **in = reduce_of(c)->run->pieces + (size_t)d * reduce_of(c)->run->spans * r->k;
	unsigned n = unit_spans(c->unit, &c->unit->parts[d], spans);

	CHECK(n <= reduce_of(c)->run->spans && r->k <= c->n + 1);
	if (gradient_of(c)->fused && !fused_steps_begin(&reduce_of(c)->run->steps, c, d))
		return;
	for (unsigned i = 0; i < n; i++, in += r->k) {
		struct k_reduce piece = *r;

		for (unsigned j = 0; j < r->k; j++)
			in[j] = (const char *)r->in[j] + spans[i].at * dtype_size(r->in_dtype);
		piece.in = in;
		piece.out = r->out ? (float *)r->out + spans[i].at : NULL;
		if (gradient_of(c)->fused)
			fused_steps_launch(&reduce_of(c)->run->steps, c, d, &spans[i], &piece);
		else
			coll_launch(&c->parts[d], LAUNCH_REDUCE, spans[i].n)->reduce = piece;
	}
}

/* A device's sum of everything; on one device into the gradient shards. */
static void reduce_run_fold(struct coll *c, unsigned d)
{
	struct reduce_run *run = reduce_of(c)->run;
	struct coll_part *p = &c->parts[d];
	bool one = coll_is_alone(c), of_partials = run->apart && !run->sets;
	struct k_reduce r = { .out = reduce_run_address(one ? &c->unit->parts[0].grads
							    : &p->scratch[REDUCE_SUMS]),
			      .out_dtype = one ? DTYPE_FP32 : run->plan.sum_dtype,
			      .in = of_partials ? &run->partials[d * run->here] : p->inputs,
			      .k = of_partials ? reduce_run_partials_on(c, run, d) : p->n,
			      .in_dtype = of_partials ? run->plan.sum_dtype : reduce_input_dtype(c),
			      .pre = reduce_head(c),
			      .sum_dtype = run->plan.sum_dtype,
			      .post = reduce_tail(c),
			      .accumulate = one && run->accumulate && !run->plan.adds_before };

	if (one)
		reduce_by_span(c, d, &r);
	else
		coll_launch(p, LAUNCH_REDUCE, c->unit->layout.elements)->reduce = r;
}

/* Into the order in which it is scattered. */
void reduce_pack(struct coll *c, unsigned d)
{
	struct coll_part *p = &c->parts[d];
	enum dtype dtype = reduce_of(c)->run->plan.sum_dtype;
	struct unit_array full = { reduce_run_address(&p->scratch[REDUCE_SUMS]), dtype };
	struct unit_array parts = { reduce_run_address(&p->scratch[REDUCE_PACKED]), dtype };

	if (!parts.at)
		return;
	CHECK(full.at && p->room >= c->unit->rec->n_tensors);
	p->n_launches = unit_pack_launches(c->unit, UNIT_TRAINED, &parts, &full, p->launches);
}

unsigned reduce_sums(const struct coll *c)
{
	return unit_is_packed(c->unit) ? REDUCE_PACKED : REDUCE_SUMS;
}

bool reduce_next_stage(struct coll *c)
{
	static void (*const stages[])(struct coll * c, unsigned d) = {
		reduce_run_zero,    reduce_run_add_new,       reduce_run_include,
		reduce_run_convert, reduce_run_fold_replicas, reduce_run_fold,
		reduce_pack
	};
	const struct reduce_run *run = reduce_of(c)->run;
	unsigned n = run->crossed || run->chained ? 4
		     : run->defer && !run->sets   ? 5
						  : ARRAY_SIZE(stages);
	bool any = false;

	while (!any && run->stage < n) {
		for (unsigned d = 0; d < c->n_parts; d++) {
			stages[reduce_of(c)->run->stage](c, d);
			any = any || c->parts[d].n_launches;
		}
		reduce_of(c)->run->stage++;
	}
	return any;
}

void reduce_finish(struct coll *c, unsigned d)
{
	const struct reduce_run *run = reduce_of(c)->run;
	struct coll_part *p = &c->parts[d];
	const struct unit_part *up = &c->unit->parts[d];
	struct k_reduce r = { .out = reduce_run_address(&up->grads),
			      .out_dtype = DTYPE_FP32,
			      .in = &p->inputs[p->n],
			      .k = 1,
			      .in_dtype = run->plan.sum_dtype,
			      .sum_dtype = run->plan.sum_dtype,
			      .post = run->plan.post,
			      .accumulate = run->accumulate && !run->plan.adds_before };

	if (run->replicas == 1 && !run->apart)
		r.post = reduce_either(run->plan.partial, run->plan.post);
	CHECK(p->sums && up->device == p->device);
	p->inputs[p->n] = p->sums;
	reduce_by_span(c, d, &r);
}
