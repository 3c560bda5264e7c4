/*
 * probe_gpu: what the driver of this machine really does, answered by experiment.
 *
 * Runs each probe in a process group of its own, with a time limit, and prints what it
 * found. This process never touches CUDA (stage.h).
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stage.h"

const struct probe probes[] = {
	{ "P1", "survive",
	  "does memory survive its allocator's kill -9 while a descriptor is held?", 120,
	  probe_survive },
	{ "P2", "timeline",
	  "do stream waits on shared memory wake, and how fast, against interprocess events?", 120,
	  probe_timeline },
	{ "P2b", "host_word", "does a CPU's store into registered shared memory wake a stream?", 60,
	  probe_host_word },
	{ "P2c", "dead_writer", "what becomes of a stream that waits for a killed process?", 60,
	  probe_dead_writer },
	{ "P3", "read_only", "does a write through a read-only import hurt the writer only?", 120,
	  probe_read_only },
	{ "P4", "poll", "does poll report anything on the descriptor of an allocation?", 60,
	  probe_poll },
	{ "P5", "overlap", "how far does work of two processes overlap, with and without MPS?", 180,
	  probe_overlap },
	{ "P6", "nccl", "can two NCCL processes share a device with different NCCL_HOSTID?", 200,
	  probe_nccl },
	{ "P6b", "nccl_abort", "when does ncclCommAbort end, while work waits for another process?",
	  120, probe_nccl_abort },
	{ "P7", "ipc", "what are legacy IPC handles worth: lifetime, reuse, own process?", 120,
	  probe_ipc },
	{ "P8", "cost", "what do a launch from another thread, and making memory, cost?", 120,
	  probe_cost },
	{ "P9", "attach", "how long does mapping all memory of 1,000 units take?", 120,
	  probe_attach },
	{ 0 },
};

struct options {
	bool small;
	const char *json;
	char **names; /* ended by NULL; none: all */
};

static void usage(FILE *to)
{
	fputs("usage: probe_gpu [--small] [--json FILE] [--list] [NAME...]\n"
	      "\n"
	      "Asks the driver (libcuda.so.1, or SHARDD_LIBCUDA) and NCCL (libnccl.so.2, or\n"
	      "SHARDD_LIBNCCL) by experiment. NAME: P1 or survive; default: all.\n"
	      "  --small      sizes for a simulator\n"
	      "  --json FILE  append one JSON object a probe\n"
	      "Exit status: 0 if every probe gave an answer, 1 if one could not be carried out.\n",
	      to);
}

static bool wanted(const struct options *o, const struct probe *p)
{
	for (char **n = o->names; *n; n++)
		if (strcmp(*n, p->id) == 0 || strcmp(*n, p->name) == 0)
			return true;
	return !*o->names;
}

/* ------------------------------------------------------------------ output */

static const char *const state_names[] = { [STAGE_RUNNING] = "failed",
					   [STAGE_ANSWERED] = "answered",
					   [STAGE_FAILED] = "failed",
					   [STAGE_SKIPPED] = "skipped",
					   [STAGE_HUNG] = "hung" };

static void json_text(FILE *f, const char *text)
{
	fputc('"', f);
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			fprintf(f, "\\%c", *text);
		else
			fputc((unsigned char)*text < 32 ? ' ' : *text, f);
	}
	fputc('"', f);
}

static void json_write(FILE *f, const struct probe *p, const struct stage *s, double seconds)
{
	fprintf(f, "{\"probe\": \"%s\", \"name\": \"%s\", \"question\": ", p->id, p->name);
	json_text(f, p->question);
	fprintf(f, ", \"state\": \"%s\", \"seconds\": %.1f, \"answer\": ", state_names[s->state],
		seconds);
	json_text(f, s->answer);
	fputs(", \"figures\": [", f);
	for (unsigned i = 0; i < s->n_figures; i++) {
		const struct figure *g = &s->figures[i];

		fprintf(f, "%s{\"name\": \"%s\", ", i ? ", " : "", g->name);
		if (g->text[0]) {
			fputs("\"text\": ", f);
			json_text(f, g->text);
		} else {
			fprintf(f, "\"value\": %.6g, \"unit\": \"%s\"", g->value, g->unit);
		}
		fputs("}", f);
	}
	fputs("]}\n", f);
	fflush(f);
}

