#include "fix.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

const struct cuda_lib *cu;

static pid_t test_process;

void fix_need(bool ok, const char *what, long got, const char *file, int line)
{
	if (ok)
		return;
	if (getpid() == test_process)
		cr_assert_fail("%s:%d: %s: got %ld", file, line, what, got);
	dprintf(STDERR_FILENO, "%s:%d: %s: got %ld\n", file, line, what, got);
	_exit(99);
}

void fix_init(void)
{
	test_process = getpid();
	setenv("SHARDD_LIBCUDA", SIM_LIBCUDA, 1);
	unsetenv("CUDA_VISIBLE_DEVICES");
}

void fix_load(void)
{
	char why[256] = "";

	fix_need(cuda_lib_open(&cu, why, sizeof(why)) == 0, why, 0, __FILE__, __LINE__);
}

void fix_open(void)
{
	CUcontext ctx;

	fix_load();
	OK(cu->cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cu->cuCtxSetCurrent(ctx));
}

static const CUmemAllocationProp prop = {
	.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
	.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
};

struct slab slab_map(CUmemGenericAllocationHandle handle, size_t bytes, int flags)
{
	struct slab s = { .handle = handle, .bytes = bytes };
	CUmemAccessDesc access = { .location = prop.location, .flags = (CUmemAccess_flags)flags };

	OK(cu->cuMemAddressReserve(&s.addr, bytes, 0, 0, 0));
	OK(cu->cuMemMap(s.addr, bytes, 0, handle, 0));
	if (flags)
		OK(cu->cuMemSetAccess(s.addr, bytes, &access, 1));
	return s;
}

struct slab slab_new(size_t bytes)
{
	CUmemGenericAllocationHandle handle;

	OK(cu->cuMemCreate(&handle, bytes, &prop, 0));
	return slab_map(handle, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

struct slab slab_import(int fd, size_t bytes, int flags)
{
	CUmemGenericAllocationHandle handle;

	OK(cu->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
					      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	return slab_map(handle, bytes, flags);
}

int slab_export(const struct slab *s)
{
	int fd = -1;

	OK(cu->cuMemExportToShareableHandle(&fd, s->handle,
					    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	return fd;
}

void slab_free(struct slab *s)
{
	OK(cu->cuMemUnmap(s->addr, s->bytes));
	OK(cu->cuMemAddressFree(s->addr, s->bytes));
	OK(cu->cuMemRelease(s->handle));
}

CUstream stream_new(void)
{
	CUstream s;

	OK(cu->cuStreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, 0));
	return s;
}

void put32(CUdeviceptr addr, uint32_t value, size_t n)
{
	CUstream s = stream_new();

	OK(cu->cuMemsetD32Async(addr, value, n, s));
	OK(cu->cuStreamSynchronize(s));
	OK(cu->cuStreamDestroy(s));
}

void get_bytes(void *dst, CUdeviceptr addr, size_t bytes)
{
	CUstream s = stream_new();

	OK(cu->cuMemcpyDtoHAsync(dst, addr, bytes, s));
	OK(cu->cuStreamSynchronize(s));
	OK(cu->cuStreamDestroy(s));
}

void put_bytes(CUdeviceptr addr, const void *src, size_t bytes)
{
	CUstream s = stream_new();

	OK(cu->cuMemcpyHtoDAsync(addr, src, bytes, s));
	OK(cu->cuStreamSynchronize(s));
	OK(cu->cuStreamDestroy(s));
}

uint32_t get32(CUdeviceptr addr)
{
	uint32_t v;

	get_bytes(&v, addr, sizeof(v));
	return v;
}

uint64_t get64(CUdeviceptr addr)
{
	uint64_t v;

	get_bytes(&v, addr, sizeof(v));
	return v;
}

void put64(CUdeviceptr addr, uint64_t value)
{
	put_bytes(addr, &value, sizeof(value));
}

/* -- processes ------------------------------------------------------------------ */

static size_t read_all(int fd, char *buf, size_t bytes)
{
	size_t n = 0;
	ssize_t r;

	while (n < bytes && (r = read(fd, buf + n, bytes - n)) > 0)
		n += (size_t)r;
	return n;
}

void dies(void (*fn)(void), const char *text)
{
	char out[4096];
	int ends[2], status;
	pid_t pid;

	NEED(pipe(ends) == 0);
	pid = fork();
	NEED(pid >= 0);
	if (!pid) {
		signal(SIGABRT, SIG_DFL);
		setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
		dup2(ends[1], STDERR_FILENO);
		close(ends[0]);
		close(ends[1]);
		fn();
		_exit(0);
	}
	close(ends[1]);
	out[read_all(ends[0], out, sizeof(out) - 1)] = 0;
	close(ends[0]);
	NEED(waitpid(pid, &status, 0) == pid);
	cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT,
		  "no breach was found; status 0x%x, it said: %s", (unsigned)status, out);
	cr_assert(strstr(out, "sim: ") && strstr(out, text), "it said: %s", out);
}

struct child child_start(void (*fn)(int fd))
{
	struct child c;
	int ends[2];

	NEED(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
	c.pid = fork();
	NEED(c.pid >= 0);
	if (!c.pid) {
		close(ends[0]);
		alarm(20);
		fn(ends[1]);
		_exit(0);
	}
	close(ends[1]);
	c.fd = ends[0];
	return c;
}

void child_end(struct child *c)
{
	int status;

	close(c->fd);
	NEED(waitpid(c->pid, &status, 0) == c->pid);
	IS(status, 0);
}

void child_kill(struct child *c)
{
	int status;

	kill(c->pid, SIGKILL);
	NEED(waitpid(c->pid, &status, 0) == c->pid);
	close(c->fd);
}

void tell(int fd, const void *data, size_t bytes, int pass)
{
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec io = { .iov_base = (void *)(uintptr_t)data, .iov_len = bytes };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1 };

	if (pass >= 0) {
		m.msg_control = control;
		m.msg_controllen = sizeof(control);
		CMSG_FIRSTHDR(&m)->cmsg_len = CMSG_LEN(sizeof(int));
		CMSG_FIRSTHDR(&m)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&m)->cmsg_type = SCM_RIGHTS;
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), &pass, sizeof(int));
	}
	NEED(sendmsg(fd, &m, MSG_NOSIGNAL) == (ssize_t)bytes);
}

int hear(int fd, void *data, size_t bytes)
{
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec io = { .iov_base = data, .iov_len = bytes };
	struct msghdr m = { .msg_iov = &io,
			    .msg_iovlen = 1,
			    .msg_control = control,
			    .msg_controllen = sizeof(control) };
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int passed = -1;

	NEED(poll(&p, 1, 10000) == 1);
	IS(recvmsg(fd, &m, MSG_CMSG_CLOEXEC), (ssize_t)bytes);
	if (CMSG_FIRSTHDR(&m))
		memcpy(&passed, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(int));
	return passed;
}

unsigned descriptors(void)
{
	DIR *d = opendir("/proc/self/fd");
	unsigned n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n;
}
