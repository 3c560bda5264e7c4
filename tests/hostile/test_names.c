/*
 * Names of jobs belong to their users: two users have a job of one name, nobody learns which
 * jobs others have, and a private job is closed to the administrators' looks, too.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

enum { ALICE = 30001, BOB = 30002, N = 300, OUT = 1 << 20 };

static void test_names_begin(void)
{
	static const char *const args[] = { "--set", "socket_mode=0666", "--set",
					    "memory_bytes=8MiB", NULL };
	const char *dir = getenv("SHARDD_BIN_DIR");
	char command[4096];

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	failfix_begin(args);
	chmod(trainfix.dir, 0755);
	/* where the build is need not be open to other users */
	snprintf(command, sizeof(command), "cp '%s/shardctl' '%s/shardctl'",
		 dir && *dir ? dir : SHARDD_BIN_DIR, trainfix.dir);
	cr_assert_eq(system(command), 0);
}

static void test_names_end(void)
{
	if (geteuid() == 0)
		failfix_end();
}

TestSuite(names, .init = test_names_begin, .fini = test_names_end, .timeout = 120);

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

struct play {
	stage go, at[2];
	pid_t pid[2];
};

static void become(uid_t uid)
{
	TRAINER_CHECK(setgid(uid) == 0 && setuid(uid) == 0);
}

/* A rank of the job of its user, with a unit called @unit, until it may go. */
static void train_as(const struct trainer *t, uid_t uid, unsigned who, const char *unit,
		     bool is_private)
{
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = 1, .is_private = is_private
	};
	struct shardd_membership m;
	struct play *p = t->arg;
	shardd_client *c, *idle;
	const void *full;
	shardd_unit u;

	become(uid);
	/* a session without a job: only its user tells who may see it */
	idle = is_private ? NULL : train_connect(t);
	c = train_connect(t);
	TRAIN_OK(shardd_join(c, &job, &m, &train_err));
	TRAINER_CHECK(m.created);
	u = train_zero_unit(c, unit, N, NULL);
	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	p->pid[who] = getpid();
	stage_set(&p->at[who], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_OK(shardd_release(c, u, &train_err));
	train_leave(c);
	if (idle)
		shardd_close(idle);
}

static int is_alice(const struct trainer *t)
{
	train_as(t, ALICE, 0, "hersecret", false);
	return 0;
}

static int is_private_alice(const struct trainer *t)
{
	train_as(t, ALICE, 0, "hersecret", true);
	return 0;
}

static int is_bob(const struct trainer *t)
{
	train_as(t, BOB, 1, "hissecret", false);
	return 0;
}

static int ctl(const char *const *args, char *out)
{
	setenv("SHARDD_BIN_DIR", trainfix.dir, 1);
	return daemonfix_ctl_text(&trainfix, args, out, OUT);
}

/* Bob's looks at everything: nothing of Alice's is in them. */
static int looks_as_bob(const struct trainer *t)
{
	const char *const *const looks[] = {
		WORDS("--json", "status"),    WORDS("--json", "memory"), WORDS("--json", "jobs"),
		WORDS("--json", "sessions"),  WORDS("--json", "ops"),    WORDS("trace", "-o", "-"),
		WORDS("--json", "units", "j")
	};
	struct play *p = t->arg;
	char *out = train_alloc(OUT), pid[32];

	become(BOB);
	snprintf(pid, sizeof(pid), "\"pid\":%d", (int)p->pid[0]);
	for (size_t i = 0; i < ARRAY_SIZE(looks); i++) {
		TRAINER_CHECK(ctl(looks[i], out) == 0);
		TRAINER_CHECK(!strstr(out, "hersecret") && !strstr(out, "30001"));
		for (char *at = out; (at = strstr(at, "\"pid\": ")); at++)
			TRAINER_CHECK(strtol(at + 7, NULL, 10) != p->pid[0]);
		TRAINER_CHECK(!strstr(out, pid));
	}
	TRAINER_CHECK(strstr(out, "hissecret"));
	free(out);
	return 0;
}

