/* Building, changing and packing the records; state_check.c checks them. */
#include "store/state.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

/* The same array with room for one more pointer. protobuf-c's repeated fields have a count but no
 * capacity. The allocator knows the capacity, so growing stays linear.
 * Return: NULL without memory (@array is as it was). */
static void *state_with_room(void *array, size_t count)
{
	if (array && malloc_usable_size(array) / sizeof(void *) > count)
		return array;
	return realloc(array, (count + count / 2 + 1) * sizeof(void *));
}

/* Append @item to a repeated field of pointers. */
#define APPEND(array, count, item)                                \
	({                                                        \
		void *_grown = state_with_room((array), (count)); \
		if (_grown) {                                     \
			(array) = _grown;                         \
			(array)[(count)++] = (item);              \
		}                                                 \
		_grown ? 0 : -ENOMEM;                             \
	})

static int state_set_name(char **field, const char *name)
{
	*field = strdup(name);
	return *field ? 0 : -ENOMEM;
}

/* Copies of the @n names at @from; NULL: of "". Return: NULL without memory. */
static char **state_names_new(const char *const *from, uint32_t n)
{
	char **names = calloc(n, sizeof(*names));

	for (uint32_t i = 0; names && i < n; i++) {
		names[i] = strdup(from ? from[i] : "");
		if (names[i])
			continue;
		while (i--)
			free(names[i]);
		free(names);
		return NULL;
	}
	return names;
}

static void state_names_free(char **names, uint32_t n)
{
	for (uint32_t i = 0; names && i < n; i++)
		free(names[i]);
	free(names);
}

/* An entry for each rank, none placed yet. */
static int state_no_devices(state_job *j)
{
	j->devices = state_names_new(NULL, j->world_size);
	if (!j->devices)
		return -ENOMEM;
	j->n_devices = j->world_size;
	return 0;
}

state_job *state_job_new(const char *name, uint32_t world_size)
{
	state_job *j = malloc(sizeof(*j));

	if (!j)
		return NULL;
	shardd__state__v1__job__init(j);
	j->world_size = world_size;
	if (state_set_name(&j->name, name) < 0) {
		free(j);
		return NULL;
	}
	if (state_no_devices(j) < 0) {
		state_job_free(j);
		return NULL;
	}
	return j;
}

state_unit *state_unit_new(const char *name)
{
	state_unit *u = malloc(sizeof(*u));

	if (!u)
		return NULL;
	shardd__state__v1__unit__init(u);
	u->optimizer = malloc(sizeof(*u->optimizer));
	if (!u->optimizer || state_set_name(&u->name, name) < 0) {
		free(u->optimizer);
		free(u);
		return NULL;
	}
	shardd__state__v1__optimizer__init(u->optimizer);
	return u;
}

/* A copy of @n numbers; for n == 0 NULL with 0 returned. */
static int state_copy_array(void *field, size_t *count, const void *data, size_t n, size_t size)
{
	void *copy = NULL;

	if (n) {
		copy = malloc(n * size);
		if (!copy)
			return -ENOMEM;
		memcpy(copy, data, n * size);
	}
	*(void **)field = copy;
	*count = n;
	return 0;
}

state_tensor *state_tensor_new(const char *name, const uint64_t *shape, size_t dims)
{
	state_tensor *t = malloc(sizeof(*t));

	if (!t)
		return NULL;
	shardd__state__v1__tensor__init(t);
	if (state_set_name(&t->name, name) < 0 ||
	    state_copy_array(&t->shape, &t->n_shape, shape, dims, sizeof(*shape)) < 0) {
		shardd__state__v1__tensor__free_unpacked(t, NULL);
		return NULL;
	}
	return t;
}

int state_tensor_set_alias(state_tensor *t, const char *unit, const char *tensor)
{
	return state_set_name(&t->alias_unit, unit) < 0 || state_set_name(&t->alias_of, tensor) < 0
		       ? -ENOMEM
		       : 0;
}

int state_tensor_set_strides(state_tensor *t, const uint64_t *strides, size_t dims)
{
	return state_copy_array(&t->strides, &t->n_strides, strides, dims, sizeof(*strides));
}

state_buffer *state_buffer_new(const char *name, const uint64_t *shape, size_t dims)
{
	state_buffer *b = malloc(sizeof(*b));

	if (!b)
		return NULL;
	shardd__state__v1__buffer__init(b);
	if (state_set_name(&b->name, name) < 0 ||
	    state_copy_array(&b->shape, &b->n_shape, shape, dims, sizeof(*shape)) < 0) {
		shardd__state__v1__buffer__free_unpacked(b, NULL);
		return NULL;
	}
	return b;
}

