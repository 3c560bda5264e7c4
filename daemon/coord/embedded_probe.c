/* Does anything accept connections at a seed's peer port? A thread of libuv's asks: at all addresses of the
 * name, since an etcd listens at one of them only. */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>

#include "coord/embedded_impl.h"
#include "core/check.h"
#include "core/cleanup.h"

#define PROBE_MS 1500

static bool embedded_probe_connects(const struct addrinfo *a)
{
	_cleanup_(fd_closep) int fd =
		socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	struct pollfd p = { .fd = fd, .events = POLLOUT };
	socklen_t bytes = sizeof(int);
	int error = 0;

	if (fd < 0)
		return true; /* without a descriptor nothing is known, and no store is made */
	if (connect(fd, a->ai_addr, a->ai_addrlen) == 0)
		return true;
	if (errno != EINPROGRESS)
		return false;
	return poll(&p, 1, PROBE_MS) == 1 &&
	       getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0;
}

static void embedded_probe_work(uv_work_t *work)
{
	struct embedded_probe *p = CONTAINER_OF(work, struct embedded_probe, work);
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *list = NULL;
	char port[8];

	snprintf(port, sizeof(port), "%u", p->seed->peer_port);
	if (getaddrinfo(p->seed->host, port, &hints, &list))
		return;
	for (const struct addrinfo *a = list; a && !p->accepts; a = a->ai_next)
		p->accepts = embedded_probe_connects(a);
	freeaddrinfo(list);
}

static void embedded_probe_after(uv_work_t *work, int status)
{
	struct embedded_probe *p = CONTAINER_OF(work, struct embedded_probe, work);

	CHECK(status == 0); /* nobody cancels it */
	p->runs = false;
	embedded_on_probed(p->e);
}

int embedded_probe_begin(struct embedded *e, const struct seed *seed,
			 void (*done)(struct embedded *e, bool accepts))
{
	struct embedded_probe *p = &e->join.probe;

	CHECK(!p->runs);
	p->e = e;
	p->seed = seed;
	p->done = done;
	p->accepts = false;
	p->runs = uv_queue_work(e->loop, &p->work, embedded_probe_work, embedded_probe_after) == 0;
	return p->runs ? 0 : -ENOMEM;
}
