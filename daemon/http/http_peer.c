#include "http/http_peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/cleanup.h"

union http_address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
	struct sockaddr_storage room;
};

struct http_peer_ask {
	struct nlmsghdr head;
	struct inet_diag_req_v2 ask;
};

static void http_peer_set_end(const union http_address *a, __be32 address[4], __be16 *ret_port)
{
	if (a->any.sa_family == AF_INET) {
		memcpy(address, &a->v4.sin_addr, sizeof(a->v4.sin_addr));
		*ret_port = a->v4.sin_port;
	} else {
		memcpy(address, &a->v6.sin6_addr, sizeof(a->v6.sin6_addr));
		*ret_port = a->v6.sin6_port;
	}
}

/* A socket that its process has closed belongs to nobody, and the kernel calls that root. */
static bool http_peer_is_open(const struct inet_diag_msg *m)
{
	return m->idiag_inode &&
	       (m->idiag_state == TCP_ESTABLISHED || m->idiag_state == TCP_FIN_WAIT1 ||
		m->idiag_state == TCP_FIN_WAIT2);
}

static bool http_peer_read(int fd, uid_t *ret)
{
	union {
		struct nlmsghdr head;
		char room[4096];
	} reply;
	ssize_t n = recv(fd, &reply, sizeof(reply), MSG_DONTWAIT);
	const struct inet_diag_msg *m = NLMSG_DATA(&reply.head);

	if (n < (ssize_t)NLMSG_LENGTH(sizeof(*m)) || reply.head.nlmsg_type != SOCK_DIAG_BY_FAMILY ||
	    !http_peer_is_open(m))
		return false;
	*ret = m->idiag_uid;
	return true;
}

/* Whose socket is the one from @far to @near? */
static bool http_peer_ask(const union http_address *near, const union http_address *far, uid_t *ret)
{
	_cleanup_(fd_closep) int fd =
		socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
	struct http_peer_ask a = {
		.head = { .nlmsg_len = sizeof(a),
			  .nlmsg_type = SOCK_DIAG_BY_FAMILY,
			  .nlmsg_flags = NLM_F_REQUEST },
		.ask = { .sdiag_family = (uint8_t)far->any.sa_family,
			 .sdiag_protocol = IPPROTO_TCP,
			 .idiag_states = ~0u,
			 .id = { .idiag_cookie = { INET_DIAG_NOCOOKIE, INET_DIAG_NOCOOKIE } } },
	};

	if (fd < 0)
		return false;
	http_peer_set_end(far, a.ask.id.idiag_src, &a.ask.id.idiag_sport);
	http_peer_set_end(near, a.ask.id.idiag_dst, &a.ask.id.idiag_dport);
	return send(fd, &a, sizeof(a), MSG_DONTWAIT) == (ssize_t)sizeof(a) &&
	       http_peer_read(fd, ret);
}

static void http_peer_find_unix(int fd, struct http_peer *ret)
{
	struct ucred cred;
	socklen_t n = sizeof(cred);

	ret->is_unix = true;
	ret->known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) == 0;
	ret->uid = ret->known ? cred.uid : 0;
	ret->gid = ret->known ? cred.gid : (gid_t)-1;
}

/* One who has an IPv6 address has all of its network. */
static void http_peer_write_address(const union http_address *far, struct http_peer *ret)
{
	union http_address a = *far;

	if (a.any.sa_family == AF_INET6)
		memset(&a.v6.sin6_addr.s6_addr[8], 0, 8);
	inet_ntop(a.any.sa_family,
		  a.any.sa_family == AF_INET ? (void *)&a.v4.sin_addr : (void *)&a.v6.sin6_addr,
		  ret->address, sizeof(ret->address));
}

void http_peer_find(int fd, struct http_peer *ret)
{
	union http_address near = { 0 }, far = { 0 };
	socklen_t n = sizeof(near), m = sizeof(far);

	*ret = (struct http_peer){ .gid = (gid_t)-1 };
	if (getsockname(fd, &near.any, &n) < 0)
		return;
	if (near.any.sa_family == AF_UNIX) {
		http_peer_find_unix(fd, ret);
		return;
	}
	if (getpeername(fd, &far.any, &m) < 0 || far.any.sa_family != near.any.sa_family)
		return;
	ret->known = http_peer_ask(&near, &far, &ret->uid);
	http_peer_write_address(&far, ret);
}
