/*
 * Matching of collective ops between the ranks of a group.
 *
 * Each member numbers its collectives 1, 2, 3... The ops at one number meet in a
 * slot: the first to announce brings the fingerprint, the others are held against
 * it. A slot ends in exactly one of two ways: all announced the same (complete),
 * or it fails, and then every member's op at that number gets the same fault, also
 * those that come later. So the numbers of the ranks never diverge.
 *
 *   EMPTY --announce--> OPEN --last announce--> COMPLETE
 *                        |
 *                        +--differs | member refused | deadline | abort--> FAILED
 *
 * Where members are on other nodes, too (struct match_others), the members here are matched like this,
 * and the last announcement is told to the others; the slot is complete when match_start says that all
 * nodes have announced:
 *
 *   OPEN --last announce--> HERE --match_start--> COMPLETE
 *     '-----------------------'--match_fail, or as above, and the others are told--> FAILED
 *
 * Loop thread only.
 */
#ifndef SHARDD_JOB_MATCH_H
#define SHARDD_JOB_MATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/user.h"

/* What must be equal on all ranks, and its description for people. */
struct fingerprint {
	uint64_t words[8];
	char text[192]; /* "Reduce of unit 'out' (120 elements, fp32)" */
};

/* One member's op in a slot; embedded by the op. */
struct match_entry {
	uint64_t number;     /* given by match_number */
	uint32_t generation; /* of the match when it was numbered */
	uint32_t index;      /* of the member in the group */
	uint32_t rank;       /* for texts */
	int pid;
	/* Once complete, with members on other nodes: the fingerprint of what all of them have started up to
	 * here (order/order.h). */
	uint64_t place;
	struct fingerprint print;
};

struct match_slot {
	uint64_t number;
	bool here;  /* the others were told that all members here have announced */
	bool asked; /* they were asked to refuse it since (match_ask) */
	bool complete;
	bool failed;
	struct fault fault;           /* when failed */
	uint32_t announced;           /* members that have */
	uint32_t passed;              /* members whose op at this number is over */
	struct match_entry *first;    /* whose fingerprint counts */
	struct match_entry **entries; /* by member index; NULL: not announced */
};

/* All have announced: @entries by member index, out of the slot, the callee's. */
typedef void (*match_complete_cb)(struct match_entry *const *entries, uint32_t n, void *userdata);
/* The op of one entry has ended like this; the entry is out of the slot. */
typedef void (*match_failed_cb)(struct match_entry *entry, const struct fault *fault,
				void *userdata);

/* What members on other nodes are told, through a leader (docs/nodes.md). */
struct match_others {
	/* All members here have announced at @number. May call match_start. */
	void (*announce)(void *userdata, uint64_t number, const struct match_entry *first);
	/* @number has failed here. */
	void (*refuse)(void *userdata, uint64_t number, const struct fault *fault);
};

struct match {
	uint32_t size;       /* members */
	uint32_t generation; /* grows with every reset */
	uint64_t *next;      /* by member: the number its next collective gets */
	uint64_t base;       /* number of slots[0] */
	struct match_slot *slots;
	size_t n_slots;
	size_t cap_slots;
	struct user *user;       /* borrowed, who pays for the slots; NULL: nobody */
	bool *stopped;           /* by member: none of its collectives is numbered any more */
	bool has_left;           /* a member takes part no more... */
	uint64_t left_after;     /* ...from the number behind this one on, */
	bool left_known;         /* and other nodes know that; */
	struct fault left_fault; /* what its peers are told */
	const struct match_others *others; /* NULL: all members are here */
	match_complete_cb complete;
	match_failed_cb failed;
	void *userdata;
};

/* Return: 0 or -ENOMEM. */
int match_init(struct match *m, uint32_t size, match_complete_cb complete, match_failed_cb failed,
	       void *userdata);
/* No entry may be announced. Safe on a zeroed struct and twice. */
void match_deinit(struct match *m);

enum {
	MATCH_E_LIMIT = 1, /* the user that pays has no room for its slot */
};

/* Make the slot of the next collective of member @index, if it is not there. Return: 0,
 * MATCH_E_LIMIT with @f, or -ENOMEM. */
int match_reserve(struct match *m, uint32_t index, struct fault *f);

/* A collective of member @index could not be numbered, and no later one may take its number. So
 * none is numbered until the next epoch, and its peers get @fault. */
void match_stop(struct match *m, uint32_t index, const struct fault *fault);

/* Number the next collective of member @entry->index, in its program order. */
void match_number(struct match *m, struct match_entry *entry);

/* Member @index takes no part in its next collective: its number is skipped. */
void match_skip(struct match *m, uint32_t index);
/* The largest number that any member has. */
uint64_t match_last(const struct match *m);

/* How many of its numbers some other member has not passed yet. */
uint64_t match_ahead(const struct match *m, uint32_t index);

/* Announce the op. Calls complete or failed, possibly before it returns, possibly for other ops
 * too. Return: 0 or -ENOMEM (nothing changed). */
int match_announce(struct match *m, struct match_entry *entry);

/* The numbered op @entry, announced or not, cannot take part: its slot fails for all members that
 * have announced or will announce. If @entry was announced its failed callback runs too. */
void match_refuse(struct match *m, struct match_entry *entry, const struct fault *fault);

/* Were the others told that all members here have announced at @number, and nothing has come of it yet? */
bool match_is_here(const struct match *m, uint64_t number);
/* Ask them to refuse @number, for @fault: match_fail or match_start follows. Of one that is here.
 * Once: what they are asked again they do not hear. */
void match_ask(struct match *m, uint64_t number, const struct fault *fault);

/* The numbered op @entry is over, with any result: a slot that all have passed is dropped. Nothing
 * to do for an entry of an earlier generation. */
void match_passed(struct match *m, const struct match_entry *entry);

/* A new epoch: fail all open slots and forget all numbers. */
void match_reset(struct match *m, const struct fault *fault);

/* Member @index has left cleanly: slots it has not announced at fail, now and later. If there are others
 * (struct match_others), they know that it has left. */
void match_member_left(struct match *m, uint32_t index, const struct fault *fault);

/* The same for a member on another node, which has announced up to @number. Return: true: an op behind
 * that runs here, and cannot come to an end. */
bool match_left_elsewhere(struct match *m, uint64_t number, const struct fault *fault);

/* All nodes have announced at @number, or will: it is complete. @place: for its entries. Return: false: the
 * members here have not. */
bool match_start(struct match *m, uint64_t number, uint64_t place);
/* @number has failed on another node. */
void match_fail(struct match *m, uint64_t number, const struct fault *fault);

/* The slot at @number, or NULL. */
struct match_slot *match_slot(struct match *m, uint64_t number);

#endif
