/* Memory of pools that outlives the daemon: who has it after that, who may not, and what is left out. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "job/job_journal.h"
#include "job/pooled.h"
#include "nodefix.h"

enum { ELEMENTS = 1 << 18, MOST = 64 }; /* a unit's gradient takes a slab of its own */

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];

/* The store: a descriptor by the number of its slab. */
static struct {
	int fds[MOST];
	int answer; /* to what is spare */
	unsigned n;
} store;

static int on_add(void *arg, uint32_t id, int fd, bool spare)
{
	CHECK(id < MOST && store.fds[id] < 0);
	(void)arg;
	if (spare && store.answer)
		return store.answer;
	store.fds[id] = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	store.n++;
	return 0;
}

static void on_drop(void *arg, uint32_t id)
{
	CHECK(id < MOST && store.fds[id] >= 0);
	(void)arg;
	store.fds[id] = fd_close(store.fds[id]);
	store.n--;
}

static void open_store(void)
{
	n.node.devices[0].table->store = (struct slab_store){ on_add, on_drop, NULL };
}

static void start(void)
{
	nodefix_begin(&n, NULL);
	open_store();
}

static void begin(void)
{
	fdcheck_begin();
	for (unsigned i = 0; i < MOST; i++)
		store.fds[i] = -1;
	start();
	job = nodefix_job(&n, "job", 2, 0);
}

static void end(void)
{
	struct fault f = FAULT_NULL;

	while (n.n_members)
		nodefix_drop(&n, n.members[0], "is gone");
	nodefix_turns(&n);
	cr_expect_eq(job_delete(job, true, NULL, &f), 0, "%s", f.text);
	nodefix_end(&n); /* all accounts are at zero */
	cr_expect_eq(store.n, 0, "all was dropped");
	fdcheck_end();
}

TestSuite(pooled, .init = begin, .fini = end, .timeout = 60);

static struct member *join(uint32_t rank, struct proc *proc)
{
	struct fault f = FAULT_NULL;
	struct member *ret = NULL;

	cr_assert_eq(nodefix_try_join(&n, job, rank, proc, NULL, &ret, &f), RES_DONE, "%s", f.text);
	return ret;
}

/* Ranks 0 and 1 are these processes; each has the buffer of a gradient. */
static void train(struct proc *first, struct proc *second)
{
	m[0] = join(0, first);
	m[1] = join(1, second);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, (float)i + 1);
		op[i].result.place.slab->exported = 1;
	}
}

/* What a successor finds. */
struct left {
	uint8_t *bytes;
	size_t n;
};

static void note_left(struct left *l)
{
	cr_assert_eq(state_encode(&job->rec, 1, n.node.devices[0].table->next, &l->bytes, &l->n),
		     0);
}

/* The daemon dies: what the store has stays. */
static void die(void)
{
	n.node.devices[0].table->store = (struct slab_store){ 0 };
	slabs_leave(&n.node.devices[0]);
	nodefix_end(&n);
}

/* The next one. @edit: what is changed of the record before. */
static void succeed(const struct left *l, void (*edit)(state_job *j))
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	int fds[MOST];
	size_t k = 0;

	nodefix_begin(&n, NULL);
	cr_assert_eq(state_decode(l->bytes, l->n, &all, &f), 0, "%s", f.text);
	if (edit)
		edit(all->jobs[0]);
	for (size_t i = 0; i < all->jobs[0]->n_slabs; i++)
		fds[k++] = store.fds[all->jobs[0]->slabs[i]->id];
	for (size_t i = 0; i < all->jobs[0]->n_pooled; i++)
		fds[k++] = store.fds[all->jobs[0]->pooled[i]->slab->id];
	cr_assert_eq(job_restore(&n.jobs, all->jobs[0], fds, &job, &f), 0, "%s", f.text);
	pooled_restore(job, fds + job->rec->n_slabs);
	all->jobs[0] = NULL;
	state_free(all);
	u = job->units[0];
	open_store();
	for (uint32_t id = 0; id < MOST; id++) { /* as survive_drop_rest */
		const struct slab *s = slab_find(&n.node.devices[0], id);

		if (store.fds[id] >= 0 && !(s && s->stored))
			on_drop(NULL, id);
	}
	nodefix_wrote(&n);
}

static void replace(void (*edit)(state_job *j))
{
	struct left l;

	note_left(&l);
	die();
	succeed(&l, edit);
	free(l.bytes);
}

static uint64_t quarantined(void)
{
	return n.node.devices[0].quarantined;
}

