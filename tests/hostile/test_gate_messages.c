/*
 * Messages that do not end, and connections that do not begin. Core keeps what has come of a
 * message until the rest is there; the gate says how much that may be.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attack.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "rawsock.h"

TestSuite(gate_messages, .timeout = 200, .init = fdcheck_begin, .fini = fdcheck_end);

#define JOIN "/shardd.v1.JobService/Join"

enum { AFTER_MS = 500, FRAME = 16384 };

static void closed_by(struct attack *a, int fd, const char *limit)
{
	if (attack_figures_only())
		return;
	cr_expect(rawsock_closed(fd, 30), "%s: still open", a->name);
	attack_logged(a, limit);
}

/* What is sent here ignores flow control: core may refuse it before the message is late. */
static void closed_late_or_refused(struct attack *a, int fd)
{
	if (attack_figures_only())
		return;
	cr_expect(rawsock_closed(fd, 30), "%s: still open", a->name);
	attack_logged_either(a, "grpc_message_timeout_ms", "http2");
}

/* Half of a message of 60 MiB on each of @n streams, as much of it as flow control lets
 * through: @frames of 16 KiB each, the streams in turn. */
static void half_messages(int fd, uint32_t first, unsigned n, unsigned frames)
{
	static uint8_t body[FRAME];
	struct attack_bytes b = { .n = 0 };

	for (unsigned i = 0; i < n; i++)
		attack_put_headers(&b, first + 2 * i, JOIN);
	attack_flush(&b, fd);
	for (unsigned k = 0; k < frames; k++) {
		memcpy(body, k == 0 ? "\0\3\xc0\0\0" : "\0\0\0\0\0", 5);
		for (unsigned i = 0; i < n; i++)
			attack_put_frame(&b, H2_DATA, 0, first + 2 * i, body, FRAME);
		if (!attack_flush(&b, fd))
			break;
	}
}

/* Was: 3.8 GB of memory in the daemon through one connection. */
Test(gate_messages, half_sent_on_all_streams)
{
	static const char *const args[] = { "--set", "grpc_message_timeout_ms=3s", NULL };
	struct attack a;
	int fd;

	attack_begin(&a, "half_messages_1088", args);
	fd = attack_connect(&a, true);
	half_messages(fd, 3, 1087, 256);
	closed_late_or_refused(&a, fd);
	close(fd);
	attack_end(&a, AFTER_MS, 300);
}

/* The memory of core is a small multiple of what the limit says, also where the limit is
 * a small one and the frames are small ones. */
Test(gate_messages, half_sent_before_attach)
{
	static const char *const args[] = { "--set", "grpc_message_timeout_ms=3s", NULL };
	struct attack a;
	int fd;

	attack_begin(&a, "half_messages_unattached", args);
	fd = attack_connect(&a, false);
	half_messages(fd, 1, 32, 4);
	closed_late_or_refused(&a, fd);
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* One user, many connections: together they have the user's budget, and one of them its
 * own; the bystander is of the same user, and is served. */
Test(gate_messages, half_sent_on_many_connections)
{
	static const char *const args[] = { "--set", "grpc_message_timeout_ms=4s",
					    "--set", "grpc_connection_bytes=72MiB",
					    "--set", "user_limits=0:max_message_bytes=72MiB",
					    NULL };
	struct attack a;
	int fds[16];

	attack_begin(&a, "half_messages_16_connections", args);
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++) {
		fds[i] = attack_connect(&a, true);
		half_messages(fds[i], 3, 64, 16);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++) {
		cr_expect(rawsock_closed(fds[i], attack_figures_only() ? 0 : 120) ||
				  attack_figures_only(),
			  "%u", i);
		close(fds[i]);
	}
	attack_logged(&a, "grpc_message_timeout_ms");
	attack_end(&a, AFTER_MS, 300);
}

/* One message that counts as more than a connection may send before Attach, in frames that are
 * smaller than what they count as: with more bytes than HTTP/2's first window of 64 KiB core could
 * be first to refuse it. */
Test(gate_messages, a_large_message_before_attach)
{
	static const char *const args[] = { "--set", "grpc_unattached_bytes=64KiB", NULL };
	static const char body[1024] = "\0\3\xc0\0\0";
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "large_unattached", args);
	fd = attack_connect(&a, false);
	attack_put_headers(&b, 1, JOIN);
	for (unsigned i = 0; i < 20; i++)
		attack_put_frame(&b, H2_DATA, 0, 1, body, sizeof(body));
	attack_flush(&b, fd);
	closed_by(&a, fd, "grpc_unattached_bytes");
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* A byte now and then: it never stops, and it never ends. */
Test(gate_messages, slow_trickle)
{
	static const char *const args[] = { "--set", "grpc_message_timeout_ms=2s", "--set",
					    "grpc_unattached_bytes=64MiB", NULL };
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "slow_trickle", args);
	fd = attack_connect(&a, false);
	attack_put_headers(&b, 1, JOIN);
	attack_put_frame(&b, H2_DATA, 0, 1, "\0\0\1\0\0", 5);
	attack_flush(&b, fd);
	do
		attack_await(&a, 10);
	while (rawsock_h2_frame(fd, H2_DATA, 0, 1, "x", 1) && !rawsock_closed(fd, 0) &&
	       !attack_figures_only());
	attack_logged(&a, "grpc_message_timeout_ms");
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* 32 calls that never send their message: what comes next waits, and then the connection
 * is closed. Others attach meanwhile. */
Test(gate_messages, calls_without_a_message)
{
	static const char *const args[] = { "--set", "grpc_message_timeout_ms=2s", NULL };
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd, other;

	attack_begin(&a, "no_message", args);
	fd = attack_connect(&a, false);
	for (unsigned i = 0; i < 1000; i++)
		attack_put_headers(&b, 1 + 2 * i, JOIN);
	attack_flush(&b, fd);
	other = attack_connect(&a, true);
	close(other);
	closed_by(&a, fd, "grpc_message_timeout_ms");
	close(fd);
	attack_end(&a, AFTER_MS, 32);
}

/* Connections that begin HTTP/2 and then nothing. */
Test(gate_messages, never_attaching)
{
	static const char *const args[] = { "--set", "grpc_idle_timeout_ms=1s", NULL };
	struct attack a;
	int fds[200];

	attack_begin(&a, "never_attaching", args);
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++)
		fds[i] = attack_connect(&a, false);
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++) {
		cr_expect(rawsock_closed(fds[i], attack_figures_only() ? 0 : 30) ||
				  attack_figures_only(),
			  "%u", i);
		close(fds[i]);
	}
	attack_logged(&a, "grpc_idle_timeout_ms");
	attack_end(&a, AFTER_MS, 64);
}

/* More calls at once than were agreed. */
Test(gate_messages, more_streams_than_agreed)
{
	struct attack_bytes b = { .n = 0 };
	struct attack a;
	int fd;

	attack_begin(&a, "streams", NULL);
	fd = attack_connect(&a, true);
	for (uint32_t i = 0; i < 20000; i++)
		attack_put_headers(&b, 3 + 2 * i, JOIN);
	attack_flush(&b, fd);
	closed_by(&a, fd, "streams");
	close(fd);
	attack_end(&a, AFTER_MS, 64);
}
