/* The publications of a job that a caller may read. */
#include <errno.h>
#include <stdlib.h>

#include "core/cleanup.h"
#include "rpc/arena.h"
#include "rpc/svc_publication.h"
#include "rpc/svc_shardd_impl.h"

static void svc_shardd_list_fill(struct arena *a, struct publication *p, bool owns,
				 Shardd__V1__ListedPublication *m)
{
	const view_declaration *d = p->rec->declaration;
	const struct published *g = publication_newest(p);

	shardd__v1__listed_publication__init(m);
	m->name = arena_string(a, d->name);
	m->tensors = p->assembly ? p->assembly->view->n : 0;
	m->bytes = p->assembly ? p->assembly->bytes : 0;
	m->number = g ? g->number : 0;
	m->step = g ? g->step : 0;
	m->may_publish = owns || d->readers_may_publish;
}

static void svc_shardd_list_all(struct arena *a, struct job *job,
				const struct svc_publication_view *v,
				Shardd__V1__ListPublicationsResponse *reply)
{
	Shardd__V1__ListedPublication *all = arena_take(a, PUBLICATIONS_MAX * sizeof(*all));
	struct publication *p, *tmp;

	reply->publications = arena_take(a, PUBLICATIONS_MAX * sizeof(*reply->publications));
	if (!all || !reply->publications)
		return;
	list_for_each (p, tmp, &job->readers.publications, link) {
		size_t n = reply->n_publications;

		if (n == PUBLICATIONS_MAX || !svc_publication_is_seen(p, v))
			continue;
		svc_shardd_list_fill(a, p, v->owns, &all[n]);
		reply->publications[reply->n_publications++] = &all[n];
	}
}

void svc_list_publications(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__ListPublicationsRequest *q =
		(const Shardd__V1__ListPublicationsRequest *)request;
	Shardd__V1__ListPublicationsResponse reply = SHARDD__V1__LIST_PUBLICATIONS_RESPONSE__INIT;
	struct svc_publication_view v;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct job *job = svc_publication_job(call, userdata, q->job, &v, &f);

	if (job)
		svc_shardd_list_all(&a, job, &v, &reply);
	if (a.failed)
		fault_errno(&f, -ENOMEM, "listing publications");
	if (f.code)
		svc_refuse(call, "publish", q->job, &f);
	else
		rpc_call_reply(call, &reply.base);
	arena_free(&a);
	free(v.gids);
}
