/* Every state that the daemon has, as Status names it. */
#include <criterion/criterion.h>

#include "fdcheck.h"
#include "op/op.h"
#include "op/op_run.h"
#include "rpc/status_fill.h"

TestSuite(status_states, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

#define STATE(enum, name) status_state(&shardd__v1__##enum##__descriptor, name)

Test(status_states, every_state_has_a_value)
{
	for (unsigned i = 0; i < _OP_N; i++)
		cr_expect_neq(STATE(op_state, op_state_name((enum op_state)i)), 0, "op %u", i);
	for (unsigned i = 0; i < _MEMBER_N; i++)
		cr_expect_neq(STATE(rank_state, member_state_name((enum member_state)i)), 0,
			      "rank %u", i);
	for (unsigned i = 0; i < _PASS_STATE_N; i++)
		cr_expect_neq(STATE(pass_state, pass_state_name((enum pass_state)i)), 0, "pass %u",
			      i);
	for (unsigned i = 0; i < _PREFETCH_N; i++)
		cr_expect_neq(STATE(prefetch_state, prefetch_mode_name((enum prefetch_mode)i)), 0,
			      "prefetch %u", i);
}

Test(status_states, of_a_job)
{
	state_job rec = { .world_size = 2 };
	struct job job = { .rec = &rec };

	cr_expect_eq(STATE(job_state, job_state_name(&job)), SHARDD__V1__JOB_STATE__JOB_STATE_IDLE);
	job.present = job.joined = 1;
	cr_expect_eq(STATE(job_state, job_state_name(&job)),
		     SHARDD__V1__JOB_STATE__JOB_STATE_FORMING);
	job.present = job.joined = 2;
	cr_expect_eq(STATE(job_state, job_state_name(&job)),
		     SHARDD__V1__JOB_STATE__JOB_STATE_RUNNING);
	job.life.torn = true;
	cr_expect_eq(STATE(job_state, job_state_name(&job)), SHARDD__V1__JOB_STATE__JOB_STATE_TORN);
	job.life.draining = true;
	cr_expect_eq(STATE(job_state, job_state_name(&job)),
		     SHARDD__V1__JOB_STATE__JOB_STATE_DRAINING);
	job.life.resize = (struct resize *)&job; /* any */
	cr_expect_eq(STATE(job_state, job_state_name(&job)),
		     SHARDD__V1__JOB_STATE__JOB_STATE_RESIZING);
	job.life.deleted = true;
	cr_expect_eq(STATE(job_state, job_state_name(&job)),
		     SHARDD__V1__JOB_STATE__JOB_STATE_DELETED);
}

Test(status_states, a_name_that_is_none)
{
	cr_expect_eq(STATE(op_state, "?"), 0);
	cr_expect_eq(STATE(op_state, ""), 0);
	cr_expect_eq(STATE(op_state, "OP_STATE_RUN"), 0);
}
