/* Windows: the same addresses of a GPU for one mapping after another. */
#include <stdlib.h>

#include "client_error.h"
#include "map.h"

int map_window_new(struct map *m, uint64_t bytes, struct map_window **ret, struct shardd_error *err)
{
	struct map_window *w = calloc(1, sizeof(*w));
	int e;

	if (!w)
		return error_memory(err);
	e = m->ops->window_new(m->device, bytes, &w->at, err);
	if (e < 0) {
		free(w);
		return e;
	}
	w->bytes = bytes;
	pthread_mutex_lock(&m->table);
	w->next = m->windows;
	m->windows = w;
	pthread_mutex_unlock(&m->table);
	*ret = w;
	return 0;
}

/* What copies may use. */
static void map_window_set(struct map *m, struct map_window *w, const uint8_t *base)
{
	pthread_mutex_lock(&m->table);
	w->shows = base;
	pthread_mutex_unlock(&m->table);
}

int map_window_show(struct map *m, struct map_window *w, const uint8_t *base,
		    struct shardd_error *err)
{
	const uint8_t *shows = w->shows;
	int e;

	map_window_set(m, w, NULL);
	e = m->ops->window_show(m->device, w->at, w->bytes, &shows, base, err);
	map_window_set(m, w, shows);
	return e;
}

void map_window_free(struct map *m, struct map_window *w)
{
	struct map_window **at = &m->windows;

	if (!w)
		return;
	if (w->shows)
		(void)map_window_show(m, w, NULL, NULL);
	pthread_mutex_lock(&m->table);
	while (*at && *at != w)
		at = &(*at)->next;
	if (*at) /* else map_abandon */
		*at = w->next;
	pthread_mutex_unlock(&m->table);
	m->ops->window_free(m->device, w->at, w->bytes);
	free(w);
}
