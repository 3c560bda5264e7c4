/* The line for memory: jobs of 64 MiB of a device, in the core without sockets. */
#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "core/clock.h"
#include "job/admission.h"
#include "job/registration.h"
#include "nodefix.h"

#define MIB         (UINT64_C(1) << 20)
#define CAPACITY    (64 * MIB)
#define WAIT_MS     600000u
#define ELEMENTS(n) ((n)*UINT64_C(65536)) /* AdamW in fp32 takes so many MiB */

enum { ALICE = 10001, BOB = 10002 };

static struct nodefix fix;

/* A rank that registers one unit. */
struct asker {
	struct admission_call line;
	struct job *job;
	unsigned mib;
	unsigned resumed;
	enum res res;
	struct fault f;
};

static void asker_on_turn(struct admission_call *c)
{
	CONTAINER_OF(c, struct asker, line)->resumed++;
}

/* As the daemon does it: a registration that waits is thrown away and begun again. */
static enum res asker_try(struct asker *a)
{
	state_unit *spec = nodefix_spec("u", ELEMENTS(a->mib));
	struct registration *r = NULL;
	uint64_t charged;
	uint32_t id;

	a->f = FAULT_NULL;
	cr_assert_eq(registration_new(a->job, &spec, 1, &id, &r), 0);
	registration_may_wait(r, &a->line);
	cr_assert_eq(registration_check(r, SIZE_MAX, &a->f), 0, "%s", a->f.text);
	a->res = registration_build(r, &charged, &a->f);
	registration_free(r);
	state_unit_free(spec);
	if (a->res != RES_WAIT)
		admission_leave(&a->line);
	return a->res;
}

/* Communicators are made in the first turns. */
static enum res asker_ask(struct asker *a)
{
	while (asker_try(a) == RES_WAIT && !a->line.waits)
		nodefix_turns(&fix);
	return a->res;
}

static struct job *job_on(unsigned device, const char *name, uid_t uid, int32_t priority,
			  uint32_t wait_ms)
{
	struct job_joining how = { .device = backend_info(fix.node.devices[device].backend)->id };
	struct job_spec spec = { .name = name,
				 .world_size = 1,
				 .lifetime = JOB_KEEP,
				 .priority = priority,
				 .wait_for_memory_ms = wait_ms };
	struct fault f = FAULT_NULL;
	struct job *job = NULL;
	struct user *u = users_get(&fix.node.users, uid, NULL, 0);

	u->priority = USER_PRIORITY_MAX;
	cr_assert_eq(job_open(&fix.jobs, &spec, uid, 1, &job, NULL, &f), 0, "%s", f.text);
	user_unref(u);
	cr_assert_eq(job_join(job, &how, fix.proc, 1, NULL, &fix.members[fix.n_members++], &f),
		     RES_DONE, "%s", f.text);
	return job;
}

static struct job *job_of(const char *name, uid_t uid, int32_t priority, uint32_t wait_ms)
{
	return job_on(0, name, uid, priority, wait_ms);
}

static void asker_init(struct asker *a, struct job *job, unsigned mib)
{
	*a = (struct asker){ .job = job, .mib = mib };
	admission_call_init(&a->line, asker_on_turn);
}

/* Begin with a job of @mib that has its memory. */
static struct job *begin(unsigned devices, unsigned mib)
{
	struct asker first;

	nodefix_begin(&fix, &(struct nodefix_options){ .devices = devices, .capacity = CAPACITY });
	fix.node.limits.max_wait_for_memory_ms = WAIT_MS;
	if (!mib)
		return NULL;
	asker_init(&first, job_of("first", ALICE, 0, 0), mib);
	cr_assert_eq(asker_ask(&first), RES_DONE, "%s", first.f.text);
	return first.job;
}

static void end_job(struct job *job)
{
	struct fault f = FAULT_NULL;

	nodefix_drop(&fix, job->ranks[0], "ends");
	cr_assert_eq(job_delete(job, true, NULL, &f), 0, "%s", f.text);
	nodefix_turns(&fix);
}

