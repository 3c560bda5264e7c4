/* NCCL called directly by one process with all GPUs: what the daemon is compared with. */
#include <stdio.h>
#include <unistd.h>

#include "bench.h"
#include "device.h"

#ifdef SHARDD_CUDA
#include "engine/nccl_lib.h"

#define MAX_DEVICES 8
#define WARM_UP     3

struct ring {
	const struct nccl_lib *nccl;
	unsigned n;
	struct gpu gpu[MAX_DEVICES];
	ncclComm_t comm[MAX_DEVICES];
	CUdeviceptr full[MAX_DEVICES], part[MAX_DEVICES];
	uint64_t part_elements;
};

struct nccl_ask {
	uint64_t bytes;
	unsigned repeat;
};

static void nccl_must(const struct nccl_lib *n, ncclResult_t r, const char *what)
{
	char text[256];

	if (r == ncclSuccess)
		return;
	fprintf(stderr, "shardd-bench: %s: %s\n", what, nccl_lib_text(n, r, text, sizeof(text)));
	_exit(1);
}

static const struct nccl_lib *nccl_load(void)
{
	const struct nccl_lib *n = NULL;
	char why[256];

	if (nccl_lib_open(&n, why, sizeof(why)) < 0) {
		fprintf(stderr, "shardd-bench: %s\n", why);
		_exit(1);
	}
	return n;
}

/* One communicator of all devices. */
static void ring_join(struct ring *r)
{
	ncclUniqueId id;

	nccl_must(r->nccl, r->nccl->ncclGetUniqueId(&id), "ncclGetUniqueId");
	nccl_must(r->nccl, r->nccl->ncclGroupStart(), "ncclGroupStart");
	for (unsigned i = 0; i < r->n; i++) {
		gpu_must(&r->gpu[i], r->gpu[i].cuda->cuCtxSetCurrent(r->gpu[i].context),
			 "cuCtxSetCurrent");
		nccl_must(r->nccl,
			  r->nccl->ncclCommInitRankConfig(&r->comm[i], (int)r->n, id, (int)i, NULL),
			  "ncclCommInitRankConfig");
	}
	nccl_must(r->nccl, r->nccl->ncclGroupEnd(), "ncclGroupEnd");
}

static void ring_open(struct ring *r, uint64_t bytes)
{
	int count = 0;

	r->nccl = nccl_load();
	gpu_open(&r->gpu[0], 0);
	gpu_must(&r->gpu[0], r->gpu[0].cuda->cuDeviceGetCount(&count), "cuDeviceGetCount");
	r->n = count < MAX_DEVICES ? (unsigned)count : MAX_DEVICES;
	r->part_elements = bytes / 2 / r->n;
	for (unsigned i = 0; i < r->n; i++) {
		if (i > 0)
			gpu_open(&r->gpu[i], i);
		r->full[i] = gpu_alloc(&r->gpu[i], r->part_elements * r->n * 2 + 4);
		r->part[i] = gpu_alloc(&r->gpu[i], r->part_elements * 2 + 4);
	}
	ring_join(r);
}

enum what { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE };

static void issue(struct ring *r, enum what what)
{
	const struct nccl_lib *n = r->nccl;
	ncclResult_t rc = n->ncclGroupStart();

	for (unsigned i = 0; i < r->n && rc == ncclSuccess; i++) {
		void *full = (void *)r->full[i], *part = (void *)r->part[i];
		CUstream stream = r->gpu[i].stream;

		if (what == ALL_GATHER)
			rc = n->ncclAllGather(part, full, r->part_elements, ncclBfloat16,
					      r->comm[i], stream);
		else if (what == REDUCE_SCATTER)
			rc = n->ncclReduceScatter(full, part, r->part_elements, ncclBfloat16,
						  ncclSum, r->comm[i], stream);
		else
			rc = n->ncclAllReduce(full, full, r->part_elements * r->n, ncclBfloat16,
					      ncclSum, r->comm[i], stream);
	}
	nccl_must(n, rc, "a collective");
	nccl_must(n, n->ncclGroupEnd(), "ncclGroupEnd");
}

/* All devices are busy for about the same time: that of the first one counts. */
static double timed(struct ring *r, enum what what, unsigned repeat)
{
	double us;

	for (unsigned i = 0; i < WARM_UP; i++)
		issue(r, what);
	for (unsigned i = 0; i < r->n; i++)
		gpu_must(&r->gpu[i], r->gpu[i].cuda->cuStreamSynchronize(r->gpu[i].stream),
			 "cuStreamSynchronize");
	gpu_must(&r->gpu[0], r->gpu[0].cuda->cuCtxSetCurrent(r->gpu[0].context), "cuCtxSetCurrent");
	gpu_begin(&r->gpu[0]);
	for (unsigned i = 0; i < repeat; i++)
		issue(r, what);
	us = gpu_end_us(&r->gpu[0]) / repeat;
	for (unsigned i = 0; i < r->n; i++)
		gpu_must(&r->gpu[i], r->gpu[i].cuda->cuStreamSynchronize(r->gpu[i].stream),
			 "cuStreamSynchronize");
	return us;
}

static void direct(const void *arg, double *ret)
{
	const struct nccl_ask *ask = arg;
	static struct ring r;

	ring_open(&r, ask->bytes);
	for (enum what what = ALL_GATHER; what <= ALL_REDUCE; what++)
		ret[what] = timed(&r, what, ask->repeat);
	ret[3] = r.n;
	ret[4] = r.nccl->version;
	for (unsigned i = 0; i < r.n; i++)
		r.nccl->ncclCommDestroy(r.comm[i]);
}

int nccl_measure(uint64_t bytes, unsigned repeat, struct nccl_times *ret)
{
	const struct nccl_ask ask = { bytes, repeat };
	double v[5];

	if (device_aside(direct, &ask, v, 5) < 0)
		return -1;
	*ret = (struct nccl_times){ v[0], v[1], v[2], (unsigned)v[3], (unsigned)v[4] };
	return 0;
}

#else

int nccl_measure(uint64_t bytes, unsigned repeat, struct nccl_times *ret)
{
	(void)bytes;
	(void)repeat;
	(void)ret;
	fputs("shardd-bench: this build has no CUDA\n", stderr);
	return -1;
}

#endif
