#include "sidecar.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "stash.h"
#include "outer.h"

#define SIDECAR_FAILED 1

enum { SIDECAR_SIGNAL, SIDECAR_LISTENER, SIDECAR_HOLDER, SIDECAR_N };

static struct sidecar {
	struct pollfd fds[SIDECAR_N]; /* -1: none */
	struct stash kept;
	bool ending; /* the pod */
} sidecar;

static int sidecar_fail(const char *what, const char *path)
{
	stash_say("%s %s: %s", what, path, strerror(errno));
	return SIDECAR_FAILED;
}

static bool sidecar_has_holder(void)
{
	return sidecar.fds[SIDECAR_HOLDER].fd >= 0;
}

/* All that the holder has sent; it may be gone by now. */
static void sidecar_read(void)
{
	static char text[STASH_TEXT_MAX + 1];
	int r, fd;

	while (sidecar_has_holder()) {
		r = outer_receive(sidecar.fds[SIDECAR_HOLDER].fd, false, text, &fd);
		if (r < 0 && errno == EAGAIN)
			return;
		if (r > 0) {
			outer_obey(&sidecar.kept, text, fd);
			continue;
		}
		close(sidecar.fds[SIDECAR_HOLDER].fd);
		sidecar.fds[SIDECAR_HOLDER].fd = -1;
		stash_say("the holder is gone; %zu descriptors are kept", sidecar.kept.n);
	}
}

/* Takes @fd. A second holder is refused, and tries again: it is the successor of the first one, or a
 * mistake. */
static void sidecar_welcome(int fd)
{
	sidecar_read();
	if (sidecar_has_holder()) {
		close(fd);
		return;
	}
	if ((sidecar.ending && !outer_send(fd, OUTER_END "=1", -1)) ||
	    !outer_send_all(fd, &sidecar.kept, true)) {
		stash_say("a holder that has come is gone: %s", strerror(errno));
		close(fd);
		return;
	}
	sidecar.fds[SIDECAR_HOLDER].fd = fd;
	stash_say("a holder has come, and has got %zu descriptors", sidecar.kept.n);
}

/* The pod ends. The caller waits until the holder knows. */
static void sidecar_on_end(int fd)
{
	sidecar.ending = true;
	if (sidecar_has_holder() && !outer_send(sidecar.fds[SIDECAR_HOLDER].fd, OUTER_END "=1", -1))
		stash_say("the holder does not hear that the pod ends: %s", strerror(errno));
	close(fd);
}

static void sidecar_accept(void)
{
	static char text[STASH_TEXT_MAX + 1];
	int fd = outer_accept(sidecar.fds[SIDECAR_LISTENER].fd), got = -1, r;

	if (fd < 0) {
		stash_say("a connection is refused: %s", strerror(errno));
		return;
	}
	r = outer_receive(fd, true, text, &got);
	if (got >= 0)
		close(got);
	if (r > 0 && stash_is_set(text, OUTER_END))
		sidecar_on_end(fd);
	else if (r > 0 && stash_is_set(text, OUTER_HELLO))
		sidecar_welcome(fd);
	else
		close(fd);
}

static int sidecar_signals(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	return sigprocmask(SIG_BLOCK, &set, NULL) < 0 ? -1 : signalfd(-1, &set, SFD_CLOEXEC);
}

int sidecar_keep(const char *path)
{
	for (int i = 0; i < SIDECAR_N; i++)
		sidecar.fds[i] = (struct pollfd){ .fd = -1, .events = POLLIN };
	stash_limit(&sidecar.kept);
	sidecar.fds[SIDECAR_SIGNAL].fd = sidecar_signals();
	sidecar.fds[SIDECAR_LISTENER].fd = outer_listen(path);
	if (sidecar.fds[SIDECAR_SIGNAL].fd < 0 || sidecar.fds[SIDECAR_LISTENER].fd < 0)
		return sidecar_fail("listening at", path);
	while (!sidecar.fds[SIDECAR_SIGNAL].revents) {
		if (poll(sidecar.fds, SIDECAR_N, -1) < 0 && errno != EINTR)
			return sidecar_fail("poll for", path);
		if (sidecar.fds[SIDECAR_HOLDER].revents)
			sidecar_read();
		if (sidecar.fds[SIDECAR_LISTENER].revents)
			sidecar_accept();
	}
	if (sidecar.kept.n)
		stash_say("told to end: %zu descriptors are given up", sidecar.kept.n);
	return 0;
}

int sidecar_end(const char *path)
{
	int fd = outer_connect(path);
	char text[STASH_TEXT_MAX + 1];
	int got;

	if (fd < 0 || !outer_send(fd, OUTER_END "=1", -1))
		return sidecar_fail("no keeper at", path);
	return outer_receive(fd, true, text, &got) == 0 ? 0 : sidecar_fail("no answer at", path);
}