static struct region gradient_of(struct member *of)
{
	NODEFIX_OK(nodefix_on_unit(&n, of, "GradientBuffer", u, &op[0]), &op[0]);
	return op[0].result.place;
}

static uint32_t slab_of(unsigned rank)
{
	return op[rank].result.place.slab->id;
}

/* ----------------------------------------------------------------------- adoption */

/* A number of successors, of which none makes memory. */
Test(pooled, the_same_process_has_its_memory_again)
{
	uint64_t bytes = 0;
	uint32_t ids[2];

	train(NULL, NULL);
	for (unsigned i = 0; i < 2; i++)
		ids[i] = slab_of(i), bytes += op[i].result.place.slab->bytes;
	cr_expect_eq(job->rec->n_pooled, 2);
	for (unsigned round = 0; round < 5; round++) {
		uint32_t next;

		replace(NULL);
		next = n.node.devices[0].table->next;
		cr_expect_eq(quarantined(), bytes, "until its process has joined");
		cr_expect_eq(job->quota.by_class[MEM_GRAD], bytes);
		for (unsigned i = 0; i < 2; i++) {
			struct region r;

			m[i] = join(i, NULL);
			r = gradient_of(m[i]);
			cr_expect_eq(r.slab->id, ids[i], "round %u", round);
			cr_expect_eq(((const float *)region_addr(&r))[7], (float)i + 1,
				     "the same pages");
			cr_expect_eq(job_slab_for(m[i], ids[i]), r.slab);
			r.slab->exported = 1;
		}
		cr_expect_eq(quarantined(), 0);
		cr_expect_eq(job->quota.by_class[MEM_GRAD], bytes);
		cr_expect_eq(n.node.devices[0].table->next, next, "no slab was made");
		cr_expect_eq(job->rec->n_pooled, 2);
	}
}

/* The job has gone on with fewer, so that its process is another rank: the memory is still its own. */
Test(pooled, a_process_that_has_become_another_rank_has_its_memory_again)
{
	struct fault f = FAULT_NULL;
	uint32_t id;

	train(NULL, NULL);
	id = slab_of(1);
	job->rec->min_ranks = 1;
	job->rec->max_ranks = 2;
	job->rec->join_grace_ms = 1;
	nodefix_wrote(&n);
	nodefix_drop(&n, m[0], "died");
	cr_assert_eq(nodefix_try_join(&n, job, 1, NULL, m[1], &m[1], &f), RES_DONE, "%s", f.text);
	jobs_tick(&n.jobs, clock_now_us() + 1000000);
	nodefix_turns(&n);
	cr_assert_eq(job->rec->world_size, 1);
	replace(NULL);
	cr_assert_eq(nodefix_try_join(&n, job, 1, NULL, NULL, &m[1], &f), RES_DONE, "%s", f.text);
	cr_expect_eq(m[1]->rank, 0);
	cr_expect_eq(gradient_of(m[1]).slab->id, id);
}

/* Before they have joined it dies again. */
Test(pooled, a_daemon_that_nobody_has_joined_leaves_it_too)
{
	uint32_t id;

	train(NULL, NULL);
	id = slab_of(1);
	replace(NULL);
	replace(NULL);
	m[1] = join(1, NULL);
	cr_expect_eq(gradient_of(m[1]).slab->id, id);
}

/* ------------------------------------------------------------------ other processes */

/* It lives, but another one is its rank now: it can still write there. */
Test(pooled, another_process_gets_other_memory)
{
	struct nodefix_child c;
	uint64_t bytes;
	uint32_t id;

	nodefix_fork(&n, &c);
	train(c.proc, NULL);
	id = slab_of(0);
	bytes = op[0].result.place.slab->bytes;
	nodefix_unref(&c);
	replace(NULL);
	m[0] = join(0, NULL);
	cr_expect_neq(gradient_of(m[0]).slab->id, id);
	cr_expect_null(job_slab_for(m[0], id));
	m[1] = join(1, NULL);
	cr_expect_null(job_slab_for(m[1], id));
	cr_expect_eq(quarantined(), bytes);
	cr_expect_eq(job->quota.by_class[MEM_GRAD], 3 * bytes);
	cr_assert_eq(proc_new_pid(&n.run.loop, c.pid, getuid(), getgid(), &c.proc), 0);
	nodefix_kill(&n, &c);
	nodefix_unref(&c);
	cr_expect_eq(quarantined(), 0);
	cr_expect_eq(job->quota.by_class[MEM_GRAD], 2 * bytes);
	cr_expect_lt(store.fds[id], 0, "it is out of the store");
	cr_expect_eq(job->rec->n_pooled, 2);
}

