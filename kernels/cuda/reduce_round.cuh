/*
 * The reduction with roundings: of every input, of the sum after each addition, of the
 * factors. The types of the inputs and of the sum are the compiler's; those of the factors and of
 * the output are the same for all threads and are read at run time.
 */
#ifndef SHARDD_CUDA_REDUCE_ROUND_CUH
#define SHARDD_CUDA_REDUCE_ROUND_CUH

#include "reduce.cuh"

template <int T, int SUM> struct reduce_round_body {
	const struct cuda_reduce &a;
	const uint64_t *in;
	struct el_divisor pre, post;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		constexpr int G = LAUNCH_REDUCE_GROUP;
		typename vec<T, V>::raw x[G][1];
		float t[V];

		static_assert(U == 1, "one vector in a turn");
#pragma unroll
		for (int j = 0; j < V; j++)
			t[j] = EL_SUM_NOTHING;
		for (uint32_t j = 0; j < a.k; j += G) {
			get_group<T, V, 1, G>(x, in, j, a.k, i);
#pragma unroll
			for (int g = 0; g < G; g++) {
				if (j + g >= a.k)
					break;
				add<V>(t, x[g][0]);
			}
		}
		if (a.out_dtype == DTYPE_FP32)
			put<DTYPE_FP32, V>(i, t);
		else if (a.out_dtype == DTYPE_BF16)
			put<DTYPE_BF16, V>(i, t);
		else
			put<DTYPE_FP16, V>(i, t);
	}

	template <int V>
	__device__ __forceinline__ void add(float t[V], const typename vec<T, V>::raw &x)
	{
#pragma unroll
		for (int j = 0; j < V; j++) {
			float y = el_round(SUM, el_apply(a.pre, pre, vec<T, V>::widen(x, j)));

			t[j] = el_round(SUM, el_sum(t[j], y));
		}
	}

	template <int OUT, int V> __device__ __forceinline__ void put(uint64_t i, float t[V])
	{
		using out = vec<OUT, V>;

#pragma unroll
		for (int j = 0; j < V; j++)
			t[j] = el_apply(a.post, post, t[j]);
		if (a.accumulate) {
			typename out::raw old = out::get(a.out, i);

#pragma unroll
			for (int j = 0; j < V; j++)
				t[j] = el_accumulate(true, out::widen(old, j), t[j]);
		}
		out::put(a.out, i, out::narrow(t));
	}
};

template <int T, int SUM>
static __device__ __forceinline__ void reduce_round_with(const struct cuda_reduce &a,
							 const uint64_t *in)
{
	constexpr int V = LAUNCH_VECTOR;
	reduce_round_body<T, SUM> body = { a, in, el_factor(a.pre), el_factor(a.post) };
	uint64_t head = a.out_dtype == DTYPE_FP32 ? head_of<4, V>(a.out) : head_of<2, V>(a.out);

	walk_any<V, 1>(a.n, head_with_all<size_of<T>, V>(head, in, a.k), body);
}

template <int T>
static __device__ __forceinline__ void reduce_round_type(const struct cuda_reduce &a,
							 const uint64_t *in)
{
	if (a.sum_dtype == DTYPE_FP32)
		reduce_round_with<T, DTYPE_FP32>(a, in);
	else if (a.sum_dtype == DTYPE_BF16)
		reduce_round_with<T, DTYPE_BF16>(a, in);
	else
		reduce_round_with<T, DTYPE_FP16>(a, in);
}

static __device__ __forceinline__ void reduce_round(const struct cuda_reduce &a,
						    const uint64_t *in)
{
	if (a.in_dtype == DTYPE_FP32)
		reduce_round_type<DTYPE_FP32>(a, in);
	else if (a.in_dtype == DTYPE_BF16)
		reduce_round_type<DTYPE_BF16>(a, in);
	else
		reduce_round_type<DTYPE_FP16>(a, in);
}

#endif
