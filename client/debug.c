#include "debug.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "debug_view.h"
#include "shardd.pb-c.h"

#define MAX_TOLD 10u /* tickets that close reports one by one */

enum debug_kind {
	KIND_PARAMETERS,
	KIND_GRADIENT,
	KIND_SUMMONED,
	KIND_SHARD,
	KIND_UNIT_BUFFERS,
	KIND_BUFFER,
	KIND_BUCKETS,
};

enum debug_effect {
	EFFECT_LEND,
	EFFECT_TAKE,
	EFFECT_BEGIN_PASS,
	EFFECT_END_PASS,
	EFFECT_STEP,
};

static const struct {
	const char *what; /* followed by the unit's name, or the number if @numbered */
	bool numbered;
	const char *advice;
} debug_kinds[] = {
	[KIND_PARAMETERS] = { "the parameters of unit", false, "gather it before you read it" },
	[KIND_GRADIENT] = { "the gradient buffer of unit", false,
			    "ask for the gradient buffer before you use it" },
	[KIND_SUMMONED] = { "the summoned memory of unit", false, "summon it before you use it" },
	[KIND_SHARD] = { "the shard of unit", false, "ask for the next shard before you use it" },
	[KIND_UNIT_BUFFERS] = { "the buffers of unit", false, "ask for them in the new epoch" },
	[KIND_BUFFER] = { "buffer", true, "allocate a buffer before you use it" },
	[KIND_BUCKETS] = { "the gradient buckets of ddp", true,
			   "use the views of the last DdpForward" },
};

/* What an op does to memory. */
struct debug_verb {
	const ProtobufCMessageDescriptor *request;
	const char *name;
	enum debug_kind kind;
	enum debug_effect effect;
	bool in_reply;          /* is the id in the reply? */
	size_t id_at, id_bytes; /* in the message */
};

