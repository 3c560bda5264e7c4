/* The cases of kernel_test: groups, each of one kernel. */
#ifndef SHARDD_TESTS_KERNEL_CASES_H
#define SHARDD_TESTS_KERNEL_CASES_H

#include "kernel_bed.h"

#ifdef SHARDD_CUDA
struct tester {
	struct device device;
	struct bed bed;
	const char *group;
	unsigned passed, failed;             /* all */
	unsigned group_passed, group_failed; /* of the group */
};

/* One case is over. @what describes it if it failed. */
void tester_case(struct tester *t, bool ok, const char *what, ...)
	__attribute__((format(printf, 3, 4)));

/* Compare host and device, and count the case.
 * @bits: NaN have to be the same, too. */
void tester_same(struct tester *t, bool bits, const char *what, ...)
	__attribute__((format(printf, 3, 4)));

extern const size_t case_sizes[];
extern unsigned n_case_sizes; /* fewer for those in a hurry: the last is the largest */

/* Elements from a multiple of 256 bytes to where the arrays begin: the output, and what is
 * read. With the same shift all arrays reach whole vectors together. */
struct case_shift {
	unsigned out, in;
};
extern const struct case_shift case_shifts[];
extern const unsigned n_case_shifts;

struct group {
	const char *name;
	void (*run)(struct tester *t);
};
/* Casts, packing, filling, looking for what is not finite. */
extern const struct group groups_move[];
extern const unsigned n_groups_move;
/* Reductions, optimizers, norms, scaling, spinning. */
extern const struct group groups_math[];
extern const unsigned n_groups_math;
#endif

#endif
