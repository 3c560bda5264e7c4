/*
 * Memory that a trainer gives to others and leaves behind: it passes its descriptors on, or forks
 * a child that keeps its mappings, and ends; its job is deleted. Whatever is still there in
 * reality is on the daemon's account, and what nobody can hold is free.
 *
 * The test process is the helper that gets the descriptors, so what is there is what fstat says.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/memfd.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "failfix.h"
#include "fdcheck.h"
#include "local_abi.h"
#include "rawcall.h"
#include "rawsock.h"
#include "witness.h"

TestSuite(memory_kept, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

#define MIB      (UINT64_C(1) << 20)
#define ELEMENTS (8 * MIB / 4) /* of the unit: 8 MiB of parameters */
#define BUFFER   (16 * MIB)    /* that the trainer writes */
#define JOB      "kept"

enum { PARAMS, GRAD, N_SLABS };

/* Between the test and its trainer. */
struct play {
	int pair[2]; /* the trainer sends descriptors on [1] */
	stage at, go;
	atomic_int child;
};

/* ------------------------------------------------------------ in the trainer */

static int bound_channel(const char *socket, struct rpc_client *c)
{
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 7, 0 },
				    .version = SHD1_VERSION };
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;
	Shardd__V1__AttachResponse *reply;
	struct shd1_welcome w;
	int fd;

	r.protocol = 1;
	reply = raw_must(c, "Attach", &r.base);
	memcpy(hello.token, reply->token.data, sizeof(hello.token));
	shardd__v1__attach_response__free_unpacked(reply, NULL);
	fd = rawsock_connect(socket);
	rawsock_send(fd, &hello, sizeof(hello));
	TRAINER_CHECK(rawsock_read(fd, &w, sizeof(w), 10) && w.h.type == SHD1_WELCOME);
	return fd;
}

static uint32_t find_slab(struct rpc_client *c, const char *class)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__GetStatusResponse *s;
	uint32_t id = 0;

	r.with_slabs = true;
	s = raw_must(c, "Status/GetStatus", &r.base);
	for (size_t i = 0; i < s->n_slabs && !id; i++)
		if (strcmp(s->slabs[i]->class_, class) == 0)
			id = s->slabs[i]->slab;
	shardd__v1__get_status_response__free_unpacked(s, NULL);
	TRAINER_CHECK(id > 0);
	return id;
}

/* The descriptor that comes with a message of @bytes. */
static int receive_fd(int socket, void *data, size_t bytes)
{
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { data, bytes };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	int fd = -1;

	if (recvmsg(socket, &msg, MSG_CMSG_CLOEXEC) == (ssize_t)bytes && CMSG_FIRSTHDR(&msg))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(fd));
	return fd;
}

static int get_slab(int channel, uint32_t id, uint64_t *ret_bytes)
{
	struct shd1_get_slab g = { .h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(g), 9, 0 },
				   .slab = id };
	struct shd1_slab s;
	int fd;

	rawsock_send(channel, &g, sizeof(g));
	fd = receive_fd(channel, &s, sizeof(s));
	TRAINER_CHECK(fd >= 0 && s.h.type == SHD1_SLAB && s.slab == id);
	*ret_bytes = s.bytes;
	return fd;
}

/* Parameters and a buffer, all pages there. @ret: their descriptors. Return: the buffer. */
static char *fill_memory(const struct trainer *t, int ret[N_SLABS])
{
	struct rpc_client *c = raw_connect(t->socket);
	int channel = bound_channel(t->socket, c);
	uint64_t bytes;
	uint32_t unit;
	char *view;

	raw_join(c, JOB, 0, 1, true);
	unit = raw_register(c, "u", ELEMENTS);
	raw_init(&c, 1, unit);
	raw_alloc(c, BUFFER);
	ret[PARAMS] = get_slab(channel, find_slab(c, "shard"), &bytes);
	ret[GRAD] = get_slab(channel, find_slab(c, "grad"), &bytes);
	view = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ret[GRAD], 0);
	TRAINER_CHECK(view != MAP_FAILED);
	memset(view, 0x5a, bytes);
	return view;
}

static int passes_descriptors_on(const struct trainer *t)
{
	struct play *p = t->arg;
	int fds[N_SLABS];

	(void)fill_memory(t, fds);
	for (unsigned i = 0; i < N_SLABS; i++)
		rawsock_send_fd(p->pair[1], "x", 1, fds[i]);
	stage_set(&p->at, 1);
	pause();
	return 0;
}

