/* The queue between threads, alone and as the way into the loop. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>

#include "core/check.h"
#include "core/loopq.h"
#include "core/mpsc.h"
#include "fdcheck.h"
#include "looprun.h"

#define TEST(suite, name) \
	Test(suite, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30)

#define THREADS 4
#define EACH    5000

struct entry {
	struct mpsc_node node;
	unsigned thread, number;
};

TEST(mpsc, first_in_first_out)
{
	struct entry e[5];
	struct mpsc q;

	mpsc_init(&q);
	cr_assert_null(mpsc_pop(&q));
	for (unsigned i = 0; i < 5; i++)
		mpsc_push(&q, &e[i].node);
	for (unsigned i = 0; i < 5; i++)
		cr_assert_eq(mpsc_pop(&q), &e[i].node);
	cr_assert_null(mpsc_pop(&q));
}

TEST(mpsc, a_popped_node_may_be_pushed_again)
{
	struct entry a, b;
	struct mpsc q;

	mpsc_init(&q);
	for (int i = 0; i < 100; i++) {
		mpsc_push(&q, &a.node);
		cr_assert_eq(mpsc_pop(&q), &a.node);
		cr_assert_null(mpsc_pop(&q));
		mpsc_push(&q, &b.node);
		mpsc_push(&q, &a.node);
		cr_assert_eq(mpsc_pop(&q), &b.node);
		mpsc_push(&q, &b.node);
		cr_assert_eq(mpsc_pop(&q), &a.node);
		cr_assert_eq(mpsc_pop(&q), &b.node);
		cr_assert_null(mpsc_pop(&q));
	}
}

static struct mpsc shared;
static struct entry entries[THREADS][EACH];

static void *push_all(void *arg)
{
	struct entry *mine = arg;

	for (unsigned i = 0; i < EACH; i++)
		mpsc_push(&shared, &mine[i].node);
	return NULL;
}

TEST(mpsc, each_producers_order_is_kept)
{
	unsigned seen[THREADS] = { 0 }, total = 0;
	pthread_t threads[THREADS];

	mpsc_init(&shared);
	for (unsigned t = 0; t < THREADS; t++) {
		for (unsigned i = 0; i < EACH; i++)
			entries[t][i] = (struct entry){ .thread = t, .number = i };
		cr_assert_eq(pthread_create(&threads[t], NULL, push_all, entries[t]), 0);
	}
	while (total < THREADS * EACH) {
		struct mpsc_node *node = mpsc_pop(&shared);
		struct entry *e;

		if (!node) {
			sched_yield();
			continue;
		}
		e = CONTAINER_OF(node, struct entry, node);
		cr_assert_eq(e->number, seen[e->thread]++);
		total++;
	}
	cr_assert_null(mpsc_pop(&shared));
	for (unsigned t = 0; t < THREADS; t++)
		pthread_join(threads[t], NULL);
}

struct job {
	struct work work;
	struct tally *tally;
	unsigned thread, number;
};

struct tally {
	pthread_t loop_thread;
	unsigned seen[THREADS];
	unsigned total;
	bool wrong, done;
};

static struct job jobs[THREADS][EACH];
static struct loopq *target;

static void count_job(struct work *work)
{
	struct job *j = CONTAINER_OF(work, struct job, work);
	struct tally *t = j->tally;

	if (!pthread_equal(pthread_self(), t->loop_thread) || j->number != t->seen[j->thread]++)
		t->wrong = true;
	t->done = ++t->total == THREADS * EACH;
}

static void *post_all(void *arg)
{
	struct job *mine = arg;

	for (unsigned i = 0; i < EACH; i++)
		loopq_post(target, &mine[i].work, count_job);
	return NULL;
}

TEST(loopq, runs_work_of_many_threads_on_the_loop_thread)
{
	struct tally tally = { .loop_thread = pthread_self() };
	pthread_t threads[THREADS];
	struct looprun l;

	looprun_init(&l);
	target = &l.queue;
	for (unsigned t = 0; t < THREADS; t++) {
		for (unsigned i = 0; i < EACH; i++)
			jobs[t][i] = (struct job){ .tally = &tally, .thread = t, .number = i };
		cr_assert_eq(pthread_create(&threads[t], NULL, post_all, jobs[t]), 0);
	}
	looprun_flag(&l, &tally.done, 20);
	for (unsigned t = 0; t < THREADS; t++)
		pthread_join(threads[t], NULL);
	cr_assert_not(tally.wrong);
	looprun_deinit(&l);
}

TEST(loopq, close_runs_what_is_left_and_may_be_called_twice)
{
	struct tally tally = { .loop_thread = pthread_self() };
	struct job j = { .tally = &tally };
	struct looprun l;

	looprun_init(&l);
	loopq_post(&l.queue, &j.work, count_job);
	loopq_close(&l.queue);
	cr_assert_eq(tally.total, 1);
	loopq_close(&l.queue);
	looprun_deinit(&l);
}

struct chain {
	struct work work;
	struct loopq *queue;
	unsigned left;
	bool done;
};

static void post_again(struct work *work)
{
	struct chain *c = CONTAINER_OF(work, struct chain, work);

	if (c->left-- > 0)
		loopq_post(c->queue, &c->work, post_again);
	else
		c->done = true;
}

TEST(loopq, work_may_post_itself_again)
{
	struct chain c = { .left = 50 };
	struct looprun l;

	looprun_init(&l);
	c.queue = &l.queue;
	loopq_post(&l.queue, &c.work, post_again);
	looprun_flag(&l, &c.done, 5);
	looprun_deinit(&l);
}
