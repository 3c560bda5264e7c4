/* Messages as bytes. All numbers are little endian:
 *
 *   version (1 byte), type (1), flags (1), phase (4), and then by type
 *   key      kind (1), group (8), number (8)
 *   nodes    bytes (1), and so many bytes of the set; without ORDER_MSG_ALL
 *   print    8 words (64), rank (4), pid (4), text
 *   chains   how many (1), and of each the set (8) and the value (8)
 *   fault    code (1), domain (1), native (4), text
 *   text     bytes (2), and so many of them without the terminating 0
 *
 * One table says which parts a type has. */
#include "order/order.h"

#include <string.h>

#include "core/check.h"

#define ORDER_MSG_VERSION 2u

enum order_msg_part {
	ORDER_MSG_HAS_KEY = 1,
	ORDER_MSG_HAS_NODES = 2,
	ORDER_MSG_HAS_PRINT = 4,
	ORDER_MSG_HAS_FAULT = 8,
	ORDER_MSG_HAS_POSITION = 16,
	ORDER_MSG_HAS_SCHEDULE = 32,
	ORDER_MSG_HAS_CHAINS = 64,
};

static const uint8_t order_msg_parts[_ORDER_MSG_N] = {
	[ORDER_MSG_ANNOUNCE] = ORDER_MSG_HAS_KEY | ORDER_MSG_HAS_NODES | ORDER_MSG_HAS_PRINT |
			       ORDER_MSG_HAS_CHAINS,
	[ORDER_MSG_REFUSE] = ORDER_MSG_HAS_KEY | ORDER_MSG_HAS_NODES | ORDER_MSG_HAS_FAULT,
	[ORDER_MSG_START] = ORDER_MSG_HAS_KEY | ORDER_MSG_HAS_NODES | ORDER_MSG_HAS_POSITION,
	[ORDER_MSG_FAIL] = ORDER_MSG_HAS_KEY | ORDER_MSG_HAS_FAULT,
	[ORDER_MSG_SCHEDULE] = ORDER_MSG_HAS_SCHEDULE,
	[ORDER_MSG_DEVIATE] = ORDER_MSG_HAS_POSITION,
	[ORDER_MSG_STOP] = 0,
	[ORDER_MSG_REACHED] = ORDER_MSG_HAS_POSITION,
	[ORDER_MSG_RESUME] = ORDER_MSG_HAS_POSITION,
	[ORDER_MSG_CAUGHT_UP] = 0,
};

/* Which flags a type may have. */
static const uint8_t order_msg_flags[_ORDER_MSG_N] = {
	[ORDER_MSG_ANNOUNCE] = ORDER_FLAGS | ORDER_MSG_ALL | ORDER_MSG_KNOWN,
	[ORDER_MSG_REFUSE] = ORDER_FLAGS | ORDER_MSG_ALL | ORDER_MSG_AGAIN,
	[ORDER_MSG_START] = ORDER_MSG_ALL,
};

/* The types that have no such parts must be within the largest one that has. */
_Static_assert(ORDER_MSG_MAX >= 7 + 17 + 1 + ORDER_MAX_NODES / 8 + 6 + 2 + 512, "REFUSE fits");
_Static_assert(ORDER_MSG_MAX >=
		       7 + 17 + 1 + ORDER_MAX_NODES / 8 + 72 + 2 + 192 + 1 + 16 * ORDER_MSG_CHAINS,
	       "ANNOUNCE fits");

static void order_msg_put(uint8_t **at, uint64_t value, unsigned bytes)
{
	for (unsigned i = 0; i < bytes; i++)
		*(*at)++ = (uint8_t)(value >> 8 * i);
}

static void order_msg_put_text(uint8_t **at, const char *text, size_t size)
{
	size_t n = strnlen(text, size - 1);

	order_msg_put(at, n, 2);
	memcpy(*at, text, n);
	*at += n;
}

