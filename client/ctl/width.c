#include "width.h"

#include <langinfo.h>
#include <locale.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

#include "ctl/format.h"

#define USUAL_COLUMNS 80u
#define MIN_COLUMNS   20u
#define MAX_COLUMNS   10000u

/* One character. */
struct letter {
	uint32_t code;
	unsigned bytes;   /* 0: the end of the text */
	unsigned columns; /* 0 to 2 */
	int shown;        /* 0: it has to be replaced */
};

/* Bytes of the character that begins with @first; 0: none does. */
static unsigned width_bytes(unsigned char first)
{
	if (first < 0x80)
		return 1;
	if (first >= 0xc2 && first < 0xe0)
		return 2;
	if (first >= 0xe0 && first < 0xf0)
		return 3;
	return first >= 0xf0 && first < 0xf5 ? 4 : 0;
}

/* Return: the character at @text, or 0 if its bytes are none. @n: how many it would have. */
static uint32_t width_decode(const unsigned char *text, unsigned n)
{
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
	uint32_t code = n == 1 ? text[0] : text[0] & (0x7fu >> n);

	for (unsigned i = 1; i < n; i++) {
		if ((text[i] & 0xc0) != 0x80)
			return 0;
		code = code << 6 | (text[i] & 0x3f);
	}
	if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
		return 0;
	return code;
}

/* wcwidth knows characters beyond ASCII in a UTF-8 locale only, which need not be the user's. */
static int width_of_code(uint32_t code)
{
	static locale_t utf8;
	locale_t before;
	int columns;

	if (code < 0x300)
		return code >= 0x20 && (code < 0x7f || code >= 0xa0) ? 1 : -1;
	if (!utf8)
		utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", NULL);
	if (!utf8)
		return 1;
	before = uselocale(utf8);
	columns = wcwidth((wchar_t)code);
	uselocale(before);
	return columns;
}

/* Marks of direction: with them a name could show the text behind it backwards. */
static int width_turns(uint32_t code)
{
	return code == 0x200e || code == 0x200f || code == 0x61c ||
	       (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

static struct letter width_letter(const char *text)
{
	unsigned char first = (unsigned char)*text;
	unsigned n = width_bytes(first);
	struct letter l = { .bytes = first != 0, .columns = first != 0 };
	int columns;

	if (!first || !n)
		return l;
	l.code = width_decode((const unsigned char *)text, n);
	columns = l.code && !width_turns(l.code) ? width_of_code(l.code) : -1;
	if (l.code)
		l.bytes = n;
	if (columns < 0)
		return l;
	l.columns = (unsigned)columns;
	l.shown = 1;
	return l;
}

size_t width_clean(char *text)
{
	size_t columns = 0;
	char *to = text;
	struct letter l;

	for (const char *from = text; (l = width_letter(from)).bytes; from += l.bytes) {
		columns += l.columns;
		if (l.shown) {
			memmove(to, from, l.bytes);
			to += l.bytes;
		} else {
			*to++ = '?';
		}
	}
	*to = '\0';
	return columns;
}

size_t width_of(const char *text)
{
	size_t columns = 0;
	struct letter l;

	for (; (l = width_letter(text)).bytes; text += l.bytes)
		columns += l.columns;
	return columns;
}

/* Return: bytes of the characters that fit into @columns. @used: columns that they take. */
static size_t width_fit(const char *text, size_t columns, size_t *used)
{
	size_t bytes = 0;
	struct letter l;

	*used = 0;
	for (; (l = width_letter(text + bytes)).bytes; bytes += l.bytes) {
		if (*used + l.columns > columns)
			break;
		*used += l.columns;
	}
	return bytes;
}

/* Return: where the end of @text begins that fits into @columns. */
static const char *width_end(const char *text, size_t columns, size_t *used)
{
	size_t all = width_of(text);
	struct letter l;

	for (; all > columns && (l = width_letter(text)).bytes; text += l.bytes)
		all -= l.columns;
	/* no accent without its letter */
	while ((l = width_letter(text)).bytes && l.columns == 0)
		text += l.bytes;
	*used = all;
	return text;
}

static const char *width_ellipsis(size_t *columns)
{
	*columns = strcmp(nl_langinfo(CODESET), "UTF-8") == 0 ? 1 : 3;
	return *columns == 1 ? "\xe2\x80\xa6" : "...";
}

size_t width_print_cut(const char *text, size_t columns, FILE *out)
{
	size_t all = width_of(text), dots, head, tail, bytes;
	const char *ellipsis = width_ellipsis(&dots), *end;

	if (all <= columns) {
		fputs(text, out);
		return all;
	}
	if (columns < dots + 2) {
		bytes = width_fit(text, columns, &head);
		fwrite(text, 1, bytes, out);
		return head;
	}
	/* the end of a name says more than its beginning */
	bytes = width_fit(text, (columns - dots) / 2, &head);
	end = width_end(text, columns - dots - head, &tail);
	fwrite(text, 1, bytes, out);
	fputs(ellipsis, out);
	fputs(end, out);
	return head + dots + tail;
}

size_t width_line(const char *text, size_t columns, const char **rest)
{
	size_t used, bytes = width_fit(text, columns, &used), n = bytes;

	if (bytes == 0 && *text) /* wider than the column: it must go somewhere */
		bytes = n = width_letter(text).bytes;
	if (text[n] && text[n] != ' ') {
		while (n > 0 && text[n - 1] != ' ')
			n--;
		if (n == 0)
			n = bytes; /* a part of a word */
	}
	*rest = text + n;
	while (**rest == ' ')
		(*rest)++;
	while (n > 0 && text[n - 1] == ' ')
		n--;
	return n;
}

size_t width_of_terminal(int fd)
{
	const char *said = getenv("COLUMNS");
	struct winsize size = { 0 };
	uint64_t columns;

	if (said && format_parse_number(said, MAX_COLUMNS, &columns) && columns)
		return columns < MIN_COLUMNS ? MIN_COLUMNS : columns;
	if (!isatty(fd))
		return 0;
	if (ioctl(fd, TIOCGWINSZ, &size) < 0 || !size.ws_col)
		return USUAL_COLUMNS;
	return size.ws_col < MIN_COLUMNS ? MIN_COLUMNS : size.ws_col;
}
