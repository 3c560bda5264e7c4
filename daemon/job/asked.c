#include "job/asked.h"

#include <stdlib.h>

#include "core/check.h"

static uint64_t asked_size(const struct asked *a)
{
	return sizeof(*a) + a->bytes;
}

struct asked *asked_new(struct user *payer, size_t bytes)
{
	struct asked *a = calloc(1, sizeof(*a) + bytes);

	if (!a)
		return NULL;
	list_init(&a->link);
	a->payer = payer;
	a->bytes = bytes;
	if (payer) /* a collective that was announced is not refused for this */
		user_add(payer, USER_MEMORY, asked_size(a));
	return a;
}

struct asked *asked_free(struct asked *a)
{
	if (!a)
		return NULL;
	if (a->payer)
		user_sub(a->payer, USER_MEMORY, asked_size(a));
	list_unlink(&a->link);
	free(a);
	return NULL;
}

void asked_insert(struct list *l, struct asked *a)
{
	struct list *before = l;
	struct asked *other, *tmp;

	list_for_each (other, tmp, l, link) {
		if (other->number == a->number) {
			asked_free(a);
			return;
		}
		if (other->number > a->number) {
			before = &other->link;
			break;
		}
	}
	list_append(before, &a->link); /* appending to an element puts it before it */
}

void asked_drop(struct list *l, uint64_t number)
{
	while (!list_empty(l)) {
		struct asked *a = list_first(l, struct asked, link);

		if (a->number > number)
			return;
		asked_free(a);
	}
}

void asked_across_init(struct asked_across *x)
{
	list_init(&x->asks);
	list_init(&x->heard);
}

void asked_across_reset(struct asked_across *x)
{
	bool busy = x->busy;

	asked_drop(&x->asks, UINT64_MAX);
	asked_drop(&x->heard, UINT64_MAX);
	free(x->joined);
	*x = (struct asked_across){ .busy = busy };
	asked_across_init(x);
}
