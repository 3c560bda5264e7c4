/* What a client knows of a unit: the places of its tensors and buffers, and what the last op has said
 * of its tensors. */
#include "client.h"

int shardd_tensor_places(shardd_client *c, shardd_unit u, struct shardd_tensor_place *ret, size_t n,
			 struct shardd_error *err)
{
	int r = client_check(c, err);

	return r < 0 ? r : places_tensors(&c->places, u, ret, n, err);
}

int shardd_buffer_places(shardd_client *c, shardd_unit u, struct shardd_buffer_place *ret, size_t n,
			 struct shardd_error *err)
{
	int r = client_check(c, err);

	return r < 0 ? r : places_buffers(&c->places, u, ret, n, err);
}

int shardd_unit_steps(shardd_client *c, shardd_unit u, uint64_t *ret, size_t n,
		      struct shardd_error *err)
{
	int r = client_check(c, err);

	return r < 0 ? r : places_steps(&c->places, u, ret, n, err);
}

int shardd_unit_unused(shardd_client *c, shardd_unit u, bool *ret, size_t n,
		       struct shardd_error *err)
{
	int r = client_check(c, err);

	return r < 0 ? r : places_unused(&c->places, u, ret, n, err);
}

int shardd_shard_pieces(shardd_client *c, shardd_unit u, struct shardd_shard_piece *ret, size_t n,
			size_t *ret_n, struct shardd_error *err)
{
	int r = client_check(c, err);

	return r < 0 ? r : places_pieces(&c->places, u, ret, n, ret_n, err);
}
