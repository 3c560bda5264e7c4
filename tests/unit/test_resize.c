/* Jobs that get another world size: what stays, what goes, what is refused; on one and on several
 * devices. The fixture compares the journal with the records at the end of each test. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "job/kept.h"
#include "job/resize.h"
#include "nodefix.h"
#include "unit/runs.h"

TestSuite(resize, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define MOST   8u
#define PACKED 41u /* elements of all tensors of a unit */

struct fixture {
	struct nodefix n;
	struct job *job;
	struct member *m[MOST];
	uint32_t world;
	struct nodefix_op op[MOST];
	struct resize_report report;
	struct fault fault;
	unsigned ended;
};

static state_unit *spec(const char *name)
{
	static const uint64_t matrix[] = { 9, 3 }, frozen[] = { 5, 2 };
	state_unit *s = nodefix_spec(name, 4);
	state_tensor *f = state_tensor_new("frozen", frozen, 2);

	f->frozen = true;
	CHECK(state_unit_add_tensor(s, f) == 0);
	CHECK(state_unit_add_tensor(s, state_tensor_new("matrix", matrix, 2)) == 0);
	for (unsigned i = 0; i < 3; i++) {
		s->tensors[i]->init_kind = FILL_NORMAL;
		s->tensors[i]->init_b = 1;
	}
	return s;
}

/* Array @i of all tensors, tensor after tensor, from wherever they are. */
static void read_packed(struct unit *u, unsigned i, float *ret)
{
	memset(ret, 0, PACKED * sizeof(*ret));
	for (unsigned d = 0; d < u->spread; d++)
		for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
			struct unit_run run;

			if ((!i || !u->tensors[t].frozen) &&
			    unit_part_run(u, &u->parts[d], t, &run))
				memcpy(ret + u->tensors[t].packed + run.first,
				       (float *)region_addr(unit_state(&u->parts[d], i)) + run.at,
				       run.n * sizeof(float));
		}
}

/* What is between the tensors and behind them. */
static void expect_gaps_are_zero(struct unit *u)
{
	for (unsigned i = 0; i < 3; i++)
		for (unsigned d = 0; d < u->n_parts; d++) {
			const struct region *r = unit_state(&u->parts[d], i);
			float *copy = malloc(r->bytes);

			memcpy(copy, region_addr(r), r->bytes);
			for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
				struct unit_run run;

				if ((!i || !u->tensors[t].frozen) &&
				    unit_part_run(u, &u->parts[d], t, &run))
					memset(copy + run.at, 0, run.n * sizeof(float));
			}
			for (size_t k = 0; k < r->bytes / sizeof(float); k++)
				cr_assert_eq(copy[k], 0, "array %u, part %u, element %zu", i, d, k);
			free(copy);
		}
}

static void join(struct fixture *x, uint32_t world)
{
	x->world = world;
	for (uint32_t i = 0; i < world; i++)
		x->m[i] = nodefix_join(&x->n, x->job, i);
}

static void leave(struct fixture *x)
{
	for (uint32_t i = 0; i < x->world; i++) {
		struct fault f = FAULT_NULL;
		bool freed;

		cr_assert_eq(job_leave(x->m[i], &freed, &f), RES_DONE, "%s", f.text);
		nodefix_drop(&x->n, x->m[i], "left");
	}
}

static void setup(struct fixture *x, uint32_t world, unsigned devices)
{
	*x = (struct fixture){ 0 };
	nodefix_begin(&x->n, &(struct nodefix_options){ .devices = devices });
	x->job = nodefix_job(&x->n, "job", world, 0);
	join(x, world);
}

static void on_resized(const struct resize_report *r, const struct fault *f, void *userdata)
{
	struct fixture *x = userdata;

	x->report = *r;
	x->fault = f ? *f : FAULT_NULL;
	x->ended++;
}

static void begin(struct fixture *x, uint32_t world, uint64_t wait_us)
{
	struct fault f = FAULT_NULL;

	x->ended = 0;
	cr_assert_eq(resize_begin(x->job, world, wait_us, on_resized, x, &f), 0, "%s", f.text);
}

