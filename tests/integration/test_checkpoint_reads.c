/*
 * Loading a checkpoint while its reads fail: whatever read fails, and whatever read is the daemon's last
 * one, the job has no commit and units that have to be initialised or loaded, and a load of the same
 * checkpoint into it works.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../preload/readfail.h"
#include "failfix.h"
#include "fdcheck.h"

enum { N = 1000, STEP = 4 };

static char root[64];
static struct readfail *control;

/* Of the build; in a folder of tests/gpu/bundle beside its libraries. */
static void preload(void)
{
	const char *folder = getenv("SHARDD_LIB_DIR");
	char path[256];

	if (access(READFAIL, R_OK) == 0 || !folder) {
		setenv("LD_PRELOAD", READFAIL, 1);
		return;
	}
	snprintf(path, sizeof(path), "%s/libreadfail.so", folder);
	cr_assert_eq(access(path, R_OK), 0, "%s", path);
	setenv("LD_PRELOAD", path, 1);
}

/* Before the daemon begins, which has it mapped. */
static void make_control(void)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/control", root);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	cr_assert_geq(fd, 0);
	cr_assert_eq(ftruncate(fd, sizeof(*control)), 0);
	control = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	cr_assert_neq(control, MAP_FAILED);
	close(fd);
	atomic_store(&control->left, -1);
	setenv("READFAIL", path, 1);
	preload();
}

static void begin(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

#ifdef SHARDD_SANITIZED
	cr_skip_test("a library that is loaded first does not go with sanitizers");
#endif
	fdcheck_begin();
	snprintf(root, sizeof(root), "/tmp/shardd-reads-XXXXXX");
	cr_assert(mkdtemp(root));
	make_control();
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	args[1] = set;
	daemonfix_start_held(&trainfix, args);
	unsetenv("LD_PRELOAD");
}

static void end(void)
{
	char command[128];

	daemonfix_stop(&trainfix);
	munmap(control, sizeof(*control));
	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	cr_assert_eq(system(command), 0);
	fdcheck_end();
}

TestSuite(checkpoint_reads, .init = begin, .fini = end, .timeout = 120);

struct play {
	bool saves;
	int loaded; /* what the last load ended with */
	char text[512];
};

static shardd_unit make_unit(shardd_client *c)
{
	const uint64_t shape[] = { N };
	struct shardd_tensor tensors[] = { { .name = "a", .shape = shape, .dims = 1 },
					   { .name = "b", .shape = shape, .dims = 1 } };
	struct shardd_buffer mean = { .name = "mean", .shape = shape, .dims = 1 };
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "unit",
					 .tensors = tensors,
					 .n_tensors = 2,
					 .buffers = &mean,
					 .n_buffers = 1,
					 .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.1 } };
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	return info.unit;
}

static void save(const char *job)
{
	const char *args[] = { "checkpoint", "save", job, root, NULL };
	char out[1024];

	TRAINER_CHECK(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)) == 0);
}

static int is_saved(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	shardd_unit u;

	(void)train_join_as(c, t, SHARDD_EPHEMERAL);
	u = make_unit(c);
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	TRAIN_OK(shardd_commit(c, STEP, "blob", 4, &train_err));
	save(t->job);
	train_leave(c);
	return 0;
}

/* Nothing has come of a load that has failed. */
static void expect_nothing(shardd_client *c, shardd_unit u)
{
	const void *full;

	TRAIN_FAILS(shardd_gather(c, u, &full, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("not initialised");
}

/* One attempt, in a process of its own, since it may be the daemon's last one. */
static int loads(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership m = train_join_as(c, t, SHARDD_KEEP);
	shardd_unit u = make_unit(c);
	const void *full;

	TRAINER_CHECK(!m.has_commit && !m.torn && !m.has_step);
	expect_nothing(c, u);
	p->loaded = shardd_load_checkpoint(c, t->job, root, NULL, NULL, &train_err);
	snprintf(p->text, sizeof(p->text), "%s", p->loaded ? train_err.text : "");
	if (p->loaded == -SHARDD_UNAVAILABLE || p->loaded == -SHARDD_ABORTED)
		return 0; /* the daemon is gone */
	if (p->loaded) {
		expect_nothing(c, u);
	} else {
		m = train_join_as(c, t, SHARDD_KEEP);
		TRAINER_CHECK(m.has_commit && m.step == STEP && m.blob_bytes == 4);
		TRAIN_OK(shardd_gather(c, make_unit(c), &full, &train_err));
		TRAIN_OK(shardd_release(c, u, &train_err));
	}
	train_leave(c);
	return 0;
}

static struct play *make_checkpoint(void)
{
	struct play *p = trainer_shared(sizeof(*p));

	trainers_run(&trainfix, "saved", 1, is_saved, p, 30);
	return p;
}

static void delete_job(void)
{
	static const char *const args[] = { "job", "delete", "loads", "--force", NULL };
	char out[512];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
}

/* Each read fails in turn, until all are made. */
static void fails_with(int how, const char *words)
{
	struct play *p = make_checkpoint();
	int n = 0;

	for (;; n++) {
		atomic_store(&control->how, how);
		atomic_store(&control->left, n);
		trainers_run(&trainfix, "loads", 1, loads, p, 30);
		if (!p->loaded)
			break;
		cr_assert(strstr(p->text, words), "read %d: %s", n, p->text);
	}
	cr_expect_gt(n, 8); /* the index, a header, six arrays, buffer and blob */
	delete_job();
}

Test(checkpoint_reads, that_fail_leave_a_job_that_can_be_loaded)
{
	fails_with(EIO, "Input/output error");
}

Test(checkpoint_reads, of_files_that_become_shorter)
{
	fails_with(READFAIL_SHORT, "short");
}

/* Each second read is the daemon's last one; the next daemon has the job. */
Test(checkpoint_reads, that_are_the_last_ones_of_the_daemon)
{
	struct play *p = make_checkpoint();
	pid_t daemon = daemonfix_daemon(&trainfix);
	unsigned deaths = 0;

	for (int n = 0;; n += 2) {
		atomic_store(&control->how, READFAIL_KILL);
		atomic_store(&control->left, n);
		trainers_run(&trainfix, "loads", 1, loads, p, 30);
		if (!p->loaded)
			break;
		AWAIT(daemonfix_daemon(&trainfix) != daemon, 30);
		daemon = daemonfix_daemon(&trainfix);
		deaths++;
	}
	cr_expect_gt(deaths, 3);
	delete_job();
}
