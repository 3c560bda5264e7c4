#include "unit/settings.h"

#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"

uint64_t settings_bytes(uint32_t n, uint32_t n_named)
{
	return sizeof(struct settings) + (uint64_t)n * sizeof(struct setting) +
	       (uint64_t)n_named * sizeof(struct setting_of);
}

struct settings *settings_new(uint32_t n, uint32_t n_named)
{
	struct settings *s = calloc(1, sizeof(*s));

	CHECK(n > 0);
	if (!s)
		return NULL;
	s->refs = 1;
	s->rest = UINT32_MAX;
	s->n = n;
	s->n_named = n_named;
	s->all = calloc(n, sizeof(*s->all));
	s->named = calloc(n_named ? n_named : 1, sizeof(*s->named));
	return s->all && s->named ? s : settings_unref(s);
}

struct settings *settings_ref(struct settings *s)
{
	if (s)
		s->refs++;
	return s;
}

struct settings *settings_unref(struct settings *s)
{
	if (!s)
		return NULL;
	CHECK(s->refs > 0);
	if (--s->refs)
		return NULL;
	user_charge_deinit(&s->charge);
	free(s->all);
	free(s->named);
	free(s);
	return NULL;
}

static int settings_compare(const void *a, const void *b)
{
	const struct setting_of *x = a, *y = b;

	if (x->unit != y->unit)
		return x->unit < y->unit ? -1 : 1;
	return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

const struct setting_of *settings_sort(struct settings *s)
{
	qsort(s->named, s->n_named, sizeof(*s->named), settings_compare);
	for (uint32_t i = 1; i < s->n_named; i++)
		if (settings_compare(&s->named[i - 1], &s->named[i]) == 0)
			return &s->named[i];
	return NULL;
}

static const struct setting_of *settings_find_same(const struct settings *s, uint32_t unit,
						   uint32_t tensor)
{
	const struct setting_of key = { .unit = unit, .tensor = tensor };

	return bsearch(&key, s->named, s->n_named, sizeof(key), settings_compare);
}

bool settings_names_tensor(const struct settings *s, uint32_t unit, uint32_t tensor)
{
	return settings_find_same(s, unit, tensor);
}

const struct setting *settings_find(const struct settings *s, uint32_t unit, uint32_t tensor)
{
	const struct setting_of *of = settings_find_same(s, unit, tensor);

	if (of)
		return &s->all[of->index];
	return s->rest == UINT32_MAX ? NULL : &s->all[s->rest];
}

static int settings_compare_unit(const void *key, const void *of)
{
	uint32_t unit = *(const uint32_t *)key, other = ((const struct setting_of *)of)->unit;

	return unit < other ? -1 : unit > other;
}

bool settings_names(const struct settings *s, uint32_t unit)
{
	return bsearch(&unit, s->named, s->n_named, sizeof(*s->named), settings_compare_unit);
}

/* FNV-1a, a word at a time. */
static uint64_t settings_add_number(uint64_t h, double x)
{
	uint64_t bits;

	memcpy(&bits, &x, sizeof(bits));
	/* the upper bits of a word must affect more than its upper bits */
	return fnv_add(fnv_add(h, bits >> 32), bits & UINT32_MAX);
}

static uint64_t settings_add_setting(uint64_t h, const struct setting *s)
{
	const double numbers[] = { s->lr,    s->weight_decay, s->momentum, s->dampening,
				   s->beta1, s->beta2,        s->eps };

	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
		h = settings_add_number(h, numbers[i]);
	return fnv_add(h, (uint64_t)s->lr_fp32 | (uint64_t)s->nesterov << 1 |
				  (uint64_t)s->maximize << 2);
}

uint64_t settings_word(const struct settings *s)
{
	uint64_t h = FNV_BEGIN;

	if (!s)
		return 0;
	h = fnv_add(fnv_add(h, s->n), s->rest);
	for (uint32_t i = 0; i < s->n; i++)
		h = settings_add_setting(h, &s->all[i]);
	for (uint32_t i = 0; i < s->n_named; i++)
		h = fnv_add(fnv_add(fnv_add(h, s->named[i].unit), s->named[i].tensor),
			    s->named[i].index);
	return h;
}

bool setting_same(const struct setting *a, const struct setting *b)
{
	return a->lr == b->lr && a->weight_decay == b->weight_decay && a->momentum == b->momentum &&
	       a->dampening == b->dampening && a->beta1 == b->beta1 && a->beta2 == b->beta2 &&
	       a->eps == b->eps && a->lr_fp32 == b->lr_fp32 && a->nesterov == b->nesterov &&
	       a->maximize == b->maximize;
}

void step_rates_copy(struct step_rates *to, const struct step_rates *from)
{
	struct settings *before = to->settings;

	*to = *from;
	settings_ref(to->settings);
	settings_unref(before);
}

void step_rates_clear(struct step_rates *r)
{
	settings_unref(r->settings);
	*r = (struct step_rates){ 0 };
}
