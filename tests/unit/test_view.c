/*
 * Views: what a declaration makes of tensors, computed here by the plain meaning of each transform, on
 * whole tensors, one after the other; and what is refused, with which words.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "publish/pattern.h"
#include "publish/published_readers.h"
#include "publish/view.h"

TestSuite(view, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30);

typedef Shardd__V1__PublishedRule rule;
typedef Shardd__V1__PublishedSource rule_source;
typedef Shardd__V1__PublishedSlice slice;

/* ------------------------------------------------------------------------- patterns */

Test(view, patterns_match_by_component)
{
	static const struct {
		const char *pattern, *name, *expand, *gives; /* gives NULL: it does not match */
	} rows[] = {
		{ "a.b", "a.b", "x", "x" },
		{ "a.b", "a.bc", "x", NULL },
		{ "h.{i}.w", "h.12.w", "layers.{i}", "layers.12" },
		{ "h.{i}.w", "h.1.2.w", "", NULL },
		{ "h.{i}.w", "h..w", "", NULL },
		{ "h.{i...}.w", "h.1.2.w", "{i}", "1.2" },
		{ "m.{r...}", "m.a.b.c", "{r}", "a.b.c" },
		{ "m.{r...}", "m.", "", NULL },
		{ "{a}_proj.{r...}", "q_proj.w", "{r}|{a}", "w|q" },
		{ "h.{i}.x.{i}", "h.3.x.3", "{i}", "3" },
		{ "h.{i}.x.{i}", "h.3.x.4", "", NULL },
		{ "w{e}.p", "w10.p", "{e}", "10" },
		{ "{r...}.0.w", "a.0.0.w", "{r}", "a.0" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		struct pattern_values values = { .n = 0 };
		struct fault f = FAULT_NULL;
		bool matches = pattern_match(rows[i].pattern, rows[i].name, &values);

		cr_assert_eq(pattern_check(rows[i].pattern, "p", &f), 0, "%s", rows[i].pattern);
		cr_assert_eq(matches, rows[i].gives != NULL, "%s of %s", rows[i].pattern,
			     rows[i].name);
		if (matches) {
			char *made = pattern_expand(rows[i].expand, &values);

			cr_assert_str_eq(made, rows[i].gives);
			free(made);
		}
	}
}

Test(view, patterns_that_are_refused)
{
	static const char *const rows[] = { "",
					    "a{",
					    "a}b",
					    "{a{b}}",
					    "{}",
					    "{a-b}",
					    "{...}",
					    "{a}{b}",
					    "{a}x{b}.w",
					    "{a...}.{b...}",
					    "{a}.{b}.{c}.{d}.{e}.{f}.{g}.{h}.{i}" };

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(pattern_check(rows[i], "p", &f), FAULT_INVALID, "%s", rows[i]);
		cr_assert_str_eq(f.field, "p");
	}
}

/* A name of 512 bytes against a pattern that almost matches: found by its square, not by 2 to its power. */
Test(view, patterns_are_fast_where_they_do_not_match, .timeout = 5)
{
	char name[PATTERN_MAX_BYTES + 1];
	struct pattern_values values = { .n = 0 };

	for (unsigned i = 0; i < PATTERN_MAX_BYTES; i++)
		name[i] = i % 2 ? '.' : 'a';
	name[PATTERN_MAX_BYTES] = '\0';
	for (unsigned i = 0; i < 1000; i++)
		cr_assert_not(pattern_match("{a...}.a{b}.{c}.{d}.{e}.{f}.{g}.{h}z", name, &values));
}

/* ---------------------------------------------------------------------- declarations */

enum { MAX = 8, ELEMENTS = 4096 };

/* A declaration that is put together field by field. */
struct made {
	view_declaration p;
	rule rules[MAX], *rule_at[MAX];
	rule_source sources[MAX][MAX], *source_at[MAX][MAX];
	slice slices[MAX][MAX];
};

static rule *add_rule(struct made *m, const char *name)
{
	rule *r = &m->rules[m->p.n_rules];

	shardd__v1__published_rule__init(r);
	r->name = (char *)(uintptr_t)name;
	r->sources = m->source_at[m->p.n_rules];
	m->rule_at[m->p.n_rules] = r;
	m->p.rules = m->rule_at;
	m->p.n_rules++;
	return r;
}

static rule_source *add_source(struct made *m, const char *tensor)
{
	unsigned k = (unsigned)m->p.n_rules - 1;
	rule *r = &m->rules[k];
	rule_source *s = &m->sources[k][r->n_sources];

	shardd__v1__published_source__init(s);
	s->tensor = (char *)(uintptr_t)tensor;
	r->sources[r->n_sources++] = s;
	return s;
}

static slice *cut(struct made *m, uint32_t dim)
{
	unsigned k = (unsigned)m->p.n_rules - 1, i = (unsigned)m->rules[k].n_sources - 1;
	slice *s = &m->slices[k][i];

	shardd__v1__published_slice__init(s);
	s->dim = dim;
	m->sources[k][i].slice = s;
	return s;
}

