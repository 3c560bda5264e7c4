/*
 * shardctl run: N trainers of one job on this node.
 *
 * A trainer that fails is started again, up to --max-restarts times per rank; then
 * the others are ended. One loop: poll for signals, ends and lines.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/run_daemon.h"
#include "ctl/run_instance.h"
#include "ctl/run_proc.h"

#define MAX_TRAINERS  1024u /* the daemon's limit of a job's ranks */
#define HELP_PRINTED  -1
#define KILL_AFTER_US (5 * 1000000u)
#define ASK_EVERY_MS  200 /* a daemon that is not there yet */

struct trainer {
	struct run_proc proc;
	unsigned restarts;
};

struct run {
	/* As asked for. */
	uint32_t n;
	uint32_t min; /* go on with fewer, down to so many; 0: not */
	uint32_t
		grace_s; /* in the same processes, when one has not come back for so long; 0: not */
	uint32_t max_restarts;
	int32_t priority;  /* of the job in the line for memory */
	uint32_t memory_s; /* how long it may wait there; 0: not */
	bool standalone;
	char **command;     /* borrowed */
	const char *socket; /* borrowed */
	char job[80];
	char id[24];                     /* of this run, which its restarts share */
	uint16_t port;                   /* for torch.distributed; 0: none of ours */
	char instance[RUN_INSTANCE_MAX]; /* of the daemon that has the job; "": not known */

	uint32_t world;           /* of them, that are started: at most n */
	bool had_job;             /* there was one when they were ended */
	bool shrinking;           /* they are ended, and then started again, one fewer */
	struct trainer *trainers; /* n */
	struct pollfd *fds;
	struct run_daemon daemon;
	int signals;       /* signalfd */
	bool stopping;     /* no restarts any more */
	uint32_t finished; /* trainers that have ended well */
	uint32_t lost;     /* that have failed for good, with @grace_s */
	bool failed;       /* stopping because of one of them: how the others end does not count */
	uint64_t kill_at;  /* what runs then is killed; 0: not stopping */
	int code;          /* worst so far */
};

/* ---------------------------------------------------------------- arguments */

static int run_count_option(const char *name, uint64_t min, uint64_t max, uint32_t *ret)
{
	uint64_t number;

	if (!format_parse_number(optarg, max, &number) || number < min)
		return ctl_usage("%s \"%s\" is not a whole number from %llu to %llu", name, optarg,
				 (unsigned long long)min, (unsigned long long)max);
	*ret = (uint32_t)number;
	return CTL_OK;
}

static void run_help(void)
{
	puts("usage: shardctl run -n N [--min M [--join-grace S]] [--max-restarts K] "
	     "[--standalone]\n"
	     "       [--priority P] [--wait-for-memory S] [--job NAME] -- CMD...\n"
	     "\n"
	     "Start N trainers of one job on this node, with RANK, LOCAL_RANK, WORLD_SIZE,\n"
	     "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, SHARDD_SOCKET, SHARDD_JOB and\n"
	     "SHARDD_RUN in their environment.\n"
	     "Each line that a trainer prints is passed on with its rank in front.\n"
	     "\n"
	     "  -n N              number of trainers, 1 to 1024\n"
	     "  --min M           when a trainer has failed for good, end the others and start "
	     "all\n"
	     "                    again with one fewer, down to M; their state stays in the job\n"
	     "  --join-grace S    do not end the others: when it has not come back for S seconds,\n"
	     "                    they go on without it. For trainers that join again by "
	     "themselves\n"
	     "  --max-restarts K  restart a failed trainer, up to K times for each rank (0)\n"
	     "  --standalone      start a private daemon, which ends with the trainers\n"
	     "  --priority P      of the job in the line for memory, -100 to 100 (0)\n"
	     "  --wait-for-memory S  how long it may wait there for memory (0)\n"
	     "  --job NAME        name of the job; default: $SHARDD_JOB, else run-PID");
}

