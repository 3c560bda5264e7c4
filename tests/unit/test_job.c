/* Jobs: opening, joining, epochs, leaving, groups, limits, and their end. */
#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_run.h"

TestSuite(job, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define OTHER_UID 12345u

static struct nodefix n;

static void test_job_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
}

static void test_job_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define JOB_TEST(name) Test(job, name, .init = test_job_begin, .fini = test_job_end)

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s", words, f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static int open_as(const struct job_spec *spec, uid_t uid, struct job **ret, bool *created,
		   struct fault *f)
{
	*f = FAULT_NULL;
	return job_open(&n.jobs, spec, uid, 7, ret, created, f);
}

/* A refused creation must not have deleted what it was to replace. */
JOB_TEST(fresh_deletes_nothing_unless_it_creates)
{
	const struct job_spec first = { .name = "a", .world_size = 2 };
	struct job_spec fresh = { .name = "a", .world_size = 2, .on_existing = JOB_FRESH };
	struct job *job = NULL, *again = NULL;
	bool created = false;
	struct fault f;

	cr_assert_eq(open_as(&first, OTHER_UID, &job, &created, &f), 0, "%s", f.text);
	job->rec->has_commit = true;
	nodefix_wrote(&n);
	n.node.limits.job_quota_bytes = 1 << 20;
	fresh.quota_bytes = 2 << 20;
	cr_expect_neq(open_as(&fresh, OTHER_UID, &again, &created, &f), 0);
	cr_expect_eq(n.jobs.count, 1, "after \"%s\"", f.text);
	fresh.quota_bytes = 0;
	n.jobs.draining = true;
	cr_expect_neq(open_as(&fresh, OTHER_UID, &again, &created, &f), 0);
	n.jobs.draining = false;
	cr_expect_eq(n.jobs.count, 1, "after \"%s\"", f.text);
}

JOB_TEST(open_makes_it_once_and_then_finds_it)
{
	const struct job_spec spec = { .name = "a", .world_size = 2 };
	struct job *job = NULL, *again = NULL;
	bool created = false;
	struct fault f;

	n.node.limits.job_quota_bytes = 1 << 20;
	n.node.limits.op_timeout_ms = 99;
	cr_assert_eq(open_as(&spec, OTHER_UID, &job, &created, &f), 0, "%s", f.text);
	cr_expect(created);
	cr_expect_eq(job->rec->uid, OTHER_UID);
	cr_expect_eq(job->rec->gid, 7);
	cr_expect_eq(job->rec->lifetime, JOB_EPHEMERAL, "the default");
	cr_expect_eq(job->rec->quota_bytes, 1 << 20);
	cr_expect_eq(job->rec->ttl_s, 3600);
	cr_expect_eq(job->rec->op_timeout_ms, 99);
	cr_expect_str_eq(job_state_name(job), "IDLE");
	cr_expect_eq(job->n_groups, 1);
	cr_expect_str_eq(job->groups[0]->rec->name, "world");
	cr_expect_eq(group_size(job->groups[0]), 2);
	cr_expect_eq(open_as(&spec, OTHER_UID, &again, &created, &f), 0);
	cr_expect_not(created);
	cr_expect_eq(again, job);
	cr_expect_eq(n.jobs.count, 1);
}

JOB_TEST(open_refuses_what_is_not_the_same_job)
{
	struct job_spec spec = {
		.name = "a", .world_size = 2, .lifetime = JOB_KEEP, .quota_bytes = 1000
	};
	struct job *job;
	struct fault f;

	cr_assert_eq(open_as(&spec, OTHER_UID, &job, NULL, &f), 0);
	spec.world_size = 3;
	open_as(&spec, OTHER_UID, &job, NULL, &f);
	expect_fault(&f, FAULT_STATE, "world size 2, not 3");
	spec.world_size = 2;
	spec.lifetime = JOB_EPHEMERAL;
	open_as(&spec, OTHER_UID, &job, NULL, &f);
	expect_fault(&f, FAULT_STATE, "lifetime KEEP, not EPHEMERAL");
	spec.lifetime = 0;
	spec.quota_bytes = 2000;
	open_as(&spec, OTHER_UID, &job, NULL, &f);
	expect_fault(&f, FAULT_STATE, "quota of 1000 bytes, not 2000");
	spec.quota_bytes = 0;
	cr_expect_eq(open_as(&spec, OTHER_UID, &job, NULL, &f), 0, "0 means: as it is");
}

