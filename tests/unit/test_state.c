/* What outlives the daemon: packed, unpacked, believed only after a check, and made
 * into a job again that goes on where the old one was. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/job_journal.h"
#include "journalfix.h"
#include "leftfix.h"

TestSuite(state, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

Test(state, a_job_goes_on_in_the_next_daemon)
{
	struct fault f = FAULT_NULL;
	struct member *m[2];
	struct nodefix n;
	state_all *all = NULL;
	struct left l;
	struct job *job = NULL;
	struct unit *u;

	left_behind(&l);
	nodefix_begin(&n, NULL);
	cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0, "%s", f.text);
	cr_assert_eq(job_restore(&n.jobs, all->jobs[0], l.fds, &job, &f), 0, "%s", f.text);
	all->jobs[0] = NULL;
	state_free(all);
	u = job_unit_by_id(job, 1);
	cr_expect_eq(job->rec->epoch, 2);
	cr_expect_eq(job->rec->step, 5);
	cr_expect_eq(state_job_blob(job->rec, 1)->data.len, 21);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 41);
	cr_expect_eq(job->n_groups, 2);
	cr_expect_eq(u->rec->optimizer->steps, 1);
	cr_expect_arr_eq(nodefix_params(u), l.params, sizeof(l.params));
	cr_expect_not(job->life.torn);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	left_train(&n, m, u, 6);
	cr_expect_eq(u->rec->optimizer->steps, 2);
	nodefix_register(job, nodefix_spec("more", 10));
	left_forget(&l);
	nodefix_end(&n);
}

#define SETS_RANKS 4

/* HYBRID on four devices: each replica has two of its own. */
static void leave_sets_behind(struct left *l)
{
	const struct nodefix_options o = { .devices = SETS_RANKS };
	struct member *m[SETS_RANKS];
	state_unit *spec = nodefix_spec("u", LEFT_ELEMENTS);
	struct nodefix n;
	struct job *job;

	*l = (struct left){ 0 };
	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", SETS_RANKS, 0);
	for (unsigned i = 0; i < SETS_RANKS; i++)
		m[i] = nodefix_join(&n, job, i);
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
	cr_assert_eq(nodefix_unit(&n, job, spec, m, SETS_RANKS)->spread, 2);
	left_keep(l, job);
	nodefix_end(&n);
}

/* What a record says of its parts counts, not what a new unit would have; unless its devices forbid it. */
Test(state, replicas_stay_on_their_sets_of_devices)
{
	const struct nodefix_options many = { .devices = SETS_RANKS };
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	struct nodefix n;
	struct left l;

	leave_sets_behind(&l);
	for (unsigned sets = 0; sets < 2; sets++) {
		struct job *job = NULL;
		const struct unit *u;

		nodefix_begin(&n, &many);
		cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0, "%s", f.text);
		cr_assert(all->jobs[0]->units[0]->sets);
		all->jobs[0]->units[0]->sets = sets;
		cr_assert_eq(job_restore(&n.jobs, all->jobs[0], l.fds, &job, &f), 0, "%s", f.text);
		all->jobs[0] = NULL;
		state_free(all);
		u = job_unit_by_id(job, 1);
		cr_expect_eq(u->layout.sets, sets);
		cr_expect_eq(u->spread, sets ? 2 : 4);
		nodefix_end(&n);
	}
	left_forget(&l);
	left_behind(&l);
	nodefix_begin(&n, NULL);
	cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0, "%s", f.text);
	all->jobs[0]->units[0]->sets = true;
	free(l.bytes);
	cr_expect_eq(state_encode(all->jobs, 1, all->next_slab, &l.bytes, &l.n), 0);
	state_free(all);
	cr_expect_eq(left_take_over(&n, &l, l.bytes, l.n), FAULT_INVALID);
	left_forget(&l);
	nodefix_end(&n);
}

