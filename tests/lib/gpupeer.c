#include "gpupeer.h"

#ifdef SHARDD_CUDA

#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

const uint8_t gpupeer_token[SHD1_TOKEN_BYTES] = "0123456789abcde";

enum { MAX_SLOTS = 16 };

enum command { HELLO, FILL, HOLDS, SHARE, OP, RAISE, DRAIN, END };

struct message {
	enum command command;
	uint32_t slot, from, to;
	uint64_t value, ready;
	bool held;
	uint8_t handles[GPUPEER_RING][GPUPEER_HANDLE];
	uint8_t ipc[GPUPEER_HANDLE];
	char uuid[48];
};

/* ------------------------------------------------------------------- the peer */

struct peer {
	const struct cuda_lib *cu;
	CUdevice device;
	CUcontext context;
	CUstream queue, beside;
	bool events;
	int listener;
	CUdeviceptr at[GPUPEER_SLABS];
	int fds[GPUPEER_SLABS];
	CUipcMemHandle ipc;
	CUevent ready[GPUPEER_RING];
	CUevent signals[MAX_SLOTS][GPUPEER_RING];
};

static void must(bool well, const char *what)
{
	if (well)
		return;
	fprintf(stderr, "gpupeer: %s\n", what);
	abort();
}

#define CU(call) must((call) == CUDA_SUCCESS, #call)

