/*
 * A view: what a publication's declaration makes of a job's tensors. Which tensors there are, where each
 * is in a generation, and of which boxes of the job's tensors it is made. It knows no memory and no job,
 * so that a declaration is checked as a whole at once. Pure functions, any thread.
 */
#ifndef SHARDD_PUBLISH_VIEW_H
#define SHARDD_PUBLISH_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "kernels.h"
#include "publication.pb-c.h"

#define VIEW_MAX_DIMS    8u
#define VIEW_MAX_RULES   1024u
#define VIEW_MAX_SOURCES 64u /* of a rule */
#define VIEW_MAX_TENSORS (1u << 17)
#define VIEW_MAX_BOXES   (1u << 20)
/* Of patterns with names, and of names that are looked for, for a whole declaration: the loop waits for them. */
#define VIEW_MAX_STEPS (1u << 23)
/* Tensors begin at multiples of this, bytes. */
#define VIEW_ALIGN 256u

typedef Shardd__V1__Publication view_declaration;

/* A tensor of the job. */
struct view_source {
	const char *name;
	const uint64_t *shape;
	const uint64_t *strides; /* elements; NULL: the last dimension varies fastest */
	uint32_t dims;
	enum dtype dtype;
	bool alias; /* its elements are those of source @of, which is none */
	uint32_t of;
};

/* A box of a source's elements, as in k_assemble_box. */
struct view_box {
	uint32_t source; /* index */
	uint64_t from;   /* its element */
	uint64_t n[3], src_stride[3];
	uint64_t at, dst_stride[2];
};

/* As in k_assemble_scales. */
struct view_tiles {
	uint64_t rows, columns, tile_rows, tile_columns;
};

struct view_tensor {
	char *name; /* owned */
	enum dtype dtype;
	uint32_t dims;
	uint64_t shape[VIEW_MAX_DIMS];
	uint64_t elements;
	uint64_t offset, bytes;  /* in the generation */
	bool gaps;               /* padded */
	uint32_t same;           /* index of the one whose bytes these are; else its own */
	bool scales;             /* of the tensor of type e4m3 in front of it; it has no boxes */
	struct view_tiles tiles; /* e4m3 */
	uint32_t first_box, n_boxes;
};

struct view {
	struct view_tensor
		*tensors; /* owned: rule by rule, then those of no rule; by the names of sources */
	uint32_t n;
	struct view_box *boxes; /* owned */
	uint32_t n_boxes;
	uint64_t bytes;      /* of a generation */
	uint64_t name_bytes; /* of all names */
};

/* Do they say the same? False without memory. */
bool view_is_same(const view_declaration *a, const view_declaration *b);

/* What @p makes of @sources. Their names are unique, or a rule that names one of two is refused.
 * @ret: view_free. Return: 0, FAULT_INVALID (the text names rule and tensor), FAULT_EXHAUSTED. */
int view_new(const view_declaration *p, const struct view_source *sources, size_t n,
	     struct view **ret, struct fault *f);
/* NULL is allowed. Return: NULL. */
struct view *view_free(struct view *v);

#endif