JOB_TEST(a_job_is_its_owners_and_the_administrators)
{
	const struct job_spec spec = { .name = "a", .world_size = 2 };
	struct job *job = NULL, *found = NULL;
	struct fault f;

	cr_assert_eq(open_as(&spec, OTHER_UID, &job, NULL, &f), 0);
	job_find(&n.jobs, "a", OTHER_UID + 1, &found, &f);
	expect_fault(&f, FAULT_NOT_FOUND, "there is no job 'a'");
	f = FAULT_NULL;
	job_find(&n.jobs, "b", OTHER_UID, &found, &f);
	expect_fault(&f, FAULT_NOT_FOUND, "'b'");
	cr_expect_null(found);
	f = FAULT_NULL;
	cr_expect_eq(job_find(&n.jobs, "a", OTHER_UID, &found, &f), 0);
	cr_expect_eq(job_find(&n.jobs, "a", 0, &found, &f), 0);
	cr_expect_eq(job_find(&n.jobs, "a", geteuid(), &found, &f), 0);
	cr_expect_eq(found, job);
}

/* A name was taken for all users by the first who used it, and the refusal said so. */
JOB_TEST(two_users_have_a_job_of_one_name)
{
	const struct job_spec spec = { .name = "a", .world_size = 2 };
	struct job *hers = NULL, *his = NULL, *found = NULL;
	struct fault f = FAULT_NULL;
	bool created = false;
	char other[JOB_LABEL_MAX + 1];

	cr_assert_eq(open_as(&spec, OTHER_UID, &hers, &created, &f), 0);
	cr_assert(created);
	cr_assert_eq(open_as(&spec, OTHER_UID + 1, &his, &created, &f), 0, "%s", f.text);
	cr_assert(created && his != hers);
	cr_assert_eq(job_find(&n.jobs, "a", OTHER_UID, &found, &f), 0);
	cr_expect_eq(found, hers);
	cr_assert_eq(job_find(&n.jobs, "a", OTHER_UID + 1, &found, &f), 0);
	cr_expect_eq(found, his);
	job_label(OTHER_UID, "a", other);
	cr_assert_eq(job_find(&n.jobs, other, OTHER_UID, &found, &f), 0, "her own, in full");
	cr_assert_eq(job_find(&n.jobs, other, 0, &found, &f), 0);
	cr_expect_eq(found, hers);
	job_find(&n.jobs, other, OTHER_UID + 1, &found, &f);
	expect_fault(&f, FAULT_NOT_FOUND, "there is no job");
	f = FAULT_NULL;
	job_find(&n.jobs, "a", 0, &found, &f);
	expect_fault(&f, FAULT_INVALID, other);
	f = FAULT_NULL;
	cr_assert_eq(job_delete(hers, false, NULL, &f), 0);
	cr_assert_eq(job_find(&n.jobs, "a", 0, &found, &f), 0);
	cr_expect_eq(found, his);
	cr_assert_eq(open_as(&spec, 0, &found, &created, &f), 0, "the administrator's own");
	cr_expect(created && found != his);
}

JOB_TEST(a_job_of_another_user_is_not_made_in_his_name)
{
	const uid_t uids[] = { OTHER_UID + 1, 0 };
	struct job *job = NULL;
	char other[JOB_LABEL_MAX + 1];
	struct job_spec spec = { .name = other, .world_size = 2 };

	job_label(OTHER_UID, "a", other);
	for (size_t i = 0; i < ARRAY_SIZE(uids); i++) {
		struct fault f = FAULT_NULL;

		open_as(&spec, uids[i], &job, NULL, &f);
		expect_fault(&f, FAULT_NOT_FOUND, "there is no job");
	}
	cr_expect_null(job);
}

JOB_TEST(names_with_a_slash_have_a_uid_before_it)
{
	static const char *const wrong[] = {
		"/a",           "x/a",           "1/",   "1/a/b", "-1/a",
		"4294967295/a", "99999999999/a", "1 /a", "1/a b", ""
	};
	struct job_ref ref;

	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
		struct fault f = FAULT_NULL;

		job_ref_parse(wrong[i], "job", &ref, &f);
		cr_expect_eq(f.code, FAULT_INVALID, "%s", wrong[i]);
	}
	{
		struct fault f = FAULT_NULL;

		cr_assert_eq(job_ref_parse("4294967294/a.b-c_D9", "job", &ref, &f), 0);
		cr_expect(ref.has_uid && ref.uid == 4294967294u);
		cr_expect_str_eq(ref.name, "a.b-c_D9");
	}
}

