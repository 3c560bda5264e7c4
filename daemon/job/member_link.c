/*
 * The signals of a member: a page in device memory in which its streams say how far they
 * have come. Charged to the device, made once, never handed to another process: when the member is
 * gone the signals are poisoned, and the page is freed when no queue waits on it any more and the
 * process has ended.
 */
#include "job/member_impl.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/job_types.h"
#include "job/member.h"

struct member_link {
	struct backend_signals *signals;
	struct slab *slab; /* a reference */
	bool poisoned;
};

static int member_link_take_slab(struct member *m, struct slab **ret)
{
	struct device *d = m->device;
	uint64_t bytes = BACKEND_SIGNAL_SLOTS * BACKEND_SLOT_STRIDE;

	return slab_new(d, &d->quota, MEM_CONTROL, job_share(m->job), bytes, m->job->rec->name,
			(int)m->rank, ret);
}

enum res member_link(struct member *m, struct fault *f)
{
	struct member_link *l;
	int r;

	if (m->link || backend_info(m->device->backend)->order == BACKEND_ORDER_NONE)
		return RES_DONE;
	l = calloc(1, sizeof(*l));
	if (!l)
		return res_of(fault_errno(f, -ENOMEM, "making signals"));
	r = member_link_take_slab(m, &l->slab);
	if (r == 0) {
		r = backend_signals_new(m->device->backend, l->slab->mem, &l->signals);
		if (r)
			slab_unref(l->slab);
	}
	if (r) {
		free(l);
		if (r == SLAB_E_LATER)
			return RES_WAIT;
		return res_of(fault_errno(f, r, "taking device memory for signals"));
	}
	l->slab->writable = true;
	m->link = l;
	return RES_DONE;
}

struct backend_signals *member_signals(const struct member *m)
{
	return m->link ? m->link->signals : NULL;
}

struct slab *member_signals_slab(const struct member *m)
{
	return m->link ? m->link->slab : NULL;
}

void member_poison(struct member *m)
{
	if (!m->link || m->link->poisoned)
		return;
	m->link->poisoned = true;
	backend_signals_poison(m->link->signals);
}

/* Points of this session that something still intends to wait for. */
static void member_link_forget_reads(struct member *m)
{
	struct job *job = m->job;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		reads_forget(&job->mem.stray[d], m->link->signals);
	for (uint32_t i = 0; i < job->n_units; i++)
		for (unsigned d = 0; d < job->units[i]->n_parts; d++)
			reads_forget(&job->units[i]->parts[d].reads, m->link->signals);
}

static void member_link_on_freed(void *userdata)
{
	slab_unref(userdata);
}

void member_unlink(struct member *m)
{
	struct member_link *l = m->link;

	if (!l)
		return;
	member_poison(m);
	member_link_forget_reads(m);
	if (m->job->jobs->ops.signals_gone)
		m->job->jobs->ops.signals_gone(m->job, l->signals);
	m->link = NULL;
	if (l->slab->exported && !proc_gone(m->proc))
		(void)quarantine_slab(&m->job->node->quarantine, m->proc, l->slab);
	backend_signals_free(l->signals, member_link_on_freed, l->slab);
	free(l);
}
