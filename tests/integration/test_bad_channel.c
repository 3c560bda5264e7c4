/* The local channel of a real daemon: wrong tokens, slabs of others, answers unread. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "local_abi.h"
#include "rawcall.h"
#include "rawsock.h"
#include "trainfix.h"
#include "witness.h"

TestSuite(bad_channel, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

struct token {
	uint8_t bytes[SHD1_TOKEN_BYTES];
};

static struct token attach_for_token(struct rpc_client *c)
{
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;
	Shardd__V1__AttachResponse *reply;
	struct token t;

	r.protocol = 1;
	reply = raw_must(c, "Attach", &r.base);
	TRAINER_CHECK(reply->token.len == sizeof(t.bytes));
	memcpy(t.bytes, reply->token.data, sizeof(t.bytes));
	shardd__v1__attach_response__free_unpacked(reply, NULL);
	return t;
}

static int local_connect(const char *socket, const struct token *t)
{
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 7, 0 },
				    .version = SHD1_VERSION };
	int fd = rawsock_connect(socket);

	memcpy(hello.token, t->bytes, sizeof(t->bytes));
	rawsock_send(fd, &hello, sizeof(hello));
	return fd;
}

static int local_bound(const char *socket, const struct token *t)
{
	struct shd1_welcome w;
	int fd = local_connect(socket, t);

	TRAINER_CHECK(rawsock_read(fd, &w, sizeof(w), 10) && w.h.type == SHD1_WELCOME);
	return fd;
}

static void ask_slab(int fd, uint32_t slab)
{
	struct shd1_get_slab g = { .h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(g), 9, 0 },
				   .slab = slab };

	rawsock_send(fd, &g, sizeof(g));
}

/* The answer is an error with @words; with @fatal the channel is closed after it. */
static void expect_error(int fd, const char *words, bool fatal)
{
	struct shd1_error e;

	TRAINER_CHECK(rawsock_read(fd, &e, sizeof(e), 10) && e.h.type == SHD1_ERROR);
	if (!strstr(e.text, words))
		fprintf(stderr, "wanted '%s', got '%s'\n", words, e.text);
	TRAINER_CHECK(strstr(e.text, words) && e.fatal == fatal);
	TRAINER_CHECK(!fatal || rawsock_closed(fd, 10));
}

/* The slabs of @class of rank @owner (-1: of all) in @job; 0: none. */
static uint32_t find_slab(struct rpc_client *c, const char *job, const char *class, int owner)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__GetStatusResponse *s;
	uint32_t id = 0;

	r.with_slabs = true;
	s = raw_must(c, "Status/GetStatus", &r.base);
	for (size_t i = 0; i < s->n_slabs && !id; i++)
		if (strcmp(s->slabs[i]->job, job) == 0 && strcmp(s->slabs[i]->class_, class) == 0 &&
		    s->slabs[i]->owner_rank == owner)
			id = s->slabs[i]->slab;
	shardd__v1__get_status_response__free_unpacked(s, NULL);
	return id;
}

/* Slab @id comes as a descriptor that cannot be made to write. (That of a GPU's memory
 * only says so: whoever has it can map it as he likes.) */
static void expect_read_only(int fd, uint32_t id)
{
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct shd1_slab s;
	struct iovec iov = { &s, sizeof(s) };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	struct cmsghdr *passed;
	int got = -1;

	ask_slab(fd, id);
	TRAINER_CHECK(recvmsg(fd, &msg, 0) == sizeof(s) && s.h.type == SHD1_SLAB);
	passed = CMSG_FIRSTHDR(&msg);
	TRAINER_CHECK(passed && !s.writable && s.slab == id);
	if (passed)
		memcpy(&got, CMSG_DATA(passed), sizeof(got));
	if (train_on_host()) {
		TRAINER_CHECK(mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, got, 0) ==
			      MAP_FAILED);
		TRAINER_CHECK(ftruncate(got, 0) < 0 && write(got, "x", 1) < 0);
	}
	fd_close(got);
}

static int foreign_slabs(const struct trainer *t)
{
	struct rpc_client *a = raw_connect(t->socket), *b = raw_connect(t->socket);
	struct rpc_client *other = raw_connect(t->socket);
	Shardd__V1__LeaveRequest leave = SHARDD__V1__LEAVE_REQUEST__INIT;
	struct token of_a = attach_for_token(a), of_other = attach_for_token(other), wrong = { 0 };
	uint32_t params, grad_of_1;
	int fd;

	raw_attach(b);
	raw_join(a, "flood", 0, 2, false);
	raw_join(b, "flood", 1, 2, false);
	raw_join(other, "second", 0, 1, false);
	raw_register(a, "u", 1000);
	raw_alloc(b, 100);
	params = find_slab(a, "flood", "shard", -1);
	grad_of_1 = find_slab(a, "flood", "grad", 1);
	TRAINER_CHECK(params && grad_of_1);

	fd = local_connect(t->socket, &wrong);
	expect_error(fd, "has this token", true);
	fd_close(fd);
	fd = rawsock_connect(t->socket);
	ask_slab(fd, params);
	expect_error(fd, "HELLO", true);
	fd_close(fd);

	fd = local_bound(t->socket, &of_other); /* of the same user, but of another job */
	ask_slab(fd, params);
	expect_error(fd, "no slab", false);
	ask_slab(fd, grad_of_1);
	expect_error(fd, "no slab", false);
	fd_close(fd);

	fd = local_bound(t->socket, &of_a);
	ask_slab(fd, grad_of_1); /* of the same job, but of another rank */
	expect_error(fd, "no slab", false);
	ask_slab(fd, params + 1); /* gradients and optimizer state are nobody's */
	expect_error(fd, "no slab", false);
	ask_slab(fd, 0);
	expect_error(fd, "no slab 0", false);
	ask_slab(fd, UINT32_MAX);
	expect_error(fd, "no slab 4294967295", false);
	expect_read_only(fd, params);
	fd_close(fd);
	rpc_client_close(a);
	rpc_client_close(b);
	raw_done(other, "Leave", &leave.base);
	rpc_client_close(other);
	return 0;
}

Test(bad_channel, slabs_of_others_over_the_local_channel)
{
	witness_trainer(NULL, "flood", foreign_slabs, 100);
}

static int deaf_channel(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	struct token token = attach_for_token(c);
	uint32_t slab;
	int fd;

	raw_join(c, "flood", 0, 1, false);
	raw_register(c, "u", 1000);
	slab = find_slab(c, "flood", "shard", -1);
	fd = local_connect(t->socket, &token);
	/* descriptors in flight are the daemon's trouble until somebody takes them */
	for (unsigned i = 0; i < 100000; i++) {
		struct shd1_get_slab g = { .h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(g), i, 0 },
					   .slab = slab };

		if (rawsock_send(fd, &g, sizeof(g)) != sizeof(g))
			break;
	}
	TRAINER_CHECK(rawsock_closed(fd, 10));
	fd_close(fd);
	/* the session itself goes on */
	raw_alloc(c, 100);
	fd = local_bound(t->socket, &token);
	expect_read_only(fd, slab);
	fd_close(fd);
	rpc_client_close(c);
	return 0;
}

Test(bad_channel, a_local_channel_that_is_not_read)
{
	witness_trainer(NULL, "flood", deaf_channel, 100);
}