JOB_TEST(a_private_job_is_closed_to_administrators)
{
	const struct job_spec spec = { .name = "a", .world_size = 2, .is_private = true };
	struct job *job = NULL, *found = NULL;
	char label[JOB_LABEL_MAX + 1];
	struct job_spec theirs = { .name = label, .world_size = 2 };
	struct fault f = FAULT_NULL;

	cr_assert_eq(open_as(&spec, OTHER_UID, &job, NULL, &f), 0);
	cr_expect(job_may_look(job, OTHER_UID));
	cr_expect(!job_may_look(job, 0) && job_may_use(job, 0), "it can be deleted");
	job_label(OTHER_UID, "a", label);
	open_as(&theirs, 0, &found, NULL, &f);
	expect_fault(&f, FAULT_DENIED, "private");
}

JOB_TEST(who_expects_another_run_of_the_daemon_is_told)
{
	static const uint8_t other[NODE_INSTANCE_BYTES] = { 1 };
	struct job_spec spec = { .name = "a", .world_size = 2, .instance = other };
	struct job *job = NULL;
	struct fault f = FAULT_NULL;

	open_as(&spec, OTHER_UID, &job, NULL, &f);
	expect_fault(&f, FAULT_LOST, "the daemon was restarted at");
	expect_fault(&f, FAULT_LOST, "the state of job 'a' is gone");
	cr_expect_null(job);
	cr_expect_eq(n.jobs.count, 0, "and no job was made");
	f = FAULT_NULL;
	spec.instance = n.node.instance;
	cr_assert_eq(open_as(&spec, OTHER_UID, &job, NULL, &f), 0);
}

JOB_TEST(a_job_cannot_ask_to_be_kept_for_ever)
{
	struct job_spec spec = { .name = "a", .world_size = 2, .ttl_s = 101 };
	struct job *job = NULL;
	struct fault f = FAULT_NULL;

	n.node.limits.max_job_ttl_s = 100;
	open_as(&spec, OTHER_UID, &job, NULL, &f);
	expect_fault(&f, FAULT_INVALID, "max_job_ttl_s");
	f = FAULT_NULL;
	spec.ttl_s = 100;
	cr_assert_eq(open_as(&spec, OTHER_UID, &job, NULL, &f), 0);
}

JOB_TEST(the_node_has_its_limits)
{
	struct job_spec spec = { .name = "a", .world_size = 5 };
	struct job *job = NULL;
	struct fault f;

	n.node.limits.max_world_size = 4;
	open_as(&spec, 1, &job, NULL, &f);
	expect_fault(&f, FAULT_INVALID, "world_size 5 is out of range");
	cr_expect_str_eq(f.field, "job.world_size");
	spec.world_size = 4;
	n.node.limits.max_jobs = 1;
	cr_assert_eq(open_as(&spec, 1, &job, NULL, &f), 0);
	spec.name = "b";
	open_as(&spec, 1, &job, NULL, &f);
	expect_fault(&f, FAULT_EXHAUSTED, "max_jobs");
	n.node.limits.max_jobs = 2;
	n.jobs.draining = true;
	open_as(&spec, 1, &job, NULL, &f);
	expect_fault(&f, FAULT_UNAVAILABLE, "draining");
	spec.name = "a";
	cr_expect_eq(open_as(&spec, 1, &job, NULL, &f), 0, "it is there");
}

/* ------------------------------------------------------------------- joining */

JOB_TEST(ranks_join_until_the_job_runs)
{
	struct job *job = nodefix_job(&n, "a", 3, 0);
	struct member *m;

	cr_expect_eq(job->rec->epoch, 0);
	m = nodefix_join(&n, job, 2);
	cr_expect_eq(job->rec->epoch, 1);
	cr_expect_eq(m->epoch, 1);
	cr_expect_eq(m->rank, 2);
	cr_expect_eq(member_pid(m), getpid());
	cr_expect_eq(job->life.idle_since_us, 0);
	cr_expect_str_eq(job_state_name(job), "FORMING");
	nodefix_join(&n, job, 0);
	nodefix_join(&n, job, 1);
	cr_expect_str_eq(job_state_name(job), "RUNNING");
	cr_expect_eq(job->rec->epoch, 1, "newcomers of an epoch do not end it");
	cr_expect_eq(n.events.n, 0);
}