static void text_write(const struct probe *p, const struct stage *s, double seconds)
{
	printf("\n%s %s: %s\n", p->id, p->name, p->question);
	for (unsigned i = 0; i < s->n_figures; i++) {
		const struct figure *g = &s->figures[i];

		if (g->text[0])
			printf("    %-40s %s\n", g->name, g->text);
		else
			printf("    %-40s %.4g %s\n", g->name, g->value, g->unit);
	}
	printf("  %s (%.1f s): %s\n", state_names[s->state], seconds, s->answer);
	fflush(stdout);
}

/* --------------------------------------------------------------- one probe */

/* All of the probe's processes; what is stuck in the driver is left to the system. */
static void end_group(pid_t group)
{
	uint64_t end = now_ns() + UINT64_C(10000000000);
	pid_t pid;

	kill(-group, SIGKILL);
	while ((pid = waitpid(-group, NULL, WNOHANG)) >= 0 && now_ns() < end)
		if (pid == 0)
			poll(NULL, 0, 2);
}

static _Noreturn void director(const struct probe *p, struct stage *s)
{
	setpgid(0, 0);
	p->run(s);
	s->state = STAGE_ANSWERED;
	_exit(0);
}

/* Return: it has ended by itself. */
static bool await_end(pid_t pid, unsigned limit_s, int *status)
{
	uint64_t end = now_ns() + UINT64_C(1000000000) * limit_s;

	while (waitpid(pid, status, WNOHANG) == 0) {
		if (now_ns() > end)
			return false;
		poll(NULL, 0, 5);
	}
	return true;
}

static void carry_out(const struct probe *p, struct stage *s)
{
	pid_t pid = fork();
	int status = 0;

	if (pid == 0)
		director(p, s);
	if (pid < 0) {
		stage_answer(s, "no process could be started");
		return;
	}
	setpgid(pid, pid);
	if (!await_end(pid, p->limit_s, &status)) {
		s->state = STAGE_HUNG;
		stage_answer(s, "Hung: %s; ended after %u s.", s->step, p->limit_s);
	} else if (WIFSIGNALED(status)) {
		stage_answer(s, "The probe ended with signal %d.", WTERMSIG(status));
	}
	end_group(pid);
	mps_stop(s);
}

/* Return: it gave an answer; that something hangs is one, too. */
static bool probe_run(const struct probe *p, const struct options *o, FILE *json)
{
	struct stage *s =
		mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint64_t begin = now_ns();
	double seconds;
	bool answered;

	if (s == MAP_FAILED) {
		perror("probe_gpu: no shared memory");
		return false;
	}
	s->small = o->small;
	fflush(NULL);
	carry_out(p, s);
	seconds = (double)(now_ns() - begin) / 1e9;
	text_write(p, s, seconds);
	if (json)
		json_write(json, p, s, seconds);
	answered = s->state != STAGE_FAILED && s->state != STAGE_RUNNING;
	munmap(s, sizeof(*s));
	return answered;
}

static int list(void)
{
	for (const struct probe *p = probes; p->id; p++)
		printf("%-4s %-12s %s\n", p->id, p->name, p->question);
	return 0;
}

/* Return: 0, 1 done, -1 wrong arguments. */
static int parse(struct options *o, int argc, char **argv)
{
	static const struct option options[] = { { "small", no_argument, NULL, 's' },
						 { "json", required_argument, NULL, 'j' },
						 { "list", no_argument, NULL, 'l' },
						 { "help", no_argument, NULL, 'h' },
						 { 0 } };
	int option;

	while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (option == 's')
			o->small = true;
		else if (option == 'j')
			o->json = optarg;
		else if (option == 'l')
			return list() + 1;
		else if (option == 'h')
			return usage(stdout), 1;
		else
			return usage(stderr), -1;
	}
	o->names = argv + optind;
	return 0;
}

int main(int argc, char **argv)
{
	struct options o = { 0 };
	unsigned asked = 0, failed = 0;
	FILE *json = NULL;
	int r = parse(&o, argc, argv);

	if (r)
		return r > 0 ? 0 : 2;
	if (o.json && !(json = fopen(o.json, "ae"))) {
		perror(o.json);
		return 2;
	}
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	for (const struct probe *p = probes; p->id; p++)
		if (wanted(&o, p)) {
			asked++;
			failed += !probe_run(p, &o, json);
		}
	if (json)
		fclose(json);
	printf("\n%u probes, %u without an answer\n", asked, failed);
	return failed || asked == 0;
}
