#include "job/regcache.h"

#include <stdlib.h>
#include <string.h>

#include "job/job_types.h"

static uint64_t regcache_charge_of(const struct regcache_entry *k)
{
	return k->bytes ? k->n_bytes + k->n * sizeof(*k->ids) : 0;
}

static void regcache_forget(struct job *job, struct regcache_entry *k)
{
	if (!k->bytes)
		return;
	quota_return(&job->quota, MEM_CONTROL, regcache_charge_of(k));
	free(k->bytes);
	free(k->ids);
	*k = (struct regcache_entry){ 0 };
	job->knowns.changes++;
}

void regcache_search_init(struct regcache_search *s, const struct job *job)
{
	*s = (struct regcache_search){ .changes = job->knowns.changes };
}

int regcache_search(struct regcache_search *s, const struct job *job, const uint8_t *bytes,
		    size_t n_bytes, size_t most, const struct regcache_entry **ret)
{
	while (s->with < KNOWN_MAX && s->changes == job->knowns.changes) {
		const struct regcache_entry *k = &job->knowns.all[s->with];
		size_t left = n_bytes - s->at, n = left < most ? left : most;
		bool same = k->bytes && k->n_bytes == n_bytes &&
			    memcmp(k->bytes + s->at, bytes + s->at, n) == 0;

		if (same && n == left) {
			*ret = k;
			return KNOWN_YES;
		}
		s->at = same ? s->at + n : 0;
		s->with += !same;
		if (same)
			return KNOWN_MORE;
	}
	return KNOWN_NO;
}

void regcache_add(struct job *job, const uint8_t *bytes, size_t n_bytes, const uint32_t *ids,
		  uint32_t n)
{
	struct regcache_entry k = { .n_bytes = n_bytes, .n = n };
	struct regcache_entry *to = &job->knowns.all[job->knowns.next];

	if (n_bytes < KNOWN_MIN_BYTES)
		return;
	k.bytes = malloc(n_bytes);
	k.ids = malloc(n * sizeof(*ids));
	regcache_forget(job, to);
	if (!k.bytes || !k.ids || quota_charge(&job->quota, MEM_CONTROL, regcache_charge_of(&k))) {
		free(k.bytes);
		free(k.ids);
		return;
	}
	memcpy(k.bytes, bytes, n_bytes);
	memcpy(k.ids, ids, n * sizeof(*ids));
	*to = k;
	job->knowns.next = (job->knowns.next + 1) % KNOWN_MAX;
	job->knowns.changes++;
}

void regcache_drop(struct job *job)
{
	for (unsigned i = 0; i < KNOWN_MAX; i++)
		regcache_forget(job, &job->knowns.all[i]);
}

uint64_t regcache_bytes(const struct job *job)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < KNOWN_MAX; i++)
		sum += regcache_charge_of(&job->knowns.all[i]);
	return sum;
}
