/* Jobs that change their number of ranks by themselves, while their trainers stay: when, to what, and what
 * becomes of ranks, blobs, memory and waiting newcomers. The fixture compares the journal with the records
 * at the end of each test. */
#include "elasticfix.h"
#include "fdcheck.h"

TestSuite(elastic, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* ------------------------------------------------------------------------- shrinking */

Test(elastic, goes_on_without_a_rank_that_does_not_come_back)
{
	float was[ELEMENTS], is[ELEMENTS];
	struct fixture x;
	struct unit *u;

	begin(&x);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	step(&x, u, 1);
	memcpy(was, nodefix_params(u), sizeof(was));
	dies(&x, 2);
	join(&x, 0, 0);
	join(&x, 1, 1);
	join(&x, 3, 3);
	expect_words(&x, "waiting for 1 of 4 ranks (2), shrinks to 3 in 5.0 s");
	advance(&x, GRACE_MS - 1);
	expect_world(&x, 4);
	cr_expect_eq(x.p[3].m->state, MEMBER_JOINED);
	advance(&x, 1);
	expect_world(&x, 3);
	cr_expect(strstr(x.n.events.text,
			 "job 'job' goes on with 3 ranks (4 before), without rank 2, "
			 "which did not come back: join again"),
		  "%s", x.n.events.text);
	cr_expect_eq(x.p[3].m->state, MEMBER_STALE);
	expect_words(&x, "");
	memcpy(is, nodefix_params(u), sizeof(is));
	cr_expect_arr_eq(is, was, sizeof(was));
	cr_expect_eq(x.job->rec->step, 1);
	cr_expect_eq(blob_of(&x, 1), 11);
	cr_expect_eq(blob_of(&x, 2), 13, "the blob goes with its process");
	cr_expect_eq(u->layout.ranks, 3);
	expect_sound(&x);
	join(&x, 0, 0);
	join(&x, 3, 2);
	join(&x, 1, 1);
	step(&x, u, 2);
	cr_expect_eq(blob_of(&x, 2), 13);
	expect_sound(&x);
	end(&x);
}

Test(elastic, waits_for_a_rank_that_comes_back_in_time)
{
	struct fixture x;

	begin(&x);
	dies(&x, 2);
	for (uint32_t i = 0; i < 4; i++)
		if (i != 2)
			join(&x, i, i);
	advance(&x, GRACE_MS - 1);
	join(&x, 2, 2);
	advance(&x, 10 * GRACE_MS);
	expect_world(&x, 4);
	cr_expect_eq(x.job->joined, 4);
	end(&x);
}

/* The time runs from the last one that came. */
Test(elastic, waits_again_after_each_rank_that_comes_back)
{
	struct fixture x;

	begin(&x);
	dies(&x, 2);
	join(&x, 0, 0);
	join(&x, 1, 1);
	advance(&x, GRACE_MS - 1);
	join(&x, 3, 3);
	advance(&x, GRACE_MS - 1);
	expect_world(&x, 4);
	advance(&x, 1);
	expect_world(&x, 3);
	end(&x);
}

Test(elastic, is_never_smaller_than_its_least_size)
{
	struct fixture x;

	setup(&x, &(struct job_spec){ .min_ranks = 3 }, 1);
	dies(&x, 2);
	dies(&x, 3);
	join(&x, 0, 0);
	join(&x, 1, 1);
	advance(&x, 100 * GRACE_MS);
	expect_world(&x, 4);
	expect_words(&x, "waiting for 2 of 4 ranks (2, 3); 3 at least must be there to go on");
	join(&x, 3, 3);
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	end(&x);
}

Test(elastic, loses_several_ranks_at_once_and_one_after_the_other)
{
	struct fixture x;
	struct unit *u;

	begin(&x);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	step(&x, u, 1);
	dies(&x, 0);
	join(&x, 1, 1);
	join(&x, 2, 2);
	join(&x, 3, 3);
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	join(&x, 1, 0);
	join(&x, 2, 1);
	dies(&x, 2);
	join(&x, 1, 0);
	join(&x, 3, 2);
	advance(&x, GRACE_MS);
	expect_world(&x, 2);
	join(&x, 1, 0);
	join(&x, 3, 1);
	cr_expect_eq(blob_of(&x, 0), 11);
	cr_expect_eq(blob_of(&x, 1), 13);
	step(&x, u, 2);
	expect_sound(&x);
	end(&x);
}

Test(elastic, waits_for_all_at_its_first_start)
{
	struct fixture x;

	setup_job(&x, &(struct job_spec){ .min_ranks = 2 }, 1);
	for (uint32_t i = 0; i < 3; i++)
		join(&x, i, i);
	waits(&x, 6);
	expect_words(&x, "waits to join, when all 4 ranks are there");
	advance(&x, 100 * GRACE_MS);
	expect_world(&x, 4);
	cr_expect_eq(x.p[0].m->state, MEMBER_JOINED);
	join(&x, 3, 3);
	expect_words(&x, "waits to join, grows to 5 at the next commit");
	end(&x);
}

/* The others have something to finish, and will leave, too. */
Test(elastic, stays_as_it_is_when_a_rank_leaves)
{
	struct fault f = FAULT_NULL;
	struct fixture x;
	bool freed;

	begin(&x);
	dies(&x, 3);
	for (uint32_t i = 0; i < 3; i++)
		join(&x, i, i);
	join(&x, 3, 3);
	cr_assert_eq(job_leave(x.p[1].m, &freed, &f), RES_DONE);
	advance(&x, 10 * GRACE_MS);
	expect_world(&x, 4);
	expect_words(&x, "");
	cr_expect_eq(x.p[0].m->state, MEMBER_JOINED);
	/* but then one dies: the one that has left is not waited for, either */
	dies(&x, 2);
	join(&x, 0, 0);
	join(&x, 3, 3);
	advance(&x, GRACE_MS);
	expect_world(&x, 2);
	join(&x, 3, 1);
	end(&x);
}

Test(elastic, stays_as_it_is_without_a_grace)
{
	struct fixture x;

	begin(&x);
	x.job->rec->join_grace_ms = 0;
	nodefix_wrote(&x.n);
	dies(&x, 2);
	for (uint32_t i = 0; i < 2; i++)
		join(&x, i, i);
	advance(&x, 1000 * GRACE_MS);
	expect_world(&x, 4);
	refused(&x, 5, FAULT_INVALID, "rank 5 is out of range (0..3)");
	end(&x);
}

Test(elastic, stays_as_it_is_while_it_drains)
{
	struct fixture x;

	begin(&x);
	dies(&x, 2);
	for (uint32_t i = 0; i < 2; i++)
		join(&x, i, i);
	cr_expect_eq(job_drain(x.job), 3);
	advance(&x, 10 * GRACE_MS);
	expect_world(&x, 4);
	refused(&x, 5, FAULT_UNAVAILABLE, "is draining: no rank may join");
	end(&x);
}

/* A process that computes for longer than the grace. */
Test(elastic, leaves_out_who_is_alive_and_does_not_come_back)
{
	struct fixture x;
	struct unit *u;

	begin(&x);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	step(&x, u, 1);
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "Gather", u, op));
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "GradientBuffer", u, op));
	dies(&x, 3);
	join(&x, 0, 0);
	join(&x, 1, 1);
	advance(&x, GRACE_MS);
	expect_world(&x, 2);
	cr_expect_eq(x.p[2].m->state, MEMBER_DEAD);
	cr_expect_eq(x.job->present, 2);
	nodefix_on_unit(&x.n, x.p[2].m, "Reduce", u, &x.op[2]);
	nodefix_wait(&x.op[2]);
	cr_expect_eq(x.op[2].fault.code, FAULT_ABORTED);
	cr_expect(strstr(x.op[2].fault.text, "job 'job' has gone on with 2 ranks, without this "
					     "process (rank 2), which had "
					     "not joined again in time: join again"),
		  "%s", x.op[2].fault.text);
	/* it is a newcomer now; at a commit it is taken in */
	waits(&x, 2);
	join(&x, 0, 0);
	join(&x, 1, 1);
	advance(&x, GRACE_MS);
	expect_world(&x, 2);
	step(&x, u, 2);
	expect_world(&x, 3);
	join(&x, 2, 2);
	cr_expect_eq(blob_of(&x, 2), 0, "its blob went when it was left out");
	end(&x);
}

