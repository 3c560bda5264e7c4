/* shardctl: the command line of shardd. */
#include <fcntl.h>
#include <getopt.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "ctl/complete.h"
#include "ctl/ctl.h"
#include "ctl/width.h"
#include "env.h"

static const struct ctl_verb verbs[] = {
	{ "status", "[JOB]", "show the daemon, devices, jobs and ranks", ctl_status, NULL },
	{ "top", "[JOB] [-d S] [-s KEY]", "watch jobs and ranks", ctl_top,
	  "  top [JOB] [-d S] [-s name|state|step|rate|wait|memory] [-b] [-n N]\n" },
	{ "blame", "[JOB]", "show what holds up the ranks of a job", ctl_blame, NULL },
	{ "slow", "JOB [-n STEPS]", "show which rank is late, and by how much", ctl_slow, NULL },
	{ "memory", "", "show who holds how much memory", ctl_memory, NULL },
	{ "plan", "--params N --ranks N ...", "compute what a job takes, and if it fits", ctl_plan,
	  "  plan --params N --ranks N [--nodes N] [--replicas N]\n"
	  "       [--units N | --unit-params N] [--dtype [STORAGE/]COMPUTE]\n"
	  "       [--gradient-dtype fp32|bf16|fp16]\n"
	  "       [--optimizer none|sgd|momentum|adam|adamw|trainer] [--amsgrad]\n"
	  "       [--in-backward] [--clip] [--resume applied|committed|no-copy]\n"
	  "       [--trainable N | --lora RANK --hidden N --layers N [--targets N]]\n"
	  "       [--backend host|cuda] [--devices N]\n" },
	{ "jobs", "", "list the jobs", ctl_jobs, NULL },
	{ "history", "[JOB] [-n N]", "list the jobs that have ended", ctl_history,
	  "  history [JOB] [-n N] [--before ID]\n" },
	{ "events", "[JOB] [-f] [-n N]", "show what has happened to jobs; -f: follow", ctl_events,
	  "  events [JOB] [-f] [-n N] [--commits]\n" },
	{ "units", "JOB", "list the units of a job", ctl_units, NULL },
	{ "publications", "[JOB]", "show generations of weights and leases", ctl_publications,
	  NULL },
	{ "sessions", "", "list the connected processes", ctl_sessions, NULL },
	{ "users", "", "show each user's usage and limits", ctl_users, NULL },
	{ "ops", "[JOB] [-n N]", "list pending ops, then the last ones", ctl_ops, NULL },
	{ "trace", "[JOB...] -o FILE [...]", "write ops for Perfetto, chrome://tracing", ctl_trace,
	  "  trace [JOB...|--all] -o FILE [--last N] [--seconds S]\n" },
	{ "health", "", "print the health; exit code 0: SERVING", ctl_health, NULL },
	{ "job", "create|delete|drain|...", "create, delete, drain or resize a job", ctl_job,
	  "  job create NAME --world-size N [--keep|--ephemeral] [--quota BYTES] [--ttl S]\n"
	  "             [--op-timeout MS] [--allow-torn] [--private]\n"
	  "             [--resume applied|committed|no-copy] [--min-ranks N --max-ranks N]\n"
	  "             [--join-grace S] [--priority P] [--wait-for-memory S]\n"
	  "             [--user USER[:GROUP]]\n"
	  "             [--checkpoint-dir DIR --checkpoint-every-steps N\n"
	  "              --checkpoint-every-s S --checkpoint-keep K\n"
	  "              --checkpoint-rate BYTES]\n"
	  "  job delete JOB [--force]\n"
	  "  job drain JOB\n"
	  "  job resize JOB N [--timeout S]\n" },
	{ "cordon", "", "admit no new jobs", ctl_cordon, NULL },
	{ "uncordon", "", "admit new jobs again", ctl_uncordon, NULL },
	{ "drain", "[--wait] [--timeout S]", "make all trainers commit and leave", ctl_drain,
	  NULL },
	{ "handover", "[--timeout S]", "start the next daemon, with all jobs", ctl_handover, NULL },
	{ "shutdown", "[--discard]", "end the daemon and its jobs", ctl_shutdown, NULL },
	{ "checkpoint", "save|load|verify|...", "write a job to files; work on such files",
	  ctl_checkpoint,
	  "  checkpoint save JOB DIR [--rate BYTES]\n"
	  "  checkpoint load JOB DIR [--step N]\n"
	  "  checkpoint policy JOB DIR [--every-steps N] [--every-s S] [--keep K]\n"
	  "                    [--rate BYTES]\n"
	  "  checkpoint policy JOB off\n"
	  "  checkpoint inspect DIR [--step N]\n"
	  "  checkpoint verify DIR [--step N]\n"
	  "  checkpoint consolidate DIR --out FILE [--step N] [--names tensor]\n"
	  "                         [--root UNIT]\n"
	  "  checkpoint prune DIR --keep N\n"
	  "  checkpoint import FILE|- DIR --step N [--world-size N] [--job NAME]\n"
	  "  checkpoint convert SRC DST --to dcp|shardd [--step N] [--no-optimizer]\n"
	  "                     [--optimizer-from FILE] [--like DIR] [--like-job JOB]\n"
	  "                     [--unit PATTERN] [--root UNIT] [--alias NEW=EXISTING]\n"
	  "                     [--leave-out PATTERN] [--allow-unstepped]\n"
	  "                     [--model-key KEY] [--optim-key KEY] [--job NAME]\n"
	  "                     [--python PATH]\n" },
	{ "run", "-n N [...] -- CMD...", "start N trainers of a job", ctl_run,
	  "  run -n N [--min M [--join-grace S]] [--max-restarts K] [--standalone]\n"
	  "      [--priority P] [--wait-for-memory S] [--job NAME] -- CMD...\n" },
};

