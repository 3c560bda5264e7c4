#include "json/json_message.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/cleanup.h"
#include "json/json.h"

#define JSON_MESSAGE_PATH 96u

/* Where a value is. */
struct json_message_at {
	char path[JSON_MESSAGE_PATH];
	struct fault *f;
};

/* @j is not @wanted. */
static int json_message_refuse(const struct json_message_at *at, const json_t *j,
			       const char *wanted)
{
	_cleanup_(freep) char *is =
		json_dumps(j, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);

	return fault_set(at->f, FAULT_INVALID, at->path, "it is %.40s%s; it must be %s",
			 is ? is : "?", is && strlen(is) > 40 ? "..." : "", wanted);
}

static int json_message_no_memory(const struct json_message_at *at)
{
	return fault_errno(at->f, -ENOMEM, "reading JSON");
}

/* The value @name of the enum. Return: false: there is none. */
static bool json_message_find_value(const ProtobufCEnumDescriptor *type, const char *name, int *ret)
{
	for (unsigned i = 0; i < type->n_values; i++)
		if (strcasecmp(json_state(type, type->values[i].value), name) == 0 && *name) {
			*ret = type->values[i].value;
			return true;
		}
	return false;
}

static int json_message_enum(const json_t *j, const ProtobufCEnumDescriptor *type, int *ret,
			     const struct json_message_at *at)
{
	char all[160] = "";

	if (json_is_string(j) && json_message_find_value(type, json_string_value(j), ret))
		return 0;
	for (unsigned i = 0; i < type->n_values; i++) {
		size_t n = strlen(all);

		if (type->values[i].value)
			snprintf(all + n, sizeof(all) - n, "%s%s", n ? ", " : "one of ",
				 json_state(type, type->values[i].value));
	}
	for (char *c = all; *c; c++)
		*c = (char)tolower((unsigned char)*c);
	return json_message_refuse(at, j, all);
}

static int json_message_number(const json_t *j, uint64_t most, uint64_t *ret,
			       const struct json_message_at *at)
{
	char wanted[64];

	if (json_is_integer(j) && json_integer_value(j) >= 0 &&
	    (uint64_t)json_integer_value(j) <= most) {
		*ret = (uint64_t)json_integer_value(j);
		return 0;
	}
	snprintf(wanted, sizeof(wanted), "an integer (0..%llu)", (unsigned long long)most);
	return json_message_refuse(at, j, wanted);
}

static int json_message_string(const json_t *j, char **ret, const struct json_message_at *at)
{
	if (!json_is_string(j))
		return json_message_refuse(at, j, "a string");
	*ret = strdup(json_string_value(j));
	return *ret ? 0 : json_message_no_memory(at);
}

static int json_message_object(const json_t *j, const ProtobufCMessageDescriptor *type,
			       ProtobufCMessage **ret, const struct json_message_at *at);

/* One value of @field, which comes to @to. */
static int json_message_value(const json_t *j, const ProtobufCFieldDescriptor *field, void *to,
			      const struct json_message_at *at)
{
	uint64_t number = 0;

	switch (field->type) {
	case PROTOBUF_C_TYPE_STRING:
		return json_message_string(j, to, at);
	case PROTOBUF_C_TYPE_MESSAGE:
		return json_message_object(j, field->descriptor, to, at);
	case PROTOBUF_C_TYPE_ENUM:
		return json_message_enum(j, field->descriptor, to, at);
	case PROTOBUF_C_TYPE_BOOL:
		if (!json_is_boolean(j))
			return json_message_refuse(at, j, "true or false");
		*(protobuf_c_boolean *)to = json_is_true(j);
		return 0;
	case PROTOBUF_C_TYPE_UINT32:
		if (json_message_number(j, UINT32_MAX, &number, at) == 0)
			*(uint32_t *)to = (uint32_t)number;
		return at->f->code;
	case PROTOBUF_C_TYPE_UINT64:
		return json_message_number(j, INT64_MAX, to, at);
	default:
		return json_message_refuse(at, j, "left out: JSON has no form for it");
	}
}

static size_t json_message_size(ProtobufCType type)
{
	return type == PROTOBUF_C_TYPE_STRING || type == PROTOBUF_C_TYPE_MESSAGE ? sizeof(void *)
	       : type == PROTOBUF_C_TYPE_UINT64                                  ? sizeof(uint64_t)
										 : sizeof(uint32_t);
}

