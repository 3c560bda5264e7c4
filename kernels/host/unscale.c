#include "host/host.h"

/* Piece by piece, so that elements are still in the cache when they are multiplied. */
void HOST(unscale)(const struct k_unscale *a, size_t begin, size_t end)
{
	const struct k_found_inf look = { a->x, a->found, DTYPE_FP32 };
	const struct k_scale scale = { a->x, a->inv, NULL };

	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		HOST(found_inf)(&look, at, at + n);
		if (a->inv != 1)
			HOST(scale)(&scale, at, at + n);
	}
}
