/*
 * What the tests of elastic jobs have in common: a job of four ranks, its processes by the numbers that they
 * were started with, and a clock that they move.
 */
#ifndef SHARDD_TESTS_ELASTICFIX_H
#define SHARDD_TESTS_ELASTICFIX_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "job/elastic.h"
#include "job/kept.h"
#include "job/launched.h"
#include "job/resize.h"
#include "journalfix.h"
#include "nodefix.h"

enum { MOST = 8, GRACE_MS = 5000, ELEMENTS = 100 };

/* A process: its number, what it holds in the job, and how it waits outside. */
struct process {
	struct member *m; /* NULL: in no job */
	struct elastic_newcomer newcomer;
};

struct fixture {
	struct nodefix n;
	struct job *job;
	uint32_t launched;
	struct process p[MOST];
	struct nodefix_op op[MOST];
	uint64_t now_us;
	bool returns; /* those that join have been in the job before */
};

static inline void advance(struct fixture *x, uint64_t ms)
{
	x->now_us += ms * 1000;
	clock_fake(x->now_us);
	jobs_tick(&x->n.jobs, x->now_us);
	nodefix_turns(&x->n);
}

static inline enum res try_join(struct fixture *x, uint32_t number, struct fault *f)
{
	struct process *p = &x->p[number];
	const struct job_joining how = { .rank = number,
					 .world_size = x->launched,
					 .device = "",
					 .returns = x->returns,
					 .newcomer = &p->newcomer };
	struct member *m = NULL;
	enum res r;

	*f = FAULT_NULL;
	r = job_join(x->job, &how, x->n.proc, number + 1, p->m, &m, f);
	if (r != RES_WAIT)
		elastic_newcomer_leave(&p->newcomer);
	if (r != RES_DONE || m == p->m)
		return r;
	if (p->m)
		nodefix_drop(&x->n, p->m, "joined as another member");
	p->m = m;
	CHECK(x->n.n_members < NODEFIX_MEMBERS);
	x->n.members[x->n.n_members++] = m;
	return r;
}

static inline void join(struct fixture *x, uint32_t number, uint32_t rank)
{
	struct fault f;

	cr_assert_eq(try_join(x, number, &f), RES_DONE, "process %u: %s", number, f.text);
	cr_assert_eq(x->p[number].m->rank, rank, "process %u is rank %u, not %u", number,
		     x->p[number].m->rank, rank);
	cr_assert_eq(x->job->ranks[rank], x->p[number].m);
}

static inline void waits(struct fixture *x, uint32_t number)
{
	struct fault f;

	cr_assert_eq(try_join(x, number, &f), RES_WAIT, "process %u: %s", number, f.text);
}

static inline void refused(struct fixture *x, uint32_t number, enum fault_code code,
			   const char *words)
{
	struct fault f;

	cr_assert_eq(try_join(x, number, &f), RES_FAILED, "process %u", number);
	cr_expect_eq(f.code, code, "%s", f.text);
	cr_expect(strstr(f.text, words), "%s: %s", words, f.text);
}

static inline void dies(struct fixture *x, uint32_t number)
{
	nodefix_drop(&x->n, x->p[number].m, "died");
	x->p[number].m = NULL;
	nodefix_turns(&x->n);
}

/* The job, without any rank. */
static inline void setup_job(struct fixture *x, const struct job_spec *more, unsigned devices)
{
	struct job_spec spec = *more;
	struct fault f = FAULT_NULL;

	*x = (struct fixture){ .launched = 4, .now_us = 1000000000 };
	clock_fake(x->now_us);
	nodefix_begin(&x->n, &(struct nodefix_options){ .devices = devices });
	spec.name = "job";
	spec.world_size = 4;
	spec.lifetime = JOB_KEEP;
	spec.max_ranks = MOST;
	spec.join_grace_ms = GRACE_MS;
	cr_assert_eq(job_open(&x->n.jobs, &spec, getuid(), getgid(), &x->job, NULL, &f), 0, "%s",
		     f.text);
	for (uint32_t i = 0; i < MOST; i++)
		elastic_newcomer_init(&x->p[i].newcomer);
}

static inline void setup(struct fixture *x, const struct job_spec *more, unsigned devices)
{
	setup_job(x, more, devices);
	for (uint32_t i = 0; i < 4; i++)
		join(x, i, i);
}

static inline void begin(struct fixture *x)
{
	setup(x, &(struct job_spec){ .min_ranks = 2 }, 1);
}

static inline void end(struct fixture *x)
{
	for (uint32_t i = 0; i < MOST; i++)
		elastic_newcomer_leave(&x->p[i].newcomer);
	nodefix_end(&x->n);
}

static inline void expect_world(struct fixture *x, uint32_t world)
{
	cr_assert_eq(x->job->rec->world_size, world, "world size %u, not %u",
		     x->job->rec->world_size, world);
	cr_assert_not(resize_is_busy(x->job));
}

static inline void expect_words(const struct fixture *x, const char *words)
{
	char text[400];
	uint64_t ms;

	elastic_describe(x->job, text, sizeof(text), &ms);
	if (*words)
		cr_expect(strstr(text, words), "%s: %s", words, text);
	else
		cr_expect_str_eq(text, "");
}

/* The same op on all ranks. */
#define ON_ALL(x, call)                                        \
	do {                                                   \
		uint32_t world = (x)->job->rec->world_size;    \
		for (uint32_t r = 0; r < world; r++) {         \
			struct nodefix_op *op = &(x)->op[r];   \
			struct member *m = (x)->job->ranks[r]; \
			call;                                  \
		}                                              \
		for (uint32_t r = 0; r < world; r++)           \
			nodefix_ok(&(x)->op[r], #call);        \
	} while (0)

static inline struct unit *make_unit(struct fixture *x, state_unit *spec)
{
	struct unit *u = nodefix_register(x->job, spec);

	ON_ALL(x, nodefix_seed(&x->n, m, u, 1, op));
	return u;
}

/* Blobs have 10 bytes, and one for each that the process's number is. */
static inline void step(struct fixture *x, struct unit *u, uint64_t number)
{
	ON_ALL(x, nodefix_on_unit(&x->n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < x->job->rec->world_size; r++)
		nodefix_write(&x->op[r].result.place, 1);
	ON_ALL(x, nodefix_on_unit(&x->n, m, "Reduce", u, op));
	ON_ALL(x, nodefix_step(&x->n, m, op));
	ON_ALL(x, nodefix_commit(&x->n, m, number, 10 + launched_number(x->job, r), op));
	nodefix_turns(&x->n);
}

static inline size_t blob_of(const struct fixture *x, uint32_t rank)
{
	const state_blob *b = state_job_blob(x->job->rec, rank);

	return b ? b->data.len : 0;
}

static inline void expect_sound(struct fixture *x)
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
	journalfix_check(&x->n.jobs);
}

static inline struct unit *shrunk(struct fixture *x)
{
	struct unit *u;

	begin(x);
	u = make_unit(x, nodefix_spec("u", ELEMENTS));
	step(x, u, 1);
	dies(x, 2);
	for (uint32_t i = 0; i < 4; i++)
		if (i != 2)
			join(x, i, i);
	advance(x, GRACE_MS);
	join(x, 0, 0);
	join(x, 1, 1);
	join(x, 3, 2);
	return u;
}

#endif
