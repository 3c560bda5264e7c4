/* A job of two ranks with one unit, for tests of its publications; each program has its own. */
#ifndef SHARDD_TESTS_PUBFIX_H
#define SHARDD_TESTS_PUBFIX_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "crc32c.h"
#include "delta_abi.h"
#include "fdcheck.h"
#include "job/job.h"
#include "nodefix.h"
#include "publish/publication.h"
#include "shardd.pb-c.h"

#define ELEMENTS 100000
#define BLOCK    (KERNEL_ASSEMBLE_BYTES / sizeof(float))
#define BLOCKS   4 /* of fp32, the last of which is not whole */

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];
static float committed[ELEMENTS]; /* of u, at the last commit */
static view_declaration d;

static inline void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
	shardd__v1__publication__init(&d);
	d.name = (char *)(uintptr_t) "pub";
	d.every_steps = 1;
}

static inline void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

static inline void both_ok(const char *what)
{
	nodefix_ok(&op[0], what);
	nodefix_ok(&op[1], what);
}

static inline void prepare_step(void)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", u, &op[i]);
	both_ok("Reduce");
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	both_ok("Step");
}

static inline void submit_commit(uint64_t step)
{
	uint64_t *turn = &job->owner.user->turn_at_us[USER_TURN_TABLES];

	*turn = *turn == UINT64_MAX ? *turn : 0; /* should the machine have stood still in one */
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], step, 0, &op[i]);
}

static inline void commit(uint64_t step)
{
	submit_commit(step);
	both_ok("Commit");
	memcpy(committed, nodefix_params(u), sizeof(committed));
}

static inline void train(uint64_t step)
{
	prepare_step();
	commit(step);
}

static inline struct publication *declare(void)
{
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(publication_declare(job, &d, &p, &f), 0, "%s: %s", f.field, f.text);
	return p;
}

static inline const float *elements(const struct published *g)
{
	return backend_addr(g->slab->mem);
}

static inline uint64_t memory(void)
{
	return job->quota.by_class[MEM_PUBLISHED];
}

static inline uint64_t newest(struct publication *p)
{
	nodefix_turns(&n);
	return publication_newest(p) ? publication_newest(p)->number : 0;
}

#endif
