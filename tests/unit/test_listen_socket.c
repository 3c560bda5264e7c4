/* Where the listener's socket file comes from and where it goes. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "net/listen_socket.h"
#include "netfix.h"

TestSuite(listen_socket, .init = netfix_begin, .fini = netfix_end, .timeout = 60);

/* A bound socket of no daemon; listens if @backlog is not negative. */
static int bound_socket(const char *path, int type, int backlog)
{
	int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
	struct sockaddr_un a = { .sun_family = AF_UNIX };

	strcpy(a.sun_path, path);
	cr_assert_eq(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0, "%s", strerror(errno));
	if (backlog >= 0)
		cr_assert_eq(listen(fd, backlog), 0);
	return fd;
}

static void leave_stale_socket(const char *path)
{
	close(bound_socket(path, SOCK_STREAM, 5));
	cr_assert_eq(access(path, F_OK), 0);
}

static unsigned files_in(const char *path)
{
	DIR *dir = opendir(path);
	unsigned n = 0;

	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 2; /* . and .. */
}

/* netfix_listen that must fail with @code and a sentence. */
static void expect_refusal(enum fault_code code)
{
	struct fault f = FAULT_NULL;
	struct listener *l = NULL;
	int r = listener_new(&netfix.run.loop, &netfix.options, netfix_on_conn, &netfix, &l, &f);

	cr_assert_eq(r, (int)code, "%d: %s", r, f.text);
	cr_assert_eq(f.code, code);
	cr_assert_neq(f.text[0], '\0');
	cr_assert_eq(l, NULL);
}

static void expect_service(const char *path)
{
	unsigned before = netfix.n_conns;
	int fd = netfix_connect(path);

	cr_assert_geq(fd, 0, "%s", strerror(errno));
	cr_assert_eq(send(fd, "PRI ", 4, 0), 4);
	netfix_await_conns(before + 1);
	close(fd);
	netfix_await_closed(before + 1);
}

Test(listen_socket, file_has_the_mode_and_group_asked_for)
{
	struct stat st;

	netfix.options.mode = 0640;
	netfix.options.group = getuid() == 0 ? "12345" : "";
	netfix_listen();
	cr_assert_eq(stat(netfix.path, &st), 0);
	cr_assert(S_ISSOCK(st.st_mode));
	cr_assert_eq(st.st_mode & 07777, 0640);
	cr_assert_eq(st.st_gid, getuid() == 0 ? 12345 : getgid());
	expect_service(netfix.path);
}

Test(listen_socket, group_may_be_a_name)
{
	struct stat st;

	netfix_need_root();
	netfix.options.group = "root";
	netfix_listen();
	cr_assert_eq(stat(netfix.path, &st), 0);
	cr_assert_eq(st.st_gid, 0);
}

Test(listen_socket, unknown_group_leaves_no_file)
{
	netfix.options.group = "no-such-group-here";
	expect_refusal(FAULT_INVALID);
	cr_assert_eq(files_in(netfix.dir), 0);
}

Test(listen_socket, file_goes_with_the_listener)
{
	netfix_listen();
	cr_assert_eq(files_in(netfix.dir), 1);
	netfix.listener = listener_close(netfix.listener);
	cr_assert_eq(files_in(netfix.dir), 0);
}

Test(listen_socket, stale_socket_is_replaced)
{
	leave_stale_socket(netfix.path);
	netfix_listen();
	expect_service(netfix.path);
	cr_assert_eq(files_in(netfix.dir), 1, "nothing is left of the old one");
}

Test(listen_socket, socket_of_a_living_daemon_is_left_alone)
{
	netfix_listen();
	expect_refusal(FAULT_STATE);
	cr_assert_eq(files_in(netfix.dir), 1);
	expect_service(netfix.path);
}

