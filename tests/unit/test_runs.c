/* Where every element of every tensor is, in every layout: against a plain evaluation of the
 * rules, element by element. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "backend/launch.h"
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
	const struct unit_place place = { list, devices, devices, 0 };
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
	cr_assert_eq(unit_new(1, x->rec, &l, &place, &x->u), 0);
}

static void teardown(struct fixture *x)
{
	unit_free(x->u);
	state_unit_free(x->rec);
}

/* Return: the rank that owns element @e of tensor @i, by the definition. */
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

/* What was seen of a unit: no place twice. */
struct seen {
	struct fixture x;
	struct unit_run of_part[8][MAX_TENSORS], of_rank[8][MAX_TENSORS];
	unsigned n_part[8], n_rank[8];
	uint64_t part, in_shard; /* elements */
	uint8_t *full, *at, *shards;
};

static bool is_in(const struct unit_run *run, unsigned tensor, uint64_t e)
{
	return run->tensor == tensor && e >= run->first && e < run->first + run->n;
}

/* In the run of the parts where its owner is, at the place that it has when gathered. */
static void check_parts(struct seen *s, unsigned i, uint64_t e, uint32_t own, uint64_t place)
{
	const struct unit *u = s->x.u;
	unsigned found = 0;

	for (unsigned d = 0; d < u->n_parts; d++) {
		for (unsigned k = 0; k < s->n_part[d]; k++) {
			const struct unit_run *run = &s->of_part[d][k];

			if (!is_in(run, i, e))
				continue;
			found++;
			cr_assert_eq(d % u->spread, unit_rank_position(u, own));
			cr_assert_eq(run->full + e - run->first, place);
			cr_assert_lt(run->at + e - run->first, s->part);
			cr_assert(!s->at[d * s->part + run->at + e - run->first]++);
		}
	}
	cr_assert_eq(found, u->n_parts / u->spread);
}

static void check_ranks(struct seen *s, unsigned i, uint64_t e, uint32_t own, uint32_t ranks)
{
	for (uint32_t r = 0; r < ranks; r++) {
		for (unsigned k = 0; k < s->n_rank[r]; k++) {
			const struct unit_run *run = &s->of_rank[r][k];

			if (!is_in(run, i, e))
				continue;
			cr_assert_eq(r % s->x.u->layout.ranks, own);
			cr_assert_lt(run->shard + e - run->first, s->in_shard);
			cr_assert(!s->shards[r * s->in_shard + run->shard + e - run->first]++);
		}
	}
}

static void seen_init(struct seen *s, uint32_t ranks)
{
	const struct unit *u = s->x.u;
	uint64_t room;

	s->part = unit_part_elements(u) + unit_frozen_elements(u);
	s->in_shard = u->layout.shard_elements + u->layout.frozen_shard;
	room = s->part * u->spread;
	cr_assert_leq(unit_full_elements(u), room);
	s->full = calloc(1, room + 1);
	s->at = calloc(u->n_parts, s->part + 1);
	s->shards = calloc(ranks, s->in_shard + 1);
	for (unsigned d = 0; d < u->n_parts; d++)
		s->n_part[d] = unit_runs_of(u, &u->parts[d], UNIT_ALL, s->of_part[d]);
	for (uint32_t r = 0; r < ranks; r++)
		s->n_rank[r] = unit_rank_runs(u, r, UNIT_ALL, s->of_rank[r]);
}

/* Every element of every tensor: in the run of its owner and of that owner's part, nowhere
 * else, in one piece in the gathered unit, alone at its place. */
