#include <criterion/criterion.h>
#include <stdlib.h>

#include "backend/host_fair.h"
#include "core/check.h"
#include "fdcheck.h"

#define TEST(name) Test(host_fair, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)

enum { HOG = 1000, OURS = 2000, MIB = 1 << 20 };

/* A task of @pieces. */
struct work_item {
	struct fair_task turn;
	unsigned pieces;
	unsigned served;
};

static struct fair *fair_new(void)
{
	struct fair *f = malloc(sizeof(*f));

	cr_assert_not_null(f);
	fair_init(f);
	return f;
}

static void item_add(struct fair *f, struct work_item *w, unsigned pieces, uint32_t user,
		     uint32_t job)
{
	*w = (struct work_item){ .pieces = pieces };
	fair_add(f, &w->turn, (struct backend_owner){ user, job, 0 });
}

/* One piece of @bytes to whose turn it is. Return: that one. */
static struct work_item *serve(struct fair *f, uint64_t bytes)
{
	struct fair_task *t = fair_next(f);
	struct work_item *w;

	if (!t)
		return NULL;
	w = CONTAINER_OF(t, struct work_item, turn);
	fair_served(t, bytes);
	if (++w->served == w->pieces)
		fair_remove(f, t);
	return w;
}

static void serve_all(struct fair *f)
{
	while (serve(f, MIB))
		;
	cr_assert_eq(f->active, 0);
}

/* Tasks began in the order in which they came: a user with a thousand of them queued kept
 * another's step waiting for all of them. */
TEST(a_step_waits_for_one_piece_of_a_user_with_a_thousand_tasks)
{
	enum { N = 1000, EACH = 64 };
	struct work_item *hog = calloc(N, sizeof(*hog)), ours;
	struct fair *f = fair_new();
	unsigned before = 0;

	for (unsigned i = 0; i < N; i++)
		item_add(f, &hog[i], EACH, HOG, 1);
	for (unsigned i = 0; i < 100; i++)
		cr_assert_neq(serve(f, MIB), &ours);
	item_add(f, &ours, 10, OURS, 2);
	while (ours.served < ours.pieces)
		before += serve(f, MIB) != &ours;
	cr_expect_leq(before, 10, "%u pieces of another came before the last of 10", before);
	serve_all(f);
	free(hog);
	free(f);
}

TEST(who_comes_anew_is_served_first)
{
	struct work_item hog, ours;
	struct fair *f = fair_new();

	item_add(f, &hog, 1000, HOG, 1);
	for (unsigned i = 0; i < 500; i++)
		serve(f, MIB);
	item_add(f, &ours, 1, OURS, 2);
	cr_expect_eq(serve(f, MIB), &ours);
	serve_all(f);
	free(f);
}

/* Again and again: each step of ours waits for no more than a piece. */
TEST(every_step_of_many_waits_for_one_piece)
{
	struct work_item hog, ours;
	struct fair *f = fair_new();

	item_add(f, &hog, 100000, HOG, 1);
	for (unsigned step = 0; step < 1000; step++) {
		unsigned before = 0;

		item_add(f, &ours, 1, OURS, 2);
		while (!ours.served)
			before += serve(f, MIB) == &hog;
		cr_assert_leq(before, 1, "step %u", step);
		serve(f, MIB);
	}
	serve_all(f);
	free(f);
}

TEST(nobody_saves_up_while_away)
{
	struct work_item hog, ours;
	struct fair *f = fair_new();
	unsigned theirs = 0;

	item_add(f, &hog, 5000, HOG, 1);
	for (unsigned i = 0; i < 1000; i++)
		serve(f, MIB);
	item_add(f, &ours, 100, OURS, 2);
	while (ours.served < ours.pieces)
		theirs += serve(f, MIB) == &hog;
	cr_expect_geq(theirs, 98);
	cr_expect_leq(theirs, 100);
	serve_all(f);
	free(f);
}

