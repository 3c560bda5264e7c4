/* What the leader of a job rules before an epoch, from what the nodes have of it: docs/nodes.md. */
#include <criterion/criterion.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "fdcheck.h"

TestSuite(cluster_holding, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10);

#define NODES 3

static const struct job_step_id left = { 5, 100, 3 }, right = { 5, 200, 7 };

static struct cluster_job cj;
static struct cluster_node nodes[NODES];

/* All have applied step 1, and nothing is in doubt. */
static void begin(void)
{
	cj = (struct cluster_job){ .label = "0/j" };
	list_init(&cj.nodes);
	list_init(&cj.later);
	for (unsigned i = 0; i < NODES; i++) {
		nodes[i] = (struct cluster_node){ .holding = { .units = 4,
							       .incarnation = 77,
							       .has_position = true,
							       .position = 1 } };
		snprintf(nodes[i].name, sizeof(nodes[i].name), "n%u", i);
		list_init(&nodes[i].link);
		list_append(&cj.nodes, &nodes[i].link);
	}
}

/* Node @i has the step @id prepared, with which it is at step 2. */
static void prepares(unsigned i, const struct job_step_id *id)
{
	nodes[i].holding.doubt.has_prepared = true;
	nodes[i].holding.doubt.prepared = *id;
	nodes[i].holding.has_after = true;
	nodes[i].holding.after = 2;
}

/* Node @i has applied these, and is at step 2. */
static void applies(unsigned i, const struct job_step_id *ids, size_t n)
{
	nodes[i].holding.applied = calloc(n, sizeof(*ids));
	CHECK(nodes[i].holding.applied);
	memcpy(nodes[i].holding.applied, ids, n * sizeof(*ids));
	nodes[i].holding.n_applied = n;
	nodes[i].holding.position = 2;
}

static int rule(struct fault *f)
{
	const struct coord_reply none = { .status = COORD_OK };

	*f = FAULT_NULL;
	return cluster_holding_rule(&cj, &none, f);
}

static void end(void)
{
	for (unsigned i = 0; i < NODES; i++)
		cluster_holding_deinit(&nodes[i].holding);
	free(cj.ruled);
}

/* A node said only which step it had applied last, so such a job was refused. */
Test(cluster_holding, steps_of_two_groups_in_doubt_are_both_applied)
{
	const struct job_step_id both[] = { left, right };
	struct fault f;

	begin();
	applies(0, both, 2);
	prepares(1, &left);
	prepares(2, &right);
	cr_assert_eq(rule(&f), 0, "%s", f.text);
	cr_expect_eq(cj.ruling.n_applied, 2);
	cr_expect(doubt_is_applied(&cj.ruling, &left) && doubt_is_applied(&cj.ruling, &right));
	end();
}

Test(cluster_holding, a_step_of_another_group_says_nothing)
{
	struct fault f;

	begin();
	applies(0, &right, 1);
	nodes[0].holding.position = 1;
	prepares(1, &left);
	cr_assert_eq(rule(&f), 0, "%s", f.text);
	cr_expect_eq(cj.ruling.n_applied, 0, "it is dropped");
	end();
}

Test(cluster_holding, a_step_that_was_applied_is_ruled_once)
{
	struct fault f;

	begin();
	applies(0, &left, 1);
	prepares(1, &left);
	prepares(2, &left);
	cr_assert_eq(rule(&f), 0, "%s", f.text);
	cr_expect_eq(cj.ruling.n_applied, 1);
	end();
}

/* With equal numbers of another epoch. */
Test(cluster_holding, a_step_of_another_epoch_is_another_one)
{
	struct job_step_id old = left;
	struct fault f;

	begin();
	old.epoch--;
	applies(0, &old, 1);
	prepares(1, &left);
	cr_expect_eq(rule(&f), FAULT_STATE, "node 0 is at step 2, node 1 at step 1");
	cr_expect_eq(cj.ruling.n_applied, 0);
	end();
}

/* All nodes were to go back to the last replicas. A node with a commit in doubt, which was decided, said that
 * it was there, and was not when the leader had ruled: it asked again without end. */
Test(cluster_holding, a_node_in_doubt_is_at_no_step)
{
	struct cluster_holding h = { .units = 4,
				     .has_position = true,
				     .position = 75,
				     .has_commit = true,
				     .step = 75,
				     .layout = 9 };

	cr_expect(cluster_holding_is_at(&h, 75, 9));
	cr_expect_not(cluster_holding_is_at(&h, 76, 9));
	cr_expect_not(cluster_holding_is_at(&h, 75, 8));
	h.doubt.has_commit = true;
	h.doubt.step = 76;
	cr_expect_not(cluster_holding_is_at(&h, 75, 9));
	h.doubt = (struct doubt_open){ .has_prepared = true };
	cr_expect_not(cluster_holding_is_at(&h, 75, 9));
}

Test(cluster_holding, a_job_keeps_its_incarnation)
{
	struct fault f = FAULT_NULL;

	begin();
	cr_assert_eq(cluster_holding_incarnation(&cj, &f), 0, "%s", f.text);
	cr_expect_eq(cj.incarnation, 77);
	cj.incarnation = 0; /* the store has lost all, and nodes have nothing: a new one */
	for (unsigned i = 0; i < NODES; i++)
		nodes[i].holding.units = 0;
	cr_assert_eq(cluster_holding_incarnation(&cj, &f), 0, "%s", f.text);
	cr_expect(cj.incarnation && cj.incarnation != 77);
	end();
}