/* It is called after all, or its epoch has ended: its entry goes with its calls. */
static void leave(struct asker *all, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		admission_leave(&all[i].line);
}

static void tick(uint64_t after_ms)
{
	admission_tick(&fix.jobs, clock_now_us() + after_ms * 1000);
}

static void expect_text(const struct asker *a, const char *text)
{
	cr_expect_eq(a->f.code, FAULT_EXHAUSTED);
	cr_expect(strstr(a->f.text, text), "'%s' is not in: %s", text, a->f.text);
}

static void expect_why(const struct asker *a, const char *text)
{
	char why[200];

	admission_why(a->job, why, sizeof(why));
	cr_expect(strstr(why, text), "'%s' is not in: %s", text, why);
}

Test(admission, a_job_that_does_not_wait_is_refused_at_once)
{
	struct asker a;

	begin(1, 40);
	asker_init(&a, job_of("second", BOB, 0, 0), 40);
	cr_expect_eq(asker_ask(&a), RES_FAILED);
	expect_text(&a, "cannot allocate");
	cr_expect_null(a.job->mem.admission);
	nodefix_end(&fix);
}

Test(admission, memory_that_another_job_gives_back_is_taken)
{
	struct job *first = begin(1, 40);
	struct admission_counts counts;
	struct admission_place place;
	struct asker a;
	char why[200];

	asker_init(&a, job_of("second", BOB, 0, WAIT_MS), 40);
	cr_expect_eq(asker_ask(&a), RES_WAIT);
	cr_expect(admission_place(a.job, &place));
	cr_expect_eq(place.position, 1);
	cr_expect_eq(place.calls, 1);
	cr_expect_geq(place.bytes, 40 * MIB);
	admission_why(a.job, why, sizeof(why));
	cr_expect(strstr(why, "are free"), "%s", why);
	tick(0);
	cr_expect_eq(a.resumed, 0);
	end_job(first);
	tick(0);
	tick(1);
	cr_expect_eq(a.resumed, 1, "once");
	cr_expect_eq(asker_ask(&a), RES_DONE, "%s", a.f.text);
	cr_expect_not(admission_place(a.job, &place));
	admission_counts(&fix.node, &counts);
	cr_expect_eq(counts.jobs, 0, "%u", counts.jobs);
	cr_expect_eq(counts.admitted, 1);
	nodefix_end(&fix);
}

Test(admission, what_can_never_fit_does_not_wait)
{
	struct asker a;

	begin(1, 0);
	asker_init(&a, job_of("large", BOB, 0, WAIT_MS), 65);
	cr_expect_eq(asker_ask(&a), RES_FAILED);
	cr_expect_null(a.job->mem.admission);
	nodefix_end(&fix);
}

Test(admission, time_over_is_an_error_that_says_so)
{
	struct admission_counts counts;
	struct asker a;

	begin(1, 40);
	asker_init(&a, job_of("second", BOB, 0, 10), 40);
	cr_expect_eq(asker_ask(&a), RES_WAIT);
	usleep(20000);
	tick(0);
	cr_expect_eq(a.resumed, 1);
	cr_expect_null(a.job->mem.admission, "nobody of it waits");
	cr_expect_eq(asker_ask(&a), RES_FAILED);
	expect_text(&a, "no memory within 10 ms (wait_for_memory_ms): cannot allocate");
	admission_counts(&fix.node, &counts);
	cr_expect_eq(counts.given_up, 1);
	nodefix_end(&fix);
}

/* Of @n askers, all of which wait, the one that is called when there is room. */
static struct asker *called(struct asker *all, unsigned n)
{
	struct asker *found = NULL;

	tick(0);
	for (unsigned i = 0; i < n; i++) {
		if (!all[i].resumed)
			continue;
		cr_expect_null(found, "one at a time");
		found = &all[i];
	}
	cr_assert_not_null(found);
	found->resumed = 0;
	return found;
}

