#include "publish/assembly.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/job_types.h"
#include "mem/slab.h"
#include "publish/cut.h"
#include "unit/runs.h"

#define ASSEMBLY_ROOT "root"

/* ------------------------------------------------------------------------------ sources */

/* The tensors of a job. */
struct assembly_sources {
	struct view_source *all; /* owned, as are names */
	char **names;
	uint32_t *units;   /* whose memory it is: index */
	uint32_t *tensors; /* index in that unit */
	uint32_t *first;   /* by unit */
	size_t n;
};

static void assembly_sources_deinit(struct assembly_sources *s)
{
	for (size_t i = 0; s->names && i < s->n; i++)
		free(s->names[i]);
	free(s->names);
	free(s->all);
	free(s->tensors);
	free(s->units);
	free(s->first);
}

/* The path of the module that the unit is of, as client/python/shardd/torch/_names.py names units: without the
 * number in front of it, and the bucket behind. */
static const char *assembly_module(const char *unit, size_t *ret_bytes)
{
	size_t digits = strspn(unit, "0123456789");

	if (digits && unit[digits] == ':')
		unit += digits + 1;
	*ret_bytes = strcspn(unit, "#");
	return unit;
}

/* Is the unit there, and of the model number @model (0: of any)? */
static bool assembly_has(const struct unit *u, uint32_t model)
{
	const char *name = u->rec->name;
	size_t digits = strspn(name, "0123456789");
	unsigned long number = digits && name[digits] == ':' ? strtoul(name, NULL, 10) : 1;

	return !u->rec->dropped && (!model || number == model);
}

/* The tensor's name in the model. Return: malloc'ed; NULL without memory. */
static char *assembly_name(const char *unit, const char *tensor, const char *root)
{
	size_t bytes;
	const char *module = assembly_module(unit, &bytes);
	char *ret = NULL;

	if (!bytes || (strlen(root) == bytes && !strncmp(module, root, bytes)))
		return strdup(tensor);
	return asprintf(&ret, "%.*s.%s", (int)bytes, module, tensor) < 0 ? NULL : ret;
}

/* A piece of a tensor, one element after the other. */
struct assembly_piece {
	uint64_t first, n; /* of its elements */
	const char *at;
	const struct device *device;
};

/* The piece of tensor @t that has element @first: of several that do, one on the device of @a. Return: false: it is on
 * another node. */
static bool assembly_find(const struct assembly *a, const struct unit *u, uint32_t t,
			  uint64_t first, struct assembly_piece *ret)
{
	struct unit_run run;
	bool found = false;

	for (unsigned d = 0; d < u->n_parts; d++) {
		struct unit_part *p = &u->parts[d];

		if (!unit_part_run(u, p, t, &run) || run.first > first ||
		    run.first + run.n <= first || (found && p->device != a->device))
			continue;
		*ret = (struct assembly_piece){ .first = run.first,
						.n = run.n,
						.at = unit_state_at(u->rec, &p->params, 0, run.at),
						.device = p->device };
		found = true;
	}
	return found;
}

static int assembly_check_piece(const struct assembly *a, const struct job *job,
				const struct unit *u, const struct assembly_piece *piece,
				struct fault *f)
{
	const struct backend *own = a->device->backend, *other = piece->device->backend;

	if (backend_reaches(own, other, job_share(job)))
		return 0;
	return fault_set(
		f, FAULT_UNIMPLEMENTED, NULL,
		"unit '%.100s' is in the memory of %s, which %s cannot read%s: publish from "
		"devices with peer access, or each device's tensors alone",
		u->rec->name, backend_info(other)->id, backend_info(own)->id,
		job->rec->ipc ? " if the job uses CUDA IPC handles" : "");
}