static void resize(struct fixture *x, uint32_t world)
{
	begin(x, world, 0);
	nodefix_turns(&x->n);
	cr_assert_eq(x->ended, 1);
	cr_assert_eq(x->fault.code, 0, "%s", x->fault.text);
	cr_assert_eq(x->job->rec->world_size, world);
	cr_assert_not(resize_is_busy(x->job));
}

static void expect_refused(struct fixture *x, uint32_t world, const char *words)
{
	struct fault f = FAULT_NULL;

	cr_expect_neq(resize_begin(x->job, world, 0, on_resized, x, &f), 0, "%s", words);
	cr_expect(strstr(f.text, words), "%s: %s", words, f.text);
}

/* The same op on all ranks. */
#define ON_ALL(x, call)                                      \
	do {                                                 \
		for (uint32_t r = 0; r < (x)->world; r++) {  \
			struct nodefix_op *op = &(x)->op[r]; \
			struct member *m = (x)->m[r];        \
			call;                                \
		}                                            \
		for (uint32_t r = 0; r < (x)->world; r++)    \
			nodefix_ok(&(x)->op[r], #call);      \
	} while (0)

static void step(struct fixture *x, struct unit *u, uint64_t number)
{
	ON_ALL(x, nodefix_on_unit(&x->n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < x->world; r++)
		nodefix_write(&x->op[r].result.place, 1);
	ON_ALL(x, nodefix_on_unit(&x->n, m, "Reduce", u, op));
	ON_ALL(x, nodefix_step(&x->n, m, op));
	ON_ALL(x, nodefix_commit(&x->n, m, number, 10 + r, op));
	nodefix_turns(&x->n);
}

static void expect_sound(struct fixture *x)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	uint8_t *bytes = NULL;
	size_t n;

	cr_assert_eq(state_encode(&x->job->rec, 1, x->n.node.devices[0].table->next, &bytes, &n),
		     0);
	cr_expect_eq(state_decode(bytes, n, &all, &f), 0, "%s", f.text);
	state_free(all);
	free(bytes);
}

static struct unit *make_unit(struct fixture *x, state_unit *s)
{
	return nodefix_unit(&x->n, x->job, s, x->m, x->world);
}

/* Its replicas, array for array. */
static void expect_copies_are_equal(struct unit *u)
{
	for (unsigned i = 0; i < 3; i++)
		for (unsigned d = u->spread; d < u->n_parts; d++) {
			const struct region *r = unit_state(&u->parts[d], i);
			const struct region *of = unit_state(&u->parts[d % u->spread], i);

			cr_expect_eq(r->bytes, of->bytes);
			cr_expect_eq(memcmp(region_addr(r), region_addr(of), r->bytes), 0,
				     "array %u, part %u", i, d);
		}
}

/* Parameters and both arrays of state keep their bits from size to size, and training goes on. */
static void walk_to(const uint32_t *sizes, unsigned n, unsigned devices, state_unit *s)
{
	struct fixture x;
	struct unit *u;

	setup(&x, 4, devices);
	u = make_unit(&x, s);
	for (unsigned i = 0; i < n; i++) {
		float was[3][PACKED], is[3][PACKED];
		uint64_t steps = i + 1;

		step(&x, u, steps);
		for (unsigned k = 0; k < 3; k++)
			read_packed(u, k, was[k]);
		leave(&x);
		resize(&x, sizes[i]);
		for (unsigned k = 0; k < 3; k++)
			read_packed(u, k, is[k]);
		cr_expect_arr_eq(is, was, sizeof(was));
		expect_gaps_are_zero(u);
		expect_copies_are_equal(u);
		expect_sound(&x);
		cr_expect_eq(u->layout.ranks * (u->layout.replicas ? u->layout.replicas : 1),
			     sizes[i]);
		cr_expect_eq(u->rec->optimizer->steps, steps);
		cr_expect_eq(x.job->rec->step, steps);
		join(&x, sizes[i]);
	}
	nodefix_end(&x.n);
}

static void walk(unsigned devices, enum unit_layout_kind layout, enum unit_strategy strategy)
{
	static const uint32_t sizes[] = { 3, 8, 2, 1, 5, 4 };
	state_unit *s = spec("u");

	s->layout = layout;
	s->strategy = strategy;
	walk_to(sizes, ARRAY_SIZE(sizes), devices, s);
}

/* Two replicas on two devices each; four, of which each device has one; three on four devices, and one
 * on two. */
static void walk_hybrid(enum unit_layout_kind layout)
{
	static const uint32_t sizes[] = { 8, 4, 6, 4, 2, 4 };
	state_unit *s = spec("u");

	s->layout = layout;
	s->strategy = STRATEGY_HYBRID;
	s->shard_ranks = 2;
	walk_to(sizes, ARRAY_SIZE(sizes), 4, s);
}

Test(resize, flat_replicas_of_two_on_four_devices)
{
	walk_hybrid(LAYOUT_FLAT);
}

Test(resize, dim0_replicas_of_two_on_four_devices)
{
	walk_hybrid(LAYOUT_DIM0);
}

Test(resize, flat_on_one_device)
{
	walk(1, LAYOUT_FLAT, STRATEGY_SHARD);
}

Test(resize, dim0_on_one_device)
{
	walk(1, LAYOUT_DIM0, STRATEGY_SHARD);
}

Test(resize, replicas_on_one_device)
{
	walk(1, LAYOUT_DIM0, STRATEGY_REPLICATE);
}

Test(resize, flat_on_two_devices)
{
	walk(2, LAYOUT_FLAT, STRATEGY_SHARD);
}

Test(resize, dim0_on_three_devices)
{
	walk(3, LAYOUT_DIM0, STRATEGY_SHARD);
}

Test(resize, replicas_on_three_devices)
{
	walk(3, LAYOUT_FLAT, STRATEGY_REPLICATE);
}

Test(resize, tensors_that_stay_where_they_are_keep_their_memory)
{
	struct fixture x;
	struct unit *u;
	void *at;

	setup(&x, 4, 1);
	u = make_unit(&x, nodefix_spec("flat", 1000));
	at = region_addr(&u->parts[0].params);
	step(&x, u, 1);
	leave(&x);
	resize(&x, 2);
	cr_expect_eq(region_addr(&u->parts[0].params), at);
	cr_expect_eq(x.report.moved, 0);
	cr_expect_eq(x.report.in_place, 1);
	join(&x, 2);
	step(&x, u, 2);
	nodefix_end(&x.n);
}

Test(resize, blobs_of_ranks_that_remain_stay)
{
	struct fixture x;
	struct unit *u;
	uint64_t control;

	setup(&x, 3, 1);
	u = make_unit(&x, nodefix_spec("u", 100));
	step(&x, u, 1);
	control = x.job->quota.by_class[MEM_CONTROL];
	leave(&x);
	resize(&x, 2);
	cr_expect_eq(x.report.left_out, 1);
	cr_expect_eq(x.job->quota.by_class[MEM_CONTROL], control - 12);
	cr_expect_eq(state_job_blob(x.job->rec, 1)->data.len, 11);
	cr_expect_not(state_job_blob(x.job->rec, 2));
	resize(&x, 3);
	cr_expect_eq(x.report.left_out, 0);
	cr_expect_not(state_job_blob(x.job->rec, 2), "what is gone does not come back");
	nodefix_end(&x.n);
}

static state_unit *buffered(const char *name)
{
	static const uint64_t shape[] = { 6 };
	state_buffer *b = state_buffer_new("mean", shape, 1);
	state_unit *s = nodefix_spec(name, 100);

	b->dtype = BUFFER_FP32;
	CHECK(state_unit_add_buffer(s, b) == 0);
	return s;
}

Test(resize, new_ranks_have_the_buffers_of_rank_0)
{
	struct fixture x;
	struct unit *u;

	setup(&x, 2, 1);
	u = make_unit(&x, buffered("u"));
	for (uint32_t i = 0; i < 2; i++)
		nodefix_write(&u->buffers[i], (float)(i + 1));
	leave(&x);
	resize(&x, 4);
	for (uint32_t i = 0; i < 4; i++) {
		const float *at = region_addr(&u->buffers[i]);

		cr_expect_eq(at[0], i == 1 ? 2 : 1, "rank %u", i);
		cr_expect_eq(u->buffers[i].slab->owner_rank, (int)i);
		cr_expect(u->buffers[i].slab->writable);
	}
	resize(&x, 1);
	cr_expect_eq(((float *)region_addr(&u->buffers[0]))[5], 1);
	expect_sound(&x);
	nodefix_end(&x.n);
}

/* A job that resumes at its commits, and whose ranks have died after changes. */
Test(resize, what_was_not_committed_is_rolled_back_first)
{
	float committed[100];
	struct fixture x;
	struct unit *u;

	x = (struct fixture){ 0 };
	nodefix_begin(&x.n, NULL);
	x.job = nodefix_job(&x.n, "job", 3, 0);
	x.job->rec->resume = JOB_RESUME_COMMITTED;
	nodefix_wrote(&x.n);
	join(&x, 3);
	u = make_unit(&x, nodefix_spec("u", 100));
	u->rec->layout = LAYOUT_FLAT;
	step(&x, u, 1);
	memcpy(committed, nodefix_params(u), sizeof(committed));
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < 3; r++)
		nodefix_write(&x.op[r].result.place, 1);
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "Reduce", u, op));
	ON_ALL(&x, nodefix_step(&x.n, m, op));
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "Gather", u, op));
	cr_assert(x.job->rec->kept);
	cr_assert_neq(nodefix_params(u)[0], committed[0]);
	for (uint32_t i = 0; i < 3; i++)
		nodefix_drop(&x.n, x.m[i], "died");
	resize(&x, 2);
	cr_expect_arr_eq(nodefix_params(u), committed, sizeof(committed));
	cr_expect_not(x.job->rec->kept);
	cr_expect(u->parts[0].kept.slab, "the next change needs no memory");
	join(&x, 2);
	step(&x, u, 2);
	nodefix_end(&x.n);
}