/* A process that comes back as another rank still has its old memory mapped. */
Test(pooled, another_rank_gets_other_memory)
{
	uint32_t ids[2];

	train(NULL, NULL);
	for (unsigned i = 0; i < 2; i++)
		ids[i] = slab_of(i);
	replace(NULL);
	m[0] = join(0, NULL);
	cr_expect_null(job_slab_for(m[0], ids[1]), "not another rank's memory");
	cr_expect_not_null(job_slab_for(m[0], ids[0]));
}

Test(pooled, memory_of_a_process_that_is_gone_is_freed)
{
	struct nodefix_child c;
	struct left l;
	uint64_t bytes;

	nodefix_fork(&n, &c);
	train(c.proc, NULL);
	bytes = op[0].result.place.slab->bytes;
	note_left(&l);
	nodefix_unref(&c);
	die();
	kill(c.pid, SIGKILL);
	waitpid(c.pid, NULL, 0);
	succeed(&l, NULL);
	free(l.bytes);
	nodefix_turns(&n);
	cr_expect_eq(job->quota.by_class[MEM_GRAD], bytes, "rank 1's");
	cr_expect_eq(quarantined(), bytes);
	cr_expect_eq(job->rec->n_pooled, 1);
}

static void begin_later(state_job *j)
{
	j->pooled[0]->began++;
}

/* The number of a process is used again. */
Test(pooled, a_process_with_the_same_pid_is_another_one)
{
	uint32_t id;

	train(NULL, NULL);
	id = job->rec->pooled[0]->slab->id;
	replace(begin_later);
	nodefix_turns(&n);
	cr_expect_eq(job->rec->n_pooled, 1);
	cr_expect_lt(store.fds[id], 0);
}

/* The quarantine of one daemon goes on in the next one. */
Test(pooled, a_rank_that_was_lost_and_lives_stays_quarantined)
{
	struct nodefix_child c;
	uint64_t bytes;

	nodefix_fork(&n, &c);
	train(c.proc, NULL);
	bytes = op[0].result.place.slab->bytes;
	nodefix_drop(&n, m[0], "has hung up");
	nodefix_turns(&n);
	cr_expect_eq(quarantined(), bytes);
	nodefix_unref(&c);
	replace(NULL);
	m[0] = join(0, NULL);
	cr_expect_eq(m[0]->pool.bytes, 0);
	cr_assert_eq(proc_new_pid(&n.run.loop, c.pid, getuid(), getgid(), &c.proc), 0);
	nodefix_kill(&n, &c);
	nodefix_unref(&c);
	cr_expect_eq(job->quota.by_class[MEM_GRAD], bytes, "rank 1's, which has not joined");
}

/* The job may end before they come. */
Test(pooled, a_job_that_is_deleted_is_gone_with_its_processes)
{
	struct nodefix_child c;
	struct fault f = FAULT_NULL;

	nodefix_fork(&n, &c);
	train(c.proc, NULL);
	nodefix_unref(&c);
	replace(NULL);
	m[1] = join(1, NULL);
	nodefix_drop(&n, m[1], "is gone");
	cr_assert_eq(job_delete(job, true, NULL, &f), 0, "%s", f.text);
	nodefix_turns(&n);
	cr_expect_gt(n.node.devices[0].quota.used, 0, "a process may write there");
	cr_assert_eq(proc_new_pid(&n.run.loop, c.pid, getuid(), getgid(), &c.proc), 0);
	nodefix_kill(&n, &c);
	nodefix_unref(&c);
	job = nodefix_job(&n, "job", 2, 0);
}

/* ------------------------------------------------------------------------ the pools */

static void make_unknown(state_job *j)
{
	j->pooled[0]->kind = 77;
}

static void make_larger(state_job *j)
{
	j->pooled[0]->slab->bytes *= 2;
}

static void make_full(state_job *j)
{
	j->pooled[0]->slab->class_ = MEM_FULL;
}

static void make_homeless(state_job *j)
{
	free(j->pooled[0]->slab->device);
	j->pooled[0]->slab->device = strdup("host:7");
}

static void make_lost(state_job *j)
{
	on_drop(NULL, j->pooled[0]->slab->id);
}

typedef void (*edit_fn)(state_job *j);