static void order_msg_put_nodes(uint8_t **at, const struct order_nodes *nodes)
{
	unsigned n = ORDER_MAX_NODES / 8;

	while (n && !(nodes->words[(n - 1) / 8] >> (n - 1) % 8 * 8 & 0xff))
		n--;
	order_msg_put(at, n, 1);
	for (unsigned i = 0; i < n; i++)
		order_msg_put(at, nodes->words[i / 8] >> i % 8 * 8 & 0xff, 1);
}

static void order_msg_put_print(uint8_t **at, const struct order_msg *msg)
{
	for (unsigned i = 0; i < ARRAY_SIZE(msg->print.words); i++)
		order_msg_put(at, msg->print.words[i], 8);
	order_msg_put(at, msg->rank, 4);
	order_msg_put(at, (uint32_t)msg->pid, 4);
	order_msg_put_text(at, msg->print.text, sizeof(msg->print.text));
}

static void order_msg_put_chains(uint8_t **at, const struct order_msg *msg)
{
	CHECK(msg->n_chains <= ORDER_MSG_CHAINS);
	order_msg_put(at, msg->n_chains, 1);
	for (uint32_t i = 0; i < msg->n_chains; i++) {
		order_msg_put(at, msg->chains[i].set, 8);
		order_msg_put(at, msg->chains[i].value, 8);
	}
}

static void order_msg_put_fault(uint8_t **at, const struct fault *f)
{
	order_msg_put(at, f->code, 1);
	order_msg_put(at, f->domain, 1);
	order_msg_put(at, (uint32_t)f->native, 4);
	order_msg_put_text(at, f->text, sizeof(f->text));
}

size_t order_pack(const struct order_msg *msg, uint8_t out[ORDER_MSG_MAX])
{
	uint8_t *at = out;
	unsigned parts;

	CHECK(msg->type && msg->type < _ORDER_MSG_N);
	parts = order_msg_parts[msg->type];
	order_msg_put(&at, ORDER_MSG_VERSION, 1);
	order_msg_put(&at, msg->type, 1);
	order_msg_put(&at, msg->flags, 1);
	order_msg_put(&at, msg->phase, 4);
	if (parts & ORDER_MSG_HAS_KEY) {
		order_msg_put(&at, msg->key.kind, 1);
		order_msg_put(&at, msg->key.group, 8);
		order_msg_put(&at, msg->key.number, 8);
	}
	if (parts & ORDER_MSG_HAS_NODES && !(msg->flags & ORDER_MSG_ALL))
		order_msg_put_nodes(&at, &msg->nodes);
	if (parts & ORDER_MSG_HAS_PRINT)
		order_msg_put_print(&at, msg);
	if (parts & ORDER_MSG_HAS_CHAINS)
		order_msg_put_chains(&at, msg);
	if (parts & ORDER_MSG_HAS_FAULT)
		order_msg_put_fault(&at, &msg->fault);
	if (parts & ORDER_MSG_HAS_POSITION)
		order_msg_put(&at, msg->position, 8);
	if (parts & ORDER_MSG_HAS_SCHEDULE) {
		order_msg_put(&at, msg->hash, 8);
		order_msg_put(&at, msg->n, 4);
	}
	return (size_t)(at - out);
}

/* Bytes that are read; after one that is not there @bad stays, and all is 0. */
struct order_msg_reader {
	const uint8_t *at;
	const uint8_t *end;
	bool bad;
};

static uint64_t order_msg_get(struct order_msg_reader *r, unsigned bytes)
{
	uint64_t value = 0;

	if (r->bad || (size_t)(r->end - r->at) < bytes) {
		r->bad = true;
		return 0;
	}
	for (unsigned i = 0; i < bytes; i++)
		value |= (uint64_t)*r->at++ << 8 * i;
	return value;
}

static void order_msg_get_text(struct order_msg_reader *r, char *text, size_t size)
{
	size_t n = order_msg_get(r, 2);

	if (n >= size || (size_t)(r->end - r->at) < n || memchr(r->at, 0, n)) {
		r->bad = true;
		return;
	}
	memcpy(text, r->at, n);
	text[n] = '\0';
	r->at += n;
}

