#include "kernel_cases.h"

#ifdef SHARDD_CUDA
#include <string.h>

static void cast_case(struct tester *t, enum dtype to, enum dtype from, size_t n,
		      const struct case_shift *s)
{
	struct bed *b = &t->bed;
	unsigned out, in;

	bed_begin(b);
	out = bed_add(b, to, n, s->out, BED_ANY);
	in = bed_add(b, from, n, s->in, BED_ANY);
	bed_upload(b);
	kernels_ref()->cast(&(struct k_cast){ bed_host(b, out), bed_host(b, in), to, from, false },
			    0, n);
	device_launch(&t->device, CUDA_FN_CAST,
		      &(struct cuda_cast){ .dst = bed_device(b, out),
					   .src = bed_device(b, in),
					   .n = n,
					   .dst_dtype = to,
					   .src_dtype = from },
		      n);
	tester_same(t, to == from, "%s from %s, %zu elements, shifts %u %u", dtype_name(to),
		    dtype_name(from), n, s->out, s->in);
}

static void run_cast(struct tester *t)
{
	for (unsigned pair = 0; pair < 9; pair++)
		for (unsigned i = 0; i < n_case_sizes; i++)
			for (unsigned s = 0; s < n_case_shifts; s++)
				cast_case(t, pair % 3 + 1, pair / 3 + 1, case_sizes[i],
					  &case_shifts[s]);
}

/* Every pattern of the 16-bit types; numbers of every exponent and tie to them. */
static void run_cast_patterns(struct tester *t)
{
	struct bed *b = &t->bed;

	for (unsigned pair = 0; pair < 9; pair++) {
		enum dtype to = pair % 3 + 1, from = pair / 3 + 1;
		size_t n = from == DTYPE_FP32 ? 1 << 21 : 65536;
		unsigned out, in;

		bed_begin(b);
		out = bed_add(b, to, n, 0, BED_ANY);
		in = bed_add(b, from, n, 0, BED_ANY);
		for (size_t i = 0; i < n; i++)
			if (from == DTYPE_FP32)
				((uint32_t *)bed_host(b, in))[i] = (uint32_t)i << 11 | (i & 1);
			else
				((uint16_t *)bed_host(b, in))[i] = (uint16_t)i;
		bed_upload(b);
		kernels_ref()->cast(&(struct k_cast){ bed_host(b, out), bed_host(b, in), to, from,
						      false },
				    0, n);
		device_launch(&t->device, CUDA_FN_CAST,
			      &(struct cuda_cast){ .dst = bed_device(b, out),
						   .src = bed_device(b, in),
						   .n = n,
						   .dst_dtype = to,
						   .src_dtype = from },
			      n);
		tester_same(t, to == from, "%s from %s, all patterns", dtype_name(to),
			    dtype_name(from));
	}
}

static const struct pack_shape {
	uint64_t rows, elements, dst_stride, src_stride;
	unsigned shift;
} pack_shapes[] = {
	{ 0, 5, 5, 5, 0 },           { 5, 0, 8, 8, 0 },
	{ 1, 1, 1, 1, 0 },           { 7, 3, 3, 5, 0 },
	{ 300, 8, 8, 24, 0 },        { 300, 8, 24, 8, 1 },
	{ 1000, 64, 64, 72, 0 },     { 17, 4096, 5000, 4096, 0 },
	{ 17, 4097, 4100, 4097, 0 }, { 3, 65536, 65600, 65544, 0 },
	{ 70001, 1, 2, 3, 0 },       { 1, 1000003, 1000003, 1000003, 3 },
};

/* Elements from the first of the first row to the last of the last. */
static size_t pack_span(const struct pack_shape *s, uint64_t stride)
{
	return s->rows && s->elements ? (s->rows - 1) * stride + s->elements : 0;
}

static void pack_case(struct tester *t, enum dtype to, enum dtype from, const struct pack_shape *s)
{
	struct bed *b = &t->bed;
	uint64_t n = s->rows * s->elements;
	unsigned out, in;

	bed_begin(b);
	out = bed_add(b, to, pack_span(s, s->dst_stride), s->shift, BED_ANY);
	in = bed_add(b, from, pack_span(s, s->src_stride), s->shift, BED_ANY);
	bed_upload(b);
	kernels_ref()->pack(&(struct k_pack){ bed_host(b, out), bed_host(b, in), s->elements,
					      s->dst_stride, s->src_stride, to, from },
			    0, n);
	device_launch(&t->device, CUDA_FN_PACK,
		      &(struct cuda_pack){ .dst = bed_device(b, out),
					   .src = bed_device(b, in),
					   .rows = s->rows,
					   .row_elements = s->elements,
					   .dst_stride = s->dst_stride,
					   .src_stride = s->src_stride,
					   .dst_dtype = to,
					   .src_dtype = from },
		      n);
	tester_same(t, to == from, "%s from %s, shape %zu", dtype_name(to), dtype_name(from),
		    (size_t)(s - pack_shapes));
}

