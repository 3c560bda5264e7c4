/* FNV-1a with 64 bits: no protection against inputs chosen to collide. */
#ifndef SHARDD_CORE_FNV_H
#define SHARDD_CORE_FNV_H

#include <stdint.h>

#define FNV_BEGIN UINT64_C(14695981039346656037)

/* One step: of a byte, as in the definition, or of a whole word. */
static inline uint64_t fnv_add(uint64_t hash, uint64_t x)
{
	return (hash ^ x) * UINT64_C(1099511628211);
}

/* Its bytes, without the 0 at the end: add a separator between two texts. */
static inline uint64_t fnv_add_text(uint64_t hash, const char *text)
{
	for (; *text; text++)
		hash = fnv_add(hash, (unsigned char)*text);
	return hash;
}

#endif
