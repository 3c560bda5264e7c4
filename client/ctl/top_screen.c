#include "top_screen.h"

#include <curses.h>
#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include "core/check.h"

static SCREEN *top_screen;
static bool top_screen_colors;

static void top_screen_start_colors(void)
{
	static const short colors[] = {
		[TOP_TITLE] = COLOR_CYAN,
		[TOP_BAD] = COLOR_RED,
	};

	start_color();
	use_default_colors();
	for (size_t i = 0; i < ARRAY_SIZE(colors); i++)
		if (colors[i])
			init_pair((short)(i + 1), colors[i], -1);
}

int top_screen_open(bool color)
{
	CHECK(!top_screen);
	/* its true size, which changes with the window, and not $COLUMNS */
	use_tioctl(TRUE);
	top_screen = newterm(NULL, stdout, stdin);
	if (!top_screen)
		return -ENOTTY;
	if (!tigetstr("cup")) { /* such as TERM=dumb */
		top_screen_close();
		return -ENOTTY;
	}
	cbreak();
	noecho();
	nonl();
	intrflush(stdscr, FALSE);
	keypad(stdscr, TRUE);
	nodelay(stdscr, TRUE);
	set_escdelay(25);
	curs_set(0);
	top_screen_colors = color && has_colors();
	if (top_screen_colors)
		top_screen_start_colors();
	return 0;
}

void top_screen_close(void)
{
	if (!top_screen)
		return;
	endwin();
	delscreen(top_screen);
	top_screen = NULL;
}

void top_screen_size(size_t *columns, size_t *lines)
{
	*columns = (size_t)COLS;
	*lines = (size_t)LINES;
}

static attr_t top_screen_attributes(enum top_style style)
{
	switch (style) {
	case TOP_HEAD:
		return A_BOLD;
	case TOP_TITLE:
		return A_BOLD | (top_screen_colors ? COLOR_PAIR(TOP_TITLE + 1) : 0);
	case TOP_BAD:
		return A_BOLD | (top_screen_colors ? COLOR_PAIR(TOP_BAD + 1) : 0);
	case TOP_CHOSEN:
	case TOP_HELP:
		return A_REVERSE;
	case TOP_TEXT:
		break;
	}
	return A_NORMAL;
}

void top_screen_draw(const struct top_frame *f)
{
	erase();
	for (size_t i = 0; i < f->n && i < (size_t)LINES; i++) {
		attr_t attributes = top_screen_attributes(f->all[i].style);

		attrset(attributes);
		if (attributes & A_REVERSE)
			mvhline((int)i, 0, ' ' | attributes, COLS);
		mvaddnstr((int)i, 0, f->all[i].text, -1);
	}
	attrset(A_NORMAL);
	refresh();
}

static int top_screen_translate(int key)
{
	switch (key) {
	case KEY_UP:
		return TOP_KEY_UP;
	case KEY_DOWN:
		return TOP_KEY_DOWN;
	case KEY_PPAGE:
		return TOP_KEY_PAGE_UP;
	case KEY_NPAGE:
		return TOP_KEY_PAGE_DOWN;
	case KEY_RESIZE:
		return TOP_KEY_RESIZE;
	default:
		return key > 0 && key < 256 ? key : TOP_KEY_NONE;
	}
}

int top_screen_key(int timeout_ms)
{
	struct pollfd in = { STDIN_FILENO, POLLIN, 0 };
	int key = getch(); /* what is read already, and a new size */

	if (key != ERR)
		return top_screen_translate(key);
	if (poll(&in, 1, timeout_ms) > 0 && in.revents & (POLLHUP | POLLERR | POLLNVAL))
		return -EIO;
	key = getch();
	return key == ERR ? TOP_KEY_NONE : top_screen_translate(key);
}
