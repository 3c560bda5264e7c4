#include "job/registration.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/admission.h"
#include "job/aliases.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/units_impl.h"
#include "mem/stagger.h"

/* One registration under way: what must be undone if it fails. */
struct registration {
	struct job *job;
	state_unit **specs;
	size_t n;
	uint32_t *ids; /* 0: new */
	struct layout *layouts;
	size_t n_new;
	size_t checked;  /* of the specs */
	bool later;      /* a group is not placed yet, or its communicators are being made */
	bool aliases;    /* some tensor is one */
	uint32_t before; /* units that were there */
	struct {
		uint32_t number;
		struct unit *u; /* dropped; NULL: it has its place still */
		state_unit *rec;
	} * again; /* numbers that are used again, ascending */
	uint32_t n_again;
	const uint32_t
		*numbers; /* borrowed: of dropped units, for the first ones; NULL: as it comes */
	uint32_t n_numbers;
	bool without_comms;          /* no epoch runs */
	struct admission_call *line; /* borrowed; NULL: it goes before all that wait for memory */
	struct admission_need need;
	struct {
		uint64_t params_bytes; /* of all new units */
		uint64_t other_bytes;  /* gradient shards and optimizer state */
		uint64_t kept_bytes;   /* copies of those that make steps early (job/kept.h) */
		struct slab *params;
		struct slab *other;
		struct slab *kept;
		uint64_t params_at; /* what has been cut off */
		uint64_t other_at;
		uint64_t kept_at;
	} on[NODE_MAX_DEVICES]; /* by device */
	struct {
		uint64_t bytes; /* of its buffers of all new units */
		struct slab *slab;
		uint64_t at;
	} * ranks; /* by rank of the job */
};

/* New units are placed on the devices of their group's ranks, and need communicators there. */
static enum res registration_reg_place(const struct registration *r, struct group *g,
				       struct fault *f)
{
	RES_TRY(group_place(g, f));
	return r->without_comms || group_makes_in_line(g) ? RES_DONE : group_comms(g, f);
}

/* Return: 0 or a fault code. */
static int registration_reg_check_unit(struct registration *r, size_t i, struct fault *f)
{
	state_unit *spec = r->specs[i];
	struct group *g = job_group_by_id(r->job, spec->group);
	struct unit *have;

	if (!g)
		return fault_set(f, FAULT_INVALID, "units.group",
				 "unit '%.100s': group %u is out of range (0..%u)", spec->name,
				 spec->group, r->job->n_groups - 1);
	if (unit_resolve(spec, group_size(g), f))
		return f->code;
	if (!unit_layout(spec, group_size(g), &r->layouts[i]))
		return fault_set(f, FAULT_INVALID, "units.tensors",
				 "unit '%.100s': its tensors must have 1 to 2^48 elements in "
				 "total, not counting aliases",
				 spec->name);
	if (!unit_buffers_fit(spec))
		return fault_set(f, FAULT_INVALID, "units.buffers",
				 "unit '%.100s': its buffers must have at most 2^50 bytes in total",
				 spec->name);
	for (size_t k = 0; k < spec->n_tensors; k++)
		r->aliases = r->aliases || unit_is_alias(spec->tensors[k]);
	have = htab_find(&r->job->unit_names, spec->name);
	if (!have) {
		r->n_new++;
		r->later = registration_reg_place(r, g, f) == RES_WAIT || r->later;
		return (int)f->code;
	}
	r->ids[i] = have->id;
	return unit_same_spec(have->rec, spec, f) ? 0 : (int)f->code;
}

/* The same name twice in one call. */
static int registration_reg_check_names(struct registration *r, struct fault *f)
{
	struct htab names = HTAB_NULL;
	int e = 0;

	for (size_t i = 0; e == 0 && i < r->n; i++) {
		e = htab_add(&names, r->specs[i]->name, r->specs[i]);
		if (e == -EEXIST)
			fault_set(f, FAULT_INVALID, "units.name", "unit '%.100s' is listed twice",
				  r->specs[i]->name);
		else if (e)
			fault_errno(f, e, "registering units");
	}
	htab_deinit(&names);
	return f->code;
}

/* Total of the job, with the new units. */
static uint64_t registration_reg_tensors(const struct registration *r)
{
	const struct job *job = r->job;
	uint64_t tensors = 0;

	for (uint32_t i = 0; i < job->n_units; i++)
		tensors += job->units[i]->rec->dropped ? 0 : job->units[i]->rec->n_tensors;
	for (size_t i = 0; i < r->n; i++)
		tensors += r->ids[i] ? 0 : r->specs[i]->n_tensors;
	return tensors;
}

