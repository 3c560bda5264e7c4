/* resize: a job without trainers gets 3 ranks, and 1 again, by shardctl: units of layout FLAT, which keep
 * their memory, and units of two tensors in layout DIM0, which are copied; beside shardctl status.
 * restart: the daemon is killed under a trainer with many units: until it has been told, has joined,
 * has all units again, and has made a step, beside a step without a death; with one gradient buffer at a
 * time that nobody writes, and with all of them at once, which the trainer writes (restart_all).
 * checkpoint: steps while the daemon writes a checkpoint, one after the other, and after a second in
 * which a unit was gathered and the trainer computes; beside steps while it does not write; and how
 * fast it writes, beside these steps and while the job stands still, beside dd with the same end
 * (conv=fsync). */
#include <glob.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

#define SURVIVE_UNITS 1000u /* by default */

enum {
	RESTART_TOLD,
	RESTART_JOIN,
	RESTART_REGISTER,
	RESTART,
	RESTART_STEP,
	RESTART_CALM,
	RESTART_N
};
enum {
	CHECKPOINT_STEP,
	CHECKPOINT_PAUSED,
	CHECKPOINT_CALM,
	CHECKPOINT_SAVE,
	CHECKPOINT_STILL,
	CHECKPOINT_DD,
	CHECKPOINT_N
};

/* As long as forward and backward may take. */
#define CHECKPOINT_PAUSE_MS 1000
#define CHECKPOINT_PAUSES   20
enum { RESIZE, RESIZE_BACK, RESIZE_STATUS, RESIZE_N };
enum { HOLDER, MOVES, ALL }; /* of crew->numbers */

/* A daemon of its own, with a holder and a root of checkpoints. */
static int survive_start(const struct bench *b, struct bench *own)
{
	if (b->o.socket) {
		fputs("shardd-bench: this case kills its daemon, or needs a root of checkpoints: "
		      "leave --socket out\n",
		      stderr);
		return -1;
	}
	*own = *b;
	own->held = true;
	if (daemon_start(own) == 0)
		return 0;
	daemon_stop(own);
	return -1;
}

static int survive_command(const char *const *argv)
{
	int status = -1;
	pid_t pid = fork();

	if (pid == 0) {
		if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr))
			_exit(1);
		execvp(argv[0], (char *const *)(uintptr_t)argv);
		_exit(127);
	}
	if (pid > 0)
		waitpid(pid, &status, 0);
	return status;
}

static void survive_step(struct trainer *t, struct model *m)
{
	struct shardd_error err;
	void *data;

	for (unsigned i = 0; i < t->crew->units; i++) {
		int rc = shardd_gradient(t->client, m->info[i].unit, &data, &err);

		if (rc == 0)
			rc = shardd_reduce(t->client, m->info[i].unit, &err);
		trainer_must(t, rc, &err, "reduce");
	}
	trainer_step(t, t->step + 1);
	t->step++;
}

/* With the gradients of all units at once, as after a backward pass without a reduction in it. */
static void survive_step_all(struct trainer *t, struct model *m)
{
	struct shardd_error err;
	void *data;

	for (unsigned i = 0; i < t->crew->units; i++) {
		trainer_must(t, shardd_gradient(t->client, m->info[i].unit, &data, &err), &err,
			     "gradient");
		if (data)
			memset(data, 0, t->crew->elements * sizeof(float));
	}
	survive_step(t, m);
}

static void survive_enter(struct trainer *t, struct model *m, enum shardd_lifetime lifetime)
{
	struct shardd_error err;

	for (unsigned i = 0; i < t->crew->units; i++)
		m->spec[i].optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD,
								  .lr = 0.01,
								  .momentum = 0.9 };
	trainer_connect(t);
	trainer_join(t, lifetime);
	trainer_must(t, shardd_register(t->client, m->spec, t->crew->units, m->info, &err), &err,
		     "register");
	for (unsigned i = 0; i < t->crew->units; i++)
		trainer_must(t, shardd_init_seed(t->client, m->info[i].unit, 1, &err), &err,
			     "initialise");
	survive_step(t, m);
}

/* -------------------------------------------------------------------------- restart */

static pid_t restart_daemon_of(pid_t holder)
{
	char path[64], text[64] = "";
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)holder, (int)holder);
	f = fopen(path, "re");
	if (f && !fgets(text, sizeof(text), f))
		text[0] = 0;
	if (f)
		fclose(f);
	return (pid_t)atoi(text);
}

