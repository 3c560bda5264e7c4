/* shardctl events: what jobs go through, as it happens and afterwards, and who may see it. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "failfix.h"
#include "fdcheck.h"
#include "rawcall.h"
#include "stopped.h"

TestSuite(events, .timeout = 120);

enum { ALICE = 30001, BOB = 30002 };

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static void events_begin(void)
{
	static const char *const args[] = { "--set", "socket_mode=0666",
					    "--set", "stall_after_ms=200",
					    "--set", "recent_events=16",
					    NULL };

	failfix_begin(args);
	chmod(trainfix.dir, 0755);
}

static const char *program(void)
{
	static char path[4096];
	const char *bin = getenv("SHARDD_BIN_DIR");

	snprintf(path, sizeof(path), "%s/shardctl", bin && *bin ? bin : SHARDD_BIN_DIR);
	return path;
}

/* `shardctl events -f` as another process, whose output goes to a file. */
struct follower {
	pid_t pid;
	char path[128];
	char text[65536];
};

static void follower_start(struct follower *f, const char *job)
{
	const char *ctl = program();

	snprintf(f->path, sizeof(f->path), "%s/events", trainfix.dir);
	f->pid = fork();
	cr_assert_geq(f->pid, 0);
	if (f->pid == 0) {
		int fd = open(f->path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(fd, STDOUT_FILENO);
		execl(ctl, ctl, "--socket", trainfix.socket, "--json", "events", "-f", job, NULL);
		_exit(127);
	}
}

static const char *follower_read(struct follower *f)
{
	FILE *file = fopen(f->path, "re");
	size_t n = file ? fread(f->text, 1, sizeof(f->text) - 1, file) : 0;

	f->text[n] = '\0';
	if (file)
		fclose(file);
	return f->text;
}

static void follower_stop(struct follower *f)
{
	int status;

	kill(f->pid, SIGTERM);
	cr_assert_eq(waitpid(f->pid, &status, 0), f->pid);
	cr_expect(WIFSIGNALED(status), "it has not ended before: %d", status);
	unlink(f->path);
}

/* The kinds of all lines so far, each with a blank behind it. */
static void kinds_of(struct follower *f, char *ret, size_t bytes)
{
	char *line, *rest = (char *)follower_read(f);
	size_t n = 0;

	ret[0] = '\0';
	while ((line = strsep(&rest, "\n")) && rest) {
		json_t *j = json_loads(line, 0, NULL);

		cr_assert(j, "a line is no JSON object: %s", line);
		n += (size_t)snprintf(ret + n, bytes - n, "%s ",
				      json_string_value(json_object_get(j, "kind")));
		cr_assert_lt(n, bytes);
		json_decref(j);
	}
}

static bool has_kinds(struct follower *f, const char *words)
{
	char kinds[4096];

	kinds_of(f, kinds, sizeof(kinds));
	return strstr(kinds, words);
}

struct play {
	stage go;
};

static int lives(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_commit(c, 7, NULL, 0, &train_err));
	if (t->rank == 1) {
		TRAINER_AWAIT(atomic_load(&p->go) >= 1, 60); /* the other one waits: a stall */
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAINER_AWAIT(atomic_load(&p->go) >= 2, 60);
		raise(SIGKILL);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAINER_AWAIT(atomic_load(&p->go) >= 3, 60);
	shardd_close(c);
	return 0;
}

Test(events, tell_what_a_job_goes_through, .init = events_begin, .fini = failfix_end)
{
	struct play *p = trainer_shared(sizeof(*p));
	struct follower *f = calloc(1, sizeof(*f));
	pid_t pids[2];
	char out[8192];

	cr_assert(f);
	follower_start(f, "j");
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "j", r, 2, lives, p);
	AWAIT(has_kinds(f, "CREATED JOINED JOINED FORMED STALL "), 30);
	stage_set(&p->go, 1);
	AWAIT(has_kinds(f, "FORMED STALL STALL_ENDED "), 30);
	stage_set(&p->go, 2);
	AWAIT(has_kinds(f, " DIED EPOCH_ENDED "), 30);
	cr_assert_eq(trainer_wait(pids[1], 30), 128 + SIGKILL);
	stage_set(&p->go, 3);
	cr_assert_eq(trainer_wait(pids[0], 30), 0);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "--force", "j"), out,
					sizeof(out)),
		     0, "%s", out);
	AWAIT(has_kinds(f, "ENDED "), 30);
	cr_expect_not(has_kinds(f, "COMMIT "));
	snprintf(out, sizeof(out), "\"pid\":%d", (int)pids[1]);
	cr_expect(strstr(follower_read(f), out), "%s", f->text);
	cr_expect_not(strstr(f->text, "lost"));
	follower_stop(f);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("events", "j", "--commits"), out,
					sizeof(out)),
		     0);
	cr_expect(strstr(out, " j FORMED: all 2 ranks are in epoch"), "%s", out);
	cr_expect(strstr(out, " j COMMIT: step 7\n"), "%s", out);
	cr_expect(strstr(out, " j ENDED: deleted\n"), "%s", out);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("events", "-n", "1"), out, sizeof(out)),
		     0);
	cr_expect(strstr(out, "ENDED") && !strstr(out, "CREATED"), "%s", out);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("events", "nobody"), out, sizeof(out)), 1);
	cr_expect(strstr(out, "NOT_FOUND: you have no job \"nobody\", and no event"), "%s", out);
	free(f);
}