/* Layout, tied tensors and everybody's buffers, his own to write. */
Test(state, what_a_unit_can_be_goes_on_too)
{
	struct nodefix n;
	struct member *m[2];
	struct left l;
	struct job *job;
	struct unit *u;

	left_behind(&l);
	nodefix_begin(&n, NULL);
	cr_assert_eq(left_take_over(&n, &l, l.bytes, l.n), 0);
	job = list_first(&n.jobs.all, struct job, link);
	u = job_unit_by_id(job, 2);
	cr_expect_eq(u->rec->layout, LAYOUT_DIM0);
	cr_expect_eq(u->layout.shard_elements, 4);
	cr_expect_eq(u->layout.frozen_shard, 6);
	cr_expect(u->tensors[2].alias);
	cr_expect_eq(u->tensors[2].of_unit, 1);
	cr_expect_eq(u->tensors[2].of, 0);
	for (unsigned i = 0; i < 2; i++) {
		struct nodefix_op op = { 0 };
		const uint8_t *at;

		m[i] = nodefix_join(&n, job, i);
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "UnitBuffers", u, &op), &op);
		cr_expect(op.result.writable);
		at = region_addr(&op.result.place);
		for (unsigned k = 0; k < LEFT_BUFFER_BYTES; k++)
			cr_assert_eq(at[k], i + 1);
		cr_expect_eq(job_slab_for(m[i], op.result.place.slab->id), op.result.place.slab);
		cr_expect_null(job_slab_for(m[i], u->buffers[1 - i].slab->id),
			       "the other rank's are not for this one");
		cr_expect(op.result.place.slab->writable);
	}
	cr_expect_not(u->parts[0].params.slab->writable);
	left_forget(&l);
	nodefix_end(&n);
}

/* A dropped unit keeps its number, and has neither memory nor a name. */
Test(state, a_dropped_unit_goes_on_as_one)
{
	struct nodefix n;
	struct member *m[2];
	struct left l;
	struct job *job;
	state_all *all = NULL;
	struct fault f = FAULT_NULL;
	struct nodefix_op op[2] = { 0 };
	static Shardd__V1__DropUnitsRequest r[2];
	static uint32_t units[] = { 1, 2 };
	uint8_t *bytes = NULL;
	size_t n_bytes = 0;

	left_behind(&l);
	nodefix_begin(&n, NULL);
	cr_assert_eq(left_take_over(&n, &l, l.bytes, l.n), 0);
	job = list_first(&n.jobs.all, struct job, link);
	for (unsigned i = 0; i < 2; i++)
		m[i] = nodefix_join(&n, job, i);
	for (unsigned i = 0; i < 2; i++) {
		r[i] = (Shardd__V1__DropUnitsRequest)SHARDD__V1__DROP_UNITS_REQUEST__INIT;
		r[i].units = units;
		r[i].n_units = 2; /* one has an alias of the other */
		nodefix_submit(&n, m[i], "DropUnits", &r[i].base, &op[i]);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "DropUnits");
	cr_assert_eq(state_encode(&job->rec, 1, n.node.devices[0].table->next, &bytes, &n_bytes),
		     0);
	cr_assert_eq(state_decode(bytes, n_bytes, &all, &f), 0, "%s", f.text);
	cr_expect(all->jobs[0]->units[0]->dropped && all->jobs[0]->units[1]->dropped);
	state_free(all);
	free(bytes);
	left_forget(&l);
	nodefix_end(&n);
}

Test(state, a_step_that_was_not_committed_is_not_forgotten)
{
	struct fault f = FAULT_NULL;
	struct nodefix n;
	state_all *all = NULL;
	struct left l;
	struct job *job = NULL;

	left_behind(&l);
	nodefix_begin(&n, NULL);
	cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0, "%s", f.text);
	all->jobs[0]->uncommitted_steps = all->jobs[0]->steps_since = 1;
	cr_assert_eq(job_restore(&n.jobs, all->jobs[0], l.fds, &job, &f), 0, "%s", f.text);
	all->jobs[0] = NULL;
	state_free(all);
	cr_expect(job->life.torn);
	left_forget(&l);
	nodefix_end(&n);
}

