/*
 * Frames that are wrong, odd, or more than usual: what is wrong ends its own connection only,
 * what is odd but right is served.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attack.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "rawsock.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

TestSuite(gate_frames, .timeout = 200, .init = fdcheck_begin, .fini = fdcheck_end);

#define GET    "/shardd.v1.StatusService/GetStatus"
#define ATTACH "/shardd.v1.SessionService/Attach"

enum { AFTER_MS = 300 };

static uint32_t noise_state = 4711;

static uint8_t noise(void)
{
	noise_state = noise_state * 1664525u + 1013904223u;
	return (uint8_t)(noise_state >> 24);
}

/* Frames of all types, known or not, with flags, streams and bodies of noise. */
Test(gate_frames, garbage_of_all_types)
{
	struct attack a;

	attack_begin(&a, "garbage_frames", NULL);
	for (unsigned type = 0; type < 256; type++) {
		struct attack_bytes b = { .n = 0 };
		int fd = attack_connect(&a, type % 2);
		uint8_t body[300];

		for (unsigned i = 0; i < 40; i++) {
			for (size_t k = 0; k < sizeof(body); k++)
				body[k] = noise();
			attack_put_frame(&b, i % 4 ? noise() % 12 : type, noise(), noise() % 16,
					 body, noise());
		}
		attack_flush(&b, fd);
		close(fd);
	}
	attack_end(&a, AFTER_MS, 64);
}

/* The same, and every frame is cut at every byte. */
Test(gate_frames, garbage_byte_by_byte)
{
	struct attack a;

	attack_begin(&a, "garbage_bytes", NULL);
	for (unsigned round = 0; round < 30; round++) {
		int fd = attack_connect(&a, false);
		uint8_t frame[64] = { 0, 0, (uint8_t)(noise() % 50), (uint8_t)(noise() % 10) };

		for (size_t i = 4; i < sizeof(frame); i++)
			frame[i] = noise() % 8;
		for (size_t i = 0; i < 9u + frame[2]; i++)
			if (rawsock_send(fd, frame + i, 1) != 1)
				break;
		close(fd);
	}
	attack_end(&a, AFTER_MS, 64);
}

static void misuse(struct attack *a, unsigned type, unsigned flags, uint32_t stream, size_t n)
{
	static const uint8_t zeros[64];
	int fd = attack_connect(a, true);

	cr_expect(rawsock_h2_frame(fd, type, flags, stream, zeros, n));
	cr_expect(rawsock_closed(fd, 30) || attack_figures_only(), "type %u stream %u", type,
		  stream);
	close(fd);
}

Test(gate_frames, streams_misused)
{
	struct attack a;

	attack_begin(&a, "stream_misuse", NULL);
	misuse(&a, H2_HEADERS, H2_END_HEADERS, 2, 10);      /* the server's */
	misuse(&a, H2_HEADERS, H2_END_HEADERS, 0, 10);      /* the connection's */
	misuse(&a, H2_DATA, 0, 99, 10);                     /* never opened */
	misuse(&a, H2_DATA, 0, 0, 10);                      /* the connection's */
	misuse(&a, H2_RST, 0, 99, 4);                       /* never opened */
	misuse(&a, H2_WINDOW, 0, 99, 4);                    /* never opened */
	misuse(&a, H2_CONTINUATION, H2_END_HEADERS, 3, 10); /* without HEADERS */
	misuse(&a, H2_PING, 0, 1, 8);                       /* on a stream */
	attack_logged(&a, "http2");
	attack_end(&a, AFTER_MS, 32);
}

/* Padding and priorities are allowed, also if no client of gRPC uses them. */
Test(gate_frames, a_call_with_padding_and_a_priority)
{
	uint8_t block[600] = { 20 }, data[5 + 1 + 7] = { 7 };
	struct attack a;
	size_t n;
	int fd;

	attack_begin(&a, "padded_call", NULL);
	fd = attack_connect(&a, false);
	/* one byte of length, five of priority, the block, 20 of padding */
	block[5] = 15;
	n = rawsock_h2_block(block + 6, GET);
	cr_assert_leq(6 + n + 20, sizeof(block));
	memset(block + 6 + n, 0, 20);
	cr_assert(rawsock_h2_frame(fd, H2_HEADERS, H2_END_HEADERS | H2_PADDED | H2_PRIORITIES, 1,
				   block, 6 + n + 20));
	cr_assert(rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM | H2_PADDED, 1, data, sizeof(data)));
	cr_expect(rawsock_h2_answered(fd, 1, 30));
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* A header block that comes in three frames is one all the same. */
Test(gate_frames, a_call_whose_headers_are_continued)
{
	uint8_t block[512];
	struct attack a;
	size_t n;
	int fd;

	attack_begin(&a, "continued_call", NULL);
	fd = attack_connect(&a, false);
	n = rawsock_h2_block(block, GET);
	cr_assert(rawsock_h2_frame(fd, H2_HEADERS, 0, 1, block, 10));
	cr_assert(rawsock_h2_frame(fd, H2_CONTINUATION, 0, 1, block + 10, 20));
	cr_assert(rawsock_h2_frame(fd, H2_CONTINUATION, H2_END_HEADERS, 1, block + 30, n - 30));
	cr_assert(rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, "\0\0\0\0\0", 5));
	cr_expect(rawsock_h2_answered(fd, 1, 30));
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* Was: core answered the third ping or so with GOAWAY "too_many_pings", and the session of a
 * trainer whose library keeps its connection alive was gone. */
