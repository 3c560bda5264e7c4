/* What a checkpoint has of a job: its tensors, buffers and blobs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/saving_impl.h"
#include "job/span.h"
#include "unit/runs.h"

enum tensor_type saving_type(enum dtype t)
{
	static const enum tensor_type types[_DTYPE_N] = {
		[DTYPE_FP32] = TENSOR_FP32, [DTYPE_BF16] = TENSOR_BF16, [DTYPE_FP16] = TENSOR_FP16
	};

	CHECK(t < _DTYPE_N && types[t]);
	return types[t];
}

enum tensor_type saving_buffer_type(uint32_t t)
{
	static const enum tensor_type types[_BUFFER_DTYPE_N] = {
		[BUFFER_FP32] = TENSOR_FP32,   [BUFFER_BF16] = TENSOR_BF16,
		[BUFFER_FP16] = TENSOR_FP16,   [BUFFER_FP64] = TENSOR_FP64,
		[BUFFER_INT64] = TENSOR_INT64, [BUFFER_INT32] = TENSOR_INT32,
		[BUFFER_UINT8] = TENSOR_UINT8,
	};

	CHECK(t < _BUFFER_DTYPE_N);
	return t ? types[t] : TENSOR_FP32;
}

enum index_array saving_array(const state_unit *rec, unsigned i)
{
	static const enum index_array adam[] = { INDEX_PARAM, INDEX_EXP_AVG, INDEX_EXP_AVG_SQ,
						 INDEX_MAX_EXP_AVG_SQ };

	if (rec->optimizer->kind == OPTIM_SGD && i)
		return INDEX_MOMENTUM_BUFFER;
	return adam[i];
}

/* The thread makes the index of what is noted here: there may be many thousands of tensors. */
static int saving_list_note(struct saving *s, const struct index_piece *p)
{
	if (draft_add(&s->draft, p) < 0)
		return fault_errno(&s->f, -ENOMEM, "listing a job's tensors");
	s->bytes += index_piece_bytes(p);
	return 0;
}

/* The replica that is written. All nodes choose the same one, and others for other units. */
static unsigned saving_list_replica(const struct saving *s, const struct unit *u)
{
	return s->part.stage ? (unsigned)(u->key % (u->all_parts / u->spread)) : 0;
}

/* An array of a tensor, as far as it is here, from the parts of one replica: elements from p->begin
 * on. */
static int saving_list_add_array(struct saving *s, const struct unit *u, uint32_t t, unsigned array,
				 struct index_piece *piece)
{
	size_t size = dtype_size(unit_state_dtype(u->rec, array));
	unsigned replica = saving_list_replica(s, u);
	uint64_t at, elements = 0;
	struct unit_run run;

	for (unsigned d = 0; d < u->n_parts; d++) {
		struct unit_part *p = &u->parts[d];

		if ((u->first_part + d) / u->spread != replica || !unit_part_run(u, p, t, &run))
			continue;
		if (!elements)
			piece->begin = run.first;
		CHECK(run.first == piece->begin + elements);
		if (generation_add(s->g, p->device,
				   unit_state_at(u->rec, unit_state(p, array), array, run.at),
				   run.n * size, &at) < 0)
			return fault_errno(&s->f, -ENOMEM, "listing a job's tensors");
		piece->source = elements ? piece->source : at;
		elements += run.n;
	}
	CHECK(s->part.stage || elements == u->tensors[t].elements);
	piece->elements = elements;
	return 0;
}

/* Of an array without elements the first node has the piece. */
static bool saving_list_has_piece(const struct saving *s, const struct unit *u, uint32_t t,
				  const struct index_piece *p)
{
	if (!s->part.stage || u->tensors[t].elements)
		return !s->part.stage || p->elements;
	return u->n_parts && !u->first_part;
}

static int saving_list_array(struct saving *s, const struct unit *u, uint32_t t, unsigned array)
{
	const struct unit_tensor *ut = &u->tensors[t];
	const state_tensor *rec = u->rec->tensors[t];
	struct index_piece p = { .unit = u->rec->name,
				 .tensor = rec->name,
				 .array = (uint8_t)saving_array(u->rec, array),
				 .type = (uint8_t)saving_type(unit_state_dtype(u->rec, array)),
				 .dims = (uint32_t)rec->n_shape,
				 .shape = rec->shape,
				 .steps = array || ut->frozen ? 0 : unit_steps(u, t) };

	if (saving_list_add_array(s, u, t, array, &p))
		return s->f.code;
	return saving_list_has_piece(s, u, t, &p) ? saving_list_note(s, &p) : 0;
}