static void run_pack(struct tester *t)
{
	for (unsigned pair = 0; pair < 9; pair++)
		for (size_t i = 0; i < sizeof(pack_shapes) / sizeof(pack_shapes[0]); i++)
			pack_case(t, pair % 3 + 1, pair / 3 + 1, &pack_shapes[i]);
}

static void fill_case(struct tester *t, enum fill_kind kind, uint64_t first, size_t n,
		      unsigned shift)
{
	struct bed *b = &t->bed;
	struct k_fill a = {
		.seed = 1234567890123456789u,
		.stream = 0x700000003u,
		.first = first,
		.kind = kind,
		.a = kind == FILL_CONSTANT ? 0.1 : -0.5,
		.b = 0.25,
	};
	struct cuda_fill c = {
		.n = n,
		.seed = a.seed,
		.stream = a.stream,
		.first = first,
		.a = a.a,
		.b = a.b,
		.kind = kind,
	};
	unsigned dst;

	bed_begin(b);
	dst = bed_add(b, DTYPE_FP32, n, shift, BED_ANY);
	bed_upload(b);
	a.dst = bed_host(b, dst);
	kernels_ref()->fill(&a, 0, n);
	c.dst = bed_device(b, dst);
	device_launch(&t->device, CUDA_FN_FILL, &c, n);
	tester_same(t, true, "kind %d, first %llu, %zu elements, shift %u", kind,
		    (unsigned long long)first, n, shift);
}

static void run_fill(struct tester *t)
{
	static const uint64_t firsts[] = { 0, 1, 2, 7, 0x3fffffffdu, UINT64_MAX / 2 };

	for (unsigned kind = FILL_CONSTANT; kind <= FILL_NORMAL; kind++)
		for (unsigned i = 0; i < n_case_sizes; i++)
			for (unsigned f = 0; f < sizeof(firsts) / sizeof(firsts[0]); f++)
				fill_case(t, kind, firsts[f], case_sizes[i], f % 4);
}

/* @place: where the one element that is not finite is; n: nowhere. */
static void found_inf_case(struct tester *t, enum dtype type, size_t n, size_t place,
			   unsigned shift)
{
	struct bed *b = &t->bed;
	unsigned x, found;

	bed_begin(b);
	x = bed_add(b, type, n, shift, BED_FINITE);
	found = bed_add(b, DTYPE_FP32, 1, 0, BED_FINITE);
	if (place < n && type == DTYPE_FP32)
		((uint32_t *)bed_host(b, x))[place] = place % 2 ? 0x7f800000 : 0xffc00000;
	else if (place < n)
		((uint16_t *)bed_host(b, x))[place] = place % 2            ? 0x7fc0
						      : type == DTYPE_BF16 ? 0xff80
									   : 0xfc00;
	bed_upload(b);
	kernels_ref()->found_inf(&(struct k_found_inf){ bed_host(b, x), bed_host(b, found), type },
				 0, n);
	device_launch(&t->device, CUDA_FN_FOUND_INF,
		      &(struct cuda_found_inf){ .x = bed_device(b, x),
						.n = n,
						.found = bed_device(b, found),
						.dtype = type },
		      n);
	tester_same(t, true, "%s, %zu elements, at %zu, shift %u", dtype_name(type), n, place,
		    shift);
}

static void run_found_inf(struct tester *t)
{
	for (unsigned type = DTYPE_FP32; type < _DTYPE_N; type++)
		for (unsigned i = 0; i < n_case_sizes; i++)
			for (unsigned shift = 0; shift < 4; shift++) {
				size_t n = case_sizes[i];

				found_inf_case(t, type, n, n, shift);
				if (n == 0)
					continue;
				found_inf_case(t, type, n, 0, shift);
				found_inf_case(t, type, n, n - 1, shift);
				found_inf_case(t, type, n, bed_random(&t->bed) % n, shift);
			}
}

const struct group groups_move[] = {
	{ "cast", run_cast },           { "cast of all patterns", run_cast_patterns },
	{ "pack", run_pack },           { "fill", run_fill },
	{ "found_inf", run_found_inf },
};
const unsigned n_groups_move = sizeof(groups_move) / sizeof(groups_move[0]);
#else
typedef int kernel_cases_move_not_empty;
#endif
