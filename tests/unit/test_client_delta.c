/*
 * Deltas as they come from anywhere: what is applied, and that nothing outside of a tensor is written, whatever
 * they say, also where all of their checksums are right.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "crc32c.h"
#include "delta_abi.h"
#include "shardd/shardd.h"

enum { FIRST = 100, SECOND = 7, PAYLOAD = 256 };

/* Two tensors: of bf16, three values of which change, and of fp32, all of which do. */
static struct made {
	struct delta_head head;
	struct delta_block blocks[2];
	char payload[PAYLOAD];
} made __attribute__((aligned(8)));

static uint16_t a[FIRST + 1];
static float b[SECOND + 1];
static const struct shardd_published_tensor tensors[] = {
	{ .name = "a", .dtype = SHARDD_BF16, .bytes = FIRST * sizeof(a[0]) },
	{ .name = "b", .dtype = SHARDD_FP32, .bytes = SECOND * sizeof(b[0]) },
};
static void *copies[] = { a, b };

/* All checksums are right for what is there. */
static void seal(void)
{
	for (unsigned i = 0; i < 2; i++)
		made.blocks[i].crc = crc32c_add(0, made.payload + made.blocks[i].at,
						delta_block_bytes(&made.blocks[i]));
	made.head.crc = 0;
	made.head.crc = crc32c_add(0, &made, sizeof(made.head) + sizeof(made.blocks));
}

static void make(void)
{
	static const uint16_t positions[] = { 3, 50, 99 }, values[] = { 30, 500, 990 };

	memset(&made, 0, sizeof(made));
	memset(a, 0, sizeof(a));
	memset(b, 0, sizeof(b));
	made.head = (struct delta_head){ .magic = DELTA_MAGIC,
					 .version = DELTA_VERSION,
					 .number = 2,
					 .base_number = 1,
					 .bytes = sizeof(made),
					 .blocks = 2,
					 .payload = offsetof(struct made, payload) };
	made.blocks[0] = (struct delta_block){ .n = FIRST, .changed = 3, .size = 2 };
	made.blocks[1] = (struct delta_block){
		.at = 64, .tensor = 1, .n = SECOND, .changed = SECOND, .dense = 1, .size = 4
	};
	memcpy(made.payload, positions, sizeof(positions));
	memcpy(made.payload + 8, values, sizeof(values));
	for (unsigned i = 0; i < SECOND; i++) {
		float value = (float)(i + 1);

		memcpy(made.payload + 64 + i * sizeof(value), &value, sizeof(value));
	}
	seal();
}

TestSuite(client_delta, .init = make, .timeout = 10);

static int apply(struct shardd_error *err)
{
	return shardd_delta_apply(&made, sizeof(made), tensors, 2, copies, 0, err);
}

Test(client_delta, changes_what_it_says)
{
	struct shardd_error err;
	uint64_t indices[3], n = 0;
	uint16_t values[3];

	cr_assert_eq(apply(&err), 0, "%s", err.text);
	for (unsigned i = 0; i < FIRST; i++)
		cr_assert_eq(a[i], i == 3 ? 30 : i == 50 ? 500 : i == 99 ? 990 : 0);
	for (unsigned i = 0; i < SECOND; i++)
		cr_assert_eq(b[i], (float)(i + 1));
	cr_assert_eq(shardd_delta_values(&made, sizeof(made), tensors, 2, 0, indices, values, 3, &n,
					 &err),
		     0);
	cr_assert_eq(n, 3);
	cr_assert(indices[1] == 50 && values[1] == 500);
	cr_assert_eq(shardd_delta_values(&made, sizeof(made), tensors, 2, 0, indices, values, 2, &n,
					 &err),
		     -SHARDD_INVALID_ARGUMENT);
	cr_assert_str_eq(err.field, "room");
	cr_assert_eq(shardd_delta_values(&made, sizeof(made), tensors, 2, 5, NULL, NULL, 0, &n,
					 &err),
		     0);
	cr_assert_eq(n, 0, "it has nothing of such a tensor");
}

/* Refused, and neither copy has changed. */
static void refused(int code, const char *words)
{
	struct shardd_error err;

	cr_assert_eq(apply(&err), -code, "%s: %s", words, err.text);
	cr_assert(strstr(err.text, words), "%s: %s", words, err.text);
	for (unsigned i = 0; i <= FIRST; i++)
		cr_assert_eq(a[i], 0, "%s", words);
	for (unsigned i = 0; i <= SECOND; i++)
		cr_assert_eq(b[i], 0, "%s", words);
	make();
}