static void begin(struct made *m)
{
	memset(m, 0, sizeof(*m));
	shardd__v1__publication__init(&m->p);
	m->p.name = (char *)(uintptr_t) "pub";
}

/* Tensors whose elements are their numbers, 1000 apart. */
struct model {
	struct view_source sources[MAX];
	uint64_t shapes[MAX][VIEW_MAX_DIMS];
	float data[MAX][ELEMENTS];
	unsigned n;
};

static void add_tensor(struct model *m, const char *name, uint32_t dims, uint64_t a, uint64_t b,
		       uint64_t c)
{
	const uint64_t shape[3] = { a, b, c };

	memcpy(m->shapes[m->n], shape, sizeof(shape));
	m->sources[m->n] = (struct view_source){
		.name = name, .shape = m->shapes[m->n], .dims = dims, .dtype = DTYPE_FP32
	};
	for (unsigned i = 0; i < ELEMENTS; i++)
		m->data[m->n][i] = (float)(m->n * 10000 + i);
	m->n++;
}

static struct view *view_of(const struct made *d, const struct model *m)
{
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(view_new(&d->p, m->sources, m->n, &v, &f), 0, "%s: %s", f.field, f.text);
	return v;
}

static const struct view_tensor *tensor(const struct view *v, const char *name)
{
	for (uint32_t i = 0; i < v->n; i++)
		if (!strcmp(v->tensors[i].name, name))
			return &v->tensors[i];
	cr_assert_fail("no tensor %s", name);
	return NULL;
}

/* What its boxes make of it, -1 where there is none; each element is in one box at most. */
static void fill(const struct view *v, const struct view_tensor *t, const struct model *m,
		 float *ret)
{
	for (uint64_t e = 0; e < t->elements; e++)
		ret[e] = -1;
	for (uint32_t i = 0; i < t->n_boxes; i++) {
		const struct view_box *x = &v->boxes[t->first_box + i];
		uint64_t n = x->n[0] * x->n[1] * x->n[2];

		for (uint64_t e = 0; e < n; e++) {
			uint64_t c = e % x->n[2], b = e / x->n[2] % x->n[1],
				 a = e / x->n[2] / x->n[1];
			uint64_t to = x->at + a * x->dst_stride[0] + b * x->dst_stride[1] + c;
			uint64_t from = x->from + a * x->src_stride[0] + b * x->src_stride[1] +
					c * x->src_stride[2];

			cr_assert_lt(to, t->elements);
			cr_assert_eq(ret[to], -1, "element %llu twice", (unsigned long long)to);
			ret[to] = m->data[x->source][from];
		}
	}
}

/* Rows of q, k, v of rank 1 of 2, one below the other; k has one head less than there are ranks. */
Test(view, joins_the_rows_of_a_rank)
{
	static struct model m;
	static struct made d;
	float got[ELEMENTS];
	const struct view_tensor *t;
	struct view *v;

	m.n = 0;
	add_tensor(&m, "model.layers.0.q.weight", 2, 8, 5, 0);
	add_tensor(&m, "model.layers.0.k.weight", 2, 4, 5, 0);
	add_tensor(&m, "model.layers.0.norm", 1, 7, 0, 0);
	begin(&d);
	d.p.tp_size = 2;
	d.p.tp_rank = 1;
	d.p.type = SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_BF16;
	add_rule(&d, "layers.{i}.qk.{w}");
	add_source(&d, "model.layers.{i}.q.{w}");
	cut(&d, 0);
	add_source(&d, "model.layers.{i}.k.{w}");
	cut(&d, 0)->parts_at_most = 1;
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 2);
	t = tensor(v, "layers.0.qk.weight");
	cr_assert_eq(t->dims, 2);
	cr_assert_eq(t->shape[0], 8);
	cr_assert_eq(t->shape[1], 5);
	cr_assert_eq(t->dtype, DTYPE_BF16);
	cr_assert_eq(t->bytes, 80);
	fill(v, t, &m, got);
	for (unsigned r = 0; r < 8; r++)
		for (unsigned c = 0; c < 5; c++)
			cr_assert_eq(got[r * 5 + c], r < 4 ? m.data[0][(r + 4) * 5 + c]
							   : m.data[1][(r - 4) * 5 + c]);
	/* what no rule names is there as it is */
	t = tensor(v, "model.layers.0.norm");
	cr_assert_eq(t->offset % VIEW_ALIGN, 0);
	cr_assert_eq(t->n_boxes, 1);
	fill(v, t, &m, got);
	cr_assert_arr_eq(got, m.data[2], 7 * sizeof(float));
	view_free(v);
}

