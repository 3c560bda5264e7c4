#include "kernel_cases.h"

#ifdef SHARDD_CUDA
#include <stddef.h>
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

/* -------------------------------------------------------------------------- assemble */

/* One tensor that is made of boxes of one source; with scales another one behind it, which is these. Its
 * tables are in the bed, for the device. */
struct assembled {
	uint64_t elements;
	unsigned n_boxes;
	struct k_assemble_box boxes[3]; /* without src */
	bool gaps;
	uint64_t rows, columns, tile_rows, tile_columns; /* of scales; 0: none */
};

static const struct assembled assembled[] = {
	{ 1, 1, { { .n = { 1, 1, 1 }, .src_stride = { 0, 0, 1 } } }, .gaps = false },
	{ 70001, 1, { { .n = { 1, 1, 70001 }, .src_stride = { 0, 0, 1 } } }, .gaps = false },
	{ 131072, 1, { { .n = { 1, 1, 131072 }, .src_stride = { 0, 0, 1 } } }, .gaps = false },
	/* rows of two sources in turn, in whole vectors, and not */
	{ 64 * 1024,
	  2,
	  { { .n = { 1, 64, 640 }, .src_stride = { 0, 640, 1 }, .dst_stride = { 0, 1024 } },
	    { .n = { 1, 64, 384 },
	      .src_stride = { 0, 640, 1 },
	      .at = 640,
	      .dst_stride = { 0, 1024 } } },
	  .gaps = false },
	{ 301 * 7 * 5,
	  2,
	  { { .n = { 7, 301, 2 }, .src_stride = { 602, 2, 1 }, .dst_stride = { 1505, 5 } },
	    { .n = { 7, 301, 3 },
	      .src_stride = { 903, 3, 1 },
	      .at = 2,
	      .dst_stride = { 1505, 5 } } },
	  .gaps = false },
	/* transposed, with zeros behind each row */
	{ 300 * 264,
	  1,
	  { { .n = { 1, 300, 257 }, .src_stride = { 0, 1, 300 }, .dst_stride = { 0, 264 } } },
	  .gaps = true },
	{ 128 * 300,
	  1,
	  { { .n = { 1, 128, 300 }, .src_stride = { 0, 300, 1 }, .dst_stride = { 0, 300 } } },
	  .rows = 64,
	  .columns = 300,
	  .tile_rows = 16,
	  .tile_columns = 128 },
	{ 90000,
	  1,
	  { { .n = { 1, 300, 297 }, .src_stride = { 0, 1, 300 }, .dst_stride = { 0, 300 } } },
	  .gaps = true,
	  .rows = 300,
	  .columns = 300,
	  .tile_rows = 300,
	  .tile_columns = 300 },
};

#define ASSEMBLED_BLOCKS 8u

/* What is in the bed, for one of both: @in, @out and the rest are addresses there. */
struct assembled_tables {
	struct k_assemble_box boxes[3];
	struct k_assemble_scales scales;
	struct k_assemble_tensor tensors[2];
	struct k_assemble_block blocks[ASSEMBLED_BLOCKS];
};

static uint64_t assembled_scales(const struct assembled *s)
{
	uint64_t matrices = s->rows ? s->elements / (s->rows * s->columns) : 0;

	return matrices ? matrices * ((s->rows + s->tile_rows - 1) / s->tile_rows) *
				  ((s->columns + s->tile_columns - 1) / s->tile_columns)
			: 0;
}

