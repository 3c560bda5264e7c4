/* shardctl: the command line of shardd. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "ctl/ctl.h"
#include "env.h"

static const struct ctl_verb verbs[] = {
	{ "status", "", "show the daemon, its devices, jobs and ranks", ctl_status },
	{ "blame", "[JOB]", "show which rank and node holds up the others", ctl_blame },
	{ "memory", "", "show who holds how much memory", ctl_memory },
	{ "jobs", "", "list the jobs", ctl_jobs },
	{ "units", "JOB", "list the units of a job", ctl_units },
	{ "sessions", "", "list the connected processes", ctl_sessions },
	{ "users", "", "show each user's usage and limits", ctl_users },
	{ "ops", "[JOB] [-n N]", "list the last ops and what pending ops wait for", ctl_ops },
	{ "trace", "[JOB] -o FILE [...]", "write them for Perfetto and chrome://tracing",
	  ctl_trace },
	{ "health", "", "print the health; exit code 0: SERVING", ctl_health },
	{ "job", "create|delete|drain|resize ...", "create, delete, drain or resize a job",
	  ctl_job },
	{ "cordon", "", "admit no new jobs", ctl_cordon },
	{ "uncordon", "", "admit new jobs again", ctl_uncordon },
	{ "drain", "[--wait] [--timeout S]", "make all trainers commit and leave", ctl_drain },
	{ "handover", "[--timeout S]", "start the next daemon, with all jobs", ctl_handover },
	{ "shutdown", "[--discard]", "end the daemon and its jobs", ctl_shutdown },
	{ "checkpoint", "save|load|policy|inspect|verify|...",
	  "write a job to files; work on such files", ctl_checkpoint },
	{ "run", "-n N [...] -- CMD...", "start N trainers of a job", ctl_run },
};

static void main_help(void)
{
	puts("usage: shardctl [--socket PATH] [--json] [--no-color] VERB [ARGUMENT...]\n");
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
		printf("  %-10s %-32s %s\n", verbs[i].name, verbs[i].arguments, verbs[i].help);
	puts("\n"
	     "  job create NAME --world-size N [--keep|--ephemeral] [--quota BYTES] [--ttl S]\n"
	     "             [--op-timeout MS] [--allow-torn] [--private]\n"
	     "             [--resume applied|committed|no-copy] [--min-ranks N --max-ranks N]\n"
	     "             [--join-grace S]\n"
	     "             [--checkpoint-dir DIR --checkpoint-every-steps N --checkpoint-every-s "
	     "S\n"
	     "              --checkpoint-keep K --checkpoint-rate BYTES]\n"
	     "  job delete NAME [--force]\n"
	     "  job drain NAME\n"
	     "  job resize NAME N [--timeout S]\n"
	     "  checkpoint save JOB DIR [--rate BYTES]\n"
	     "  checkpoint load JOB DIR [--step N]\n"
	     "  checkpoint policy JOB DIR [--every-steps N] [--every-s S] [--keep K] [--rate "
	     "BYTES]\n"
	     "  checkpoint policy JOB off\n"
	     "  checkpoint inspect DIR [--step N]\n"
	     "  checkpoint verify DIR [--step N]\n"
	     "  checkpoint consolidate DIR --out FILE [--step N] [--names tensor] [--root UNIT]\n"
	     "  checkpoint prune DIR --keep N\n"
	     "  checkpoint import FILE|- DIR --step N [--world-size N] [--job NAME]\n"
	     "  checkpoint convert SRC DST --to dcp|shardd [--step N] [...]\n"
	     "  trace [JOB] -o FILE [--last N] [--seconds S]\n"
	     "  run -n N [--min M [--join-grace S]] [--max-restarts K] [--standalone]\n"
	     "      [--job NAME] -- CMD...\n"
	     "\n"
	     "  --socket PATH  the daemon's socket; default: $SHARDD_SOCKET, else\n"
	     "                 " ENV_DEFAULT_SOCKET "\n"
	     "  --json         print one JSON document instead of tables\n"
	     "  --no-color     print no colours; the default if stdout is not a terminal or\n"
	     "                 $NO_COLOR is set\n"
	     "\n"
	     "exit code: 0 done, 1 the daemon returned an error, 2 wrong arguments,\n"
	     "3 the daemon cannot be reached; run: the highest exit code of its trainers");
}

static const struct ctl_verb *main_find_verb(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
		if (strcmp(verbs[i].name, name) == 0)
			return &verbs[i];
	return NULL;
}

/* Options before the verb. Return: -1 to go on, else the exit code. */
static int main_parse(struct ctl *ctl, int argc, char **argv)
{
	static const struct option options[] = {
		{ "socket", required_argument, NULL, 's' }, { "json", no_argument, NULL, 'j' },
		{ "no-color", no_argument, NULL, 'c' },     { "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'v' },      { 0 },
	};
	int o;

	while ((o = ctl_getopt(argc, argv, "+h", options, NULL)) != -1) {
		switch (o) {
		case 's':
			ctl->socket = optarg;
			break;
		case 'j':
			ctl->json = true;
			break;
		case 'c':
			ctl->color = false;
			break;
		case 'h':
			main_help();
			return CTL_OK;
		case 'v':
			printf("shardctl %s\n", shardd_version());
			return CTL_OK;
		default:
			return CTL_USAGE;
		}
	}
	return -1;
}

/* run has options of its own, and behind them a command with its options. */
static bool main_wants_help(const struct ctl_verb *verb, int argc, char **argv)
{
	for (int i = 1; verb->run != ctl_run && i < argc && strcmp(argv[i], "--") != 0; i++)
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
			return true;
	return false;
}

static bool main_wants_color(void)
{
	const char *no = getenv("NO_COLOR");

	return isatty(STDOUT_FILENO) && !(no && *no);
}

int main(int argc, char **argv)
{
	static char name[] = "shardctl";
	struct ctl ctl = { .color = main_wants_color() };
	const struct ctl_verb *verb;
	int r;

	argv[0] = name; /* and not the path of a program, in front of an error */
	r = main_parse(&ctl, argc, argv);

	if (r >= 0)
		return r;
	env_warn("shardctl");
	ctl.socket = env_socket(ctl.socket);
	if (optind == argc)
		return ctl_usage("no verb is given");
	verb = main_find_verb(argv[optind]);
	if (!verb)
		return ctl_usage("there is no verb \"%s\"", argv[optind]);
	argc -= optind;
	argv += optind;
	if (main_wants_help(verb, argc, argv)) {
		main_help();
		return CTL_OK;
	}
	optind = 0; /* restart getopt for the verb's own options */
	r = verb->run(&ctl, argc, argv);
	if (fflush(stdout) != 0)
		r = ctl_broken();
	/* The kernel closes the connection. An orderly end of gRPC waits some
	 * milliseconds for its threads, as long as all the rest of a status takes; and
	 * exit() would run its destructors under those threads. */
	if (ctl.rpc)
		_exit(r);
	return r;
}
