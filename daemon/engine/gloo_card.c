#include "engine/gloo_card.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>
#include <sys/random.h>

#include "core/check.h"

#define GLOO_CARD_MAGIC  "SHDCARD2"
#define GLOO_CARD_SECRET 16

struct gloo_card {
	char magic[8];
	uint32_t size;
	uint16_t family;
	uint16_t port;
	uint8_t ip[16];
	uint8_t secret[GLOO_CARD_SECRET];
};

static_assert(sizeof(struct gloo_card) == GLOO_CARD_BYTES, "no padding");

/* Of which a token is the HMAC. Its key is the secret of one card, which says who expects the token. */
struct gloo_card_from {
	char magic[8];
	uint32_t member; /* network order */
};

static_assert(sizeof(struct gloo_card_from) == 12, "no padding");

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
	return r ? r : gloo_card_fill(c->secret, sizeof(c->secret));
}

bool gloo_card_check(const uint8_t *card, int size)
{
	const struct gloo_card *c = (const struct gloo_card *)card;

	return memcmp(c->magic, GLOO_CARD_MAGIC, sizeof(c->magic)) == 0 &&
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

int gloo_card_token(const uint8_t *card, int member, uint8_t ret[GLOO_CARD_TOKEN])
{
	const struct gloo_card *c = (const struct gloo_card *)card;
	struct gloo_card_from from = { .member = htonl((uint32_t)member) };
	unsigned bytes = GLOO_CARD_TOKEN;

	CHECK(member >= 0);
	memcpy(from.magic, GLOO_CARD_MAGIC, sizeof(from.magic));
	if (!HMAC(EVP_sha256(), c->secret, sizeof(c->secret), (const uint8_t *)&from, sizeof(from),
		  ret, &bytes))
		return -EIO;
	CHECK(bytes == GLOO_CARD_TOKEN);
	return 0;
}

bool gloo_card_is_token(const uint8_t *token, const uint8_t *other)
{
	uint8_t differs = 0;

	for (unsigned i = 0; i < GLOO_CARD_TOKEN; i++)
		differs |= token[i] ^ other[i];
	return differs == 0;
}
