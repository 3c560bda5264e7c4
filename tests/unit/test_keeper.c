/* The keeper's messages, as a service manager sees them. */
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "store/keeper.h"

TestSuite(keeper, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

/* An abstract address of our own. Return: the manager's socket. */
static int manager(const char *most)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	char name[64];
	int n = snprintf(name, sizeof(name), "@shardd-keeper-%d", (int)getpid());

	memcpy(a.sun_path, name, (size_t)n);
	a.sun_path[0] = '\0';
	cr_assert_eq(bind(fd, (struct sockaddr *)&a, (socklen_t)(sizeof(sa_family_t) + (size_t)n)),
		     0);
	setenv("NOTIFY_SOCKET", name, 1);
	if (most)
		setenv("FDSTORE", most, 1);
	else
		unsetenv("FDSTORE");
	return fd;
}

/* The next message; @ret_fd: -1: there was none with it. */
static void next(int fd, const char *want, int *ret_fd)
{
	char text[256] = "";
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec part = { text, sizeof(text) - 1 };
	struct msghdr msg = { .msg_iov = &part,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };

	cr_assert_gt(recvmsg(fd, &msg, MSG_DONTWAIT), 0, "%s", strerror(errno));
	cr_expect_str_eq(text, want);
	*ret_fd = -1;
	if (msg.msg_controllen)
		memcpy(ret_fd, CMSG_DATA(&control.head), sizeof(int));
}

static bool empty(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, 0) == 0;
}

Test(keeper, without_room_or_address_there_is_none)
{
	struct keeper k = KEEPER_NULL(k);
	int fd = manager(NULL);

	cr_expect_eq(keeper_init(&k), 0);
	cr_expect_not(keeper_is_there(&k));
	keeper_deinit(&k);
	setenv("FDSTORE", "0", 1);
	cr_expect_eq(keeper_init(&k), 0);
	cr_expect_not(keeper_is_there(&k));
	setenv("FDSTORE", "7", 1);
	unsetenv("NOTIFY_SOCKET");
	cr_expect_eq(keeper_init(&k), 0);
	cr_expect_not(keeper_is_there(&k));
	setenv("NOTIFY_SOCKET", "vsock:2:1234", 1);
	cr_expect_eq(keeper_init(&k), -EINVAL);
	setenv("NOTIFY_SOCKET", "/nowhere/at/all", 1);
	cr_expect_eq(keeper_init(&k), -ENOENT);
	keeper_deinit(&k);
	keeper_deinit(&k);
	close(fd);
}

Test(keeper, descriptors_are_sent_by_name_and_counted)
{
	struct keeper k = KEEPER_NULL(k);
	int fd = manager("3"), sent, got;
	struct stat a, b;

	cr_assert_eq(keeper_init(&k), 0);
	cr_assert(keeper_is_there(&k));
	sent = memfd_create("one", MFD_CLOEXEC);
	cr_expect_eq(keeper_add(&k, "slab.1", sent), 0);
	next(fd, "FDSTORE=1\nFDNAME=slab.1\nFDPOLL=0", &got);
	cr_assert(fstat(sent, &a) == 0 && fstat(got, &b) == 0);
	cr_expect_eq(a.st_ino, b.st_ino);
	close(got);
	keeper_has(&k, 1);
	cr_expect_eq(keeper_add(&k, "slab.2", sent), 0);
	cr_expect_eq(keeper_add(&k, "slab.3", sent), -ENOSPC);
	next(fd, "FDSTORE=1\nFDNAME=slab.2\nFDPOLL=0", &got);
	close(got);
	cr_expect(empty(fd));
	keeper_drop(&k, "slab.1");
	cr_expect(empty(fd), "at the tick");
	keeper_tick(&k);
	next(fd, "FDSTOREREMOVE=1\nFDNAME=slab.1", &got);
	cr_expect_eq(got, -1);
	cr_expect_eq(keeper_add(&k, "slab.3", sent), 0);
	next(fd, "FDSTORE=1\nFDNAME=slab.3\nFDPOLL=0", &got);
	close(got);
	keeper_drop(&k, "slab.3");
	keeper_deinit(&k);
	cr_expect(empty(fd), "what it has stays there");
	close(sent);
	close(fd);
}

/* A manager that does not read must not hold up the loop. */
Test(keeper, a_full_queue_is_no_wait)
{
	struct keeper k = KEEPER_NULL(k);
	int fd = manager("100000"), sent = memfd_create("one", MFD_CLOEXEC), got, r = 0;
	unsigned n = 0;

	cr_assert_eq(keeper_init(&k), 0);
	while (r == 0 && n < 99999)
		r = keeper_add(&k, "slab.7", sent), n += r == 0;
	cr_assert_eq(r, -EAGAIN);
	cr_expect_eq(k.used, n);
	keeper_drop(&k, "slab.7");
	keeper_tick(&k);
	cr_expect_not(list_empty(&k.drops));
	next(fd, "FDSTORE=1\nFDNAME=slab.7\nFDPOLL=0", &got);
	close(got);
	keeper_tick(&k);
	cr_expect(list_empty(&k.drops));
	for (unsigned i = 1; i < n; i++) {
		next(fd, "FDSTORE=1\nFDNAME=slab.7\nFDPOLL=0", &got);
		close(got);
	}
	next(fd, "FDSTOREREMOVE=1\nFDNAME=slab.7", &got);
	keeper_deinit(&k);
	close(sent);
	close(fd);
}