/* Units with and without memory for the copy, and of those some that move: after the last commit more
 * were registered. */
Test(resize, copies_of_the_commit_have_memory_where_they_had)
{
	struct unit *stays, *moves, *new_stays, *new_moves;
	struct fixture x = { 0 };
	state_unit *s = spec("moves");

	nodefix_begin(&x.n, NULL);
	x.job = nodefix_job(&x.n, "job", 3, 0);
	x.job->rec->resume = JOB_RESUME_COMMITTED;
	nodefix_wrote(&x.n);
	join(&x, 3);
	stays = make_unit(&x, nodefix_spec("stays", 100));
	s->layout = LAYOUT_DIM0;
	moves = make_unit(&x, s);
	step(&x, moves, 1);
	s = spec("new moves");
	s->layout = LAYOUT_DIM0;
	new_moves = nodefix_register(x.job, s);
	new_stays = nodefix_register(x.job, nodefix_spec("new stays", 5000));
	leave(&x);
	resize(&x, 2);
	cr_expect_eq(x.report.in_place, 2);
	cr_expect(stays->parts[0].kept.slab && moves->parts[0].kept.slab);
	cr_expect_not(new_stays->parts[0].kept.slab || new_moves->parts[0].kept.slab);
	expect_sound(&x);
	join(&x, 2);
	nodefix_seed(&x.n, x.m[0], new_moves, 1, &x.op[0]);
	NODEFIX_OK(nodefix_seed(&x.n, x.m[1], new_moves, 1, &x.op[1]), &x.op[1]);
	nodefix_seed(&x.n, x.m[0], new_stays, 1, &x.op[0]);
	NODEFIX_OK(nodefix_seed(&x.n, x.m[1], new_stays, 1, &x.op[1]), &x.op[1]);
	step(&x, moves, 2);
	cr_expect(new_stays->parts[0].kept.slab && new_moves->parts[0].kept.slab);
	expect_sound(&x);
	nodefix_end(&x.n);
}

