#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

extern const struct kernels host_table_portable;
#if defined(__x86_64__)
extern const struct kernels host_table_avx2;
extern const struct kernels host_table_avx512;

/* Not a name that __builtin_cpu_supports of every compiler knows. */
static bool has_f16c(void)
{
	unsigned eax, ebx, ecx, edx;

	return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static bool has_avx2(void)
{
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void)
{
	return has_avx2() && __builtin_cpu_supports("avx512f") &&
	       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx512vl");
}
#endif

static bool always(void)
{
	return true;
}

/* Fastest first. */
static const struct {
	const struct kernels *table;
	bool (*supported)(void);
} variants[] = {
#if defined(__x86_64__)
	{ &host_table_avx512, has_avx512 },
	{ &host_table_avx2, has_avx2 },
#endif
	{ &host_table_portable, always },
};

#define N_VARIANTS (sizeof(variants) / sizeof(variants[0]))

const struct kernels *kernels_named(const char *name)
{
	if (strcmp(name, kernels_ref()->name) == 0)
		return kernels_ref();
	for (size_t i = 0; i < N_VARIANTS; i++)
		if (strcmp(name, variants[i].table->name) == 0)
			return variants[i].supported() ? variants[i].table : NULL;
	return NULL;
}

static const struct kernels *choose(void)
{
	const char *name = getenv("SHARDD_KERNELS");
	const struct kernels *named = name ? kernels_named(name) : NULL;
	size_t i = 0;

	while (!variants[i].supported())
		i++;
	return named ? named : variants[i].table;
}

/* Two threads may both choose at first: they choose the same. */
const struct kernels *kernels_host(void)
{
	static _Atomic(const struct kernels *) chosen;
	const struct kernels *k = atomic_load_explicit(&chosen, memory_order_acquire);

	if (!k) {
		k = choose();
		atomic_store_explicit(&chosen, k, memory_order_release);
	}
	return k;
}