static void restart_once(struct trainer *t, struct model *m, int i)
{
	void (*step)(struct trainer * t, struct model * m) =
		t->crew->numbers[ALL] ? survive_step_all : survive_step;
	struct sample *s[RESTART_N];
	struct shardd_error err;
	pid_t daemon = restart_daemon_of((pid_t)t->crew->numbers[HOLDER]);
	int rc;

	for (unsigned k = 0; k < RESTART_N; k++)
		s[k] = trainer_sample(t, k, i);
	sample_begin(s[RESTART_CALM]);
	step(t, m);
	sample_end(s[RESTART_CALM]);
	if (daemon <= 0) {
		fputs("shardd-bench: the holder has no daemon\n", stderr);
		_exit(1);
	}
	sample_begin(s[RESTART_TOLD]);
	s[RESTART]->begin_ns = s[RESTART_TOLD]->begin_ns;
	kill(daemon, SIGKILL);
	do
		rc = shardd_barrier(t->client, SHARDD_WORLD, &err);
	while (rc == 0); /* answered before the signal had its effect */
	if (rc != -SHARDD_ABORTED)
		trainer_must(t, rc, &err, "barrier");
	sample_end(s[RESTART_TOLD]);
	sample_begin(s[RESTART_JOIN]);
	trainer_join(t, SHARDD_EPHEMERAL);
	sample_end(s[RESTART_JOIN]);
	sample_begin(s[RESTART_REGISTER]);
	trainer_must(t, shardd_register(t->client, m->spec, t->crew->units, m->info, &err), &err,
		     "register");
	sample_end(s[RESTART_REGISTER]);
	s[RESTART]->end_ns = s[RESTART_REGISTER]->end_ns;
	sample_begin(s[RESTART_STEP]);
	step(t, m);
	sample_end(s[RESTART_STEP]);
}

static void restart_main(struct trainer *t)
{
	struct model m;

	model_make(&m, t->crew);
	survive_enter(t, &m, SHARDD_EPHEMERAL);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++)
		restart_once(t, &m, i);
	trainer_leave(t);
}

static void restart_all_main(struct trainer *t)
{
	t->crew->numbers[ALL] = true;
	restart_main(t);
}

static void survive_report(const struct bench *b, const struct crew *crew, const char *const *names,
			   unsigned n)
{
	for (unsigned k = 0; k < n; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = 1;
		f.bytes = b->o.bytes;
		f.units = crew->units;
		f.dtype = "fp32";
		figures_calls(&f, crew, k, 0, 1);
		figures_report(b, &f);
	}
}

static int survive_run(struct bench *own, const struct bench_case *c, trainer_fn fn,
		       const char *const *names, unsigned n, unsigned units, bool moves)
{
	uint64_t elements = own->o.bytes / 4 / units;
	struct crew *crew = crew_new(own, 1, 0, n, bench_repeat(own, c), elements ? elements : 1);
	int r;

	if (!crew)
		return -1;
	crew->units = units;
	crew->numbers[HOLDER] = (uint64_t)own->daemon;
	crew->numbers[MOVES] = moves;
	r = crew_run(crew, fn);
	if (r == 0)
		survive_report(own, crew, names, n);
	crew_free(crew);
	return r;
}

int case_restart(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "restart_told", "restart_join", "restart_register",
					     "restart",      "restart_step", "restart_calm_step" };
	static const char *const all[] = { "restart_all_told",     "restart_all_join",
					   "restart_all_register", "restart_all",
					   "restart_all_step",     "restart_all_calm_step" };
	struct bench own;
	int r;

	if (survive_start(b, &own) < 0)
		return -1;
	r = survive_run(&own, c, restart_main, names, RESTART_N, bench_units(b, SURVIVE_UNITS),
			false);
	if (r == 0)
		r = survive_run(&own, c, restart_all_main, all, RESTART_N,
				bench_units(b, SURVIVE_UNITS), false);
	return daemon_stop(&own) < 0 ? -1 : r;
}

/* ----------------------------------------------------------------------- checkpoint */

