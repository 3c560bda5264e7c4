/*
 * Communicators with members in several processes: these meet over TCP, and each sends what its
 * members contribute to the others. One thread per communicator and process does all of it.
 *
 * The process that makes an id listens (the root). Each member calls there, says its rank and where its
 * process listens, and gets the list of all when the last one has come. Then each two processes have one
 * connection. The result of a collective is computed at each end.
 *
 * As with the real one:
 *   - it uses the interface that NCCL_SOCKET_IFNAME says (a prefix, or with = the name), else the
 *     first that is not the loopback
 *   - a member that never comes is waited for until the communicator is aborted
 *   - when a process dies, or aborts, the members next to its ranks get ncclRemoteError; the others
 *     wait until they are aborted, and so do all if a machine is silent
 *   - calls that do not match hang (and a line on standard error says so)
 *   - a process counts as a machine of its own by NCCL_HOSTID only; else two that have the same
 *     device are refused
 *   - unless NCCL_RUNTIME_CONNECT is 0 the first call of each kind, and the first large one, stays in
 *     progress until the other processes make it
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "nccl_impl.h"

#define FRAME_MAX (UINT64_C(1) << 32)
/* How long a process that leaves waits for others to take what it has sent. */
#define FLUSH_TURNS 200

enum what { F_HELLO = 1, F_TABLE, F_MEET, F_PART, F_CONNECT, F_BYE };

struct frame {
	uint32_t what;
	int32_t rank, kind, type, op, root;
	uint64_t seq, count, process, bytes; /* that follow */
};

/* What all must know of a member. */
struct place {
	uint64_t process;
	struct sockaddr_in at;
	char device[72]; /* and the machine that it is in */
};

struct out {
	struct out *next;
	size_t bytes, sent;
	char data[];
};

enum role { TO_ROOT, AT_ROOT, PEER };

struct line {
	struct line *next;
	int fd;
	enum role role;
	int rank;         /* TO_ROOT: ours */
	uint64_t process; /* PEER: the other one; 0: not known yet */
	bool connecting, over, bye;
	size_t slot; /* among what is polled; 0: none */
	struct frame in;
	size_t got; /* of the frame and what follows */
	char *payload;
	struct out *out, **last;
};

struct net {
	struct clique *q;
	int wake, root, listener;
	struct sockaddr_in at;
	uint64_t self;
	bool has_said[NCCL_RANKS]; /* that it wants to join */
	struct place *places;      /* by rank; at the root as they come */
	int n_places;              /* at the root */
	bool has_table, up, ends;
	unsigned connected[2 * _K_N]; /* processes that have made such a call */
	bool connects[2 * _K_N];
	struct line *lines;
	struct pollfd *polled;
	size_t room;
};

/* Ids made here whose communicator is not complete. */
static struct root {
	struct root *next;
	ncclUniqueId id;
	pthread_t by;
	int fd;
} * roots;

/* ------------------------------------------------------------------------ addresses */

static bool wanted(const char *name, unsigned flags, bool any)
{
	const char *list = getenv("NCCL_SOCKET_IFNAME");

	if (list && *list == '=')
		return strcmp(name, list + 1) == 0;
	if (list && *list)
		return strncmp(name, list, strlen(list)) == 0;
	return any || !(flags & IFF_LOOPBACK);
}

static bool own_address(struct sockaddr_in *ret)
{
	struct ifaddrs *all;
	bool found = false;

	if (getifaddrs(&all))
		return false;
	for (int any = 0; any < 2 && !found; any++)
		for (const struct ifaddrs *a = all; a && !found; a = a->ifa_next) {
			if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET ||
			    !(a->ifa_flags & IFF_UP) || !wanted(a->ifa_name, a->ifa_flags, any))
				continue;
			memcpy(ret, a->ifa_addr, sizeof(*ret));
			ret->sin_port = 0;
			found = true;
		}
	freeifaddrs(all);
	return found;
}

