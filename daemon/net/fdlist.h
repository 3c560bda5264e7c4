/*
 * A small set of descriptors that travel together, with one owner.
 *
 * The set takes the descriptors over; fdlist_deinit closes them. Embedded by value, allocates
 * nothing. Any thread.
 */
#ifndef SHARDD_NET_FDLIST_H
#define SHARDD_NET_FDLIST_H

#include <stddef.h>
#include <sys/socket.h>

#define FDLIST_MAX 4

struct fdlist {
	size_t n;
	int fds[FDLIST_MAX];
};

#define FDLIST_NULL ((struct fdlist){ .n = 0 })

/* Room for the control message of a full set; align as struct cmsghdr. */
#define FDLIST_CONTROL_BYTES CMSG_SPACE(sizeof(int) * FDLIST_MAX)

/* Take @n descriptors over; on error too they are gone: closed.
 * Return: 0, -E2BIG (more than FDLIST_MAX). */
int fdlist_init_consume(struct fdlist *l, const int *fds, size_t n);

/* Close them. Safe after FDLIST_NULL and twice. */
void fdlist_deinit(struct fdlist *l);

size_t fdlist_count(const struct fdlist *l);

/* Write an SCM_RIGHTS message with all descriptors into @control, which has
 * FDLIST_CONTROL_BYTES.
 * Return: bytes for msg_controllen; 0 for an empty set. */
size_t fdlist_control(const struct fdlist *l, void *control);

#endif
