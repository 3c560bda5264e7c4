/*
 * The nodes of a job take the state of one step from replicas: a node is gone with its memory, or nodes are
 * not at the same step.
 *
 * The leader has found, before an epoch begins, that the nodes cannot go on from what they have. It looks for
 * the newest step of which each part is on some node, and has all nodes take that. Each node reads the tails
 * of all parts, sees which parts it needs, fetches those that it does not have, and loads them
 * (job/restore.h). When all have done so the leader begins again: all of them are at that step.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/fnv.h"
#include "core/log.h"
#include "core/text.h"
#include "job/restore.h"

/* ------------------------------------------------------------------------- the leader */

/* The node that has a part, itself first. Return: NULL: none. */
static const struct cluster_node *cluster_restore_source(struct cluster_job *cj,
							 const struct replica_id *id,
							 const struct cluster_part **ret)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		for (unsigned i = 0; i < n->holding.n_replicas; i++) {
			const struct cluster_part *p = &n->holding.replicas[i];

			if (p->id.step != id->step || p->id.layout != id->layout ||
			    p->id.part != id->part || p->id.parts != id->parts)
				continue;
			*ret = p;
			return n;
		}
	return NULL;
}

static bool cluster_restore_is_complete(struct cluster_job *cj, struct replica_id id)
{
	const struct cluster_part *p;

	for (id.part = 0; id.part < id.parts; id.part++)
		if (!cluster_restore_source(cj, &id, &p))
			return false;
	return id.parts > 0;
}

/* A later epoch may have gone back to an earlier step: what is of epochs before it is given up. */
static bool cluster_restore_is_newer(const struct cluster_part *a, const struct cluster_part *than)
{
	return a->epoch != than->epoch ? a->epoch > than->epoch : a->id.step > than->id.step;
}

const struct cluster_part *cluster_restore_newest(struct cluster_job *cj)
{
	const struct cluster_part *newest = NULL;
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		for (unsigned i = 0; i < n->holding.n_replicas; i++) {
			const struct cluster_part *p = &n->holding.replicas[i];

			if (p->id.parts <= SPAN_MAX_NODES &&
			    (!newest || cluster_restore_is_newer(p, newest)) &&
			    cluster_restore_is_complete(cj, p->id))
				newest = p;
		}
	return newest;
}

static void cluster_restore_send(struct cluster_job *cj, Shardd__V1__JobRestore *r)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	struct cluster_node *n, *tmp;

	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_RESTORE;
	m.restore = r;
	list_for_each (n, tmp, &cj->nodes, link) {
		n->told = true;
		cluster_send(cj, n->peer, &m);
	}
	cluster_on_restore(cj, r);
}

/* Return: false: without memory. */
static bool cluster_restore_tell(struct cluster_job *cj, const struct replica_id *of)
{
	Shardd__V1__JobPart *parts = calloc(of->parts, sizeof(*parts));
	Shardd__V1__JobPart **list = calloc(of->parts, sizeof(*list));
	Shardd__V1__JobRestore r = SHARDD__V1__JOB_RESTORE__INIT;
	struct replica_id id = *of;
	void *block = NULL;

	r.id = cj->restore_id;
	r.step = of->step;
	r.layout = of->layout;
	r.nodes = cluster_list_nodes(cj, &r.n_nodes, &block);
	r.launched = list_first(&cj->nodes, struct cluster_node, link)->holding.grace_ms
			     ? list_first(&cj->nodes, struct cluster_node, link)->holding.world
			     : 0;
	r.n_parts = of->parts;
	r.parts = list;
	for (id.part = 0; parts && list && id.part < of->parts; id.part++) {
		Shardd__V1__JobPart *to = &parts[id.part];
		const struct cluster_part *p = NULL;
		const struct cluster_node *n = cluster_restore_source(cj, &id, &p);

		CHECK(n && p);
		shardd__v1__job_part__init(to);
		to->node = (char *)n->name;
		to->at = (char *)n->at;
		to->tensors = p->bytes[REPLICA_TENSORS];
		to->tail = p->bytes[REPLICA_TAIL];
		list[id.part] = to;
	}
	if (parts && list && r.nodes)
		cluster_restore_send(cj, &r);
	free(parts);
	free(list);
	free(block);
	return parts && list && r.nodes;
}

