/* Restores (job/restore.h) that fail, wait, are refused or ended: the job has all of a state then, or nothing. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "job/job_journal.h"
#include "restorefix.h"
#include "store/change.h"

TestSuite(span_restore_fail, .init = restorefix_begin_suite, .fini = restorefix_end_suite,
	  .timeout = 120);

/* A job of two nodes at step 3, between epochs; the second one may have nothing of it. */
static struct restorefix_parts at_step_3(bool loses)
{
	struct restorefix_parts p;

	restorefix_begin(WORLD(2, 1));
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	restorefix_step(4);
	restorefix_epoch_ends();
	if (loses)
		restorefix_lose(1);
	return p;
}

static bool has_state(unsigned node)
{
	const struct job *job = spanfix.jobs[node];
	uint32_t units = 0, initialised = 0;

	for (uint32_t i = 0; i < job->n_units; i++) {
		units += !job->units[i]->rec->dropped;
		initialised += !job->units[i]->rec->dropped && job->units[i]->rec->initialised;
	}
	cr_expect(initialised == 0 || initialised == units, "half of it");
	cr_expect_eq(job->rec->has_commit, initialised > 0);
	return initialised;
}

static void restore_fails(unsigned node, const struct restorefix_parts *p, uint64_t step_number,
			  enum fault_code code, const char *words)
{
	struct fault f = FAULT_NULL;

	memset(&restorefix_ended, 0, sizeof(restorefix_ended));
	if (restorefix_try(node, p, step_number, &f) == 0) {
		restorefix.awaited = 1;
		spanfix_turn_until(&spanfix, restorefix_is_over);
		f = restorefix_ended.f[node];
	}
	cr_expect_eq(f.code, code, "%s: %s", fault_code_name(f.code), f.text);
	cr_expect(strstr(f.text, words), "%s", f.text);
	cr_expect(!restore_is_busy(spanfix.jobs[node]));
}

/* After whatever failed it can be tried again. */
static void then_all_is_well(struct restorefix_parts *p)
{
	struct restorefix_parts is3;

	restorefix_all(p);
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		restorefix_drop_members(i);
	is3 = restorefix_take(NULL);
	restorefix_same(p, &is3, 3);
	restorefix_end();
	restorefix_free(p);
	restorefix_free(&is3);
}

/* A bit of its first tensor. */
static void flip(const struct restorefix_parts *p, unsigned part)
{
	uint64_t header;
	uint8_t byte;

	CHECK(pread(p->all[part].fd, &header, 8, 0) == 8);
	CHECK(pread(p->all[part].fd, &byte, 1, (off_t)header + 8) == 1);
	byte ^= 16;
	CHECK(pwrite(p->all[part].fd, &byte, 1, (off_t)header + 8) == 1);
}

Test(span_restore_fail, of_a_damaged_part_leaves_no_state)
{
	struct restorefix_parts p = at_step_3(true);

	for (unsigned part = 0; part < 2; part++) {
		flip(&p, part);
		restore_fails(part, &p, 3, FAULT_LOST, "is damaged");
		cr_expect(!has_state(part));
		flip(&p, part);
	}
	then_all_is_well(&p);
}

Test(span_restore_fail, of_a_missing_part_changes_nothing)
{
	struct restorefix_parts p = at_step_3(true);

	p.n = 1;
	restore_fails(0, &p, 3, FAULT_LOST, "overlap or are missing");
	cr_expect(has_state(0));
	restore_fails(1, &p, 3, FAULT_LOST, "overlap or are missing");
	p.n = 2;
	restore_fails(0, &p, 2, FAULT_LOST, "is of step 3");
	cr_expect(has_state(0));
	then_all_is_well(&p);
}

Test(span_restore_fail, of_a_part_that_is_cut_off_changes_nothing)
{
	struct restorefix_parts p = at_step_3(true);
	off_t bytes = lseek(p.all[0].fd, 0, SEEK_END);

	CHECK(ftruncate(p.all[0].fd, bytes - 100) == 0);
	restore_fails(0, &p, 3, FAULT_LOST, "");
	cr_expect(has_state(0));
	CHECK(ftruncate(p.all[0].fd, 5) == 0);
	restore_fails(0, &p, 3, FAULT_LOST, "");
	cr_expect(has_state(0));
	cr_expect_eq(spanfix.jobs[0]->rec->step, 4);
	restorefix_end();
	restorefix_free(&p);
}

