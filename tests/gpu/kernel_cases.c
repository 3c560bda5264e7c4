#include "kernel_cases.h"

#ifdef SHARDD_CUDA
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Failures of one group that are described. */
#define TOLD 5

const size_t case_sizes[] = { 0, 1, 3, 17, 255, 4097, 65537, (1 << 20) + 3 };
unsigned n_case_sizes = sizeof(case_sizes) / sizeof(case_sizes[0]);

const struct case_shift case_shifts[] = { { 0, 0 }, { 1, 1 }, { 7, 7 }, { 1, 2 }, { 0, 4 } };
const unsigned n_case_shifts = sizeof(case_shifts) / sizeof(case_shifts[0]);

static void tell(struct tester *t, const char *what, va_list args)
{
	if (t->group_failed > TOLD)
		return;
	printf("  %s, ", t->group);
	vprintf(what, args);
	printf("\n");
}

static void count(struct tester *t, bool ok)
{
	t->passed += ok;
	t->failed += !ok;
	t->group_passed += ok;
	t->group_failed += !ok;
}

void tester_case(struct tester *t, bool ok, const char *what, ...)
{
	va_list args;

	count(t, ok);
	if (ok)
		return;
	va_start(args, what);
	tell(t, what, args);
	va_end(args);
}

void tester_same(struct tester *t, bool bits, const char *what, ...)
{
	va_list args;
	unsigned buf = 0;
	size_t at = 0;
	bool ok = bed_same(&t->bed, &buf, &at);

	if (ok && bits)
		ok = memcmp(t->bed.want, t->bed.got, t->bed.used) == 0;
	count(t, ok);
	if (ok)
		return;
	va_start(args, what);
	tell(t, what, args);
	va_end(args);
	if (t->group_failed <= TOLD)
		printf("    buffer %u differs at %s%zu\n", buf,
		       at == SIZE_MAX ? "what is before it; " : "", at);
}
#else
typedef int kernel_cases_not_empty;
#endif
