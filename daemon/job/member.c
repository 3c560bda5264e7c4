#include "job/member.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/state.h"
#include "job/job_full.h"
#include "job/job_types.h"
#include "job/member_impl.h"
#include "job/passes.h"

#define MEMBER_MAGIC 0x4d454d42u

int member_new(struct job *job, uint32_t rank, struct proc *proc, uint64_t session,
	       struct member **ret)
{
	struct member *m = calloc(1, sizeof(*m));

	if (!m)
		return -ENOMEM;
	m->user = users_get(&job->node->users, proc_uid(proc), NULL, 0);
	if (!m->user) {
		free(m);
		return -ENOMEM;
	}
	m->magic = MEMBER_MAGIC;
	m->refs = 1;
	CHECK(m->state == MEMBER_JOINED);
	m->job = job;
	m->rank = rank;
	m->proc = proc_ref(proc);
	m->session = session;
	m->next_seq = 1;
	m->waits.since_unix_us = clock_unix_us();
	m->last.op = "join";
	list_init(&m->ops);
	list_init(&m->held);
	condition_init(&m->casts, "its turn under max_inflight_gathers");
	list_init(&m->cast_turn);
	list_init(&m->buffers);
	prefetch_init(&m->ahead.learned, &job->quota);
	m->device = job->placed[rank];
	CHECK(m->device);
	pool_init(&m->pool, m->device, &job->quota, MEM_GRAD, job_share(job), job->rec->name,
		  (int)rank);
	job->members++;
	*ret = m;
	return 0;
}

struct member *member_ref(struct member *m)
{
	MAGIC_CHECK(m, MEMBER_MAGIC);
	m->refs++;
	return m;
}

struct member *member_unref(struct member *m)
{
	if (!m)
		return NULL;
	MAGIC_CHECK(m, MEMBER_MAGIC);
	CHECK(m->refs > 0);
	if (--m->refs)
		return NULL;
	CHECK(list_empty(&m->ops) && list_empty(&m->held) && list_empty(&m->buffers));
	CHECK(condition_is_idle(&m->casts));
	list_unlink(&m->cast_turn);
	CHECK(!m->link && !m->executing && !m->ahead.lists);
	pool_deinit(&m->pool);
	proc_unref(m->proc);
	user_unref(m->user);
	free(m->units);
	free(m->now.holding);
	free(m->registered);
	free(m->gone.slabs);
	m->job->members--;
	m->magic = 0;
	free(m);
	return NULL;
}

static const struct state_row member_states[] = {
	[MEMBER_JOINED] = { "JOINED", STATE_TO(MEMBER_STALE) | STATE_TO(MEMBER_LEFT) |
					      STATE_TO(MEMBER_DEAD) },
	[MEMBER_STALE] = { "STALE", STATE_TO(MEMBER_JOINED) | STATE_TO(MEMBER_LEFT) |
					    STATE_TO(MEMBER_DEAD) },
	[MEMBER_LEFT] = { "LEFT", 0 },
	[MEMBER_DEAD] = { "DEAD", 0 },
};

void member_state_move(struct member *m, enum member_state to)
{
	state_move(member_states, &m->state, (uint8_t)to);
}

const char *member_state_name(enum member_state s)
{
	return s < ARRAY_SIZE(member_states) ? member_states[s].name : "?";
}

/* Each may become NONE: the epoch ends, or the unit is initialised. */
static const struct state_row member_shard_states[] = {
	[SHARD_NONE] = { "NONE", STATE_TO(SHARD_COMING) },
	[SHARD_COMING] = { "COMING", STATE_TO(SHARD_GOING) | STATE_TO(SHARD_NONE) },
	[SHARD_GOING] = { "GOING",
			  STATE_TO(SHARD_OUT) | STATE_TO(SHARD_COMING) | STATE_TO(SHARD_NONE) },
	[SHARD_OUT] = { "OUT", STATE_TO(SHARD_BACK) | STATE_TO(SHARD_NONE) },
	[SHARD_BACK] = { "BACK", STATE_TO(SHARD_GIVEN_BACK) | STATE_TO(SHARD_NONE) },
	[SHARD_GIVEN_BACK] = { "GIVEN_BACK", STATE_TO(SHARD_COMING) | STATE_TO(SHARD_NONE) },
};

