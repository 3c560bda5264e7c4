#include "ctl/plan_bytes.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/formula.h"

#define PLAN_BLOB (64u << 10) /* the most that a rank stores with a commit */

static const struct {
	const char *name;
	enum plan_class class;
} plan_items[_PLAN_ITEMS] = {
	[PLAN_PARAMS] = { "parameters", PLAN_SHARD },
	[PLAN_GRADIENTS] = { "gradients", PLAN_SHARD },
	[PLAN_STATES] = { "optimizer state", PLAN_SHARD },
	[PLAN_COPY] = { "copy to roll back to", PLAN_SHARD },
	[PLAN_GATHERED] = { "gathered copies", PLAN_FULL },
	[PLAN_SCRATCH] = { "scratch of an op", PLAN_FULL },
	[PLAN_BUFFERS] = { "gradient buffers", PLAN_GRAD },
	[PLAN_POOLED] = { "gradients until the step", PLAN_GRAD },
	[PLAN_LENT] = { "lent to the trainers' optimizer", PLAN_GRAD },
	[PLAN_BLOBS] = { "blobs of commits", PLAN_CONTROL },
	[PLAN_CHECKPOINT] = { "copy for a checkpoint", PLAN_CONTROL },
};

const char *plan_bytes_name(enum plan_item i)
{
	CHECK(i < _PLAN_ITEMS);
	return plan_items[i].name;
}

enum plan_class plan_bytes_class(enum plan_item i)
{
	CHECK(i < _PLAN_ITEMS);
	return plan_items[i].class;
}

const char *plan_bytes_class_name(enum plan_class c)
{
	static const char *const names[] = { "shard", "full", "grad", "control" };

	CHECK(c < ARRAY_SIZE(names));
	return names[c];
}

/* One unit: the letters of the page. */
struct plan_unit {
	uint64_t elements; /* N: trained */
	struct formula_part part;
	uint32_t spread; /* E */
	uint32_t here;   /* ranks of the node */
};

static uint64_t plan_bytes_up(uint64_t n, uint64_t by)
{
	return (n + by - 1) / by;
}

static uint32_t plan_bytes_spread(const struct plan_place *p)
{
	uint32_t devices = p->nodes * p->devices;

	if (p->replicas == p->ranks || p->replicas >= devices)
		return 1;
	return devices % p->replicas ? devices : devices / p->replicas;
}

static struct plan_unit plan_bytes_unit(const struct plan_model *m, const struct plan_place *p,
					uint32_t index)
{
	uint64_t trained = m->trained / m->units + (index < m->trained % m->units);
	uint64_t frozen = m->frozen / m->units + (index < m->frozen % m->units);
	uint32_t ranks = p->ranks / p->replicas, spread = plan_bytes_spread(p);
	uint64_t shards = plan_bytes_up(ranks, spread);
	bool copies = (m->early && trained && m->resume != PLAN_RESUME_NO_COPY) ||
		      m->resume == PLAN_RESUME_COMMITTED;

	return (struct plan_unit){
		.elements = trained,
		.part = { .trained = shards * plan_bytes_up(trained, ranks),
			  .frozen = shards * plan_bytes_up(frozen, ranks),
			  .storage_bytes = m->storage_bytes,
			  .states = m->states,
			  .pools_gradient = m->early,
			  .has_copy = copies,
			  .is_staggered = p->is_staggered },
		.spread = spread,
		.here = p->ranks / p->nodes,
	};
}

/* All parameters of a unit, with padding, in a copy on one device. */
static uint64_t plan_bytes_whole(const struct plan_unit *u, unsigned bytes)
{
	return formula_array((u->part.trained + u->part.frozen) * u->spread * bytes,
			     u->part.is_staggered);
}

/* The ranks on the devices that have the same part share it. */
static uint64_t plan_bytes_lent(const struct plan_unit *u, const struct plan_place *p)
{
	uint64_t n = plan_bytes_up(u->part.trained, p->ranks / u->spread);

	n = n ? n : 1;
	return formula_array(formula_rounded(n * u->part.storage_bytes) +
				     formula_rounded(n * FORMULA_STATE),
			     u->part.is_staggered);
}

/* A reduction has sums between devices, and sums of replicas where one device has several. */
static uint64_t plan_bytes_scratch(const struct plan_unit *u, const struct plan_place *p)
{
	const struct formula_part *part = &u->part;
	uint32_t devices = p->nodes * p->devices, size = p->ranks / p->replicas;
	uint32_t replicas;
	uint64_t bytes = 0;

	CHECK(devices && size);
	replicas = p->ranks / devices % size ? 0 : p->ranks / devices / size;
	if (devices > 1)
		bytes = formula_array(part->trained * u->spread * FORMULA_STATE,
				      part->is_staggered);
	if (size > 1 && p->replicas > 1 && replicas && (replicas > 1 || devices == 1))
		bytes += formula_array(replicas * formula_rounded(u->elements * FORMULA_STATE),
				       part->is_staggered);
	return bytes;
}

static void plan_bytes_add(struct plan *plan, enum plan_item i, uint64_t bytes)
{
	plan->items[i].least += bytes;
	plan->items[i].most += bytes;
}

