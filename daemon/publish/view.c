#include "publish/view.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/name.h"
#include "publish/pattern.h"
#include "publish/view_impl.h"

/* Behind a tensor's name: its scales. */
#define VIEW_SCALE "_scale"
/* What a name costs, which is made of a pattern and looked for among all, in steps of comparing patterns; and
 * how many of its bytes cost one more. */
#define VIEW_NAME_STEPS 8u
#define VIEW_STEP_BYTES 64u

/* --------------------------------------------------------------------- the declaration */

bool view_is_same(const view_declaration *a, const view_declaration *b)
{
	size_t bytes = shardd__v1__publication__get_packed_size(a);
	uint8_t *one, *other;
	bool same;

	if (bytes != shardd__v1__publication__get_packed_size(b))
		return false;
	one = malloc(2 * bytes + 1);
	if (!one)
		return false;
	other = one + bytes;
	shardd__v1__publication__pack(a, one);
	shardd__v1__publication__pack(b, other);
	same = memcmp(one, other, bytes) == 0;
	free(one);
	return same;
}

static bool view_knows_type(int type)
{
	return type >= 0 && type <= SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3;
}

/* All placeholders of @pattern have a value where @of matches. */
static int view_check_bound(const char *pattern, const char *of, const char *field, struct fault *f)
{
	size_t bytes = 0;
	const char *key = pattern_lacks(pattern, of, &bytes);

	return key ? fault_set(f, FAULT_INVALID, field,
			       "{%.*s} of '%.150s' is not in the first source, '%.150s'",
			       (int)bytes, key, pattern, of)
		   : 0;
}

static int view_check_source(const view_rule *r, unsigned rule, unsigned k, struct fault *f)
{
	const view_rule_source *s = r->sources[k];
	char field[64];

	snprintf(field, sizeof(field), "rules[%u].sources[%u].tensor", rule, k);
	if (pattern_check(s->tensor, field, f))
		return f->code;
	return view_check_bound(s->tensor, r->sources[0]->tensor, field, f);
}

/* The placeholder that is stacked is in all sources, and in no name. */
static int view_check_stack(const view_rule *r, const char *name, const char *field,
			    struct fault *f)
{
	size_t bytes = strlen(r->stack);

	if (!bytes)
		return 0;
	for (size_t k = 0; k < r->n_sources; k++)
		if (!pattern_has(r->sources[k]->tensor, r->stack, bytes))
			return fault_set(f, FAULT_INVALID, field,
					 "'%.150s' has no {%.32s}, which is stacked",
					 r->sources[k]->tensor, r->stack);
	return pattern_has(name, r->stack, bytes) ? fault_set(f, FAULT_INVALID, field,
							      "'%.150s' has {%.32s}, which is "
							      "stacked: all of them are one tensor",
							      name, r->stack)
						  : 0;
}

/* A name that the rule gives. */
static int view_check_name(const view_rule *r, const char *name, const char *field, struct fault *f)
{
	if (pattern_check(name, field, f) ||
	    view_check_bound(name, r->sources[0]->tensor, field, f))
		return f->code;
	return view_check_stack(r, name, field, f);
}

static int view_check_names(const view_rule *r, unsigned number, struct fault *f)
{
	char field[64];

	snprintf(field, sizeof(field), "rules[%u].name", number);
	if (view_check_name(r, r->name, field, f))
		return f->code;
	for (size_t i = 0; i < r->n_also; i++) {
		snprintf(field, sizeof(field), "rules[%u].also[%zu]", number, i);
		if (view_check_name(r, r->also[i], field, f))
			return f->code;
	}
	return 0;
}