static int json_message_list(const json_t *j, const ProtobufCFieldDescriptor *field,
			     ProtobufCMessage *m, const struct json_message_at *at)
{
	size_t size = json_message_size(field->type), n = json_array_size(j);
	size_t *count = (size_t *)(void *)((char *)m + field->quantifier_offset);
	char **items = (char **)(void *)((char *)m + field->offset);

	if (!json_is_array(j))
		return json_message_refuse(at, j, "a list");
	if (!n)
		return 0;
	*items = calloc(n, size);
	if (!*items)
		return json_message_no_memory(at);
	for (size_t i = 0; i < n; i++) {
		struct json_message_at inner = { .f = at->f };

		snprintf(inner.path, sizeof(inner.path), "%.70s[%zu]", at->path, i);
		if (json_message_value(json_array_get(j, i), field, *items + i * size, &inner)) {
			/* of a message that is freed all items must be there */
			*count = field->type == PROTOBUF_C_TYPE_STRING ||
						 field->type == PROTOBUF_C_TYPE_MESSAGE
					 ? i
					 : n;
			return at->f->code;
		}
	}
	*count = n;
	return 0;
}

static int json_message_unknown(const ProtobufCMessageDescriptor *type, const char *key,
				const struct json_message_at *at)
{
	char all[300] = "";

	for (unsigned i = 0; i < type->n_fields; i++) {
		size_t n = strlen(all);

		snprintf(all + n, sizeof(all) - n, "%s%s", n ? ", " : "", type->fields[i].name);
	}
	return fault_set(at->f, FAULT_INVALID, at->path, "there is no '%.64s'; there are %s", key,
			 all);
}

static int json_message_fields(const json_t *j, ProtobufCMessage *m,
			       const struct json_message_at *at)
{
	const char *key;
	json_t *value;

	json_object_foreach((json_t *)(uintptr_t)j, key, value)
	{
		const ProtobufCFieldDescriptor *field =
			protobuf_c_message_descriptor_get_field_by_name(m->descriptor, key);
		struct json_message_at inner = { .f = at->f };

		if (!field)
			return json_message_unknown(m->descriptor, key, at);
		snprintf(inner.path, sizeof(inner.path), "%.60s%s%.30s", at->path,
			 *at->path ? "." : "", key);
		if (field->label == PROTOBUF_C_LABEL_REPEATED
			    ? json_message_list(value, field, m, &inner)
			    : json_message_value(value, field, (char *)m + field->offset, &inner))
			return at->f->code;
		if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
			*(uint32_t *)(void *)((char *)m + field->quantifier_offset) = field->id;
	}
	return 0;
}

/* The default of a string is a constant, which is not freed. */
static int json_message_object(const json_t *j, const ProtobufCMessageDescriptor *type,
			       ProtobufCMessage **ret, const struct json_message_at *at)
{
	const ProtobufCFieldDescriptor *first = &type->fields[0];
	ProtobufCMessage *m;

	if (!json_is_object(j) && !(json_is_string(j) && first->type == PROTOBUF_C_TYPE_STRING))
		return json_message_refuse(at, j, "an object");
	m = malloc(type->sizeof_message);
	if (!m)
		return json_message_no_memory(at);
	protobuf_c_message_init(type, m);
	if (json_is_string(j))
		json_message_value(j, first, (char *)m + first->offset, at);
	else
		json_message_fields(j, m, at);
	if (at->f->code) {
		protobuf_c_message_free_unpacked(m, NULL);
		return at->f->code;
	}
	*ret = m;
	return 0;
}

int json_message(const char *text, const char *field, const ProtobufCMessageDescriptor *type,
		 ProtobufCMessage **ret, struct fault *f)
{
	struct json_message_at at = { .f = f };
	_cleanup_(json_freep) json_t *j = NULL;
	json_error_t e;

	j = json_loads(text, JSON_REJECT_DUPLICATES, &e);
	if (!j)
		return fault_set(f, FAULT_INVALID, field, "it is no JSON: line %d, column %d: %s",
				 e.line, e.column, e.text);
	return json_message_object(j, type, ret, &at);
}
