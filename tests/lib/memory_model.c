#include "memory_model.h"

#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

#define ALIGN      256u
#define MIN_SLAB   (1u << 20)
#define LARGE      (32u << 20)
#define LARGE_ROOM (64u << 10)

static uint64_t up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

uint64_t memory_page(uint64_t bytes)
{
	return up(bytes, train_on_host() ? (uint64_t)sysconf(_SC_PAGESIZE) : 2u << 20);
}

uint64_t memory_array(uint64_t elements, uint64_t size)
{
	return up(elements * size, ALIGN);
}

uint64_t memory_taken(uint64_t bytes)
{
	return up(bytes, ALIGN) + (train_on_host() && bytes >= LARGE ? LARGE_ROOM : 0);
}

uint64_t memory_size(enum shardd_dtype t)
{
	return t == SHARDD_BF16 || t == SHARDD_FP16 ? 2 : 4;
}

/* ---------------------------------------------------------------------- pools */

/* Before which piece of slab @s there is room, and where. */
static bool find_gap(const struct memory_pool *p, unsigned s, uint64_t bytes, unsigned *ret_i,
		     uint64_t *ret_at)
{
	uint64_t at = 0;
	unsigned n = p->slabs[s].n;

	for (unsigned i = 0; i <= n; i++) {
		uint64_t end = i < n ? p->slabs[s].pieces[i].at : p->slabs[s].bytes;

		*ret_i = i;
		*ret_at = at;
		if (end - at >= bytes)
			return true;
		if (i < n)
			at = p->slabs[s].pieces[i].at + p->slabs[s].pieces[i].bytes;
	}
	return false;
}

struct memory_piece memory_take(struct memory_pool *p, uint64_t bytes)
{
	unsigned s = 0, i = 0;
	uint64_t at = 0;

	bytes = memory_taken(bytes);
	while (s < p->n && !find_gap(p, s, bytes, &i, &at))
		s++;
	TRAINER_CHECK(s < MEMORY_MAX_SLABS && p->slabs[s].n < MEMORY_MAX_PIECES);
	if (s == p->n) {
		p->slabs[s].bytes = memory_page(bytes > MIN_SLAB ? bytes : MIN_SLAB);
		p->taken += p->slabs[s].bytes;
		p->n++;
		i = 0;
		at = 0;
	}
	memmove(&p->slabs[s].pieces[i + 1], &p->slabs[s].pieces[i],
		(p->slabs[s].n++ - i) * sizeof(p->slabs[s].pieces[0]));
	p->slabs[s].pieces[i].at = at;
	p->slabs[s].pieces[i].bytes = bytes;
	p->used += bytes;
	return (struct memory_piece){ true, s, at };
}

void memory_give(struct memory_pool *p, struct memory_piece *piece)
{
	unsigned i = 0, s = piece->slab;

	if (!piece->there)
		return;
	piece->there = false;
	while (p->slabs[s].pieces[i].at != piece->at)
		i++;
	p->used -= p->slabs[s].pieces[i].bytes;
	p->slabs[s].n--;
	memmove(&p->slabs[s].pieces[i], &p->slabs[s].pieces[i + 1],
		(p->slabs[s].n - i) * sizeof(p->slabs[s].pieces[0]));
}

/* ---------------------------------------------------------------------- units */

uint32_t memory_shard_ranks(const struct memory_unit *u)
{
	uint32_t n = u->like->strategy == SHARDD_HYBRID      ? u->like->shard_ranks
		     : u->like->strategy == SHARDD_REPLICATE ? 1
							     : u->world;

	CHECK(n > 0);
	return n;
}

uint32_t memory_replicas(const struct memory_unit *u)
{
	return u->world / memory_shard_ranks(u);
}

unsigned memory_device_of(const struct memory_unit *u, uint32_t rank)
{
	return rank * u->devices / u->world;
}

bool memory_has_sets(const struct memory_unit *u)
{
	uint32_t replicas = memory_replicas(u);

	if (replicas < 2 || replicas >= u->devices || u->devices % replicas)
		return false;
	for (uint32_t r = 0; r < u->world; r++)
		if (memory_device_of(u, r) * replicas / u->devices != r / memory_shard_ranks(u))
			return false;
	return true;
}

unsigned memory_spread(const struct memory_unit *u)
{
	uint32_t replicas = memory_replicas(u);

	CHECK(u->devices > 0 && replicas > 0);
	if (memory_shard_ranks(u) == 1 || replicas >= u->devices)
		return 1;
	return memory_has_sets(u) ? u->devices / replicas : u->devices;
}

static bool is_dim0(const struct memory_unit *u)
{
	return u->like->layout == SHARDD_LAYOUT_DIM0;
}