static int assembly_add_source(const struct job *job, const struct unit *u, uint32_t t,
			       const char *root, struct assembly_sources *s, struct fault *f)
{
	const state_tensor *rec = u->rec->tensors[t];
	const struct unit_tensor *ut = &u->tensors[t];
	const struct unit *of = ut->alias ? job->units[ut->of_unit - 1] : u;
	size_t i = s->n;

	s->names[i] = assembly_name(u->rec->name, rec->name, root);
	if (!s->names[i])
		return fault_errno(f, -ENOMEM, "a publication");
	s->n++;
	s->first[u->id - 1] = (uint32_t)(i - t);
	s->units[i] = of->id - 1;
	s->tensors[i] = ut->alias ? ut->of : t;
	s->all[i] = (struct view_source){
		.name = s->names[i],
		.shape = rec->shape,
		.strides = rec->n_strides ? rec->strides : NULL,
		.dims = (uint32_t)rec->n_shape,
		.dtype = unit_state_dtype(of->rec, 0),
	};
	return 0;
}

/* All sources are listed. */
static void assembly_note_aliases(const struct job *job, uint32_t model, struct assembly_sources *s)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		for (uint32_t t = 0; assembly_has(u, model) && t < u->rec->n_tensors; t++) {
			const struct unit_tensor *ut = &u->tensors[t];
			struct view_source *source = &s->all[s->first[i] + t];

			/* of another model's tensor it is one of its own */
			source->alias =
				ut->alias && assembly_has(job->units[ut->of_unit - 1], model);
			source->of = source->alias ? s->first[ut->of_unit - 1] + ut->of : 0;
		}
	}
}

/* A model that is named by its number is there. */
static int assembly_check_model(const struct job *job, uint32_t model, struct fault *f)
{
	for (uint32_t i = 0; model && i < job->n_units; i++)
		if (assembly_has(job->units[i], model))
			return 0;
	return model ? (int)fault_set(f, FAULT_INVALID, "model",
				      "job '%s' has no units of a model number %u", job->rec->name,
				      model)
		     : 0;
}

/* A root that is named is there. */
static int assembly_check_root(const struct job *job, const char *root, uint32_t model,
			       struct fault *f)
{
	for (uint32_t i = 0; *root && i < job->n_units; i++) {
		size_t bytes;
		const char *module = assembly_module(job->units[i]->rec->name, &bytes);

		if (assembly_has(job->units[i], model) && strlen(root) == bytes &&
		    !strncmp(module, root, bytes))
			return 0;
	}
	return *root ? (int)fault_set(
			       f, FAULT_INVALID, "root",
			       "job '%s' has no unit '%.100s', whose tensors would have their "
			       "own names alone",
			       job->rec->name, root)
		     : 0;
}

static int assembly_list(const struct job *job, const char *root, uint32_t model,
			 struct assembly_sources *s, struct fault *f)
{
	size_t n = 0;

	for (uint32_t i = 0; i < job->n_units; i++)
		n += assembly_has(job->units[i], model) ? job->units[i]->rec->n_tensors : 0;
	s->all = calloc(n + 1, sizeof(*s->all));
	s->names = calloc(n + 1, sizeof(*s->names));
	s->tensors = calloc(n + 1, sizeof(*s->tensors));
	s->units = calloc(n + 1, sizeof(*s->units));
	s->first = calloc((size_t)job->n_units + 1, sizeof(*s->first));
	if (!s->all || !s->names || !s->tensors || !s->units || !s->first)
		return fault_errno(f, -ENOMEM, "a publication");
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		if (!assembly_has(u, model))
			continue;
		for (uint32_t t = 0; t < u->rec->n_tensors; t++)
			if (assembly_add_source(job, u, t, root, s, f))
				return f->code;
	}
	assembly_note_aliases(job, model, s);
	return 0;
}

/* ------------------------------------------------------------------------------- tables */

/* Elements of one block. */
static uint64_t assembly_block(const struct view_tensor *t)
{
	size_t size = dtype_size(t->dtype == DTYPE_E4M3 ? DTYPE_FP32 : t->dtype);

	CHECK(size);
	return KERNEL_ASSEMBLE_BYTES / size < KERNEL_DELTA_ELEMENTS ? KERNEL_ASSEMBLE_BYTES / size
								    : KERNEL_DELTA_ELEMENTS;
}