/* @type: of the tensors that are @name. */
static int view_check_block(const uint32_t *block, size_t n, Shardd__V1__PublishedType type,
			    const char *name, const char *field, struct fault *f)
{
	if (n && type != SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3)
		return fault_set(f, FAULT_INVALID, field,
				 "only tensors of type e4m3 have scales; '%.150s' has another type",
				 name);
	if (n && n != 2)
		return fault_set(f, FAULT_INVALID, field,
				 "a block has 2 numbers, its rows and columns; that of '%.150s' "
				 "has %zu",
				 name, n);
	return n && (!block[0] || !block[1])
		       ? (int)fault_set(
				 f, FAULT_INVALID, field,
				 "a block of %u rows and %u columns has no elements; '%.150s' "
				 "needs one that has",
				 block[0], block[1], name)
		       : 0;
}

static int view_check_scales(const view_declaration *p, const view_rule *r, unsigned number,
			     struct fault *f)
{
	Shardd__V1__PublishedType type = r->type ? r->type : p->type;
	char field[40];

	snprintf(field, sizeof(field), "rules[%u].scale_block", number);
	if (view_check_block(r->scale_block, r->n_scale_block, type, r->name, field, f))
		return f->code;
	snprintf(field, sizeof(field), "rules[%u].scale_name", number);
	if (!*r->scale_name)
		return 0;
	if (type != SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3)
		return fault_set(f, FAULT_INVALID, field,
				 "only tensors of type e4m3 have scales; '%.150s' has another type",
				 r->name);
	if (r->n_also)
		return fault_set(f, FAULT_INVALID, field,
				 "'%.150s' has further names, and its scales have one for each: "
				 "leave out scale_name or also",
				 r->name);
	return view_check_name(r, r->scale_name, field, f);
}

/* What only a rule that publishes something uses is not ignored. */
static int view_check_drop(const view_rule *r, unsigned number, struct fault *f)
{
	bool cut = false;
	char field[32];

	snprintf(field, sizeof(field), "rules[%u].name", number);
	for (size_t k = 0; k < r->n_sources; k++)
		cut |= r->sources[k]->transpose || r->sources[k]->slice;
	if (cut || r->join_dim || *r->stack || r->type || r->pad_dim || r->pad_multiple ||
	    r->n_also || r->n_scale_block || *r->scale_name)
		return fault_set(f, FAULT_INVALID, field,
				 "a rule without a name publishes nothing: it has only sources and "
				 "optional");
	return 0;
}

static int view_check_rule(const view_declaration *p, const view_rule *r, unsigned number,
			   struct fault *f)
{
	char field[40];

	snprintf(field, sizeof(field), "rules[%u].sources", number);
	if (!r->n_sources || r->n_sources > VIEW_MAX_SOURCES)
		return fault_set(f, FAULT_INVALID, field,
				 "a rule has 1 to %u sources; this one has %zu", VIEW_MAX_SOURCES,
				 r->n_sources);
	for (unsigned k = 0; k < r->n_sources; k++)
		if (view_check_source(r, number, k, f))
			return f->code;
	if (!*r->name)
		return view_check_drop(r, number, f);
	snprintf(field, sizeof(field), "rules[%u].type", number);
	if (!view_knows_type(r->type))
		return fault_set(f, FAULT_INVALID, field,
				 "type is %d, which is not a type; it must be 1 to 4",
				 (int)r->type);
	snprintf(field, sizeof(field), "rules[%u].join_dim", number);
	if (r->join_dim && r->n_sources == 1)
		return fault_set(f, FAULT_INVALID, field, "one source is not joined with anything");
	snprintf(field, sizeof(field), "rules[%u].pad_dim", number);
	if (r->pad_dim && !r->pad_multiple)
		return fault_set(f, FAULT_INVALID, field, "pad_dim %u needs pad_multiple",
				 r->pad_dim);
	if (view_check_names(r, number, f))
		return f->code;
	return view_check_scales(p, r, number, f);
}