JOB_TEST(a_rank_is_one_process_at_a_time)
{
	struct job *job = nodefix_job(&n, "a", 2, 0);
	struct member *m = nodefix_join(&n, job, 1), *other = NULL;
	struct fault f = FAULT_NULL;

	nodefix_try_join(&n, job, 1, NULL, NULL, &other, &f);
	expect_fault(&f, FAULT_STATE, "rank 1 of job 'a' is taken by pid");
	f = FAULT_NULL;
	nodefix_try_join(&n, job, 2, NULL, NULL, &other, &f);
	expect_fault(&f, FAULT_INVALID, "rank 2 is out of range (0..1)");
	f = FAULT_NULL;
	nodefix_try_join(&n, job, 0, NULL, m, &other, &f);
	expect_fault(&f, FAULT_STATE, "cannot become rank 0");
	cr_expect_null(other);
	cr_expect_eq(job->present, 1);
}

JOB_TEST(joining_again_ends_the_epoch_for_all)
{
	struct job *job = nodefix_job(&n, "a", 2, 0);
	struct member *m0 = nodefix_join(&n, job, 0), *m1 = nodefix_join(&n, job, 1), *again;
	struct nodefix_op op = { 0 };
	struct fault f = FAULT_NULL;

	nodefix_barrier(&n, m1, 0, &op);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m0, &again, &f), 0);
	cr_expect_eq(again, m0);
	cr_expect_eq(job->rec->epoch, 2);
	cr_expect_eq(m0->state, MEMBER_JOINED);
	cr_expect_eq(m0->epoch, 2);
	cr_expect_eq(m1->state, MEMBER_STALE);
	cr_assert(op.over);
	expect_fault(&op.fault, FAULT_ABORTED, "epoch 1 has ended");
	cr_expect_eq(n.events.kind, JOB_EVENT_EPOCH_ENDED);
	cr_expect_str_eq(job_state_name(job), "FORMING");
	nodefix_barrier(&n, m1, 0, &op);
	expect_fault(&op.fault, FAULT_ABORTED, "join again");
	cr_assert_eq(nodefix_try_join(&n, job, 1, NULL, m1, &again, &f), 0);
	cr_expect_eq(job->rec->epoch, 2, "who is stale joins the epoch that is there");
	cr_expect_str_eq(job_state_name(job), "RUNNING");
	cr_expect_eq(job->present, 2);
}

JOB_TEST(joining_again_gives_everything_back)
{
	struct job *job = nodefix_job(&n, "a", 1, 0);
	struct member *m = nodefix_join(&n, job, 0), *again;
	struct unit *u = nodefix_unit(&n, job, nodefix_spec("u", 100), &m, 1);
	struct nodefix_op op = { 0 };
	struct fault f = FAULT_NULL;

	NODEFIX_OK(nodefix_on_unit(&n, m, "Gather", u, &op), &op);
	NODEFIX_OK(nodefix_on_unit(&n, m, "GradientBuffer", u, &op), &op);
	NODEFIX_OK(nodefix_alloc(&n, m, 5000, &op), &op);
	cr_expect_gt(m->pool.used, 0);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m, &again, &f), 0);
	cr_expect_eq(again, m);
	cr_expect_eq(m->pool.used, 0);
	cr_expect_eq(member_gathered_units(m), 0);
	cr_expect_eq(u->gathered_ranks, 0);
	cr_expect(list_empty(&m->buffers));
	cr_expect(u->rec->initialised, "what belongs to the job stays");
}

static unsigned settled;

static void on_settled(struct waiter *w)
{
	(void)w;
	settled++;
}

JOB_TEST(who_joins_again_waits_for_what_still_runs)
{
	struct job *job = nodefix_job(&n, "a", 1, 0);
	struct member *m = nodefix_join(&n, job, 0), *again = NULL;
	struct unit *u = nodefix_register(job, nodefix_spec("u", 100));
	struct waiter w;
	struct nodefix_op op = { 0 };
	struct fault f = FAULT_NULL;

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_seed(&n, m, u, 1, &op);
	nodefix_turns(&n);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m, &again, &f), RES_WAIT);
	cr_expect_eq(m->state, MEMBER_STALE, "the epoch has ended though");
	cr_expect_null(again);
	waiter_init(&w, on_settled);
	condition_wait(&job->settled, &w);
	settled = 0;
	nodefix_turns(&n);
	cr_expect_eq(settled, 0);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&op);
	nodefix_turns(&n);
	cr_expect_eq(settled, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m, &again, &f), 0);
	cr_expect_eq(job->rec->epoch, 2);
}