static int run_option(struct run *run, int o)
{
	switch (o) {
	case 'h':
		run_help();
		return HELP_PRINTED;
	case 'n':
		return run_count_option("-n", 1, MAX_TRAINERS, &run->n);
	case 'm':
		return run_count_option("--min", 1, MAX_TRAINERS, &run->min);
	case 'g':
		return run_count_option("--join-grace", 1, UINT32_MAX / 1000, &run->grace_s);
	case 'r':
		return run_count_option("--max-restarts", 0, UINT32_MAX, &run->max_restarts);
	case 's':
		run->standalone = true;
		return CTL_OK;
	case 'P':
		return ctl_priority(optarg, &run->priority);
	case 'W':
		return run_count_option("--wait-for-memory", 1, UINT32_MAX / 1000, &run->memory_s);
	case 'j':
		snprintf(run->job, sizeof(run->job), "%s", optarg);
		return CTL_OK;
	default:
		return CTL_USAGE;
	}
}

/* In a container every shardctl may have the same process id. The name must then come from
 * outside. */
static void run_default_job(struct run *run)
{
	const char *name = getenv("SHARDD_JOB");

	if (name && *name)
		snprintf(run->job, sizeof(run->job), "%s", name);
	else
		snprintf(run->job, sizeof(run->job), "run-%d", (int)getpid());
}

/* USER/NAME to UID/NAME, which is what trainers know. */
static int run_resolve_job(struct run *run)
{
	char buf[CTL_JOB_MAX], *name;
	int r = ctl_job_name(run->job, buf, &name);

	if (r == CTL_OK && name == buf)
		snprintf(run->job, sizeof(run->job), "%.79s", buf);
	return r;
}

static int run_parse(struct run *run, int argc, char **argv)
{
	static const struct option options[] = {
		{ "min", required_argument, NULL, 'm' },
		{ "join-grace", required_argument, NULL, 'g' },
		{ "max-restarts", required_argument, NULL, 'r' },
		{ "standalone", no_argument, NULL, 's' },
		{ "job", required_argument, NULL, 'j' },
		{ "priority", required_argument, NULL, 'P' },
		{ "wait-for-memory", required_argument, NULL, 'W' },
		{ "help", no_argument, NULL, 'h' },
		{ 0 },
	};
	int r = CTL_OK;
	int o;

	run_default_job(run);
	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "+hn:", options, NULL)) != -1)
		r = run_option(run, o);
	if (r == CTL_OK)
		r = run_resolve_job(run);
	if (r != CTL_OK)
		return r;
	if (!run->n)
		return ctl_usage("run needs -n N");
	if (run->min > run->n)
		return ctl_usage("--min %u is more than -n %u", run->min, run->n);
	if (run->grace_s && !run->min)
		return ctl_usage("--join-grace needs --min M");
	if (optind == argc)
		return ctl_usage("run needs a command after --");
	run->command = argv + optind;
	return CTL_OK;
}

/* ------------------------------------------------------------------ trainers */