/* One of the units at a time has it, or all of them. */
static void plan_bytes_add_each(struct plan *plan, enum plan_item i, uint64_t bytes)
{
	struct plan_bytes *b = &plan->items[i];

	b->least = bytes > b->least ? bytes : b->least;
	b->most += bytes;
}

/* The largest one, in either case. */
static void plan_bytes_add_one(struct plan *plan, enum plan_item i, uint64_t bytes)
{
	struct plan_bytes *b = &plan->items[i];

	b->most = bytes > b->most ? bytes : b->most;
	b->least = b->most;
}

static void plan_bytes_add_unit(struct plan *plan, const struct plan_model *m,
				const struct plan_place *p, const struct plan_unit *u)
{
	const struct formula_part *part = &u->part;
	uint64_t pooled =
		p->devices * formula_array(part->trained * FORMULA_STATE, part->is_staggered);

	plan_bytes_add(plan, PLAN_PARAMS, p->devices * formula_params(part));
	plan_bytes_add(plan, PLAN_GRADIENTS, p->devices * formula_gradients(part));
	plan_bytes_add(plan, PLAN_STATES, p->devices * formula_states(part));
	plan_bytes_add(plan, PLAN_COPY, p->devices * formula_copy(part));
	if (m->casts || u->spread > 1)
		plan_bytes_add_each(plan, PLAN_GATHERED,
				    p->devices * plan_bytes_whole(u, m->compute_bytes));
	if (u->elements)
		plan_bytes_add_one(plan, PLAN_SCRATCH, p->devices * plan_bytes_scratch(u, p));
	if (!u->elements)
		return;
	plan_bytes_add_each(plan, PLAN_BUFFERS,
			    u->here * formula_array(u->elements * m->gradient_bytes,
						    part->is_staggered));
	if (m->early && m->clips)
		plan_bytes_add_each(plan, PLAN_POOLED, pooled);
	else if (m->early)
		plan_bytes_add_one(plan, PLAN_POOLED, pooled);
	if (m->external)
		plan_bytes_add_each(plan, PLAN_LENT, u->here * plan_bytes_lent(u, p));
}

void plan_bytes(const struct plan_model *m, const struct plan_place *p, struct plan *ret)
{
	CHECK(m->units && m->trained + m->frozen <= 2 * PLAN_MAX_PARAMS);
	CHECK(p->ranks % p->nodes == 0 && p->ranks / p->nodes % p->devices == 0);
	CHECK(p->ranks % p->replicas == 0);
	*ret = (struct plan){ 0 };
	for (uint32_t i = 0; i < m->units; i++) {
		const struct plan_unit u = plan_bytes_unit(m, p, i);

		plan_bytes_add_unit(ret, m, p, &u);
	}
	ret->items[PLAN_BLOBS].most = (uint64_t)(p->ranks / p->nodes) * PLAN_BLOB;
	ret->items[PLAN_CHECKPOINT].most =
		ret->items[PLAN_PARAMS].most + ret->items[PLAN_STATES].most;
	for (unsigned i = 0; i < _PLAN_ITEMS; i++) {
		ret->all.least += ret->items[i].least;
		ret->all.most += ret->items[i].most;
	}
}

/* Return: the power of 10 that a suffix stands for; 0: it is none. */
static int plan_bytes_suffix(char c)
{
	switch (toupper((unsigned char)c)) {
	case 'K':
		return 3;
	case 'M':
		return 6;
	case 'G':
	case 'B':
		return 9;
	case 'T':
		return 12;
	default:
		return 0;
	}
}

/* Digits with a point among them, or without one. @ret_power: the power of 10 that @ret must be multiplied with.
 * Return: what follows; NULL: there are none, or too many. */
static const char *plan_bytes_digits(const char *text, uint64_t *ret, long *ret_power)
{
	bool fraction = false, any = false;

	*ret = 0;
	*ret_power = 0;
	for (; isdigit((unsigned char)*text) || (*text == '.' && !fraction); text++) {
		if (*text == '.') {
			fraction = true;
			continue;
		}
		if (*ret > (UINT64_MAX - 9) / 10)
			return NULL;
		*ret = *ret * 10 + (uint64_t)(*text - '0');
		*ret_power -= fraction;
		any = true;
	}
	return any ? text : NULL;
}

/* In decimal: 1.3e9 is not exactly a whole number in binary, and 1.0000001e6 is not one at all. */
bool plan_bytes_parse(const char *text, uint64_t max, uint64_t *ret)
{
	uint64_t n;
	long power;
	const char *at = isdigit((unsigned char)*text) ? plan_bytes_digits(text, &n, &power) : NULL;

	if (!at)
		return false;
	if (*at == 'e' || *at == 'E') {
		char *end;
		long exponent = strtol(at + 1, &end, 10);

		if (isspace((unsigned char)at[1]) || end == at + 1 || exponent < -99 ||
		    exponent > 99)
			return false;
		power += exponent;
		at = end;
	}
	if (*at && plan_bytes_suffix(*at))
		power += plan_bytes_suffix(*at++);
	if (*at || !n)
		return false;
	for (; power < 0; power++, n /= 10)
		if (n % 10)
			return false;
	for (; power > 0; power--, n *= 10)
		if (n > max / 10)
			return false;
	if (n > max)
		return false;
	*ret = n;
	return true;
}