/* A vocabulary of 5 that is padded to 6 and cut in two: the last part is shorter, and is padded. */
Test(view, ranges_are_cut)
{
	static struct model m;
	static struct made d;
	float got[ELEMENTS];
	const struct view_tensor *t;
	struct view *v;

	m.n = 0;
	add_tensor(&m, "n", 2, 5, 3, 0);
	begin(&d);
	d.p.rules_only = true;
	add_rule(&d, "last")->pad_multiple = 3;
	add_source(&d, "n");
	*cut(&d, 0) = (slice){ .base = d.slices[0][0].base, .first = 3, .count = 2 };
	v = view_of(&d, &m);
	t = tensor(v, "last");
	cr_assert_eq(t->shape[0], 3);
	cr_assert(t->gaps);
	fill(v, t, &m, got);
	for (unsigned i = 0; i < 9; i++)
		cr_assert_eq(got[i], i < 6 ? m.data[0][9 + i] : -1);
	view_free(v);
}

/* Columns of a middle dimension, joined along another one, transposed, padded, and under two names. */
Test(view, transforms_have_their_plain_meaning)
{
	static struct model m;
	static struct made d;
	float got[ELEMENTS];
	const struct view_tensor *t;
	struct view *v;

	m.n = 0;
	add_tensor(&m, "a", 3, 3, 4, 5);
	add_tensor(&m, "b", 3, 3, 2, 5);
	add_tensor(&m, "c", 2, 6, 7, 0);
	begin(&d);
	d.p.rules_only = true;
	add_rule(&d, "ab")->join_dim = 2; /* a[:, 2:4, :] beside b */
	add_source(&d, "a");
	*cut(&d, 1) =
		(slice){ .base = d.slices[0][0].base,
			 .dim = 1,
			 .parts = 2,
			 .optional_part_case = SHARDD__V1__PUBLISHED_SLICE__OPTIONAL_PART_PART,
			 .part = 1 };
	add_source(&d, "b");
	rule *r = add_rule(&d, "ct");
	r->pad_dim = 0;
	r->pad_multiple = 8;
	r->type = SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_FP16;
	char *also[] = { (char *)(uintptr_t) "tied" };
	r->also = also;
	r->n_also = 1;
	add_source(&d, "c")->transpose = true;
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 3);
	t = tensor(v, "ab");
	cr_assert_eq(t->elements, 3 * 2 * 10);
	fill(v, t, &m, got);
	for (unsigned i = 0; i < 3; i++)
		for (unsigned j = 0; j < 2; j++)
			for (unsigned k = 0; k < 10; k++)
				cr_assert_eq(got[(i * 2 + j) * 10 + k],
					     k < 5 ? m.data[0][(i * 4 + j + 2) * 5 + k]
						   : m.data[1][(i * 2 + j) * 5 + k - 5]);
	t = tensor(v, "ct");
	cr_assert(t->gaps);
	cr_assert_eq(t->shape[0], 8);
	cr_assert_eq(t->shape[1], 6);
	cr_assert_eq(t->dtype, DTYPE_FP16);
	fill(v, t, &m, got);
	for (unsigned i = 0; i < 8; i++)
		for (unsigned j = 0; j < 6; j++)
			cr_assert_eq(got[i * 6 + j], i < 7 ? m.data[2][j * 7 + i] : -1);
	cr_assert_eq(tensor(v, "tied")->offset, t->offset);
	cr_assert_eq(v->bytes, 256 + 256);
	view_free(v);
}

