#include "op/op_stats.h"

#include "core/check.h"
#include "op/op.h"

/* More than there are kinds. */
#define OP_STATS_KINDS 64u

const uint64_t op_stats_bounds[OP_STATS_BUCKETS - 1] = {
	10,    30,     100,    300,     1000,    3000,     10000,
	30000, 100000, 300000, 1000000, 3000000, 10000000, 30000000,
};

/* By the address of the type, which is looked for with every op. */
struct op_stats_kind {
	const struct op_type *type;
	struct op_stats stats;
};

static struct op_stats_kind kinds[OP_STATS_KINDS];
static size_t n_kinds;
static struct op_stats_kind *last_kind; /* ops of a kind come in rows */
static uint8_t first_bucket[65];        /* by the number of bits of a time: where to look from */

static void op_stats_sort(void)
{
	for (unsigned bits = 1, i = 0; bits <= 64; bits++) {
		while (i < OP_STATS_BUCKETS - 1 && op_stats_bounds[i] < 1ull << (bits - 1))
			i++;
		first_bucket[bits] = (uint8_t)i;
	}
	for (size_t i = 0; op_table[i]; i++) {
		size_t at = n_kinds++;

		CHECK(n_kinds <= OP_STATS_KINDS);
		for (; at && (uintptr_t)kinds[at - 1].type > (uintptr_t)op_table[i]; at--)
			kinds[at].type = kinds[at - 1].type;
		kinds[at].type = op_table[i];
	}
}

/* Return: NULL for a type that is not in op_table. */
static struct op_stats *op_stats_of(const struct op_type *type)
{
	size_t low = 0, high;

	if (last_kind && last_kind->type == type)
		return &last_kind->stats;
	if (!n_kinds)
		op_stats_sort();
	high = n_kinds;
	while (low < high) {
		size_t middle = (low + high) / 2;

		if ((uintptr_t)kinds[middle].type < (uintptr_t)type)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == n_kinds || kinds[low].type != type)
		return NULL;
	last_kind = &kinds[low];
	return &last_kind->stats;
}

static size_t op_stats_bucket(uint64_t us)
{
	size_t i = first_bucket[64 - __builtin_clzll(us | 1)];

	while (i < OP_STATS_BUCKETS - 1 && us > op_stats_bounds[i])
		i++;
	return i;
}

void op_stats_count(const struct op *op, uint64_t now_us)
{
	struct op_stats *s = op_stats_of(op->type);
	const uint64_t active = op->active_us ? op->active_us : now_us;
	const uint64_t started = op->started_us ? op->started_us : now_us;

	if (!s)
		return;
	s->buckets[op_stats_bucket(now_us - op->announced_us)]++;
	s->failed += op->fault.code != FAULT_NONE;
	s->us += now_us - op->announced_us;
	s->deps_us += active - op->announced_us;
	s->wait_us += started > active ? started - active : 0;
}

const char *op_stats_at(size_t i, const struct op_stats **ret)
{
	if (!op_table[i])
		return NULL;
	*ret = op_stats_of(op_table[i]);
	return op_table[i]->name;
}
