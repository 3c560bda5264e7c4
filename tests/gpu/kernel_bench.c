/*
 * How fast the kernels are, against the device's own copies in the same run.
 *
 *     kernel_bench [--device N] [--sizes 64M,256M,1G,4G] [--repeats 20] [--json FILE]
 *
 * A size is that of one fp32 array (of one input, for reductions). Of each kernel, after
 * warming up, the median time of the repeats by the device's own clock, the bytes it has
 * to read and write at least over that time, and the ratio to what cuMemcpyAsync reaches
 * at that size. Data are random numbers. What does not fit into the device's free memory
 * is left out, and said.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_device.h"

#ifdef SHARDD_CUDA

#define MAX_SIZES   16
#define MAX_REPEATS 1000
#define WARM_UPS    3
/* Arrays that the largest case needs: eight inputs and an output. */
#define ARRAYS 9

struct options {
	int device;
	uint64_t sizes[MAX_SIZES];
	unsigned n_sizes, repeats;
	FILE *json;
};

struct bench {
	struct device d;
	struct options o;
	CUdeviceptr array[ARRAYS]; /* of the largest size that fits */
	CUdeviceptr partial;       /* of norms */
	struct cuda_undo undo;     /* of the kernel that keeps what it changes */
	CUevent begin[MAX_REPEATS], end[MAX_REPEATS];
	double copy_rate; /* bytes a second, at this size */
};

/* What is measured: one launch on @bytes of fp32. */
struct measured {
	const char *name;
	void (*launch)(struct bench *b, const struct measured *m, uint64_t bytes);
	enum dtype type; /* of inputs, or of a cast's output */
	unsigned k;
	double moved; /* bytes read and written for each byte of size */
	unsigned arrays;
};

static uint64_t elements(uint64_t bytes, enum dtype t)
{
	return bytes / dtype_size(t);
}

static void launch_memcpy(struct bench *b, const struct measured *m, uint64_t bytes)
{
	(void)m;
	DEVICE_OK(&b->d, b->d.cu->cuMemcpyDtoDAsync(b->array[0], b->array[1], bytes, b->d.stream));
}

static void launch_cast(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_cast a = { .dst = b->array[0],
			       .src = b->array[1],
			       .n = elements(bytes, DTYPE_FP32),
			       .dst_dtype = m->type,
			       .src_dtype = DTYPE_FP32 };

	device_launch(&b->d, CUDA_FN_CAST, &a, a.n);
}

/* From a 16-bit type to fp32. */
static void launch_widen(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_cast a = { .dst = b->array[0],
			       .src = b->array[1],
			       .n = elements(bytes, DTYPE_FP32),
			       .dst_dtype = DTYPE_FP32,
			       .src_dtype = m->type };

	device_launch(&b->d, CUDA_FN_CAST, &a, a.n);
}

static void launch_reduce(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_reduce a = { .out = b->array[8],
				 .n = elements(bytes, DTYPE_FP32),
				 .k = m->k,
				 .in_dtype = m->type,
				 .out_dtype = DTYPE_FP32,
				 .sum_dtype = DTYPE_FP32,
				 .pre = { K_FACTOR_DIV, DTYPE_FP32, 8 } };

	for (unsigned j = 0; j < m->k; j++)
		a.in[j] = b->array[j];
	device_launch(&b->d, CUDA_FN_REDUCE, &a, a.n);
}

static void launch_adamw(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_adamw a = { .p = b->array[0],
				.g = b->array[1],
				.m = b->array[2],
				.v = b->array[3],
				.n = elements(bytes, DTYPE_FP32),
				.decay = 0.99999f,
				.w1 = 0.1f,
				.b2 = 0.999f,
				.w2 = 0.001f,
				.step_size = 0.001f,
				.sq = 0.0316f,
				.eps = 1e-8f };

	(void)m;
	device_launch(&b->d, CUDA_FN_ADAMW, &a, a.n);
}

