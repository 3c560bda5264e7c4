#include "unitio/writes.h"

#include <errno.h>
#include <stdlib.h>

#include "copies/full.h"
#include "copies/hold.h"
#include "core/check.h"
#include "core/fnv.h"
#include "job/across_write.h"
#include "job/position.h"
#include "job/span.h"
#include "op/op_run.h"

static uint64_t writes_key(const struct unit *u, uint32_t rank)
{
	return fnv_add(fnv_add(fnv_add_text(FNV_BEGIN, "CopyShard"), u->key), rank);
}

static struct across_write *writes_find(const struct job *job, uint64_t key, uint64_t number)
{
	struct across_write *w, *tmp;

	list_for_each (w, tmp, (struct list *)&job->across.writes, link)
		if (w->key == key && w->number == number)
			return w;
	return NULL;
}

static struct across_write *writes_of(const struct op *op)
{
	struct across_write *w, *tmp;

	list_for_each (w, tmp, &op->m->job->across.writes, link)
		if (w->op == op)
			return w;
	return NULL;
}

static int writes_new(struct job *job, struct unit *u, uint32_t rank, uint64_t number,
		      struct across_write **ret)
{
	struct across_write *w = calloc(1, sizeof(*w));

	if (!w)
		return -ENOMEM;
	w->unit = u;
	w->rank = rank;
	w->key = writes_key(u, rank);
	w->number = number;
	w->state = WRITES_ASKED;
	list_init(&w->link);
	list_append(&job->across.writes, &w->link);
	u->shard_writes++; /* nobody here gathers it from here on */
	*ret = w;
	return 0;
}

/* Gathers of ranks here go on. */
static void writes_let_go(struct across_write *w)
{
	struct unit *u = w->unit;

	CHECK(u->shard_writes > 0);
	list_unlink(&w->link);
	free(w);
	if (!--u->shard_writes)
		condition_signal(&u->step_done);
}

/* ------------------------------------------------------------------ the rank's node */

static enum res writes_ask(struct op *op, struct fault *f)
{
	struct job *job = op->m->job;
	struct across_write *w;
	int r = writes_new(job, op->unit, op->m->rank, ++job->across.n_writes, &w);

	if (r < 0)
		return res_of(fault_errno(f, r, "writing a shard"));
	w->op = op;
	condition_init(&w->known, "the other nodes, which must not have the unit gathered");
	job->jobs->ops.writes(job, w);
	return op_wait(op, &w->known);
}

enum res writes_allow(struct op *op, struct fault *f)
{
	struct across_write *w = writes_of(op);

	if (!w)
		return writes_ask(op, f);
	switch ((enum writes_state)w->state) {
	case WRITES_ASKED:
		return op_wait(op, &w->known);
	case WRITES_ALLOWED:
		return RES_DONE;
	case WRITES_REFUSED:
		*f = w->fault;
		return RES_FAILED;
	case WRITES_NONE:
		break;
	}
	CHECK_NOT_REACHED();
}

void writes_end(struct op *op)
{
	struct across_write *w = writes_of(op);

	if (!w)
		return;
	w->op = NULL;
	if (op->m->epoch == op->m->job->rec->epoch && op->m->job->across.span->over)
		return; /* across_writes_end: the epoch is ending, and nothing goes on meanwhile */
	if (w->state != WRITES_ASKED || op->m->epoch != op->m->job->rec->epoch)
		writes_let_go(w);
	/* else its entry starts or fails */
}

/* ------------------------------------------------------------------------ all nodes */

/* Do ranks here have its parameters of before the write, or will they? Return: 0 or a fault code. */
static int writes_check_here(struct job *job, struct unit *u, struct fault *f)
{
	char node[JOB_ON_NODE_BYTES];

	hold_drop(job, u);
	if (u->gathered_ranks)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is still gathered by %u ranks%s: release it before "
				 "its parameters are written",
				 u->rec->name, u->gathered_ranks, job_on_node(job, node));
	if (!condition_is_idle(&u->cast_done))
		return fault_set(f, FAULT_STATE, NULL,
				 "ranks%s wait for unit '%.100s' to be gathered: release it before "
				 "its parameters are written",
				 job_on_node(job, node), u->rec->name);
	return 0;
}

void writes_asked_elsewhere(struct job *job, struct unit *u, uint32_t rank, uint64_t number)
{
	struct across_write *w;
	struct fault f = FAULT_NULL;

	if (writes_new(job, u, rank, number, &w) < 0) {
		fault_set(&f, FAULT_ABORTED, NULL,
			  "there is no memory to let rank %u write parameters of job '%s'", rank,
			  job->rec->name);
		job_epoch_end(job, &f);
		return;
	}
	if (writes_check_here(job, u, &f) == 0) {
		job->jobs->ops.write_allowed(job, w);
		return;
	}
	job->jobs->ops.write_refused(job, w, &f);
}

bool writes_start(struct job *job, uint64_t key, uint64_t number)
{
	struct across_write *w = writes_find(job, key, number);

	if (!w)
		return false;
	CHECK(w->state == WRITES_ASKED);
	w->state = WRITES_ALLOWED;
	w->unit->version++; /* copies that are being made are of the one before */
	full_invalidate(job, w->unit);
	readers_rewrite(job);
	position_altered(job);
	if (w->op)
		condition_signal(&w->known);
	else
		writes_let_go(w);
	return true;
}

bool writes_fail(struct job *job, uint64_t key, uint64_t number, const struct fault *f)
{
	struct across_write *w = writes_find(job, key, number);

	if (!w)
		return false;
	w->state = WRITES_REFUSED;
	w->fault = *f;
	if (w->op)
		condition_signal(&w->known);
	else
		writes_let_go(w);
	return true;
}
