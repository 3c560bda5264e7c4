/* Chunks as messages, without a copy of their data. */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "crc32c.h"
#include "core/check.h"
#include "peer/bulk_impl.h"

#define BULK_WIRE_DATA     (15u << 3 | 2u) /* the tag of data */
#define BULK_WIRE_PARTS    64
#define BULK_WIRE_REQUEST  4096u
#define BULK_WIRE_TAG_MORE 11u /* bytes of this tag and a length, at most */

/* ------------------------------------------------------------------------------------ to send */

static size_t bulk_wire_put(uint8_t *at, uint64_t v)
{
	size_t n = 0;

	for (; v >= 0x80; v >>= 7)
		at[n++] = (uint8_t)(v | 0x80);
	at[n++] = (uint8_t)v;
	return n;
}

grpc_byte_buffer *bulk_wire_pack(const Shardd__V1__PeerHello *hello, uint64_t total,
				 uint64_t offset, grpc_slice data)
{
	size_t bytes = GRPC_SLICE_LENGTH(data), n;
	Shardd__V1__FetchChunk m = SHARDD__V1__FETCH_CHUNK__INIT;
	grpc_slice both[2];
	grpc_byte_buffer *b;
	uint8_t *at;

	m.hello = (Shardd__V1__PeerHello *)hello;
	m.total = total;
	m.offset = offset;
	m.crc = crc32c_add(0, GRPC_SLICE_START_PTR(data), bytes);
	both[0] = grpc_slice_malloc(shardd__v1__fetch_chunk__get_packed_size(&m) +
				    BULK_WIRE_TAG_MORE);
	both[1] = data;
	at = GRPC_SLICE_START_PTR(both[0]);
	n = shardd__v1__fetch_chunk__pack(&m, at);
	if (bytes) {
		at[n++] = BULK_WIRE_DATA;
		n += bulk_wire_put(at + n, bytes);
	}
	CHECK(n <= BULK_HEAD_BYTES);
	GRPC_SLICE_SET_LENGTH(both[0], n);
	b = grpc_raw_byte_buffer_create(both, bytes ? 2 : 1);
	grpc_slice_unref(both[0]);
	grpc_slice_unref(both[1]);
	return b;
}

/* ------------------------------------------------------------------------------------ to receive */

/* Return: its length; 0: it is none. */
static size_t bulk_wire_get(const uint8_t *at, size_t bytes, uint64_t *ret)
{
	*ret = 0;
	for (size_t n = 0; n < bytes && n < 10; n++) {
		*ret |= (uint64_t)(at[n] & 0x7f) << (7 * n);
		if (!(at[n] & 0x80))
			return n + 1;
	}
	return 0;
}

/* Length of the field behind a tag of @kind; 0: it is none. */
static size_t bulk_wire_field(const uint8_t *at, size_t bytes, unsigned kind)
{
	uint64_t v;
	size_t n;

	switch (kind) {
	case 0:
		return bulk_wire_get(at, bytes, &v);
	case 2:
		n = bulk_wire_get(at, bytes, &v);
		return n && v <= bytes - n ? n + (size_t)v : 0;
	case 5:
		return bytes >= 4 ? 4 : 0;
	default:
		return 0;
	}
}

/* Where the tag of data is, or the end. Return: false: the fields in front are not whole. */
static bool bulk_wire_find_data(const uint8_t *head, size_t bytes, size_t *ret)
{
	size_t at = 0;

	while (at < bytes && head[at] != BULK_WIRE_DATA) {
		uint64_t tag;
		size_t n = bulk_wire_get(head + at, bytes - at, &tag), field;

		if (!n)
			return false;
		field = bulk_wire_field(head + at + n, bytes - at - n, tag & 7);
		if (!field)
			return false;
		at += n + field;
	}
	*ret = at;
	return true;
}

/* The first bytes of the message. Return: how many. */
static size_t bulk_wire_head(const grpc_slice_buffer *all, uint8_t *ret, size_t most)
{
	size_t n = 0;

	for (size_t i = 0; i < all->count && n < most; i++) {
		size_t part = GRPC_SLICE_LENGTH(all->slices[i]);

		part = part < most - n ? part : most - n;
		memcpy(ret + n, GRPC_SLICE_START_PTR(all->slices[i]), part);
		n += part;
	}
	return n;
}

