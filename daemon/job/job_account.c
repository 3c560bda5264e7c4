#include "job/job_account.h"

#include <stdio.h>
#include <string.h>

#include "job/job_types.h"
#include "job/member.h"

/* Approximate size of the records with their names: of a rank, of a unit, of a tensor. */
#define JOB_RANK_BYTES   (sizeof(struct member) + 256u)
#define JOB_UNIT_BYTES   1024u
#define JOB_TENSOR_BYTES 512u

uint64_t job_own_bytes(const struct job *job, uint64_t units, uint64_t tensors)
{
	uint64_t ranks = job->rec->world_size;

	return sizeof(struct job) + ranks * JOB_RANK_BYTES +
	       units * (sizeof(struct unit) + JOB_UNIT_BYTES + ranks * sizeof(struct member_unit)) +
	       tensors * JOB_TENSOR_BYTES;
}

int job_owner_fault(const struct job *job, uint64_t bytes, struct fault *f)
{
	struct user *u = job->owner.user;

	if (!user_has_room(u, USER_SLABS, 1))
		return user_refuse(u, USER_SLABS, 1, f);
	if (!user_has_room(u, USER_STATE, bytes))
		return user_refuse(u, USER_STATE, bytes, f);
	return 0;
}

/* The other jobs of the same owner that hold most, since they may cause the shortage. Of other
 * users' jobs only the sum is told. */
static void job_account_name_largest(const struct job *job, char *buf, size_t bytes)
{
	const struct job *largest[3] = { NULL };
	struct job *other, *tmp;

	list_for_each (other, tmp, &job->jobs->all, link) {
		const struct job *next = other;

		for (size_t i = 0; i < ARRAY_SIZE(largest) && next; i++) {
			const struct job *here = largest[i];

			if (other == job || other->rec->uid != job->rec->uid || !other->quota.used)
				break;
			if (here && here->quota.used >= next->quota.used)
				continue;
			largest[i] = next;
			next = here;
		}
	}
	for (size_t i = 0; i < ARRAY_SIZE(largest) && largest[i]; i++) {
		size_t at = strlen(buf);

		snprintf(buf + at, bytes - at, "%s '%.40s' %llu",
			 i ? "," : "; your others ('shardctl job delete NAME' frees one):",
			 largest[i]->rec->name, (unsigned long long)largest[i]->quota.used);
	}
}

/* The part of the memory in use that only waits for processes to release it. */
static void job_account_name_quarantined(const struct job *job, char *buf, size_t bytes)
{
	uint64_t sum = 0;
	size_t at = strlen(buf);

	for (unsigned d = 0; d < job->node->n_devices; d++)
		sum += job->node->devices[d].quarantined;
	if (sum)
		snprintf(buf + at, bytes - at,
			 "; %llu bytes of it are quarantined until processes end that have mapped "
			 "them (shardctl memory lists them)",
			 (unsigned long long)sum);
}

void job_holders(const struct job *job, char *buf, size_t bytes)
{
	const struct quota *q = &job->quota;
	size_t at = 0;
	int n = snprintf(buf, bytes, "job '%s' holds %llu bytes", job->rec->name,
			 (unsigned long long)q->used);

	at = n > 0 && (size_t)n < bytes ? (size_t)n : bytes;
	for (int c = 0; c < _MEM_N && at < bytes; c++) {
		n = snprintf(buf + at, bytes - at, "%s%s %llu", c ? ", " : " (",
			     mem_class_name((enum mem_class)c), (unsigned long long)q->by_class[c]);
		at += n > 0 && (size_t)n < bytes - at ? (size_t)n : bytes - at;
	}
	if (at < bytes)
		snprintf(buf + at, bytes - at,
			 ") of its %llu, all jobs %llu of %llu in %u of %u slabs",
			 (unsigned long long)(q->limit ? q->limit : node_capacity(job->node)),
			 (unsigned long long)node_used(job->node),
			 (unsigned long long)node_capacity(job->node),
			 job->node->devices[0].table->n, job->node->devices[0].table->max);
	job_account_name_quarantined(job, buf, bytes);
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		const char *why = backend_info(job->node->devices[d].backend)->short_of;

		at = strlen(buf);
		if (*why)
			snprintf(buf + at, bytes - at, "; %s", why);
	}
	job_account_name_largest(job, buf, bytes);
}
