/* Reductions of small units that wait at the same time: one task, one collective, the bits
 * of each by itself, and each ended by itself. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"

enum { UNITS = 7, MOST = 4 };

TestSuite(reduce_batch, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

struct world {
	struct nodefix n;
	struct job *job;
	struct member *m[MOST];
	unsigned ranks;
	struct unit *u[UNITS];
	struct nodefix_op op[UNITS][MOST];
};

/* Of different sizes, layouts and dtypes; the last is larger than a batch may be. */
static const uint64_t sizes[UNITS] = { 1, 1000, 77, 5, 1000, 333, 300000 };

static state_unit *spec_of(unsigned i)
{
	char name[8];
	state_unit *spec;

	snprintf(name, sizeof(name), "u%u", i);
	spec = nodefix_spec(name, sizes[i]);
	spec->gradient_dtype = i % 2 ? DTYPE_BF16 : DTYPE_FP32;
	spec->layout = i == 4 ? LAYOUT_DIM0 : 0;
	spec->reduce_profile = i == 3 ? PROFILE_FSDP1_HOOK : 0; /* adds in bf16 */
	spec->strategy = i == 5 ? STRATEGY_REPLICATE : 0;
	return spec;
}

static void test_reduce_batch_begin(struct world *w, unsigned devices, unsigned ranks,
				    uint64_t batch)
{
	const struct nodefix_options o = { .devices = devices };

	*w = (struct world){ .ranks = ranks };
	nodefix_begin(&w->n, &o);
	w->n.node.limits.reduce_batch_bytes = batch;
	w->job = nodefix_job(&w->n, "job", ranks, 0);
	for (unsigned r = 0; r < ranks; r++)
		w->m[r] = nodefix_join(&w->n, w->job, r);
	for (unsigned i = 0; i < UNITS; i++)
		w->u[i] = nodefix_unit(&w->n, w->job, spec_of(i), w->m, ranks);
}

static void hold(struct world *w, bool on)
{
	for (unsigned d = 0; d < w->n.node.n_devices; d++)
		backend_fake_hold(w->n.node.devices[d].backend, on);
}

static void fill(const struct unit *u, const struct region *place, unsigned seed)
{
	struct k_fill a = { .dst = calloc(u->layout.elements, sizeof(float)),
			    .seed = seed,
			    .kind = FILL_UNIFORM,
			    .a = -1,
			    .b = 1 };
	struct k_cast to = { region_addr(place), a.dst, (enum dtype)u->rec->gradient_dtype,
			     DTYPE_FP32, false };

	CHECK(a.dst);
	kernels_ref()->fill(&a, 0, u->layout.elements);
	kernels_ref()->cast(&to, 0, u->layout.elements);
	free(a.dst);
}

static void hand_in(struct world *w, unsigned pass)
{
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned r = 0; r < w->ranks; r++) {
			struct nodefix_op *op = &w->op[i][r];

			NODEFIX_OK(nodefix_on_unit(&w->n, w->m[r], "GradientBuffer", w->u[i], op),
				   op);
			fill(w->u[i], &op->result.place, 1000 * pass + 10 * i + r);
		}
}

static unsigned calls_of(const struct world *w)
{
	return backend_fake_calls(w->n.node.devices[0].backend) +
	       (w->n.node.engine ? 1000 * engine_fake_calls(w->n.node.engine) : 0);
}

/* All at once: the first begins, and while it is held the others wait. Return: tasks, and
 * a thousand times the collectives between devices. */
static unsigned reduce_all(struct world *w)
{
	unsigned calls = calls_of(w);

	hold(w, true);
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned r = 0; r < w->ranks; r++)
			nodefix_on_unit(&w->n, w->m[r], "Reduce", w->u[i], &w->op[i][r]);
	nodefix_turns(&w->n);
	hold(w, false);
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned r = 0; r < w->ranks; r++)
			nodefix_ok(&w->op[i][r], "Reduce");
	return calls_of(w) - calls;
}

/* Gradients of all units after two passes, and how many tasks that took. */
static unsigned gradients(unsigned devices, unsigned ranks, uint64_t batch, float *ret)
{
	static struct world w;
	unsigned tasks = 0;

	test_reduce_batch_begin(&w, devices, ranks, batch);
	for (unsigned pass = 0; pass < 2; pass++) {
		hand_in(&w, pass);
		tasks += reduce_all(&w);
	}
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned d = 0; d < w.u[i]->n_parts; d++) {
			const struct unit_part *p = &w.u[i]->parts[d];

			if (p->n)
				memcpy(ret, region_addr(&p->grads), p->n * sizeof(float));
			ret += p->n;
		}
	for (unsigned d = 0; d < w.n.node.n_devices; d++)
		cr_expect_eq(w.job->mem.scratch[d].used, 0);
	nodefix_end(&w.n);
	return tasks;
}