bool cluster_restore_begin(struct cluster_job *cj, const struct fault *why)
{
	const struct cluster_part *newest =
		why->code == FAULT_STATE ? cluster_restore_newest(cj) : NULL;
	struct replica_id id;

	if (!newest ||
	    getrandom(&cj->restore_id, sizeof(cj->restore_id), 0) != sizeof(cj->restore_id))
		return false;
	id = newest->id; /* nodes may answer soon, and have others */
	cj->restore_id |= 1;
	log_warn("cluster", "restores from replicas job=%s step=%llu parts=%u why=\"%s\"",
		 cj->label, (unsigned long long)id.step, id.parts, why->text);
	cluster_state_move(cj, CLUSTER_RESTORING);
	cluster_say(cj, "all nodes take the state of step %llu from replicas",
		    (unsigned long long)id.step);
	cluster_rounds_restore(cj);
	if (cluster_restore_tell(cj, &id))
		return true;
	cluster_seek(cj);
	return true;
}

/* "node b, node c" */
static void cluster_restore_say(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	char text[160] = "";
	size_t at = 0;

	list_for_each (n, tmp, &cj->nodes, link)
		if (n->told && at < sizeof(text))
			at += (size_t)snprintf(text + at, sizeof(text) - at, "%snode %s",
					       at ? ", " : "", n->name);
	cluster_say(cj, "the state of the last replicas is being taken on %s", text);
}

void cluster_restore_look(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;

	if (cj->state != CLUSTER_RESTORING)
		return;
	cluster_restore_say(cj);
	list_for_each (n, tmp, &cj->nodes, link)
		if (n->told)
			return; /* one that has come since is asked when the epoch is decided */
	cluster_state_move(cj, CLUSTER_LEADS);
	cluster_form(cj);
}

/* What another try may do: a node, or a part, was not there any more. */
static bool cluster_restore_is_for_now(enum fault_code code)
{
	return code == FAULT_UNAVAILABLE || code == FAULT_ABORTED || code == FAULT_NOT_FOUND;
}

void cluster_on_restored(struct cluster_job *cj, struct peer *from,
			 const Shardd__V1__JobRestored *m)
{
	struct cluster_node *n, *tmp;
	struct fault f = FAULT_NULL;

	if (cj->state != CLUSTER_RESTORING || m->id != cj->restore_id)
		return;
	list_for_each (n, tmp, &cj->nodes, link) {
		if (n->peer == from && m->code)
			fault_set(&f, m->code < _FAULT_N ? m->code : FAULT_INTERNAL, NULL,
				  "node %s cannot take the state of job '%s' from replicas: %.400s",
				  n->name, cj->label, m->text);
		n->told = n->told && n->peer != from;
	}
	if (cluster_restore_is_for_now(f.code)) {
		log_warn("cluster", "not restored job=%s why=\"%s\"", cj->label, f.text);
		cluster_seek(cj);
		cj->again_us = clock_now_us() + CLUSTER_PAUSE_US;
	} else if (f.code) {
		cluster_refuse_all(cj, &f);
		cluster_seek(cj);
	} else {
		cluster_restore_look(cj);
	}
}

/* ---------------------------------------------------------------------------- each node */

enum cluster_restore_stage { RESTORE_TAILS, RESTORE_TENSORS, RESTORE_LOADS };

struct cluster_restore_part {
	struct cluster_restore *restore;
	char node[SPAN_NAME_BYTES], at[CLUSTER_AT_BYTES];
	uint64_t bytes[_REPLICA_FILES];
	struct replica *replica; /* owned ref */
	bool was_here, needed;
	struct replica_tail tail;  /* owned */
	struct cluster_copy *copy; /* borrowed until its end; NULL: none */
};

