#include "net/local_out.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "net/fdlist.h"
#include "net/local_codec.h"
#include "rpc/status_map.h"

struct out_frame {
	struct list link;
	struct fdlist fds; /* owned until the first byte is sent */
	size_t size;
	size_t sent;
	union {
		struct shd1_header h;
		struct shd1_error error;
		uint8_t bytes[SHD1_MAX_FRAME];
	};
};

static struct out_frame *local_out_frame_free(struct out_frame *frame)
{
	if (!frame)
		return NULL;
	list_unlink(&frame->link);
	fdlist_deinit(&frame->fds);
	free(frame);
	return NULL;
}

/* Consumes @fd. Return: NULL: no memory. */
static struct out_frame *local_out_frame_new(const struct shd1_header *h, int fd)
{
	struct out_frame *frame = calloc(1, sizeof(*frame));

	CHECK(h->bytes >= sizeof(*h) && h->bytes <= SHD1_MAX_FRAME);
	if (!frame) {
		fd_close(fd);
		return NULL;
	}
	list_init(&frame->link);
	frame->size = h->bytes;
	memcpy(frame->bytes, h, h->bytes);
	fdlist_init_consume(&frame->fds, &fd, fd >= 0 ? 1 : 0);
	return frame;
}

/* Too many of our descriptors are in transit, unread by some peer (the kernel counts them per
 * user): this one is refused with a fault, and its channel stays. */
static void local_out_refuse_descriptor(struct out_frame *frame)
{
	struct fault f = FAULT_NULL;
	uint32_t tag = frame->h.tag;

	fault_set(&f, FAULT_EXHAUSTED, NULL,
		  "too many descriptors are in transit to peers that have not read them");
	fdlist_deinit(&frame->fds);
	local_codec_error(&frame->error, tag, (uint32_t)status_map_code(f.code), 0, &f);
	frame->size = sizeof(frame->error);
}

static ssize_t local_out_send_some(struct out_frame *frame, int sock)
{
	_Alignas(struct cmsghdr) char control[FDLIST_CONTROL_BYTES];
	struct iovec iov = { frame->bytes + frame->sent, frame->size - frame->sent };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t n;

	CHECK(frame->sent == 0 || fdlist_count(&frame->fds) == 0);
	msg.msg_controllen = fdlist_control(&frame->fds, control);
	msg.msg_control = msg.msg_controllen ? control : NULL;
	n = sendmsg(sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
	return n < 0 ? -errno : n;
}

/* Return: 0: it is sent; -EAGAIN the socket is full; other negative errno. */
static int local_out_frame_send(struct out_frame *frame, int sock)
{
	while (frame->sent < frame->size) {
		ssize_t n = local_out_send_some(frame, sock);

		if (n == -EINTR)
			continue;
		if (n == -ETOOMANYREFS && fdlist_count(&frame->fds) > 0) {
			local_out_refuse_descriptor(frame);
			continue;
		}
		if (n < 0)
			return (int)n;
		/* Sent with the first byte: sending it again would create a second descriptor. */
		fdlist_deinit(&frame->fds);
		frame->sent += (size_t)n;
	}
	return 0;
}

void local_out_init(struct local_out *o)
{
	*o = (struct local_out){ .n = 0 };
	list_init(&o->frames);
}

int local_out_flush(struct local_out *o, int sock)
{
	while (!list_empty(&o->frames)) {
		struct out_frame *frame = list_first(&o->frames, struct out_frame, link);
		int r = local_out_frame_send(frame, sock);

		if (r == -EAGAIN)
			return 0;
		if (r < 0)
			return r;
		local_out_frame_free(frame);
		o->n--;
	}
	CHECK(o->n == 0);
	return 0;
}

int local_out_put(struct local_out *o, int sock, const struct shd1_header *h, int fd)
{
	struct out_frame *frame;

	if (o->n >= LOCAL_OUT_MAX) {
		fd_close(fd);
		return LOCAL_OUT_E_FULL;
	}
	frame = local_out_frame_new(h, fd);
	if (!frame)
		return -ENOMEM;
	list_append(&o->frames, &frame->link);
	o->n++;
	return local_out_flush(o, sock);
}

void local_out_deinit(struct local_out *o)
{
	while (!list_empty(&o->frames))
		local_out_frame_free(list_first(&o->frames, struct out_frame, link));
	o->n = 0;
}