#define VERB_ID(Message, field) offsetof(Message, field), sizeof(((Message *)0)->field)
#define VERB(Name, lower, kind, effect, field)                                          \
	{                                                                               \
		&shardd__v1__##lower##_request__descriptor, #Name, kind, effect, false, \
			VERB_ID(Shardd__V1__##Name##Request, field)                     \
	}
/* Lends what the reply names. */
#define VERB_REPLY(Name, lower, kind, field)                                                \
	{                                                                                   \
		&shardd__v1__##lower##_request__descriptor, #Name, kind, EFFECT_LEND, true, \
			VERB_ID(Shardd__V1__##Name##Response, field)                        \
	}

static const struct debug_verb debug_verbs[] = {
	VERB(Gather, gather, KIND_PARAMETERS, EFFECT_LEND, unit),
	VERB(Release, release, KIND_PARAMETERS, EFFECT_TAKE, unit),
	VERB(BeginPass, begin_pass, KIND_PARAMETERS, EFFECT_BEGIN_PASS, unit),
	VERB(EndPass, end_pass, KIND_PARAMETERS, EFFECT_END_PASS, unit),
	VERB(Step, step, KIND_PARAMETERS, EFFECT_STEP, group),
	VERB(GradientBuffer, gradient_buffer, KIND_GRADIENT, EFFECT_LEND, unit),
	VERB(Reduce, reduce, KIND_GRADIENT, EFFECT_TAKE, unit),
	VERB(Accumulate, accumulate, KIND_GRADIENT, EFFECT_TAKE, unit),
	VERB(SummonFull, summon_full, KIND_SUMMONED, EFFECT_LEND, unit),
	VERB(ReturnFull, return_full, KIND_SUMMONED, EFFECT_TAKE, unit),
	VERB_REPLY(NextShard, next_shard, KIND_SHARD, unit),
	VERB(ShardDone, shard_done, KIND_SHARD, EFFECT_TAKE, unit),
	VERB(UnitBuffers, unit_buffers, KIND_UNIT_BUFFERS, EFFECT_LEND, unit),
	VERB_REPLY(AllocBuffer, alloc_buffer, KIND_BUFFER, buffer),
	VERB(FreeBuffer, free_buffer, KIND_BUFFER, EFFECT_TAKE, buffer),
	VERB(DdpForward, ddp_forward, KIND_BUCKETS, EFFECT_LEND, ddp),
};

/* Memory of one kind of one unit, buffer or ddp. */
struct debug_loan {
	enum debug_kind kind;
	uint64_t id;
	struct debug_loan *next;
	struct debug_view *views; /* the newest first; at most one is lent */
	const char *by;           /* the verb that took it last, static */
	/* As of the ops that were sent. Parameters: gathers without a release. Other kinds: 1, or 0
	 * after the memory was taken. */
	uint64_t references;
	bool held;        /* a pass, or the reshard policy after it, has its own reference */
	unsigned passes;  /* begun and not ended */
	uint64_t pass_at; /* the op that began the last one */
};

/* An op whose ticket has not ended. */
struct debug_op {
	struct list link; /* in debug.ops */
	const ProtobufCMessageDescriptor *request;
	const struct debug_verb *verb; /* NULL: it hands out nothing and takes nothing */
	uint64_t id;                   /* what @verb says; else of its unit, 0: none */
	uint64_t seq;
	uint64_t epoch;          /* debug.epoch when it was sent */
	bool had;                /* TAKE: it took a reference; BEGIN_PASS: there was one */
	struct debug_view *view; /* that a TAKE protected */
	bool detached;           /* nobody is to wait for it */
};

struct debug_unit {
	char *name; /* owned; NULL: not registered by this client */
	shardd_group group;
};

#define N_LOANS 1024u

/* Everything under debug_view_lock. */
struct debug {
	struct debug_loan *loans[N_LOANS]; /* by kind and id */
	struct debug_unit *units;          /* by id - 1 */
	size_t n_units;
	struct list ops;
	uint64_t epoch;       /* joins and leaves */
	const char *epoch_by; /* the call that began it, static */
	uint32_t rank;
	bool gpu;
};

/* --------------------------------------------------------------------- loans */

static struct debug_loan **debug_bucket(struct debug *d, enum debug_kind kind, uint64_t id)
{
	return &d->loans[(id + (uint64_t)kind * 131) % N_LOANS];
}

static struct debug_loan *debug_loan_find(struct debug *d, enum debug_kind kind, uint64_t id)
{
	struct debug_loan *l = *debug_bucket(d, kind, id);

	while (l && (l->kind != kind || l->id != id))
		l = l->next;
	return l;
}

/* Numbers of buffers do not come back: forget those whose views are gone. */
static void debug_forget_buffers(struct debug_loan **at)
{
	while (*at) {
		struct debug_loan *l = *at;

		if (l->kind == KIND_BUFFER && !l->views && !l->references) {
			*at = l->next;
			free(l);
		} else {
			at = &l->next;
		}
	}
}

/* Return: NULL: no memory. */
static struct debug_loan *debug_loan_get(struct debug *d, enum debug_kind kind, uint64_t id)
{
	struct debug_loan **at = debug_bucket(d, kind, id);
	struct debug_loan *l = debug_loan_find(d, kind, id);

	if (l)
		return l;
	debug_forget_buffers(at);
	l = calloc(1, sizeof(*l));
	if (!l)
		return NULL;
	*l = (struct debug_loan){ .kind = kind, .id = id, .next = *at, .by = d->epoch_by };
	*at = l;
	return l;
}

static struct debug_view *debug_lent_view(const struct debug_loan *l)
{
	struct debug_view *v = l->views;

	while (v && atomic_load(&v->by))
		v = v->next;
	return v;
}

/* Protect the memory of @l if nothing holds it any more. Return: the view, or NULL. */
static struct debug_view *debug_settle(struct debug_loan *l)
{
	struct debug_view *v = debug_lent_view(l);

	if (l->references || l->held || !v)
		return NULL;
	debug_view_lose(v, l->by);
	return v;
}

/* The epoch is over: what it lent is no longer this session's. */
static void debug_end_epoch(struct debug *d, const char *by, bool keep_buffers)
{
	d->epoch++;
	d->epoch_by = by;
	for (size_t i = 0; i < N_LOANS; i++)
		for (struct debug_loan *l = d->loans[i]; l; l = l->next) {
			if (keep_buffers && l->kind == KIND_UNIT_BUFFERS)
				continue;
			l->references = 0;
			l->held = false;
			l->passes = 0;
			l->by = by;
			(void)debug_settle(l);
		}
}

/* --------------------------------------------------------------------- names */

static const char *debug_unit_name(const struct debug *d, uint64_t id)
{
	const char *name = id && id <= d->n_units ? d->units[id - 1].name : NULL;

	return name ? name : "?";
}

static void debug_describe(const struct debug *d, const struct debug_loan *l, char *buf,
			   size_t bytes)
{
	const char *what = debug_kinds[l->kind].what;

	if (debug_kinds[l->kind].numbered)
		snprintf(buf, bytes, "%s %llu", what, (unsigned long long)l->id);
	else
		snprintf(buf, bytes, "%s '%.100s'", what, debug_unit_name(d, l->id));
}

static uint64_t debug_number_at(const ProtobufCMessage *m, size_t at, size_t bytes)
{
	const uint8_t *from = (const uint8_t *)m + at;

	if (bytes == sizeof(uint64_t))
		return *(const uint64_t *)from;
	CHECK(bytes == sizeof(uint32_t));
	return *(const uint32_t *)from;
}

/* The request's field "unit"; 0: it has none. */
static uint64_t debug_unit_of(const ProtobufCMessage *request)
{
	const ProtobufCFieldDescriptor *f =
		protobuf_c_message_descriptor_get_field_by_name(request->descriptor, "unit");

	if (!f || f->type != PROTOBUF_C_TYPE_UINT32 || f->label == PROTOBUF_C_LABEL_REPEATED)
		return 0;
	return debug_number_at(request, f->offset, sizeof(uint32_t));
}

/* ----------------------------------------------------------------------- ops */

static const struct debug_verb *debug_verb_of(const ProtobufCMessage *request)
{
	for (size_t i = 0; i < ARRAY_SIZE(debug_verbs); i++)
		if (debug_verbs[i].request == request->descriptor)
			return &debug_verbs[i];
	return NULL;
}

/* What @op, which has been sent, does to the references of @l. */
static void debug_sent(struct debug_op *op, struct debug_loan *l)
{
	switch (op->verb->effect) {
	case EFFECT_LEND:
		l->references = l->kind == KIND_PARAMETERS ? l->references + 1 : 1;
		break;
	case EFFECT_TAKE:
		op->had = l->references > 0;
		l->references -= op->had;
		l->by = op->verb->name;
		op->view = debug_settle(l);
		break;
	case EFFECT_BEGIN_PASS:
		op->had = l->held;
		l->held = true;
		l->passes++;
		l->pass_at = op->seq;
		break;
	case EFFECT_END_PASS:
		op->had = l->passes > 0;
		l->passes -= op->had;
		break;
	case EFFECT_STEP:
		break;
	}
}

struct debug_op *debug_begin(struct debug *d, uint64_t seq, const ProtobufCMessage *request)
{
	const struct debug_verb *verb = debug_verb_of(request);
	bool lends = verb && !verb->in_reply && verb->effect != EFFECT_STEP;
	struct debug_op *op = calloc(1, sizeof(*op));
	struct debug_loan *l = NULL;

	if (!op)
		return NULL;
	op->request = request->descriptor;
	op->verb = verb;
	op->seq = seq;
	if (!verb)
		op->id = debug_unit_of(request);
	else if (!verb->in_reply)
		op->id = debug_number_at(request, verb->id_at, verb->id_bytes);
	list_init(&op->link);
	debug_view_lock();
	op->epoch = d->epoch;
	if (lends)
		l = debug_loan_get(d, verb->kind, op->id);
	if (l)
		debug_sent(op, l);
	if (l || !lends)
		list_append(&d->ops, &op->link);
	else
		free(STEAL_PTR(op));
	debug_view_unlock();
	return op;
}

/* The view of @place; @by has moved @l there from where it was. NULL: no memory. */
static struct debug_view *debug_view_of(struct debug *d, struct debug_loan *l,
					const struct map_place *place, const void *data,
					const char *by)
{
	struct debug_view *v, *lent;
	char what[DEBUG_VIEW_WHAT];

	/* in another job its number may be that of another unit */
	debug_describe(d, l, what, sizeof(what));
	for (v = l->views; v; v = v->next)
		if (v->under == data && v->bytes == place->bytes &&
		    v->writable == place->writable && strcmp(v->what, what) == 0)
			break;
	lent = debug_lent_view(l);
	if (lent && lent != v)
		debug_view_lose(lent, by);
	if (v)
		return v;
	return debug_view_new(&l->views, data, place->bytes, place->writable, what,
			      debug_kinds[l->kind].advice);
}

static int debug_hand_out(struct debug *d, const struct debug_op *op, struct debug_loan *l,
			  const struct map_place *place, void **data)
{
	bool ended = op->epoch != d->epoch;
	struct debug_view *v;
	int r;

	if (op->verb->in_reply && !ended)
		l->references = 1;
	v = debug_view_of(d, l, place, *data, op->verb->name);
	r = v ? debug_view_lend(v, d->rank) : -1;
	if (r < 0)
		return r;
	*data = v->at;
	if (ended)
		debug_view_lose(v, d->epoch_by);
	else
		(void)debug_settle(l); /* it was given back before it was waited for */
	return 0;
}

int debug_lend(struct debug *d, struct debug_op *op, const ProtobufCMessage *reply,
	       const struct map_place *place, void **data, struct shardd_error *err)
{
	const struct debug_verb *verb = op ? op->verb : NULL;
	struct debug_loan *l;
	int r = 0;

	if (!verb || d->gpu || !*data || !place->bytes)
		return 0;
	debug_view_lock();
	if (verb->in_reply)
		op->id = debug_number_at(reply, verb->id_at, verb->id_bytes);
	l = debug_loan_get(d, verb->kind, op->id);
	r = l ? debug_hand_out(d, op, l, place, data) : -1;
	debug_view_unlock();
	return r < 0 ? error_memory(err) : 0;
}

/* @op has failed: what it would have done to @l has not happened. */
static void debug_undo(struct debug *d, const struct debug_op *op, struct debug_loan *l)
{
	struct debug_view *v = l->views;

	switch (op->verb->effect) {
	case EFFECT_LEND:
		/* of other kinds one reference is all there is, perhaps another op's */
		if (l->kind == KIND_PARAMETERS && l->references)
			l->references--;
		break;
	case EFFECT_TAKE:
		l->references = l->kind == KIND_PARAMETERS ? l->references + op->had
							   : l->references || op->had;
		while (v && v != op->view)
			v = v->next;
		if (v && !debug_lent_view(l))
			(void)debug_view_lend(v, d->rank);
		break;
	case EFFECT_BEGIN_PASS:
		l->passes -= l->passes > 0;
		if (!op->had && l->pass_at == op->seq)
			l->held = false;
		break;
	case EFFECT_END_PASS:
		l->passes += op->had;
		break;
	case EFFECT_STEP:
		break;
	}
	(void)debug_settle(l);
}

/* A pass has ended: only the daemon knows the policy. */
static void debug_pass_ended(const struct debug_op *op, struct debug_loan *l, bool kept)
{
	if (l->pass_at > op->seq)
		return; /* the next one has begun */
	l->held = kept;
	l->by = op->verb->name;
	(void)debug_settle(l);
}

/* The step has dropped what policies kept between passes. */
static void debug_stepped(struct debug *d, const struct debug_op *op)
{
	for (size_t i = 0; i < d->n_units; i++) {
		struct debug_loan *l = debug_loan_find(d, KIND_PARAMETERS, i + 1);

		if (!l || !d->units[i].name || d->units[i].group != op->id || l->passes ||
		    l->pass_at > op->seq || !l->held)
			continue;
		l->held = false;
		l->by = op->verb->name;
		(void)debug_settle(l);
	}
}

static void debug_answered(struct debug *d, const struct debug_op *op,
			   const ProtobufCMessage *reply)
{
	struct debug_loan *l = debug_loan_find(d, op->verb->kind, op->id);

	if (op->verb->effect == EFFECT_STEP) {
		if (reply && !((const Shardd__V1__StepResponse *)reply)->skipped)
			debug_stepped(d, op);
	} else if (!l || (op->verb->in_reply && !reply)) {
		return;
	} else if (!reply) {
		debug_undo(d, op, l);
	} else if (op->verb->effect == EFFECT_END_PASS) {
		debug_pass_ended(op, l, ((const Shardd__V1__EndPassResponse *)reply)->kept);
	}
}

void debug_end(struct debug *d, struct debug_op *op, const ProtobufCMessage *reply)
{
	if (!op)
		return;
	debug_view_lock();
	if (op->verb && op->epoch == d->epoch)
		debug_answered(d, op, reply);
	list_unlink(&op->link);
	debug_view_unlock();
	free(op);
}

void debug_detached(struct debug *d, struct debug_op *op)
{
	(void)d;
	if (!op)
		return;
	debug_view_lock();
	op->detached = true;
	debug_view_unlock();
}

int debug_under(struct debug *d, const void **at, size_t bytes, bool write, const char *field,
		struct shardd_error *err)
{
	struct debug_view *v;
	const char *by;
	int r = 0;

	(void)d;
	debug_view_lock();
	v = debug_view_find(*at, bytes);
	by = v ? atomic_load(&v->by) : NULL;
	if (by)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, field,
			      "%s: %p is in %s, which %s gave back: %s", field, *at, v->what, by,
			      v->advice);
	else if (v && write && !v->writable)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, field,
			      "%s: %p is in %s, which are read-only", field, *at, v->what);
	else if (v)
		*at = v->under + ((const uint8_t *)*at - v->at);
	debug_view_unlock();
	return r;
}