/* A reader that is stopped while more happens than is kept. */
Test(events, say_how_many_are_lost, .init = events_begin, .fini = failfix_end)
{
	struct follower *f = calloc(1, sizeof(*f));
	char name[8], out[512];

	cr_assert(f);
	/* it has seen one event at its start, so that it knows what comes next */
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "create", "x", "--world-size", "2"),
					out, sizeof(out)),
		     0, "%s", out);
	follower_start(f, NULL);
	for (unsigned i = 0; i < 31; i++) {
		snprintf(name, sizeof(name), "j%u", i);
		cr_assert_eq(daemonfix_ctl_text(&trainfix,
						WORDS("job", "create", name, "--world-size", "2"),
						out, sizeof(out)),
			     0, "%s", out);
		if (i == 0) {
			AWAIT(has_kinds(f, "CREATED CREATED "), 30);
			stopped_stop(f->pid);
		}
	}
	kill(f->pid, SIGCONT);
	snprintf(name, sizeof(name), "\"j30\"");
	AWAIT(strstr(follower_read(f), name), 30);
	/* one answer was on its way: the next one begins 16 events before the last */
	cr_expect(strstr(f->text, "{\"lost\":"), "%s", f->text);
	follower_stop(f);
	free(f);
}

static Shardd__V1__EventsResponse *ask_events(struct rpc_client *c, uint64_t after, uint64_t run)
{
	Shardd__V1__EventsRequest request = SHARDD__V1__EVENTS_REQUEST__INIT;

	request.after = after;
	request.run = run;
	return raw_must(c, "Status/Events", &request.base);
}

static int asks_after_a_restart(const struct trainer *t)
{
	Shardd__V1__EventsRequest request = SHARDD__V1__EVENTS_REQUEST__INIT;
	struct rpc_client *c = raw_connect(t->socket);
	Shardd__V1__EventsResponse *all = ask_events(c, 0, 0), *some;

	TRAINER_CHECK(all->run && all->n_events == 3 && all->last == all->events[2]->id);
	some = ask_events(c, all->events[0]->id, all->run);
	TRAINER_CHECK(some->n_events == 2 && some->events[0]->id == all->events[1]->id);
	shardd__v1__events_response__free_unpacked(some, NULL);
	some = ask_events(c, all->last, all->run);
	TRAINER_CHECK(some->n_events == 0 && some->last == all->last);
	shardd__v1__events_response__free_unpacked(some, NULL);
	/* as a client does that has read two events of another daemon */
	some = ask_events(c, 2, all->run + 1);
	TRAINER_CHECK(some->n_events == 3 && some->run == all->run);
	shardd__v1__events_response__free_unpacked(some, NULL);
	request.after = 2;
	raw_refused(c, "Status/Events", &request.base, SHARDD_INVALID_ARGUMENT, "run",
		    "run is 0, and after is 2");
	shardd__v1__events_response__free_unpacked(all, NULL);
	rpc_client_close(c);
	return 0;
}

Test(events, begin_again_with_another_daemon, .init = events_begin, .fini = failfix_end)
{
	char name[8], out[512];

	for (unsigned i = 0; i < 3; i++) {
		snprintf(name, sizeof(name), "j%u", i);
		cr_assert_eq(daemonfix_ctl_text(&trainfix,
						WORDS("job", "create", name, "--world-size", "2"),
						out, sizeof(out)),
			     0, "%s", out);
	}
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "-", 0, 1, asks_after_a_restart, NULL),
				  30),
		     0);
}

static int is_alice(const struct trainer *t)
{
	char out[8192];

	(void)t;
	TRAINER_CHECK(setgid(ALICE) == 0 && setuid(ALICE) == 0);
	setenv("SHARDD_BIN_DIR", trainfix.dir, 1);
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix,
					 WORDS("job", "create", "secret", "--world-size", "3",
					       "--private"),
					 out, sizeof(out)) == 0);
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, WORDS("events"), out, sizeof(out)) == 0);
	TRAINER_CHECK(strstr(out, "secret CREATED: 3 ranks, KEEP"));
	return 0;
}

static int is_bob(const struct trainer *t)
{
	char out[8192];

	(void)t;
	TRAINER_CHECK(setgid(BOB) == 0 && setuid(BOB) == 0);
	setenv("SHARDD_BIN_DIR", trainfix.dir, 1);
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, WORDS("events"), out, sizeof(out)) == 0);
	TRAINER_CHECK(!*out);
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, WORDS("events", "30001/secret"), out,
					 sizeof(out)) == 1);
	TRAINER_CHECK(strstr(out, "you see no job") && !strstr(out, "CREATED"));
	return 0;
}

Test(events, belong_to_their_user, .init = events_begin, .fini = failfix_end)
{
	char command[8192], out[8192];

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	snprintf(command, sizeof(command), "cp '%s' '%s/shardctl'", program(), trainfix.dir);
	cr_assert_eq(system(command), 0);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "-", 0, 1, is_alice, NULL), 30), 0);
	for (unsigned i = 0; i < 20; i++) {
		snprintf(command, sizeof(command), "j%u", i);
		cr_assert_eq(
			daemonfix_ctl_text(&trainfix,
					   WORDS("job", "create", command, "--world-size", "2"),
					   out, sizeof(out)),
			0, "%s", out);
	}
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "-", 0, 1, is_bob, NULL), 30), 0);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("events", "30001/secret"), out,
					sizeof(out)),
		     0);
	cr_expect(strstr(out, "secret CREATED\n"), "still there, without detail: %s", out);
}
