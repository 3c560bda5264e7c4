/* The card of a member of a communicator (engine/gloo_card.h): its size, its checks, and the tokens that follow
 * from it. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <string.h>

#include "engine/gloo_card.h"

TestSuite(gloo_card, .timeout = 20);

static struct sockaddr_storage address(const char *ip, uint16_t port)
{
	struct sockaddr_storage a = { .ss_family = strchr(ip, ':') ? AF_INET6 : AF_INET };
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&a;
	struct sockaddr_in *in = (struct sockaddr_in *)&a;

	if (a.ss_family == AF_INET)
		cr_assert_eq(inet_pton(AF_INET, ip, &in->sin_addr), 1);
	else
		cr_assert_eq(inet_pton(AF_INET6, ip, &in6->sin6_addr), 1);
	in->sin_port = htons(port); /* the same place in both */
	return a;
}

static void make(uint8_t card[GLOO_CARD_BYTES], int size)
{
	const struct sockaddr_storage a = address("10.1.2.3", 4567);

	cr_assert_eq(gloo_card_make(card, size, &a), 0);
	cr_assert(gloo_card_check(card, size));
}

Test(gloo_card, an_address_comes_back)
{
	static const char *const ips[] = { "10.1.2.3", "fd00::1:2" };
	uint8_t card[GLOO_CARD_BYTES];

	for (unsigned i = 0; i < 2; i++) {
		const struct sockaddr_storage a = address(ips[i], 4567);
		struct sockaddr_storage back;
		socklen_t n;

		cr_assert_eq(gloo_card_make(card, 1000, &a), 0);
		n = gloo_card_address(card, &back);
		cr_assert_eq(n, i ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
		cr_assert_eq(memcmp(&a, &back, n), 0);
	}
}

/* RFC 2104 with SHA-256, computed by Python's hmac: hmac.new(bytes(range(16)),
 * b"SHDCARD2\0\0\0\5", "sha256"). */
Test(gloo_card, a_token_is_the_hmac_of_the_member_with_the_secret)
{
	static const uint8_t expected[GLOO_CARD_TOKEN] = { 0xe9, 0x4d, 0xaf, 0x36, 0x7a, 0x99, 0x8d,
							   0x9c, 0x72, 0x63, 0xb5, 0xdc, 0x68, 0xeb,
							   0x04, 0x1b, 0xfd, 0x62, 0xa4, 0xcf, 0xa5,
							   0xc5, 0xfd, 0xaa, 0x1c, 0x51, 0x18, 0x82,
							   0xb7, 0xfc, 0x75, 0x6f };
	uint8_t card[GLOO_CARD_BYTES], token[GLOO_CARD_TOKEN];

	make(card, 8);
	for (unsigned i = 0; i < 16; i++)
		card[32 + i] = (uint8_t)i;
	cr_assert_eq(gloo_card_token(card, 5, token), 0);
	cr_assert_eq(memcmp(token, expected, sizeof(token)), 0);
}

Test(gloo_card, each_pair_has_its_own_token)
{
	enum { CARDS = 4, MEMBERS = 50 };
	static uint8_t tokens[CARDS * MEMBERS][GLOO_CARD_TOKEN];
	uint8_t card[GLOO_CARD_BYTES];

	for (int c = 0; c < CARDS; c++) {
		make(card, MEMBERS);
		for (int i = 0; i < MEMBERS; i++)
			cr_assert_eq(gloo_card_token(card, i, tokens[c * MEMBERS + i]), 0);
		for (int i = 0; i < MEMBERS; i++) {
			uint8_t again[GLOO_CARD_TOKEN];

			cr_assert_eq(gloo_card_token(card, i, again), 0);
			cr_assert(gloo_card_is_token(tokens[c * MEMBERS + i], again));
		}
	}
	for (int i = 0; i < CARDS * MEMBERS; i++)
		for (int k = 0; k < i; k++)
			cr_assert_not(gloo_card_is_token(tokens[i], tokens[k]), "%d and %d", i, k);
}

/* Magic, members, family, port: the first bit of each that is wrong is enough. */
Test(gloo_card, what_is_no_card_is_refused)
{
	uint8_t card[GLOO_CARD_BYTES], bad[GLOO_CARD_BYTES];

	make(card, 3);
	for (unsigned i = 0; i < 14 * 8; i++) {
		memcpy(bad, card, sizeof(bad));
		bad[i / 8] ^= (uint8_t)(1u << i % 8);
		if (i == 13 * 8 + 1) /* 4 becomes 6 */
			continue;
		cr_expect_not(gloo_card_check(bad, 3), "bit %u", i);
	}
	memcpy(bad, card, sizeof(bad));
	memset(bad + 14, 0, 2);
	cr_expect_not(gloo_card_check(bad, 3), "without a port");
	cr_expect_not(gloo_card_check(card, 4), "of another communicator");
	memset(bad, 0, sizeof(bad));
	cr_expect_not(gloo_card_check(bad, 3));
}