static void main_help_codes(void)
{
	puts("exit code: 0 done; 1 the daemon returned an error, or the output cannot be\n"
	     "written; 2 wrong arguments; 3 the daemon cannot be reached, does not answer, or\n"
	     "accepts no new jobs. health: 1 not SERVING. drain: 1 trainers are left, or a job\n"
	     "is not committed. run: the highest exit code of its trainers, 128+N after signal\n"
	     "N, 127 the command cannot be started");
}

static void main_help(void)
{
	puts("usage: shardctl [--socket PATH] [--json] [--wide] [--no-color] VERB [ARG...]\n");
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
		printf("  %-10s %-24s %s\n", verbs[i].name, verbs[i].arguments, verbs[i].help);
	putchar('\n');
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
		if (verbs[i].usage)
			fputs(verbs[i].usage, stdout);
	fputs("\n"
	      "  --socket PATH  the daemon's socket; default: $SHARDD_SOCKET, else\n"
	      "                 " ENV_DEFAULT_SOCKET "\n"
	      "  --json         print one JSON document instead of tables\n"
	      "  --wide         cut nothing in tables, however wide they are; the default if\n"
	      "                 stdout is not a terminal and $COLUMNS is not set\n"
	      "  --no-color     print no colours; the default if stdout is not a terminal or\n"
	      "                 $NO_COLOR is set\n"
	      "\n",
	      stdout);
	main_help_codes();
}

static void main_help_verb(const struct ctl_verb *verb)
{
	if (verb->usage)
		printf("usage: shardctl [--socket PATH] [--json] VERB\n\n%s\n", verb->usage);
	else
		printf("usage: shardctl [--socket PATH] [--json] %s%s%s\n\n", verb->name,
		       *verb->arguments ? " " : "", verb->arguments);
	printf("%s: %s. man shardctl says more.\n\n", verb->name, verb->help);
	main_help_codes();
}

/* Letters that have to be put in, left out or replaced. Of words below MAIN_WORD. */
#define MAIN_WORD 24u

static unsigned main_distance(const char *a, const char *b)
{
	unsigned row[MAIN_WORD + 1], n = (unsigned)strlen(b);

	for (unsigned k = 0; k <= n; k++)
		row[k] = k;
	for (unsigned i = 1; a[i - 1]; i++) {
		unsigned corner = row[0];

		row[0] = i;
		for (unsigned k = 1; k <= n; k++) {
			unsigned swap = corner + (a[i - 1] != b[k - 1]);

			corner = row[k];
			row[k] = corner + 1 < row[k - 1] + 1 ? corner + 1 : row[k - 1] + 1;
			row[k] = row[k] < swap ? row[k] : swap;
		}
	}
	return row[n];
}