/* @to: the tables; @at: where they will be. Return: blocks. */
static unsigned assembled_fill(const struct assembled *s, enum dtype to, enum dtype from,
			       struct assembled_tables *t, uintptr_t at, uintptr_t in,
			       uintptr_t out, uintptr_t scales, uintptr_t amax)
{
	uint64_t each = KERNEL_ASSEMBLE_BYTES / dtype_size(to == DTYPE_E4M3 ? DTYPE_FP32 : to);
	unsigned n = 0;

	memset(t, 0, sizeof(*t));
	for (unsigned i = 0; i < s->n_boxes; i++) {
		t->boxes[i] = s->boxes[i];
		t->boxes[i].src = (const void *)in;
		t->boxes[i].src_dtype = from;
	}
	t->scales = (struct k_assemble_scales){ (uint32_t *)amax, s->rows, s->columns, s->tile_rows,
						s->tile_columns };
	for (unsigned i = 0; i < 2; i++)
		t->tensors[i] = (struct k_assemble_tensor){
			.dst = (void *)(i ? scales : out),
			.dst_dtype = i ? DTYPE_FP32 : to,
			.gaps = !i && s->gaps,
			.boxes = (const void *)(at + offsetof(struct assembled_tables, boxes)),
			.n_boxes = i ? 0 : s->n_boxes,
			.scales = s->rows ? (const void *)(at + offsetof(struct assembled_tables,
									 scales))
					  : NULL,
		};
	for (uint64_t first = 0; first < s->elements; first += each) {
		uint64_t left = s->elements - first;

		t->blocks[n++] =
			(struct k_assemble_block){ 0, (uint32_t)(left < each ? left : each),
						   first };
	}
	if (s->rows)
		t->blocks[n++] = (struct k_assemble_block){ 1, (uint32_t)assembled_scales(s), 0 };
	return n;
}

static void assembled_pass(struct tester *t, const struct assembled_tables *host,
			   CUdeviceptr tables, CUdeviceptr crc, uint32_t *host_crc,
			   enum k_assemble_pass pass, unsigned first, unsigned n)
{
	bool makes = pass == K_ASSEMBLE_MAKE;
	struct k_assemble k = { .tensors = host->tensors,
				.blocks = host->blocks + first,
				.crc = makes ? host_crc + first : NULL,
				.pass = pass };

	kernels_ref()->assemble(&k, 0, n);
	device_launch(&t->device, CUDA_FN_ASSEMBLE,
		      &(struct cuda_assemble){
			      .tensors = tables + offsetof(struct assembled_tables, tensors),
			      .blocks = tables + offsetof(struct assembled_tables, blocks) +
					first * sizeof(struct k_assemble_block),
			      .crc = makes ? crc + first * sizeof(uint32_t) : 0,
			      .n = n,
			      .pass = pass },
		      n);
}

/* Arrays of a delta in the bed. */
struct assembled_delta {
	unsigned base, out, used, blocks;
	uint64_t room;
};

/* The base is what was made, but for one element in 37, and for all of the second block. */
static void assembled_base(struct tester *t, const struct assembled_delta *d, unsigned out,
			   uint64_t elements, size_t size)
{
	uint8_t *base = bed_host(&t->bed, d->base);
	uint64_t dense = KERNEL_ASSEMBLE_BYTES / size;

	memcpy(base, bed_host(&t->bed, out), elements * size);
	for (uint64_t i = 0; i < elements; i++)
		if (i % 37 == 5 || i / dense == 1)
			base[i * size] ^= 1;
	memset(bed_host(&t->bed, d->used), 0, sizeof(uint64_t));
	bed_upload(&t->bed);
}

/* Block by block, so that their changes come in one order. */
static void assembled_deltas(struct tester *t, const struct assembled_tables *host,
			     CUdeviceptr tables, unsigned crc, unsigned out,
			     const struct assembled_delta *d, unsigned n)
{
	struct bed *b = &t->bed;

	for (unsigned e = 0; e < n; e++) {
		struct k_delta own = { .base = bed_host(b, d->base),
				       .made = bed_host(b, out),
				       .out = bed_host(b, d->out),
				       .room = d->room,
				       .used = bed_host(b, d->used),
				       .blocks =
					       (struct k_delta_block *)bed_host(b, d->blocks) + e };
		struct k_assemble k = { .tensors = host->tensors,
					.blocks = host->blocks + e,
					.crc = (uint32_t *)bed_host(b, crc) + e,
					.delta = &own };

		kernels_ref()->assemble(&k, 0, 1);
		device_launch(&t->device, CUDA_FN_ASSEMBLE,
			      &(struct cuda_assemble){
				      .tensors =
					      tables + offsetof(struct assembled_tables, tensors),
				      .blocks = tables + offsetof(struct assembled_tables, blocks) +
						e * sizeof(struct k_assemble_block),
				      .crc = bed_device(b, crc) + e * sizeof(uint32_t),
				      .n = 1,
				      .shift = bed_device(b, d->base) - bed_device(b, out),
				      .out = bed_device(b, d->out),
				      .room = d->room,
				      .used = bed_device(b, d->used),
				      .deltas = bed_device(b, d->blocks) +
						e * sizeof(struct k_delta_block) },
			      1);
	}
}