Test(span_restore_fail, of_a_part_that_was_not_fetched_is_refused)
{
	struct restorefix_parts p = at_step_3(false);
	int fd = p.all[1].fd;

	p.all[1].fd = -1;
	restore_fails(1, &p, 3, FAULT_INTERNAL, "was not fetched");
	p.all[1].fd = fd;
	then_all_is_well(&p);
}

Test(span_restore_fail, without_memory_fails)
{
	struct restorefix_parts p = at_step_3(true);
	struct fault f = FAULT_NULL;

	cr_assert_eq(job_delete(spanfix.jobs[1], true, NULL, &f), 0);
	spanfix.jobs[1] = nodefix_job(&spanfix.nodes[1], "job", 3, 20000);
	restore_fails(1, &p, 3, FAULT_EXHAUSTED, "cannot allocate");
	cr_expect(!has_state(1));
	cr_expect_eq(job_units_alive(spanfix.jobs[1]), 0);
	spanfix.jobs[1]->quota.limit = UINT64_MAX;
	then_all_is_well(&p);
}

Test(span_restore_fail, of_other_units_is_refused)
{
	struct restorefix_parts p = at_step_3(false);

	p.specs[0] ^= 0xff;
	restore_fails(0, &p, 3, FAULT_INVALID, "");
	cr_expect(has_state(0));
	p.specs[0] ^= 0xff;
	then_all_is_well(&p);
}

Test(span_restore_fail, is_refused_in_an_epoch_and_twice)
{
	struct restorefix_parts p;
	struct fault f = FAULT_NULL;
	struct member *m = NULL;

	restorefix_begin(WORLD(2, 1));
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	restore_fails(0, &p, 3, FAULT_STATE, "ranks are in job");
	cr_expect(has_state(0));
	restorefix_epoch_ends();
	memset(&restorefix_ended, 0, sizeof(restorefix_ended));
	cr_assert_eq(restorefix_try(0, &p, 3, &f), 0, "%s", f.text);
	cr_expect_neq(restorefix_try(0, &p, 3, &f), 0);
	cr_expect(strstr(f.text, "is being restored"), "%s", f.text);
	f = FAULT_NULL;
	cr_expect_eq(nodefix_try_join(&spanfix.nodes[0], spanfix.jobs[0], 0, NULL,
				      spanfix.members[0], &m, &f),
		     RES_WAIT, "ranks wait");
	restorefix.awaited = 1;
	spanfix_turn_until(&spanfix, restorefix_is_over);
	cr_expect_eq(restorefix_ended.f[0].code, 0, "%s", restorefix_ended.f[0].text);
	then_all_is_well(&p);
}

static void turns(unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		spanfix_turn(&spanfix);
		usleep(20);
	}
}

static void is_cancelled(bool devices, bool moves)
{
	struct restorefix_parts p;
	unsigned cancelled = 0;

	spanfix_queues = devices;
	p = at_step_3(!moves);
	if (moves)
		restorefix_move_to(WORLD(1, 2), false);
	for (unsigned k = 0; k < 24; k++) {
		unsigned node = k & 1;
		struct fault f = FAULT_NULL;

		memset(&restorefix_ended, 0, sizeof(restorefix_ended));
		cr_assert_eq(restorefix_try(node, &p, 3, &f), 0, "%s", f.text);
		turns(k / 2);
		restore_cancel(spanfix.jobs[node]);
		restorefix.awaited = 1;
		spanfix_turn_until(&spanfix, restorefix_is_over);
		cancelled += restorefix_ended.f[node].code == FAULT_CANCELLED;
		cr_expect(!restorefix_ended.f[node].code ||
				  restorefix_ended.f[node].code == FAULT_CANCELLED,
			  "%s", restorefix_ended.f[node].text);
		if (!has_state(node))
			cr_expect_neq(restorefix_ended.f[node].code, 0);
	}
	cr_expect_gt(cancelled, 1);
	then_all_is_well(&p);
}

Test(span_restore_fail, ends_when_it_is_cancelled)
{
	is_cancelled(false, false);
}

Test(span_restore_fail, ends_when_it_is_cancelled_by_way_of_devices)
{
	is_cancelled(true, false);
}

Test(span_restore_fail, ends_when_it_is_cancelled_on_its_way_elsewhere)
{
	is_cancelled(false, true);
}

