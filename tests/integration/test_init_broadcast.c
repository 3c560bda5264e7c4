/*
 * Parameters from one rank to all at the start, 250 MiB at a time as DistributedDataParallel
 * coalesces them: units that come to just that are on their way together, one byte more and
 * the first of them have arrived before the next one begins. What is on its way is memory of the
 * root's, so that the most it ever took says how much that was.
 */
#include <criterion/criterion.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(init_broadcast, .timeout = 300, .init = trainfix_begin, .fini = trainfix_end);

enum { UNITS = 3, ROOT = 1, HALF = 125 << 20, SMALL = 2 << 20 };

struct scene {
	uint64_t bytes[UNITS];
	uint64_t peak; /* of all buffers that were on their way together */
	atomic_uint done;
	atomic_bool seen;
};

static float value_of(unsigned u, uint64_t i)
{
	return (float)(u + 1) + (float)(i % 1021) / 1024;
}

/* Frozen: nothing but the parameters takes memory. */
static void register_units(shardd_client *c, const uint64_t *elements, shardd_unit *ret)
{
	static const char *const names[UNITS] = { "first", "second", "third" };
	struct shardd_tensor tensors[UNITS];
	struct shardd_unit_spec specs[UNITS];
	struct shardd_unit_info info[UNITS];

	for (unsigned u = 0; u < UNITS; u++) {
		tensors[u] = (struct shardd_tensor){
			.name = "weight", .shape = &elements[u], .dims = 1, .frozen = true
		};
		specs[u] = (struct shardd_unit_spec){ .size = sizeof(specs[u]),
						      .name = names[u],
						      .tensors = &tensors[u],
						      .n_tensors = 1 };
	}
	TRAIN_OK(shardd_register(c, specs, UNITS, info, &train_err));
	for (unsigned u = 0; u < UNITS; u++) {
		TRAINER_CHECK(info[u].packed_elements == elements[u]);
		ret[u] = info[u].unit;
	}
}

static void check_unit(shardd_client *c, shardd_unit id, unsigned u, uint64_t elements)
{
	const uint64_t places[] = { 0, elements / 2, elements - 1 };
	const void *data;

	TRAIN_OK(shardd_gather(c, id, &data, &train_err));
	for (unsigned i = 0; i < ARRAY_SIZE(places); i++)
		TRAINER_CHECK(train_peek(c, (const float *)data + places[i]) ==
			      value_of(u, places[i]));
	TRAIN_OK(shardd_release(c, id, &train_err));
}

static int sender(const struct trainer *t)
{
	struct scene *s = t->arg;
	shardd_client *c = train_join(t);
	uint64_t elements[UNITS];
	const void *data[UNITS];
	shardd_unit units[UNITS];

	for (unsigned u = 0; u < UNITS; u++) {
		float *x = NULL;

		elements[u] = s->bytes[u] / sizeof(float);
		if (t->rank == ROOT)
			x = train_alloc(s->bytes[u]);
		for (uint64_t i = 0; x && i < elements[u]; i++)
			x[i] = value_of(u, i);
		data[u] = x;
	}
	register_units(c, elements, units);
	TRAIN_OK(shardd_init_broadcast_all(c, units, s->bytes, UNITS, ROOT,
					   t->rank == ROOT ? data : NULL, &train_err));
	atomic_fetch_add(&s->done, 1);
	while (!atomic_load(&s->seen))
		sched_yield();
	for (unsigned u = 0; u < UNITS; u++)
		check_unit(c, units[u], u, elements[u]);
	for (unsigned u = 0; u < UNITS; u++)
		free((void *)data[u]);
	train_leave(c);
	return 0;
}

static uint64_t peak_of_buffers(void)
{
	static const char *const args[] = { "memory", NULL };
	json_t *all = daemonfix_ctl(&trainfix, args);
	json_t *job = json_array_get(json_object_get(all, "jobs"), 0), *c;
	uint64_t peak = 0;
	size_t i;

	json_array_foreach(json_object_get(job, "memory"), i,
			   c) if (strcmp(json_string_value(json_object_get(c, "name")), "grad") ==
				  0) peak =
		(uint64_t)json_integer_value(json_object_get(c, "peak_bytes"));
	json_decref(all);
	return peak;
}

/* Slabs are made in pages of the device. */
static uint64_t slab(uint64_t bytes)
{
	uint64_t page = train_on_host() ? (uint64_t)sysconf(_SC_PAGESIZE) : 2u << 20;

	bytes = bytes > 1u << 20 ? bytes : 1u << 20;
	bytes += train_on_host() && bytes >= 32u << 20 ? 64u << 10 : 0; /* docs/semantics.md, A */
	return (bytes + page - 1) / page * page;
}

static void run_scene(const struct scene *like)
{
	struct scene *s = trainer_shared(sizeof(*s));
	pid_t pids[2];
	uint64_t peak;

	memcpy(s->bytes, like->bytes, sizeof(s->bytes));
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "large", r, 2, sender, s);
	while (atomic_load(&s->done) < 2) {
		cr_assert_eq(kill(pids[0], 0), 0);
		sched_yield();
	}
	peak = peak_of_buffers();
	atomic_store(&s->seen, true);
	for (uint32_t r = 0; r < 2; r++)
		cr_assert_eq(trainer_wait(pids[r], 120), 0);
	cr_assert_eq(peak, like->peak, "%llu bytes were on their way together, not %llu",
		     (unsigned long long)peak, (unsigned long long)like->peak);
}

/* The third is on its way alone: it finds room in what the first two gave back. */
Test(init_broadcast, as_many_units_as_come_to_250_mib_go_together)
{
	run_scene(&(struct scene){ .bytes = { HALF, HALF, SMALL }, .peak = 2 * slab(HALF) });
}

/* The second finds room in what the first gave back; the third goes with it, and does not. */
Test(init_broadcast, one_element_more_waits_for_those_before)
{
	run_scene(&(struct scene){ .bytes = { HALF + 4, HALF, SMALL },
				   .peak = slab(HALF + 4) + slab(SMALL) });
}