static pid_t checkpoint_begin(const struct trainer *t, const char *dir)
{
	char program[PATH_MAX];
	pid_t pid;

	bench_program("shardctl", program, sizeof(program));
	pid = fork();
	if (pid == 0) {
		if (!freopen("/dev/null", "w", stdout))
			_exit(1);
		execlp(program, "shardctl", "--socket", t->crew->socket, "checkpoint", "save",
		       t->crew->job, dir, NULL);
		_exit(127);
	}
	return pid;
}

static uint64_t checkpoint_bytes(const char *dir)
{
	char pattern[PATH_MAX + 64];
	struct stat st = { 0 };
	glob_t found;

	snprintf(pattern, sizeof(pattern), "%s/step-*/shard-00000.safetensors", dir);
	if (glob(pattern, 0, NULL, &found) || found.gl_pathc != 1 ||
	    stat(found.gl_pathv[0], &st) < 0) {
		fputs("shardd-bench: there is not one checkpoint\n", stderr);
		_exit(1);
	}
	globfree(&found);
	return (uint64_t)st.st_size;
}

/* As many bytes, with an fsync at the end and outside of the page cache, by dd. */
static void checkpoint_dd(const char *dir, struct sample *s)
{
	char count[64], to[PATH_MAX + 64];
	const char *const argv[] = { "dd",
				     "if=/dev/zero",
				     to,
				     "bs=4M",
				     count,
				     "conv=fsync",
				     "iflag=count_bytes",
				     "oflag=nocache",
				     NULL };

	snprintf(count, sizeof(count), "count=%llu", (unsigned long long)checkpoint_bytes(dir));
	snprintf(to, sizeof(to), "of=%s/dd", dir);
	sample_begin(s);
	if (survive_command(argv) != 0) {
		fputs("shardd-bench: dd has failed\n", stderr);
		_exit(1);
	}
	sample_end(s);
	unlink(to + strlen("of="));
}

static void checkpoint_empty(const char *dir)
{
	daemon_remove_folder(dir);
	mkdir(dir, 0700);
}

/* A trainer that computes for a second, and gathers a unit now and then, as forward and backward do. */
static void checkpoint_pause(struct trainer *t, struct model *m)
{
	for (unsigned i = 0; i < CHECKPOINT_PAUSES; i++) {
		t->unit = m->info[i % t->crew->units].unit;
		trainer_gather(t);
		trainer_release(t);
		poll(NULL, 0, CHECKPOINT_PAUSE_MS / CHECKPOINT_PAUSES);
	}
}

/* One step; @longest is the longest one so far. */
static void checkpoint_step(struct trainer *t, struct model *m, bool paused, struct sample *longest)
{
	struct sample now = { 0 };

	if (paused)
		checkpoint_pause(t, m);
	sample_begin(&now);
	survive_step(t, m);
	sample_end(&now);
	if (now.end_ns - now.begin_ns > longest->end_ns - longest->begin_ns)
		*longest = now;
}

/* Steps until the checkpoint is on the disk; the one that takes longest counts. Return: how many. */
static unsigned checkpoint_save_under(struct trainer *t, struct model *m, const char *dir,
				      bool paused, struct sample *longest, struct sample *save)
{
	unsigned n = 0;
	int status = 0;
	pid_t pid, ended;

	*longest = (struct sample){ 0 };
	sample_begin(save);
	pid = checkpoint_begin(t, dir);
	for (; (ended = waitpid(pid, &status, WNOHANG)) == 0; n++)
		checkpoint_step(t, m, paused, longest);
	sample_end(save);
	if (ended == pid && status == 0 && n)
		return n;
	fputs("shardd-bench: no checkpoint was made, or not a step meanwhile\n", stderr);
	_exit(1);
}

static void checkpoint_still(struct trainer *t, const char *dir, struct sample *s)
{
	int status = 0;
	pid_t pid;

	sample_begin(s);
	pid = checkpoint_begin(t, dir);
	if (waitpid(pid, &status, 0) != pid || status != 0) {
		fputs("shardd-bench: no checkpoint was made\n", stderr);
		_exit(1);
	}
	sample_end(s);
}

