/*
 * shardd-bench: what the files of the program share.
 *
 * The program itself never uses gRPC or libshardd: it starts a private daemon and
 * forks trainers, which do. A case writes its times into memory that they share (a
 * crew); the program makes figures of them when all trainers have ended.
 */
#ifndef SHARDD_TESTS_BENCH_H
#define SHARDD_TESTS_BENCH_H

#include <pthread.h>
#include <shardd/shardd.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define BENCH_MAX_CASES 64
#define BENCH_MAX_RANKS 64

/* ---------------------------------------------------------------- options */

struct bench_case;

struct options {
	bool json;
	const char *socket;      /* NULL: a private daemon */
	const char *backend;     /* of the private daemon: host, cuda */
	unsigned ranks;          /* 0: the case's own number */
	uint64_t bytes;          /* of the unit, in its dtype */
	enum shardd_dtype dtype; /* 0: the case's own */
	unsigned repeat;         /* 0: the case's own number */
	unsigned units;          /* 0: the case's own number */
	const struct bench_case *cases[BENCH_MAX_CASES];
	unsigned n_cases;
};

/* Return: 0 go on, 1 done (help), -1 wrong arguments, said on standard error. */
int options_parse(struct options *o, int argc, char **argv);

struct bench {
	struct options o;
	char dir[80];     /* private, removed at the end */
	char socket[108]; /* of the daemon that is measured */
	pid_t daemon;     /* 0: not ours */
	bool held;        /* with a holder, which @daemon is then, and a root of checkpoints */
	bool no_spin;     /* a private daemon that sleeps at once (ring_spin_us 0) */
	unsigned jobs;    /* made so far, for their names */
};

/* A measurement. @run: 0, or -1 when it failed, said on standard error. */
struct bench_case {
	const char *name;
	const char *ops; /* what it measures of the protocol, for --help */
	const char *help;
	unsigned ranks;  /* by default */
	unsigned repeat; /* by default */
	int (*run)(struct bench *b, const struct bench_case *c);
	const struct op_case *op; /* with case_op */
};

/* The tables of all cases, ended by NULL; each is ended by a NULL name. */
extern const struct bench_case *const bench_tables[];
extern const struct bench_case local_cases[], group_cases[], ddp_cases[];
const struct bench_case *bench_case_named(const char *name);

unsigned bench_ranks(const struct bench *b, const struct bench_case *c);
unsigned bench_repeat(const struct bench *b, const struct bench_case *c);
unsigned bench_units(const struct bench *b, unsigned by_default);
enum shardd_dtype bench_dtype(const struct bench *b, enum shardd_dtype by_default);
const char *bench_dtype_name(enum shardd_dtype dtype);
/* Elements of --bytes. */
uint64_t bench_elements(const struct bench *b, enum shardd_dtype dtype);

/* The daemon's memory is that of GPUs: limits are theirs, too. */
bool bench_on_device(const struct bench *b);

/* SIGINT, SIGTERM or SIGHUP has come: come to an end. */
bool bench_interrupted(void);

/* Path of a program of this build: beside our own, else @name alone, for PATH. */
void bench_program(const char *name, char *path, size_t size);

/* A private folder and, unless a socket was given, a daemon on it that accepts
 * connections. Return: 0, or -1, said on standard error. */
int daemon_start(struct bench *b);
/* Stop it and remove the folder. Return: 0, or -1 if it did not end well. */
int daemon_stop(struct bench *b);
/* With all that is in it; nothing, if there is none. */
void daemon_remove_folder(const char *path);

/* --------------------------------------------------------------- trainers */

/* One op of one rank. */
struct sample {
	uint64_t begin_ns, end_ns;  /* CLOCK_MONOTONIC, the same for all processes */
	uint64_t waited_us, ran_us; /* the daemon's share, from its reply */
};

