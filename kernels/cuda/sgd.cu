#include "optimizer.cuh"

/* The buffer is neither read nor written without momentum, and not read at first. */
struct sgd_body {
	const struct cuda_sgd &a;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		using f32 = vec<DTYPE_FP32, V>;
		const bool momentum = a.mu != 0.0f;
		typename f32::raw p[U], g[U], buf[U] = {};

#pragma unroll
		for (int u = 0; u < U; u++) {
			p[u] = f32::get(a.p, vector_at<V>(i, u));
			g[u] = f32::get(a.g, vector_at<V>(i, u));
			if (momentum && !a.first)
				buf[u] = f32::get(a.buf, vector_at<V>(i, u));
		}
#pragma unroll
		for (int u = 0; u < U; u++) {
			step<V>(vector_at<V>(i, u), p[u], g[u], buf[u]);
			f32::put(a.p, vector_at<V>(i, u), p[u]);
			if (momentum)
				f32::put(a.buf, vector_at<V>(i, u), buf[u]);
		}
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

KERNEL(6) shardd_sgd(const __grid_constant__ struct cuda_sgd a)
{
	sgd_body body = { a };
	uint64_t head = head_f32(head_of<4, LAUNCH_VECTOR>(a.p), a.g);

	if (a.mu != 0.0f)
		head = head_f32(head, a.buf);
	walk_any<LAUNCH_VECTOR, LAUNCH_OPTIMIZER_UNROLL>(a.n, head, body);
}
