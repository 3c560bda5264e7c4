/*
 * Frames that cost their sender nothing and gRPC core much. Each was sent to core as it
 * came, before there was a gate. Beside every attack a bystander is served, and the figures
 * are printed: they are those of docs/security.md.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attack.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "rawsock.h"

TestSuite(gate_floods, .timeout = 200, .init = fdcheck_begin, .fini = fdcheck_end);

#define GET    "/shardd.v1.StatusService/GetStatus"
#define ATTACH "/shardd.v1.SessionService/Attach"

enum { AFTER_MS = 500, FRAME = 16384 };

/* It is closed, and the log says why; @limit NULL: by core, of which the log says nothing. */
static void ended_by(struct attack *a, int fd, const char *limit, unsigned max_mib)
{
	bool closed = rawsock_closed(fd, attack_figures_only() ? 5 : 30);

	cr_expect(closed || attack_figures_only(), "%s: still open", a->name);
	if (limit && !attack_figures_only()) {
		attack_logged(a, limit);
		cr_expect_eq(attack_log_lines(a, limit), 1);
	}
	close(fd);
	attack_end(a, AFTER_MS, max_mib);
}

/* A header block of @total bytes in frames of 16 KiB, all of it @fill, without an end. */
static void put_block(struct attack_bytes *b, uint32_t stream, size_t total, uint8_t fill)
{
	static uint8_t body[FRAME];
	size_t n = total < FRAME ? total : FRAME;

	memset(body, fill, sizeof(body));
	if (fill == 0)
		/* one literal whose value is longer than all that comes */
		memcpy(body, "\0\1x\x7f\x80\x80\x80\x7f", 8);
	attack_put_frame(b, H2_HEADERS, 0, stream, body, n);
	memset(body, fill, sizeof(body));
	for (size_t sent = n; sent < total; sent += n)
		attack_put_frame(b, H2_CONTINUATION, 0, stream, body, n);
}

/* Was: core parsed the whole header again with each frame, for minutes; nobody was served, and the
 * watchdog was not fed. */
Test(gate_floods, one_header_of_49_megabytes)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "continuation_49MB", NULL);
	fd = attack_connect(&a, false);
	put_block(&b, 1, 49u << 20, 0);
	attack_flush(&b, fd);
	ended_by(&a, fd, "grpc_header_bytes", 16);
}

/* Was: each byte became a header of 50 bytes and more in core, 2.4 GB in all. 0x82 is
 * ":method: GET" of the static table. */
Test(gate_floods, millions_of_headers_of_one_byte)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "tiny_headers", NULL);
	fd = attack_connect(&a, false);
	put_block(&b, 1, 49u << 20, 0x82);
	attack_flush(&b, fd);
	ended_by(&a, fd, "grpc_header_bytes", 16);
}

/* Was: passed, though core advertises a limit of 8 KiB. */
Test(gate_floods, a_header_of_300_kilobytes)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "header_300KB", NULL);
	fd = attack_connect(&a, true);
	put_block(&b, 3, 300u << 10, 0);
	attack_flush(&b, fd);
	ended_by(&a, fd, "grpc_header_bytes", 16);
}

/* As many frames of one block as there can be bytes. */
Test(gate_floods, empty_continuations)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "empty_continuations", NULL);
	fd = attack_connect(&a, false);
	attack_put_frame(&b, H2_HEADERS, 0, 1, "\x83", 1);
	for (unsigned i = 0; i < 1000000; i++)
		attack_put_frame(&b, H2_CONTINUATION, 0, 1, NULL, 0);
	attack_flush(&b, fd);
	ended_by(&a, fd, "grpc_continuations", 16);
}

/* Full header blocks of one-byte fields on every stream that a session may open. */
Test(gate_floods, the_largest_headers_on_all_streams)
{
	struct attack_bytes b = { .n = 0 };
	static uint8_t body[FRAME];
	struct attack a;
	int fd;

	attack_begin(&a, "largest_headers", NULL);
	fd = attack_connect(&a, true);
	memset(body, 0x83, sizeof(body));
	for (uint32_t i = 0; i < 1088; i++)
		attack_put_frame(&b, H2_HEADERS, H2_END_HEADERS, 3 + 2 * i, body, FRAME);
	attack_flush(&b, fd);
	attack_await(&a, 100);
	close(fd);
	attack_end(&a, AFTER_MS, 256);
}

