/*
 * The user at the other end of an HTTP connection. Of a unix socket the kernel tells it at once. Of TCP it tells whose
 * socket the other end is if that is on this machine, in this network namespace (sock_diag(7)); of all others
 * nothing is known but the address. Loop thread only; does not block.
 */
#ifndef SHARDD_HTTP_HTTP_PEER_H
#define SHARDD_HTTP_HTTP_PEER_H

#include <netinet/in.h>
#include <stdbool.h>
#include <sys/types.h>

struct http_peer {
	bool known; /* uid is */
	uid_t uid;
	gid_t gid; /* of a unix socket, if it is known; else (gid_t)-1 */
	bool is_unix;
	char address[INET6_ADDRSTRLEN]; /* of TCP; of IPv6 the network, /64; "": unix */
};

/* @fd: accepted. */
void http_peer_find(int fd, struct http_peer *ret);

#endif