static uint64_t assembly_blocks(const struct view_tensor *t)
{
	return (t->elements + assembly_block(t) - 1) / assembly_block(t);
}

/* Padding may ask for any size, and so for tables of any size. */
static int assembly_check_bytes(const struct assembly *a, const struct view *v, struct fault *f)
{
	uint64_t most = a->device->quota.limit;

	return v->bytes <= most
		       ? 0
		       : (int)fault_set(f, FAULT_EXHAUSTED, NULL,
					"a generation has %llu bytes, and the device only %llu: "
					"publish less",
					(unsigned long long)v->bytes, (unsigned long long)most);
}

static struct assembly_scales *assembly_free_scales(struct assembly_scales *s)
{
	if (!s)
		return NULL;
	free(s->all);
	free(s->amax);
	free(s->cleared);
	free(s->measured);
	free(s);
	return NULL;
}

static struct assembly_scales assembly_count_scales(const struct assembly *a)
{
	struct assembly_scales s = { .n = 0 };

	for (uint32_t i = 0; i < a->view->n; i++) {
		const struct view_tensor *t = &a->view->tensors[i];

		if (t->same != i || (!t->scales && t->dtype != DTYPE_E4M3))
			continue;
		s.n += t->scales;
		s.n_amax += t->scales ? t->elements : 0;
		s.n_cleared += t->scales ? (uint32_t)assembly_blocks(t) : 0;
		s.n_measured += t->scales ? 0 : (uint32_t)assembly_blocks(t);
	}
	return s;
}

static int assembly_take_scales(struct assembly *a)
{
	struct assembly_scales s = assembly_count_scales(a);

	if (!s.n)
		return 0;
	a->scales = calloc(1, sizeof(*a->scales));
	if (!a->scales)
		return -ENOMEM;
	s.all = calloc(s.n, sizeof(*s.all));
	s.amax = calloc(s.n_amax + 1, sizeof(*s.amax));
	s.cleared = calloc((size_t)s.n_cleared + 1, sizeof(*s.cleared));
	s.measured = calloc((size_t)s.n_measured + 1, sizeof(*s.measured));
	*a->scales = s;
	return s.all && s.amax && s.cleared && s.measured ? 0 : -ENOMEM;
}

static uint64_t assembly_scales_bytes(const struct assembly_scales *s)
{
	return s ? sizeof(*s) + s->n * (uint64_t)sizeof(*s->all) + s->n_amax * sizeof(*s->amax) +
			       ((uint64_t)s->n_cleared + s->n_measured) * sizeof(*s->cleared)
		 : 0;
}

/* Padding may ask for any number of blocks and scales: the job's owner can pay for their tables. */
static int assembly_check_cost(const struct assembly *a, const struct job *job, struct fault *f)
{
	const struct assembly_scales s = assembly_count_scales(a);
	struct user_charge cost = USER_CHARGE_NULL;
	int r = user_charge(&cost, job->owner.user, USER_MEMORY,
			    assembly_scales_bytes(&s) + a->n_blocks * (uint64_t)sizeof(*a->blocks),
			    f);

	user_charge_deinit(&cost);
	return r;
}

static int assembly_count_blocks(struct assembly *a)
{
	const struct view *v = a->view;
	uint64_t blocks = 0;

	for (uint32_t i = 0; i < v->n; i++)
		blocks += v->tensors[i].same == i ? assembly_blocks(&v->tensors[i]) : 0;
	if (blocks > UINT32_MAX)
		return -EOVERFLOW;
	a->n_blocks = (uint32_t)blocks;
	return 0;
}

static int assembly_take(struct assembly *a)
{
	const struct view *v = a->view;

	a->tensors = calloc(v->n, sizeof(*a->tensors));
	a->blocks = calloc(a->n_blocks, sizeof(*a->blocks));
	a->reads = calloc((size_t)a->n_units + 1, sizeof(*a->reads));
	return a->tensors && a->blocks && a->reads ? assembly_take_scales(a) : -ENOMEM;
}

