/*
 * shardd-holder -- shardd ARGS...: starts the daemon, keeps the descriptors that it leaves, and
 * starts it again with them when it has died. For containers, and wherever no service manager with
 * a descriptor store (systemd) starts the daemon.
 *
 * The protocol is sd_notify(3)'s: FDSTORE=1 with FDNAME, FDSTOREREMOVE=1, BARRIER=1. The daemon
 * gets its descriptors back as sd_listen_fds(3) describes. All other messages go on to the
 * NOTIFY_SOCKET of the holder itself.
 *
 * One thread, one poll. It maps nothing of what it keeps, and it allocates a few bytes for each
 * descriptor.
 *
 * SIGTERM, SIGINT, SIGUSR1: end for good. The daemon gets SIGUSR1, ends its jobs, and the holder ends as it
 * did. SIGUSR2: start the daemon again, perhaps another version, with all that is kept. SIGHUP: to
 * the daemon.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HOLDER_FIRST_FD 3
#define HOLDER_NAME_MAX 255
#define HOLDER_TEXT_MAX 4096
#define HOLDER_MSG_FDS  253 /* the kernel's limit */
#define HOLDER_OWN_FDS  16  /* descriptors that are not kept */
#define HOLDER_MOST_FDS 65536
/* A daemon that lived less is started again after a pause, unless it was ready: so many of those
 * are started at once, and one more for each interval. */
#define HOLDER_SHORT_MS  1000
#define HOLDER_AT_ONCE   32
#define HOLDER_PAUSE_MS  100
#define HOLDER_PAUSES_MS 5000 /* the longest */
#define HOLDER_FAILED    1
#define HOLDER_USAGE     2
/* Exit codes of the daemon that another try does not change: configuration, socket in use, socket,
 * backend. */
#define HOLDER_LAST_PREVENTED 5

struct holder_kept {
	int fd;
	char *name;
};

static struct holder {
	char **command;
	int notify;  /* our socket */
	int outer;   /* of the service manager that started us; -1: none */
	int signals; /* signalfd */
	char address[64];
	struct holder_kept *kept;
	size_t n_kept;
	size_t most;
	pid_t daemon; /* 0: none runs */
	uint64_t began_ms;
	uint64_t start_at_ms; /* the daemon is started then; 0: it runs */
	unsigned pause_ms;
	bool ready;           /* the daemon has said so */
	uint64_t credit_ms;   /* for starts at once, a HOLDER_SHORT_MS each */
	uint64_t credited_ms; /* when that was counted */
	bool ending;          /* for good */
	bool again;           /* it was told to end, and is started again */
} holder;

static void __attribute__((format(printf, 1, 2))) holder_say(const char *fmt, ...)
{
	va_list args;

	fputs("shardd-holder: ", stderr);
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
}

static int holder_fail(const char *what)
{
	holder_say("%s: %s", what, strerror(errno));
	return HOLDER_FAILED;
}

static uint64_t holder_now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

/* ------------------------------------------------------------------- descriptors */

static bool holder_is_name(const char *name)
{
	size_t n = strlen(name);

	for (size_t i = 0; i < n; i++)
		if ((unsigned char)name[i] < ' ' || (unsigned char)name[i] > '~' || name[i] == ':')
			return false;
	return n > 0 && n <= HOLDER_NAME_MAX;
}

/* Takes @fd. */
static void holder_keep(int fd, const char *name)
{
	struct holder_kept *grown;
	char *copy;

	if (holder.n_kept >= holder.most) {
		holder_say("descriptor '%s' is not kept: there is room for %zu", name, holder.most);
		close(fd);
		return;
	}
	copy = strdup(name);
	grown = realloc(holder.kept, (holder.n_kept + 1) * sizeof(*grown));
	if (grown)
		holder.kept = grown;
	if (!copy || !grown) {
		holder_say("descriptor '%s' is not kept: no memory", name);
		free(copy);
		close(fd);
		return;
	}
	holder.kept[holder.n_kept++] = (struct holder_kept){ fd, copy };
}

static void holder_drop(const char *name)
{
	size_t left = 0;

	for (size_t i = 0; i < holder.n_kept; i++) {
		if (strcmp(holder.kept[i].name, name) != 0) {
			holder.kept[left++] = holder.kept[i];
			continue;
		}
		close(holder.kept[i].fd);
		free(holder.kept[i].name);
	}
	holder.n_kept = left;
}

/* ---------------------------------------------------------------------- messages */

