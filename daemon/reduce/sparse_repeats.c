/*
 * Rows that one rank names several times. Autograd coalesces a rank's own sparse gradient
 * before the ranks' are added: v1 + v2 is rounded before it meets what the others gave. So such
 * a rank's entries are added to a table of its own first, which has as many rows as it names,
 * and that table's rows to the tensor.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op.h"
#include "reduce/sparse.h"
#include "work/coll.h"

static const struct sparse_repeats *sparse_repeats_of(const struct coll *c, uint32_t member)
{
	return c->ops[member]->owned;
}

/* Return: 0 or -ENOMEM. @slot: of each of the tensor's rows, its number in @r from 1 on. */
static int sparse_repeats_note(struct op *op, uint32_t *slot)
{
	uint64_t n = sparse_args(op)->n;
	struct sparse_repeats *r = malloc(sizeof(*r) + 2 * n * sizeof(int64_t));

	if (!r)
		return -ENOMEM;
	r->n_rows = 0;
	for (uint64_t i = 0; i < n; i++) {
		int64_t row = sparse_args(op)->rows[i];

		if (!slot[row]) {
			r->at[n + r->n_rows] = row;
			slot[row] = (uint32_t)++r->n_rows;
		}
		r->at[i] = slot[row] - 1;
	}
	CHECK(!op->owned);
	if (r->n_rows == n)
		free(r);
	else
		op->owned = r;
	return 0;
}

int sparse_repeats_init(const struct coll *c, uint64_t rows)
{
	int status = 0;

	for (uint32_t i = 0; status == 0 && i < c->n; i++) {
		uint32_t *slot;

		if (sparse_args(c->ops[i])->n < 2)
			continue;
		slot = calloc(rows, sizeof(*slot)); /* touched only where a row is named */
		status = slot ? sparse_repeats_note(c->ops[i], slot) : -ENOMEM;
		free(slot);
	}
	return status;
}

uint64_t sparse_repeats_indices(const struct coll *c)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < c->n; i++)
		n += sparse_repeats_of(c, i) ? sparse_repeats_of(c, i)->n_rows : 0;
	return n;
}

uint64_t sparse_repeats_bytes(const struct coll *c, uint64_t width)
{
	uint64_t most = 0;

	for (uint32_t i = 0; i < c->n; i++)
		if (sparse_repeats_of(c, i) && sparse_repeats_of(c, i)->n_rows > most)
			most = sparse_repeats_of(c, i)->n_rows;
	return most * width * sizeof(float);
}

const struct sparse_repeats *sparse_repeats_now(const struct coll *c, unsigned d)
{
	const struct coll_part *p = &c->parts[d];

	return c->turn < p->n ? sparse_repeats_of(c, p->members[c->turn]) : NULL;
}

/* ------------------------------------------------------------------ its table */

static float *sparse_repeats_table(const struct coll *c, unsigned d)
{
	return region_addr(&c->parts[d].scratch[SPARSE_COALESCED]);
}

enum res sparse_repeats_clear(struct coll *c)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		const struct sparse_repeats *r = sparse_repeats_now(c, d);

		if (r)
			coll_launch(&c->parts[d], LAUNCH_FILL,
				    r->n_rows * sparse_rows_launch(c, d).row_elements)
				->fill = (struct k_fill){ .dst = sparse_repeats_table(c, d),
							  .kind = FILL_CONSTANT };
	}
	return coll_kernels(c);
}

enum res sparse_repeats_fill(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		const struct sparse_repeats *r = sparse_repeats_now(c, d);
		struct k_add_rows a;

		if (!r)
			continue;
		a = sparse_rows_launch(c, d);
		a.out = sparse_repeats_table(c, d);
		a.row_limit = r->n_rows;
		coll_launch(&c->parts[d], LAUNCH_ADD_ROWS, a.row_elements)->add_rows = a;
		w->given[d] += a.n_rows;
	}
	return coll_kernels(c);
}

void sparse_add_coalesced(struct coll *c, unsigned d)
{
	const struct sparse_repeats *r = sparse_repeats_now(c, d);
	struct sparse_work *w = sparse_of(c);
	struct k_add_rows a = sparse_rows_launch(c, d);

	CHECK(r && r->n_rows * a.row_elements * sizeof(float) <=
			   c->parts[d].scratch[SPARSE_COALESCED].bytes);
	a.n_rows = r->n_rows;
	a.values = sparse_repeats_table(c, d);
	a.dtype = DTYPE_FP32;
	a.pre = (struct k_factor){ .how = K_FACTOR_NONE };
	coll_launch(&c->parts[d], LAUNCH_ADD_ROWS, a.row_elements)->add_rows = a;
	w->given[d] += a.n_rows;
}