struct cluster_restore {
	struct cluster *c;
	char label[JOB_LABEL_MAX + 1];
	uint32_t number; /* of the job: another one may have its name */
	uint64_t id;
	struct replica_id of; /* @part is not used */
	uint8_t stage;        /* enum cluster_restore_stage */
	unsigned pending;     /* copies */
	bool over;            /* nobody waits: it ends with its last copy */
	struct fault f;
	struct span *span;                  /* owned, until RESTORE_LOADS */
	uint32_t launched, *numbers;        /* owned: of an elastic job; NULL: it is not */
	struct cluster_restore_part *parts; /* owned, of.parts of them */
};

/* It may end behind the cluster. */
static struct job *cluster_restore_job(const struct cluster_restore *x)
{
	struct job *job = the_cluster ? htab_find(&the_cluster->jobs->names, x->label) : NULL;

	return job && job->number == x->number ? job : NULL;
}

static void cluster_restore_answer(struct cluster_job *cj, uint64_t id, const struct fault *f)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRestored r = SHARDD__V1__JOB_RESTORED__INIT;

	r.id = id;
	r.code = f ? f->code : 0;
	r.text = (char *)(f ? f->text : "");
	if (!f)
		cluster_tell_wishes(cj); /* what it has now */
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_RESTORED;
	m.restored = &r;
	if (cj->state == CLUSTER_RESTORING)
		cluster_on_restored(cj, NULL, &r);
	else
		cluster_send(cj, cluster_to_leader(cj), &m);
}

/* Parts that this node does not keep otherwise go. */
static void cluster_restore_free(struct cluster_restore *x)
{
	unsigned n = x->of.parts;

	for (unsigned i = 0; i < n; i++) {
		struct cluster_restore_part *p = &x->parts[i];

		if (p->replica && !p->was_here)
			replica_drop(p->replica);
		replica_unref(p->replica);
		free(p->tail.data);
	}
	free(x->parts);
	free(x->numbers);
	span_free(x->span);
	free(x);
}

static void cluster_restore_settle(struct job *job, struct cluster_restore *x)
{
	for (unsigned i = 0; i < x->of.parts; i++)
		if (x->parts[i].replica && !x->parts[i].was_here)
			replica_drop(x->parts[i].replica);
	replica_completed(job, x->of.step, x->of.layout);
}

static void cluster_restore_over(struct cluster_restore *x)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, x->label) : NULL;
	const struct fault f = x->f;
	uint64_t id = x->id;
	bool tells = cj && cj->restore == x;

	if (tells)
		cj->restore = NULL;
	if (f.code)
		log_warn("cluster", "not restored job=%s step=%llu why=\"%s\"", x->label,
			 (unsigned long long)x->of.step, f.text);
	else if (cluster_restore_job(x)) /* parts of later steps are of a state that is given up */
		cluster_restore_settle(cluster_restore_job(x), x);
	cluster_restore_free(x);
	if (tells)
		cluster_restore_answer(cj, id, f.code ? &f : NULL);
}

static void cluster_restore_on_loaded(struct job *job, const struct fault *f, void *userdata)
{
	struct cluster_restore *x = userdata;

	(void)job;
	if (f && !x->f.code)
		x->f = *f;
	cluster_restore_over(x);
}

static void cluster_restore_load(struct cluster_restore *x)
{
	struct restore_part *parts = calloc(x->of.parts, sizeof(*parts));
	struct job *job = cluster_restore_job(x);
	struct restore_options o = { .step = x->of.step,
				     .parts = parts,
				     .n_parts = x->of.parts,
				     .specs = x->parts[0].tail.specs,
				     .specs_bytes = x->parts[0].tail.specs_bytes,
				     .launched = x->launched,
				     .numbers = x->numbers };

	x->stage = RESTORE_LOADS;
	for (unsigned i = 0; parts && i < x->of.parts; i++)
		parts[i] = (struct restore_part){
			.fd = x->parts[i].needed ? x->parts[i].replica->fds[REPLICA_TENSORS] : -1,
			.index = x->parts[i].tail.data,
			.index_bytes = x->parts[i].tail.index_bytes,
		};
	if (!parts)
		fault_errno(&x->f, -ENOMEM, "restoring a job");
	else if (!job)
		fault_set(&x->f, FAULT_ABORTED, NULL, "job '%s' was deleted", x->label);
	if (!x->f.code) {
		o.span = x->span;
		x->span = NULL;
		(void)restore_begin(job, &o, cluster_restore_on_loaded, x, &x->f);
	}
	free(parts);
	if (x->f.code)
		cluster_restore_over(x);
}