/* Does any slice follow tp_size? */
static bool view_is_cut(const view_declaration *p)
{
	for (size_t i = 0; i < p->n_rules; i++)
		for (size_t k = 0; k < p->rules[i]->n_sources; k++) {
			const view_rule_source *s = p->rules[i]->sources[k];

			if (s->slice && !s->slice->parts && !s->slice->count)
				return true;
		}
	return false;
}

static int view_check(const view_declaration *p, struct fault *f)
{
	if (!name_is_good(p->name))
		return fault_set(f, FAULT_INVALID, "name",
				 "the name '%.64s' is not possible; a name has " NAME_RULE,
				 p->name);
	if (p->tp_rank >= (p->tp_size ? p->tp_size : 1))
		return fault_set(f, FAULT_INVALID, "tp_rank", "tp_rank %u is out of range (0..%u)",
				 p->tp_rank, p->tp_size ? p->tp_size - 1 : 0);
	if (!view_knows_type(p->type))
		return fault_set(f, FAULT_INVALID, "type",
				 "type is %d, which is not a type; it must be 1 to 4",
				 (int)p->type);
	if (view_check_block(p->scale_block, p->n_scale_block, p->type, p->name, "scale_block", f))
		return f->code;
	if (p->n_rules > VIEW_MAX_RULES)
		return fault_set(f, FAULT_INVALID, "rules",
				 "%zu rules are too many: the limit is %u", p->n_rules,
				 VIEW_MAX_RULES);
	for (unsigned i = 0; i < p->n_rules; i++)
		if (view_check_rule(p, p->rules[i], i, f))
			return f->code;
	if (p->tp_size > 1 && !view_is_cut(p))
		return fault_set(f, FAULT_INVALID, "tp_size",
				 "tp_size is %u, and no rule cuts by it: give a source a slice "
				 "without parts",
				 p->tp_size);
	return 0;
}

/* ------------------------------------------------------------------------- sources */

static int view_compare_sources(const void *a, const void *b, void *build)
{
	const struct view_source *sources = ((const struct view_build *)build)->sources;

	return strcmp(sources[*(const uint32_t *)a].name, sources[*(const uint32_t *)b].name);
}

static const char *view_name_at(const struct view_build *b, size_t i)
{
	return b->sources[b->by_name[i]].name;
}

/* The first of by_name that is not below the first @bytes bytes of @text. */
static size_t view_find(const struct view_build *b, const char *text, size_t bytes)
{
	size_t lo = 0, hi = b->n;

	while (lo < hi) {
		size_t middle = lo + (hi - lo) / 2;

		if (strncmp(view_name_at(b, middle), text, bytes) < 0)
			lo = middle + 1;
		else
			hi = middle;
	}
	return lo;
}

/* The source of that name: its place in by_name; b->n: there is none. */
static size_t view_find_name(const struct view_build *b, const char *name)
{
	size_t i = view_find(b, name, strlen(name) + 1);

	return i < b->n && !strcmp(view_name_at(b, i), name) ? i : b->n;
}

static int view_not_unique(const struct view_build *b, const char *name)
{
	return fault_set(b->f, FAULT_INVALID, "rules",
			 "several units have a tensor '%.200s': it cannot be named", name);
}

/* Note that a rule has named the source at @i of by_name. */
static int view_take(struct view_build *b, size_t i, uint32_t *ret)
{
	const char *name = view_name_at(b, i);

	if (i + 1 < b->n && !strcmp(view_name_at(b, i + 1), name))
		return view_not_unique(b, name);
	*ret = b->by_name[i];
	b->named[*ret] = true;
	return 0;
}

/* Count work on rule @r, as steps of comparing patterns. Return: 0 or a fault code. */
static int view_spend(struct view_build *b, const view_rule *r, unsigned number, uint64_t steps)
{
	char field[64];

	b->steps += steps;
	if (b->steps <= VIEW_MAX_STEPS)
		return 0;
	snprintf(field, sizeof(field), "rules[%u].sources[0].tensor", number);
	return fault_set(b->f, FAULT_INVALID, field,
			 "the rules up to '%.150s' compare too much with the job's %zu tensors: "
			 "have fewer rules or sources, or names that begin with more of the "
			 "tensors' names before the first {",
			 r->sources[0]->tensor, b->n);
}