/* What it held of the units is gone: it registers them again before it uses them. */
Test(elastic, takes_back_what_ranks_held)
{
	struct fixture x;
	struct unit *u;

	begin(&x);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	step(&x, u, 1);
	dies(&x, 0);
	for (uint32_t i = 1; i < 4; i++)
		join(&x, i, i);
	for (uint32_t i = 1; i < 4; i++) {
		cr_assert_eq(member_registered(x.p[i].m, u->id), 0);
		nodefix_alloc(&x.n, x.p[i].m, 64, &x.op[i]);
		nodefix_wait(&x.op[i]);
		nodefix_on_unit(&x.n, x.p[i].m, "Gather", u, &x.op[i]);
		nodefix_wait(&x.op[i]);
		nodefix_barrier(&x.n, x.p[i].m, 0, &x.op[i]);
	}
	cr_expect_eq(u->gathered_ranks, 3);
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	for (uint32_t i = 1; i < 4; i++) {
		cr_expect_eq(x.op[i].fault.code, FAULT_ABORTED, "%s", x.op[i].fault.text);
		cr_expect_eq(x.p[i].m->n_registered, 0);
		cr_expect_eq(x.p[i].m->n_buffers, 0);
		cr_expect_eq(x.p[i].m->pool.owner_rank, (int)i - 1);
		join(&x, i, i - 1);
	}
	step(&x, u, 2);
	end(&x);
}