/* Return: the verb that was meant, perhaps; NULL: none is like it. */
static const struct ctl_verb *main_guess_verb(const char *name)
{
	const struct ctl_verb *best = NULL;
	unsigned least = 3;

	if (strlen(name) >= MAIN_WORD)
		return NULL;
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
		unsigned d = main_distance(name, verbs[i].name);

		if (d < least && d < strlen(verbs[i].name)) {
			least = d;
			best = &verbs[i];
		}
	}
	return best;
}

static int main_no_verb(const char *name)
{
	const struct ctl_verb *meant = main_guess_verb(name);

	if (meant)
		return ctl_usage("there is no verb \"%s\": is \"%s\" meant?", name, meant->name);
	return ctl_usage("there is no verb \"%s\"", name);
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
		{ "socket", required_argument, NULL, 's' },
		{ "json", no_argument, NULL, 'j' },
		{ "no-color", no_argument, NULL, 'c' },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'v' },
		{ "wide", no_argument, NULL, 'w' },
		{ 0 },
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
		case 'w':
			ctl->width = 0;
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

/* --wide and --json may be behind the verb, too: who has seen a table that was cut, or a table, adds them there.
 * Return: arguments that are left. */
static int main_take_style(const struct ctl_verb *verb, int argc, char **argv, struct ctl *ctl)
{
	int n = 1;

	for (int i = 1; i < argc; i++) {
		bool is_ours = verb->run != ctl_run;

		if (is_ours && strcmp(argv[i], "--wide") == 0)
			ctl->width = 0;
		else if (is_ours && strcmp(argv[i], "--json") == 0)
			ctl->json = true;
		else
			argv[n++] = argv[i];
	}
	argv[n] = NULL;
	return n;
}

static bool main_wants_color(void)
{
	const char *no = getenv("NO_COLOR");

	return isatty(STDOUT_FILENO) && !(no && *no);
}

/* Where standard output is closed, the connection to the daemon would get its number, and what is printed. Such a
 * number gets a file that can do nothing, so that printing fails. */
static void main_fill_standard(void)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0)
			(void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

/* What was printed may not have been written. Return: the exit code. */
static int main_end(int r)
{
	return fflush(stdout) != 0 || ferror(stdout) ? ctl_broken() : r;
}

int main(int argc, char **argv)
{
	static char name[] = "shardctl";
	struct ctl ctl = { .color = main_wants_color(), .width = width_of_terminal(STDOUT_FILENO) };
	const struct ctl_verb *verb;
	int r;

	main_fill_standard();
	setlocale(LC_CTYPE, "");
	if (argc > 1 && strcmp(argv[1], "--complete") == 0) {
		complete_print(verbs, ARRAY_SIZE(verbs), argv + 2, (size_t)argc - 2, complete_jobs,
			       stdout);
		fflush(stdout);
		_exit(CTL_OK); /* as below */
	}
	argv[0] = name; /* and not the path of a program, in front of an error */
	r = main_parse(&ctl, argc, argv);

	if (r >= 0)
		return main_end(r);
	env_warn("shardctl");
	ctl.socket = env_socket(ctl.socket);
	if (optind == argc)
		return ctl_usage("no verb is given");
	verb = main_find_verb(argv[optind]);
	if (!verb)
		return main_no_verb(argv[optind]);
	argc -= optind;
	argv += optind;
	argc = main_take_style(verb, argc, argv, &ctl);
	if (main_wants_help(verb, argc, argv)) {
		main_help_verb(verb);
		return main_end(CTL_OK);
	}
	optind = 0; /* restart getopt for the verb's own options */
	r = verb->run(&ctl, argc, argv);
	r = main_end(r);
	/* The kernel closes the connection. An orderly end of gRPC waits some
	 * milliseconds for its threads, as long as all the rest of a status takes; and
	 * exit() would run its destructors under those threads. */
	if (ctl.rpc)
		_exit(r);
	return r;
}
