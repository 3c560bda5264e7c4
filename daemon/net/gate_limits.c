#include "net/gate_limits.h"

#include <stddef.h>

#define GATE_TOKEN 1000000u

static uint64_t gate_limits_gate_rate_full(uint32_t per_s)
{
	return (uint64_t)per_s * GATE_BURST * GATE_TOKEN;
}

static void gate_limits_gate_rate_put(struct gate_rate *r, uint64_t full, uint64_t more)
{
	r->level = r->level >= full || more >= full - r->level ? full : r->level + more;
}

void gate_rate_init(struct gate_rate *r, uint32_t per_s, uint64_t now_us)
{
	*r = (struct gate_rate){ .level = gate_limits_gate_rate_full(per_s), .last_us = now_us };
}

bool gate_rate_take(struct gate_rate *r, uint32_t per_s, uint64_t now_us)
{
	uint64_t passed = now_us > r->last_us ? now_us - r->last_us : 0;

	/* past this it is full anyway, and the product stays small */
	if (passed > (uint64_t)GATE_BURST * GATE_TOKEN)
		passed = (uint64_t)GATE_BURST * GATE_TOKEN;
	r->last_us = now_us;
	gate_limits_gate_rate_put(r, gate_limits_gate_rate_full(per_s), passed * per_s);
	if (r->level < GATE_TOKEN)
		return false;
	r->level -= GATE_TOKEN;
	return true;
}

void gate_rate_add(struct gate_rate *r, uint32_t per_s, uint64_t n)
{
	uint64_t full = gate_limits_gate_rate_full(per_s);

	gate_limits_gate_rate_put(r, full, n > full / GATE_TOKEN ? full : n * GATE_TOKEN);
}

bool gate_purse_admits(struct gate_purse *p, uint64_t limit, uint64_t bytes, const void *who)
{
	if (p->used <= limit && bytes <= limit - p->used)
		return true;
	if (p->turn && p->turn != who)
		return false;
	p->turn = who;
	return true;
}

void gate_purse_leave(struct gate_purse *p, const void *who)
{
	if (p->turn == who)
		p->turn = NULL;
}