Test(span_restore_fail, ends_with_its_job)
{
	struct restorefix_parts p = at_step_3(true);

	for (unsigned k = 0; k < 12; k++) {
		struct fault f = FAULT_NULL;

		memset(&restorefix_ended, 0, sizeof(restorefix_ended));
		cr_assert_eq(restorefix_try(1, &p, 3, &f), 0, "%s", f.text);
		turns(k);
		cr_assert_eq(job_delete(spanfix.jobs[1], true, NULL, &f), 0, "%s", f.text);
		restorefix.awaited = 1;
		spanfix_turn_until(&spanfix, restorefix_is_over);
		cr_expect(!restorefix_ended.f[1].code ||
				  restorefix_ended.f[1].code == FAULT_NOT_FOUND,
			  "%s", restorefix_ended.f[1].text);
		cr_expect(k || restorefix_ended.f[1].code == FAULT_NOT_FOUND);
		spanfix.jobs[1] = nodefix_job(&spanfix.nodes[1], "job", 3, 0);
	}
	then_all_is_well(&p);
}

/* What is there and not in the parts goes; what is in the parts and not there comes. */
Test(span_restore_fail, has_the_units_of_its_step)
{
	struct restorefix_parts p;

	restorefix_begin(WORLD(2, 1));
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	spanfix_add_named_unit(&spanfix, "later", 100, NULL);
	restorefix_epoch_ends();
	for (unsigned i = 0; i < 2; i++) {
		struct job *job = spanfix.jobs[i];

		for (uint32_t r = 0; r < 3; r++)
			if (job->ranks[r])
				member_reset(job->ranks[r]);
		job_drop_unit(job, restorefix_unit_of(i, "theirs"));
		job_units_dropped(job, NULL);
		job_journal_write(job);
	}
	restorefix_all(&p);
	for (unsigned i = 0; i < 2; i++) {
		cr_expect(!restorefix_unit_of(i, "later"));
		cr_expect(restorefix_unit_of(i, "theirs"));
	}
	then_all_is_well(&p);
}

static void on_hold(struct reader *r, const struct fault *f)
{
	(void)r;
	cr_expect(!f);
}

static bool waits_for_a_reader(struct spanfix *w)
{
	return strcmp(restore_waits_for(w->jobs[0]), "readers of the job's parameters") == 0;
}

Test(span_restore_fail, waits_for_readers)
{
	struct restorefix_parts p;
	struct reader *r = NULL;
	struct fault f = FAULT_NULL;

	restorefix_begin(WORLD(2, 1));
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	restorefix_epoch_ends();
	cr_assert_eq(reader_new(spanfix.jobs[0], spanfix.nodes[0].proc, 9, &r), 0);
	cr_assert_eq(reader_hold(r, UINT64_MAX, on_hold, NULL, &f), 0, "%s", f.text);
	cr_assert_eq(r->state, READER_HOLDS);
	memset(&restorefix_ended, 0, sizeof(restorefix_ended));
	cr_assert_eq(restorefix_try(0, &p, 3, &f), 0, "%s", f.text);
	spanfix_turn_until(&spanfix, waits_for_a_reader); /* a thread has looked at the parts */
	turns(50);
	cr_expect_eq(restorefix_ended.over, 0);
	cr_expect(has_state(0));
	cr_expect_str_eq(restore_waits_for(spanfix.jobs[0]), "readers of the job's parameters");
	cr_expect_eq(reader_release(r, &f), 0, "%s", f.text);
	restorefix.awaited = 1;
	spanfix_turn_until(&spanfix, restorefix_is_over);
	cr_expect_eq(restorefix_ended.f[0].code, 0, "%s", restorefix_ended.f[0].text);
	reader_free(r);
	then_all_is_well(&p);
}

/* A step is prepared, and a commit announced, of which nobody knows whether it took effect. */
Test(span_restore_fail, drops_what_is_in_doubt)
{
	struct spanfix *w = &spanfix;
	struct restorefix_parts p;

	restorefix_begin(WORLD(2, 1));
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	w->undecided = true;
	CHECK(restorefix_use("rows"));
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_fill(spanfix_result(w, r), r, 40);
	ALL(w, nodefix_reduce(n, m, u, false, op));
	ALL(w, nodefix_step(n, m, op));
	EACH(w, nodefix_commit(n, m, 4, 8, op));
	turns(50);
	restorefix_epoch_ends();
	for (unsigned i = 0; i < 2; i++)
		cr_expect(spanfix.jobs[i]->step.doubt);
	restorefix_all(&p);
	for (unsigned i = 0; i < 2; i++)
		cr_expect(!spanfix.jobs[i]->step.doubt);
	then_all_is_well(&p);
}