Test(elastic, goes_back_to_the_commit_where_jobs_resume_there)
{
	float was[ELEMENTS], is[ELEMENTS];
	struct fixture x;
	struct unit *u;

	setup(&x, &(struct job_spec){ .min_ranks = 2, .resume = JOB_RESUME_COMMITTED }, 1);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	step(&x, u, 1);
	memcpy(was, nodefix_params(u), sizeof(was));
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "GradientBuffer", u, op));
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "Reduce", u, op));
	ON_ALL(&x, nodefix_step(&x.n, m, op));
	ON_ALL(&x, nodefix_on_unit(&x.n, m, "Gather", u, op));
	dies(&x, 1);
	nodefix_turns(&x.n);
	join(&x, 0, 0);
	join(&x, 2, 2);
	join(&x, 3, 3);
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	memcpy(is, nodefix_params(u), sizeof(is));
	cr_expect_arr_eq(is, was, sizeof(was));
	cr_expect_eq(x.job->rec->uncommitted_steps, 0);
	cr_expect_not(x.job->rec->torn);
	end(&x);
}

/* -------------------------------------------------------- devices, buffers, failures */

Test(elastic, devices_and_buffers_go_with_their_processes)
{
	static const uint64_t shape[] = { 6 };
	state_buffer *b = state_buffer_new("mean", shape, 1);
	state_unit *s = nodefix_spec("u", ELEMENTS);
	struct device *of[4];
	struct fixture x;
	struct unit *u;

	b->dtype = BUFFER_FP32;
	CHECK(state_unit_add_buffer(s, b) == 0);
	s->layout = LAYOUT_DIM0;
	setup(&x, &(struct job_spec){ .min_ranks = 2 }, 2);
	u = make_unit(&x, s);
	step(&x, u, 1);
	for (uint32_t i = 0; i < 4; i++) {
		nodefix_write(&u->buffers[i], (float)(i + 1));
		of[i] = x.job->placed[i];
	}
	cr_assert_neq(of[1], of[2]);
	dies(&x, 0);
	for (uint32_t i = 1; i < 4; i++)
		join(&x, i, i);
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	for (uint32_t i = 0; i < 3; i++) {
		cr_expect_eq(x.job->placed[i], of[i + 1]);
		cr_expect_eq(((float *)region_addr(&u->buffers[i]))[5], (float)(i + 2));
		cr_expect_eq(u->buffers[i].slab->owner_rank, (int)i);
		join(&x, i + 1, i);
	}
	step(&x, u, 2);
	waits(&x, 0);
	step(&x, u, 3);
	expect_world(&x, 4);
	for (uint32_t i = 0; i < 4; i++) {
		/* the newcomer has a copy of those of the rank 0 that there was */
		cr_expect_eq(((float *)region_addr(&u->buffers[i]))[0], i ? (float)(i + 1) : 2.0f,
			     "rank %u", i);
		join(&x, i, i);
	}
	expect_sound(&x);
	end(&x);
}

