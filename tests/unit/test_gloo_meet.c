/* The gloo engine: members that do not come, or publish something else (gloofix.h). */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "engine/engine_impl.h"
#include "fdcheck.h"
#include "gloofix.h"

TestSuite(gloo_meet, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* Member 1 never comes. */
static void scene_absent(struct gloofix *m)
{
	if (m->rank == 1)
		return;
	gloofix_ask(m, "absent", 0, 2, 300);
	looprun_flag(&m->run, &m->ready, 10);
	EXPECT(!m->c && m->status == -ECONNABORTED);
	EXPECT(strcmp(engine_why(m->e), "member 1 did not publish its address in time") == 0);
}

Test(gloo_meet, a_member_that_does_not_come_is_named)
{
	gloofix_play(scene_absent, 2, false);
}

/* Member 1 has published something else: as many bytes as a card has, or fewer. */
static void scene_malformed(struct gloofix *m)
{
	static const struct {
		const char *prefix, *published, *why;
	} cases[] = {
		{ "garbage", "this is no card, and has as many bytes as a card",
		  "the address of member 1 is malformed" },
		{ "short", "nothing", "the members do not agree on how many they are; here: 2" },
	};

	if (m->rank == 1)
		return;
	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		char key[32];

		snprintf(key, sizeof(key), "%s/1", cases[i].prefix);
		EXPECT(gloofix_set(NULL, key, cases[i].published, strlen(cases[i].published)) == 0);
		gloofix_ask(m, cases[i].prefix, 0, 2, 2000);
		looprun_flag(&m->run, &m->ready, 10);
		EXPECT(!m->c && m->status == -ECONNABORTED);
		EXPECT(strcmp(engine_why(m->e), cases[i].why) == 0);
	}
}

Test(gloo_meet, a_malformed_address_is_refused)
{
	gloofix_play(scene_malformed, 2, false);
}

Test(gloo_meet, options_are_checked)
{
	const struct gloo_options none = { .iface = NULL }, here = { .address = "127.0.0.1" };
	struct comm_group group = { .size = 2, .member = 2, .prefix = "x" };
	struct gloofix m = { .n_failed = 0 };
	struct comm_options options = {
		.devices = &m.b, .n_devices = 1, .ready = gloofix_on_ready, .userdata = &m
	};
	struct engine *local;

	looprun_init(&m.run);
	cr_assert_eq(backend_fake_new(&m.run.queue, 0, &m.b), 0);
	cr_assert_eq(engine_gloo_new(&m.run.queue, &none, &m.e), -EINVAL);
	cr_assert_eq(engine_gloo_new(&m.run.queue, &here, &m.e), 0);
	cr_assert_eq(engine_local_new(&m.run.queue, &local), 0);
	cr_assert_eq(engine_comm_new(m.e, &options), -EINVAL, "no group");
	group.store = &gloofix_store;
	options.group = &group;
	cr_assert_eq(engine_comm_new(m.e, &options), -EINVAL, "no such member");
	cr_assert_eq(engine_comm_new(local, &options), -EOPNOTSUPP);
	engine_close(local);
	engine_close(m.e);
	backend_close(m.b);
	looprun_deinit(&m.run);
}
