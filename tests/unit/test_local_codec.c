#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "net/local_codec.h"

TestSuite(local_codec, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10);

static struct shd1_hello hello(void)
{
	struct shd1_hello f = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(f), 7, 0 }, .version = 1 };

	memset(f.token, 0x5a, sizeof(f.token));
	return f;
}

static struct shd1_get_slab get_slab(uint32_t slab)
{
	return (struct shd1_get_slab){
		.h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(struct shd1_get_slab), 8, 0 }, .slab = slab
	};
}

/* The bytes lie at the end of an allocation of their own: a read behind them is
 * seen by the address sanitizer. */
static enum res next(const void *data, size_t n, union local_frame *frame, size_t *size,
		     struct fault *f)
{
	uint8_t *copy = malloc(n ? n : 1);
	enum res r;

	memcpy(copy, data, n);
	*f = FAULT_NULL;
	r = local_codec_next(copy, n, frame, size, f);
	free(copy);
	return r;
}

Test(local_codec, whole_frames_come_out_as_they_went_in)
{
	struct shd1_hello h = hello();
	struct shd1_get_slab g = get_slab(42);
	union local_frame frame;
	struct fault f;
	size_t size = 0;

	cr_assert_eq(next(&h, sizeof(h), &frame, &size, &f), RES_DONE);
	cr_assert_eq(size, sizeof(h));
	cr_assert_eq(memcmp(&frame.hello, &h, sizeof(h)), 0);
	cr_assert_eq(next(&g, sizeof(g), &frame, &size, &f), RES_DONE);
	cr_assert_eq(size, sizeof(g));
	cr_assert_eq(frame.get_slab.slab, 42);
	cr_assert_eq(frame.h.tag, 8);
}

Test(local_codec, every_proper_prefix_waits_for_more)
{
	struct shd1_hello h = hello();
	struct shd1_get_slab g = get_slab(1);
	union local_frame frame;
	struct fault f;
	size_t size = 12345;

	for (size_t n = 0; n < sizeof(h); n++)
		cr_assert_eq(next(&h, n, &frame, &size, &f), RES_WAIT, "%zu bytes", n);
	for (size_t n = 0; n < sizeof(g); n++)
		cr_assert_eq(next(&g, n, &frame, &size, &f), RES_WAIT, "%zu bytes", n);
	cr_assert_eq(size, 12345, "written only on success");
}

Test(local_codec, only_the_first_frame_is_taken)
{
	uint8_t data[sizeof(struct shd1_hello) + sizeof(struct shd1_get_slab)];
	struct shd1_hello h = hello();
	struct shd1_get_slab g = get_slab(3);
	union local_frame frame;
	struct fault f;
	size_t size;

	memcpy(data, &h, sizeof(h));
	memcpy(data + sizeof(h), &g, sizeof(g));
	cr_assert_eq(next(data, sizeof(data), &frame, &size, &f), RES_DONE);
	cr_assert_eq(frame.h.type, SHD1_HELLO);
	cr_assert_eq(next(data + size, sizeof(data) - size, &frame, &size, &f), RES_DONE);
	cr_assert_eq(frame.h.type, SHD1_GET_SLAB);
	cr_assert_eq(size, sizeof(g));
}

Test(local_codec, wrong_magic_is_seen_at_its_first_byte)
{
	const uint32_t magic = SHD1_MAGIC;
	uint8_t data[4];
	union local_frame frame;
	struct fault f;
	size_t size;

	for (size_t i = 0; i < sizeof(data); i++) {
		memcpy(data, &magic, sizeof(data));
		data[i] ^= 0x20;
		cr_assert_eq(next(data, i, &frame, &size, &f), RES_WAIT);
		cr_assert_eq(next(data, i + 1, &frame, &size, &f), RES_FAILED);
		cr_assert_eq(f.code, FAULT_INVALID);
		cr_assert_str_eq(f.field, "magic");
	}
}

/* One word of a good frame is spoilt; the field named must be it. */
struct spoil {
	size_t offset;
	uint16_t value;
	const char *field;
};

static void check_spoilt(const void *good, size_t n, const struct spoil *s, size_t n_spoils)
{
	for (size_t i = 0; i < n_spoils; i++) {
		uint8_t data[SHD1_MAX_FRAME];
		union local_frame frame;
		struct fault f;
		size_t size = 1;

		memcpy(data, good, n);
		memcpy(data + s[i].offset, &s[i].value, sizeof(s[i].value));
		cr_assert_eq(next(data, n, &frame, &size, &f), RES_FAILED, "case %zu", i);
		cr_assert_eq(f.code, FAULT_INVALID);
		cr_assert_str_eq(f.field, s[i].field, "case %zu: %s", i, f.field);
		cr_assert_neq(f.text[0], '\0');
		cr_assert_eq(size, 1);
	}
}

