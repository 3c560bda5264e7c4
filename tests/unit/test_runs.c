/* Where every element of every tensor is, in every layout: against a plain evaluation of the
 * rules, element by element. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "backend/kop.h"
#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "unit/optim.h"
#include "unit/pack.h"

TestSuite(runs, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define MAX_TENSORS 6

struct shape {
	uint64_t d[3];
	unsigned n;
	bool frozen;
};

/* Scalars, fewer rows than ranks, what divides and what does not; all frozen at last. */
static const struct {
	struct shape t[MAX_TENSORS];
	unsigned n;
} models[] = {
	{ { { { 1 }, 0, false } }, 1 },
	{ { { { 5 }, 1, false } }, 1 },
	{ { { { 7, 3 }, 2, false }, { { 2 }, 1, false }, { { 8, 1, 2 }, 3, false } }, 3 },
	{ { { { 3 }, 1, false },
	    { { 4, 5 }, 2, true },
	    { { 9, 2 }, 2, false },
	    { { 1 }, 0, true } },
	  4 },
	{ { { { 1 }, 1, true },
	    { { 6, 2 }, 2, false },
	    { { 1, 7 }, 2, false },
	    { { 13 }, 1, true } },
	  4 },
	{ { { { 11, 3 }, 2, true }, { { 2, 2 }, 2, true } }, 2 },
};

struct fixture {
	state_unit *rec;
	struct unit *u;
	struct device devices[8];
};

static void setup(struct fixture *x, unsigned model, enum unit_layout_kind layout, uint32_t ranks,
		  uint32_t shard_ranks, unsigned devices)
{
	struct device *list[8];
	struct layout l;

	x->rec = state_unit_new("u");
	for (unsigned i = 0; i < models[model].n; i++) {
		const struct shape *s = &models[model].t[i];
		char name[16];
		state_tensor *t;

		snprintf(name, sizeof(name), "t%u", i);
		t = state_tensor_new(name, s->d, s->n);
		t->frozen = s->frozen;
		CHECK(state_unit_add_tensor(x->rec, t) == 0);
	}
	x->rec->layout = layout;
	x->rec->shard_multiple = layout == LAYOUT_FLAT && model % 2 ? 4 : 1;
	x->rec->shard_ranks = shard_ranks;
	x->rec->compute_dtype = x->rec->gradient_dtype = x->rec->storage_dtype = DTYPE_FP32;
	for (unsigned d = 0; d < devices; d++)
		list[d] = &x->devices[d];
	cr_assert(unit_layout(x->rec, ranks, &l));
	cr_assert_eq(unit_new(1, x->rec, &l, list, devices, &x->u), 0);
}

static void teardown(struct fixture *x)
{
	unit_free(x->u);
	state_unit_free(x->rec);
}

/* Who owns element @e of tensor @i, by the books. */
static uint32_t owner(const struct fixture *x, unsigned model, unsigned i, uint64_t e)
{
	const struct shape *s = &models[model].t[i];
	uint32_t ranks = x->u->layout.ranks, m = x->rec->shard_multiple;
	uint64_t before = 0, all = 0, shard;

	if (x->rec->layout == LAYOUT_DIM0) {
		uint64_t d0 = s->n ? s->d[0] : 1, row = 1;

		for (unsigned k = 1; k < s->n; k++)
			row *= s->d[k];
		return (uint32_t)(e / row / ((d0 + ranks - 1) / ranks));
	}
	for (unsigned k = 0; k < models[model].n; k++) {
		uint64_t n = 1;

		for (unsigned j = 0; j < models[model].t[k].n; j++)
			n *= models[model].t[k].d[j];
		if (models[model].t[k].frozen != s->frozen)
			continue;
		all += n;
		before += k < i ? n : 0;
	}
	shard = ((all + ranks - 1) / ranks + m - 1) / m * m;
	return (uint32_t)((before + e) / shard);
}

/* Every element of every tensor: in the run of its owner and of that owner's part, nowhere
 * else, in one piece in the gathered unit, alone at its place. */
