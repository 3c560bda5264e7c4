/* Monotonic time. Tests step a fake clock instead of sleeping. */
#ifndef SHARDD_CORE_CLOCK_H
#define SHARDD_CORE_CLOCK_H

#include <stdint.h>

/* Microseconds since an arbitrary start. Any thread. */
uint64_t clock_now_us(void);

/* Let clock_now_us return @us until clock_real. Tests only. */
void clock_fake(uint64_t us);
void clock_real(void);

#endif