static void make_slab(struct peer *p, unsigned i)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = p->device },
	};
	CUmemAccessDesc access = { .location = prop.location,
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;

	CU(p->cu->cuMemCreate(&handle, GPUPEER_SLAB_BYTES, &prop, 0));
	CU(p->cu->cuMemAddressReserve(&p->at[i], GPUPEER_SLAB_BYTES, 0, 0, 0));
	CU(p->cu->cuMemMap(p->at[i], GPUPEER_SLAB_BYTES, 0, handle, 0));
	CU(p->cu->cuMemSetAccess(p->at[i], GPUPEER_SLAB_BYTES, &access, 1));
	CU(p->cu->cuMemExportToShareableHandle(&p->fds[i], handle,
					       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

static void set_up(struct peer *p, unsigned device)
{
	char why[256];

	must(cuda_lib_open(&p->cu, why, sizeof(why)) == 0, "libcuda");
	CU(p->cu->cuDeviceGet(&p->device, (int)device));
	CU(p->cu->cuDevicePrimaryCtxRetain(&p->context, p->device));
	CU(p->cu->cuCtxSetCurrent(p->context));
	for (unsigned i = 1; i < GPUPEER_IPC; i++)
		make_slab(p, i);
	CU(p->cu->cuMemAlloc(&p->at[GPUPEER_IPC], GPUPEER_IPC_BYTES));
	CU(p->cu->cuIpcGetMemHandle(&p->ipc, p->at[GPUPEER_IPC]));
	CU(p->cu->cuStreamCreateWithPriority(&p->queue, CU_STREAM_NON_BLOCKING, 0));
	CU(p->cu->cuStreamCreateWithPriority(&p->beside, CU_STREAM_NON_BLOCKING, 0));
	for (unsigned i = 1; i < GPUPEER_SLABS; i++)
		CU(p->cu->cuMemsetD8Async(p->at[i], 0, GPUPEER_SLAB_BYTES, p->queue));
	CU(p->cu->cuStreamSynchronize(p->queue));
	for (unsigned i = 0; p->events && i < GPUPEER_RING; i++)
		CU(p->cu->cuEventCreate(&p->ready[i],
					CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
}

static void fill_header(struct shd1_header *h, uint16_t type, size_t bytes, uint32_t tag)
{
	*h = (struct shd1_header){ SHD1_MAGIC, type, (uint16_t)bytes, tag, 0 };
}

static void send_slab(struct peer *p, int sock, const struct shd1_get_slab *q)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct shd1_slab s = { .slab = q->slab, .bytes = GPUPEER_SLAB_BYTES };
	struct iovec iov = { &s, sizeof(s) };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control.bytes,
			      .msg_controllen = sizeof(control.bytes) };

	must(q->slab > 0 && q->slab < GPUPEER_IPC, "a slab of the peer's");
	s.writable = q->slab != GPUPEER_READ_ONLY && q->slab != GPUPEER_READY;
	fill_header(&s.h, SHD1_SLAB, sizeof(s), q->h.tag);
	*CMSG_FIRSTHDR(&msg) = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						 .cmsg_level = SOL_SOCKET,
						 .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), &p->fds[q->slab], sizeof(int));
	must(sendmsg(sock, &msg, MSG_NOSIGNAL) == sizeof(s), "sendmsg");
}

/* Any number of channels, one after the other. */
static void *serve(void *arg)
{
	struct shd1_welcome welcome = { .version = SHD1_VERSION, .session = GPUPEER_SESSION };
	struct shd1_get_slab q;
	struct shd1_hello hello;
	struct peer *p = arg;
	int sock;

	while ((sock = accept(p->listener, NULL, NULL)) >= 0) {
		if (recv(sock, &hello, sizeof(hello), MSG_WAITALL) == sizeof(hello)) {
			fill_header(&welcome.h, SHD1_WELCOME, sizeof(welcome), hello.h.tag);
			must(send(sock, &welcome, sizeof(welcome), MSG_NOSIGNAL) > 0, "send");
		}
		while (recv(sock, &q, sizeof(q), MSG_WAITALL) == sizeof(q))
			send_slab(p, sock, &q);
		close(sock);
	}
	return NULL;
}

static void raise_ready(struct peer *p, CUstream stream, uint64_t value)
{
	if (p->events)
		CU(p->cu->cuEventRecord(p->ready[value % GPUPEER_RING], stream));
	else
		CU(p->cu->cuStreamWriteValue64(stream, p->at[GPUPEER_READY], value,
					       CU_STREAM_WRITE_VALUE_DEFAULT));
}

static void run_op(struct peer *p, const struct message *m)
{
	CUdeviceptr word = p->at[GPUPEER_SIGNALS] + (uint64_t)m->slot * GPUPEER_STRIDE;

	if (p->events)
		CU(p->cu->cuStreamWaitEvent(p->queue, p->signals[m->slot][m->value % GPUPEER_RING],
					    0));
	else
		CU(p->cu->cuStreamWaitValue64(p->queue, word, m->value, CU_STREAM_WAIT_VALUE_GEQ));
	CU(p->cu->cuMemcpyDtoDAsync(p->at[m->to], p->at[m->from], GPUPEER_SLAB_BYTES, p->queue));
	if (!m->held)
		raise_ready(p, p->queue, m->ready);
}

static void compare(struct peer *p, struct message *m)
{
	static uint8_t bytes[GPUPEER_SLAB_BYTES];
	size_t i = 0;

	CU(p->cu->cuMemcpyDtoHAsync(bytes, p->at[m->from], sizeof(bytes), p->beside));
	CU(p->cu->cuStreamSynchronize(p->beside));
	while (i < sizeof(bytes) && bytes[i] == (uint8_t)m->value)
		i++;
	m->held = i == sizeof(bytes);
}

static void open_events(struct peer *p, const struct message *m)
{
	CUipcEventHandle handle;

	for (unsigned i = 0; i < GPUPEER_RING; i++) {
		memcpy(&handle, m->handles[i], sizeof(handle));
		CU(p->cu->cuIpcOpenEventHandle(&p->signals[m->slot][i], handle));
	}
}

static void introduce(struct peer *p, struct message *m)
{
	CUipcEventHandle handle;

	CU(cuda_lib_uuid(p->cu, p->device, m->uuid));
	memcpy(m->ipc, &p->ipc, sizeof(p->ipc));
	for (unsigned i = 0; p->events && i < GPUPEER_RING; i++) {
		CU(p->cu->cuIpcGetEventHandle(&handle, p->ready[i]));
		memcpy(m->handles[i], &handle, sizeof(handle));
	}
}

static void obey(struct peer *p, struct message *m)
{
	switch (m->command) {
	case HELLO:
		introduce(p, m);
		break;
	case FILL:
		CU(p->cu->cuMemsetD8Async(p->at[m->from], (unsigned char)m->value,
					  GPUPEER_SLAB_BYTES, p->beside));
		CU(p->cu->cuStreamSynchronize(p->beside));
		break;
	case HOLDS:
		compare(p, m);
		break;
	case SHARE:
		open_events(p, m);
		break;
	case OP:
		run_op(p, m);
		break;
	case RAISE:
		raise_ready(p, p->beside, m->ready);
		break;
	case DRAIN:
		CU(p->cu->cuStreamSynchronize(p->queue));
		break;
	case END:
		_exit(0);
	}
}

static void play(struct peer *p, unsigned device, int commands)
{
	struct message m;
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	set_up(p, device);
	must(pthread_create(&thread, NULL, serve, p) == 0, "pthread_create");
	while (recv(commands, &m, sizeof(m), 0) == sizeof(m)) {
		obey(p, &m);
		must(send(commands, &m, sizeof(m), MSG_NOSIGNAL) == sizeof(m), "send");
	}
	_exit(1);
}

/* -------------------------------------------------------------------- the test */

static void ask(struct gpupeer *p, struct message *m)
{
	cr_assert_eq(send(p->commands, m, sizeof(*m), MSG_NOSIGNAL), sizeof(*m));
	cr_assert_eq(recv(p->commands, m, sizeof(*m), 0), sizeof(*m), "the peer has died");
}

void gpupeer_start(struct gpupeer *p, unsigned device, bool events)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	struct message m = { .command = HELLO };
	struct peer peer = { .events = events };
	int ends[2];

	setenv("SHARDD_LIBCUDA", SHARDD_SIM_DIR "/libcuda.so.1", 1);
	*p = (struct gpupeer){ .dir = "/tmp/shardd-peer-XXXXXX" };
	cr_assert_not_null(mkdtemp(p->dir));
	snprintf(p->path, sizeof(p->path), "%s/s", p->dir);
	strcpy(sa.sun_path, p->path);
	cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
	peer.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	cr_assert_eq(bind(peer.listener, (struct sockaddr *)&sa, sizeof(sa)), 0);
	cr_assert_eq(listen(peer.listener, 4), 0);
	p->pid = fork();
	cr_assert_geq(p->pid, 0);
	if (p->pid == 0) {
		close(ends[0]);
		play(&peer, device, ends[1]);
	}
	close(ends[1]);
	close(peer.listener);
	p->commands = ends[0];
	ask(p, &m);
	memcpy(p->uuid, m.uuid, sizeof(p->uuid));
	memcpy(p->ipc, m.ipc, sizeof(p->ipc));
	memcpy(p->ready_events, m.handles, sizeof(p->ready_events));
}