static int registration_reg_check_tensors(const struct registration *r, struct fault *f)
{
	const struct job *job = r->job;
	uint64_t tensors = registration_reg_tensors(r);

	if (tensors <= JOB_MAX_TENSORS)
		return 0;
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "job '%s' would have %llu tensors; the limit is %u", job->rec->name,
			 (unsigned long long)tensors, JOB_MAX_TENSORS);
}

/* Resolve the aliases. */
static int registration_reg_check_aliases(struct registration *r, struct fault *f)
{
	struct aliases a;

	aliases_init(&a, r->job);
	for (size_t i = 0; !f->code && i < r->n; i++)
		if (aliases_add(&a, r->specs[i]) < 0)
			fault_errno(f, -ENOMEM, "registering units");
	for (size_t i = 0; !f->code && i < r->n; i++)
		aliases_check(&a, r->specs[i], f);
	aliases_deinit(&a);
	return f->code;
}

/* Checks over all units together. Return: 0 or a fault code. */
static int registration_reg_check_all(struct registration *r, struct fault *f)
{
	uint32_t most = r->job->node->limits.max_units_per_job;

	if (registration_reg_check_names(r, f))
		return f->code;
	/* the limit may have been lowered since */
	if (r->n_new && job_units_alive(r->job) + (uint64_t)r->n_new > most)
		return fault_set(
			f, FAULT_EXHAUSTED, NULL,
			"job '%s' would have %llu units; the limit is %u (max_units_per_job)",
			r->job->rec->name, (unsigned long long)job_units_alive(r->job) + r->n_new,
			most);
	if (registration_reg_check_tensors(r, f) ||
	    (r->aliases && registration_reg_check_aliases(r, f)))
		return f->code;
	return 0;
}