/* Nothing could be copied back. */
Test(state, a_way_back_without_a_copy_is_refused)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	struct left l;

	left_behind(&l);
	cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0, "%s", f.text);
	all->jobs[0]->kept = all->jobs[0]->rollback = true;
	cr_expect_eq(state_check(all, &f), 0, "%s", f.text);
	all->jobs[0]->kept = false;
	cr_expect_eq(state_check(all, &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "a way back"), "%s", f.text);
	state_free(all);
	left_forget(&l);
}

/* RLIMIT_FSIZE stands for a machine without memory. The journal used to be incomplete then, until the
 * next tick: a daemon that died before it left nothing. */
Test(state, a_journal_that_cannot_grow_begins_again)
{
	const struct rlimit limit = { 1 << 18, RLIM_INFINITY };
	struct nodefix n;
	struct member *m[2];
	struct job *job;
	uint64_t bytes;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	bytes = journal_bytes(n.jobs.journal);
	signal(SIGXFSZ, SIG_IGN);
	cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	for (uint64_t step = 1; step <= 60; step++) {
		struct nodefix_op op[2] = { 0 };

		for (unsigned i = 0; i < 2; i++)
			nodefix_commit(&n, m[i], step, 8000 + i, &op[i]);
		for (unsigned i = 0; i < 2; i++)
			nodefix_ok(&op[i], "Commit");
		jobs_journal_write(&n.jobs);
		cr_assert_not(journal_is_spoiled(n.jobs.journal), "at step %llu",
			      (unsigned long long)step);
		journalfix_check(&n.jobs);
	}
	cr_expect_eq(journal_bytes(n.jobs.journal), bytes);
	nodefix_end(&n);
}

/* A disk that lost the end of the file. */
Test(state, a_part_of_it_is_refused_or_consistent)
{
	struct nodefix n;
	struct left l;

	left_behind(&l);
	for (size_t len = 0; len < l.n; len++) {
		nodefix_begin(&n, NULL);
		left_take_over(&n, &l, l.bytes, len);
		nodefix_end(&n);
	}
	left_forget(&l);
}

/* A disk that turned a bit: whatever it says then, nothing breaks. */
Test(state, every_bit_may_be_wrong)
{
	unsigned refused = 0;
	struct nodefix n;
	struct left l;

	left_behind(&l);
	for (size_t i = 0; i < l.n * 8; i++) {
		nodefix_begin(&n, NULL);
		l.bytes[i / 8] ^= (uint8_t)(1 << i % 8);
		refused += left_take_over(&n, &l, l.bytes, l.n) != 0;
		l.bytes[i / 8] ^= (uint8_t)(1 << i % 8);
		nodefix_end(&n);
	}
	cr_expect_gt(refused, l.n);
	left_forget(&l);
}

Test(state, blobs_are_replaced)
{
	state_job *j = state_job_new("job", 2);

	cr_expect_null(state_job_blob(j, 1));
	cr_assert_eq(state_job_set_blob(j, 1, NULL, 0, 4), 0);
	cr_expect_eq(state_job_blob(j, 1)->data.len, 0);
	cr_assert_eq(state_job_set_blob(j, 1, malloc(5), 5, 4), 0);
	cr_assert_eq(state_job_set_blob(j, 1, malloc(7), 7, 4), 0);
	cr_assert_eq(state_job_set_blob(j, 0, malloc(1), 1, 4), 0);
	cr_expect_eq(j->n_blobs, 2);
	cr_expect_eq(state_job_blob(j, 1)->data.len, 7);
	state_job_free(j);
	state_job_free(NULL);
}

/* --------------------------------------------------------------- wrong numbers */

#define HARM(name, what)                      \
	static void harm_##name(state_all *s) \
	{                                     \
		state_job *j = s->jobs[0];    \
		state_unit *u = j->units[0];  \
                                              \
		(void)u;                      \
		what;                         \
	}
