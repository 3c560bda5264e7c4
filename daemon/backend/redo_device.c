/* Completing on devices what a predecessor has begun. This process may be killed as well: each step
 * leaves the memfd and the devices so that the next process can do the rest. */
#include <errno.h>
#include <stdlib.h>

#include "backend/redo_impl.h"
#include "core/check.h"
#include "core/cleanup.h"

static struct backend *redo_device_of(const struct redo_launch *l, redo_backend_cb backend,
				      void *arg)
{
	struct backend *b = backend(arg, l->at[0]); /* the first array is always there */

	CHECK(b);
	return b;
}

static int redo_device_run(struct backend *b, const struct launch *l, uint64_t number,
			   struct fault *f)
{
	int r = backend_redo_run(b, l, number);

	return r ? fault_errno(f, r, "completing a step on a device") : 0;
}

/* A number above the device's last one is of a launch that had not begun. It is forgotten before any
 * other launch gets a number, so that it cannot be taken for one that is complete. */
int redo_device_repair(struct redo *r, uint64_t number, redo_addr_cb addr, redo_backend_cb backend,
		       void *arg, struct fault *f)
{
	_cleanup_(freep) struct launch *launches = NULL;
	struct redo_task t;

	if (redo_complete_load(r, number, addr, arg, &t, &launches, f))
		return f->code;
	for (uint32_t i = 0; !f->code && i < t.head->n; i++) {
		struct redo_launch *l = &t.head->launches[i];
		struct backend *b = redo_device_of(l, backend, arg);
		uint64_t last = backend_redo_last(b), was = atomic_load(&l->number);

		if (was && was == last)
			redo_device_run(b, &launches[i], was, f);
		else if (was > last)
			atomic_store(&l->number, 0);
	}
	return f->code;
}

int redo_take(struct redo *r, uint64_t number, redo_addr_cb addr, void *arg, struct redo_task **ret,
	      struct launch **ret_launches, struct fault *f)
{
	_cleanup_(freep) struct redo_task *t = calloc(1, sizeof(*t));
	_cleanup_(freep) struct launch *launches = NULL;

	if (!t)
		return fault_errno(f, -ENOMEM, "taking over a step");
	if (redo_complete_load(r, number, addr, arg, t, &launches, f))
		return f->code;
	for (uint32_t i = 0; i < t->head->n; i++)
		if (atomic_load(&t->head->launches[i].number))
			return fault_set(f, FAULT_INVALID, "redo",
					 "the redo file of the previous daemon is damaged: a step "
					 "that was not begun has launches");
	*ret = STEAL_PTR(t);
	*ret_launches = STEAL_PTR(launches);
	return 0;
}

unsigned redo_task_count(const struct redo_task *t)
{
	return t->head->n;
}

uint32_t redo_task_phase(const struct redo_task *t, unsigned i)
{
	return t->head->launches[i].phase;
}

struct redo_place redo_task_place(const struct redo_task *t, unsigned i)
{
	return t->head->launches[i].at[0];
}

/* Launches need what those of the phase before have made, on their device. */
int redo_device_complete(struct redo *r, uint64_t number, redo_addr_cb addr,
			 redo_backend_cb backend, void *arg, struct fault *f)
{
	_cleanup_(freep) struct launch *launches = NULL;
	struct redo_task t;

	if (redo_complete_load(r, number, addr, arg, &t, &launches, f))
		return f->code;
	for (uint32_t phase = 0; phase < redo_complete_phases(t.head); phase++)
		for (uint32_t i = 0; !f->code && i < t.head->n; i++) {
			struct redo_launch *l = &t.head->launches[i];
			struct backend *b = redo_device_of(l, backend, arg);
			uint64_t next = backend_redo_last(b) + 1;

			if (l->phase != phase || atomic_load(&l->number) || !launches[i].n)
				continue;
			atomic_store(&l->number, next);
			redo_device_run(b, &launches[i], next, f);
		}
	return f->code;
}