static void check_all(unsigned model, enum unit_layout_kind layout, uint32_t ranks,
		      uint32_t shard_ranks, unsigned devices)
{
	struct unit_run runs[8][MAX_TENSORS], of_rank[8][MAX_TENSORS];
	unsigned n[8], n_rank[8];
	struct fixture x;
	uint64_t room, part, in_shard;
	uint8_t *full, *at, *shards;

	setup(&x, model, layout, ranks, shard_ranks, devices);
	part = unit_part_elements(x.u) + unit_frozen_elements(x.u);
	in_shard = x.u->layout.shard_elements + x.u->layout.frozen_shard;
	room = part * x.u->spread;
	cr_assert_leq(unit_full_elements(x.u), room);
	full = calloc(1, room + 1);
	at = calloc(x.u->n_parts, part + 1);
	shards = calloc(ranks, in_shard + 1);
	for (unsigned d = 0; d < x.u->n_parts; d++)
		n[d] = unit_runs_of(x.u, &x.u->parts[d], UNIT_ALL, runs[d]);
	for (uint32_t r = 0; r < ranks; r++)
		n_rank[r] = unit_rank_runs(x.u, r, UNIT_ALL, of_rank[r]);
	for (unsigned i = 0; i < models[model].n; i++) {
		const struct unit_tensor *t = &x.u->tensors[i];

		for (uint64_t e = 0; e < t->elements; e++) {
			uint32_t own = owner(&x, model, i, e);
			uint64_t place = unit_tensor_full(x.u, t) + e;
			unsigned found = 0;

			cr_assert_lt(place, unit_full_elements(x.u));
			cr_assert(!full[place]++);
			cr_assert_eq(place < x.u->layout.elements || !x.u->layout.elements,
				     !t->frozen || !x.u->layout.elements, "gradients come first");
			for (unsigned d = 0; d < x.u->n_parts; d++)
				for (unsigned k = 0; k < n[d]; k++) {
					struct unit_run *run = &runs[d][k];

					if (run->tensor != i || e < run->first ||
					    e >= run->first + run->n)
						continue;
					found++;
					cr_assert_eq(d % x.u->spread, unit_rank_position(x.u, own));
					cr_assert_eq(run->full + e - run->first, place);
					cr_assert_lt(run->at + e - run->first, part);
					cr_assert(!at[d * part + run->at + e - run->first]++);
				}
			cr_assert_eq(found, x.u->n_parts / x.u->spread);
			for (uint32_t r = 0; r < ranks; r++)
				for (unsigned k = 0; k < n_rank[r]; k++) {
					struct unit_run *run = &of_rank[r][k];

					if (run->tensor != i || e < run->first ||
					    e >= run->first + run->n)
						continue;
					cr_assert_eq(r % x.u->layout.ranks, own);
					cr_assert_lt(run->shard + e - run->first, in_shard);
					cr_assert(!shards[r * in_shard + run->shard + e -
							  run->first]++);
				}
		}
	}
	free(full);
	free(at);
	free(shards);
	teardown(&x);
}

Test(runs, every_element_is_where_the_rules_say)
{
	for (unsigned model = 0; model < ARRAY_SIZE(models); model++)
		for (unsigned layout = LAYOUT_FLAT; layout <= LAYOUT_DIM0; layout++)
			for (uint32_t ranks = 1; ranks <= 8; ranks++)
				for (unsigned devices = 1; devices <= ranks && devices <= 4;
				     devices++)
					for (uint32_t shard = 1; shard <= ranks; shard++)
						if (ranks % shard == 0)
							check_all(model, layout, ranks, shard,
								  devices);
}