/* Count that @name is made and looked for. */
static int view_spend_on_name(struct view_build *b, const view_rule *r, unsigned number,
			      const char *name)
{
	return view_spend(b, r, number, VIEW_NAME_STEPS + strlen(name) / VIEW_STEP_BYTES);
}

/* ------------------------------------------------------------------------ one match */

/* The sources of one turn: those that @values make of the patterns; the first of them exists. */
static int view_collect(struct view_build *b, const view_rule *r, unsigned number,
			const struct pattern_values *values, uint32_t *ret)
{
	for (size_t k = 0; k < r->n_sources; k++) {
		_cleanup_(freep) char *name = pattern_expand(r->sources[k]->tensor, values);
		char field[64];
		size_t i;

		if (!name)
			return fault_errno(b->f, -ENOMEM, "a publication");
		if (view_spend_on_name(b, r, number, name))
			return b->f->code;
		i = view_find_name(b, name);
		if (i == b->n) {
			snprintf(field, sizeof(field), "rules[%u].sources[%zu].tensor", number, k);
			return fault_set(b->f, FAULT_INVALID, field,
					 "the job has no tensor '%.200s', which goes with '%.200s'",
					 name, r->sources[0]->tensor);
		}
		if (view_take(b, i, &ret[k]))
			return b->f->code;
	}
	return 0;
}

/* The name that @values make of @pattern. Return: malloc'ed, the caller's; NULL: the fault says why. */
static char *view_name_of(struct view_build *b, const char *pattern,
			  const struct pattern_values *values)
{
	char *name = pattern_expand(pattern, values);

	if (!name) {
		fault_errno(b->f, -ENOMEM, "a publication");
	} else if (strlen(name) > PATTERN_MAX_BYTES) {
		fault_set(b->f, FAULT_INVALID, "rules",
			  "'%.150s' makes a name of %zu bytes; at most %u are possible", pattern,
			  strlen(name), PATTERN_MAX_BYTES);
		free(name);
		name = NULL;
	}
	return name;
}

/* The name of the scales of the tensor @name. Return: as view_name_of. */
static char *view_scale_name(struct view_build *b, const char *name)
{
	char *ret = NULL;

	if (strlen(name) + strlen(VIEW_SCALE) > PATTERN_MAX_BYTES) {
		fault_set(b->f, FAULT_INVALID, "rules",
			  "'%.150s' is too long a name for " VIEW_SCALE " behind it; at most %u "
			  "bytes are possible",
			  name, PATTERN_MAX_BYTES);
		return NULL;
	}
	if (asprintf(&ret, "%s" VIEW_SCALE, name) < 0) {
		fault_errno(b->f, -ENOMEM, "a publication");
		return NULL;
	}
	return ret;
}

/* Another name, which is taken, of tensor @same; and of its scales. */
static int view_add_name(struct view_build *b, uint32_t same, char *name)
{
	struct view_tensor t = b->v->tensors[same];

	t.name = name;
	t.same = same;
	if (!name || view_append(b, &t))
		return b->f->code;
	if (t.dtype != DTYPE_E4M3)
		return 0;
	t = b->v->tensors[same + 1];
	t.name = view_scale_name(b, name);
	t.same = same + 1;
	return t.name ? view_append(b, &t) : (int)b->f->code;
}

/* Further names of tensor @same. */
static int view_add_names(struct view_build *b, const view_rule *r, uint32_t same,
			  const struct pattern_values *values)
{
	for (size_t i = 0; i < r->n_also; i++)
		if (view_add_name(b, same, view_name_of(b, r->also[i], values)))
			return b->f->code;
	return 0;
}

