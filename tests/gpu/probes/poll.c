/* P4: what poll and epoll say about the descriptor of an allocation. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "stage.h"

static void allocator(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	struct vmm v;

	actor_cuda(a);
	vmm_create(a, 2 * MIB, &v);
	m.fd = vmm_export(a, &v);
	m.value[0] = v.bytes;
	actor_tell(a, &m);
	actor_hear(a, &m);
}

/* Events that poll reports within 200 ms; below 0: none. */
static int polled(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN | POLLOUT | POLLPRI | POLLRDHUP };

	return poll(&p, 1, 200) > 0 ? p.revents : -1;
}

static void polled_text(char *buf, size_t bytes, int events)
{
	static const struct {
		short event;
		const char *name;
	} names[] = { { POLLIN, "in" },     { POLLOUT, "out" },    { POLLPRI, "pri" },
		      { POLLERR, "error" }, { POLLHUP, "hangup" }, { POLLNVAL, "invalid" } };
	size_t n = 0;

	snprintf(buf, bytes, "nothing");
	for (unsigned i = 0; events > 0 && i < 6; i++)
		if (events & names[i].event)
			n += (size_t)snprintf(buf + n, bytes - n, "%s%s", n ? ", " : "",
					      names[i].name);
}

static void look(struct stage *s, const char *name, int fd)
{
	char text[64], figure[56];
	struct epoll_event e = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP };
	int set = epoll_create1(EPOLL_CLOEXEC);

	stage_step(s, "poll, %s", name);
	polled_text(text, sizeof(text), polled(fd));
	snprintf(figure, sizeof(figure), "poll_%s", name);
	stage_text(s, figure, "%s", text);
	snprintf(figure, sizeof(figure), "epoll_%s", name);
	stage_step(s, "epoll, %s", name);
	if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &e) < 0)
		stage_text(s, figure, "refused: %s", strerrordesc_np(errno));
	else if (epoll_wait(set, &e, 1, 200) <= 0)
		stage_text(s, figure, "nothing");
	else {
		polled_text(text, sizeof(text), (int)e.events);
		stage_text(s, figure, "%s", text);
	}
	close(set);
}

void probe_poll(struct stage *s)
{
	struct role owner = role_start(s, "the allocator", allocator, NULL);
	struct message m;
	int before, after;

	stage_step(s, "allocating");
	role_must(s, &owner, 20000, &m);
	look(s, "while_it_lives", m.fd);
	before = polled(m.fd);
	role_kill(s, &owner);
	look(s, "after_its_death", m.fd);
	after = polled(m.fd);
	close(m.fd);
	stage_answer(s, after >= 0 && after & (POLLHUP | POLLERR)
				? "The exporter's death is reported: a supervisor that polls the "
				  "descriptor would drop it (FDPOLL=0)."
				: "No hang-up or error is reported when the exporter dies.");
	stage_answer(s, before == after ? "Nothing changes with its death."
					: "What is reported changes with its death.");
}