/* Mixtral's experts: w1 above w3, of all of them, along a new first dimension; 10 comes behind 9. */
Test(view, stacks_experts_by_number)
{
	static struct made d;
	static struct view_source many[24];
	static char names[24][32];
	const uint64_t shape[2] = { 2, 3 };
	const struct view_tensor *t;
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	for (unsigned i = 0; i < 24; i++) {
		snprintf(names[i], sizeof(names[i]), "l.0.e.%u.w%u", i / 2, i % 2 ? 3 : 1);
		many[i] = (struct view_source){
			.name = names[i], .shape = shape, .dims = 2, .dtype = DTYPE_FP32
		};
	}
	begin(&d);
	rule *r = add_rule(&d, "l.{i}.w13");
	r->stack = (char *)(uintptr_t) "e";
	add_source(&d, "l.{i}.e.{e}.w1");
	add_source(&d, "l.{i}.e.{e}.w3");
	cr_assert_eq(view_new(&d.p, many, 24, &v, &f), 0, "%s", f.text);
	cr_assert_eq(v->n, 1);
	t = tensor(v, "l.0.w13");
	cr_assert_eq(t->dims, 3);
	cr_assert_eq(t->shape[0], 12);
	cr_assert_eq(t->shape[1], 4);
	cr_assert_eq(t->shape[2], 3);
	cr_assert_eq(t->n_boxes, 24);
	for (uint32_t i = 0; i < 24; i++) {
		const struct view_box *x = &v->boxes[t->first_box + i];

		cr_assert_eq(x->source, i);
		cr_assert_eq(x->at, i * 6);
		cr_assert_eq(x->n[2], 6);
	}
	view_free(v);
	/* one is missing: those behind it would silently not be there */
	f = FAULT_NULL;
	names[8][6] = 'x'; /* of 4 */
	names[9][6] = 'x';
	cr_assert_eq(view_new(&d.p, many, 24, &v, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "rules[0].stack");
	cr_assert(strstr(f.text, "0, 1, and so on without a gap"), "%s", f.text);
}

/* A parameter whose dimensions lie in another order in memory. */
Test(view, strides_of_a_source_are_followed)
{
	static struct model m;
	static struct made d;
	static const uint64_t strides[2] = { 1, 6 };
	float got[ELEMENTS];
	struct view *v;

	m.n = 0;
	add_tensor(&m, "a", 2, 6, 4, 0);
	m.sources[0].strides = strides;
	begin(&d);
	v = view_of(&d, &m);
	fill(v, tensor(v, "a"), &m, got);
	for (unsigned i = 0; i < 6; i++)
		for (unsigned j = 0; j < 4; j++)
			cr_assert_eq(got[i * 4 + j], m.data[0][j * 6 + i]);
	view_free(v);
}

/* ------------------------------------------------------------------------- refusals */

static void refused(const struct made *d, const struct model *m, const char *field,
		    const char *text)
{
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(view_new(&d->p, m->sources, m->n, &v, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, field, "%s: %s", f.field, f.text);
	cr_assert(strstr(f.text, text), "%s: %s", f.field, f.text);
	cr_assert_null(v);
}

static void model_of_four(struct model *m)
{
	m->n = 0;
	add_tensor(m, "l.0.q", 2, 6, 4, 0);
	add_tensor(m, "l.0.k", 2, 4, 4, 0);
	add_tensor(m, "l.1.q", 2, 6, 4, 0);
	add_tensor(m, "n", 1, 5, 0, 0);
}

Test(view, wrong_names_are_refused)
{
	static struct model m;
	static struct made d;

	model_of_four(&m);
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "l.0.z");
	refused(&d, &m, "rules[0].sources[0].tensor", "the job has no tensor 'l.0.z'");
	d.rules[0].optional = true;
	view_free(view_of(&d, &m));
	begin(&d);
	add_rule(&d, "l.{i}.qk");
	add_source(&d, "l.{i}.q");
	add_source(&d, "l.{i}.k"); /* there is no l.1.k */
	refused(&d, &m, "rules[0].sources[1].tensor", "no tensor 'l.1.k', which goes with");
	begin(&d);
	add_rule(&d, "l.q"); /* of both layers */
	add_source(&d, "l.{i}.q");
	refused(&d, &m, "rules", "two published tensors have the name 'l.q'");
	begin(&d);
	add_rule(&d, "l.{j}.q");
	add_source(&d, "l.{i}.q");
	refused(&d, &m, "rules[0].name", "{j} of 'l.{j}.q' is not in the first source");
	begin(&d);
	add_rule(&d, "l.{i}.q");
	add_source(&d, "l.{i}.q");
	refused(&d, &(struct model){ .n = 0 }, "rules[0].sources[0].tensor",
		"no tensor 'l.{i}.q': it has none yet");
	begin(&d);
	d.p.rules_only = true;
	refused(&d, &m, "rules", "nothing is published");
	begin(&d);
	d.p.name = (char *)(uintptr_t) "a/b";
	refused(&d, &m, "name", "the name 'a/b' is not possible");
	begin(&d);
	add_rule(&d, "")->join_dim = 1;
	add_source(&d, "n");
	refused(&d, &m, "rules[0].name", "a rule without a name publishes nothing");
	m.sources[1].name = "n"; /* two of them */
	begin(&d);
	refused(&d, &m, "rules", "several units have a tensor 'n'");
}

Test(view, wrong_shapes_are_refused)
{
	static struct model m;
	static struct made d;

	model_of_four(&m);
	begin(&d);
	add_rule(&d, "x")->join_dim = 1;
	add_source(&d, "l.0.q");
	add_source(&d, "l.0.k");
	refused(&d, &m, "rules[0]",
		"'l.0.k' gives 4x4, which does not fit what comes before it, 6x4");
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "n")->transpose = true;
	refused(&d, &m, "rules[0].sources[0].transpose", "'n' has 1 dimensions; only a matrix");
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "n");
	cut(&d, 1);
	refused(&d, &m, "rules[0].sources[0].slice", "there is no dimension 1");
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "n");
	cut(&d, 0)->parts = 2;
	refused(&d, &m, "rules[0].sources[0].slice", "parts is 2, and part is not given");
	d.slices[0][0].optional_part_case = SHARDD__V1__PUBLISHED_SLICE__OPTIONAL_PART_PART;
	refused(&d, &m, "rules[0].sources[0].slice", "is 5, which is not a multiple of 2 parts");
	d.slices[0][0].part = 2;
	refused(&d, &m, "rules[0].sources[0].slice", "part 2 is out of range (0..1)");
	d.slices[0][0].parts = 0;
	refused(&d, &m, "rules[0].sources[0].slice", "part is 2, and parts is not given");
	d.slices[0][0].count = 2;
	refused(&d, &m, "rules[0].sources[0].slice", "a range (first, count) has no parts");
	d.slices[0][0].optional_part_case = SHARDD__V1__PUBLISHED_SLICE__OPTIONAL_PART__NOT_SET;
	d.slices[0][0].first = 4;
	refused(&d, &m, "rules[0].sources[0].slice", "'n' is 5; 2 from 4 on are out of range");
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "n");
	*cut(&d, 0) = (slice){ .base = d.slices[0][0].base, .count = 3 };
	add_source(&d, "n");
	*cut(&d, 0) = (slice){ .base = d.slices[0][0].base, .first = 2, .count = 2 };
	refused(&d, &m, "rules[0].sources[1].slice", "it overlaps what source 0 takes of 'n'");
	d.slices[0][0].count = 2;
	view_free(view_of(&d, &m));
	d.sources[0][0].slice = NULL;
	refused(&d, &m, "rules[0].sources[1].slice", "it overlaps what source 0 takes of 'n'");
	d.sources[0][1].slice = NULL; /* one tensor twice, as a whole */
	view_free(view_of(&d, &m));
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "n");
	*cut(&d, 0) = (slice){ .base = d.slices[0][0].base, .first = 4, .count = UINT64_MAX };
	refused(&d, &m, "rules[0].sources[0].slice", "out of range");
	d.slices[0][0].first = UINT64_MAX;
	refused(&d, &m, "rules[0].sources[0].slice", "out of range");
	d.slices[0][0].optional_first_case = SHARDD__V1__PUBLISHED_SLICE__OPTIONAL_FIRST_FIRST;
	d.slices[0][0].count = 0;
	refused(&d, &m, "rules[0].sources[0].slice", "needs count");
	d.slices[0][0].first = 0;
	refused(&d, &m, "rules[0].sources[0].slice", "first 0 needs count");
	begin(&d);
	d.p.tp_size = 4;
	d.p.tp_rank = 4;
	refused(&d, &m, "tp_rank", "tp_rank 4 is out of range (0..3)");
	begin(&d);
	add_rule(&d, "x")->pad_dim = 1;
	add_source(&d, "n");
	refused(&d, &m, "rules[0].pad_dim", "needs pad_multiple");
	d.rules[0].pad_multiple = 4;
	refused(&d, &m, "rules[0].pad_dim", "there is no dimension 1");
	begin(&d);
	add_rule(&d, "x")->type = 77;
	add_source(&d, "n");
	refused(&d, &m, "rules[0].type", "type is 77, which is not a type");
	begin(&d);
	add_rule(&d, "x");
	refused(&d, &m, "rules[0].sources", "1 to 64 sources; this one has 0");
}