Test(runs, spans_and_gaps_are_all_of_a_part)
{
	for (unsigned model = 0; model < ARRAY_SIZE(models); model++)
		for (unsigned layout = LAYOUT_FLAT; layout <= LAYOUT_DIM0; layout++)
			for (uint32_t ranks = 1; ranks <= 8; ranks++) {
				struct unit_run runs[MAX_TENSORS], spans[MAX_TENSORS],
					gaps[MAX_TENSORS];
				unsigned devices = ranks < 3 ? ranks : 3;
				struct fixture x;

				setup(&x, model, layout, ranks, ranks, devices);
				for (unsigned d = 0; d < devices; d++) {
					const struct unit_part *p = &x.u->parts[d];
					unsigned n = unit_runs(x.u, p, runs), s, g;
					uint64_t in_runs = 0, in_spans = 0, in_gaps = 0;

					s = unit_spans(x.u, p, spans);
					g = unit_gaps(x.u, p, gaps);
					for (unsigned i = 0; i < n; i++)
						in_runs += runs[i].n;
					for (unsigned i = 0; i < s; i++)
						in_spans += spans[i].n;
					for (unsigned i = 0; i < g; i++)
						in_gaps += gaps[i].n;
					cr_assert_eq(in_runs, in_spans);
					cr_assert_eq(in_spans + in_gaps, p->n);
					cr_assert(layout == LAYOUT_DIM0 || (s <= 1 && !g));
				}
				teardown(&x);
			}
}

/* What an all-gather of the parts leaves, and back: the same numbers, each where its tensor
 * is. */
Test(runs, packing_and_unpacking)
{
	for (unsigned model = 0; model < ARRAY_SIZE(models); model++)
		for (uint32_t ranks = 2; ranks <= 8; ranks++)
			for (unsigned devices = 2; devices <= ranks && devices <= 4; devices++) {
				struct unit_run runs[MAX_TENSORS];
				struct kop kops[MAX_TENSORS];
				struct fixture x;
				uint64_t trained, frozen, room;
				float *full, *parts, *back;
				unsigned n;

				setup(&x, model, LAYOUT_DIM0, ranks, ranks, devices);
				trained = unit_part_elements(x.u);
				frozen = unit_frozen_elements(x.u);
				room = (trained + frozen) * devices;
				full = calloc(room, sizeof(float));
				parts = calloc(room, sizeof(float));
				back = calloc(room, sizeof(float));
				for (unsigned d = 0; d < devices; d++) {
					n = unit_runs_of(x.u, &x.u->parts[d], UNIT_ALL, runs);
					for (unsigned i = 0; i < n; i++)
						for (uint64_t e = 0; e < runs[i].n; e++) {
							bool fr =
								x.u->tensors[runs[i].tensor].frozen;
							uint64_t at = runs[i].at + e;

							at = fr ? trained * devices + d * frozen +
									     at - trained
								: d * trained + at;
							parts[at] =
								(float)(1 + runs[i].tensor * 100 +
									runs[i].first + e);
						}
				}
				cr_assert(unit_is_packed(x.u));
				n = unit_unpack_kops(x.u, UNIT_ALL,
						     &(struct unit_array){ full, DTYPE_FP32 },
						     &(struct unit_array){ parts, DTYPE_FP32 },
						     kops);
				for (unsigned i = 0; i < n; i++)
					kop_run(kernels_ref(), &kops[i], 0, kops[i].n);
				for (unsigned i = 0; i < models[model].n; i++) {
					const struct unit_tensor *t = &x.u->tensors[i];

					for (uint64_t e = 0; e < t->elements; e++)
						cr_assert_eq(full[unit_tensor_full(x.u, t) + e],
							     (float)(1 + i * 100 + e));
				}
				n = unit_pack_kops(x.u, UNIT_ALL,
						   &(struct unit_array){ back, DTYPE_FP32 },
						   &(struct unit_array){ full, DTYPE_FP32 }, kops);
				for (unsigned i = 0; i < n; i++)
					kop_run(kernels_ref(), &kops[i], 0, kops[i].n);
				cr_assert_arr_eq(back, parts, room * sizeof(float));
				free(full);
				free(parts);
				free(back);
				teardown(&x);
			}
}