state_group *state_group_new(const char *name, const uint32_t *ranks, size_t n)
{
	state_group *g = malloc(sizeof(*g));

	if (!g)
		return NULL;
	shardd__state__v1__group__init(g);
	if (state_set_name(&g->name, name) < 0 ||
	    state_copy_array(&g->ranks, &g->n_ranks, ranks, n, sizeof(*ranks)) < 0) {
		shardd__state__v1__group__free_unpacked(g, NULL);
		return NULL;
	}
	return g;
}

void state_job_free(state_job *j)
{
	shardd__state__v1__job__free_unpacked(j, NULL);
}

void state_unit_free(state_unit *u)
{
	shardd__state__v1__unit__free_unpacked(u, NULL);
}

void state_unit_drop(state_unit *u)
{
	for (size_t i = 0; i < u->n_parts; i++)
		shardd__state__v1__part__free_unpacked(u->parts[i], NULL);
	for (size_t i = 0; i < u->n_buffer_regions; i++)
		shardd__state__v1__region__free_unpacked(u->buffer_regions[i], NULL);
	free(u->parts);
	free(u->buffer_regions);
	u->parts = NULL;
	u->buffer_regions = NULL;
	u->n_parts = u->n_buffer_regions = 0;
	u->initialised = false;
	u->dropped = true;
}

void state_group_free(state_group *g)
{
	shardd__state__v1__group__free_unpacked(g, NULL);
}

int state_job_add_group(state_job *j, state_group *g)
{
	return APPEND(j->groups, j->n_groups, g);
}

int state_job_add_unit(state_job *j, state_unit *u)
{
	return APPEND(j->units, j->n_units, u);
}

int state_unit_add_tensor(state_unit *u, state_tensor *t)
{
	return APPEND(u->tensors, u->n_tensors, t);
}

int state_unit_add_buffer(state_unit *u, state_buffer *b)
{
	return APPEND(u->buffers, u->n_buffers, b);
}

int state_job_take_slab(state_job *j, state_slab *s)
{
	return APPEND(j->slabs, j->n_slabs, s);
}

static state_slab *state_slab_new(const struct slab *s)
{
	state_slab *rec = malloc(sizeof(*rec));

	if (!rec)
		return NULL;
	shardd__state__v1__slab__init(rec);
	rec->id = s->id;
	rec->class_ = s->class;
	rec->bytes = s->bytes;
	rec->device = strdup(backend_lasting_name(s->device->backend));
	if (rec->device)
		return rec;
	free(rec);
	return NULL;
}

int state_job_add_slab(state_job *j, const struct slab *s)
{
	state_slab *rec = state_slab_new(s);

	if (rec && state_job_take_slab(j, rec) == 0)
		return 0;
	shardd__state__v1__slab__free_unpacked(rec, NULL);
	return -ENOMEM;
}

int state_job_take_pooled(state_job *j, state_pooled *p)
{
	return APPEND(j->pooled, j->n_pooled, p);
}

state_pooled *state_job_add_pooled(state_job *j, const struct slab *s)
{
	state_pooled *p = malloc(sizeof(*p));

	if (!p)
		return NULL;
	shardd__state__v1__pooled__init(p);
	p->slab = state_slab_new(s);
	if (p->slab && state_job_take_pooled(j, p) == 0)
		return p;
	shardd__state__v1__pooled__free_unpacked(p, NULL);
	return NULL;
}

void state_job_drop_pooled(state_job *j, size_t i)
{
	CHECK(i < j->n_pooled);
	shardd__state__v1__pooled__free_unpacked(j->pooled[i], NULL);
	j->pooled[i] = j->pooled[--j->n_pooled];
}

state_part *state_unit_add_part(state_unit *u)
{
	state_part *p = malloc(sizeof(*p));

	if (!p)
		return NULL;
	shardd__state__v1__part__init(p);
	if (APPEND(u->parts, u->n_parts, p) == 0)
		return p;
	free(p);
	return NULL;
}

int state_job_set_span(state_job *j, const char *text)
{
	char *copy = strdup(text);

	if (!copy)
		return -ENOMEM;
	if (j->span != protobuf_c_empty_string)
		free(j->span);
	j->span = copy;
	return 0;
}

int state_job_set_device(state_job *j, uint32_t rank, const char *id)
{
	char *copy = strdup(id);

	if (!copy)
		return -ENOMEM;
	CHECK(rank < j->n_devices);
	free(j->devices[rank]);
	j->devices[rank] = copy;
	return 0;
}

