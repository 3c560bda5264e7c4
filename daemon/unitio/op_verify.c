/* VerifyModel: have all ranks of a group registered the same units, in the same order? What
 * is in a unit was compared when it was registered. */
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "unitio/registered.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

static int op_verify_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	return op_take_group(op, ((const Shardd__V1__VerifyModelRequest *)msg)->group, f);
}

static const char *op_verify_name_at(const struct member *m, uint32_t i)
{
	if (i >= m->n_registered)
		return NULL;
	CHECK(m->registered[i] && m->registered[i] <= m->job->n_units);
	return m->job->units[m->registered[i] - 1]->rec->name;
}

/* Of the names of all units, in their order. */
static uint64_t op_verify_word(const struct member *m)
{
	uint64_t h = FNV_BEGIN;

	for (uint32_t i = 0; i < m->n_registered; i++)
		h = fnv_add(fnv_add_text(h, op_verify_name_at(m, i)), 0);
	return h;
}

static int op_verify_check(struct op *op, struct fault *f)
{
	(void)f;
	op_print(op, "VerifyModel");
	if (job_is_across(op->m->job)) /* on one node the ranks are compared, which says more */
		op->entry.print.words[2] = op_verify_word(op->m);
	return 0;
}

static void op_verify_describe(const struct member *m, uint32_t i, char *buf, size_t bytes)
{
	const char *name = op_verify_name_at(m, i);

	if (name)
		snprintf(buf, bytes, "rank %u (pid %d) has unit '%.100s'", m->rank, member_pid(m),
			 name);
	else
		snprintf(buf, bytes, "rank %u (pid %d) has registered only %u", m->rank,
			 member_pid(m), m->n_registered);
}

static int op_verify_compare(const struct member *a, const struct member *b, struct fault *f)
{
	uint32_t i = 0;
	char first[160], second[160];

	while (i < a->n_registered && i < b->n_registered && a->registered[i] == b->registered[i])
		i++;
	if (i == a->n_registered && i == b->n_registered)
		return 0;
	op_verify_describe(a, i, first, sizeof(first));
	op_verify_describe(b, i, second, sizeof(second));
	return fault_set(f, FAULT_STATE, NULL, "models differ at position %u: %s, %s", i, first,
			 second);
}

static enum res op_verify_tick(struct coll *c)
{
	for (uint32_t i = 1; i < c->n; i++)
		if (op_verify_compare(c->members[0], c->members[i], c->fault))
			return RES_FAILED;
	return RES_DONE;
}

static void op_verify_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__VerifyModelResponse reply = SHARDD__V1__VERIFY_MODEL_RESPONSE__INIT;

	reply.units = op->m->n_registered;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_verify = {
	.name = "VerifyModel",
	.collective = true,
	.request = &shardd__v1__verify_model_request__descriptor,
	.decode = op_verify_decode,
	.check = op_verify_check,
	.coll_tick = op_verify_tick,
	.encode = op_verify_encode,
};
