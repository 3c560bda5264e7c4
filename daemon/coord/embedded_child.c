/* The child of the embedded etcd: its folder and locks, its arguments, and its start. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "coord/embedded_impl.h"
#include "core/check.h"
#include "core/child.h"
#include "core/cleanup.h"

#define CHILD_PACKAGE  "install the package etcd-server, or set coord_etcd"
#define CHILD_ARGS     64u
#define CHILD_ENV      8u
#define CHILD_PID_TEXT 16
/* What the daemons agree on is a few MiB; the rest is what a compaction has not freed yet. */
#define CHILD_QUOTA_BYTES (1024u * 1024 * 1024)
/* Watches that fall further behind read all keys again. */
#define CHILD_KEPT_REVISIONS 10000u

/* ------------------------------------------------------------------------------ the program */

static bool embedded_child_is_program(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && S_ISREG(st.st_mode) && access(path, X_OK) == 0;
}

static int embedded_child_search(const char *path, char **ret)
{
	while (*path) {
		size_t n = strcspn(path, ":");
		char *at = NULL;

		if (n && asprintf(&at, "%.*s/etcd", (int)n, path) < 0)
			return -ENOMEM;
		if (at && embedded_child_is_program(at)) {
			*ret = at;
			return 0;
		}
		free(at);
		path += n + (path[n] == ':');
	}
	return -ENOENT;
}

int embedded_child_find(const char *etcd, char **ret, struct fault *f)
{
	const char *path = getenv("PATH");
	int r;

	if (etcd && *etcd && !embedded_child_is_program(etcd))
		return fault_set(f, FAULT_NOT_FOUND, "coord_etcd",
				 "coord_etcd is '%.200s', which is no program: " CHILD_PACKAGE,
				 etcd);
	if (etcd && *etcd) {
		*ret = strdup(etcd);
		return *ret ? 0 : fault_errno(f, -ENOMEM, "coord_etcd");
	}
	r = embedded_child_search(path ? path : "/usr/bin:/bin", ret);
	if (r == -ENOENT)
		return fault_set(f, FAULT_NOT_FOUND, "coord_etcd",
				 "there is no etcd in PATH (%.200s): " CHILD_PACKAGE,
				 path ? path : "not set");
	return r < 0 ? fault_errno(f, r, "coord_etcd") : 0;
}

/* --------------------------------------------------------------------- the folder and locks */

static void embedded_child_say(char why[EMBEDDED_WHY_BYTES], const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
static void embedded_child_say(char why[EMBEDDED_WHY_BYTES], const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, EMBEDDED_WHY_BYTES, fmt, args);
	va_end(args);
}

/* And the folders above it. */
static int embedded_child_make_dir(const char *dir)
{
	_cleanup_(freep) char *path = strdup(dir);

	if (!path)
		return -ENOMEM;
	for (char *at = path + 1; *at; at++) {
		if (*at != '/')
			continue;
		*at = '\0';
		if (mkdir(path, 0755) < 0 && errno != EEXIST)
			return -errno;
		*at = '/';
	}
	return mkdir(path, 0700) < 0 && errno != EEXIST ? -errno : 0;
}

