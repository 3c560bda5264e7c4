/* Users and groups, with their use of their limits. */
#include "job/admission.h"
#include "rpc/status_fill.h"

static void status_users_status_fill_user(struct arena *a, const struct user *u,
					  Shardd__V1__UserStatus *r)
{
	r->uid = u->uid;
	r->worker_weight = u->worker_weight;
	r->priority = u->priority;
	r->usage = STATUS_MESSAGES(a, _USER_KINDS, UserUsage, user_usage);
	for (unsigned k = 0; r->usage && k < _USER_KINDS; k++) {
		Shardd__V1__UserUsage *usage = r->usage[r->n_usage++];

		usage->name = status_text(a, user_kind_name(k));
		usage->used = k == USER_MESSAGE_BYTES ? u->message_bytes : u->used[k];
		usage->limit = u->most[k];
		usage->peak = u->peak[k] > usage->used ? u->peak[k] : usage->used;
		usage->refused = u->refused[k];
	}
}

void status_fill_users(struct arena *a, const struct users *users, const struct status_scope *scope,
		       Shardd__V1__GetStatusResponse *reply)
{
	reply->users = STATUS_MESSAGES(a, users->count, UserStatus, user_status);
	if (!reply->users)
		return;
	for (struct user *u = users_next(users, NULL); u; u = users_next(users, u))
		if (status_sees(scope, u->uid))
			status_users_status_fill_user(a, u, reply->users[reply->n_users++]);
}

static void status_users_fill_group(struct arena *a, const struct user_group *g,
				    Shardd__V1__GroupStatus *r)
{
	r->gid = g->gid;
	r->members = g->members;
	r->usage = STATUS_MESSAGES(a, _USER_KINDS, UserUsage, user_usage);
	for (unsigned k = 0; r->usage && user_kind_has_total(k); k++) {
		Shardd__V1__UserUsage *usage = r->usage[r->n_usage++];

		usage->name = status_text(a, user_kind_name(k));
		usage->used = g->used[k];
		usage->limit = g->most[k];
		usage->peak = g->peak[k];
		usage->refused = g->refused[k];
	}
}

void status_fill_groups(struct arena *a, const struct users *users,
			const struct status_scope *scope, Shardd__V1__GetStatusResponse *reply)
{
	const struct user *u = users_find(users, scope->uid);
	uint64_t mine = u ? u->in_groups : 0;

	reply->groups = STATUS_MESSAGES(a, users->n_groups, GroupStatus, group_status);
	for (unsigned i = 0; reply->groups && i < users->n_groups; i++)
		if (scope->sees_all || (mine >> i & 1))
			status_users_fill_group(a, &users->groups[i],
						reply->groups[reply->n_groups++]);
}

void status_fill_memory_line(struct arena *a, const struct node *node,
			     Shardd__V1__GetStatusResponse *reply)
{
	Shardd__V1__MemoryLineStatus **line =
		STATUS_MESSAGES(a, 1, MemoryLineStatus, memory_line_status);
	struct admission_counts counts;

	if (!line)
		return;
	admission_counts(node, &counts);
	reply->memory_line = line[0];
	line[0]->jobs = counts.jobs;
	line[0]->bytes = counts.bytes;
	line[0]->admitted = counts.admitted;
	line[0]->given_up = counts.given_up;
	line[0]->waited_us = counts.waited_us;
}
