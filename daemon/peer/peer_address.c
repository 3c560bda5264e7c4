/* Addresses of nodes: HOST:PORT, an address of IPv6 in brackets. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/cleanup.h"
#include "peer/peer_impl.h"

/* Core takes an address as a part of a URI. */
#define PEER_ADDRESS_CHARS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._:"

struct peer_address {
	char host[PEER_PLACE_BYTES]; /* without brackets */
	char port[8];
};

/* Return: false: it is none. */
static bool peer_address_split(const char *at, unsigned least, struct peer_address *ret)
{
	const char *colon = strrchr(at, ':');
	size_t n = colon ? (size_t)(colon - at) : 0;
	char *end = NULL;
	long port = colon ? strtol(colon + 1, &end, 10) : 0;

	if (n == 0 || strlen(at) >= PEER_PLACE_BYTES || colon[1] < '0' || colon[1] > '9' || *end ||
	    port < (long)least || port > 65535)
		return false;
	if (at[0] == '[' && at[n - 1] == ']' && n > 2)
		snprintf(ret->host, sizeof(ret->host), "%.*s", (int)n - 2, at + 1);
	else
		snprintf(ret->host, sizeof(ret->host), "%.*s", (int)n, at);
	snprintf(ret->port, sizeof(ret->port), "%ld", port);
	return ret->host[strspn(ret->host, PEER_ADDRESS_CHARS)] == '\0' &&
	       (at[0] == '[' || !strchr(ret->host, ':'));
}

/* Other names may be of any address, and are not asked for: that may block. */
static bool peer_address_is_loopback(const char *host)
{
	struct in6_addr six;
	struct in_addr four;

	if (inet_pton(AF_INET, host, &four) == 1)
		return ntohl(four.s_addr) >> 24 == 127;
	if (inet_pton(AF_INET6, host, &six) == 1)
		return IN6_IS_ADDR_LOOPBACK(&six);
	return strcmp(host, "localhost") == 0;
}

int peer_address_check(const struct peers *ps, const char *at, unsigned least, struct fault *f)
{
	struct peer_address a;

	if (!peer_address_split(at, least, &a))
		return fault_set(f, FAULT_INVALID, "peer",
				 "'%.200s' is no address of a node: write HOST:PORT with a port "
				 "from %u to 65535, such as 10.0.0.1:7390 or [fd00::1]:7390",
				 at, least);
	if (!ps->certs && !ps->plain_anywhere && !peer_address_is_loopback(a.host))
		return fault_set(f, FAULT_DENIED, "peer",
				 "%.200s is not an address of loopback, and there is no "
				 "certificate: set the CA, the certificate and the key, or allow "
				 "links without TLS",
				 at);
	return 0;
}

int peer_address_why(const char *at, struct fault *f)
{
	struct addrinfo hints = { .ai_flags = AI_PASSIVE | AI_NUMERICSERV,
				  .ai_socktype = SOCK_STREAM };
	_cleanup_(fd_closep) int fd = -1;
	struct addrinfo *list = NULL;
	struct peer_address a;
	int r, e = EADDRNOTAVAIL;

	if (!peer_address_split(at, 0, &a))
		return fault_set(f, FAULT_INVALID, "peer", "'%.200s' is no address", at);
	r = getaddrinfo(a.host, a.port, &hints, &list);
	if (r)
		return fault_set(f, FAULT_INVALID, "peer",
				 "'%.200s' cannot be listened on: %s: write an address of this "
				 "machine",
				 at, gai_strerror(r));
	fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || bind(fd, list->ai_addr, list->ai_addrlen) < 0)
		e = errno;
	freeaddrinfo(list);
	return fault_set(f, FAULT_INTERNAL, "peer",
			 "%.200s cannot be listened on: %s: choose another address, or end the "
			 "program that has it",
			 at, strerror(e));
}
