/*
 * Items - spans or metrics - into requests of OTLP. A request is closed before it gets longer than OTLP_REQUEST_BYTES,
 * unless one item alone is longer: collectors refuse those of 4 MiB. A packer belongs to one thread at a time.
 */
#ifndef SHARDD_OTLP_OTLP_PACK_H
#define SHARDD_OTLP_OTLP_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "otlp.pb-c.h"
#include "rpc/arena.h"

#define OTLP_REQUEST_BYTES (UINT64_C(1) << 20)
/* Items of a request. */
#define OTLP_REQUEST_ITEMS 4096u

/* A request that is packed. */
struct otlp_request {
	uint8_t *data; /* owned */
	size_t bytes;
	uint64_t n; /* spans, or data points */
};

/* Several, in their order. */
struct otlp_requests {
	struct otlp_request *list; /* owned */
	size_t n, room;
	size_t at;      /* the first that was not sent */
	uint64_t bytes; /* of all */
};

#define OTLP_REQUESTS_NULL ((struct otlp_requests){ .list = NULL })

/* Free all; safe twice. */
void otlp_requests_deinit(struct otlp_requests *r);

/* The attributes of the resource: this daemon. All are borrowed. */
struct otlp_self {
	const char *service, *instance, *host, *version;
	const char *cluster; /* "": none */
	int pid;
};

struct otlp_packer {
	const struct otlp_self *self; /* borrowed */
	struct otlp_requests *out;    /* borrowed */
	struct arena arena;           /* of the items */
	ProtobufCBinaryData *items;   /* in it; NULL: there are none */
	size_t n_items;
	uint64_t bytes, n;
	bool failed; /* no memory: what is in @out is not all */
};

void otlp_packer_init(struct otlp_packer *p, const struct otlp_self *self,
		      struct otlp_requests *out);
/* One item, which is copied: @n spans or data points. */
void otlp_packer_add(struct otlp_packer *p, const ProtobufCMessage *item, uint64_t n);
/* Close the last request. Return: was there memory for all? */
bool otlp_packer_end(struct otlp_packer *p);

/* Attributes, in an arena. */
struct otlp_attributes {
	struct arena *arena; /* borrowed */
	Shardd__Otlp__V1__KeyValue **list;
	size_t n, room;
};

/* For at most @room. Without memory the arena is marked, and it has room for none. */
void otlp_attributes_init(struct otlp_attributes *a, struct arena *arena, size_t room);
/* @key: static. @text: copied, cleaned of what is no UTF-8. */
void otlp_attributes_text(struct otlp_attributes *a, const char *key, const char *text);
void otlp_attributes_number(struct otlp_attributes *a, const char *key, int64_t n);
void otlp_attributes_bool(struct otlp_attributes *a, const char *key, bool value);

#endif