TEST(many_jobs_are_no_larger_share_than_one)
{
	struct work_item a[8], b;
	struct fair *f = fair_new();

	for (unsigned i = 0; i < 8; i++)
		item_add(f, &a[i], 1000, HOG, i + 1);
	item_add(f, &b, 1000, OURS, 100);
	for (unsigned i = 0; i < 1600; i++)
		serve(f, MIB);
	cr_expect_geq(b.served, 799);
	cr_expect_leq(b.served, 801);
	for (unsigned i = 0; i < 8; i++) {
		cr_expect_geq(a[i].served, 99, "%u: %u", i, a[i].served);
		cr_expect_leq(a[i].served, 101, "%u: %u", i, a[i].served);
	}
	serve_all(f);
	free(f);
}

TEST(tasks_of_a_job_keep_their_order)
{
	struct work_item a[4], b[4];
	struct fair *f = fair_new();

	for (unsigned i = 0; i < 4; i++) {
		item_add(f, &a[i], 3, HOG, 1);
		item_add(f, &b[i], 3, OURS, 2);
	}
	for (struct work_item *w; (w = serve(f, MIB));) {
		const struct work_item *list = w >= a && w < a + 4 ? a : b;

		for (const struct work_item *before = list; before < w; before++)
			cr_assert_eq(before->served, before->pieces);
	}
	free(f);
}

TEST(bytes_are_counted_not_pieces)
{
	struct work_item large, small;
	struct fair *f = fair_new();

	item_add(f, &large, 1000, HOG, 1);
	item_add(f, &small, 1000, OURS, 2);
	for (unsigned i = 0; i < 500; i++) {
		const struct fair_task *t = fair_next(f);

		serve(f, t == &large.turn ? 4 * MIB : MIB);
	}
	cr_expect_geq(small.served, 398);
	cr_expect_leq(small.served, 402);
	serve_all(f);
	free(f);
}

TEST(more_users_than_places_are_all_served)
{
	enum { N = 3 * FAIR_USERS };
	struct work_item w[N];
	struct fair *f = fair_new();

	for (unsigned i = 0; i < N; i++)
		item_add(f, &w[i], 2, 1000 + i, i % 50);
	cr_expect(fair_shared(f));
	serve_all(f);
	for (unsigned i = 0; i < N; i++)
		cr_expect_eq(w[i].served, 2, "%u", i);
	cr_expect_not(fair_shared(f));
	free(f);
}

TEST(a_task_is_taken_out_once)
{
	struct work_item w;
	struct fair *f = fair_new();

	item_add(f, &w, 5, OURS, 1);
	fair_remove(f, &w.turn);
	fair_remove(f, &w.turn);
	cr_expect_eq(f->active, 0);
	cr_expect_null(fair_next(f));
	free(f);
}

/* By weight, not by how many tasks or jobs there are; and a weight changes with the next task. */
TEST(users_share_by_weight)
{
	struct work_item heavy, light, plain;
	struct fair *f = fair_new();

	heavy = light = plain = (struct work_item){ .pieces = 100000 };
	fair_add(f, &plain.turn, (struct backend_owner){ 1, 1, 0 });
	fair_add(f, &heavy.turn, (struct backend_owner){ 2, 2, 3 * BACKEND_WEIGHT });
	fair_add(f, &light.turn, (struct backend_owner){ 3, 3, BACKEND_WEIGHT / 10 });
	for (unsigned i = 0; i < 4100; i++)
		serve(f, MIB);
	cr_expect_leq(abs((int)heavy.served - 3000), 2, "%u", heavy.served);
	cr_expect_leq(abs((int)plain.served - 1000), 2, "%u", plain.served);
	cr_expect_leq(abs((int)light.served - 100), 2, "%u", light.served);
	fair_remove(f, &heavy.turn);
	fair_remove(f, &light.turn);
	fair_remove(f, &plain.turn);
	cr_expect_eq(f->active, 0);
	free(f);
}
