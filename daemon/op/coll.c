/* Collectives that run: made when the last member has announced, one for all. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op_impl.h"

#define COLL_MAGIC 0x434f4c4cu

static struct coll *coll_new(struct group *g, struct match_entry *const *entries, uint32_t n)
{
	struct coll *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->ops = calloc(n, sizeof(struct op *));
	c->inputs = calloc(n, sizeof(void *));
	if (!c->ops || !c->inputs) {
		free(c->ops);
		free(c->inputs);
		free(c);
		return NULL;
	}
	c->magic = COLL_MAGIC;
	c->group = g;
	c->job = g->job;
	c->n = n;
	list_init(&c->parked.link);
	for (uint32_t i = 0; i < n; i++)
		c->ops[i] = CONTAINER_OF(entries[i], struct op, entry);
	c->type = c->ops[0]->type;
	c->unit = c->ops[0]->unit;
	return c;
}

static void coll_free(struct coll *c)
{
	c->magic = 0;
	free(c->ops);
	free(c->inputs);
	free(c->kops);
	free(c->partials);
	free(c);
}

static void end_all(struct match_entry *const *entries, uint32_t n, int negative_errno)
{
	for (uint32_t i = 0; i < n; i++) {
		struct op *op = CONTAINER_OF(entries[i], struct op, entry);

		fault_errno(&op->fault, negative_errno, "starting a collective");
		op_end(op);
	}
}

void op_complete(struct match_entry *const *entries, uint32_t n, void *userdata)
{
	struct coll *c = coll_new(userdata, entries, n);

	if (!c) {
		end_all(entries, n, -ENOMEM);
		return;
	}
	for (uint32_t i = 0; i < n; i++)
		op_begin_run(c->ops[i]);
	c->job->running++;
	c->type->run(c);
}

void coll_end(struct coll *c, const struct fault *fault)
{
	struct job *job = c->job;

	MAGIC_CHECK(c, COLL_MAGIC);
	CHECK(job->running > 0);
	job->running--;
	for (uint32_t i = 0; i < c->n; i++) {
		if (fault && fault->code)
			c->ops[i]->fault = *fault;
		op_end(c->ops[i]);
	}
	coll_free(c);
	job_settle(job);
}

void coll_end_status(struct coll *c, int status, const char *what)
{
	struct fault f = FAULT_NULL;

	if (status > 0)
		fault_set(&f, FAULT_ABORTED, NULL, "%s: the engine was aborted", what);
	else
		fault_errno(&f, status, what);
	coll_end(c, &f);
}

bool coll_overtaken(struct coll *c, bool torn_matters)
{
	const struct op *op = c->ops[0];
	struct fault f = FAULT_NULL;

	/* no member can have joined again: its op of the old epoch still runs */
	if (op->m->epoch != c->job->rec->epoch)
		fault_set(&f, FAULT_ABORTED, NULL, "%s", op->m->ended.text);
	else if (torn_matters)
		(void)op_check_not_torn(op, &f);
	if (f.code)
		coll_end(c, &f);
	return f.code;
}

static void on_kernels(struct backend_task *task, int status)
{
	struct coll *c = CONTAINER_OF(task, struct coll, task);

	MAGIC_CHECK(c, COLL_MAGIC);
	if (status)
		coll_end_status(c, status, c->type->name);
	else
		c->next(c);
}

void coll_kernels(struct coll *c, unsigned n, void (*next)(struct coll *c))
{
	c->next = next;
	c->task = (struct backend_task){ .kops = c->kops, .n_kops = n, .done = on_kernels };
	backend_submit(c->job->node->backend, &c->task);
}

static void on_comm(struct comm_op *op, int status)
{
	struct coll *c = CONTAINER_OF(op, struct coll, comm_op);

	MAGIC_CHECK(c, COLL_MAGIC);
	if (status)
		coll_end_status(c, status, c->type->name);
	else
		c->next(c);
}

struct comm_op *coll_comm(struct coll *c, void (*next)(struct coll *c))
{
	c->next = next;
	c->comm_op = (struct comm_op){ .done = on_comm };
	return &c->comm_op;
}

bool coll_need_kops(struct coll *c, size_t n)
{
	free(c->kops);
	c->kops = calloc(n ? n : 1, sizeof(*c->kops));
	if (c->kops)
		return true;
	coll_end_status(c, -ENOMEM, c->type->name); /* and @c is gone */
	return false;
}

uint32_t coll_index(const struct coll *c, uint32_t root)
{
	uint32_t index = 0;

	CHECK(group_index(c->group, root, &index));
	return index;
}
