/* Initialise with the parameters in the message, which the library never sends: what
 * a client that speaks gRPC alone can do. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "rawcall.h"
#include "trainfix.h"

enum { N = 1537 };

static struct rpc_pending *start_init(struct rpc_client *c, uint32_t unit, bool own,
				      const float *values, size_t bytes)
{
	Shardd__V1__InitialiseRequest request = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__FromRank from = SHARDD__V1__FROM_RANK__INIT;
	Shardd__V1__Own every = SHARDD__V1__OWN__INIT;

	request.unit = unit;
	request.how_case = own ? SHARDD__V1__INITIALISE_REQUEST__HOW_OWN
			       : SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
	if (own)
		request.own = &every;
	else
		request.broadcast = &from;
	request.data.data = (uint8_t *)values;
	request.data.len = bytes;
	return raw_start(c, "Initialise", &request.base);
}

static void must_end_well(struct rpc_pending *p)
{
	struct shardd_error err = { 0 };

	TRAINER_CHECK(raw_finish(p, NULL, &err) == 0);
}

/* Rank 0 speaks gRPC, rank 1 is a session of the library and looks at the outcome. */
static int trainer(const struct trainer *t)
{
	struct trainer other = { t->socket, t->job, 1, 2, NULL };
	shardd_client *c = train_join(&other);
	shardd_unit u = train_register(c, "unit", N, NULL).unit;
	struct rpc_client *raw = raw_trainer(t->socket, t->job, 0, 2, false);
	float *mine = train_numbers(N, 1), *others = train_numbers(N, 2), got[N];
	size_t shard = (N + 1) / 2;
	struct rpc_pending *p;
	uint64_t buffer;
	void *data;

	p = start_init(raw, u, false, others, sizeof(got));
	TRAIN_OK(shardd_init_broadcast(c, u, 0, 0, &train_err));
	must_end_well(p);
	train_params(c, u, got, sizeof(got));
	TRAIN_SAME(got, others, sizeof(got));

	/* each its own shard: rank 0's from the message, rank 1's from a buffer */
	TRAIN_OK(shardd_alloc(c, sizeof(got), &buffer, &data, &train_err));
	train_write(c, data, mine, sizeof(got));
	p = start_init(raw, u, true, others, sizeof(got));
	TRAIN_OK(shardd_init_own(c, u, buffer, &train_err));
	must_end_well(p);
	memcpy(mine, others, shard * sizeof(float));
	train_params(c, u, got, sizeof(got));
	TRAIN_SAME(got, mine, sizeof(got));

	/* one byte less is refused, on both ranks, and changes nothing */
	p = start_init(raw, u, true, mine, sizeof(got) - 1);
	raw_finish_refused(p, SHARDD_INVALID_ARGUMENT, "data", "unit 'unit'");
	train_params(c, u, got, sizeof(got));
	TRAIN_SAME(got, mine, sizeof(got));
	free(mine);
	free(others);
	rpc_client_close(raw);
	shardd_close(c);
	return 0;
}

Test(inline_data, initialises_a_unit, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	const char *delete[] = { "job", "delete", "test", NULL };
	char out[512];
	int code = trainer_wait(trainer_start(&trainfix, "test", 0, 1, trainer, NULL), 60);

	cr_assert_eq(code, 0);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, delete, out, sizeof(out)), 0, "%s", out);
}
