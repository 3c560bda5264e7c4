#include "cudatrainer.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/cuda_lib.h"

#ifdef SHARDD_CUDA

#define STRIDE  64u
#define SLOTS   4u /* with events */
#define RING    16u
#define HAMMERS 3000u

enum command { MAP, OPEN, RAISE, HAMMER, AWAIT, READ, EVENT, RECORD, AWAIT_EVENT, END };

struct message {
	enum command command;
	uint32_t a, b;
	uint64_t value;
	uint8_t handle[64];
};

struct trainer {
	const struct cuda_lib *cu;
	CUdevice device;
	CUstream stream;
	CUdeviceptr page[_TRAINER_PAGES];
	CUevent events[SLOTS][RING];
};

/* ------------------------------------------------------------------ in it */

static void must(CUresult r, const char *what)
{
	if (r == CUDA_SUCCESS)
		return;
	fprintf(stderr, "trainer: %s answered %d\n", what, (int)r);
	_exit(1);
}

#define CU(call) must((call), #call)

static void load(struct trainer *t)
{
	CUcontext context;
	char why[256];

	if (t->cu)
		return;
	if (cuda_lib_open(&t->cu, why, sizeof(why))) {
		fprintf(stderr, "trainer: %s\n", why);
		_exit(1);
	}
	CU(t->cu->cuDeviceGet(&t->device, 0));
	CU(t->cu->cuDevicePrimaryCtxRetain(&context, t->device));
	CU(t->cu->cuCtxSetCurrent(context));
	CU(t->cu->cuStreamCreateWithPriority(&t->stream, CU_STREAM_NON_BLOCKING, 0));
}

