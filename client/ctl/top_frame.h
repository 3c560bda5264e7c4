/*
 * A sample as lines of text: what a terminal shows at one time, and what batch mode prints. One thread.
 */
#ifndef SHARDD_CTL_TOP_FRAME_H
#define SHARDD_CTL_TOP_FRAME_H

#include "ctl/ctl.h"
#include "ctl/top_sample.h"

enum top_sort { TOP_BY_NAME, TOP_BY_STATE, TOP_BY_STEP, TOP_BY_RATE, TOP_BY_WAIT, TOP_BY_MEMORY };
enum top_style { TOP_TEXT, TOP_HEAD, TOP_TITLE, TOP_CHOSEN, TOP_BAD, TOP_HELP };

/* What the window shows. */
struct top_look {
	size_t columns, lines; /* 0: no limit */
	enum top_sort sort;
	bool all;     /* the ranks of all jobs; else of the chosen one */
	bool help;    /* what the keys do, in place of jobs */
	uint32_t uid; /* the chosen job: its owner and name; "": none yet */
	char job[CTL_JOB_MAX];
	size_t chosen;     /* its place among the jobs: if it goes, its place has another one */
	size_t first_rank; /* that is shown */
	const char *socket;
	char trouble[600]; /* why there is no newer sample; "": there is */
};

struct top_line {
	char *text; /* owned */
	enum top_style style;
};

struct top_frame {
	struct top_line *all; /* owned */
	size_t n, room;
	bool failed; /* no memory */
};

#define TOP_FRAME_NULL ((struct top_frame){ 0 })

/* Names of the ways to sort, as arguments have them. Return: NULL behind the last one. */
const char *top_frame_sort_name(unsigned sort);

/* Sort the jobs of @s, and find the chosen one of @l among them. */
void top_frame_arrange(struct top_sample *s, struct top_look *l);
/* Choose the job that is @by places further. */
void top_frame_choose(const struct top_sample *s, struct top_look *l, int by);

/* @s: arranged; without status if none was there yet. @f: top_frame_deinit. At most look->lines
 * lines. Return: 0 or -ENOMEM. */
int top_frame_make(const struct top_sample *s, const struct top_look *l, struct top_frame *f);
void top_frame_deinit(struct top_frame *f);

#endif
