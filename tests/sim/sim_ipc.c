/*
 * Legacy handles: memory and events by name.
 *
 * A process that made a handle answers on an abstract socket, from a thread that runs while
 * it has something to hand out: who opens the handle connects, names the object's number,
 * and gets its descriptor. So a handle dies with its process, and with what it names; the
 * numbers of a dead object are not used again. The two need a network namespace in common,
 * which the real thing does not.
 *
 * An importer keeps a shared lock on its descriptor while it has the memory open: that is
 * how freeing what others have open is noticed.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "sim_impl.h"

#define MAGIC "SIMcuIPC"

struct offer {
	struct offer *next;
	uint64_t object;
	int fd;
	enum ipc_kind kind;
};

static struct offer *offers;
static uint64_t token, last_object;
static int listener = -1;
static pthread_t server;
static pthread_t ended[16]; /* shut down, not joined yet */
static unsigned n_ended;

static socklen_t address(uint64_t of, struct sockaddr_un *ret)
{
	memset(ret, 0, sizeof(*ret));
	ret->sun_family = AF_UNIX;
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
			   (size_t)snprintf(ret->sun_path + 1, sizeof(ret->sun_path) - 1,
					    "shardd-sim-%016llx", (unsigned long long)of));
}

/* -- the exporter ------------------------------------------------------------------------ */

static int offered(uint64_t object)
{
	int fd = -1;

	pthread_mutex_lock(&sim_lock);
	for (struct offer *o = offers; o; o = o->next)
		if (o->object == object)
			fd = fcntl(o->fd, F_DUPFD_CLOEXEC, 3);
	pthread_mutex_unlock(&sim_lock);
	return fd;
}

static void send_fd(int to, int fd)
{
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { .head = { .cmsg_len = CMSG_LEN(sizeof(int)),
				.cmsg_level = SOL_SOCKET,
				.cmsg_type = SCM_RIGHTS } };
	char ok = 1;
	struct iovec io = { .iov_base = &ok, .iov_len = 1 };
	struct msghdr m = { .msg_iov = &io,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control.space) };

	memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	sendmsg(to, &m, MSG_NOSIGNAL);
}

static void answer(int to)
{
	struct timeval second = { .tv_sec = 1 };
	uint64_t object;
	int fd = -1;

	setsockopt(to, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second));
	if (recv(to, &object, sizeof(object), MSG_WAITALL) == sizeof(object))
		fd = offered(object);
	if (fd < 0)
		return;
	send_fd(to, fd);
	close(fd);
}

/* Ends when the listener is shut down; closes it. */
static void *serve(void *arg)
{
	int fd = (int)(intptr_t)arg;
	int peer;

	while ((peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC)) >= 0 || errno != EINVAL) {
		if (peer < 0) {
			usleep(1000); /* no descriptors left, most likely */
			continue;
		}
		answer(peer);
		close(peer);
	}
	close(fd);
	return NULL;
}

static bool serve_start(int fd)
{
	sigset_t all, before;
	int err;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	err = pthread_create(&server, NULL, serve, (void *)(intptr_t)fd);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!err)
		pthread_setname_np(server, "sim-ipc");
	return !err;
}

static bool listen_start(void)
{
	struct sockaddr_un sa;
	socklen_t len;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || getrandom(&token, sizeof(token), 0) != sizeof(token))
		token = 0;
	len = address(token, &sa);
	if (fd < 0 || bind(fd, (struct sockaddr *)&sa, len) < 0 || listen(fd, 64) < 0 ||
	    !serve_start(fd)) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	listener = fd;
	return true;
}

uint64_t ipc_offer(int fd, enum ipc_kind kind)
{
	struct offer *o = malloc(sizeof(*o));

	if (!o || (listener < 0 && !listen_start())) {
		free(o);
		return 0;
	}
	*o = (struct offer){ .next = offers, .object = ++last_object, .fd = fd, .kind = kind };
	offers = o;
	return o->object;
}

void ipc_withdraw(uint64_t object)
{
	for (struct offer **o = &offers; *o; o = &(*o)->next) {
		struct offer *gone = *o;

		if (gone->object != object)
			continue;
		*o = gone->next;
		free(gone);
		break;
	}
	if (offers || listener < 0)
		return;
	shutdown(listener, SHUT_RDWR);
	listener = -1;
	if (n_ended == sizeof(ended) / sizeof(ended[0]))
		sim_breach("ipc_settle was not called");
	ended[n_ended++] = server;
}

void ipc_settle(void)
{
	pthread_t one;

	pthread_mutex_lock(&sim_lock);
	while (n_ended) {
		one = ended[--n_ended];
		pthread_mutex_unlock(&sim_lock);
		pthread_join(one, NULL);
		pthread_mutex_lock(&sim_lock);
	}
	pthread_mutex_unlock(&sim_lock);
}

static uint64_t checksum(const struct ipc_handle *h)
{
	return (h->token ^ h->object * 0x9e3779b97f4a7c15ull) + h->bytes + h->pid * 31ull + h->kind;
}

/* @ret: CUDA's own type, 64 bytes without alignment. */
void ipc_handle_make(void *ret, enum ipc_kind kind, uint64_t object, uint64_t bytes)
{
	struct ipc_handle h = { .kind = kind,
				.pid = (uint32_t)getpid(),
				.token = token,
				.object = object,
				.bytes = bytes };

	memcpy(h.magic, MAGIC, 8);
	h.check = checksum(&h);
	memcpy(ret, &h, sizeof(h));
}

