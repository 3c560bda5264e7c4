#include "cluster/round.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "checkpoint/folder.h"
#include "checkpoint/place.h"
#include "core/check.h"
#include "core/clock.h"
#include "job/loading.h"
#include "job/replica.h"
#include "job/saving.h"

#define NOW   SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_NOW
#define NEXT  SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_NEXT
#define SEE   SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_SEE
#define WRITE SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_WRITE
#define OPEN  SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_OPEN
#define READ  SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_READ
#define COPY  SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_COPY
/* The leader alone. */
#define ROUND_COMPLETE 8

#define ROUND_TRIES       3u
#define ROUND_PROGRESS_US 1000000u
#define ROUND_SECOND_US   UINT64_C(1000000)

static const struct {
	const char *doing;
	unsigned limit_s; /* without news of a node; 0: none */
	bool collects;    /* the faults of all nodes */
	bool leads;       /* the leader is the first one */
} round_phases[] = {
	[NOW] = { "say whether their parameters are those of the last commit", 10, false, false },
	[NEXT] = { "come to the next commit", 0, false, false },
	[SEE] = { "find the folder", 60, true, true },
	[WRITE] = { "write their parts", 300, false, false },
	[OPEN] = { "find the checkpoint", 120, true, true },
	[READ] = { "read the checkpoint", 300, false, false },
	[COPY] = { "take copies of each other's parts", 300, false, false },
	[ROUND_COMPLETE] = { "complete it", 0, false, false },
};

/* -------------------------------------------------------------------------- its beginning */

static struct round *round_new(struct job *job, const struct round_options *o, const char *path)
{
	struct round *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	list_init(&r->link);
	r->ops = o->ops;
	r->job = job;
	r->id = o->id;
	r->loads = o->loads;
	r->n = o->n;
	r->self = o->self;
	r->leader = o->leader;
	r->deadline_us = UINT64_MAX;
	r->since_us = clock_now_us();
	r->path = strdup(path);
	return r->path ? r : round_free(r);
}

static struct round *round_of(struct job *job, const struct round_options *o)
{
	struct round *r = round_new(job, o, o->loads ? o->load->path : o->save->path);

	if (!r)
		return NULL;
	r->asked = o->asked;
	if (o->loads) {
		r->has_step = o->load->has_step;
		r->step = o->load->step;
		return r;
	}
	r->bytes_per_s = o->save->bytes_per_s;
	r->keep = o->save->keep;
	r->memory = o->save->memory;
	r->next = o->save->next;
	r->deadline_us = o->save->deadline_us;
	return r;
}

struct round *round_lead(struct job *job, const struct round_options *o,
			 char (*names)[SPAN_NAME_BYTES], uint64_t owner)
{
	struct round *r = round_of(job, o);

	if (!r)
		return NULL;
	r->leads = true;
	r->state = ROUND_RUNS;
	r->owner = owner;
	r->names = calloc(o->n, sizeof(*r->names));
	r->nodes = calloc(o->n, sizeof(*r->nodes));
	if (!r->names || !r->nodes || getrandom(&r->nonce, sizeof(r->nonce), 0) != sizeof(r->nonce))
		return round_free(r);
	memcpy(r->names, names, o->n * sizeof(*names));
	return r;
}

struct round *round_free(struct round *r)
{
	if (!r)
		return NULL;
	free(r->names);
	free(r->nodes);
	free(r->path);
	free(r);
	return NULL;
}

static const char *round_name(const struct round *r, unsigned node)
{
	return r->names ? r->names[node] : r->job->across.span->nodes[node].name;
}

/* ---------------------------------------------------------------------------- its end */

/* Here: the part ends, if there is one. */
static void round_over(struct round *r, uint64_t bytes, const struct fault *f)
{
	bool part = r->begun || r->asked;

	CHECK(r->state != ROUND_OVER);
	r->state = ROUND_OVER;
	if (r->holds &&
	    (f || !r->pauses)) /* else the owner ends the epoch, or lets commits go on */
		r->ops->hold(r, false);
	r->holds = false;
	r->ops->over(r, f);
	if (r->memory && !f)
		replica_completed(r->job, r->step, r->layout);
	if (part && r->loads)
		loading_part_end(r->job, bytes, f);
	else if (r->saving)
		saving_part_end(r->saving, bytes, f);
	else if (part)
		saving_part_refuse(r->job, f);
	r->saving = NULL;
}

