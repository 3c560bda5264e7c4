#include "unitio/registered.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op.h"
#include "unit/runs.h"
#include "shardd.pb-c.h"

/* Messages and the pointers to them, in one array each. */
static int registered_make_arrays(struct registered *r, const struct unit *u)
{
	r->tensors = calloc(u->rec->n_tensors, sizeof(*r->tensors));
	r->buffers = calloc(u->rec->n_buffers + 1, sizeof(*r->buffers));
	r->unit.tensors = calloc(u->rec->n_tensors, sizeof(*r->unit.tensors));
	r->unit.buffers = calloc(u->rec->n_buffers + 1, sizeof(*r->unit.buffers));
	return r->tensors && r->buffers && r->unit.tensors && r->unit.buffers ? 0 : -ENOMEM;
}

void registered_tensor(const struct job *job, const struct unit *u, uint32_t i, uint32_t rank,
		       Shardd__V1__TensorPlace *p)
{
	const struct unit_tensor *t = &u->tensors[i];
	const struct unit *of = t->alias ? job->units[t->of_unit - 1] : u;
	uint32_t at = t->alias ? t->of : i, index;
	struct unit_run run = { 0 };

	CHECK(at < of->rec->n_tensors && !of->tensors[at].alias); /* resolved at registration */
	shardd__v1__tensor_place__init(p);
	p->unit = of->id;
	p->offset = unit_tensor_full(of, &of->tensors[at]);
	p->elements = of->tensors[at].elements;
	if (!group_index(job->groups[of->rec->group], rank, &index))
		return;
	unit_rank_run(of, index, at, &run);
	p->shard_offset = run.shard;
	p->shard_elements = run.n;
}

void registered_unit(const struct unit *u, Shardd__V1__RegisteredUnit *m)
{
	shardd__v1__registered_unit__init(m);
	m->unit = u->id;
	m->elements = unit_full_elements(u);
	m->shard_elements = u->layout.shard_elements + u->layout.frozen_shard;
	m->gradient_elements = u->layout.elements;
	m->packed_elements = u->packed;
	m->initialised = u->rec->initialised && !u->torn;
	m->optimizer_steps = u->rec->optimizer->steps;
}

void registered_buffer(const struct unit *u, size_t i, const Shardd__V1__BufferPlace *before,
		       Shardd__V1__BufferPlace *p)
{
	shardd__v1__buffer_place__init(p);
	p->bytes = unit_buffer_bytes(u->rec->buffers[i]);
	p->offset = before ? unit_buffer_next(u->rec, i - 1, before->offset) : 0;
}

int registered_init(struct registered *r, const struct job *job, const struct unit *u,
		    uint32_t rank)
{
	*r = (struct registered){ 0 };
	registered_unit(u, &r->unit);
	if (registered_make_arrays(r, u) < 0)
		return -ENOMEM;
	r->unit.n_tensors = u->rec->n_tensors;
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		r->unit.tensors[i] = &r->tensors[i];
		registered_tensor(job, u, i, rank, &r->tensors[i]);
	}
	r->unit.n_buffers = u->rec->n_buffers;
	for (size_t i = 0; i < u->rec->n_buffers; i++) {
		r->unit.buffers[i] = &r->buffers[i];
		registered_buffer(u, i, i ? &r->buffers[i - 1] : NULL, &r->buffers[i]);
	}
	return 0;
}

void registered_deinit(struct registered *r)
{
	free(r->tensors);
	free(r->buffers);
	free(r->unit.tensors);
	free(r->unit.buffers);
	*r = (struct registered){ 0 };
}
