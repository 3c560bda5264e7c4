/*
 * Closes what takes long to close: memory of gigabytes behind a descriptor. The loop must not wait for it.
 *
 * A thread ("shardd-close") does it, which is started when there is something for the first time. An item
 * is embedded in the object that it closes; it belongs to the closer from closer_add until its function
 * is called, on that thread.
 */
#ifndef SHARDD_CORE_CLOSER_H
#define SHARDD_CORE_CLOSER_H

#include <pthread.h>
#include <stdbool.h>

#include "core/list.h"

struct closer_item;
typedef void (*closer_cb)(struct closer_item *item);

struct closer_item {
	struct list link; /* the closer's, under its lock */
	closer_cb close;  /* may free the item */
};

struct closer {
	pthread_t thread; /* if it runs */
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list queue; /* of struct closer_item; under the lock */
	bool stop;         /* under the lock */
	bool open, runs;   /* the loop's */
};

/* Starts no thread. */
void closer_init(struct closer *c);
/* Is it there? Loop thread. */
bool closer_is_open(const struct closer *c);
/* Have @close called with @item on the thread. Without one (it cannot be started, or the closer is not
 * open) it is called here. Loop thread. */
void closer_add(struct closer *c, struct closer_item *item, closer_cb close);
/* Close what is queued, and join the thread. Blocks for as long. Safe to call twice. Loop thread. */
void closer_deinit(struct closer *c);

#endif