/* What would be ignored, or differ without a word. */
Test(view, settings_without_effect_are_refused)
{
	static struct model m;
	static struct made d;

	model_of_four(&m);
	begin(&d);
	d.p.tp_size = 2;
	refused(&d, &m, "tp_size", "tp_size is 2, and no rule cuts by it");
	add_rule(&d, "x");
	add_source(&d, "l.0.q");
	cut(&d, 0)->parts = 2;
	refused(&d, &m, "tp_size", "no rule cuts by it");
	d.slices[0][0].parts = 0;
	view_free(view_of(&d, &m));
	/* without a type: which of the two would it be? */
	m.sources[1].dtype = DTYPE_BF16;
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "l.0.q");
	add_source(&d, "l.0.k");
	refused(&d, &m, "rules[0].type", "'l.0.q' is stored as fp32 and 'l.0.k' as bf16");
	d.rules[0].type = SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_FP16;
	view_free(view_of(&d, &m));
}

Test(view, more_dimensions_than_possible_are_refused)
{
	static const uint64_t shape[VIEW_MAX_DIMS + 1] = { 1, 1, 1, 1, 1, 1, 1, 1, 1 };
	static struct model m;
	static struct made d;
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	model_of_four(&m);
	m.sources[3].shape = shape;
	m.sources[3].dims = VIEW_MAX_DIMS + 1;
	begin(&d);
	cr_assert_eq(view_new(&d.p, m.sources, m.n, &v, &f), FAULT_UNIMPLEMENTED);
	cr_assert(strstr(f.text, "'n' has 9 dimensions; at most 8"), "%s", f.text);
	add_rule(&d, ""); /* it is not published */
	add_source(&d, "n");
	view_free(view_of(&d, &m));
}

