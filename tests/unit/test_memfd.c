/* Host memory of which the kernel tells who else has it, and that can be emptied under them. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/memfd.h"
#include "fdcheck.h"
#include "ownfd.h"

TestSuite(memfd, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

#define BYTES (UINT64_C(1) << 20)

static struct memfd *full(void)
{
	struct memfd *m;

	cr_assert_eq(memfd_new(BYTES, &m), 0);
	memset(m->mem.addr, 0x5a, BYTES);
	cr_assert_eq(memfd_resident(m), BYTES);
	return m;
}

static int export(struct memfd *m, bool writable)
{
	int fd;

	cr_assert_eq(memfd_export(m, writable, &fd), 0);
	cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	return fd;
}

static void need_holders(void)
{
	if (!memfd_knows_holders())
		cr_skip("this kernel does not tell who holds a memfd");
}

Test(memfd, nobody_holds_what_was_not_handed_out)
{
	struct memfd *m = full();

	cr_assert_not(memfd_is_held(m));
	cr_assert_neq(m->mem.inode, 0);
	memfd_free(m);
}

Test(memfd, a_descriptor_holds_it_for_as_long_as_it_is_open)
{
	need_holders();
	for (int writable = 0; writable < 2; writable++) {
		struct memfd *m = full();
		int fd = export(m, writable), again = dup(fd);

		cr_assert(memfd_is_held(m));
		cr_assert(memfd_is_held(m), "the question changes nothing");
		close(fd);
		cr_assert(memfd_is_held(m), "a duplicate");
		close(again);
		cr_assert_not(memfd_is_held(m));
		memfd_free(m);
	}
}

Test(memfd, a_mapping_holds_it_without_a_descriptor)
{
	struct memfd *m = full();
	int fd = export(m, false);
	char *view = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, fd, 0);

	need_holders();
	cr_assert_neq(view, MAP_FAILED);
	close(fd);
	cr_assert(memfd_is_held(m));
	munmap(view, BYTES / 2);
	cr_assert(memfd_is_held(m), "a part of it");
	munmap(view + BYTES / 2, BYTES / 2);
	cr_assert_not(memfd_is_held(m));
	memfd_free(m);
}

/* What a trainer that was handed a slab may do, and then end. */
Test(memfd, a_child_that_lives_on_holds_it)
{
	struct memfd *m = full();
	int fd = export(m, true), status;
	pid_t parent = getpid(), child;

	need_holders();
	child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (getppid() == parent)
			pause();
		_exit(0);
	}
	close(fd);
	cr_assert(memfd_is_held(m));
	cr_assert_eq(kill(child, SIGKILL), 0);
	cr_assert_eq(waitpid(child, &status, 0), child);
	cr_assert_not(memfd_is_held(m));
	memfd_free(m);
}

/* SCM_RIGHTS: in a message that nobody has read yet. */
Test(memfd, a_descriptor_in_flight_holds_it)
{
	struct memfd *m = full();
	int fd = export(m, false), pair[2];
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = { { 0 } };
	struct iovec iov = { "x", 1 };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control.bytes,
			      .msg_controllen = sizeof(control.bytes) };

	need_holders();
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	*CMSG_FIRSTHDR(&msg) = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						 .cmsg_level = SOL_SOCKET,
						 .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), &fd, sizeof(fd));
	cr_assert_eq(sendmsg(pair[0], &msg, 0), 1);
	close(fd);
	cr_assert(memfd_is_held(m));
	close(pair[0]);
	close(pair[1]);
	cr_assert_not(memfd_is_held(m));
	memfd_free(m);
}

Test(memfd, emptied_it_reads_as_zeros_everywhere)
{
	struct memfd *m = full();
	int fd = export(m, false);
	char *view = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, fd, 0);

	cr_assert_neq(view, MAP_FAILED);
	cr_assert_eq(view[1], 0x5a);
	cr_assert_eq(memfd_empty(m), 0);
	cr_assert_eq(memfd_resident(m), 0);
	cr_assert_eq(view[1], 0);
	cr_assert_eq(memfd_empty(m), 0, "again, with a page that came back");
	cr_assert_eq(memfd_resident(m), 0);
	munmap(view, BYTES);
	close(fd);
	memfd_free(m);
}

/* It was not: who held a descriptor kept all of the memory, and nobody paid for it. */
Test(memfd, what_others_hold_is_empty_after_it_was_freed)
{
	struct memfd *m = full();
	int fd = export(m, true), other = own_fd(&m->mem);

	memfd_free(m);
	cr_assert_eq(lseek(fd, 0, SEEK_DATA), -1);
	cr_assert_eq(errno, ENXIO);
	close(fd);
	close(other);
}

Test(memfd, memory_that_only_we_pass_on_keeps_its_contents)
{
	struct memfd *m = full(), *again;
	int fd = own_fd(&m->mem);

	memfd_free(m);
	cr_assert_eq(memfd_import(fd, BYTES, &again), 0);
	close(fd);
	cr_assert_eq(((char *)again->mem.addr)[7], 0x5a);
	fd = export(again, false);
	if (memfd_knows_holders())
		cr_assert(memfd_is_held(again));
	close(fd);
	cr_assert_not(memfd_is_held(again));
	memfd_free(again);
}

/* Root, or a process of the daemon's user, could reopen it for writing. */
Test(memfd, sealed_it_is_written_through_our_mapping_alone)
{
	struct memfd *m = full(), *none = NULL;
	char path[64];
	int fd, rw;

	cr_assert_eq(memfd_seal(m), 0);
	fd = export(m, false);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	rw = open(path, O_RDWR | O_CLOEXEC);
	cr_assert_geq(rw, 0, "the kernel lets the owner open it");
	cr_assert_eq(mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, rw, 0), MAP_FAILED);
	cr_assert_eq(errno, EPERM);
	cr_assert_eq(pwrite(rw, "x", 1, 0), -1);
	cr_assert_eq(errno, EPERM);
	((char *)m->mem.addr)[0] = 7;
	cr_assert_eq(pread(fd, path, 1, 0), 1);
	cr_assert_eq(path[0], 7);
	cr_assert_eq(fallocate(rw, 0, 0, (off_t)BYTES), 0, "pages can be made ahead");
	cr_assert_eq(memfd_empty(m), -EPERM, "and not be taken away");
	cr_assert_eq(memfd_import(rw, BYTES, &none), -EINVAL, "nor be taken over");
	close(rw);
	close(fd);
	memfd_free(m);
}

Test(memfd, who_can_write_adds_no_seals)
{
	struct memfd *m = full();
	int fd = export(m, true);

	cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
	cr_assert_eq(errno, EPERM);
	cr_assert_eq(ftruncate(fd, 0), -1);
	cr_assert_eq(errno, EPERM);
	close(fd);
	memfd_free(m);
}