/* Which parts are needed here? */
static void cluster_restore_see(struct cluster_restore *x)
{
	struct restore_part *parts = calloc(x->of.parts, sizeof(*parts));
	bool *needed = calloc(x->of.parts, sizeof(*needed));
	struct job *job = cluster_restore_job(x);
	struct restore_options o = { .step = x->of.step,
				     .span = x->span,
				     .parts = parts,
				     .n_parts = x->of.parts,
				     .launched = x->launched,
				     .numbers = x->numbers };

	for (unsigned i = 0; parts && needed && !x->f.code && i < x->of.parts; i++) {
		struct cluster_restore_part *p = &x->parts[i];

		(void)replica_read_tail(p->replica->fds[REPLICA_TAIL], p->bytes[REPLICA_TAIL],
					&p->tail, &x->f);
		parts[i] = (struct restore_part){ .fd = -1,
						  .index = p->tail.data,
						  .index_bytes = p->tail.index_bytes };
	}
	o.specs = x->parts[0].tail.specs;
	o.specs_bytes = x->parts[0].tail.specs_bytes;
	if (!parts || !needed)
		fault_errno(&x->f, -ENOMEM, "restoring a job");
	else if (!job)
		fault_set(&x->f, FAULT_ABORTED, NULL, "job '%s' was deleted", x->label);
	else if (!x->f.code)
		(void)restore_needs(job, &o, needed, &x->f);
	for (unsigned i = 0; needed && i < x->of.parts; i++)
		x->parts[i].needed = needed[i];
	free(parts);
	free(needed);
}

static void cluster_restore_go_on(struct cluster_restore *x);

static void cluster_restore_on_copied(void *userdata, uint64_t bytes, const struct fault *f)
{
	struct cluster_restore_part *p = userdata;
	struct cluster_restore *x = p->restore;

	(void)bytes;
	p->copy = NULL;
	if (f && !x->f.code) {
		x->f = *f;
		for (unsigned i = 0; i < x->of.parts; i++)
			if (x->parts[i].copy)
				cluster_copy_cancel(x->parts[i].copy);
	}
	if (--x->pending == 0)
		cluster_restore_go_on(x);
}

static void cluster_restore_copy(struct cluster_restore *x, struct cluster_restore_part *p,
				 enum replica_file file)
{
	struct cluster_copy_want want = {
		.replica = p->replica, .label = x->label, .node = p->node, .at = p->at
	};

	want.bytes[file] = p->bytes[file];
	if (cluster_copy_begin(x->c, &want, cluster_restore_on_copied, p, &p->copy, &x->f) == 0)
		x->pending++;
}

static void cluster_restore_fetch_tensors(struct cluster_restore *x)
{
	x->stage = RESTORE_TENSORS;
	for (unsigned i = 0; !x->f.code && i < x->of.parts; i++) {
		struct cluster_restore_part *p = &x->parts[i];

		if (p->needed && !p->was_here &&
		    replica_expect(p->replica, p->bytes[0] + p->bytes[1], &x->f) == 0)
			cluster_restore_copy(x, p, REPLICA_TENSORS);
	}
}

