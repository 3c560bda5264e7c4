#include "optimizer.cuh"

struct adam_any_body {
	const struct cuda_adam_any &a;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		using f32 = vec<DTYPE_FP32, V>;
		typename f32::raw p, g, m, v, x = {};

		static_assert(U == 1, "one vector in a turn");
		p = f32::get(a.p, i);
		g = f32::get(a.g, i);
		m = f32::get(a.m, i);
		v = f32::get(a.v, i);
		if (a.vmax)
			x = f32::get(a.vmax, i);
#pragma unroll
		for (int j = 0; j < V; j++) {
			float pj = EL_FLOAT(p.w[j]), mj = EL_FLOAT(m.w[j]), vj = EL_FLOAT(v.w[j]);
			float xj = EL_FLOAT(x.w[j]);

			el_adam_any(&a, &pj, EL_FLOAT(g.w[j]), &mj, &vj, &xj, i + j >= a.tail_from);
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

KERNEL(4) shardd_adam_any(const __grid_constant__ struct cuda_adam_any a)
{
	adam_any_body body = { a };
	uint64_t head = head_of<4, LAUNCH_VECTOR>(a.p);

	head = head_f32(head_f32(head_f32(head, a.g), a.m), a.v);
	if (a.vmax)
		head = head_f32(head, a.vmax);
	walk_any<LAUNCH_VECTOR, 1>(a.n, head, body);
}
