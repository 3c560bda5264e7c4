/* shardctl users: who uses how much of the daemon, and of what is allowed. */
#include <grp.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "json/status_json.h"
#include "ctl/format.h"

static bool users_is_bytes(const char *name)
{
	size_t n = strlen(name);

	return n > 6 && strcmp(name + n - 6, "_bytes") == 0;
}

static void users_amount(struct table *t, const char *name, uint64_t n)
{
	if (n == UINT64_MAX)
		table_cell(t, "-");
	else if (users_is_bytes(name))
		table_cell(t, "%s", format_bytes(n).text);
	else
		table_cell(t, "%llu", (unsigned long long)n);
}

#define WEIGHT_DEFAULT 100u /* of user_limits */
#define PRIORITY_ADMIN 100  /* what administrators have */

/* What was never used is left out; with @limits not where there is a limit. */
static void users_usage(struct table *t, const char *id, const char *name, bool limits,
			Shardd__V1__UserUsage *const *usage, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const Shardd__V1__UserUsage *k = usage[i];

		if (!k->peak && !k->refused && (!limits || k->limit == UINT64_MAX))
			continue;
		table_cell(t, "%s", id);
		table_cell(t, "%s", name);
		table_cell(t, "%s", k->name);
		users_amount(t, k->name, k->used);
		users_amount(t, k->name, k->limit);
		if (k->limit == UINT64_MAX)
			table_cell(t, "-");
		else
			table_cell(t, "%s", format_percent(k->used, k->limit).text);
		users_amount(t, k->name, k->peak);
		table_cell(t, "%llu", (unsigned long long)k->refused);
	}
}

/* A setting that is not the default. */
static void users_setting(struct table *t, const char *id, const char *name, const char *what,
			  int64_t value)
{
	table_cell(t, "%s", id);
	table_cell(t, "%s", name);
	table_cell(t, "%s", what);
	table_cell(t, "%lld", (long long)value);
	for (unsigned i = 0; i < 4; i++)
		table_cell(t, "-");
}

static void users_rows(struct table *t, const Shardd__V1__UserStatus *u)
{
	char user[CTL_USER_MAX], id[16];

	snprintf(id, sizeof(id), "%u", u->uid);
	ctl_user(u->uid, user);
	users_usage(t, id, user, false, u->usage, u->n_usage);
	if (u->worker_weight != WEIGHT_DEFAULT)
		users_setting(t, id, user, "worker_weight", u->worker_weight);
	if (u->priority && u->priority != PRIORITY_ADMIN)
		users_setting(t, id, user, "priority", u->priority);
}

/* What its members use together. */
static void users_group_rows(struct table *t, const Shardd__V1__GroupStatus *g)
{
	const struct group *known = getgrgid(g->gid);
	char id[16], name[CTL_USER_MAX];

	snprintf(id, sizeof(id), "@%u", g->gid);
	snprintf(name, sizeof(name), "@%.*s", CTL_USER_MAX - 2, known ? known->gr_name : id + 1);
	users_usage(t, id, name, true, g->usage, g->n_usage);
}

int ctl_users(struct ctl *ctl, int argc, char **argv)
{
	static const struct table_column columns[] = {
		{ "ID", TABLE_KEY | TABLE_NUMBER }, { "USER", TABLE_KEY | TABLE_TEXT },
		{ "WHAT", TABLE_KEY | TABLE_TEXT }, { "USED", TABLE_NUMBER },
		{ "LIMIT", TABLE_NUMBER },          { "USED%", TABLE_NUMBER },
		{ "PEAK", TABLE_NUMBER },           { "REFUSED", TABLE_NUMBER },
	};
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	_cleanup_(table_freep) struct table *t = NULL;
	int r = ctl_no_arguments(argc, argv);

	if (r == CTL_OK)
		r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(status_json_users(s));
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_users; i++)
		users_rows(t, s->users[i]);
	for (size_t i = 0; t && i < s->n_groups; i++)
		users_group_rows(t, s->groups[i]);
	return ctl_print_table(ctl, NULL, t);
}
