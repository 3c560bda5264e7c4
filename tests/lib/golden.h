/*
 * The vectors of tests/golden: what the real systems computed, and with which settings.
 */
#ifndef SHARDD_TESTS_GOLDEN_H
#define SHARDD_TESTS_GOLDEN_H

#include <jansson.h>
#include <stdbool.h>

#include "kernels.h"
#include "safetensors.h"

/* tests/golden/@name, or the test fails; $SHARDD_GOLDEN in the environment stands for another
 * folder than tests/golden. The caller frees it. */
struct safetensors *golden_open(const char *name);

/* The numbers of tests/golden/@name; golden_json_freep drops them. */
json_t *golden_json(const char *name);
void golden_json_freep(json_t **json);
/* Number @i of a row, which must have one. */
double golden_json_number(const json_t *row, size_t i);
uint64_t golden_json_count(const json_t *row, size_t i);

/* The tensor @name of @f, which must be there. */
struct safetensors_tensor golden_tensor(const struct safetensors *f, const char *name);
/* "@name/@part". */
struct safetensors_tensor golden_part(const struct safetensors *f, const char *name,
				      const char *part);
bool golden_has(const struct safetensors *f, const char *name, const char *part);

/* The value of @key in "key=value key=value"; the test fails where there is none. */
const char *golden_text(const char *about, const char *key, char *buf, size_t size);
double golden_number(const char *about, const char *key);
bool golden_is(const char *about, const char *key, const char *value);
/* fp32, bf16, fp16; DTYPE_NONE for "none". */
enum dtype golden_dtype(const char *about, const char *key);

/* Element @i of an array of @t, widened. */
float golden_at(const void *data, enum dtype t, size_t i);
/* @x rounded to @t and back. */
float golden_round(float x, enum dtype t);

/* The same bits, or both NaN; else the test fails and says at which of the @n elements. */
void golden_expect(const char *name, const void *got, const void *want, enum dtype t, size_t n);

#endif