static int run_start_trainer(struct run *run, uint32_t rank)
{
	char rank_env[32], local_rank[32], world[32], local_world[32], job[96];
	char socket[128 + sizeof("SHARDD_SOCKET=")], instance[80];
	char id[48], port[32], least[40], most[40], grace[48], priority[40], memory[48];
	/* a trainer that is started again continues from state of this run of the daemon */
	bool again = (run->trainers[rank].restarts || run->world < run->n) && *run->instance;
	const char *env[17] = { rank_env, world, local_rank, local_world, socket, job, id };
	size_t n = 7;
	struct run_command command = { run->command, env, SIGKILL };
	int r;

	snprintf(rank_env, sizeof(rank_env), "RANK=%u", rank);
	snprintf(world, sizeof(world), "WORLD_SIZE=%u", run->world);
	snprintf(local_rank, sizeof(local_rank), "LOCAL_RANK=%u", rank);
	snprintf(local_world, sizeof(local_world), "LOCAL_WORLD_SIZE=%u", run->world);
	snprintf(socket, sizeof(socket), "SHARDD_SOCKET=%s", run->socket);
	snprintf(job, sizeof(job), "SHARDD_JOB=%s", run->job);
	snprintf(id, sizeof(id), "SHARDD_RUN=%s", run->id);
	snprintf(instance, sizeof(instance), "SHARDD_INSTANCE=%s", run->instance);
	snprintf(port, sizeof(port), "MASTER_PORT=%u", run->port);
	snprintf(least, sizeof(least), "SHARDD_MIN_RANKS=%u", run->min);
	snprintf(most, sizeof(most), "SHARDD_MAX_RANKS=%u", run->n);
	snprintf(grace, sizeof(grace), "SHARDD_JOIN_GRACE_MS=%u", run->grace_s * 1000);
	snprintf(priority, sizeof(priority), "SHARDD_PRIORITY=%d", run->priority);
	snprintf(memory, sizeof(memory), "SHARDD_WAIT_FOR_MEMORY_MS=%u", run->memory_s * 1000);
	if (run->priority)
		env[n++] = priority;
	if (run->memory_s)
		env[n++] = memory;
	if (again)
		env[n++] = instance;
	if (run->min) {
		env[n++] = least;
		env[n++] = most;
		env[n++] = grace;
	}
	if (run->port) {
		env[n++] = "MASTER_ADDR=127.0.0.1";
		env[n++] = port;
	}
	r = run_proc_start(&run->trainers[rank].proc, &command);
	if (r < 0)
		fprintf(stderr, "shardctl: INTERNAL: cannot start rank %u: %s\n", rank,
			strerrordesc_np(-r));
	return r;
}

static void run_signal_all(struct run *run, int sig)
{
	for (uint32_t i = 0; i < run->n; i++)
		run_proc_signal(&run->trainers[i].proc, sig);
}

static void run_stop(struct run *run, int sig)
{
	run->stopping = true;
	run->shrinking = false;
	if (!run->kill_at)
		run->kill_at = clock_now_us() + KILL_AFTER_US;
	run_signal_all(run, sig);
}

static void run_worse(struct run *run, int code)
{
	if (code > run->code)
		run->code = code;
}

/* One of them has failed for good: end all. */
static void run_give_up(struct run *run, int code)
{
	run_worse(run, code);
	run->failed = true;
	run_stop(run, SIGTERM);
}

static void run_say_end(uint32_t rank, pid_t pid, int code, const char *then)
{
	if (code > 128 && strsignal(code - 128))
		fprintf(stderr, "shardctl: rank %u (pid %d) was killed by signal %d (%s)%s\n", rank,
			(int)pid, code - 128, strsignal(code - 128), then);
	else
		fprintf(stderr, "shardctl: rank %u (pid %d) exited with code %d%s\n", rank,
			(int)pid, code, then);
}

/* One of them has failed for good, and fewer can go on. As when a machine ends: none of them does
 * anything any more, and the daemon has their state. */
static void run_shrink(struct run *run)
{
	run->shrinking = true;
	run->had_job = run->had_job || run_instance_has_job(run->socket, run->job, false);
	run_signal_all(run, SIGKILL);
}

/* An EPHEMERAL job whose ranks have left it goes with its state: to begin again at step 0 is nothing
 * that anybody has asked for. */
static bool run_lost_job(const struct run *run)
{
	if (!run->had_job || run_instance_has_job(run->socket, run->job, true))
		return false;
	fprintf(stderr,
		"shardctl: DATA_LOSS: job '%s' is gone, with its state: its last rank has left it, "
		"and it is not kept (lifetime KEEP), or somebody has deleted it; start the run "
		"again "
		"from step 0, or from a checkpoint\n",
		run->job);
	return true;
}

/* All of them have ended. */
static void run_start_fewer(struct run *run)
{
	run->shrinking = false;
	if (run_lost_job(run)) {
		run_give_up(run, CTL_FAILED);
		return;
	}
	run->world--;
	for (uint32_t i = 0; i < run->world && !run->stopping; i++) {
		run->trainers[i].restarts = 0;
		if (run_start_trainer(run, i) < 0)
			run_give_up(run, CTL_FAILED);
	}
}

