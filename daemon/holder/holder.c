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
 * did. With a keeper (--keeper), SIGTERM leaves the jobs to the next holder, unless the pod ends. SIGUSR2: start the daemon again, perhaps another version, with all that is kept. SIGHUP: to
 * the daemon.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "stash.h"
#include "outer.h"
#include "sidecar.h"

#define HOLDER_FIRST_FD 3
/* A daemon that lived less is started again after a pause, unless it was ready: so many of those
 * are started at once, and one more for each interval. */
#define HOLDER_SHORT_MS  1000
#define HOLDER_AT_ONCE   32
#define HOLDER_PAUSE_MS  100
#define HOLDER_PAUSES_MS 5000  /* the longest */
#define HOLDER_KEEPER_MS 30000 /* it starts before us, and may have the holder before us */
#define HOLDER_LOOK_MS   1000
#define HOLDER_FAILED    1
#define HOLDER_USAGE     2
/* Exit codes of the daemon that another try does not change: configuration, socket in use, socket,
 * backend. */
#define HOLDER_LAST_PREVENTED 5

static struct holder {
	char **command;
	int notify;         /* our socket */
	int outer;          /* of the service manager that started us; -1: none */
	int signals;        /* signalfd */
	int link;           /* to the keeper; -1: none */
	const char *keeper; /* its path; NULL: there is none */
	char address[64];
	struct stash kept;
	pid_t daemon; /* 0: none runs */
	uint64_t began_ms;
	uint64_t start_at_ms; /* the daemon is started then; 0: it runs */
	unsigned pause_ms;
	bool ready;           /* the daemon has said so */
	uint64_t credit_ms;   /* for starts at once, a HOLDER_SHORT_MS each */
	uint64_t credited_ms; /* when that was counted */
	bool ending;          /* for good */
	bool told;            /* to end, by the keeper: a SIGTERM says the same */
	bool leaving;         /* this container ends, the keeper has the jobs */
	uint64_t look_ms;     /* when the keeper was looked for */
	bool again;           /* it was told to end, and is started again */
} holder;

static int holder_fail(const char *what)
{
	stash_say("%s: %s", what, strerror(errno));
	return HOLDER_FAILED;
}

static uint64_t holder_now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

/* ------------------------------------------------------------------------ keeper */

static void holder_lose_keeper(void)
{
	stash_say("the keeper at %s is gone (%s): jobs outlive the daemon, and not this container",
		  holder.keeper, strerror(errno));
	close(holder.link);
	holder.link = -1;
	holder.look_ms = holder_now_ms();
}

/* The daemon drains, and ends. */
static void holder_end(void)
{
	if (holder.daemon)
		kill(holder.daemon, holder.ending ? SIGTERM : SIGUSR1);
	holder.ending = true;
}

/* The keeper says that the pod ends. */
static void holder_be_told(void)
{
	if (holder.told)
		return;
	holder.told = true;
	stash_say("told to end with the pod");
	if (!holder.ending)
		holder_end();
}

/* What the keeper has no room for would end with this container: FDSTORE tells the daemon of what fits. */
static void holder_take_room(const char *text)
{
	char value[STASH_NAME_MAX + 1];
	size_t most = stash_value(text, OUTER_MOST, value) ? strtoul(value, NULL, 10) : 0;

	if (!most || most >= holder.kept.most)
		return;
	stash_say("the keeper has room for %zu descriptors", most);
	holder.kept.most = most;
}

/* Take what the keeper has. Return: whether that was all of it. */
static bool holder_take_kept(int link, struct stash *ret)
{
	static char text[STASH_TEXT_MAX + 1];
	int fd, r;

	while ((r = outer_receive(link, true, text, &fd)) > 0) {
		outer_obey(ret, text, fd);
		if (stash_is_set(text, OUTER_END))
			holder_be_told();
		if (stash_is_set(text, "READY")) {
			holder_take_room(text);
			return true;
		}
	}
	if (r == 0)
		errno = EBUSY; /* it has a holder, which is about to end */
	return false;
}

/* Return: whether the keeper is there, and @ret is what it has. */
static bool holder_reach_keeper(struct stash *ret)
{
	int link = outer_connect(holder.keeper), error;

	if (link >= 0 && outer_send(link, OUTER_HELLO "=1", -1) && holder_take_kept(link, ret)) {
		holder.link = link;
		return true;
	}
	error = errno;
	stash_clear(ret);
	if (link >= 0)
		close(link);
	errno = error;
	return false;
}

/* At the start: an empty daemon must not begin beside a keeper that has jobs. Return: 0 or -1. */
static int holder_await_keeper(void)
{
	uint64_t until = holder_now_ms() + HOLDER_KEEPER_MS;

	while (!holder_reach_keeper(&holder.kept)) {
		if (holder_now_ms() >= until)
			return -1;
		(void)poll(NULL, 0, HOLDER_PAUSE_MS);
	}
	return 0;
}