static void assembly_fill_box(struct assembly *a, const struct view_box *x, enum dtype type,
			      const struct assembly_piece *piece)
{
	struct k_assemble_box *to = &a->boxes[a->n_boxes++];

	*to = (struct k_assemble_box){
		.src = piece->at + (x->from - piece->first) * dtype_size(type),
		.src_dtype = type,
		.at = x->at,
	};
	memcpy(to->n, x->n, sizeof(x->n));
	memcpy(to->src_stride, x->src_stride, sizeof(x->src_stride));
	memcpy(to->dst_stride, x->dst_stride, sizeof(x->dst_stride));
}

/* Append the parts of @x in one piece after the other. */
static int assembly_cut(struct assembly *a, const struct job *job, const struct assembly_sources *s,
			const struct view_box *x, struct fault *f)
{
	_cleanup_(cut_deinit) struct cut_boxes cut = CUT_BOXES_NULL;
	const struct unit *u = job->units[s->units[x->source]];
	uint32_t t = s->tensors[x->source];
	uint64_t elements = u->tensors[t].elements;
	struct k_assemble_box *more;
	struct assembly_piece piece = { 0 };
	int r = 0;

	for (uint64_t first = 0; first < elements && r == 0; first = piece.first + piece.n) {
		uint32_t before = cut.n;

		if (!assembly_find(a, u, t, first, &piece))
			return fault_set(
				f, FAULT_UNIMPLEMENTED, NULL,
				"tensor '%.100s' of unit '%.100s' is sharded over several "
				"nodes: only what one of them has as a whole can be published",
				u->rec->tensors[t]->name, u->rec->name);
		/* of pieces that are there twice, as of replicas, each element once */
		r = cut_append(&cut, x, first, piece.first + piece.n - first);
		if (r || cut.n == before)
			continue;
		if (assembly_check_piece(a, job, u, &piece, f))
			return f->code;
		more = realloc(a->boxes, (a->n_boxes + cut.n - before) * sizeof(*more));
		if (!more) {
			r = -ENOMEM;
			continue;
		}
		a->boxes = more;
		a->others |= piece.device != a->device;
		for (uint32_t i = before; i < cut.n; i++)
			assembly_fill_box(a, &cut.all[i], s->all[x->source].dtype, &piece);
	}
	return r ? (int)fault_errno(f, r, "a publication") : 0;
}

/* What is published must be there as a whole; what is not may be anywhere. The view's numbers of boxes become those
 * of what was cut. */
static int assembly_fill_boxes(struct assembly *a, const struct job *job,
			       const struct assembly_sources *s, struct fault *f)
{
	for (uint32_t i = 0; i < a->view->n; i++) {
		struct view_tensor *t = &a->view->tensors[i];
		uint32_t first = a->n_boxes;

		for (uint32_t b = t->first_box; b < t->first_box + t->n_boxes && t->same == i;
		     b++) {
			const struct view_box *x = &a->view->boxes[b];

			a->reads[s->units[x->source]] = true;
			if (assembly_cut(a, job, s, x, f))
				return f->code;
		}
		t->first_box = first;
		t->n_boxes = a->n_boxes - first;
	}
	return 0;
}

/* Return: bytes that are read and written for the tensor. */
static uint64_t assembly_fill_tensor(struct assembly *a, uint32_t i)
{
	const struct view_tensor *t = &a->view->tensors[i];
	uint64_t moves = t->bytes;

	a->tensors[i] = (struct k_assemble_tensor){ .dst = (void *)(uintptr_t)t->offset,
						    .dst_dtype = t->dtype,
						    .gaps = t->gaps,
						    .boxes = a->boxes + t->first_box,
						    .n_boxes = t->n_boxes };
	for (uint32_t b = t->first_box; b < t->first_box + t->n_boxes; b++) {
		const struct k_assemble_box *x = &a->boxes[b];

		moves += x->n[0] * x->n[1] * x->n[2] * dtype_size(x->src_dtype);
	}
	return moves;
}

