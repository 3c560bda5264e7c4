#include "publish/published_policy.h"

#include "publish/published_readers.h"

unsigned published_policy_keep(const view_declaration *d)
{
	return d->keep ? d->keep : 1;
}

unsigned published_policy_buffers(const view_declaration *d)
{
	return d->buffers ? d->buffers : published_policy_keep(d) + 2;
}

uint64_t published_policy_wait_us(const view_declaration *d)
{
	return (d->wait_ms ? d->wait_ms : PUBLISHED_POLICY_WAIT_MS) * UINT64_C(1000);
}

int published_policy_check(const view_declaration *d, size_t most_bytes, unsigned most_buffers,
			   struct fault *f)
{
	uint32_t keep = published_policy_keep(d), buffers = published_policy_buffers(d);
	size_t bytes = shardd__v1__publication__get_packed_size(d);

	if (published_readers_check(d, f))
		return f->code;
	if (bytes > most_bytes)
		return fault_set(f, FAULT_INVALID, NULL,
				 "the declaration has %zu bytes; at most %zu are possible: rules "
				 "with placeholders, as {i}, are shorter",
				 bytes, most_bytes);
	if (buffers > most_buffers)
		return fault_set(f, FAULT_INVALID, "buffers",
				 "%u buffers are too many: the limit is %u", buffers, most_buffers);
	if (keep >= buffers)
		return fault_set(
			f, FAULT_INVALID, "keep",
			"keep is %u and buffers is %u: the next generation needs a buffer more "
			"than are kept",
			keep, buffers);
	if (d->delta_percent > 100)
		return fault_set(f, FAULT_INVALID, "delta_percent",
				 "delta_percent %u is out of range (0..100)", d->delta_percent);
	if (d->full_every == 1 || (d->full_every && !d->delta_percent))
		return fault_set(
			f, FAULT_INVALID, "full_every",
			"full_every is %u and delta_percent %u: no generation would have a "
			"delta",
			d->full_every, d->delta_percent);
	if (d->when_full > SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_WAIT)
		return fault_set(
			f, FAULT_INVALID, "when_full",
			"when_full is %d, which is not a policy: use DROP_OLDEST (1), SKIP (2) or "
			"WAIT (3)",
			(int)d->when_full);
	if (d->wait_ms && d->when_full != SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_WAIT)
		return fault_set(
			f, FAULT_INVALID, "wait_ms",
			"wait_ms is %u, which only the policy WAIT uses: set when_full to it",
			d->wait_ms);
	return 0;
}
