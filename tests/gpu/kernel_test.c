/*
 * Every CUDA kernel against kernels/ref on a device: random numbers (never zeros) with
 * special values, odd sizes, arrays that begin anywhere, bit for bit but for sums of
 * squares, whose order of additions differs.
 *
 *     kernel_test [--device N]
 *
 * One line for each group and a summary at the end. Ends with 0, with 1 if anything
 * differed, with 77 where there is no device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_cases.h"

#ifdef SHARDD_CUDA

#define CAPACITY ((size_t)64 << 20)
static void run_groups(struct tester *t, const struct group *groups, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		t->group = groups[i].name;
		t->group_passed = 0;
		t->group_failed = 0;
		groups[i].run(t);
		printf("%-32s %5u cases  %s\n", t->group, t->group_passed + t->group_failed,
		       t->group_failed ? "FAILED" : "ok");
		fflush(stdout);
	}
}

static struct tester tester;

int main(int argc, char **argv)
{
	struct tester *t = &tester;
	int ordinal = argc == 3 && strcmp(argv[1], "--device") == 0 ? atoi(argv[2]) : 0;

	if (argc != 1 && argc != 3) {
		fprintf(stderr, "usage: kernel_test [--device N]\n");
		return 2;
	}
	device_open(&t->device, ordinal);
	bed_open(&t->bed, &t->device, CAPACITY);
	printf("%s, %u multiprocessors\n", t->device.name, t->device.sms);
	run_groups(t, groups_move, n_groups_move);
	run_groups(t, groups_math, n_groups_math);
	bed_close(&t->bed);
	device_close(&t->device);
	printf("%u passed, %u failed\n", t->passed, t->failed);
	return t->failed ? 1 : 0;
}
#else
int main(void)
{
	printf("no device: built without the CUDA Toolkit\n");
	return 77;
}
#endif
