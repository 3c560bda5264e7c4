/* Arrange spans of time in lanes, so none hides another. Any thread. */
#ifndef SHARDD_CTL_LANES_H
#define SHARDD_CTL_LANES_H

#include <stddef.h>
#include <stdint.h>

struct lane_span {
	uint64_t begin;
	uint64_t end; /* not before @begin; another may begin there */
	size_t lane;  /* from 0: set by lanes_lay */
};

/* Give each of @spans, which are sorted by their start, the first lane that is free at
 * that time. @ret_n: number of lanes. Return: 0 or -ENOMEM. */
int lanes_lay(struct lane_span *spans, size_t n, size_t *ret_n);

#endif