static int leaves_a_child_behind(const struct trainer *t)
{
	struct play *p = t->arg;
	int fds[N_SLABS];
	char *view = fill_memory(t, fds);
	pid_t child = fork();

	if (child == 0) {
		alarm(100); /* the test may fail, and nobody waits for us */
		for (unsigned i = 0; i < N_SLABS; i++)
			close(fds[i]);
		stage_set(&p->at, 1);
		while (atomic_load(&p->go) == 0)
			poll(NULL, 0, 1);
		memset(view, 0xaa, BUFFER); /* it is not killed for that */
		stage_set(&p->at, 2);
		while (atomic_load(&p->go) == 1)
			poll(NULL, 0, 1);
		_exit(0);
	}
	atomic_store(&p->child, child);
	pause();
	return 0;
}

/* Its ring, all pages there. */
static int passes_its_ring_on(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	int channel = bound_channel(t->socket, c), fd;
	struct shd1_get_ring g = { .h = { SHD1_MAGIC, SHD1_GET_RING, sizeof(g), 9, 0 },
				   .part = SHD1_RING_MEMORY };
	struct play *p = t->arg;
	struct shd1_ring ring;

	rawsock_send(channel, &g, sizeof(g));
	fd = receive_fd(channel, &ring, sizeof(ring));
	TRAINER_CHECK(fd >= 0 && ring.h.type == SHD1_RING && ring.bytes > 0);
	rawsock_send_fd(p->pair[1], "x", 1, fd);
	stage_set(&p->at, 1);
	pause();
	return 0;
}

/* --------------------------------------------------------------- in the test */

static uint64_t bytes_there(int fd)
{
	struct stat st;

	cr_assert_eq(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

static uint64_t all_there(const int fds[N_SLABS])
{
	return bytes_there(fds[PARAMS]) + bytes_there(fds[GRAD]);
}

static void get_descriptors(struct play *p, int ret[N_SLABS])
{
	char x;

	for (unsigned i = 0; i < N_SLABS; i++) {
		ret[i] = receive_fd(p->pair[0], &x, 1);
		cr_assert_geq(ret[i], 0);
	}
}

static void delete_job(struct daemonfix *d)
{
	static const char *const args[] = { "job", "delete", JOB, "--force", NULL };

	json_decref(daemonfix_ctl(d, args));
}

/* The trainer is killed, its job is deleted. */
static void end_trainer(struct daemonfix *d, pid_t pid)
{
	fail_kill(pid);
	AWAIT(fail_rank_is(d, JOB, 0, "DEAD"), 30);
	delete_job(d);
}

static void need_holders(void)
{
	if (strcmp(daemonfix_backend(), "host") != 0)
		cr_skip("this is about the host's memory");
	if (!memfd_knows_holders())
		cr_skip("this kernel does not tell who holds a memfd");
}

/* shardctl memory names the process that holds both: this one. */
static void check_holder(struct daemonfix *d)
{
	static const char *const args[] = { "memory", NULL };
	json_t *all = daemonfix_ctl(d, args), *list = json_object_get(all, "holders"), *item;
	unsigned n = 0;
	size_t i;

	json_array_foreach(list, i,
			   item) if (json_integer_value(json_object_get(item, "pid")) == getpid() &&
				     strcmp(json_string_value(json_object_get(item, "job")), JOB) ==
					     0) n++;
	cr_assert_geq(n, N_SLABS, "%zu holders", json_array_size(list));
	json_decref(all);
}

/* We are the daemon's user, who may open what is the daemon's. */
static void check_sealed(int params)
{
	char path[64];
	int rw;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", params);
	rw = open(path, O_RDWR | O_CLOEXEC);
	cr_assert_geq(rw, 0);
	cr_assert_eq(mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, rw, 0), MAP_FAILED);
	cr_assert_eq(errno, EPERM);
	cr_assert_eq(pwrite(rw, "x", 1, 0), -1);
	cr_assert_eq(errno, EPERM);
	close(rw);
}

/* Of the deleted job. At any time: first what is there, then what the account says of it. */
static void check_account(struct daemonfix *d, const int fds[N_SLABS])
{
	for (unsigned i = 0; i < 20; i++) {
		uint64_t there = all_there(fds);

		cr_assert_geq(daemonfix_bytes(d), there);
	}
	cr_assert(fail_job_is(d, JOB, "DELETED"));
	cr_assert_eq(fail_quarantined(d), daemonfix_bytes(d));
	cr_assert_geq(fail_quarantined(d), 8 * MIB + BUFFER, "not what is there, but what can be");
	check_holder(d);
}

static void check_pages(struct daemonfix *d, const int fds[N_SLABS], bool params_stay)
{
	/* what need not be there is not: all but sealed parameters */
	AWAIT(bytes_there(fds[GRAD]) == 0, 30);
	if (params_stay)
		cr_assert_geq(bytes_there(fds[PARAMS]), 8 * MIB);
	else
		AWAIT(bytes_there(fds[PARAMS]) == 0, 30);
	/* pages that the helper brings back are on the account, and go again */
	cr_assert_eq(pwrite(fds[GRAD], "x", 1, 0), 1);
	cr_assert_geq(daemonfix_bytes(d), 8 * MIB + BUFFER);
	AWAIT(bytes_there(fds[GRAD]) == 0, 30);
}

/* The account said 0 as soon as the trainer was gone, and the memory was still there. */
static void pass_on(const char *seal, bool params_stay)
{
	const char *const args[] = { "--set", seal, NULL };
	struct play *p = trainer_shared(sizeof(*p));
	int fds[N_SLABS];
	struct witness w;
	pid_t pid;

	need_holders();
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p->pair), 0);
	witness_begin(&w, args);
	pid = trainer_start(&w.d, JOB, 0, 1, passes_descriptors_on, p);
	get_descriptors(p, fds);
	AWAIT(atomic_load(&p->at) == 1, 30);
	cr_assert_geq(all_there(fds), 8 * MIB + BUFFER);
	if (params_stay)
		check_sealed(fds[PARAMS]);
	end_trainer(&w.d, pid);
	check_account(&w.d, fds);
	check_pages(&w.d, fds, params_stay);
	close(fds[GRAD]);
	AWAIT(daemonfix_bytes(&w.d) < BUFFER + 8 * MIB, 30);
	cr_assert_geq(daemonfix_bytes(&w.d), 8 * MIB, "the other is still held");
	close(fds[PARAMS]);
	AWAIT(daemonfix_bytes(&w.d) == w.bytes && !fail_has_job(&w.d, JOB), 30);
	close(p->pair[0]);
	close(p->pair[1]);
	witness_end(&w);
}

