/*
 * Pack and unpack: rows that are strided on one side or both, converted on the way. A thread's
 * place moves on by a fixed number of rows and columns each time, so that only the first step takes
 * a division.
 */
#include "device.cuh"

/* Vector number i, as row and vector of the row. */
struct place {
	uint64_t row, column;
};

/* @columns: vectors of a row; @step less than a row and some rows. */
static __device__ __forceinline__ void place_move(struct place *p, const struct place &step,
						  uint64_t columns)
{
	p->row += step.row;
	p->column += step.column;
	if (p->column >= columns) {
		p->column -= columns;
		p->row++;
	}
}

static __device__ __forceinline__ struct place place_of(uint64_t i, uint64_t columns)
{
	return { i / columns, i % columns };
}

template <int D, int S, int V>
static __device__ __forceinline__ void pack_vectors(const struct cuda_pack &a)
{
	constexpr int U = LAUNCH_PACK_UNROLL;
	const uint64_t columns = a.row_elements / V;
	const struct place step = place_of(thread_count(), columns);
	struct place p = place_of(thread_index(), columns);

	while (p.row < a.rows) {
		typename vec<S, V>::raw x[U];
		uint64_t to[U];
		bool there[U];

#pragma unroll
		for (int u = 0; u < U; u++) {
			there[u] = p.row < a.rows;
			to[u] = p.row * a.dst_stride + p.column * V;
			if (there[u])
				x[u] = vec<S, V>::get(a.src, p.row * a.src_stride + p.column * V);
			place_move(&p, step, columns);
		}
#pragma unroll
		for (int u = 0; u < U; u++) {
			float f[V];

			if (!there[u])
				break;
			if constexpr (D == S) {
				vec<D, V>::put(a.dst, to[u], x[u]);
			} else {
#pragma unroll
				for (int j = 0; j < V; j++)
					f[j] = vec<S, V>::widen(x[u], j);
				vec<D, V>::put(a.dst, to[u], vec<D, V>::narrow(f));
			}
		}
	}
}

template <int SIZE, int V>
static __device__ __forceinline__ bool fits(uint64_t array, uint64_t stride)
{
	return array % (SIZE * V) == 0 && stride % V == 0;
}

template <int D, int S> static __device__ __forceinline__ void pack(const struct cuda_pack &a)
{
	constexpr int V = size_of<D> == 2 && size_of<S> == 2 ? LAUNCH_SHORT_VECTOR : LAUNCH_VECTOR;

	if (a.row_elements == 0)
		return;
	if (a.row_elements % V == 0 && fits<size_of<D>, V>(a.dst, a.dst_stride) &&
	    fits<size_of<S>, V>(a.src, a.src_stride))
		pack_vectors<D, S, V>(a);
	else
		pack_vectors<D, S, 1>(a);
}

template <int S> static __device__ __forceinline__ void pack_from(const struct cuda_pack &a)
{
	if (a.dst_dtype == DTYPE_FP32)
		pack<DTYPE_FP32, S>(a);
	else if (a.dst_dtype == DTYPE_BF16)
		pack<DTYPE_BF16, S>(a);
	else
		pack<DTYPE_FP16, S>(a);
}

KERNEL(4) shardd_pack(const __grid_constant__ struct cuda_pack a)
{
	if (a.src_dtype == DTYPE_FP32)
		pack_from<DTYPE_FP32>(a);
	else if (a.src_dtype == DTYPE_BF16)
		pack_from<DTYPE_BF16>(a);
	else
		pack_from<DTYPE_FP16>(a);
}
