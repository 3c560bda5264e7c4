/* Parameters and optimizer state in this rank's own memory, and back. */
#include "client.h"
#include "client_error.h"
#include "op.h"
#include "options.h"

static void ops_summon_result(const ProtobufCMessage *m, struct shardd_result *ret,
			      const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__SummonFullResponse *reply = (const Shardd__V1__SummonFullResponse *)m;

	ret->optimizer_steps = reply->optimizer_steps;
	*ret_place = reply->place;
}

static int ops_summon_keep(struct shardd_client *c, const ProtobufCMessage *m,
			   struct shardd_error *err)
{
	return places_take_steps(&c->places, (const Shardd__V1__SummonFullResponse *)m, err);
}

OP_KEEPING(summon, SummonFull, summon_full, ops_summon_result, ops_summon_keep);
OP(return_full, ReturnFull, return_full, NULL);

int shardd_submit_summon(shardd_client *c, const struct shardd_summon_options *options,
			 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__SummonFullRequest q = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;
	struct shardd_summon_options room;
	const struct shardd_summon_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.state = o->state;
	return op_submit(c, &summon, &q.base, t, err);
}

int shardd_submit_return(shardd_client *c, const struct shardd_return_options *options,
			 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ReturnFullRequest q = SHARDD__V1__RETURN_FULL_REQUEST__INIT;
	struct shardd_return_options room;
	const struct shardd_return_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (o->n_tensors && !o->tensor_steps)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.tensor_steps",
				 "tensor_steps is NULL, but n_tensors is %zu", o->n_tensors);
	q.unit = o->unit;
	q.write = o->write;
	if (o->optimizer_steps) {
		q.optional_optimizer_steps_case =
			SHARDD__V1__RETURN_FULL_REQUEST__OPTIONAL_OPTIMIZER_STEPS_OPTIMIZER_STEPS;
		q.optimizer_steps = *o->optimizer_steps;
	}
	q.tensor_steps = (uint64_t *)o->tensor_steps;
	q.n_tensor_steps = o->n_tensors;
	return op_submit(c, &return_full, &q.base, t, err);
}