/* What a step costs that the next daemon can complete, beside "adamw". */
static void launch_adamw_undo(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_adam_undo a = { .a = { .p = b->array[0],
					   .g = b->array[1],
					   .m = b->array[2],
					   .v = b->array[3],
					   .n = elements(bytes, DTYPE_FP32),
					   .tail_from = UINT64_MAX,
					   .decay = 0.99999f,
					   .w1 = 0.1f,
					   .b2 = 0.999f,
					   .w2 = 0.001f,
					   .step_size = 0.001f,
					   .sq = 0.0316f,
					   .eps = 1e-8f,
					   .decoupled = 1 } };

	(void)m;
	b->undo.launch++;
	a.undo = b->undo;
	device_launch(&b->d, CUDA_FN_ADAM_UNDO, &a, a.a.n);
}

static void launch_norm(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_norm a = { .x = b->array[1],
			       .n = elements(bytes, DTYPE_FP32),
			       .partial = b->partial };

	(void)m;
	device_launch(&b->d, CUDA_FN_NORM, &a, a.n);
}

static void launch_scale(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_scale a = { .x = b->array[2],
				.n = elements(bytes, DTYPE_FP32),
				.factor = 0.999f };

	(void)m;
	device_launch(&b->d, CUDA_FN_SCALE, &a, a.n);
}

static void launch_found_inf(struct bench *b, const struct measured *m, uint64_t bytes)
{
	struct cuda_found_inf a = { .x = b->array[1],
				    .n = elements(bytes, DTYPE_FP32),
				    .found = b->partial,
				    .dtype = DTYPE_FP32 };

	(void)m;
	device_launch(&b->d, CUDA_FN_FOUND_INF, &a, a.n);
}

static const struct measured list[] = {
	{ "memcpy", launch_memcpy, DTYPE_FP32, 0, 2, 2 }, /* the first: the others' measure */
	{ "copy kernel", launch_cast, DTYPE_FP32, 0, 2, 2 },
	{ "cast fp32 bf16", launch_cast, DTYPE_BF16, 0, 1.5, 2 },
	{ "cast fp32 fp16", launch_cast, DTYPE_FP16, 0, 1.5, 2 },
	{ "cast bf16 fp32", launch_widen, DTYPE_BF16, 0, 1.5, 2 },
	{ "reduce fp32 k=1", launch_reduce, DTYPE_FP32, 1, 2, 9 },
	{ "reduce fp32 k=2", launch_reduce, DTYPE_FP32, 2, 3, 9 },
	{ "reduce fp32 k=4", launch_reduce, DTYPE_FP32, 4, 5, 9 },
	{ "reduce fp32 k=8", launch_reduce, DTYPE_FP32, 8, 9, 9 },
	{ "reduce bf16 k=1", launch_reduce, DTYPE_BF16, 1, 1.5, 9 },
	{ "reduce bf16 k=2", launch_reduce, DTYPE_BF16, 2, 2, 9 },
	{ "reduce bf16 k=4", launch_reduce, DTYPE_BF16, 4, 3, 9 },
	{ "reduce bf16 k=8", launch_reduce, DTYPE_BF16, 8, 5, 9 },
	{ "reduce fp16 k=1", launch_reduce, DTYPE_FP16, 1, 1.5, 9 },
	{ "reduce fp16 k=2", launch_reduce, DTYPE_FP16, 2, 2, 9 },
	{ "reduce fp16 k=4", launch_reduce, DTYPE_FP16, 4, 3, 9 },
	{ "reduce fp16 k=8", launch_reduce, DTYPE_FP16, 8, 5, 9 },
	{ "adamw", launch_adamw, DTYPE_FP32, 0, 7, 4 },
	{ "adamw undo", launch_adamw_undo, DTYPE_FP32, 0, 7, 4 },
	{ "norm", launch_norm, DTYPE_FP32, 0, 1, 2 },
	{ "scale", launch_scale, DTYPE_FP32, 0, 2, 3 },
	{ "found_inf", launch_found_inf, DTYPE_FP32, 0, 1, 2 },
};
#define N_LIST (sizeof(list) / sizeof(list[0]))

static int by_size(const void *x, const void *y)
{
	float a = *(const float *)x, b = *(const float *)y;

	return (a > b) - (a < b);
}

