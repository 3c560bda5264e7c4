/* Adam, AdamW and SGD: four fp32 arrays, one element of each at a time. */
#ifndef SHARDD_CUDA_OPTIMIZER_CUH
#define SHARDD_CUDA_OPTIMIZER_CUH

#include "undo.cuh"

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

/* The same with vmax, if there is one, and a tail: @step(a, p, g, m, v, vmax, in the tail). */
template <class A, class UNDO,
	  void (*STEP)(const A *, float *, float, float *, float *, float *, bool)>
struct adam_vmax_body {
	const A &a;
	uint64_t tail_from;
	UNDO undo;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		using f32 = vec<DTYPE_FP32, V>;
		typename f32::raw p, g, m, v, x = {};

		static_assert(U == 1, "one vector in a turn");
		if (undo.passes())
			return;
		p = load<f32::BYTES>(undo.from(0, a.p + i * 4));
		g = f32::get(a.g, i);
		m = load<f32::BYTES>(undo.from(1, a.m + i * 4));
		v = load<f32::BYTES>(undo.from(2, a.v + i * 4));
		if (a.vmax)
			x = load<f32::BYTES>(undo.from(3, a.vmax + i * 4));
		undo.save(0, p);
		undo.save(1, m);
		undo.save(2, v);
		if (a.vmax)
			undo.save(3, x);
		undo.publish();
#pragma unroll
		for (int j = 0; j < V; j++) {
			float pj = EL_FLOAT(p.w[j]), mj = EL_FLOAT(m.w[j]), vj = EL_FLOAT(v.w[j]);
			float xj = EL_FLOAT(x.w[j]);

			STEP(&a, &pj, EL_FLOAT(g.w[j]), &mj, &vj, &xj, i + j >= tail_from);
			p.w[j] = EL_BITS(pj);
			m.w[j] = EL_BITS(mj);
			v.w[j] = EL_BITS(vj);
			x.w[j] = EL_BITS(xj);
		}
		f32::put(a.p, i, p);
		f32::put(a.m, i, m);
		f32::put(a.v, i, v);
		if (a.vmax)
			f32::put(a.vmax, i, x);
	}
};

template <class A, class UNDO,
	  void (*STEP)(const A *, float *, float, float *, float *, float *, bool)>
static __device__ __forceinline__ void adam_vmax(const A &a, uint64_t tail_from, UNDO undo)
{
	adam_vmax_body<A, UNDO, STEP> body = { a, tail_from, undo };
	uint64_t head = head_of<4, LAUNCH_VECTOR>(a.p);

	head = head_f32(head_f32(head_f32(head, a.g), a.m), a.v);
	if (a.vmax)
		head = head_f32(head, a.vmax);
	walk_any<LAUNCH_VECTOR, 1>(a.n, head, body);
}

/* In double there is no tail: nothing is fused. */
static __device__ __forceinline__ void adam_f64_step(const struct cuda_adam_f64 *a, float *p,
						     float g, float *m, float *v, float *vmax,
						     bool tail)
{
	(void)tail;
	el_adam_f64(a, p, g, m, v, vmax);
}

/* The buffer is neither read nor written without momentum, and not read at first. */
template <class UNDO> struct sgd_body {
	const struct cuda_sgd &a;
	UNDO undo;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		using f32 = vec<DTYPE_FP32, V>;
		const bool momentum = a.mu != 0.0f;
		typename f32::raw p, g, buf = {};

		static_assert(U == 1, "one vector in a turn");
		if (undo.passes())
			return;
		p = load<f32::BYTES>(undo.from(0, a.p + i * 4));
		g = f32::get(a.g, i);
		if (momentum && !a.first)
			buf = load<f32::BYTES>(undo.from(1, a.buf + i * 4));
		undo.save(0, p);
		if (momentum && !a.first)
			undo.save(1, buf);
		undo.publish();
		step<V>(i, p, g, buf);
		f32::put(a.p, i, p);
		if (momentum)
			f32::put(a.buf, i, buf);
	}

	template <int V, class R>
	__device__ __forceinline__ void step(uint64_t i, R &p, const R &g, R &buf)
	{
#pragma unroll
		for (int j = 0; j < V; j++) {
			float pj = EL_FLOAT(p.w[j]), bj = EL_FLOAT(buf.w[j]);

			el_sgd(&a, &pj, EL_FLOAT(g.w[j]), &bj, i + j >= a.tail_from);
			p.w[j] = EL_BITS(pj);
			buf.w[j] = EL_BITS(bj);
		}
	}
};

template <class UNDO>
static __device__ __forceinline__ void sgd(const struct cuda_sgd &a, UNDO undo)
{
	sgd_body<UNDO> body = { a, undo };
	uint64_t head = head_f32(head_of<4, LAUNCH_VECTOR>(a.p), a.g);

	if (a.mu != 0.0f)
		head = head_f32(head, a.buf);
	walk_any<LAUNCH_VECTOR, LAUNCH_OPTIMIZER_UNROLL>(a.n, head, body);
}

#endif
