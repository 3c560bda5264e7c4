/*
 * What ranks of a group ask for: a collective, in a form that another node can take part in for its
 * ranks, when these have no more inputs (op/uneven_nodes.h). Loop thread only.
 */
#ifndef SHARDD_JOB_ASKED_H
#define SHARDD_JOB_ASKED_H

#include <stddef.h>
#include <stdint.h>

#include "core/list.h"
#include "core/user.h"
#include "job/match.h"

#define ASKED_WORDS      6
#define ASKED_TYPE_BYTES 32
/* Nobody does what ranks may have asked for at that number. */
#define ASKED_REFUSED "refused"

struct asked {
	struct list link;
	struct user *payer; /* borrowed, outlives it; NULL: nobody pays */
	uint64_t number;    /* of the collective in its group */
	uint32_t rank;      /* who asks for it, for texts */
	int pid;
	struct fingerprint print;
	uint64_t units; /* a word for what the asking node calls units and groups by number */
	uint64_t words[ASKED_WORDS]; /* the type's: op_type.ask */
	char type[ASKED_TYPE_BYTES]; /* name of the op's type, or ASKED_REFUSED */
	size_t bytes;
	uint8_t request[]; /* packed; none: @words say all */
};

/* With room for @bytes of a request, else zero. Return: the caller's, asked_free; NULL: no memory. */
struct asked *asked_new(struct user *payer, size_t bytes);
/* NULL is allowed. Return: NULL. */
struct asked *asked_free(struct asked *a);
/* Put @a, which becomes the list's, where its number belongs. What the list has at that number stays, and
 * @a is freed. */
void asked_insert(struct list *l, struct asked *a);
/* Free those with numbers up to @number. */
void asked_drop(struct list *l, uint64_t number);

/* What a node has said of its ranks: they have no more inputs. */
struct asked_joined {
	bool now;
	bool again; /* the next time, too: they were done with this one before this node */
	uint64_t number, last_number; /* @again: uneven_joined_elsewhere */
	uint32_t last;
};

/* JoinUneven of a group that spans nodes. Zeroed and asked_across_init at first. */
struct asked_across {
	struct list asks; /* of ranks here, ascending: some node may not have come to them */
	struct list
		heard; /* of ranks elsewhere, ascending: the ranks here have no part in them yet */
	struct asked_joined *joined; /* by node of the span; owned; NULL: none has */
	unsigned n_joined;           /* of them, now */
	uint64_t most;        /* the number that nodes had come to when they joined, at most */
	uint64_t last_number; /* the number at which the last rank joined */
	uint32_t
		last; /* that rank: the one with the highest number of its own, at the same number */
	bool told;    /* this node is one of those that joined */
	bool busy;    /* it takes part in what it has heard of */
};

void asked_across_init(struct asked_across *x);
/* Nobody has joined, and nothing was asked for. Safe twice. */
void asked_across_reset(struct asked_across *x);

#endif