Test(admission, the_order_is_priority_then_holdings_then_arrival)
{
	struct job *first = begin(1, 40); /* of ALICE */
	struct asker small, a[4];
	struct asker *next;
	static const unsigned order[] = { 3, 1, 2, 0 };

	asker_init(&small, job_of("small", ALICE, 0, 0), 10);
	cr_assert_eq(asker_ask(&small), RES_DONE);
	asker_init(&a[0], job_of("a0", ALICE, 0, WAIT_MS), 50); /* her owner holds 10 MiB */
	asker_init(&a[1], job_of("a1", BOB, 0, WAIT_MS), 50);
	asker_init(&a[2], job_of("a2", BOB + 1, 0, WAIT_MS), 50);
	asker_init(&a[3], job_of("a3", ALICE, 1, WAIT_MS), 50);
	for (unsigned i = 0; i < 4; i++)
		cr_expect_eq(asker_ask(&a[i]), RES_WAIT);
	end_job(first);
	for (unsigned i = 0; i < 4; i++) {
		next = called(a, 4);
		cr_expect_eq(next - a, order[i], "%u: %td", i, next - a);
		cr_expect_eq(asker_ask(next), RES_DONE, "%s", next->f.text);
		end_job(next->job);
	}
	nodefix_end(&fix);
}

Test(admission, a_large_job_does_not_starve)
{
	struct job *first = begin(1, 40);
	struct asker large, small, now, above;

	asker_init(&large, job_of("large", BOB, 0, WAIT_MS), 60);
	asker_init(&small, job_of("small", BOB, 0, WAIT_MS), 10);
	asker_init(&now, job_of("now", BOB, 0, 0), 10);
	asker_init(&above, job_of("above", BOB, 5, 0), 10);
	cr_expect_eq(asker_ask(&large), RES_WAIT);
	cr_expect_eq(asker_ask(&small), RES_WAIT, "there is room, but not for who is first");
	cr_expect_eq(asker_ask(&now), RES_FAILED);
	expect_text(&now, "2 jobs wait for memory before job 'now'");
	cr_expect_eq(asker_ask(&above), RES_DONE, "%s", above.f.text);
	tick(0);
	cr_expect_eq(small.resumed + large.resumed, 0);
	end_job(above.job);
	end_job(first);
	tick(0);
	cr_expect_eq(large.resumed, 1);
	cr_expect_eq(small.resumed, 0);
	cr_expect_eq(asker_ask(&large), RES_DONE, "%s", large.f.text);
	end_job(large.job);
	tick(0);
	cr_expect_eq(small.resumed, 1);
	cr_expect_eq(asker_ask(&small), RES_DONE);
	nodefix_end(&fix);
}

Test(admission, who_waits_for_one_device_keeps_no_other)
{
	struct asker a, b;

	begin(2, 0);
	asker_init(&a, job_on(1, "a", ALICE, 0, 0), 40);
	cr_assert_eq(asker_ask(&a), RES_DONE, "%s", a.f.text);
	asker_init(&b, job_on(1, "b", BOB, 0, WAIT_MS), 40);
	cr_expect_eq(asker_ask(&b), RES_WAIT);
	cr_expect(b.line.waits);
	asker_init(&a, job_on(0, "c", ALICE, 0, 0), 10);
	cr_expect_eq(asker_ask(&a), RES_DONE, "%s", a.f.text);
	asker_init(&a, job_on(1, "d", ALICE, 0, 0), 10);
	cr_expect_eq(asker_ask(&a), RES_FAILED, "there is room on it, too");
	admission_leave(&b.line);
	nodefix_end(&fix);
}

Test(admission, its_owners_limit_keeps_back_nobody_else)
{
	struct job *first = begin(1, 20);
	struct asker limited, other;

	users_find(&fix.node.users, ALICE)->most[USER_STATE] = 45 * MIB;
	asker_init(&limited, job_of("limited", ALICE, 3, WAIT_MS), 30);
	cr_expect_eq(asker_ask(&limited), RES_WAIT);
	expect_why(&limited, "max_state_bytes_per_user leaves less than the ");
	asker_init(&other, job_of("other", BOB, 0, 0), 30);
	cr_expect_eq(asker_ask(&other), RES_DONE, "%s", other.f.text);
	tick(0);
	cr_expect_eq(limited.resumed, 0);
	end_job(first);
	tick(0);
	cr_expect_eq(limited.resumed, 1);
	cr_expect_eq(asker_ask(&limited), RES_DONE, "%s", limited.f.text);
	nodefix_end(&fix);
}