void round_end_here(struct round *r, const struct fault *f)
{
	if (r->state != ROUND_OVER)
		round_over(r, 0, f);
}

static void round_send_end(struct round *r, unsigned node, uint64_t bytes, const struct fault *f)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRoundEnd end = SHARDD__V1__JOB_ROUND_END__INIT;

	end.id = r->id;
	end.code = f ? f->code : 0;
	end.text = (char *)(f ? f->text : "");
	end.bytes = bytes;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ROUND_END;
	m.round_end = &end;
	r->ops->send(r, node, &m);
}

/* On all nodes. */
static void round_end(struct round *r, uint64_t bytes, const struct fault *f)
{
	for (unsigned i = 0; i < r->n; i++)
		if (i != r->self)
			round_send_end(r, i, bytes, f);
	round_over(r, bytes, f);
}

static void round_fail(struct round *r, struct fault *f)
{
	if (!r->loads && !r->memory &&
	    (r->what == SEE || r->what == WRITE || r->what == ROUND_COMPLETE))
		place_tell(f, r->path, r->step);
	round_end(r, 0, f);
}

/* --------------------------------------------------------------------- what a node does */

static void round_on_part(struct round *r, const struct saving_answer *a);

static void round_on_saving(struct job *job, const struct saving_answer *a, void *userdata)
{
	(void)job;
	round_on_part(userdata, a);
}

static void round_on_loading(struct job *job, const struct loading_answer *a, void *userdata)
{
	const struct saving_answer same = {
		.f = a->f, .step = a->step, .bytes = a->bytes, .crc = a->crc
	};

	(void)job;
	round_on_part(userdata, &same);
}

static void round_part_failed(struct round *r, const struct fault *f)
{
	round_on_part(r, &(struct saving_answer){ .f = f });
}

static int round_begin_saving(struct round *r, struct fault *f)
{
	struct saving_options o = { .path = r->path,
				    .bytes_per_s = r->bytes_per_s,
				    .deadline_us = UINT64_MAX,
				    .keep = r->keep,
				    .memory = r->memory };

	if (!r->begun && r->memory) {
		o.layout = r->layout = replica_layout(r->job, r->id);
		o.epoch = r->job->rec->epoch;
	}
	if (!r->begun)
		r->saving = saving_part_begin(r->job, &o, r->self, r->n, round_on_saving, r, f);
	if (!r->saving)
		return f->code;
	r->begun = true;
	return 0;
}

/* @has_step, @step: the last commit. */
static void round_freeze(struct round *r, bool has_step, uint64_t step)
{
	const struct saving_freeze_how how = { .now = r->what == NOW,
					       .has_after = has_step,
					       .after = step,
					       .deadline_us = UINT64_MAX };
	struct fault f = FAULT_NULL;

	if (round_begin_saving(r, &f) == 0) {
		saving_part_freeze(r->saving, &how);
		return;
	}
	round_part_failed(r, &f);
	if (!r->leads && r->state != ROUND_OVER) /* nothing here keeps its job */
		round_over(r, 0, &f);
}

static void round_open(struct round *r)
{
	const struct loading_options o = { .path = r->path,
					   .has_step = r->has_step,
					   .step = r->step };
	struct fault f = FAULT_NULL;

	r->begun = true;
	if (loading_part_open(r->job, &o, round_on_loading, r, &f) == 0)
		return;
	r->begun = false;
	round_part_failed(r, &f);
}

/* ------------------------------------------------------------------------- the leader */

/* The node whose part @node takes a copy of. */
static unsigned round_before(const struct round *r, unsigned node)
{
	return node ? node - 1 : r->n - 1;
}

static void round_fill_phase(struct round *r, unsigned node, bool has_step, uint64_t step,
			     Shardd__V1__JobRoundPhase *ret)
{
	ret->id = r->id;
	ret->what = (Shardd__V1__JobRoundWhat)r->what;
	ret->self = node;
	ret->nodes = r->n;
	ret->has_step = has_step;
	ret->step = step;
	ret->name = (char *)(r->what == SEE ? saving_part_name(r->saving) : "");
	ret->nonce = r->nonce;
	ret->plan->loads = r->loads;
	ret->plan->path = r->path;
	ret->plan->has_step = r->has_step;
	ret->plan->step = r->step;
	ret->plan->bytes_per_s = r->bytes_per_s;
	ret->plan->keep = r->keep;
	ret->plan->memory = r->memory;
	ret->bytes = r->nodes[round_before(r, node)].part_bytes;
	ret->tail = r->nodes[round_before(r, node)].part_tail;
}

