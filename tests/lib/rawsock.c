#include "rawsock.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/clock.h"

#define SEND_MS 200 /* a peer that takes nothing for so long takes no more */

int rawsock_connect(const char *path)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int r;

	if (fd < 0)
		return -errno;
	memcpy(a.sun_path, path, strnlen(path, sizeof(a.sun_path) - 1));
	do {
		r = connect(fd, (const struct sockaddr *)&a, sizeof(a));
	} while (r < 0 && errno == EINTR);
	if (r == 0)
		return fd;
	r = -errno;
	close(fd);
	return r;
}

static bool writable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };

	return poll(&p, 1, SEND_MS) > 0 && !(p.revents & (POLLERR | POLLHUP));
}

size_t rawsock_send(int fd, const void *data, size_t bytes)
{
	size_t sent = 0;

	while (sent < bytes) {
		ssize_t n = send(fd, (const char *)data + sent, bytes - sent,
				 MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n > 0)
			sent += (size_t)n;
		else if (errno != EINTR && (errno != EAGAIN || !writable(fd)))
			break;
	}
	return sent;
}

size_t rawsock_send_fd(int fd, const void *data, size_t bytes, int passed)
{
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec iov = { (void *)data, bytes };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	ssize_t n;

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &passed, sizeof(int));
	n = sendmsg(fd, &msg, MSG_NOSIGNAL);
	return n > 0 ? (size_t)n : 0;
}

/* Wait until there is something to read. */
static bool readable(int fd, uint64_t deadline_us)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	uint64_t now = clock_now_us();

	return now < deadline_us && poll(&p, 1, (int)((deadline_us - now + 999) / 1000)) > 0;
}

bool rawsock_closed(int fd, unsigned seconds)
{
	uint64_t deadline = clock_now_us() + seconds * 1000000ull;
	char data[4096];

	while (readable(fd, deadline)) {
		ssize_t n = recv(fd, data, sizeof(data), MSG_DONTWAIT);

		if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
			return true;
	}
	return false;
}

bool rawsock_read(int fd, void *data, size_t bytes, unsigned seconds)
{
	uint64_t deadline = clock_now_us() + seconds * 1000000ull;
	size_t have = 0;

	while (have < bytes && readable(fd, deadline)) {
		ssize_t n = recv(fd, (char *)data + have, bytes - have, MSG_DONTWAIT);

		if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
			return false;
		have += n > 0 ? (size_t)n : 0;
	}
	return have == bytes;
}

/* ------------------------------------------------------------------- HTTP/2 */

void rawsock_h2_begin(int fd)
{
	static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

	rawsock_send(fd, preface, sizeof(preface) - 1);
	rawsock_h2_frame(fd, H2_SETTINGS, 0, 0, NULL, 0);
}

bool rawsock_h2_frame(int fd, unsigned type, unsigned flags, uint32_t stream, const void *data,
		      size_t bytes)
{
	uint8_t h[9 + 512] = { (uint8_t)(bytes >> 16),  (uint8_t)(bytes >> 8),
			       (uint8_t)bytes,          (uint8_t)type,
			       (uint8_t)flags,          (uint8_t)(stream >> 24),
			       (uint8_t)(stream >> 16), (uint8_t)(stream >> 8),
			       (uint8_t)stream };
	size_t first = bytes < sizeof(h) - 9 ? bytes : sizeof(h) - 9;

	/* A short frame is one send: the daemon may close the connection at the nine bytes. */
	if (first)
		memcpy(h + 9, data, first);
	if (rawsock_send(fd, h, 9 + first) != 9 + first)
		return false;
	bytes -= first;
	return !bytes || rawsock_send(fd, (const uint8_t *)data + first, bytes) == bytes;
}

/* A literal header without indexing. Return: bytes added. */
static size_t add_header(uint8_t *at, const char *name, const char *value)
{
	size_t n = strlen(name), v = strlen(value);

	at[0] = 0;
	at[1] = (uint8_t)n; /* both are below 127 */
	memcpy(at + 2, name, n);
	at[2 + n] = (uint8_t)v;
	memcpy(at + 3 + n, value, v);
	return 3 + n + v;
}

size_t rawsock_h2_block(uint8_t *block, const char *path)
{
	size_t n = 0;

	n += add_header(block + n, ":method", "POST");
	n += add_header(block + n, ":scheme", "http");
	n += add_header(block + n, ":path", path);
	n += add_header(block + n, ":authority", "shardd");
	n += add_header(block + n, "content-type", "application/grpc");
	n += add_header(block + n, "te", "trailers");
	return n;
}

bool rawsock_h2_headers(int fd, uint32_t stream, const char *path)
{
	uint8_t block[512];

	return rawsock_h2_frame(fd, H2_HEADERS, H2_END_HEADERS, stream, block,
				rawsock_h2_block(block, path));
}

bool rawsock_h2_answered(int fd, uint32_t stream, unsigned seconds)
{
	uint64_t deadline = clock_now_us() + seconds * 1000000ull;
	uint8_t head[9], body[16384];

	while (clock_now_us() < deadline && rawsock_read(fd, head, sizeof(head), seconds)) {
		size_t n = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
		uint32_t id = ((uint32_t)head[5] & 0x7f) << 24 | (uint32_t)head[6] << 16 |
			      (uint32_t)head[7] << 8 | head[8];
		bool ends =
			(head[3] == H2_DATA || head[3] == H2_HEADERS) && (head[4] & H2_END_STREAM);

		if (n > sizeof(body) || !rawsock_read(fd, body, n, seconds))
			return false;
		if (id == stream && (ends || head[3] == H2_RST))
			return true;
	}
	return false;
}

bool rawsock_h2_call(int fd, uint32_t stream, const char *path, const ProtobufCMessage *request)
{
	size_t n = protobuf_c_message_get_packed_size(request);
	uint8_t *data = calloc(1, n + 5); /* flag and length, then the message */
	bool sent;

	if (!data)
		return false;
	data[3] = (uint8_t)(n >> 8);
	data[4] = (uint8_t)n;
	protobuf_c_message_pack(request, data + 5);
	sent = rawsock_h2_headers(fd, stream, path) &&
	       rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, stream, data, n + 5);
	free(data);
	return sent;
}
