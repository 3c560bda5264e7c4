/*
 * A doubly linked list whose links live in its elements. A link that is in no
 * list points to itself, so unlinking twice is harmless.
 */
#ifndef SHARDD_CORE_LIST_H
#define SHARDD_CORE_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "core/check.h"

struct list {
	struct list *next;
	struct list *prev;
};

#define LIST_INIT(name)          \
	{                        \
		&(name), &(name) \
	}

static inline void list_init(struct list *l)
{
	l->next = l;
	l->prev = l;
}

static inline bool list_empty(const struct list *l)
{
	return l->next == l;
}

/* Put @item at the end of @head. @item must be in no list. */
static inline void list_append(struct list *head, struct list *item)
{
	CHECK(list_empty(item));
	item->prev = head->prev;
	item->next = head;
	head->prev->next = item;
	head->prev = item;
}

/* Take @item out of the list that it is in, if any. */
static inline void list_unlink(struct list *item)
{
	item->prev->next = item->next;
	item->next->prev = item->prev;
	list_init(item);
}

/* Move everything from @from to the end of @to. */
static inline void list_take_all(struct list *to, struct list *from)
{
	while (!list_empty(from)) {
		struct list *l = from->next;

		list_unlink(l);
		list_append(to, l);
	}
}

#define list_entry(link, type, member) CONTAINER_OF(link, type, member)
#define list_first(head, type, member) list_entry((head)->next, type, member)

/* Walk; @pos may be unlinked and freed inside, its neighbours may not. */
#define list_for_each(pos, tmp, head, member)                             \
	for (pos = list_entry((head)->next, __typeof__(*pos), member),    \
	    tmp = list_entry(pos->member.next, __typeof__(*pos), member); \
	     &pos->member != (head);                                      \
	     pos = tmp, tmp = list_entry(pos->member.next, __typeof__(*pos), member))

#endif