/* The bytes of one unit fit 64 bits easily; those of a hundred thousand units may not. */
static uint64_t registration_add(uint64_t a, uint64_t b)
{
	return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* Beside the parameters. */
static unsigned registration_other_arrays(const state_unit *rec)
{
	return !unit_pools_gradient(rec) + unit_state_arrays(rec);
}

static void registration_reg_sum_buffers(struct registration *r, const state_unit *spec)
{
	const state_group *g = r->job->groups[spec->group]->rec;
	uint64_t bytes = unit_buffers_bytes(spec);

	for (size_t i = 0; i < g->n_ranks; i++)
		r->ranks[g->ranks[i]].bytes = registration_add(r->ranks[g->ranks[i]].bytes, bytes);
}

/* Bytes that an array of @bytes takes on a device. */
static uint64_t registration_array_bytes(const struct device *d, uint64_t bytes)
{
	return bytes + stagger_room(d, bytes);
}

/* Of the copy of each part of a unit; 0: it has none. */
static uint64_t registration_kept_bytes(const struct job *job, const state_unit *rec,
					const struct layout *l, unsigned spread)
{
	return kept_takes(job, rec, l)
		       ? unit_params_bytes(rec, l, spread) +
				 unit_state_arrays(rec) * unit_array_bytes(l, spread)
		       : 0;
}

/* Its group is placed by now. */
static void registration_set_replicas(struct registration *r, size_t i, const struct group *g)
{
	if (r->ids[i])
		return;
	group_set_replicas(g, r->specs[i]);
	r->layouts[i].sets = r->specs[i]->sets;
}

static void registration_reg_sum(struct registration *r)
{
	for (size_t i = 0; i < r->n; i++) {
		struct group *g = r->job->groups[r->specs[i]->group];
		const struct layout *l = &r->layouts[i];
		unsigned spread, others = registration_other_arrays(r->specs[i]);

		registration_set_replicas(r, i, g);
		spread = layout_spread(l, g->all_devices);
		for (unsigned d = 0; !r->ids[i] && d < g->n_devices; d++) {
			const struct device *device = g->devices[d];
			uint64_t params = registration_array_bytes(
				device, unit_params_bytes(r->specs[i], l, spread));
			uint64_t other =
				registration_array_bytes(device, unit_array_bytes(l, spread));
			uint64_t kept = registration_kept_bytes(r->job, r->specs[i], l, spread);
			unsigned on = device->index;

			r->on[on].params_bytes = registration_add(r->on[on].params_bytes, params);
			r->on[on].other_bytes =
				registration_add(r->on[on].other_bytes, other * others);
			r->on[on].kept_bytes = registration_add(r->on[on].kept_bytes, kept);
		}
		if (!r->ids[i])
			registration_reg_sum_buffers(r, r->specs[i]);
	}
}

/* The slabs that an earlier try of the registration took and kept. */
static struct slab *registration_take_spare(struct job *job, const struct device *d, uint64_t bytes)
{
	uint64_t granularity = backend_info(d->backend)->granularity;

	for (unsigned i = 0; i < job->mem.n_spare; i++) {
		struct slab *s = job->mem.spare[i];

		if (s->device == d && s->bytes >= bytes && s->bytes - bytes < granularity) {
			job->mem.spare[i] = job->mem.spare[--job->mem.n_spare];
			return s;
		}
	}
	return NULL;
}

/* Return: 0, SLAB_E_*, or negative errno. */
static int registration_reg_slab(struct registration *r, unsigned d, uint64_t bytes,
				 struct slab **ret)
{
	struct job *job = r->job;
	struct device *device = &job->node->devices[d];

	if (!bytes)
		return 0;
	*ret = registration_take_spare(job, device, bytes);
	if (*ret)
		return 0;
	return slab_new(device, &job->quota, MEM_SHARD, job_share(job), bytes, job->rec->name, -1,
			ret);
}

static void registration_keep_spare(struct job *job, struct slab **s)
{
	struct slab **grown =
		*s ? realloc(job->mem.spare, (job->mem.n_spare + 1) * sizeof(*grown)) : NULL;

	if (grown) {
		job->mem.spare = grown;
		job->mem.spare[job->mem.n_spare++] = STEAL_PTR(*s);
	}
	*s = slab_unref(*s);
}

/* Some memory is still being allocated: keep the rest for the next try, or give it back. */
static void registration_reg_put_back(struct registration *r, bool keep)
{
	for (unsigned d = 0; d < r->job->node->n_devices; d++) {
		if (keep) {
			registration_keep_spare(r->job, &r->on[d].params);
			registration_keep_spare(r->job, &r->on[d].other);
			registration_keep_spare(r->job, &r->on[d].kept);
		}
		r->on[d].params = slab_unref(r->on[d].params);
		r->on[d].other = slab_unref(r->on[d].other);
		r->on[d].kept = slab_unref(r->on[d].kept);
	}
	for (uint32_t i = 0; i < r->job->rec->world_size; i++) {
		if (keep)
			registration_keep_spare(r->job, &r->ranks[i].slab);
		r->ranks[i].slab = slab_unref(r->ranks[i].slab);
	}
	if (!keep)
		job_drop_spare(r->job);
}

/* A job may choose to do without. */
static void registration_say_copies(uint64_t bytes, char *buf, size_t n)
{
	buf[0] = '\0';
	if (bytes)
		snprintf(buf, n,
			 ", %llu of them for copies that a step is rolled back to (a job that is "
			 "created with resume NO_COPY has none)",
			 (unsigned long long)bytes);
}

static int registration_reg_memory_fault(struct registration *r, int error, struct fault *f)
{
	char holders[440], copies[160];
	uint64_t bytes = 0, kept = 0;

	if (!slab_is_short(error) && error != -ENOMEM) {
		registration_reg_put_back(r, false);
		return fault_errno(f, error, "taking memory for shards");
	}
	for (unsigned d = 0; d < r->job->node->n_devices; d++) {
		kept = registration_add(kept, r->on[d].kept_bytes);
		bytes = registration_add(bytes, registration_add(r->on[d].params_bytes,
								 r->on[d].other_bytes));
	}
	bytes = registration_add(bytes, kept);
	for (uint32_t i = 0; i < r->job->rec->world_size; i++)
		bytes = registration_add(bytes, r->ranks[i].bytes);
	if (error == SLAB_E_QUOTA && job_owner_fault(r->job, bytes, f)) {
		registration_reg_put_back(r, false);
		return f->code;
	}
	/* the slabs that this call has taken so far do not count as the job's */
	registration_reg_put_back(r, false);
	job_holders(r->job, holders, sizeof(holders));
	registration_say_copies(kept, copies, sizeof(copies));
	return fault_set(f, FAULT_EXHAUSTED, NULL, "cannot allocate %llu bytes for shards%s: %s",
			 (unsigned long long)bytes, copies, holders);
}

static uint64_t registration_rounded(const struct registration *r, unsigned d, uint64_t bytes)
{
	uint64_t granularity = backend_info(r->job->node->devices[d].backend)->granularity;

	return bytes > UINT64_MAX - granularity
		       ? UINT64_MAX
		       : (bytes + granularity - 1) / granularity * granularity;
}

static void registration_reg_need(struct registration *r)
{
	struct admission_need *need = &r->need;

	*need = (struct admission_need){ .all = 0 };
	for (unsigned d = 0; d < r->job->node->n_devices; d++) {
		uint64_t bytes = registration_add(registration_rounded(r, d, r->on[d].params_bytes),
						  registration_rounded(r, d, r->on[d].other_bytes));

		bytes = registration_add(bytes, registration_rounded(r, d, r->on[d].kept_bytes));

		for (uint32_t i = 0; i < r->job->rec->world_size; i++)
			if (job_device_of(r->job, i) == d)
				bytes = registration_add(
					bytes, registration_rounded(r, d, r->ranks[i].bytes));
		need->bytes[d] = bytes;
		need->slabs += (r->on[d].params_bytes > 0) + (r->on[d].other_bytes > 0) +
			       (r->on[d].kept_bytes > 0);
		need->all = registration_add(need->all, bytes);
	}
	for (uint32_t i = 0; i < r->job->rec->world_size; i++)
		need->slabs += r->ranks[i].bytes > 0;
}

/* Is there room for all of it? Devices allocate memory asynchronously, so do not start if the end
 * would be a refusal. */
static int registration_reg_room(const struct registration *r)
{
	const struct job *job = r->job;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		if (r->need.bytes[d] > registration_add(quota_left(&job->node->devices[d].quota),
							job_spare_bytes(job)))
			return SLAB_E_FULL;
	return r->need.all > registration_add(quota_left(&job->quota), job_spare_bytes(job))
		       ? SLAB_E_QUOTA
		       : 0;
}

static enum res registration_reg_behind(struct registration *r, uint32_t ahead, struct fault *f)
{
	registration_reg_put_back(r, false);
	fault_set(
		f, FAULT_EXHAUSTED, NULL,
		"cannot allocate %llu bytes for shards: %u %s for memory before job '%s' (shardctl "
		"status): let it wait, too (wait_for_memory_ms), or try later",
		(unsigned long long)r->need.all, ahead, ahead == 1 ? "job waits" : "jobs wait",
		r->job->rec->name);
	return RES_FAILED;
}

/* It is in the line by now, or @f says why it got no memory. @ahead: jobs that wait, 0: @error is the
 * reason. */
static enum res registration_reg_short(struct registration *r, int error, uint32_t ahead,
				       struct fault *f)
{
	uint32_t waited_ms = r->line && r->line->until_us && clock_now_us() >= r->line->until_us
				     ? r->job->rec->wait_for_memory_ms
				     : 0;
	char why[sizeof(f->text)];

	if (r->line && (ahead || slab_is_short(error)) && admission_can_fit(r->job, &r->need) &&
	    admission_wait(r->line, r->job, &r->need) == RES_WAIT) {
		registration_reg_put_back(r, false);
		return RES_WAIT;
	}
	if (ahead)
		registration_reg_behind(r, ahead, f);
	else
		registration_reg_memory_fault(r, error, f);
	if (!waited_ms || f->code != FAULT_EXHAUSTED)
		return RES_FAILED;
	memcpy(why, f->text, sizeof(why));
	*f = FAULT_NULL;
	fault_set(f, FAULT_EXHAUSTED, NULL, "no memory within %u ms (wait_for_memory_ms): %s",
		  waited_ms, why);
	return RES_FAILED;
}

/* Of device @i; beyond the devices, of ranks. */
static int registration_reg_slabs(struct registration *r, unsigned i)
{
	unsigned rank = i - r->job->node->n_devices;
	bool later = false;
	int e;

	if (i >= r->job->node->n_devices)
		return registration_reg_slab(r, job_device_of(r->job, rank), r->ranks[rank].bytes,
					     &r->ranks[rank].slab);
	e = slab_note_later(registration_reg_slab(r, i, r->on[i].params_bytes, &r->on[i].params),
			    &later);
	if (e == 0)
		e = slab_note_later(
			registration_reg_slab(r, i, r->on[i].other_bytes, &r->on[i].other), &later);
	if (e == 0)
		e = slab_note_later(
			registration_reg_slab(r, i, r->on[i].kept_bytes, &r->on[i].kept), &later);
	return e || !later ? e : SLAB_E_LATER;
}

/* All slabs, or none. Requests all of them at once, so that devices allocate them in parallel. */
static enum res registration_reg_memory(struct registration *r, struct fault *f)
{
	bool later = false;
	uint32_t ahead = 0;
	int room;

	registration_reg_need(r);
	room = registration_reg_room(r);
	for (unsigned d = 0; room && d < r->job->node->n_devices; d++)
		slabs_sweep(&r->job->node->devices[d]); /* a trainer may have unmapped some */
	room = room ? registration_reg_room(r) : 0;
	if (room == 0 && r->line)
		(void)admission_lets(r->job, &r->need, &ahead);
	if (room || ahead)
		return registration_reg_short(r, room, ahead, f);
	for (unsigned i = 0; i < r->job->node->n_devices + r->job->rec->world_size; i++) {
		int e = slab_note_later(registration_reg_slabs(r, i), &later);

		if (e)
			return registration_reg_short(r, e, 0, f);
	}
	if (later)
		registration_reg_put_back(r, true);
	return later ? RES_WAIT : RES_DONE;
}

/* Cut array @i of a unit, of @bytes, off @slab at *@at. */
static struct region registration_cut(struct slab *slab, uint64_t *at, uint64_t bytes, unsigned i)
{
	uint64_t by = stagger_by(slab->device, bytes, STAGGER_ARRAY(i));
	struct region r = { slab, *at + by, bytes };

	*at += registration_array_bytes(slab->device, bytes);
	CHECK(*at <= slab->bytes);
	return r;
}

/* As it is copied: array behind array. */
static int registration_place_kept(struct unit *u, struct registration *r, struct unit_part *p,
				   state_part *rec)
{
	uint64_t bytes = registration_kept_bytes(r->job, u->rec, &u->layout, u->spread);
	unsigned d = p->device->index;

	if (!bytes)
		return 0;
	p->kept = (struct region){ r->on[d].kept, r->on[d].kept_at, bytes };
	r->on[d].kept_at += bytes;
	CHECK(r->on[d].kept_at <= r->on[d].kept->bytes);
	return state_region_set(&rec->kept, &p->kept);
}

/* Memory for one part of a new unit, in the record and in the unit. */
static int registration_place(struct unit *u, struct registration *r, struct unit_part *p)
{
	uint64_t bytes = unit_array_bytes(&u->layout, u->spread);
	unsigned states = unit_state_arrays(u->rec), d = p->device->index;
	state_part *rec = state_unit_add_part(u->rec);

	if (!rec)
		return -ENOMEM;
	p->params = registration_cut(r->on[d].params, &r->on[d].params_at,
				     unit_params_bytes(u->rec, &u->layout, u->spread), 0);
	if (state_region_set(&rec->params, &p->params) < 0)
		return -ENOMEM;
	if (!bytes) /* all of it is frozen */
		return 0;
	if (!unit_pools_gradient(u->rec))
		p->grads = registration_cut(r->on[d].other, &r->on[d].other_at, bytes, 1);
	if (states > 0)
		p->state1 = registration_cut(r->on[d].other, &r->on[d].other_at, bytes, 2);
	if (states > 1)
		p->state2 = registration_cut(r->on[d].other, &r->on[d].other_at, bytes, 3);
	if (states > 2)
		p->state3 = registration_cut(r->on[d].other, &r->on[d].other_at, bytes, 4);
	if ((p->grads.slab && state_region_set(&rec->grads, &p->grads) < 0) ||
	    (states > 0 && state_region_set(&rec->state1, &p->state1) < 0) ||
	    (states > 1 && state_region_set(&rec->state2, &p->state2) < 0) ||
	    (states > 2 && state_region_set(&rec->state3, &p->state3) < 0))
		return -ENOMEM;
	return registration_place_kept(u, r, p, rec);
}

static int registration_place_all(struct unit *u, struct registration *r)
{
	for (unsigned d = 0; d < u->n_parts; d++)
		if (registration_place(u, r, &u->parts[d]) < 0)
			return -ENOMEM;
	return 0;
}

/* Each rank's buffers, in the record and in the unit. */
static int registration_place_buffers(struct unit *u, struct registration *r)
{
	const state_group *g = r->job->groups[u->rec->group]->rec;
	uint64_t bytes = unit_buffers_bytes(u->rec);

	if (!bytes)
		return 0;
	u->buffers = calloc(g->n_ranks, sizeof(*u->buffers));
	if (!u->buffers)
		return -ENOMEM;
	for (size_t i = 0; i < g->n_ranks; i++) {
		uint32_t rank = g->ranks[i];

		u->buffers[i] = (struct region){ r->ranks[rank].slab, r->ranks[rank].at, bytes };
		r->ranks[rank].at += bytes;
		CHECK(r->ranks[rank].at <= r->ranks[rank].slab->bytes);
		if (state_unit_add_buffer_region(u->rec, &u->buffers[i]) < 0)
			return -ENOMEM;
	}
	return 0;
}

/* The unit takes the place of a dropped one, which is kept until all is done. */
static void registration_replace(struct registration *r, uint32_t k, struct unit *u)
{
	struct job *job = r->job;
	uint32_t at = r->again[k].number - 1;

	job_units_replaced(job, job->units[at]);
	r->again[k].u = job->units[at];
	r->again[k].rec = job->rec->units[at];
	job->units[at] = u;
	job->rec->units[at] = u->rec;
}

static int registration_append(struct registration *r, struct unit *u)
{
	if (state_job_add_unit(r->job->rec, u->rec) < 0)
		return -ENOMEM;
	r->job->units[r->job->n_units++] = u;
	return 0;
}

/* Add unit @k of the new ones, with its record and name. On failure nothing of it remains. */
static int registration_add_unit(struct registration *r, size_t i, uint32_t k)
{
	struct job *job = r->job;
	const struct group *g = job->groups[r->specs[i]->group];
	uint32_t number = k < r->n_again ? r->again[k].number : job->n_units + 1;
	const struct unit_place place = group_unit_place(g);
	struct unit *u = NULL;

	if (unit_new(number, r->specs[i], &r->layouts[i], &place, &u) < 0)
		return -ENOMEM;
	job_continue_turns(job, u);
	if (registration_place_all(u, r) < 0 || registration_place_buffers(u, r) < 0 ||
	    htab_add(&job->unit_names, r->specs[i]->name, u) < 0) {
		unit_free(u);
		return -ENOMEM;
	}
	if (k < r->n_again) {
		registration_replace(r, k, u);
	} else if (registration_append(r, u) < 0) {
		htab_remove(&job->unit_names, r->specs[i]->name);
		unit_free(u);
		return -ENOMEM;
	}
	r->ids[i] = number;
	return 0;
}

/* Give the new units, those appended from @first on, back to the caller's specs. */
static void registration_undo_units(struct registration *r, uint32_t first)
{
	struct job *job = r->job;

	while (job->n_units > first) {
		struct unit *u = job->units[--job->n_units];

		htab_remove(&job->unit_names, u->rec->name);
		job->rec->n_units--;
		unit_free(u);
	}
	for (uint32_t k = 0; k < r->n_again && r->again[k].u; k++) {
		uint32_t at = r->again[k].number - 1;
		struct unit *u = job->units[at];

		htab_remove(&job->unit_names, u->rec->name);
		unit_free(u);
		job->units[at] = r->again[k].u;
		job->rec->units[at] = r->again[k].rec;
	}
}

/* What had their numbers. */
static void registration_free_replaced(struct registration *r)
{
	for (uint32_t k = 0; k < r->n_again; k++) {
		unit_free(r->again[k].u);
		state_unit_free(r->again[k].rec);
	}
	job_forget_dropped(r->job);
	r->job->readers.changes += r->n_again;
}

/* Return: 0 or -ENOMEM. */
static int registration_choose_numbers(struct registration *r)
{
	_cleanup_(freep) uint32_t *numbers = calloc(r->n_new, sizeof(*numbers));

	free(r->again);
	r->again = calloc(r->n_new, sizeof(*r->again));
	r->n_again = 0;
	if (!numbers || !r->again)
		return -ENOMEM;
	if (r->numbers) {
		CHECK(r->n_numbers <= r->n_new);
		r->n_again = r->n_numbers;
		memcpy(numbers, r->numbers, r->n_numbers * sizeof(*numbers));
	} else {
		r->n_again = job_take_dropped(r->job, numbers, (uint32_t)r->n_new);
	}
	for (uint32_t k = 0; k < r->n_again; k++)
		r->again[k].number = numbers[k];
	return 0;
}

/* Add them to the job and its record. */
static int registration_enter_slabs(struct registration *r)
{
	struct job *job = r->job;
	_cleanup_(freep) struct slab **all =
		calloc(3 * NODE_MAX_DEVICES + job->rec->world_size, sizeof(*all));
	size_t n = 0;

	if (!all)
		return -ENOMEM;
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		if (r->on[d].params)
			all[n++] = r->on[d].params;
		if (r->on[d].other)
			all[n++] = r->on[d].other;
		if (r->on[d].kept)
			all[n++] = r->on[d].kept;
	}
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (r->ranks[i].slab)
			all[n++] = r->ranks[i].slab;
	return job_add_slabs(job, all, n);
}

