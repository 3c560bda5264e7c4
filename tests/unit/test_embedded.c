/* An embedded etcd: with a real one, as a child of this process. */
#include <criterion/criterion.h>
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "await.h"
#include "coord/coord.h"
#include "coord/embedded.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "etcdfix.h"
#include "fdcheck.h"
#include "longform.h"
#include "looprun.h"

#define NODES 3

/* One daemon's embedded etcd, and what it has said. */
struct node {
	struct embedded *e;
	char dir[96];
	char last_why[400];
	unsigned lines, changes;
	bool stopped;
};

static struct looprun run;
static char folder[] = "/tmp/shardd-embedded-XXXXXX";
static char client[NODES][32], peer[NODES][32]; /* 127.0.0.1:PORT */
static struct node nodes[NODES];
static const char *ca, *cert, *key; /* paths; NULL: no TLS */
static bool connected;              /* gRPC was begun, and keeps descriptors */

static void on_changed(struct embedded *e, void *userdata)
{
	struct node *n = userdata;

	n->changes++;
	if (*embedded_why(e))
		snprintf(n->last_why, sizeof(n->last_why), "%s", embedded_why(e));
}

static void on_logged(struct embedded *e, enum log_level level, const char *line, void *userdata)
{
	struct node *n = userdata;

	(void)e;
	cr_expect(level >= LOG_WARN && level < _LOG_N && strlen(line) <= 1024);
	n->lines++;
}

static void on_stopped(void *userdata)
{
	struct node *n = userdata;

	cr_assert_not(n->stopped);
	n->stopped = true;
	n->e = NULL;
}

static const struct embedded_ops ops = { .changed = on_changed, .logged = on_logged };

static void begin(void)
{
	strcpy(folder + sizeof(folder) - 7, "XXXXXX");
	cr_assert(mkdtemp(folder));
	for (unsigned i = 0; i < NODES; i++) {
		etcdfix_port(client[i], sizeof(client[i]));
		etcdfix_port(peer[i], sizeof(peer[i]));
		nodes[i] = (struct node){ .e = NULL };
		snprintf(nodes[i].dir, sizeof(nodes[i].dir), "%s/n%u/etcd", folder, i);
	}
	fdcheck_begin();
	looprun_init(&run);
}

static void stop(struct node *n)
{
	embedded_stop(n->e, on_stopped);
	looprun_flag(&run, &n->stopped, 10);
}

static void end(void)
{
	const char *const argv[] = { "rm", "-rf", folder, NULL };
	pid_t pid;

	for (unsigned i = 0; i < NODES; i++)
		if (nodes[i].e)
			stop(&nodes[i]);
	looprun_deinit(&run);
	if (!connected)
		fdcheck_end();
	pid = fork();
	if (pid == 0) {
		execvp("rm", (char **)argv);
		_exit(127);
	}
	cr_expect(pid > 0 && waitpid(pid, NULL, 0) == pid);
}

TestSuite(embedded, .init = begin, .fini = end, .timeout = 90);

/* Three members one after the other take etcd long: with the address sanitizer these run in the long form. */
static void not_cut(void)
{
	if (longform_cut())
		cr_skip_test("with the address sanitizer in the long form only");
}

static void needs_etcd(void)
{
	if (access("/usr/bin/etcd", X_OK) < 0)
		cr_skip_test("there is no etcd: deploy/install-deps --test");
}

static const char *port_of(const char *at)
{
	return strchr(at, ':') + 1;
}

/* The seeds n0, n1, ... at 127.0.0.1 (@host). */
static struct seeds seeds_of(const char *node, unsigned n, const char *host)
{
	struct seeds_options o = { .node = node, .nodes = n, .client_port = 1, .peer_port = 2 };
	struct fault f = FAULT_NULL;
	char text[512] = "";
	struct seeds s;