/* Return: a listening socket, or -1. */
static int listen_somewhere(struct sockaddr_in *ret)
{
	socklen_t bytes = sizeof(*ret);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd >= 0 && own_address(ret) && bind(fd, (struct sockaddr *)ret, bytes) == 0 &&
	    listen(fd, 128) == 0 && getsockname(fd, (struct sockaddr *)ret, &bytes) == 0)
		return fd;
	if (fd >= 0)
		close(fd);
	return -1;
}

bool net_make_id(ncclUniqueId *id)
{
	struct root *r = calloc(1, sizeof(*r));
	char text[INET_ADDRSTRLEN];
	struct sockaddr_in at;
	uint64_t random;

	if (!r || (r->fd = listen_somewhere(&at)) < 0) {
		nccl_error("no interface to listen on");
		free(r);
		return false;
	}
	if (getrandom(&random, sizeof(random), 0) != sizeof(random))
		sim_breach("libnccl: no random numbers");
	inet_ntop(AF_INET, &at.sin_addr, text, sizeof(text));
	snprintf(id->internal, sizeof(id->internal), "sim-%s-%u-%016llx", text, ntohs(at.sin_port),
		 (unsigned long long)random);
	r->id = *id;
	r->by = pthread_self();
	r->next = roots;
	roots = r;
	return true;
}

/* The socket of that id, if it was made here. It is forgotten. */
static int take_root(const ncclUniqueId *id)
{
	for (struct root **p = &roots, *r; (r = *p); p = &r->next) {
		int fd = r->fd;

		if (memcmp(&r->id, id, sizeof(*id)) != 0)
			continue;
		*p = r->next;
		free(r);
		return fd;
	}
	return -1;
}

void net_forget_id(const ncclUniqueId *id)
{
	int fd = take_root(id);

	if (fd >= 0)
		close(fd);
}

void net_forget_own(void)
{
	for (struct root *r = roots, *next; r; r = next) {
		next = r->next;
		if (pthread_equal(r->by, pthread_self()))
			net_forget_id(&r->id);
	}
}

static bool root_address(const ncclUniqueId *id, struct sockaddr_in *ret)
{
	char ip[INET_ADDRSTRLEN];
	unsigned port;

	*ret = (struct sockaddr_in){ .sin_family = AF_INET };
	if (sscanf(id->internal, "sim-%15[0-9.]-%u-", ip, &port) != 2)
		return false;
	ret->sin_port = htons((uint16_t)port);
	return inet_pton(AF_INET, ip, &ret->sin_addr) == 1;
}

static void name_device(ncclComm_t comm, char ret[72])
{
	const char *host = getenv("NCCL_HOSTID");
	char own[48] = "";

	gethostname(own, sizeof(own) - 1);
	snprintf(ret, 72, "%.55s/%d", host ? host : own, sim_physical(comm->device));
}

/* ------------------------------------------------------------------------------ lines */

static void kick(struct net *n)
{
	uint64_t one = 1;

	if (write(n->wake, &one, sizeof(one)) < 0)
		sim_breach("libnccl: eventfd: %s", strerror(errno));
}

static struct line *line_new(struct net *n, int fd, enum role role)
{
	struct line *l = calloc(1, sizeof(*l));

	if (!l)
		sim_breach("libnccl: no memory");
	l->fd = fd;
	l->role = role;
	l->last = &l->out;
	l->next = n->lines;
	n->lines = l;
	return l;
}

static void line_free(struct line *l)
{
	close(l->fd);
	free(l->payload);
	while (l->out) {
		struct out *o = l->out;

		l->out = o->next;
		free(o);
	}
	free(l);
}

