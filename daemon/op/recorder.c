#include "op/recorder.h"

#include <errno.h>
#include <stdlib.h>

struct recorder recorder;

int recorder_init(size_t size)
{
	recorder = (struct recorder){ .size = size, .next_id = 1, .next_device_id = 1 };
	recorder.ring = calloc(size ? size : 1, sizeof(*recorder.ring));
	recorder.devices = calloc(size ? size : 1, sizeof(*recorder.devices));
	return recorder.ring && recorder.devices ? 0 : -ENOMEM;
}

void recorder_deinit(void)
{
	free(recorder.ring);
	free(recorder.devices);
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

/* The @i-th oldest that is kept when @next is the next to come. Return: 0 past the end. */
static uint64_t recorder_id_at(uint64_t next, size_t i)
{
	uint64_t oldest = next > recorder.size ? next - recorder.size : 1;

	return oldest + i < next ? oldest + i : 0;
}

const struct record *recorder_at(size_t i)
{
	return recorder_find(recorder_id_at(recorder.next_id, i));
}

/* ------------------------------------------------------------------- devices */

struct device_record *recorder_add_device(void)
{
	struct device_record *r;

	if (!recorder.size)
		return NULL;
	r = &recorder.devices[recorder.next_device_id % recorder.size];
	*r = (struct device_record){ .id = recorder.next_device_id++ };
	return r;
}

struct device_record *recorder_find_device(uint64_t id)
{
	struct device_record *r;

	if (!id || !recorder.size)
		return NULL;
	r = &recorder.devices[id % recorder.size];
	return r->id == id ? r : NULL;
}

const struct device_record *recorder_device_at(size_t i)
{
	return recorder_find_device(recorder_id_at(recorder.next_device_id, i));
}
