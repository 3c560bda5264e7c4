/* Seeds of an embedded etcd, and addresses as text. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "coord/seeds.h"
#include "core/check.h"
#include "fdcheck.h"

#define SEEDS_TEST(name) \
	Test(seeds, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)

static int read_seeds(const char *text, const char *node, uint32_t nodes, struct seeds *ret,
		      struct fault *f)
{
	struct seeds_options o = {
		.text = text, .node = node, .nodes = nodes, .client_port = 2379, .peer_port = 2380
	};

	*f = FAULT_NULL;
	return seeds_read(&o, ret, f);
}

SEEDS_TEST(one_member_up_to_two_nodes_and_three_from_three_on)
{
	static const struct {
		const char *text;
		uint32_t nodes;
		size_t members;
	} cases[] = {
		{ "a=h1", 0, 1 },           { "a=h1,b=h2", 0, 1 },
		{ "a=h1,b=h2,c=h3", 0, 3 }, { "a=h1,b=h2,c=h3,d=h4", 0, 3 },
		{ "a=h1,b=h2,c=h3", 2, 1 }, { "a=h1,b=h2,c=h3", 100, 3 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct fault f;
		struct seeds s;

		cr_assert_eq(read_seeds(cases[i].text, "z", cases[i].nodes, &s, &f), 0, "%s",
			     f.text);
		cr_expect_eq(s.n, cases[i].members, "%s", cases[i].text);
		cr_expect_str_eq(s.members[0].node, "a");
		cr_expect_str_eq(s.members[0].host, "h1");
		cr_expect_null(seeds_find(&s, "z"));
		cr_expect_eq(seeds_find(&s, "a"), &s.members[0]);
	}
}

SEEDS_TEST(ports_and_addresses_are_read)
{
	struct fault f;
	struct seeds s;

	cr_assert_eq(read_seeds("n1=10.0.0.1,n2=[fd00::2]:5:6,n.3_x=h-3.example.org:65535:1", "n1",
				3, &s, &f),
		     0, "%s", f.text);
	cr_expect_eq(s.members[0].client_port, 2379);
	cr_expect_eq(s.members[0].peer_port, 2380);
	cr_expect_str_eq(s.members[1].host, "fd00::2");
	cr_expect_eq(s.members[1].client_port, 5);
	cr_expect_eq(s.members[1].peer_port, 6);
	cr_expect_str_eq(s.members[2].node, "n.3_x");
	cr_expect_eq(s.members[2].client_port, 65535);
}

SEEDS_TEST(a_headless_service_names_the_members_by_their_numbers)
{
	struct fault f;
	struct seeds s;

	cr_assert_eq(read_seeds("dns:shardd.default.svc", "my-set-7", 8, &s, &f), 0, "%s", f.text);
	cr_assert_eq(s.n, 3);
	cr_expect_str_eq(s.members[2].node, "my-set-2");
	cr_expect_str_eq(s.members[2].host, "my-set-2.shardd.default.svc");
	cr_expect_null(seeds_find(&s, "my-set-7"));
	cr_assert_eq(read_seeds("dns:shardd", "my-set-1", 2, &s, &f), 0, "%s", f.text);
	cr_expect_eq(s.n, 1);
	cr_expect_str_eq(s.members[0].host, "my-set-0.shardd");
}

SEEDS_TEST(what_is_wrong_is_named)
{
	static const struct {
		const char *text, *node;
		uint32_t nodes;
		const char *field, *what;
	} cases[] = {
		{ "", "a", 0, "coord_seeds", "has 0 entries" },
		{ "a=h1,b=h2", "a", 3, "coord_seeds", "it must have 3 at least" },
		{ "a", "a", 0, "coord_seeds", "no '='" },
		{ "a=h1,,b=h2", "a", 0, "coord_seeds", "no '='" },
		{ "=h", "a", 0, "coord_seeds", "NODE must" },
		{ "a/b=h", "a", 0, "coord_seeds", "NODE must" },
		{ "a=", "a", 0, "coord_seeds", "HOST must" },
		{ "a=-h", "a", 0, "coord_seeds", "HOST must" },
		{ "a=[10.0.0.1]", "a", 0, "coord_seeds", "HOST must" },
		{ "a=[::1", "a", 0, "coord_seeds", "HOST must" },
		{ "a=fd00::1", "a", 0, "coord_seeds", "ports must" },
		{ "a=h:1", "a", 0, "coord_seeds", "ports must" },
		{ "a=h:0:1", "a", 0, "coord_seeds", "ports must" },
		{ "a=h:1:65536", "a", 0, "coord_seeds", "ports must" },
		{ "a=h:7:7", "a", 0, "coord_seeds", "two different" },
		{ "a=h:1:2x", "a", 0, "coord_seeds", "ports must" },
		{ "a=0.0.0.0", "a", 0, "coord_seeds", "no node can connect" },
		{ "a=h1,a=h2", "a", 0, "coord_seeds", "the same node" },
		{ "a=h1,b=h1", "a", 0, "coord_seeds", "the same host" },
		{ "a=h1:1:2,b=h1:2:3", "a", 0, "coord_seeds", "the same host" },
		{ "dns:x", "a-0", 0, "coord_nodes", "number of nodes" },
		{ "dns:x", "a", 3, "node_name", "'-' and a number" },
		{ "dns:x", "-1", 3, "node_name", "'-' and a number" },
		{ "dns:", "a-0", 3, "coord_seeds", "a DNS name" },
		{ "dns:10.0.0.1", "a-0", 3, "coord_seeds", "a DNS name" },
		{ "dns:x,a=b", "a-0", 3, "coord_seeds", "a DNS name" },
		{ "a=h1,dns:x", "a-0", 3, "coord_seeds", "no '='" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct fault f;
		struct seeds s;

		cr_assert_eq(read_seeds(cases[i].text, cases[i].node, cases[i].nodes, &s, &f),
			     FAULT_INVALID, "%s", cases[i].text);
		cr_expect_str_eq(f.field, cases[i].field, "%s", f.text);
		cr_expect(strstr(f.text, cases[i].what), "%s: %s", cases[i].text, f.text);
	}
}

SEEDS_TEST(there_may_be_64)
{
	char text[2048] = "";
	struct fault f;
	struct seeds s;

	for (unsigned i = 0; i < SEEDS_MOST; i++)
		snprintf(text + strlen(text), 32, "%sn%u=h%u", i ? "," : "", i, i);
	cr_assert_eq(read_seeds(text, "n1", 0, &s, &f), 0, "%s", f.text);
	strcat(text, ",x=y");
	cr_assert_eq(read_seeds(text, "n1", 0, &s, &f), FAULT_INVALID);
}

SEEDS_TEST(addresses_are_read_and_written)
{
	static const struct {
		const char *text, *host;
		uint16_t port;
	} cases[] = {
		{ "h:1", "h", 1 },
		{ "10.0.0.1:65535", "10.0.0.1", 65535 },
		{ "[::1]:80", "::1", 80 },
		{ "a-b.c:007", "a-b.c", 7 },
	};
	static const char *const wrong[] = { "",        ":1",   "h",          "h:",    "h:0",
					     "h:65536", "h:1x", "::1:5",      "[h]:1", "[::1]1",
					     "h:-1",    "h :1", "[::1%lo]:1", "h:+1",  "http://h:1",
					     "h\xe9:1", "-h:1" };
	struct hostport h;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		char back[HOSTPORT_TEXT_BYTES];
		struct hostport again;

		cr_assert(hostport_parse(cases[i].text, &h), "%s", cases[i].text);
		cr_expect_str_eq(h.host, cases[i].host);
		cr_expect_eq(h.port, cases[i].port);
		hostport_format(h.host, h.port, back);
		cr_assert(hostport_parse(back, &again), "%s", back);
		cr_expect_str_eq(again.host, h.host);
	}
	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
		cr_expect_not(hostport_parse(wrong[i], &h), "%s", wrong[i]);
}

/* As the others, but for the port 0. */
SEEDS_TEST(addresses_to_listen_on_may_have_port_0)
{
	struct hostport h;

	cr_assert(hostport_parse_any("[::1]:0", &h));
	cr_expect(strcmp(h.host, "::1") == 0 && h.port == 0);
	cr_assert(hostport_parse_any("h:65535", &h));
	cr_expect_eq(h.port, 65535);
	cr_expect_not(hostport_parse_any("h:", &h));
	cr_expect_not(hostport_parse_any("h:65536", &h));
	cr_expect_not(hostport_parse_any(":0", &h));
}

SEEDS_TEST(kinds_of_addresses_are_told_apart)
{
	cr_expect(hostport_is_wildcard("0.0.0.0") && hostport_is_wildcard("::"));
	cr_expect_not(hostport_is_wildcard("10.0.0.1") || hostport_is_wildcard("h"));
	cr_expect(hostport_is_loopback("127.1.2.3") && hostport_is_loopback("::1") &&
		  hostport_is_loopback("localhost"));
	cr_expect_not(hostport_is_loopback("128.0.0.1") || hostport_is_loopback("::") ||
		      hostport_is_loopback("h"));
	cr_expect(hostport_is_numeric("1.2.3.4") && hostport_is_numeric("fd00::1"));
	cr_expect_not(hostport_is_numeric("1.2.3") || hostport_is_numeric("localhost"));
}
