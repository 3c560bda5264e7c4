#include "engine/gloo_card.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/random.h>

#include "core/check.h"

#define GLOO_CARD_MAGIC "SHDCARD1"

struct gloo_card {
	char magic[8];
	uint32_t size;
	uint16_t family;
	uint16_t port;
	uint8_t ip[16];
	uint8_t tokens[][GLOO_CARD_TOKEN];
};

static_assert(sizeof(struct gloo_card) == 32, "no padding");

size_t gloo_card_bytes(int size)
{
	return sizeof(struct gloo_card) + (size_t)size * GLOO_CARD_TOKEN;
}

static int gloo_card_set_address(struct gloo_card *c, const struct sockaddr_storage *address)
{
	if (address->ss_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)address;

		c->family = htons(4);
		c->port = in->sin_port;
		memcpy(c->ip, &in->sin_addr, sizeof(in->sin_addr));
		return 0;
	}
	if (address->ss_family == AF_INET6) {
		const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;

		c->family = htons(6);
		c->port = in6->sin6_port;
		memcpy(c->ip, &in6->sin6_addr, sizeof(in6->sin6_addr));
		return 0;
	}
	return -EAFNOSUPPORT;
}

static int gloo_card_fill(void *bytes, size_t n)
{
	uint8_t *at = bytes;

	while (n > 0) {
		ssize_t got = getrandom(at, n, 0);

		if (got < 0 && errno != EINTR)
			return -errno;
		at += got > 0 ? got : 0;
		n -= got > 0 ? (size_t)got : 0;
	}
	return 0;
}

int gloo_card_make(uint8_t *card, int size, const struct sockaddr_storage *address)
{
	struct gloo_card *c = (struct gloo_card *)card;
	int r;

	memset(c, 0, sizeof(*c));
	memcpy(c->magic, GLOO_CARD_MAGIC, sizeof(c->magic));
	c->size = htonl((uint32_t)size);
	r = gloo_card_set_address(c, address);
	return r ? r : gloo_card_fill(c->tokens, (size_t)size * GLOO_CARD_TOKEN);
}

bool gloo_card_check(const uint8_t *card, size_t bytes, int size)
{
	const struct gloo_card *c = (const struct gloo_card *)card;

	return bytes == gloo_card_bytes(size) &&
	       memcmp(c->magic, GLOO_CARD_MAGIC, sizeof(c->magic)) == 0 &&
	       c->size == htonl((uint32_t)size) &&
	       (c->family == htons(4) || c->family == htons(6)) && c->port != 0;
}

socklen_t gloo_card_address(const uint8_t *card, struct sockaddr_storage *ret)
{
	const struct gloo_card *c = (const struct gloo_card *)card;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)ret;
	struct sockaddr_in *in = (struct sockaddr_in *)ret;

	memset(ret, 0, sizeof(*ret));
	if (c->family == htons(4)) {
		in->sin_family = AF_INET;
		in->sin_port = c->port;
		memcpy(&in->sin_addr, c->ip, sizeof(in->sin_addr));
		return sizeof(*in);
	}
	in6->sin6_family = AF_INET6;
	in6->sin6_port = c->port;
	memcpy(&in6->sin6_addr, c->ip, sizeof(in6->sin6_addr));
	return sizeof(*in6);
}

const uint8_t *gloo_card_token(const uint8_t *card, int member)
{
	CHECK(member >= 0);
	return ((const struct gloo_card *)card)->tokens[member];
}

bool gloo_card_is_token(const uint8_t *token, const uint8_t *other)
{
	uint8_t differs = 0;

	for (unsigned i = 0; i < GLOO_CARD_TOKEN; i++)
		differs |= token[i] ^ other[i];
	return differs == 0;
}