/* A unit of AdamW takes two slabs, or three with a copy. */
Test(admission, its_owners_limit_of_slabs_keeps_back_nobody_else)
{
	struct job *first = begin(1, 10);
	struct user *alice = users_find(&fix.node.users, ALICE);
	struct asker limited, other;

	alice->most[USER_SLABS] = alice->used[USER_SLABS] + 1;
	asker_init(&limited, job_of("limited", ALICE, 3, WAIT_MS), 10);
	cr_expect_eq(asker_ask(&limited), RES_WAIT);
	expect_why(&limited, "max_slabs_per_user leaves less than the 2 slabs that it needs");
	asker_init(&other, job_of("other", BOB, 0, 0), 10);
	cr_expect_eq(asker_ask(&other), RES_DONE, "%s", other.f.text);
	end_job(first);
	tick(0);
	cr_expect_eq(limited.resumed, 1);
	cr_expect_eq(asker_ask(&limited), RES_DONE, "%s", limited.f.text);
	nodefix_end(&fix);
}

Test(admission, a_job_that_has_shards_is_first)
{
	struct job *first = begin(1, 30);
	struct asker a, b;
	struct job *job = job_of("begun", BOB, 0, WAIT_MS);

	nodefix_register(job, nodefix_spec("earlier", ELEMENTS(10)));
	asker_init(&a, job_of("a", ALICE, 0, WAIT_MS), 30);
	asker_init(&b, job, 30);
	cr_expect_eq(asker_ask(&a), RES_WAIT);
	cr_expect_eq(asker_ask(&b), RES_WAIT);
	end_job(first);
	tick(0);
	cr_expect_eq(b.resumed, 1);
	cr_expect_eq(a.resumed, 0);
	cr_expect_eq(asker_ask(&b), RES_DONE);
	admission_leave(&a.line);
	nodefix_end(&fix);
}

/* What it has itself stays. */
Test(admission, a_job_whose_own_shards_are_in_the_way_does_not_wait)
{
	struct job *job;
	struct asker a;

	begin(1, 0);
	job = job_of("begun", BOB, 0, WAIT_MS);
	nodefix_register(job, nodefix_spec("earlier", ELEMENTS(40)));
	asker_init(&a, job, 40);
	cr_expect_eq(asker_ask(&a), RES_FAILED);
	cr_expect_null(job->mem.admission);
	nodefix_end(&fix);
}

Test(admission, who_would_close_a_ring_is_refused)
{
	struct asker a, b;

	begin(1, 0);
	asker_init(&a, job_of("a", ALICE, 0, WAIT_MS), 30);
	asker_init(&b, job_of("b", BOB, 0, WAIT_MS), 30);
	nodefix_register(a.job, nodefix_spec("earlier", ELEMENTS(25)));
	nodefix_register(b.job, nodefix_spec("earlier", ELEMENTS(25)));
	cr_expect_eq(asker_ask(&a), RES_WAIT, "b may end");
	cr_expect_eq(asker_ask(&b), RES_FAILED, "a waits for what b has");
	end_job(b.job);
	tick(0);
	cr_expect_eq(a.resumed, 1);
	cr_expect_eq(asker_ask(&a), RES_DONE, "%s", a.f.text);
	nodefix_end(&fix);
}