/* Their ranks write them. */
static void registration_open_buffers(struct registration *r)
{
	for (uint32_t i = 0; i < r->job->rec->world_size; i++) {
		struct slab *s = r->ranks[i].slab;

		if (s) {
			s->writable = true;
			s->owner_rank = (int)i;
		}
	}
}

static bool registration_is_new(const struct registration *r, size_t i)
{
	return r->job->units[r->ids[i] - 1]->rec == r->specs[i];
}

static int registration_resolve_aliases(struct registration *r, struct fault *f)
{
	struct aliases a;

	aliases_init(&a, r->job);
	for (size_t i = 0; !f->code && i < r->n; i++)
		if (registration_is_new(r, i))
			aliases_resolve(&a, r->job->units[r->ids[i] - 1], f);
	aliases_deinit(&a);
	return f->code;
}

static int registration_reg_build(struct registration *r, struct fault *f)
{
	struct job *job = r->job;
	uint32_t first = job->n_units, added = 0;
	int e = 0;

	CHECK(first == r->before); /* one registration of a job at a time */

	if (job_units_grow(job, r->n_new - r->n_again) < 0)
		return fault_errno(f, -ENOMEM, "registering units");
	for (size_t i = 0; e == 0 && i < r->n; i++)
		if (!r->ids[i])
			e = registration_add_unit(r, i, added++);
	if (e == 0 && r->aliases && registration_resolve_aliases(r, f))
		e = -ENOMEM; /* everything else was checked */
	if (e == 0)
		e = registration_enter_slabs(r);
	if (e < 0) {
		registration_undo_units(r, first);
		return fault_errno(f, -ENOMEM, "registering units");
	}
	registration_open_buffers(r);
	for (size_t i = 0; i < r->n; i++)
		if (registration_is_new(r, i))
			job_journal_mark_unit(job, job->units[r->ids[i] - 1]);
	job_journal_write(job);
	registration_free_replaced(r);
	return 0;
}

