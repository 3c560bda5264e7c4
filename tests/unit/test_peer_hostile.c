/* What is no node, on the port of one: it costs its own connection, and nobody else's. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "peerfix.h"
#include "rawsock.h"

#define METHOD "/shardd.v1.PeerService/Link"

static struct peerfix_node *a, *b;

/* Two nodes with a link; the test attacks @b. */
static void begin(void)
{
	struct peers_options o = { .max_links = 8 };

	peerfix_begin();
	a = peerfix_node("a", NULL);
	b = peerfix_node("b", &o);
	peerfix_link(a, b);
}

static void end(void)
{
	cr_expect_eq(a->gones + b->gones, 0, "%s%s", a->why, b->why);
	peerfix_send(a->last, 0, 8);
	peerfix_await_messages(b, 1);
	peerfix_end();
}

TestSuite(peer_hostile, .init = begin, .fini = end, .timeout = 120);

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

static int dial(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
				  .sin_port = htons(peers_port(b->ps)) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	cr_assert(fd >= 0);
	cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
	return fd;
}

static bool closed(void *arg)
{
	char data[4096];
	ssize_t n;

	do {
		n = recv(*(const int *)arg, data, sizeof(data), MSG_DONTWAIT);
	} while (n > 0);
	return n == 0 || (errno != EAGAIN && errno != EINTR);
}

/* The node ends the connection. */
static void await_closed(int fd)
{
	looprun_until(&peerfix.run, closed, &fd, 60);
	close(fd);
}

static int open_stream(const char *method)
{
	int fd = dial();

	rawsock_h2_begin(fd);
	cr_assert(rawsock_h2_headers(fd, 1, method));
	return fd;
}

/* One message of gRPC. */
static void send_bytes(int fd, const void *data, size_t bytes)
{
	uint8_t *frame = malloc(bytes + 5);

	cr_assert(frame);
	frame[0] = 0;
	for (unsigned i = 0; i < 4; i++)
		frame[1 + i] = (uint8_t)(bytes >> (24 - 8 * i));
	memcpy(frame + 5, data, bytes);
	rawsock_h2_frame(fd, H2_DATA, 0, 1, frame, bytes + 5);
	free(frame);
}

static void send_message(int fd, const Shardd__V1__PeerMessage *m)
{
	uint8_t data[1024];

	cr_assert_lt(shardd__v1__peer_message__get_packed_size(m), sizeof(data));
	send_bytes(fd, data, shardd__v1__peer_message__pack(m, data));
}

static void send_hello(int fd, const char *node, uint32_t protocol, size_t instance_bytes)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	Shardd__V1__PeerHello h = SHARDD__V1__PEER_HELLO__INIT;

	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_HELLO;
	m.hello = &h;
	h.node = (char *)node;
	h.cluster = (char *)"test";
	h.protocol = protocol;
	h.instance = (ProtobufCBinaryData){ instance_bytes, (uint8_t *)"0123456789abcdef0" };
	send_message(fd, &m);
}

static void send_ping(int fd)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	Shardd__V1__PeerPing ping = SHARDD__V1__PEER_PING__INIT;

	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_PING;
	m.ping = &ping;
	send_message(fd, &m);
}

Test(peer_hostile, garbage_on_the_port)
{
	static const char text[] = "GET / HTTP/1.1\r\nHost: b\r\n\r\n";
	uint8_t noise[4096];
	int fds[2] = { dial(), dial() };

	srand(7);
	for (size_t i = 0; i < sizeof(noise); i++)
		noise[i] = (uint8_t)rand();
	rawsock_send(fds[0], text, sizeof(text) - 1);
	rawsock_send(fds[1], noise, sizeof(noise));
	await_closed(fds[0]);
	await_closed(fds[1]);
	cr_expect_eq(b->refusals, 0);
}

Test(peer_hostile, a_connection_that_says_nothing)
{
	await_closed(dial());
}

Test(peer_hostile, a_connection_without_a_stream)
{
	int fd = dial();

	rawsock_h2_begin(fd);
	await_closed(fd);
}

Test(peer_hostile, a_connection_that_stops_in_a_frame)
{
	uint8_t header[9] = { 0, 0, 100, H2_HEADERS, H2_END_HEADERS, 0, 0, 0, 1 };
	int fd = dial();

	rawsock_h2_begin(fd);
	rawsock_send(fd, header, sizeof(header));
	await_closed(fd);
}

Test(peer_hostile, a_stream_without_a_hello)
{
	int fd = open_stream(METHOD);

	peerfix_await_refused(b, 1);
	expect_text(b->refused, "has not said hello within 5 s");
	await_closed(fd);
}