/* Later: another keeper, or the same one, gets what we have. */
static void holder_look_for_keeper(uint64_t now)
{
	struct stash theirs = { .most = holder.kept.most };

	holder.look_ms = now;
	if (!holder_reach_keeper(&theirs))
		return;
	stash_clear(&theirs);
	free(theirs.all);
	if (outer_send(holder.link, OUTER_CLEAR "=1", -1) &&
	    outer_send_all(holder.link, &holder.kept, false))
		stash_say("a keeper is there again, and has got %zu descriptors", holder.kept.n);
	else
		holder_lose_keeper();
}

/* The jobs are over: no later holder shall get them. */
static void holder_give_up(void)
{
	if (holder.link >= 0 && !outer_send(holder.link, OUTER_CLEAR "=1", -1))
		holder_lose_keeper();
}

/* Return: whether the pod ends. */
static bool holder_hear_keeper(void)
{
	char text[STASH_TEXT_MAX + 1];
	int fd, r;

	while (holder.link >= 0) {
		r = outer_receive(holder.link, false, text, &fd);
		if (fd >= 0)
			close(fd);
		if (r < 0 && errno == EAGAIN)
			break;
		if (r == 0)
			errno = EPIPE;
		if (r <= 0)
			holder_lose_keeper();
		else if (stash_is_set(text, OUTER_END))
			return true;
	}
	return false;
}

static void holder_on_keeper(void)
{
	if (holder_hear_keeper())
		holder_be_told();
}

/* ---------------------------------------------------------------------- messages */

static void holder_store(int fd, const char *name)
{
	if (stash_add(&holder.kept, fd, name) && holder.link >= 0 &&
	    !outer_send_kept(holder.link, &holder.kept.all[holder.kept.n - 1]))
		holder_lose_keeper();
}

static void holder_remove(const char *name)
{
	stash_drop(&holder.kept, name);
	if (holder.link >= 0 && !outer_send_drop(holder.link, name))
		holder_lose_keeper();
}