/* All but this node. */
static void round_send_phase(struct round *r, bool has_step, uint64_t step)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRoundPhase phase = SHARDD__V1__JOB_ROUND_PHASE__INIT;
	Shardd__V1__JobRoundPlan plan = SHARDD__V1__JOB_ROUND_PLAN__INIT;

	phase.plan = &plan;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ROUND_PHASE;
	m.round_phase = &phase;
	for (unsigned i = 0; i < r->n; i++) {
		if (i == r->self)
			continue;
		round_fill_phase(r, i, has_step, step, &phase);
		r->nodes[i].entered = true;
		r->nodes[i].news_us = clock_now_us();
		r->ops->send(r, i, &m);
	}
}

/* @bytes, @tail: COPY: of the part. */
static void round_enter_here(struct round *r, bool has_step, uint64_t step, uint64_t bytes,
			     uint64_t tail)
{
	switch (r->what) {
	case NOW:
	case NEXT:
		round_freeze(r, has_step, step);
		return;
	case SEE:
		saving_part_make(r->saving, r->owner, r->nonce);
		return;
	case WRITE:
		saving_part_write(r->saving);
		return;
	case COPY:
		r->ops->copy(r, round_before(r, r->self), bytes, tail);
		return;
	case OPEN:
		round_open(r);
		return;
	case READ:
		loading_part_read(r->job);
		return;
	default:
		CHECK_NOT_REACHED();
	}
}

static void round_enter(struct round *r, uint8_t what)
{
	const struct round_node *before;
	bool freezes = what == NOW || what == NEXT, has_step = false;
	uint64_t step = 0;

	r->what = what;
	r->later = false;
	r->since_us = clock_now_us();
	for (unsigned i = 0; i < r->n; i++)
		r->nodes[i] = (struct round_node){ .part_bytes = r->nodes[i].bytes,
						   .part_tail = r->nodes[i].tail };
	if (freezes)
		r->has_after = has_step = r->ops->last(r, &step);
	r->after = step;
	if (what == NOW && !r->holds) {
		r->holds = true;
		r->ops->hold(r, true);
	}
	if (!round_phases[what].leads)
		round_send_phase(r, has_step, step);
	r->nodes[r->self].entered = true;
	r->nodes[r->self].news_us = clock_now_us();
	before = &r->nodes[round_before(r, r->self)];
	round_enter_here(r, has_step, step, before->part_bytes, before->part_tail);
}

void round_begin(struct round *r)
{
	round_enter(r, r->loads ? OPEN : r->next ? NEXT : NOW);
}

static bool round_all_answered(const struct round *r)
{
	for (unsigned i = 0; i < r->n; i++)
		if (!r->nodes[i].answered)
			return false;
	return true;
}

/* Return: a node that has another checkpoint, or is at another commit, than this one; n: none. */
static unsigned round_differs(const struct round *r)
{
	const struct round_node *own = &r->nodes[r->self];

	for (unsigned i = 0; i < r->n; i++)
		if (r->nodes[i].step != own->step ||
		    (r->what == OPEN && r->nodes[i].crc != own->crc))
			return i;
	return r->n;
}

static void round_fail_differing(struct round *r, unsigned node)
{
	const struct round_node *x = &r->nodes[r->self], *y = &r->nodes[node];
	struct fault f = FAULT_NULL;

	if (r->what == OPEN)
		fault_set(&f, FAULT_STATE, NULL,
			  "the nodes of job '%s' find different checkpoints of step %llu in "
			  "'%.160s': its index has checksum %08x on node %s and %08x on node %s: "
			  "checkpoint_roots must be a file system that all nodes see",
			  r->job->rec->name, (unsigned long long)r->step, r->path, x->crc,
			  round_name(r, r->self), y->crc, round_name(r, node));
	else
		fault_set(&f, FAULT_INTERNAL, NULL,
			  "the nodes of job '%s' are not at the same commit: node %s is at step "
			  "%llu, node %s at step %llu",
			  r->job->rec->name, round_name(r, r->self), (unsigned long long)x->step,
			  round_name(r, node), (unsigned long long)y->step);
	round_fail(r, &f);
}