	for (unsigned i = 0; i < n; i++)
		snprintf(text + strlen(text), 128, "%sn%u=%s:%s:%s", i ? "," : "", i, host,
			 port_of(client[i]), port_of(peer[i]));
	o.text = text;
	cr_assert_eq(seeds_read(&o, &s, &f), 0, "%s", f.text);
	return s;
}

static int begin_node(struct node *n, const char *node, const struct seeds *s, const char *etcd,
		      struct fault *f)
{
	struct embedded_options o = { .node = node,
				      .cluster = "test",
				      .seeds = s,
				      .dir = n->dir,
				      .etcd = etcd,
				      .ca = ca,
				      .cert = cert,
				      .key = key };

	*f = FAULT_NULL;
	n->stopped = false;
	connected = connected || s->n > 1;
	return embedded_new(&run.loop, &run.queue, &o, &ops, n, &n->e, f);
}

/* Node @i of a cluster of @of. */
static struct node *start(unsigned i, unsigned of)
{
	struct node *n = &nodes[i];
	struct fault f;
	struct seeds s;
	char name[8];

	snprintf(name, sizeof(name), "n%u", i);
	s = seeds_of(name, of, "127.0.0.1");
	cr_assert_eq(begin_node(n, name, &s, NULL, &f), 0, "%s", f.text);
	return n;
}

static bool is_serving(void *arg)
{
	const struct node *n = arg;

	return embedded_state(n->e) == EMBEDDED_SERVING;
}

/* And has a vote. */
static bool is_voting(void *arg)
{
	const struct node *n = arg;

	return embedded_state(n->e) == EMBEDDED_SERVING && !*embedded_why(n->e);
}

static bool is_paused(void *arg)
{
	const struct node *n = arg;

	return embedded_state(n->e) == EMBEDDED_PAUSED && *embedded_why(n->e);
}

/* It has asked the others, and asks them again. */
static bool is_joining(void *arg)
{
	const struct node *n = arg;

	return embedded_state(n->e) == EMBEDDED_JOINING &&
	       !strstr(embedded_why(n->e), "asking the other");
}

/* There is no such process, or only what its parent has not asked for yet. */
static bool is_gone(pid_t pid)
{
	char path[32], text[512] = "", *at;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	f = fopen(path, "re");
	if (!f)
		return true;
	at = fgets(text, sizeof(text), f) ? strrchr(text, ')') : NULL;
	fclose(f);
	return !at || at[2] == 'Z' || at[2] == 'X';
}

/* --------------------------------------------------------------------- a user of the store */

struct asked {
	struct coord_call call;
	bool done;
	enum coord_status status;
	char value[64], why[256];
};

static void on_done(struct coord_call *call, const struct coord_reply *r)
{
	struct asked *q = CONTAINER_OF(call, struct asked, call);

	q->done = true;
	q->status = r->status;
	snprintf(q->why, sizeof(q->why), "%s", r->why ? r->why : "");
	if (r->n)
		snprintf(q->value, sizeof(q->value), "%.*s", (int)r->kvs[0].bytes,
			 (const char *)r->kvs[0].value);
}

static struct coord *connect_to(const struct node *n)
{
	struct coord_options o = { .prefix = "/shardd/test/", .ca = ca, .cert = cert, .key = key };
	struct fault f = FAULT_NULL;
	struct coord *c = NULL;

	connected = true;
	o.endpoints = embedded_endpoints(n->e, &o.n_endpoints);
	cr_assert_eq(coord_etcd_new(&run.queue, &o, &c, &f), 0, "%s", f.text);
	return c;
}

/* Read, once. */
static enum coord_status ask(struct coord *c)
{
	struct coord_txn t = { .read = "k" };
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_txn(c, &q.call, &t, 2000), 0);
	looprun_flag(&run, &q.done, 10);
	return q.status;
}

