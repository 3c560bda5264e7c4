/* The set is our own, so what is wrong in it is CHECKed. */
#include "rpc/descriptors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "descriptor.pb-c.h"
#include "descriptor_set.h"
#include "rpc/arena.h"
#include "rpc/codec.h"

#define DESCRIPTORS_FILES 16u
#define DESCRIPTORS_NAME  256u /* bytes of a full name */

struct descriptors_symbol {
	const char *name;
	uint16_t file;
	bool message;
};

struct descriptors {
	struct arena arena; /* names */
	struct descriptors_file files[DESCRIPTORS_FILES];
	size_t n_files;
	struct descriptors_symbol *symbols; /* owned; by name */
	size_t n_symbols, room;
	bool failed; /* memory ran out */
};

/* ------------------------------------------------------------- the symbols */

/* @ret: "scope.name", or "name" if the scope is empty. */
static void descriptors_join(char ret[static DESCRIPTORS_NAME], const char *scope, const char *name)
{
	int n = snprintf(ret, DESCRIPTORS_NAME, "%s%s%s", scope, *scope ? "." : "", name);

	CHECK(n > 0 && (size_t)n < DESCRIPTORS_NAME);
}

/* Of the file that is last. */
static void descriptors_add(struct descriptors *d, const char *scope, const char *name,
			    bool message)
{
	char full[DESCRIPTORS_NAME];

	descriptors_join(full, scope, name);
	if (d->n_symbols == d->room) {
		size_t room = d->room ? 2 * d->room : 1024;
		void *more = reallocarray(d->symbols, room, sizeof(*d->symbols));

		if (!more) {
			d->failed = true;
			return;
		}
		d->symbols = more;
		d->room = room;
	}
	d->symbols[d->n_symbols++] = (struct descriptors_symbol){
		.name = arena_string(&d->arena, full),
		.file = (uint16_t)(d->n_files - 1),
		.message = message,
	};
}

static void descriptors_add_all(struct descriptors *d, const char *scope,
				Shardd__Wire__V1__NamedDescriptor *const *named, size_t n)
{
	for (size_t i = 0; i < n; i++)
		descriptors_add(d, scope, named[i]->name, false);
}

/* An enum's values are names of the scope in which it is. */
static void descriptors_add_enum(struct descriptors *d, const char *scope,
				 const Shardd__Wire__V1__EnumDescriptor *e)
{
	descriptors_add(d, scope, e->name, false);
	descriptors_add_all(d, scope, e->value, e->n_value);
}

static void descriptors_add_message(struct descriptors *d, const char *scope,
				    const Shardd__Wire__V1__MessageDescriptor *m)
{
	char full[DESCRIPTORS_NAME];

	CHECK(m->n_extension == 0); /* reflection says that there are none */
	descriptors_join(full, scope, m->name);
	descriptors_add(d, scope, m->name, true);
	descriptors_add_all(d, full, m->field, m->n_field);
	descriptors_add_all(d, full, m->oneof_decl, m->n_oneof_decl);
	for (size_t i = 0; i < m->n_nested_type; i++)
		descriptors_add_message(d, full, m->nested_type[i]);
	for (size_t i = 0; i < m->n_enum_type; i++)
		descriptors_add_enum(d, full, m->enum_type[i]);
}

static void descriptors_add_service(struct descriptors *d, const char *scope,
				    const Shardd__Wire__V1__ServiceDescriptor *s)
{
	char full[DESCRIPTORS_NAME];

	descriptors_join(full, scope, s->name);
	descriptors_add(d, scope, s->name, false);
	descriptors_add_all(d, full, s->method, s->n_method);
}

static void descriptors_add_file(struct descriptors *d, const Shardd__Wire__V1__FileDescriptor *f)
{
	CHECK(f->n_extension == 0);
	d->files[d->n_files - 1].name = arena_string(&d->arena, f->name);
	for (size_t i = 0; i < f->n_message_type; i++)
		descriptors_add_message(d, f->package, f->message_type[i]);
	for (size_t i = 0; i < f->n_enum_type; i++)
		descriptors_add_enum(d, f->package, f->enum_type[i]);
	for (size_t i = 0; i < f->n_service; i++)
		descriptors_add_service(d, f->package, f->service[i]);
}

/* --------------------------------------------------------------- the files */

/* A length at @p. Return: what follows it. */
static const uint8_t *descriptors_length(const uint8_t *p, size_t *ret)
{
	unsigned shift = 0;

	*ret = 0;
	do {
		*ret |= (size_t)(*p & 0x7f) << shift;
		shift += 7;
	} while (*p++ & 0x80);
	return p;
}

/* The file whose field is at @p. @ret_next: what follows it. Return: 0 or -ENOMEM. */
static int descriptors_read_file(struct descriptors *d, const uint8_t *p, const uint8_t **ret_next)
{
	struct codec_message m = CODEC_MESSAGE_NULL;
	const uint8_t *file;
	size_t bytes;
	int r;

	CHECK(*p == 0x0a && d->n_files < DESCRIPTORS_FILES); /* field 1 is bytes */
	file = descriptors_length(p + 1, &bytes);
	r = codec_unpack(&m, &shardd__wire__v1__file_descriptor__descriptor, file, bytes,
			 codec_budget(bytes));
	if (r == CODEC_E_BUDGET)
		return -ENOMEM;
	CHECK(r == 0);
	*ret_next = file + bytes;
	d->files[d->n_files++] =
		(struct descriptors_file){ .field = p, .bytes = (size_t)(*ret_next - p) };
	descriptors_add_file(d, (const Shardd__Wire__V1__FileDescriptor *)m.msg);
	codec_message_deinit(&m);
	return d->failed || d->arena.failed ? -ENOMEM : 0;
}

static int descriptors_compare(const void *a, const void *b)
{
	const struct descriptors_symbol *x = a, *y = b;

	return strcmp(x->name, y->name);
}

static void descriptors_freep(struct descriptors **d)
{
	descriptors_free(*d);
}

int descriptors_new(struct descriptors **ret)
{
	_cleanup_(descriptors_freep) struct descriptors *d = calloc(1, sizeof(*d));
	const uint8_t *p = descriptor_set, *end = p + descriptor_set_bytes;

	if (!d)
		return -ENOMEM;
	while (p < end) {
		int r = descriptors_read_file(d, p, &p);

		if (r < 0)
			return r;
	}
	CHECK(p == end && d->n_symbols > 0);
	qsort(d->symbols, d->n_symbols, sizeof(*d->symbols), descriptors_compare);
	*ret = d;
	d = NULL;
	return 0;
}

struct descriptors *descriptors_free(struct descriptors *d)
{
	if (d) {
		arena_free(&d->arena);
		free(d->symbols);
		free(d);
	}
	return NULL;
}

const struct descriptors_file *descriptors_find_file(const struct descriptors *d, const char *name)
{
	for (size_t i = 0; i < d->n_files; i++)
		if (strcmp(d->files[i].name, name) == 0)
			return &d->files[i];
	return NULL;
}

const struct descriptors_file *descriptors_find_symbol(const struct descriptors *d,
						       const char *name, bool *ret_message)
{
	const struct descriptors_symbol key = { .name = name }, *found;

	found = bsearch(&key, d->symbols, d->n_symbols, sizeof(key), descriptors_compare);
	if (!found)
		return NULL;
	if (ret_message)
		*ret_message = found->message;
	return &d->files[found->file];
}