/* Memory shared by the program and the processes of one case. */
struct crew {
	pthread_barrier_t meeting; /* of the ranks */
	unsigned ranks;            /* of the job */
	unsigned helpers;          /* further processes, numbered from ranks on */
	unsigned series;           /* how many kinds of op are measured */
	unsigned repeat;           /* measured times of each */
	uint64_t elements;         /* of the unit, or of each */
	unsigned units;            /* of cases with many of them */
	const struct op_case *op;  /* of case_op */
	enum shardd_dtype dtype;
	enum shardd_optimizer_kind optimizer;
	enum shardd_resume resume; /* of the job */
	bool on_device;            /* the daemon's memory is a GPU's */
	const char *socket;
	char job[64];
	atomic_uint ready;     /* ranks that have made their first step */
	atomic_bool stop;      /* a helper: enough */
	bool agreed;           /* the ranks have seen it; between two meetings */
	unsigned turn;         /* of cases with new processes for each turn */
	uint64_t numbers[16];  /* what else a trainer reports */
	double limits[16];     /* of series, GB/s; 0: not measured */
	struct sample *sample; /* [series][rank or helper][repeat] */
};

/* @elements: of the unit. Return: NULL: no memory, said on standard error. */
struct crew *crew_new(struct bench *b, unsigned ranks, unsigned helpers, unsigned series,
		      unsigned repeat, uint64_t elements);
void crew_free(struct crew *crew);

/* A process of the crew. */
struct trainer {
	struct crew *crew;
	unsigned rank;
	shardd_client *client;
	shardd_unit unit;
	bool on_device;     /* what ops hand out are addresses on a GPU */
	void *ones;         /* on a GPU: what gradients are written from */
	const char *device; /* to connect for; NULL: any */
	uint64_t step;      /* last committed */
	uint64_t turn;      /* of case_op, from 0, with those that are not measured */
	uint64_t buffer;    /* of case_op: one that it has allocated */
	void *data;         /* its memory, or what the op handed out */
	shardd_ddp ddp;
};

typedef void (*trainer_fn)(struct trainer *t);

/* Run all processes of the crew with @fn until they have ended. If one fails the
 * others are killed. Return: 0, or -1, said on standard error. */
int crew_run(struct crew *crew, trainer_fn fn);

/* For trainers: any failure is said on standard error and ends the process. */
void trainer_connect(struct trainer *t);
void trainer_join(struct trainer *t, enum shardd_lifetime lifetime);
void trainer_register(struct trainer *t);
void trainer_enter(struct trainer *t); /* connect, join, register, initialise */
void trainer_leave(struct trainer *t);
void trainer_meet(struct trainer *t); /* all ranks are here; not through the daemon */
void trainer_must(struct trainer *t, int rc, const struct shardd_error *err, const char *what);

/* What a training step does around the op that is measured. Not measured. */
const void *trainer_gather(struct trainer *t);
void trainer_release(struct trainer *t);
void trainer_gradient(struct trainer *t); /* ask for the buffer and write all of it */
void trainer_reduce(struct trainer *t);
void trainer_step(struct trainer *t, uint64_t number); /* step and commit */
void trainer_fill(struct trainer *t, void *data, uint64_t elements, enum shardd_dtype dtype);

/* The sample of turn @i; one to throw away for a warm-up turn (below 0). */
struct sample *trainer_sample(const struct trainer *t, unsigned series, int i);
#define TRAINER_WARM_UP (-3) /* the first turn */
void sample_begin(struct sample *s);
void sample_end(struct sample *s);
/* Wait for the ticket, then sample_end with the daemon's times. */
void trainer_timed_wait(struct trainer *t, struct sample *s, shardd_ticket ticket,
			struct shardd_result *ret, const char *what);

/* Many equal units of one trainer. */
struct model {
	struct shardd_unit_info *info;
	struct shardd_unit_spec *spec;
	char (*name)[24];
	shardd_ticket *ticket;
	struct shardd_tensor w;
};

/* Specs of the crew's number of units; for the rest there is room. Never given back. */
void model_make(struct model *m, struct crew *crew);

/* The two moves of a swap at fixed addresses; the same again, at once. */
enum { SWAP_BARE_OUT, SWAP_BARE_IN, SWAP_BARE_OUT_AGAIN, SWAP_BARE_IN_AGAIN, SWAP_BARE_N };
struct bare;
/* Two generations of @bytes; never given back. */
struct bare *swap_bare_new(uint64_t bytes);
/* Read what is in the window, and time turn @i of both: the SWAP_BARE_N series from @series on. */
void swap_bare(struct trainer *t, struct bare *b, unsigned series, int i);

