/*
 * Strangers on the port of a member of the gloo engine: they cost their own connections, and
 * nothing else. The test is the stranger, the members are processes (gloofix.h).
 */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/check.h"
#include "engine/gloo_meet.h"
#include "fdcheck.h"
#include "gloofix.h"

TestSuite(gloo_strangers, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define MAX_PORTS    8
#define MAX_STRANGER 400

/* ------------------------------------------------------------------ a member's ports */

static bool owns(pid_t pid, unsigned long inode)
{
	char path[64], want[64], target[64];
	struct dirent *e;
	bool found = false;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	snprintf(want, sizeof(want), "socket:[%lu]", inode);
	dir = opendir(path);
	while (dir && !found && (e = readdir(dir))) {
		char name[320];
		ssize_t len;

		snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
		len = readlink(name, target, sizeof(target) - 1);
		found = len > 0 && (size_t)len == strlen(want) &&
			!memcmp(target, want, (size_t)len);
	}
	if (dir)
		closedir(dir);
	return found;
}

/* The ports that @pid listens on. */
static unsigned find_ports(pid_t pid, uint16_t ports[MAX_PORTS])
{
	FILE *f = fopen("/proc/net/tcp", "re");
	char line[256];
	unsigned n = 0;

	cr_assert_not_null(f);
	while (fgets(line, sizeof(line), f)) {
		unsigned port, state;
		unsigned long inode;

		if (sscanf(line, " %*d: %*8x:%4x %*8x:%*4x %2x %*s %*s %*s %*s %*s %lu", &port,
			   &state, &inode) == 3 &&
		    state == 0x0a && n < MAX_PORTS && owns(pid, inode))
			ports[n++] = (uint16_t)port;
	}
	fclose(f);
	return n;
}

static unsigned await_ports(pid_t pid, uint16_t ports[MAX_PORTS])
{
	const struct timespec pause = { 0, 2000000 };
	double end = gloofix_now_s() + 10;
	unsigned n;

	while ((n = find_ports(pid, ports)) == 0) {
		cr_assert_lt(gloofix_now_s(), end, "the member does not listen");
		nanosleep(&pause, NULL);
	}
	return n;
}

/* -------------------------------------------------------------------------- attacks */

/* What a stranger does with a connection. */
struct attack {
	const char *name;
	unsigned connections; /* to each port */
	unsigned random;      /* bytes that it sends first */
	const char *bytes;    /* that it sends then */
	unsigned n_bytes;
	bool reset;   /* then it resets the connection */
	bool close;   /* then it closes it; else it stays */
	bool betrays; /* a member cannot do this either */
};

/* As Gloo's messages begin: length, code, slot, three offsets; in bytes of this machine. */
#define GLOO_MESSAGE(code, length)                                    \
	length "\0\0\0\0\0\0\0" code "\0\0\0\0\0\0\0\7\0\0\0\0\0\0\0" \
	       "\0\0\0\0\0\0\0\0\40\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
#define BYTES(text) .bytes = (text), .n_bytes = sizeof(text) - 1

static const struct attack attacks[] = {
	{ .name = "closes at once", .connections = 1, .close = true, .betrays = true },
	{ .name = "resets at once",
	  .connections = 1,
	  .reset = true,
	  .close = true,
	  .betrays = true },
	{ .name = "is silent", .connections = 1 },
	{ .name = "sends garbage", .connections = 1, .random = 4096 },
	{ .name = "sends garbage and closes",
	  .connections = 1,
	  .random = 4096,
	  .close = true,
	  .betrays = true },
	{ .name = "sends one byte", .connections = 1, BYTES("S") },
	{ .name = "sends Gloo's data that nobody waits for",
	  .connections = 1,
	  .betrays = true,
	  BYTES(GLOO_MESSAGE("\1", "\120")) },
	{ .name = "sends Gloo's data for a buffer",
	  .connections = 1,
	  .betrays = true,
	  BYTES(GLOO_MESSAGE("\0", "\120")) },
	{ .name = "announces in Gloo's way that it sends",
	  .connections = 1,
	  BYTES(GLOO_MESSAGE("\2", "\60")) },
	{ .name = "announces in Gloo's way that it receives",
	  .connections = 1,
	  BYTES(GLOO_MESSAGE("\3", "\60")) },
	{ .name = "begins as a member does", .connections = 1, BYTES("SHDGLOO1\0\0\0\1\0\0") },
	{ .name = "guesses the token",
	  .connections = 1,
	  BYTES("SHDGLOO1\0\0\0\1\0\0\0\0"
		"0123456789abcdef0123456789abcdef") },
	{ .name = "connects many times", .connections = MAX_STRANGER },
	{ .name = "sends garbage many times", .connections = MAX_STRANGER, .random = 512 },
};

/* Its connections stay open until the test is over. */
struct stranger {
	int fds[MAX_STRANGER];
	unsigned n;
};

static void send_all(int fd, const void *bytes, size_t n)
{
	if (n > 0)
		(void)!send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void act(const struct attack *a, int fd)
{
	char random[4096];

	CHECK(a->random <= sizeof(random));
	for (unsigned i = 0; i < a->random; i++)
		random[i] = (char)(i * 2654435761u >> 13);
	send_all(fd, random, a->random);
	send_all(fd, a->bytes, a->n_bytes);
	if (a->reset)
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 0 },
			   sizeof(struct linger));
}