Test(cluster_holding, an_earlier_job_is_refused_by_the_name_of_its_node)
{
	struct fault f = FAULT_NULL;

	begin();
	cj.incarnation = 77;
	nodes[2].holding.incarnation = 66;
	cr_expect_eq(cluster_holding_incarnation(&cj, &f), FAULT_STATE);
	cr_expect(strstr(f.text, "node n2 has the memory of an earlier job '0/j'"), "%s", f.text);
	nodes[2].holding.units = 0; /* only a commit that it is in doubt about */
	nodes[2].holding.doubt.has_commit = true;
	f = FAULT_NULL;
	cr_expect_eq(cluster_holding_incarnation(&cj, &f), FAULT_STATE);
	nodes[2].holding.doubt.has_commit = false;
	f = FAULT_NULL;
	cr_expect_eq(cluster_holding_incarnation(&cj, &f), 0, "%s", f.text);
	end();
}

/* The store has a commit of epoch 7. */
static int rule_after_commit(struct fault *f)
{
	const struct coord_kv kv = { .value = (const uint8_t *)"12 7", .bytes = 4, .modified = 3 };
	const struct coord_reply r = { .status = COORD_OK, .kvs = &kv, .n = 1 };

	*f = FAULT_NULL;
	(void)cluster_holding_rule(&cj, &r, f);
	*f = FAULT_NULL;
	return cluster_holding_check_newer(&cj, f);
}

/* The part of an elastic job that was cut off, while the others went on. */
Test(cluster_holding, commits_of_nodes_that_are_not_here_stay)
{
	struct fault f;

	begin();
	for (unsigned i = 0; i < NODES; i++)
		nodes[i].holding.begun = 5 + i % 2;
	cr_assert_eq(rule_after_commit(&f), FAULT_STATE);
	cr_expect(strstr(f.text, "node n1 was in none after epoch 6"), "%s", f.text);
	nodes[2].holding.begun = 7; /* one of those that made it */
	cr_expect_eq(rule_after_commit(&f), 0, "%s", f.text);
	nodes[2].holding.begun = 6; /* it was not: more of its ranks were lost behind that epoch */
	nodes[2].holding.epoch = 9;
	cr_expect_eq(rule_after_commit(&f), FAULT_STATE);
	for (unsigned i = 0; i < NODES; i++)
		nodes[i].holding.units = 0;
	cr_expect_eq(rule_after_commit(&f), 0, "nobody has anything: a job begins");
	end();
}

/* Node @i has part @part of two, of @step, as epoch @epoch has made it. */
static void keeps(unsigned i, uint32_t part, uint64_t step, uint64_t epoch)
{
	struct cluster_holding *h = &nodes[i].holding;

	h->replicas[h->n_replicas++] = (struct cluster_part){
		.id = { .step = step, .layout = epoch, .part = part, .parts = 2 }, .epoch = epoch
	};
}

/* Node 0 went on alone from an earlier step than node 1 has copies of, which are of an epoch that was given up. */
Test(cluster_holding, copies_of_a_later_epoch_are_newer)
{
	const struct cluster_part *newest;

	begin();
	cr_expect_null(cluster_restore_newest(&cj));
	keeps(1, 0, 40, 7);
	keeps(1, 1, 40, 7);
	keeps(0, 0, 30, 9);
	newest = cluster_restore_newest(&cj);
	cr_assert(newest);
	cr_expect_eq(newest->epoch, 7, "the other one is not complete");
	keeps(2, 1, 30, 9);
	cr_expect_eq(cluster_restore_newest(&cj)->id.step, 30);
	end();
}

/* Nodes 0 and 1 have made commits in epoch 2, without node 2, which has copies of epoch 1 only. The first one has
 * taken step 21, which the other one, whose daemon was started again, is in doubt about. */
static void two_without_the_third(void)
{
	static uint32_t ranks[NODES];
	static uint16_t devices[NODES];
	static bool are_members[NODES];

	begin();
	for (unsigned i = 0; i < NODES; i++) {
		struct cluster_holding *h = &nodes[i].holding;

		*h = (struct cluster_holding){ .units = 1,
					       .ranks = i < 2 ? 2 : 3,
					       .grace_ms = 500,
					       .layout = i < 2 ? 22 : 33,
					       .begun = i < 2 ? 2 : 1,
					       .has_position = true,
					       .has_commit = true,
					       .step = i < 2 ? 21 : 9,
					       .position = i < 2 ? 21 : 9 };
		ranks[i] = i;
		are_members[i] = true;
		nodes[i].n = nodes[i].members = 1;
		nodes[i].ranks = &ranks[i];
		nodes[i].devices = &devices[i];
		nodes[i].are_members = &are_members[i];
	}
	nodes[1].holding.step = nodes[1].holding.position = 20;
	nodes[1].holding.doubt = (struct doubt_open){ .has_commit = true, .step = 21, .epoch = 2 };
	keeps(2, 0, 8, 1);
	keeps(2, 1, 8, 1);
	cj.known.epoch = 2;
	cj.known.commit = (struct doubt_ruling){ .has_commit = true, .step = 21, .epoch = 2 };
}

/* All would have gone back to step 8: the step in doubt was not counted. */
Test(cluster_holding, who_has_the_last_commit_goes_on_first)
{
	two_without_the_third();
	cluster_elastic_set_apart(&cj);
	cr_expect_eq(list_first(&cj.later, struct cluster_node, link), &nodes[2]);
	cr_expect_eq(list_first(&cj.nodes, struct cluster_node, link), &nodes[0]);
	cr_expect_eq(nodes[1].holding.step, 20, "it is settled in the ruling");
	end();
	two_without_the_third(); /* another commit was decided: the two have not the same */
	cj.known.commit.epoch = 1;
	cluster_elastic_set_apart(&cj);
	cr_expect(list_empty(&cj.later));
	end();
}
