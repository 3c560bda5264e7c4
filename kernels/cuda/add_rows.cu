/*
 * Each thread has one column and walks through all entries, so that one thread adds all values of
 * an element, in order. Entries are read in groups: several loads are in flight, and only the
 * additions wait for each other.
 */
#include "device.cuh"

#define ADD_ROWS_GROUP 8

template <int T>
static __device__ __forceinline__ void add_group(const struct cuda_add_rows &a,
						 struct el_divisor pre, uint64_t column, uint64_t e)
{
	const int64_t *rows = reinterpret_cast<const int64_t *>(a.rows);
	typename vec<T, 1>::raw x[ADD_ROWS_GROUP];
	uint64_t row[ADD_ROWS_GROUP];

#pragma unroll
	for (int g = 0; g < ADD_ROWS_GROUP; g++) {
		if (e + g >= a.n_rows)
			break;
		row[g] = static_cast<uint64_t>(rows[e + g]);
		x[g] = vec<T, 1>::get(a.values, (e + g) * a.n + column);
	}
#pragma unroll
	for (int g = 0; g < ADD_ROWS_GROUP; g++) {
		if (e + g >= a.n_rows)
			break;
		if (row[g] < a.first_row || row[g] >= a.row_limit)
			continue;
		float *out = reinterpret_cast<float *>(a.out) + (row[g] - a.first_row) * a.n + column;
		*out = EL_ADD(*out, el_apply(a.pre, pre, vec<T, 1>::widen(x[g], 0)));
	}
}

template <int T> static __device__ __forceinline__ void add_rows(const struct cuda_add_rows &a)
{
	const struct el_divisor pre = el_factor(a.pre);

	for (uint64_t c = thread_index(); c < a.n; c += thread_count())
		for (uint64_t e = 0; e < a.n_rows; e += ADD_ROWS_GROUP)
			add_group<T>(a, pre, c, e);
}

KERNEL(4) shardd_add_rows(const __grid_constant__ struct cuda_add_rows a)
{
	if (a.dtype == DTYPE_FP32)
		add_rows<DTYPE_FP32>(a);
	else if (a.dtype == DTYPE_BF16)
		add_rows<DTYPE_BF16>(a);
	else
		add_rows<DTYPE_FP16>(a);
}