static void order_msg_get_nodes(struct order_msg_reader *r, struct order_nodes *nodes)
{
	unsigned n = (unsigned)order_msg_get(r, 1);

	if (n > ORDER_MAX_NODES / 8)
		r->bad = true;
	for (unsigned i = 0; i < n && !r->bad; i++)
		nodes->words[i / 8] |= order_msg_get(r, 1) << i % 8 * 8;
}

static void order_msg_get_key(struct order_msg_reader *r, struct order_key *key)
{
	key->kind = (uint32_t)order_msg_get(r, 1);
	key->group = order_msg_get(r, 8);
	key->number = order_msg_get(r, 8);
	r->bad |= key->kind == 0 || key->kind >= _ORDER_KIND_N;
}

static void order_msg_get_print(struct order_msg_reader *r, struct order_msg *msg)
{
	for (unsigned i = 0; i < ARRAY_SIZE(msg->print.words); i++)
		msg->print.words[i] = order_msg_get(r, 8);
	msg->rank = (uint32_t)order_msg_get(r, 4);
	msg->pid = (int32_t)order_msg_get(r, 4);
	order_msg_get_text(r, msg->print.text, sizeof(msg->print.text));
}

static void order_msg_get_chains(struct order_msg_reader *r, struct order_msg *msg)
{
	msg->n_chains = (uint32_t)order_msg_get(r, 1);
	if (msg->n_chains > ORDER_MSG_CHAINS) {
		r->bad = true;
		msg->n_chains = 0;
	}
	for (uint32_t i = 0; i < msg->n_chains; i++) {
		msg->chains[i].set = order_msg_get(r, 8);
		msg->chains[i].value = order_msg_get(r, 8);
	}
}

static void order_msg_get_fault(struct order_msg_reader *r, struct fault *f)
{
	uint64_t code = order_msg_get(r, 1), domain = order_msg_get(r, 1);

	r->bad |= code == FAULT_NONE || code >= _FAULT_N || domain >= _FAULT_DOMAIN_N;
	f->code = r->bad ? FAULT_NONE : (enum fault_code)code;
	f->domain = r->bad ? FAULT_DOMAIN_SHARDD : (enum fault_domain)domain;
	f->native = (int32_t)order_msg_get(r, 4);
	order_msg_get_text(r, f->text, sizeof(f->text));
}

static void order_msg_get_parts(struct order_msg_reader *r, struct order_msg *msg)
{
	unsigned parts = order_msg_parts[msg->type];

	if (parts & ORDER_MSG_HAS_KEY)
		order_msg_get_key(r, &msg->key);
	if (parts & ORDER_MSG_HAS_NODES && !(msg->flags & ORDER_MSG_ALL))
		order_msg_get_nodes(r, &msg->nodes);
	if (parts & ORDER_MSG_HAS_PRINT)
		order_msg_get_print(r, msg);
	if (parts & ORDER_MSG_HAS_CHAINS)
		order_msg_get_chains(r, msg);
	if (parts & ORDER_MSG_HAS_FAULT)
		order_msg_get_fault(r, &msg->fault);
	if (parts & ORDER_MSG_HAS_POSITION)
		msg->position = order_msg_get(r, 8);
	if (parts & ORDER_MSG_HAS_SCHEDULE) {
		msg->hash = order_msg_get(r, 8);
		msg->n = (uint32_t)order_msg_get(r, 4);
	}
}

int order_unpack(const uint8_t *bytes, size_t n, struct order_msg *ret)
{
	struct order_msg_reader r = { .at = bytes, .end = bytes + n };
	struct order_msg msg = { 0 };

	if (order_msg_get(&r, 1) != ORDER_MSG_VERSION)
		return ORDER_E_MALFORMED;
	msg.type = (uint8_t)order_msg_get(&r, 1);
	msg.flags = (uint8_t)order_msg_get(&r, 1);
	msg.phase = (uint32_t)order_msg_get(&r, 4);
	if (r.bad || !msg.type || msg.type >= _ORDER_MSG_N ||
	    msg.flags & ~order_msg_flags[msg.type])
		return ORDER_E_MALFORMED;
	order_msg_get_parts(&r, &msg);
	if (r.bad || r.at != r.end)
		return ORDER_E_MALFORMED;
	*ret = msg;
	return 0;
}
