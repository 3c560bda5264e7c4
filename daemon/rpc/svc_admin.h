/* Service shardd.v1.AdminService: maintenance of the daemon, for administrators alone. Loop thread
 * only. */
#ifndef SHARDD_RPC_SVC_ADMIN_H
#define SHARDD_RPC_SVC_ADMIN_H

#include "job/job_types.h"
#include "rpc/method.h"

/* What only the server can do. Each gets the userdata of svc_admin_init. Return: 0 or a fault
 * code. */
struct svc_admin_actions {
	/* Leave the jobs to the next daemon, and end: soon, after the answer. */
	int (*hand_over)(void *userdata, struct fault *f);
	/* End the jobs, then the daemon: soon. */
	int (*shut_down)(void *userdata, struct fault *f);
};

struct svc_admin {
	struct jobs *jobs;                       /* borrowed */
	const struct svc_admin_actions *actions; /* borrowed */
	void *userdata;
	struct rpc_service service; /* filled by init */
};

void svc_admin_init(struct svc_admin *svc, struct jobs *jobs,
		    const struct svc_admin_actions *actions, void *userdata);

#endif
