/*
 * Arbitrary bytes as what the ranks of a job ask for and what happens to them, over the fake
 * backends: sequences of ops.
 *
 * The first byte says on what it plays, the second what is prepared (a scenario of
 * fault/scenarios.c). The rest is commands: a byte that says which, for which rank, and an
 * argument. Ranks ask as fault/asks.c does, or with a message of any fields, which is what a
 * trainer can send; completions come one by one; ranks are lost, join again, leave.
 *
 * Nobody checks what an op says. Every op ends once, with a reason if it failed; the ranks
 * train again afterwards, and every byte is back.
 */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../fault/asks.h"
#include "core/check.h"

enum {
	MAX_COMMANDS = 64,
	MAX_MESSAGES = 64,
	MAX_BYTES = 1 << 20, /* of one buffer */
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* ------------------------------------------------- what the fixtures say without Criterion */

void criterion_send_assert(struct criterion_assert_stats *stats)
{
	if (!stats->passed)
		fprintf(stderr, "%s:%u: %s\n", stats->file, stats->line, stats->message);
}

void criterion_abort_test(void)
{
	abort();
}

void cri_asserts_passed_incr(void)
{
}

/* ------------------------------------------------------------------------------- the input */

struct input {
	const uint8_t *at;
	size_t left;
};

/* 0 behind the end. */
static uint8_t next(struct input *in)
{
	if (!in->left)
		return 0;
	in->left--;
	return *in->at++;
}

/* -------------------------------------------------------------- ops with any fields at all */

/* They live until their ops are over. */
static struct {
	ProtobufCMessage *messages[MAX_MESSAGES];
	unsigned n;
} kept;

static void forget_messages(void)
{
	while (kept.n) {
		ProtobufCMessage *m = kept.messages[--kept.n];

		*(void **)((char *)m + m->descriptor->fields[0].offset) = NULL; /* the fixture's */
		protobuf_c_message_free_unpacked(m, NULL);
	}
}

/* What a trainer may ask for, and what would only cost time, or leave nothing to train on. */
static void tame(ProtobufCMessage *m)
{
	if (m->descriptor == &shardd__v1__alloc_buffer_request__descriptor)
		((Shardd__V1__AllocBufferRequest *)m)->bytes %= MAX_BYTES;
	if (m->descriptor == &shardd__v1__commit_request__descriptor)
		((Shardd__V1__CommitRequest *)m)->step %= 1000;
}

static void set_header(struct nodefix_op *op, const struct scene *s, uint8_t how)
{
	const uint64_t now = s->job->rec->epoch, epochs[] = { 0, now, now + 1, UINT64_MAX };

	op->epoch = epochs[how & 3];
	op->seq = how & 4 ? how >> 3 : 0;
}

static const struct op_type *any_type(uint8_t which)
{
	size_t n = 0;

	while (op_table[n])
		n++;
	return op_table[which % n];
}

/* nodefix_submit copies it. protobuf-c reads a field with the number 0 if the number has two bytes, and does not read what
 * it then writes, one byte. */
static bool can_be_copied(const ProtobufCMessage *m)
{
	size_t bytes = protobuf_c_message_get_packed_size(m);
	uint8_t *packed = malloc(bytes + 1);
	ProtobufCMessage *copy;

	CHECK(packed);
	(void)protobuf_c_message_pack(m, packed);
	copy = protobuf_c_message_unpack(m->descriptor, NULL, bytes, packed);
	free(packed);
	if (copy)
		protobuf_c_message_free_unpacked(copy, NULL);
	return copy;
}

static void ask_anything(struct scene *s, unsigned rank, struct input *in)
{
	const struct op_type *t = any_type(next(in));
	uint8_t how = next(in);
	size_t n = next(in) % 64;
	ProtobufCMessage *m;
	struct nodefix_op *op;

	n = n < in->left ? n : in->left;
	if (kept.n == MAX_MESSAGES || !t->request) /* DdpBucket: nobody asks for it */
		return;
	m = protobuf_c_message_unpack(t->request, NULL, n, in->at);
	in->at += n;
	in->left -= n;
	if (!m)
		return;
	protobuf_c_message_free_unpacked(
		*(ProtobufCMessage **)((char *)m + t->request->fields[0].offset), NULL);
	*(ProtobufCMessage **)((char *)m + t->request->fields[0].offset) = NULL;
	kept.messages[kept.n++] = m;
	tame(m);
	if (!can_be_copied(m))
		return;
	op = scene_op(s, rank);
	set_header(op, s, how);
	nodefix_submit(s->n, s->m[rank], t->name, m, op);
}

/* -------------------------------------------------------------------------------- commands */

static bool can_ask(const struct scene *s, unsigned rank)
{
	return s->m[rank] && s->m[rank]->state == MEMBER_JOINED &&
	       scene_has_room(s, rank, MOST_OF_AN_ASK);
}

static void ask(struct scene *s, unsigned rank, ask_fn fn)
{
	if (can_ask(s, rank))
		fn(s, rank);
}

static void go_on(struct scene *s, unsigned steps)
{
	while (steps-- && scene_step(s))
		;
}

static void let_go(struct scene *s)
{
	scene_raise(s);
	scene_let_go(s);
	scene_hold(s);
}

enum { ASK_ALL, ASK_ALL_MORE, ASK_ONE, ASK_ANYTHING, STEP, LET_GO, DISTURB, JOIN };

/* Return: false: the job is gone. */
static bool obey(struct scene *s, struct input *in)
{
	uint8_t command = next(in);
	unsigned rank = (command >> 3) % s->stage->ranks;
	uint8_t arg;

	switch (command & 7) {
	case ASK_ALL:
	case ASK_ALL_MORE:
		arg = next(in);
		for (unsigned r = 0; r < s->stage->ranks; r++)
			ask(s, r, all_asks[arg % n_all_asks]);
		break;
	case ASK_ONE:
		ask(s, rank, all_asks[next(in) % n_all_asks]);
		break;
	case ASK_ANYTHING:
		if (can_ask(s, rank))
			ask_anything(s, rank, in);
		break;
	case STEP:
		go_on(s, 1 + (command >> 3));
		break;
	case LET_GO:
		let_go(s);
		break;
	case DISTURB:
		(void)scene_disturb(s, next(in) % _DISTURB_N, rank);
		break;
	case JOIN:
		if (!s->job->life.draining)
			(void)scene_join(s, rank);
		break;
	}
	return !s->job->life.deleted;
}

static void play(struct nodefix *n, const struct stage *stage, struct input *in)
{
	static struct scene s; /* ops are written to until they are over */
	const struct scenario *o = &scenarios[next(in) % n_scenarios];
	bool gone = false;

	scene_begin(&s, n, stage);
	if (o->prepare && o->ranks <= stage->ranks)
		o->prepare(&s);
	s.promised = stage->promises;
	scene_hold(&s);
	for (unsigned i = 0; !gone && in->left && i < MAX_COMMANDS; i++)
		gone = !obey(&s, in);
	s.epoch = s.job->rec->epoch;
	scene_end(&s, gone);
	forget_messages();
}

/* Those of test_disturbances.c, and what is between them. */
static const struct stage stages[] = {
	{ .ranks = 1, .devices = 1 },
	{ .ranks = 2, .devices = 1 },
	{ .ranks = 2, .devices = 2 },
	{ .ranks = 4, .devices = 2, .batches = true },
	{ .ranks = 4, .devices = 2, .queues = true, .streams = true },
	{ .ranks = 2, .devices = 2, .queues = true, .later = true },
	{ .ranks = 2, .devices = 2, .queues = true, .streams = true, .promises = true },
	{ .ranks = 1, .devices = 1, .queues = true, .streams = true },
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static struct nodefix node;
	struct input in = { data, n };
	const struct stage *stage = &stages[next(&in) % ARRAY_SIZE(stages)];

	scene_node_begin(&node, stage);
	play(&node, stage, &in);
	scene_node_end(&node);
	return 0;
}