void state_job_drop_blobs(state_job *j, uint32_t ranks, uint32_t *ret_gone, uint64_t *ret_bytes)
{
	size_t kept = 0;

	*ret_gone = 0;
	*ret_bytes = 0;
	for (size_t i = 0; i < j->n_blobs; i++) {
		if (j->blobs[i]->rank < ranks) {
			j->blobs[kept++] = j->blobs[i];
			continue;
		}
		*ret_gone += 1;
		*ret_bytes += j->blobs[i]->data.len;
		shardd__state__v1__blob__free_unpacked(j->blobs[i], NULL);
	}
	j->n_blobs = kept;
}

/* An entry for each rank of @to that will have one. Return: 0 or -ENOMEM: nothing has changed. */
static int state_reserve_blobs(state_job *j, const struct state_size *to)
{
	uint32_t gone;
	uint64_t bytes;

	for (uint32_t i = 0; i < to->world->n_ranks; i++)
		if (to->from[i] != STATE_NEW_RANK && state_job_blob(j, to->from[i]) &&
		    !state_job_blob(j, i) && state_job_set_blob(j, i, NULL, 0, 0) < 0) {
			state_job_drop_blobs(j, j->world_size, &gone, &bytes);
			return -ENOMEM;
		}
	return 0;
}

/* Blobs go with their ranks. A rank that is new has an empty one in place of its namesake's: readers of
 * the journal replace blobs, and do not remove them. @old: as they are now; taken. */
static void state_move_blobs(state_job *j, const struct state_size *to, state_blob *old)
{
	for (uint32_t i = 0; i < to->world->n_ranks; i++) {
		state_blob *b = (state_blob *)state_job_blob(j, i), *from = NULL;

		for (size_t k = 0; k < j->n_blobs; k++)
			if (old[k].rank == to->from[i])
				from = &old[k];
		if (!b)
			continue;
		b->data = from ? from->data : (ProtobufCBinaryData){ 0 };
		b->step = from ? from->step : 0;
		if (from)
			from->data.data = NULL;
	}
}

static int state_resize_blobs(state_job *j, const struct state_size *to, uint32_t *ret_gone,
			      uint64_t *ret_bytes)
{
	uint32_t was = j->world_size, dropped;
	state_blob *old;
	uint64_t none;

	if (state_reserve_blobs(j, to) < 0)
		return -ENOMEM;
	old = calloc(j->n_blobs + 1, sizeof(*old));
	if (!old) {
		state_job_drop_blobs(j, was, &dropped, &none);
		return -ENOMEM;
	}
	*ret_gone = 0;
	*ret_bytes = 0;
	for (size_t i = 0; i < j->n_blobs; i++) {
		old[i] = *j->blobs[i];
		j->blobs[i]->data = (ProtobufCBinaryData){ 0 };
	}
	state_move_blobs(j, to, old);
	for (size_t i = 0; i < j->n_blobs; i++) {
		if (!old[i].data.data)
			continue;
		*ret_gone += 1;
		*ret_bytes += old[i].data.len;
		free(old[i].data.data);
	}
	free(old);
	state_job_drop_blobs(j, (uint32_t)to->world->n_ranks, &dropped, &none);
	return 0;
}

int state_job_resize(state_job *j, const struct state_size *to, uint32_t *ret_gone,
		     uint64_t *ret_bytes)
{
	uint32_t world = (uint32_t)to->world->n_ranks;
	char **names = state_names_new(to->devices, world);
	uint32_t *numbers = to->numbers ? calloc(world, sizeof(*numbers)) : NULL;

	CHECK(j->n_groups > 0);
	if (!names || (to->numbers && !numbers) ||
	    state_resize_blobs(j, to, ret_gone, ret_bytes) < 0) {
		state_names_free(names, world);
		free(numbers);
		return -ENOMEM;
	}
	if (numbers)
		memcpy(numbers, to->numbers, world * sizeof(*numbers));
	free(j->numbers);
	j->numbers = numbers;
	j->n_numbers = numbers ? world : 0;
	j->launched = numbers ? to->launched : 0;
	state_names_free(j->devices, (uint32_t)j->n_devices);
	j->devices = names;
	j->n_devices = world;
	for (size_t i = 0; i < j->n_groups; i++)
		state_group_free(j->groups[i]);
	j->groups[0] = to->world;
	j->n_groups = 1;
	j->world_size = world;
	return 0;
}