/* Its arrays whose elements have @size bytes. */
static int saving_list_tensor(struct saving *s, const struct unit *u, uint32_t t, size_t size)
{
	unsigned arrays = u->tensors[t].frozen ? 0 : unit_state_arrays(u->rec);

	for (unsigned i = 0; !u->tensors[t].alias && i <= arrays; i++)
		if (dtype_size(unit_state_dtype(u->rec, i)) == size &&
		    saving_list_array(s, u, t, i))
			return s->f.code;
	return 0;
}

/* A unit, and its tensors, in the order of their names. */
struct saving_unit {
	const struct unit *u;
	uint32_t *tensors; /* owned */
};

static int saving_list_compare_tensors(const void *a, const void *b, void *unit)
{
	const struct unit *u = unit;

	return strcmp(u->rec->tensors[*(const uint32_t *)a]->name,
		      u->rec->tensors[*(const uint32_t *)b]->name);
}

static int saving_list_compare_units(const void *a, const void *b)
{
	const struct saving_unit *x = a, *y = b;

	return strcmp(x->u->rec->name, y->u->rec->name);
}

static int saving_list_sort_tensors(struct saving_unit *su, struct unit *u)
{
	su->u = u;
	su->tensors = calloc(u->rec->n_tensors + 1, sizeof(*su->tensors));
	for (uint32_t t = 0; su->tensors && t < u->rec->n_tensors; t++)
		su->tensors[t] = t;
	if (!su->tensors)
		return -ENOMEM;
	qsort_r(su->tensors, u->rec->n_tensors, sizeof(*su->tensors), saving_list_compare_tensors,
		u);
	return 0;
}

static void saving_list_free_units(struct saving_unit *all, size_t n)
{
	for (size_t i = 0; all && i < n; i++)
		free(all[i].tensors);
	free(all);
}

/* The job's units. @ret: the caller's, saving_list_free_units, also after an error. */
static int saving_list_sort_units(const struct job *job, struct saving_unit **ret, size_t *ret_n)
{
	*ret_n = 0;
	*ret = calloc((size_t)job->n_units + 1, sizeof(**ret));
	for (uint32_t i = 0; *ret && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped &&
		    saving_list_sort_tensors(&(*ret)[(*ret_n)++], job->units[i]) < 0)
			return -ENOMEM;
	if (!*ret)
		return -ENOMEM;
	qsort(*ret, *ret_n, sizeof(**ret), saving_list_compare_units);
	return 0;
}

/* In the order in which they are written (save_write), so that what was copied for the writing thread
 * is soon read. */
static int saving_list_units(struct saving *s)
{
	struct saving_unit *all;
	size_t n;

	if (saving_list_sort_units(s->job, &all, &n) < 0)
		fault_errno(&s->f, -ENOMEM, "listing a job's tensors");
	for (size_t size = sizeof(float); !s->f.code && size; size /= 2)
		for (size_t i = 0; i < n; i++)
			for (uint32_t t = 0; !s->f.code && t < all[i].u->rec->n_tensors; t++)
				saving_list_tensor(s, all[i].u, all[i].tensors[t], size);
	saving_list_free_units(all, n);
	return s->f.code;
}

/* All buffers of member @index of the unit's group. */
static int saving_list_buffers_of(struct saving *s, const struct unit *u, uint32_t index)
{
	uint64_t at = bufcopy_at(s->buffers, u, index), offset = 0;
	const struct group *g = s->job->groups[u->rec->group];

	for (size_t i = 0; !s->f.code && i < u->rec->n_buffers; i++) {
		const state_buffer *b = u->rec->buffers[i];
		struct index_piece p = { .unit = u->rec->name,
					 .tensor = b->name,
					 .array = INDEX_BUFFER,
					 .type = (uint8_t)saving_buffer_type(b->dtype),
					 .rank = g->rec->ranks[index],
					 .dims = (uint32_t)b->n_shape,
					 .shape = b->shape,
					 .source = at + offset };

		p.elements = unit_buffer_bytes(b) / tensor_type_bytes(saving_buffer_type(b->dtype));
		offset = unit_buffer_next(u->rec, i, offset);
		saving_list_note(s, &p);
	}
	return s->f.code;
}

/* Is member @index of the unit's group on this node? */
static bool saving_list_is_here(const struct job *job, const struct unit *u, uint32_t index)
{
	return span_is_here(job->across.span, job->groups[u->rec->group]->rec->ranks[index]);
}