static bool run_may_shrink(const struct run *run)
{
	return run->min && run->world - run->lost > run->min && run->finished == 0;
}

static void run_trainer_ended(struct run *run, uint32_t rank)
{
	struct trainer *t = &run->trainers[rank];
	pid_t pid = t->proc.pid;
	int code = run_proc_reap(&t->proc);
	char then[64];

	if (run->shrinking)
		return;
	if (run->stopping) {
		if (!run->failed)
			run_worse(run, code);
		return;
	}
	if (code == 0) {
		run->finished++;
		return;
	}
	if (t->restarts == run->max_restarts && !run_may_shrink(run)) {
		run_say_end(rank, pid, code, run->world > 1 ? "; ending the others" : "");
		run_give_up(run, code);
		return;
	}
	if (run_instance_lost(run->socket, run->instance, run->job)) {
		run_say_end(rank, pid, code, "; no restart");
		run_give_up(run, CTL_FAILED);
		return;
	}
	if (t->restarts == run->max_restarts && run->grace_s) {
		run->lost++;
		snprintf(then, sizeof(then), "; the others go on, %u ranks",
			 run->world - run->lost);
		run_say_end(rank, pid, code, then);
		return;
	}
	if (t->restarts == run->max_restarts) {
		snprintf(then, sizeof(then), "; starting all again, %u ranks", run->world - 1);
		run_say_end(rank, pid, code, then);
		run_shrink(run);
		return;
	}
	t->restarts++;
	snprintf(then, sizeof(then), "; restart %u of %u", t->restarts, run->max_restarts);
	run_say_end(rank, pid, code, then);
	if (run_start_trainer(run, rank) < 0)
		run_give_up(run, CTL_FAILED);
}

/* ---------------------------------------------------------------------- loop */

static bool run_any_runs(const struct run *run)
{
	for (uint32_t i = 0; i < run->n; i++)
		if (run->trainers[i].proc.pid)
			return true;
	return false;
}

/* Pass the first signal on; the second one kills the trainers at once. */
static void run_take_signal(struct run *run)
{
	struct signalfd_siginfo info;

	if (read(run->signals, &info, sizeof(info)) != sizeof(info))
		return;
	if (run->stopping && !run->failed)
		run_signal_all(run, SIGKILL);
	run->failed = false;
	run_stop(run, (int)info.ssi_signo);
}

/* Before a trainer is restarted, the run of the daemon that it continues from must be known. */
static bool run_must_ask(const struct run *run)
{
	return (run->max_restarts || run->min) && !*run->instance && !run->stopping;
}

static void run_ask(struct run *run)
{
	uint64_t started;

	if (run_must_ask(run) && !getenv("SHARDD_INSTANCE"))
		run_instance_ask(run->socket, run->instance, &started);
}

static int run_poll_timeout(const struct run *run)
{
	uint64_t now = clock_now_us();

	if (!run->kill_at)
		return run_must_ask(run) ? ASK_EVERY_MS : -1;
	return now >= run->kill_at ? 0 : (int)((run->kill_at - now + 999) / 1000);
}

static void run_daemon_ended(struct run *run)
{
	int code = run_proc_reap(&run->daemon.proc);

	fprintf(stderr, "shardctl: UNAVAILABLE: the private daemon exited with code %d\n", code);
	run_give_up(run, CTL_UNREACHABLE);
}

/* The descriptors: signals, the daemon's, then each trainer's. */
static void run_turn(struct run *run)
{
	struct pollfd *daemon = run->fds + 1;
	struct pollfd *trainers = daemon + RUN_PROC_FDS;

	run_ask(run);
	run->fds[0] = (struct pollfd){ .fd = run->signals, .events = POLLIN };
	run_proc_fds(&run->daemon.proc, daemon);
	for (uint32_t i = 0; i < run->n; i++)
		run_proc_fds(&run->trainers[i].proc, trainers + i * RUN_PROC_FDS);
	poll(run->fds, 1 + (run->n + 1) * RUN_PROC_FDS, run_poll_timeout(run));
	if (run->fds[0].revents)
		run_take_signal(run);
	if (run_proc_ready(&run->daemon.proc, daemon))
		run_daemon_ended(run);
	for (uint32_t i = 0; i < run->n; i++)
		if (run_proc_ready(&run->trainers[i].proc, trainers + i * RUN_PROC_FDS))
			run_trainer_ended(run, i);
	if (run->kill_at && clock_now_us() >= run->kill_at) {
		run_signal_all(run, SIGKILL);
		run->kill_at = clock_now_us() + KILL_AFTER_US;
	}
}

