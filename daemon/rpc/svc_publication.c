#include "rpc/svc_publication.h"

#include <stdlib.h>

#include "core/cleanup.h"

static int svc_publication_compare(const void *a, const void *b)
{
	const gid_t *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

/* The process behind @c. @ret_gids: owned by the caller; what @ret points to. */
static void svc_publication_caller(struct conn *c, struct published_reader *ret, gid_t **ret_gids)
{
	size_t n = 0;

	*ret_gids = conn_groups(c, &n);
	if (*ret_gids)
		qsort(*ret_gids, n, sizeof(**ret_gids), svc_publication_compare);
	*ret = (struct published_reader){ .uid = proc_uid(conn_proc(c)),
					  .gids = *ret_gids,
					  .n_gids = *ret_gids ? n : 0 };
}

/* The job UID/NAME, of whatever user. Return: NULL: there is none, or @name is not of this form. */
static struct job *svc_publication_job_of_others(struct svc_shardd *svc, const char *name)
{
	struct fault ignored = FAULT_NULL;
	struct job *job = NULL;
	struct job_ref ref;

	if (job_ref_parse(name, "job", &ref, &ignored) || !ref.has_uid)
		return NULL;
	return job_find_seen(svc->jobs, name, ref.uid, false, &job, &ignored) ? NULL : job;
}

static bool svc_publication_names(const struct publication *p, const struct published_reader *r)
{
	return published_readers_has(p->rec->declaration, r);
}

/* Does any publication of @job name the reader? Then it knows of the job. */
static bool svc_publication_knows(const struct job *job, const struct published_reader *r)
{
	const struct publication *p, *tmp;

	list_for_each (p, tmp, (struct list *)(uintptr_t)&job->readers.publications, link)
		if (!p->gone && svc_publication_names(p, r))
			return true;
	return false;
}

static int svc_publication_missing(const struct job *job, const char *name, struct fault *f)
{
	*f = FAULT_NULL;
	return fault_set(f, FAULT_NOT_FOUND, "name",
			 "job '%s' has no publication '%.64s': declare it first", job->rec->name,
			 name);
}

/* For somebody who may not open the job, for the reason in @f. Return: NULL: @f says why not. */
static struct publication *svc_publication_for_reader(struct rpc_call *call, struct svc_shardd *svc,
						      const char *job_name, const char *name,
						      enum svc_publication_right right,
						      struct fault *f)
{
	struct job *job = svc_publication_job_of_others(svc, job_name);
	_cleanup_(freep) gid_t *gids = NULL;
	struct published_reader r;
	struct publication *p;

	svc_publication_caller(rpc_call_conn(call), &r, &gids);
	if (!job || !svc_publication_knows(job, &r))
		return NULL;
	p = publication_find(job, name);
	if (!p || !svc_publication_names(p, &r)) {
		svc_publication_missing(job, name, f);
		return NULL;
	}
	if (right == SVC_PUBLICATION_READ ||
	    (right == SVC_PUBLICATION_PUBLISH && p->rec->declaration->readers_may_publish))
		return p;
	*f = FAULT_NULL;
	fault_set(f, FAULT_DENIED, NULL,
		  "uid %u may read publication '%s' of job '%s' and nothing else%s",
		  (unsigned)r.uid, p->rec->declaration->name, job->label,
		  right == SVC_PUBLICATION_PUBLISH ? ": its declaration has no readers_may_publish"
						   : "");
	return NULL;
}

struct publication *svc_publication_find(struct rpc_call *call, struct svc_shardd *svc,
					 const char *job_name, const char *name,
					 enum svc_publication_right right)
{
	struct session *s = svc_session(call);
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;
	struct job *job;

	if (!s)
		return NULL;
	if (svc_find_job(call, svc, job_name, &job, &f) == 0 &&
	    job_check_open(job, proc_uid(s->proc), &f) == 0) {
		p = publication_find(job, name);
		if (!p)
			svc_publication_missing(job, name, &f);
	} else if (f.code == FAULT_NOT_FOUND || f.code == FAULT_DENIED) {
		p = svc_publication_for_reader(call, svc, job_name, name, right, &f);
	}
	if (!p)
		svc_refuse(call, "publish", job_name, &f);
	return p;
}

struct job *svc_publication_job(struct rpc_call *call, struct svc_shardd *svc, const char *name,
				struct svc_publication_view *ret, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);
	struct job *job = NULL;

	*ret = (struct svc_publication_view){ .owns = false };
	if (svc_find_job(call, svc, name, &job, f) == 0 &&
	    job_check_open(job, proc_uid(conn_proc(c)), f) == 0) {
		ret->owns = true;
		return job;
	}
	if (!c)
		return NULL;
	job = svc_publication_job_of_others(svc, name);
	svc_publication_caller(c, &ret->reader, &ret->gids);
	if (job && svc_publication_knows(job, &ret->reader)) {
		*f = FAULT_NULL;
		return job;
	}
	return NULL;
}

bool svc_publication_is_seen(const struct publication *p, const struct svc_publication_view *v)
{
	return !p->gone && (v->owns || svc_publication_names(p, &v->reader));
}
