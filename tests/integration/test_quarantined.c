/* Memory that a process may still write to is not handed on, nor given back, before
 * that process is proven gone. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(quarantined, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 2, N = 20000 };

struct play {
	stage go, at[WORLD + 1];
	pid_t pids[WORLD + 1];
};

/* A second mapping of the pages at @at, which the library knows nothing of. On a GPU a
 * process has one only while its context has: there the memory is not written to. */
static float *keep_mapped(float *at, size_t bytes)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	size_t into = (uintptr_t)at % page;
	char *base = (char *)at - into;
	char *twin = mremap(base, 0, (into + bytes + page - 1) / page * page, MREMAP_MAYMOVE);

	TRAINER_CHECK(twin != MAP_FAILED);
	return (float *)(void *)(twin + into);
}

static shardd_unit unit_of(shardd_client *c)
{
	static const struct shardd_unit_spec spec = { .compute_dtype = SHARDD_BF16,
						      .gradient_dtype = SHARDD_FP32 };

	return train_register(c, "u", N, &spec).unit;
}

/* Ends its session, lives on and writes to what it had. */
static int lives_on(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = unit_of(c);
	void *gradient;
	float *twin = NULL;

	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	train_set(c, gradient, 1, N * sizeof(float));
	if (train_on_host())
		twin = keep_mapped(gradient, N * sizeof(float));
	stage_set(&p->at[1], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	shardd_close(c);
	stage_set(&p->at[1], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 2, 60);
	if (twin)
		memset(twin, 0xaa, N * sizeof(float));
	stage_set(&p->at[1], 3);
	TRAINER_AWAIT(atomic_load(&p->go) == 3, 60);
	return 0;
}

/* Takes its place; nobody else writes to what it gets. */
static int succeeds(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = unit_of(c);
	float *want = train_numbers(N, 5);
	void *gradient;

	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	train_write(c, gradient, want, N * sizeof(float));
	stage_set(&p->at[2], 1);
	TRAINER_AWAIT(atomic_load(&p->at[1]) == 3, 60);
	TRAIN_HAS(c, gradient, want, N * sizeof(float));
	stage_set(&p->at[2], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 4, 60);
	free(want);
	train_leave(c);
	return 0;
}

Test(quarantined, a_successor_does_not_get_what_its_predecessor_can_write_to)
{
	struct play *p = trainer_shared(sizeof(*p));
	uint64_t before;

	p->pids[1] = trainer_start(&trainfix, "q", 1, WORLD, lives_on, p);
	AWAIT(atomic_load(&p->at[1]) == 1, 30);
	before = daemonfix_bytes(&trainfix);
	cr_assert_eq(fail_quarantined(&trainfix), 0);
	stage_set(&p->go, 1);
	AWAIT(fail_rank_is(&trainfix, "q", 1, "DEAD"), 30);
	/* nothing was given back (but the page of its streams), and status says why */
	cr_assert_geq(fail_quarantined(&trainfix), N * sizeof(float));
	cr_assert_eq(fail_job_number(&trainfix, "q", "quarantined_bytes"),
		     fail_quarantined(&trainfix));
	if (train_on_host())
		cr_assert_eq(daemonfix_bytes(&trainfix), before);
	p->pids[2] = trainer_start(&trainfix, "q", 1, WORLD, succeeds, p);
	AWAIT(atomic_load(&p->at[2]) == 1, 30);
	cr_assert_gt(daemonfix_bytes(&trainfix), before);
	stage_set(&p->go, 2);
	AWAIT(atomic_load(&p->at[2]) == 2, 30);
	/* the end of the process ends its quarantine */
	stage_set(&p->go, 3);
	cr_assert_eq(trainer_wait(p->pids[1], 30), 0);
	AWAIT(fail_quarantined(&trainfix) == 0 && daemonfix_bytes(&trainfix) == before, 20);
	stage_set(&p->go, 4);
	cr_assert_eq(trainer_wait(p->pids[2], 30), 0);
}

/* Leaves cleanly with everything mapped, and stays alive. */
static int leaves_and_lives(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = unit_of(c);
	void *gradient;
	const void *full;

	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_leave(c, &train_err));
	stage_set(&p->at[t->rank], 1);
	TRAINER_AWAIT(atomic_load(&p->go) >= 1 + t->rank, 60);
	shardd_close(c);
	return 0;
}

Test(quarantined, a_freed_job_keeps_its_bytes_while_a_process_has_them_mapped)
{
	struct play *p = trainer_shared(sizeof(*p));

	for (uint32_t r = 0; r < WORLD; r++)
		p->pids[r] = trainer_start(&trainfix, "ghost", r, WORLD, leaves_and_lives, p);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	/* the name is free, the bytes are not, and it is said whose they are */
	cr_assert(fail_job_is(&trainfix, "ghost", "DELETED"));
	cr_assert_gt(daemonfix_bytes(&trainfix), 0);
	cr_assert_eq(fail_quarantined(&trainfix), daemonfix_bytes(&trainfix));
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(p->pids[0], 30), 0);
	cr_assert_gt(daemonfix_bytes(&trainfix), 0);
	stage_set(&p->go, 2);
	cr_assert_eq(trainer_wait(p->pids[1], 30), 0);
	AWAIT(!fail_has_job(&trainfix, "ghost"), 20);
	AWAIT(daemonfix_bytes(&trainfix) == 0, 20);
	cr_assert_eq(fail_quarantined(&trainfix), 0);
}

Test(quarantined, a_killed_trainer_leaves_nothing_in_it)
{
	static const char *const delete[] = { "job", "delete", "q", NULL };
	struct play *p = trainer_shared(sizeof(*p));

	p->pids[1] = trainer_start(&trainfix, "q", 1, WORLD, lives_on, p);
	AWAIT(atomic_load(&p->at[1]) == 1, 30);
	fail_kill(p->pids[1]);
	AWAIT(fail_rank_is(&trainfix, "q", 1, "DEAD") && fail_quarantined(&trainfix) == 0, 20);
	json_decref(daemonfix_ctl(&trainfix, delete));
}