static void run_trainers(struct run *run)
{
	run->world = run->n;
	for (uint32_t i = 0; i < run->n && !run->stopping; i++)
		if (run_start_trainer(run, i) < 0)
			run_give_up(run, CTL_FAILED);
	while (run_any_runs(run)) {
		run_turn(run);
		if (run->shrinking && !run_any_runs(run))
			run_start_fewer(run);
	}
}

/* -------------------------------------------------------------- start and end */

/* Signals arrive by descriptor from here on, in whatever thread they come. */
static int run_take_over_signals(struct run *run)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGQUIT);
	signal(SIGPIPE, SIG_IGN);
	sigprocmask(SIG_BLOCK, &set, NULL);
	run->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return run->signals < 0 ? ctl_broken() : CTL_OK;
}

/* Containers may all have the same process ids, so the identifier is random. */
static int run_make_id(struct run *run)
{
	uint64_t number;

	if (getrandom(&number, sizeof(number), 0) != sizeof(number))
		return ctl_broken();
	snprintf(run->id, sizeof(run->id), "run-%016llx", (unsigned long long)number);
	return CTL_OK;
}

/* Where the trainers' torch.distributed meets, as torchrun says it: a port that nobody uses now. Not
 * if the caller has chosen one, or if the machine has no network. */
static void run_choose_port(struct run *run)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t size = sizeof(address);
	_cleanup_(fd_closep) int fd = -1;

	if (getenv("MASTER_PORT"))
		return;
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0 &&
	    getsockname(fd, (struct sockaddr *)&address, &size) == 0)
		run->port = ntohs(address.sin_port);
}

static int run_prepare(struct run *run)
{
	int r = run_make_id(run);

	if (r != CTL_OK)
		return r;
	run_choose_port(run);
	run->trainers = calloc(run->n, sizeof(*run->trainers));
	run->fds = calloc(1 + (run->n + 1) * RUN_PROC_FDS, sizeof(*run->fds));
	if (!run->trainers || !run->fds)
		return ctl_broken();
	for (uint32_t i = 0; i < run->n; i++) {
		char prefix[16];

		snprintf(prefix, sizeof(prefix), "%u", i);
		run_proc_init(&run->trainers[i].proc, prefix);
	}
	return run_take_over_signals(run);
}

static void run_free(struct run *run)
{
	if (!run)
		return;
	for (uint32_t i = 0; run->trainers && i < run->n; i++)
		run_proc_deinit(&run->trainers[i].proc);
	run_daemon_stop(&run->daemon);
	fd_close(run->signals);
	free(run->trainers);
	free(run->fds);
	free(run);
}

static void run_freep(struct run **run)
{
	run_free(STEAL_PTR(*run));
}

int ctl_run(struct ctl *ctl, int argc, char **argv)
{
	_cleanup_(run_freep) struct run *run = calloc(1, sizeof(*run));
	int r;

	if (!run)
		return ctl_broken();
	run->signals = -1;
	run_daemon_init(&run->daemon);
	r = run_parse(run, argc, argv);
	if (r == HELP_PRINTED)
		return CTL_OK;
	if (r == CTL_OK)
		r = run_prepare(run);
	if (r == CTL_OK && run->standalone)
		r = run_daemon_start(&run->daemon, run->signals);
	if (r != CTL_OK)
		return r;
	run->socket = run->standalone ? run->daemon.socket : ctl->socket;
	run_trainers(run);
	return run->code;
}
