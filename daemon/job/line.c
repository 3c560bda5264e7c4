#include "job/line.h"

#include "core/check.h"
#include "job/job_types.h"

void line_item_init(struct line_item *i)
{
	*i = (struct line_item){ 0 };
	list_init(&i->link);
}

bool line_is_in(const struct line_item *i)
{
	return !list_empty(&i->link);
}

static struct line_item *line_first(struct job *job)
{
	return list_empty(&job->across.line)
		       ? NULL
		       : list_first(&job->across.line, struct line_item, link);
}

static struct line_item *line_second(struct job *job)
{
	struct list *second =
		list_empty(&job->across.line) ? &job->across.line : job->across.line.next->next;

	return second == &job->across.line ? NULL : list_entry(second, struct line_item, link);
}

bool line_is_first(const struct line_item *i)
{
	return line_is_in(i) && i->job->across.line.next == &i->link;
}

static void line_begin(struct line_item *i)
{
	i->has_begun = true;
	i->go_on(i);
}

/* What may begin does. Each of them may leave the line, and so call this. */
static void line_go_on(struct job *job)
{
	struct line_item *first = line_first(job), *second;

	if (first && !first->has_begun) {
		line_begin(first);
		return;
	}
	second = line_second(job);
	if (second && !second->has_begun && !second->first && first->has_talked)
		line_begin(second);
}

void line_enter(struct line_item *i, struct job *job, bool first,
		void (*go_on)(struct line_item *i))
{
	CHECK(!line_is_in(i));
	i->job = job;
	i->first = first;
	i->go_on = go_on;
	i->has_begun = i->has_talked = false;
	list_append(&job->across.line, &i->link);
	line_go_on(job);
}

void line_talked(struct line_item *i)
{
	if (i->has_talked)
		return;
	i->has_talked = true;
	if (line_is_first(i))
		line_go_on(i->job);
}

void line_leave(struct line_item *i)
{
	bool was_first = line_is_first(i);
	struct line_item *first;

	if (!line_is_in(i))
		return;
	list_unlink(&i->link);
	first = line_first(i->job);
	if (was_first && first && first->has_begun)
		first->go_on(first); /* it may have waited to be the first */
	line_go_on(i->job);
}
