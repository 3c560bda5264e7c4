/*
 * Plain sockets that do to a daemon what no client library would: connect and say
 * nothing, HTTP/2 frame by frame, requests whose answers nobody reads. For the test
 * process itself: no gRPC here.
 */
#ifndef SHARDD_TESTS_RAWSOCK_H
#define SHARDD_TESTS_RAWSOCK_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Connect, waiting for room in the backlog. Return: a descriptor, or a negative errno. */
int rawsock_connect(const char *path);

/* Send all of it or until the peer takes no more or is gone. Return: bytes sent. */
size_t rawsock_send(int fd, const void *data, size_t bytes);

/* The same with the descriptor @passed along. */
size_t rawsock_send_fd(int fd, const void *data, size_t bytes, int passed);

/* Has the peer closed it within @seconds? What comes meanwhile is read and dropped. */
bool rawsock_closed(int fd, unsigned seconds);

/* Read exactly @bytes within @seconds. Return: whether they came. */
bool rawsock_read(int fd, void *data, size_t bytes, unsigned seconds);

/* --- HTTP/2 --- */

enum {
	H2_DATA = 0,
	H2_HEADERS = 1,
	H2_PRIORITY = 2,
	H2_RST = 3,
	H2_SETTINGS = 4,
	H2_PING = 6,
	H2_WINDOW = 8,
	H2_CONTINUATION = 9
};
enum { H2_END_STREAM = 1, H2_ACK = 1, H2_END_HEADERS = 4, H2_PADDED = 8, H2_PRIORITIES = 32 };

/* Preface and an empty SETTINGS. */
void rawsock_h2_begin(int fd);
/* One frame. Return: whether all of it was taken. */
bool rawsock_h2_frame(int fd, unsigned type, unsigned flags, uint32_t stream, const void *data,
		      size_t bytes);
/* HEADERS of a call: @path is "/shardd.v1.SessionService/Attach". */
bool rawsock_h2_headers(int fd, uint32_t stream, const char *path);
/* The header block of one, into @block of 512 bytes. Return: its length. */
size_t rawsock_h2_block(uint8_t *block, const char *path);
/* Read frames until @stream is ended by the peer, at most @seconds. Return: whether it is. */
bool rawsock_h2_answered(int fd, uint32_t stream, unsigned seconds);
/* A whole unary call: headers and @request. */
bool rawsock_h2_call(int fd, uint32_t stream, const char *path, const ProtobufCMessage *request);

#endif
