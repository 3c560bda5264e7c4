/* Processes of a probe, and what they say to each other. */
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stage.h"

#define KILL_LIMIT_MS 20000

static int send_message(int sock, const struct message *m)
{
	struct iovec iov = { (void *)m, sizeof(*m) };
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (m->fd >= 0) {
		struct cmsghdr *c = &control.align;

		h.msg_control = control.bytes;
		h.msg_controllen = sizeof(control.bytes);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &m->fd, sizeof(int));
	}
	return sendmsg(sock, &h, MSG_NOSIGNAL) == (ssize_t)sizeof(*m) ? 0 : -EPIPE;
}

/* @ms: below 0 without limit. */
static int receive_message(int sock, int ms, struct message *ret)
{
	struct iovec iov = { ret, sizeof(*ret) };
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr h = { .msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = control.bytes,
			    .msg_controllen = sizeof(control.bytes) };
	struct pollfd p = { .fd = sock, .events = POLLIN };
	struct cmsghdr *c;

	if (poll(&p, 1, ms) == 0)
		return -ETIMEDOUT;
	if (recvmsg(sock, &h, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof(*ret))
		return -EPIPE;
	c = CMSG_FIRSTHDR(&h);
	ret->fd = -1;
	if (c && c->cmsg_type == SCM_RIGHTS)
		memcpy(&ret->fd, CMSG_DATA(c), sizeof(int));
	return 0;
}

/* --------------------------------------------------------------- director */

/* Nothing of the director's descriptors may stay: one of an allocation keeps it alive. */
static int keep_only(int sock, int fd)
{
	int high = fcntl(sock, F_DUPFD_CLOEXEC, 200), kept = -1;

	if (fd >= 0)
		kept = fcntl(fd, F_DUPFD_CLOEXEC, high + 1);
	dup2(high, 3);
	if (kept >= 0)
		dup2(kept, 4);
	close_range(kept >= 0 ? 5 : 4, ~0u, 0);
	return kept >= 0 ? 4 : -1;
}

static _Noreturn void actor_main(struct actor *a, actor_fn fn, pid_t director)
{
	struct message order = *a->order;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != director)
		_exit(1);
	order.fd = keep_only(a->sock, order.fd);
	a->sock = 3;
	a->order = &order;
	fn(a);
	_exit(0);
}

struct role role_start(struct stage *s, const char *name, actor_fn fn, const struct message *order)
{
	static const struct message none = { .fd = -1 };
	struct actor a = { .stage = s, .name = name, .order = order ? order : &none };
	struct role r = { .name = name };
	pid_t director = getpid();
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		stage_fail(s, "cannot make a socket: %s", strerrordesc_np(errno));
	r.sock = pair[0];
	r.pid = fork();
	if (r.pid == 0) {
		close(pair[0]);
		a.sock = pair[1];
		actor_main(&a, fn, director);
	}
	close(pair[1]);
	if (r.pid < 0)
		stage_fail(s, "cannot start a process: %s", strerrordesc_np(errno));
	return r;
}

void role_tell(struct stage *s, struct role *r, const struct message *m)
{
	static const struct message go_on = { .fd = -1 };
	char how[64];

	if (send_message(r->sock, m ? m : &go_on) < 0)
		stage_fail(s, "%s %s", r->name, role_how(r, how, sizeof(how)));
}

/* Wait for its end. Return: it has ended. */
static bool reap(struct role *r, unsigned ms)
{
	uint64_t end = now_ns() + (uint64_t)ms * 1000000;

	while (r->pid > 0) {
		if (waitpid(r->pid, &r->ended, WNOHANG) == r->pid)
			r->pid = 0;
		else if (now_ns() >= end)
			return false;
		else
			poll(NULL, 0, 1);
	}
	return true;
}

int role_hear(struct stage *s, struct role *r, unsigned ms, struct message *ret)
{
	int rc = receive_message(r->sock, (int)ms, ret);

	(void)s;
	if (rc == -EPIPE)
		reap(r, 1000);
	return rc;
}

void role_must(struct stage *s, struct role *r, unsigned ms, struct message *ret)
{
	struct message m;
	char how[64];
	int rc = role_hear(s, r, ms, &m);

	if (rc == -ETIMEDOUT)
		stage_fail(s, "%s: %s did not answer in %u s", s->step, r->name, ms / 1000);
	if (rc < 0)
		stage_fail(s, "%s: %s %s", s->step, r->name, role_how(r, how, sizeof(how)));
	if (m.status)
		stage_fail(s, "%s: %s: %s", s->step, r->name, m.text);
	if (ret)
		*ret = m;
	else if (m.fd >= 0)
		close(m.fd);
}

double role_kill(struct stage *s, struct role *r)
{
	uint64_t begin = now_ns();

	(void)s;
	if (r->pid > 0)
		kill(r->pid, SIGKILL);
	if (!reap(r, KILL_LIMIT_MS))
		return -1;
	close(r->sock);
	r->sock = -1;
	return (double)(now_ns() - begin) / 1e6;
}

void role_end(struct stage *s, struct role *r)
{
	shutdown(r->sock, SHUT_RDWR);
	if (!reap(r, KILL_LIMIT_MS))
		stage_fail(s, "%s: %s does not end", s->step, r->name);
	close(r->sock);
	r->sock = -1;
}

const char *role_how(const struct role *r, char *buf, size_t bytes)
{
	if (r->pid > 0)
		snprintf(buf, bytes, "has closed its socket");
	else if (WIFSIGNALED(r->ended))
		snprintf(buf, bytes, "ended with signal %d", WTERMSIG(r->ended));
	else
		snprintf(buf, bytes, "ended with code %d", WEXITSTATUS(r->ended));
	return buf;
}

/* ------------------------------------------------------------------ actor */

void actor_tell(struct actor *a, const struct message *m)
{
	if (send_message(a->sock, m) < 0)
		_exit(2);
}

void actor_done(struct actor *a, uint64_t v0, uint64_t v1)
{
	struct message m = MESSAGE_NULL;

	m.value[0] = v0;
	m.value[1] = v1;
	actor_tell(a, &m);
}

void actor_hear(struct actor *a, struct message *ret)
{
	if (receive_message(a->sock, -1, ret) < 0)
		_exit(0);
}

void actor_fail(struct actor *a, int status, const char *fmt, ...)
{
	struct message m = MESSAGE_NULL;
	va_list args;

	m.status = status ? status : -1;
	va_start(args, fmt);
	vsnprintf(m.text, sizeof(m.text), fmt, args);
	va_end(args);
	actor_tell(a, &m);
	_exit(3);
}

const char *actor_text(struct actor *a, CUresult r, char buf[160])
{
	buf[0] = 0;
	return r == CUDA_SUCCESS ? buf : cuda_lib_text(a->cuda, r, buf, 160);
}

void actor_must(struct actor *a, CUresult r, const char *what)
{
	char text[160];

	if (r != CUDA_SUCCESS)
		actor_fail(a, (int)r, "%s: %s", what, actor_text(a, r, text));
}