Test(admission, a_total_of_its_group_is_a_limit_too)
{
	static const struct user_override o[] = { { true, true, 20001, USER_STATE, 30 * MIB } };
	struct user_limits limits = { .overrides = o, .n_overrides = 1 };
	static const gid_t ml[] = { 20001 };
	struct asker a, b;
	struct user *u;

	begin(1, 0);
	cr_assert_eq(users_configure(&fix.node.users, &limits), 0);
	u = users_get(&fix.node.users, BOB, ml, 1);
	asker_init(&a, job_of("large", BOB, 0, WAIT_MS), 40);
	cr_expect_eq(asker_ask(&a), RES_FAILED, "more than the total");
	cr_expect_null(a.job->mem.admission);
	asker_init(&a, job_of("half", BOB, 0, 0), 20);
	cr_expect_eq(asker_ask(&a), RES_DONE, "%s", a.f.text);
	asker_init(&b, job_of("rest", BOB, 0, WAIT_MS), 20);
	cr_expect_eq(asker_ask(&b), RES_WAIT);
	expect_why(&b, "'@20001:total_state_bytes' of user_limits leaves less than the ");
	end_job(a.job);
	tick(0);
	cr_expect_eq(b.resumed, 1);
	cr_expect_eq(asker_ask(&b), RES_DONE, "%s", b.f.text);
	user_unref(u);
	nodefix_end(&fix);
}

Test(admission, who_has_waited_long_is_not_passed_any_more)
{
	struct job *first = begin(1, 40); /* of ALICE */
	struct asker small, old, now;

	asker_init(&small, job_of("small", ALICE, 0, 0), 10);
	cr_assert_eq(asker_ask(&small), RES_DONE);
	asker_init(&old, job_of("old", ALICE, 0, WAIT_MS), 50);
	asker_init(&now, job_of("now", BOB, 0, WAIT_MS), 50);
	cr_expect_eq(asker_ask(&old), RES_WAIT);
	usleep(2000);
	cr_expect_eq(asker_ask(&now), RES_WAIT);
	end_job(first);
	old.line.until_us += ADMISSION_OLD_US;
	now.line.until_us += ADMISSION_OLD_US;
	tick(ADMISSION_OLD_US / 1000);
	cr_expect_eq(old.resumed, 1, "its owner has more than that of the other one");
	cr_expect_eq(now.resumed, 0);
	leave(&old, 1);
	leave(&now, 1);
	nodefix_end(&fix);
}

/* A rank that comes when there is memory registers the units of those that wait. */
Test(admission, ranks_that_wait_find_what_another_one_has_registered)
{
	struct job *first = begin(1, 40);
	struct job *job = job_of("second", BOB, 0, WAIT_MS);
	struct asker waits, comes;

	asker_init(&waits, job, 40);
	asker_init(&comes, job, 40);
	cr_expect_eq(asker_ask(&waits), RES_WAIT);
	end_job(first);
	cr_expect_eq(asker_ask(&comes), RES_DONE, "%s", comes.f.text);
	cr_expect_eq(waits.resumed, 1);
	cr_expect_eq(asker_ask(&waits), RES_DONE, "%s", waits.f.text);
	cr_expect_null(job->mem.admission);
	nodefix_end(&fix);
}

Test(admission, ranks_of_a_job_wait_as_one)
{
	struct job *first = begin(1, 40);
	struct asker a[3];
	struct admission_place place;
	struct job *job = job_of("second", BOB, 0, WAIT_MS);

	for (unsigned i = 0; i < 3; i++) {
		asker_init(&a[i], job, 40);
		cr_expect_eq(asker_ask(&a[i]), RES_WAIT);
	}
	cr_expect(admission_place(job, &place));
	cr_expect_eq(place.calls, 3);
	end_job(first);
	tick(0);
	cr_expect_eq(a[0].resumed, 1);
	cr_expect_eq(a[1].resumed + a[2].resumed, 0, "one asks for all");
	admission_leave(&a[0].line); /* its process has died */
	tick(2000);
	cr_expect_eq(a[1].resumed, 1, "the next one is called");
	cr_expect_eq(asker_ask(&a[1]), RES_DONE, "%s", a[1].f.text);
	cr_expect_eq(a[2].resumed, 1, "it finds the unit there");
	cr_expect_eq(asker_ask(&a[2]), RES_DONE, "%s", a[2].f.text);
	cr_expect_eq(a[1].resumed, 1);
	cr_expect_null(job->mem.admission);
	nodefix_end(&fix);
}