/* The nodes do not stand still at a commit, and there is nobody to make the next one. */
static void round_fail_left(struct round *r)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_STATE, NULL,
		  "no rank of job '%s' is joined: nothing commits what it has since its last "
		  "commit. Start its ranks, and save when they have committed",
		  r->job->rec->name);
	round_fail(r, &f);
}

static void round_go_on_frozen(struct round *r)
{
	unsigned differs = round_differs(r);
	bool now = r->what == NOW;

	if ((r->later || differs < r->n) && r->ops->left(r)) {
		round_fail_left(r);
		return;
	}
	if (differs < r->n && !now && ++r->tries >= ROUND_TRIES) {
		round_fail_differing(r, differs);
		return;
	}
	if (r->later || differs < r->n) {
		round_enter(r, NEXT);
	} else {
		r->step = r->nodes[r->self].step;
		round_enter(r, r->memory ? WRITE : SEE);
	}
	if (r->pauses && !r->holds && r->state != ROUND_OVER) {
		r->holds = true;
		r->ops->hold(r, true);
	}
	if (r->holds && !r->pauses && r->state != ROUND_OVER) {
		r->holds = false;
		r->ops->hold(r, false);
	}
}

static void round_complete(struct round *r)
{
	uint32_t *crcs = calloc(r->n, sizeof(*crcs));
	struct fault f = FAULT_NULL;

	if (!crcs) {
		fault_set(&f, FAULT_EXHAUSTED, NULL, "there is no memory to complete it");
		round_fail(r, &f);
		return;
	}
	for (unsigned i = 0; i < r->n; i++)
		crcs[i] = r->nodes[i].crc;
	r->what = ROUND_COMPLETE;
	r->since_us = clock_now_us();
	saving_part_complete(r->saving, crcs);
	free(crcs);
}

static uint64_t round_bytes(const struct round *r)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < r->n; i++)
		bytes += r->nodes[i].bytes;
	return bytes;
}

/* All have answered. */
static void round_go_on(struct round *r)
{
	unsigned differs;

	switch (r->what) {
	case NOW:
	case NEXT:
		round_go_on_frozen(r);
		return;
	case SEE:
		round_enter(r, WRITE);
		return;
	case WRITE:
		if (!r->memory)
			round_complete(r);
		else if (r->n == 1) /* there is nobody to copy from */
			round_end(r, round_bytes(r), NULL);
		else
			round_enter(r, COPY);
		return;
	case OPEN:
		differs = round_differs(r);
		if (differs < r->n)
			round_fail_differing(r, differs);
		else
			round_enter(r, READ);
		return;
	case READ:
	case COPY:
		round_end(r, round_bytes(r), NULL);
		return;
	default:
		CHECK_NOT_REACHED();
	}
}

/* "node b: ...; node c: ..." */
static void round_add_fault(struct round *r, unsigned node, const struct fault *f)
{
	struct fault *all = &r->fault;
	size_t at;

	if (!all->code) {
		*all = *f;
		snprintf(all->text, sizeof(all->text), "node %s: %.400s", round_name(r, node),
			 f->text);
		return;
	}
	at = strlen(all->text);
	snprintf(all->text + at, sizeof(all->text) - at, "; node %s: %s", round_name(r, node),
		 f->text);
}

static void round_fail_phase(struct round *r)
{
	struct fault f = r->fault;

	if (r->what == SEE && *saving_part_name(r->saving)) /* this node has made it */
		snprintf(f.text, sizeof(f.text),
			 "all nodes of the job must see the same folder (a shared file system), "
			 "and these do not: %.380s",
			 r->fault.text);
	round_fail(r, &f);
}

/* @node has answered. */
static void round_take(struct round *r, unsigned node, const struct saving_answer *a)
{
	struct round_node *from = &r->nodes[node];

	if (a->f)
		round_add_fault(r, node, a->f);
	from->answered = true;
	from->step = a->step;
	from->bytes = a->bytes;
	from->tail = a->tail;
	from->crc = a->crc;
	r->later = r->later || a->later;
	if (r->fault.code && (!round_phases[r->what].collects || node == r->self)) {
		round_fail_phase(r);
		return;
	}
	if (round_phases[r->what].leads && node == r->self) {
		if (r->what == OPEN)
			r->step = a->step, r->has_step = true;
		round_send_phase(r, false, 0);
	}
	if (!round_all_answered(r))
		return;
	if (r->fault.code)
		round_fail_phase(r);
	else
		round_go_on(r);
}

