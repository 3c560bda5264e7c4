/*
 * Publications of a job: when a generation is made, what is in it, who keeps a buffer, what trainers wait
 * for, and how all of that ends.
 */
#include "pubfix.h"

TestSuite(publication, .init = begin, .fini = end, .timeout = 60);

/* ------------------------------------------------------------------------------ content */

Test(publication, a_generation_is_the_committed_step)
{
	struct publication *p;
	struct published *g;
	uint32_t sum = 0;

	train(7);
	p = declare();
	cr_assert_null(publication_newest(p));
	publication_want(p);
	nodefix_turns(&n);
	g = publication_newest(p);
	cr_assert(g);
	cr_assert_eq(g->number, 1);
	cr_assert_eq(g->step, 7);
	cr_assert_arr_eq(elements(g), committed, sizeof(committed));
	cr_assert_eq(g->assembly->n_blocks, BLOCKS);
	for (unsigned i = 0; i < BLOCKS; i++) {
		size_t elements_here = i + 1 < BLOCKS ? BLOCK : ELEMENTS % BLOCK;
		uint32_t crc = crc32c_add(0, committed + i * BLOCK, elements_here * sizeof(float));

		cr_assert_eq(g->crc[i], crc);
		sum = crc32c_add(sum, &crc, sizeof(crc));
	}
	cr_assert_eq(g->checksum, sum);
	cr_assert(publication_is_current(p));
	train(8); /* every_steps is 1 */
	nodefix_turns(&n);
	cr_assert_eq(publication_newest(p)->number, 2);
	cr_assert_eq(publication_newest(p)->step, 8);
	cr_assert_arr_eq(elements(publication_newest(p)), committed, sizeof(committed));
}

Test(publication, only_every_so_many_steps)
{
	struct publication *p;

	d.every_steps = 3;
	p = declare();
	for (uint64_t step = 1; step <= 7; step++) {
		train(step);
		nodefix_turns(&n);
		cr_assert_eq(publication_newest(p)->step, step < 4 ? 1 : step < 7 ? 4 : 7);
	}
	cr_assert_eq(p->counts.made, 3);
}

/* ------------------------------------------------------------------- beside the training */

static struct backend *fake(void)
{
	return n.node.devices[0].backend;
}

/* Before u in the order of names, and so large that its part of a generation takes ten tasks. */
static void register_large(void)
{
	state_unit *spec = nodefix_spec("large", 10 * 32 * (uint64_t)BLOCK);

	spec->tensors[0]->frozen = true;
	nodefix_unit(&n, job, spec, m, 2);
}

static const float *of_u(const struct published *g)
{
	const struct view *v = g->assembly->view;

	cr_assert_str_eq(v->tensors[1].name, "u.weight");
	return elements(g) + v->tensors[1].offset / sizeof(float);
}

/* Let completions through one by one until @op is over. */
static void step_until_over(const struct nodefix_op *o)
{
	for (unsigned i = 0; i < 1000 && !o->over; i++) {
		nodefix_turn(&n);
		backend_fake_step(fake());
	}
	nodefix_ok((struct nodefix_op *)(uintptr_t)o, "op");
}

/* A whole step comes while the generation before it is made: it waits before it changes masters. */
Test(publication, a_step_waits_until_the_masters_were_read)
{
	struct publication *p;
	struct published *g;

	register_large();
	train(1);
	p = declare();
	backend_fake_hold(fake(), true);
	publication_want(p);
	for (unsigned i = 0; i < 2; i++) {
		nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]);
		step_until_over(&op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", u, &op[i]);
	step_until_over(&op[0]);
	step_until_over(&op[1]);
	cr_assert(making_is_busy(job), "most of it is still to do");
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	step_until_over(&op[0]);
	step_until_over(&op[1]);
	submit_commit(2);
	step_until_over(&op[0]);
	step_until_over(&op[1]);
	backend_fake_hold(fake(), false);
	nodefix_turns(&n);
	g = &p->buffers[0];
	cr_assert_eq(g->step, 1);
	cr_assert_eq(g->state, PUBLISHED_READY);
	cr_assert_arr_eq(of_u(g), committed, sizeof(committed), "of step 1, not of 2");
	cr_assert_neq(memcmp(nodefix_params(u), committed, sizeof(committed)), 0);
	/* and the generation of step 2 was made, which had to wait for the one before */
	cr_assert_eq(publication_newest(p)->step, 2);
	cr_assert_arr_eq(of_u(publication_newest(p)), nodefix_params(u), sizeof(committed));
}