JOB_TEST(death_tells_the_peers_who_and_where)
{
	struct job *job = nodefix_job(&n, "a", 2, 0);
	struct member *m[2] = { nodefix_join(&n, job, 0), nodefix_join(&n, job, 1) };
	struct unit *u = nodefix_unit(&n, job, nodefix_spec("encoder", 100), m, 2);
	struct nodefix_op gather = { 0 }, barrier = { 0 };

	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", u, &gather), &gather);
	nodefix_barrier(&n, m[0], 0, &barrier);
	nodefix_drop(&n, m[1], "died");
	cr_assert(barrier.over);
	expect_fault(&barrier.fault, FAULT_ABORTED, "rank 1 (pid");
	expect_fault(&barrier.fault, FAULT_ABORTED, "died (its last op: Gather of unit encoder)");
	cr_expect_eq(m[0]->state, MEMBER_STALE);
	cr_expect_eq(u->gathered_ranks, 0);
	cr_expect_eq(job->present, 1);
	cr_expect_eq(job->ranks[1]->state, MEMBER_DEAD);
	m[1] = nodefix_join(&n, job, 1);
	cr_expect_eq(job->rec->epoch, 2);
}

/* ------------------------------------------------------------------- leaving */

JOB_TEST(the_last_to_leave_frees_an_ephemeral_job)
{
	const struct job_spec spec = { .name = "e", .world_size = 2 };
	struct job *job = NULL;
	struct member *m[2];
	struct fault f = FAULT_NULL;
	bool freed = true;

	cr_assert_eq(job_open(&n.jobs, &spec, getuid(), 0, &job, NULL, &f), 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	nodefix_register(job, nodefix_spec("u", 1000));
	cr_assert_eq(job_leave(m[0], &freed, &f), 0);
	cr_expect_not(freed);
	cr_expect_eq(m[0]->state, MEMBER_LEFT);
	cr_assert_eq(job_leave(m[1], &freed, &f), 0);
	cr_expect(freed);
	cr_expect_eq(n.jobs.count, 0);
	nodefix_turns(&n);
	cr_expect_eq(n.node.devices[0].quota.used, 0);
	nodefix_drop(&n, m[0], "is gone"); /* the sessions end */
	nodefix_drop(&n, m[1], "is gone");
	nodefix_turns(&n);
	cr_expect(list_empty(&n.jobs.zombies));
}

JOB_TEST(who_has_ops_under_way_cannot_leave)
{
	struct job *job = nodefix_job(&n, "a", 2, 0);
	struct member *m = nodefix_join(&n, job, 0);
	struct nodefix_op op = { 0 };
	struct fault f = FAULT_NULL;
	bool freed;

	nodefix_barrier(&n, m, 0, &op);
	cr_assert_neq(job_leave(m, &freed, &f), 0);
	expect_fault(&f, FAULT_STATE, "1 ops in progress");
	cr_expect_eq(m->state, MEMBER_JOINED);
	op_cancel(op.op, FAULT_CANCELLED, "enough");
	f = FAULT_NULL;
	cr_expect_eq(job_leave(m, &freed, &f), 0);
	nodefix_barrier(&n, m, 0, &op);
	expect_fault(&op.fault, FAULT_STATE, "has left");
}

JOB_TEST(collectives_end_for_those_whose_peer_has_left)
{
	struct job *job = nodefix_job(&n, "a", 2, 0);
	struct member *m[2] = { nodefix_join(&n, job, 0), nodefix_join(&n, job, 1) };
	struct nodefix_op op[2] = { 0 };
	struct fault f = FAULT_NULL;
	bool freed;

	nodefix_barrier(&n, m[0], 0, &op[0]);
	cr_assert_eq(job_leave(m[1], &freed, &f), 0);
	cr_assert(op[0].over);
	expect_fault(&op[0].fault, FAULT_ABORTED, "has left job 'a'");
	nodefix_barrier(&n, m[0], 0, &op[1]);
	cr_assert(op[1].over);
	expect_fault(&op[1].fault, FAULT_ABORTED, "has left job 'a'");
	cr_expect_eq(m[0]->state, MEMBER_JOINED, "the epoch goes on");
}

/* A group that was made after a rank had left used to know nothing of that: its
 * collectives waited until their deadline. */
JOB_TEST(also_in_groups_that_are_made_later)
{
	static const uint32_t ranks[] = { 1, 0 };
	struct job *job = nodefix_job(&n, "a", 2, 0);
	struct member *m[2] = { nodefix_join(&n, job, 0), nodefix_join(&n, job, 1) };
	struct fault f = FAULT_NULL;
	struct nodefix_op op = { 0 };
	struct group *g = NULL;
	bool freed;

	cr_assert_eq(job_leave(m[1], &freed, &f), 0);
	cr_assert_eq(job_group(job, "late", ranks, 2, &g, &f), 0);
	nodefix_barrier(&n, m[0], g->id, &op);
	cr_assert(op.over);
	expect_fault(&op.fault, FAULT_ABORTED, "has left job 'a'");
}

JOB_TEST(who_has_left_may_come_back)
{
	struct job *job = nodefix_job(&n, "a", 1, 0);
	struct member *m = nodefix_join(&n, job, 0), *again = NULL;
	struct fault f = FAULT_NULL;
	struct nodefix_op op = { 0 };
	bool freed;

	cr_assert_eq(job_leave(m, &freed, &f), 0);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m, &again, &f), 0, "%s", f.text);
	cr_expect_neq(again, m);
	cr_expect_eq(again->epoch, 2, "its numbers begin at 1 again");
	NODEFIX_OK(nodefix_barrier(&n, again, 0, &op), &op);
	cr_expect_eq(op.number, 1);
}

