/*
 * Unpacks messages from clients, in bounded memory.
 *
 * A few bytes on the wire can need many in memory (a repeated empty message is two bytes on the
 * wire and about a hundred in memory), so every message is unpacked into an arena with a budget.
 * The arena is dropped as a whole. Free of gRPC, so that the fuzzer links it alone. Any thread, one
 * at a time per message.
 */
#ifndef SHARDD_RPC_CODEC_H
#define SHARDD_RPC_CODEC_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	CODEC_E_MALFORMED = 1, /* the bytes are not such a message */
	CODEC_E_BUDGET = 2,    /* it would take more memory than allowed, or than there is */
};

struct codec_chunk;

/* An unpacked message and the memory it lies in. */
struct codec_message {
	ProtobufCMessage *msg;      /* NULL: none */
	struct codec_chunk *chunks; /* newest first */
	size_t left;                /* free bytes at the end of the newest chunk */
	uint64_t used;              /* bytes handed out */
	uint64_t budget;            /* bytes that may be handed out */
	bool over;                  /* an allocation was refused */
};

#define CODEC_MESSAGE_NULL ((struct codec_message){ .msg = NULL })

/* Memory that a message of @bytes may take when unpacked: 64 MiB and 16 times its
 * size on the wire. */
uint64_t codec_budget(size_t bytes);

/* Unpack @data (borrowed, copied out of) as @desc into @ret, which must be NULL-ed.
 * Return: 0, CODEC_E_MALFORMED or CODEC_E_BUDGET; on failure @ret is empty. */
int codec_unpack(struct codec_message *ret, const ProtobufCMessageDescriptor *desc,
		 const uint8_t *data, size_t bytes, uint64_t budget);

/* Free the message. Safe after CODEC_MESSAGE_NULL and twice. */
void codec_message_deinit(struct codec_message *m);

/* Replace in place, with '?', what is not valid UTF-8 or is a control character:
 * other languages refuse such strings, and texts quote strings from clients. */
void codec_clean_text(char *text);

#endif
