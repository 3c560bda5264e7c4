/*
 * Initialise: the parameters of a unit, from a seed, from one rank, or each shard from
 * its own rank. Optimizer state is zeroed. Heals a unit of a torn job.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op_impl.h"
#include "unit/optim.h"

typedef Shardd__V1__InitialiseRequest request;

#define HOW_SEED      SHARDD__V1__INITIALISE_REQUEST__HOW_SEED
#define HOW_BROADCAST SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST
#define HOW_OWN       SHARDD__V1__INITIALISE_REQUEST__HOW_OWN

static int decode_source(struct op *op, const request *r, struct fault *f)
{
	uint64_t need = op->unit->layout.elements * sizeof(float);
	bool must = r->how_case == HOW_OWN ||
		    (r->how_case == HOW_BROADCAST && op->args.init.root == op->m->rank);

	op->buffer = r->buffer;
	op->args.init.data = r->data.data;
	op->args.init.data_bytes = r->data.len;
	if (r->buffer && r->data.len)
		return fault_set(f, FAULT_INVALID, "data",
				 "buffer and data are both given: one is allowed");
	if (!must && (r->buffer || r->data.len))
		return fault_set(
			f, FAULT_INVALID, "buffer",
			"this rank gives no parameters, so buffer must be 0 and data empty");
	if (must && !r->buffer && r->data.len != need)
		return fault_set(f, FAULT_INVALID, "data",
				 "data is %zu bytes: unit '%.100s' needs %llu, or a buffer",
				 r->data.len, op->unit->rec->name, (unsigned long long)need);
	return 0;
}

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const request *r = (const request *)msg;

	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	op->args.init.how = (int)r->how_case;
	if (r->how_case == HOW_SEED) {
		op->args.init.seed = r->seed->seed;
	} else if (r->how_case == HOW_BROADCAST) {
		uint32_t index;

		op->args.init.root = r->broadcast->root;
		if (!group_index(op->group, r->broadcast->root, &index))
			return fault_set(f, FAULT_INVALID, "broadcast.root",
					 "broadcast.root is %u: a rank of group '%.64s' is allowed",
					 r->broadcast->root, op->group->rec->name);
	} else if (r->how_case != HOW_OWN) {
		return fault_set(f, FAULT_INVALID, "how", "how is missing: seed, broadcast or own");
	}
	return decode_source(op, r, f);
}

/* What all ranks must say the same, in words. */
static void print_how(struct op *op)
{
	const char *name = op->unit->rec->name;

	if (op->args.init.how == HOW_SEED)
		op_print(op, "Initialise of unit '%.64s' (seed %llu)", name,
			 (unsigned long long)op->args.init.seed);
	else if (op->args.init.how == HOW_BROADCAST)
		op_print(op, "Initialise of unit '%.64s' (from rank %u)", name, op->args.init.root);
	else
		op_print(op, "Initialise of unit '%.64s' (own)", name);
}

static int check(struct op *op, struct fault *f)
{
	struct unit *u = op->unit;

	if (op->buffer && !op_buffer_at(op, 0, u->layout.elements * sizeof(float), f))
		return f->code;
	print_how(op);
	op->entry.print.words[2] = (uint64_t)op->args.init.how;
	op->entry.print.words[3] = op->args.init.seed;
	op->entry.print.words[4] = op->args.init.root;
	return 0;
}

/* What @op's rank brings: checked again, the buffer may be gone since. */
static const float *source_of(struct op *op)
{
	struct fault f = FAULT_NULL;

	if (op->args.init.data_bytes)
		return (const float *)op->args.init.data;
	return (const float *)op_buffer_at(op, 0, op->unit->layout.elements * sizeof(float), &f);
}

static void copy_kop(struct kop *kop, float *dst, const float *src, uint64_t elements)
{
	*kop = (struct kop){ .kind = KOP_COPY, .n = elements * sizeof(float) };
	kop->copy = (struct k_copy){ dst, src };
}

/* Each rank's shard from its own buffer. */
static unsigned own_kops(struct coll *c)
{
	const struct layout *l = &c->unit->layout;
	unsigned n = 0;

	for (uint32_t i = 0; i < c->n; i++) {
		uint64_t begin = layout_begin(l, i), owned = layout_owned(l, i);

		if (owned)
			copy_kop(&c->kops[n++], optim_at(&c->unit->params, begin),
				 source_of(c->ops[i]) + begin, owned);
	}
	return n;
}

static void job_heal(struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->torn)
			return;
	/* what was committed belongs to parameters that are no more */
	job->torn = false;
	job->rec->uncommitted_steps = 0;
	job->rec->has_commit = false;
	job->rec->step = 0;
}

static void done(struct coll *c)
{
	struct unit *u = c->unit;

	u->rec->initialised = true;
	u->rec->optimizer->steps = 0;
	u->version++;
	u->has_gradient = false;
	full_invalidate(c->job, u);
	if (u->torn) {
		u->torn = false;
		job_heal(c->job);
	}
	coll_end(c, NULL);
}

static void to_other_devices(struct coll *c)
{
	comm_broadcast(c->job->node->comm, coll_comm(c, done), region_addr(&c->unit->params),
		       c->unit->layout.elements * sizeof(float), 0);
}

static int check_unused(const struct coll *c, struct fault *f)
{
	if (!c->unit->gathered_ranks)
		return 0;
	return fault_set(
		f, FAULT_STATE, NULL,
		"unit '%.100s' is still gathered by %u ranks: release it before it is initialised",
		c->unit->rec->name, c->unit->gathered_ranks);
}

static void start(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	struct fault f = FAULT_NULL;
	unsigned n;

	if (coll_overtaken(c, false))
		return;
	if (check_unused(c, &f)) {
		coll_end(c, &f);
		return;
	}
	if (!coll_need_kops(c, c->unit->rec->n_tensors + c->n + 3))
		return;
	if (c->ops[0]->args.init.how == HOW_SEED) {
		optim_seed_kops(c->unit, c->ops[0]->args.init.seed, c->kops);
		n = (unsigned)c->unit->rec->n_tensors;
	} else if (c->ops[0]->args.init.how == HOW_OWN) {
		n = own_kops(c);
	} else {
		struct op *root = c->ops[coll_index(c, c->ops[0]->args.init.root)];

		copy_kop(c->kops, optim_at(&c->unit->params, 0), source_of(root),
			 c->unit->layout.elements);
		n = 1;
	}
	n += optim_zero_kops(c->unit, c->kops + n);
	c->unit->rec->initialised = false; /* until it is whole: a device may fail half-way */
	coll_kernels(c, n, to_other_devices);
}

static void run(struct coll *c)
{
	if (apply_ensure(c->job, &c->parked, start))
		start(&c->parked);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__InitialiseReply reply = SHARDD__V1__INITIALISE_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_init = {
	.name = "Initialise",
	.collective = true,
	.request = &shardd__v1__initialise_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
};