void member_shard_move(struct member_unit *mu, enum shard_state to)
{
	state_move(member_shard_states, &mu->shard_state, (uint8_t)to);
}

void member_shard_drop(struct member_unit *mu)
{
	if (mu->shard_state != SHARD_NONE)
		member_shard_move(mu, SHARD_NONE);
}

int member_pid(const struct member *m)
{
	return (int)proc_pid(m->proc);
}

#define MEMBER_WORD_BITS 64u

static uint32_t member_words(uint32_t n_units)
{
	return (n_units + MEMBER_WORD_BITS - 1) / MEMBER_WORD_BITS;
}

/* Return: 0 or -ENOMEM. */
static int member_grow_holding(struct member *m, uint32_t n_units)
{
	uint64_t *grown = realloc(m->now.holding, member_words(n_units) * sizeof(*grown));

	if (!grown)
		return -ENOMEM;
	m->now.holding = grown;
	for (uint32_t i = member_words(m->n_units); i < member_words(n_units); i++)
		m->now.holding[i] = 0;
	return 0;
}

void member_note_held(struct member *m, const struct member_unit *mu)
{
	const uint32_t i = (uint32_t)(mu - m->units);
	const uint64_t bit = UINT64_C(1) << i % MEMBER_WORD_BITS;
	const bool holds = mu->gradient.slab || mu->accumulated.slab || mu->is_summoned ||
			   mu->shard_state == SHARD_GOING || mu->shard_state == SHARD_OUT ||
			   mu->shard_state == SHARD_BACK;

	CHECK(i < m->n_units);
	if (holds)
		m->now.holding[i / MEMBER_WORD_BITS] |= bit;
	else
		m->now.holding[i / MEMBER_WORD_BITS] &= ~bit;
}

uint32_t member_next_held(const struct member *m, uint32_t from)
{
	uint32_t i = from / MEMBER_WORD_BITS;
	uint64_t word;

	if (from >= m->n_units)
		return m->n_units;
	word = m->now.holding[i] & ~UINT64_C(0) << from % MEMBER_WORD_BITS;
	while (!word && ++i < member_words(m->n_units))
		word = m->now.holding[i];
	return word ? i * MEMBER_WORD_BITS + (uint32_t)__builtin_ctzll(word) : m->n_units;
}

struct member_unit *member_unit(struct member *m, const struct unit *u)
{
	if (u->id > m->n_units) {
		uint32_t n = m->job->n_units;
		struct member_unit *grown;

		CHECK(u->id <= n);
		if (member_grow_holding(m, n) < 0)
			return NULL;
		grown = realloc(m->units, n * sizeof(*grown));
		if (!grown)
			return NULL;
		m->units = grown;
		for (uint32_t i = m->n_units; i < n; i++)
			m->units[i] = (struct member_unit){ 0 };
		m->n_units = n;
	}
	return &m->units[u->id - 1];
}

struct member_unit *member_unit_find(struct member *m, const struct unit *u)
{
	return u->id <= m->n_units ? &m->units[u->id - 1] : NULL;
}

void member_gathered(struct member *m, struct unit *u, struct member_unit *mu)
{
	if (!mu->gathers++) {
		m->gathered++;
		u->gathered_ranks++;
		list_unlink(&u->idle);
	}
	u->drop = false;
}

void member_released(struct member *m, struct unit *u, struct member_unit *mu)
{
	CHECK(mu->gathers > 0);
	if (--mu->gathers)
		return;
	CHECK(u->gathered_ranks > 0 && m->gathered > 0);
	m->gathered--;
	if (--u->gathered_ranks == 0)
		job_full_unused(m->job, u);
}

void member_unsummon(struct member *m, struct unit *u, struct member_unit *mu)
{
	pool_give(&m->pool, &mu->summoned);
	if (!mu->is_summoned)
		return;
	mu->is_summoned = false;
	CHECK(u->summoned_ranks > 0);
	u->summoned_ranks--;
}