/* A unit that stays in memory with more room than it needs now, beside one that moves: its copy has room for
 * all of that memory, which is what is copied, and what a successor looks for. */
Test(resize, copies_have_room_for_the_memory_that_stays)
{
	struct unit *stays, *moves;
	struct fixture x = { 0 };
	const struct unit_part *p;
	state_unit *s = spec("moves");

	nodefix_begin(&x.n, NULL);
	x.job = nodefix_job(&x.n, "job", 3, 0);
	x.job->rec->resume = JOB_RESUME_COMMITTED;
	nodefix_wrote(&x.n);
	join(&x, 3);
	stays = make_unit(&x, nodefix_spec("stays", 128)); /* 129 with padding */
	s->layout = LAYOUT_DIM0;
	moves = make_unit(&x, s);
	step(&x, moves, 1);
	leave(&x);
	resize(&x, 2);
	p = &stays->parts[0];
	cr_assert_eq(x.report.in_place, 1);
	cr_assert_gt(p->params.bytes, unit_params_bytes(stays->rec, &stays->layout, 1));
	cr_expect_geq(p->kept.bytes, p->params.bytes + p->state1.bytes + p->state2.bytes);
	join(&x, 2);
	step(&x, stays, 2);
	step(&x, moves, 3);
	expect_sound(&x);
	nodefix_end(&x.n);
}

