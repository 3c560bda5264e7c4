/* peer/peer.h between the nodes of cutfix.h: links are queues, and can be cut. */
#ifndef SHARDD_TESTS_PARTITION_CUTLINKS_H
#define SHARDD_TESTS_PARTITION_CUTLINKS_H

#include <stdbool.h>
#include <stdint.h>

struct cutfix_options;

void cutlinks_begin(unsigned nodes, const struct cutfix_options *o);
void cutlinks_end(void);
/* The next message arrives, or a node goes on before it. Return: false: nothing is under way. */
bool cutlinks_deliver(void);
/* It is @now_us: ends of links notice that they are. */
void cutlinks_notice(uint64_t now_us);
/* As cutfix_cut and cutfix_heal. */
void cutlinks_cut(unsigned apart, unsigned late);
void cutlinks_heal(void);
/* The daemon of @node is dead, until the next peers_new: what is under way to it is lost, and with @loses what it has
 * sent, too. The other ends hear of it behind what they get. */
void cutlinks_die(unsigned node, bool loses);
bool cutlinks_is_dead(unsigned node);
bool cutlinks_is_cut(unsigned a, unsigned b);

#endif