/* Write @value unless it is NULL; read it back, as often as it takes. */
static void store(struct coord *c, const char *value, const char *expected)
{
	struct coord_change change = { .key = "k", .value = value };
	struct coord_txn t = { .changes = &change, .n_changes = value ? 1 : 0, .read = "k" };
	struct asked q;

	change.bytes = value ? strlen(value) : 0;
	for (unsigned i = 0; i < 20; i++) {
		q = (struct asked){ .call.done = on_done };
		cr_assert_eq(coord_txn(c, &q.call, &t, 2000), 0);
		looprun_flag(&run, &q.done, 10);
		if (q.status == COORD_OK)
			break;
	}
	cr_assert_eq(q.status, COORD_OK);
	cr_expect_str_eq(q.value, expected);
}

/* --------------------------------------------------------------------------------- the tests */

Test(embedded, a_node_that_is_no_seed_is_a_client)
{
	struct seeds s = seeds_of("other", 3, "127.0.0.1");
	const char *const *endpoints;
	struct fault f;
	size_t n;

	/* without a member no program is needed */
	cr_assert_eq(begin_node(&nodes[0], "other", &s, "/no/such/etcd", &f), 0, "%s", f.text);
	cr_expect_eq(embedded_state(nodes[0].e), EMBEDDED_CLIENT);
	cr_expect_eq(embedded_pid(nodes[0].e), 0);
	endpoints = embedded_endpoints(nodes[0].e, &n);
	cr_assert_eq(n, 3);
	for (unsigned i = 0; i < 3; i++)
		cr_expect_str_eq(endpoints[i], client[i]);
	stop(&nodes[0]);
	cr_expect_eq(access(nodes[0].dir, F_OK), -1);
}

Test(embedded, a_missing_program_is_a_fault)
{
	struct seeds s = seeds_of("n0", 1, "127.0.0.1");
	struct fault f;

	cr_assert_eq(begin_node(&nodes[0], "n0", &s, "/no/such/etcd", &f), FAULT_NOT_FOUND);
	cr_expect(strstr(f.text, "/no/such/etcd") && strstr(f.text, "etcd-server"), "%s", f.text);
	setenv("PATH", "/no/such:/tmp", 1);
	cr_assert_eq(begin_node(&nodes[0], "n0", &s, NULL, &f), FAULT_NOT_FOUND);
	cr_expect(strstr(f.text, "/no/such:/tmp") && strstr(f.text, "etcd-server"), "%s", f.text);
	setenv("PATH", "/usr/bin:/bin", 1);
}

Test(embedded, a_folder_that_cannot_be_written_is_the_reason)
{
	struct seeds s = seeds_of("n0", 1, "127.0.0.1");
	struct fault f;
	char file[128];
	int fd;

	snprintf(file, sizeof(file), "%s/n0", folder); /* a file where a folder is needed */
	fd = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	cr_assert(fd >= 0);
	close(fd);
	cr_assert_eq(begin_node(&nodes[0], "n0", &s, "/bin/false", &f), 0, "%s", f.text);
	looprun_until(&run, is_paused, &nodes[0], 10);
	cr_expect(strstr(embedded_why(nodes[0].e), "coord_dir"), "%s", embedded_why(nodes[0].e));
	cr_expect(strstr(embedded_why(nodes[0].e), nodes[0].dir), "%s", embedded_why(nodes[0].e));
	cr_expect_eq(embedded_pid(nodes[0].e), 0);
}

Test(embedded, a_program_that_ends_is_tried_again_more_and_more_rarely)
{
	struct seeds s = seeds_of("n0", 1, "127.0.0.1");
	uint64_t began = clock_now_us();
	struct fault f;

	cr_assert_eq(begin_node(&nodes[0], "n0", &s, "/bin/false", &f), 0, "%s", f.text);
	AWAIT((uv_run(&run.loop, UV_RUN_NOWAIT), nodes[0].changes >= 8), 20);
	/* pauses of 0.1, 0.2, 0.4 s lie between four starts */
	cr_expect(clock_now_us() - began >= 700000u);
	cr_expect(strstr(nodes[0].last_why, "with code 1") || strstr(nodes[0].last_why, "serve"),
		  "%s", nodes[0].last_why);
}