/* A full queue of the listener is no reason to wait. */
static bool visit(struct stranger *s, const struct attack *a, uint16_t port)
{
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_port = htons(port),
				  .sin_addr = { htonl(INADDR_LOOPBACK) } };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct timeval wait = { 0, 50000 };

	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)) < 0) {
		close(fd);
		return false;
	}
	act(a, fd);
	if (a->close || s->n == MAX_STRANGER)
		close(fd);
	else
		s->fds[s->n++] = fd;
	return true;
}

/* Return: connections that were made. */
static unsigned attack(struct stranger *s, const struct attack *a, pid_t member)
{
	uint16_t ports[MAX_PORTS];
	unsigned n = find_ports(member, ports), made = 0;

	for (unsigned i = 0; i < n; i++)
		for (unsigned k = 0; k < a->connections && visit(s, a, ports[i]); k++)
			made++;
	return made;
}

static void leave(struct stranger *s)
{
	while (s->n > 0)
		close(s->fds[--s->n]);
}

/* ----------------------------------------------------------------- while they meet */

static void sum_some(struct gloofix *m)
{
	struct waited w = gloofix_waited();
	float x[1000];

	for (unsigned i = 0; i < 1000; i++)
		x[i] = (float)(m->rank + i);
	comm_all_reduce(m->c, &w.op, (void *const[]){ x }, 1000, DTYPE_FP32, REDUCE_SUM);
	gloofix_expect(m, &w, 0);
	for (unsigned i = 0; i < 1000; i++)
		EXPECT(x[i] == (float)(m->size * (m->size - 1) / 2 + i * m->size));
}

static void scene_meet(struct gloofix *m)
{
	gloofix_meet(m, "meet", m->rank, m->size);
	sum_some(m);
	m->c = comm_free(m->c);
}

/* One member after the other comes; each is visited before the next one comes. */
static void meet_under(const struct attack *a, unsigned size)
{
	struct stranger s = { .n = 0 };
	uint16_t ports[MAX_PORTS];
	pid_t pids[GLOOFIX_MAX];

	gloofix_make_folder();
	for (unsigned i = 0; i < size; i++) {
		pids[i] = gloofix_start(scene_meet, i, size);
		if (i == size - 1)
			break;
		await_ports(pids[i], ports);
		cr_expect_gt(attack(&s, a, pids[i]), 0, "a stranger that %s", a->name);
	}
	for (unsigned i = 0; i < size; i++)
		gloofix_join(pids[i], false);
	leave(&s);
	gloofix_remove_folder();
}