int state_job_set_run(state_job *j, const char *run)
{
	char *copy = strdup(run);

	if (!copy)
		return -ENOMEM;
	if (j->run != protobuf_c_empty_string)
		free(j->run);
	j->run = copy;
	return 0;
}

/* @at: replaced by a copy of @c. */
state_doubt *state_doubt_new(void)
{
	state_doubt *d = malloc(sizeof(*d));

	if (d)
		shardd__state__v1__doubt__init(d);
	return d;
}

void state_doubt_free(state_doubt *d)
{
	if (d)
		shardd__state__v1__doubt__free_unpacked(d, NULL);
}

void state_blob_free(state_blob *b)
{
	shardd__state__v1__blob__free_unpacked(b, NULL);
}

int state_doubt_add_blob(state_blob ***list, size_t *n, uint32_t rank, uint64_t step,
			 const void *data, size_t bytes)
{
	state_blob **grown = realloc(*list, (*n + 1) * sizeof(*grown));
	state_blob *b = malloc(sizeof(*b));

	if (grown)
		*list = grown;
	if (b)
		shardd__state__v1__blob__init(b);
	if (b && bytes)
		b->data = (ProtobufCBinaryData){ .len = bytes, .data = malloc(bytes) };
	if (!grown || !b || (bytes && !b->data.data)) {
		free(b);
		return -ENOMEM;
	}
	if (bytes)
		memcpy(b->data.data, data, bytes);
	b->rank = rank;
	b->step = step;
	(*list)[(*n)++] = b;
	return 0;
}

state_applied *state_job_applied(const state_job *j, uint64_t group)
{
	for (size_t i = 0; i < j->n_applied; i++)
		if (j->applied[i]->group == group)
			return j->applied[i];
	return NULL;
}

int state_job_reserve_applied(state_job *j, uint64_t group)
{
	state_applied *a = state_job_applied(j, group);

	if (a)
		return 0;
	a = malloc(sizeof(*a));
	if (!a)
		return -ENOMEM;
	shardd__state__v1__applied__init(a);
	a->group = group;
	if (APPEND(j->applied, j->n_applied, a) == 0)
		return 0;
	free(a);
	return -ENOMEM;
}

static int state_set_checkpoints(state_checkpoints **at, const state_checkpoints *c)
{
	state_checkpoints *copy = NULL;

	if (c) {
		copy = malloc(sizeof(*copy));
		if (!copy)
			return -ENOMEM;
		*copy = *c;
		copy->path = strdup(c->path);
		if (!copy->path) {
			free(copy);
			return -ENOMEM;
		}
	}
	if (*at)
		shardd__state__v1__checkpoints__free_unpacked(*at, NULL);
	*at = copy;
	return 0;
}

int state_job_set_checkpoints(state_job *j, const state_checkpoints *c)
{
	return state_set_checkpoints(&j->checkpoints, c);
}

int state_job_set_said_checkpoints(state_job *j, const state_checkpoints *c)
{
	return state_set_checkpoints(&j->said_checkpoints, c);
}

void state_job_drop_slabs(state_job *j, size_t n)
{
	CHECK(n <= j->n_slabs);
	while (n--)
		shardd__state__v1__slab__free_unpacked(j->slabs[--j->n_slabs], NULL);
}

void state_job_drop_slab(state_job *j, size_t i)
{
	CHECK(i < j->n_slabs);
	shardd__state__v1__slab__free_unpacked(j->slabs[i], NULL);
	j->n_slabs--;
	for (; i < j->n_slabs; i++)
		j->slabs[i] = j->slabs[i + 1];
}

static int state_compare_slab(const void *a, const void *b)
{
	const state_slab *x = *(state_slab *const *)a, *y = *(state_slab *const *)b;

	return x->id < y->id ? -1 : x->id > y->id;
}

void state_job_sort_slabs(state_job *j)
{
	if (j->n_slabs)
		qsort(j->slabs, j->n_slabs, sizeof(*j->slabs), state_compare_slab);
}

void state_region_free(state_region **field)
{
	if (*field)
		shardd__state__v1__region__free_unpacked(*field, NULL);
	*field = NULL;
}

int state_region_set(state_region **field, const struct region *r)
{
	state_region *rec = malloc(sizeof(*rec));

	if (!rec)
		return -ENOMEM;
	shardd__state__v1__region__init(rec);
	rec->slab = r->slab->id;
	rec->offset = r->offset;
	rec->bytes = r->bytes;
	state_region_free(field);
	*field = rec;
	return 0;
}

