/* At which step the parameters are: numbers of commits and of Steps, their blobs, and what is known
 * when a trainer dies between two commits. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/position.h"
#include "nodefix.h"
#include "shardd.pb-c.h"

#define ELEMENTS  1000
#define NO_NUMBER UINT64_MAX

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];
static size_t prepared_bytes; /* of blobs of a Step that is not applied yet */

static void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
}

static void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(position, .init = begin, .fini = end, .timeout = 60);

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static void both_ok(const char *what)
{
	nodefix_ok(&op[0], what);
	nodefix_ok(&op[1], what);
}

static void reduce(void)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", u, &op[i]);
	both_ok("Reduce");
}

/* The blob of rank i has @bytes + i bytes; 0: none. */
static int submit_step(unsigned i, uint64_t number, size_t bytes, bool discard)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;
	uint8_t blob[64];

	memset(blob, (int)(number & 0xff), sizeof(blob));
	q.discard = discard;
	if (number != NO_NUMBER) {
		q.optional_step_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_STEP_STEP;
		q.step = number;
	}
	q.blob = (ProtobufCBinaryData){ bytes ? bytes + i : 0, blob };
	return nodefix_submit(&n, m[i], "Step", &q.base, &op[i]);
}

static void step(uint64_t number, size_t bytes)
{
	reduce();
	for (unsigned i = 0; i < 2; i++)
		submit_step(i, number, bytes, false);
	both_ok("Step");
}

/* Something that needs the parameters. */
static void apply(void)
{
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "Gather", u, &op[i]), &op[i]);
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "Release", u, &op[i]), &op[i]);
}

static void applied(uint64_t number, size_t bytes)
{
	step(number, bytes);
	apply();
}

static void commit_with(uint64_t number, size_t bytes)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], number, bytes ? bytes + i : 0, &op[i]);
	both_ok("Commit");
}

static void commit(uint64_t number)
{
	commit_with(number, 10);
}

static void expect_at(uint64_t want)
{
	uint64_t is = 0;

	cr_expect(position_of(job->rec, &is));
	cr_expect_eq(is, want, "at %llu", (unsigned long long)is);
}

static void expect_unknown(void)
{
	uint64_t is;

	cr_expect_not(position_of(job->rec, &is));
}

static void expect_blobs(size_t bytes, uint64_t of)
{
	size_t all = 0;

	for (unsigned i = 0; i < 2; i++) {
		const state_blob *b = state_job_blob(job->rec, i);

		cr_assert(b);
		cr_expect_eq(b->data.len, bytes + i);
		cr_expect_eq(b->step, of);
		all += b->data.len;
	}
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], all + prepared_bytes);
	prepared_bytes = 0;
}

/* ------------------------------------------------------------------- without numbers */

Test(position, a_fresh_job_is_nowhere)
{
	expect_unknown();
	applied(NO_NUMBER, 0);
	expect_unknown();
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn, "no state that a restart would go on from");
}

Test(position, steps_count_if_the_commits_before_have_counted_them)
{
	for (unsigned i = 0; i < 10; i++)
		applied(NO_NUMBER, 0);
	commit(10);
	expect_at(10);
	applied(NO_NUMBER, 0);
	applied(NO_NUMBER, 0);
	expect_at(12);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	expect_at(12);
	cr_expect_eq(job->rec->step, 10);
	expect_blobs(10, 10);
}

Test(position, a_prepared_step_goes_with_its_trainers)
{
	applied(NO_NUMBER, 0);
	commit(1);
	step(NO_NUMBER, 0);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	expect_at(1);
}

/* 64 samples a step: nobody knows which number the next commit would have had. */
Test(position, other_numbers_tear_the_job)
{
	applied(NO_NUMBER, 0);
	commit(64);
	expect_at(64);
	applied(NO_NUMBER, 0);
	expect_unknown();
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
}

