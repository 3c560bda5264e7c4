/* The ranks that hold up others, as the nodes of a job describe them. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "rpc/status_blame.h"

TestSuite(status_blame, .timeout = 20, .init = fdcheck_begin, .fini = fdcheck_end);

#define WORLD  4
#define GROUPS 2 /* 1: all ranks; 2: ranks 2 and 3 */

static uint32_t all[WORLD] = { 0, 1, 2, 3 }, pair[2] = { 2, 3 };

/* Ranks 0 and 1 are on node a, 2 and 3 on b. */
struct scene {
	Shardd__V1__JobRankTold ranks[WORLD];
	Shardd__V1__JobLast last[WORLD][GROUPS];
	Shardd__V1__JobLast *lasts[WORLD][GROUPS];
	Shardd__V1__JobGroupTold groups[GROUPS];
	Shardd__V1__JobGroupTold *group_list[GROUPS];
	Shardd__V1__JobTold told;
	const Shardd__V1__JobTold *told_list[1];
	const Shardd__V1__JobRankTold *by_rank[WORLD];
	const char *nodes[WORLD], *why[WORLD];
	struct status_blame in;
	struct arena arena;
	Shardd__V1__JobStatus j;
};

/* All have announced @number of group 1, and nothing else. */
static void setup(struct scene *s, uint64_t number)
{
	static const char *const names[GROUPS] = { "world", "pair" };

	memset(s, 0, sizeof(*s));
	for (uint32_t g = 0; g < GROUPS; g++) {
		shardd__v1__job_group_told__init(&s->groups[g]);
		s->groups[g].group = g + 1;
		s->groups[g].name = (char *)names[g];
		s->groups[g].ranks = g ? pair : all;
		s->groups[g].n_ranks = g ? ARRAY_SIZE(pair) : ARRAY_SIZE(all);
		s->group_list[g] = &s->groups[g];
	}
	shardd__v1__job_told__init(&s->told);
	s->told.groups = s->group_list;
	s->told.n_groups = GROUPS;
	s->told_list[0] = &s->told;
	for (uint32_t r = 0; r < WORLD; r++) {
		shardd__v1__job_rank_told__init(&s->ranks[r]);
		s->ranks[r].rank = r;
		s->ranks[r].pid = 100 + (int)r;
		s->ranks[r].state = (char *)"JOINED";
		for (uint32_t g = 0; g < GROUPS; g++) {
			shardd__v1__job_last__init(&s->last[r][g]);
			s->last[r][g].group = g + 1;
			s->last[r][g].number = g ? 0 : number;
			s->lasts[r][g] = &s->last[r][g];
		}
		s->ranks[r].last = s->lasts[r];
		s->ranks[r].n_last = r < 2 ? 1 : 2;
		s->by_rank[r] = &s->ranks[r];
		s->nodes[r] = r < 2 ? "a" : "b";
		s->why[r] = "";
	}
	s->in = (struct status_blame){ WORLD, s->by_rank, s->nodes, s->why, s->told_list, 1 };
	shardd__v1__job_status__init(&s->j);
}

/* @rank has announced @number of @group, and waits for the others. */
static void waits(struct scene *s, uint32_t rank, uint32_t group, uint64_t number, uint64_t us)
{
	Shardd__V1__JobRankTold *r = &s->ranks[rank];

	r->op = (char *)"Barrier";
	r->on = s->groups[group - 1].name;
	r->group = group;
	r->number = number;
	r->op_us = us;
	r->wait_us = us;
	r->for_ranks = true;
	s->last[rank][group - 1].number = number;
}

static void expect(struct scene *s, size_t n, ...)
{
	va_list args;

	status_blame(&s->arena, &s->in, &s->j);
	cr_expect_eq(s->j.n_blame, n, "%zu sentences", s->j.n_blame);
	va_start(args, n);
	for (size_t i = 0; i < n && i < s->j.n_blame; i++)
		cr_expect_str_eq(s->j.blame[i]->text, va_arg(args, const char *));
	va_end(args);
	arena_free(&s->arena);
}

Test(status_blame, a_rank_without_an_op_holds_up_the_others)
{
	struct scene s;

	setup(&s, 6);
	waits(&s, 0, 1, 7, 1200000);
	waits(&s, 1, 1, 7, 900000);
	waits(&s, 3, 1, 7, 100);
	s.ranks[2].last_op = (char *)"Commit";
	s.ranks[2].idle_us = 1500000;
	expect(&s, 1,
	       "rank 2 (pid 102) on node b has not begun Barrier, number 7 in group world, in "
	       "which "
	       "3 ranks wait for 1.2 s: it has no op; the last one, Commit, ended 1.5 s ago");
	cr_expect_eq(s.j.n_blame, 1);
}

