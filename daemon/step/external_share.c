#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op.h"
#include "step/external.h"
#include "shardd.pb-c.h"

static const struct group *external_share_group_of(const struct job *job, const struct unit *u)
{
	return job->groups[u->rec->group];
}

/* The number of its part among those of all nodes. */
static unsigned external_share_part_of(const struct job *job, struct unit *u, uint32_t index)
{
	CHECK(u->all_parts == external_share_group_of(job, u)->all_devices);
	return group_device_number(external_share_group_of(job, u), index);
}

/* One on this node that has the same elements as part @d of all nodes. */
static struct unit_part *external_share_part_like(struct unit *u, unsigned d)
{
	unsigned i = 0;

	while (i < u->n_parts && unit_position(u, &u->parts[i]) != d % u->spread)
		i++;
	CHECK(i < u->n_parts);
	return &u->parts[i];
}

/* Does every rank have its shard on its own device, and for itself? */
static bool external_share_own_shards(const struct job *job, struct unit *u)
{
	uint32_t n = group_size(external_share_group_of(job, u));

	if (u->layout.ranks != n)
		return false;
	for (uint32_t i = 0; i < n; i++)
		if (external_share_part_of(job, u, i) != unit_rank_position(u, i))
			return false;
	return true;
}

/* Of the ranks that share what part @d has: how many there are, how many come before those
 * on @d, and how many those are. */
struct sharers {
	uint32_t all, before, here;
};

static struct sharers external_share_count_sharers(const struct job *job, struct unit *u,
						   unsigned d)
{
	struct sharers s = { 0 };

	for (uint32_t i = 0; i < group_size(external_share_group_of(job, u)); i++) {
		unsigned p = external_share_part_of(job, u, i);

		s.all += p % u->spread == d % u->spread;
		s.before += p % u->spread == d % u->spread && p < d;
		s.here += p == d;
	}
	return s;
}

/* Which of the ranks on its device. */
static uint32_t external_share_turn_of(const struct job *job, struct unit *u, uint32_t index)
{
	unsigned d = external_share_part_of(job, u, index);
	uint32_t turn = 0;

	for (uint32_t i = 0; i < index; i++)
		turn += external_share_part_of(job, u, i) == d;
	return turn;
}

/* Pieces [from, to) of a row in @all pieces. */
static void external_share_row_range(const struct unit *u, const struct unit_part *p, uint32_t all,
				     uint32_t from, uint32_t to, uint64_t *ret_begin,
				     uint64_t *ret_n)
{
	uint64_t row = unit_row_elements(u, p), each = all ? (row + all - 1) / all : row;
	uint64_t begin = from * each < row ? from * each : row;
	uint64_t end = to * each < row ? to * each : row;

	*ret_begin = begin;
	*ret_n = end - begin;
}

static void external_share_rank_range(const struct job *job, struct unit *u, uint32_t index,
				      uint64_t *ret_begin, uint64_t *ret_n)
{
	unsigned d = external_share_part_of(job, u, index);
	struct sharers s = external_share_count_sharers(job, u, d);
	uint32_t k = s.before + external_share_turn_of(job, u, index);

	external_share_row_range(u, external_share_part_like(u, d), s.all, k, k + 1, ret_begin,
				 ret_n);
}

/* Up to the end of what a rank has in its shard: what lies between tensors is in it. */
static uint64_t external_share_end_of_shard(const struct unit *u, uint32_t index)
{
	struct unit_run run;
	uint64_t end = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++)
		if (!u->tensors[i].alias && !u->tensors[i].frozen &&
		    unit_rank_run(u, index, i, &run))
			end = run.shard + run.n;
	return end;
}

uint64_t external_share_elements(const struct job *job, struct unit *u, uint32_t index)
{
	uint64_t begin, n;

	if (external_share_own_shards(job, u))
		return external_share_end_of_shard(u, index);
	external_share_rank_range(job, u, index, &begin, &n);
	return n;
}

int external_share_init(struct external_share *s, const struct job *job, struct unit *u,
			uint32_t index)
{
	uint64_t begin;

	*s = (struct external_share){
		.part = &u->parts[external_share_part_of(job, u, index) - u->first_part]
	};
	s->runs = calloc(u->rec->n_tensors, sizeof(*s->runs));
	if (!s->runs)
		return -ENOMEM;
	if (external_share_own_shards(job, u)) {
		s->elements = external_share_end_of_shard(u, index);
		s->n_runs = unit_rank_runs(u, index, UNIT_TRAINED, s->runs);
	} else {
		external_share_rank_range(job, u, index, &begin, &s->elements);
		s->n_runs = unit_row_runs(u, s->part, begin, s->elements, s->runs);
	}
	CHECK(s->n_runs <= u->rec->n_tensors);
	return 0;
}

void external_share_deinit(struct external_share *s)
{
	free(s->runs);
	*s = (struct external_share){ 0 };
}

int external_share_of_device(const struct job *job, struct unit *u, unsigned d, uint64_t *ret_begin,
			     uint64_t *ret_end)
{
	struct unit_run *runs = calloc(u->rec->n_tensors, sizeof(*runs));
	struct sharers s = external_share_count_sharers(job, u, d);
	const struct unit_part *p = external_share_part_like(u, d);
	uint64_t begin, n;
	unsigned n_runs;

	if (!runs)
		return -ENOMEM;
	external_share_row_range(u, p, s.all, s.before, s.before + s.here, &begin, &n);
	n_runs = unit_row_runs(u, p, begin, n, runs);
	*ret_begin = n_runs ? runs[0].at : 0;
	*ret_end = n_runs ? runs[n_runs - 1].at + runs[n_runs - 1].n : 0;
	free(runs);
	return 0;
}

struct external_pieces *external_pieces_new(const struct external_share *s)
{
	struct external_pieces *p =
		calloc(1, sizeof(*p) + s->n_runs * (sizeof(*p->messages) + sizeof(p->pointers[0])));

	if (!p)
		return NULL;
	p->n = s->n_runs;
	p->messages = (Shardd__V1__ShardPiece *)(p + 1);
	p->pointers = (Shardd__V1__ShardPiece **)(p->messages + p->n);
	for (size_t i = 0; i < p->n; i++) {
		Shardd__V1__ShardPiece *m = &p->messages[i];

		shardd__v1__shard_piece__init(m);
		m->tensor = s->runs[i].tensor;
		m->first = s->runs[i].first;
		m->elements = s->runs[i].n;
		m->at = s->runs[i].shard;
		p->pointers[i] = m;
	}
	return p;
}