/* ------------------------------------------------------------------------------- buffers */

Test(publication, a_leased_generation_stays_as_it_is)
{
	struct publication *p = declare();
	struct publication_lease *l;
	static float before[ELEMENTS];
	struct published *g;

	train(1);
	cr_assert_eq(newest(p), 1);
	g = publication_newest(p);
	l = publication_lease(g);
	memcpy(before, committed, sizeof(before));
	for (uint64_t step = 2; step < 12; step++) {
		train(step);
		cr_assert_eq(newest(p), step, "two other buffers take turns");
		cr_assert_eq(g->number, 1);
		cr_assert_arr_eq(elements(g), before, sizeof(before));
	}
	cr_assert_eq(p->counts.dropped, 8, "nobody has leased the others; the last two are there");
	publication_release(l);
	train(12);
	cr_assert_eq(newest(p), 12);
	cr_assert_eq(p->counts.skipped, 0);
}

Test(publication, without_a_buffer_a_generation_is_skipped)
{
	struct publication_lease *l[3];
	struct publication *p = declare(); /* 3 buffers */

	for (uint64_t step = 1; step <= 3; step++) {
		train(step);
		cr_assert_eq(newest(p), step);
		l[step - 1] = publication_lease(publication_newest(p));
	}
	train(4);
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(p->counts.skipped, 0, "it may still be made");
	train(5);
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(p->counts.skipped, 1);
	publication_release(l[0]);
	cr_assert_eq(newest(p), 4, "of the last commit; numbers have no gap");
	cr_assert_eq(publication_newest(p)->step, 5);
	cr_assert_eq(p->counts.skipped, 1);
	publication_release(l[1]);
	publication_release(l[2]);
}

Test(publication, one_that_waits_is_made_when_a_buffer_is_free)
{
	struct publication_lease *l[2];
	struct publication *p;

	d.when_full = SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_WAIT;
	d.buffers = 2;
	p = declare();
	for (uint64_t step = 1; step <= 2; step++) {
		train(step);
		cr_assert_eq(newest(p), step);
		l[step - 1] = publication_lease(publication_newest(p));
	}
	cr_assert_eq(p->counts.waits, 0);
	train(3);
	cr_assert_eq(newest(p), 2);
	cr_assert_eq(p->counts.waits, 1);
	cr_assert_eq(p->counts.waited_us, 0, "it goes on");
	cr_assert(p->waits_since_us);
	p->waits_since_us -= 1000; /* since then */
	publication_release(l[0]);
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(publication_newest(p)->step, 3);
	cr_assert_eq(p->counts.skipped, 0);
	cr_assert_eq(p->waits_since_us, 0);
	cr_assert_geq(p->counts.waited_us, 1000);
	l[0] = publication_lease(publication_newest(p));
	train(4);
	train(5);
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(p->counts.skipped, 1, "that of step 4");
	publication_release(l[1]);
	cr_assert_eq(newest(p), 4);
	cr_assert_eq(publication_newest(p)->step, 5);
	cr_assert_eq(p->counts.skipped, 1);
	cr_assert_eq(p->counts.waits, 2);
	cr_assert_eq(p->counts.expired, 0);
	publication_release(l[0]);
}

/* The last two stay; only with DROP_OLDEST the older one of them makes room. */
Test(publication, kept_generations_make_room_by_policy)
{
	for (unsigned drops = 0; drops < 2; drops++) {
		/* generations of the one that was dropped, and that of the last commit before */
		uint64_t before = drops ? 3 + 1 : 0;
		struct publication_lease *l;
		struct publication *p;

		d.keep = 2;
		d.buffers = 3;
		d.when_full =
			drops ? SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_DROP_OLDEST
			      : SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_SKIP;
		p = declare();
		train(10 * drops + 1);
		cr_assert_eq(newest(p), before + 1);
		l = publication_lease(publication_newest(p));
		train(10 * drops + 2);
		train(10 * drops + 3);
		cr_assert_eq(newest(p), before + 3);
		train(10 * drops + 4);
		cr_assert_eq(newest(p), before + (drops ? 4 : 3));
		cr_assert_eq(p->counts.skipped, drops ? 0 : 1);
		publication_release(l);
		publication_drop(p);
		cr_assert_eq(memory(), 0);
	}
}

