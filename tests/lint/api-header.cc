/* What tests/lint/api-header compiles as C++. */
#include <shardd/shardd.h>

int api_header_gather(shardd_client *c, shardd_unit u, shardd_error *err);

int api_header_gather(shardd_client *c, shardd_unit u, shardd_error *err)
{
	const void *data = nullptr;
	shardd_reduce_options o = shardd_reduce_options();

	o.size = sizeof(o);
	o.unit = u;
	o.more = true;
	int r = shardd_reduce_with(c, &o, nullptr, err);
	return r == 0 ? shardd_gather(c, u, &data, err) : r;
}