static void round_send_answer(struct round *r, const struct saving_answer *a, bool progress)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRoundAnswer answer = SHARDD__V1__JOB_ROUND_ANSWER__INIT;

	answer.id = r->id;
	answer.what = (Shardd__V1__JobRoundWhat)r->what;
	answer.progress = progress;
	answer.later = a->later;
	answer.step = a->step;
	answer.bytes = a->bytes;
	answer.tail = a->tail;
	answer.crc = a->crc;
	answer.code = a->f ? a->f->code : 0;
	answer.text = (char *)(a->f ? a->f->text : "");
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER;
	m.round_answer = &answer;
	r->ops->send(r, r->leader, &m);
}

/* Of a node that follows: it has all that it should have, once it has done that. */
static uint8_t round_last_phase(const struct round *r)
{
	if (r->loads)
		return READ;
	return r->memory ? COPY : WRITE;
}

/* This node's part of the phase is over. */
static void round_on_part(struct round *r, const struct saving_answer *a)
{
	if (r->state == ROUND_OVER)
		return;
	r->busy = false;
	if (r->what == NOW || r->what == NEXT)
		r->step = a->f || a->later ? r->step : a->step;
	if (!r->leads) {
		r->did = r->did || (r->what == round_last_phase(r) && !a->f);
		round_send_answer(r, a, false);
	} else if (r->what != ROUND_COMPLETE) {
		round_take(r, r->self, a);
	} else if (a->f) {
		struct fault f = *a->f;

		round_fail(r, &f);
	} else {
		round_end(r, a->bytes, NULL);
	}
}

static void round_take_fault(const Shardd__V1__JobRoundAnswer *m, struct fault *ret)
{
	if (m->code)
		fault_set(ret, m->code < _FAULT_N ? m->code : FAULT_INTERNAL, NULL, "%.500s",
			  m->text);
}

void round_on_answer(struct round *r, unsigned node, const Shardd__V1__JobRoundAnswer *m)
{
	struct fault f = FAULT_NULL;
	struct round_node *from;

	if (!r->leads || r->state != ROUND_RUNS || node >= r->n || node == r->self)
		return;
	from = &r->nodes[node];
	if ((uint8_t)m->what != r->what || !from->entered || from->answered)
		return;
	if (m->progress) {
		if (m->bytes > from->bytes)
			from->news_us = clock_now_us();
		from->bytes = m->bytes;
		return;
	}
	round_take_fault(m, &f);
	round_take(r, node,
		   &(struct saving_answer){ .f = f.code ? &f : NULL,
					    .later = m->later,
					    .step = m->step,
					    .bytes = m->bytes,
					    .tail = m->tail,
					    .crc = m->crc });
}

/* --------------------------------------------------------------------------- the others */

static void round_fill_plan(const struct round *r, Shardd__V1__JobRoundPlan *ret)
{
	ret->loads = r->loads;
	ret->path = r->path;
	ret->has_step = r->has_step;
	ret->step = r->step;
	ret->bytes_per_s = r->bytes_per_s;
	ret->keep = r->keep;
	ret->memory = r->memory;
}

struct round *round_new_asked(struct job *job, const struct round_options *o)
{
	struct round *r = round_of(job, o);

	if (r)
		r->state = ROUND_ASKED;
	return r;
}

void round_ask(struct round *r)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRoundAsk ask = SHARDD__V1__JOB_ROUND_ASK__INIT;
	Shardd__V1__JobRoundPlan plan = SHARDD__V1__JOB_ROUND_PLAN__INIT;
	uint64_t now = clock_now_us();

	round_fill_plan(r, &plan);
	ask.id = r->id;
	ask.plan = &plan;
	if (r->deadline_us != UINT64_MAX)
		ask.timeout_ms = r->deadline_us > now ? (r->deadline_us - now) / 1000 + 1 : 1;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ASK;
	m.round_ask = &ask;
	r->ops->send(r, r->leader, &m);
}

struct round *round_follow(struct job *job, const struct round_ops *ops, unsigned leader,
			   const Shardd__V1__JobRoundPhase *m)
{
	const struct round_options o = { .ops = ops,
					 .id = m->id,
					 .loads = m->plan->loads,
					 .n = m->nodes,
					 .self = m->self,
					 .leader = leader };
	struct round *r = round_new(job, &o, m->plan->path);

	if (r)
		r->memory = m->plan->memory;
	return r;
}