Test(reduce_batch, has_the_bits_of_each_by_itself_in_fewer_tasks)
{
	enum { ROOM = 400000 };
	float *want = calloc(ROOM, sizeof(float)), *got = calloc(ROOM, sizeof(float));

	cr_assert(want && got);
	for (unsigned devices = 2; devices <= 3; devices++)
		for (unsigned ranks = devices; ranks <= MOST; ranks++) {
			unsigned alone, together;

			memset(want, 0, ROOM * sizeof(float));
			memset(got, 0, ROOM * sizeof(float));
			alone = gradients(devices, ranks, 0, want);
			together = gradients(devices, ranks, 1 << 16, got);
			cr_expect_eq(memcmp(want, got, ROOM * sizeof(float)), 0, "%u on %u", ranks,
				     devices);
			cr_expect_lt(together % 1000, alone % 1000, "%u on %u: %u tasks, %u alone",
				     ranks, devices, together % 1000, alone % 1000);
			cr_expect(together / 1000 < alone / 1000,
				  "%u on %u: %u collectives, %u alone", ranks, devices,
				  together / 1000, alone / 1000);
		}
	free(want);
	free(got);
}

/* They are in the batch, or wait for it: none is forgotten. */
Test(reduce_batch, a_death_ends_all_that_wait)
{
	static struct world w;

	test_reduce_batch_begin(&w, 2, 2, 1 << 16);
	hand_in(&w, 0);
	hold(&w, true);
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned r = 0; r < w.ranks; r++)
			nodefix_on_unit(&w.n, w.m[r], "Reduce", w.u[i], &w.op[i][r]);
	nodefix_turns(&w.n);
	cr_expect_eq(w.job->running, UNITS);
	nodefix_drop(&w.n, w.m[1], "died");
	hold(&w, false);
	nodefix_turns(&w.n);
	cr_expect_eq(w.job->running, 0);
	for (unsigned i = 0; i < UNITS; i++) {
		cr_expect(w.op[i][0].over);
		cr_expect_not(w.u[i]->has_gradient);
	}
	cr_expect_eq(w.op[UNITS - 2][0].fault.code, FAULT_ABORTED, "it had not begun");
	nodefix_end(&w.n);
}

/* A job that is deleted while a batch runs and others wait goes when all have ended. */
Test(reduce_batch, a_job_may_be_deleted_meanwhile)
{
	static struct world w;
	struct fault f = FAULT_NULL;

	test_reduce_batch_begin(&w, 2, 2, 1 << 16);
	hand_in(&w, 0);
	hold(&w, true);
	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned r = 0; r < w.ranks; r++)
			nodefix_on_unit(&w.n, w.m[r], "Reduce", w.u[i], &w.op[i][r]);
	nodefix_turns(&w.n);
	cr_assert_eq(job_delete(w.job, true, NULL, &f), 0, "%s", f.text);
	hold(&w, false);
	nodefix_turns(&w.n);
	nodefix_end(&w.n);
}

/* A device that fails the task of a batch fails all of it, and the next one runs. */
Test(reduce_batch, fails_as_a_whole)
{
	static struct world w;
	unsigned failed = 0;

	test_reduce_batch_begin(&w, 2, 2, 1 << 16);
	hand_in(&w, 0);
	hold(&w, true);
	for (unsigned i = 0; i + 1 < UNITS; i++)
		for (unsigned r = 0; r < w.ranks; r++)
			nodefix_on_unit(&w.n, w.m[r], "Reduce", w.u[i], &w.op[i][r]);
	nodefix_turns(&w.n);
	backend_fake_fail(w.n.node.devices[0].backend, 1, -EIO);
	hold(&w, false);
	nodefix_turns(&w.n);
	for (unsigned i = 0; i + 1 < UNITS; i++) {
		cr_expect(w.op[i][0].over && w.op[i][1].over);
		cr_expect_eq(w.op[i][0].fault.code, w.op[i][1].fault.code);
		failed += w.op[i][0].fault.code != 0;
		cr_expect_eq(w.u[i]->has_gradient, !w.op[i][0].fault.code);
	}
	cr_expect_geq(failed, 2, "%u failed", failed);
	cr_expect_lt(failed, UNITS - 1);
	cr_expect_eq(w.job->running, 0);
	nodefix_end(&w.n);
}