/* Takes @fds. */
static void holder_obey(const char *text, const int *fds, size_t n)
{
	char name[STASH_NAME_MAX + 1] = "stored";

	if (stash_value(text, "FDNAME", name) && !stash_is_name(name))
		strcpy(name, "stored");
	if (stash_is_set(text, "X_SHARDD_FOR_GOOD"))
		holder.ending = true;
	if (stash_is_set(text, "READY"))
		holder.ready = true;
	if (stash_is_set(text, "FDSTOREREMOVE"))
		holder_remove(name);
	for (size_t i = 0; i < n; i++)
		if (stash_is_set(text, "FDSTORE"))
			holder_store(fds[i], name);
		else
			close(fds[i]); /* of BARRIER=1: the sender waits for that */
	if (holder.outer >= 0 && !strstr(text, "FDSTORE") && !stash_is_set(text, "BARRIER"))
		(void)send(holder.outer, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Return: whether there was one. */
static bool holder_receive(void)
{
	static union {
		struct cmsghdr head;
		char room[CMSG_SPACE(STASH_MSG_FDS * sizeof(int)) +
			  CMSG_SPACE(sizeof(struct ucred))];
	} control;
	static char text[STASH_TEXT_MAX + 1];
	struct iovec part = { text, STASH_TEXT_MAX };
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

	for (size_t i = 0; i < holder.kept.n; i++)
		bytes += strlen(holder.kept.all[i].name) + 1;
	names = to = malloc(bytes);
	if (!names)
		return -1;
	*names = '\0';
	for (size_t i = 0; i < holder.kept.n; i++)
		to += sprintf(to, "%s%s", i ? ":" : "", holder.kept.all[i].name);
	r = setenv("LISTEN_FDNAMES", names, 1);
	free(names);
	return r;
}

/* Return: 0 or -1. */
static int holder_set_listen(void)
{
	if (!holder.kept.n) /* "" would be the name of one */
		return unsetenv("LISTEN_PID") | unsetenv("LISTEN_FDS") | unsetenv("LISTEN_FDNAMES");
	if (holder_set_number("LISTEN_PID", (unsigned long)getpid()) < 0 ||
	    holder_set_number("LISTEN_FDS", holder.kept.n) < 0)
		return -1;
	return holder_set_names();
}

/* In the child: descriptors 3, 4, ... are those that are kept. First all of them are moved out of
 * the way. Return: 0 or -1. */
static int holder_place_fds(void)
{
	int n = (int)holder.kept.n;

	for (int i = 0; i < n; i++) {
		int fd = fcntl(holder.kept.all[i].fd, F_DUPFD_CLOEXEC, HOLDER_FIRST_FD + n);

		if (fd < 0)
			return -1;
		holder.kept.all[i].fd = fd;
	}
	for (int i = 0; i < n; i++)
		if (dup2(holder.kept.all[i].fd, HOLDER_FIRST_FD + i) < 0)
			return -1;
	return 0;
}

static void holder_exec(void)
{
	sigset_t mask;
	bool ready = setenv("NOTIFY_SOCKET", holder.address, 1) == 0 &&
		     holder_set_number("FDSTORE", holder.kept.most) == 0 &&
		     holder_set_listen() == 0;

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
	if (holder.again || holder.kept.n || !WIFEXITED(status))
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
		if (holder.leaving) {
			stash_say("the daemon %s; the keeper has %zu descriptors", how,
				  holder.kept.n);
			return 0;
		}
		if (holder_is_over(status)) {
			holder_give_up();
			if (holder.kept.n || !WIFEXITED(status))
				stash_say("the daemon %s; %zu descriptors are given up", how,
					  holder.kept.n);
			return WIFEXITED(status) ? WEXITSTATUS(status) : HOLDER_FAILED;
		}
		holder_plan(holder_now_ms());
		stash_say("the daemon %s; it is started again%s with %zu descriptors", how,
			  holder.pause_ms ? " after a pause" : "", holder.kept.n);
	}
	return -1;
}

/* Return: as holder_reap. */
static int holder_is_idle(void)
{
	if (holder.daemon)
		return -1;
	if (!holder.leaving)
		holder_give_up();
	return 0;
}

/* With a keeper, it is the end of this container: the daemon leaves its jobs, and the next container
 * goes on with them, unless the pod ends, too. Return: as holder_reap. */
static int holder_on_term(void)
{
	holder_on_keeper();
	if (holder.told && holder.daemon) {
		holder.told = false; /* the next SIGTERM is one of its own */
		return -1;
	}
	if (holder.link < 0 || holder.ending) {
		holder_end();
		return holder_is_idle();
	}
	holder.leaving = true;
	if (holder.daemon)
		kill(holder.daemon, SIGTERM);
	return holder_is_idle();
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
		return holder_on_term();
	case SIGINT:
	case SIGUSR1: /* blocked before a daemon is forked, which gets it from us */
		holder_end();
		return holder_is_idle();
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

static int holder_run(void)
{
	struct pollfd fds[] = { { .fd = holder.signals, .events = POLLIN },
				{ .fd = holder.notify, .events = POLLIN },
				{ .fd = -1, .events = POLLIN } };
	int code = -1;

	while (code < 0) {
		uint64_t now = holder_now_ms();
		int wait = -1;

		if (holder.start_at_ms && now >= holder.start_at_ms)
			holder_start();
		if (holder.start_at_ms)
			wait = (int)(holder.start_at_ms - now);
		if (holder.keeper && holder.link < 0) {
			if (now - holder.look_ms >= HOLDER_LOOK_MS)
				holder_look_for_keeper(now);
			wait = wait < 0 || wait > HOLDER_SHORT_MS ? HOLDER_SHORT_MS : wait;
		}
		fds[2].fd = holder.link;
		if (poll(fds, 3, wait) < 0 && errno != EINTR)
			return holder_fail("poll");
		while (holder_receive())
			; /* before the end of its sender */
		if (fds[2].revents)
			holder_on_keeper();
		if (fds[0].revents)
			code = holder_on_signal();
	}
	return code;
}

static int holder_usage(FILE *to, int code)
{
	fputs("usage: shardd-holder [--keeper PATH] [--] shardd [ARGUMENTS...]\n"
	      "       shardd-holder --keep PATH\n"
	      "       shardd-holder --end PATH\n"
	      "\n"
	      "Starts the daemon, keeps the memory of its jobs while it is away, and starts it\n"
	      "again when it has died. systemd does the same with its descriptor store.\n"
	      "\n"
	      "  SIGTERM, SIGINT  end the daemon and its jobs\n"
	      "  SIGUSR2          start the daemon again, for example a newer version; jobs stay\n"
	      "  SIGHUP           the daemon reads its configuration again\n"
	      "\n"
	      "For two containers of one pod:\n"
	      "\n"
	      "  --keep PATH      keep a copy of what a holder with --keeper PATH keeps, and "
	      "listen\n"
	      "                   for it at PATH, a socket\n"
	      "  --keeper PATH    start with what the keeper at PATH has. SIGTERM then leaves the\n"
	      "                   jobs to the next holder, unless the pod ends\n"
	      "  --end PATH       say that the pod ends: the daemon ends its jobs\n",
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
	if (argc == 3 && strcmp(argv[1], "--keep") == 0)
		return sidecar_keep(argv[2]);
	if (argc == 3 && strcmp(argv[1], "--end") == 0)
		return sidecar_end(argv[2]);
	if (argc > 2 && strcmp(argv[1], "--keeper") == 0) {
		holder.keeper = argv[2];
		first = 3;
	}
	if (argc > first && strcmp(argv[first], "--") == 0)
		first++;
	else if (argc > first && argv[first][0] == '-') {
		stash_say("unknown option '%s', or it has no value", argv[first]);
		first = argc;
	}
	if (first >= argc)
		return holder_usage(stderr, HOLDER_USAGE);
	holder.command = argv + first;
	stash_limit(&holder.kept);
	holder_open_outer();
	/* orphans of the daemon are ours, which waitpid collects */
	if (holder_catch_signals() || holder_listen() || prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
		return HOLDER_FAILED;
	holder.link = -1;
	if (holder.keeper && holder_await_keeper() < 0)
		return holder_fail(holder.keeper);
	if (holder.ending)
		return 0;
	holder.start_at_ms = holder_now_ms();
	return holder_run();
}
