/*
 * Texts on a terminal: how many columns they take, and what is left of them in fewer.
 *
 * Columns are those of characters, not of bytes: none for an accent that combines, two for most
 * characters of Chinese and Japanese. Any thread.
 */
#ifndef SHARDD_CTL_WIDTH_H
#define SHARDD_CTL_WIDTH_H

#include <stddef.h>
#include <stdio.h>

/* Replace what a terminal would obey in place of showing it: control characters, marks that change
 * the direction of writing, and bytes that are no UTF-8. Return: columns. */
size_t width_clean(char *text);

/* Columns of a text that width_clean has seen. */
size_t width_of(const char *text);

/* Print @text, cut in the middle to @columns: "block...weight". Of a very narrow column only the
 * beginning. Return: columns that were printed. */
size_t width_print_cut(const char *text, size_t columns, FILE *out);

/* The next line of @text, which continues in *@rest: words up to @columns, parts of a word that is
 * longer. @rest: where the line after it begins, at the end of the text if there is none.
 * Return: bytes of the line. */
size_t width_line(const char *text, size_t columns, const char **rest);

/* Columns of the terminal at descriptor @fd: $COLUMNS, else what the terminal says, else 80.
 * Return: 0 if it is no terminal and $COLUMNS is not set: there is no limit. */
size_t width_of_terminal(int fd);

#endif