static void check_all(unsigned model, enum unit_layout_kind layout, uint32_t ranks,
		      uint32_t shard_ranks, unsigned devices)
{
	struct seen s = { .part = 0 };
	const struct unit *u;

	setup(&s.x, model, layout, ranks, shard_ranks, devices);
	seen_init(&s, ranks);
	u = s.x.u;
	for (unsigned i = 0; i < models[model].n; i++) {
		const struct unit_tensor *t = &u->tensors[i];

		for (uint64_t e = 0; e < t->elements; e++) {
			uint32_t own = owner(&s.x, model, i, e);
			uint64_t place = unit_tensor_full(u, t) + e;

			cr_assert_lt(place, unit_full_elements(u));
			cr_assert(!s.full[place]++);
			cr_assert_eq(place < u->layout.elements || !u->layout.elements,
				     !t->frozen || !u->layout.elements, "gradients come first");
			check_parts(&s, i, e, own, place);
			check_ranks(&s, i, e, own, ranks);
		}
	}
	free(s.full);
	free(s.at);
	free(s.shards);
	teardown(&s.x);
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

/* Pieces of @each elements of a part's row, one after the other: what the runs say, in their
 * order. */
static void check_row(const struct unit *u, const struct unit_part *p, uint64_t each)
{
	struct unit_run runs[MAX_TENSORS], pieces[MAX_TENSORS];
	unsigned n = unit_runs(u, p, runs), run = 0;
	uint64_t all = unit_row_elements(u, p), in_run = 0;

	for (uint64_t from = 0; from < all + each; from += each) {
		unsigned k = unit_row_runs(u, p, from, each, pieces);
		uint64_t at = 0;

		for (unsigned i = 0; i < k; i++) {
			cr_assert_lt(run, n);
			cr_assert_eq(pieces[i].tensor, runs[run].tensor);
			cr_assert_eq(pieces[i].shard, at);
			cr_assert_eq(pieces[i].first, runs[run].first + in_run);
			cr_assert_eq(pieces[i].at, runs[run].at + in_run);
			cr_assert_eq(pieces[i].full, runs[run].full + in_run);
			at += pieces[i].n;
			in_run += pieces[i].n;
			cr_assert_leq(in_run, runs[run].n);
			if (in_run == runs[run].n) {
				run++;
				in_run = 0;
			}
		}
		cr_assert_eq(at, from >= all ? 0 : all - from < each ? all - from : each);
	}
	cr_assert_eq(run, n);
}

Test(runs, a_row_in_pieces_is_all_of_a_part)
{
	for (unsigned model = 0; model < ARRAY_SIZE(models); model++)
		for (unsigned layout = LAYOUT_FLAT; layout <= LAYOUT_DIM0; layout++)
			for (uint32_t ranks = 1; ranks <= 4; ranks++)
				for (unsigned devices = 1; devices <= ranks; devices++) {
					struct fixture x;

					setup(&x, model, layout, ranks, ranks, devices);
					for (unsigned d = 0; d < devices; d++)
						for (uint64_t each = 1; each < 40; each += 3)
							check_row(x.u, &x.u->parts[d], each);
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
				struct launch launches[MAX_TENSORS];
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
				n = unit_unpack_launches(x.u, UNIT_ALL,
							 &(struct unit_array){ full, DTYPE_FP32 },
							 &(struct unit_array){ parts, DTYPE_FP32 },
							 launches);
				for (unsigned i = 0; i < n; i++)
					launch_run(kernels_ref(), &launches[i], 0, launches[i].n);
				for (unsigned i = 0; i < models[model].n; i++) {
					const struct unit_tensor *t = &x.u->tensors[i];

					for (uint64_t e = 0; e < t->elements; e++)
						cr_assert_eq(full[unit_tensor_full(x.u, t) + e],
							     (float)(1 + i * 100 + e));
				}
				n = unit_pack_launches(x.u, UNIT_ALL,
						       &(struct unit_array){ back, DTYPE_FP32 },
						       &(struct unit_array){ full, DTYPE_FP32 },
						       launches);
				for (unsigned i = 0; i < n; i++)
					launch_run(kernels_ref(), &launches[i], 0, launches[i].n);
				cr_assert_arr_eq(back, parts, room * sizeof(float));
				free(full);
				free(parts);
				free(back);
				teardown(&x);
			}
}
