/* Where the pieces of a checkpoint go to in a job. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/extents.h"
#include "job/loading_impl.h"
#include "job/saving.h"
#include "job/span.h"
#include "unit/runs.h"

/* What the job needs: @name of unit @u. */
static int loading_place_check_piece(struct loading *l, const struct unit *u, const char *name,
				     enum tensor_type type, const uint64_t *shape, size_t dims,
				     const struct index_piece *p)
{
	if (p->type != (uint8_t)type)
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "%s of tensor '%.100s' of unit '%.100s' is %s in the checkpoint "
				 "and %s in the job",
				 index_array_name((enum index_array)p->array), name, u->rec->name,
				 tensor_type_name((enum tensor_type)p->type),
				 tensor_type_name(type));
	if (p->dims != dims || (dims && memcmp(p->shape, shape, dims * sizeof(*p->shape)) != 0))
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "%s '%.100s' of unit '%.100s' has another shape in the "
				 "checkpoint than in the job",
				 p->array == INDEX_BUFFER ? "buffer" : "tensor", name,
				 u->rec->name);
	return 0;
}

/* Does the daemon's own address of the unit's one part do? */
static bool loading_place_is_in_place(const struct loading *l, const struct unit *u)
{
	return extents_in_place(l->job->node) && u->n_parts == 1;
}

/* What part @p has of elements [begin, end) of a tensor. */
static int loading_place_upload_run(struct loading *l, const struct unit *u, struct unit_part *p,
				    uint32_t t, unsigned array, uint64_t begin, uint64_t end)
{
	size_t size = dtype_size(unit_state_dtype(u->rec, array));
	struct unit_run run;
	uint64_t lo, hi;

	if (!unit_part_run(u, p, t, &run))
		return 0;
	lo = begin > run.first ? begin : run.first;
	hi = end < run.first + run.n ? end : run.first + run.n;
	if (lo >= hi)
		return 0;
	return upload_add(l->upload, p->device,
			  unit_state_at(u->rec, unit_state(p, array), array,
					run.at + lo - run.first),
			  (hi - lo) * size);
}

static int loading_place_need_upload(struct loading *l)
{
	if (!l->upload)
		l->upload = upload_new(l->job, SAVE_CHUNK_BYTES);
	return l->upload ? 0 : -ENOMEM;
}

/* All replicas, one after the other. */
static int loading_place_upload_piece(struct loading *l, const struct unit *u, uint32_t t,
				      unsigned array, const struct index_piece *p,
				      struct loading_place *ret)
{
	int r = loading_place_need_upload(l);

	ret->upload = l->upload ? upload_bytes(l->upload) : 0;
	ret->replicas = u->n_parts / u->spread;
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = loading_place_upload_run(l, u, &u->parts[d], t, array, p->begin,
					     p->begin + p->elements);
	return r ? fault_errno(&l->f, r, "loading a checkpoint") : 0;
}

/* Has it parts on other nodes? */
static bool loading_place_is_partial(const struct unit *u)
{
	return u->n_parts != u->all_parts;
}

static int loading_place_add_run(struct loading *l, const struct loading_run *run)
{
	uint32_t room = l->runs_room ? 2 * l->runs_room : 64;
	struct loading_run *more;

	if (l->n_runs == l->runs_room) {
		more = reallocarray(l->runs, room, sizeof(*more));
		if (!more)
			return -ENOMEM;
		l->runs = more;
		l->runs_room = room;
	}
	l->runs[l->n_runs++] = *run;
	return 0;
}

/* What part @p of this node has of a piece. */
static int loading_place_run(struct loading *l, const struct unit *u, struct unit_part *p,
			     uint32_t t, unsigned array, const struct index_piece *piece)
{
	size_t size = dtype_size(unit_state_dtype(u->rec, array));
	uint64_t end = piece->begin + piece->elements, lo, hi;
	struct loading_run to = { 0 };
	struct unit_run run;
	char *at;

	if (!unit_part_run(u, p, t, &run))
		return 0;
	lo = piece->begin > run.first ? piece->begin : run.first;
	hi = end < run.first + run.n ? end : run.first + run.n;
	if (lo >= hi)
		return 0;
	to.begin = (lo - piece->begin) * size;
	to.bytes = (hi - lo) * size;
	at = unit_state_at(u->rec, unit_state(p, array), array, run.at + lo - run.first);
	if (extents_in_place(l->job->node)) {
		to.to = at;
		return loading_place_add_run(l, &to);
	}
	if (loading_place_need_upload(l) < 0)
		return -ENOMEM;
	to.upload = upload_bytes(l->upload);
	if (upload_add(l->upload, p->device, at, to.bytes) < 0)
		return -ENOMEM;
	return loading_place_add_run(l, &to);
}