Test(position, one_commit_without_steps_says_nothing_about_them)
{
	commit(1000);
	expect_at(1000);
	applied(NO_NUMBER, 0);
	expect_unknown();
	commit(1001);
	applied(NO_NUMBER, 0);
	expect_at(1002);
	commit(1002);
	expect_at(1002);
}

Test(position, a_number_that_does_not_fit_ends_the_counting)
{
	applied(NO_NUMBER, 0);
	commit(1);
	applied(NO_NUMBER, 0);
	commit(3);
	applied(NO_NUMBER, 0);
	expect_unknown();
}

static void skip(uint64_t number, size_t bytes)
{
	reduce();
	for (unsigned i = 0; i < 2; i++)
		submit_step(i, number, bytes, true);
	both_ok("Step");
}

/* Programs count such a step, or not. */
Test(position, a_step_that_drops_its_gradients)
{
	applied(NO_NUMBER, 0);
	commit(1);
	skip(NO_NUMBER, 0);
	expect_at(1);
	applied(NO_NUMBER, 0);
	expect_unknown();
	commit(3); /* it is counted */
	applied(NO_NUMBER, 0);
	expect_at(4);
	skip(NO_NUMBER, 0);
	expect_unknown();
	commit(4); /* it is not */
	applied(NO_NUMBER, 0);
	expect_at(5);
}

/* ------------------------------------------------------------------- with numbers */

Test(position, a_step_with_a_number_needs_no_commit)
{
	applied(640, 7);
	expect_at(640);
	expect_blobs(7, 640);
	cr_expect_not(job->rec->has_commit);
	applied(1280, 9);
	expect_at(1280);
	expect_blobs(9, 1280);
	step(1920, 11);
	prepared_bytes = 11 + 12;
	expect_blobs(9, 1280); /* not applied yet */
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	expect_at(1280);
	expect_blobs(9, 1280);
}

Test(position, a_step_without_a_blob_leaves_the_last_one)
{
	applied(5, 7);
	applied(6, 0);
	expect_at(6);
	expect_blobs(7, 5);
}

/* It was erased before. */
Test(position, a_commit_without_a_blob_leaves_that_of_its_step)
{
	step(5, 7); /* the commit applies it */
	commit_with(5, 0);
	expect_blobs(7, 5);
	applied(6, 8);
	commit_with(6, 0);
	expect_blobs(8, 6);
	cr_expect_eq(job->rec->step, 6);
}

Test(position, a_commit_without_a_blob_erases_that_of_an_earlier_step)
{
	applied(5, 7);
	applied(6, 0);
	commit_with(6, 0);
	for (unsigned i = 0; i < 2; i++)
		cr_expect_eq(state_job_blob(job->rec, i)->data.len, 0);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0);
}

Test(position, a_number_counts_though_nothing_is_stepped)
{
	commit(10);
	skip(11, 7);
	expect_at(11);
	expect_blobs(7, 11);
	for (unsigned i = 0; i < 2; i++) /* without any gradient */
		submit_step(i, 12, 9, false);
	both_ok("Step");
	nodefix_drop(&n, m[1], "died");
	expect_at(12);
	expect_blobs(9, 12);
}

Test(position, the_commit_has_the_number_of_its_step)
{
	step(5, 7);
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 6, 10, &op[i]);
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "the last Step said that it is step 5");
	apply();
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 6, 10, &op[i]);
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "the last Step said that it is step 5");
	commit(5);
	expect_at(5);
	expect_blobs(10, 5);
	applied(NO_NUMBER, 0);
	commit(7);
}

static void expect_refused(uint64_t number, const char *words)
{
	for (unsigned i = 0; i < 2; i++)
		submit_step(i, number, 0, false);
	for (unsigned i = 0; i < 2; i++) {
		nodefix_wait(&op[i]);
		expect_fault(&op[i].fault, FAULT_INVALID, words);
	}
}