/* --------------------------------------------------------------------------------- waits */

struct waiter_case {
	struct publication_wait w;
	unsigned n;
	struct fault f;
};

static void on_wait(struct publication_wait *w, const struct fault *f)
{
	struct waiter_case *c = CONTAINER_OF(w, struct waiter_case, w);

	c->n++;
	c->f = f ? *f : FAULT_NULL;
}

static void await(struct publication *p, struct waiter_case *c, uint64_t newer_than, bool asks)
{
	*c = (struct waiter_case){ .w = { .newer_than = newer_than,
					  .deadline_us = UINT64_MAX,
					  .asks = asks,
					  .done = on_wait } };
	publication_await(p, &c->w);
}

Test(publication, waits_end_with_a_newer_generation)
{
	struct publication *p = declare();
	struct waiter_case one, other, left;

	await(p, &one, 0, false);
	await(p, &other, 1, false);
	await(p, &left, 0, false);
	publication_leave(&left.w);
	train(1);
	cr_assert_eq(newest(p), 1);
	cr_assert_eq(one.n, 1);
	cr_assert_eq(one.f.code, 0);
	cr_assert_eq(other.n, 0);
	train(2);
	cr_assert_eq(newest(p), 2);
	cr_assert_eq(other.n, 1);
	cr_assert_eq(left.n, 0);
}

Test(publication, waits_end_with_their_deadline_and_with_the_publication)
{
	struct publication *p = declare();
	struct waiter_case one, other;

	await(p, &one, 0, false);
	one.w.deadline_us = clock_now_us() + 1000;
	await(p, &other, 0, false);
	publications_tick(job, clock_now_us() + 2000);
	cr_assert_eq(one.n, 1);
	cr_assert_eq(one.f.code, FAULT_DEADLINE);
	cr_assert(strstr(one.f.text, "the first commit of job 'job'"), "%s", one.f.text);
	publication_drop(p);
	cr_assert_eq(other.n, 1);
	cr_assert_eq(other.f.code, FAULT_NOT_FOUND);
}

/* It said only that it had timed out. */
Test(publication, a_wait_for_a_buffer_says_so)
{
	struct publication_lease *l[2];
	struct publication *p;
	struct waiter_case one;

	d.when_full = SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_WAIT;
	d.every_steps = 0;
	d.buffers = 2;
	p = declare();
	for (uint64_t step = 1; step <= 2; step++) {
		train(step);
		publication_want(p);
		cr_assert_eq(newest(p), step);
		l[step - 1] = publication_lease(publication_newest(p));
	}
	train(3);
	publication_want(p);
	await(p, &one, 2, true);
	one.w.deadline_us = clock_now_us() + 1000;
	publications_tick(job, clock_now_us() + 2000);
	cr_assert_eq(one.f.code, FAULT_DEADLINE);
	cr_assert(strstr(one.f.text, "for a reader that releases one of its 2 buffers"), "%s",
		  one.f.text);
	publication_release(l[0]);
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(p->counts.skipped, 0);
	publication_release(l[1]);
}

/* A reader that never lets go costs one wait, not all later steps: each of them would be late, too. */
Test(publication, a_wait_for_a_buffer_ends)
{
	struct publication_lease *l[2];
	struct waiter_case one;
	struct publication *p;

	d.when_full = SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_WAIT;
	d.wait_ms = 3600000;
	d.buffers = 2;
	p = declare();
	for (uint64_t step = 1; step <= 2; step++) {
		train(step);
		l[step - 1] = publication_lease(publication_newest(p));
	}
	train(3);
	await(p, &one, 2, true);
	publications_tick(job, clock_now_us());
	cr_assert_eq(one.n + p->counts.skipped, 0);
	cr_assert_eq(p->counts.waits, 1);
	cr_assert_eq(p->counts.expired, 0);
	p->waits_since_us -= 3600000000u; /* the time is over */
	publications_tick(job, clock_now_us());
	cr_assert_eq(p->counts.skipped, 1);
	cr_assert_eq(p->counts.expired, 1);
	cr_assert_geq(p->counts.waited_us, 3600000000u);
	cr_assert_eq(p->waits_since_us, 0);
	cr_assert_eq(one.f.code, FAULT_EXHAUSTED);
	cr_assert(strstr(one.f.text, "all 2 buffers of publication"), "%s", one.f.text);
	publication_release(l[0]);
	cr_assert_eq(newest(p), 2,
		     "it is not made later: it would be of a commit that nobody expects");
	train(4);
	cr_assert_eq(publication_newest(p)->step, 4);
	cr_assert_eq(p->counts.skipped, 1);
	publication_release(l[1]);
}