static void line_put(struct line *l, const struct frame *f, const void *payload)
{
	struct out *o = malloc(sizeof(*o) + sizeof(*f) + f->bytes);

	if (!o)
		sim_breach("libnccl: no memory");
	*o = (struct out){ .bytes = sizeof(*f) + f->bytes };
	memcpy(o->data, f, sizeof(*f));
	if (f->bytes)
		memcpy(o->data + sizeof(*f), payload, f->bytes);
	*l->last = o;
	l->last = &o->next;
}

/* Return: false: it cannot be reached. */
static struct line *line_call(struct net *n, const struct sockaddr_in *at, enum role role)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	struct line *l;

	if (fd < 0)
		return NULL;
	if (connect(fd, (const struct sockaddr *)at, sizeof(*at)) < 0 && errno != EINPROGRESS) {
		close(fd);
		return NULL;
	}
	l = line_new(n, fd, role);
	l->connecting = true;
	return l;
}

static void fail_all(struct net *n, ncclResult_t r, const char *why)
{
	nccl_error("%s", why);
	for (int i = 0; i < n->q->size; i++)
		if (n->q->members[i])
			comm_set(n->q->members[i], r);
}

/* ------------------------------------------------------------------------ meeting */

static void say_hello(struct net *n, ncclComm_t comm)
{
	struct place p = { .process = n->self, .at = n->at };
	struct frame f = { .what = F_HELLO,
			   .rank = comm->rank,
			   .count = (uint64_t)n->q->size,
			   .bytes = sizeof(p) };
	struct sockaddr_in root;
	struct line *l = NULL;

	n->has_said[comm->rank] = true;
	if (root_address(&n->q->id, &root))
		l = line_call(n, &root, TO_ROOT);
	if (!l) {
		nccl_error("the root of the id cannot be reached");
		comm_set(comm, ncclSystemError);
		return;
	}
	name_device(comm, p.device);
	l->rank = comm->rank;
	line_put(l, &f, &p);
}

static void on_hello(struct net *n, const struct line *l)
{
	struct frame f = { .what = F_TABLE, .bytes = (uint64_t)n->q->size * sizeof(struct place) };

	if (l->in.bytes != sizeof(struct place) || l->in.rank < 0 || l->in.rank >= n->q->size ||
	    l->in.count != (uint64_t)n->q->size || n->places[l->in.rank].process)
		return; /* it waits for ever */
	memcpy(&n->places[l->in.rank], l->payload, sizeof(struct place));
	if (++n->n_places < n->q->size)
		return;
	for (struct line *to = n->lines; to; to = to->next)
		if (to->role == AT_ROOT && !to->over)
			line_put(to, &f, n->places);
}

static bool is_local(const struct net *n, int rank)
{
	return n->places[rank].process == n->self;
}

static struct line *peer_of(const struct net *n, uint64_t process)
{
	for (struct line *l = n->lines; l; l = l->next)
		if (l->role == PEER && l->process == process && !l->over)
			return l;
	return NULL;
}

/* Has this process one connection to each other one? */
static void look_up(struct net *n)
{
	if (!n->has_table || n->up)
		return;
	for (int i = 0; i < n->q->size; i++)
		if (!is_local(n, i) && (!peer_of(n, n->places[i].process) ||
					peer_of(n, n->places[i].process)->connecting))
			return;
	n->up = true;
	for (int i = 0; i < n->q->size; i++) {
		ncclComm_t c = n->q->members[i];

		if (c && c->state == ncclInProgress)
			comm_set(c, comm_take_memory(c, 0));
	}
	pthread_cond_broadcast(&nccl_changed);
}

static void call_peers(struct net *n)
{
	struct frame f = { .what = F_MEET, .process = n->self };

	for (int i = 0; i < n->q->size; i++) {
		uint64_t process = n->places[i].process;
		struct line *l;

		if (process <= n->self || peer_of(n, process))
			continue;
		l = line_call(n, &n->places[i].at, PEER);
		if (!l) {
			fail_all(n, ncclSystemError, "a process cannot be reached");
			return;
		}
		l->process = process;
		line_put(l, &f, NULL);
	}
}

