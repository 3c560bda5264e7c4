/* Taking over what another daemon left, with every call failing once. */
#include <criterion/criterion.h>
#include <errno.h>

#include "failmalloc.h"
#include "fdcheck.h"
#include "leftfix.h"

TestSuite(fault_restore, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* Every import, then every allocation, fails once: nothing is left of the job. */
Test(fault_restore, taking_over_may_fail_at_any_point)
{
	struct nodefix n;
	struct left l;
	unsigned i, failed = 0;
	bool hit;

	left_behind(&l);
	for (i = 1; i <= 3; i++) {
		nodefix_begin(&n, NULL);
		backend_fake_fail(n.node.devices[0].backend, i, -EIO);
		cr_assert_eq(left_take_over(&n, &l, l.bytes, l.n) != 0, i <= l.n_fds);
		cr_assert_eq(n.jobs.count, i > l.n_fds);
		cr_assert_eq(n.node.devices[0].quota.used != 0, i > l.n_fds);
		nodefix_end(&n);
	}
	for (i = 1, hit = true; hit; i++) {
		int r;

		nodefix_begin(&n, NULL);
		failmalloc_in(i);
		r = left_take_over(&n, &l, l.bytes, l.n);
		hit = failmalloc_hit();
		failmalloc_in(0);
		cr_assert_eq(r != 0, hit, "allocation %u", i);
		cr_assert_eq(n.jobs.count, !hit);
		failed += hit;
		nodefix_end(&n);
	}
	cr_assert_gt(failed, 10);
	left_forget(&l);
}
