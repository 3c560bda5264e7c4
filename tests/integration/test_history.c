/* shardctl history: why jobs ended, for whom that is kept, and that it outlives the daemon. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "fdcheck.h"

TestSuite(history, .timeout = 120);

enum { ALICE = 30001, BOB = 30002 };

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

static json_t *ended(const char *const *args)
{
	json_t *all = daemonfix_ctl(&trainfix, args), *jobs = json_object_get(all, "jobs");

	json_incref(jobs);
	json_decref(all);
	return jobs;
}

static const char *text(const json_t *jobs, size_t i, const char *key)
{
	const char *s = json_string_value(json_object_get(json_array_get(jobs, i), key));

	cr_assert(s, "job %zu has no text '%s'", i, key);
	return s;
}

static json_int_t number(const json_t *jobs, size_t i, const char *key)
{
	const json_t *n = json_object_get(json_array_get(jobs, i), key);

	cr_assert(json_is_integer(n), "job %zu has no number '%s'", i, key);
	return json_integer_value(n);
}

static size_t count(void)
{
	json_t *jobs = ended(WORDS("history"));
	size_t n = json_array_size(jobs);

	json_decref(jobs);
	return n;
}

static void make_and_delete(const char *name)
{
	char out[512];

	cr_assert_eq(daemonfix_ctl_text(&trainfix,
					WORDS("job", "create", name, "--world-size", "2"), out,
					sizeof(out)),
		     0, "%s", out);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", name), out, sizeof(out)),
		     0, "%s", out);
}

/* ------------------------------------------------------------------- causes */

static int finishes(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	train_zero_unit(c, "u", 100000, NULL);
	if (t->rank == 0)
		TRAIN_FAILS(shardd_gather(c, 99, &(const void *){ NULL }, &train_err),
			    SHARDD_NOT_FOUND);
	TRAIN_OK(shardd_commit(c, 41, NULL, 0, &train_err));
	train_leave(c);
	return 0;
}

static int crashes(const struct trainer *t)
{
	train_join(t);
	raise(SIGKILL);
	return 0;
}

static void causes_begin(void)
{
	static const char *const args[] = { "--set", "uncommitted_ttl_s=1", NULL };

	failfix_begin(args);
}

Test(history, says_why_jobs_ended, .init = causes_begin, .fini = failfix_end)
{
	char out[4096];
	json_t *jobs;

	trainers_run(&trainfix, "well", 2, finishes, NULL, 60);
	AWAIT(count() == 1, 10);
	make_and_delete("gone");
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "dead", 0, 1, crashes, NULL), 30),
		     128 + SIGKILL);
	AWAIT(count() == 3, 20);
	jobs = ended(WORDS("history"));
	cr_expect_str_eq(text(jobs, 0, "name"), "dead");
	cr_expect_str_eq(text(jobs, 0, "end"), "CRASHED");
	cr_expect_str_eq(text(jobs, 1, "name"), "gone");
	cr_expect_str_eq(text(jobs, 1, "end"), "DELETED");
	cr_expect_str_eq(text(jobs, 2, "name"), "well");
	cr_expect_str_eq(text(jobs, 2, "end"), "FINISHED");
	cr_expect_eq(number(jobs, 2, "step"), 41);
	cr_expect_eq(number(jobs, 2, "world_size"), 2);
	cr_expect_eq(number(jobs, 2, "uid"), (json_int_t)getuid());
	cr_expect_geq(number(jobs, 2, "peak_bytes"), 100000 * 4);
	cr_expect_gt(number(jobs, 2, "began_unix_s"), 0);
	cr_expect_geq(number(jobs, 2, "ended_unix_s"), number(jobs, 2, "began_unix_s"));
	json_decref(jobs);
	jobs = ended(WORDS("history", "gone"));
	cr_expect_eq(json_array_size(jobs), 1);
	json_decref(jobs);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, WORDS("history"), out, sizeof(out)), 0);
	cr_expect(strstr(out, "well") && strstr(out, "FINISHED"), "%s", out);
}

/* -------------------------------------------------------------------- limits */

static void few_begin(void)
{
	static const char *const args[] = { "--set", "history_jobs=8", "--set", "socket_mode=0666",
					    NULL };

	failfix_begin(args);
	chmod(trainfix.dir, 0755);
}