/* Milliseconds. */
static double median_ms(struct bench *b)
{
	static float ms[MAX_REPEATS];
	unsigned n = b->o.repeats;

	for (unsigned i = 0; i < n; i++)
		DEVICE_OK(&b->d, b->d.cu->cuEventElapsedTime(&ms[i], b->begin[i], b->end[i]));
	qsort(ms, n, sizeof(ms[0]), by_size);
	return n % 2 ? (double)ms[n / 2] : ((double)ms[n / 2 - 1] + (double)ms[n / 2]) / 2;
}

static double measure(struct bench *b, const struct measured *m, uint64_t bytes)
{
	for (unsigned i = 0; i < WARM_UPS; i++)
		m->launch(b, m, bytes);
	for (unsigned i = 0; i < b->o.repeats; i++) {
		DEVICE_OK(&b->d, b->d.cu->cuEventRecord(b->begin[i], b->d.stream));
		m->launch(b, m, bytes);
		DEVICE_OK(&b->d, b->d.cu->cuEventRecord(b->end[i], b->d.stream));
	}
	device_wait(&b->d);
	return median_ms(b);
}

/* Normals as parameters and gradients, nothing negative as second moments (array 3). 16-bit
 * inputs are the same bytes: as bf16 and fp16 they are numbers of every kind, and no
 * kernel's time depends on which. */
static void fill_arrays(struct bench *b, unsigned arrays, uint64_t bytes)
{
	for (unsigned i = 0; i < arrays; i++) {
		struct cuda_fill a = { .dst = b->array[i],
				       .n = elements(bytes, DTYPE_FP32),
				       .seed = 42,
				       .stream = i,
				       .a = i == 3 ? 1e-6 : 0,
				       .b = i == 3 ? 1e-3 : 0.02,
				       .kind = i == 3 ? FILL_UNIFORM : FILL_NORMAL };

		device_launch(&b->d, CUDA_FN_FILL, &a, a.n);
	}
	device_wait(&b->d);
}

static void report(struct bench *b, const struct measured *m, uint64_t bytes, double ms)
{
	double rate = (double)bytes * m->moved / (ms / 1000);

	if (m == list)
		b->copy_rate = rate;
	printf("%-18s %8.1f MiB %10.1f us %9.1f GB/s %6.3f\n", m->name, (double)bytes / (1 << 20),
	       ms * 1000, rate / 1e9, rate / b->copy_rate);
	fflush(stdout);
	if (b->o.json)
		fprintf(b->o.json,
			"{\"kernel\": \"%s\", \"bytes\": %llu, \"us\": %.2f, \"gb_s\": %.2f, "
			"\"ratio\": %.4f}\n",
			m->name, (unsigned long long)bytes, ms * 1000, rate / 1e9,
			rate / b->copy_rate);
}

static void run_size(struct bench *b, uint64_t bytes)
{
	size_t available = 0, total = 0;
	unsigned arrays;

	DEVICE_OK(&b->d, b->d.cu->cuMemGetInfo(&available, &total));
	arrays = available * 9 / 10 / bytes >= ARRAYS ? ARRAYS
						      : (unsigned)(available * 9 / 10 / bytes);
	for (unsigned i = 0; i < arrays; i++)
		b->array[i] = device_alloc(&b->d, bytes);
	fill_arrays(b, arrays, bytes);
	for (size_t i = 0; i < N_LIST; i++)
		if (list[i].arrays <= arrays)
			report(b, &list[i], bytes, measure(b, &list[i], bytes));
		else
			printf("%-18s %8.1f MiB does not fit: %u arrays\n", list[i].name,
			       (double)bytes / (1 << 20), list[i].arrays);
	for (unsigned i = 0; i < arrays; i++)
		device_free(&b->d, b->array[i]);
}

static uint64_t parse_size(char *text, char **ret_end)
{
	uint64_t n = strtoull(text, ret_end, 10);
	unsigned shift = 0;

	switch (**ret_end) {
	case 'K':
		shift = 10;
		break;
	case 'M':
		shift = 20;
		break;
	case 'G':
		shift = 30;
	}
	*ret_end += shift != 0;
	return n << shift;
}