Test(resize, dropped_units_alone_on_two_devices_are_sound)
{
	struct fixture x;
	struct unit *u;

	setup(&x, 4, 2);
	u = make_unit(&x, nodefix_spec("u", 100));
	job_drop_unit(x.job, u);
	job_units_dropped(x.job, NULL);
	leave(&x);
	resize(&x, 3);
	for (uint32_t i = 0; i < 3; i++)
		cr_expect(*x.job->rec->devices[i], "a successor asks where rank %u is", i);
	nodefix_end(&x.n);
}

/* Units that were registered together are in one slab, and move together. */
Test(resize, memory_does_not_grow)
{
	static const uint32_t sizes[] = { 3, 7, 2, 5, 8, 1, 6, 4 };
	uint32_t ids[6];
	uint64_t first = 0, charged;
	state_unit *specs[6];
	struct fault f = FAULT_NULL;
	struct fixture x;
	char name[8];

	setup(&x, 4, 1);
	for (unsigned i = 0; i < 6; i++) {
		snprintf(name, sizeof(name), "u%u", i);
		specs[i] = i % 2 ? spec(name) : nodefix_spec(name, 100 + 120 * i);
		specs[i]->layout = i == 3 ? LAYOUT_DIM0 : LAYOUT_FLAT;
	}
	cr_assert_eq(nodefix_try_register(x.job, specs, 6, ids, &charged, &f), 0, "%s", f.text);
	leave(&x);
	for (unsigned i = 0; i < 40; i++) {
		resize(&x, sizes[i % ARRAY_SIZE(sizes)]);
		cr_expect(x.report.in_place == 0 || x.report.in_place == 6, "all of them, or none");
		if (x.job->rec->world_size == 4 && !first)
			first = x.job->quota.by_class[MEM_SHARD];
		if (x.job->rec->world_size == 4)
			cr_expect_leq(x.job->quota.by_class[MEM_SHARD], first);
	}
	cr_expect_leq(x.job->mem.n_slabs, 2);
	expect_sound(&x);
	nodefix_end(&x.n);
}

Test(resize, factors_follow_the_profile)
{
	struct fixture x;
	struct unit *own, *given;
	state_unit *s = nodefix_spec("given", 100);
	double pre, post;

	setup(&x, 8, 1);
	own = make_unit(&x, nodefix_spec("own", 100));
	s->pre_divide = 5;
	s->post_divide = 1;
	given = make_unit(&x, s);
	leave(&x);
	resize(&x, 6);
	layout_divide_factors(6, &pre, &post);
	cr_expect_eq(own->rec->pre_divide, pre);
	cr_expect_eq(own->rec->post_divide, post);
	cr_expect_eq(given->rec->pre_divide, 5);
	cr_expect_eq(given->rec->post_divide, 1);
	nodefix_end(&x.n);
}

