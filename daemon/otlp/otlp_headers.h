/*
 * Headers that go with each request to the collector, such as the token of a vendor: a text with lines `name: value`.
 * Empty lines and those that begin with # do not count. Any thread.
 */
#ifndef SHARDD_OTLP_OTLP_HEADERS_H
#define SHARDD_OTLP_OTLP_HEADERS_H

#include <stddef.h>

#include "core/fault.h"

#define OTLP_HEADERS_MAX 16u

struct otlp_headers {
	char *text; /* owned: what the rest points into; wiped at the end */
	size_t bytes;
	struct {
		const char *name, *value;
	} list[OTLP_HEADERS_MAX];
	size_t n;
};

#define OTLP_HEADERS_NULL ((struct otlp_headers){ .text = NULL })

/* @text: copied. @ret: deinit it. Return: 0, or a fault code about the key otlp_headers_file: no value is in it. */
int otlp_headers_parse(const char *text, struct otlp_headers *ret, struct fault *f);
/* Put asterisks in place of @value, and of its last word, wherever it is in @text; nothing that short is a secret. */
void otlp_headers_hide(const char *value, char *text);
/* Safe twice. */
void otlp_headers_deinit(struct otlp_headers *h);

#endif