/* Nothing is being copied. */
static void cluster_restore_go_on(struct cluster_restore *x)
{
	if (x->over && !x->f.code)
		fault_set(&x->f, FAULT_ABORTED, NULL, "nobody waits for it any more");
	if (!x->f.code && x->stage == RESTORE_TAILS) {
		cluster_restore_see(x);
		if (!x->f.code)
			cluster_restore_fetch_tensors(x);
		if (x->pending)
			return; /* also after an error: its end comes */
	}
	if (x->f.code)
		cluster_restore_over(x);
	else
		cluster_restore_load(x);
}

static int cluster_restore_take_part(struct cluster_restore *x, struct job *job, unsigned i,
				     const Shardd__V1__JobPart *m, struct fault *f)
{
	struct cluster_restore_part *p = &x->parts[i];
	const struct replica_id id = { x->of.step, x->of.layout, i, x->of.parts };
	struct replica *r = replica_find(job, &id);

	p->restore = x;
	text_copy(p->node, sizeof(p->node), m->node);
	text_copy(p->at, sizeof(p->at), m->at);
	p->bytes[REPLICA_TENSORS] = m->tensors;
	p->bytes[REPLICA_TAIL] = m->tail;
	if (!m->tensors || !m->tail || m->tensors > REPLICA_MAX_BYTES ||
	    m->tail > REPLICA_MAX_BYTES)
		return fault_set(f, FAULT_INVALID, NULL, "the leader has sent a part of no size");
	p->was_here = r;
	if (r)
		memcpy(p->bytes, r->bytes, sizeof(p->bytes));
	else if (replica_new(job, &id, m->tail, &r, f))
		return f->code;
	p->replica = replica_ref(r);
	return 0;
}

static int cluster_restore_make_span(struct cluster_restore *x, const Shardd__V1__JobRestore *m,
				     struct fault *f)
{
	const struct comm_store store = rendezvous_store(x->c->rendezvous);
	struct span_node *nodes = calloc(m->n_nodes, sizeof(*nodes));
	unsigned self = (unsigned)m->n_nodes;
	uint16_t *devices = NULL;
	size_t world = 0;

	for (size_t i = 0; i < m->n_nodes; i++)
		world += m->nodes[i]->n_devices;
	devices = calloc(world + 1, sizeof(*devices));
	world = 0;
	for (unsigned i = 0; nodes && devices && i < m->n_nodes; i++) {
		const Shardd__V1__JobNode *from = m->nodes[i];

		text_copy(nodes[i].name, sizeof(nodes[i].name), from->name);
		nodes[i].first = from->first;
		nodes[i].n = (uint32_t)from->n_devices;
		nodes[i].devices = devices + world;
		for (size_t k = 0; k < from->n_devices; k++)
			devices[world++] = (uint16_t)from->devices[k];
		if (strcmp(from->name, x->c->node) == 0)
			self = i;
	}
	x->launched = m->launched;
	if (m->launched)
		x->numbers = calloc(world + 1, sizeof(*x->numbers));
	for (size_t i = 0, at = 0; x->numbers && i < m->n_nodes; i++)
		for (size_t k = 0; k < m->nodes[i]->n_devices; k++)
			x->numbers[at++] = m->nodes[i]->numbers[k];
	if (nodes && devices && (!m->launched || x->numbers))
		span_new(nodes, (unsigned)m->n_nodes, self, "", &store, &x->span, f);
	else
		fault_errno(f, -ENOMEM, "noting a job's nodes");
	free(nodes);
	free(devices);
	return f->code;
}

static bool cluster_restore_is_valid(const Shardd__V1__JobRestore *m)
{
	bool valid = m->id && m->n_nodes && m->n_nodes <= SPAN_MAX_NODES && m->n_parts &&
		     m->n_parts <= SPAN_MAX_NODES;

	for (size_t i = 0; valid && i < m->n_nodes; i++)
		valid = m->nodes[i]->n_devices && m->nodes[i]->n_devices <= CLUSTER_MAX_RANKS &&
			(!m->launched || m->nodes[i]->n_numbers == m->nodes[i]->n_devices);
	return valid;
}

/* Has this node a part of these copies? */
static bool cluster_restore_has_part(const struct job *job, const struct cluster_restore *x)
{
	struct replica_id id = x->of;

	for (id.part = 0; id.part < id.parts; id.part++)
		if (replica_find(job, &id))
			return true;
	return false;
}