int member_set_ahead(struct member *m, struct member_unit *mu, unsigned pass, const uint32_t *units,
		     uint32_t n)
{
	struct member_list **list = &mu->ahead[pass];

	CHECK(pass < ARRAY_SIZE(mu->ahead) && n <= MEMBER_MAX_AHEAD);
	if (n && !*list) {
		if (quota_charge(&m->job->quota, MEM_CONTROL, sizeof(**list)))
			return QUOTA_E_LIMIT;
		*list = calloc(1, sizeof(**list));
		if (!*list) {
			quota_return(&m->job->quota, MEM_CONTROL, sizeof(**list));
			return -ENOMEM;
		}
		m->ahead.lists++;
	}
	if (!n && *list) {
		quota_return(&m->job->quota, MEM_CONTROL, sizeof(**list));
		free(*list);
		*list = NULL;
		m->ahead.lists--;
	}
	for (uint32_t i = 0; i < n; i++)
		(*list)->units[i] = units[i];
	if (n)
		(*list)->n = n;
	return 0;
}

int member_registered(struct member *m, uint32_t id)
{
	struct member_unit *mu = member_unit(m, m->job->units[id - 1]);

	if (!mu)
		return -ENOMEM;
	if (mu->registered)
		return 0;
	if (m->n_registered == m->room_registered) {
		uint32_t room = m->room_registered ? m->room_registered * 2 : 16;
		uint32_t *grown = realloc(m->registered, room * sizeof(*grown));

		if (!grown)
			return -ENOMEM;
		m->registered = grown;
		m->room_registered = room;
	}
	m->registered[m->n_registered++] = id;
	mu->registered = true;
	return 0;
}

uint64_t member_gathered_units(const struct member *m)
{
	return m->gathered;
}

/* What is gathered ahead beside what is there. */
static void member_shorten_ahead(struct member *m, struct member_list *list)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; list && i < list->n; i++)
		if (job_unit_by_id(m->job, list->units[i]))
			list->units[kept++] = list->units[i];
	if (list)
		list->n = kept;
}

void member_units_forgotten(struct member *m)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; m->ahead.lists && i < m->n_units; i++)
		for (unsigned pass = 0; pass < ARRAY_SIZE(m->units[i].ahead); pass++)
			member_shorten_ahead(m, m->units[i].ahead[pass]);

	for (uint32_t i = 0; i < m->n_registered; i++)
		if (m->units[m->registered[i] - 1].registered)
			m->registered[kept++] = m->registered[i];
	m->n_registered = kept;
}

void member_forget_unit(struct member *m, const struct unit *u)
{
	struct member_unit *mu = member_unit_find(m, u);

	prefetch_deinit(&m->ahead.learned);
	if (!mu)
		return;
	CHECK(!mu->gathers && !mu->gradient.slab && !mu->accumulated.slab && !mu->shard.slab);
	CHECK(!mu->summoned.slab && mu->pass == PASS_IDLE);
	for (unsigned pass = 0; pass < ARRAY_SIZE(mu->ahead); pass++)
		(void)member_set_ahead(m, mu, pass, NULL, 0);
	*mu = (struct member_unit){ 0 };
}

struct member_buffer *member_buffer_find(struct member *m, uint64_t id)
{
	struct member_buffer *b, *tmp;

	list_for_each (b, tmp, &m->buffers, link)
		if (b->id == id)
			return b;
	return NULL;
}

struct member_buffer *member_buffer_add(struct member *m, const struct region *r)
{
	struct member_buffer *b = calloc(1, sizeof(*b));

	if (!b)
		return NULL;
	b->m = m;
	b->refs = 1;
	b->id = ++m->next_buffer;
	b->region = *r;
	list_init(&b->link);
	list_append(&m->buffers, &b->link);
	m->n_buffers++;
	return b;
}

void member_buffer_free(struct member *m, struct member_buffer *b)
{
	CHECK(m->n_buffers > 0);
	m->n_buffers--;
	list_unlink(&b->link);
	member_buffer_unref(b);
}