/* The whole of a large model is declared in little time: it is done on the loop. */
Test(view, ten_thousand_tensors_take_milliseconds, .timeout = 20)
{
	enum { N = 10000 };
	static struct view_source many[N];
	static char names[N][48];
	static struct made d;
	const uint64_t shape[2] = { 4, 4 };
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	for (unsigned i = 0; i < N; i++) {
		static const char *const kinds[] = { "q", "k", "v", "o" };

		snprintf(names[i], sizeof(names[i]), "model.layers.%u.%s.weight", i / 4,
			 kinds[i % 4]);
		many[i] = (struct view_source){
			.name = names[i], .shape = shape, .dims = 2, .dtype = DTYPE_FP32
		};
	}
	begin(&d);
	add_rule(&d, "layers.{i}.qkv.weight");
	add_source(&d, "model.layers.{i}.q.weight");
	add_source(&d, "model.layers.{i}.k.weight");
	add_source(&d, "model.layers.{i}.v.weight");
	add_rule(&d, "{r}");
	add_source(&d, "model.{r...}.o.weight");
	for (unsigned i = 0; i < 20; i++) {
		cr_assert_eq(view_new(&d.p, many, N, &v, &f), 0, "%s", f.text);
		cr_assert_eq(v->n, N / 2);
		view_free(v);
	}
}

/* A name is as short as a pattern is, however often it has what a placeholder stands for. */
Test(view, names_that_become_long_are_refused)
{
	static char name[PATTERN_MAX_BYTES / 2 + 1];
	static struct model m;
	static struct made d;
	char *also[1] = { (char *)(uintptr_t) "{r}.{r}.{r}" };

	memset(name, 'a', sizeof(name) - 1);
	m.n = 0;
	add_tensor(&m, name, 1, 4, 0, 0);
	begin(&d);
	add_rule(&d, "{r}.{r}");
	add_source(&d, "{r}");
	refused(&d, &m, "rules", "makes a name of 513 bytes");
	begin(&d);
	add_rule(&d, "{r}")->also = also;
	d.rules[0].n_also = 1;
	add_source(&d, "{r}");
	refused(&d, &m, "rules", "'{r}.{r}.{r}' makes a name of 770 bytes");
}

/* What would take minutes is refused within a second: meanwhile the daemon does nothing else. */
Test(view, rules_that_compare_too_much_are_refused, .timeout = 10)
{
	enum { N = 10000 };
	static struct view_source many[N];
	static char names[N][PATTERN_MAX_BYTES + 1];
	static rule *rules[VIEW_MAX_RULES];
	const uint64_t shape[1] = { 4 };
	view_declaration p = SHARDD__V1__PUBLICATION__INIT;
	rule_source source = SHARDD__V1__PUBLISHED_SOURCE__INIT, *sources[1] = { &source };
	rule r = SHARDD__V1__PUBLISHED_RULE__INIT;
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	for (unsigned i = 0; i < N; i++) {
		for (unsigned k = 0; k + 8 < PATTERN_MAX_BYTES; k++)
			names[i][k] = k % 2 ? '.' : 'a';
		snprintf(names[i] + PATTERN_MAX_BYTES - 8, 9, "%u", i);
		many[i] = (struct view_source){
			.name = names[i], .shape = shape, .dims = 1, .dtype = DTYPE_FP32
		};
	}
	source.tensor = (char *)(uintptr_t) "{a...}.a{b}.{c}.{d}.{e}.{f}.{g}.{h}z";
	r.sources = sources;
	r.n_sources = 1;
	r.optional = true;
	for (unsigned i = 0; i < VIEW_MAX_RULES; i++)
		rules[i] = &r;
	p.name = (char *)(uintptr_t) "slow";
	p.rules = rules;
	p.n_rules = VIEW_MAX_RULES;
	cr_assert_eq(view_new(&p, many, N, &v, &f), FAULT_INVALID);
	cr_assert(strstr(f.text, "compare too much with the job's 10000 tensors"), "%s", f.text);
	cr_assert(strstr(f.field, ".sources[0].tensor"), "%s", f.field);
}

/* Each of many sources is looked for among all names, also where nothing is published: that took minutes. */
Test(view, rules_with_too_many_sources_are_refused, .timeout = 10)
{
	enum { N = 10000 };
	static struct view_source many[N];
	static char names[N][24];
	static rule *rules[VIEW_MAX_RULES];
	const uint64_t shape[1] = { 4 };
	view_declaration p = SHARDD__V1__PUBLICATION__INIT;
	rule_source source = SHARDD__V1__PUBLISHED_SOURCE__INIT, *sources[VIEW_MAX_SOURCES];
	rule r = SHARDD__V1__PUBLISHED_RULE__INIT;
	struct view *v = NULL;
	struct fault f = FAULT_NULL;

	for (unsigned i = 0; i < N; i++) {
		snprintf(names[i], sizeof(names[i]), "w%u", i);
		many[i] = (struct view_source){
			.name = names[i], .shape = shape, .dims = 1, .dtype = DTYPE_FP32
		};
	}
	source.tensor = (char *)(uintptr_t) "w{i}";
	for (unsigned i = 0; i < VIEW_MAX_SOURCES; i++)
		sources[i] = &source;
	r.sources = sources;
	r.n_sources = VIEW_MAX_SOURCES;
	for (unsigned i = 0; i < VIEW_MAX_RULES; i++)
		rules[i] = &r;
	p.name = (char *)(uintptr_t) "slow";
	p.rules = rules;
	p.n_rules = VIEW_MAX_RULES;
	cr_assert_eq(view_new(&p, many, N, &v, &f), FAULT_INVALID);
	cr_assert(strstr(f.text, "have fewer rules or sources"), "%s", f.text);
}