/* ---------------------------------------------------------------- figures */

struct figures {
	const char *name;
	unsigned ranks;
	uint64_t bytes;    /* of the unit; 0: none */
	unsigned units;    /* where it is their number that counts; 0: else */
	const char *dtype; /* NULL: none */
	unsigned n;        /* measurements */
	double p50_us, p99_us;
	double ran_us;   /* median of the daemon's own time from start to end; below 0: none */
	double traffic;  /* bytes that the op has to read and write, by definition; below 0: none */
	double gb_per_s; /* of these by the median; below 0: none */
	double limit;    /* GB/s of the same traffic without a daemon; below 0: none */
	double ratio;    /* to the limit; below 0: none */
	bool has_memory; /* the next three mean something */
	uint64_t held, formula;
	double overhead_percent;
};

#define FIGURES_NULL \
	((struct figures){ .ran_us = -1, .traffic = -1, .gb_per_s = -1, .limit = -1, .ratio = -1 })

/* Times of a collective: from the first rank's call to the last rank's return. */
void figures_collective(struct figures *f, const struct crew *crew, unsigned series);
/* Times of every call of members [first, first+n) by itself. */
void figures_calls(struct figures *f, const struct crew *crew, unsigned series, unsigned first,
		   unsigned n);
/* The same of one @member and the @n_series from @series on. */
void figures_series(struct figures *f, const struct crew *crew, unsigned series, unsigned n_series,
		    unsigned member);
/* Traffic of @bytes in the median time, against @limit GB/s. */
void figures_traffic(struct figures *f, double bytes, double limit);
void figures_report(const struct bench *b, const struct figures *f);

/* A case of one trainer, which is made again in every turn: series k of @crew (NULL: there was
 * no memory) goes under @names[k]. Frees @crew. Return: 0, or -1, said on standard error. */
int figures_turns(struct bench *b, struct crew *crew, trainer_fn fn, const char *const *names,
		  unsigned n);

/* ----------------------------------------------------------------- limits */

enum limit_kind { LIMIT_COPY, LIMIT_TRIAD, LIMIT_READ };

/* Memory bandwidth of all cores together, in memory of the kind the daemon uses, with
 * arrays of @footprint bytes in all: GB/s of bytes read and written, the best of
 * several turns. Return: below 0 when it could not be measured. */
double limit_measure(enum limit_kind kind, uint64_t footprint);
/* From here on limits are those of GPU 0: whatever the kind, how fast it copies in its own
 * memory. */
void limit_of_device(void);
static inline double limit_better(double a, double b)
{
	return a > b ? a : b;
}

/* ----------------------------------------------------------------- devices */

/* CUDA without a daemon, each in a process of its own: this one forks trainers, which
 * CUDA does not live through. Return: below 0 when it fails, said on standard error. */

/* Copies between two arrays of @footprint bytes in all on GPU 0: GB/s read and written,
 * the best of several turns. */
double device_copy_limit(uint64_t footprint);

/* For trainers: limit_measure while all ranks wait. The best measurement of a series is its limit. Before and after what is
 * timed, since the bandwidth of a virtual machine may double or halve within seconds. Nothing on a GPU: a trainer that
 * has used CUDA cannot start another process that does. */
void trainer_limit(struct trainer *t, unsigned series, enum limit_kind kind, uint64_t footprint);
/* The limit of a series; on a GPU @of_device. Below 0: none. */
double crew_limit(const struct crew *crew, unsigned series, double of_device);
/* The kernel that adds @k gradient buffers of @elements to what is there: median
 * microseconds. */
double device_reduce_us(unsigned k, uint64_t elements, enum shardd_dtype dtype, unsigned repeat);
int device_count(void);

/* NCCL called directly by one process with all GPUs: mean microseconds of each. */
struct nccl_times {
	double all_gather_us, reduce_scatter_us, all_reduce_us;
	unsigned devices, version;
};
int nccl_measure(uint64_t bytes, unsigned repeat, struct nccl_times *ret);

