#include "job/across_write.h"

#include <stdlib.h>

#include "core/check.h"
#include "job/job_types.h"

/* One that is being written ends by its op. */
void across_writes_end(struct job *job)
{
	struct across_write *w, *tmp;

	job->across.n_writes = 0;
	list_for_each (w, tmp, &job->across.writes, link) {
		struct unit *u = w->unit;

		if (w->op)
			continue;
		CHECK(u->shard_writes > 0);
		list_unlink(&w->link);
		free(w);
		if (!--u->shard_writes)
			condition_signal(&u->step_done);
	}
}
