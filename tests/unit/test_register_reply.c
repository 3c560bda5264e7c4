/* What ranks register and are told: packed by hand, and compared with what is known. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/regcache.h"
#include "job/registration.h"
#include "nodefix.h"
#include "unitio/registered.h"
#include "rpc/register_reply.h"

TestSuite(register_reply, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

enum { RANKS = 3, UNITS = 4 };

/* Tensors of their own, an alias of another unit, buffers, frozen ones. */
static state_unit *spec_of(unsigned i)
{
	static const char *const names[UNITS] = { "a", "b", "c", "d" };
	state_unit *u = nodefix_spec(names[i], 1 + 200000 * i);
	uint64_t shape[] = { 7, 1000 + i };
	state_tensor *t = state_tensor_new("more", shape, 2);
	state_buffer *b;

	u->layout = i % 2 ? LAYOUT_DIM0 : LAYOUT_FLAT;
	t->frozen = i == 2;
	cr_assert_eq(state_unit_add_tensor(u, t), 0);
	if (i == 3) {
		t = state_tensor_new("other name", shape, 2);
		cr_assert_eq(state_tensor_set_alias(t, "d", "more"), 0);
		cr_assert_eq(state_unit_add_tensor(u, t), 0);
	}
	for (unsigned k = 0; k < i; k++) {
		char name[16];

		snprintf(name, sizeof(name), "b%u", k);
		b = state_buffer_new(name, shape + 1, k > 0);
		b->dtype = BUFFER_FP32;
		cr_assert_eq(state_unit_add_buffer(u, b), 0);
	}
	return u;
}

static void make_units(struct job *job, uint32_t *ids)
{
	state_unit *specs[UNITS];
	struct fault f = FAULT_NULL;
	uint64_t charged;

	for (unsigned i = 0; i < UNITS; i++)
		specs[i] = spec_of(i);
	cr_assert_eq(nodefix_try_register(job, specs, UNITS, ids, &charged, &f), 0, "%s", f.text);
}

/* As protobuf-c packs the same messages. */
static uint8_t *packed(const struct job *job, const uint32_t *ids, uint32_t rank, uint64_t charged,
		       size_t *ret_n)
{
	Shardd__V1__RegisterUnitsResponse reply = SHARDD__V1__REGISTER_UNITS_RESPONSE__INIT;
	Shardd__V1__RegisteredUnit *units[UNITS];
	struct registered all[UNITS];
	uint8_t *bytes;

	for (unsigned i = 0; i < UNITS; i++) {
		cr_assert_eq(registered_init(&all[i], job, job->units[ids[i] - 1], rank), 0);
		units[i] = &all[i].unit;
	}
	reply.units = units;
	reply.n_units = UNITS;
	reply.charged_bytes = charged;
	*ret_n = protobuf_c_message_get_packed_size(&reply.base);
	bytes = malloc(*ret_n);
	protobuf_c_message_pack(&reply.base, bytes);
	for (unsigned i = 0; i < UNITS; i++)
		registered_deinit(&all[i]);
	return bytes;
}

Test(register_reply, is_what_protobuf_would_have_packed)
{
	static const uint64_t charges[] = { 0, 1, UINT64_MAX };
	struct nodefix n;
	uint32_t ids[UNITS];
	struct job *job;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", RANKS, 0);
	make_units(job, ids);
	job->units[1]->rec->initialised = true;
	job->units[2]->rec->optimizer->steps = UINT64_C(1) << 40;
	nodefix_wrote(&n);
	for (uint32_t rank = 0; rank <= RANKS; rank++) { /* the last one is in no group */
		struct register_reply r = REGISTER_REPLY_NULL;
		size_t want_n;
		uint8_t *want = packed(job, ids, rank, charges[rank % 3], &want_n);

		for (unsigned i = 0; i < UNITS; i++)
			cr_assert_eq(register_reply_add(&r, job, job->units[ids[i] - 1], rank), 0);
		cr_assert_eq(register_reply_end(&r, charges[rank % 3]), 0);
		cr_expect_eq(r.n, want_n);
		cr_expect(r.n == want_n && memcmp(r.bytes, want, want_n) == 0, "rank %u", rank);
		register_reply_deinit(&r);
		register_reply_deinit(&r);
		free(want);
	}
	nodefix_end(&n);
}

static int search(const struct job *job, const uint8_t *bytes, size_t n, size_t step,
		  const struct regcache_entry **ret)
{
	struct regcache_search s;
	int e;

	regcache_search_init(&s, job);
	do
		e = regcache_search(&s, job, bytes, n, step, ret);
	while (e == KNOWN_MORE);
	return e;
}

Test(register_reply, what_is_known_is_found_whole_and_charged)
{
	enum { N = KNOWN_MIN_BYTES + 1 };
	const struct regcache_entry *k = NULL;
	struct regcache_search s;
	uint32_t ids[] = { 3, 1, 2 };
	struct nodefix n;
	struct job *job;
	uint8_t *bytes = calloc(1, N);

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", RANKS, 0);
	regcache_add(job, bytes, KNOWN_MIN_BYTES - 1, ids, 3);
	cr_expect_eq(job->quota.used, 0, "not worth it");
	for (unsigned i = 0; i < KNOWN_MAX + 1; i++) {
		bytes[N - 1] = (uint8_t)i;
		regcache_add(job, bytes, N, ids, 3);
	}
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], KNOWN_MAX * (N + sizeof(ids)));
	cr_expect_eq(regcache_bytes(job), job->quota.used);
	for (unsigned i = 0; i < KNOWN_MAX + 1; i++) {
		bytes[N - 1] = (uint8_t)i;
		cr_expect_eq(search(job, bytes, N, 1000, &k), i ? KNOWN_YES : KNOWN_NO,
			     "%u: the oldest was replaced", i);
		cr_expect_eq(search(job, bytes, N - 1, N, &k), KNOWN_NO, "shorter");
	}
	cr_expect(k && k->n == 3 && memcmp(k->ids, ids, sizeof(ids)) == 0);
	regcache_search_init(&s, job);
	regcache_drop(job);
	cr_expect_eq(regcache_search(&s, job, bytes, N, N, &k), KNOWN_NO);
	cr_expect_eq(job->quota.used, 0);
	regcache_drop(job);
	free(bytes);
	nodefix_end(&n);
}

Test(register_reply, nothing_is_kept_that_the_quota_has_no_room_for)
{
	uint32_t id = 1;
	struct nodefix n;
	struct job *job;
	uint8_t *bytes = calloc(1, KNOWN_MIN_BYTES);
	const struct regcache_entry *k;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", RANKS, KNOWN_MIN_BYTES);
	regcache_add(job, bytes, KNOWN_MIN_BYTES, &id, 1);
	cr_expect_eq(job->quota.used, 0);
	cr_expect_eq(search(job, bytes, KNOWN_MIN_BYTES, SIZE_MAX, &k), KNOWN_NO);
	free(bytes);
	nodefix_end(&n);
}
