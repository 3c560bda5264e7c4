/*
 * The registration requests of a job's ranks, as they came over the wire, and the units that were
 * created from them. The ranks of a job register the same model, so all requests but the first need
 * only be compared. The kept bytes are charged to the job; without room nothing is kept. Loop
 * thread only.
 */
#ifndef SHARDD_JOB_REGCACHE_H
#define SHARDD_JOB_REGCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct job;
struct regcache_entry;

/* Shorter requests are registered fast enough without this. */
#define KNOWN_MIN_BYTES (16u << 10)

/* How far a request was compared, and with which kept request. */
struct regcache_search {
	unsigned with;
	size_t at;
	uint64_t changes;
};

enum { KNOWN_NO, KNOWN_YES, KNOWN_MORE };

void regcache_search_init(struct regcache_search *s, const struct job *job);
/* Compare up to @most bytes. Return: KNOWN_YES with *ret until the next change; KNOWN_NO;
 * KNOWN_MORE. */
int regcache_search(struct regcache_search *s, const struct job *job, const uint8_t *bytes,
		    size_t n_bytes, size_t most, const struct regcache_entry **ret);

/* Keep it, if it is worth it and there is room. */
void regcache_add(struct job *job, const uint8_t *bytes, size_t n_bytes, const uint32_t *ids,
		  uint32_t n);
/* Units have changed since they were registered: forget all. Safe to call twice. */
void regcache_drop(struct job *job);
/* Bytes charged for all of it. */
uint64_t regcache_bytes(const struct job *job);

#endif