static void on_table(struct net *n, const struct line *l)
{
	if (n->has_table || l->in.bytes != (uint64_t)n->q->size * sizeof(struct place))
		return;
	memcpy(n->places, l->payload, l->in.bytes);
	n->has_table = true;
	for (int i = 0; i < n->q->size; i++)
		for (int j = 0; j < i; j++)
			if (strcmp(n->places[i].device, n->places[j].device) == 0) {
				fail_all(n, ncclInvalidUsage, "Duplicate GPU detected");
				return;
			}
	call_peers(n);
}

/* ----------------------------------------------------------------------- collectives */

static unsigned class_of(const struct call *c)
{
	return (unsigned)c->kind + (c->count > 1024 ? _K_N : 0);
}

static unsigned other_processes(const struct net *n)
{
	unsigned all = 0;

	for (const struct line *l = n->lines; l; l = l->next)
		all += l->role == PEER;
	return all;
}

bool net_must_connect(const struct call *c)
{
	struct net *n = c->comm->clique->net;
	const char *set = getenv("NCCL_RUNTIME_CONNECT");
	struct frame f = { .what = F_CONNECT, .kind = (int32_t)class_of(c) };

	if (!n || (set && strcmp(set, "0") == 0) || c->comm->stopped ||
	    c->comm->state != ncclInProgress)
		return false;
	if (!n->connects[f.kind]) {
		n->connects[f.kind] = true;
		for (struct line *l = n->lines; l; l = l->next)
			if (l->role == PEER && !l->over)
				line_put(l, &f, NULL);
		kick(n);
	}
	return n->connected[f.kind] < other_processes(n);
}

void net_send(const struct call *c)
{
	struct net *n = c->comm->clique->net;
	struct frame f = { .what = F_PART,
			   .rank = c->rank,
			   .kind = (int32_t)c->kind,
			   .type = (int32_t)c->type,
			   .op = (int32_t)c->op,
			   .root = c->root,
			   .seq = c->meeting->seq,
			   .count = c->count,
			   .bytes = call_input(c) };

	if (!n)
		return;
	for (struct line *l = n->lines; l; l = l->next)
		if (l->role == PEER && !l->over)
			line_put(l, &f, c->in);
	kick(n);
}

static void on_part(struct net *n, struct line *l)
{
	struct call *c;

	if (l->in.rank < 0 || l->in.rank >= n->q->size || n->q->members[l->in.rank])
		return;
	c = calloc(1, sizeof(*c));
	if (!c)
		sim_breach("libnccl: no memory");
	*c = (struct call){ .kind = (enum kind)l->in.kind,
			    .rank = l->in.rank,
			    .count = l->in.count,
			    .type = (ncclDataType_t)l->in.type,
			    .op = (ncclRedOp_t)l->in.op,
			    .root = l->in.root,
			    .in = l->payload,
			    .come = true };
	l->payload = NULL;
	meeting_add_remote(n->q, l->in.seq, c);
}

/* As the sockets of the real one tell: those next to it in the ring. */
static void on_gone(struct net *n, const struct line *l)
{
	int size = n->q->size;

	for (int r = 0; r < size; r++) {
		if (n->places[r].process != l->process)
			continue;
		for (int d = -1; d <= 1; d += 2) {
			ncclComm_t next = n->q->members[(r + d + size) % size];

			if (!next || next->ended)
				continue;
			nccl_error("socket closed by remote peer: rank %d", r);
			comm_set(next, ncclRemoteError);
		}
	}
	pthread_cond_broadcast(&nccl_changed);
	sim_kick();
}

/* ---------------------------------------------------------------------- reading, writing */