/* It is spare: the job goes on without it. */
Test(pooled, what_does_not_match_is_left_out)
{
	static const edit_fn edits[] = { make_unknown, make_larger, make_full, make_homeless,
					 make_lost };

	for (size_t i = 0; i < ARRAY_SIZE(edits); i++) {
		train(NULL, NULL);
		replace(edits[i]);
		cr_expect_eq(job->rec->n_pooled, 1, "edit %zu", i);
		for (unsigned k = 0; k < 2; k++)
			m[k] = join(k, NULL);
		gradient_of(m[0]);
		gradient_of(m[1]);
		cr_expect_eq(job->rec->n_pooled, 2);
		end();
		begin();
	}
}

/* Gathered copies, and gradient shards that exist only in backward: nobody's alone. */
Test(pooled, copies_and_shards_are_free_memory_at_once)
{
	struct region r;
	uint32_t full, grads;

	pool_take(&job->mem.full[0], 1000, &r);
	full = r.slab->id;
	pool_give(&job->mem.full[0], &r);
	pool_take(&job->mem.grads[0], 1000, &r);
	grads = r.slab->id;
	pool_give(&job->mem.grads[0], &r);
	train(NULL, NULL);
	replace(NULL);
	cr_expect_eq(pool_take(&job->mem.full[0], 1000, &r), 0);
	cr_expect_eq(r.slab->id, full);
	cr_expect_not(r.slab->writable);
	pool_give(&job->mem.full[0], &r);
	cr_expect_eq(pool_take(&job->mem.grads[0], 1000, &r), 0);
	cr_expect_eq(r.slab->id, grads);
	cr_expect(pooled_outlives(&r));
	m[0] = join(0, NULL);
	cr_expect_null(job_slab_for(m[0], grads), "no process may write there");
	pool_give(&job->mem.grads[0], &r);
	cr_expect_eq(pool_trim(&job->mem.grads[0], UINT64_MAX), POOL_MIN_SLAB);
	cr_expect_lt(store.fds[grads], 0);
}

/* ------------------------------------------------------------------------- the store */

Test(pooled, what_the_store_has_no_room_for_ends_with_the_daemon)
{
	uint32_t ids[2];

	store.answer = -ENOSPC;
	train(NULL, NULL);
	for (unsigned i = 0; i < 2; i++)
		ids[i] = slab_of(i);
	cr_expect_eq(jobs_pooled_left_out(&n.jobs), 2);
	cr_expect_not(pooled_outlives(&op[0].result.place));
	store.answer = 0;
	jobs_pooled_retry(&n.jobs);
	cr_expect_lt(store.fds[ids[0]], 0, "it was not to wait");
	replace(NULL);
	cr_expect_eq(job->rec->n_pooled, 0);
	cr_expect_eq(job->quota.by_class[MEM_GRAD], 0);
	cr_expect_eq(jobs_pooled_left_out(&n.jobs), 0);
}

Test(pooled, a_store_that_is_late_gets_it_later)
{
	store.answer = -EAGAIN;
	train(NULL, NULL);
	cr_expect_lt(store.fds[slab_of(0)], 0);
	jobs_pooled_retry(&n.jobs);
	cr_expect_lt(store.fds[slab_of(0)], 0);
	store.answer = 0;
	jobs_pooled_retry(&n.jobs);
	for (unsigned i = 0; i < 2; i++)
		cr_expect_geq(store.fds[slab_of(i)], 0);
	cr_expect_eq(jobs_pooled_left_out(&n.jobs), 0);
	replace(NULL);
	cr_expect_eq(job->rec->n_pooled, 2);
}

/* nodefix_end compares the journal with the jobs. */
Test(pooled, the_journal_follows)
{
	struct region r[8];

	train(NULL, NULL);
	jobs_journal_write(&n.jobs);
	for (unsigned i = 0; i < ARRAY_SIZE(r); i++) {
		cr_assert_eq(pool_take(&job->mem.grads[0], POOL_MIN_SLAB, &r[i]), 0);
		if (i % 3 == 0)
			jobs_journal_write(&n.jobs);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(r); i += 2)
		pool_give(&job->mem.grads[0], &r[i]);
	cr_expect_gt(pool_trim(&job->mem.grads[0], UINT64_MAX), 0);
	jobs_journal_write(&n.jobs);
	for (unsigned i = 1; i < ARRAY_SIZE(r); i += 2)
		pool_give(&job->mem.grads[0], &r[i]);
	replace(NULL);
	cr_expect_eq(job->rec->n_pooled, 2 + ARRAY_SIZE(r) / 2);
	m[1] = join(1, NULL);
	nodefix_drop(&n, m[1], "is gone");
}
