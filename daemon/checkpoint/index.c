#include "checkpoint/index.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

static const char *const index_arrays[_INDEX_ARRAY_N] = {
	[INDEX_PARAM] = "param",
	[INDEX_EXP_AVG] = "exp_avg",
	[INDEX_EXP_AVG_SQ] = "exp_avg_sq",
	[INDEX_MAX_EXP_AVG_SQ] = "max_exp_avg_sq",
	[INDEX_MOMENTUM_BUFFER] = "momentum_buffer",
	[INDEX_BUFFER] = "buffer",
	[INDEX_BLOB] = "blob",
};

const char *index_array_name(enum index_array array)
{
	CHECK(array < _INDEX_ARRAY_N);
	return index_arrays[array];
}

int index_init(struct index *x, const char *job, uint64_t step, uint32_t world_size,
	       struct fault *f)
{
	*x = (struct index){ .job = strdup(job), .step = step, .world_size = world_size };
	return x->job ? 0 : fault_errno(f, -ENOMEM, "beginning the index of a checkpoint");
}

static void index_piece_deinit(struct index_piece *p)
{
	free(p->unit);
	free(p->tensor);
	free(p->shape);
	free(p->key);
}

void index_deinit(struct index *x)
{
	for (size_t i = 0; i < x->n_pieces; i++)
		index_piece_deinit(&x->pieces[i]);
	for (size_t i = 0; i < x->n_files; i++)
		free(x->files[i].name);
	free(x->pieces);
	free(x->files);
	free(x->job);
	*x = INDEX_NULL;
}

int index_add_file(struct index *x, const char *name, struct fault *f)
{
	struct index_file *files = reallocarray(x->files, x->n_files + 1, sizeof(*files));
	char *copy = strdup(name);

	if (files)
		x->files = files;
	if (!files || !copy) {
		free(copy);
		return fault_errno(f, -ENOMEM, "listing the files of a checkpoint");
	}
	x->files[x->n_files++] = (struct index_file){ .name = copy, .fd = INDEX_IN_FOLDER };
	return 0;
}

/* @name with what has a meaning in a key as %XX. Return: the caller's to free, or NULL. */
static char *index_escape(const char *name, const char *special)
{
	char *out = malloc(3 * strlen(name) + 1), *at = out;

	if (!out)
		return NULL;
	for (; *name; name++)
		if (strchr(special, *name))
			at += sprintf(at, "%%%02X", (unsigned char)*name);
		else
			*at++ = *name;
	*at = '\0';
	return out;
}

/* ARRAY/UNIT/TENSOR, with what makes it unique: the rank, or the first element of a piece. */
static char *index_key(const struct index_piece *p, bool whole)
{
	_cleanup_(freep) char *unit = index_escape(p->unit, "%/@");
	_cleanup_(freep) char *tensor = index_escape(p->tensor, "%@");
	char *key = NULL;
	int n;

	if (!unit || !tensor)
		return NULL;
	if (p->array == INDEX_BLOB)
		n = asprintf(&key, "blob/%u", p->rank);
	else if (p->array == INDEX_BUFFER)
		n = asprintf(&key, "buffer/%u/%s/%s", p->rank, unit, tensor);
	else if (whole)
		n = asprintf(&key, "%s/%s/%s", index_arrays[p->array], unit, tensor);
	else
		n = asprintf(&key, "%s/%s/%s@%llu", index_arrays[p->array], unit, tensor,
			     (unsigned long long)p->begin);
	return n < 0 ? NULL : key;
}

/* Return: the elements of the whole array; UINT64_MAX: too many. */
static uint64_t index_elements(const uint64_t *shape, uint32_t dims)
{
	uint64_t n = 1;

	for (uint32_t i = 0; i < dims; i++)
		if (__builtin_mul_overflow(n, shape[i], &n))
			return UINT64_MAX;
	return n;
}

static struct index_piece *index_grow(struct index *x)
{
	size_t room = x->room ? 2 * x->room : 64;
	struct index_piece *pieces = x->pieces;

	if (x->n_pieces == x->room) {
		pieces = reallocarray(x->pieces, room, sizeof(*pieces));
		if (!pieces)
			return NULL;
		x->pieces = pieces;
		x->room = room;
	}
	return &pieces[x->n_pieces];
}