Test(memory_kept, descriptors_that_were_passed_on)
{
	pass_on("seal_parameters=yes", true);
}

Test(memory_kept, descriptors_that_were_passed_on_of_memory_that_is_not_sealed)
{
	pass_on("seal_parameters=no", false);
}

/* What is held counts for those that come later: under memory_bytes=1GiB one trainer after the
 * other could leave memory behind until the machine had none. */
Test(memory_kept, what_is_held_is_not_given_twice)
{
	static const char *const args[] = { "--set", "memory_bytes=48MiB", NULL };
	struct play *p = trainer_shared(sizeof(*p)), *second = trainer_shared(sizeof(*second));
	int fds[N_SLABS];
	struct witness w;
	pid_t pid;

	need_holders();
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p->pair), 0);
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, second->pair), 0);
	witness_begin(&w, args);
	pid = trainer_start(&w.d, JOB, 0, 1, passes_descriptors_on, p);
	get_descriptors(p, fds);
	end_trainer(&w.d, pid);
	pid = trainer_start(&w.d, JOB, 0, 1, passes_descriptors_on, second);
	cr_assert_eq(trainer_wait(pid, 30), 1, "there is no room for both");
	delete_job(&w.d); /* of the same name as the one that is gone */
	close(fds[PARAMS]);
	close(fds[GRAD]);
	AWAIT(daemonfix_bytes(&w.d) == w.bytes, 30);
	pid = trainer_start(&w.d, JOB, 0, 1, passes_descriptors_on, second);
	get_descriptors(second, fds);
	close(fds[PARAMS]);
	close(fds[GRAD]);
	end_trainer(&w.d, pid);
	AWAIT(daemonfix_bytes(&w.d) == w.bytes, 30);
	for (unsigned i = 0; i < 2; i++) {
		close(p->pair[i]);
		close(second->pair[i]);
	}
	witness_end(&w);
}