/* Of a unit that has parts on other nodes: what is here, of all replicas. */
static int loading_place_runs(struct loading *l, const struct unit *u, uint32_t t, unsigned array,
			      const struct index_piece *piece, struct loading_place *ret)
{
	const struct loading_run *only;
	int r = 0;

	ret->first_run = l->n_runs;
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = loading_place_run(l, u, &u->parts[d], t, array, piece);
	ret->runs = l->n_runs - ret->first_run;
	ret->left_out = !ret->runs;
	only = ret->runs == 1 ? &l->runs[ret->first_run] : NULL;
	if (only && only->to && only->bytes == index_piece_bytes(piece)) {
		ret->at = only->to;
		ret->runs = 0;
	} else if (ret->runs && !l->chunk) {
		l->chunk = malloc(SAVE_CHUNK_BYTES);
		r = l->chunk ? r : -ENOMEM;
	}
	return r ? fault_errno(&l->f, r, "loading a checkpoint") : 0;
}

static int loading_place_piece(struct loading *l, struct unit *u, uint32_t t, unsigned array,
			       size_t i)
{
	const state_tensor *rec = u->rec->tensors[t];
	const struct index_piece *p = &l->x.pieces[i];
	struct loading_place *place = &l->places[i];

	if (loading_place_check_piece(l, u, rec->name, saving_type(unit_state_dtype(u->rec, array)),
				      rec->shape, rec->n_shape, p))
		return l->f.code;
	place->known = true;
	place->unit = array ? NULL : u;
	place->tensor = t;
	if (loading_place_is_partial(u))
		return loading_place_runs(l, u, t, array, p, place);
	if (!loading_place_is_in_place(l, u))
		return loading_place_upload_piece(l, u, t, array, p, place);
	place->at = unit_state_at(u->rec, unit_state(&u->parts[0], array), array,
				  unit_tensor_full(u, &u->tensors[t]) + p->begin);
	return 0;
}

/* All pieces of one array. */
static int loading_place_array(struct loading *l, struct unit *u, uint32_t t, unsigned array)
{
	const state_tensor *rec = u->rec->tensors[t];
	enum index_array kind = saving_array(u->rec, array);
	size_t i = index_find(&l->x, u->rec->name, rec->name, kind);

	if (i == l->x.n_pieces)
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "the checkpoint has no %s of tensor '%.100s' of unit '%.100s', "
				 "which the job needs",
				 index_array_name(kind), rec->name, u->rec->name);
	for (; !l->f.code && i < l->x.n_pieces &&
	       index_is_of(&l->x.pieces[i], u->rec->name, rec->name, kind);
	     i++)
		loading_place_piece(l, u, t, array, i);
	return l->f.code;
}

static int loading_place_unit(struct loading *l, struct unit *u)
{
	for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
		unsigned arrays = u->tensors[t].frozen ? 0 : unit_state_arrays(u->rec);

		if (u->tensors[t].alias)
			continue;
		if (u->rec->tensors[t]->n_strides)
			return fault_set(&l->f, FAULT_UNIMPLEMENTED, NULL,
					 "tensor '%.100s' of unit '%.100s' has strides; "
					 "checkpoints hold only tensors whose dimensions are in "
					 "order",
					 u->rec->tensors[t]->name, u->rec->name);
		for (unsigned i = 0; i <= arrays; i++)
			if (loading_place_array(l, u, t, i))
				return l->f.code;
	}
	return 0;
}

/* ---------------------------------------------------------------------------- buffers */

static bool loading_place_has_buffers(const struct index *x)
{
	for (size_t i = 0; i < x->n_pieces; i++)
		if (x->pieces[i].array == INDEX_BUFFER)
			return true;
	return false;
}

