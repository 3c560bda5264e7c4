/* Monotonic time. Tests step a fake clock instead of sleeping. */
#ifndef SHARDD_CORE_CLOCK_H
#define SHARDD_CORE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Microseconds since an arbitrary start. Any thread. */
uint64_t clock_now_us(void);

/* Microseconds since 1970, as the machine's clock has them: for people and other machines. A fake clock does not change
 * it. Any thread. */
uint64_t clock_unix_us(void);

/* The time of CLOCK_MONOTONIC in @ms, which pthread_cond_timedwait waits until with that clock. A fake
 * clock does not change it. Any thread. */
struct timespec clock_in(unsigned ms);

/* Let clock_now_us return @us until clock_real. Tests only. */
void clock_fake(uint64_t us);
void clock_real(void);

#endif
