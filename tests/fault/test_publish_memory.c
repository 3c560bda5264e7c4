/* Publications: any allocation may fail while one is declared, made and leased, and nothing is left of it. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "failmalloc.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "publish/publication.h"
#include "shardd.pb-c.h"

enum { EXPERTS = 3, SIDE = 8 };

static struct nodefix n;
static struct job *job;
static struct member *m[1];

static void begin(void)
{
	static const char *const kinds[] = { "w1", "w3" };
	const uint64_t shape[2] = { SIDE, SIDE };
	state_unit *spec;
	struct nodefix_op op;

	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 1, 0);
	m[0] = nodefix_join(&n, job, 0);
	spec = nodefix_spec("l.0", SIDE); /* l.0.weight */
	for (unsigned i = 0; i < EXPERTS * ARRAY_SIZE(kinds); i++) {
		char name[16];

		snprintf(name, sizeof(name), "e.%u.%s", i / 2, kinds[i % 2]);
		cr_assert_eq(state_unit_add_tensor(spec, state_tensor_new(name, shape, 2)), 0);
	}
	nodefix_unit(&n, job, spec, m, 1);
	NODEFIX_OK(nodefix_commit(&n, m[0], 1, 0, &op), &op);
}

static void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(publish_memory, .init = begin, .fini = end, .timeout = 60);

/* Two rules, one of which stacks; all of it has scales. */
static Shardd__V1__PublishedSource sources[3];
static Shardd__V1__PublishedSource *stacked[2] = { &sources[0], &sources[1] },
				   *renamed[1] = { &sources[2] };
static Shardd__V1__PublishedRule rules[2], *both[2] = { &rules[0], &rules[1] };
static view_declaration d;

static void make_declaration(void)
{
	static char *also[] = { (char *)(uintptr_t) "tied" };

	for (unsigned i = 0; i < 3; i++)
		shardd__v1__published_source__init(&sources[i]);
	sources[0].tensor = (char *)(uintptr_t) "l.{i}.e.{e}.w1";
	sources[1].tensor = (char *)(uintptr_t) "l.{i}.e.{e}.w3";
	sources[2].tensor = (char *)(uintptr_t) "l.{i}.weight";
	for (unsigned i = 0; i < 2; i++)
		shardd__v1__published_rule__init(&rules[i]);
	rules[0].name = (char *)(uintptr_t) "l.{i}.w13";
	rules[0].stack = (char *)(uintptr_t) "e";
	rules[0].sources = stacked;
	rules[0].n_sources = 2;
	rules[1].name = (char *)(uintptr_t) "norm.{i}";
	rules[1].sources = renamed;
	rules[1].n_sources = 1;
	rules[1].also = also;
	rules[1].n_also = 1;
	shardd__v1__publication__init(&d);
	d.name = (char *)(uintptr_t) "pub";
	d.type = SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3;
	d.rules = both;
	d.n_rules = 2;
}

/* Declare it, have a generation made, and lease it. Return: did all of that come about? */
static bool publishes(struct publication **ret)
{
	struct publication_lease *l;
	struct fault f = FAULT_NULL;

	*ret = NULL;
	if (publication_declare(job, &d, ret, &f)) {
		cr_assert_eq(f.code, FAULT_EXHAUSTED, "%s: %s", fault_code_name(f.code), f.text);
		return false;
	}
	publication_want(*ret);
	nodefix_turns(&n);
	if (!publication_newest(*ret)) {
		cr_assert_eq((*ret)->counts.failed, 1);
		cr_assert(strstr((*ret)->why, "no memory"), "%s", (*ret)->why);
		return false;
	}
	l = publication_lease(publication_newest(*ret));
	publication_release(l);
	return l;
}

Test(publish_memory, any_allocation_may_fail)
{
	unsigned failed = 0;
	bool hit;

	make_declaration();
	for (unsigned i = 1;; i++) {
		struct publication *p;
		bool well;

		failmalloc_in(i);
		well = publishes(&p);
		hit = failmalloc_hit();
		failmalloc_in(0);
		cr_assert_eq(well, !hit, "allocation %u", i);
		if (well) {
			const struct view *v = p->assembly->view;

			cr_assert_eq(v->n, 6); /* l.0.w13, norm.0, tied, and their scales */
			cr_assert_eq(v->tensors[0].shape[0], EXPERTS);
		}
		if (p)
			publication_drop(p);
		nodefix_turns(&n);
		cr_assert_null(publication_find(job, "pub"));
		cr_assert_eq(job->quota.by_class[MEM_PUBLISHED], 0);
		if (!hit)
			break;
		failed++;
	}
	cr_assert_gt(failed, 20);
}