Test(resize, what_cannot_be_done_is_refused)
{
	struct fixture x;
	state_unit *s = nodefix_spec("hybrid", 100);
	struct unit *u;

	setup(&x, 4, 1);
	s->strategy = STRATEGY_HYBRID;
	s->shard_ranks = 2;
	u = make_unit(&x, s);
	expect_refused(&x, 2, "has 4 trainers");
	leave(&x);
	expect_refused(&x, 0, "world_size 0 is out of range (1..");
	expect_refused(&x, 1u << 20, "out of range");
	expect_refused(&x, 3, "shard_ranks is 2; it must be a divisor of the group's 3 ranks");
	cr_expect_eq(x.job->rec->world_size, 4);
	begin(&x, 2, 0);
	expect_refused(&x, 6, "is being resized to 2 ranks");
	nodefix_turns(&x.n);
	cr_expect_eq(u->rec->shard_ranks, 2);
	nodefix_end(&x.n);
}

Test(resize, units_of_other_groups_are_refused_and_empty_groups_go)
{
	const uint32_t ranks[] = { 1, 2 };
	struct fault f = FAULT_NULL;
	struct group *g = NULL;
	struct fixture x;
	state_unit *s;
	struct unit *u;

	setup(&x, 3, 1);
	cr_assert_eq(job_group(x.job, "pair", ranks, 2, &g, &f), 0);
	u = make_unit(&x, nodefix_spec("u", 100));
	leave(&x);
	resize(&x, 2);
	cr_expect_eq(x.job->n_groups, 1);
	cr_expect_eq(x.job->rec->n_groups, 1);
	join(&x, 2);
	step(&x, u, 1);
	cr_assert_eq(job_group(x.job, "pair", ranks, 1, &g, &f), 0, "it may be others now");
	s = nodefix_spec("of pair", 10);
	s->group = 1;
	nodefix_register(x.job, s);
	leave(&x);
	expect_refused(&x, 3, "unit 'of pair' belongs to group 'pair'");
	nodefix_end(&x.n);
}

Test(resize, without_memory_nothing_has_changed)
{
	struct fixture x;
	state_unit *s = spec("u");
	float was[PACKED], is[PACKED];
	struct unit *u;

	setup(&x, 4, 1);
	s->layout = LAYOUT_DIM0;
	u = make_unit(&x, s);
	step(&x, u, 1);
	read_packed(u, 0, was);
	leave(&x);
	x.job->quota.limit = x.job->quota.used + 10;
	begin(&x, 3, 0);
	nodefix_turns(&x.n);
	cr_expect_eq(x.fault.code, FAULT_EXHAUSTED);
	cr_expect(strstr(x.fault.text, "to lay job 'job' out for 3 ranks"), "%s", x.fault.text);
	cr_expect_eq(x.job->rec->world_size, 4);
	x.job->quota.limit = 0;
	join(&x, 4);
	read_packed(u, 0, is);
	cr_expect_arr_eq(is, was, sizeof(was));
	step(&x, u, 2);
	nodefix_end(&x.n);
}

Test(resize, it_waits_for_ranks_that_are_about_to_go)
{
	struct fixture x;
	struct unit *u;

	setup(&x, 3, 1);
	u = make_unit(&x, nodefix_spec("u", 100));
	step(&x, u, 1);
	begin(&x, 2, 60000000);
	nodefix_turns(&x.n);
	cr_expect_eq(x.ended, 0);
	cr_expect(resize_is_busy(x.job));
	leave(&x);
	jobs_tick(&x.n.jobs, clock_now_us());
	nodefix_turns(&x.n);
	cr_expect_eq(x.ended, 1);
	cr_expect_eq(x.job->rec->world_size, 2);
	join(&x, 2);
	begin(&x, 3, 1); /* they do not go */
	nodefix_turns(&x.n);
	clock_fake(clock_now_us() + 10);
	jobs_tick(&x.n.jobs, clock_now_us());
	nodefix_turns(&x.n);
	cr_expect_eq(x.fault.code, FAULT_STATE);
	cr_expect(strstr(x.fault.text, "has 2 trainers"), "%s", x.fault.text);
	step(&x, u, 2);
	nodefix_end(&x.n);
}

static void on_granted(struct reader *r, const struct fault *f)
{
	*(unsigned *)r->userdata += f ? 100 : 1;
}

