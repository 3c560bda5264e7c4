/*
 * What happens to publications, for the flight recorder: generations, those that were not made, readers and leases. A
 * record is written when a thing is over. What goes on is in the publication itself. Loop thread only.
 *
 * A reader by board takes and gives back generations without telling the daemon. The daemon looks at the holds at each
 * tick, and before each generation that it makes: so it knows a lease by board to within the time between two looks.
 */
#ifndef SHARDD_PUBLISH_PUBLISHED_RECORDS_H
#define SHARDD_PUBLISH_PUBLISHED_RECORDS_H

#include <stdint.h>

#include "publish/publication_types.h"

/* @g is over, or was never complete. @was_used: a reader has leased it. @why: "": its buffer is another one's. */
void published_records_generation(const struct published *g, bool was_used, const char *why);
/* One that was due was not made: for want of a buffer, or because it cannot be. */
void published_records_skipped(const struct publication *p, const char *why);
void published_records_failed(const struct publication *p, const char *why);
/* @l ends: it leads nowhere any more, or is about to be freed. */
void published_records_lease(const struct publication_lease *l);
/* What the readers by board have begun and ended to hold since the last look. */
void published_records_look(struct publication *p, uint64_t now_us);
/* @r is about to be closed, or to lose its hold. */
void published_records_reader(struct board_reader *r);
/* Its leases lead nowhere any more. */
void published_records_leases(const struct published *g);

#endif