static void expect_no_try(struct fixture *x, uint64_t ms)
{
	advance(x, ms);
	cr_expect_eq(x->p[0].m->state, MEMBER_JOINED);
}

/* Each try waits twice as long as the one before, and status says why. */
Test(elastic, what_cannot_be_laid_out_stays_as_it_is)
{
	static const uint32_t pair[] = { 0, 1 };
	struct fixture x;
	struct fault f = FAULT_NULL;
	struct group *g;
	state_unit *s = nodefix_spec("u", ELEMENTS);

	begin(&x);
	cr_assert_eq(job_group(x.job, "pair", pair, 2, &g, &f), 0, "%s", f.text);
	s->group = g->id;
	(void)nodefix_register(x.job, s);
	dies(&x, 3);
	for (uint32_t i = 0; i < 3; i++)
		join(&x, i, i);
	expect_no_try(&x, GRACE_MS);
	expect_world(&x, 4);
	cr_expect_eq(x.job->elastic.failures, 1);
	expect_words(
		&x,
		"shrinks to 3 in 10.0 s; the last try failed: unit 'u' belongs to group 'pair'");
	expect_no_try(&x, 2 * GRACE_MS - 1);
	cr_expect_eq(x.job->elastic.failures, 1);
	expect_no_try(&x, 1);
	cr_expect_eq(x.job->elastic.failures, 2);
	join(&x, 3, 3);
	expect_words(&x, "");
	end(&x);
}

/* A daemon that dies now leaves the job in its old size, whole; its ranks join that. */
Test(elastic, is_of_the_old_size_until_all_is_copied)
{
	state_unit *s = nodefix_spec("u", ELEMENTS);
	static const uint64_t matrix[] = { 9, 3 };
	struct fault f;
	struct fixture x;
	struct unit *u;

	begin(&x);
	s->layout = LAYOUT_DIM0;
	CHECK(state_unit_add_tensor(s, state_tensor_new("matrix", matrix, 2)) == 0);
	u = make_unit(&x, s);
	step(&x, u, 1);
	dies(&x, 1);
	join(&x, 0, 0);
	join(&x, 2, 2);
	join(&x, 3, 3);
	backend_fake_hold(x.n.node.devices[0].backend, true);
	advance(&x, GRACE_MS);
	cr_assert(resize_is_busy(x.job));
	cr_expect_str_eq(job_state_name(x.job), "RESIZING");
	cr_expect_eq(x.job->rec->world_size, 4);
	expect_sound(&x);
	cr_expect_eq(try_join(&x, 0, &f), RES_WAIT);
	cr_expect_eq(try_join(&x, 1, &f), RES_WAIT, "the lost one, too");
	dies(&x, 3);
	backend_fake_hold(x.n.node.devices[0].backend, false);
	nodefix_turns(&x.n);
	expect_world(&x, 3);
	expect_sound(&x);
	join(&x, 0, 0);
	join(&x, 2, 1);
	waits(&x, 1); /* its place is gone */
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	join(&x, 1, 1);
	end(&x);
}

