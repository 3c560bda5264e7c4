/*
 * Requests built by name: a good one of each method, in which one field is then set to
 * anything at all. For trainers (tests/lib/daemonfix.h). Link shardd_ctl.
 */
#ifndef SHARDD_TESTS_REQUEST_H
#define SHARDD_TESTS_REQUEST_H

#include <stddef.h>
#include <stdint.h>

#include "shardd.pb-c.h"
#include "status.pb-c.h"

enum request_value_kind { NUMBER, REAL, TEXT, LONG_TEXT, BYTES, NUMBERS, NOTHING };

struct request_value {
	enum request_value_kind kind;
	uint64_t number; /* LONG_TEXT, BYTES: how many */
	double real;
	const char *text;
	const uint64_t *numbers;
	size_t n;
};

#define N(x)    ((struct request_value){ .kind = NUMBER, .number = (uint64_t)(x) })
#define R(x)    ((struct request_value){ .kind = REAL, .real = (x) })
#define T(x)    ((struct request_value){ .kind = TEXT, .text = (x) })
#define LONG(n) ((struct request_value){ .kind = LONG_TEXT, .number = (n) })
#define B(n)    ((struct request_value){ .kind = BYTES, .number = (n) })
#define NONE    ((struct request_value){ .kind = NOTHING })
#define LIST(...)                                                                 \
	((struct request_value){ .kind = NUMBERS,                                 \
				 .numbers = (const uint64_t[]){ __VA_ARGS__ },    \
				 .n = sizeof((const uint64_t[]){ __VA_ARGS__ }) / \
				      sizeof(uint64_t) })

/* What good requests are made of; may be changed until the next one is made. */
struct request_parts {
	Shardd__V1__JobSpec job;
	Shardd__V1__OpHeader header;
	Shardd__V1__Init init;
	Shardd__V1__TensorSpec tensor[2], *tensors[2];
	Shardd__V1__Optimizer optimizer;
	Shardd__V1__UnitSpec unit[2], *units[2];
	Shardd__V1__Seed seed;
	Shardd__V1__FromRank from;
	Shardd__V1__DdpTensor sparse, *sparses[1];
	Shardd__V1__SparseRows rows;
	int64_t row[2];
	Shardd__V1__StepSettings setting, *settings[1]; /* of all tensors */
	uint32_t unit_id[1], place[1];                  /* of a ddp: its unit, a tensor's index */
	uint64_t shape[2];
	uint32_t ranks[2];
	uint64_t buffer; /* of the session */
};
extern struct request_parts good;

/* The parts as they are at first; only @buffer stays. */
void request_reset(void);

/* The method "Join" or "Status/GetStatus". @ret_service: its service's full name; may be NULL.
 * Return: NULL: there is none. */
const ProtobufCMethodDescriptor *request_method(const char *name, const char **ret_service);

/* A good request of @method ("Join", "Status/GetStatus") in @room, which is large enough for
 * any (REQUEST_ROOM bytes). */
#define REQUEST_ROOM 512
ProtobufCMessage *request_good(const char *method, void *room);
/* The same in a room of its own, until the next call. */
ProtobufCMessage *request_plain(const char *method);
/* The same with its field unit set to @unit. */
ProtobufCMessage *request_of_unit(const char *method, uint32_t unit);

/* Set a field: "units.tensors.shape"; of lists of messages the first one. */
void request_set(ProtobufCMessage *m, const char *path, struct request_value v);

#endif
