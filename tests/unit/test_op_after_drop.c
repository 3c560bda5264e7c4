/* Ops behind a DropUnits of their unit, taken in while the unit was there or afterwards: refused, whatever
 * they are. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "store/state.h"

TestSuite(op_after_drop, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define RANKS 2

static uint32_t one = 1, zero;

struct request_room {
	_Alignas(16) char room[512];
};

static state_unit *spec(const char *name, bool guarded)
{
	static const uint64_t shape[] = { 3 };
	state_unit *s = nodefix_spec(name, 11);
	state_buffer *b = state_buffer_new("mean", shape, 1);

	b->dtype = BUFFER_FP32;
	s->guarded = guarded;
	CHECK(state_unit_add_buffer(s, b) == 0);
	return s;
}

static const ProtobufCFieldDescriptor *field_of(const ProtobufCMessage *m, const char *name)
{
	return protobuf_c_message_descriptor_get_field_by_name(m->descriptor, name);
}

static void set_list(ProtobufCMessage *m, const char *name, uint32_t *value)
{
	const ProtobufCFieldDescriptor *f = field_of(m, name);

	if (!f || f->type != PROTOBUF_C_TYPE_UINT32 || f->label != PROTOBUF_C_LABEL_REPEATED)
		return;
	*(uint32_t **)((char *)m + f->offset) = value;
	*(size_t *)((char *)m + f->quantifier_offset) = 1;
}

/* A request of the op that names unit 1, if it names any. */
static ProtobufCMessage *request_of(const char *name, struct request_room *room)
{
	static Shardd__V1__Seed seed = SHARDD__V1__SEED__INIT;
	const ProtobufCFieldDescriptor *f;
	ProtobufCMessage *m = (ProtobufCMessage *)room;

	for (unsigned i = 0; op_table[i]; i++)
		if (strcmp(op_table[i]->name, name) == 0)
			protobuf_c_message_init(op_table[i]->request, m);
	f = field_of(m, "unit");
	if (f)
		*(uint32_t *)((char *)m + f->offset) = 1;
	for (unsigned i = 0; i < 2; i++) {
		f = field_of(m, i ? "pass" : "array");
		if (f)
			*(uint32_t *)((char *)m + f->offset) = 1;
	}
	set_list(m, "units", &one);
	set_list(m, "tensors", &zero);
	if (strcmp(name, "Initialise") == 0) {
		((Shardd__V1__InitialiseRequest *)m)->how_case =
			SHARDD__V1__INITIALISE_REQUEST__HOW_SEED;
		((Shardd__V1__InitialiseRequest *)m)->seed = &seed;
	}
	return m;
}

static bool names_a_unit(const ProtobufCMessage *m)
{
	const ProtobufCFieldDescriptor *f = field_of(m, "units");

	return field_of(m, "unit") || (f && f->type == PROTOBUF_C_TYPE_UINT32);
}

static void behind_a_drop(const char *name, unsigned devices, bool guarded, bool early)
{
	struct nodefix_op drop[RANKS] = { 0 }, op[RANKS] = { 0 };
	struct request_room rooms[RANKS], drops[RANKS];
	struct member *m[RANKS];
	struct nodefix n;
	struct job *job;

	nodefix_begin(&n, &(struct nodefix_options){ .devices = devices });
	job = nodefix_job(&n, "job", RANKS, 0);
	for (unsigned i = 0; i < RANKS; i++)
		m[i] = nodefix_join(&n, job, i);
	nodefix_unit(&n, job, spec("u", guarded), m, RANKS);
	nodefix_unit(&n, job, spec("v", guarded), m, RANKS);
	for (unsigned i = 0; i < RANKS; i++) {
		if (early) { /* all are taken in before the drop begins */
			op[i].seq = 2;
			drop[i].seq = 1;
			nodefix_submit(&n, m[i], name, request_of(name, &rooms[i]), &op[i]);
		}
		nodefix_submit(&n, m[i], "DropUnits", request_of("DropUnits", &drops[i]), &drop[i]);
		if (!early)
			nodefix_submit(&n, m[i], name, request_of(name, &rooms[i]), &op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&drop[i], "DropUnits");
	for (unsigned i = 0; i < RANKS; i++) {
		nodefix_wait(&op[i]);
		if (!names_a_unit((ProtobufCMessage *)&rooms[i]))
			continue;
		cr_expect(op[i].fault.code, "%s was done", name);
	}
	cr_expect_eq(job->quota.by_class[MEM_GRAD] + job->quota.by_class[MEM_FULL], 0, "%s", name);
	nodefix_end(&n);
}

/* NextShard waits, for a shard of any unit. */
Test(op_after_drop, every_op)
{
	for (unsigned i = 0; op_table[i]; i++)
		for (unsigned k = 0; k < 8; k++)
			if (op_table[i]->request && op_table[i] != &op_next_shard)
				behind_a_drop(op_table[i]->name, 1 + k % 2, k & 2, k & 4);
}