/* @args of shardctl with a name of Alice's job and with one that nobody has: the same answer. */
static void same_answer(const char *const *hers, const char *const *nobodys)
{
	char *a = train_alloc(OUT), *b = train_alloc(OUT), *name;

	TRAINER_CHECK(ctl(hers, a) == 1 && ctl(nobodys, b) == 1);
	TRAINER_CHECK(strstr(a, "NOT_FOUND") != NULL);
	name = strstr(b, "30001/nobody");
	TRAINER_CHECK(name);
	memcpy(name, "30001/hidden", strlen("30001/hidden"));
	TRAINER_CHECK(strcmp(a, b) == 0);
	free(a);
	free(b);
}

static int asks_as_bob(const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job), .name = "30001/hidden", .world_size = 1 };
	shardd_live *live;
	shardd_client *c;

	become(BOB);
	same_answer(WORDS("job", "delete", "30001/hidden"), WORDS("job", "delete", "30001/nobody"));
	same_answer(WORDS("job", "drain", "30001/hidden"), WORDS("job", "drain", "30001/nobody"));
	same_answer(WORDS("ops", "30001/hidden"), WORDS("ops", "30001/nobody"));
	same_answer(WORDS("units", "30001/hidden"), WORDS("units", "30001/nobody"));
	c = train_connect(t);
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_NOT_FOUND);
	TRAIN_FAILS(shardd_live_open(c, "30001/hidden", "engine", 0, &live, &train_err),
		    SHARDD_NOT_FOUND);
	TRAIN_FAILS(shardd_live_open(c, "hidden", "engine", 0, &live, &train_err),
		    SHARDD_NOT_FOUND);
	shardd_close(c);
	return 0;
}

/* The text about memory that is used up says who holds what: of one's own. */
static int takes_too_much_as_bob(const struct trainer *t)
{
	struct shardd_tensor tensor = { .name = "t", .shape = (uint64_t[]){ 64 << 20 }, .dims = 1 };
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .name = "big", .tensors = &tensor, .n_tensors = 1
	};
	struct shardd_unit_info info;
	shardd_client *c;

	become(BOB);
	c = train_connect(t);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_RESOURCE_EXHAUSTED);
	TRAINER_CHECK(strstr(train_err.text, "mine"));
	TRAINER_CHECK(!strstr(train_err.text, "hidden") && !strstr(train_err.text, "30001"));
	train_leave(c);
	return 0;
}

static int run_one(struct play *p, const char *job, trainer_fn fn)
{
	return trainer_wait(trainer_start(&trainfix, job, 0, 1, fn, p), 60);
}

Test(names, two_users_have_a_job_of_one_name)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t hers = trainer_start(&trainfix, "j", 0, 1, is_alice, p);
	pid_t his = trainer_start(&trainfix, "j", 0, 1, is_bob, p);
	char out[8192];

	AWAIT(atomic_load(&p->at[0]) == 1 && atomic_load(&p->at[1]) == 1, 30);
	cr_assert_eq(run_one(p, "j", looks_as_bob), 0);
	/* root has to say whose */
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("units", "j"), out, sizeof(out)), 1);
	cr_assert(strstr(out, "30001/j") && strstr(out, "30002/j"), "%s", out);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("units", "30001/j"), out, sizeof(out)), 0);
	cr_assert(strstr(out, "hersecret") && !strstr(out, "hissecret"), "%s", out);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("jobs"), out, sizeof(out)), 0);
	cr_assert(strstr(out, "OWNER") && strstr(out, "30001") && strstr(out, "30002"), "%s", out);
	snprintf(out, sizeof(out), "job joined uid=30001 pid=%d job=30001/j", (int)p->pid[0]);
	AWAIT(fail_logged(&trainfix, out), 20);
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(hers, 30), 0);
	cr_assert_eq(trainer_wait(his, 30), 0);
	AWAIT(fail_logged(&trainfix, "job left uid=30002"), 20);
}

Test(names, a_foreign_name_is_not_revealed)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t hers = trainer_start(&trainfix, "hidden", 0, 1, is_alice, p);

	AWAIT(atomic_load(&p->at[0]) == 1, 30);
	cr_assert_eq(run_one(p, "hidden", asks_as_bob), 0);
	AWAIT(fail_logged(&trainfix, "refused what=delete uid=30002"), 20);
	AWAIT(fail_logged(&trainfix, "job=\"30001/hidden\" code=NOT_FOUND"), 20);
	cr_assert_eq(run_one(p, "mine", takes_too_much_as_bob), 0);
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(hers, 30), 0);
}

