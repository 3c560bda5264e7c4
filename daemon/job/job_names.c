/*
 * Names of jobs. A name belongs to its user: the registry's key is UID/NAME, so two users may each
 * have a job of the same name, and no user learns which names others have. A user asks for NAME or
 * for UID/NAME. Only its owner and the administrators see that a job exists.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "job/job.h"

void job_label(uid_t uid, const char *name, char ret[JOB_LABEL_MAX + 1])
{
	int n = snprintf(ret, JOB_LABEL_MAX + 1, "%u/%.*s", (unsigned)uid, JOB_NAME_MAX, name);

	CHECK(n > 0 && n <= JOB_LABEL_MAX);
}

/* 1 to 64 of [A-Za-z0-9._-]. */
static int job_names_job_name_check(const char *name, const char *field, struct fault *f)
{
	static const char allowed[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
	size_t n = strlen(name), good = strspn(name, allowed);

	if (!n || n > JOB_NAME_MAX)
		return fault_set(
			f, FAULT_INVALID, field,
			"%s has %zu bytes; it must be 1 to %u characters of [A-Za-z0-9._-]", field,
			n, JOB_NAME_MAX);
	if (good < n)
		return fault_set(f, FAULT_INVALID, field,
				 "%s has byte 0x%02x at %zu; only [A-Za-z0-9._-] are allowed",
				 field, (unsigned char)name[good], good);
	return 0;
}

/* Return: are the characters up to @end digits of a uid? */
static bool job_names_job_uid_parse(const char *text, const char *end, uid_t *ret)
{
	uint64_t n = 0;

	if (text == end || end - text > 10)
		return false;
	for (; text < end; text++) {
		if (!isdigit((unsigned char)*text))
			return false;
		n = n * 10 + (uint64_t)(*text - '0');
	}
	*ret = (uid_t)n;
	return n < UINT32_MAX;
}

int job_ref_parse(const char *text, const char *field, struct job_ref *ret, struct fault *f)
{
	const char *slash = strchr(text, '/');
	struct job_ref ref = { .name = slash ? slash + 1 : text, .has_uid = slash };

	if (slash && !job_names_job_uid_parse(text, slash, &ref.uid))
		return fault_set(f, FAULT_INVALID, field,
				 "%s is '%.75s'; the part before the slash must be a numeric user "
				 "id (UID/NAME)",
				 field, text);
	if (job_names_job_name_check(ref.name, field, f))
		return f->code;
	*ret = ref;
	return 0;
}

bool job_is_admin(uid_t uid)
{
	return uid == 0 || uid == geteuid();
}

bool job_may_use(const struct job *job, uid_t uid)
{
	return uid == job->rec->uid || job_is_admin(uid);
}

bool job_may_look(const struct job *job, uid_t uid)
{
	return uid == job->rec->uid || (!job->rec->is_private && job_is_admin(uid));
}

int job_check_open(const struct job *job, uid_t uid, struct fault *f)
{
	if (job_may_look(job, uid))
		return 0;
	return fault_set(f, FAULT_DENIED, NULL,
			 "job '%s' is private: only its owner can join or read it", job->label);
}

static struct job *job_names_job_by_label(const struct jobs *jobs, uid_t uid, const char *name)
{
	char label[JOB_LABEL_MAX + 1];

	job_label(uid, name, label);
	return htab_find(&jobs->names, label);
}

/* The only job of that name, of any user. Several: a fault that lists them. */
static int job_names_job_only(struct jobs *jobs, const char *name, struct job **ret,
			      struct fault *f)
{
	struct job *job, *tmp, *found = NULL;
	char list[256] = "";
	unsigned n = 0;

	list_for_each (job, tmp, &jobs->all, link) {
		size_t at = strlen(list);

		if (strcmp(job->rec->name, name) != 0)
			continue;
		snprintf(list + at, sizeof(list) - at, "%s%s", n++ ? ", " : "", job->label);
		found = job;
	}
	if (n > 1)
		return fault_set(f, FAULT_INVALID, "job",
				 "%u users have a job '%.64s': use one of the names %s", n, name,
				 list);
	*ret = found;
	return 0;
}

int job_find(struct jobs *jobs, const char *name, uid_t uid, struct job **ret, struct fault *f)
{
	return job_find_seen(jobs, name, uid, job_is_admin(uid), ret, f);
}

int job_find_seen(struct jobs *jobs, const char *name, uid_t uid, bool sees_all, struct job **ret,
		  struct fault *f)
{
	struct job *job = NULL;
	struct job_ref ref = { .name = "" };

	if (job_ref_parse(name, "job", &ref, f))
		return f->code;
	if (!ref.has_uid || ref.uid == uid || sees_all)
		job = job_names_job_by_label(jobs, ref.has_uid ? ref.uid : uid, ref.name);
	if (!job && !ref.has_uid && sees_all && job_names_job_only(jobs, ref.name, &job, f))
		return f->code;
	if (!job)
		return fault_set(f, FAULT_NOT_FOUND, NULL, "there is no job '%.75s'", name);
	*ret = job;
	return 0;
}