Test(local_codec, every_field_of_a_hello_is_checked)
{
	const struct spoil spoils[] = {
		{ offsetof(struct shd1_header, type), 0, "type" },
		{ offsetof(struct shd1_header, type), SHD1_WELCOME, "type" },
		{ offsetof(struct shd1_header, type), SHD1_SLAB, "type" },
		{ offsetof(struct shd1_header, type), SHD1_ERROR, "type" },
		{ offsetof(struct shd1_header, type), SHD1_RING, "type" },
		{ offsetof(struct shd1_header, type), 8, "type" },
		{ offsetof(struct shd1_header, type), 65535, "type" },
		{ offsetof(struct shd1_header, type), SHD1_GET_SLAB, "bytes" },
		{ offsetof(struct shd1_header, type), SHD1_GET_RING, "bytes" },
		{ offsetof(struct shd1_header, bytes), 0, "bytes" },
		{ offsetof(struct shd1_header, bytes), 16, "bytes" },
		{ offsetof(struct shd1_header, bytes), 39, "bytes" },
		{ offsetof(struct shd1_header, bytes), 41, "bytes" },
		{ offsetof(struct shd1_header, bytes), 65535, "bytes" },
		{ offsetof(struct shd1_header, zero), 1, "zero" },
		{ offsetof(struct shd1_header, zero) + 2, 0x8000, "zero" },
		{ offsetof(struct shd1_hello, version), 0, "version" },
		{ offsetof(struct shd1_hello, zero), 1, "zero" },
	};
	struct shd1_hello h = hello();

	check_spoilt(&h, sizeof(h), spoils, ARRAY_SIZE(spoils));
}

Test(local_codec, every_field_of_a_get_slab_is_checked)
{
	const struct spoil spoils[] = {
		{ offsetof(struct shd1_header, bytes), 23, "bytes" },
		{ offsetof(struct shd1_header, bytes), 25, "bytes" },
		{ offsetof(struct shd1_header, zero), 1, "zero" },
		{ offsetof(struct shd1_get_slab, zero), 1, "zero" },
		{ offsetof(struct shd1_get_slab, zero) + 2, 1, "zero" },
	};
	struct shd1_get_slab g = get_slab(1);

	check_spoilt(&g, sizeof(g), spoils, ARRAY_SIZE(spoils));
}

Test(local_codec, wrong_size_is_seen_before_the_body_came)
{
	struct shd1_hello h = hello();
	union local_frame frame;
	struct fault f;
	size_t size;

	h.h.bytes = 500;
	cr_assert_eq(next(&h, sizeof(h.h), &frame, &size, &f), RES_FAILED);
	cr_assert_eq(f.code, FAULT_INVALID);
}

Test(local_codec, newer_version_is_accepted)
{
	struct shd1_hello h = hello();
	union local_frame frame;
	struct fault f;
	size_t size;

	h.version = 9;
	cr_assert_eq(next(&h, sizeof(h), &frame, &size, &f), RES_DONE);
	cr_assert_eq(frame.hello.version, 9);
}

Test(local_codec, error_frame_is_complete_and_terminated)
{
	struct fault f = FAULT_NULL;
	struct shd1_error e;
	char text[400];

	memset(text, 'a', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	memset(&e, 0xff, sizeof(e));
	fault_set(&f, FAULT_NOT_FOUND, NULL, "%s", text);
	local_codec_error(&e, 9, 5, 1, &f);
	cr_assert_eq(e.h.magic, SHD1_MAGIC);
	cr_assert_eq(e.h.type, SHD1_ERROR);
	cr_assert_eq(e.h.bytes, sizeof(e));
	cr_assert_eq(e.h.tag, 9);
	cr_assert_eq(e.h.zero, 0);
	cr_assert_eq(e.code, 5);
	cr_assert_eq(e.fatal, 1);
	cr_assert_eq(strlen(e.text), sizeof(e.text) - 1);
	cr_assert_eq(memcmp(e.text, text, sizeof(e.text) - 1), 0);
}

Test(local_codec, short_error_text_is_padded_with_zeros)
{
	struct fault f = FAULT_NULL;
	struct shd1_error e;

	memset(&e, 0xff, sizeof(e));
	fault_set(&f, FAULT_STATE, NULL, "no");
	local_codec_error(&e, 0, 9, 0, &f);
	cr_assert_str_eq(e.text, "no");
	for (size_t i = 2; i < sizeof(e.text); i++)
		cr_assert_eq(e.text[i], '\0');
}