/* Several replicas on more devices, and yet not one on each device, nor each on a set of them? Then
 * there is one copy, over all devices. */
static bool registration_is_spread(const struct unit *u)
{
	return u->rec->strategy == STRATEGY_HYBRID && u->layout.replicas > 1 &&
	       u->spread == u->all_parts;
}

/* Trainers that ask for replicas expect gathers that stay among some of the devices. */
static void registration_tell_spread(const struct registration *r)
{
	const struct unit *first = NULL;
	unsigned n = 0;

	for (size_t i = 0; i < r->n; i++) {
		const struct unit *u = r->job->units[r->ids[i] - 1];

		if (!registration_is_new(r, i) || !registration_is_spread(u))
			continue;
		n++;
		first = first ? first : u;
	}
	if (first)
		log_warn("job",
			 "hybrid units in one copy over all devices job=%s units=%u unit=%s "
			 "shard_ranks=%u replicas=%u devices=%u why=\"replicas have no sets of "
			 "equally many devices of their own\"",
			 r->job->label, n, first->rec->name, first->rec->shard_ranks,
			 first->layout.replicas, first->all_parts);
}

/* The specs of new units belong to the job now. */
static void registration_take_specs(struct registration *r)
{
	for (size_t i = 0; i < r->n; i++)
		if (registration_is_new(r, i))
			r->specs[i] = NULL;
}

