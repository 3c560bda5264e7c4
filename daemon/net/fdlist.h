/*
 * A small set of descriptors that travel together, with one owner.
 *
 * The origin of the descriptors decides who closes them: borrowed ones belong to the caller,
 * consumed and duplicated ones belong to the set and are closed by fdlist_deinit unless stolen
 * before. Embedded by value, allocates nothing. Any thread.
 */
#ifndef SHARDD_NET_FDLIST_H
#define SHARDD_NET_FDLIST_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>

#define FDLIST_MAX 4

struct fdlist {
	size_t n;
	bool owned; /* deinit closes */
	int fds[FDLIST_MAX];
};

#define FDLIST_NULL ((struct fdlist){ .n = 0 })

/* Room for the control message of a full set; align as struct cmsghdr. */
#define FDLIST_CONTROL_BYTES CMSG_SPACE(sizeof(int) * FDLIST_MAX)

/* Refer to @n descriptors that the caller keeps, and keeps open.
 * Return: 0, -E2BIG (more than FDLIST_MAX). */
int fdlist_init_borrow(struct fdlist *l, const int *fds, size_t n);

/* Take them over; on error too they are gone: closed. Return: 0, -E2BIG. */
int fdlist_init_consume(struct fdlist *l, const int *fds, size_t n);

/* Duplicate them, close-on-exec; all or none. Return: 0, -E2BIG, negative errno. */
int fdlist_init_dup(struct fdlist *l, const int *fds, size_t n);

/* Close what the set owns, forget the rest. Safe after FDLIST_NULL and twice. */
void fdlist_deinit(struct fdlist *l);

size_t fdlist_count(const struct fdlist *l);

/* Return: descriptor @i, still the set's (or its owner's); -1 once it was stolen.
 * @i must be below the count. */
int fdlist_get(const struct fdlist *l, size_t i);

/* Take descriptor @i out; the set must own it. Return: it, now the caller's; -1
 * if it was stolen already. The count stays, so that the others keep their index. */
int fdlist_steal(struct fdlist *l, size_t i);

/* Write an SCM_RIGHTS message with all descriptors into @control, which has
 * FDLIST_CONTROL_BYTES. None may have been stolen.
 * Return: bytes for msg_controllen; 0 for an empty set. */
size_t fdlist_control(const struct fdlist *l, void *control);

#endif
