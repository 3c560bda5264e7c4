/* Adam, AdamW and SGD: four fp32 arrays, one element of each at a time. */
#ifndef SHARDD_CUDA_OPTIMIZER_CUH
#define SHARDD_CUDA_OPTIMIZER_CUH

#include "device.cuh"

static __device__ __forceinline__ uint64_t head_f32(uint64_t head, uint64_t array)
{
	return head_with<4, LAUNCH_VECTOR>(head, array);
}

/* A is cuda_adam or cuda_adamw; step(a, p, g, m, v) is its arithmetic. */
template <class A, void (*STEP)(const A *, float *, float, float *, float *)> struct adam_body {
	const A &a;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		using f32 = vec<DTYPE_FP32, V>;
		typename f32::raw p[U], g[U], m[U], v[U];

#pragma unroll
		for (int u = 0; u < U; u++) {
			p[u] = f32::get(a.p, vector_at<V>(i, u));
			g[u] = f32::get(a.g, vector_at<V>(i, u));
			m[u] = f32::get(a.m, vector_at<V>(i, u));
			v[u] = f32::get(a.v, vector_at<V>(i, u));
		}
#pragma unroll
		for (int u = 0; u < U; u++) {
			step<V>(p[u], g[u], m[u], v[u]);
			f32::put(a.p, vector_at<V>(i, u), p[u]);
			f32::put(a.m, vector_at<V>(i, u), m[u]);
			f32::put(a.v, vector_at<V>(i, u), v[u]);
		}
	}

	template <int V, class R>
	__device__ __forceinline__ void step(R &p, const R &g, R &m, R &v)
	{
#pragma unroll
		for (int j = 0; j < V; j++) {
			float pj = EL_FLOAT(p.w[j]), mj = EL_FLOAT(m.w[j]), vj = EL_FLOAT(v.w[j]);

			STEP(&a, &pj, EL_FLOAT(g.w[j]), &mj, &vj);
			p.w[j] = EL_BITS(pj);
			m.w[j] = EL_BITS(mj);
			v.w[j] = EL_BITS(vj);
		}
	}
};

template <class A, void (*STEP)(const A *, float *, float, float *, float *)>
static __device__ __forceinline__ void adam(const A &a)
{
	adam_body<A, STEP> body = { a };
	uint64_t head = head_of<4, LAUNCH_VECTOR>(a.p);

	head = head_f32(head_f32(head_f32(head, a.g), a.m), a.v);
	walk_any<LAUNCH_VECTOR, LAUNCH_OPTIMIZER_UNROLL>(a.n, head, body);
}

#endif