/* -- the importer --------------------------------------------------------------------------- */

CUresult ipc_handle_check(const struct ipc_handle *h, enum ipc_kind kind)
{
	if (memcmp(h->magic, MAGIC, 8) != 0 || h->kind != kind || h->check != checksum(h))
		return CUDA_ERROR_INVALID_VALUE;
	/* the same process, or one of the same number in another PID namespace */
	return h->pid == (uint32_t)getpid() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

static int receive_fd(int from)
{
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { .space = { 0 } };
	char ok;
	struct iovec io = { .iov_base = &ok, .iov_len = 1 };
	struct msghdr m = { .msg_iov = &io,
			    .msg_iovlen = 1,
			    .msg_control = &control,
			    .msg_controllen = sizeof(control.space) };
	struct cmsghdr *c;
	int fd;

	if (recvmsg(from, &m, MSG_CMSG_CLOEXEC) != 1)
		return -1;
	c = CMSG_FIRSTHDR(&m);
	if (!c || c->cmsg_type != SCM_RIGHTS || c->cmsg_len != CMSG_LEN(sizeof(int)))
		return -1;
	memcpy(&fd, CMSG_DATA(c), sizeof(fd));
	return fd;
}

CUresult ipc_fetch(const struct ipc_handle *h, int *ret_fd)
{
	struct sockaddr_un sa;
	socklen_t len = address(h->token, &sa);
	int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int fd = -1;

	if (peer < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (connect(peer, (struct sockaddr *)&sa, len) == 0 &&
	    send(peer, &h->object, sizeof(h->object), MSG_NOSIGNAL) == sizeof(h->object))
		fd = receive_fd(peer);
	close(peer);
	if (fd < 0)
		return CUDA_ERROR_MAP_FAILED; /* the process or what it offered is gone */
	*ret_fd = fd;
	return CUDA_SUCCESS;
}

/* -- memory ------------------------------------------------------------------------------------ */

CUresult cuIpcGetMemHandle(CUipcMemHandle *ret, CUdeviceptr addr)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	v = range_find(addr);
	if (!v || v->kind != RANGE_MALLOC || v->addr != addr)
		r = CUDA_ERROR_INVALID_VALUE;
	else if (!v->exported && !(v->exported = ipc_offer(v->block->fd, IPC_MEMORY)))
		r = CUDA_ERROR_OPERATING_SYSTEM;
	if (r == CUDA_SUCCESS)
		ipc_handle_make(ret, IPC_MEMORY, v->exported, v->bytes);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static struct range *opened(const struct ipc_handle *h)
{
	for (struct range *v = range_first(); v; v = range_after(v))
		if (v->kind == RANGE_IPC && v->ipc_token == h->token && v->ipc_object == h->object)
			return v;
	return NULL;
}

/* An open file description of our own, so that the lock on it is ours alone. Takes @fd over. */
static int reopen(int fd)
{
	char path[64];
	int own;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	own = open(path, O_RDWR | O_CLOEXEC);
	close(fd);
	return own;
}

/* Takes @fd over: it is the memory's from here on, with its lock. */
static CUresult open_memory(struct ctx *c, const struct ipc_handle *h, int fd, CUdeviceptr *ret)
{
	struct block *b = NULL;
	CUresult r;

	fd = reopen(fd);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	r = block_import(fd, BLOCK_MALLOC, &b); /* duplicates it: the lock belongs to both */
	if (r == CUDA_SUCCESS && flock(fd, LOCK_SH | LOCK_NB) < 0)
		r = CUDA_ERROR_OPERATING_SYSTEM;
	close(fd);
	if (r == CUDA_SUCCESS && (h->bytes > b->bytes || !(*ret = addr_take(h->bytes, 1))))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r) {
		block_unref(b);
		return r;
	}
	range_add(&(struct range){ .addr = *ret,
				   .bytes = h->bytes,
				   .kind = RANGE_IPC,
				   .block = b,
				   .device = c->device,
				   .ipc_token = h->token,
				   .ipc_object = h->object,
				   .opens = 1 });
	return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *ret, CUipcMemHandle handle, unsigned int flags)
{
	struct ipc_handle h;
	struct range *v;
	struct ctx *c;
	int fd = -1;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	memcpy(&h, &handle, sizeof(h));
	if (r == CUDA_SUCCESS && flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
		r = CUDA_ERROR_INVALID_VALUE;
	if (r == CUDA_SUCCESS)
		r = ipc_handle_check(&h, IPC_MEMORY);
	if (r == CUDA_SUCCESS)
		r = ipc_fetch(&h, &fd);
	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	v = opened(&h);
	if (v) {
		v->opens++;
		*ret = v->addr;
		close(fd);
	} else {
		r = open_memory(c, &h, fd, ret);
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr addr)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	v = range_find(addr);
	if (!v && addr_is_device(addr))
		sim_breach("cuIpcCloseMemHandle: nothing is open at 0x%llx (any more)",
			   (unsigned long long)addr);
	if (!v || v->kind != RANGE_IPC || v->addr != addr)
		r = CUDA_ERROR_INVALID_VALUE;
	else if (!--v->opens)
		range_remove(v);
	pthread_mutex_unlock(&sim_lock);
	return r ? r : sim_leave(c);
}

bool ipc_in_use(const struct range *v)
{
	if (!v->exported || flock(v->block->fd, LOCK_EX | LOCK_NB) == 0) {
		if (v->exported)
			flock(v->block->fd, LOCK_UN);
		return false;
	}
	return errno == EWOULDBLOCK;
}