/* A block of a tensor that has scales, or is some: for the passes before the last one. */
static void assembly_note_scales(struct assembly *a, const struct k_assemble_block *b)
{
	struct assembly_scales *s = a->scales;
	const struct view_tensor *t = &a->view->tensors[b->tensor];

	if (t->scales)
		s->cleared[s->n_cleared++] = *b;
	else if (t->dtype == DTYPE_E4M3)
		s->measured[s->n_measured++] = *b;
}

/* Tensors of type e4m3 have their scales behind them. */
static void assembly_fill_scales(struct assembly *a)
{
	struct assembly_scales *s = a->scales;
	uint64_t at = 0;
	uint32_t n = 0;

	for (uint32_t i = 0; s && i + 1 < a->view->n; i++) {
		const struct view_tensor *t = &a->view->tensors[i];

		if (t->same != i || t->dtype != DTYPE_E4M3)
			continue;
		CHECK(t[1].scales && n < s->n);
		s->all[n] =
			(struct k_assemble_scales){ s->amax + at, t->tiles.rows, t->tiles.columns,
						    t->tiles.tile_rows, t->tiles.tile_columns };
		a->tensors[i].scales = a->tensors[i + 1].scales = &s->all[n++];
		at += t[1].elements;
	}
	if (s) {
		CHECK(n == s->n && at == s->n_amax);
		s->n_cleared = s->n_measured = 0;
	}
	for (uint32_t b = 0; s && b < a->n_blocks; b++)
		assembly_note_scales(a, &a->blocks[b]);
}

static void assembly_fill(struct assembly *a)
{
	uint64_t moves = 0;
	uint32_t n = 0;

	for (uint32_t i = 0; i < a->view->n; i++) {
		const struct view_tensor *t = &a->view->tensors[i];
		uint64_t each = assembly_block(t);

		if (t->same != i)
			continue;
		moves += assembly_fill_tensor(a, i);
		for (uint64_t at = 0; at < t->elements; at += each) {
			uint64_t left = t->elements - at;

			a->blocks[n++] =
				(struct k_assemble_block){ i, (uint32_t)(left < each ? left : each),
							   at };
		}
	}
	CHECK(n == a->n_blocks);
	assembly_fill_scales(a);
	a->bytes = a->view->bytes;
	a->moves = n ? moves / n : 0;
}

/* Where generations are: on the device that is named, or the first one that has memory of the job. */
static int assembly_find_device(struct assembly *a, const struct job *job,
				const view_declaration *p, struct fault *f)
{
	char devices[256];

	a->device = *p->device ? node_device(job->node, p->device) : NULL;
	for (uint32_t i = 0; !*p->device && !a->device && i < job->n_units; i++)
		if (job->units[i]->n_parts)
			a->device = job->units[i]->parts[0].device;
	if (a->device)
		return 0;
	if (!*p->device) {
		a->device = &job->node->devices[0];
		return 0;
	}
	node_list_devices(job->node, devices, sizeof(devices));
	return fault_set(f, FAULT_INVALID, "device",
			 "there is no device '%.100s': this daemon has %s", p->device, devices);
}

int assembly_new(const struct job *job, const view_declaration *p, struct assembly **ret,
		 struct fault *f)
{
	_cleanup_(assembly_sources_deinit) struct assembly_sources s = { 0 };
	struct assembly *a = calloc(1, sizeof(*a));
	int r = 0;

	if (!a)
		return fault_errno(f, -ENOMEM, "a publication");
	a->refs = 1;
	a->n_units = job->n_units;
	if (assembly_find_device(a, job, p, f) == 0 &&
	    assembly_check_model(job, p->model, f) == 0 &&
	    assembly_check_root(job, p->root, p->model, f) == 0 &&
	    assembly_list(job, *p->root ? p->root : ASSEMBLY_ROOT, p->model, &s, f) == 0 &&
	    view_new(p, s.all, s.n, &a->view, f) == 0 && assembly_check_bytes(a, a->view, f) == 0) {
		r = assembly_count_blocks(a);
		if (r == 0 && assembly_check_cost(a, job, f) == 0)
			r = assembly_take(a);
	}
	if (r < 0)
		fault_errno(f, r, "a publication");
	if (f->code || assembly_fill_boxes(a, job, &s, f)) {
		assembly_unref(a);
		return f->code;
	}
	assembly_fill(a);
	a->delta_room = a->bytes * p->delta_percent / 100;
	if (user_charge(&a->cost, job->owner.user, USER_MEMORY, assembly_own_bytes(a), f)) {
		assembly_unref(a);
		return f->code;
	}
	*ret = a;
	return 0;
}

