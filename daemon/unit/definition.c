#include "unit/definition.h"

#include <string.h>

#include "core/fnv.h"

static uint64_t definition_add_text(uint64_t h, const char *text)
{
	return fnv_add(fnv_add_text(h, text), 0);
}

static uint64_t definition_add_double(uint64_t h, double x)
{
	uint64_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return fnv_add(h, bits);
}

static uint64_t definition_add_numbers(uint64_t h, const uint64_t *numbers, size_t n)
{
	h = fnv_add(h, n);
	for (size_t i = 0; i < n; i++)
		h = fnv_add(h, numbers[i]);
	return h;
}

static uint64_t definition_add_tensor(uint64_t h, const state_tensor *t)
{
	h = definition_add_text(h, t->name);
	h = definition_add_numbers(h, t->shape, t->n_shape);
	h = definition_add_numbers(h, t->strides, t->n_strides);
	h = fnv_add(h, t->init_kind);
	h = definition_add_double(h, t->init_a);
	h = definition_add_double(h, t->init_b);
	h = fnv_add(h, t->frozen);
	h = definition_add_text(h, t->alias_unit);
	return definition_add_text(h, t->alias_of);
}

static uint64_t definition_add_buffer(uint64_t h, const state_buffer *b)
{
	h = definition_add_text(h, b->name);
	h = definition_add_numbers(h, b->shape, b->n_shape);
	return fnv_add(h, b->dtype);
}

/* How its gradients are reduced. */
static uint64_t definition_add_reduce(uint64_t h, const state_unit *rec)
{
	h = fnv_add(h, rec->reduce_dtype);
	h = fnv_add(h, rec->reduce_profile);
	h = fnv_add(h, rec->force_sum);
	h = fnv_add(h, rec->div_mode);
	h = definition_add_double(h, rec->pre_divide);
	h = definition_add_double(h, rec->post_divide);
	return definition_add_double(h, rec->divide_factor);
}

uint64_t definition_hash(const state_unit *rec)
{
	const uint64_t words[] = { rec->storage_dtype,  rec->compute_dtype, rec->gradient_dtype,
				   rec->shard_multiple, rec->layout,        rec->strategy,
				   rec->shard_ranks,    rec->guarded,       rec->optimizer->kind };
	uint64_t h = definition_add_text(FNV_BEGIN, rec->name);

	h = definition_add_numbers(h, words, sizeof(words) / sizeof(words[0]));
	h = definition_add_reduce(h, rec);
	for (size_t i = 0; i < rec->n_tensors; i++)
		h = definition_add_tensor(h, rec->tensors[i]);
	for (size_t i = 0; i < rec->n_buffers; i++)
		h = definition_add_buffer(h, rec->buffers[i]);
	return h;
}
