#include "etcdfix.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "await.h"

/* Not a port that the kernel gives to outgoing connections: those of a client that tries it until etcd is
 * back could take it. */
void etcdfix_port(char *ret, size_t bytes)
{
	static unsigned tries;
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	unsigned port;
	int fd, r;

	do {
		port = 16000 + ((unsigned)getpid() * 7 + tries++) % 16000;
		a.sin_port = htons((uint16_t)port);
		fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		cr_assert(fd >= 0 && tries < 16000);
		r = bind(fd, (struct sockaddr *)&a, sizeof(a));
		close(fd);
	} while (r < 0);
	snprintf(ret, bytes, "127.0.0.1:%u", port);
}

static bool etcdfix_accepts(const struct etcdfix *x)
{
	struct sockaddr_in a = { .sin_family = AF_INET,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
				 .sin_port = htons((uint16_t)atoi(strchr(x->client, ':') + 1)) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool yes = fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0;

	close(fd);
	return yes;
}

static void etcdfix_exec(const struct etcdfix *x)
{
	char client[64], peer[64], cluster[80];
	int null = open("/dev/null", O_RDWR);

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	dup2(null, 0);
	dup2(null, 1);
	dup2(null, 2);
	snprintf(client, sizeof(client), "http://%s", x->client);
	snprintf(peer, sizeof(peer), "http://%s", x->peer);
	snprintf(cluster, sizeof(cluster), "one=%s", peer);
	execlp("etcd", "etcd", "--name", "one", "--data-dir", x->dir, "--listen-client-urls",
	       client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
	       "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster, NULL);
	_exit(127);
}

void etcdfix_again(struct etcdfix *x)
{
	x->pid = fork();
	cr_assert(x->pid >= 0);
	if (x->pid == 0)
		etcdfix_exec(x);
	AWAIT(etcdfix_accepts(x), 30);
}

void etcdfix_begin(struct etcdfix *x)
{
	*x = (struct etcdfix){ .dir = "/tmp/shardd-etcd-XXXXXX" };
	if (access("/usr/bin/etcd", X_OK) < 0)
		cr_skip_test("there is no etcd: deploy/install-deps --test");
	cr_assert(mkdtemp(x->dir));
	etcdfix_port(x->client, sizeof(x->client));
	etcdfix_port(x->peer, sizeof(x->peer));
	etcdfix_again(x);
}

void etcdfix_kill(struct etcdfix *x)
{
	if (x->pid <= 0)
		return;
	kill(x->pid, SIGKILL);
	waitpid(x->pid, NULL, 0);
	x->pid = 0;
}

void etcdfix_end(struct etcdfix *x)
{
	const char *const argv[] = { "rm", "-rf", x->dir, NULL };
	pid_t pid;

	etcdfix_kill(x);
	pid = fork();
	if (pid == 0) {
		execvp("rm", (char **)argv);
		_exit(127);
	}
	cr_expect(pid > 0 && waitpid(pid, NULL, 0) == pid);
}
