/* Publications and who may do what with them, for the files of svc_shardd. Loop thread only. */
#ifndef SHARDD_RPC_SVC_PUBLICATION_H
#define SHARDD_RPC_SVC_PUBLICATION_H

#include "publish/publication.h"
#include "publish/published_readers.h"
#include "rpc/svc_shardd_impl.h"

enum svc_publication_right {
	SVC_PUBLICATION_READ,    /* those who may open the job, and those whom it names */
	SVC_PUBLICATION_PUBLISH, /* the same, if readers_may_publish is set */
	SVC_PUBLICATION_OWN,     /* those who may open the job */
};

/* The publication @name of the job @job, if the caller has the right @right. Somebody who may not read it
 * learns no more than that there is no such job. Return: NULL: the call has ended. */
struct publication *svc_publication_find(struct rpc_call *call, struct svc_shardd *svc,
					 const char *job, const char *name,
					 enum svc_publication_right right);

/* What a caller sees of a job's publications. */
struct svc_publication_view {
	bool owns; /* all of them: it may open the job */
	struct published_reader reader;
	gid_t *gids; /* owned: free it */
};

/* The job @name for a caller who may open it, or may read one of its publications. @ret: always filled.
 * Return: NULL: @f says that there is no such job. */
struct job *svc_publication_job(struct rpc_call *call, struct svc_shardd *svc, const char *name,
				struct svc_publication_view *ret, struct fault *f);
/* Is @p among what the caller sees? */
bool svc_publication_is_seen(const struct publication *p, const struct svc_publication_view *v);

#endif