static struct waiter_case *gives_up; /* when another one is answered */

static void on_wait_of_two(struct publication_wait *w, const struct fault *f)
{
	on_wait(w, f);
	publication_leave(&gives_up->w);
}

/* What an answer leads to may end the next one of the waits that are answered: it was used after that. */
Test(publication, a_wait_that_another_answer_ends_is_not_answered)
{
	struct publication *p = declare();
	struct waiter_case one, other, last;

	for (unsigned turn = 0; turn < 3; turn++) {
		await(p, &one, 0, true);
		await(p, &other, 0, true);
		await(p, &last, 0, true);
		one.w.deadline_us = other.w.deadline_us = last.w.deadline_us =
			turn == 1 ? clock_now_us() + 1000 : UINT64_MAX;
		one.w.done = on_wait_of_two;
		gives_up = &other;
		if (turn == 0)
			train(1);
		else if (turn == 1)
			publications_tick(job, clock_now_us() + 2000);
		else
			publication_drop(p);
		nodefix_turns(&n);
		cr_assert_eq(one.n, 1);
		cr_assert_eq(other.n, 0, "turn %u", turn);
		cr_assert_eq(last.n, 1);
	}
}

/* A request is told why there is no generation; a wait goes on. */
Test(publication, a_request_ends_with_the_reason)
{
	struct publication_lease *l[3];
	struct publication *p = declare();
	struct waiter_case asks, waits;

	for (uint64_t step = 1; step <= 3; step++) {
		train(step);
		cr_assert_eq(newest(p), step);
		l[step - 1] = publication_lease(publication_newest(p));
	}
	await(p, &asks, 3, true);
	await(p, &waits, 3, false);
	train(4);
	cr_assert_eq(asks.n, 1);
	cr_assert_eq(asks.f.code, FAULT_EXHAUSTED);
	cr_assert(strstr(asks.f.text, "all 3 buffers of publication 'pub'"), "%s", asks.f.text);
	cr_assert_eq(waits.n, 0);
	publication_leave(&waits.w);
	for (unsigned i = 0; i < 3; i++)
		publication_release(l[i]);
}

/* Of tables for what can never be made the daemon would have run out of memory. */
Test(publication, a_generation_larger_than_the_device_is_refused)
{
	Shardd__V1__PublishedSource source = SHARDD__V1__PUBLISHED_SOURCE__INIT;
	Shardd__V1__PublishedSource *sources[1] = { &source };
	Shardd__V1__PublishedRule rule = SHARDD__V1__PUBLISHED_RULE__INIT, *rules[1] = { &rule };
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	source.tensor = (char *)(uintptr_t) "u.weight";
	rule.name = (char *)(uintptr_t) "x";
	rule.sources = sources;
	rule.n_sources = 1;
	rule.pad_multiple = UINT32_MAX;
	n.node.devices[0].quota.limit = UINT64_C(1) << 33;
	d.rules = rules;
	d.n_rules = 1;
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_EXHAUSTED);
	cr_assert(strstr(f.text, "a generation has 17179869184 bytes"), "%s", f.text);
	d.rules = NULL;
	d.n_rules = 0;
}

