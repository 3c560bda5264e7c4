/* The gloo engine: members at different places of the order of operations (gloofix.h). */
#include <criterion/criterion.h>
#include <string.h>

#include "engine/engine_impl.h"
#include "fdcheck.h"
#include "gloofix.h"

TestSuite(gloo_places, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define SEND(...) ((const void *const[]){ __VA_ARGS__ })
#define RECV(...) ((void *const[]){ __VA_ARGS__ })

static void start(struct gloofix *m, unsigned kind, struct waited *w, char *data, char *all)
{
	if (kind == 0)
		comm_all_gather(m->c, &w->op, SEND(data), RECV(all), 64, DTYPE_FP32);
	else if (kind == 1)
		comm_reduce_scatter(m->c, &w->op, SEND(all), RECV(data), 64, DTYPE_FP32);
	else if (kind == 2)
		comm_all_reduce(m->c, &w->op, RECV(data), 64, DTYPE_FP32, REDUCE_SUM);
	else
		comm_broadcast(m->c, &w->op, RECV(data), 64, 0);
}

/* An operation at one place with all, then one at which the last member has another one. Nobody who receives
 * from it takes its data; the root of a broadcast receives nothing, and hears of the end. */
static void scene_places(struct gloofix *m)
{
	char prefix[8] = "place0", data[256] = "", all[3 * 256] = "";
	bool last = m->rank == m->size - 1;

	for (unsigned kind = 0; kind < 4; kind++) {
		struct waited same = gloofix_waited(), other = gloofix_waited();

		prefix[5] = (char)('0' + kind);
		m->c = gloofix_meet(m, prefix, m->rank, m->size);
		m->failed = false;
		same.op.place = 77;
		start(m, kind, &same, data, all);
		gloofix_expect(m, &same, 0);
		gloofix_sync(m);
		other.op.place = last ? 79 : 78;
		start(m, kind, &other, data, all);
		looprun_flag(&m->run, &other.done, 20);
		EXPECT(other.status == ENGINE_E_ABORTED || (kind == 3 && !last));
		if (last)
			looprun_flag(&m->run, &m->failed, 20);
		EXPECT(kind < 3 || !last || strstr(m->why, "another place of the order"));
		comm_free(m->c);
		m->c = NULL;
	}
}

Test(gloo_places, data_of_another_place_is_refused)
{
	gloofix_play(scene_places, 2, false);
	gloofix_play(scene_places, 3, false);
}
