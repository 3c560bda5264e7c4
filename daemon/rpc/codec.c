#include "rpc/codec.h"

#include <stdlib.h>

#include "core/check.h"
#include "core/utf8.h"

#define BUDGET_BASE   ((uint64_t)64 << 20)
#define BUDGET_FACTOR 16u
#define ALIGNMENT     16u

/* With the address sanitizer every allocation gets its own chunk, so that a write past its end is
 * detected. */
#if defined(__SANITIZE_ADDRESS__)
#define CHUNK_MIN 0u
#define CHUNK_MAX 0u
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CHUNK_MIN 0u
#define CHUNK_MAX 0u
#endif
#endif
#ifndef CHUNK_MIN
#define CHUNK_MIN 1024u
#define CHUNK_MAX 65536u
#endif

struct codec_chunk {
	struct codec_chunk *next;
	size_t bytes; /* of data */
	_Alignas(ALIGNMENT) uint8_t data[];
};

uint64_t codec_budget(size_t bytes)
{
	return BUDGET_BASE + BUDGET_FACTOR * (uint64_t)bytes;
}

/* A new chunk for at least @bytes; chunks double, so that a large message takes few. */
static bool codec_add_chunk(struct codec_message *m, size_t bytes)
{
	size_t size = m->chunks ? m->chunks->bytes * 2 : CHUNK_MIN;
	struct codec_chunk *chunk;

	if (size > CHUNK_MAX)
		size = CHUNK_MAX;
	if (size < bytes)
		size = bytes;
	chunk = malloc(sizeof(*chunk) + size);
	if (!chunk)
		return false;
	chunk->next = m->chunks;
	chunk->bytes = size;
	m->chunks = chunk;
	m->left = size;
	return true;
}

static void *codec_arena_alloc(void *data, size_t bytes)
{
	struct codec_message *m = data;
	size_t size;
	uint8_t *p;

	/* First compare, then round up: @bytes may be near SIZE_MAX. */
	if (m->over || bytes > m->budget - m->used)
		goto refuse;
	size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
	if (size > m->budget - m->used)
		goto refuse;
	if ((size > m->left || !m->chunks) && !codec_add_chunk(m, size))
		goto refuse;
	p = m->chunks->data + (m->chunks->bytes - m->left);
	m->left -= size;
	m->used += size;
	return p;
refuse:
	m->over = true;
	return NULL;
}

static void codec_arena_free(void *data, void *pointer)
{
	(void)data; /* the arena is freed as a whole */
	(void)pointer;
}

int codec_unpack(struct codec_message *ret, const ProtobufCMessageDescriptor *desc,
		 const uint8_t *data, size_t bytes, uint64_t budget)
{
	ProtobufCAllocator allocator = { codec_arena_alloc, codec_arena_free, ret };
	bool over;

	CHECK(!ret->msg && !ret->chunks);
	CHECK(budget <= SIZE_MAX - ALIGNMENT);
	ret->budget = budget;
	ret->msg = protobuf_c_message_unpack(desc, &allocator, bytes, data);
	if (ret->msg)
		return 0;
	over = ret->over;
	codec_message_deinit(ret);
	return over ? CODEC_E_BUDGET : CODEC_E_MALFORMED;
}

void codec_message_deinit(struct codec_message *m)
{
	while (m->chunks) {
		struct codec_chunk *chunk = m->chunks;

		m->chunks = chunk->next;
		free(chunk);
	}
	*m = CODEC_MESSAGE_NULL;
}

void codec_clean_text(char *text)
{
	while (*text) {
		size_t n = utf8_length(text);

		if (n == 0)
			*text = '?';
		text += n ? n : 1;
	}
}