/* Tables of scales took gigabytes before they were refused: with blocks of one element each has one. */
Test(publication, tables_that_the_user_cannot_pay_are_refused)
{
	Shardd__V1__PublishedSource source = SHARDD__V1__PUBLISHED_SOURCE__INIT;
	Shardd__V1__PublishedSource *sources[1] = { &source };
	Shardd__V1__PublishedRule rule = SHARDD__V1__PUBLISHED_RULE__INIT, *rules[1] = { &rule };
	struct user *user = job->owner.user;
	uint64_t before = user->used[USER_MEMORY], most = user->most[USER_MEMORY];
	uint32_t block[2] = { 1, 1 };
	state_unit *spec = nodefix_spec("matrix", 8);
	state_tensor *t = spec->tensors[0];
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	t->shape = realloc(t->shape, 2 * sizeof(*t->shape));
	t->shape[t->n_shape++] = 1;
	nodefix_register(job, spec);
	before = user->used[USER_MEMORY];
	source.tensor = (char *)(uintptr_t) "matrix.weight";
	rule.name = (char *)(uintptr_t) "x";
	rule.sources = sources;
	rule.n_sources = 1;
	rule.type = SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3;
	rule.scale_block = block;
	rule.n_scale_block = ARRAY_SIZE(block);
	rule.pad_multiple = 1u << 30;
	n.node.devices[0].quota.limit = UINT64_C(1) << 40;
	user->most[USER_MEMORY] = before + (64 << 20);
	d.rules = rules;
	d.n_rules = 1;
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_EXHAUSTED, "%s", f.text);
	cr_assert(strstr(f.text, "max_daemon_bytes_per_user"), "%s", f.text);
	cr_assert_eq(user->used[USER_MEMORY], before);
	cr_assert_lt(user->peak[USER_MEMORY], before + (64 << 20));
	user->most[USER_MEMORY] = most;
	d.rules = NULL;
	d.n_rules = 0;
}

/* The record and the journal of a job have no more than that of each. */
Test(publication, a_large_declaration_is_refused)
{
	static char also[400], *names[PUBLICATION_MAX_BYTES / sizeof(also) + 1];
	Shardd__V1__PublishedSource source = SHARDD__V1__PUBLISHED_SOURCE__INIT;
	Shardd__V1__PublishedSource *sources[1] = { &source };
	Shardd__V1__PublishedRule rule = SHARDD__V1__PUBLISHED_RULE__INIT, *rules[1] = { &rule };
	struct user *user = job->owner.user;
	uint64_t before = user->used[USER_MEMORY];
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	memset(also, 'a', sizeof(also) - 1);
	for (unsigned i = 0; i < ARRAY_SIZE(names); i++)
		names[i] = also;
	source.tensor = (char *)(uintptr_t) "none";
	rule.name = (char *)(uintptr_t) "x";
	rule.sources = sources;
	rule.n_sources = 1;
	rule.optional = true;
	rule.also = names;
	rule.n_also = ARRAY_SIZE(names);
	d.rules = rules;
	d.n_rules = 1;
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_INVALID);
	cr_assert(strstr(f.text, "at most 262144"), "%s", f.text);
	cr_assert_eq(user->used[USER_MEMORY], before);
	rule.n_also /= 2;
	f = FAULT_NULL;
	cr_assert_eq(publication_declare(job, &d, &p, &f), 0, "%s", f.text);
	cr_assert_gt(user->used[USER_MEMORY] - before, PUBLICATION_MAX_BYTES / 2,
		     "its user pays for the record");
	publication_drop(p);
	cr_assert_eq(user->used[USER_MEMORY], before);
}

/* Only the present tables were charged: with leases and ever more units a user had many times the limit. */
Test(publication, tables_of_units_before_are_paid_as_long_as_they_are_leased)
{
	struct user *user = job->owner.user;
	struct publication_lease *l;
	struct publication *p = declare();
	uint64_t before, tables;
	struct unit *late;

	job->quota.limit = UINT64_MAX;
	train(1);
	cr_assert_eq(newest(p), 1);
	l = publication_lease(publication_newest(p));
	tables = assembly_own_bytes(l->g->assembly) + (BLOCKS + 1) * sizeof(*l->g->crc);
	late = nodefix_register(job, nodefix_spec("late", 1000));
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], late, 1, &op[i]);
	both_ok("Initialise");
	train(2);
	cr_assert_eq(newest(p), 2);
	cr_assert_neq(publication_newest(p)->assembly, l->g->assembly);
	before = user->used[USER_MEMORY];
	publication_release(l);
	train(3); /* in the buffer of step 1, with the new tables */
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(before - user->used[USER_MEMORY],
		     tables - (publication_newest(p)->assembly->n_blocks + 1) * sizeof(uint32_t));
}

