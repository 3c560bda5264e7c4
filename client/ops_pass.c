/* The passes of shardd.h: guarded units, their policies and what is gathered ahead. */
#include "client_error.h"
#include "core/check.h"
#include "op.h"
#include "options.h"

static_assert((int)SHARDD_BACKWARD == SHARDD__V1__PASS__PASS_BACKWARD, "passes");

static void ops_pass_begin_result(const ProtobufCMessage *m, struct shardd_result *ret,
				  const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__BeginPassResponse *reply = (const Shardd__V1__BeginPassResponse *)m;

	ret->copied = reply->copied;
	*ret_place = reply->place;
}

static void ops_pass_end_result(const ProtobufCMessage *m, struct shardd_result *ret,
				const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->kept = ((const Shardd__V1__EndPassResponse *)m)->kept;
}

OP(begin_pass, BeginPass, begin_pass, ops_pass_begin_result);
OP(end_pass, EndPass, end_pass, ops_pass_end_result);
OP(set_reshard, SetReshard, set_reshard, NULL);
OP(set_prefetch, SetPrefetch, set_prefetch, NULL);
OP(set_factors, SetFactors, set_factors, NULL);

int shardd_submit_begin_pass(shardd_client *c, const struct shardd_begin_pass_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__BeginPassRequest q = SHARDD__V1__BEGIN_PASS_REQUEST__INIT;
	struct shardd_begin_pass_options room;
	const struct shardd_begin_pass_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.pass = (Shardd__V1__Pass)o->pass;
	return op_submit(c, &begin_pass, &q.base, t, err);
}

int shardd_submit_end_pass(shardd_client *c, const struct shardd_end_pass_options *options,
			   shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__EndPassRequest q = SHARDD__V1__END_PASS_REQUEST__INIT;
	struct shardd_end_pass_options room;
	const struct shardd_end_pass_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.pass = (Shardd__V1__Pass)o->pass;
	q.sync = o->sync;
	return op_submit(c, &end_pass, &q.base, t, err);
}

static int ops_pass_check_units(const shardd_unit *units, size_t n, struct shardd_error *err)
{
	if (units || !n)
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, "units", "units is NULL, but n_units is %zu",
			 n);
}

int shardd_submit_set_reshard(shardd_client *c, const struct shardd_set_reshard_options *options,
			      shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__SetReshardRequest q = SHARDD__V1__SET_RESHARD_REQUEST__INIT;
	struct shardd_set_reshard_options room;
	const struct shardd_set_reshard_options *o = OPTIONS_READ(options, &room, err);
	int r;

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	r = ops_pass_check_units(o->units, o->n_units, err);
	if (r < 0)
		return r;
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	q.reshard = (Shardd__V1__Reshard)o->reshard;
	return op_submit(c, &set_reshard, &q.base, t, err);
}

int shardd_submit_set_prefetch(shardd_client *c, const struct shardd_set_prefetch_options *options,
			       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__SetPrefetchRequest q = SHARDD__V1__SET_PREFETCH_REQUEST__INIT;
	struct shardd_set_prefetch_options room;
	const struct shardd_set_prefetch_options *o = OPTIONS_READ(options, &room, err);
	int r;

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	r = ops_pass_check_units(o->units, o->n_units, err);
	if (r < 0)
		return r;
	q.unit = o->unit;
	q.pass = (Shardd__V1__Pass)o->pass;
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	return op_submit(c, &set_prefetch, &q.base, t, err);
}

int shardd_submit_set_factors(shardd_client *c, const struct shardd_set_factors_options *options,
			      shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__SetFactorsRequest q = SHARDD__V1__SET_FACTORS_REQUEST__INIT;
	struct shardd_set_factors_options room;
	const struct shardd_set_factors_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.pre_divide = o->pre_divide;
	q.post_divide = o->post_divide;
	q.divide_factor = o->divide_factor;
	q.force_sum = o->force_sum;
	return op_submit(c, &set_factors, &q.base, t, err);
}