void round_decline(const Shardd__V1__JobRoundPhase *m, const struct fault *f,
		   Shardd__V1__JobRoundAnswer *ret)
{
	ret->id = m->id;
	ret->what = m->what;
	ret->code = f->code;
	ret->text = (char *)f->text;
}

/* May this phase follow the one before? */
static bool round_may_enter(const struct round *r, uint8_t what)
{
	if (r->busy)
		return false;
	switch (what) {
	case NOW:
		return !r->loads && r->state == ROUND_ASKED;
	case NEXT:
		return !r->loads && (r->state == ROUND_ASKED || r->what == NOW || r->what == NEXT);
	case SEE:
		return r->begun && !r->memory && (r->what == NOW || r->what == NEXT);
	case WRITE:
		return r->begun && r->what == (r->memory ? NEXT : SEE);
	case COPY:
		return r->begun && r->memory && r->what == WRITE;
	case OPEN:
		return r->loads && r->state == ROUND_ASKED;
	case READ:
		return r->begun && r->what == OPEN;
	default:
		return false;
	}
}

static void round_take_plan(struct round *r, const Shardd__V1__JobRoundPhase *m)
{
	r->self = m->self;
	r->n = m->nodes;
	r->bytes_per_s = m->plan->bytes_per_s;
	r->keep = m->plan->keep;
	if (r->loads) {
		r->has_step = m->plan->has_step;
		r->step = m->plan->step;
	}
}

void round_on_phase(struct round *r, const Shardd__V1__JobRoundPhase *m)
{
	uint8_t what = (uint8_t)m->what;

	if (r->leads || r->state == ROUND_OVER || !round_may_enter(r, what))
		return;
	if ((what == NOW || what == NEXT || what == OPEN) && m->plan)
		round_take_plan(r, m);
	r->state = ROUND_RUNS;
	r->what = what;
	r->busy = true;
	r->since_us = clock_now_us();
	if (what == SEE)
		saving_part_see(r->saving, m->name, m->nonce);
	else
		round_enter_here(r, m->has_step, m->step, m->bytes, m->tail);
}

void round_copied(struct round *r, uint64_t bytes, const struct fault *f)
{
	if (r->what == COPY)
		round_on_part(r,
			      &(struct saving_answer){ .f = f, .step = r->step, .bytes = bytes });
}

void round_on_end(struct round *r, unsigned node, const Shardd__V1__JobRoundEnd *m)
{
	struct fault f = FAULT_NULL;

	if (r->state == ROUND_OVER)
		return;
	if (r->leads) { /* somebody has given up */
		if (!r->loads && r->what && r->what != NOW && r->what != NEXT)
			return;
		fault_set(&f, FAULT_CANCELLED, NULL, "the caller on node %s has given up",
			  round_name(r, node));
		round_end(r, 0, &f);
		return;
	}
	if (m->code || !r->did)
		fault_set(&f, m->code && m->code < _FAULT_N ? m->code : FAULT_INTERNAL, NULL,
			  "%.500s", m->code ? m->text : "it has ended before this node was done");
	round_over(r, m->bytes, f.code ? &f : NULL);
}

/* ------------------------------------------------------------------------ what may happen */

void round_lost(struct round *r, unsigned node, const char *why)
{
	struct fault f = FAULT_NULL;

	if (r->state == ROUND_OVER || (r->leads && r->what == ROUND_COMPLETE))
		return; /* all is written: the leader alone goes on */
	if (r->leads)
		fault_set(&f, FAULT_ABORTED, NULL, "node %s is gone: %.300s", round_name(r, node),
			  why);
	else
		fault_set(&f, FAULT_ABORTED, NULL, "the node that leads the job is gone: %.200s%s",
			  why,
			  r->did && !r->memory && !r->loads
				  ? "; it may have completed the checkpoint: see whether it is "
				    "there"
				  : "");
	if (r->leads)
		round_fail(r, &f);
	else
		round_over(r, 0, &f);
}

void round_epoch_ended(struct round *r, const char *why)
{
	struct fault f = FAULT_NULL;

	if (r->state == ROUND_OVER || !r->leads || (r->what && r->what != NOW && r->what != NEXT))
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "the epoch has ended before the checkpoint had begun: %.300s", why);
	round_end(r, 0, &f);
}