/* Each commit and each request after a change of units had the loop make the tables at once, however long that takes. */
Test(publication, tables_of_changed_units_are_made_in_the_owners_turn)
{
	struct publication *p = declare();
	struct waiter_case asks;
	struct unit *late;

	train(1);
	cr_assert_eq(newest(p), 1);
	late = nodefix_register(job, nodefix_spec("late", 1000));
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], late, 1, &op[i]);
	both_ok("Initialise");
	job->owner.user->turn_at_us[USER_TURN_TABLES] = UINT64_MAX;
	train(2);
	await(p, &asks, 1, true);
	publication_want(p);
	publications_tick(job, clock_now_us());
	cr_assert_eq(newest(p), 1);
	cr_assert_eq(asks.n, 0, "it waits for the turn");
	cr_assert(p->wanted);
	job->owner.user->turn_at_us[USER_TURN_TABLES] = 0;
	publications_tick(job, clock_now_us());
	cr_assert_eq(newest(p), 2);
	cr_assert_eq(asks.n, 1);
	cr_assert_eq(asks.f.code, FAULT_NONE);
	job->owner.user->turn_at_us[USER_TURN_TABLES] = UINT64_MAX;
	train(3); /* the tables are there */
	cr_assert_eq(newest(p), 3);
	cr_assert_eq(p->counts.failed + p->counts.skipped, 0);
}

/* A unit that was registered after the commit was published with the zeros that it has. */
Test(publication, a_unit_without_values_is_not_published)
{
	struct publication *p;
	struct waiter_case asks;
	struct unit *late;

	d.every_steps = 0;
	train(1);
	late = nodefix_register(job, nodefix_spec("late", 1000));
	p = declare();
	await(p, &asks, 0, true);
	publication_want(p);
	cr_assert_eq(newest(p), 0);
	cr_assert_eq(asks.n, 1);
	cr_assert_eq(asks.f.code, FAULT_STATE);
	cr_assert(strstr(asks.f.text, "unit 'late' has no values"), "%s", asks.f.text);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], late, 1, &op[i]);
	both_ok("Initialise");
	publication_want(p);
	cr_assert_eq(newest(p), 0, "it was changed since the commit");
	train(2);
	cr_assert_eq(newest(p), 1);
}

/* ------------------------------------------------------------------------------- its end */

Test(publication, a_lease_of_a_dropped_publication_leads_nowhere)
{
	struct publication *p = declare();
	struct publication_lease *l;
	uint64_t layout;

	train(1);
	cr_assert_eq(newest(p), 1);
	l = publication_lease(publication_newest(p));
	layout = l->g->assembly->layout;
	publication_drop(p);
	cr_assert_null(l->g);
	cr_assert_null(publication_find(job, "pub"));
	cr_assert_eq(memory(), 0);
	publication_release(l);
	/* a new one: what it makes is newer than what readers of the former one have, and they do not take its
	 * tensors for those that they know */
	p = declare();
	nodefix_turns(&n);
	cr_assert_eq(newest(p), 2);
	cr_assert_neq(publication_newest(p)->assembly->layout, layout);
}

Test(publication, a_drop_in_the_middle_of_a_generation)
{
	struct publication *p;

	d.every_steps = 0;
	p = declare();
	train(1);
	nodefix_turns(&n);
	backend_fake_hold(fake(), true);
	publication_want(p);
	cr_assert(making_is_busy(job));
	publication_drop(p);
	cr_assert(making_is_busy(job));
	cr_assert_null(publication_find(job, "pub"));
	p = declare();
	backend_fake_hold(fake(), false);
	nodefix_turns(&n);
	cr_assert_not(making_is_busy(job));
	cr_assert_eq(memory(), 0);
	publication_want(p);
	cr_assert_eq(newest(p), 2, "the number 1 was taken");
}