/* The scales of tensor @of, if it has them. @values: NULL: of no rule. */
static int view_add_scales_of(struct view_build *b, const struct view_match *m, uint32_t of,
			      const struct pattern_values *values)
{
	const struct view_tensor *t = &b->v->tensors[of];
	char *name;

	if (t->dtype != DTYPE_E4M3)
		return 0;
	name = *m->rule->scale_name ? view_name_of(b, m->rule->scale_name, values)
				    : view_scale_name(b, t->name);
	return name ? view_add_scales(b, m, name) : (int)b->f->code;
}

static int view_add_match(struct view_build *b, const struct view_match *m,
			  const struct pattern_values *values)
{
	uint32_t same = b->v->n;
	char *name;

	if (!*m->rule->name)
		return 0;
	name = view_name_of(b, m->rule->name, values);
	if (!name || view_add(b, m, name) || view_add_scales_of(b, m, same, values))
		return b->f->code;
	return view_add_names(b, m->rule, same, values);
}

/* The value of the placeholder that is stacked becomes @text. */
static void view_set_stacked(struct pattern_values *values, const view_rule *r, const char *text)
{
	for (unsigned i = 0; i < values->n; i++)
		if (values->all[i].key_bytes == strlen(r->stack) &&
		    !memcmp(values->all[i].key, r->stack, strlen(r->stack))) {
			values->all[i].value = text;
			values->all[i].value_bytes = strlen(text);
		}
}

/* Is there a first source for this turn of the stacked placeholder? Return: 0 or a fault code. */
static int view_has_turn(const struct view_build *b, const view_rule *r,
			 const struct pattern_values *values, bool *ret)
{
	_cleanup_(freep) char *name = pattern_expand(r->sources[0]->tensor, values);

	if (!name)
		return fault_errno(b->f, -ENOMEM, "a publication");
	*ret = view_find_name(b, name) < b->n;
	return 0;
}

/* The turns 0, 1, ... of the stacked placeholder; @values has its first one. */
static int view_add_stack(struct view_build *b, const view_rule *r, unsigned number,
			  struct pattern_values *values)
{
	struct view_match m = { .rule = r, .number = number, .each = (uint32_t)r->n_sources };
	_cleanup_(freep) uint32_t *sources = NULL;
	char turn[16];

	for (;; m.stacked++) {
		uint32_t *more;
		bool is_there = false;

		snprintf(turn, sizeof(turn), "%u", m.stacked);
		view_set_stacked(values, r, turn);
		if (view_has_turn(b, r, values, &is_there))
			return b->f->code;
		if (!is_there)
			break;
		more = realloc(sources, (size_t)(m.stacked + 1) * m.each * sizeof(*more));
		if (!more)
			return fault_errno(b->f, -ENOMEM, "a publication");
		sources = more;
		if (view_collect(b, r, number, values, sources + (size_t)m.stacked * m.each))
			return b->f->code;
	}
	m.sources = sources;
	return view_add_match(b, &m, values);
}

static bool view_is_first_turn(const view_rule *r, const struct pattern_values *values)
{
	const struct pattern_value *v = pattern_find(values, r->stack, strlen(r->stack));

	return v && v->value_bytes == 1 && *v->value == '0';
}

/* The first source matches the name at @i of by_name. */
static int view_on_match(struct view_build *b, const view_rule *r, unsigned number,
			 struct pattern_values *values)
{
	struct view_match m = { .rule = r, .number = number, .each = (uint32_t)r->n_sources };
	uint32_t sources[VIEW_MAX_SOURCES];

	if (*r->stack)
		return view_is_first_turn(r, values) ? view_add_stack(b, r, number, values) : 0;
	if (view_collect(b, r, number, values, sources))
		return b->f->code;
	m.sources = sources;
	return view_add_match(b, &m, values);
}

