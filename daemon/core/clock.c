#include "core/clock.h"

#include <stdatomic.h>

static _Atomic uint64_t fake_us; /* 0: real time */

uint64_t clock_now_us(void)
{
	struct timespec ts;
	uint64_t fake = atomic_load_explicit(&fake_us, memory_order_relaxed);

	if (fake)
		return fake;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

struct timespec clock_in(unsigned ms)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	t.tv_sec += ms / 1000;
	t.tv_nsec += (long)(ms % 1000) * 1000000;
	t.tv_sec += t.tv_nsec / 1000000000;
	t.tv_nsec %= 1000000000;
	return t;
}

void clock_fake(uint64_t us)
{
	atomic_store(&fake_us, us);
}

void clock_real(void)
{
	atomic_store(&fake_us, 0);
}

uint64_t clock_unix_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}