/* Where @ret's data are: from byte @at of the message on. */
static void bulk_wire_place(const grpc_slice_buffer *all, size_t at, struct bulk_chunk *ret)
{
	size_t i = 0;

	for (; i < all->count && at >= GRPC_SLICE_LENGTH(all->slices[i]); i++)
		at -= GRPC_SLICE_LENGTH(all->slices[i]);
	ret->slices = all->slices + i;
	ret->n_slices = all->count - i;
	ret->skip = at;
}

bool bulk_wire_unpack(const grpc_byte_buffer *buffer, struct bulk_chunk *ret)
{
	const grpc_slice_buffer *all = &buffer->data.raw.slice_buffer;
	uint8_t head[BULK_HEAD_BYTES];
	size_t n = bulk_wire_head(all, head, sizeof(head)), at, front;
	uint64_t bytes = 0;

	if (buffer->data.raw.compression != GRPC_COMPRESS_NONE ||
	    !bulk_wire_find_data(head, n, &at))
		return false;
	front = at;
	if (at < n) {
		size_t length = bulk_wire_get(head + at + 1, n - at - 1, &bytes);

		if (!length)
			return false;
		front += 1 + length;
	}
	if (front > all->length || bytes != all->length - front)
		return false;
	ret->m = shardd__v1__fetch_chunk__unpack(NULL, at, head);
	ret->bytes = (size_t)bytes;
	bulk_wire_place(all, front, ret);
	return ret->m;
}

static struct iovec bulk_wire_part(const struct bulk_chunk *c, size_t i)
{
	size_t skip = i ? 0 : c->skip;

	return (struct iovec){ (uint8_t *)GRPC_SLICE_START_PTR(c->slices[i]) + skip,
			       GRPC_SLICE_LENGTH(c->slices[i]) - skip };
}

uint32_t bulk_wire_crc(const struct bulk_chunk *c)
{
	uint32_t crc = 0;

	for (size_t i = 0; i < c->n_slices; i++) {
		struct iovec part = bulk_wire_part(c, i);

		crc = crc32c_add(crc, part.iov_base, part.iov_len);
	}
	return crc;
}

/* Return: how many of the @n parts are written, or negative errno. The rest of the first one that is not
 * written stays in it. */
static int bulk_wire_write_some(struct iovec *parts, int n, int fd, uint64_t *at)
{
	ssize_t done;
	int i = 0;

	do {
		done = pwritev(fd, parts, n, (off_t)*at);
	} while (done < 0 && errno == EINTR);
	if (done <= 0)
		return done < 0 ? -errno : -EIO;
	*at += (uint64_t)done;
	for (; i < n && (size_t)done >= parts[i].iov_len; i++)
		done -= (ssize_t)parts[i].iov_len;
	if (i < n) {
		parts[i].iov_base = (uint8_t *)parts[i].iov_base + done;
		parts[i].iov_len -= (size_t)done;
	}
	return i;
}

int bulk_wire_write(const struct bulk_chunk *c, int fd, uint64_t at)
{
	struct iovec parts[BULK_WIRE_PARTS];

	for (size_t i = 0; i < c->n_slices;) {
		int n = 0, done = 0;

		for (; n < BULK_WIRE_PARTS && i < c->n_slices; n++, i++)
			parts[n] = bulk_wire_part(c, i);
		while (done < n) {
			int r = bulk_wire_write_some(parts + done, n - done, fd, &at);

			if (r < 0)
				return r;
			done += r;
		}
	}
	return 0;
}

Shardd__V1__FetchRequest *bulk_wire_request(grpc_byte_buffer *buffer)
{
	Shardd__V1__FetchRequest *m = NULL;
	grpc_byte_buffer_reader reader;
	grpc_slice all;

	if (!buffer || buffer->data.raw.compression != GRPC_COMPRESS_NONE ||
	    grpc_byte_buffer_length(buffer) > BULK_WIRE_REQUEST ||
	    !grpc_byte_buffer_reader_init(&reader, buffer))
		return NULL;
	all = grpc_byte_buffer_reader_readall(&reader);
	grpc_byte_buffer_reader_destroy(&reader);
	m = shardd__v1__fetch_request__unpack(NULL, GRPC_SLICE_LENGTH(all),
					      GRPC_SLICE_START_PTR(all));
	grpc_slice_unref(all);
	return m;
}
