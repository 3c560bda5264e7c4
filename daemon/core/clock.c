#include "core/clock.h"

#include <stdatomic.h>
#include <time.h>

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

void clock_fake(uint64_t us)
{
	atomic_store(&fake_us, us);
}

void clock_real(void)
{
	atomic_store(&fake_us, 0);
}