Test(embedded, one_member_serves_and_ends_with_the_object)
{
	struct node *n;
	struct coord *c;
	pid_t pid;

	needs_etcd();
	n = start(0, 1);
	looprun_until(&run, is_serving, n, 30);
	cr_expect_str_eq(embedded_why(n->e), "");
	cr_expect_gt(n->lines, 5);
	c = connect_to(n);
	store(c, "one", "one");
	coord_close(c);
	pid = embedded_pid(n->e);
	cr_assert_gt(pid, 0);
	stop(n);
	cr_expect_eq(kill(pid, 0), -1);
	cr_expect_eq(errno, ESRCH); /* ended, and reaped */
}

Test(embedded, a_member_that_is_killed_comes_back_with_its_data)
{
	struct node *n;
	struct coord *c;
	pid_t pid;

	needs_etcd();
	n = start(0, 1);
	looprun_until(&run, is_serving, n, 30);
	c = connect_to(n);
	store(c, "kept", "kept");
	pid = embedded_pid(n->e);
	kill(pid, SIGKILL);
	looprun_until(&run, is_paused, n, 10);
	cr_expect(strstr(embedded_why(n->e), "by signal 9"), "%s", embedded_why(n->e));
	looprun_until(&run, is_serving, n, 30);
	cr_expect_neq(embedded_pid(n->e), pid);
	store(c, NULL, "kept");
	coord_close(c);
}

static bool has_ended(void *arg)
{
	return is_gone(*(const pid_t *)arg);
}

/* A daemon of its own that starts a member and is killed. Return: the member's pid. */
static pid_t start_and_die(void)
{
	struct node *n = &nodes[0];
	int ends[2];
	pid_t daemon, pid = 0;

	cr_assert_eq(pipe2(ends, O_CLOEXEC), 0);
	daemon = fork();
	cr_assert(daemon >= 0);
	if (daemon == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		looprun_init(&run); /* its own; what it has of ours ends with it */
		start(0, 1);
		looprun_until(&run, is_serving, n, 30);
		pid = embedded_pid(n->e);
		if (write(ends[1], &pid, sizeof(pid)) != sizeof(pid))
			_exit(1);
		for (;;)
			uv_run(&run.loop, UV_RUN_ONCE);
	}
	close(ends[1]);
	cr_assert_eq(read(ends[0], &pid, sizeof(pid)), sizeof(pid));
	close(ends[0]);
	cr_assert_gt(pid, 0);
	kill(daemon, SIGKILL);
	cr_assert_eq(waitpid(daemon, NULL, 0), daemon);
	return pid;
}

Test(embedded, a_member_ends_with_a_daemon_that_is_killed_and_the_next_one_starts_it)
{
	struct node *n;
	struct coord *c;
	pid_t pid;

	needs_etcd();
	pid = start_and_die();
	n = start(0, 1); /* at once: the earlier one may not have ended yet */
	looprun_until(&run, is_serving, n, 30);
	cr_expect_neq(embedded_pid(n->e), pid);
	looprun_until(&run, has_ended, &pid, 5);
	c = connect_to(n);
	store(c, "x", "x");
	coord_close(c);
}