/* Charge the daemon's own memory for the new units. Return: 0 or a fault code. */
static int registration_reg_charge(struct registration *r, struct fault *f)
{
	struct job *job = r->job;
	uint64_t bytes = job_own_bytes(job, job->n_units + (uint64_t)r->n_new - r->n_again,
				       registration_reg_tensors(r));

	return user_charge_resize(&job->memory, bytes, f) ? (int)f->code : 0;
}

/* What was missing when the units were checked may be there by now, and its news are over: waiting
 * for them would not end. */
static enum res registration_reg_place_later(struct registration *r, struct fault *f)
{
	bool later = false;

	for (size_t i = 0; r->later && i < r->n; i++) {
		enum res res =
			r->ids[i]
				? RES_DONE
				: registration_reg_place(r, r->job->groups[r->specs[i]->group], f);

		if (res == RES_FAILED)
			return RES_FAILED;
		later = later || res == RES_WAIT;
	}
	r->later = later;
	return later ? RES_WAIT : RES_DONE;
}

/* Was one of those that were there dropped since it was checked? */
static int registration_reg_check_there(const struct registration *r, struct fault *f)
{
	for (size_t i = 0; i < r->n; i++)
		if (r->ids[i] && !job_unit_by_id(r->job, r->ids[i]))
			return fault_set(f, FAULT_STATE, NULL,
					 "unit '%.100s' was dropped (DropUnits) while it was "
					 "registered: register it again",
					 r->specs[i]->name);
	return 0;
}

