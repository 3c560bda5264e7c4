/*
 * Arbitrary bytes as the request of every method: the first byte chooses the
 * method, the second the budget, the rest is the message.
 */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "health.pb-c.h"
#include "methods.h"
#include "reflection.pb-c.h"
#include "rpc/codec.h"
#include "publication.pb-c.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* By its line in methods.h; from 0xe0 on the service Status, from 0xf0 on Health: a new method
 * does not move the others. The last one is reflection's. */
static const ProtobufCMessageDescriptor *input(unsigned i)
{
	static const ProtobufCServiceDescriptor *const services[] = {
		&shardd__v1__session_service__descriptor,
		&shardd__v1__job_service__descriptor,
		&shardd__v1__unit_service__descriptor,
		&shardd__v1__training_service__descriptor,
		&shardd__v1__ddp_service__descriptor,
		&shardd__v1__publication_service__descriptor,
	};
	const ProtobufCServiceDescriptor *s = i >= 0xf0 ? &grpc__health__v1__health__descriptor
							: &shardd__v1__status_service__descriptor;
	const ProtobufCMethodDescriptor *m = NULL;

	if (i == 0xff)
		return &grpc__reflection__v1__server_reflection_request__descriptor;
	if (i >= 0xe0)
		return s->methods[(i & 0x0f) % s->n_methods].input;
	i %= sizeof(methods) / sizeof(methods[0]) - 1;
	for (size_t k = 0; !m && k < sizeof(services) / sizeof(services[0]); k++)
		m = protobuf_c_service_descriptor_get_method_by_name(services[k], methods[i].name);
	CHECK(m);
	return m->input;
}

/* What was taken can be written, and is the same when read again. It may be refused
 * then: protobuf-c lets a field 0 pass if its number is written in two bytes, and
 * writes it in one. */
static void round_trip(const struct codec_message *m, const ProtobufCMessageDescriptor *desc)
{
	struct codec_message again = CODEC_MESSAGE_NULL;
	size_t n = protobuf_c_message_get_packed_size(m->msg);
	uint8_t *bytes = malloc(n ? n : 1);

	CHECK(bytes && protobuf_c_message_pack(m->msg, bytes) == n);
	if (codec_unpack(&again, desc, bytes, n, codec_budget(n)) == 0)
		CHECK(protobuf_c_message_get_packed_size(again.msg) == n);
	codec_message_deinit(&again);
	free(bytes);
}

static void clean(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1);
	char *twice;

	CHECK(text);
	memcpy(text, data, size);
	text[size] = '\0';
	codec_clean_text(text);
	twice = strdup(text);
	CHECK(twice);
	codec_clean_text(twice);
	CHECK(strcmp(text, twice) == 0);
	free(twice);
	free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct codec_message m = CODEC_MESSAGE_NULL;
	const ProtobufCMessageDescriptor *desc;
	uint64_t budget;
	int r;

	if (size < 2)
		return 0;
	desc = input(data[0]);
	budget = data[1] ? (uint64_t)data[1] << 8 : codec_budget(size);
	r = codec_unpack(&m, desc, data + 2, size - 2, budget);
	if (r == 0) {
		CHECK(m.used <= budget);
		if (!data[1])
			round_trip(&m, desc);
	} else {
		CHECK(!m.msg && !m.chunks);
	}
	codec_message_deinit(&m);
	clean(data + 2, size - 2);
	return 0;
}
