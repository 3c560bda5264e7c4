/*
 * What of a unit was used in a backward pass, as the ranks say in their Reduces. A tensor that
 * no rank has used has no gradient: its optimizer leaves it alone. If one has used it the zeros
 * of the others count. What was accumulated, and sums that wait to be reduced, are of all
 * tensors. Loop thread only.
 */
#ifndef SHARDD_REDUCE_REDUCE_UNUSED_H
#define SHARDD_REDUCE_REDUCE_UNUSED_H

#include "work/coll.h"
#include "shardd.pb-c.h"

/* Take from the request what this rank has not used of op->unit. Return: 0 or a fault code. */
int reduce_unused_decode(struct op *op, const Shardd__V1__ReduceRequest *r, struct fault *f);

/* If it names any, and its unit is on several nodes: from here on they show each other what is unused. Those
 * that have begun this reduction already have used something. */
void reduce_unused_declare(const struct op *op);

/* All ranks are there: find what none of them has used, and note it in each op, for
 * reduce_unused_reply. *@ret_none: nothing was used at all. Never waits. */
enum res reduce_unused_agree(struct coll *c, bool *ret_none);

/* The reduction begins. c->unit->has_gradient still says whether there is one to add to. Note in
 * the unit which tensors will have none. Return: 0 or -ENOMEM, and nothing has changed. */
int reduce_unused_note(struct coll *c);

/* Has c->unit no gradient of some tensor when this is over? */
bool reduce_leaves_out(const struct coll *c);

void reduce_unused_reply(const struct op *op, Shardd__V1__ReduceResponse *reply);

#endif
