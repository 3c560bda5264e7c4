/* What test_checkpoint_reads and the library that it loads into the daemon share: a file of this. */
#ifndef SHARDD_TESTS_READFAIL_H
#define SHARDD_TESTS_READFAIL_H

#include <stdatomic.h>

enum { READFAIL_KILL = 0x10000, READFAIL_SHORT }; /* else an errno */

struct readfail {
	_Atomic int left; /* reads of checkpoints until the one that fails; -1: none does */
	_Atomic int how;
	_Atomic int reads; /* so far */
};

#endif
