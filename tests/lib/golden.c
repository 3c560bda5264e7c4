#include "golden.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"

/* Those of the source, or the ones just made with another version. */
static void path_of(const char *name, char *path, size_t size)
{
	const char *folder = getenv("SHARDD_GOLDEN");

	if (folder)
		snprintf(path, size, "%s/%s", folder, name);
	else
		snprintf(path, size, "%s/tests/golden/%s", SHARDD_SOURCE_DIR, name);
}

struct safetensors *golden_open(const char *name)
{
	char path[1024];
	const char *why = "";
	struct safetensors *f;

	path_of(name, path, sizeof(path));
	f = safetensors_open(path, &why);
	cr_assert_not_null(f, "%s: %s", path, why);
	return f;
}

json_t *golden_json(const char *name)
{
	char path[1024];
	json_error_t error;
	json_t *json;

	path_of(name, path, sizeof(path));
	json = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
	cr_assert_not_null(json, "%s:%d: %s", path, error.line, error.text);
	return json;
}

void golden_json_freep(json_t **json)
{
	json_decref(*json);
	*json = NULL;
}

double golden_json_number(const json_t *row, size_t i)
{
	const json_t *number = json_array_get(row, i);

	cr_assert(json_is_number(number), "no number %zu in a row", i);
	return json_number_value(number);
}

uint64_t golden_json_count(const json_t *row, size_t i)
{
	double d = golden_json_number(row, i);

	cr_assert(d >= 0 && d == (double)(uint64_t)d);
	return (uint64_t)d;
}

struct safetensors_tensor golden_tensor(const struct safetensors *f, const char *name)
{
	struct safetensors_tensor t = { .dtype = DTYPE_NONE };

	cr_assert(safetensors_tensor(f, name, &t), "no tensor %s", name);
	return t;
}

struct safetensors_tensor golden_part(const struct safetensors *f, const char *name,
				      const char *part)
{
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", name, part);
	return golden_tensor(f, path);
}

bool golden_has(const struct safetensors *f, const char *name, const char *part)
{
	struct safetensors_tensor t;
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", name, part);
	return safetensors_tensor(f, path, &t);
}

const char *golden_text(const char *about, const char *key, char *buf, size_t size)
{
	size_t n = strlen(key), bytes;
	const char *at = about;

	while (at && !(strncmp(at, key, n) == 0 && at[n] == '=')) {
		at = strchr(at, ' ');
		at = at ? at + 1 : NULL;
	}
	cr_assert_not_null(at, "no %s in %s", key, about);
	at += n + 1;
	bytes = strcspn(at, " ");
	cr_assert_lt(bytes, size);
	memcpy(buf, at, bytes);
	buf[bytes] = 0;
	return buf;
}

double golden_number(const char *about, const char *key)
{
	char buf[128], *end;
	double d = strtod(golden_text(about, key, buf, sizeof(buf)), &end);

	cr_assert(*buf && !*end, "%s of %s is not a number", key, about);
	return d;
}

bool golden_is(const char *about, const char *key, const char *value)
{
	char buf[128];

	return strcmp(golden_text(about, key, buf, sizeof(buf)), value) == 0;
}

enum dtype golden_dtype(const char *about, const char *key)
{
	for (enum dtype t = DTYPE_FP32; t < _DTYPE_N; t++)
		if (golden_is(about, key, dtype_name(t)))
			return t;
	cr_assert(golden_is(about, key, "none"), "%s of %s is not a type", key, about);
	return DTYPE_NONE;
}

float golden_at(const void *data, enum dtype t, size_t i)
{
	if (t == DTYPE_FP32)
		return ((const float *)data)[i];
	return t == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)data)[i])
			       : fp16_to_f32(((const uint16_t *)data)[i]);
}

float golden_round(float x, enum dtype t)
{
	if (t == DTYPE_BF16)
		return bf16_to_f32(bf16_from_f32(x));
	return t == DTYPE_FP16 ? fp16_to_f32(fp16_from_f32(x)) : x;
}

void golden_expect(const char *name, const void *got, const void *want, enum dtype t, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		float a = golden_at(got, t, i), b = golden_at(want, t, i);

		cr_assert(f32_bits(a) == f32_bits(b) || (isnan(a) && isnan(b)),
			  "%s: element %zu is %a, not %a", name, i, (double)a, (double)b);
	}
}