static void checkpoint_once(struct trainer *t, struct model *m, const char *dir, int i)
{
	struct sample unused, *calm = trainer_sample(t, CHECKPOINT_CALM, i);
	unsigned n;

	checkpoint_empty(dir);
	checkpoint_still(t, dir, trainer_sample(t, CHECKPOINT_STILL, i));
	checkpoint_empty(dir);
	n = checkpoint_save_under(t, m, dir, true, trainer_sample(t, CHECKPOINT_PAUSED, i),
				  &unused);
	*calm = (struct sample){ 0 };
	while (n--)
		checkpoint_step(t, m, true, calm);
	checkpoint_empty(dir);
	(void)checkpoint_save_under(t, m, dir, false, trainer_sample(t, CHECKPOINT_STEP, i),
				    trainer_sample(t, CHECKPOINT_SAVE, i));
}

static void checkpoint_main(struct trainer *t)
{
	char dir[PATH_MAX];
	struct model m;

	snprintf(dir, sizeof(dir), "%s", t->crew->socket);
	*strrchr(dir, '/') = 0;
	strcat(dir, "/checkpoints");
	model_make(&m, t->crew);
	survive_enter(t, &m, SHARDD_EPHEMERAL);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		checkpoint_once(t, &m, dir, i);
		checkpoint_dd(dir, trainer_sample(t, CHECKPOINT_DD, i));
	}
	trainer_leave(t);
}

int case_checkpoint(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "checkpoint_step",      "checkpoint_paused_step",
					     "checkpoint_calm_step", "checkpoint_save",
					     "checkpoint_still",     "checkpoint_dd" };
	struct bench own;
	int r;

	if (survive_start(b, &own) < 0)
		return -1;
	r = survive_run(&own, c, checkpoint_main, names, CHECKPOINT_N, bench_units(b, 20), false);
	return daemon_stop(&own) < 0 ? -1 : r;
}

/* --------------------------------------------------------------------------- resize */

/* Two tensors, of which the second one's place depends on the number of ranks. */
static void resize_make(struct model *m, const struct crew *crew)
{
	static struct shardd_tensor tensors[2];
	static uint64_t rows;

	rows = crew->elements / 2 / 3 * 3 + 1;
	tensors[0] = tensors[1] = m->w;
	tensors[0].shape = tensors[1].shape = &rows;
	tensors[1].name = "second";
	for (unsigned i = 0; i < crew->units; i++) {
		m->spec[i].tensors = tensors;
		m->spec[i].n_tensors = 2;
		m->spec[i].layout = SHARDD_LAYOUT_DIM0;
	}
}

static void resize_command(const struct trainer *t, const char *const *words, struct sample *s)
{
	const char *argv[8] = { NULL, "--socket", t->crew->socket };
	char program[PATH_MAX];

	bench_program("shardctl", program, sizeof(program));
	argv[0] = program;
	for (unsigned i = 3; i < 7 && *words; i++)
		argv[i] = *words++;
	sample_begin(s);
	if (survive_command(argv) != 0) {
		fprintf(stderr, "shardd-bench: shardctl %s has failed\n", argv[3]);
		_exit(1);
	}
	sample_end(s);
}

static void resize_main(struct trainer *t)
{
	struct sample unused;
	struct model m;

	model_make(&m, t->crew);
	if (t->crew->numbers[MOVES])
		resize_make(&m, t->crew);
	survive_enter(t, &m, SHARDD_KEEP);
	trainer_leave(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		resize_command(t, (const char *const[]){ "job", "resize", t->crew->job, "3", NULL },
			       trainer_sample(t, RESIZE, i));
		resize_command(t, (const char *const[]){ "job", "resize", t->crew->job, "1", NULL },
			       trainer_sample(t, RESIZE_BACK, i));
		resize_command(t, (const char *const[]){ "status", NULL },
			       trainer_sample(t, RESIZE_STATUS, i));
	}
	resize_command(t, (const char *const[]){ "job", "delete", t->crew->job, NULL }, &unused);
}

int case_resize(struct bench *b, const struct bench_case *c)
{
	static const char *const stays[] = { "resize_stays", "resize_stays_back", "resize_status" };
	static const char *const moves[] = { "resize_moves", "resize_moves_back", "resize_status" };
	unsigned units = bench_units(b, SURVIVE_UNITS);
	struct bench own;
	int r;

	if (survive_start(b, &own) < 0)
		return -1;
	r = survive_run(&own, c, resize_main, stays, RESIZE_N, units, false);
	if (r == 0)
		r = survive_run(&own, c, resize_main, moves, RESIZE_N, units, true);
	return daemon_stop(&own) < 0 ? -1 : r;
}
