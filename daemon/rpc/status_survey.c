#include "rpc/status_survey.h"

#include <stdlib.h>

#include "cluster/cluster.h"

struct status_survey {
	void (*done)(void *userdata);
	void *userdata;
	size_t pending; /* jobs that are asked for still */
	size_t n;
	struct cluster_ask asks[]; /* of jobs */
};

void status_survey_cancel(struct status_survey *s)
{
	for (size_t i = 0; i < s->n; i++)
		cluster_ask_cancel(&s->asks[i]);
	free(s);
}

static void status_survey_on_told(struct cluster_ask *a)
{
	struct status_survey *s = a->userdata;
	void (*done)(void *userdata) = s->done;
	void *userdata = s->userdata;

	if (--s->pending)
		return;
	status_survey_cancel(s);
	done(userdata);
}

static bool status_survey_wants(const struct job *job, const struct status_scope *scope)
{
	return status_visible(scope, job) && status_may_look_at(scope, job);
}

struct status_survey *status_survey_begin(struct jobs *jobs, const struct status_scope *scope,
					  void (*done)(void *userdata), void *userdata)
{
	struct job *job, *tmp;
	struct status_survey *s;
	size_t n = 0;

	list_for_each (job, tmp, &jobs->all, link)
		n += status_survey_wants(job, scope);
	s = calloc(1, sizeof(*s) + n * sizeof(s->asks[0]));
	if (!s)
		return NULL;
	s->done = done;
	s->userdata = userdata;
	list_for_each (job, tmp, &jobs->all, link) {
		struct cluster_ask *a = &s->asks[s->n];

		if (!status_survey_wants(job, scope))
			continue;
		*a = (struct cluster_ask){ .done = status_survey_on_told, .userdata = s };
		s->n++;
		s->pending += !cluster_ask(a, job);
	}
	if (s->pending)
		return s;
	status_survey_cancel(s);
	return NULL;
}
