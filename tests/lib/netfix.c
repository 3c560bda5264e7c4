#include "netfix.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"

enum { PATIENCE_S = 20 };

struct netfix netfix;

void netfix_begin(void)
{
	/* libuv keeps a pipe for the life of the process, made with the first loop */
	looprun_init(&netfix.run);
	looprun_deinit(&netfix.run);
	fdcheck_begin();
	looprun_init(&netfix.run);
	strcpy(netfix.dir, "/tmp/shardd-test-XXXXXX");
	cr_assert_neq(mkdtemp(netfix.dir), NULL);
	cr_assert_eq(chmod(netfix.dir, 0755), 0);
	snprintf(netfix.path, sizeof(netfix.path), "%s/s", netfix.dir);
	netfix.options = (struct listener_options){ .path = netfix.path,
						    .inherited_fd = -1,
						    .mode = 0660,
						    .max_connections = 4096,
						    .hello_timeout_us = 60 * 1000000ull };
}

void netfix_end(void)
{
	netfix.listener = listener_close(netfix.listener);
	for (unsigned i = 0; i < netfix.n_conns; i++)
		if (netfix.conns[i])
			conn_close(netfix.conns[i]);
	looprun_deinit(&netfix.run);
	/* fails if the listener or the test left a file */
	cr_assert_eq(rmdir(netfix.dir), 0, "%s: %s", netfix.dir, strerror(errno));
	fdcheck_end();
}

void netfix_need_root(void)
{
	if (getuid() == 0)
		return;
	/* a skipped test has no .fini */
	rmdir(netfix.dir);
	cr_skip("needs root");
}

static void on_closed(struct conn *c, void *userdata)
{
	(void)userdata;
	for (unsigned i = 0; i < netfix.n_conns; i++)
		if (netfix.conns[i] == c)
			netfix.conns[i] = NULL;
	netfix.n_closed++;
	listener_conn_ended(netfix.listener);
}

void netfix_on_conn(struct conn *c, void *userdata)
{
	cr_assert_eq(userdata, &netfix);
	cr_assert_lt(netfix.n_conns, NETFIX_CONNS);
	netfix.conns[netfix.n_conns++] = c;
	conn_on_closed(c, on_closed, NULL);
}

void netfix_listen(void)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(listener_new(&netfix.run.loop, &netfix.options, netfix_on_conn, &netfix,
				  &netfix.listener, &f),
		     0, "%s", f.text);
}

int netfix_connect(const char *path)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un a = { .sun_family = AF_UNIX };

	strcpy(a.sun_path, path);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
		fd = fd_close(fd);
	return fd;
}

int netfix_client(const char *hello)
{
	int fd = netfix_connect(netfix.path);

	cr_assert_geq(fd, 0, "connect: %s", strerror(errno));
	if (hello)
		cr_assert_eq(send(fd, hello, strlen(hello), MSG_NOSIGNAL), (ssize_t)strlen(hello));
	return fd;
}

static bool conns_are(void *n)
{
	return netfix.n_conns == *(unsigned *)n;
}

static bool closed_are(void *n)
{
	return netfix.n_closed == *(unsigned *)n;
}

static bool open_are(void *n)
{
	return listener_connections(netfix.listener) == *(unsigned *)n;
}

static bool ended(void *fd)
{
	char byte;
	ssize_t n = recv(*(int *)fd, &byte, 1, MSG_DONTWAIT);

	/* reset: it was closed with our bytes unread */
	return n == 0 || (n < 0 && errno == ECONNRESET);
}

void netfix_await_conns(unsigned n)
{
	looprun_until(&netfix.run, conns_are, &n, PATIENCE_S);
}

void netfix_await_closed(unsigned n)
{
	looprun_until(&netfix.run, closed_are, &n, PATIENCE_S);
}

void netfix_await_open(unsigned n)
{
	looprun_until(&netfix.run, open_are, &n, PATIENCE_S);
}

void netfix_await_end(int fd)
{
	looprun_until(&netfix.run, ended, &fd, PATIENCE_S);
}

void netfix_turn(unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		uv_run(&netfix.run.loop, UV_RUN_NOWAIT);
}
