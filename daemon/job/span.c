#include "job/span.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"

static int span_check(const struct span_node *nodes, unsigned n, unsigned self, struct fault *f)
{
	uint32_t next = 0;

	for (unsigned i = 0; i < n; i++) {
		if (nodes[i].first != next || !nodes[i].n)
			return fault_set(f, FAULT_INTERNAL, NULL,
					 "node '%s' has %u ranks from %u on: its ranks must begin "
					 "at %u",
					 nodes[i].name, nodes[i].n, nodes[i].first, next);
		next += nodes[i].n;
	}
	if (self >= n)
		return fault_set(f, FAULT_INTERNAL, NULL, "this node is none of the job's %u", n);
	return 0;
}

/* One block: the nodes, then the devices of all ranks. */
static int span_copy_nodes(struct span *s, const struct span_node *nodes)
{
	uint16_t *devices;

	s->nodes = calloc(1, s->n_nodes * sizeof(*nodes) + s->world * sizeof(*devices));
	if (!s->nodes)
		return -ENOMEM;
	memcpy(s->nodes, nodes, s->n_nodes * sizeof(*nodes));
	devices = (uint16_t *)(s->nodes + s->n_nodes);
	for (unsigned i = 0; i < s->n_nodes; i++) {
		memcpy(devices, nodes[i].devices, nodes[i].n * sizeof(*devices));
		s->nodes[i].devices = devices;
		devices += nodes[i].n;
	}
	return 0;
}

int span_new(const struct span_node *nodes, unsigned n_nodes, unsigned self, const char *prefix,
	     const struct comm_store *store, struct span **ret, struct fault *f)
{
	struct span *s;

	if (span_check(nodes, n_nodes, self, f))
		return f->code;
	s = calloc(1, sizeof(*s));
	if (!s)
		return fault_errno(f, -ENOMEM, "noting a job's nodes");
	s->n_nodes = n_nodes;
	s->self = self;
	s->world = nodes[n_nodes - 1].first + nodes[n_nodes - 1].n;
	s->store = *store;
	snprintf(s->prefix, sizeof(s->prefix), "%s", prefix);
	if (span_copy_nodes(s, nodes) < 0) {
		free(s);
		return fault_errno(f, -ENOMEM, "noting a job's nodes");
	}
	*ret = s;
	return 0;
}

struct span *span_free(struct span *s)
{
	if (s)
		free(s->nodes);
	free(s);
	return NULL;
}

bool span_same(const struct span *a, const struct span *b)
{
	bool same = a->n_nodes == b->n_nodes && a->self == b->self && a->world == b->world;

	for (unsigned i = 0; same && i < a->n_nodes; i++)
		same = strcmp(a->nodes[i].name, b->nodes[i].name) == 0 &&
		       a->nodes[i].n == b->nodes[i].n &&
		       memcmp(a->nodes[i].devices, b->nodes[i].devices,
			      a->nodes[i].n * sizeof(*a->nodes[i].devices)) == 0;
	return same;
}

uint64_t span_layout_add(uint64_t h, const char *name, uint32_t n, const uint16_t *devices)
{
	h = fnv_add(fnv_add_text(h, name), n);
	for (uint32_t k = 0; k < n; k++)
		h = fnv_add(h, devices[k]);
	return h;
}

uint64_t span_layout(const struct span *s)
{
	uint64_t h = FNV_BEGIN;

	for (unsigned i = 0; i < s->n_nodes; i++)
		h = span_layout_add(h, s->nodes[i].name, s->nodes[i].n, s->nodes[i].devices);
	return h;
}

bool span_is_alone(const struct span *s, bool elastic)
{
	return s && s->n_nodes == 1 && elastic;
}

unsigned span_node_of(const struct span *s, uint32_t rank)
{
	unsigned lo = 0, hi = s->n_nodes;

	CHECK(rank < s->world);
	while (hi - lo > 1) {
		unsigned mid = (lo + hi) / 2;

		if (s->nodes[mid].first <= rank)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

uint32_t span_device_of(const struct span *s, uint32_t rank)
{
	unsigned node = span_node_of(s, rank);

	return (uint32_t)node << 16 | s->nodes[node].devices[rank - s->nodes[node].first];
}

bool span_is_here(const struct span *s, uint32_t rank)
{
	return !s || s->n_nodes == 1 || span_node_of(s, rank) == s->self;
}

/* "SELF NAME:DEVICE,DEVICE,... NAME:..." with a device for each rank */
char *span_format(const struct span *s)
{
	size_t bytes = 16, at;
	char *text;

	for (unsigned i = 0; i < s->n_nodes; i++)
		bytes += SPAN_NAME_BYTES + 2 + s->nodes[i].n * sizeof("65535,");
	text = malloc(bytes);
	if (!text)
		return NULL;
	at = (size_t)snprintf(text, bytes, "%u", s->self);
	for (unsigned i = 0; i < s->n_nodes; i++) {
		at += (size_t)snprintf(text + at, bytes - at, " %s", s->nodes[i].name);
		for (uint32_t k = 0; k < s->nodes[i].n; k++)
			at += (size_t)snprintf(text + at, bytes - at, "%c%u", k ? ',' : ':',
					       s->nodes[i].devices[k]);
	}
	return text;
}

static unsigned span_count(const char *text, char what)
{
	unsigned n = 0;

	for (; *text; text++)
		n += *text == what;
	return n;
}

/* One node at *at, which is then behind it. Return: false: it is none. */
static bool span_parse_node(const char **at, struct span_node *ret, uint16_t *devices)
{
	const char *colon = strchr(*at, ':');
	size_t n = colon ? (size_t)(colon - *at) : 0;
	char *end;

	if (!n || n >= sizeof(ret->name))
		return false;
	memcpy(ret->name, *at, n);
	ret->devices = devices;
	for (*at = colon; **at == ':' || **at == ','; *at = end) {
		unsigned long d = strtoul(*at + 1, &end, 10);

		if (end == *at + 1 || d > UINT16_MAX)
			return false;
		devices[ret->n++] = (uint16_t)d;
	}
	if (**at == ' ')
		++*at;
	return true;
}

/* Return: how many nodes, or 0: the text is not valid. */
static unsigned span_parse_nodes(const char *at, struct span_node *nodes, uint16_t *devices)
{
	uint32_t first = 0;
	unsigned n = 0;

	while (*at) {
		if (!span_parse_node(&at, &nodes[n], devices + first))
			return 0;
		nodes[n].first = first;
		first += nodes[n++].n;
	}
	return n;
}

int span_parse(const char *text, struct span **ret, struct fault *f)
{
	const struct comm_store none = { 0 };
	unsigned most = span_count(text, ' '), n = 0;
	struct span_node *nodes = calloc(most + 1, sizeof(*nodes));
	uint16_t *devices = calloc(most + span_count(text, ',') + 1, sizeof(*devices));
	char *at;
	unsigned long self = strtoul(text, &at, 10);

	if (nodes && devices && *at == ' ')
		n = span_parse_nodes(at + 1, nodes, devices);
	if (!n)
		fault_set(f, FAULT_INVALID, "state", "the nodes of a job are '%.100s'", text);
	else if (span_new(nodes, n, (unsigned)self, "", &none, ret, f) == 0)
		(*ret)->over = true;
	free(nodes);
	free(devices);
	return f->code;
}
