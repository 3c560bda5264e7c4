/* Groups of a job, and the effect of a rank's leaving on them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/span.h"

/* The collectives of @g that @m has not announced will never complete. */
void job_group_left(struct group *g, const struct member *m)
{
	struct fault told = FAULT_NULL;
	uint32_t index;

	if (!group_index_here(g, m->rank, &index))
		return;
	fault_set(&told, FAULT_ABORTED, NULL, "rank %u (pid %d) has left job '%s'", m->rank,
		  member_pid(m), g->job->rec->name);
	match_member_left(&g->match, index, &told);
}

/* Rank @rank of another node, process @pid, has announced up to @number. */
static void job_groups_left_elsewhere(struct group *g, uint32_t rank, int pid, uint64_t number)
{
	const struct span *s = g->job->across.span;
	struct fault told = FAULT_NULL;
	uint32_t index;

	if (!g->here || !group_index(g, rank, &index))
		return;
	fault_set(&told, FAULT_ABORTED, NULL, "rank %u (pid %d) on node %s has left job '%s'", rank,
		  pid, s->nodes[span_node_of(s, rank)].name, g->job->rec->name);
	if (match_left_elsewhere(&g->match, number, &told))
		job_epoch_end(g->job, &told);
}

static uint64_t job_groups_number_of(const struct job_left *l, uint64_t key)
{
	for (size_t i = 0; i < l->n; i++)
		if (l->keys[i] == key)
			return l->numbers[i];
	return 0; /* its node does not know the group */
}

void job_left_elsewhere(struct job *job, const struct job_left *l)
{
	const struct span *s = job->across.span;

	if (!job_is_across(job) || s->over || l->rank >= s->world || span_is_here(s, l->rank))
		return;
	if (!job->across.left)
		job->across.left = calloc(s->world, sizeof(*job->across.left));
	if (job->across.left) /* else the deadlines of ops of later groups end their wait */
		job->across.left[l->rank] = l->pid ? l->pid : -1;
	for (uint32_t i = 0; i < job->n_groups && !s->over; i++)
		job_groups_left_elsewhere(job->groups[i], l->rank, l->pid,
					  job_groups_number_of(l, group_key(job->groups[i])));
}

/* A rank that has left in this epoch will not take part in a group made later either. */
static void job_groups_tell_group_who_left(struct job *job, struct group *g)
{
	for (uint32_t i = 0; job->across.left && group_spans(g) && i < group_size(g); i++)
		if (job->across.left[g->rec->ranks[i]])
			job_groups_left_elsewhere(g, g->rec->ranks[i],
						  job->across.left[g->rec->ranks[i]], 0);
	for (uint32_t i = 0; i < group_size(g); i++) {
		const struct member *m = job->ranks[g->rec->ranks[i]];

		if (m && m->state == MEMBER_LEFT && m->epoch == job->rec->epoch)
			job_group_left(g, m);
	}
}

/* Groups are known to other nodes by a hash of their name. */
static bool job_groups_key_is_taken(const struct job *job, const char *name)
{
	const state_group rec = { .name = (char *)name };
	const struct group of_name = { .rec = &rec };
	uint64_t key = group_key(&of_name);

	for (uint32_t i = 0; i < job->n_groups; i++)
		if (group_key(job->groups[i]) == key)
			return true;
	return false;
}

int job_group(struct job *job, const char *name, const uint32_t *ranks, size_t n,
	      struct group **ret, struct fault *f)
{
	state_group *rec;

	for (uint32_t i = 0; i < job->n_groups; i++) {
		const state_group *g = job->groups[i]->rec;

		if (strcmp(g->name, name) != 0)
			continue;
		if (g->n_ranks != n || memcmp(g->ranks, ranks, n * sizeof(*ranks)) != 0)
			return fault_set(f, FAULT_STATE, NULL,
					 "group '%.64s' of job '%s' has other ranks, or the same "
					 "ranks in another order",
					 name, job->rec->name);
		*ret = job->groups[i];
		return 0;
	}
	if (job_groups_key_is_taken(job, name))
		return fault_set(
			f, FAULT_INVALID, "name",
			"group '%.64s' has the same hash as another group of job '%s': give "
			"it another name",
			name, job->rec->name);
	if (job->n_groups >= JOB_MAX_GROUPS)
		return fault_set(f, FAULT_EXHAUSTED, NULL, "job '%s' has %u groups, the maximum",
				 job->rec->name, job->n_groups);
	rec = state_group_new(name, ranks, n);
	if (!rec || state_job_add_group(job->rec, rec) < 0) {
		state_group_free(rec);
		return fault_errno(f, -ENOMEM, "making a group");
	}
	if (job_add_group(job) < 0) {
		state_group_free(job->rec->groups[--job->rec->n_groups]);
		return fault_errno(f, -ENOMEM, "making a group");
	}
	*ret = job->groups[job->n_groups - 1];
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job);
	job_groups_tell_group_who_left(job, *ret);
	return 0;
}