/* Does the first source match the name at @i of by_name? Return: 0 or a fault code. */
static int view_match_name(struct view_build *b, const view_rule *r, unsigned number, size_t i,
			   struct pattern_values *values, bool *ret)
{
	*values = (struct pattern_values){ .n = 0 };
	*ret = pattern_match(r->sources[0]->tensor, view_name_at(b, i), values);
	return view_spend(b, r, number, values->steps);
}

/* Of a rule that stacks: every tensor that its first source matches is in one of the stacks. */
static int view_check_turns(struct view_build *b, const view_rule *r, unsigned number, size_t from,
			    size_t to)
{
	char field[32];

	snprintf(field, sizeof(field), "rules[%u].stack", number);
	for (size_t i = from; i < to && *r->stack; i++) {
		struct pattern_values values;
		bool matches;

		if (view_match_name(b, r, number, i, &values, &matches))
			return b->f->code;
		if (matches && !b->named[b->by_name[i]])
			return fault_set(
				b->f, FAULT_INVALID, field,
				"'%.200s' is not stacked: the values of {%.32s} must be 0, 1, "
				"and so on without a gap",
				view_name_at(b, i), r->stack);
	}
	return 0;
}

static int view_apply(struct view_build *b, const view_rule *r, unsigned number)
{
	const char *pattern = r->sources[0]->tensor;
	size_t prefix = pattern_prefix(pattern), from = view_find(b, pattern, prefix), i;
	unsigned matches = 0;
	char field[64];

	for (i = from; i < b->n && !strncmp(view_name_at(b, i), pattern, prefix); i++) {
		struct pattern_values values;
		bool found;

		if (view_match_name(b, r, number, i, &values, &found))
			return b->f->code;
		if (!found)
			continue;
		matches++;
		if (view_on_match(b, r, number, &values))
			return b->f->code;
	}
	snprintf(field, sizeof(field), "rules[%u].sources[0].tensor", number);
	if (!matches && !r->optional)
		return fault_set(b->f, FAULT_INVALID, field,
				 b->n ? "the job has no tensor '%.200s' (optional: true allows "
					"that)"
				      : "the job has no tensor '%.200s': it has none yet; its "
					"ranks register them first (in PyTorch with the "
					"optimizer)",
				 pattern);
	return view_check_turns(b, r, number, from, i);
}

/* ------------------------------------------------------------------------- the whole */

/* The source @i is an alias of one that is published as tensor @same. */
static int view_add_alias(struct view_build *b, uint32_t i, uint32_t same)
{
	char *name = strdup(b->sources[i].name);

	return name ? view_add_name(b, same, name)
		    : (int)fault_errno(b->f, -ENOMEM, "a publication");
}

/* The source @i as it is, under its own name. */
static int view_add_plain(struct view_build *b, uint32_t i)
{
	view_rule rule = SHARDD__V1__PUBLISHED_RULE__INIT;
	view_rule_source source = SHARDD__V1__PUBLISHED_SOURCE__INIT, *sources[1] = { &source };
	struct view_match m = { .rule = &rule, .sources = &i, .each = 1 };
	char *name = strdup(b->sources[i].name);
	uint32_t at = b->v->n;

	if (!name)
		return fault_errno(b->f, -ENOMEM, "a publication");
	rule.sources = sources;
	rule.n_sources = 1;
	if (view_add(b, &m, name))
		return b->f->code;
	return view_add_scales_of(b, &m, at, NULL);
}

/* Those that no rule has named; the aliases behind the others, whose memory they have. @tensors: by source,
 * the tensor under its own name, and 1. */