/* As names of tensors are that a job registers: readers and tools show them. */
Test(view, names_are_text)
{
	static const char *const bad[] = { "a\n", "\x1b[2J", "\x7f", "\xff", "\xc3(" };
	static struct model m;
	static struct made d;

	m.n = 0;
	add_tensor(&m, "w", 1, 4, 0, 0);
	for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
		begin(&d);
		add_rule(&d, bad[i]);
		add_source(&d, "w");
		refused(&d, &m, "rules[0].name", "only printable text is allowed");
	}
	begin(&d);
	add_rule(&d, "\xc3\xbc");
	add_source(&d, "w");
	view_free(view_of(&d, &m));
}

/* A tensor that the job has under two names is published once, under both. */
Test(view, aliases_cost_no_memory)
{
	static struct model m;
	static struct made d;
	struct view *v;

	m.n = 0;
	add_tensor(&m, "embed", 2, 8, 4, 0);
	add_tensor(&m, "a.head", 2, 8, 4, 0); /* before it in the order of names */
	m.sources[1].alias = true;
	begin(&d);
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 2);
	cr_assert_eq(v->bytes, 256);
	cr_assert_eq(tensor(v, "a.head")->same, 0);
	cr_assert_eq(tensor(v, "a.head")->offset, tensor(v, "embed")->offset);
	view_free(v);
	/* the reader wants only the other one, under a third name */
	begin(&d);
	add_rule(&d, "out");
	add_source(&d, "a.head");
	add_rule(&d, "");
	add_source(&d, "embed");
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 1);
	cr_assert_eq(tensor(v, "out")->n_boxes, 1);
	view_free(v);
}

/* ------------------------------------------------------------------------------ readers */

Test(view, readers_are_users_and_groups)
{
	uint32_t users[] = { 7, 3 }, groups[] = { 20, 10 };
	Shardd__V1__PublishedReaders may = SHARDD__V1__PUBLISHED_READERS__INIT;
	view_declaration d = SHARDD__V1__PUBLICATION__INIT;
	const gid_t gids[] = { 5, 10, 30 };
	struct published_reader r = { .uid = 3 };

	cr_expect_not(published_readers_has(&d, &r), "nobody is named");
	d.readers = &may;
	may.users = users;
	may.groups = groups;
	cr_expect_not(published_readers_has(&d, &r));
	may.n_users = 2;
	cr_expect(published_readers_has(&d, &r));
	r.uid = 20; /* a group's number is no user's */
	cr_expect_not(published_readers_has(&d, &r));
	r.gids = gids;
	r.n_gids = 3;
	cr_expect_not(published_readers_has(&d, &r));
	may.n_groups = 2;
	cr_expect(published_readers_has(&d, &r));
	r.n_gids = 1;
	cr_expect_not(published_readers_has(&d, &r));
}

/* --------------------------------------------------------------------------------- e4m3 */

#define E4M3 SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3

static uint32_t block_of_4_by_3[2] = { 4, 3 };

static void set_block(rule *r, uint32_t *block)
{
	r->scale_block = block;
	r->n_scale_block = 2;
}

static void check_scales(const struct view *v, const char *name, uint32_t dims, uint64_t a,
			 uint64_t b)
{
	const struct view_tensor *t = tensor(v, name);

	cr_assert(t->scales);
	cr_assert_eq(t->dtype, DTYPE_FP32);
	cr_assert_eq(t->n_boxes, 0);
	cr_assert_eq(t->dims, dims);
	cr_assert(dims == 0 || (t->shape[dims - 2] == a && t->shape[dims - 1] == b), "%s", name);
	cr_assert_eq(t->bytes, 4 * t->elements);
	cr_assert_eq(t[-1].dtype, DTYPE_E4M3);
	cr_assert_eq(t[-1].bytes, t[-1].elements);
}

Test(view, scales_are_published_beside_e4m3)
{
	static struct model m;
	static struct made d;
	struct view *v;

	model_of_four(&m);
	begin(&d);
	d.p.type = E4M3;
	d.p.scale_block = block_of_4_by_3;
	d.p.n_scale_block = 2;
	add_rule(&d, "qk"); /* as the publication has it: 10 x 4 */
	add_source(&d, "l.0.q");
	add_source(&d, "l.0.k");
	add_rule(&d, "n")->type = E4M3; /* its own type: one scale */
	add_source(&d, "n");
	d.rules[1].scale_name = (char *)(uintptr_t) "n.inv";
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 6);
	check_scales(v, "qk_scale", 2, 3, 2);
	check_scales(v, "n.inv", 0, 0, 0);
	check_scales(v, "l.1.q_scale", 2, 2, 2); /* of no rule */
	cr_assert_eq(tensor(v, "n")->tiles.columns, 5);
	cr_assert_eq(tensor(v, "n")->tiles.tile_columns, 5);
	cr_assert_eq(tensor(v, "qk")->tiles.rows, 10);
	view_free(v);
}

