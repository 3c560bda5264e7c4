/* What the daemons of two nodes say of a job that they have together: shardctl status of each. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "await.h"
#include "daemonfix.h"
#include "etcdfix.h"
#include "fdcheck.h"
#include "shardd/shardd.h"

TestSuite(nodes_status, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

enum { NODES = 2, WORLD = 4, HERE = WORLD / NODES };

#define ARGS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static const char *const names[NODES] = { "a", "b" };

struct world {
	struct etcdfix etcd;
	struct daemonfix d[NODES];
};

static void start_daemon(struct world *w, unsigned i)
{
	char coord[64], name[32], at[32], listen[64];

	snprintf(coord, sizeof(coord), "coord=etcd://%s", w->etcd.client);
	snprintf(name, sizeof(name), "node_name=%s", names[i]);
	etcdfix_port(at, sizeof(at));
	snprintf(listen, sizeof(listen), "peer_listen=%s", at);
	daemonfix_start(&w->d[i], ARGS("--set", coord, "--set", "cluster=blue", "--set", name,
				       "--set", listen, "--set", "checkpoint_roots=/tmp"));
}

static const char *text(json_t *o, const char *key)
{
	const char *s = json_string_value(json_object_get(o, key));

	return s ? s : "";
}

static bool is_member(struct daemonfix *d)
{
	json_t *j = daemonfix_ctl(d, ARGS("status"));
	bool in = strcmp(text(json_object_get(j, "cluster"), "state"), "IN") == 0;

	json_decref(j);
	return in;
}

static void begin(struct world *w)
{
	etcdfix_begin(&w->etcd);
	for (unsigned i = 0; i < NODES; i++)
		start_daemon(w, i);
	for (unsigned i = 0; i < NODES; i++)
		AWAIT(is_member(&w->d[i]), 30);
}

static void end(struct world *w)
{
	for (unsigned i = 0; i < NODES; i++)
		daemonfix_stop(&w->d[i]);
	etcdfix_end(&w->etcd);
}

/* A rank that trains nothing: it joins, and leaves when it is told to. */
struct scene {
	atomic_uint joined;
	atomic_bool over;
};

static int rank(const struct trainer *t)
{
	struct scene *s = t->arg;
	struct shardd_options o = { .size = sizeof(o), .socket = t->socket };
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .lifetime = SHARDD_KEEP };
	shardd_client *c;

	TRAINER_CHECK(shardd_connect(&o, &c, NULL) == 0);
	TRAINER_CHECK(shardd_join(c, &job, NULL, NULL) == 0);
	atomic_fetch_add(&s->joined, 1);
	while (!atomic_load(&s->over))
		usleep(1000);
	TRAINER_CHECK(shardd_leave(c, NULL) == 0);
	shardd_close(c);
	return 0;
}

static json_t *job_of(json_t *status)
{
	return json_array_get(json_object_get(status, "jobs"), 0);
}

static bool waits_for(struct daemonfix *d, const char *words)
{
	json_t *j = daemonfix_ctl(d, ARGS("status"));
	bool found = strstr(text(job_of(j), "waits"), words) != NULL;

	json_decref(j);
	return found;
}

static void check_node(json_t *node, unsigned i, bool here)
{
	cr_expect_str_eq(text(node, "name"), names[i]);
	cr_expect_eq(json_integer_value(json_object_get(node, "first")), i * HERE);
	cr_expect_eq(json_integer_value(json_object_get(node, "ranks")), HERE);
	cr_expect_eq(json_is_true(json_object_get(node, "leads")), i == 0);
	cr_expect_eq(json_is_true(json_object_get(node, "here")), here);
}

/* On whichever node. */
static void check_rank(json_t *r, unsigned number)
{
	cr_expect_str_eq(text(r, "node"), names[number / HERE]);
	cr_expect_str_eq(text(r, "state"), "JOINED");
	cr_expect_neq(json_integer_value(json_object_get(r, "pid")), 0);
	/* which one of several is the daemon's choice */
	cr_expect_eq(strncmp(text(r, "device"), daemonfix_device(), 5), 0, "device %s",
		     text(r, "device"));
}

static void check_json(struct daemonfix *d, unsigned self)
{
	json_t *j = daemonfix_ctl(d, ARGS("status")), *job = job_of(j);
	json_t *cluster = json_object_get(j, "cluster"), *nodes = json_object_get(job, "nodes");

	cr_expect_str_eq(text(cluster, "name"), "blue");
	cr_expect_str_eq(text(cluster, "node"), names[self]);
	cr_expect_str_eq(text(cluster, "why"), "");
	cr_expect_str_eq(text(job, "state"), "RUNNING");
	cr_expect_str_eq(text(job, "waits"), "");
	cr_assert_eq(json_array_size(nodes), NODES);
	for (unsigned i = 0; i < NODES; i++)
		check_node(json_array_get(nodes, i), i, i == self);
	for (unsigned r = 0; r < WORLD; r++)
		check_rank(json_array_get(json_object_get(job, "ranks"), r), r);
	json_decref(j);
}

/* Of @out, the lines of the table @title fit into 80 columns. */
static void check_width(const char *out, const char *title)
{
	const char *at = strstr(out, title);

	cr_assert(at, "no %s in: %s", title, out);
	for (at = strchr(at, '\n') + 1; *at == ' '; at = strchr(at, '\n') + 1)
		cr_expect_leq(strcspn(at, "\n"), 80, "%s", at);
}

