#include "json/json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/cleanup.h"
#include "status.pb-c.h"

json_t *json_from_text(const char *text)
{
	_cleanup_(freep) char *copy = NULL;
	json_t *j = json_string(text);

	if (j)
		return j;
	copy = strdup(text);
	for (char *c = copy; c && *c; c++)
		if ((unsigned char)*c >= 0x80)
			*c = '?';
	return copy ? json_string(copy) : NULL;
}

static json_t *json_from_u64(uint64_t n)
{
	return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
}

/* Bytes that all names of values begin with; 0: they do not begin alike. */
static size_t json_prefix_of(const ProtobufCEnumDescriptor *type)
{
	static const char zero[] = "_UNSPECIFIED";
	const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, 0);
	size_t n = v ? strlen(v->name) : 0;

	if (n < sizeof(zero) || strcmp(v->name + n - (sizeof(zero) - 1), zero) != 0)
		return 0;
	return n - (sizeof(zero) - 2);
}

const char *json_state(const ProtobufCEnumDescriptor *type, int value)
{
	const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);

	return v && value ? v->name + json_prefix_of(type) : "";
}

static json_t *json_from_enum(const ProtobufCFieldDescriptor *f, int value)
{
	const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(f->descriptor, value);

	if (json_prefix_of(f->descriptor))
		return json_string(json_state(f->descriptor, value));
	return v ? json_string(v->name) : json_integer(value);
}

/* The value at @at, which is one of the type of @f. */
static json_t *json_from_value(const ProtobufCFieldDescriptor *f, const void *at)
{
	switch (f->type) {
	case PROTOBUF_C_TYPE_INT32:
	case PROTOBUF_C_TYPE_SINT32:
	case PROTOBUF_C_TYPE_SFIXED32:
		return json_integer(*(const int32_t *)at);
	case PROTOBUF_C_TYPE_UINT32:
	case PROTOBUF_C_TYPE_FIXED32:
		return json_integer(*(const uint32_t *)at);
	case PROTOBUF_C_TYPE_INT64:
	case PROTOBUF_C_TYPE_SINT64:
	case PROTOBUF_C_TYPE_SFIXED64:
		return json_integer(*(const int64_t *)at);
	case PROTOBUF_C_TYPE_UINT64:
	case PROTOBUF_C_TYPE_FIXED64:
		return json_from_u64(*(const uint64_t *)at);
	case PROTOBUF_C_TYPE_FLOAT:
		return json_real(*(const float *)at);
	case PROTOBUF_C_TYPE_DOUBLE:
		return json_real(*(const double *)at);
	case PROTOBUF_C_TYPE_BOOL:
		return json_boolean(*(const protobuf_c_boolean *)at);
	case PROTOBUF_C_TYPE_ENUM:
		return json_from_enum(f, *(const int *)at);
	case PROTOBUF_C_TYPE_STRING:
		return json_from_text(*(char *const *)at ? *(char *const *)at : "");
	case PROTOBUF_C_TYPE_MESSAGE:
		return *(void *const *)at ? json_from_message(*(ProtobufCMessage *const *)at)
					  : json_null();
	case PROTOBUF_C_TYPE_BYTES:
		break;
	}
	return json_integer((json_int_t)((const ProtobufCBinaryData *)at)->len);
}

static size_t json_size_of(ProtobufCType type)
{
	switch (type) {
	case PROTOBUF_C_TYPE_INT64:
	case PROTOBUF_C_TYPE_SINT64:
	case PROTOBUF_C_TYPE_SFIXED64:
	case PROTOBUF_C_TYPE_UINT64:
	case PROTOBUF_C_TYPE_FIXED64:
	case PROTOBUF_C_TYPE_DOUBLE:
		return 8;
	case PROTOBUF_C_TYPE_BOOL:
		return sizeof(protobuf_c_boolean);
	case PROTOBUF_C_TYPE_STRING:
	case PROTOBUF_C_TYPE_MESSAGE:
		return sizeof(void *);
	case PROTOBUF_C_TYPE_BYTES:
		return sizeof(ProtobufCBinaryData);
	default:
		return 4;
	}
}

static json_t *json_from_classes(Shardd__V1__ClassBytes *const *classes, size_t n)
{
	_cleanup_(json_freep) json_t *object = json_object();

	for (size_t i = 0; i < n; i++)
		if (json_object_set_new(object, classes[i]->name,
					json_from_u64(classes[i]->bytes)) < 0)
			return NULL;
	return STEAL_PTR(object);
}

static json_t *json_from_list(const ProtobufCFieldDescriptor *f, const char *items, size_t n)
{
	_cleanup_(json_freep) json_t *array = NULL;

	if (f->type == PROTOBUF_C_TYPE_MESSAGE &&
	    f->descriptor == &shardd__v1__class_bytes__descriptor)
		return json_from_classes((Shardd__V1__ClassBytes *const *)(const void *)items, n);
	array = json_array();
	for (size_t i = 0; i < n; i++)
		if (json_array_append_new(
			    array, json_from_value(f, items + i * json_size_of(f->type))) < 0)
			return NULL;
	return STEAL_PTR(array);
}

static json_t *json_from_field(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f)
{
	const char *at = (const char *)m + f->offset;
	const char *count = (const char *)m + f->quantifier_offset;

	if (f->label != PROTOBUF_C_LABEL_REPEATED)
		return json_from_value(f, at);
	return json_from_list(f, *(const char *const *)(const void *)at,
			      *(const size_t *)(const void *)count);
}

json_t *json_from_message(const ProtobufCMessage *m)
{
	_cleanup_(json_freep) json_t *object = json_object();

	for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
		const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];

		if (json_object_set_new(object, f->name, json_from_field(m, f)) < 0)
			return NULL;
	}
	return STEAL_PTR(object);
}

int json_print(const json_t *j, FILE *out)
{
	if (json_dumpf(j, out, JSON_INDENT(2)) < 0 || fputc('\n', out) == EOF)
		return -EIO;
	return 0;
}