/* A process that has the lock of etcd, as one would that has not ended with its daemon. */
static pid_t hold_data(const char *dir)
{
	char path[128], text[16];
	int ends[2];
	pid_t pid;

	cr_assert_eq(pipe2(ends, O_CLOEXEC), 0);
	pid = fork();
	cr_assert(pid >= 0);
	if (pid == 0) {
		int fd, bytes;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		snprintf(path, sizeof(path), "%s/etcd.lock", dir);
		fd = open(path, O_RDWR | O_CREAT, 0600);
		bytes = snprintf(text, sizeof(text), "%d\n", (int)getpid());
		if (flock(fd, LOCK_EX | LOCK_NB) < 0 || ftruncate(fd, 0) < 0 ||
		    write(fd, text, (size_t)bytes) != bytes || write(ends[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	close(ends[1]);
	cr_assert_eq(read(ends[0], text, 1), 1);
	close(ends[0]);
	return pid;
}

Test(embedded, an_etcd_that_is_left_is_ended_before_another_has_its_folder)
{
	struct node *n;
	int status = 0;
	pid_t pid;

	needs_etcd();
	n = start(0, 1);
	looprun_until(&run, is_serving, n, 30);
	stop(n);
	pid = hold_data(n->dir);
	n = start(0, 1);
	looprun_until(&run, is_serving, n, 30);
	cr_expect(strstr(n->last_why, "serve") || strstr(n->last_why, "earlier daemon"), "%s",
		  n->last_why);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

Test(embedded, a_folder_belongs_to_one_daemon)
{
	struct node *n, *other = &nodes[1];
	struct fault f;
	struct seeds s;
	pid_t pid;

	needs_etcd();
	n = start(0, 1);
	looprun_until(&run, is_serving, n, 30);
	pid = embedded_pid(n->e);
	strcpy(other->dir, n->dir);
	s = seeds_of("n0", 1, "127.0.0.1");
	cr_assert_eq(begin_node(other, "n0", &s, NULL, &f), 0, "%s", f.text);
	looprun_until(&run, is_paused, other, 10);
	cr_expect(strstr(embedded_why(other->e), "another daemon"), "%s", embedded_why(other->e));
	stop(other);
	cr_expect_eq(embedded_pid(n->e), pid);
	cr_expect_eq(embedded_state(n->e), EMBEDDED_SERVING);
}

Test(embedded, a_port_that_is_taken_is_named)
{
	struct fault f;
	struct seeds s;

	needs_etcd();
	looprun_until(&run, is_serving, start(0, 1), 30);
	s = seeds_of("n0", 1, "127.0.0.1"); /* the same ports, another folder */
	cr_assert_eq(begin_node(&nodes[1], "n0", &s, NULL, &f), 0, "%s", f.text);
	looprun_until(&run, is_paused, &nodes[1], 20);
	cr_expect(strstr(embedded_why(nodes[1].e), "address already in use"), "%s",
		  embedded_why(nodes[1].e));
	cr_expect(strstr(embedded_why(nodes[1].e), "coord_client_port"), "%s",
		  embedded_why(nodes[1].e));
}

Test(embedded, the_host_of_a_seed_may_be_a_name)
{
	struct node *n = &nodes[0];
	struct seeds s;
	struct fault f;

	needs_etcd();
	s = seeds_of("n0", 1, "localhost");
	cr_assert_eq(begin_node(n, "n0", &s, NULL, &f), 0, "%s", f.text);
	looprun_until(&run, is_serving, n, 30);
}

Test(embedded, a_name_that_nobody_knows_is_the_reason)
{
	struct node *n = &nodes[0];
	struct seeds s = seeds_of("n0", 1, "no-such-host.invalid");
	struct fault f;

	cr_assert_eq(begin_node(n, "n0", &s, "/bin/false", &f), 0, "%s", f.text);
	looprun_until(&run, is_paused, n, 30);
	cr_expect(strstr(embedded_why(n->e), "no-such-host.invalid"), "%s", embedded_why(n->e));
	/* and in the middle of the next try */
	AWAIT((uv_run(&run.loop, UV_RUN_NOWAIT), embedded_state(n->e) == EMBEDDED_RESOLVING), 30);
	stop(n);
}

static int run_in_folder(const char *command)
{
	char line[2048];

	snprintf(line, sizeof(line), "cd %s && { %s; } >log 2>&1", folder, command);
	return system(line); /* NOLINT: of this test's own text */
}

/* ca.pem, and node.pem with node.key, which it has signed for 127.0.0.1. */
static void make_certificates(void)
{
	if (access("/usr/bin/openssl", X_OK) < 0)
		cr_skip_test("there is no openssl");
	cr_assert_eq(run_in_folder(
			     "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca "
			     "-keyout ca.key -out ca.pem && "
			     "openssl req -newkey rsa:2048 -nodes -subj /CN=n0 -keyout node.key "
			     "-out node.csr && "
			     "printf 'subjectAltName=DNS:n0,IP:127.0.0.1\\n"
			     "extendedKeyUsage=serverAuth,clientAuth\\n' >ext && "
			     "openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key "
			     "-CAcreateserial -days 2 -extfile ext -out node.pem"),
		     0);
}

/* The path of one of them. */
static const char *certificate(const char *name, char ret[96])
{
	snprintf(ret, 96, "%s/%s", folder, name);
	return ret;
}

/* An etcd that serves with them. */
static struct node *start_with_certificates(void)
{
	char paths[3][96];
	struct node *n = &nodes[0];
	struct seeds s = seeds_of("n0", 1, "127.0.0.1");
	struct embedded_options o = { .node = "n0",
				      .cluster = "test",
				      .dir = n->dir,
				      .seeds = &s,
				      .ca = certificate("ca.pem", paths[0]),
				      .cert = certificate("node.pem", paths[1]),
				      .key = certificate("node.key", paths[2]) };
	struct fault f = FAULT_NULL;

	needs_etcd();
	make_certificates();
	cr_assert_eq(embedded_new(&run.loop, &run.queue, &o, &ops, n, &n->e, &f), 0, "%s", f.text);
	looprun_until(&run, is_serving, n, 30);
	return n;
}

Test(embedded, with_certificates_both_sides_prove_who_they_are)
{
	char paths[3][96];
	struct node *n = start_with_certificates();
	struct coord *c;

	ca = certificate("ca.pem", paths[0]);
	c = connect_to(n); /* without a certificate of its own */
	cr_expect_neq(ask(c), COORD_OK);
	coord_close(c);
	cert = certificate("node.pem", paths[1]);
	key = certificate("node.key", paths[2]);
	c = connect_to(n);
	store(c, "secret", "secret");
	coord_close(c);
}

/* As certificates are renewed: the connection of a daemon that runs uses them. */
Test(embedded, certificates_of_the_connection_are_read_again)
{
	char paths[3][96];
	struct node *n = start_with_certificates();
	enum coord_status status = COORD_DOUBT;
	struct coord *c;
	uint64_t until_us;

	cr_assert_eq(run_in_folder("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x "
				   "-keyout mine.key -out mine.pem"),
		     0);
	ca = certificate("ca.pem", paths[0]);
	cert = certificate("mine.pem", paths[1]);
	key = certificate("mine.key", paths[2]);
	c = connect_to(n);
	cr_expect_neq(ask(c), COORD_OK, "the CA has not signed it");
	cr_assert_eq(run_in_folder("cp node.key mine.key && cp node.pem mine.pem"), 0);
	until_us = clock_now_us() + 30000000;
	while (status != COORD_OK && clock_now_us() < until_us)
		status = ask(c);
	cr_expect_eq(status, COORD_OK);
	coord_close(c);
}

Test(embedded, one_that_does_not_end_is_killed)
{
	struct node *n = &nodes[0];
	uint64_t began;
	struct fault f;
	char path[128];
	struct seeds s = seeds_of("n0", 1, "127.0.0.1");

	cr_assert_eq(run_in_folder(
			     "printf '#!/bin/sh\\ntrap \"\" TERM; echo deaf; exec sleep 60\\n' "
			     ">deaf && chmod 700 deaf"),
		     0);
	snprintf(path, sizeof(path), "%s/deaf", folder);
	cr_assert_eq(begin_node(n, "n0", &s, path, &f), 0, "%s", f.text);
	AWAIT((uv_run(&run.loop, UV_RUN_NOWAIT), n->lines == 1), 10);
	began = clock_now_us();
	stop(n);
	cr_expect(clock_now_us() - began >= 4900000u);
}

/* Three members, which vote. */
static void start_three(void)
{
	for (unsigned i = 0; i < 3; i++)
		if (!nodes[i].e)
			start(i, 3);
	for (unsigned i = 0; i < 3; i++)
		looprun_until(&run, is_voting, &nodes[i], 60);
}

Test(embedded, of_three_members_one_may_die)
{
	struct coord *c;
	pid_t pid;

	needs_etcd();
	start_three();
	c = connect_to(&nodes[0]);
	store(c, "three", "three");
	pid = embedded_pid(nodes[1].e);
	stop(&nodes[1]);
	cr_expect(is_gone(pid));
	store(c, NULL, "three");
	store(c, "two", "two");
	kill(embedded_pid(nodes[2].e), SIGKILL); /* one of two: no leader, until it is back */
	looprun_until(&run, is_paused, &nodes[2], 10);
	looprun_until(&run, is_serving, &nodes[2], 30);
	store(c, NULL, "two");
	start(1, 3); /* and the one that was stopped */
	looprun_until(&run, is_serving, &nodes[1], 30);
	store(c, "all", "all");
	coord_close(c);
}

static void forget(const struct node *n)
{
	char command[160];

	snprintf(command, sizeof(command), "rm -r %s/data", n->dir);
	cr_assert_eq(run_in_folder(command), 0);
}

/* All members but node @i's know it. */
static void expect_stored(unsigned i, const char *value)
{
	struct coord *c;

	stop(&nodes[i]);
	c = connect_to(&nodes[(i + 1) % 3]);
	store(c, NULL, value);
	coord_close(c);
}

Test(embedded, one_member_becomes_three)
{
	struct coord *c;

	needs_etcd();
	looprun_until(&run, is_serving, start(0, 1), 30);
	c = connect_to(&nodes[0]);
	store(c, "kept", "kept");
	coord_close(c);
	stop(&nodes[0]);
	start_three();
	expect_stored(0, "kept");
}

Test(embedded, the_store_waits_for_the_first_seed)
{
	needs_etcd();
	start(1, 3);
	start(2, 3);
	for (unsigned i = 1; i < 3; i++) {
		looprun_until(&run, is_joining, &nodes[i], 10);
		cr_expect(strstr(embedded_why(nodes[i].e), "node 'n0'"), "%s",
			  embedded_why(nodes[i].e));
		cr_expect_eq(embedded_pid(nodes[i].e), 0);
	}
	start_three();
}

Test(embedded, a_member_without_its_data_joins_again)
{
	struct coord *c;

	not_cut();
	needs_etcd();
	start_three();
	c = connect_to(&nodes[0]);
	store(c, "kept", "kept");
	coord_close(c);
	for (unsigned i = 0; i < 3; i += 2) { /* the first seed, too */
		stop(&nodes[i]);
		forget(&nodes[i]);
		start_three();
	}
	expect_stored(1, "kept");
}

static bool has_no_leader(void *arg)
{
	const struct node *n = arg;

	return strstr(n->last_why, "does not name its members") != NULL;
}

static bool listens(const char *at)
{
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_port = htons((uint16_t)atoi(port_of(at))),
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool yes = connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0;

	close(fd);
	return yes;
}

static void make_no_store_beside_another_one(void)
{
	struct coord *c;

	start_three();
	c = connect_to(&nodes[0]);
	store(c, "kept", "kept");
	coord_close(c);
	for (unsigned i = 0; i < 3; i++)
		stop(&nodes[i]);
	forget(&nodes[0]);
	start(1, 3); /* one of three: it runs, and has no leader */
	AWAIT((uv_run(&run.loop, UV_RUN_NOWAIT), listens(peer[1])), 20);
	start(0, 3);
	looprun_until(&run, has_no_leader, &nodes[0], 20);
	cr_expect_eq(embedded_pid(nodes[0].e), 0);
	start_three();
	expect_stored(2, "kept");
}

Test(embedded, the_first_seed_without_data_makes_no_store_beside_another_one)
{
	needs_etcd();
	make_no_store_beside_another_one();
}

Test(embedded, nor_with_certificates)
{
	char paths[3][96];

	not_cut();
	needs_etcd();
	make_certificates();
	ca = certificate("ca.pem", paths[0]);
	cert = certificate("node.pem", paths[1]);
	key = certificate("node.key", paths[2]);
	make_no_store_beside_another_one();
}

static bool is_split(struct coord *c)
{
	struct coord_txn t = { .read = "k" };
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_txn(c, &q.call, &t, 2000), 0);
	looprun_flag(&run, &q.done, 10);
	return q.status == COORD_DOUBT && strstr(q.why, "two stores") && strstr(q.why, client[0]);
}

/* The first seed has lost its data, and no other member runs: it cannot know. */
Test(embedded, two_stores_are_noticed)
{
	struct coord *c;
	uint64_t until_us;

	needs_etcd();
	start_three();
	c = connect_to(&nodes[0]);
	store(c, "kept", "kept");
	coord_close(c);
	for (unsigned i = 0; i < 3; i++)
		stop(&nodes[i]);
	forget(&nodes[0]);
	looprun_until(&run, is_voting, start(0, 3), 30);
	c = connect_to(&nodes[0]);
	start_three();
	until_us = clock_now_us() + 30000000;
	while (!is_split(c))
		cr_assert_lt(clock_now_us(), until_us);
	stop(&nodes[0]);
	forget(&nodes[0]);
	start_three();
	until_us = clock_now_us() + 30000000;
	while (is_split(c)) /* until it has asked again */
		cr_assert_lt(clock_now_us(), until_us);
	store(c, NULL, "kept");
	coord_close(c);
}

Test(embedded, a_member_that_the_seeds_do_not_have_is_named)
{
	struct node *n;

	needs_etcd();
	start_three();
	stop(&nodes[2]);
	etcdfix_port(peer[2], sizeof(peer[2])); /* at another place, without data */
	forget(&nodes[2]);
	n = start(2, 3);
	looprun_until(&run, is_joining, n, 10);
	cr_expect(strstr(embedded_why(n->e), "'n2'") &&
			  strstr(embedded_why(n->e), "etcdctl member remove"),
		  "%s", embedded_why(n->e));
}

/* As a second machine with a copy of the configuration. */
Test(embedded, a_member_that_lives_is_not_removed)
{
	struct node other = { .e = NULL };
	struct coord *c;
	struct fault f;
	struct seeds s;

	needs_etcd();
	start_three();
	c = connect_to(&nodes[0]);
	store(c, "kept", "kept");
	coord_close(c);
	snprintf(other.dir, sizeof(other.dir), "%s/other/etcd", folder);
	s = seeds_of("n2", 3, "127.0.0.1");
	cr_assert_eq(begin_node(&other, "n2", &s, NULL, &f), 0, "%s", f.text);
	looprun_until(&run, is_joining, &other, 20);
	cr_expect(strstr(embedded_why(other.e), "another process accepts connections"), "%s",
		  embedded_why(other.e));
	stop(&other);
	cr_expect(is_voting(&nodes[2]));
	expect_stored(0, "kept");
}

/* It is not one without data. */
Test(embedded, data_that_cannot_be_read_are_the_reason)
{
	struct fault f;
	struct seeds s;

	cr_assert_eq(run_in_folder("mkdir -p n0/etcd && ln -s data n0/etcd/data"), 0);
	s = seeds_of("n0", 3, "127.0.0.1");
	cr_assert_eq(begin_node(&nodes[0], "n0", &s, "/bin/false", &f), 0, "%s", f.text);
	looprun_until(&run, is_paused, &nodes[0], 10);
	cr_expect(strstr(embedded_why(nodes[0].e), "coord_dir"), "%s", embedded_why(nodes[0].e));
	cr_expect_eq(embedded_pid(nodes[0].e), 0);
}
