/*
 * Streams of server reflection, the one call on which a client may send many messages: with
 * garbage, with more requests than anybody needs, and with answers that nobody reads.
 */
#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "attack.h"
#include "fdcheck.h"
#include "rawsock.h"

TestSuite(gate_reflection, .timeout = 200, .init = fdcheck_begin, .fini = fdcheck_end);

#define INFO "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

enum { STREAMS = 1000, ROUND = 50, ANSWERED = 64, AFTER_MS = 300 };

/* A list of services, and the largest file. */
static const char list[] = "\0\0\0\0\2\x3a";
static const char file[] = "\0\0\0\0\x18\x1a\x16shardd/v1/shardd.proto";

/* @n calls from stream @first on, each with @times @message of @bytes in one frame, without an
 * end. All of it is within HTTP/2's first window. */
static void open_streams(int fd, uint32_t first, unsigned n, const void *message, size_t bytes,
			 unsigned times)
{
	struct attack_bytes b = { .n = 0 };
	uint8_t body[512];

	cr_assert(bytes * times <= sizeof(body) && n * bytes * times < 65536);
	for (unsigned i = 0; i < times; i++)
		memcpy(body + i * bytes, message, bytes);
	for (unsigned i = 0; i < n; i++) {
		attack_put_headers(&b, first + 2 * i, INFO);
		attack_put_frame(&b, H2_DATA, 0, first + 2 * i, body, bytes * times);
	}
	cr_assert(attack_flush(&b, fd));
}

/* Until the daemon has ended @n streams. Return: bytes of the answers. */
static uint64_t read_answers(const struct attack *a, int fd, unsigned n)
{
	uint8_t head[9], body[16384];
	unsigned ended = 0;
	uint64_t sum = 0;

	while (ended < n && rawsock_read(fd, head, sizeof(head), 30)) {
		size_t bytes = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];

		if (bytes > sizeof(body) || !rawsock_read(fd, body, bytes, 30))
			break;
		sum += head[3] == H2_DATA ? bytes : 0;
		ended += head[3] == H2_HEADERS && (head[4] & H2_END_STREAM);
	}
	cr_expect_eq(ended, n, "%s: %u streams have ended", a->name, ended);
	return sum;
}

/* Bytes that are no request: each stream ends with its first message. */
Test(gate_reflection, garbage_on_1000_streams)
{
	static const char garbage[] = "\0\0\0\0\7\xff\xff\xff\xff\x1a\xff\xff";
	struct attack a;
	int fd;

	attack_begin(&a, "reflection_garbage", NULL);
	fd = attack_connect(&a, true);
	open_streams(fd, 3, STREAMS, garbage, sizeof(garbage) - 1, 1);
	cr_expect_eq(read_answers(&a, fd, STREAMS), 0);
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* Each of 1000 streams is answered 64 times, and ends with the 65th request: 64,000 answers. */
Test(gate_reflection, requests_without_end)
{
	struct attack_bytes window = { .n = 0 };
	struct attack a;
	uint64_t sum = 0;
	int fd;

	attack_begin(&a, "reflection_requests", NULL);
	fd = attack_connect(&a, true);
	attack_put_frame(&window, H2_WINDOW, 0, 0, "\x7f\xff\0\0", 4);
	attack_flush(&window, fd);
	for (uint32_t i = 0; i < STREAMS; i += ROUND) {
		open_streams(fd, 3 + 2 * i, ROUND, list, sizeof(list), ANSWERED + 1);
		sum += read_answers(&a, fd, ROUND);
	}
	cr_expect(sum > 0 && sum % (STREAMS * ANSWERED) == 0, "%llu", (unsigned long long)sum);
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* Each stream has one answer that waits, which takes no memory of its own, and a request that
 * nobody reads. Nobody waits for the client: the bystander is served meanwhile. */
Test(gate_reflection, answers_that_nobody_reads_on_1000_streams)
{
	struct attack a;
	int fd;

	attack_begin(&a, "reflection_unread", NULL);
	fd = attack_connect(&a, true);
	open_streams(fd, 3, STREAMS, file, sizeof(file) - 1, 2);
	attack_await(&a, 100);
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}