/* The value of @key in the lines of @text. @ret: HOLDER_NAME_MAX + 1 bytes. */
static bool holder_value(const char *text, const char *key, char *ret)
{
	size_t n = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		size_t bytes;

		line += *line == '\n';
		if (strncmp(line, key, n) != 0 || line[n] != '=')
			continue;
		bytes = strcspn(line + n + 1, "\n");
		if (bytes > HOLDER_NAME_MAX)
			return false;
		memcpy(ret, line + n + 1, bytes);
		ret[bytes] = '\0';
		return true;
	}
	return false;
}

static bool holder_is_set(const char *text, const char *key)
{
	char value[HOLDER_NAME_MAX + 1];

	return holder_value(text, key, value) && strcmp(value, "1") == 0;
}

/* Takes @fds. */
static void holder_obey(const char *text, const int *fds, size_t n)
{
	char name[HOLDER_NAME_MAX + 1] = "stored";

	if (holder_value(text, "FDNAME", name) && !holder_is_name(name))
		strcpy(name, "stored");
	if (holder_is_set(text, "READY"))
		holder.ready = true;
	if (holder_is_set(text, "FDSTOREREMOVE"))
		holder_drop(name);
	for (size_t i = 0; i < n; i++)
		if (holder_is_set(text, "FDSTORE"))
			holder_keep(fds[i], name);
		else
			close(fds[i]); /* of BARRIER=1: the sender waits for that */
	if (holder.outer >= 0 && !strstr(text, "FDSTORE") && !holder_is_set(text, "BARRIER"))
		(void)send(holder.outer, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Return: whether there was one. */
static bool holder_receive(void)
{
	static union {
		struct cmsghdr head;
		char room[CMSG_SPACE(HOLDER_MSG_FDS * sizeof(int)) +
			  CMSG_SPACE(sizeof(struct ucred))];
	} control;
	static char text[HOLDER_TEXT_MAX + 1];
	struct iovec part = { text, HOLDER_TEXT_MAX };
	struct msghdr msg = { .msg_iov = &part,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	ssize_t bytes = recvmsg(holder.notify, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct ucred from = { 0 };
	const int *fds = NULL;
	size_t n = 0;

	if (bytes < 0)
		return false;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS)
			memcpy(&from, CMSG_DATA(c), sizeof(from));
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			fds = (const int *)(const void *)CMSG_DATA(c);
			n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		}
	}
	text[bytes] = '\0';
	if (from.pid == holder.daemon && !(msg.msg_flags & MSG_TRUNC)) {
		holder_obey(text, fds, n);
		return true;
	}
	for (size_t i = 0; i < n;
	     i++) /* the address is open to everybody in this network namespace */
		close(fds[i]);
	return true;
}

/* ------------------------------------------------------------------- the daemon */

static int holder_set_number(const char *name, unsigned long value)
{
	char text[24];

	snprintf(text, sizeof(text), "%lu", value);
	return setenv(name, text, 1);
}

/* LISTEN_FDNAMES is "a:b:c". Return: 0 or -1. */
static int holder_set_names(void)
{
	size_t bytes = 1;
	char *names, *to;
	int r;

	for (size_t i = 0; i < holder.n_kept; i++)
		bytes += strlen(holder.kept[i].name) + 1;
	names = to = malloc(bytes);
	if (!names)
		return -1;
	*names = '\0';
	for (size_t i = 0; i < holder.n_kept; i++)
		to += sprintf(to, "%s%s", i ? ":" : "", holder.kept[i].name);
	r = setenv("LISTEN_FDNAMES", names, 1);
	free(names);
	return r;
}

/* Return: 0 or -1. */
static int holder_set_listen(void)
{
	if (!holder.n_kept) /* "" would be the name of one */
		return unsetenv("LISTEN_PID") | unsetenv("LISTEN_FDS") | unsetenv("LISTEN_FDNAMES");
	if (holder_set_number("LISTEN_PID", (unsigned long)getpid()) < 0 ||
	    holder_set_number("LISTEN_FDS", holder.n_kept) < 0)
		return -1;
	return holder_set_names();
}

/* In the child: descriptors 3, 4, ... are those that are kept. First all of them are moved out of
 * the way. Return: 0 or -1. */
static int holder_place_fds(void)
{
	int n = (int)holder.n_kept;

	for (int i = 0; i < n; i++) {
		int fd = fcntl(holder.kept[i].fd, F_DUPFD_CLOEXEC, HOLDER_FIRST_FD + n);

		if (fd < 0)
			return -1;
		holder.kept[i].fd = fd;
	}
	for (int i = 0; i < n; i++)
		if (dup2(holder.kept[i].fd, HOLDER_FIRST_FD + i) < 0)
			return -1;
	return 0;
}

static void holder_exec(void)
{
	sigset_t mask;
	bool ready = setenv("NOTIFY_SOCKET", holder.address, 1) == 0 &&
		     holder_set_number("FDSTORE", holder.most) == 0 && holder_set_listen() == 0;

	unsetenv("WATCHDOG_PID"); /* it has to feed the watchdog in our name */
	sigemptyset(&mask);
	sigaddset(&mask, SIGUSR1); /* it waits until the daemon has its handler */
	sigprocmask(SIG_SETMASK, &mask, NULL);
	if (ready && holder_place_fds() == 0)
		execvp(holder.command[0], holder.command);
	holder_fail(holder.command[0]);
	_exit(HOLDER_USAGE);
}

static void holder_start(void)
{
	pid_t pid = fork();

	if (pid == 0)
		holder_exec();
	holder.start_at_ms = 0;
	holder.again = holder.ready = false;
	holder.began_ms = holder_now_ms();
	if (pid > 0) {
		holder.daemon = pid;
		return;
	}
	holder_fail("fork");
	holder.start_at_ms = holder.began_ms + HOLDER_PAUSES_MS;
}

static void holder_describe(int status, char *ret, size_t bytes)
{
	if (WIFSIGNALED(status))
		snprintf(ret, bytes, "was killed by signal %d", WTERMSIG(status));
	else
		snprintf(ret, bytes, "has ended with exit code %d", WEXITSTATUS(status));
}

/* Nothing is kept, and a second try would end in the same way; or it has ended because it was
 * told to. */
static bool holder_is_over(int status)
{
	if (holder.ending)
		return true;
	if (holder.again || holder.n_kept || !WIFEXITED(status))
		return false;
	return WEXITSTATUS(status) <= HOLDER_LAST_PREVENTED;
}

static bool holder_take_credit(uint64_t now)
{
	uint64_t most = HOLDER_AT_ONCE * HOLDER_SHORT_MS;
	uint64_t has = holder.credit_ms + (now - holder.credited_ms);

	holder.credited_ms = now;
	holder.credit_ms = has < most ? has : most;
	if (holder.credit_ms < HOLDER_SHORT_MS)
		return false;
	holder.credit_ms -= HOLDER_SHORT_MS;
	return true;
}

/* Start the daemon again, at once if it has lived. */
static void holder_plan(uint64_t now)
{
	bool lived = holder.again || now - holder.began_ms >= HOLDER_SHORT_MS ||
		     (holder.ready && holder_take_credit(now));
	unsigned next = holder.pause_ms ? 2 * holder.pause_ms : HOLDER_PAUSE_MS;

	holder.pause_ms = lived ? 0 : next < HOLDER_PAUSES_MS ? next : HOLDER_PAUSES_MS;
	holder.start_at_ms = now + holder.pause_ms;
}

/* Return: the holder's exit code, or -1: it goes on. */
static int holder_reap(void)
{
	char how[64];
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid != holder.daemon)
			continue; /* an orphan of the container, if we are its first process */
		while (holder_receive())
			; /* its last words */
		holder.daemon = 0;
		holder_describe(status, how, sizeof(how));
		if (holder_is_over(status)) {
			if (holder.n_kept || !WIFEXITED(status))
				holder_say("the daemon %s; %zu descriptors are given up", how,
					   holder.n_kept);
			return WIFEXITED(status) ? WEXITSTATUS(status) : HOLDER_FAILED;
		}
		holder_plan(holder_now_ms());
		holder_say("the daemon %s; it is started again%s with %zu descriptors", how,
			   holder.pause_ms ? " after a pause" : "", holder.n_kept);
	}
	return -1;
}

