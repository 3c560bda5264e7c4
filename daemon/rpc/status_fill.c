#include "rpc/status_fill.h"

#include <string.h>

#include "rpc/codec.h"

char *status_text(struct arena *a, const char *s)
{
	char *copy = arena_string(a, s);

	if (!copy)
		return (char *)"";
	codec_clean_text(copy);
	return copy;
}

int status_state(const ProtobufCEnumDescriptor *type, const char *name)
{
	const ProtobufCEnumValue *none = protobuf_c_enum_descriptor_get_value(type, 0);
	size_t prefix = strlen(none->name) - strlen("UNSPECIFIED");

	for (unsigned i = 0; i < type->n_values; i++)
		if (strncmp(type->values[i].name, none->name, prefix) == 0 &&
		    strcmp(type->values[i].name + prefix, name) == 0)
			return type->values[i].value;
	return 0;
}

void *status_messages(struct arena *a, size_t n, const ProtobufCMessageDescriptor *type)
{
	size_t size = type->sizeof_message;
	char *items = arena_take(a, n * size);
	void **pointers = arena_take(a, n * sizeof(void *));

	if (!items || !pointers)
		return NULL;
	for (size_t i = 0; i < n; i++) {
		pointers[i] = items + i * size;
		protobuf_c_message_init(type, pointers[i]);
	}
	return pointers;
}

Shardd__V1__ClassBytes **status_classes(struct arena *a, const struct quota *q, size_t *ret_n)
{
	Shardd__V1__ClassBytes **c = STATUS_MESSAGES(a, _MEM_N, ClassBytes, class_bytes);

	*ret_n = c ? _MEM_N : 0;
	for (size_t i = 0; i < *ret_n; i++) {
		c[i]->name = (char *)mem_class_name((enum mem_class)i);
		c[i]->bytes = q->by_class[i];
	}
	return c;
}

bool status_sees(const struct status_scope *s, uid_t uid)
{
	return s->sees_all || s->uid == uid;
}

bool status_may_look(const struct status_scope *s, uid_t uid, bool is_private)
{
	return s->uid == uid || (s->sees_all && !is_private);
}

bool status_may_look_at(const struct status_scope *s, const struct job *job)
{
	return status_may_look(s, job->rec->uid, job->rec->is_private);
}

bool status_visible(const struct status_scope *s, const struct job *job)
{
	return status_sees(s, job->rec->uid) && (!s->job || s->job == job);
}
