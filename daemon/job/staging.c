#include "job/staging.h"

#include <errno.h>
#include <sys/mman.h>

#include "core/check.h"
#include "job/job_types.h"

int staging_take(struct job *job, uint64_t bytes, void **ret)
{
	char why[192];
	void *at;

	if (quota_charge_here(&job->quota, MEM_CONTROL, bytes))
		return -EDQUOT;
	at = host_room_take(&job->node->room, bytes, why, sizeof(why))
		     ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
		     : MAP_FAILED;
	if (at == MAP_FAILED) {
		quota_return_here(&job->quota, MEM_CONTROL, bytes);
		return -ENOMEM;
	}
	(void)madvise(at, bytes, MADV_HUGEPAGE); /* only the number of faults depends on it */
	*ret = at;
	return 0;
}

void *staging_give(struct job *job, void *at, uint64_t bytes)
{
	if (!at)
		return NULL;
	CHECK(munmap(at, bytes) == 0);
	quota_return_here(&job->quota, MEM_CONTROL, bytes);
	return NULL;
}