/* Has this node that state already? A step of that number alone says nothing: nodes that went on without
 * this one from older copies have committed it once more. A node with a part of the copies was in that step. */
static bool cluster_restore_is_there(struct job *job, const struct cluster_restore *x)
{
	uint64_t layout = span_layout(x->span);
	struct cluster_holding h;
	bool there;

	for (uint32_t r = 0; x->numbers && r < x->span->world; r++)
		layout = fnv_add(layout, x->numbers[r]);
	if (cluster_holding_of(job, &h) < 0)
		return false;
	there = cluster_holding_is_at(&h, x->of.step, layout) && cluster_restore_has_part(job, x);
	cluster_holding_deinit(&h);
	return there;
}

static void cluster_restore_start(struct cluster_restore *x, struct job *job,
				  const Shardd__V1__JobRestore *m)
{
	for (unsigned i = 0; !x->f.code && i < x->of.parts; i++)
		(void)cluster_restore_take_part(x, job, i, m->parts[i], &x->f);
	for (unsigned i = 0; !x->f.code && i < x->of.parts; i++)
		if (!x->parts[i].was_here)
			cluster_restore_copy(x, &x->parts[i], REPLICA_TAIL);
	if (!x->pending)
		cluster_restore_go_on(x);
}

void cluster_on_restore(struct cluster_job *cj, const Shardd__V1__JobRestore *m)
{
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;
	struct cluster_restore *x;

	if (!cluster_restore_is_valid(m)) {
		fault_set(&f, FAULT_INVALID, NULL, "the leader has sent nodes that no job has");
	} else if (!job || !cj->n_wishes) {
		fault_set(&f, FAULT_ABORTED, NULL, "no rank of job '%s' waits to join", cj->label);
	} else if (cj->restore || restore_is_busy(job) || job->joined) {
		fault_set(&f, FAULT_UNAVAILABLE, NULL, "job '%s' is being restored, or has ranks",
			  cj->label);
	}
	x = f.code ? NULL : calloc(1, sizeof(*x));
	if (x)
		x->parts = calloc(m->n_parts, sizeof(*x->parts));
	if (!f.code && (!x || !x->parts))
		fault_errno(&f, -ENOMEM, "restoring a job");
	if (!f.code) {
		x->c = cj->c;
		text_copy(x->label, sizeof(x->label), cj->label);
		x->number = job->number;
		x->id = m->id;
		x->of = (struct replica_id){ .step = m->step,
					     .layout = m->layout,
					     .parts = (uint32_t)m->n_parts };
		(void)cluster_restore_make_span(x, m, &f);
	}
	if (!f.code)
		cluster_rounds_restore(cj);
	if (f.code || cluster_restore_is_there(job, x)) {
		if (!f.code)
			replica_completed(job, m->step, m->layout);
		if (x && x->parts)
			cluster_restore_free(x);
		else
			free(x);
		cluster_restore_answer(cj, m->id, f.code ? &f : NULL);
		return;
	}
	cj->restore = x;
	log_info("cluster", "restores job=%s step=%llu", cj->label, (unsigned long long)m->step);
	cluster_restore_start(x, job, m);
}

void cluster_restore_end(struct cluster_job *cj)
{
	struct cluster_restore *x = cj->restore;

	cj->restore = NULL;
	if (!x)
		return;
	if (cluster_to_leader(cj)) {
		struct fault f = FAULT_NULL;

		fault_set(&f, FAULT_ABORTED, NULL, "job '%s' was deleted", cj->label);
		cluster_restore_answer(cj, x->id, &f);
	}
	x->over = true;
	for (unsigned i = 0; i < x->of.parts; i++)
		if (x->parts[i].copy)
			cluster_copy_cancel(x->parts[i].copy);
	if (x->stage == RESTORE_LOADS && cluster_restore_job(x))
		restore_cancel(cluster_restore_job(x));
}