HARM(version, s->version++)
HARM(name, j->name[0] = '\0')
HARM(lifetime, j->lifetime = 4)
HARM(world, j->world_size++)
HARM(world_order, j->groups[0]->ranks[0] = 1)
HARM(group_rank, j->groups[1]->ranks[0] = 2)
HARM(blob_rank, j->blobs[0]->rank = 2)
HARM(blob_twice, j->blobs[0]->rank = 1)
HARM(slab_id, j->slabs[0]->id = j->slabs[1]->id)
HARM(slab_zero, j->slabs[0]->id = 0)
HARM(next_slab, s->next_slab = j->slabs[0]->id)
HARM(slab_class, j->slabs[0]->class_ = MEM_GRAD)
HARM(slab_bytes, j->slabs[0]->bytes = 0)
HARM(unit_name, u->name[0] = '\0')
HARM(unit_group, u->group = 2)
HARM(storage, u->storage_dtype = 4)
HARM(compute, u->compute_dtype = 4)
HARM(gradient, u->gradient_dtype = 0)
HARM(multiple, u->shard_multiple = 0)
HARM(layout, u->layout = 3)
HARM(strategy, u->strategy = 0)
HARM(profile, u->reduce_profile = 8)
HARM(reduce_dtype, u->reduce_dtype = 9)
HARM(reshard, u->reshard = 5)
HARM(shard_ranks, u->shard_ranks = 0)
HARM(optim_profile, u->optimizer->profile = 5)
HARM(optim_double, (u->optimizer->kind = 1, u->optimizer->profile = 4))
HARM(when, u->optimizer->when = 0)
HARM(pre, u->pre_divide = 0)
HARM(post, u->post_divide = NAN)
HARM(kind, u->optimizer->kind = 4)
HARM(lr, u->optimizer->lr = INFINITY)
HARM(missed, u->tensors[0]->missed = u->optimizer->steps + 1)
HARM(init, u->tensors[0]->init_kind = 4)
HARM(slab, u->parts[0]->params->slab = 999)
HARM(offset, u->parts[0]->params->offset = UINT64_MAX - 255)
HARM(bytes, u->parts[0]->params->bytes = UINT64_MAX)
HARM(align, u->parts[0]->params->offset += 2)
HARM(overlap, u->parts[0]->state1->offset = u->parts[0]->grads->offset)

HARM(buffer_dtype, j->units[1]->buffers[0]->dtype = 8)
HARM(buffer_offset, j->units[1]->buffer_regions[0]->offset = UINT64_MAX - 255)
HARM(buffer_in_shards, j->units[1]->buffer_regions[0]->slab = j->units[1]->parts[0]->grads->slab)
HARM(buffer_of_another, j->units[1]->buffer_regions[0]->slab = j->units[1]->buffer_regions[1]->slab)

static void harm_buffer_count(state_all *s)
{
	state_unit *u = s->jobs[0]->units[1];

	shardd__state__v1__region__free_unpacked(u->buffer_regions[--u->n_buffer_regions], NULL);
}

static void harm_device(state_all *s)
{
	free(s->jobs[0]->slabs[1]->device);
	s->jobs[0]->slabs[1]->device = strdup("another:0");
}

static void harm_no_region(state_all *s)
{
	shardd__state__v1__region__free_unpacked(s->jobs[0]->units[0]->parts[0]->grads, NULL);
	s->jobs[0]->units[0]->parts[0]->grads = NULL;
}

