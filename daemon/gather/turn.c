#include "gather/turn.h"

#include <errno.h>
#include <stdlib.h>

#include "copies/full.h"
#include "core/check.h"
#include "job/line.h"
#include "job/mesh.h"
#include "job/span.h"
#include "step/apply.h"

/* One copy, from its start to its end: the operations between nodes of the next one come behind it. */
struct turn {
	struct line_item line;
	struct waiter waiter;
	struct job *job;
	struct unit *unit;
	uint64_t epoch;
	uint64_t position, place; /* of the order */
	bool has_begun;
};

bool turn_is_needed(const struct job *job, const struct unit *u)
{
	const struct group *g = job->groups[u->rec->group];

	if (u->spread == 1 || !group_spans(g))
		return false;
	return !mesh_is_needed(u) || mesh_crosses(g, u);
}

void turn_asked(struct job *job, struct unit *u)
{
	if (u->turns.asked || !u->turns.n || !(u->turns.in_line || unit_is_copying(u)))
		return;
	u->turns.asked = true;
	if (job->jobs->ops.asked)
		job->jobs->ops.asked(job, u, u->turns.n);
}

void turn_want(struct job *job, struct unit *u)
{
	if (u->turns.wanted || u->turns.in_line) /* that copy will do */
		return;
	u->turns.wanted = true;
	job->jobs->ops.want(job, u, u->turns.n + 1);
}

/* An epoch of other nodes is over before its number is: they do not take part any more. */
static bool turn_epoch_is_over(const struct turn *t)
{
	return t->epoch != t->job->rec->epoch || t->job->across.span->over;
}

static void turn_end(struct turn *t)
{
	struct job *job = t->job;

	t->unit->turns.in_line -= !t->has_begun;
	waiter_leave(&t->waiter);
	line_leave(&t->line);
	if (!turn_epoch_is_over(t))
		job->jobs->ops.made(job, t->position);
	free(t);
	job_ran(job);
}

/* Other nodes wait for this one's part of it. */
static void turn_give_up(struct turn *t, const struct fault *f)
{
	struct fault told = FAULT_NULL;
	char node[JOB_ON_NODE_BYTES];

	fault_set(&told, FAULT_ABORTED, NULL, "unit '%.100s' cannot be gathered%s: %.300s",
		  t->unit->rec->name, job_on_node(t->job, node), f->text);
	job_epoch_end(t->job, &told);
}

/* Return: RES_WAIT: @t->waiter is resumed. RES_FAILED: with @f. */
static enum res turn_tick(struct turn *t, struct fault *f)
{
	struct unit *u = t->unit;

	if (t->has_begun) {
		if (!unit_is_copying(u))
			return RES_DONE;
		condition_wait(&t->job->node->changed, &t->waiter);
		return RES_WAIT;
	}
	RES_TRY(apply_wait_step(t->job, &t->waiter));
	if (turn_epoch_is_over(t))
		return RES_DONE;
	if (u->step == UNIT_STEP_DUE || u->step == UNIT_STEP_STEPPING || u->shards_left ||
	    u->shard_writes) {
		condition_wait(&u->step_done, &t->waiter);
		return RES_WAIT;
	}
	if (unit_is_copying(u) || !full_may_begin(t->job)) {
		condition_wait(&t->job->node->changed, &t->waiter);
		return RES_WAIT;
	}
	switch (full_begin_together(t->job, u, t->place, f)) {
	case RES_DONE:
		t->has_begun = true;
		u->turns.in_line--;
		condition_wait(&t->job->node->changed, &t->waiter);
		return RES_WAIT;
	case RES_WAIT:
		condition_wait(&t->job->node->changed, &t->waiter);
		return RES_WAIT;
	case RES_FAILED:
		break;
	}
	return RES_FAILED;
}

static void turn_go_on(struct turn *t)
{
	struct fault f = FAULT_NULL;
	enum res r;

	if (turn_epoch_is_over(t) && !t->has_begun) {
		turn_end(t);
		return;
	}
	r = turn_tick(t, &f);
	if (r == RES_WAIT)
		return;
	if (r == RES_FAILED && !turn_epoch_is_over(t))
		turn_give_up(t, &f);
	turn_end(t);
}

static void turn_resume(struct waiter *w)
{
	turn_go_on(CONTAINER_OF(w, struct turn, waiter));
}

static void turn_on_line(struct line_item *i)
{
	struct turn *t = CONTAINER_OF(i, struct turn, line);

	if (list_empty(&t->waiter.link))
		turn_go_on(t);
}

int turn_start(struct job *job, struct unit *u, uint64_t position, uint64_t place)
{
	struct turn *t = calloc(1, sizeof(*t));

	if (!t)
		return -ENOMEM;
	u->turns.n++;
	u->turns.in_line++;
	u->turns.asked = u->turns.wanted;
	u->turns.wanted = false;
	t->job = job;
	t->unit = u;
	t->epoch = job->rec->epoch;
	t->position = position;
	t->place = place;
	line_item_init(&t->line);
	waiter_init(&t->waiter, turn_resume);
	job->running++; /* until turn_end */
	line_enter(&t->line, job, true, turn_on_line);
	return 0;
}