Test(publication, a_deleted_job_ends_what_is_made)
{
	struct publication *p;
	struct waiter_case c;
	struct fault f = FAULT_NULL;

	d.every_steps = 0;
	p = declare();
	train(1);
	nodefix_turns(&n);
	backend_fake_hold(fake(), true);
	publication_want(p);
	cr_assert(making_is_busy(job));
	await(p, &c, 5, false);
	cr_assert_eq(job_delete(job, true, NULL, &f), 0);
	cr_assert_eq(c.n, 1);
	cr_assert_eq(c.f.code, FAULT_NOT_FOUND);
	backend_fake_hold(fake(), false);
	nodefix_turns(&n);
}

/* ------------------------------------------------------------------------------- refusals */

Test(publication, declarations_that_are_refused)
{
	struct publication *p = declare(), *other = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(publication_declare(job, &d, &other, &f), 0, "the same again");
	cr_assert_eq(other, p);
	d.every_steps = 2;
	cr_assert_eq(publication_declare(job, &d, &other, &f), FAULT_STATE);
	cr_assert(strstr(f.text, "is declared otherwise: drop it first"), "%s", f.text);
	f = FAULT_NULL;
	d.buffers = 17;
	cr_assert_eq(publication_declare(job, &d, &other, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "buffers");
	f = FAULT_NULL;
	d.buffers = 2;
	d.keep = 2;
	cr_assert_eq(publication_declare(job, &d, &other, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "keep");
	f = FAULT_NULL;
	d.keep = 0;
	d.when_full = 9;
	cr_assert_eq(publication_declare(job, &d, &other, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "when_full");
	f = FAULT_NULL;
	d.when_full = SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_SKIP;
	d.wait_ms = 5;
	cr_assert_eq(publication_declare(job, &d, &other, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "wait_ms");
}

Test(publication, a_root_that_is_not_there_is_refused)
{
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	d.root = (char *)(uintptr_t) "v";
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "root");
	cr_assert(strstr(f.text, "job 'job' has no unit 'v'"), "%s", f.text);
	d.root = (char *)(uintptr_t) "u";
	p = declare();
	cr_assert_str_eq(p->assembly->view->tensors[0].name, "weight");
}

Test(publication, there_are_not_too_many)
{
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;
	char name[32];

	d.name = name;
	for (unsigned i = 0; i < PUBLICATIONS_MAX; i++) {
		snprintf(name, sizeof(name), "pub%u", i);
		cr_assert_eq(publication_declare(job, &d, &p, &f), 0);
	}
	for (unsigned i = PUBLICATIONS_MAX; i < 1000; i++) {
		snprintf(name, sizeof(name), "pub%u", i);
		f = FAULT_NULL;
		cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_EXHAUSTED);
		cr_assert(strstr(f.text, "the most that are possible: drop one"), "%s", f.text);
	}
	cr_assert_eq(memory(), 0, "without a generation they have no memory");
}

/* No memory is left to train with, or by the job's quota: the trainers go on, and the reason is shown. */
Test(publication, without_memory_there_is_no_generation)
{
	struct publication *p;
	struct waiter_case waits;

	train(1); /* the gradient buffers are there */
	job->quota.limit = job->quota.used + 1000;
	p = declare();
	cr_assert_eq(p->counts.failed, 1, "that of the last commit");
	train(2);
	cr_assert_eq(newest(p), 0);
	cr_assert_eq(p->counts.failed, 2);
	cr_assert(strstr(p->why, "no memory for a generation of publication 'pub', 400128 bytes"),
		  "%s", p->why);
	await(p, &waits, 0, false);
	waits.w.deadline_us = clock_now_us() + 1000;
	publications_tick(job, clock_now_us() + 2000);
	cr_assert(strstr(waits.f.text, "timed out"), "%s", waits.f.text);
	cr_assert(strstr(waits.f.text, "not made: job 'job' has no memory"), "%s", waits.f.text);
	job->quota.limit = 0;
	train(3);
	cr_assert_eq(newest(p), 1);
	cr_assert_str_eq(p->why, "");
}

/* A new unit is in the next generation, which has another size; the older one stays as it is. */
Test(publication, new_units_are_in_the_next_generation)
{
	struct publication *p = declare();
	struct publication_lease *l;
	struct published *g;

	train(1);
	cr_assert_eq(newest(p), 1);
	g = publication_newest(p);
	l = publication_lease(g);
	nodefix_unit(&n, job, nodefix_spec("v", 10), m, 2);
	train(2);
	cr_assert_eq(newest(p), 2);
	cr_assert_eq(publication_newest(p)->assembly->view->n, 2);
	cr_assert_eq(g->assembly->view->n, 1);
	publication_release(l);
}

static void write_back(float value)
{
	Shardd__V1__ReturnFullRequest r = SHARDD__V1__RETURN_FULL_REQUEST__INIT;

	r.unit = u->id;
	r.write = true;
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "SummonFull", u, &op[i]);
	both_ok("SummonFull");
	for (unsigned i = 0; i < 2; i++)
		nodefix_write(&op[i].result.place, value);
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "ReturnFull", &r.base, &op[i]);
	both_ok("ReturnFull");
}

