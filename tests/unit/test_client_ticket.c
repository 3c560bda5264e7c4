#include <criterion/criterion.h>
#include <stdlib.h>

#include "fdcheck.h"
#include "ticket.h"

TestSuite(client_ticket, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

static uint64_t add(struct tickets *t, struct ticket **ret)
{
	uint64_t id = 0;

	cr_assert_eq(tickets_add(t, NULL, 0, ret, &id), 0);
	cr_assert_neq(id, 0);
	return id;
}

Test(client_ticket, a_number_never_comes_back)
{
	struct tickets t;
	struct ticket *x;
	uint64_t last = 0;

	tickets_init(&t);
	for (int i = 0; i < 1000; i++) {
		uint64_t id = add(&t, &x);

		cr_expect_gt(id, last);
		tickets_end(&t, id);
		cr_expect_eq(tickets_claim(&t, id, &x), TICKET_E_NONE);
		last = id;
	}
	cr_expect_eq(t.count, 1, "one slot was enough");
	tickets_deinit(&t);
}

Test(client_ticket, one_thread_at_a_time_has_it)
{
	struct tickets t;
	struct ticket *x;
	struct ticket *y = NULL;
	uint64_t id;

	tickets_init(&t);
	id = add(&t, &x);
	cr_expect_eq(tickets_claim(&t, id, &y), TICKET_E_CLAIMED);
	tickets_release(&t, x);
	cr_expect_eq(tickets_claim(&t, id, &y), 0);
	cr_expect_eq(x, y);
	cr_expect_eq(tickets_claim(&t, id, &y), TICKET_E_CLAIMED);
	tickets_end(&t, id);
	cr_expect_eq(tickets_claim(&t, id, &y), TICKET_E_NONE);
	tickets_deinit(&t);
}

Test(client_ticket, numbers_that_were_never_handed_out_are_none)
{
	struct tickets t;
	struct ticket *x;
	uint64_t id;

	tickets_init(&t);
	cr_expect_eq(tickets_claim(&t, 0, &x), TICKET_E_NONE);
	cr_expect_eq(tickets_claim(&t, UINT64_MAX, &x), TICKET_E_NONE);
	id = add(&t, &x);
	tickets_release(&t, x);
	cr_expect_eq(tickets_claim(&t, id + 1, &x), TICKET_E_NONE);
	cr_expect_eq(tickets_claim(&t, id + (1u << 24), &x), TICKET_E_NONE);
	cr_expect_eq(tickets_claim(&t, 0, &x), TICKET_E_NONE);
	tickets_deinit(&t);
}

Test(client_ticket, the_table_grows_and_slots_are_used_again)
{
	enum { N = 5000 };
	struct tickets t;
	struct ticket *x;
	uint64_t *ids = calloc(N, sizeof(*ids));

	tickets_init(&t);
	for (int i = 0; i < N; i++)
		ids[i] = add(&t, &x);
	for (int i = 0; i < N; i += 2)
		tickets_end(&t, ids[i]);
	for (int i = 0; i < N; i += 2)
		add(&t, &x);
	cr_expect_eq(t.count, N);
	for (int i = 1; i < N; i += 2)
		cr_expect_eq(tickets_claim(&t, ids[i], &x), TICKET_E_CLAIMED);
	free(ids);
	tickets_deinit(&t);
	tickets_deinit(&t);
}

Test(client_ticket, unanswered_ops_have_a_limit)
{
	struct tickets t;
	struct ticket *x;
	struct ticket *y;
	uint64_t a, b, c;

	tickets_init(&t);
	cr_expect_eq(tickets_add(&t, NULL, 2, &x, &a), 0);
	cr_expect_eq(tickets_add(&t, NULL, 2, &y, &b), 0);
	cr_expect_eq(tickets_add(&t, NULL, 2, &x, &c), TICKET_E_FULL);
	/* Answered, though its ticket has not ended. */
	tickets_answered(&t, y);
	tickets_answered(&t, y);
	cr_expect_eq(tickets_add(&t, NULL, 2, &x, &c), 0);
	tickets_end(&t, a);
	tickets_end(&t, b);
	tickets_end(&t, c);
	cr_expect_eq(t.unanswered, 0);
	tickets_deinit(&t);
}
