/* Descriptor-leak check: every test ends with the descriptors it began with. */
#ifndef SHARDD_TESTS_FDCHECK_H
#define SHARDD_TESTS_FDCHECK_H

/* Open descriptors of this process. */
unsigned fdcheck_count(void);

/* .init and .fini of a Criterion test: fini fails the test on a difference and
 * lists what the extra descriptors point to. */
void fdcheck_begin(void);
void fdcheck_end(void);

#endif
