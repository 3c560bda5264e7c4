/* Amounts and times as people read them. Any thread. */
#ifndef SHARDD_CTL_FORMAT_H
#define SHARDD_CTL_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A short text by value: format_bytes(n).text. */
struct format {
	char text[32];
};

struct format format_bytes(uint64_t bytes);                  /* 512 B, 1.5 KiB, 3.00 GiB */
struct format format_us(uint64_t us);                        /* 850 us, 1.20 ms, 3.40 s, 5m02s */
struct format format_seconds(uint64_t s);                    /* 12s, 5m02s, 3h07m, 2d04h */
struct format format_percent(uint64_t part, uint64_t whole); /* 12.5%; - of nothing */

/* Parse "4096", "64K", "2G", "1T" (powers of 1024; "iB" or "B" may follow; "1.5M" is not
 * accepted). Return: false if it is invalid or too large. */
bool format_parse_bytes(const char *text, uint64_t *ret);

/* Parse a whole number up to @max. Return: false if it is not one. */
bool format_parse_number(const char *text, uint64_t max, uint64_t *ret);

#endif