/* Has the unit memory for it, in what is frozen or trained? */
static bool counts(const struct memory_tensor *t, bool frozen)
{
	return !t->alias && t->frozen == frozen;
}

static uint64_t elements(const struct memory_unit *u, bool frozen)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < u->n_tensors; i++)
		if (counts(&u->tensors[i], frozen))
			n += u->tensors[i].rows * u->tensors[i].columns;
	return n;
}

uint64_t memory_shard(const struct memory_unit *u, bool frozen)
{
	uint64_t w = memory_shard_ranks(u), n = 0;

	for (unsigned i = 0; is_dim0(u) && i < u->n_tensors; i++)
		if (counts(&u->tensors[i], frozen))
			n += (u->tensors[i].rows + w - 1) / w * u->tensors[i].columns;
	if (is_dim0(u))
		return n;
	return up((elements(u, frozen) + w - 1) / w,
		  u->like->shard_multiple ? u->like->shard_multiple : 1);
}

/* So many ranks of a replica have their shards on one device. */
static uint32_t part_ranks(const struct memory_unit *u)
{
	return (memory_shard_ranks(u) + memory_spread(u) - 1) / memory_spread(u);
}

uint64_t memory_part(const struct memory_unit *u, bool frozen)
{
	return part_ranks(u) * memory_shard(u, frozen);
}

uint64_t memory_gradient(const struct memory_unit *u)
{
	return is_dim0(u) ? memory_part(u, false) * memory_spread(u) : elements(u, false);
}

uint64_t memory_summoned(const struct memory_unit *u)
{
	uint64_t frozen = is_dim0(u) ? memory_part(u, true) * memory_spread(u) : elements(u, true);

	return frozen ? memory_part(u, false) * memory_spread(u) + frozen : memory_gradient(u);
}

/* Rows of @t that the shards of ranks [from, to) of a replica have. */
static uint64_t rows_of(const struct memory_unit *u, const struct memory_tensor *t, uint32_t from,
			uint32_t to)
{
	uint64_t w = memory_shard_ranks(u), each = (t->rows + w - 1) / w;
	uint64_t begin = from * each < t->rows ? from * each : t->rows;
	uint64_t end = to * each < t->rows ? to * each : t->rows;

	return end - begin;
}

/* Trained elements in the shards of ranks [from, to) of a replica, without padding. */
static uint64_t owned(const struct memory_unit *u, uint32_t from, uint32_t to)
{
	uint64_t n = elements(u, false), s = memory_shard(u, false), sum = 0;
	uint64_t begin = from * s < n ? from * s : n, end = to * s < n ? to * s : n;

	if (!is_dim0(u))
		return end - begin;
	for (unsigned i = 0; i < u->n_tensors; i++)
		if (counts(&u->tensors[i], false))
			sum += rows_of(u, &u->tensors[i], from, to) * u->tensors[i].columns;
	return sum;
}

/* Of a rank's shard, up to the end of the last tensor in it. */
static uint64_t own_end(const struct memory_unit *u, uint32_t rank)
{
	uint64_t w = memory_shard_ranks(u), at = 0, end = 0;

	if (!is_dim0(u))
		return owned(u, rank, rank + 1);
	for (unsigned i = 0; i < u->n_tensors; i++) {
		const struct memory_tensor *t = &u->tensors[i];
		uint64_t rows = counts(t, false) ? rows_of(u, t, rank, rank + 1) : 0;

		if (rows)
			end = at + rows * t->columns;
		at += counts(t, false) ? (t->rows + w - 1) / w * t->columns : 0;
	}
	return end;
}

/* Is there one replica, and every rank's shard on the device that it is on itself? */
static bool are_at_home(const struct memory_unit *u)
{
	bool home = memory_replicas(u) == 1;

	for (uint32_t r = 0; memory_spread(u) > 1 && r < u->world; r++)
		home = home && memory_device_of(u, r) == r / part_ranks(u);
	return home;
}

/* Else the ranks of all devices that have the same elements share these in equal pieces. */
uint64_t memory_lent(const struct memory_unit *u, uint32_t rank)
{
	unsigned spread = memory_spread(u), part = memory_device_of(u, rank) % spread;
	uint32_t sharers = 0, before = 0;
	uint64_t all, each, begin;

	if (are_at_home(u))
		return own_end(u, rank);
	for (uint32_t r = 0; r < u->world; r++) {
		bool same = memory_device_of(u, r) % spread == part;

		sharers += same;
		before += same && r < rank;
	}
	CHECK(sharers > 0); /* the rank is one */
	all = owned(u, part * part_ranks(u), (part + 1) * part_ranks(u));
	each = (all + sharers - 1) / sharers;
	begin = before * each < all ? before * each : all;
	return all - begin < each ? all - begin : each;
}
