/* Views of many slices: what they cost. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "publish/view.h"

/* Each slice was compared with all others after both were cut again, and named for an error that there was none of:
 * the daemon's loop stood still for ten seconds with one declaration. */
Test(view_slices, many_slices_of_one_tensor_are_cut_once, .timeout = 40)
{
	enum { N = 4000, RULES = 4, TIMES = 12 };
	static Shardd__V1__PublishedSlice slices[VIEW_MAX_SOURCES];
	static Shardd__V1__PublishedSource source[VIEW_MAX_SOURCES];
	static struct view_source many[N];
	static char names[N][24], to[RULES][24];
	Shardd__V1__PublishedSource *sources[VIEW_MAX_SOURCES];
	Shardd__V1__PublishedRule r[RULES], *rules[RULES];
	const uint64_t shape[1] = { VIEW_MAX_SOURCES };
	view_declaration p = SHARDD__V1__PUBLICATION__INIT;

	for (unsigned i = 0; i < N; i++) {
		snprintf(names[i], sizeof(names[i]), "w%u", i);
		many[i] = (struct view_source){
			.name = names[i], .shape = shape, .dims = 1, .dtype = DTYPE_FP32
		};
	}
	for (unsigned i = 0; i < VIEW_MAX_SOURCES; i++) {
		shardd__v1__published_slice__init(&slices[i]);
		shardd__v1__published_source__init(&source[i]);
		slices[i].optional_first_case = SHARDD__V1__PUBLISHED_SLICE__OPTIONAL_FIRST_FIRST;
		slices[i].first = i;
		slices[i].count = 1;
		source[i].tensor = (char *)(uintptr_t) "w{i}";
		source[i].slice = &slices[i];
		sources[i] = &source[i];
	}
	for (unsigned i = 0; i < RULES; i++) {
		shardd__v1__published_rule__init(&r[i]);
		snprintf(to[i], sizeof(to[i]), "r%u.{i}", i);
		r[i].name = to[i];
		r[i].sources = sources;
		r[i].n_sources = VIEW_MAX_SOURCES;
		rules[i] = &r[i];
	}
	p.name = (char *)(uintptr_t) "slow";
	p.rules_only = true;
	p.rules = rules;
	p.n_rules = RULES;
	for (unsigned i = 0; i < TIMES; i++) {
		struct view *v = NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(view_new(&p, many, N, &v, &f), 0, "%s: %s", f.field, f.text);
		cr_assert_eq(v->n, N * RULES);
		view_free(v);
	}
}