void gpupeer_stop(struct gpupeer *p)
{
	struct message m = { .command = END };
	int status;

	cr_assert_eq(send(p->commands, &m, sizeof(m), MSG_NOSIGNAL), sizeof(m));
	cr_assert_eq(waitpid(p->pid, &status, 0), p->pid);
	cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the peer: status %d", status);
	close(p->commands);
	unlink(p->path);
	rmdir(p->dir);
}

void gpupeer_fill(struct gpupeer *p, enum gpupeer_slab slab, uint8_t byte)
{
	struct message m = { .command = FILL, .from = slab, .value = byte };

	ask(p, &m);
}

bool gpupeer_holds(struct gpupeer *p, enum gpupeer_slab slab, uint8_t byte)
{
	struct message m = { .command = HOLDS, .from = slab, .value = byte };

	ask(p, &m);
	return m.held;
}

void gpupeer_share(struct gpupeer *p, uint32_t slot, const uint8_t *handles)
{
	struct message m = { .command = SHARE, .slot = slot };

	cr_assert_lt(slot, MAX_SLOTS);
	memcpy(m.handles, handles, sizeof(m.handles));
	ask(p, &m);
}

void gpupeer_op(struct gpupeer *p, uint32_t slot, uint64_t value, enum gpupeer_slab from,
		enum gpupeer_slab to, uint64_t ready, bool held)
{
	struct message m = { OP, slot, from, to, value, ready, held, { { 0 } }, { 0 }, "" };

	ask(p, &m);
}

void gpupeer_raise(struct gpupeer *p, uint64_t ready)
{
	struct message m = { .command = RAISE, .ready = ready };

	ask(p, &m);
}

void gpupeer_drain(struct gpupeer *p)
{
	struct message m = { .command = DRAIN };

	ask(p, &m);
}

#endif
