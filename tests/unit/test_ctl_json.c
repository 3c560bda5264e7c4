#include <criterion/criterion.h>
#include <stdlib.h>

#include "json/json.h"
#include "fdcheck.h"
#include "health.pb-c.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

TestSuite(ctl_json, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

/* Convert @m, which must give @expected (compact). */
static void expect(const ProtobufCMessage *m, const char *expected)
{
	json_t *j = json_from_message(m);
	char *text = json_dumps(j, JSON_COMPACT);

	cr_assert_not_null(text);
	cr_expect_str_eq(text, expected);
	free(text);
	json_decref(j);
}

Test(ctl_json, every_field_is_there)
{
	Shardd__V1__DeviceStatus d = SHARDD__V1__DEVICE_STATUS__INIT;

	expect(&d.base,
	       "{\"id\":\"\",\"backend\":\"\",\"capacity_bytes\":0,\"used_bytes\":0,"
	       "\"quarantined_bytes\":0,\"classes\":{},\"uuid\":\"\",\"kernels\":\"\",\"detail\":"
	       "\"\",\"order\":\"\",\"mode\":\"\",\"lost\":\"\",\"overhead_bytes\":0}");
}

Test(ctl_json, classes_are_one_object)
{
	Shardd__V1__ClassBytes shard = SHARDD__V1__CLASS_BYTES__INIT;
	Shardd__V1__ClassBytes full = SHARDD__V1__CLASS_BYTES__INIT;
	Shardd__V1__ClassBytes *classes[] = { &shard, &full };
	Shardd__V1__DeviceStatus d = SHARDD__V1__DEVICE_STATUS__INIT;

	shard.name = "shard";
	shard.bytes = 1ull << 40;
	full.name = "full";
	d.id = "host:0";
	d.backend = "host";
	d.capacity_bytes = UINT64_MAX;
	d.classes = classes;
	d.n_classes = 2;
	expect(&d.base, "{\"id\":\"host:0\",\"backend\":\"host\","
			"\"capacity_bytes\":9223372036854775807,\"used_bytes\":0,"
			"\"quarantined_bytes\":0,\"classes\":{\"shard\":1099511627776,\"full\":0},"
			"\"uuid\":\"\",\"kernels\":\"\",\"detail\":\"\",\"order\":\"\",\"mode\":"
			"\"\",\"lost\":\"\",\"overhead_bytes\":0}");
}

Test(ctl_json, lists_and_signs_and_booleans)
{
	uint32_t ranks[] = { 0, 4294967295u };
	Shardd__V1__UnitStatus u = SHARDD__V1__UNIT_STATUS__INIT;
	Shardd__V1__SlabStatus s = SHARDD__V1__SLAB_STATUS__INIT;
	json_t *j;

	u.gathered_by = ranks;
	u.n_gathered_by = 2;
	u.initialised = true;
	j = json_from_message(&u.base);
	cr_expect_eq(json_array_size(json_object_get(j, "gathered_by")), 2);
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(j, "gathered_by"), 1)),
		     4294967295);
	cr_expect(json_is_true(json_object_get(j, "initialised")));
	cr_expect(json_is_false(json_object_get(j, "has_gradient")));
	json_decref(j);
	s.owner_rank = -1;
	s.class_ = "grad";
	j = json_from_message(&s.base);
	cr_expect_eq(json_integer_value(json_object_get(j, "owner_rank")), -1);
	cr_expect_str_eq(json_string_value(json_object_get(j, "class")), "grad");
	json_decref(j);
}

Test(ctl_json, messages_inside_messages)
{
	Shardd__V1__RankStatus rank = SHARDD__V1__RANK_STATUS__INIT;
	Shardd__V1__RankStatus *ranks[] = { &rank };
	Shardd__V1__JobStatus job = SHARDD__V1__JOB_STATUS__INIT;
	Shardd__V1__JobStatus *jobs[] = { &job };
	Shardd__V1__GetStatusResponse s = SHARDD__V1__GET_STATUS_RESPONSE__INIT;
	const char *name = NULL;
	const char *state = NULL;
	json_t *j;

	rank.state = SHARDD__V1__RANK_STATE__RANK_STATE_JOINED;
	job.name = "train";
	job.ranks = ranks;
	job.n_ranks = 1;
	s.jobs = jobs;
	s.n_jobs = 1;
	j = json_from_message(&s.base);
	cr_assert_eq(json_unpack(j, "{s:[{s:s, s:[{s:s}]}]}", "jobs", "name", &name, "ranks",
				 "state", &state),
		     0);
	cr_expect_str_eq(name, "train");
	cr_expect_str_eq(state, "JOINED");
	cr_expect_eq(json_array_size(json_object_get(j, "sessions")), 0);
	json_decref(j);
}

Test(ctl_json, enums_are_names)
{
	Grpc__Health__V1__HealthCheckResponse h = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

	h.status = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
	expect(&h.base, "{\"status\":\"SERVING\"}");
}

Test(ctl_json, a_message_that_is_not_there_is_null)
{
	Shardd__V1__GatherResponse g = SHARDD__V1__GATHER_RESPONSE__INIT;

	g.references = 3;
	expect(&g.base, "{\"info\":null,\"place\":null,\"references\":3,\"copied\":false}");
}

Test(ctl_json, text_that_is_no_utf8_is_still_text)
{
	json_t *j = json_from_text("a\xff"
				   "b");

	cr_expect_str_eq(json_string_value(j), "a?b");
	json_decref(j);
}
