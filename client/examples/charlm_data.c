/*
 * Training text: see charlm_data.h. Files are read whole; a text of many
 * gigabytes would want a mapping instead, this is an example.
 */
#include "charlm_data.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int read_all(FILE *file, unsigned char **ret_bytes, size_t *ret_n)
{
	size_t n = 0, room = 1 << 16;
	unsigned char *bytes = malloc(room);

	while (bytes) {
		n += fread(bytes + n, 1, room - n, file);
		if (n < room)
			break;
		unsigned char *more = realloc(bytes, room *= 2);
		if (!more)
			free(bytes);
		bytes = more;
	}
	if (!bytes)
		return -ENOMEM;
	if (ferror(file)) {
		free(bytes);
		return -EIO;
	}
	*ret_bytes = bytes;
	*ret_n = n;
	return 0;
}

/* FNV-1a, and the bytes become numbers of the alphabet in place. */
static void index_symbols(struct text *t)
{
	bool seen[256] = { false };
	unsigned char number[256];

	t->hash = 14695981039346656037u;
	for (size_t i = 0; i < t->n; i++) {
		seen[t->symbols[i]] = true;
		t->hash = (t->hash ^ t->symbols[i]) * 1099511628211u;
	}
	for (unsigned b = 0; b < 256; b++) {
		if (!seen[b])
			continue;
		number[b] = (unsigned char)t->vocab;
		t->alphabet[t->vocab++] = (unsigned char)b;
	}
	for (size_t i = 0; i < t->n; i++)
		t->symbols[i] = number[t->symbols[i]];
}

int text_load(struct text *ret, const char *path)
{
	struct text t = TEXT_NULL;
	FILE *file = fopen(path, "rb");
	int rc;

	if (!file)
		return -errno;
	errno = 0;
	rc = read_all(file, &t.symbols, &t.n);
	if (rc == -EIO && errno)
		rc = -errno; /* a directory, say */
	fclose(file);
	if (rc < 0)
		return rc;
	if (t.n == 0) {
		text_deinit(&t);
		return -ENODATA;
	}
	index_symbols(&t);
	*ret = t;
	return 0;
}

void text_deinit(struct text *t)
{
	free(t->symbols);
	*t = (struct text)TEXT_NULL;
}

/* The finaliser of splitmix64: every input bit changes every output bit. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

void text_sample(const struct text *t, unsigned context, uint64_t seed, uint64_t step,
		 uint64_t index, unsigned char *ret_context, unsigned char *ret_target)
{
	uint64_t random = mix(seed + 0x9e3779b97f4a7c15u);
	size_t at;

	random = mix(random ^ (step + 0x9e3779b97f4a7c15u));
	random = mix(random ^ (index + 0x9e3779b97f4a7c15u));
	at = (size_t)(random % (t->n - context));
	memcpy(ret_context, t->symbols + at, context);
	*ret_target = t->symbols[at + context];
}