Test(position, numbers_grow)
{
	commit(5);
	reduce();
	expect_refused(5, "must be above the step before it, 5");
	step(7, 0);
	expect_refused(7, "must be above the step before it, 7"); /* which is not applied yet */
}

Test(position, a_blob_needs_a_number)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;
	uint8_t byte = 1;

	q.blob = (ProtobufCBinaryData){ 1, &byte };
	nodefix_submit(&n, m[0], "Step", &q.base, &op[0]);
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "give both");
}

Test(position, ranks_agree_on_the_number)
{
	reduce();
	submit_step(0, 5, 0, false);
	submit_step(1, 6, 0, false);
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[0].fault, FAULT_STATE, "Step 5");
	expect_fault(&op[1].fault, FAULT_STATE, "Step 6");
}

/* ------------------------------------------------------------------- half of a step */

static struct unit *in_backward(const char *name, uint32_t group)
{
	state_unit *s = nodefix_spec(name, ELEMENTS);

	s->optimizer->when = OPTIM_IN_BACKWARD;
	s->group = group;
	return nodefix_unit(&n, job, s, m, 2);
}

static void reduce_of(struct unit *x)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", x, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", x, &op[i]);
	both_ok("Reduce");
	nodefix_turns(&n);
}

/* The job has no copy of the state before that. */
static void without_copy(void)
{
	job->rec->resume = JOB_RESUME_NO_COPY;
	nodefix_wrote(&n);
}

/* Of two units, one has made the step. */
static void half(uint64_t last)
{
	struct unit *a = in_backward("a", 0);

	in_backward("b", 0);
	applied(last, 7);
	reduce_of(a);
	expect_unknown();
}

Test(position, optimizers_in_backward_are_between_two_steps)
{
	without_copy();
	half(1);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
}

Test(position, joining_again_makes_half_a_step_no_whole_one)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	without_copy();
	half(5);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), RES_DONE);
	expect_unknown();
}

Test(position, leaving_makes_half_a_step_no_whole_one)
{
	struct fault f = FAULT_NULL;
	bool freed;

	without_copy();
	half(5);
	cr_assert_eq(job_leave(m[1], &freed, &f), RES_DONE, "%s", f.text);
	m[1] = nodefix_join(&n, job, 1);
	expect_unknown();
}

Test(position, allowing_torn_makes_half_a_step_no_whole_one)
{
	job->rec->allow_torn = true;
	without_copy();
	half(5);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	expect_unknown();
}

/* With one, those of the step before it come back. */
static void expect_back(void)
{
	nodefix_turns(&n);
	expect_at(5);
	expect_blobs(7, 5);
	cr_expect_not(job->life.torn || job->rec->partial || job->rec->kept);
	cr_expect_eq(job->rec->uncommitted_steps, 1);
}

Test(position, a_death_brings_the_step_before_it_back)
{
	half(5);
	nodefix_drop(&n, m[1], "died");
	expect_back();
}

Test(position, joining_again_brings_the_step_before_it_back)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	half(5);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), RES_WAIT);
	expect_back();
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), RES_DONE, "%s", f.text);
}

Test(position, leaving_brings_the_step_before_it_back)
{
	struct fault f = FAULT_NULL;
	bool freed;

	half(5);
	cr_assert_eq(job_leave(m[1], &freed, &f), RES_DONE, "%s", f.text);
	cr_assert_eq(nodefix_try_join(&n, job, 1, NULL, NULL, &m[1], &f), RES_WAIT);
	expect_back();
	m[1] = nodefix_join(&n, job, 1);
}

/* Nobody knows which step that is. */
Test(position, a_step_before_it_without_a_number_tears_the_job)
{
	struct unit *a = in_backward("a", 0);

	commit(64);
	applied(NO_NUMBER, 0);
	reduce_of(a);
	cr_expect(job->rec->kept);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn, "it is not back yet");
	nodefix_turns(&n);
	cr_expect(job->life.torn);
}