Test(client_delta, writes_nothing_outside_of_a_tensor)
{
	((uint16_t *)made.payload)[2] = FIRST;
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "a position lies outside of its block");
	made.blocks[0].first = 1;
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "which is a");
	made.blocks[0].n = FIRST + 1;
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "elements 0 to 101 of tensor 0, which is a");
	made.blocks[0].first = UINT64_MAX;
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "other tensors");
	made.blocks[1].tensor = 2;
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "other tensors");
	made.blocks[1].tensor = 0;
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "other tensors");
	made.blocks[1].at = PAYLOAD - 8;
	made.head.crc = 0;
	made.head.crc = crc32c_add(0, &made, sizeof(made.head) + sizeof(made.blocks));
	refused(SHARDD_INVALID_ARGUMENT, "a block lies outside of it");
	made.blocks[1].size = 3;
	made.head.crc = 0;
	made.head.crc = crc32c_add(0, &made, sizeof(made.head) + sizeof(made.blocks));
	refused(SHARDD_INVALID_ARGUMENT, "a block lies outside of it");
}

/* The values of tensor 0 are refused, and nothing was written behind arrays for @room of its type. */
static void values_refused(uint64_t room, const char *words)
{
	struct shardd_error err;
	uint64_t indices[FIRST], n = 77;
	uint16_t values[FIRST];

	memset(values, 0xee, sizeof(values));
	cr_assert_eq(shardd_delta_values(&made, sizeof(made), tensors, 2, 0, indices, values, room,
					 &n, &err),
		     -SHARDD_INVALID_ARGUMENT, "%s: %s", words, err.text);
	cr_assert(strstr(err.text, words), "%s: %s", words, err.text);
	cr_assert_eq(n, 77);
	for (uint64_t i = room; i < FIRST; i++)
		cr_assert_eq(values[i], 0xeeee, "%s", words);
	make();
}

/* The size of elements was the delta's, in memory of the tensor's type; indices were anything. */
Test(client_delta, values_are_inside_of_the_tensor)
{
	made.blocks[0] = (struct delta_block){ .n = 7, .dense = 1, .size = 4 };
	seal();
	values_refused(7, "which is a");
	((uint16_t *)made.payload)[2] = FIRST;
	seal();
	values_refused(3, "a position lies outside of its block");
	((uint16_t *)made.payload)[2] = 50;
	seal();
	values_refused(3, "the positions of a block do not ascend");
	made.blocks[0].first = UINT64_MAX - 200;
	seal();
	values_refused(3, "other tensors");
}

/* Many blocks of the same elements took as long, and as much memory, as all of them together. */
Test(client_delta, blocks_do_not_overlap)
{
	made.blocks[1] = made.blocks[0];
	seal();
	values_refused(6, "its blocks are not in order");
	made.blocks[1] = made.blocks[0];
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "its blocks are not in order");
	made.blocks[0] =
		(struct delta_block){ .at = 64, .tensor = 1, .n = 7, .dense = 1, .size = 4 };
	made.blocks[1] = (struct delta_block){ .n = FIRST, .size = 2 };
	seal();
	refused(SHARDD_INVALID_ARGUMENT, "its blocks are not in order");
}

Test(client_delta, is_checked_as_a_whole_first)
{
	made.payload[65] ^= 1; /* of the last block */
	refused(SHARDD_DATA_LOSS, "block 1 of the delta to generation 2");
	made.head.number++;
	refused(SHARDD_DATA_LOSS, "the head of the delta");
	made.head.blocks = 1u << 30;
	refused(SHARDD_INVALID_ARGUMENT, "its blocks lie outside of it");
	made.head.payload = sizeof(made) + 8;
	refused(SHARDD_INVALID_ARGUMENT, "its blocks lie outside of it");
	made.head.bytes--;
	refused(SHARDD_INVALID_ARGUMENT, "bytes, not");
	made.head.version++;
	refused(SHARDD_UNIMPLEMENTED, "version 2");
	made.head.magic++;
	refused(SHARDD_INVALID_ARGUMENT, "it does not begin as one does");
}
