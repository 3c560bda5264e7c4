/*
 * The terminal of `shardctl top`: frames on it, and keys from it. One of them at a time; one thread.
 */
#ifndef SHARDD_CTL_TOP_SCREEN_H
#define SHARDD_CTL_TOP_SCREEN_H

#include "ctl/top_frame.h"

enum top_key {
	TOP_KEY_NONE,
	TOP_KEY_UP = 256,
	TOP_KEY_DOWN,
	TOP_KEY_PAGE_UP,
	TOP_KEY_PAGE_DOWN,
	TOP_KEY_RESIZE, /* the window has another size */
};

/* Take the terminal over. Return: 0, or -ENOTTY: $TERM has no terminal that can do it. */
int top_screen_open(bool color);
/* Give it back as it was. Safe without one, and twice. */
void top_screen_close(void);

void top_screen_size(size_t *columns, size_t *lines);
void top_screen_draw(const struct top_frame *f);

/* Wait for a key, at most @timeout_ms. Return: a character, an enum top_key, or -EIO: the terminal is
 * gone. */
int top_screen_key(int timeout_ms);

#endif