/* ------------------------------------------------------------------- sessions */

void debug_joined(struct debug *d, uint32_t rank, bool gpu)
{
	static atomic_flag said = ATOMIC_FLAG_INIT;

	debug_view_lock();
	debug_end_epoch(d, "shardd_join", d->rank == rank);
	d->rank = rank;
	d->gpu = gpu;
	debug_view_unlock();
	if (gpu && !atomic_flag_test_and_set(&said))
		fprintf(stderr,
			"shardd: SHARDD_DEBUG=1 cannot protect memory of a GPU: a use after "
			"release "
			"is not reported there (rank %u)\n",
			rank);
}

void debug_left(struct debug *d)
{
	debug_view_lock();
	debug_end_epoch(d, "shardd_leave", false);
	debug_view_unlock();
}

/* Without memory it has no name. */
void debug_unit(struct debug *d, shardd_unit u, const char *name, shardd_group group)
{
	struct debug_unit *more;

	debug_view_lock();
	if (u > d->n_units) {
		more = realloc(d->units, u * sizeof(*more));
		if (more) {
			memset(more + d->n_units, 0, (u - d->n_units) * sizeof(*more));
			d->units = more;
			d->n_units = u;
		}
	}
	if (u && u <= d->n_units) {
		free(d->units[u - 1].name);
		d->units[u - 1] = (struct debug_unit){ strdup(name), group };
	}
	debug_view_unlock();
}