/* In a trainer: a stream on GPU @device, whose context is current from here on, and the
 * end of all that is on it. Ends the process when it fails. */
void *device_stream(unsigned device);
void device_drain(void *stream);

/* -------------------------------------------------------------------- gRPC */

struct raw_client;

/* A bare gRPC core client on a unix socket; ends the process when that fails. */
struct raw_client *raw_client_new(const char *socket);
void raw_client_free(struct raw_client *c);
/* One unary call, made as libshardd makes it. @ret, @ret_bytes: the reply, malloc'ed;
 * may be NULL. Ends the process if the status is not OK. */
void raw_call(struct raw_client *c, const char *method, const void *request, size_t bytes,
	      uint8_t **ret, size_t *ret_bytes);
/* Until somebody serves there. */
void raw_await_listener(const char *socket);
/* Answer every call with its own request until RAW_END is called, then end the process. */
__attribute__((noreturn)) void raw_echo_serve(const char *socket);
#define RAW_ECHO "/bench.Echo/Echo"
#define RAW_END  "/bench.Echo/End"

/* --------------------------------------------------------------- single ops */

/*
 * An op that is measured by itself: what has to be there, the op, and what puts things
 * back. All ranks begin a turn together. Either submit or call.
 */
struct op_case {
	/* (optional) what its unit has that others do not */
	void (*adapt)(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w);
	void (*prepare)(struct trainer *t); /* (optional) once */
	void (*before)(struct trainer *t);  /* (optional) in every turn, not measured */
	int (*submit)(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err);
	int (*call)(struct trainer *t, struct shardd_error *err); /* what has no ticket */
	void (*after)(struct trainer *t);                         /* (optional) as before */
	/* Times are from the first rank's call to the last rank's return; else each call's. */
	bool collective;
	enum shardd_optimizer_kind optimizer;
	/* Memory traffic of one element: bytes in all, and elements of the dtype for each rank;
	 * both 0: none to speak of. */
	double once, each;
	bool wide; /* fp32 for each rank, whatever the dtype */
	enum limit_kind limit;
};

int case_op(struct bench *b, const struct bench_case *c);

/* ------------------------------------------------------------------- cases */

int case_gather(struct bench *b, const struct bench_case *c);
int case_gather_cast(struct bench *b, const struct bench_case *c);
int case_reduce(struct bench *b, const struct bench_case *c);
int case_adamw(struct bench *b, const struct bench_case *c);
int case_sgd(struct bench *b, const struct bench_case *c);
int case_reduce_adamw(struct bench *b, const struct bench_case *c);
int case_transformer(struct bench *b, const struct bench_case *c);
int case_scale(struct bench *b, const struct bench_case *c);
int case_norm(struct bench *b, const struct bench_case *c);
int case_grpc_rtt(struct bench *b, const struct bench_case *c);
int case_ring_rtt(struct bench *b, const struct bench_case *c);
int case_ring_rtt_sleeping(struct bench *b, const struct bench_case *c);
int case_submit(struct bench *b, const struct bench_case *c);
int case_attach(struct bench *b, const struct bench_case *c);
int case_status(struct bench *b, const struct bench_case *c);
int case_memory(struct bench *b, const struct bench_case *c);
int case_limits(struct bench *b, const struct bench_case *c);
int case_launch(struct bench *b, const struct bench_case *c);
int case_adamw_kept(struct bench *b, const struct bench_case *c);
int case_restart(struct bench *b, const struct bench_case *c);
int case_checkpoint(struct bench *b, const struct bench_case *c);
int case_resize(struct bench *b, const struct bench_case *c);
int case_publish(struct bench *b, const struct bench_case *c);
int case_publish_transforms(struct bench *b, const struct bench_case *c);
int case_publish_delta(struct bench *b, const struct bench_case *c);
int case_publish_swap(struct bench *b, const struct bench_case *c);
int case_attach_units(struct bench *b, const struct bench_case *c);
int case_reduce_units(struct bench *b, const struct bench_case *c);
int case_reduce_bare(struct bench *b, const struct bench_case *c);
int case_nccl_direct(struct bench *b, const struct bench_case *c);

#endif
