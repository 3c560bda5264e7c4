#include "core/hostport.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"

static bool hostport_is_ipv6(const char *host)
{
	struct in6_addr a;

	return inet_pton(AF_INET6, host, &a) == 1;
}

#define HOSTPORT_ALNUM "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

/* The characters of names and of IPv4 addresses, in any locale. */
static size_t hostport_name_length(const char *text)
{
	return strspn(text, HOSTPORT_ALNUM) ? strspn(text, HOSTPORT_ALNUM "._-") : 0;
}

static bool hostport_take(const char *from, size_t n, char ret[HOSTPORT_HOST_BYTES])
{
	if (n == 0 || n >= HOSTPORT_HOST_BYTES)
		return false;
	memcpy(ret, from, n);
	ret[n] = '\0';
	return true;
}

const char *hostport_parse_host(const char *text, char ret[HOSTPORT_HOST_BYTES])
{
	const char *end;
	size_t n;

	if (*text == '[') {
		end = strchr(text, ']');
		if (!end || !hostport_take(text + 1, (size_t)(end - text) - 1, ret))
			return NULL;
		return hostport_is_ipv6(ret) ? end + 1 : NULL;
	}
	n = hostport_name_length(text);
	return hostport_take(text, n, ret) ? text + n : NULL;
}

static const char *hostport_read_port(const char *text, unsigned least, uint16_t *ret)
{
	size_t n = strspn(text, "0123456789");
	unsigned long port = 0;

	if (n == 0 || n > 5)
		return NULL;
	for (size_t i = 0; i < n; i++)
		port = port * 10 + (unsigned long)(text[i] - '0');
	if (port < least || port > 65535)
		return NULL;
	*ret = (uint16_t)port;
	return text + n;
}

const char *hostport_parse_port(const char *text, uint16_t *ret)
{
	return hostport_read_port(text, 1, ret);
}

static bool hostport_read(const char *text, unsigned least, struct hostport *ret)
{
	struct hostport h;
	const char *rest = hostport_parse_host(text, h.host);

	rest = rest && *rest == ':' ? hostport_read_port(rest + 1, least, &h.port) : NULL;
	if (!rest || *rest)
		return false;
	*ret = h;
	return true;
}

bool hostport_parse(const char *text, struct hostport *ret)
{
	return hostport_read(text, 1, ret);
}

bool hostport_parse_any(const char *text, struct hostport *ret)
{
	return hostport_read(text, 0, ret);
}

void hostport_format(const char *host, uint16_t port, char *buf)
{
	bool brackets = strchr(host, ':') != NULL;
	int n = snprintf(buf, HOSTPORT_TEXT_BYTES, "%s%s%s:%u", brackets ? "[" : "", host,
			 brackets ? "]" : "", port);

	CHECK(n > 0 && n < HOSTPORT_TEXT_BYTES);
}

bool hostport_is_numeric(const char *host)
{
	struct in_addr a;

	return inet_pton(AF_INET, host, &a) == 1 || hostport_is_ipv6(host);
}

bool hostport_is_wildcard(const char *host)
{
	struct in6_addr six;
	struct in_addr four;

	if (inet_pton(AF_INET, host, &four) == 1)
		return four.s_addr == INADDR_ANY;
	return inet_pton(AF_INET6, host, &six) == 1 && IN6_IS_ADDR_UNSPECIFIED(&six);
}

bool hostport_is_loopback(const char *host)
{
	struct in6_addr six;
	struct in_addr four;

	if (inet_pton(AF_INET, host, &four) == 1)
		return ntohl(four.s_addr) >> 24 == 127;
	if (inet_pton(AF_INET6, host, &six) == 1)
		return IN6_IS_ADDR_LOOPBACK(&six);
	return strcmp(host, "localhost") == 0;
}