/* A journal may be damaged: units are not checked yet when it is read. */
static bool state_unit_is_kept(const state_unit *u)
{
	return u->initialised && !u->dropped && u->optimizer && u->n_parts && u->parts[0]->kept;
}

void state_job_keep(state_job *j)
{
	j->kept = true;
	j->kept_uncommitted = j->uncommitted_steps;
	for (size_t i = 0; i < j->n_units; i++) {
		state_unit *u = j->units[i];

		u->kept_initialised = state_unit_is_kept(u);
		if (!u->kept_initialised)
			continue;
		u->optimizer->kept_steps = u->optimizer->steps;
		for (size_t t = 0; t < u->n_tensors; t++)
			u->tensors[t]->kept_missed = u->tensors[t]->missed;
	}
}

static void state_unit_roll_back(state_unit *u)
{
	bool kept = u->kept_initialised;

	u->initialised = kept;
	u->optimizer->steps = kept ? u->optimizer->kept_steps : 0;
	for (size_t t = 0; t < u->n_tensors; t++)
		u->tensors[t]->missed = kept ? u->tensors[t]->kept_missed : 0;
}

void state_job_roll_back(state_job *j, bool all)
{
	CHECK(j->kept);
	j->kept = j->rollback = false;
	for (size_t i = 0; i < j->n_units; i++) {
		state_unit *u = j->units[i];

		if (!u->dropped && (all || (u->n_parts && u->parts[0]->kept)))
			state_unit_roll_back(u);
	}
}

int state_unit_add_buffer_region(state_unit *u, const struct region *r)
{
	state_region *rec = NULL;

	if (state_region_set(&rec, r) < 0)
		return -ENOMEM;
	if (APPEND(u->buffer_regions, u->n_buffer_regions, rec) == 0)
		return 0;
	shardd__state__v1__region__free_unpacked(rec, NULL);
	return -ENOMEM;
}

const state_blob *state_job_blob(const state_job *j, uint32_t rank)
{
	for (size_t i = 0; i < j->n_blobs; i++)
		if (j->blobs[i]->rank == rank)
			return j->blobs[i];
	return NULL;
}

int state_job_set_blob(state_job *j, uint32_t rank, uint8_t *data, size_t bytes, uint64_t step)
{
	state_blob *b = (state_blob *)state_job_blob(j, rank);

	if (!b) {
		b = malloc(sizeof(*b));
		if (!b)
			return -ENOMEM;
		shardd__state__v1__blob__init(b);
		b->rank = rank;
		if (APPEND(j->blobs, j->n_blobs, b) < 0) {
			free(b);
			return -ENOMEM;
		}
	}
	free(b->data.data);
	b->data = (ProtobufCBinaryData){ .len = bytes, .data = data };
	b->step = step;
	return 0;
}

int state_job_take_blob(state_job *j, state_blob **b)
{
	for (size_t i = 0; i < j->n_blobs; i++)
		if (j->blobs[i]->rank == (*b)->rank) {
			shardd__state__v1__blob__free_unpacked(j->blobs[i], NULL);
			j->blobs[i] = STEAL_PTR(*b);
			return 0;
		}
	if (APPEND(j->blobs, j->n_blobs, *b) < 0)
		return -ENOMEM;
	*b = NULL;
	return 0;
}

/* Return: a copy; NULL without memory. */
static Shardd__V1__Publication *state_copy_publication(const Shardd__V1__Publication *p)
{
	size_t bytes = shardd__v1__publication__get_packed_size(p);
	uint8_t *packed = malloc(bytes + 1);
	Shardd__V1__Publication *copy = NULL;

	if (packed) {
		shardd__v1__publication__pack(p, packed);
		copy = shardd__v1__publication__unpack(NULL, bytes, packed);
	}
	free(packed);
	return copy;
}

state_published *state_job_add_published(state_job *j, const Shardd__V1__Publication *declaration)
{
	state_published *p = malloc(sizeof(*p));

	if (!p)
		return NULL;
	shardd__state__v1__published__init(p);
	p->declaration = state_copy_publication(declaration);
	if (!p->declaration || APPEND(j->published, j->n_published, p) < 0) {
		shardd__state__v1__published__free_unpacked(p, NULL);
		return NULL;
	}
	return p;
}

void state_job_drop_published(state_job *j, state_published *p)
{
	size_t i = 0;

	while (i < j->n_published && j->published[i] != p)
		i++;
	CHECK(i < j->n_published);
	shardd__state__v1__published__free_unpacked(p, NULL);
	j->n_published--;
	memmove(j->published + i, j->published + i + 1,
		(j->n_published - i) * sizeof(j->published[0]));
}
