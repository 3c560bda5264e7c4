/* Two users on one daemon: neither sees, joins, reads, drains or deletes what is the other's. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

static void test_users_begin(void)
{
	static const char *const args[] = { "--set", "socket_mode=0666", NULL };

	failfix_begin(args);
	chmod(trainfix.dir, 0755);
}

TestSuite(users, .init = test_users_begin, .fini = failfix_end, .timeout = 120);

enum { ALICE = 30001, BOB = 30002, N = 300 };

struct play {
	stage go, at;
};

static void become(uid_t uid)
{
	TRAINER_CHECK(setgid(uid) == 0 && setuid(uid) == 0);
}

static int is_alice(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c;
	const void *full;
	shardd_unit u;

	become(ALICE);
	c = train_connect(t);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	u = train_zero_unit(c, "secret", N, NULL);
	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	stage_set(&p->at, 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_OK(shardd_release(c, u, &train_err));
	train_leave(c);
	return 0;
}

/* shardctl as this user; where the build is need not be open to him. */
static int ctl_as_bob(const char *const *args, char *out, size_t bytes)
{
	setenv("SHARDD_BIN_DIR", trainfix.dir, 1);
	return daemonfix_ctl_text(&trainfix, args, out, bytes);
}

static int is_bob(const struct trainer *t)
{
	static const char *const status[] = { "--json", "status", NULL };
	static const char *const slabs[] = { "--json", "memory", NULL };
	static const char *const ops[] = { "--json", "ops", NULL };
	static const char *const delete[] = { "job", "delete", "--force", "hers", NULL };
	static const char *const drain[] = { "job", "drain", "hers", NULL };
	static const char *const *const looks[] = { status, slabs, ops };
	struct shardd_job job = { .size = sizeof(job), .name = t->job, .world_size = t->world };
	char *out = train_alloc(1 << 20);
	shardd_live *live;
	shardd_client *c;

	become(BOB);
	for (size_t i = 0; i < ARRAY_SIZE(looks); i++) {
		TRAINER_CHECK(ctl_as_bob(looks[i], out, 1 << 20) == 0);
		TRAINER_CHECK(!strstr(out, "hers") && !strstr(out, "secret"));
	}
	TRAINER_CHECK(ctl_as_bob(delete, out, 1 << 20) != 0);
	TRAINER_CHECK(strstr(out, "there is no job"));
	TRAINER_CHECK(ctl_as_bob(drain, out, 1 << 20) != 0);
	TRAINER_CHECK(strstr(out, "there is no job"));
	c = train_connect(t);
	TRAIN_FAILS(shardd_live_open(c, t->job, "engine", 0, &live, &train_err), SHARDD_NOT_FOUND);
	told_now("there is no job");
	/* his own of that name */
	TRAIN_OK(shardd_join(c, &job, NULL, &train_err));
	free(out);
	train_leave(c);
	return 0;
}

static void copy_ctl(void)
{
	const char *dir = getenv("SHARDD_BIN_DIR");
	char command[4096];

	snprintf(command, sizeof(command), "cp '%s/shardctl' '%s/shardctl'",
		 dir && *dir ? dir : SHARDD_BIN_DIR, trainfix.dir);
	cr_assert_eq(system(command), 0);
}

Test(users, do_not_see_each_other)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t hers;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	copy_ctl();
	hers = trainer_start(&trainfix, "hers", 0, 1, is_alice, p);
	AWAIT(atomic_load(&p->at) == 1, 30);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "hers", 0, 1, is_bob, p), 60), 0);
	cr_assert(fail_job_is(&trainfix, "hers", "RUNNING"));
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(hers, 30), 0);
}
