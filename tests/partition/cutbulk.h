/* peer/bulk between the nodes of cutfix.h: parts are copied as an event, unless they are cut from each other. */
#ifndef SHARDD_TESTS_PARTITION_CUTBULK_H
#define SHARDD_TESTS_PARTITION_CUTBULK_H

/* What @node fetches is there, or cannot be. */
void cutbulk_end(unsigned node);

#endif
