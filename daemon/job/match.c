#include "job/match.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"

int match_init(struct match *m, uint32_t size, match_complete_cb complete, match_failed_cb failed,
	       void *userdata)
{
	CHECK(size > 0);
	*m = (struct match){ .size = size,
			     .base = 1,
			     .complete = complete,
			     .failed = failed,
			     .userdata = userdata };
	m->next = calloc(size, sizeof(*m->next));
	m->stopped = calloc(size, sizeof(*m->stopped));
	if (m->next && m->stopped)
		return 0;
	free(m->next);
	free(m->stopped);
	m->next = NULL;
	m->stopped = NULL;
	return -ENOMEM;
}

static uint64_t match_slots_bytes(const struct match *m, uint64_t n)
{
	return n * (sizeof(struct match_slot) + m->size * sizeof(struct match_entry *));
}

/* @n slots are gone. */
static void match_slots_uncharge(struct match *m, size_t n)
{
	if (m->user)
		user_sub(m->user, USER_MEMORY, match_slots_bytes(m, n));
}

void match_deinit(struct match *m)
{
	match_slots_uncharge(m, m->n_slots);
	for (size_t i = 0; i < m->n_slots; i++) {
		for (uint32_t k = 0; m->slots[i].entries && k < m->size; k++)
			CHECK(!m->slots[i].entries[k]);
		free(m->slots[i].entries);
	}
	free(m->slots);
	free(m->next);
	free(m->stopped);
	*m = (struct match){ 0 };
}

void match_number(struct match *m, struct match_entry *entry)
{
	CHECK(entry->index < m->size);
	entry->number = ++m->next[entry->index];
	entry->generation = m->generation;
}

uint64_t match_ahead(const struct match *m, uint32_t index)
{
	CHECK(index < m->size && m->next[index] + 1 >= m->base);
	return m->next[index] + 1 - m->base;
}

void match_skip(struct match *m, uint32_t index)
{
	struct match_entry e = { .index = index };

	match_number(m, &e);
	match_passed(m, &e);
}

uint64_t match_last(const struct match *m)
{
	uint64_t last = 0;

	for (uint32_t i = 0; i < m->size; i++)
		last = m->next[i] > last ? m->next[i] : last;
	return last;
}

struct match_slot *match_slot(struct match *m, uint64_t number)
{
	if (number < m->base || number >= m->base + m->n_slots)
		return NULL;
	return &m->slots[number - m->base];
}

/* Make slots up to @number. */
static int match_slots_reach(struct match *m, uint64_t number)
{
	while (m->base + m->n_slots <= number) {
		struct match_slot *s;

		if (m->n_slots == m->cap_slots) {
			size_t cap = m->cap_slots ? m->cap_slots * 2 : 16;
			struct match_slot *grown = realloc(m->slots, cap * sizeof(*grown));

			if (!grown)
				return -ENOMEM;
			m->slots = grown;
			m->cap_slots = cap;
		}
		s = &m->slots[m->n_slots];
		*s = (struct match_slot){ .number = m->base + m->n_slots };
		s->entries = calloc(m->size, sizeof(struct match_entry *));
		if (!s->entries)
			return -ENOMEM;
		m->n_slots++;
		/* an op that must end is not refused: match_reserve has checked for room */
		if (m->user)
			user_add(m->user, USER_MEMORY, match_slots_bytes(m, 1));
	}
	return 0;
}

int match_reserve(struct match *m, uint32_t index, struct fault *f)
{
	uint64_t end = m->base + m->n_slots, number = m->next[index] + 1;
	uint64_t more = number < end ? 0 : match_slots_bytes(m, number + 1 - end);

	CHECK(index < m->size);
	if (more && !user_has_room(m->user, USER_MEMORY, more)) {
		user_refuse(m->user, USER_MEMORY, more, f);
		return MATCH_E_LIMIT;
	}
	return match_slots_reach(m, number);
}

/* Take every entry out of the slot and tell its op. */
static void match_tell_failed(struct match *m, uint64_t number)
{
	for (uint32_t i = 0; i < m->size; i++) {
		struct match_slot *s = match_slot(m, number); /* may move meanwhile */
		struct match_entry *e = s && s->entries ? s->entries[i] : NULL;
		struct fault fault;

		if (!e)
			continue;
		fault = s->fault;
		s->entries[i] = NULL;
		m->failed(e, &fault, m->userdata);
	}
}

static void match_slot_end(struct match *m, struct match_slot *s, const struct fault *fault)
{
	s->failed = true;
	s->fault = *fault;
	match_tell_failed(m, s->number);
}

/* Of itself: the others are told, before what follows from it here. */
static void match_slot_fail(struct match *m, struct match_slot *s, const struct fault *fault)
{
	uint64_t number = s->number;

	if (s->failed || s->complete)
		return;
	s->failed = true;
	s->fault = *fault;
	if (m->others)
		m->others->refuse(m->userdata, number, fault);
	match_tell_failed(m, number);
}

static bool match_same_print(const struct match_entry *a, const struct match_entry *b)
{
	return memcmp(a->print.words, b->print.words, sizeof(a->print.words)) == 0;
}

static void match_mismatch_fault(const struct match_slot *s, const struct match_entry *e,
				 struct fault *f)
{
	const struct match_entry *o = s->first;

	fault_set(
		f, FAULT_STATE, NULL,
		"ops differ at number %llu: rank %u (pid %d) asks for %s, rank %u (pid %d) for %s",
		(unsigned long long)s->number, o->rank, o->pid, o->print.text, e->rank, e->pid,
		e->print.text);
}

static void match_slot_complete(struct match *m, struct match_slot *s)
{
	struct match_entry **entries = s->entries;

	/* the callback may end ops, which may drop or move the slot */
	s->complete = true;
	s->entries = NULL;
	m->complete(entries, m->size, m->userdata);
	free(entries);
}