Test(state, decode_checks_every_number)
{
	static const struct {
		void (*harm)(state_all *s);
		const char *words;
	} harms[] = {
		{ harm_version, "version" },
		{ harm_name, "without a name" },
		{ harm_lifetime, "lifetime" },
		{ harm_device, "region" },
		{ harm_world, "world" },
		{ harm_world_order, "world" },
		{ harm_group_rank, "outside the world" },
		{ harm_blob_rank, "outside the world" },
		{ harm_blob_twice, "two of one" },
		{ harm_slab_id, "wrong number" },
		{ harm_slab_zero, "wrong number" },
		{ harm_next_slab, "wrong number" },
		{ harm_slab_class, "not of shards" },
		{ harm_slab_bytes, "without size" },
		{ harm_unit_name, "without a name" },
		{ harm_unit_group, "group" },
		{ harm_storage, "dtype" },
		{ harm_compute, "dtype" },
		{ harm_gradient, "dtype" },
		{ harm_multiple, "layout" },
		{ harm_pre, "not numbers" },
		{ harm_post, "not numbers" },
		{ harm_kind, "not numbers" },
		{ harm_lr, "not numbers" },
		{ harm_missed, "more steps than there were" },
		{ harm_layout, "layout, strategy" },
		{ harm_strategy, "layout, strategy" },
		{ harm_profile, "layout, strategy" },
		{ harm_reduce_dtype, "layout, strategy" },
		{ harm_reshard, "layout, strategy" },
		{ harm_shard_ranks, "layout, strategy" },
		{ harm_optim_profile, "layout, strategy" },
		{ harm_optim_double, "layout, strategy" },
		{ harm_when, "layout, strategy" },
		{ harm_init, "initialiser" },
		{ harm_slab, "outside its slab" },
		{ harm_offset, "outside its slab" },
		{ harm_bytes, "outside its slab" },
		{ harm_align, "outside its slab" },
		{ harm_overlap, "overlap" },
		{ harm_no_region, "outside its slab" },
		{ harm_buffer_count, "not every rank" },
		{ harm_buffer_dtype, "dtype" },
		{ harm_buffer_offset, "outside their slab" },
		{ harm_buffer_in_shards, "one rank's buffers" },
		{ harm_buffer_of_another, "one rank's buffers" },
	};
	struct left l;

	left_behind(&l);
	for (size_t i = 0; i < ARRAY_SIZE(harms); i++) {
		state_all *all = NULL, *again = NULL;
		struct fault f = FAULT_NULL;
		uint8_t *data = NULL;
		size_t bytes;

		cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0);
		harms[i].harm(all);
		bytes = shardd__state__v1__state__get_packed_size(all);
		data = malloc(bytes);
		shardd__state__v1__state__pack(all, data);
		cr_expect_eq(state_decode(data, bytes, &again, &f), FAULT_INVALID, "harm %zu", i);
		cr_expect(strstr(f.text, harms[i].words), "harm %zu: %s", i, f.text);
		cr_expect_null(again);
		free(data);
		state_free(all);
	}
	left_forget(&l);
}

Test(state, it_packs_again_to_the_same_bytes)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	uint8_t *again = NULL;
	struct left l;
	size_t bytes;

	left_behind(&l);
	cr_assert_eq(state_decode(l.bytes, l.n, &all, &f), 0, "%s", f.text);
	cr_assert_eq(state_encode(all->jobs, all->n_jobs, all->next_slab, &again, &bytes), 0);
	cr_assert_eq(bytes, l.n);
	cr_expect_arr_eq(again, l.bytes, bytes);
	free(again);
	state_free(all);
	left_forget(&l);
}

Test(state, without_jobs_is_a_state_too)
{
	struct fault f = FAULT_NULL;
	state_all *all = NULL;
	uint8_t *data = NULL;
	size_t bytes;

	cr_assert_eq(state_encode(NULL, 0, 7, &data, &bytes), 0);
	cr_assert_eq(state_decode(data, bytes, &all, &f), 0, "%s", f.text);
	cr_expect_eq(all->n_jobs, 0);
	cr_expect_eq(all->next_slab, 7);
	state_free(all);
	free(data);
}

/* Descriptors in the wrong order, of something else, or of nothing. */
Test(state, foreign_descriptors_are_refused)
{
	struct nodefix n;
	struct left l;
	int own, null;

	left_behind(&l);
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	own = l.fds[0];
	nodefix_begin(&n, NULL);
	l.fds[0] = l.fds[1]; /* of another size */
	cr_expect_neq(left_take_over(&n, &l, l.bytes, l.n), 0);
	l.fds[0] = null;
	cr_expect_neq(left_take_over(&n, &l, l.bytes, l.n), 0);
	cr_expect_eq(n.jobs.count, 0);
	cr_expect_eq(n.node.devices[0].quota.used, 0);
	l.fds[0] = own;
	cr_expect_eq(left_take_over(&n, &l, l.bytes, l.n), 0);
	nodefix_end(&n);
	close(null);
	left_forget(&l);
}