Test(history, keeps_the_newest_and_gives_them_in_parts, .init = few_begin, .fini = failfix_end)
{
	char name[8], out[4096], before[32];
	json_t *all;

	for (unsigned i = 0; i < 12; i++) {
		snprintf(name, sizeof(name), "j%u", i);
		make_and_delete(name);
	}
	cr_expect_eq(count(), 8);
	all = daemonfix_ctl(&trainfix, WORDS("history", "-n", "3"));
	cr_expect_eq(json_array_size(json_object_get(all, "jobs")), 3);
	cr_expect_str_eq(text(json_object_get(all, "jobs"), 0, "name"), "j11");
	snprintf(before, sizeof(before), "%lld",
		 (long long)json_integer_value(json_object_get(all, "next")));
	json_decref(all);
	all = daemonfix_ctl(&trainfix, WORDS("history", "--before", before));
	cr_expect_eq(json_array_size(json_object_get(all, "jobs")), 5);
	cr_expect_str_eq(text(json_object_get(all, "jobs"), 0, "name"), "j8");
	cr_expect_str_eq(text(json_object_get(all, "jobs"), 4, "name"), "j4");
	cr_expect_eq(json_integer_value(json_object_get(all, "next")), 0);
	json_decref(all);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, WORDS("history", "-n", "3"), out, sizeof(out)),
		     0);
	cr_expect(strstr(out, "there are older ones: --before "), "%s", out);
}

static void ctl_as(uid_t uid, const char *const *args, char *out, size_t bytes)
{
	TRAINER_CHECK(setgid(uid) == 0 && setuid(uid) == 0);
	setenv("SHARDD_BIN_DIR", trainfix.dir, 1);
	trainer_check(daemonfix_ctl_text(&trainfix, args, out, bytes) == 0, out, __FILE__,
		      __LINE__);
}

static int alice_makes(const struct trainer *t)
{
	char out[4096];

	(void)t;
	ctl_as(ALICE, WORDS("job", "create", "secret", "--world-size", "3", "--private"), out,
	       sizeof(out));
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "secret"), out,
					 sizeof(out)) == 0);
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, WORDS("--json", "history"), out, sizeof(out)) ==
		      0);
	TRAINER_CHECK(strstr(out, "secret") && strstr(out, "\"world_size\": 3"));
	return 0;
}

static int bob_looks(const struct trainer *t)
{
	char out[4096];

	(void)t;
	ctl_as(BOB, WORDS("--json", "history"), out, sizeof(out));
	TRAINER_CHECK(!strstr(out, "secret") && !strstr(out, "j1"));
	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, WORDS("--json", "history", "30001/secret"), out,
					 sizeof(out)) == 1);
	TRAINER_CHECK(strstr(out, "you see no job") && !strstr(out, "DELETED"));
	return 0;
}

/* Many jobs of one user push out none of another, and nobody sees what is not his. */
Test(history, belongs_to_its_user, .init = few_begin, .fini = failfix_end)
{
	const char *dir = getenv("SHARDD_BIN_DIR");
	char name[8], command[4096];
	json_t *jobs;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	snprintf(command, sizeof(command), "cp '%s/shardctl' '%s/shardctl'",
		 dir && *dir ? dir : SHARDD_BIN_DIR, trainfix.dir);
	cr_assert_eq(system(command), 0);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "-", 0, 1, alice_makes, NULL), 30), 0);
	for (unsigned i = 0; i < 20; i++) {
		snprintf(name, sizeof(name), "j%u", i);
		make_and_delete(name);
	}
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "-", 0, 1, bob_looks, NULL), 30), 0);
	jobs = ended(WORDS("history", "30001/secret"));
	cr_assert_eq(json_array_size(jobs), 1, "it is still there");
	cr_expect_eq(number(jobs, 0, "uid"), ALICE);
	cr_expect_eq(number(jobs, 0, "world_size"), 0, "a private one, without detail");
	cr_expect_str_eq(text(jobs, 0, "end"), "DELETED");
	json_decref(jobs);
}

/* ------------------------------------------------------------------ restarts */

static void held_begin(void)
{
	fdcheck_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void held_end(void)
{
	daemonfix_stop(&trainfix);
	fdcheck_end();
}

Test(history, outlives_the_daemon, .init = held_begin, .fini = held_end)
{
	json_t *before, *after;
	char out[512];

	make_and_delete("first");
	make_and_delete("second");
	cr_assert_eq(
		daemonfix_ctl_text(&trainfix,
				   WORDS("job", "create", "stays", "--world-size", "2", "--keep"),
				   out, sizeof(out)),
		0, "%s", out);
	before = ended(WORDS("history"));
	cr_assert_eq(json_array_size(before), 2);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	after = ended(WORDS("history"));
	cr_expect(json_equal(before, after));
	json_decref(after);
	daemonfix_replace_daemon(&trainfix, SIGUSR2);
	after = ended(WORDS("history"));
	cr_expect(json_equal(before, after), "and a handover");
	json_decref(after);
	json_decref(before);
	make_and_delete("third");
	cr_assert_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "stays"), out,
					sizeof(out)),
		     0, "%s", out);
	after = ended(WORDS("history"));
	cr_assert_eq(json_array_size(after), 4);
	cr_expect_str_eq(text(after, 0, "name"), "stays");
	cr_expect_gt(number(after, 0, "began_unix_s"), 0, "in an earlier daemon");
	cr_expect_str_eq(text(after, 3, "name"), "first");
	json_decref(after);
}
