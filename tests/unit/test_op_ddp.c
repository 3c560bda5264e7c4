/* What a ddp outlives: ops of its epoch that still read it. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"

TestSuite(op_ddp, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

enum { RANKS = 4 };

static struct nodefix n;
static struct job *job;
static struct member *m[RANKS];
static struct nodefix_op op[RANKS];

static struct unit *unit_of(struct group *g, const char *name, unsigned first)
{
	state_unit *spec = nodefix_spec(name, 1000);

	spec->group = g->id;
	spec->strategy = STRATEGY_REPLICATE;
	spec->reduce_profile = PROFILE_DDP;
	return nodefix_unit(&n, job, spec, &m[first], 2);
}

static struct group *group_of(const char *name, uint32_t first)
{
	const uint32_t ranks[] = { first, first + 1 };
	struct fault f = FAULT_NULL;
	struct group *g = NULL;

	cr_assert_eq(job_group(job, name, ranks, 2, &g, &f), 0, "%s", f.text);
	return g;
}

static void create(const struct group *g, const struct unit *u, unsigned rank)
{
	Shardd__V1__DdpCreateRequest r = SHARDD__V1__DDP_CREATE_REQUEST__INIT;
	static Shardd__V1__DdpCreateRequest kept[RANKS]; /* read until the op is over */
	static uint32_t unit[RANKS];

	unit[rank] = u->id;
	r.group = g->id;
	r.units = &unit[rank];
	r.n_units = 1;
	kept[rank] = r;
	nodefix_submit(&n, m[rank], "DdpCreate", &kept[rank].base, &op[rank]);
}

static void create_both(const struct group *g, const struct unit *u, unsigned first)
{
	create(g, u, first);
	create(g, u, first + 1);
	nodefix_ok(&op[first], "DdpCreate");
	nodefix_ok(&op[first + 1], "DdpCreate");
}

#define ON_DDP(name, Name, UPPER)                                                              \
	static void name(unsigned rank)                                                        \
	{                                                                                      \
		Shardd__V1__##Name##Request r = SHARDD__V1__##UPPER##_REQUEST__INIT;           \
                                                                                               \
		r.ddp = 1;                                                                     \
		NODEFIX_OK(nodefix_submit(&n, m[rank], #Name, &r.base, &op[rank]), &op[rank]); \
	}
ON_DDP(forward, DdpForward, DDP_FORWARD)
ON_DDP(backward, DdpBackward, DDP_BACKWARD)

static void ready(unsigned rank)
{
	Shardd__V1__DdpReadyRequest r = SHARDD__V1__DDP_READY_REQUEST__INIT;
	static uint32_t tensor;

	r.ddp = 1;
	r.tensors = &tensor;
	r.n_tensors = 1;
	nodefix_submit(&n, m[rank], "DdpReady", &r.base, &op[rank]);
}

static void join_again(unsigned rank)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(nodefix_try_join(&n, job, rank, NULL, m[rank], &m[rank], &f), 0, "%s", f.text);
}

/* A bucket of ranks 0 and 1 is between two stages when rank 1 dies. Ranks 2 and 3 have nothing
 * under way and make a ddp in the next epoch: it used to take the place of the one that the
 * bucket reads, which was freed. */
Test(op_ddp, of_an_earlier_epoch_stays_while_a_bucket_reads_it)
{
	struct group *left, *right;
	struct unit *a, *b;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", RANKS, 0);
	for (unsigned r = 0; r < RANKS; r++)
		m[r] = nodefix_join(&n, job, r);
	left = group_of("left", 0);
	right = group_of("right", 2);
	a = unit_of(left, "a", 0);
	b = unit_of(right, "b", 2);
	create_both(left, a, 0);
	for (unsigned r = 0; r < 2; r++) {
		forward(r);
		backward(r);
	}
	backend_fake_hold(n.node.devices[0].backend, true);
	ready(0);
	ready(1);
	nodefix_turns(&n);
	cr_assert_eq(job->running, 1, "the bucket is at its first stage");
	nodefix_drop(&n, m[1], "was killed");
	join_again(2);
	join_again(3);
	create_both(right, b, 2);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_assert_eq(job->running, 0);
	/* now nobody reads it: the next one takes its place */
	create_both(right, b, 2);
	cr_assert_eq(job->ddps[0]->epoch, job->rec->epoch);
	nodefix_end(&n);
}

/* Its buckets were made without the tensor: a pass would leave its gradient as it is, and a step would
 * use that. */
Test(op_ddp, a_tensor_of_its_units_stays_frozen)
{
	static const uint64_t shape[] = { 5 };
	state_unit *spec = nodefix_spec("u", 1000);
	state_tensor *frozen = state_tensor_new("frozen", shape, 1);
	Shardd__V1__ConvertUnitsRequest r = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	uint32_t unit = 1, tensor = 1;
	struct group *g;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", RANKS, 0);
	for (unsigned i = 0; i < RANKS; i++)
		m[i] = nodefix_join(&n, job, i);
	g = group_of("left", 0);
	frozen->frozen = true;
	CHECK(state_unit_add_tensor(spec, frozen) == 0);
	spec->group = g->id;
	spec->strategy = STRATEGY_REPLICATE;
	spec->reduce_profile = PROFILE_DDP;
	create_both(g, nodefix_unit(&n, job, spec, m, 2), 0);
	r.units = &unit;
	r.unfreeze = &tensor;
	r.n_units = r.n_unfreeze = 1;
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "ConvertUnits", &r.base, &op[i]);
	for (unsigned i = 0; i < 2; i++) {
		nodefix_wait(&op[i]);
		cr_expect_eq(op[i].fault.code, FAULT_STATE);
		cr_expect(strstr(op[i].fault.text, "in the buckets of a ddp"), "%s",
			  op[i].fault.text);
	}
	cr_expect(job->units[0]->rec->tensors[1]->frozen);
	nodefix_end(&n);
}
