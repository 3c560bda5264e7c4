/* What tests/lint/api-header compiles as C: a user of every form of a call. */
#include <shardd/shardd.h>

int api_header_gather(shardd_client *c, shardd_unit u, struct shardd_error *err);
struct shardd_unit_spec api_header_spec(double lr);

int api_header_gather(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	const void *data = NULL;
	shardd_ticket t = 0;
	int r = shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), &t, err);

	if (r == 0)
		r = shardd_wait(c, t, -1, NULL, err);
	if (r == 0)
		r = shardd_reduce_with(c, SHARDD_OPTIONS(reduce, .unit = u, .more = true), NULL,
				       err);
	return r == 0 ? shardd_gather(c, u, &data, err) : r;
}

struct shardd_unit_spec api_header_spec(double lr)
{
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .optimizer =
						 SHARDD_ADAMW_DEFAULTS(.lr = lr, .eps = 1e-6) };

	if (lr == 0)
		spec.optimizer = SHARDD_SGD_DEFAULTS(.momentum = 0.9);
	else if (lr < 0)
		spec.optimizer = SHARDD_ADAM_DEFAULTS(.amsgrad = true);
	return spec;
}
