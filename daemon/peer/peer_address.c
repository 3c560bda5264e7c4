/* Addresses of nodes (core/hostport.h): may they be used, and why can one not be listened on? */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "core/cleanup.h"
#include "core/hostport.h"
#include "peer/peer_impl.h"

/* Return: false: it is none. */
static bool peer_address_read(const char *at, unsigned least, struct hostport *ret)
{
	return strlen(at) < PEER_PLACE_BYTES &&
	       (least ? hostport_parse(at, ret) : hostport_parse_any(at, ret));
}

int peer_address_check(const struct peers *ps, const char *at, unsigned least, struct fault *f)
{
	struct hostport a;

	if (!peer_address_read(at, least, &a))
		return fault_set(f, FAULT_INVALID, "peer",
				 "'%.200s' is no address of a node: write HOST:PORT with a port "
				 "from %u to 65535, such as 10.0.0.1:7390 or [fd00::1]:7390",
				 at, least);
	if (!ps->certs && !ps->plain_anywhere && !hostport_is_loopback(a.host))
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
	struct hostport a;
	char port[8];
	int r, e = EADDRNOTAVAIL;

	if (!peer_address_read(at, 0, &a))
		return fault_set(f, FAULT_INVALID, "peer", "'%.200s' is no address", at);
	snprintf(port, sizeof(port), "%u", a.port);
	r = getaddrinfo(a.host, port, &hints, &list);
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