Test(listen_socket, living_daemon_that_does_not_accept_is_living)
{
	int server = bound_socket(netfix.path, SOCK_STREAM, 0);
	int clients[3];

	for (int i = 0; i < 3; i++)
		clients[i] = netfix_connect(netfix.path);
	cr_assert_lt(clients[2], 0, "the backlog is full");
	expect_refusal(FAULT_STATE);
	for (int i = 0; i < 3; i++)
		fd_close(clients[i]);
	close(server);
	unlink(netfix.path);
}

Test(listen_socket, served_socket_of_another_type_is_living)
{
	int server = bound_socket(netfix.path, SOCK_SEQPACKET, 5);

	expect_refusal(FAULT_STATE);
	close(server);
	unlink(netfix.path);
}

Test(listen_socket, file_that_is_no_socket_is_kept)
{
	int fd = open(netfix.path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	struct stat st;

	cr_assert_eq(write(fd, "data", 4), 4);
	close(fd);
	expect_refusal(FAULT_INVALID);
	cr_assert_eq(stat(netfix.path, &st), 0);
	cr_assert(S_ISREG(st.st_mode) && st.st_size == 4);
	unlink(netfix.path);
}

Test(listen_socket, directory_and_symbolic_link_are_kept)
{
	cr_assert_eq(mkdir(netfix.path, 0700), 0);
	expect_refusal(FAULT_INVALID);
	cr_assert_eq(rmdir(netfix.path), 0);
	cr_assert_eq(symlink("/nowhere/at/all", netfix.path), 0);
	expect_refusal(FAULT_INVALID);
	cr_assert_eq(unlink(netfix.path), 0);
}

/* @n characters, below netfix.dir. */
static char *path_of_length(size_t n)
{
	static char path[256];

	memset(path, 'p', sizeof(path));
	memcpy(path, netfix.path, strlen(netfix.dir) + 1);
	path[n] = '\0';
	return path;
}

Test(listen_socket, longest_path_works_also_over_a_stale_socket)
{
	char *path = path_of_length(107);

	leave_stale_socket(path);
	netfix.options.path = path;
	netfix_listen();
	expect_service(path);
	cr_assert_eq(files_in(netfix.dir), 1);
}

Test(listen_socket, path_that_is_too_long_or_empty_is_refused)
{
	netfix.options.path = path_of_length(108);
	expect_refusal(FAULT_INVALID);
	netfix.options.path = "";
	expect_refusal(FAULT_INVALID);
	netfix.options.path = NULL;
	expect_refusal(FAULT_INVALID);
}

Test(listen_socket, missing_directory_is_refused)
{
	netfix.options.path = "/tmp/no-such-directory-here/s";
	expect_refusal(FAULT_INVALID);
}

Test(listen_socket, path_below_a_file_is_refused)
{
	char path[160];

	close(open(netfix.path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
	snprintf(path, sizeof(path), "%s/below", netfix.path);
	netfix.options.path = path;
	expect_refusal(FAULT_INVALID);
	unlink(netfix.path);
}

/* Root passes by the bits of a mode, so the child is nobody. */
Test(listen_socket, directory_that_is_not_writable_is_refused)
{
	int status;
	pid_t pid;

	cr_assert_eq(chmod(netfix.dir, 0555), 0);
	pid = fork();
	if (pid == 0) {
		struct listen_socket s = LISTEN_SOCKET_NULL;
		struct fault f = FAULT_NULL;
		int r = getuid() == 0 ? setuid(65534) : 0;

		if (r == 0)
			r = listen_socket_bind(&s, netfix.path, 0660, NULL, &f);
		_exit(r == FAULT_DENIED && strstr(f.text, netfix.path) ? 0 : 1);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert_eq(status, 0);
	cr_assert_eq(chmod(netfix.dir, 0755), 0);
}

Test(listen_socket, somebody_elses_file_at_the_path_is_not_unlinked)
{
	int other;

	netfix_listen();
	cr_assert_eq(unlink(netfix.path), 0);
	other = bound_socket(netfix.path, SOCK_STREAM, 5);
	netfix.listener = listener_close(netfix.listener);
	cr_assert_eq(files_in(netfix.dir), 1);
	close(other);
	unlink(netfix.path);
}

Test(listen_socket, inherited_socket_serves_and_its_file_stays)
{
	int theirs = bound_socket(netfix.path, SOCK_STREAM, 5), fd;

	netfix.options.inherited_fd = dup(theirs);
	netfix.options.path = "/ignored/then";
	netfix_listen();
	expect_service(netfix.path);
	netfix.listener = listener_close(netfix.listener);
	cr_assert_eq(access(netfix.path, F_OK), 0);
	/* nor shut down: who holds it goes on listening */
	fd = netfix_connect(netfix.path);
	cr_assert_geq(fd, 0);
	close(fd);
	close(theirs);
	unlink(netfix.path);
}

Test(listen_socket, inherited_descriptor_of_another_kind_is_refused_and_left_open)
{
	int fds[3], sv[2];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
	fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	fds[1] = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	fds[2] = sv[0];
	for (int i = 0; i < 3; i++) {
		netfix.options.inherited_fd = fds[i];
		expect_refusal(FAULT_INVALID);
		cr_assert_geq(fcntl(fds[i], F_GETFD), 0);
		close(fds[i]);
	}
	close(sv[1]);
}

/* One of many starting daemons: says 's' if it serves, 'r' if refused; stays
 * until @hold is closed. */
static void racing_daemon(int go, int result, int hold)
{
	struct listen_socket s = LISTEN_SOCKET_NULL;
	struct fault f = FAULT_NULL;
	char byte;
	int r;

	if (read(go, &byte, 1) != 0)
		_exit(1);
	r = listen_socket_bind(&s, netfix.path, 0660, NULL, &f);
	byte = r == 0 ? 's' : r == FAULT_STATE ? 'r' : 'x';
	if (write(result, &byte, 1) != 1 || read(hold, &byte, 1) != 0)
		_exit(1);
	/* leaves the file, as a daemon that is killed does */
	_exit(0);
}

/* All at once over a stale socket. Return: how many serve. */
static unsigned race(unsigned n)
{
	int go[2], result[2], hold[2];
	unsigned serving = 0;
	char byte;

	cr_assert(!pipe2(go, O_CLOEXEC) && !pipe2(result, O_CLOEXEC) && !pipe2(hold, O_CLOEXEC));
	for (unsigned i = 0; i < n; i++) {
		if (fork() == 0) {
			close(go[1]);
			close(hold[1]);
			racing_daemon(go[0], result[1], hold[0]);
		}
	}
	close(go[1]);
	for (unsigned i = 0; i < n; i++) {
		cr_assert_eq(read(result[0], &byte, 1), 1);
		cr_assert(byte == 's' || byte == 'r', "a fault of another kind");
		serving += byte == 's';
	}
	if (serving > 0) {
		int fd = netfix_connect(netfix.path);

		cr_assert_geq(fd, 0, "the one that serves can be reached");
		close(fd);
	}
	close(hold[1]);
	while (wait(NULL) > 0)
		;
	close(go[0]);
	close(hold[0]);
	close(result[0]);
	close(result[1]);
	return serving;
}

/* A user who locks the directory for good gains nothing. */
Test(listen_socket, lock_held_by_a_stranger_only_delays)
{
	int dir = open(netfix.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	cr_assert_eq(flock(dir, LOCK_EX), 0);
	leave_stale_socket(netfix.path);
	netfix_listen();
	expect_service(netfix.path);
	close(dir);
}

Test(listen_socket, of_daemons_that_start_together_exactly_one_serves)
{
	leave_stale_socket(netfix.path);
	for (int i = 0; i < 400; i++)
		cr_assert_eq(race(8), 1);
	unlink(netfix.path);
	cr_assert_eq(files_in(netfix.dir), 0);
}