static void on_frame(struct net *n, struct line *l)
{
	switch (l->in.what) {
	case F_HELLO:
		if (l->role == AT_ROOT)
			on_hello(n, l);
		break;
	case F_TABLE:
		if (l->role == TO_ROOT)
			on_table(n, l);
		l->over = true;
		break;
	case F_MEET:
		l->process = l->in.process;
		break;
	case F_PART:
		on_part(n, l);
		break;
	case F_CONNECT:
		if ((unsigned)l->in.kind < 2 * _K_N)
			n->connected[l->in.kind]++;
		break;
	default:
		l->bye = true;
		break;
	}
	look_up(n);
}

static void line_gone(struct net *n, struct line *l)
{
	l->over = true;
	if (l->role == TO_ROOT && !n->has_table && n->q->members[l->rank]) {
		nccl_error("the root of the id is gone");
		comm_set(n->q->members[l->rank], ncclRemoteError);
	} else if (l->role == PEER && l->connecting) {
		fail_all(n, ncclSystemError, "a process cannot be reached");
	} else if (l->role == PEER && !l->bye) {
		on_gone(n, l);
	}
}

/* Return: whether there may be more. */
static bool line_read(struct net *n, struct line *l)
{
	size_t head = sizeof(l->in);
	char *to = l->got < head ? (char *)&l->in + l->got : l->payload + (l->got - head);
	size_t want = l->got < head ? head - l->got : head + l->in.bytes - l->got;
	ssize_t r = read(l->fd, to, want);

	if (r < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (r <= 0) {
		line_gone(n, l);
		return false;
	}
	l->got += (size_t)r;
	if (l->got == head && l->in.bytes) {
		if (l->in.bytes > FRAME_MAX)
			sim_breach("libnccl: a frame of %llu bytes",
				   (unsigned long long)l->in.bytes);
		l->payload = malloc(l->in.bytes);
		if (!l->payload)
			sim_breach("libnccl: no memory");
	}
	if (l->got >= head && l->got == head + l->in.bytes) {
		on_frame(n, l);
		free(l->payload);
		l->payload = NULL;
		l->got = 0;
	}
	return !l->over;
}

static void line_write(struct net *n, struct line *l)
{
	int error = 0;
	socklen_t bytes = sizeof(error);

	if (l->connecting) {
		if (getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) || error) {
			line_gone(n, l);
			return;
		}
		l->connecting = false;
		look_up(n);
	}
	while (l->out) {
		struct out *o = l->out;
		ssize_t r = send(l->fd, o->data + o->sent, o->bytes - o->sent, MSG_NOSIGNAL);

		if (r < 0)
			return; /* what is wrong is read */
		o->sent += (size_t)r;
		if (o->sent < o->bytes)
			return;
		l->out = o->next;
		l->last = l->out ? l->last : &l->out;
		free(o);
	}
}

