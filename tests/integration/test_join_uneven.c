/*
 * Ranks that have no more inputs (DDP's join), by itself: what they are refused, and those who
 * want an error instead. With buckets: test_ddp.c.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "trainfix.h"

/* Rank 0 has joined; what it cannot take part in is refused to rank 1, and numbers stay
 * equal. */
static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t buffer, shadowed = 0;
	uint32_t last;

	TRAIN_OK(shardd_alloc(c, 64, &buffer, NULL, &train_err));
	if (t->rank) {
		/* nothing ends without rank 0 until it has joined */
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAIN_FAILS(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, 4, SHARDD_FP32,
					      SHARDD_SUM, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "rank 0") &&
			      strstr(train_err.text, "no more inputs"));
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAIN_FAILS(shardd_join_uneven(c, SHARDD_WORLD, true, NULL, NULL, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "divide_by_active"));
		TRAIN_FAILS(shardd_join_even(c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "error_if_uneven"));
	}
	TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, false, &last, &shadowed, &train_err));
	TRAINER_CHECK(last == 1 && shadowed == (t->rank ? 0 : 2));
	TRAIN_OK(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, 4, SHARDD_FP32, SHARDD_SUM,
				   &train_err));
	train_leave(c);
	return 0;
}

Test(join_uneven, what_a_joined_rank_cannot_do_is_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, refused_trainer, NULL);
}

/* Ranks 0 and 1 ask for more before rank 2 has joined: that is no more input of theirs. Then
 * rank 2 goes on, with several collectives under way. */
static int even_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_ticket tickets[4];

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_join_even_submit(c, SHARDD_WORLD, &tickets[0], &train_err));
	TRAIN_OK(shardd_barrier_submit(c, SHARDD_WORLD, &tickets[1], &train_err));
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
	for (unsigned i = 0; i < 4; i++)
		if (t->rank < 2)
			TRAIN_OK(shardd_join_even_submit(c, SHARDD_WORLD, &tickets[i], &train_err));
		else
			TRAIN_OK(shardd_barrier_submit(c, SHARDD_WORLD, &tickets[i], &train_err));
	for (unsigned i = 0; i < (t->rank < 2 ? 1 : 4); i++) {
		TRAIN_FAILS(shardd_wait(c, tickets[i], -1, NULL, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "rank 2"));
	}
	if (t->rank == 2) {
		TRAIN_FAILS(shardd_join_even(c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		for (unsigned i = 1; i < 4; i++)
			TRAIN_OK(shardd_join_even(c, SHARDD_WORLD, &train_err));
	}
	for (unsigned i = 1; t->rank < 2 && i < 4; i++)
		TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_join_even_submit(c, SHARDD_WORLD, &tickets[0], &train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_wait(c, tickets[0], -1, NULL, &train_err));
	else
		TRAIN_OK(shardd_join_even(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(join_uneven, uneven_inputs_end_for_all_and_all_go_on, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, even_trainer, NULL);
}
