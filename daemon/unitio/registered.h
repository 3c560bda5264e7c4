/* What a rank is told of a registered unit. Loop thread only. */
#ifndef SHARDD_UNITIO_REGISTERED_H
#define SHARDD_UNITIO_REGISTERED_H

#include "job/job.h"
#include "shardd.pb-c.h"

struct registered {
	Shardd__V1__RegisteredUnit unit; /* the message */
	Shardd__V1__TensorPlace *tensors;
	Shardd__V1__BufferPlace *buffers;
};

/* One message of it: the unit without its lists, tensor @i for rank @rank, buffer @i, which
 * comes after @before (NULL for the first). */
void registered_unit(const struct unit *u, Shardd__V1__RegisteredUnit *m);
void registered_tensor(const struct job *job, const struct unit *u, uint32_t i, uint32_t rank,
		       Shardd__V1__TensorPlace *p);
void registered_buffer(const struct unit *u, size_t i, const Shardd__V1__BufferPlace *before,
		       Shardd__V1__BufferPlace *p);

/* Fill @r, for rank @rank of @job (which need not be of the unit's group). Return: 0 or
 * -ENOMEM; registered_deinit either way. */
int registered_init(struct registered *r, const struct job *job, const struct unit *u,
		    uint32_t rank);
void registered_deinit(struct registered *r);

#endif