/* Return: as holder_reap. */
static int holder_on_signal(void)
{
	struct signalfd_siginfo info;

	if (read(holder.signals, &info, sizeof(info)) != (ssize_t)sizeof(info))
		return -1;
	switch (info.ssi_signo) {
	case SIGCHLD:
		return holder_reap();
	case SIGTERM:
	case SIGINT:
	case SIGUSR1: /* blocked before a daemon is forked, which gets it from us */
		if (!holder.daemon)
			return 0;
		kill(holder.daemon, holder.ending ? SIGTERM : SIGUSR1);
		holder.ending = true;
		return -1;
	case SIGUSR2:
		holder.again = true;
		if (holder.daemon)
			kill(holder.daemon, SIGTERM);
		return -1;
	default:
		if (holder.daemon)
			kill(holder.daemon, (int)info.ssi_signo);
		return -1;
	}
}

/* ---------------------------------------------------------------------- the start */

/* An abstract address that the kernel chooses. */
static int holder_listen(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	socklen_t bytes = sizeof(address);
	int on = 1;

	holder.notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (holder.notify < 0 ||
	    bind(holder.notify, (struct sockaddr *)&address, sizeof(sa_family_t)) < 0 ||
	    setsockopt(holder.notify, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0 ||
	    getsockname(holder.notify, (struct sockaddr *)&address, &bytes) < 0)
		return holder_fail("the notification socket");
	snprintf(holder.address, sizeof(holder.address), "@%.*s",
		 (int)(bytes - offsetof(struct sockaddr_un, sun_path) - 1), address.sun_path + 1);
	return 0;
}

static void holder_open_outer(void)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	size_t n = path ? strlen(path) : 0;

	holder.outer = -1;
	if (!n || n >= sizeof(address.sun_path))
		return;
	memcpy(address.sun_path, path, n);
	if (*path == '@')
		address.sun_path[0] = '\0';
	holder.outer = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (holder.outer >= 0 &&
	    connect(holder.outer, (struct sockaddr *)&address,
		    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n)) < 0) {
		close(holder.outer);
		holder.outer = -1;
	}
}