/* -------------------------------------------------------------------- groups */

JOB_TEST(groups_have_an_order_and_are_made_once)
{
	static const uint32_t ranks[] = { 3, 1 }, turned[] = { 1, 3 };
	struct job *job = nodefix_job(&n, "a", 4, 0);
	struct group *g = NULL, *same = NULL;
	struct fault f = FAULT_NULL;
	uint32_t index;

	cr_assert_eq(job_group(job, "pair", ranks, 2, &g, &f), 0);
	cr_expect_eq(g->id, 1);
	cr_expect(group_index(g, 3, &index));
	cr_expect_eq(index, 0);
	cr_expect(group_index(g, 1, &index));
	cr_expect_eq(index, 1);
	cr_expect_not(group_index(g, 0, &index));
	cr_assert_eq(job_group(job, "pair", ranks, 2, &same, &f), 0);
	cr_expect_eq(same, g);
	cr_expect_eq(job_group_by_id(job, 1), g);
	cr_expect_null(job_group_by_id(job, 2));
	job_group(job, "pair", turned, 2, &same, &f);
	expect_fault(&f, FAULT_STATE, "another order");
	f = FAULT_NULL;
	job_group(job, "pair", ranks, 1, &same, &f);
	expect_fault(&f, FAULT_STATE, "other ranks");
}

JOB_TEST(there_are_so_many_groups_and_no_more)
{
	static const uint32_t ranks[] = { 0 };
	struct job *job = nodefix_job(&n, "a", 1, 0);
	struct fault f = FAULT_NULL;
	struct group *g;
	char name[16];

	for (unsigned i = 1; i < JOB_MAX_GROUPS; i++) {
		snprintf(name, sizeof(name), "g%u", i);
		cr_assert_eq(job_group(job, name, ranks, 1, &g, &f), 0);
	}
	cr_expect_eq(job->rec->n_groups, JOB_MAX_GROUPS);
	job_group(job, "more", ranks, 1, &g, &f);
	expect_fault(&f, FAULT_EXHAUSTED, "256 groups");
	f = FAULT_NULL;
	cr_expect_eq(job_group(job, "g17", ranks, 1, &g, &f), 0);
}

/* ------------------------------------------------------------------- the end */

JOB_TEST(a_job_without_trainers_lives_for_ttl)
{
	const struct job_spec spec = {
		.name = "k", .world_size = 1, .lifetime = JOB_KEEP, .ttl_s = 10
	};
	struct job *job = NULL;
	struct fault f = FAULT_NULL;
	struct member *m;

	clock_fake(1000000);
	cr_assert_eq(job_open(&n.jobs, &spec, getuid(), 0, &job, NULL, &f), 0);
	jobs_tick(&n.jobs, 10999999);
	cr_expect_eq(n.jobs.count, 1);
	m = nodefix_join(&n, job, 0);
	jobs_tick(&n.jobs, 99000000);
	cr_expect_eq(n.jobs.count, 1, "somebody is there");
	clock_fake(99000000);
	nodefix_drop(&n, m, "died");
	jobs_tick(&n.jobs, 108999999);
	cr_expect_eq(n.jobs.count, 1);
	jobs_tick(&n.jobs, 109000000);
	cr_expect_eq(n.jobs.count, 0);
	cr_expect(list_empty(&n.jobs.zombies));
}