static int loading_place_add_copy(struct loading *l, const struct loading_copy *copy)
{
	struct loading_copy *more = reallocarray(l->copies, l->n_copies + 1, sizeof(*l->copies));

	if (!more)
		return fault_errno(&l->f, -ENOMEM, "loading a checkpoint");
	l->copies = more;
	l->copies[l->n_copies++] = *copy;
	return 0;
}

/* The pieces of a buffer, which are in the order of ranks. */
struct loading_buffer {
	const struct unit *unit;
	size_t first, end;
	uint64_t offset; /* in each rank's memory */
};

/* Is piece @i what member @k gets? That of its rank; a rank that was not there when the job was saved gets
 * what the first one has. */
static bool loading_place_is_buffer_of(const struct loading *l, const struct loading_buffer *b,
				       size_t i, uint32_t k)
{
	uint32_t rank = l->job->groups[b->unit->rec->group]->rec->ranks[k];
	const struct index_piece *all = l->x.pieces;

	if (all[i].rank == rank)
		return true;
	if (all[i].rank != all[b->first].rank)
		return false;
	for (size_t n = b->first; n < b->end; n++)
		if (all[n].rank == rank)
			return false;
	return true;
}

/* One more place of a piece: @offset in the buffers at @r. */
static int loading_place_add_buffer(struct loading *l, const struct region *r, uint64_t offset,
				    uint64_t bytes, struct loading_place *place)
{
	char *to = (char *)region_addr(r) + offset;

	if (extents_in_place(l->job->node)) {
		if (place->at)
			return loading_place_add_copy(l, &(struct loading_copy){ place->at, to,
										 bytes });
		place->at = to;
		return 0;
	}
	place->replicas++;
	if (loading_place_need_upload(l) < 0 ||
	    upload_add(l->upload, r->slab->device, to, bytes) < 0)
		return fault_errno(&l->f, -ENOMEM, "loading a checkpoint");
	return 0;
}

static int loading_place_buffer_piece(struct loading *l, const struct loading_buffer *b, size_t i)
{
	const struct index_piece *p = &l->x.pieces[i];
	struct loading_place *place = &l->places[i];
	uint64_t at = b->offset + p->begin * tensor_type_bytes((enum tensor_type)p->type);

	const struct group *g = l->job->groups[b->unit->rec->group];
	bool nobodys = true;

	place->known = place->left_out = true;
	place->upload = l->upload ? upload_bytes(l->upload) : 0;
	for (uint32_t k = 0; k < group_size(g); k++) {
		if (!loading_place_is_buffer_of(l, b, i, k))
			continue;
		nobodys = false;
		if (!span_is_here(l->job->across.span, g->rec->ranks[k]))
			continue;
		place->left_out = false;
		if (loading_place_add_buffer(l, &b->unit->buffers[k], at, index_piece_bytes(p),
					     place))
			return l->f.code;
	}
	l->report.buffers_left_out += nobodys;
	return 0;
}

/* One buffer of all ranks. @offset: in each one's memory. */
static int loading_place_buffer(struct loading *l, const struct unit *u, const state_buffer *rec,
				uint64_t offset)
{
	enum tensor_type type = saving_buffer_type(rec->dtype);
	size_t first = index_find(&l->x, u->rec->name, rec->name, INDEX_BUFFER);
	struct loading_buffer b = { u, first, first, offset };

	if (first == l->x.n_pieces)
		return fault_set(
			&l->f, FAULT_STATE, NULL,
			"the checkpoint has no buffer '%.100s' of unit '%.100s', which the "
			"job needs",
			rec->name, u->rec->name);
	for (; b.end < l->x.n_pieces &&
	       index_is_of(&l->x.pieces[b.end], u->rec->name, rec->name, INDEX_BUFFER);
	     b.end++)
		if (loading_place_check_piece(l, u, rec->name, type, rec->shape, rec->n_shape,
					      &l->x.pieces[b.end]))
			return l->f.code;
	for (size_t i = first; i < b.end; i++)
		if (loading_place_buffer_piece(l, &b, i))
			return l->f.code;
	return 0;
}