static bool parse_sizes(struct options *o, char *text)
{
	o->n_sizes = 0;
	for (;;) {
		if (o->n_sizes == MAX_SIZES)
			return false;
		o->sizes[o->n_sizes] = parse_size(text, &text) / 16 * 16;
		if (!o->sizes[o->n_sizes++])
			return false;
		if (!*text)
			return true;
		if (*text++ != ',')
			return false;
	}
}

static bool parse_option(struct options *o, const char *name, char *value)
{
	if (strcmp(name, "--device") == 0)
		return (o->device = atoi(value)) >= 0;
	if (strcmp(name, "--repeats") == 0)
		return (o->repeats = (unsigned)atoi(value)) > 0 && o->repeats <= MAX_REPEATS;
	if (strcmp(name, "--sizes") == 0)
		return parse_sizes(o, value);
	if (strcmp(name, "--json") == 0)
		return (o->json = fopen(value, "we")) != NULL;
	return false;
}

static bool parse(struct options *o, int argc, char **argv)
{
	static char sizes[] = "64M,256M,1G,4G";

	o->repeats = 20;
	parse_sizes(o, sizes);
	for (int i = 1; i < argc; i += 2)
		if (i + 1 >= argc || !parse_option(o, argv[i], argv[i + 1]))
			return false;
	return true;
}

/* Its words have to be zero at first. */
static void bench_undo(struct bench *b)
{
	uint32_t room =
		b->d.sms * b->d.per_sm[CUDA_FN_ADAM_UNDO] * cuda_fn_threads(CUDA_FN_ADAM_UNDO);
	void *zero = calloc(room, CUDA_UNDO_WORD);

	if (!zero)
		exit(1);
	b->undo.room = room;
	b->undo.words = device_alloc(&b->d, (size_t)room * CUDA_UNDO_BYTES);
	b->undo.old = b->undo.words + (uint64_t)room * CUDA_UNDO_WORD;
	device_put(&b->d, b->undo.words, zero, (size_t)room * CUDA_UNDO_WORD);
	free(zero);
}

static void open_bench(struct bench *b)
{
	device_open(&b->d, b->o.device);
	b->partial = device_alloc(&b->d, CUDA_NORM_PARTIALS * sizeof(double));
	bench_undo(b);
	for (unsigned i = 0; i < b->o.repeats; i++) {
		DEVICE_OK(&b->d, b->d.cu->cuEventCreate(&b->begin[i], CU_EVENT_DEFAULT));
		DEVICE_OK(&b->d, b->d.cu->cuEventCreate(&b->end[i], CU_EVENT_DEFAULT));
	}
}

static void close_bench(struct bench *b)
{
	for (unsigned i = 0; i < b->o.repeats; i++) {
		DEVICE_OK(&b->d, b->d.cu->cuEventDestroy(b->begin[i]));
		DEVICE_OK(&b->d, b->d.cu->cuEventDestroy(b->end[i]));
	}
	device_free(&b->d, b->partial);
	device_free(&b->d, b->undo.words);
	device_close(&b->d);
	if (b->o.json && fclose(b->o.json))
		perror("kernel_bench");
}

int main(int argc, char **argv)
{
	static struct bench b;

	if (!parse(&b.o, argc, argv)) {
		fprintf(stderr, "usage: kernel_bench [--device N] [--sizes 64M,...] "
				"[--repeats N] [--json FILE]\n");
		return 2;
	}
	open_bench(&b);
	printf("%s, %u multiprocessors, median of %u\n", b.d.name, b.d.sms, b.o.repeats);
	printf("%-18s %12s %13s %14s %6s\n", "kernel", "size", "time", "rate", "ratio");
	for (unsigned i = 0; i < b.o.n_sizes; i++)
		run_size(&b, b.o.sizes[i]);
	close_bench(&b);
	return 0;
}
#else
int main(void)
{
	printf("no device: built without the CUDA Toolkit\n");
	return 77;
}
#endif