static int joins_as_root(const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job), .name = "30001/p", .world_size = 1 };
	shardd_client *c = train_connect(t);
	shardd_live *live;

	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_PERMISSION_DENIED);
	told_now("private");
	TRAIN_FAILS(shardd_live_open(c, "30001/p", "engine", 0, &live, &train_err),
		    SHARDD_PERMISSION_DENIED);
	shardd_close(c);
	return 0;
}

Test(names, a_private_job_shows_root_its_name_owner_state_and_bytes)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t hers = trainer_start(&trainfix, "p", 0, 1, is_private_alice, p);
	const char *const *const looks[] = {
		WORDS("--json", "status"), WORDS("--json", "memory"),
		WORDS("--json", "ops"),    WORDS("--json", "sessions"),
		WORDS("trace", "-o", "-"), WORDS("--json", "units", "30001/p")
	};
	static char out[OUT], pid[32];

	AWAIT(atomic_load(&p->at[0]) == 1, 30);
	snprintf(pid, sizeof(pid), "%d", (int)p->pid[0]);
	for (size_t i = 0; i < ARRAY_SIZE(looks); i++) {
		cr_assert_eq(daemonfix_ctl_text(&trainfix, looks[i], out, sizeof(out)), 0);
		cr_assert(!strstr(out, "hersecret"), "%zu: %s", i, out);
		for (char *at = out; (at = strstr(at, "\"pid\": ")); at++)
			cr_assert_neq(strtol(at + 7, NULL, 10), p->pid[0], "%zu: %s", i, out);
	}
	cr_assert_gt(fail_job_number(&trainfix, "p", "used_bytes"), 0);
	cr_assert_eq(fail_job_number(&trainfix, "p", "uid"), ALICE);
	cr_assert(fail_job_is(&trainfix, "p", "RUNNING"));
	cr_assert_eq(run_one(p, "p", joins_as_root), 0);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "drain", "30001/p"), out,
					sizeof(out)),
		     0, "%s", out);
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(hers, 30), 0);
}

/* It was told as an answer of the daemon (1), which it never reached. */
static int is_shut_out(const struct trainer *t)
{
	char *out = train_alloc(OUT);

	(void)t;
	become(BOB);
	TRAINER_CHECK(ctl(WORDS("status"), out) == 3);
	TRAINER_CHECK(strstr(out, "PERMISSION_DENIED"));
	free(out);
	return 0;
}

Test(names, a_socket_that_is_closed_to_a_user_ends_shardctl_with_3)
{
	struct play *p = trainer_shared(sizeof(*p));

	cr_assert_eq(chmod(trainfix.socket, 0600), 0);
	cr_assert_eq(run_one(p, "x", is_shut_out), 0);
}

/* A name is the client's text: it must not read as keys of the line. */
static int forges(const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job), .name = "x\" uid=0 y=\"", .world_size = 1 };
	shardd_client *c;

	become(BOB);
	c = train_connect(t);
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	shardd_close(c);
	return 0;
}

Test(names, a_name_cannot_forge_a_line_of_the_log)
{
	struct play *p = trainer_shared(sizeof(*p));

	cr_assert_eq(run_one(p, "x", forges), 0);
	AWAIT(fail_logged(&trainfix, "job=\"x' uid=0 y='\" code=INVALID_ARGUMENT"), 20);
}

/* A loop of refusals fills nobody's log. */
static int refused_in_a_loop(const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job), .name = "30001/x", .world_size = 1 };
	shardd_client *c;

	become(BOB);
	c = train_connect(t);
	for (unsigned i = 0; i < 2000; i++)
		TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_NOT_FOUND);
	shardd_close(c);
	return 0;
}

static unsigned lines_with(const char *words)
{
	FILE *f = fopen(trainfix.log, "re");
	char line[2048];
	unsigned n = 0;

	while (f && fgets(line, sizeof(line), f))
		n += strstr(line, words) != NULL;
	if (f)
		fclose(f);
	return n;
}

Test(names, refusals_in_a_loop_do_not_fill_the_log)
{
	struct play *p = trainer_shared(sizeof(*p));
	uint64_t begun = clock_now_us(), most;

	cr_assert_eq(run_one(p, "x", refused_in_a_loop), 0);
	/* a burst, and ten a second */
	most = 100 + 10 * ((clock_now_us() - begun) / 1000000u + 1);
	AWAIT(lines_with("refused what=join uid=30002") >= 100, 20);
	cr_assert_leq(lines_with("refused what=join uid=30002"), most);
}