int index_add(struct index *x, const struct index_piece *p, struct fault *f)
{
	uint64_t all = index_elements(p->shape, p->dims);
	struct index_piece *new = index_grow(x);

	CHECK(p->array < _INDEX_ARRAY_N && p->file < x->n_files && p->dims <= TENSOR_FILE_MAX_DIMS);
	if (!new)
		return fault_errno(f, -ENOMEM, "listing the tensors of a checkpoint");
	*new = *p;
	new->unit = strdup(p->unit);
	new->tensor = strdup(p->tensor);
	new->shape = calloc(p->dims + 1, sizeof(*new->shape));
	new->key = index_key(p, p->begin == 0 && p->elements == all);
	if (!new->unit || !new->tensor || !new->shape || !new->key) {
		index_piece_deinit(new);
		return fault_errno(f, -ENOMEM, "listing the tensors of a checkpoint");
	}
	memcpy(new->shape, p->shape, p->dims * sizeof(*p->shape));
	x->n_pieces++;
	return 0;
}

uint64_t index_piece_bytes(const struct index_piece *p)
{
	return p->elements * tensor_type_bytes(p->type);
}

/* --------------------------------------------------------------- all of it, once */

static int index_compare_arrays(const struct index_piece *x, const struct index_piece *y)
{
	int r = strcmp(x->unit, y->unit);

	r = r ? r : strcmp(x->tensor, y->tensor);
	r = r ? r : (x->array > y->array) - (x->array < y->array);
	return r ? r : (x->rank > y->rank) - (x->rank < y->rank);
}

static int index_compare(const void *a, const void *b)
{
	const struct index_piece *x = a, *y = b;
	int r = index_compare_arrays(x, y);

	r = r ? r : (x->begin > y->begin) - (x->begin < y->begin);
	return r ? r : (x->elements > y->elements) - (x->elements < y->elements);
}

static bool index_same_array(const struct index_piece *x, const struct index_piece *y)
{
	return x->type == y->type && x->dims == y->dims && x->steps == y->steps &&
	       memcmp(x->shape, y->shape, x->dims * sizeof(*x->shape)) == 0;
}

static int index_incomplete(const struct index_piece *p, const char *why, struct fault *f)
{
	return fault_set(f, FAULT_LOST, NULL, "%s of tensor '%.100s' of unit '%.100s' %s",
			 index_array_name(p->array), p->tensor, p->unit, why);
}

/* The array that begins at piece @i. Return: the first piece of the next one. */
static size_t index_check_array(const struct index *x, size_t i, struct fault *f)
{
	const struct index_piece *first = &x->pieces[i];
	uint64_t all = index_elements(first->shape, first->dims), at = 0;

	for (; i < x->n_pieces && index_compare_arrays(first, &x->pieces[i]) == 0; i++) {
		const struct index_piece *p = &x->pieces[i];

		if (!index_same_array(first, p))
			index_incomplete(p, "is described in two ways", f);
		if (p->begin != at || __builtin_add_overflow(at, p->elements, &at))
			index_incomplete(p, "has pieces that overlap or are missing", f);
	}
	if (at != all)
		index_incomplete(first, "has pieces that overlap or are missing", f);
	return i;
}

void index_sort(struct index *x)
{
	if (x->n_pieces)
		qsort(x->pieces, x->n_pieces, sizeof(*x->pieces), index_compare);
}

int index_check(struct index *x, struct fault *f)
{
	index_sort(x);
	for (size_t i = 0; !f->code && i < x->n_pieces;)
		i = index_check_array(x, i, f);
	return f->code;
}

static int index_compare_name(const struct index_piece *p, const char *unit, const char *tensor,
			      enum index_array array)
{
	int r = strcmp(p->unit, unit);

	r = r ? r : strcmp(p->tensor, tensor);
	return r ? r : (p->array > array) - (p->array < array);
}

bool index_is_of(const struct index_piece *p, const char *unit, const char *tensor,
		 enum index_array array)
{
	return index_compare_name(p, unit, tensor, array) == 0;
}

size_t index_find(const struct index *x, const char *unit, const char *tensor,
		  enum index_array array)
{
	size_t lo = 0, hi = x->n_pieces;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (index_compare_name(&x->pieces[mid], unit, tensor, array) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo < x->n_pieces && index_is_of(&x->pieces[lo], unit, tensor, array))
		return lo;
	return x->n_pieces;
}