static int view_add_rest_of(struct view_build *b, bool aliases, uint32_t *tensors)
{
	for (size_t i = 0; i < b->n; i++) {
		const struct view_source *s = &b->sources[b->by_name[i]];
		uint32_t source, at;

		if (s->alias != aliases || b->named[b->by_name[i]])
			continue;
		if (i + 1 < b->n && !strcmp(view_name_at(b, i + 1), s->name))
			return view_not_unique(b, s->name);
		source = b->by_name[i];
		at = b->v->n;
		if (s->alias && tensors[s->of] ? view_add_alias(b, source, tensors[s->of] - 1)
					       : view_add_plain(b, source))
			return b->f->code;
		tensors[source] = at + 1;
	}
	return 0;
}

static int view_add_rest(struct view_build *b)
{
	_cleanup_(freep) uint32_t *tensors = calloc(b->n + 1, sizeof(*tensors));

	if (!tensors)
		return fault_errno(b->f, -ENOMEM, "a publication");
	if (b->p->rules_only || view_add_rest_of(b, false, tensors))
		return b->f->code;
	return view_add_rest_of(b, true, tensors);
}

static int view_compare_names(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Each name once. */
static int view_check_unique(struct view_build *b)
{
	_cleanup_(freep) char **names = calloc((size_t)b->v->n + 1, sizeof(*names));

	if (!names)
		return fault_errno(b->f, -ENOMEM, "a publication");
	for (uint32_t i = 0; i < b->v->n; i++)
		names[i] = b->v->tensors[i].name;
	qsort(names, b->v->n, sizeof(*names), view_compare_names);
	for (uint32_t i = 1; i < b->v->n; i++)
		if (!strcmp(names[i], names[i - 1]))
			return fault_set(
				b->f, FAULT_INVALID, "rules",
				"two published tensors have the name '%.200s': give each rule "
				"its own name, and put each placeholder of its first source, as "
				"{i}, into it",
				names[i]);
	return 0;
}

static void view_place(struct view *v)
{
	for (uint32_t i = 0; i < v->n; i++) {
		struct view_tensor *t = &v->tensors[i];

		if (t->same != i) {
			t->offset = v->tensors[t->same].offset;
			continue;
		}
		t->offset = v->bytes;
		v->bytes += (t->bytes + VIEW_ALIGN - 1) / VIEW_ALIGN * VIEW_ALIGN;
	}
}

static int view_build(struct view_build *b)
{
	for (uint32_t i = 0; i < b->n; i++)
		b->by_name[i] = i;
	qsort_r(b->by_name, b->n, sizeof(*b->by_name), view_compare_sources, b);
	for (unsigned i = 0; i < b->p->n_rules; i++)
		if (view_apply(b, b->p->rules[i], i))
			return b->f->code;
	if (view_add_rest(b) || view_check_unique(b))
		return b->f->code;
	if (!b->v->n)
		return fault_set(
			b->f, FAULT_INVALID, "rules", "nothing is published: %s",
			b->n ? "no rule matches a tensor of the job, or all are left out"
			     : "the job has no tensors yet; its ranks register them first (in "
			       "PyTorch with the optimizer)");
	view_place(b->v);
	return 0;
}

int view_new(const view_declaration *p, const struct view_source *sources, size_t n,
	     struct view **ret, struct fault *f)
{
	struct view_build b = { .p = p, .sources = sources, .n = n, .f = f };

	if (view_check(p, f))
		return f->code;
	CHECK(n <= UINT32_MAX);
	b.v = calloc(1, sizeof(*b.v));
	b.by_name = calloc(n + 1, sizeof(*b.by_name));
	b.named = calloc(n + 1, sizeof(*b.named));
	if (!b.v || !b.by_name || !b.named)
		fault_errno(f, -ENOMEM, "a publication");
	else
		view_build(&b);
	free(b.by_name);
	free(b.named);
	if (f->code)
		b.v = view_free(b.v);
	else
		*ret = b.v;
	return f->code;
}

struct view *view_free(struct view *v)
{
	if (!v)
		return NULL;
	for (uint32_t i = 0; i < v->n; i++)
		free(v->tensors[i].name);
	free(v->tensors);
	free(v->boxes);
	free(v);
	return NULL;
}