JOB_TEST(deletion_needs_force_while_trainers_are_there)
{
	struct job *job = nodefix_job(&n, "a", 2, 0), *found;
	struct member *m = nodefix_join(&n, job, 0);
	struct unit *u = nodefix_register(job, nodefix_spec("u", 1000));
	struct nodefix_op op = { 0 };
	struct fault f = FAULT_NULL;
	uint64_t freed = 0, held = job->quota.used;

	cr_expect(u);
	nodefix_barrier(&n, m, 0, &op);
	job_delete(job, false, &freed, &f);
	expect_fault(&f, FAULT_STATE, "1 trainers");
	f = FAULT_NULL;
	cr_assert_eq(job_delete(job, true, &freed, &f), 0);
	cr_expect_eq(freed, held);
	cr_assert(op.over);
	expect_fault(&op.fault, FAULT_ABORTED, "was deleted");
	cr_expect_eq(m->state, MEMBER_DEAD);
	cr_expect_str_eq(job_state_name(job), "DELETED");
	nodefix_turns(&n);
	cr_expect_eq(n.node.devices[0].quota.used, 0, "nothing was mapped");
	nodefix_barrier(&n, m, 0, &op);
	expect_fault(&op.fault, FAULT_ABORTED, "was deleted");
	job_find(&n.jobs, "a", getuid(), &found, &f);
	expect_fault(&f, FAULT_NOT_FOUND, "'a'");
	cr_expect_neq(nodefix_job(&n, "a", 3, 0), job, "the name is free");
	nodefix_drop(&n, m, "is gone");
	/* whoever ends the last of it goes on to use it */
	cr_expect_not(list_empty(&n.jobs.zombies));
	nodefix_turns(&n);
	cr_expect(list_empty(&n.jobs.zombies));
}

static void map_all(struct slab *s, void *arg)
{
	bool writable;
	int fd;

	(void)arg;
	cr_assert_eq(slab_export(s, &fd, &writable), 0);
	close(fd);
}

JOB_TEST(a_deleted_job_stays_as_a_zombie_while_its_memory_is_mapped)
{
	struct job *job = nodefix_job(&n, "a", 1, 0);
	struct fault f = FAULT_NULL;
	struct nodefix_child c;
	struct nodefix_op op = { 0 };
	struct member *m = NULL;
	uint64_t held, grads;

	nodefix_fork(&n, &c);
	cr_assert_eq(nodefix_try_join(&n, job, 0, c.proc, NULL, &m, &f), 0);
	nodefix_register(job, nodefix_spec("u", 1000));
	NODEFIX_OK(nodefix_alloc(&n, m, 5000, &op), &op);
	map_all(job->mem.slabs[0], NULL); /* but not the gradients' slab */
	pool_each_slab(&m->pool, map_all, NULL);
	grads = job->mem.slabs[1]->bytes;
	held = job->quota.used;
	cr_assert_eq(job_delete(job, true, NULL, &f), 0);
	nodefix_drop(&n, m, "is gone");
	jobs_tick(&n.jobs, clock_now_us());
	cr_expect_not(list_empty(&n.jobs.zombies));
	cr_expect_eq(n.node.devices[0].quota.used, held - grads);
	cr_expect_eq(n.node.quarantine.bytes, held - grads);
	nodefix_kill(&n, &c);
	cr_expect_eq(n.node.devices[0].quota.used, 0);
	jobs_tick(&n.jobs, clock_now_us());
	cr_expect(list_empty(&n.jobs.zombies));
	nodefix_unref(&c);
}

JOB_TEST(memory_of_a_lost_rank_waits_for_its_process)
{
	struct job *job = nodefix_job(&n, "a", 1, 0);
	struct fault f = FAULT_NULL;
	struct nodefix_child c;
	struct nodefix_op op = { 0 };
	struct member *m = NULL;

	nodefix_fork(&n, &c);
	cr_assert_eq(nodefix_try_join(&n, job, 0, c.proc, NULL, &m, &f), 0);
	NODEFIX_OK(nodefix_alloc(&n, m, 5000, &op), &op);
	pool_each_slab(&m->pool, map_all, NULL);
	nodefix_drop(&n, m, "closed its connection");
	cr_expect_eq(job->quota.by_class[MEM_GRAD], POOL_MIN_SLAB, "it may still write there");
	cr_expect_eq(n.node.quarantine.bytes, POOL_MIN_SLAB);
	nodefix_kill(&n, &c);
	cr_expect_eq(job->quota.used, 0);
	nodefix_unref(&c);
}