/* All members here have announced. */
static void match_slot_there(struct match *m, struct match_slot *s)
{
	if (!m->others) {
		match_slot_complete(m, s);
		return;
	}
	s->here = true;
	m->others->announce(m->userdata, s->number, s->first);
}

int match_announce(struct match *m, struct match_entry *entry)
{
	struct match_slot *s;
	struct fault f = FAULT_NULL;
	bool left;

	CHECK(entry->index < m->size && entry->generation == m->generation);
	if (match_slots_reach(m, entry->number) < 0)
		return -ENOMEM;
	s = match_slot(m, entry->number);
	CHECK(s && !s->complete && !s->entries[entry->index]);
	if (!s->announced++)
		s->first = entry;
	left = m->has_left && entry->number > m->left_after;
	if (left)
		f = m->left_fault;
	else if (!s->failed && !match_same_print(s->first, entry))
		match_mismatch_fault(s, entry, &f);
	s->entries[entry->index] = entry;
	if (s->failed)
		match_tell_failed(m, entry->number);
	else if (left && m->left_known)
		match_slot_end(m, s, &f);
	else if (f.code)
		match_slot_fail(m, s, &f);
	else if (s->announced == m->size)
		match_slot_there(m, s);
	return 0;
}

bool match_start(struct match *m, uint64_t number, uint64_t place)
{
	struct match_slot *s = match_slot(m, number);

	if (!s || !s->here || s->complete || s->failed)
		return false;
	for (uint32_t i = 0; i < m->size; i++)
		s->entries[i]->place = place;
	match_slot_complete(m, s);
	return true;
}

void match_fail(struct match *m, uint64_t number, const struct fault *fault)
{
	struct match_slot *s;

	/* without memory for the slot the deadlines of the ops that come end their wait */
	if (number < m->base || match_slots_reach(m, number) < 0)
		return;
	s = match_slot(m, number);
	if (!s->failed && !s->complete)
		match_slot_end(m, s, fault);
}

void match_refuse(struct match *m, struct match_entry *entry, const struct fault *fault)
{
	/* without memory for the slot the peers' own deadlines end their wait */
	if (entry->generation == m->generation && match_slots_reach(m, entry->number) == 0)
		match_slot_fail(m, match_slot(m, entry->number), fault);
}

bool match_is_here(const struct match *m, uint64_t number)
{
	const struct match_slot *s = match_slot((struct match *)m, number);

	return s && s->here && !s->failed && !s->complete;
}

void match_ask(struct match *m, uint64_t number, const struct fault *fault)
{
	struct match_slot *s = match_slot(m, number);

	CHECK(match_is_here(m, number));
	if (s->asked)
		return;
	s->asked = true;
	m->others->refuse(m->userdata, number, fault);
}

void match_passed(struct match *m, const struct match_entry *entry)
{
	struct match_slot *s;
	size_t done = 0;

	if (entry->generation != m->generation || match_slots_reach(m, entry->number) < 0)
		return;
	s = match_slot(m, entry->number);
	CHECK(s && s->passed < m->size);
	s->passed++;
	while (done < m->n_slots && m->slots[done].passed == m->size)
		free(m->slots[done++].entries);
	match_slots_uncharge(m, done);
	memmove(m->slots, m->slots + done, (m->n_slots - done) * sizeof(*m->slots));
	m->n_slots -= done;
	m->base += done;
}

void match_reset(struct match *m, const struct fault *fault)
{
	uint64_t end = m->base + m->n_slots;

	for (uint64_t n = m->base; n < end; n++) {
		struct match_slot *s = match_slot(m, n);

		if (s && !s->failed && !s->complete)
			match_slot_end(m, s, fault); /* the others have the end of the epoch */
	}
	for (size_t i = 0; i < m->n_slots; i++)
		free(m->slots[i].entries);
	match_slots_uncharge(m, m->n_slots);
	m->n_slots = 0;
	m->base = 1;
	m->generation++;
	m->has_left = false;
	memset(m->next, 0, m->size * sizeof(*m->next));
	memset(m->stopped, 0, m->size * sizeof(*m->stopped));
}

/* Nothing behind @number is whole any more. */
static void match_end_behind(struct match *m, uint64_t number, bool known,
			     const struct fault *fault)
{
	uint64_t end = m->base + m->n_slots;

	if (m->has_left && m->left_after <= number)
		return;
	m->has_left = true;
	m->left_after = number;
	m->left_known = known;
	m->left_fault = *fault;
	for (uint64_t n = number + 1; n < end; n++) {
		struct match_slot *s = match_slot(m, n);

		if (s && !known)
			match_slot_fail(m, s, fault);
		else if (s && !s->failed && !s->complete)
			match_slot_end(m, s, fault);
	}
}

void match_member_left(struct match *m, uint32_t index, const struct fault *fault)
{
	CHECK(index < m->size);
	match_end_behind(m, m->next[index], m->others != NULL, fault);
}

static bool match_runs_behind(struct match *m, uint64_t number)
{
	for (size_t i = 0; i < m->n_slots; i++) {
		const struct match_slot *s = &m->slots[i];

		if (s->number > number && s->complete && s->passed < m->size)
			return true;
	}
	return false;
}

bool match_left_elsewhere(struct match *m, uint64_t number, const struct fault *fault)
{
	CHECK(m->others);
	match_end_behind(m, number, true, fault);
	return match_runs_behind(m, number);
}

void match_stop(struct match *m, uint32_t index, const struct fault *fault)
{
	CHECK(index < m->size);
	m->stopped[index] = true;
	match_end_behind(m, m->next[index], false, fault);
}