Test(span_restore_fail, that_cannot_be_laid_out_is_refused)
{
	struct restorefix_parts p;

	restorefix_begin(WORLD(2, 2));
	restorefix.hybrid = true;
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	restorefix_epoch_ends();
	restorefix_move_to(WORLD(2, 1), false);
	restore_fails(0, &p, 3, FAULT_INVALID, "hybrid");
	cr_expect(has_state(0));
	restorefix_end();
	restorefix_free(&p);
}

Test(span_restore_fail, of_groups_with_other_ranks_is_refused)
{
	struct restorefix_parts p;

	restorefix_begin(WORLD(1, 1, 1));
	restorefix.pair = true;
	restorefix_add_units();
	restorefix_train(1, 3);
	p = restorefix_take(NULL);
	restorefix_epoch_ends();
	restorefix_move_to(WORLD(1, 1), false);
	restore_fails(0, &p, 3, FAULT_INVALID, "unit 'pair' belongs to group 'pair'");
	cr_expect(has_state(0));
	restorefix_end();
	restorefix_free(&p);
}

/* After a try that left no memory, and in a world with other ranks. */
Test(span_restore_fail, elsewhere_of_a_damaged_part_leaves_no_state)
{
	struct restorefix_parts p = at_step_3(false);

	restorefix_move_to(WORLD(1, 2), false);
	flip(&p, 0);
	restore_fails(0, &p, 3, FAULT_LOST, "is damaged");
	cr_expect(!has_state(0));
	flip(&p, 0);
	then_all_is_well(&p);
}

/* What a successor of the daemon would find now: all of a state, or nothing. Return: all. */
static bool journal_has_state(unsigned node)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	size_t units = 0, initialised = 0;
	bool commit;

	cr_assert_eq(change_read(spanfix.nodes[node].journal, &all, &f), 0, "%s", f.text);
	cr_assert_eq(all->n_jobs, 1);
	commit = all->jobs[0]->has_commit;
	for (size_t i = 0; i < all->jobs[0]->n_units; i++) {
		units += !all->jobs[0]->units[i]->dropped;
		initialised += all->jobs[0]->units[i]->initialised;
	}
	cr_expect(initialised == 0 || initialised == units);
	cr_expect_eq(commit, initialised > 0);
	state_free(all);
	return commit;
}

/* A restore that has forgotten the state it had is held there, so that a turn ends between. */
static struct {
	enum res (*drain)(struct job *job, struct waiter *w); /* what it would have waited for */
	struct waiter *waiter;                                /* NULL: it is not held */
} held;

static enum res hold(struct job *job, struct waiter *w)
{
	job->jobs->ops.drain = held.drain;
	held.waiter = w;
	return RES_WAIT;
}

static void hold_next(struct job *job)
{
	held.drain = job->jobs->ops.drain;
	job->jobs->ops.drain = hold;
}

static void let_go(struct job *job)
{
	struct waiter *w = held.waiter;

	held.waiter = NULL;
	if (w && held.drain(job, w) == RES_DONE)
		w->resume(w);
}

/* @moves: it gets other ranks. */
static void is_in_the_journal(bool moves, bool loses)
{
	struct restorefix_parts p = at_step_3(loses);
	bool had, has;

	if (moves)
		restorefix_move_to(WORLD(1, 2), false);
	for (unsigned node = 0; node < 2; node++) {
		struct fault f = FAULT_NULL;
		unsigned changes = 0, expected = journal_has_state(node) ? 2 : 1;

		had = expected == 2;
		hold_next(spanfix.jobs[node]);
		memset(&restorefix_ended, 0, sizeof(restorefix_ended));
		cr_assert_eq(restorefix_try(node, &p, 3, &f), 0, "%s", f.text);
		while (!restorefix_ended.over) {
			turns(1);
			has = journal_has_state(node);
			changes += has != had;
			had = has;
			let_go(spanfix.jobs[node]);
		}
		cr_expect_eq(restorefix_ended.f[node].code, 0);
		cr_expect(journal_has_state(node));
		cr_expect_eq(changes, expected, "a state that was there goes, and one comes");
	}
	then_all_is_well(&p);
}

Test(span_restore_fail, has_all_or_nothing_in_the_journal)
{
	is_in_the_journal(false, false);
}

Test(span_restore_fail, has_all_or_nothing_in_the_journal_of_an_empty_node)
{
	is_in_the_journal(false, true);
}

Test(span_restore_fail, has_all_or_nothing_in_the_journal_elsewhere)
{
	is_in_the_journal(true, false);
}