Test(gloo_strangers, cost_two_members_that_meet_nothing)
{
	for (unsigned i = 0; i < ARRAY_SIZE(attacks); i++)
		meet_under(&attacks[i], 2);
}

Test(gloo_strangers, cost_three_members_that_meet_nothing)
{
	for (unsigned i = 0; i < ARRAY_SIZE(attacks); i++)
		meet_under(&attacks[i], 3);
}

/* ----------------------------------------------------------------- while they work */

#define ROUNDS 300

static void scene_work(struct gloofix *m)
{
	gloofix_meet(m, "work", m->rank, m->size);
	gloofix_sync(m);
	for (unsigned i = 0; i < ROUNDS; i++)
		sum_some(m);
	EXPECT(m->n_failed == 0);
	m->c = comm_free(m->c);
}

/* Members that have met have no port. */
Test(gloo_strangers, find_no_port_of_members_that_work)
{
	struct stranger s = { .n = 0 };
	pid_t pids[2];
	char value[1];

	gloofix_make_folder();
	for (unsigned i = 0; i < 2; i++)
		pids[i] = gloofix_start(scene_work, i, 2);
	cr_assert_eq(gloofix_get(NULL, "met/1/0", 20000, value, 1), 1);
	cr_assert_eq(gloofix_get(NULL, "met/1/1", 20000, value, 1), 1);
	for (unsigned i = 0; i < ARRAY_SIZE(attacks); i++)
		for (unsigned k = 0; k < 2; k++)
			cr_expect_eq(attack(&s, &attacks[i], pids[k]), 0);
	for (unsigned i = 0; i < 2; i++)
		gloofix_join(pids[i], false);
	leave(&s);
	gloofix_remove_folder();
}

/* ------------------------------------------------------------------- a bad member */

static void scene_betrayed(struct gloofix *m)
{
	struct waited w = gloofix_waited();
	float x[1000] = { 0 };

	gloofix_meet(m, "betrayed", 0, 2);
	gloofix_sync(m);
	comm_all_reduce(m->c, &w.op, (void *const[]){ x }, 1000, DTYPE_FP32, REDUCE_SUM);
	gloofix_expect(m, &w, ENGINE_E_ABORTED);
	EXPECT(m->n_failed == 1 && strncmp(m->why, "member 1: ", 10) == 0);
	m->c = comm_free(m->c);
}

static bool never(void *userdata)
{
	(void)userdata;
	return false;
}

/* The test is member 1: it has the token, meets, and then does @a. */
static void betray(const struct attack *a)
{
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	const struct gloo_meet_options options = { .address = (struct sockaddr *)&here,
						   .address_bytes = sizeof(here),
						   .prefix = "betrayed",
						   .size = 2,
						   .rank = 1,
						   .timeout_ms = 20000,
						   .store = &gloofix_store,
						   .stopped = never };
	int fds[2] = { -1, -1 };
	char why[256] = "";
	pid_t pid;

	gloofix_make_folder();
	pid = gloofix_start(scene_betrayed, 0, 2);
	cr_assert_eq(gloo_meet(&options, fds, why, sizeof(why)), 0, "%s", why);
	cr_assert_eq(gloofix_set(NULL, "met/1/1", "x", 1), 0);
	cr_assert_eq(gloofix_get(NULL, "met/1/0", 20000, why, sizeof(why)), 1);
	act(a, fds[0]);
	if (a->close)
		close(fds[0]);
	gloofix_join(pid, false);
	if (!a->close)
		close(fds[0]);
	gloofix_remove_folder();
}

Test(gloo_strangers, a_member_that_breaks_the_protocol_costs_the_communicator)
{
	for (unsigned i = 0; i < ARRAY_SIZE(attacks); i++)
		if (attacks[i].betrays)
			betray(&attacks[i]);
}
