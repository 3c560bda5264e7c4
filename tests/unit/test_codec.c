#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "rpc/codec.h"
#include "shardd.pb-c.h"

#define MIB ((uint64_t)1 << 20)

TestSuite(codec, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30);

static int unpack(struct codec_message *m, const char *bytes, size_t n, uint64_t budget)
{
	return codec_unpack(m, &shardd__v1__register_units_request__descriptor,
			    (const uint8_t *)bytes, n, budget);
}

Test(codec, message_comes_out_as_it_went_in)
{
	Shardd__V1__RegisterUnitsRequest req = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT, *got;
	Shardd__V1__UnitSpec unit = SHARDD__V1__UNIT_SPEC__INIT, *units[300];
	struct codec_message m = CODEC_MESSAGE_NULL;
	uint8_t *bytes;
	size_t n;

	unit.name = (char *)"layers.0.attention";
	unit.pre_divide = 2.5;
	for (size_t i = 0; i < 300; i++)
		units[i] = &unit;
	req.units = units;
	req.n_units = 300;
	n = protobuf_c_message_get_packed_size(&req.base);
	bytes = malloc(n);
	protobuf_c_message_pack(&req.base, bytes);
	cr_assert_eq(unpack(&m, (char *)bytes, n, codec_budget(n)), 0);
	free(bytes); /* nothing of it is borrowed */
	got = (Shardd__V1__RegisterUnitsRequest *)m.msg;
	cr_assert_eq(got->n_units, 300);
	for (size_t i = 0; i < 300; i++) {
		cr_assert_str_eq(got->units[i]->name, "layers.0.attention");
		cr_assert_eq(got->units[i]->pre_divide, 2.5);
	}
	codec_message_deinit(&m);
	codec_message_deinit(&m);
}

Test(codec, empty_message_is_all_defaults)
{
	struct codec_message m = CODEC_MESSAGE_NULL;

	cr_assert_eq(unpack(&m, "", 0, codec_budget(0)), 0);
	cr_assert_eq(((Shardd__V1__RegisterUnitsRequest *)m.msg)->n_units, 0);
	codec_message_deinit(&m);
}

Test(codec, malformed_bytes_are_told_from_a_lack_of_memory)
{
	static const char *const bad[] = { "\x0a", "\x0a\x05\x61\x62", "\x08\x01",
					   "\xff\xff\xff\xff" };
	struct codec_message m = CODEC_MESSAGE_NULL;

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		cr_assert_eq(unpack(&m, bad[i], strlen(bad[i]), MIB), CODEC_E_MALFORMED, "%zu", i);
		cr_assert_null(m.msg);
		cr_assert_null(m.chunks);
	}
}

/* Two bytes a unit on the wire, more than a hundred in memory. */
Test(codec, message_that_swells_is_stopped_at_the_budget)
{
	size_t n = 2 * MIB;
	struct codec_message m = CODEC_MESSAGE_NULL;
	char *bytes = malloc(n);

	for (size_t i = 0; i < n; i += 2) {
		bytes[i] = '\x0a';
		bytes[i + 1] = '\0';
	}
	cr_assert_eq(unpack(&m, bytes, n, codec_budget(n)), CODEC_E_BUDGET);
	cr_assert_null(m.chunks);
	cr_assert_eq(unpack(&m, bytes, 2000, codec_budget(2000)), 0);
	cr_assert_leq(m.used, codec_budget(2000));
	codec_message_deinit(&m);
	free(bytes);
}

Test(codec, no_budget_at_all)
{
	struct codec_message m = CODEC_MESSAGE_NULL;

	cr_assert_eq(unpack(&m, "", 0, 0), CODEC_E_BUDGET);
}

Test(codec, budget_grows_with_the_message)
{
	cr_assert_eq(codec_budget(0), 64 * MIB);
	cr_assert_eq(codec_budget(MIB), 80 * MIB);
}

Test(codec, text_is_cleaned_in_place)
{
	static const struct {
		const char *in, *out;
	} table[] = {
		{ "", "" },
		{ "plain", "plain" },
		{ "line\nbreak\x7f", "line?break?" },
		{ "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80" },
		{ "\xc0\xaf", "??" },             /* too long a form */
		{ "\xe0\x80\xaf", "???" },        /* likewise */
		{ "\xed\xa0\x80", "???" },        /* half of a surrogate pair */
		{ "\xf4\x90\x80\x80", "????" },   /* past the last character */
		{ "\xf5\x80\x80\x80", "????" },   /* likewise */
		{ "cut \xe2\x82", "cut ??" },     /* in the middle */
		{ "\x80\xbf stray", "?? stray" }, /* without a head */
	};
	char buf[64];

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		strcpy(buf, table[i].in);
		codec_clean_text(buf);
		cr_assert_str_eq(buf, table[i].out, "row %zu", i);
	}
}
