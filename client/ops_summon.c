/* Parameters and optimizer state in this rank's own memory, and back. */
#include "client.h"
#include "client_error.h"
#include "op.h"

static void summon_result(const ProtobufCMessage *m, struct shardd_result *ret,
			  const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__SummonFullReply *reply = (const Shardd__V1__SummonFullReply *)m;

	ret->optimizer_steps = reply->optimizer_steps;
	*ret_place = reply->place;
}

static int summon_keep(struct shardd_client *c, const ProtobufCMessage *m, struct shardd_error *err)
{
	return places_take_steps(&c->places, (const Shardd__V1__SummonFullReply *)m, err);
}

OP_KEEPING(summon, SummonFull, summon_full, summon_result, summon_keep);
OP(return_full, ReturnFull, return_full, NULL);

int shardd_summon_state_submit(shardd_client *c, shardd_unit u, uint32_t state, shardd_ticket *t,
			       struct shardd_error *err)
{
	Shardd__V1__SummonFullRequest q = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;

	q.unit = u;
	q.state = state;
	return op_submit(c, &summon, &q.base, t, err);
}

int shardd_summon_state(shardd_client *c, shardd_unit u, uint32_t state, void **data,
			uint64_t *optimizer_steps, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_summon_state_submit(c, u, state, &t, err), &t, &result, err);

	if (r == 0 && data)
		*data = result.data;
	if (r == 0 && optimizer_steps)
		*optimizer_steps = result.optimizer_steps;
	return r;
}

int shardd_summon_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			 struct shardd_error *err)
{
	return shardd_summon_state_submit(c, u, 0, t, err);
}

int shardd_summon(shardd_client *c, shardd_unit u, void **data, struct shardd_error *err)
{
	return shardd_summon_state(c, u, 0, data, NULL, err);
}

int shardd_return_with_submit(shardd_client *c, shardd_unit u,
			      const struct shardd_return_options *o, shardd_ticket *t,
			      struct shardd_error *err)
{
	Shardd__V1__ReturnFullRequest q = SHARDD__V1__RETURN_FULL_REQUEST__INIT;
	int r = client_check_size(o->size, sizeof(*o), "options.size", err);

	if (r < 0)
		return r;
	if (o->n_tensors && !o->tensor_steps)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.tensor_steps",
				 "tensor_steps is NULL, but n_tensors is %zu", o->n_tensors);
	q.unit = u;
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

int shardd_return_with(shardd_client *c, shardd_unit u, const struct shardd_return_options *o,
		       struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_return_with_submit(c, u, o, &t, err), &t, NULL, err);
}

int shardd_return_state_submit(shardd_client *c, shardd_unit u, bool write,
			       const uint64_t *optimizer_steps, shardd_ticket *t,
			       struct shardd_error *err)
{
	struct shardd_return_options o = { .size = sizeof(o),
					   .write = write,
					   .optimizer_steps = optimizer_steps };

	return shardd_return_with_submit(c, u, &o, t, err);
}

int shardd_return_state(shardd_client *c, shardd_unit u, bool write,
			const uint64_t *optimizer_steps, struct shardd_error *err)
{
	shardd_ticket t;
	int r = shardd_return_state_submit(c, u, write, optimizer_steps, &t, err);

	return op_finish(c, r, &t, NULL, err);
}

int shardd_return_submit(shardd_client *c, shardd_unit u, bool write, shardd_ticket *t,
			 struct shardd_error *err)
{
	return shardd_return_state_submit(c, u, write, NULL, t, err);
}

int shardd_return(shardd_client *c, shardd_unit u, bool write, struct shardd_error *err)
{
	return shardd_return_state(c, u, write, NULL, err);
}
