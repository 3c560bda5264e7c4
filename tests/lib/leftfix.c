#include "leftfix.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/pooled.h"
#include "ownfd.h"

void left_train(struct nodefix *n, struct member **m, struct unit *u, uint64_t step)
{
	struct nodefix_op op[2] = { 0 };

	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(n, m[i], "Reduce", u, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Reduce");
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(n, m[i], &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Step");
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(n, m[i], step, 20 + i, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Commit");
}

/* Rows, frozen and tied tensors, buffers. */
static state_unit *rich_spec(void)
{
	static const uint64_t rows[] = { 5, 2 }, whole = LEFT_ELEMENTS, three = 3;
	state_unit *spec = nodefix_spec("rich", 7);
	state_tensor *frozen = state_tensor_new("frozen", rows, 2);
	state_tensor *tied = state_tensor_new("tied", &whole, 1);
	state_buffer *count = state_buffer_new("count", NULL, 0);
	state_buffer *mean = state_buffer_new("mean", &three, 1);

	frozen->frozen = true;
	count->dtype = BUFFER_INT64;
	mean->dtype = BUFFER_BF16;
	CHECK(state_tensor_set_alias(tied, "u", "weight") == 0);
	CHECK(state_unit_add_tensor(spec, frozen) == 0 && state_unit_add_tensor(spec, tied) == 0);
	CHECK(state_unit_add_buffer(spec, count) == 0 && state_unit_add_buffer(spec, mean) == 0);
	spec->layout = LAYOUT_DIM0;
	return spec;
}

/* Each rank writes its own number. */
static void fill_buffers(struct nodefix *n, struct member **m, struct unit *u)
{
	for (unsigned i = 0; i < 2; i++) {
		struct nodefix_op op = { 0 };

		NODEFIX_OK(nodefix_on_unit(n, m[i], "UnitBuffers", u, &op), &op);
		memset(region_addr(&op.result.place), (int)(i + 1), LEFT_BUFFER_BYTES);
	}
}

void left_keep(struct left *l, struct job *job)
{
	cr_assert_eq(
		state_encode(&job->rec, 1, job->node->devices[0].table->next, &l->bytes, &l->n), 0);
	CHECK(job->mem.n_slabs <= LEFT_MAX_SLABS);
	for (l->n_fds = 0; l->n_fds < job->mem.n_slabs; l->n_fds++)
		l->fds[l->n_fds] = own_fd(job->mem.slabs[l->n_fds]->mem);
}

void left_behind(struct left *l)
{
	static const uint32_t ranks[] = { 1 };
	struct fault f = FAULT_NULL;
	struct nodefix n;
	struct member *m[2];
	struct group *g;
	struct unit *u;
	struct job *job;

	*l = (struct left){ 0 };
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", LEFT_ELEMENTS), m, 2);
	CHECK(job_group(job, "one", ranks, 1, &g, &f) == 0);
	fill_buffers(&n, m, nodefix_register(job, rich_spec()));
	left_train(&n, m, u, 5);
	memcpy(l->params, nodefix_params(u), sizeof(l->params));
	left_keep(l, job);
	nodefix_end(&n);
}

void left_forget(struct left *l)
{
	for (unsigned i = 0; i < l->n_fds; i++)
		fd_close(l->fds[i]);
	free(l->bytes);
}

int left_take_over(struct nodefix *n, const struct left *l, const uint8_t *bytes, size_t len)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	int fds[64];

	if (state_decode(bytes, len, &all, &f)) {
		cr_assert(f.text[0]);
		return (int)f.code;
	}
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		fds[i] = l->fds[i % l->n_fds];
	for (size_t i = 0; i < all->n_jobs && !f.code; i++) {
		struct job *job;

		if (all->jobs[i]->n_slabs + all->jobs[i]->n_pooled <= ARRAY_SIZE(fds) &&
		    job_restore(&n->jobs, all->jobs[i], fds, &job, &f) == 0) {
			pooled_restore(job, fds + job->rec->n_slabs);
			all->jobs[i] = NULL;
		}
	}
	state_free(all);
	cr_assert(!f.code || f.text[0]);
	return (int)f.code;
}