struct assembly *assembly_ref(struct assembly *a)
{
	a->refs++;
	return a;
}

struct assembly *assembly_unref(struct assembly *a)
{
	if (!a || --a->refs)
		return NULL;
	view_free(a->view);
	free(a->tensors);
	free(a->boxes);
	free(a->blocks);
	free(a->reads);
	tables_free(&a->tables);
	assembly_free_scales(a->scales);
	user_charge_deinit(&a->cost);
	free(a);
	return NULL;
}

int assembly_check_values(const struct assembly *a, const struct job *job, struct fault *f)
{
	CHECK(a->n_units == job->n_units);
	for (uint32_t i = 0; i < a->n_units; i++) {
		const struct unit *u = job->units[i];

		if (a->reads[i] && (!u->rec->initialised || u->torn))
			return fault_set(f, FAULT_STATE, NULL,
					 "unit '%.100s' has no values to publish: initialise it, "
					 "and commit",
					 u->rec->name);
	}
	return 0;
}

unsigned assembly_others(const struct assembly *a, const struct job *job,
			 struct backend *ret[MAKING_FENCES])
{
	unsigned n = 0;

	for (unsigned d = 0; a->others && d < job->node->n_devices; d++)
		if (&job->node->devices[d] != a->device)
			ret[n++] = job->node->devices[d].backend;
	return n;
}

int assembly_take_tables(struct assembly *a, const struct board_payer *payer)
{
	const struct assembly_scales none = { .n = 0 }, *s = a->scales ? a->scales : &none;
	const struct tables_source all = { .tensors = a->tensors,
					   .boxes = a->boxes,
					   .scales = s->all,
					   .amax = s->amax,
					   .cleared = s->cleared,
					   .measured = s->measured,
					   .blocks = a->blocks,
					   .n_tensors = a->view->n,
					   .n_boxes = a->n_boxes,
					   .n_scales = s->n,
					   .n_amax = s->n_amax,
					   .n_cleared = s->n_cleared,
					   .n_measured = s->n_measured,
					   .n_blocks = a->n_blocks,
					   .delta_room = a->delta_room };

	return tables_take(&a->tables, &all, payer);
}

void assembly_set_delta_room(struct assembly *a, uint64_t bytes)
{
	a->delta_room = bytes;
	tables_free(&a->tables);
}

void assembly_passes(const struct assembly *a, struct making_pass ret[MAKING_PASSES])
{
	const struct assembly_scales none = { .n = 0 }, *s = a->scales ? a->scales : &none;
	const struct tables *t = a->tables.slab ? &a->tables : NULL;

	ret[0] =
		(struct making_pass){ K_ASSEMBLE_CLEAR, t ? t->cleared : s->cleared, s->n_cleared };
	ret[1] = (struct making_pass){ K_ASSEMBLE_MEASURE, t ? t->measured : s->measured,
				       s->n_measured };
	ret[2] = (struct making_pass){ K_ASSEMBLE_MAKE, t ? t->blocks : a->blocks, a->n_blocks };
}

uint64_t assembly_own_bytes(const struct assembly *a)
{
	const struct view *v = a->view;

	return assembly_scales_bytes(a->scales) + sizeof(*a) + sizeof(*v) + v->name_bytes +
	       v->n * (uint64_t)(sizeof(*v->tensors) + sizeof(*a->tensors)) +
	       v->n_boxes * (uint64_t)sizeof(*v->boxes) + a->n_boxes * (uint64_t)sizeof(*a->boxes) +
	       a->n_blocks * (uint64_t)sizeof(*a->blocks) +
	       a->n_units * (uint64_t)sizeof(*a->reads);
}