/* What ranks have mapped and the job has no more, their next join tells them. */
Test(elastic, ranks_are_told_of_memory_that_is_gone)
{
	state_unit *s = nodefix_spec("u", ELEMENTS);
	static const uint64_t matrix[] = { 9, 3 };
	struct fixture x;
	struct unit *u;
	uint32_t was;

	begin(&x);
	s->layout = LAYOUT_DIM0;
	CHECK(state_unit_add_tensor(s, state_tensor_new("matrix", matrix, 2)) == 0);
	u = make_unit(&x, s);
	step(&x, u, 1);
	u->parts[0].params.slab->exported = true;
	was = u->parts[0].params.slab->id;
	dies(&x, 1);
	join(&x, 0, 0);
	join(&x, 2, 2);
	join(&x, 3, 3);
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	cr_expect_neq(u->parts[0].params.slab->id, was);
	for (uint32_t i = 0; i < 4; i++)
		if (i != 1) {
			cr_assert_eq(x.p[i].m->gone.n, 1);
			cr_expect_eq(x.p[i].m->gone.slabs[0], was);
		}
	end(&x);
}

Test(elastic, a_resize_by_hand_ends_the_numbers_of_processes)
{
	struct fault f = FAULT_NULL;
	struct fixture x;
	bool freed;

	(void)shrunk(&x);
	for (uint32_t i = 0; i < 4; i++)
		if (i != 2)
			cr_assert_eq(job_leave(x.p[i].m, &freed, &f), RES_DONE);
	cr_assert_eq(resize_begin(x.job, 2, 0, NULL, NULL, &f), 0, "%s", f.text);
	nodefix_turns(&x.n);
	expect_world(&x, 2);
	cr_expect_eq(x.job->rec->launched, 0);
	cr_expect_eq(x.job->rec->n_numbers, 0);
	cr_expect_eq(launched_world(x.job), 2);
	end(&x);
}

/* What it goes on with afterwards must be a record that a successor takes. */
Test(elastic, a_resize_by_hand_keeps_to_its_most_ranks)
{
	struct fixture x;
	struct fault f = FAULT_NULL;

	begin(&x);
	make_unit(&x, nodefix_spec("u", ELEMENTS));
	for (uint32_t i = 0; i < 4; i++)
		dies(&x, i);
	cr_expect_eq(resize_begin(x.job, MOST + 1, 0, NULL, NULL, &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "elastic from 2 to 8 ranks"), "%s", f.text);
	f = FAULT_NULL;
	cr_assert_eq(resize_begin(x.job, MOST, 0, NULL, NULL, &f), 0, "%s", f.text);
	nodefix_turns(&x.n);
	expect_world(&x, MOST);
	expect_sound(&x);
	end(&x);
}

Test(elastic, ranks_agree_on_the_grace)
{
	struct job_spec spec = { .name = "job",
				 .world_size = 4,
				 .min_ranks = 2,
				 .max_ranks = MOST,
				 .join_grace_ms = GRACE_MS };
	struct fault f = FAULT_NULL;
	struct fixture x;
	struct job *job;

	begin(&x);
	cr_expect_eq(job_open(&x.n.jobs, &spec, getuid(), getgid(), &job, NULL, &f), 0, "%s",
		     f.text);
	spec.join_grace_ms = 0;
	cr_expect_neq(job_open(&x.n.jobs, &spec, getuid(), getgid(), &job, NULL, &f), 0);
	cr_expect(strstr(f.text, "job 'job' has a join_grace_ms of 5000, not 0"), "%s", f.text);
	spec.min_ranks = spec.max_ranks = 0;
	cr_expect_eq(job_open(&x.n.jobs, &spec, getuid(), getgid(), &job, NULL, &f), 0, "%s",
		     f.text);
	end(&x);
}