static enum res registration_reg_run(struct registration *r, struct fault *f)
{
	uint64_t own = r->job->memory.n;
	enum res res;

	if (registration_reg_check_there(r, f) || registration_reg_check_all(r, f))
		return RES_FAILED;
	RES_TRY(registration_reg_place_later(r, f));
	if (!r->n_new)
		return RES_DONE;
	if (registration_choose_numbers(r) < 0) {
		fault_errno(f, -ENOMEM, "registering units");
		return RES_FAILED;
	}
	if (registration_reg_charge(r, f))
		return RES_FAILED;
	registration_reg_sum(r);
	res = registration_reg_memory(r, f);
	if (res == RES_DONE) {
		if (registration_reg_build(r, f))
			res = RES_FAILED;
		registration_reg_put_back(r, false); /* the job has taken its own references */
	}
	if (res != RES_DONE)
		(void)user_charge_resize(&r->job->memory, own, NULL);
	return res;
}

int registration_new(struct job *job, state_unit **specs, size_t n, uint32_t *ids,
		     struct registration **ret)
{
	struct registration *r = calloc(1, sizeof(*r));

	if (!r)
		return -ENOMEM;
	*r = (struct registration){
		.job = job, .specs = specs, .n = n, .ids = ids, .before = job->n_units
	};
	for (size_t i = 0; i < n; i++)
		ids[i] = 0;
	r->layouts = calloc(n ? n : 1, sizeof(*r->layouts));
	r->ranks = calloc(job->rec->world_size, sizeof(*r->ranks));
	if (r->layouts && r->ranks) {
		*ret = r;
		return 0;
	}
	registration_free(r);
	return -ENOMEM;
}