/* One of two units is stepped, the other waits for its release. A rank dies while the commit, which
 * would be refused, waits. */
Test(position, a_death_does_not_let_half_a_step_be_committed)
{
	struct unit *a = in_backward("a", 0), *b = in_backward("b", 0);
	struct nodefix_op c[2] = { 0 }, gather[2] = { 0 };

	commit(10);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", b, &gather[0]), &gather[0]);
	reduce_of(b);
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", a, &gather[1]), &gather[1]);
	reduce_of(a);
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[1], "Release", a, &gather[1]);
	nodefix_turns(&n);
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 11, 10, &c[i]);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&c[0]);
	cr_expect_neq(c[0].fault.code, 0);
	cr_expect_eq(job->rec->step, 10);
	nodefix_turns(&n);
	expect_at(10);
}

/* ------------------------------------------------------------------- groups */

static struct group *both_ranks(void)
{
	static const uint32_t ranks[] = { 0, 1 };
	struct fault f = FAULT_NULL;
	struct group *g = NULL;

	cr_assert_eq(job_group(job, "g", ranks, 2, &g, &f), 0);
	return g;
}

/* Their Steps come before or after the world's. */
Test(position, with_groups_only_commits_tell)
{
	struct group *g = both_ranks();
	struct unit *a = in_backward("a", g->id);

	in_backward("b", g->id);
	applied(1, 7);
	expect_unknown();
	commit(1);
	expect_at(1);
	reduce_of(a); /* b not yet */
	applied(2, 7);
	expect_unknown();
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
}

/* What was committed is kept until the next commit. */
Test(position, with_groups_the_commit_comes_back)
{
	struct group *g = both_ranks();
	struct unit *a = in_backward("a", g->id), *b = in_backward("b", 0);

	commit(1);
	reduce_of(a);
	reduce_of(b);
	submit_step(0, NO_NUMBER, 0, false);
	submit_step(1, NO_NUMBER, 0, false);
	both_ok("Step");
	expect_unknown();
	cr_expect(job->rec->kept);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect_not(job->life.torn);
	expect_at(1);
	expect_blobs(10, 1);
	cr_expect_eq(a->rec->optimizer->steps + b->rec->optimizer->steps, 0);
}

Test(position, with_groups_and_no_commit_all_begins_again)
{
	struct unit *a = in_backward("a", both_ranks()->id);

	reduce_of(a);
	submit_step(0, 3, 5, false);
	submit_step(1, 3, 5, false);
	both_ok("Step");
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect_not(job->life.torn || job->rec->anchored);
	cr_expect_eq(a->rec->optimizer->steps, 0);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0);
}

/* By ReturnFull, CopyShard: nobody knows what they are for. */
Test(position, parameters_that_were_written_are_those_of_no_step)
{
	applied(NO_NUMBER, 0);
	commit(1);
	position_altered(job);
	expect_unknown();
	applied(2, 7);
	expect_at(2);
	position_altered(job);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
}

Test(position, parameters_that_were_initialised_again_are_those_of_no_step)
{
	applied(NO_NUMBER, 0);
	commit(1);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 77, &op[i]);
	both_ok("Initialise");
	expect_unknown();
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
}

Test(position, initialising_forgets_it)
{
	applied(NO_NUMBER, 0);
	commit(64);
	applied(NO_NUMBER, 0);
	nodefix_drop(&n, m[1], "died");
	cr_assert(job->life.torn);
	nodefix_drop(&n, m[0], "died");
	for (unsigned i = 0; i < 2; i++)
		m[i] = nodefix_join(&n, job, i);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 1, &op[i]);
	both_ok("Initialise");
	cr_expect_not(job->life.torn);
	expect_unknown();
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0, "the blobs are gone, too");
	applied(64, 0);
	expect_at(64);
	cr_expect_eq(state_job_blob(job->rec, 0)->data.len, 0);
	cr_expect_neq(state_job_blob(job->rec, 0)->step, 64);
}
