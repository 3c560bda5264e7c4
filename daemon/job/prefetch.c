#include "job/prefetch.h"

#include <stdlib.h>

#include "core/check.h"

void prefetch_init(struct prefetch *p, struct quota *payer)
{
	*p = (struct prefetch){ .payer = payer };
}

static uint64_t prefetch_price(uint32_t room)
{
	return room <= PREFETCH_FREE ? 0 : room * sizeof(prefetch_use);
}

static void prefetch_forget(struct prefetch *p)
{
	if (prefetch_price(p->room))
		quota_return(p->payer, MEM_CONTROL, prefetch_price(p->room));
	free(p->uses);
	p->uses = NULL;
	p->room = p->n = p->at = 0;
}

void prefetch_deinit(struct prefetch *p)
{
	prefetch_forget(p);
	p->mode = PREFETCH_RECORDING;
	p->used = false;
}

void prefetch_restart(struct prefetch *p)
{
	p->used = false;
	p->at = 0;
	if (p->mode != PREFETCH_FOLLOWING)
		p->n = 0;
	if (p->mode == PREFETCH_OFF)
		p->mode = PREFETCH_RECORDING;
}

prefetch_use prefetch_use_of(uint32_t unit, unsigned kind)
{
	CHECK(unit && unit < UINT32_C(1) << 30 && kind < 4);
	return unit << 2 | kind;
}

uint32_t prefetch_unit(prefetch_use use)
{
	return use >> 2;
}

static bool prefetch_grow(struct prefetch *p)
{
	uint32_t room = p->room ? 2 * p->room : PREFETCH_FREE;
	uint64_t more = prefetch_price(room) - prefetch_price(p->room);
	void *grown;

	if (room > PREFETCH_MAX || (more && quota_charge(p->payer, MEM_CONTROL, more)))
		return false;
	CHECK(room > p->room);
	grown = reallocarray(p->uses, room, sizeof(*p->uses));
	if (!grown) {
		if (more)
			quota_undo(p->payer, MEM_CONTROL, more);
		return false;
	}
	p->uses = grown;
	p->room = room;
	return true;
}

static void prefetch_record(struct prefetch *p, prefetch_use use)
{
	if (p->n == p->room && !prefetch_grow(p)) {
		prefetch_forget(p);
		p->mode = PREFETCH_OFF;
		return;
	}
	p->uses[p->n++] = use;
}

bool prefetch_used(struct prefetch *p, prefetch_use use)
{
	p->used = true;
	if (p->mode == PREFETCH_FOLLOWING && p->at < p->n && p->uses[p->at] == use) {
		p->at++;
		return true;
	}
	if (p->mode == PREFETCH_FOLLOWING) { /* the uses so far are the start of the new record */
		p->mode = PREFETCH_RECORDING;
		p->n = p->at;
		p->deviations++;
	}
	if (p->mode == PREFETCH_RECORDING)
		prefetch_record(p, use);
	return false;
}

prefetch_use prefetch_next(const struct prefetch *p)
{
	return p->mode == PREFETCH_FOLLOWING && p->at < p->n ? p->uses[p->at] : 0;
}

void prefetch_step(struct prefetch *p)
{
	if (!p->used)
		return;
	p->used = false;
	if (p->mode == PREFETCH_FOLLOWING && p->at < p->n) {
		p->n = p->at; /* it was shorter this time */
		p->deviations++;
	}
	p->at = 0;
	p->mode = p->mode == PREFETCH_OFF ? PREFETCH_RECORDING : PREFETCH_FOLLOWING;
}

const char *prefetch_mode_name(enum prefetch_mode mode)
{
	static const char *const names[_PREFETCH_N] = { "RECORDING", "FOLLOWING", "OFF" };

	return mode < _PREFETCH_N ? names[mode] : "?";
}