/* Parameters that were written are where they were. Each such write made a layout of its own: no generation had a delta,
 * and a reader kept the memory of every generation that it had mapped. */
Test(publication, written_parameters_change_no_layout)
{
	struct publication *p;
	const struct assembly *a;
	const struct slab *slab;

	d.delta_percent = 100;
	train(1);
	p = declare();
	cr_assert_eq(newest(p), 1);
	a = publication_newest(p)->assembly;
	slab = publication_newest(p)->slab;
	for (uint64_t step = 2; step < 8; step++) {
		write_back((float)step);
		if (step % 2) {
			for (unsigned i = 0; i < 2; i++)
				nodefix_seed(&n, m[i], u, step, &op[i]);
			both_ok("Initialise");
		}
		commit(step);
		cr_assert_eq(newest(p), step);
		cr_assert_eq(publication_newest(p)->assembly, a);
		cr_assert_arr_eq(elements(publication_newest(p)), committed, sizeof(committed));
		cr_assert(publication_newest(p)->delta.made);
	}
	cr_assert_eq(p->counts.deltas, 6);
	cr_assert_eq(p->buffers[0].slab, slab, "it was given up, and is another one");
}

/* ----------------------------------------------------------------------- several devices */

static void begin_devices(void)
{
	fdcheck_begin();
	nodefix_begin(&n, &(struct nodefix_options){ .devices = 2, .fake_engine = true });
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
	shardd__v1__publication__init(&d);
	d.name = (char *)(uintptr_t) "pub";
}

TestSuite(publication_devices, .init = begin_devices, .fini = end, .timeout = 60);

/* What no device has as a whole is refused if it is published, and costs nothing if it is not. */
Test(publication_devices, a_unit_may_be_sharded_over_those_that_reach_each_other)
{
	Shardd__V1__PublishedSource source = SHARDD__V1__PUBLISHED_SOURCE__INIT;
	Shardd__V1__PublishedSource *sources[1] = { &source };
	Shardd__V1__PublishedRule rule = SHARDD__V1__PUBLISHED_RULE__INIT, *rules[1] = { &rule };
	state_unit *spec = nodefix_spec("whole", 10);
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;
	struct unit *whole;

	spec->strategy = STRATEGY_REPLICATE;
	whole = nodefix_unit(&n, job, spec, m, 2);
	d.device = (char *)(uintptr_t) "fake:2";
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "device");
	cr_assert_str_eq(f.text, "there is no device 'fake:2': this daemon has fake:0, fake:1");
	f = FAULT_NULL;
	d.device = (char *)(uintptr_t) "fake:1";
	p = declare();
	cr_assert_eq(p->assembly->view->n, 2);
	cr_assert_eq(p->assembly->n_boxes, 3); /* one for each part of 'u', and 'whole' */
	cr_assert_eq(p->assembly->device, &n.node.devices[1]);
	cr_assert(p->assembly->others);
	publication_drop(p);
	d.device = (char *)(uintptr_t) "";
	source.tensor = (char *)(uintptr_t) "u.weight";
	rule.sources = sources;
	rule.n_sources = 1;
	d.rules = rules;
	d.n_rules = 1;
	p = declare();
	cr_assert_eq(p->assembly->view->n, 1);
	submit_commit(1);
	both_ok("Commit");
	publication_want(p);
	nodefix_turns(&n);
	cr_assert_arr_eq(elements(publication_newest(p)), nodefix_params(whole),
			 10 * sizeof(float));
	d.rules = NULL;
	d.n_rules = 0;
}