Test(memory_kept, mappings_of_a_forked_child)
{
	struct play *p = trainer_shared(sizeof(*p));
	struct witness w;
	uint64_t held;
	pid_t pid;

	need_holders();
	witness_begin(&w, NULL);
	pid = trainer_start(&w.d, JOB, 0, 1, leaves_a_child_behind, p);
	AWAIT(atomic_load(&p->at) == 1 && atomic_load(&p->child) > 0, 30);
	end_trainer(&w.d, pid);
	/* of the parameters it has nothing: no descriptor, no mapping */
	AWAIT(daemonfix_bytes(&w.d) < BUFFER + 8 * MIB, 30);
	held = daemonfix_bytes(&w.d);
	cr_assert_geq(held, BUFFER);
	cr_assert_eq(fail_quarantined(&w.d), held);
	stage_set(&p->go, 1);
	AWAIT(atomic_load(&p->at) == 2, 30);
	cr_assert_eq(kill(atomic_load(&p->child), 0), 0, "it lives");
	cr_assert_eq(daemonfix_bytes(&w.d), held);
	stage_set(&p->go, 2);
	AWAIT(daemonfix_bytes(&w.d) == w.bytes && !fail_has_job(&w.d, JOB), 30);
	witness_end(&w);
}

/* It does not wait for them. */
Test(memory_kept, the_daemon_ends_while_others_hold_memory)
{
	struct play *p = trainer_shared(sizeof(*p));
	int fds[N_SLABS];
	struct witness w;
	pid_t pid;

	need_holders();
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p->pair), 0);
	witness_begin(&w, NULL);
	pid = trainer_start(&w.d, JOB, 0, 1, passes_descriptors_on, p);
	get_descriptors(p, fds);
	end_trainer(&w.d, pid);
	daemonfix_stop(&w.d);
	cr_assert_eq(bytes_there(fds[GRAD]), 0, "and leaves nothing in them");
	close(fds[PARAMS]);
	close(fds[GRAD]);
	close(p->pair[0]);
	close(p->pair[1]);
}

static bool has_sessions(struct daemonfix *d)
{
	static const char *const args[] = { "memory", NULL };
	json_t *all = daemonfix_ctl(d, args);
	bool any = json_array_size(json_object_get(all, "sessions")) > 0;

	json_decref(all);
	return any;
}

static uint64_t ring_bytes(struct daemonfix *d)
{
	static const char *const args[] = { "memory", NULL };
	json_t *all = daemonfix_ctl(d, args);
	uint64_t bytes = (uint64_t)json_integer_value(json_object_get(all, "ring_bytes"));

	json_decref(all);
	return bytes;
}

/* The ring of a session that has ended. Return: its descriptor. */
static int keep_a_ring(struct witness *w, struct play *p)
{
	struct stat st;
	pid_t pid;
	char x;
	int fd;

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p->pair), 0);
	witness_begin(w, NULL);
	cr_assert_eq(ring_bytes(&w->d), 0);
	pid = trainer_start(&w->d, JOB, 0, 1, passes_its_ring_on, p);
	fd = receive_fd(p->pair[0], &x, 1);
	cr_assert_eq(fstat(fd, &st), 0);
	cr_assert_eq(ring_bytes(&w->d), (uint64_t)st.st_size);
	fail_kill(pid);
	AWAIT(!has_sessions(&w->d), 30);
	cr_assert_eq(ring_bytes(&w->d), (uint64_t)st.st_size);
	return fd;
}

/* A ring is some 2 MiB: its session ended, and nobody paid for it. */
Test(memory_kept, rings_of_sessions_that_ended)
{
	struct play *p = trainer_shared(sizeof(*p));
	struct witness w;
	int fd;

	need_holders();
	fd = keep_a_ring(&w, p);
	close(fd);
	AWAIT(ring_bytes(&w.d) == 0, 30);
	close(p->pair[0]);
	close(p->pair[1]);
	witness_end(&w);
}

Test(memory_kept, the_daemon_ends_while_others_hold_a_ring)
{
	struct play *p = trainer_shared(sizeof(*p));
	struct witness w;
	int fd;

	need_holders();
	fd = keep_a_ring(&w, p);
	daemonfix_stop(&w.d);
	close(fd);
	close(p->pair[0]);
	close(p->pair[1]);
}