Test(admission, a_job_that_finds_none_after_all_waits_on)
{
	struct job *first = begin(1, 40);
	struct asker a, thief;

	asker_init(&a, job_of("second", BOB, 0, WAIT_MS), 40);
	cr_expect_eq(asker_ask(&a), RES_WAIT);
	end_job(first);
	tick(0);
	cr_assert_eq(a.resumed, 1);
	asker_init(&thief, job_of("thief", ALICE, 9, 0), 40);
	cr_expect_eq(asker_ask(&thief), RES_DONE, "a higher priority may");
	cr_expect_eq(asker_ask(&a), RES_WAIT);
	tick(0);
	cr_expect_eq(a.resumed, 1);
	end_job(thief.job);
	tick(0);
	cr_expect_eq(a.resumed, 1, "not again within a second");
	tick(1100);
	cr_expect_eq(a.resumed, 2);
	cr_expect_eq(asker_ask(&a), RES_DONE);
	nodefix_end(&fix);
}

Test(admission, the_end_of_an_epoch_calls_all_of_it)
{
	struct asker a[2];
	struct job *job;

	begin(1, 40);
	job = job_of("second", BOB, 0, WAIT_MS);
	for (unsigned i = 0; i < 2; i++) {
		asker_init(&a[i], job, 40);
		cr_expect_eq(asker_ask(&a[i]), RES_WAIT);
	}
	nodefix_drop(&fix, job->ranks[0], "is gone");
	cr_expect_eq(a[0].resumed + a[1].resumed, 2);
	leave(a, 2);
	cr_expect_null(job->mem.admission);
	nodefix_end(&fix);
}

Test(admission, a_priority_above_the_limit_is_refused)
{
	struct job_spec spec = { .name = "j", .world_size = 1, .priority = 1 };
	struct fault f = FAULT_NULL;
	struct job *job = NULL;

	begin(1, 0);
	cr_expect_eq(job_open(&fix.jobs, &spec, BOB, 1, &job, NULL, &f), FAULT_DENIED);
	cr_expect_str_eq(f.text,
			 "job.priority 1 is too high: the limit of user 10002 is 0 (priority in "
			 "user_limits, shardd.yaml)");
	spec.priority = 0;
	spec.wait_for_memory_ms = WAIT_MS + 1;
	f = FAULT_NULL;
	cr_expect_eq(job_open(&fix.jobs, &spec, BOB, 1, &job, NULL, &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "the limit is 600000 (max_wait_for_memory_ms)"), "%s", f.text);
	spec.wait_for_memory_ms = 0;
	spec.priority = -7;
	f = FAULT_NULL;
	cr_expect_eq(job_open(&fix.jobs, &spec, BOB, 1, &job, NULL, &f), 0, "%s", f.text);
	cr_expect_eq(job->rec->priority, -7);
	spec.priority = -8;
	cr_expect_eq(job_open(&fix.jobs, &spec, BOB, 1, &job, NULL, &f), FAULT_STATE);
	cr_expect(strstr(f.text, "has priority -7, not -8"), "%s", f.text);
	nodefix_end(&fix);
}

Test(admission, an_administrator_creates_a_job_for_another_user)
{
	struct job_spec spec = { .name = "10002/j", .world_size = 1, .gid = 20002 };
	struct fault f = FAULT_NULL;
	struct job *job = NULL;
	bool created = false;

	begin(1, 0);
	cr_expect_neq(job_open(&fix.jobs, &spec, ALICE, 1, &job, &created, &f), 0);
	f = FAULT_NULL;
	cr_expect_eq(job_open(&fix.jobs, &spec, 0, 0, &job, &created, &f), 0, "%s", f.text);
	cr_expect(created);
	cr_expect_eq(job->rec->uid, BOB);
	cr_expect_eq(job->rec->gid, 20002);
	cr_expect_eq(job_open(&fix.jobs, &spec, 0, 0, &job, &created, &f), 0, "%s", f.text);
	cr_expect_not(created);
	spec.gid = 0;
	spec.name = "10003/j";
	cr_expect_eq(job_open(&fix.jobs, &spec, 0, 0, &job, &created, &f), FAULT_NOT_FOUND);
	nodefix_end(&fix);
}
