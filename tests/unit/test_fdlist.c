#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "net/fdlist.h"

TestSuite(fdlist, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10);

static bool is_open(int fd)
{
	return fcntl(fd, F_GETFD) >= 0;
}

static bool same_file(int a, int b)
{
	struct stat x, y;

	return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev &&
	       x.st_ino == y.st_ino;
}

Test(fdlist, consumed_descriptors_are_closed_once)
{
	struct fdlist l = FDLIST_NULL;
	int fds[2];

	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	cr_assert_eq(fdlist_init_consume(&l, fds, 2), 0);
	fdlist_deinit(&l);
	cr_assert(!is_open(fds[0]) && !is_open(fds[1]));
	/* the numbers are somebody else's now: a second deinit must not close them */
	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	fdlist_deinit(&l);
	cr_assert(is_open(fds[0]) && is_open(fds[1]));
	cr_assert_eq(fdlist_count(&l), 0);
	close(fds[0]);
	close(fds[1]);
}

Test(fdlist, too_many_are_refused)
{
	struct fdlist l = FDLIST_NULL;
	int fds[FDLIST_MAX + 1];

	for (size_t i = 0; i <= FDLIST_MAX; i++)
		fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	/* consume means gone, whatever happens */
	cr_assert_eq(fdlist_init_consume(&l, fds, FDLIST_MAX + 1), -E2BIG);
	for (size_t i = 0; i <= FDLIST_MAX; i++)
		cr_assert(!is_open(fds[i]));
}

Test(fdlist, control_message_carries_all_of_them)
{
	_Alignas(struct cmsghdr) char out[FDLIST_CONTROL_BYTES], in[FDLIST_CONTROL_BYTES];
	struct iovec iov = { (char[1]){ 'x' }, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = out };
	struct fdlist l = FDLIST_NULL;
	struct cmsghdr *c;
	int sv[2], fds[2], got[2];

	cr_assert_eq(fdlist_control(&l, out), 0, "an empty set needs no message");
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	cr_assert_eq(fdlist_init_consume(&l, fds, 2), 0);
	msg.msg_controllen = fdlist_control(&l, out);
	cr_assert_eq(sendmsg(sv[0], &msg, 0), 1);
	msg.msg_control = in;
	msg.msg_controllen = sizeof(in);
	cr_assert_eq(recvmsg(sv[1], &msg, MSG_CMSG_CLOEXEC), 1);
	c = CMSG_FIRSTHDR(&msg);
	cr_assert(c && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(got)));
	memcpy(got, CMSG_DATA(c), sizeof(got));
	cr_assert(same_file(got[0], fds[0]) && same_file(got[1], fds[1]));
	fdlist_deinit(&l);
	close(got[0]);
	close(got[1]);
	close(sv[0]);
	close(sv[1]);
}
