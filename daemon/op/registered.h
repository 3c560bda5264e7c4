/* What a rank is told of a registered unit. Loop thread only. */
#ifndef SHARDD_OP_REGISTERED_H
#define SHARDD_OP_REGISTERED_H

#include "job/job.h"
#include "shardd.pb-c.h"

struct registered {
	Shardd__V1__RegisteredUnit unit; /* the message */
	Shardd__V1__TensorPlace *tensors;
	Shardd__V1__BufferPlace *buffers;
};

/* Fill @r, for rank @rank of @job (which need not be of the unit's group). Return: 0 or
 * -ENOMEM; registered_deinit either way. */
int registered_init(struct registered *r, const struct job *job, const struct unit *u,
		    uint32_t rank);
void registered_deinit(struct registered *r);

#endif
