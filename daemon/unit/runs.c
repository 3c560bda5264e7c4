#include "unit/runs.h"

#include "core/check.h"

/* Return: false: nothing of it. */
static bool runs_run_of(const struct unit *u, uint32_t i, const struct unit_ranks *r,
			struct unit_run *ret)
{
	const struct unit_tensor *t = &u->tensors[i];
	uint64_t begin, end;

	if (t->alias)
		return false;
	unit_tensor_cut(u, t, r, &begin, &end);
	if (begin == end)
		return false;
	*ret = (struct unit_run){ .tensor = i,
				  .first = begin,
				  .at = unit_tensor_at(u, t, r, begin),
				  .full = unit_tensor_full(u, t) + begin,
				  .n = end - begin };
	return true;
}

static unsigned runs_in(const struct unit *u, const struct unit_ranks *r, enum unit_which which,
			struct unit_run *ret)
{
	unsigned n = 0;

	for (int frozen = 0; frozen < 2; frozen++)
		for (uint32_t i = 0; i < u->rec->n_tensors; i++)
			if (u->tensors[i].frozen == frozen &&
			    which & (frozen ? UNIT_FROZEN : UNIT_TRAINED))
				n += runs_run_of(u, i, r, &ret[n]);
	return n;
}

unsigned unit_runs(const struct unit *u, const struct unit_part *p, struct unit_run *ret)
{
	return unit_runs_of(u, p, UNIT_TRAINED, ret);
}

unsigned unit_runs_of(const struct unit *u, const struct unit_part *p, enum unit_which which,
		      struct unit_run *ret)
{
	struct unit_ranks r = unit_part_ranks(u, unit_position(u, p));

	return runs_in(u, &r, which, ret);
}

bool unit_part_run(const struct unit *u, const struct unit_part *p, uint32_t i,
		   struct unit_run *ret)
{
	return unit_position_run(u, unit_position(u, p), i, ret);
}

bool unit_position_run(const struct unit *u, unsigned position, uint32_t i, struct unit_run *ret)
{
	struct unit_ranks r = unit_part_ranks(u, position);

	return runs_run_of(u, i, &r, ret);
}

unsigned unit_rank_position(const struct unit *u, uint32_t index)
{
	return index % u->layout.ranks / layout_part_ranks(&u->layout, u->spread);
}

static uint64_t runs_at_shard(const struct unit *u, uint32_t rank, const struct unit_tensor *t,
			      uint64_t first)
{
	uint64_t shard = t->frozen ? u->layout.frozen_shard : u->layout.shard_elements;
	uint64_t base = t->frozen ? u->layout.shard_elements : 0;

	return base + (u->layout.dim0 ? t->at : t->at + first - rank * shard);
}

bool unit_rank_run(const struct unit *u, uint32_t index, uint32_t i, struct unit_run *ret)
{
	uint32_t rank = index % u->layout.ranks;
	struct unit_ranks r = { rank, rank + 1, unit_rank_position(u, index) };
	bool any = runs_run_of(u, i, &r, ret);

	if (!any)
		*ret = (struct unit_run){ .tensor = i };
	else
		ret->shard = runs_at_shard(u, rank, &u->tensors[i], ret->first);
	return any;
}

unsigned unit_rank_runs(const struct unit *u, uint32_t index, enum unit_which which,
			struct unit_run *ret)
{
	unsigned n = 0;

	for (int frozen = 0; frozen < 2; frozen++)
		for (uint32_t i = 0; i < u->rec->n_tensors; i++)
			if (u->tensors[i].frozen == frozen &&
			    which & (frozen ? UNIT_FROZEN : UNIT_TRAINED))
				n += unit_rank_run(u, index, i, &ret[n]);
	return n;
}

unsigned unit_gaps(const struct unit *u, const struct unit_part *p, struct unit_run *ret)
{
	struct unit_ranks r = unit_part_ranks(u, unit_position(u, p));
	struct unit_run run;
	uint64_t end = 0;
	unsigned n = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		if (u->tensors[i].frozen || !runs_run_of(u, i, &r, &run))
			continue;
		if (run.at > end)
			ret[n++] = (struct unit_run){ .at = end, .n = run.at - end };
		end = run.at + run.n;
	}
	CHECK(end == p->n);
	return n;
}

uint64_t unit_row_elements(const struct unit *u, const struct unit_part *p)
{
	struct unit_run run;
	uint64_t n = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++)
		if (!u->tensors[i].frozen && unit_part_run(u, p, i, &run))
			n += run.n;
	return n;
}

/* @run, which is elements [at, at + run->n) of a row, cut to [from, to) of it. Return: false:
 * nothing is left. */
static bool runs_cut_run(struct unit_run *run, uint64_t at, uint64_t from, uint64_t to)
{
	uint64_t end = at + run->n < to ? at + run->n : to, skip = from > at ? from - at : 0;

	if (at + skip >= end)
		return false;
	run->first += skip;
	run->at += skip;
	run->full += skip;
	run->shard = at + skip - from;
	run->n = end - at - skip;
	return true;
}

unsigned unit_row_runs(const struct unit *u, const struct unit_part *p, uint64_t from, uint64_t n,
		       struct unit_run *ret)
{
	uint64_t at = 0;
	unsigned runs = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		struct unit_run run;
		uint64_t all;

		if (u->tensors[i].frozen || !unit_part_run(u, p, i, &run))
			continue;
		all = run.n;
		if (runs_cut_run(&run, at, from, from + n))
			ret[runs++] = run;
		at += all;
	}
	return runs;
}

unsigned unit_spans(const struct unit *u, const struct unit_part *p, struct unit_run *ret)
{
	unsigned all = unit_runs(u, p, ret), n = 0;

	for (unsigned i = 0; i < all; i++) {
		struct unit_run *last = n ? &ret[n - 1] : NULL;

		if (last && last->at + last->n == ret[i].at && last->full + last->n == ret[i].full)
			last->n += ret[i].n;
		else
			ret[n++] = ret[i];
	}
	return n;
}
