/* Publications of type e4m3: their generations are made in passes, while training goes on. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "convert.h"
#include "core/check.h"
#include "fdcheck.h"
#include "job/job.h"
#include "nodefix.h"
#include "publish/publication.h"
#include "shardd.pb-c.h"

enum {
	COLUMNS = 100,
	ROWS = 1000,
	ELEMENTS = ROWS * COLUMNS,
	LARGE_BLOCKS = 320,
	TASK_BLOCKS = 32,
	TASKS = LARGE_BLOCKS / TASK_BLOCKS
};

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];
static view_declaration d;
static bool held; /* completions come one by one */

static void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
	shardd__v1__publication__init(&d);
	d.name = (char *)(uintptr_t) "pub";
	d.type = SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3;
}

static void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(publication_e4m3, .init = begin, .fini = end, .timeout = 60);

static struct backend *fake(void)
{
	return n.node.devices[0].backend;
}

static void hold(bool how)
{
	held = how;
	backend_fake_hold(fake(), how);
}

/* Let completions through one by one until @o is over. */
static void step_until_over(struct nodefix_op *o)
{
	for (unsigned i = 0; i < 1000 && !o->over; i++) {
		nodefix_turn(&n);
		if (held)
			backend_fake_step(fake());
	}
	nodefix_ok(o, "op");
}

static void both_over(void)
{
	step_until_over(&op[0]);
	step_until_over(&op[1]);
}

/* All of a step but itself. */
static void prepare_step(void)
{
	for (unsigned i = 0; i < 2; i++) {
		nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]);
		step_until_over(&op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", u, &op[i]);
	both_over();
}

static void step(void)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	both_over();
}

static void commit(uint64_t number)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], number, 0, &op[i]);
	both_over();
}

static struct publication *declare(void)
{
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(publication_declare(job, &d, &p, &f), 0, "%s: %s", f.field, f.text);
	return p;
}

static const void *data_of(const struct published *g, const char *name)
{
	const struct view *v = g->assembly->view;

	for (uint32_t i = 0; i < v->n; i++)
		if (!strcmp(v->tensors[i].name, name))
			return (const char *)backend_addr(g->slab->mem) + v->tensors[i].offset;
	cr_assert_fail("no tensor %s", name);
	return NULL;
}

/* u with one scale is what @want gives. */
static void check_u(const struct published *g, const float *want)
{
	const uint8_t *codes = data_of(g, "u.weight");
	const float *scale = data_of(g, "u.weight_scale");
	float max = 0;

	for (unsigned i = 0; i < ELEMENTS; i++)
		max = fmaxf(max, fabsf(want[i]));
	cr_assert_gt(max, 0);
	cr_assert_eq(*scale, max / 448);
	for (unsigned i = 0; i < ELEMENTS; i++)
		cr_assert_eq(codes[i], e4m3_from_f32(want[i] / (max / 448)), "element %u", i);
}

static void register_large(void)
{
	state_unit *spec =
		nodefix_spec("large", LARGE_BLOCKS * (uint64_t)KERNEL_ASSEMBLE_BYTES / 4);

	spec->tensors[0]->frozen = true;
	nodefix_unit(&n, job, spec, m, 2);
}

/* A step comes while the largest values are looked for: it waits until all passes are over, which then hurry. Values
 * and scale are of the step before. */
Test(publication_e4m3, a_step_waits_in_the_first_pass)
{
	static float before[ELEMENTS];
	struct publication *p;
	const struct published *g;

	register_large();
	prepare_step();
	step();
	commit(1);
	p = declare();
	memcpy(before, nodefix_params(u), sizeof(before));
	hold(true);
	publication_want(p);
	prepare_step();
	cr_assert(making_is_busy(job));
	cr_assert_eq(p->making.passes[p->making.at_pass].pass, K_ASSEMBLE_MEASURE,
		     "most of the first pass is still to do");
	step();
	commit(2);
	hold(false);
	nodefix_turns(&n);
	g = &p->buffers[0];
	cr_assert_eq(g->state, PUBLISHED_READY);
	cr_assert_eq(g->step, 1);
	cr_assert_neq(memcmp(nodefix_params(u), before, sizeof(before)), 0);
	check_u(g, before);
}

/* In place of a step that would do it. */
static void set(unsigned i, float to)
{
	((float *)(uintptr_t)nodefix_params(u))[i] = to;
}

/* The scales of a generation know nothing of those before: they shrink, too. */
Test(publication_e4m3, scales_are_of_their_generation_alone)
{
	struct publication *p;

	set(17, 1000);
	commit(1);
	p = declare();
	publication_want(p);
	nodefix_turns(&n);
	check_u(publication_newest(p), nodefix_params(u));
	set(17, 0);
	commit(2);
	publication_want(p);
	nodefix_turns(&n);
	cr_assert_eq(publication_newest(p)->step, 2);
	check_u(publication_newest(p), nodefix_params(u));
}

/* A publication that is dropped in the first pass ends there. */
Test(publication_e4m3, a_drop_ends_the_first_pass)
{
	struct publication *p;

	register_large();
	prepare_step();
	step();
	commit(1);
	p = declare();
	hold(true);
	publication_want(p);
	cr_assert(making_is_busy(job));
	publication_drop(p);
	for (unsigned i = 0; i < 3; i++) {
		nodefix_turn(&n);
		backend_fake_step(fake());
	}
	nodefix_turn(&n);
	cr_assert_not(making_is_busy(job), "of %u tasks a few were enough", 2 * TASKS);
	hold(false);
}

/* What the daemon keeps for scales is in its account. */
Test(publication_e4m3, memory_of_scales_is_counted)
{
	static const struct assembly_scales none;
	struct publication *p;
	struct assembly_scales *scales;
	uint64_t with, without;

	p = declare();
	scales = p->assembly->scales;
	cr_assert_eq(scales->n_amax, 1);
	cr_assert_eq(scales->n_measured, 4);
	with = assembly_own_bytes(p->assembly);
	p->assembly->scales = NULL;
	without = assembly_own_bytes(p->assembly);
	p->assembly->scales = scales;
	cr_assert_geq(with - without, sizeof(none) + 5 * sizeof(struct k_assemble_block));
}
