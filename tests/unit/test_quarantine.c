/* Quarantine: memory a living process may still write to is not used again. */
#include <criterion/criterion.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "fdcheck.h"
#include "looprun.h"
#include "mem/quarantine.h"

TestSuite(quarantine, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

struct fixture {
	struct looprun run;
	struct backend *b;
	struct device d;
	struct quota job;
	struct quarantine q;
};

static void setup(struct fixture *f)
{
	looprun_init(&f->run);
	cr_assert_eq(backend_fake_new(&f->run.queue, 0, &f->b), 0);
	slab_device_init(&f->d, f->b, 0);
	quota_init(&f->job, &f->d.quota, 0);
	quarantine_init(&f->q);
}

static void teardown(struct fixture *f)
{
	quarantine_deinit(&f->q);
	cr_assert_eq(f->q.bytes, 0);
	cr_assert_eq(f->job.used, 0);
	slab_device_deinit(&f->d);
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

/* A process that does nothing until it is killed. */
struct child {
	pid_t pid;
	struct proc *proc;
};

static struct child child_start(struct fixture *f)
{
	pid_t parent = getpid();
	struct child c = { .pid = fork() };

	if (c.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* the test may fail and leave us */
		while (getppid() == parent)
			pause();
		_exit(0);
	}
	cr_assert_gt(c.pid, 0);
	cr_assert_eq(proc_new_pid(&f->run.loop, c.pid, getuid(), getgid(), &c.proc), 0);
	return c;
}

static void child_kill(struct child *c)
{
	cr_assert_eq(kill(c->pid, SIGKILL), 0);
	cr_assert_eq(waitpid(c->pid, NULL, 0), c->pid);
}

static bool is_gone(void *arg)
{
	return proc_gone(arg);
}

static void child_end(struct fixture *f, struct child *c)
{
	child_kill(c);
	looprun_until(&f->run, is_gone, c->proc, 5);
}

static struct slab *slab(struct fixture *f, uint64_t bytes)
{
	struct slab *s = NULL;

	cr_assert_eq(slab_new(&f->d, &f->job, MEM_SHARD, BACKEND_SHARE_FD, bytes, "job", -1, &s),
		     0);
	return s;
}

Test(quarantine, a_slab_of_a_process_that_is_gone_is_free_at_once)
{
	struct fixture f;
	struct child c;
	struct slab *s;

	setup(&f);
	c = child_start(&f);
	child_end(&f, &c);
	s = slab(&f, 4096);
	cr_assert_eq(quarantine_slab(&f.q, c.proc, s), 0);
	cr_assert_eq(f.q.bytes, 0);
	cr_assert_eq(s->refs, 1);
	slab_unref(s);
	proc_unref(c.proc);
	teardown(&f);
}

Test(quarantine, a_slab_lives_until_all_processes_that_map_it_are_gone)
{
	struct fixture f;
	struct child a, b;
	struct slab *s;

	setup(&f);
	a = child_start(&f);
	b = child_start(&f);
	s = slab(&f, 8192);
	cr_assert_eq(quarantine_slab(&f.q, a.proc, s), 0);
	cr_assert_eq(quarantine_slab(&f.q, b.proc, s), 0);
	slab_unref(s);
	cr_assert_eq(f.q.bytes, 8192, "counted once");
	cr_assert_eq(f.d.quarantined, 8192);
	child_end(&f, &a);
	cr_assert_eq(f.q.bytes, 8192);
	cr_assert_eq(f.job.used, 8192);
	child_end(&f, &b);
	cr_assert_eq(f.q.bytes, 0);
	cr_assert_eq(f.job.used, 0);
	proc_unref(a.proc);
	proc_unref(b.proc);
	teardown(&f);
}

Test(quarantine, at_the_daemons_end_everything_comes_back)
{
	struct fixture f;
	struct child c;
	struct slab *s;

	setup(&f);
	c = child_start(&f);
	s = slab(&f, 8192);
	cr_assert_eq(quarantine_slab(&f.q, c.proc, s), 0);
	slab_unref(s);
	quarantine_deinit(&f.q);
	cr_assert_eq(f.job.used, 0);
	proc_unref(c.proc);
	child_kill(&c);
	teardown(&f);
}