struct member_buffer *member_buffer_ref(struct member_buffer *b)
{
	CHECK(b->refs > 0);
	b->refs++;
	return b;
}

struct member_buffer *member_buffer_unref(struct member_buffer *b)
{
	if (!b)
		return NULL;
	CHECK(b->refs > 0);
	if (--b->refs)
		return NULL;
	pool_give(&b->m->pool, &b->region);
	free(b);
	return NULL;
}

void member_reset(struct member *m)
{
	struct member_buffer *b, *tmp;

	for (uint32_t i = 0; i < m->n_units; i++) {
		struct member_unit *mu = &m->units[i];

		while (mu->gathers)
			member_released(m, m->job->units[i], mu);
		member_unsummon(m, m->job->units[i], mu);
		pool_give(&m->pool, &mu->gradient);
		mu->registered = false;
		mu->pass = PASS_IDLE;
		mu->held = false;
		mu->uses = 0;
		pool_give(&m->pool, &mu->accumulated);
		mu->included = false;
		mu->expected = false;
		pool_give(&m->pool, &mu->shard);
		member_shard_drop(mu);
	}
	m->now.in_pass = 0;
	prefetch_restart(&m->ahead.learned);
	m->n_registered = 0;
	list_for_each (b, tmp, &m->buffers, link)
		member_buffer_free(m, b);
}

void member_renumber(struct member *m, uint32_t rank)
{
	CHECK(!m->gathered && !m->n_registered && list_empty(&m->ops));
	m->rank = rank;
	pool_renumber(&m->pool, (int)rank);
	if (m->link)
		member_signals_slab(m)->owner_rank = (int)rank;
}

void member_slabs_gone(struct member *m, const uint32_t *slabs, uint32_t n)
{
	uint32_t *grown = n ? realloc(m->gone.slabs, (m->gone.n + n) * sizeof(*grown)) : NULL;

	if (!grown)
		return;
	memcpy(grown + m->gone.n, slabs, n * sizeof(*grown));
	m->gone.slabs = grown;
	m->gone.n += n;
}

/* The process may still write to any slab it was handed. */
static void member_keep_until_gone(struct slab *s, void *arg)
{
	struct member *m = arg;

	if (s->exported && !proc_gone(m->proc))
		(void)quarantine_slab(&m->job->node->quarantine, m->proc, s);
}

static void member_retire_now(struct member *m)
{
	m->retiring = false;
	pool_each_slab(&m->pool, member_keep_until_gone, m);
	pool_deinit(&m->pool);
	member_unlink(m);
}

void member_retire(struct member *m)
{
	member_reset(m);
	prefetch_deinit(&m->ahead.learned);
	for (uint32_t i = 0; i < m->n_units; i++)
		for (unsigned pass = 0; pass < ARRAY_SIZE(m->units[i].ahead); pass++)
			(void)member_set_ahead(m, &m->units[i], pass, NULL, 0);
	m->retiring = true;
	member_poison(m);
	if (!m->pending && !m->executing)
		member_retire_now(m);
}

void member_executed(struct member *m)
{
	CHECK(m->executing > m->marking);
	m->executing--;
	if (m->retiring && !m->pending && !m->executing)
		member_retire_now(m);
	member_unref(m);
}

void member_will_execute(struct member *m)
{
	member_ref(m);
	m->executing++;
	m->marking++;
}

void member_marked(struct member *m, uint64_t ready)
{
	CHECK(m->marking > 0);
	m->marking--;
	if (ready > m->ready)
		m->ready = ready;
}

void member_op_begun(struct member *m)
{
	member_ref(m);
	m->pending++;
	m->user->used[USER_OPS]++; /* op_submit has checked for room */
	m->ops_total++;
}

void member_op_ended(struct member *m)
{
	CHECK(m->pending > 0);
	m->pending--;
	user_give_one(m->user, USER_OPS);
	if (m->retiring && !m->pending && !m->executing)
		member_retire_now(m);
	member_unref(m);
}