JOB_TEST(draining_admits_nobody_and_tells_all)
{
	struct job *job = nodefix_job(&n, "a", 3, 0);
	struct fault f = FAULT_NULL;
	struct member *m;

	nodefix_join(&n, job, 0);
	nodefix_join(&n, job, 1);
	cr_expect_eq(job_drain(job), 2);
	cr_expect_eq(n.events.n, 2);
	cr_expect_eq(n.events.kind, JOB_EVENT_DRAIN);
	cr_expect_str_eq(job_state_name(job), "DRAINING");
	nodefix_try_join(&n, job, 2, NULL, NULL, &m, &f);
	expect_fault(&f, FAULT_UNAVAILABLE, "draining");
}

JOB_TEST(a_refusal_for_want_of_memory_says_who_has_it)
{
	struct job *job = nodefix_job(&n, "a", 1, 3 << 20);
	struct member *m = nodefix_join(&n, job, 0);
	struct nodefix_op op = { 0 };

	NODEFIX_OK(nodefix_alloc(&n, m, 2 << 20, &op), &op);
	nodefix_alloc(&n, m, 2 << 20, &op);
	expect_fault(&op.fault, FAULT_EXHAUSTED,
		     "job 'a' holds 2097152 bytes (shard 0, full 0, "
		     "grad 2097152, control 0, published 0) of its 3145728");
	cr_expect_eq(job->ops.failed, 1);
	cr_expect(strstr(job->ops.last_error, "RESOURCE_EXHAUSTED"));
}

JOB_TEST(a_refusal_for_want_of_memory_says_what_frees_some)
{
	struct job *job = nodefix_job(&n, "a", 1, 3 << 20), *other = nodefix_job(&n, "b", 1, 0);
	struct member *m = nodefix_join(&n, job, 0), *of_other = nodefix_join(&n, other, 0);
	struct nodefix_op op = { 0 };

	NODEFIX_OK(nodefix_alloc(&n, of_other, 1 << 20, &op), &op);
	nodefix_alloc(&n, m, 4 << 20, &op);
	expect_fault(&op.fault, FAULT_EXHAUSTED,
		     "your others ('shardctl job delete NAME' frees one): 'b' 1048576");
}

/* What a shutdown takes for lost. */
JOB_TEST(whose_last_commit_is_in_a_checkpoint)
{
	state_unit *spec = nodefix_spec("u", 100);
	struct fault f = FAULT_NULL;
	struct nodefix_op op = { 0 };
	struct member *m;
	struct job *job;
	bool freed;

	job = nodefix_job(&n, "job", 1, 0);
	cr_expect_str_eq(job_state_place(job), "none");
	m = nodefix_join(&n, job, 0);
	cr_assert_eq(state_unit_add_buffer(spec, state_buffer_new("mean", NULL, 0)), 0);
	(void)nodefix_unit(&n, job, spec, &m, 1); /* its buffers are in checkpoints, too */
	NODEFIX_OK(nodefix_commit(&n, m, 5, 0, &op), &op);
	job_saved(job, 5);
	cr_expect(job_is_in_memory_only(job), "its trainer may change it");
	cr_assert_eq(job_leave(m, &freed, &f), RES_DONE);
	nodefix_drop(&n, m, "left");
	cr_expect_str_eq(job_state_place(job), "in a checkpoint");
	m = nodefix_join(&n, job, 0);
	(void)nodefix_unit(&n, job, nodefix_spec("more", 100), &m, 1);
	job_saved(job, 5); /* of what was before */
	cr_assert_eq(job_leave(m, &freed, &f), RES_DONE);
	nodefix_drop(&n, m, "left");
	cr_expect_not(job->rec->saved, "a successor must not believe it either");
	cr_expect_str_eq(job_state_place(job), "in memory only: lost");
	m = nodefix_join(&n, job, 0);
	NODEFIX_OK(nodefix_commit(&n, m, 6, 0, &op), &op);
	cr_assert_eq(job_leave(m, &freed, &f), RES_DONE);
	nodefix_drop(&n, m, "left");
	cr_expect_str_eq(job_state_place(job), "in memory only: lost");
	job_saved(job, 6);
	cr_expect_str_eq(job_state_place(job), "in a checkpoint");
}