static void check_text(struct daemonfix *d, unsigned self)
{
	char out[16384], line[64];

	cr_assert_eq(daemonfix_ctl_text(d, ARGS("status"), out, sizeof(out)), 0);
	snprintf(line, sizeof(line), "\n  cluster blue, node %s: IN\n", names[self]);
	cr_expect(strstr(out, line), "%s", out);
	snprintf(line, sizeof(line), " %s (this one)  %u to %u  ", names[self], self * HERE,
		 self * HERE + HERE - 1);
	cr_expect(strstr(out, line), "no '%s' in: %s", line, out);
	snprintf(line, sizeof(line), "  %u  %s     JOINED", !self * HERE, names[!self]);
	cr_expect(strstr(out, line), "no '%s' in: %s", line, out);
	cr_expect_not(strstr(out, "Joins that wait"));
	check_width(out, "\nNodes\n");
	check_width(out, "\nRanks\n");
}

/* Resizing, which only works where all memory of a job is; saving what nobody commits any more. */
static void check_refused(struct daemonfix *d)
{
	char out[1024];

	cr_expect_neq(daemonfix_ctl_text(d, ARGS("job", "resize", "both", "2"), out, sizeof(out)),
		      0);
	cr_expect(strstr(out, "resizing is not possible: job 'both' has ranks on 2 nodes"), "%s",
		  out);
	cr_expect_neq(daemonfix_ctl_text(d, ARGS("checkpoint", "save", "both", "/tmp"), out,
					 sizeof(out)),
		      0);
	cr_expect(strstr(out, "no rank of job 'both' is joined: nothing commits"), "%s", out);
}

Test(nodes_status, where_the_ranks_of_a_job_are)
{
	struct scene *s = trainer_shared(sizeof(*s));
	pid_t pids[WORLD];
	struct world w;

	begin(&w);
	/* the first one makes its node the leader */
	pids[0] = trainer_start(&w.d[0], "both", 0, WORLD, rank, s);
	AWAIT(waits_for(&w.d[0], "3 of 4 ranks have not joined on any node: 1, 2, 3"), 20);
	for (unsigned r = 1; r + 1 < WORLD; r++)
		pids[r] = trainer_start(&w.d[r / HERE], "both", r, WORLD, rank, s);
	AWAIT(waits_for(&w.d[0], "1 of 4 ranks have not joined on any node: 3"), 20);
	AWAIT(waits_for(&w.d[1], "1 of 4 ranks have not joined on any node: 3"), 20);
	pids[WORLD - 1] = trainer_start(&w.d[1], "both", WORLD - 1, WORLD, rank, s);
	AWAIT(atomic_load(&s->joined) == WORLD, 30);
	for (unsigned i = 0; i < NODES; i++) {
		check_json(&w.d[i], i);
		check_text(&w.d[i], i);
	}
	atomic_store(&s->over, true);
	for (unsigned r = 0; r < WORLD; r++)
		cr_expect_eq(trainer_wait(pids[r], 20), 0);
	for (unsigned i = 0; i < NODES; i++)
		check_refused(&w.d[i]);
	end(&w);
}

Test(nodes_status, while_ranks_wait)
{
	struct scene *s = trainer_shared(sizeof(*s));
	char out[16384];
	struct world w;
	json_t *j;
	pid_t pid;

	begin(&w);
	pid = trainer_start(&w.d[1], "half", 2, WORLD, rank, s);
	AWAIT(waits_for(&w.d[1], "3 of 4 ranks"), 20);
	j = daemonfix_ctl(&w.d[1], ARGS("status"));
	cr_expect_str_eq(text(job_of(j), "state"), "FORMING");
	cr_expect_eq(json_array_size(json_object_get(job_of(j), "nodes")), 0);
	json_decref(j);
	cr_assert_eq(daemonfix_ctl_text(&w.d[1], ARGS("status"), out, sizeof(out)), 0);
	cr_expect(strstr(out, "\nJoins that wait\n"), "%s", out);
	cr_expect_not(strstr(out, "\nNodes\n"));
	check_width(out, "\nJoins that wait\n");
	kill(pid, SIGKILL);
	cr_expect_eq(trainer_wait(pid, 20), 128 + SIGKILL);
	end(&w);
}

Test(nodes_status, a_store_that_is_gone)
{
	char out[16384];
	struct world w;

	begin(&w);
	etcdfix_kill(&w.etcd);
	AWAIT(!is_member(&w.d[0]), 40); /* its lease is over */
	cr_assert_eq(daemonfix_ctl_text(&w.d[0], ARGS("status"), out, sizeof(out)), 0);
	cr_expect(strstr(out, "\n  cluster blue, node a: "), "%s", out);
	cr_expect_not(strstr(out, "node a: IN"), "%s", out);
	end(&w);
}

Test(nodes_status, a_daemon_without_others)
{
	struct daemonfix d;
	char out[8192];
	json_t *j;

	daemonfix_start(&d, NULL);
	j = daemonfix_ctl(&d, ARGS("status"));
	cr_expect(json_is_null(json_object_get(j, "cluster")));
	json_decref(j);
	cr_assert_eq(daemonfix_ctl_text(&d, ARGS("status"), out, sizeof(out)), 0);
	cr_expect_not(strstr(out, "cluster"), "%s", out);
	daemonfix_stop(&d);
}