Test(status_blame, nobody_waits)
{
	struct scene s;

	setup(&s, 6);
	expect(&s, 0);
}

/* Rank 2 waits, too: for rank 3 alone. */
Test(status_blame, who_waits_himself_is_not_blamed)
{
	struct scene s;

	setup(&s, 6);
	waits(&s, 0, 1, 7, 2000000);
	waits(&s, 1, 1, 7, 2000000);
	waits(&s, 2, 2, 4, 3000000);
	s.ranks[3].op = (char *)"Gather";
	s.ranks[3].on = (char *)"encoder";
	s.ranks[3].op_us = 3100000;
	s.ranks[3].waits_for = (char *)"memory";
	expect(&s, 1,
	       "rank 3 (pid 103) on node b has not begun Barrier, number 4 in group pair, in which "
	       "1 "
	       "rank waits for 3.0 s: it is in Gather of encoder for 3.1 s, which waits for "
	       "memory");
}

Test(status_blame, all_of_a_circle_are_named)
{
	struct scene s;

	setup(&s, 6);
	waits(&s, 0, 1, 7, 2000000);
	waits(&s, 1, 1, 7, 2000000);
	waits(&s, 3, 1, 7, 2000000);
	waits(&s, 2, 2, 4, 1000000);
	expect(&s, 2,
	       "rank 2 (pid 102) on node b has not begun Barrier, number 7 in group world, in "
	       "which "
	       "3 ranks wait for 2.0 s: it is in Barrier of pair for 1.0 s",
	       "rank 3 (pid 103) on node b has not begun Barrier, number 4 in group pair, in which "
	       "1 "
	       "rank waits for 1.0 s: it is in Barrier of world for 2.0 s");
}

Test(status_blame, ranks_that_are_gone_or_unknown)
{
	struct scene s;

	setup(&s, 6);
	waits(&s, 0, 1, 7, 5000000);
	s.ranks[1].state = (char *)"EMPTY";
	s.ranks[1].pid = 0;
	s.ranks[2].state = (char *)"LEFT";
	s.by_rank[3] = NULL;
	s.why[3] = "it has not answered within 1 s";
	expect(&s, 3,
	       "rank 1 on node a has not begun Barrier, number 7 in group world, in which 1 rank "
	       "waits for 5.0 s: it has not joined",
	       "rank 2 (pid 102) on node b has not begun Barrier, number 7 in group world, in "
	       "which "
	       "1 rank waits for 5.0 s: it has left",
	       "rank 3 on node b has not begun Barrier, number 7 in group world, in which 1 rank "
	       "waits for 5.0 s: what it does is not known: it has not answered within 1 s");
}

Test(status_blame, what_all_have_begun)
{
	struct scene s;

	setup(&s, 7);
	waits(&s, 0, 1, 7, 5000000);
	s.ranks[0].waits_for = (char *)"the store, which decides the commit";
	expect(&s, 1,
	       "all ranks have begun Barrier, number 7 in group world, for 5.0 s: it waits for the "
	       "store, which decides the commit");
}

/* The node of rank 3 does not know the group. A rank of too many groups is not blamed. */
Test(status_blame, groups_that_are_not_told)
{
	struct scene s;

	setup(&s, 6);
	waits(&s, 2, 2, 1, 5000000);
	s.ranks[3].n_last = 1;
	expect(&s, 1,
	       "rank 3 (pid 103) on node b has not begun Barrier, number 1 in group pair, in which "
	       "1 "
	       "rank waits for 5.0 s: it has no op");
	setup(&s, 6);
	waits(&s, 2, 2, 1, 5000000);
	s.ranks[3].n_last = 1;
	s.ranks[3].cut = true;
	expect(&s, 1, "all ranks have begun Barrier, number 1 in group pair, for 5.0 s");
}

/* What a node says is not trusted: ranks that the job does not have, and 0 groups. */
Test(status_blame, nonsense)
{
	static uint32_t far[3] = { 0, 4, UINT32_MAX };
	struct scene s;

	setup(&s, 6);
	waits(&s, 1, 1, 7, 5000000);
	s.groups[0].ranks = far;
	s.groups[0].n_ranks = 3;
	waits(&s, 2, 2, 9, 1000000);
	s.told.n_groups = 1;
	expect(&s, 1,
	       "rank 0 (pid 100) on node a has not begun Barrier, number 7 in group world, in "
	       "which "
	       "1 rank waits for 5.0 s: it has no op");
}
