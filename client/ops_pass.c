/* The passes of shardd.h: guarded units, their policies and what is gathered ahead. */
#include "client_error.h"
#include "core/check.h"
#include "op.h"

static_assert((int)SHARDD_BACKWARD == SHARDD__V1__PASS__PASS_BACKWARD, "passes");

static void begin_result(const ProtobufCMessage *m, struct shardd_result *ret,
			 const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__BeginPassReply *reply = (const Shardd__V1__BeginPassReply *)m;

	ret->copied = reply->copied;
	*ret_place = reply->place;
}

static void end_result(const ProtobufCMessage *m, struct shardd_result *ret,
		       const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->kept = ((const Shardd__V1__EndPassReply *)m)->kept;
}

OP(begin_pass, BeginPass, begin_pass, begin_result);
OP(end_pass, EndPass, end_pass, end_result);
OP(set_reshard, SetReshard, set_reshard, NULL);
OP(set_prefetch, SetPrefetch, set_prefetch, NULL);
OP(set_factors, SetFactors, set_factors, NULL);

int shardd_begin_pass_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__BeginPassRequest q = SHARDD__V1__BEGIN_PASS_REQUEST__INIT;

	q.unit = u;
	q.pass = (Shardd__V1__Pass)pass;
	return op_submit(c, &begin_pass, &q.base, t, err);
}

int shardd_begin_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass, const void **data,
		      struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_begin_pass_submit(c, u, pass, &t, err), &t, &result, err);

	if (r == 0 && data)
		*data = result.data;
	return r;
}

int shardd_end_pass_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass, bool sync,
			   shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__EndPassRequest q = SHARDD__V1__END_PASS_REQUEST__INIT;

	q.unit = u;
	q.pass = (Shardd__V1__Pass)pass;
	q.sync = sync;
	return op_submit(c, &end_pass, &q.base, t, err);
}

int shardd_end_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass, bool sync,
		    struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_end_pass_submit(c, u, pass, sync, &t, err), &t, NULL, err);
}

static int check_units(const shardd_unit *units, size_t n, struct shardd_error *err)
{
	if (units || !n)
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, "units", "units is NULL, but n is %zu", n);
}

int shardd_set_reshard_submit(shardd_client *c, const shardd_unit *units, size_t n,
			      enum shardd_reshard reshard, shardd_ticket *t,
			      struct shardd_error *err)
{
	Shardd__V1__SetReshardRequest q = SHARDD__V1__SET_RESHARD_REQUEST__INIT;
	int r = check_units(units, n, err);

	if (r < 0)
		return r;
	q.units = (uint32_t *)units;
	q.n_units = n;
	q.reshard = (Shardd__V1__Reshard)reshard;
	return op_submit(c, &set_reshard, &q.base, t, err);
}

int shardd_set_reshard(shardd_client *c, const shardd_unit *units, size_t n,
		       enum shardd_reshard reshard, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_set_reshard_submit(c, units, n, reshard, &t, err), &t, NULL,
			 err);
}

int shardd_set_prefetch_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
			       const shardd_unit *units, size_t n, shardd_ticket *t,
			       struct shardd_error *err)
{
	Shardd__V1__SetPrefetchRequest q = SHARDD__V1__SET_PREFETCH_REQUEST__INIT;
	int r = check_units(units, n, err);

	if (r < 0)
		return r;
	q.unit = u;
	q.pass = (Shardd__V1__Pass)pass;
	q.units = (uint32_t *)units;
	q.n_units = n;
	return op_submit(c, &set_prefetch, &q.base, t, err);
}

int shardd_set_prefetch(shardd_client *c, shardd_unit u, enum shardd_pass pass,
			const shardd_unit *units, size_t n, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_set_prefetch_submit(c, u, pass, units, n, &t, err), &t, NULL,
			 err);
}

int shardd_set_factors_submit(shardd_client *c, shardd_unit u, const struct shardd_factors *factors,
			      shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__SetFactorsRequest q = SHARDD__V1__SET_FACTORS_REQUEST__INIT;

	if (factors->size != sizeof(*factors))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "factors.size",
				 "size is %zu, must be %zu, the size in this library",
				 factors->size, sizeof(*factors));
	q.unit = u;
	q.pre_divide = factors->pre_divide;
	q.post_divide = factors->post_divide;
	q.divide_factor = factors->divide_factor;
	q.force_sum = factors->force_sum;
	return op_submit(c, &set_factors, &q.base, t, err);
}

int shardd_set_factors(shardd_client *c, shardd_unit u, const struct shardd_factors *factors,
		       struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_set_factors_submit(c, u, factors, &t, err), &t, NULL, err);
}
