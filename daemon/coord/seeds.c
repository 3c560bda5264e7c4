#include "coord/seeds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/text.h"

#define SEEDS_KEY "coord_seeds"
#define SEEDS_DNS "dns:"

static int seeds_refuse(const char *item, size_t n, const char *why, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, SEEDS_KEY,
			 SEEDS_KEY " has '%.*s': %s; it must be NODE=HOST, "
				   "NODE=HOST:CLIENTPORT:PEERPORT, or dns:NAME alone",
			 n < 80 ? (int)n : 80, item, why);
}

/* "" or ":CLIENTPORT:PEERPORT". */
static bool seeds_read_ports(const char *text, struct seed *s)
{
	if (!*text)
		return true;
	text = *text == ':' ? hostport_parse_port(text + 1, &s->client_port) : NULL;
	text = text && *text == ':' ? hostport_parse_port(text + 1, &s->peer_port) : NULL;
	return text && !*text && s->client_port != s->peer_port;
}

/* @ret has the default ports. */
static int seeds_read_one(const char *item, size_t n, struct seed *ret, struct fault *f)
{
	char text[NAME_BYTES + HOSTPORT_TEXT_BYTES + 8], *equals;
	const char *rest;

	if (n >= sizeof(text))
		return seeds_refuse(item, n, "it is too long", f);
	memcpy(text, item, n);
	text[n] = '\0';
	equals = strchr(text, '=');
	if (!equals)
		return seeds_refuse(item, n, "it has no '='", f);
	*equals = '\0';
	if (!name_is_good(text))
		return seeds_refuse(item, n, "NODE must be " NAME_RULE, f);
	text_copy(ret->node, sizeof(ret->node), text);
	rest = hostport_parse_host(equals + 1, ret->host);
	if (!rest)
		return seeds_refuse(item, n, "HOST must be a name or an address, IPv6 in brackets",
				    f);
	if (!seeds_read_ports(rest, ret))
		return seeds_refuse(item, n, "the ports must be two different ones, 1 to 65535", f);
	if (hostport_is_wildcard(ret->host))
		return seeds_refuse(item, n, "no node can connect to this address", f);
	return 0;
}

static bool seeds_same_place(const struct seed *a, const struct seed *b)
{
	return strcmp(a->host, b->host) == 0 &&
	       (a->client_port == b->client_port || a->peer_port == b->peer_port ||
		a->client_port == b->peer_port || a->peer_port == b->client_port);
}

static int seeds_check_new(const struct seed *list, size_t n, const char *item, size_t bytes,
			   struct fault *f)
{
	for (size_t i = 0; i < n; i++) {
		if (strcmp(list[i].node, list[n].node) == 0)
			return seeds_refuse(item, bytes, "an entry before it has the same node", f);
		if (seeds_same_place(&list[i], &list[n]))
			return seeds_refuse(item, bytes,
					    "an entry before it has the same host and port", f);
	}
	return 0;
}

/* @list: SEEDS_MOST. */
static int seeds_read_list(const struct seeds_options *o, struct seed *list, size_t *ret_n,
			   struct fault *f)
{
	const char *at = o->text;
	size_t n = 0;

	while (*at) {
		size_t bytes = strcspn(at, ",");

		if (n == SEEDS_MOST)
			return seeds_refuse(at, bytes, "there are 64 entries before it", f);
		list[n] = (struct seed){ .client_port = o->client_port, .peer_port = o->peer_port };
		if (seeds_read_one(at, bytes, &list[n], f) ||
		    seeds_check_new(list, n, at, bytes, f))
			return (int)f->code;
		n++;
		at += bytes + (at[bytes] == ',');
	}
	*ret_n = n;
	return 0;
}

static size_t seeds_members_of(uint32_t nodes)
{
	return nodes < SEEDS_MEMBERS ? 1 : SEEDS_MEMBERS;
}

static int seeds_choose(const struct seeds_options *o, const struct seed *list, size_t n,
			struct seeds *ret, struct fault *f)
{
	size_t members = seeds_members_of(o->nodes ? o->nodes : (uint32_t)n);

	if (n < members)
		return fault_set(f, FAULT_INVALID, SEEDS_KEY,
				 SEEDS_KEY " has %zu entries; for coord_nodes: %u it must have %zu "
					   "at least",
				 n, o->nodes, members);
	memcpy(ret->members, list, members * sizeof(*list));
	ret->n = members;
	return 0;
}

/* How many characters of @node are before "-N". Return: 0: it has no such end. */
static size_t seeds_prefix(const char *node)
{
	const char *dash = strrchr(node, '-');
	size_t digits = dash ? strspn(dash + 1, "0123456789") : 0;

	return digits && digits < 7 && !dash[1 + digits] ? (size_t)(dash - node) : 0;
}

static int seeds_dns_member(const struct seeds_options *o, const char *domain, size_t i,
			    struct seed *ret, struct fault *f)
{
	int prefix = (int)seeds_prefix(o->node), n;

	*ret = (struct seed){ .client_port = o->client_port, .peer_port = o->peer_port };
	snprintf(ret->node, sizeof(ret->node), "%.*s-%zu", prefix, o->node, i);
	n = snprintf(ret->host, sizeof(ret->host), "%s.%s", ret->node, domain);
	if (n >= (int)sizeof(ret->host))
		return seeds_refuse(o->text, strlen(o->text), "the name is too long", f);
	return 0;
}

static int seeds_read_dns(const struct seeds_options *o, struct seeds *ret, struct fault *f)
{
	const char *domain = o->text + strlen(SEEDS_DNS);
	char host[HOSTPORT_HOST_BYTES];
	const char *rest = hostport_parse_host(domain, host);

	if (!rest || *rest || hostport_is_numeric(host))
		return seeds_refuse(o->text, strlen(o->text), "NAME must be a DNS name", f);
	if (!o->nodes)
		return fault_set(f, FAULT_INVALID, "coord_nodes",
				 "coord_nodes is 0; with coord_seeds: %.80s it must be the number "
				 "of nodes",
				 o->text);
	if (!seeds_prefix(o->node))
		return fault_set(f, FAULT_INVALID, "node_name",
				 "node_name is '%s'; with coord_seeds: %.80s it must end with '-' "
				 "and a number, as the pods of a StatefulSet are named",
				 o->node, o->text);
	ret->n = seeds_members_of(o->nodes);
	for (size_t i = 0; i < ret->n; i++)
		if (seeds_dns_member(o, domain, i, &ret->members[i], f))
			return (int)f->code;
	return 0;
}

int seeds_read(const struct seeds_options *o, struct seeds *ret, struct fault *f)
{
	struct seed list[SEEDS_MOST];
	struct seeds s = { .n = 0 };
	size_t n = 0;
	int r;

	CHECK(name_is_good(o->node) && o->client_port && o->peer_port);
	if (strncmp(o->text, SEEDS_DNS, strlen(SEEDS_DNS)) == 0) {
		r = seeds_read_dns(o, &s, f);
	} else {
		r = seeds_read_list(o, list, &n, f);
		r = r ? r : seeds_choose(o, list, n, &s, f);
	}
	if (r == 0)
		*ret = s;
	return r;
}

const struct seed *seeds_find(const struct seeds *s, const char *node)
{
	for (size_t i = 0; i < s->n; i++)
		if (strcmp(s->members[i].node, node) == 0)
			return &s->members[i];
	return NULL;
}
