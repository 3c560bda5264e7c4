/* Shared by the files of view. */
#ifndef SHARDD_PUBLISH_VIEW_IMPL_H
#define SHARDD_PUBLISH_VIEW_IMPL_H

#include "publish/view.h"

typedef Shardd__V1__PublishedRule view_rule;
typedef Shardd__V1__PublishedSource view_rule_source;

struct view_build {
	const view_declaration *p;
	const struct view_source *sources;
	size_t n;
	uint32_t *by_name; /* owned: indexes of sources, by their names */
	bool *named;       /* owned: a rule has named it */
	struct view *v;
	uint32_t room, boxes_room;
	uint64_t steps; /* of VIEW_MAX_STEPS */
	struct fault *f;
};

/* A rule, and the sources of one tensor that it makes: @each of every one of @stacked. */
struct view_match {
	const view_rule *rule;
	unsigned number; /* of the rule */
	const uint32_t *sources;
	uint32_t each, stacked; /* 0: it does not stack */
};

/* view_shape.c: append the tensor @name (taken, also after an error). Return: 0 or a fault code. */
int view_add(struct view_build *b, const struct view_match *m, char *name);
/* Append the scales of the last tensor, which has type e4m3, under @name, which is taken as above. */
int view_add_scales(struct view_build *b, const struct view_match *m, char *name);
/* Append @t, whose name is taken as above. */
int view_append(struct view_build *b, struct view_tensor *t);

#endif