Test(gate_frames, keepalive_pings_end_no_session)
{
	Shardd__V1__GetStatusRequest status = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct attack a;
	int fd;

	attack_begin(&a, "keepalive", NULL);
	fd = attack_connect(&a, true);
	for (unsigned i = 0; i < 300; i++) {
		cr_assert(rawsock_h2_frame(fd, H2_PING, 0, 0, "12345678", 8));
		attack_await(&a, 2);
	}
	cr_assert(rawsock_h2_call(fd, 3, GET, &status.base));
	cr_expect(rawsock_h2_answered(fd, 3, 30));
	cr_expect_eq(attack_log_lines(&a, "grpc_pings_per_s"), 0);
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* The client of a limit hears which one it was: GOAWAY with a sentence. */
Test(gate_frames, the_client_hears_which_limit_it_was)
{
	static const char *const args[] = { "--set", "grpc_pings_per_s=1", NULL };
	struct attack a;
	char text[4096] = "";
	bool found = false;
	size_t n = 0;
	int fd;

	attack_begin(&a, "goaway", args);
	fd = attack_connect(&a, true);
	for (unsigned i = 0; i < 10; i++)
		rawsock_h2_frame(fd, H2_PING, 0, 0, "12345678", 8);
	while (!found && n < sizeof(text) && rawsock_read(fd, text + n, 1, 30)) {
		n++;
		found = n >= 24 && memcmp(text + n - 24, "limit grpc_pings_per_s=1", 24) == 0;
	}
	cr_expect(found);
	cr_expect(rawsock_closed(fd, 30));
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* The error of a call that ends without a message says this. */
Test(gate_frames, a_call_without_a_message_is_refused_in_words)
{
	static const char words[] =
		"/shardd.v1.StatusService/GetStatus: the request has no message";
	Shardd__V1__GetStatusRequest status = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct attack_bytes got = { .n = 0 };
	uint8_t block[512], byte;
	struct attack a;
	int fd;

	attack_begin(&a, "empty_call", NULL);
	fd = attack_connect(&a, true);
	cr_assert(rawsock_h2_frame(fd, H2_HEADERS, H2_END_HEADERS | H2_END_STREAM, 3, block,
				   rawsock_h2_block(block, GET)));
	do {
		cr_assert(rawsock_read(fd, &byte, 1, 30), "no answer");
		attack_put(&got, &byte, 1);
	} while (!memmem(got.data, got.n, words, strlen(words)));
	free(got.data);
	close(fd);
	fd = attack_connect(&a, true);
	cr_assert(rawsock_h2_call(fd, 3, GET, &status.base));
	cr_expect(rawsock_h2_answered(fd, 3, 30));
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

#define AT_ONCE 32

/* More calls at once than are allowed before Attach are answered one after the other. */
Test(gate_frames, calls_beyond_the_limit_before_attach_are_served_in_turn)
{
	static const char *const args[] = { "--set", "grpc_unattached_streams=1", NULL };
	Shardd__V1__GetStatusRequest status = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct attack a;
	int fd;

	attack_begin(&a, "one_stream", args);
	fd = attack_connect(&a, false);
	/* room for all answers */
	cr_assert(rawsock_h2_frame(fd, H2_WINDOW, 0, 0, "\0\20\0\0", 4));
	/* The answers are read while calls are sent: a client that only writes is stopped. */
	for (uint32_t i = 0; i < 200 + AT_ONCE; i++) {
		if (i < 200)
			cr_assert(rawsock_h2_call(fd, 1 + 2 * i, GET, &status.base));
		if (i >= AT_ONCE)
			cr_assert(rawsock_h2_answered(fd, 1 + 2 * (i - AT_ONCE), 30));
	}
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}
