/* Between publication.c, which makes generations, and publication_uses.c. Loop thread only. */
#ifndef SHARDD_PUBLISH_PUBLICATION_IMPL_H
#define SHARDD_PUBLISH_PUBLICATION_IMPL_H

#include "publish/publication.h"

/* publication.c: begin to make a generation, if one is wanted and can be made now. */
void publication_go(struct publication *p);

/* publication_uses.c: who pays for pages of the host. */
struct board_payer publication_pages(struct publication *p);
/* Has somebody leased @g, or does a reader hold it? */
bool publication_is_used(const struct published *g);
/* What readers see of @g, which is READY. */
void publication_write(const struct published *g);
/* The readers lose the board. */
void publication_end_board(struct publication *p);
/* The newest generation is another one, or none. */
void publication_show(struct publication *p);

#endif
