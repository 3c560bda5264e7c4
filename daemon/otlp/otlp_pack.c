#include "otlp/otlp_pack.h"

#include <stdlib.h>

#include "core/check.h"
#include "rpc/codec.h"

/* ----------------------------------------------------------------------------- attributes */

void otlp_attributes_init(struct otlp_attributes *a, struct arena *arena, size_t room)
{
	Shardd__Otlp__V1__KeyValue **list = arena_take(arena, room * sizeof(*list));

	*a = (struct otlp_attributes){ .arena = arena, .list = list, .room = list ? room : 0 };
}

/* Return: NULL without memory. */
static Shardd__Otlp__V1__AnyValue *otlp_pack_attribute(struct otlp_attributes *a, const char *key)
{
	struct {
		Shardd__Otlp__V1__KeyValue pair;
		Shardd__Otlp__V1__AnyValue value;
	} *both = a->room ? arena_take(a->arena, sizeof(*both)) : NULL;

	if (!both)
		return NULL;
	CHECK(a->n < a->room);
	shardd__otlp__v1__key_value__init(&both->pair);
	shardd__otlp__v1__any_value__init(&both->value);
	both->pair.key = (char *)(uintptr_t)key;
	both->pair.value = &both->value;
	a->list[a->n++] = &both->pair;
	return &both->value;
}

void otlp_attributes_text(struct otlp_attributes *a, const char *key, const char *text)
{
	char *copy = arena_string(a->arena, text);
	Shardd__Otlp__V1__AnyValue *v = copy ? otlp_pack_attribute(a, key) : NULL;

	if (!v)
		return;
	codec_clean_text(copy);
	v->value_case = SHARDD__OTLP__V1__ANY_VALUE__VALUE_STRING_VALUE;
	v->string_value = copy;
}

void otlp_attributes_number(struct otlp_attributes *a, const char *key, int64_t n)
{
	Shardd__Otlp__V1__AnyValue *v = otlp_pack_attribute(a, key);

	if (!v)
		return;
	v->value_case = SHARDD__OTLP__V1__ANY_VALUE__VALUE_INT_VALUE;
	v->int_value = n;
}

void otlp_attributes_bool(struct otlp_attributes *a, const char *key, bool value)
{
	Shardd__Otlp__V1__AnyValue *v = otlp_pack_attribute(a, key);

	if (!v)
		return;
	v->value_case = SHARDD__OTLP__V1__ANY_VALUE__VALUE_BOOL_VALUE;
	v->bool_value = value;
}

/* ------------------------------------------------------------------------------- requests */

void otlp_requests_deinit(struct otlp_requests *r)
{
	for (size_t i = 0; i < r->n; i++)
		free(r->list[i].data);
	free(r->list);
	*r = OTLP_REQUESTS_NULL;
}

/* @data: taken. Return: false: no memory. */
static bool otlp_pack_append(struct otlp_requests *r, uint8_t *data, size_t bytes, uint64_t n)
{
	if (r->n == r->room) {
		size_t room = r->room ? r->room * 2 : 4;
		struct otlp_request *list = realloc(r->list, room * sizeof(*list));

		if (!list) {
			free(data);
			return false;
		}
		r->list = list;
		r->room = room;
	}
	r->list[r->n++] = (struct otlp_request){ .data = data, .bytes = bytes, .n = n };
	r->bytes += bytes;
	return true;
}

/* The conventions of OpenTelemetry name these. */
static void otlp_pack_fill_resource(struct otlp_packer *p, struct otlp_attributes *a)
{
	otlp_attributes_init(a, &p->arena, 6);
	otlp_attributes_text(a, "service.name", p->self->service);
	otlp_attributes_text(a, "service.version", p->self->version);
	otlp_attributes_text(a, "service.instance.id", p->self->instance);
	otlp_attributes_text(a, "host.name", p->self->host);
	otlp_attributes_number(a, "process.pid", p->self->pid);
	if (*p->self->cluster)
		otlp_attributes_text(a, "service.namespace", p->self->cluster);
}

static void otlp_pack_request(struct otlp_packer *p, const ProtobufCMessage *m)
{
	size_t bytes = protobuf_c_message_get_packed_size(m);
	uint8_t *data = malloc(bytes);

	if (!data) {
		p->failed = true;
		return;
	}
	CHECK(protobuf_c_message_pack(m, data) == bytes);
	if (!otlp_pack_append(p->out, data, bytes, p->n))
		p->failed = true;
}

static void otlp_pack_close(struct otlp_packer *p)
{
	Shardd__Otlp__V1__InstrumentationScope scope =
		SHARDD__OTLP__V1__INSTRUMENTATION_SCOPE__INIT;
	Shardd__Otlp__V1__Resource resource = SHARDD__OTLP__V1__RESOURCE__INIT;
	Shardd__Otlp__V1__ScopeItems items = SHARDD__OTLP__V1__SCOPE_ITEMS__INIT,
				     *all[] = { &items };
	Shardd__Otlp__V1__ResourceItems of = SHARDD__OTLP__V1__RESOURCE_ITEMS__INIT,
					*ofs[] = { &of };
	Shardd__Otlp__V1__ExportRequest request = SHARDD__OTLP__V1__EXPORT_REQUEST__INIT;
	struct otlp_attributes attributes;

	if (!p->n_items)
		return;
	otlp_pack_fill_resource(p, &attributes);
	resource.attributes = attributes.list;
	resource.n_attributes = attributes.n;
	scope.name = (char *)(uintptr_t)p->self->service;
	scope.version = (char *)(uintptr_t)p->self->version;
	items.scope = &scope;
	items.items = p->items;
	items.n_items = p->n_items;
	of.resource = &resource;
	of.scopes = all;
	of.n_scopes = 1;
	request.resources = ofs;
	request.n_resources = 1;
	if (!p->arena.failed)
		otlp_pack_request(p, &request.base);
	p->failed = p->failed || p->arena.failed;
	arena_free(&p->arena);
	p->items = NULL;
	p->n_items = p->bytes = p->n = 0;
}

void otlp_packer_init(struct otlp_packer *p, const struct otlp_self *self,
		      struct otlp_requests *out)
{
	*p = (struct otlp_packer){ .self = self, .out = out, .arena = ARENA_NULL };
}

void otlp_packer_add(struct otlp_packer *p, const ProtobufCMessage *item, uint64_t n)
{
	size_t bytes = protobuf_c_message_get_packed_size(item);
	uint8_t *data;

	if (p->n_items == OTLP_REQUEST_ITEMS ||
	    (p->n_items && p->bytes + bytes > OTLP_REQUEST_BYTES))
		otlp_pack_close(p);
	if (!p->items)
		p->items = arena_take(&p->arena, OTLP_REQUEST_ITEMS * sizeof(*p->items));
	data = p->items ? arena_take(&p->arena, bytes) : NULL;
	if (!data) {
		p->failed = true;
		return;
	}
	CHECK(protobuf_c_message_pack(item, data) == bytes);
	p->items[p->n_items++] = (ProtobufCBinaryData){ .data = data, .len = bytes };
	p->bytes += bytes + 8;
	p->n += n;
}

bool otlp_packer_end(struct otlp_packer *p)
{
	otlp_pack_close(p);
	arena_free(&p->arena);
	return !p->failed;
}