void registration_between_epochs(struct registration *r, const uint32_t *numbers, uint32_t n)
{
	r->without_comms = true;
	r->numbers = numbers;
	r->n_numbers = n;
}

void registration_may_wait(struct registration *r, struct admission_call *line)
{
	r->line = line;
}

int registration_check(struct registration *r, size_t tensors, struct fault *f)
{
	size_t seen = 0;

	while (r->checked < r->n && seen < tensors) {
		if (registration_reg_check_unit(r, r->checked, f))
			return (int)f->code;
		seen += 1 + r->specs[r->checked++]->n_tensors;
	}
	return 0;
}

bool registration_is_checked(const struct registration *r)
{
	return r->checked == r->n;
}

enum res registration_build(struct registration *r, uint64_t *ret_charged, struct fault *f)
{
	struct job *job = r->job;
	uint64_t before = job->quota.used - job_spare_bytes(job);
	enum res res = registration_reg_run(r, f);

	CHECK(registration_is_checked(r));
	if (res == RES_FAILED)
		job_drop_spare(job);
	RES_TRY(res);
	registration_tell_spread(r);
	if (r->line && r->n_new)
		admission_served(r->line, job);
	registration_take_specs(r);
	*ret_charged = job->quota.used - before;
	return RES_DONE;
}

void registration_free(struct registration *r)
{
	if (!r)
		return;
	free(r->layouts);
	free(r->ranks);
	free(r->again);
	free(r);
}