Test(gate_floods, rapid_reset)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "rapid_reset", NULL);
	fd = attack_connect(&a, true);
	for (uint32_t i = 0; i < 100000; i++) {
		attack_put_headers(&b, 3 + 2 * i, ATTACH);
		attack_put_frame(&b, H2_RST, 0, 3 + 2 * i, "\0\0\0\10", 4);
	}
	attack_flush(&b, fd);
	ended_by(&a, fd, "grpc_resets_per_s", 64);
}

Test(gate_floods, rapid_reset_before_attach)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "rapid_reset_unattached", NULL);
	fd = attack_connect(&a, false);
	for (uint32_t i = 0; i < 100000; i++) {
		attack_put_headers(&b, 1 + 2 * i, ATTACH);
		attack_put_frame(&b, H2_RST, 0, 1 + 2 * i, "\0\0\0\10", 4);
	}
	attack_flush(&b, fd);
	ended_by(&a, fd, "grpc_resets_per_s", 64);
}

/* A million frames of one kind, which mean nothing. */
static void flood(const char *name, const char *limit, unsigned type, unsigned flags,
		  uint32_t stream, const void *body, size_t bytes)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, name, NULL);
	fd = attack_connect(&a, true);
	if (stream)
		attack_put_headers(&b, stream, GET);
	for (unsigned i = 0; i < 1000000; i++)
		attack_put_frame(&b, type, flags, stream, body, bytes);
	attack_flush(&b, fd);
	ended_by(&a, fd, limit, 32);
}

Test(gate_floods, settings)
{
	flood("settings", "grpc_settings_per_s", H2_SETTINGS, 0, 0, "\0\4\0\1\0\0", 6);
}

Test(gate_floods, settings_acknowledged)
{
	flood("settings_ack", "grpc_control_per_s", H2_SETTINGS, H2_ACK, 0, NULL, 0);
}

Test(gate_floods, pings)
{
	flood("ping", "grpc_pings_per_s", H2_PING, 0, 0, "12345678", 8);
}

Test(gate_floods, window_updates)
{
	flood("window_update", "grpc_control_per_s", H2_WINDOW, 0, 0, "\0\0\0\1", 4);
}

Test(gate_floods, priorities)
{
	flood("priority", "grpc_control_per_s", H2_PRIORITY, 0, 3, "\0\0\0\0\20", 5);
}

Test(gate_floods, data_without_bytes)
{
	flood("empty_data", "grpc_control_per_s", H2_DATA, 0, 3, NULL, 0);
}

Test(gate_floods, data_that_is_all_padding)
{
	static const char body[256] = { (char)255 };

	/* core counts padding against the window of the connection, and closes it */
	flood("padding", NULL, H2_DATA, H2_PADDED, 3, body, sizeof(body));
}

Test(gate_floods, frames_of_a_type_that_is_unknown)
{
	flood("unknown_type", "grpc_control_per_s", 0xee, 0, 0, "x", 1);
}

/* A thousand connections in turn: one line of the log is enough. */
Test(gate_floods, a_repeated_attack_is_logged_once)
{
	struct attack a;

	attack_begin(&a, "repeated", NULL);
	for (unsigned i = 0; i < 300; i++) {
		struct attack_bytes b = { .n = 0 };
		int fd = attack_connect(&a, false);

		put_block(&b, 1, 100u << 10, 0);
		attack_flush(&b, fd);
		cr_assert(rawsock_closed(fd, 30) || attack_figures_only());
		close(fd);
	}
	attack_logged(&a, "grpc_header_bytes");
	/* one in ten seconds */
	cr_expect_lt(attack_log_lines(&a, "grpc_header_bytes"), 10);
	attack_end(&a, AFTER_MS, 32);
}