static void accept_all(struct net *n, int fd, enum role role)
{
	int got;

	while ((got = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0)
		line_new(n, got, role);
}

/* ---------------------------------------------------------------------------- the thread */

static size_t fill(struct net *n)
{
	size_t need = 3, at = 0;

	for (const struct line *l = n->lines; l; l = l->next)
		need++;
	if (need > n->room) {
		n->room = 2 * need;
		n->polled = realloc(n->polled, n->room * sizeof(*n->polled));
		if (!n->polled)
			sim_breach("libnccl: no memory");
	}
	n->polled[at++] = (struct pollfd){ .fd = n->wake, .events = POLLIN };
	n->polled[at++] = (struct pollfd){ .fd = n->listener, .events = POLLIN };
	n->polled[at++] = (struct pollfd){ .fd = n->root, .events = POLLIN };
	for (struct line *l = n->lines; l; l = l->next) {
		short out = l->connecting || l->out ? POLLOUT : 0;

		l->slot = l->over ? 0 : at;
		if (l->slot)
			n->polled[at++] =
				(struct pollfd){ .fd = l->fd, .events = (short)(POLLIN | out) };
	}
	return at;
}

/* With the lock, which it gives up while it waits. */
static void turn(struct net *n, int timeout_ms)
{
	size_t all = fill(n);
	uint64_t count;

	pthread_mutex_unlock(&nccl_lock);
	poll(n->polled, all, timeout_ms);
	pthread_mutex_lock(&nccl_lock);
	if (n->polled[0].revents && read(n->wake, &count, sizeof(count)) < 0)
		sim_breach("libnccl: eventfd: %s", strerror(errno));
	for (struct line *l = n->lines; l; l = l->next) {
		short got = l->slot ? n->polled[l->slot].revents : 0;

		if (!l->over && got & (POLLOUT | POLLERR | POLLHUP))
			line_write(n, l);
		if (!l->over && !l->connecting && got & ~POLLOUT)
			while (line_read(n, l))
				;
		l->slot = 0;
	}
	if (n->polled[1].revents)
		accept_all(n, n->listener, PEER);
	if (n->polled[2].revents)
		accept_all(n, n->root, AT_ROOT);
}

static bool has_to_send(const struct net *n)
{
	for (const struct line *l = n->lines; l; l = l->next)
		if (l->out && !l->over)
			return true;
	return false;
}

/* They have ended well: the others are told. */
static void say_bye(struct net *n)
{
	struct frame f = { .what = F_BYE };

	for (struct line *l = n->lines; l; l = l->next)
		if (l->role == PEER && !l->over)
			line_put(l, &f, NULL);
	for (unsigned i = 0; i < FLUSH_TURNS && has_to_send(n); i++)
		turn(n, 10);
}

static bool all_well(const struct net *n)
{
	for (int i = 0; i < n->q->size; i++)
		if (n->q->members[i] && n->q->members[i]->stopped)
			return false;
	return n->up;
}

static void *net_main(void *arg)
{
	struct net *n = arg;

	pthread_mutex_lock(&nccl_lock);
	while (!n->ends)
		turn(n, -1);
	if (all_well(n))
		say_bye(n);
	while (n->lines) {
		struct line *l = n->lines;

		n->lines = l->next;
		line_free(l);
	}
	close(n->wake);
	close(n->listener);
	if (n->root >= 0)
		close(n->root);
	n->q->net = NULL;
	pthread_cond_broadcast(&nccl_changed);
	pthread_mutex_unlock(&nccl_lock);
	free(n->places);
	free(n->polled);
	free(n);
	return NULL;
}

static void net_start(struct net *n)
{
	sigset_t all, old;
	pthread_t thread;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&thread, NULL, net_main, n);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r)
		sim_breach("libnccl: no thread");
	pthread_detach(thread);
}

static struct net *net_new(struct clique *q)
{
	struct net *n = calloc(1, sizeof(*n));

	if (!n || !(n->places = calloc((size_t)q->size, sizeof(struct place))))
		sim_breach("libnccl: no memory");
	n->q = q;
	n->wake = eventfd(0, EFD_CLOEXEC);
	n->listener = listen_somewhere(&n->at);
	n->root = take_root(&q->id);
	if (n->wake < 0 || n->listener < 0 || getrandom(&n->self, sizeof(n->self), 0) < 0)
		sim_breach("libnccl: no socket: %s", strerror(errno));
	n->self |= 1; /* not 0 */
	net_start(n);
	return n;
}

void net_begin(void *arg)
{
	struct clique *q = arg;
	struct sockaddr_in root;

	if (q->joined == q->size || (q->net && q->net->up) || !root_address(&q->id, &root))
		return;
	if (q->ended == q->joined) /* aborted by now */
		return;
	q->net = q->net ? q->net : net_new(q);
	for (int i = 0; i < q->size; i++)
		if (q->members[i] && !q->net->has_said[i])
			say_hello(q->net, q->members[i]);
	kick(q->net);
}

void net_end(struct clique *q)
{
	net_forget_id(&q->id);
	if (!q->net)
		return;
	q->net->ends = true;
	kick(q->net);
	while (q->net)
		pthread_cond_wait(&nccl_changed, &nccl_lock);
}