int debug_new(struct debug **ret, struct shardd_error *err)
{
	const char *value = getenv("SHARDD_DEBUG");
	struct debug *d;

	*ret = NULL;
	if (!value || !*value || strcmp(value, "0") == 0)
		return 0;
	if (strcmp(value, "1") != 0)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "SHARDD_DEBUG",
				 "SHARDD_DEBUG=\"%.40s\" is neither 0 nor 1", value);
	d = calloc(1, sizeof(*d));
	if (!d)
		return error_memory(err);
	list_init(&d->ops);
	d->epoch_by = "nothing";
	debug_view_begin();
	*ret = d;
	return 0;
}

static void debug_tell_op(const struct debug *d, const struct debug_op *op)
{
	bool numbered = op->verb && (op->verb->effect == EFFECT_STEP || op->verb->in_reply ||
				     debug_kinds[op->verb->kind].numbered);
	const char *name = op->request->short_name;

	fprintf(stderr, "shardd: nobody waited for the ticket of %.*s",
		(int)(strlen(name) - strlen("Request")), name);
	if (op->id && !numbered)
		fprintf(stderr, " of unit '%.100s'", debug_unit_name(d, op->id));
	fprintf(stderr, " (rank %u): wait for every ticket before you close\n", d->rank);
}

static void debug_tell_ops(struct debug *d)
{
	struct debug_op *op, *tmp;
	size_t n = 0;

	list_for_each (op, tmp, &d->ops, link) {
		if (!op->detached && n++ < MAX_TOLD)
			debug_tell_op(d, op);
		list_unlink(&op->link);
		free(op);
	}
	if (n > MAX_TOLD)
		fprintf(stderr, "shardd: nor for %zu more tickets (rank %u)\n", n - MAX_TOLD,
			d->rank);
}

static void debug_free_loans(struct debug *d, size_t bucket)
{
	while (d->loans[bucket]) {
		struct debug_loan *l = d->loans[bucket];

		d->loans[bucket] = l->next;
		while (l->views)
			debug_view_orphan(l->views, "shardd_close",
					  "keep the client open while you use its memory");
		free(l);
	}
}

struct debug *debug_free(struct debug *d)
{
	if (!d)
		return NULL;
	debug_view_lock();
	debug_tell_ops(d);
	for (size_t i = 0; i < N_LOANS; i++)
		debug_free_loans(d, i);
	debug_view_unlock();
	for (size_t i = 0; i < d->n_units; i++)
		free(d->units[i].name);
	free(d->units);
	free(d);
	return NULL;
}