void round_give_up(struct round *r)
{
	struct fault f = FAULT_NULL;

	if (r->state == ROUND_OVER)
		return;
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up, or the job was deleted");
	if (r->leads) {
		if (r->loads || !r->what || r->what == NOW || r->what == NEXT)
			round_end(r, 0, &f);
	} else if (r->loads && r->begun) {
		round_on_part(r, &(struct saving_answer){ .f = &f });
	} else if (r->asked) {
		round_send_end(r, r->leader, 0, &f);
		if (r->state == ROUND_ASKED)
			round_over(r, 0, &f);
	}
}

/* "node b, node c and 3 more" */
static void round_say_missing(const struct round *r, char *buf, size_t bytes)
{
	unsigned missing = 0;
	size_t at = 0;

	*buf = '\0';
	for (unsigned i = 0; i < r->n; i++)
		if (r->nodes[i].entered && !r->nodes[i].answered && missing++ < 4 && at < bytes)
			at += (size_t)snprintf(buf + at, bytes - at, "%snode %s", at ? ", " : "",
					       round_name(r, i));
	if (missing > 4 && at < bytes)
		snprintf(buf + at, bytes - at, " and %u more", missing - 4);
}

void round_waits(const struct round *r, char *buf, size_t bytes)
{
	char missing[320];

	*buf = '\0';
	if (r->state == ROUND_ASKED) {
		snprintf(buf, bytes, "the node that leads the job to begin");
	} else if (r->leads && !r->what) {
		snprintf(buf, bytes, "replicas of the job that are being made");
	} else if (r->leads && r->what != ROUND_COMPLETE) {
		round_say_missing(r, missing, sizeof(missing));
		snprintf(buf, bytes, "%s, to %s", missing, round_phases[r->what].doing);
	} else if (!r->leads) {
		snprintf(buf, bytes, "this node, or the one that leads the job: all nodes %s",
			 round_phases[r->what].doing);
	}
}

static void round_time_out(struct round *r, const char *limit)
{
	struct fault f = FAULT_NULL;
	char waits[480];

	round_waits(r, waits, sizeof(waits));
	fault_set(&f, FAULT_DEADLINE, NULL, "timed out%s waiting for %.420s", limit, waits);
	round_fail(r, &f);
}

/* The leader: does a node say nothing for too long? */
static bool round_is_late(const struct round *r, uint64_t now_us)
{
	unsigned limit_s = round_phases[r->what].limit_s;

	for (unsigned i = 0; limit_s && i < r->n; i++)
		if (i != r->self && r->nodes[i].entered && !r->nodes[i].answered &&
		    now_us > r->nodes[i].news_us + limit_s * ROUND_SECOND_US)
			return true;
	return false;
}

/* How far this node is, for the leader. */
static void round_tell(struct round *r, uint64_t now_us)
{
	struct loading_progress l = { 0 };
	struct saving_answer a = { 0 };

	if ((r->what != WRITE && r->what != READ && r->what != COPY) ||
	    now_us < r->told_us + ROUND_PROGRESS_US)
		return;
	r->told_us = now_us;
	if (r->what == COPY)
		a.bytes = r->copied;
	else if (r->what == WRITE)
		a.bytes = saving_part_written(r->saving);
	else if (loading_progress(r->job, &l))
		a.bytes = l.done;
	round_send_answer(r, &a, true);
}

/* NEXT waits for a commit that will not be: one that has begun since NEXT ends also without the ranks. */
static bool round_is_left(struct round *r)
{
	uint64_t step = 0;
	bool has_step = r->ops->last(r, &step);

	return has_step == r->has_after && step == r->after && r->ops->left(r);
}

void round_tick(struct round *r, uint64_t now_us)
{
	char limit[64];

	if (r->state != ROUND_RUNS)
		return;
	if (!r->leads) {
		round_tell(r, now_us);
	} else if ((!r->what || r->what == NOW || r->what == NEXT) && now_us > r->deadline_us) {
		round_time_out(r, "");
	} else if (r->what == NEXT && round_is_left(r)) {
		round_fail_left(r);
	} else if (round_is_late(r, now_us)) {
		snprintf(limit, sizeof(limit), ", %u s without news,",
			 round_phases[r->what].limit_s);
		round_time_out(r, limit);
	}
}
