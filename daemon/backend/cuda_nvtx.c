#include "backend/cuda_nvtx.h"

#if defined(SHARDD_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)

#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdio.h>

/* NULL: there is no tool. Written once. */
static nvtxDomainHandle_t cuda_nvtx_domain;
static pthread_once_t cuda_nvtx_once = PTHREAD_ONCE_INIT;

static void cuda_nvtx_make_domain(void)
{
	cuda_nvtx_domain = nvtxDomainCreateA("shardd");
}

void cuda_nvtx_open(void)
{
	pthread_once(&cuda_nvtx_once, cuda_nvtx_make_domain);
}

/* "Reduce train/layer.0", "Step train", or "task" if it is not recorded. */
static void cuda_nvtx_name(const struct backend_label *l, char *buf, size_t bytes)
{
	if (l->op)
		snprintf(buf, bytes, "%s %s%s%s", l->op, l->job, *l->unit ? "/" : "", l->unit);
	else
		snprintf(buf, bytes, "task");
}

void cuda_nvtx_begin(const struct backend_task *task)
{
	nvtxEventAttributes_t e = { .version = NVTX_VERSION,
				    .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
				    .payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT32,
				    .messageType = NVTX_MESSAGE_TYPE_ASCII };
	char name[192];

	if (!cuda_nvtx_domain || !task->n_launches)
		return;
	cuda_nvtx_name(&task->label, name, sizeof(name));
	e.message.ascii = name; /* the tool copies it */
	e.payload.uiValue = task->n_launches;
	nvtxDomainRangePushEx(cuda_nvtx_domain, &e);
}

void cuda_nvtx_end(const struct backend_task *task)
{
	if (cuda_nvtx_domain && task->n_launches)
		nvtxDomainRangePop(cuda_nvtx_domain);
}

#else

void cuda_nvtx_open(void)
{
}

void cuda_nvtx_begin(const struct backend_task *task)
{
	(void)task;
}

void cuda_nvtx_end(const struct backend_task *task)
{
	(void)task;
}

#endif