/* Three dimensions: the last two are cut. Padding has scales, too. Other names have scales under theirs. */
Test(view, scales_of_stacks_and_of_further_names)
{
	static char *also[1];
	static struct model m;
	static struct made d;
	const struct view_tensor *t;
	struct view *v;

	also[0] = (char *)(uintptr_t) "other";
	m.n = 0;
	add_tensor(&m, "e.0.w", 2, 6, 4, 0);
	add_tensor(&m, "e.1.w", 2, 6, 4, 0);
	begin(&d);
	add_rule(&d, "w")->type = E4M3;
	add_source(&d, "e.{i}.w");
	d.rules[0].stack = (char *)(uintptr_t) "i";
	d.rules[0].pad_dim = 1;
	d.rules[0].pad_multiple = 5;
	d.rules[0].also = also;
	d.rules[0].n_also = 1;
	set_block(&d.rules[0], block_of_4_by_3);
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 4);
	check_scales(v, "w_scale", 3, 3, 2);
	t = tensor(v, "w_scale");
	cr_assert_eq(t->shape[0], 2);
	cr_assert_eq(tensor(v, "other")->offset, tensor(v, "w")->offset);
	cr_assert_eq(tensor(v, "other_scale")->offset, t->offset);
	cr_assert_eq(v->bytes, 512);
	view_free(v);
}

/* An alias that no rule has named has its scales' name, too. */
Test(view, scales_of_aliases)
{
	static struct model m;
	static struct made d;
	struct view *v;

	m.n = 0;
	add_tensor(&m, "embed", 2, 8, 4, 0);
	add_tensor(&m, "a.head", 2, 8, 4, 0);
	m.sources[1].alias = true;
	begin(&d);
	d.p.type = E4M3;
	v = view_of(&d, &m);
	cr_assert_eq(v->n, 4);
	cr_assert_eq(v->bytes, 512);
	cr_assert_eq(tensor(v, "a.head_scale")->offset, tensor(v, "embed_scale")->offset);
	cr_assert_eq(tensor(v, "a.head")->offset, tensor(v, "embed")->offset);
	view_free(v);
}

Test(view, scales_that_are_refused)
{
	static uint32_t none[2] = { 128, 0 };
	static char *also[1];
	static char name[PATTERN_MAX_BYTES + 1];
	static struct model m;
	static struct made d;

	model_of_four(&m);
	begin(&d);
	d.p.scale_block = block_of_4_by_3;
	d.p.n_scale_block = 2;
	refused(&d, &m, "scale_block", "only tensors of type e4m3 have scales; 'pub' has");
	d.p.type = E4M3;
	refused(&d, &m, "scale_block", "'n' has 1 dimensions: it has no rows and columns");
	d.p.n_scale_block = 1;
	refused(&d, &m, "scale_block", "that of 'pub' has 1");
	begin(&d);
	add_rule(&d, "x");
	add_source(&d, "l.0.q");
	set_block(&d.rules[0], block_of_4_by_3);
	refused(&d, &m, "rules[0].scale_block", "only tensors of type e4m3 have scales; 'x' has");
	d.rules[0].type = E4M3;
	view_free(view_of(&d, &m));
	set_block(&d.rules[0], none);
	refused(&d, &m, "rules[0].scale_block",
		"a block of 128 rows and 0 columns has no elements");
	d.rules[0].n_scale_block = 3;
	refused(&d, &m, "rules[0].scale_block", "that of 'x' has 3");
	d.rules[0].n_scale_block = 0;
	d.rules[0].scale_name = (char *)(uintptr_t) "n";
	refused(&d, &m, "rules", "two published tensors have the name 'n'");
	d.rules[0].scale_name = (char *)(uintptr_t) "s.{i}";
	refused(&d, &m, "rules[0].scale_name", "{i} of 's.{i}' is not in the first source");
	d.rules[0].scale_name = (char *)(uintptr_t) "s";
	d.rules[0].type = 0;
	refused(&d, &m, "rules[0].scale_name", "only tensors of type e4m3 have scales; 'x' has");
	d.rules[0].type = E4M3;
	also[0] = (char *)(uintptr_t) "y";
	d.rules[0].also = also;
	d.rules[0].n_also = 1;
	refused(&d, &m, "rules[0].scale_name", "'x' has further names, and its scales");
	begin(&d);
	add_rule(&d, "")->scale_name = (char *)(uintptr_t) "s";
	add_source(&d, "n");
	refused(&d, &m, "rules[0].name", "a rule without a name publishes nothing");
	begin(&d);
	memset(name, 'a', PATTERN_MAX_BYTES);
	add_rule(&d, name)->type = E4M3;
	add_source(&d, "n");
	refused(&d, &m, "rules", "is too long a name for _scale behind it");
	d.rules[0].scale_name = (char *)(uintptr_t) "s";
	view_free(view_of(&d, &m));
}