Test(peer_hostile, a_hello_without_a_ping)
{
	int fd = open_stream(METHOD);

	send_hello(fd, "m", 1, 16);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "node 'm' at 127.0.0.1:");
	expect_text(b->refused, "has not completed its greeting within 5 s");
	close(fd);
	cr_expect_eq(b->ups, 1);
}

Test(peer_hostile, a_message_that_is_none)
{
	int fd = open_stream(METHOD);

	send_bytes(fd, "\xff\xff\xff\xff", 4);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "has sent what is no message");
	close(fd);
}

/* Each of two bytes, which would take a hundred in memory. */
Test(peer_hostile, a_message_of_many_unknown_fields)
{
	static uint8_t fields[16000];
	int fd = open_stream(METHOD);

	for (size_t i = 0; i < sizeof(fields); i += 2)
		fields[i] = 5 << 3;
	send_bytes(fd, fields, sizeof(fields));
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "has sent what is no message");
	close(fd);
}

Test(peer_hostile, a_message_that_is_too_large)
{
	uint8_t header[5] = { 0, 0, 0x50, 0, 0 };
	int fd = open_stream(METHOD);

	rawsock_h2_frame(fd, H2_DATA, 0, 1, header, sizeof(header));
	peerfix_await_refused(b, 1);
	close(fd);
}

Test(peer_hostile, a_compressed_message)
{
	uint8_t frame[8] = { 1, 0, 0, 0, 3 };
	int fd = open_stream(METHOD);

	rawsock_h2_frame(fd, H2_DATA, 0, 1, frame, sizeof(frame));
	peerfix_await_refused(b, 1);
	close(fd);
}

Test(peer_hostile, another_method)
{
	int fd = open_stream("/shardd.v1.SessionService/Attach");

	peerfix_await_refused(b, 1);
	expect_text(b->refused, "calls a method that is not there");
	close(fd);
}

Test(peer_hostile, a_first_message_that_is_no_hello)
{
	int fd = open_stream(METHOD);

	send_ping(fd);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "its first message is no hello");
	close(fd);
}

Test(peer_hostile, a_hello_of_another_version)
{
	int fd = open_stream(METHOD);

	send_hello(fd, "m", 7, 16);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "node 'm' has version 7");
	expect_text(b->refused, "node 'b' has version 1");
	close(fd);
}

Test(peer_hostile, hellos_with_bad_fields)
{
	int fds[3] = { open_stream(METHOD), open_stream(METHOD), open_stream(METHOD) };

	send_hello(fds[0], "m\nm", 1, 16);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "says no name that a node may have");
	send_hello(fds[1], "m", 1, 17);
	peerfix_await_refused(b, 2);
	expect_text(b->refused, "has 17 bytes; it must have 16");
	send_hello(fds[2], "b", 1, 16);
	peerfix_await_refused(b, 3);
	expect_text(b->refused, "have the name 'b'");
	for (unsigned i = 0; i < 3; i++)
		close(fds[i]);
}

Test(peer_hostile, a_second_hello)
{
	int fd = open_stream(METHOD);

	send_hello(fd, "m", 1, 16);
	send_hello(fd, "m", 1, 16);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "a message that is not allowed here");
	close(fd);
}

Test(peer_hostile, a_message_before_the_ping)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	int fd = open_stream(METHOD);
	Shardd__V1__JobMessage job;

	shardd__v1__job_message__init(&job);
	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_JOB;
	m.job = &job;
	send_hello(fd, "m", 1, 16);
	send_message(fd, &m);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "a message before its first ping");
	close(fd);
}

/* It is up, and takes part no further: gone as any other, with the link's connection. */
Test(peer_hostile, one_that_falls_silent)
{
	int fd = open_stream(METHOD);

	send_hello(fd, "m", 1, 16);
	send_ping(fd);
	peerfix_await_up(b, 2);
	peerfix_await_gone(b, 1);
	cr_expect_str_eq(b->why, "node 'm' has not answered for 1.25 s");
	b->gones = 0;
	b->last = NULL;
	close(fd);
}

Test(peer_hostile, many_connections_leave_when_their_time_is_over)
{
	enum { MANY = 200 };
	int fds[MANY];

	for (unsigned i = 0; i < MANY; i++)
		fds[i] = i % 2 ? dial() : open_stream(METHOD);
	peerfix_turn(200);
	for (unsigned i = 0; i < MANY; i++)
		await_closed(fds[i]);
	cr_expect_geq(b->refusals, MANY / 2 - 1);
	peerfix_link(b, a);
}