static void map(struct trainer *t, uint32_t page, int fd, uint64_t bytes)
{
	CUmemAccessDesc access = { .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;

	access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location.id = t->device;
	CU(t->cu->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
						 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	close(fd);
	CU(t->cu->cuMemAddressReserve(&t->page[page], bytes, 0, 0, 0));
	CU(t->cu->cuMemMap(t->page[page], bytes, 0, handle, 0));
	CU(t->cu->cuMemRelease(handle));
	CU(t->cu->cuMemSetAccess(t->page[page], bytes, &access, 1));
}

static void open_page(struct trainer *t, uint32_t page, const uint8_t *handle)
{
	CUipcMemHandle h;

	memcpy(&h, handle, sizeof(h));
	CU(t->cu->cuIpcOpenMemHandle(&t->page[page], h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}

static void raise_slot(struct trainer *t, uint32_t slot, uint64_t value)
{
	CU(t->cu->cuStreamWriteValue64(t->stream, t->page[TRAINER_SIGNALS] + slot * STRIDE, value,
				       CU_STREAM_WRITE_VALUE_DEFAULT));
}

static void hammer(struct trainer *t, uint32_t slot, uint64_t value)
{
	for (unsigned i = 0; i < HAMMERS; i++) {
		raise_slot(t, slot, i % value);
		if (i % 16 == 15)
			CU(t->cu->cuStreamSynchronize(t->stream));
	}
}

static uint64_t read_word(struct trainer *t, uint64_t index)
{
	uint64_t word = 0;

	CU(t->cu->cuMemcpyDtoHAsync(&word, t->page[TRAINER_DATA] + index * sizeof(word),
				    sizeof(word), t->stream));
	CU(t->cu->cuStreamSynchronize(t->stream));
	return word;
}

static void make_event(struct trainer *t, uint32_t slot, uint32_t i, uint8_t *ret)
{
	CUipcEventHandle h;

	CU(t->cu->cuEventCreate(&t->events[slot][i],
				CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
	CU(t->cu->cuIpcGetEventHandle(&h, t->events[slot][i]));
	memcpy(ret, &h, sizeof(h));
}

static void await_event(struct trainer *t, const uint8_t *handle)
{
	CUipcEventHandle h;
	CUevent e;

	memcpy(&h, handle, sizeof(h));
	CU(t->cu->cuIpcOpenEventHandle(&e, h));
	CU(t->cu->cuStreamWaitEvent(t->stream, e, 0));
}

static int receive(int s, struct message *m)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { m, sizeof(*m) };
	struct msghdr h = { .msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control) };
	struct cmsghdr *c;
	int fd = -1;

	if (recvmsg(s, &h, MSG_CMSG_CLOEXEC) != sizeof(*m))
		_exit(2);
	c = CMSG_FIRSTHDR(&h);
	if (c)
		memcpy(&fd, CMSG_DATA(c), sizeof(fd));
	return fd;
}

static void obey(struct trainer *t, struct message *m, int fd)
{
	load(t);
	if (m->command == MAP)
		map(t, m->a, fd, m->value);
	else if (m->command == OPEN)
		open_page(t, m->a, m->handle);
	else if (m->command == RAISE)
		raise_slot(t, m->a, m->value);
	else if (m->command == AWAIT)
		CU(t->cu->cuStreamWaitValue64(t->stream, t->page[TRAINER_READY] + m->a * STRIDE,
					      m->value, CU_STREAM_WAIT_VALUE_GEQ));
	else if (m->command == READ)
		m->value = read_word(t, m->value);
	else if (m->command == EVENT)
		make_event(t, m->a, m->b, m->handle);
	else if (m->command == RECORD)
		CU(t->cu->cuEventRecord(t->events[m->a][m->b], t->stream));
	else if (m->command == AWAIT_EVENT)
		await_event(t, m->handle);
}

static _Noreturn void run(int s)
{
	struct trainer t = { 0 };

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		struct message m;
		int fd = receive(s, &m);

		if (m.command == END) {
			/* what it was told to raise, it raises */
			if (t.cu)
				CU(t.cu->cuStreamSynchronize(t.stream));
			_exit(0);
		}
		if (m.command != HAMMER)
			obey(&t, &m, fd);
		if (write(s, &m, sizeof(m)) != sizeof(m))
			_exit(2);
		if (m.command == HAMMER)
			hammer(&t, m.a, m.value);
	}
}

/* ------------------------------------------------------------- beside it */

struct cudatrainer cudatrainer_start(void)
{
	struct cudatrainer t;
	int pair[2];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	t.pid = fork();
	cr_assert_geq(t.pid, 0);
	if (t.pid == 0) {
		close(pair[0]);
		run(pair[1]);
	}
	close(pair[1]);
	t.fd = pair[0];
	return t;
}

static void tell(struct cudatrainer *t, struct message *m, int fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec iov = { m, sizeof(*m) };
	struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (fd >= 0) {
		h.msg_control = &control;
		h.msg_controllen = sizeof(control);
		control.align = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						  .cmsg_level = SOL_SOCKET,
						  .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.align), &fd, sizeof(fd));
	}
	cr_assert_eq(sendmsg(t->fd, &h, MSG_NOSIGNAL), (ssize_t)sizeof(*m));
}

static void ask(struct cudatrainer *t, struct message *m, int fd)
{
	tell(t, m, fd);
	cr_assert_eq(recv(t->fd, m, sizeof(*m), 0), (ssize_t)sizeof(*m), "the trainer has ended");
}

void cudatrainer_stop(struct cudatrainer *t)
{
	struct message m = { .command = END };
	int status;

	tell(t, &m, -1);
	close(t->fd);
	cr_assert_eq(waitpid(t->pid, &status, 0), t->pid);
	cr_assert_eq(status, 0);
}

void cudatrainer_kill(struct cudatrainer *t)
{
	int status;

	cr_assert_eq(kill(t->pid, SIGKILL), 0);
	cr_assert_eq(waitpid(t->pid, &status, 0), t->pid);
	close(t->fd);
}

void cudatrainer_map(struct cudatrainer *t, enum cudatrainer_page page, int fd, uint64_t bytes)
{
	struct message m = { .command = MAP, .a = page, .value = bytes };

	ask(t, &m, fd);
}

void cudatrainer_open(struct cudatrainer *t, enum cudatrainer_page page, const uint8_t *handle)
{
	struct message m = { .command = OPEN, .a = page };

	memcpy(m.handle, handle, sizeof(m.handle));
	ask(t, &m, -1);
}

void cudatrainer_raise(struct cudatrainer *t, uint32_t slot, uint64_t value)
{
	struct message m = { .command = RAISE, .a = slot, .value = value };

	ask(t, &m, -1);
}

void cudatrainer_hammer(struct cudatrainer *t, uint32_t slot, uint64_t value)
{
	struct message m = { .command = HAMMER, .a = slot, .value = value };

	ask(t, &m, -1);
}

void cudatrainer_await(struct cudatrainer *t, uint32_t queue, uint64_t value)
{
	struct message m = { .command = AWAIT, .a = queue, .value = value };

	ask(t, &m, -1);
}

uint64_t cudatrainer_read(struct cudatrainer *t, uint64_t index)
{
	struct message m = { .command = READ, .value = index };

	ask(t, &m, -1);
	return m.value;
}

void cudatrainer_event(struct cudatrainer *t, uint32_t slot, uint32_t i, uint8_t ret_handle[64])
{
	struct message m = { .command = EVENT, .a = slot, .b = i };

	ask(t, &m, -1);
	memcpy(ret_handle, m.handle, sizeof(m.handle));
}

void cudatrainer_record(struct cudatrainer *t, uint32_t slot, uint32_t i)
{
	struct message m = { .command = RECORD, .a = slot, .b = i };

	ask(t, &m, -1);
}

void cudatrainer_await_event(struct cudatrainer *t, const uint8_t handle[64])
{
	struct message m = { .command = AWAIT_EVENT };

	memcpy(m.handle, handle, sizeof(m.handle));
	ask(t, &m, -1);
}

#endif
