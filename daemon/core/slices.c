#include "core/slices.h"

#include "core/check.h"

static void slices_on_idle(uv_idle_t *idle)
{
	struct slices *s = idle->data;

	if (!list_empty(&s->all)) {
		struct slice *slice = list_first(&s->all, struct slice, link);

		list_unlink(&slice->link);
		slice->fn(slice);
	}
	if (list_empty(&s->all))
		uv_idle_stop(idle);
}

void slices_init(struct slices *s, uv_loop_t *loop)
{
	list_init(&s->all);
	uv_idle_init(loop, &s->idle);
	s->idle.data = s;
	s->open = true;
}

void slices_add(struct slices *s, struct slice *slice, void (*fn)(struct slice *slice))
{
	CHECK(s->open && list_empty(&slice->link));
	slice->fn = fn;
	list_append(&s->all, &slice->link);
	uv_idle_start(&s->idle, slices_on_idle);
}

void slices_close(struct slices *s)
{
	if (!s->open)
		return;
	CHECK(list_empty(&s->all));
	s->open = false;
	uv_close((uv_handle_t *)&s->idle, NULL);
}