/* Return: the file, with the lock or without it (@ret_held), or negative errno. */
static int embedded_child_lock(const char *dir, const char *name, bool *ret_held)
{
	_cleanup_(fd_closep) int fd = -1;
	_cleanup_(freep) char *path = NULL;

	if (asprintf(&path, "%s/%s", dir, name) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	*ret_held = flock(fd, LOCK_EX | LOCK_NB) < 0;
	if (*ret_held && errno != EWOULDBLOCK)
		return -errno;
	/* a child may never have it as one of its standard descriptors */
	if (fd <= STDERR_FILENO)
		return -EBADF;
	return STEAL_FD(fd);
}

static int embedded_child_complain(const struct embedded *e, int r, char why[EMBEDDED_WHY_BYTES])
{
	embedded_child_say(why,
			   "coord_dir '%.150s' cannot be used: %s; it must be a folder that the "
			   "daemon's user (uid %u) may write to",
			   e->setup.dir, strerror(-r), (unsigned)geteuid());
	return r;
}

static int embedded_child_own_dir(struct embedded *e, char why[EMBEDDED_WHY_BYTES])
{
	bool held = false;
	int fd, r;

	if (e->daemon_lock >= 0)
		return 0;
	r = embedded_child_make_dir(e->setup.dir);
	fd = r < 0 ? r : embedded_child_lock(e->setup.dir, "daemon.lock", &held);
	if (fd < 0)
		return embedded_child_complain(e, fd, why);
	if (held) {
		fd_close(fd);
		embedded_child_say(why, "another daemon uses coord_dir '%.150s': give each its own",
				   e->setup.dir);
		return -EBUSY;
	}
	e->daemon_lock = fd;
	return 0;
}

int embedded_child_own_data(struct embedded *e, bool *ret_data, char why[EMBEDDED_WHY_BYTES])
{
	_cleanup_(freep) char *path = NULL;
	int r = embedded_child_own_dir(e, why);

	*ret_data = false;
	if (r < 0)
		return r;
	if (asprintf(&path, "%s/data/member/wal", e->setup.dir) < 0) {
		path = NULL;
		return embedded_child_complain(e, -ENOMEM, why);
	}
	*ret_data = access(path, F_OK) == 0;
	return *ret_data || errno == ENOENT ? 0 : embedded_child_complain(e, -errno, why);
}

/* The one that holds the lock of @fd, whose pid is written there. Its daemon has ended, since its lock is
 * ours, and nobody else has a lock on this file: it may be killed. The pid is that of the holder,
 * unless it has just ended: so the lock is tried again with the process in our hand. */
static void embedded_child_end_other(int fd, pid_t *ret_pid)
{
	_cleanup_(fd_closep) int process = -1;
	char text[CHILD_PID_TEXT] = "";

	*ret_pid = 0;
	if (pread(fd, text, sizeof(text) - 1, 0) <= 0 || atoi(text) <= 1)
		return;
	process = (int)syscall(SYS_pidfd_open, atoi(text), 0);
	if (process < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0)
		return;
	*ret_pid = atoi(text);
	syscall(SYS_pidfd_send_signal, process, SIGKILL, NULL, 0);
}

/* @ret_fd: the lock that etcd inherits; its file is empty. */
static int embedded_child_lock_data(struct embedded *e, int *ret_fd, char why[EMBEDDED_WHY_BYTES])
{
	_cleanup_(fd_closep) int fd = -1;
	bool held = false;
	pid_t pid;

	fd = embedded_child_lock(e->setup.dir, "etcd.lock", &held);
	if (fd < 0)
		return embedded_child_complain(e, fd, why);
	if (held) {
		embedded_child_end_other(fd, &pid);
		embedded_child_say(why,
				   "an etcd of an earlier daemon still has the data in '%.150s': "
				   "%s (pid %d)",
				   e->setup.dir, pid ? "it was killed" : "its end is waited for",
				   (int)pid);
		return EMBEDDED_E_HELD;
	}
	if (ftruncate(fd, 0) < 0) /* what it says now is of a process that has ended */
		return embedded_child_complain(e, -errno, why);
	*ret_fd = STEAL_FD(fd);
	return 0;
}

/* ---------------------------------------------------------------------------- the arguments */

struct child_args {
	char *list[CHILD_ARGS + 1]; /* owned */
	size_t n;
	bool lacks; /* memory */
};

static void embedded_child_args_free(struct child_args *a)
{
	for (size_t i = 0; i < a->n; i++)
		free(a->list[i]);
}

static void embedded_child_add(struct child_args *a, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
static void embedded_child_add(struct child_args *a, const char *fmt, ...)
{
	va_list args;

	CHECK(a->n < CHILD_ARGS);
	va_start(args, fmt);
	if (vasprintf(&a->list[a->n], fmt, args) < 0)
		a->lacks = true;
	else
		a->n++;
	va_end(args);
}

static void embedded_child_add_url(const struct embedded *e, struct child_args *a,
				   const char *option, const char *host, uint16_t port)
{
	char at[HOSTPORT_TEXT_BYTES];

	hostport_format(host, port, at);
	embedded_child_add(a, "--%s=%s://%s", option, e->setup.cert ? "https" : "http", at);
}

/* Of a member with data etcd ignores all three. Should the data go meanwhile it finds no other member,
 * and ends: it makes no second store. */
static void embedded_child_add_cluster(const struct embedded *e, struct child_args *a)
{
	const struct embedded_join *j = &e->join;
	char at[HOSTPORT_TEXT_BYTES];

	hostport_format(e->setup.own->host, e->setup.own->peer_port, at);
	if (j->initial)
		embedded_child_add(a, "--initial-cluster=%s", j->initial);
	else
		embedded_child_add(a, "--initial-cluster=%s=%s://%s", e->setup.node,
				   e->setup.cert ? "https" : "http", at);
	embedded_child_add(a, "--initial-cluster-token=%s",
			   j->initial ? j->token : e->setup.cluster);
	embedded_child_add(a, "--initial-cluster-state=%s", j->initial ? j->state : "existing");
}

static void embedded_child_add_tls(const struct embedded *e, struct child_args *a)
{
	static const char *const sides[] = { "", "peer-" };

	for (size_t i = 0; e->setup.cert && i < ARRAY_SIZE(sides); i++) {
		embedded_child_add(a, "--%scert-file=%s", sides[i], e->setup.cert);
		embedded_child_add(a, "--%skey-file=%s", sides[i], e->setup.key);
		embedded_child_add(a, "--%strusted-ca-file=%s", sides[i], e->setup.ca);
		embedded_child_add(a, "--%sclient-cert-auth", sides[i]);
	}
}

static int embedded_child_arguments(const struct embedded *e, struct child_args *a)
{
	const struct seed *own = e->setup.own;

	embedded_child_add(a, "etcd");
	embedded_child_add(a, "--name=%s", e->setup.node);
	embedded_child_add(a, "--data-dir=%s/data", e->setup.dir);
	embedded_child_add_url(e, a, "listen-client-urls", e->setup.listen, own->client_port);
	embedded_child_add_url(e, a, "listen-peer-urls", e->setup.listen, own->peer_port);
	embedded_child_add_url(e, a, "advertise-client-urls", own->host, own->client_port);
	embedded_child_add_url(e, a, "initial-advertise-peer-urls", own->host, own->peer_port);
	embedded_child_add_cluster(e, a);
	embedded_child_add_tls(e, a);
	embedded_child_add(a, "--auto-compaction-mode=revision");
	embedded_child_add(a, "--auto-compaction-retention=%u", CHILD_KEPT_REVISIONS);
	embedded_child_add(a, "--quota-backend-bytes=%u", CHILD_QUOTA_BYTES);
	embedded_child_add(a, "--pre-vote"); /* one that comes back does not depose the leader */
	embedded_child_add(a, "--logger=zap");
	embedded_child_add(a, "--log-outputs=stderr");
	return a->lacks ? -ENOMEM : 0;
}

/* Few of our variables: etcd takes ETCD_... as options, sends readiness to NOTIFY_SOCKET, which is the
 * daemon's, and would speak to its peers through an HTTP proxy. */
static void embedded_child_environment(char **ret)
{
	static const char *const names[] = { "PATH=", "TZ=",         "GODEBUG=",
					     "GOGC=", "GOMAXPROCS=", "ETCD_UNSUPPORTED_ARCH=" };
	size_t n = 0;

	for (char **v = environ; *v && n < CHILD_ENV; v++)
		for (size_t i = 0; i < ARRAY_SIZE(names); i++)
			if (strncmp(*v, names[i], strlen(names[i])) == 0) {
				ret[n++] = *v;
				break;
			}
	ret[n] = NULL;
}

/* -------------------------------------------------------------------------------- the start */

/* For the next daemon, if this one does not end it. */
static void embedded_child_write_pid(int lock, pid_t pid)
{
	char text[CHILD_PID_TEXT];
	int n = snprintf(text, sizeof(text), "%d\n", (int)pid);

	/* refused: the next daemon waits for its end, which comes with ours */
	if (pwrite(lock, text, (size_t)n, 0) < 0)
		return;
}

static int embedded_child_spawn(struct embedded *e, int lock, int output)
{
	_cleanup_(embedded_child_args_free) struct child_args args = { .n = 0 };
	char *env[CHILD_ENV + 1];
	struct child_options o = { .path = e->setup.etcd,
				   .argv = args.list,
				   .envp = env,
				   .output = output,
				   .keep = lock };
	int r = embedded_child_arguments(e, &args);

	embedded_child_environment(env);
	if (r == 0)
		r = child_spawn(&o, &e->pid);
	if (r == 0)
		embedded_child_write_pid(lock, e->pid);
	return r;
}

static int embedded_child_begin(struct embedded *e, int lock)
{
	_cleanup_(fd_closep) int output = -1;
	int ends[2], r;

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
		return -errno;
	output = ends[1];
	if (fcntl(output, F_SETFL, 0) < 0) { /* etcd waits for us rather than lose lines */
		fd_close(ends[0]);
		return -errno;
	}
	r = embedded_log_open(e, ends[0], &e->log);
	if (r < 0)
		return r;
	r = embedded_child_spawn(e, lock, output);
	if (r < 0)
		e->log = embedded_log_close(e->log);
	return r;
}

int embedded_child_start(struct embedded *e, char why[EMBEDDED_WHY_BYTES])
{
	_cleanup_(fd_closep) int lock = -1;
	int r = embedded_child_own_dir(e, why);

	CHECK(!e->pid && !e->log);
	if (r == 0)
		r = embedded_child_lock_data(e, &lock, why);
	if (r)
		return r;
	r = embedded_child_begin(e, lock);
	if (r < 0)
		embedded_child_say(why, "etcd ('%.150s') cannot be started: %s", e->setup.etcd,
				   strerror(-r));
	return r;
}
