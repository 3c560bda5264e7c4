#include "job/launched.h"

#include "job/job_types.h"

uint32_t launched_world(const struct job *job)
{
	return job->rec->n_numbers ? job->rec->launched : job->rec->world_size;
}

uint32_t launched_number(const struct job *job, uint32_t rank)
{
	return job->rec->n_numbers ? job->rec->numbers[rank] : rank;
}

bool launched_rank(const struct job *job, uint32_t number, uint32_t *ret)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (launched_number(job, r) == number) {
			*ret = r;
			return true;
		}
	return false;
}
