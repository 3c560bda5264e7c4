/* Open MPI between the processes that mpirun starts: allgather (--bytes: of the result),
 * reduce_scatter_block and allreduce (--bytes: of every rank's input), fp32. */
#include <mpi.h>

#include "peer.h"

struct turn {
	float *in, *out;
	size_t n;    /* elements of --bytes */
	size_t part; /* of one rank */
	unsigned ranks, rank;
};

static void all_gather(const struct turn *t)
{
	MPI_Allgather(t->in, (int)t->part, MPI_FLOAT, t->out, (int)t->part, MPI_FLOAT,
		      MPI_COMM_WORLD);
}

static void reduce_scatter(const struct turn *t)
{
	MPI_Reduce_scatter_block(t->in, t->out, (int)t->part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void all_reduce(const struct turn *t)
{
	MPI_Allreduce(t->in, t->out, (int)t->n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static const struct collective {
	const char *name;
	void (*run)(const struct turn *t);
	char in, out; /* a: all elements; p: one rank's part */
} collectives[] = {
	{ "mpi_all_gather", all_gather, 'p', 'a' },
	{ "mpi_reduce_scatter", reduce_scatter, 'a', 'p' },
	{ "mpi_all_reduce", all_reduce, 'a', 'a' },
};

/* Every rank puts in 1: a sum is the number of ranks. */
static void measure(const struct collective *c, const struct turn *t, struct peer_sample *own,
		    unsigned repeat)
{
	size_t n_in = c->in == 'a' ? t->n : t->part, n_out = c->out == 'a' ? t->n : t->part;

	for (unsigned i = 0; i < repeat + PEER_WARM_UP; i++) {
		struct peer_sample s;

		peer_fill(t->in, n_in, 1);
		MPI_Barrier(MPI_COMM_WORLD);
		s.begin_ns = peer_now_ns();
		c->run(t);
		s.end_ns = peer_now_ns();
		if (i >= PEER_WARM_UP)
			own[i - PEER_WARM_UP] = s;
	}
	peer_check(c->name, t->out, n_out, c->in == 'p' ? 1 : (float)t->ranks);
}

static void run(const char *name, const struct peer_options *o, const struct turn *t)
{
	struct peer_sample *own = calloc(o->repeat, sizeof(*own));
	struct peer_sample *all = calloc((size_t)o->repeat * o->ranks, sizeof(*all));
	int bytes = (int)(o->repeat * sizeof(*own));

	for (size_t k = 0; k < sizeof(collectives) / sizeof(collectives[0]); k++) {
		if (strcmp(collectives[k].name, name) != 0)
			continue;
		measure(&collectives[k], t, own, o->repeat);
		MPI_Gather(own, bytes, MPI_BYTE, all, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
		if (t->rank == 0)
			peer_report(name, o, all);
		free(own);
		free(all);
		return;
	}
	peer_die(name, "there is no such case");
}

int main(int argc, char **argv)
{
	struct peer_options o;
	struct turn t = { 0 };
	int ranks, rank;

	MPI_Init(&argc, &argv);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	o = peer_parse(argc, argv);
	if (o.ranks != (unsigned)ranks)
		peer_die(argv[0], "--ranks is not what mpirun has started");
	t.ranks = o.ranks;
	t.rank = (unsigned)rank;
	t.n = o.bytes / sizeof(float);
	t.part = t.n / o.ranks;
	t.in = malloc(o.bytes);
	t.out = malloc(o.bytes);
	if (!t.in || !t.out)
		peer_die(argv[0], "no memory");
	for (int i = optind; i < argc; i++)
		run(argv[i], &o, &t);
	free(t.in);
	free(t.out);
	MPI_Finalize();
	return 0;
}
