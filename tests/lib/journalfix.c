#include "journalfix.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/job_journal.h"
#include "store/change.h"

struct journal *journalfix_begin(struct jobs *jobs)
{
	CHECK(journal_new(&jobs->journal) == 0);
	CHECK(jobs_journal_base(jobs) == 0);
	return jobs->journal;
}

static uint8_t *pack(const state_job *j, size_t *ret)
{
	size_t n = shardd__state__v1__job__get_packed_size(j);
	uint8_t *data = malloc(n);

	CHECK(data && shardd__state__v1__job__pack(j, data) == n);
	*ret = n;
	return data;
}

static int compare_pooled(const void *a, const void *b)
{
	const state_pooled *x = *(state_pooled *const *)a, *y = *(state_pooled *const *)b;

	return x->slab->id < y->slab->id ? -1 : x->slab->id > y->slab->id;
}

/* In no order. */
static uint8_t *pack_sorted(const state_job *j, size_t *ret)
{
	state_job own = *j;
	uint8_t *data;

	own.pooled = calloc(j->n_pooled + 1, sizeof(state_pooled *));
	CHECK(own.pooled);
	for (size_t i = 0; i < j->n_pooled; i++)
		own.pooled[i] = j->pooled[i];
	qsort(own.pooled, own.n_pooled, sizeof(state_pooled *), compare_pooled);
	data = pack(&own, ret);
	free(own.pooled);
	return data;
}

static const state_job *find(const state_all *all, uint32_t number)
{
	for (size_t i = 0; i < all->n_jobs; i++)
		if (all->jobs[i]->number == number)
			return all->jobs[i];
	return NULL;
}

static void check_job(const struct job *job, const state_all *all)
{
	const state_job *read = find(all, job->number);
	size_t is_n, read_n;
	uint8_t *is_data, *read_data;

	cr_assert(read, "job %s is not in the journal", job->label);
	is_data = pack_sorted(job->rec, &is_n);
	read_data = pack_sorted(read, &read_n);
	cr_expect(is_n == read_n && memcmp(is_data, read_data, is_n) == 0,
		  "the journal has job %s otherwise than it is: epoch %llu and %llu, step %llu and "
		  "%llu, uncommitted %llu and %llu, units %zu and %zu, slabs %zu and %zu, of pools "
		  "%zu and %zu",
		  job->label, (unsigned long long)read->epoch, (unsigned long long)job->rec->epoch,
		  (unsigned long long)read->step, (unsigned long long)job->rec->step,
		  (unsigned long long)read->uncommitted_steps,
		  (unsigned long long)job->rec->uncommitted_steps, read->n_units, job->rec->n_units,
		  read->n_slabs, job->rec->n_slabs, read->n_pooled, job->rec->n_pooled);
	for (size_t i = 0; i < read->n_units && i < job->rec->n_units; i++) {
		const state_unit *a = read->units[i], *b = job->rec->units[i];

		cr_expect(a->optimizer->steps == b->optimizer->steps &&
				  a->initialised == b->initialised && a->dropped == b->dropped,
			  "unit %s: steps %llu and %llu, initialised %d and %d, dropped %d and %d",
			  b->name, (unsigned long long)a->optimizer->steps,
			  (unsigned long long)b->optimizer->steps, a->initialised, b->initialised,
			  a->dropped, b->dropped);
	}
	free(is_data);
	free(read_data);
}

void journalfix_check(struct jobs *jobs)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	struct job *job, *tmp;
	size_t n = 0;

	jobs_journal_write(jobs);
	if (journal_is_spoiled(jobs->journal)) /* the test let an allocation fail */
		cr_assert_eq(jobs_journal_base(jobs), 0);
	cr_assert_eq(change_read(jobs->journal, &all, &f), 0, "%s", f.text);
	list_for_each (job, tmp, &jobs->all, link) {
		n += !job->rec->ipc;
		if (!job->rec->ipc)
			check_job(job, all);
	}
	cr_expect_eq(all->n_jobs, n, "%zu jobs in the journal, %zu there", all->n_jobs, n);
	state_free(all);
}