static int holder_catch_signals(void)
{
	static const int caught[] = { SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGUSR2 };
	sigset_t set;

	sigemptyset(&set);
	for (size_t i = 0; i < sizeof(caught) / sizeof(caught[0]); i++)
		sigaddset(&set, caught[i]);
	if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
		return holder_fail("sigprocmask");
	holder.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return holder.signals < 0 ? holder_fail("signalfd") : 0;
}

/* The daemon has them open, too, beside those that it needs. */
static void holder_limit(void)
{
	struct rlimit limit = { 0 };

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	getrlimit(RLIMIT_NOFILE, &limit);
	holder.most = limit.rlim_cur / 2 > HOLDER_OWN_FDS ? limit.rlim_cur / 2 - HOLDER_OWN_FDS : 0;
	if (holder.most > HOLDER_MOST_FDS)
		holder.most = HOLDER_MOST_FDS;
}

static int holder_run(void)
{
	struct pollfd fds[] = { { .fd = holder.signals, .events = POLLIN },
				{ .fd = holder.notify, .events = POLLIN } };
	int code = -1;

	while (code < 0) {
		uint64_t now = holder_now_ms();
		int wait = -1;

		if (holder.start_at_ms && now >= holder.start_at_ms)
			holder_start();
		if (holder.start_at_ms)
			wait = (int)(holder.start_at_ms - now);
		if (poll(fds, 2, wait) < 0 && errno != EINTR)
			return holder_fail("poll");
		while (holder_receive())
			; /* before the end of its sender */
		if (fds[0].revents)
			code = holder_on_signal();
	}
	return code;
}

static int holder_usage(FILE *to, int code)
{
	fputs("usage: shardd-holder [--] shardd [ARGUMENTS...]\n"
	      "\n"
	      "Starts the daemon, keeps the memory of its jobs while it is away, and starts it\n"
	      "again when it has died. systemd does the same with its descriptor store.\n"
	      "\n"
	      "  SIGTERM, SIGINT  end the daemon and its jobs\n"
	      "  SIGUSR2          start the daemon again, for example a newer version; jobs stay\n"
	      "  SIGHUP           the daemon reads its configuration again\n",
	      to);
	return code;
}

int main(int argc, char **argv)
{
	int first = 1;

	if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
		return holder_usage(stdout, 0);
	if (argc > 1 && strcmp(argv[1], "--version") == 0)
		return puts("shardd-holder " SHARDD_VERSION) < 0;
	if (argc > 1 && strcmp(argv[1], "--") == 0)
		first = 2;
	else if (argc > 1 && argv[1][0] == '-')
		holder_say("unknown option '%s'", argv[1]);
	if (first >= argc || (first == 1 && argv[1][0] == '-'))
		return holder_usage(stderr, HOLDER_USAGE);
	holder.command = argv + first;
	holder_limit();
	holder_open_outer();
	/* orphans of the daemon are ours, which waitpid collects */
	if (holder_catch_signals() || holder_listen() || prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
		return HOLDER_FAILED;
	holder.start_at_ms = holder_now_ms();
	return holder_run();
}
