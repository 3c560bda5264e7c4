#include "core/closer.h"

#include <signal.h>

#include "core/check.h"

void closer_init(struct closer *c)
{
	*c = (struct closer){ .open = true };
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->wake, NULL);
	list_init(&c->queue);
}

bool closer_is_open(const struct closer *c)
{
	return c->open;
}

/* Wait for an item. Return: NULL: there are none, and it stops. */
static struct closer_item *closer_next(struct closer *c)
{
	struct closer_item *item = NULL;

	pthread_mutex_lock(&c->lock);
	while (list_empty(&c->queue) && !c->stop)
		pthread_cond_wait(&c->wake, &c->lock);
	if (!list_empty(&c->queue)) {
		item = list_first(&c->queue, struct closer_item, link);
		list_unlink(&item->link);
	}
	pthread_mutex_unlock(&c->lock);
	return item;
}

static void *closer_main(void *closer)
{
	struct closer_item *item;

	while ((item = closer_next(closer)))
		item->close(item);
	return NULL;
}

static bool closer_start(struct closer *c)
{
	sigset_t all, old;

	if (c->runs || !c->open)
		return c->runs;
	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	c->runs = pthread_create(&c->thread, NULL, closer_main, c) == 0;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (c->runs)
		pthread_setname_np(c->thread, "shardd-close");
	return c->runs;
}

void closer_add(struct closer *c, struct closer_item *item, closer_cb close)
{
	item->close = close;
	if (!closer_start(c)) {
		close(item);
		return;
	}
	list_init(&item->link);
	pthread_mutex_lock(&c->lock);
	CHECK(!c->stop);
	list_append(&c->queue, &item->link);
	pthread_mutex_unlock(&c->lock);
	pthread_cond_signal(&c->wake);
}

void closer_deinit(struct closer *c)
{
	if (!c->open)
		return;
	c->open = false;
	pthread_mutex_lock(&c->lock);
	c->stop = true;
	pthread_mutex_unlock(&c->lock);
	pthread_cond_signal(&c->wake);
	if (c->runs)
		pthread_join(c->thread, NULL);
	c->runs = false;
	pthread_cond_destroy(&c->wake);
	pthread_mutex_destroy(&c->lock);
}
