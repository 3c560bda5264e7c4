/*
 * Text as training data for charlm: bytes mapped to the numbers of an alphabet,
 * and samples drawn from it by a counter-based generator, so that a sample
 * depends on (seed, step, index) alone and on nothing that was drawn before. No
 * state to save, and any number of ranks sees the same global batch.
 * Plain data, any thread.
 */
#ifndef CHARLM_DATA_H
#define CHARLM_DATA_H

#include <stddef.h>
#include <stdint.h>

struct text {
	unsigned char *symbols; /* owned: every byte as its place in the alphabet */
	size_t n;
	unsigned vocab;              /* distinct bytes */
	unsigned char alphabet[256]; /* sorted; the first @vocab are used */
	uint64_t hash;               /* of the bytes: tells one text from another */
};

#define TEXT_NULL \
	{         \
		0 \
	}

/* Read the whole file @path. @ret: text_deinit. Return: 0 or negative errno
 * (ENODATA: empty). */
int text_load(struct text *ret, const char *path);

/* Free what it holds; safe twice. */
void text_deinit(struct text *t);

/* Draw sample @index of the global batch of @step: @context symbols into
 * @ret_context and the one that follows them into @ret_target.
 * @t has more than @context symbols. */
void text_sample(const struct text *t, unsigned context, uint64_t seed, uint64_t step,
		 uint64_t index, unsigned char *ret_context, unsigned char *ret_target);

#endif