/* A reader reads them where they are, and none gets a hold meanwhile. */
Test(resize, it_waits_for_readers_that_hold)
{
	struct fault f = FAULT_NULL;
	struct reader *a, *b;
	unsigned told[2] = { 0 };
	struct fixture x;
	state_unit *s = spec("u");
	struct unit *u;
	uint64_t changes;

	setup(&x, 3, 1);
	s->layout = LAYOUT_DIM0;
	u = make_unit(&x, s);
	step(&x, u, 1);
	leave(&x);
	cr_assert_eq(reader_new(x.job, x.n.proc, 7, &a), 0);
	cr_assert_eq(reader_new(x.job, x.n.proc, 8, &b), 0);
	cr_assert_eq(reader_hold(a, UINT64_MAX, on_granted, &told[0], &f), 0, "%s", f.text);
	cr_assert_eq(told[0], 1);
	changes = readers_generation(x.job);
	begin(&x, 2, 0);
	nodefix_turns(&x.n);
	jobs_tick(&x.n.jobs, clock_now_us());
	nodefix_turns(&x.n);
	cr_expect_eq(x.ended, 0, "it is held");
	cr_assert_eq(reader_hold(b, UINT64_MAX, on_granted, &told[1], &f), 0, "%s", f.text);
	cr_expect_eq(told[1], 0);
	cr_expect_eq(reader_release(a, &f), 0, "%s", f.text);
	nodefix_turns(&x.n);
	cr_expect_eq(x.ended, 1);
	cr_expect_eq(x.fault.code, 0, "%s", x.fault.text);
	cr_expect_eq(told[1], 1, "after it");
	cr_expect_gt(readers_generation(x.job), changes);
	cr_expect_eq(reader_release(b, &f), 0);
	reader_free(a);
	reader_free(b);
	nodefix_end(&x.n);
}

Test(resize, ranks_that_join_wait_for_its_end)
{
	struct fault f = FAULT_NULL;
	struct member *m = NULL;
	struct fixture x;
	state_unit *s = spec("u");

	setup(&x, 3, 1);
	s->layout = LAYOUT_DIM0;
	(void)make_unit(&x, s);
	leave(&x);
	begin(&x, 2, 0);
	cr_expect_eq(nodefix_try_join(&x.n, x.job, 0, NULL, NULL, &m, &f), RES_WAIT);
	nodefix_turns(&x.n);
	join(&x, 2);
	nodefix_end(&x.n);
}

Test(resize, a_job_that_is_deleted_meanwhile_goes)
{
	for (unsigned when = 0; when < 3; when++) {
		struct fault f = FAULT_NULL;
		state_unit *s = spec("u");
		struct fixture x;

		setup(&x, 3, 1);
		s->layout = LAYOUT_DIM0;
		(void)make_unit(&x, s);
		leave(&x);
		if (when == 2)
			backend_fake_hold(x.n.node.devices[0].backend, true);
		begin(&x, 2, 0);
		if (when)
			nodefix_turns(&x.n);
		if (when == 1)
			begin(&x, 4, 60000000);
		cr_assert_eq(job_delete(x.job, true, NULL, &f), 0, "%s", f.text);
		backend_fake_hold(x.n.node.devices[0].backend, false);
		nodefix_turns(&x.n);
		cr_expect_eq(x.fault.code, FAULT_NOT_FOUND);
		nodefix_end(&x.n);
	}
}

Test(resize, dropped_units_keep_their_numbers)
{
	struct fixture x;
	struct unit *a, *b;

	setup(&x, 4, 1);
	a = make_unit(&x, nodefix_spec("a", 100));
	b = make_unit(&x, nodefix_spec("b", 100));
	job_drop_unit(x.job, a);
	job_units_dropped(x.job, NULL);
	leave(&x);
	resize(&x, 3);
	expect_sound(&x);
	cr_expect_eq(job_unit_by_id(x.job, 2), b);
	cr_expect_not(job_unit_by_id(x.job, 1));
	join(&x, 3);
	step(&x, b, 1);
	nodefix_end(&x.n);
}
