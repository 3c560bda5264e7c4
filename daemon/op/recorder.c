#include "op/recorder.h"

#include <errno.h>
#include <stdlib.h>

struct recorder recorder;

int recorder_init(size_t size)
{
	recorder = (struct recorder){ .size = size, .next_id = 1 };
	recorder.ring = calloc(size ? size : 1, sizeof(*recorder.ring));
	return recorder.ring ? 0 : -ENOMEM;
}

void recorder_deinit(void)
{
	free(recorder.ring);
	recorder = (struct recorder){ 0 };
}

struct record *recorder_add(void)
{
	struct record *r;

	if (!recorder.size)
		return NULL;
	r = &recorder.ring[recorder.next_id % recorder.size];
	*r = (struct record){ .id = recorder.next_id++ };
	return r;
}

struct record *recorder_find(uint64_t id)
{
	struct record *r;

	if (!id || !recorder.size)
		return NULL;
	r = &recorder.ring[id % recorder.size];
	return r->id == id ? r : NULL;
}

const struct record *recorder_at(size_t i)
{
	uint64_t oldest = recorder.next_id > recorder.size ? recorder.next_id - recorder.size : 1;

	return oldest + i < recorder.next_id ? recorder_find(oldest + i) : NULL;
}