static int loading_place_buffers(struct loading *l, const struct unit *u)
{
	uint64_t offset = 0;

	if (!u->buffers)
		return 0;
	if (!loading_place_has_buffers(&l->x)) { /* as all of shardd's first checkpoints */
		l->report.buffers_missing += (uint32_t)u->rec->n_buffers;
		return 0;
	}
	for (size_t i = 0; !l->f.code && i < u->rec->n_buffers; i++) {
		loading_place_buffer(l, u, u->rec->buffers[i], offset);
		offset = unit_buffer_next(u->rec, i, offset);
	}
	return l->f.code;
}

/* ------------------------------------------------------------------------------- the rest */

static int loading_place_blob(struct loading *l, size_t i)
{
	const struct index_piece *p = &l->x.pieces[i];
	uint64_t bytes = index_piece_bytes(p);
	struct job *job = l->job;

	if (p->rank < job->rec->world_size ? !span_is_here(job->across.span, p->rank)
					   : l->in_memory) {
		l->places[i].known = l->places[i].left_out = true;
		l->report.left_out += p->rank >= job->rec->world_size;
		return 0;
	}
	if (bytes > JOB_MAX_BLOB)
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "the blob of rank %u has %llu bytes; the maximum is %u", p->rank,
				 (unsigned long long)bytes, JOB_MAX_BLOB);
	if (quota_charge(&job->quota, MEM_CONTROL, bytes))
		return fault_set(
			&l->f, FAULT_EXHAUSTED, NULL,
			"job '%s' has no memory for the blob of rank %u, %llu bytes: raise "
			"its quota",
			job->rec->name, p->rank, (unsigned long long)bytes);
	l->charged += bytes;
	l->places[i].blob = malloc(bytes ? bytes : 1);
	l->places[i].at = (char *)l->places[i].blob;
	l->places[i].known = true;
	l->report.left_out += p->rank >= job->rec->world_size;
	return l->places[i].blob ? 0 : fault_errno(&l->f, -ENOMEM, "loading a blob");
}

/* What nothing of the job has asked for. */
static int loading_place_rest(struct loading *l)
{
	for (size_t i = 0; !l->f.code && i < l->x.n_pieces; i++) {
		const struct index_piece *p = &l->x.pieces[i];

		if (l->places[i].known)
			continue;
		if (p->array == INDEX_BLOB)
			loading_place_blob(l, i);
		else if (loading_is_elsewhere(l, p))
			l->places[i].known = l->places[i].left_out = true;
		else
			fault_set(
				&l->f, FAULT_STATE, NULL,
				"the checkpoint has %s of tensor '%.100s' of unit '%.100s', which "
				"the job does not have: register the units and optimizers that "
				"were saved",
				index_array_name((enum index_array)p->array), p->tensor, p->unit);
	}
	return l->f.code;
}

/* Is the file of each piece that is needed here? */
static int loading_place_check_files(struct loading *l)
{
	for (size_t i = 0; i < l->x.n_pieces; i++) {
		const struct index_file *file = &l->x.files[l->x.pieces[i].file];

		if (file->fd == INDEX_NOT_HERE && !l->places[i].left_out &&
		    index_piece_bytes(&l->x.pieces[i]))
			return fault_set(
				&l->f, FAULT_INTERNAL, NULL,
				"part '%.64s' of step %llu of job '%s' is needed here, and "
				"was not fetched",
				file->name, (unsigned long long)l->x.step, l->job->rec->name);
	}
	return 0;
}

int loading_place_all(struct loading *l)
{
	struct job *job = l->job;

	CHECK(!l->places);
	l->places = calloc(l->x.n_pieces + 1, sizeof(*l->places));
	if (!l->places)
		return fault_errno(&l->f, -ENOMEM, "loading a checkpoint");
	l->n_units = job->n_units;
	for (uint32_t i = 0; !l->f.code && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && loading_place_unit(l, job->units[i]) == 0)
			loading_place_buffers(l, job->units[i]);
	if (l->f.code || loading_place_rest(l) || loading_place_check_files(l))
		return l->f.code;
	for (size_t i = 0; i < l->x.n_pieces; i++)
		l->bytes += l->places[i].left_out ? 0 : index_piece_bytes(&l->x.pieces[i]);
	return 0;
}
