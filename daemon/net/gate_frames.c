#include "net/gate_frames.h"

#include <string.h>

#include "core/check.h"

static uint32_t gate_frames_u32(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static struct gate_frame gate_frames_decode(const uint8_t *head)
{
	return (struct gate_frame){ .bytes = gate_frames_u32(head) >> 8,
				    .type = head[3],
				    .flags = head[4],
				    .stream = gate_frames_u32(head + 5) & 0x7fffffffu };
}

static enum gate_step gate_frames_head(struct gate_frames *r, const uint8_t *data, size_t n,
				       size_t *ret_used)
{
	size_t used = GATE_HEAD_BYTES - r->n_head;

	if (used > n)
		used = n;
	memcpy(r->head + r->n_head, data, used);
	r->n_head = (uint8_t)(r->n_head + used);
	*ret_used = used;
	if (r->n_head < GATE_HEAD_BYTES)
		return GATE_STEP_MORE;
	r->frame = gate_frames_decode(r->head);
	r->left = r->frame.bytes;
	r->n_head = 0;
	return GATE_STEP_HEAD;
}

enum gate_step gate_frames_next(struct gate_frames *r, const uint8_t *data, size_t n,
				size_t *ret_used)
{
	CHECK(r->n_head < GATE_HEAD_BYTES);
	*ret_used = 0;
	if (n == 0)
		return GATE_STEP_MORE;
	if (r->left == 0)
		return gate_frames_head(r, data, n, ret_used);
	*ret_used = r->left < n ? r->left : n;
	r->left -= (uint32_t)*ret_used;
	return GATE_STEP_BODY;
}