static void assembled_case(struct tester *t, enum dtype to, enum dtype from,
			   const struct assembled *s)
{
	size_t words = sizeof(struct assembled_tables) / sizeof(float);
	size_t size = to == DTYPE_E4M3 ? 1 : dtype_size(to);
	uint64_t scales = assembled_scales(s);
	struct bed *b = &t->bed;
	struct assembled_tables host;
	struct assembled_delta d;
	unsigned in, out, scale, amax, crc, tables, n;

	bed_begin(b);
	in = bed_add(b, from, 90000 + 131072, 0, BED_FINITE);
	out = bed_add(b, to == DTYPE_E4M3 ? DTYPE_BF16 : to, s->elements, 0, BED_ANY);
	scale = bed_add(b, DTYPE_FP32, scales + 1, 0, BED_ANY);
	amax = bed_add(b, DTYPE_FP32, scales + 1, 0, BED_ANY);
	crc = bed_add(b, DTYPE_FP32, ASSEMBLED_BLOCKS, 0, BED_ANY);
	tables = bed_add(b, DTYPE_FP32, words, 0, BED_ANY);
	/* one that has room for all, or for some */
	d.room = (s - assembled) % 2 ? 4096 : s->elements * 8 + 4096;
	d.base = bed_add(b, to == DTYPE_E4M3 ? DTYPE_BF16 : to, s->elements, 0, BED_ANY);
	d.out = bed_add(b, DTYPE_FP32, d.room / sizeof(float), 0, BED_ANY);
	d.used = bed_add(b, DTYPE_FP32, 2, 0, BED_ANY);
	d.blocks = bed_add(b, DTYPE_FP32,
			   ASSEMBLED_BLOCKS * sizeof(struct k_delta_block) / sizeof(float), 0,
			   BED_ANY);
	assembled_fill(s, to, from, bed_host(b, tables), bed_device(b, tables), bed_device(b, in),
		       bed_device(b, out), bed_device(b, scale), bed_device(b, amax));
	bed_upload(b);
	n = assembled_fill(s, to, from, &host, (uintptr_t)&host, (uintptr_t)bed_host(b, in),
			   (uintptr_t)bed_host(b, out), (uintptr_t)bed_host(b, scale),
			   (uintptr_t)bed_host(b, amax));
	if (s->rows) {
		assembled_pass(t, &host, bed_device(b, tables), 0, NULL, K_ASSEMBLE_CLEAR, n - 1,
			       1);
		assembled_pass(t, &host, bed_device(b, tables), 0, NULL, K_ASSEMBLE_MEASURE, 0,
			       n - 1);
	}
	assembled_pass(t, &host, bed_device(b, tables), bed_device(b, crc), bed_host(b, crc),
		       K_ASSEMBLE_MAKE, 0, n);
	tester_same(t, true, "%s from %s, case %zu", dtype_name(to), dtype_name(from),
		    (size_t)(s - assembled));
	assembled_base(t, &d, out, s->elements, size);
	assembled_deltas(t, &host, bed_device(b, tables), crc, out, &d, s->rows ? n - 1 : n);
	tester_same(t, true, "a delta of %s from %s, case %zu", dtype_name(to), dtype_name(from),
		    (size_t)(s - assembled));
}

static void run_assemble(struct tester *t)
{
	for (size_t i = 0; i < sizeof(assembled) / sizeof(assembled[0]); i++)
		for (enum dtype from = DTYPE_FP32; from < _DTYPE_N; from++) {
			for (enum dtype to = DTYPE_FP32; to < _DTYPE_N && !assembled[i].rows; to++)
				assembled_case(t, to, from, &assembled[i]);
			if (assembled[i].rows)
				assembled_case(t, DTYPE_E4M3, from, &assembled[i]);
		}
}

const struct group groups_move[] = {
	{ "cast", run_cast },           { "cast of all patterns", run_cast_patterns },
	{ "pack", run_pack },           { "fill", run_fill },
	{ "found_inf", run_found_inf }, { "assemble", run_assemble },
};
const unsigned n_groups_move = sizeof(groups_move) / sizeof(groups_move[0]);
#else
typedef int kernel_cases_move_not_empty;
#endif
