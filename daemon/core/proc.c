#include "core/proc.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/cleanup.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define PROC_MAGIC 0x50524f43u

struct proc {
	uint32_t magic;
	unsigned refs;
	pid_t pid;
	uid_t uid;
	gid_t gid;
	int pidfd;
	bool gone;
	uint64_t began;      /* 0: not asked for yet, or not known */
	uv_poll_t poll;      /* closed, with the pidfd, once the process is gone */
	uv_timer_t late;     /* so that later watchers are told */
	unsigned handles;    /* of the two that are not closed yet */
	struct list watches; /* of struct proc_watch */
};

static void proc_tell_watches(struct proc *p)
{
	/* A callback may drop the last other reference, so we hold one. */
	proc_ref(p);
	while (!list_empty(&p->watches)) {
		struct proc_watch *w = list_first(&p->watches, struct proc_watch, link);

		list_unlink(&w->link);
		w->fn(w);
	}
	proc_unref(p);
}

/* The last handle of a proc without references: nothing refers to it any more. */
static void proc_handle_closed(struct proc *p)
{
	CHECK(p->handles > 0);
	if (--p->handles || p->refs)
		return;
	p->magic = 0;
	free(p);
}

static void proc_on_poll_closed(uv_handle_t *handle)
{
	struct proc *p = handle->data;

	MAGIC_CHECK(p, PROC_MAGIC);
	p->pidfd = fd_close(p->pidfd);
	proc_handle_closed(p);
}

static void proc_on_late_closed(uv_handle_t *handle)
{
	MAGIC_CHECK((struct proc *)handle->data, PROC_MAGIC);
	proc_handle_closed(handle->data);
}

static void proc_on_pidfd(uv_poll_t *poll, int status, int events)
{
	struct proc *p = poll->data;

	(void)status;
	(void)events;
	MAGIC_CHECK(p, PROC_MAGIC);
	p->gone = true;
	/* the proc may be kept long after this; its descriptor is not needed */
	uv_close((uv_handle_t *)&p->poll, proc_on_poll_closed);
	proc_tell_watches(p);
}

static void proc_on_late(uv_timer_t *timer)
{
	proc_tell_watches(timer->data);
}

static int proc_open_pidfd(pid_t pid)
{
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);

	return fd < 0 ? -errno : fd;
}

static int proc_new_fd(uv_loop_t *loop, int pidfd, const struct ucred *cred, struct proc **ret)
{
	struct proc *p = calloc(1, sizeof(*p));
	int r;

	if (!p) {
		fd_close(pidfd);
		return -ENOMEM;
	}
	*p = (struct proc){ .magic = PROC_MAGIC,
			    .refs = 1,
			    .pid = cred->pid,
			    .uid = cred->uid,
			    .gid = cred->gid,
			    .pidfd = pidfd };
	list_init(&p->watches);
	r = uv_poll_init(loop, &p->poll, pidfd);
	if (r < 0) {
		fd_close(pidfd);
		free(p);
		return r;
	}
	p->poll.data = p;
	uv_timer_init(loop, &p->late);
	p->late.data = p;
	p->handles = 2;
	r = uv_poll_start(&p->poll, UV_READABLE, proc_on_pidfd);
	CHECK(r == 0);
	*ret = p;
	return 0;
}

int proc_new_peer(uv_loop_t *loop, int sock, struct proc **ret)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);
	int pidfd = -1;

	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return -errno;
	len = sizeof(pidfd);
	if (getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len) < 0)
		pidfd = proc_open_pidfd(cred.pid);
	if (pidfd < 0)
		return pidfd;
	return proc_new_fd(loop, pidfd, &cred, ret);
}

int proc_new_pid(uv_loop_t *loop, pid_t pid, uid_t uid, gid_t gid, struct proc **ret)
{
	int pidfd = proc_open_pidfd(pid);

	if (pidfd < 0)
		return pidfd;
	return proc_new_fd(loop, pidfd, &(struct ucred){ pid, uid, gid }, ret);
}

struct proc *proc_ref(struct proc *p)
{
	MAGIC_CHECK(p, PROC_MAGIC);
	p->refs++;
	return p;
}

struct proc *proc_unref(struct proc *p)
{
	if (!p)
		return NULL;
	MAGIC_CHECK(p, PROC_MAGIC);
	CHECK(p->refs > 0);
	if (--p->refs)
		return NULL;
	CHECK(list_empty(&p->watches));
	if (!uv_is_closing((uv_handle_t *)&p->poll))
		uv_close((uv_handle_t *)&p->poll, proc_on_poll_closed);
	uv_close((uv_handle_t *)&p->late, proc_on_late_closed);
	return NULL;
}

pid_t proc_pid(const struct proc *p)
{
	return p->pid;
}

uid_t proc_uid(const struct proc *p)
{
	return p->uid;
}

gid_t proc_gid(const struct proc *p)
{
	return p->gid;
}

bool proc_gone(const struct proc *p)
{
	return p->gone;
}

/* Fields 3 and 22 of /proc/PID/stat; the name in the second one may contain anything. Return: true: they are
 * the process's own. */
static bool proc_read_stat(const struct proc *p, char *ret_state, uint64_t *ret_began)
{
	struct pollfd gone = { .fd = p->pidfd, .events = POLLIN };
	_cleanup_(fclosep) FILE *f = NULL;
	char path[32], text[1024];
	const char *at;
	size_t n;

	if (p->gone)
		return false;
	snprintf(path, sizeof(path), "/proc/%d/stat", (int)p->pid);
	f = fopen(path, "re");
	n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
	text[n] = '\0';
	at = strrchr(text, ')');
	if (!at || sscanf(at + 1,
			  " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d "
			  "%*d %" SCNu64,
			  ret_state, ret_began) != 2)
		return false;
	/* it lives still, so that the number was its own meanwhile */
	return poll(&gone, 1, 0) == 0;
}

uint64_t proc_began(struct proc *p)
{
	uint64_t began;
	char state;

	if (!p->began && proc_read_stat(p, &state, &began))
		p->began = began;
	return p->began;
}

char proc_state(struct proc *p)
{
	uint64_t began;
	char state;

	/* of a process that lives: its first thread has ended, and others have not */
	return proc_read_stat(p, &state, &began) && state != 'Z' ? state : '\0';
}

void proc_watch(struct proc *p, struct proc_watch *w, proc_gone_cb fn)
{
	w->fn = fn;
	list_append(&p->watches, &w->link);
	if (p->gone)
		uv_timer_start(&p->late, proc_on_late, 0, 0);
}