/* As they were at the commit: the trainers may write to them just now. */
static int saving_list_buffers(struct saving *s)
{
	const struct job *job = s->job;

	if (!bufcopy_has_buffers(job))
		return 0;
	s->buffers = bufcopy_take(job);
	if (!s->buffers)
		return fault_set(
			&s->f, FAULT_EXHAUSTED, NULL,
			"job '%s' has no memory for a copy of its units' buffers: raise its "
			"quota",
			job->rec->name);
	s->as_left = bufcopy_is_as_left(s->buffers);
	for (uint32_t i = 0; i < job->n_units; i++)
		for (uint32_t k = 0; job->units[i]->buffers && !job->units[i]->rec->dropped &&
				     k < group_size(job->groups[job->units[i]->rec->group]);
		     k++)
			if (saving_list_is_here(job, job->units[i], k) &&
			    saving_list_buffers_of(s, job->units[i], k))
				return s->f.code;
	return 0;
}

static int saving_list_blob(struct saving *s, uint32_t rank, const state_blob *b)
{
	uint64_t shape[1] = { b->data.len };
	struct index_piece p = { .unit = (char *)(uintptr_t) "",
				 .tensor = (char *)(uintptr_t) "",
				 .array = INDEX_BLOB,
				 .type = TENSOR_UINT8,
				 .rank = rank,
				 .dims = 1,
				 .shape = shape,
				 .elements = b->data.len,
				 .source = s->blob_bytes };

	memcpy(s->blobs + s->blob_bytes, b->data.data, b->data.len);
	s->blob_bytes += b->data.len;
	return saving_list_note(s, &p);
}

/* Return: NULL: there is none, or its rank is on another node. */
static const state_blob *saving_list_blob_of(const struct saving *s, uint32_t rank)
{
	return span_is_here(s->job->across.span, rank) ? state_job_blob(s->job->rec, rank) : NULL;
}

static int saving_list_blobs(struct saving *s)
{
	const state_job *rec = s->job->rec;
	uint64_t bytes = 0;

	for (uint32_t r = 0; r < rec->world_size; r++)
		bytes += saving_list_blob_of(s, r) ? saving_list_blob_of(s, r)->data.len : 0;
	if (!bytes)
		return 0;
	if (quota_charge(&s->job->quota, MEM_CONTROL, bytes))
		return fault_set(
			&s->f, FAULT_EXHAUSTED, NULL,
			"job '%s' has no memory for a copy of its blobs, %llu bytes: raise "
			"its quota",
			rec->name, (unsigned long long)bytes);
	s->blobs = malloc(bytes);
	if (!s->blobs) {
		quota_return(&s->job->quota, MEM_CONTROL, bytes);
		return fault_errno(&s->f, -ENOMEM, "copying a job's blobs");
	}
	for (uint32_t r = 0; !s->f.code && r < rec->world_size; r++)
		if (saving_list_blob_of(s, r) && saving_list_blob_of(s, r)->data.len)
			saving_list_blob(s, r, saving_list_blob_of(s, r));
	/* what was charged is what is returned, also if the list is not complete */
	s->blob_bytes = bytes;
	return s->f.code;
}

static int saving_list_check_unit(const struct unit *u, struct fault *f)
{
	const state_unit *rec = u->rec;

	if (!rec->initialised || u->torn)
		return fault_set(
			f, FAULT_STATE, NULL,
			"unit '%.100s' is not initialised: its parameters are undefined, so "
			"there is nothing to save",
			rec->name);
	for (size_t i = 0; i < rec->n_tensors; i++)
		if (rec->tensors[i]->n_strides)
			return fault_set(
				f, FAULT_UNIMPLEMENTED, NULL,
				"tensor '%.100s' of unit '%.100s' has strides; checkpoints "
				"hold only tensors whose dimensions are in order",
				rec->tensors[i]->name, rec->name);
	return 0;
}

int saving_list(struct saving *s)
{
	struct job *job = s->job;

	s->step = job->rec->step;
	if (index_init(&s->x, job->rec->name, s->step, job->rec->world_size, &s->f))
		return s->f.code;
	for (uint32_t i = 0; !s->f.code && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped)
			saving_list_check_unit(job->units[i], &s->f);
	if (!s->f.code && saving_list_units(s) == 0 && !s->draft.n && !s->part.stage)
		fault_set(&s->f, FAULT_STATE, NULL,
			  "job '%s' has no units: there is nothing to save", job->rec->name);
	if (s->f.code || saving_list_buffers(s))
		return s->f.code;
	return saving_list_blobs(s);
}
