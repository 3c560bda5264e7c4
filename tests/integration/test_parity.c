/*
 * charlm on 1, 2 and 4 ranks with the same global batch: the same losses; the same run
 * twice: the same bits. Each with a private daemon, as a user would start it.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemonfix.h"
#include "fdcheck.h"

enum { STEPS = 200 };

struct losses {
	unsigned n;
	double loss[STEPS + 1]; /* by step, from 1 */
};

static const char *bin_dir(void)
{
	const char *dir = getenv("SHARDD_BIN_DIR");

	return dir && *dir ? dir : SHARDD_BIN_DIR;
}

static void exec_run(const char *ranks, const char *dtype, int out, pid_t parent)
{
	char shardctl[4096], charlm[4096];

	prctl(PR_SET_PDEATHSIG, SIGTERM); /* it ends its daemon and its trainers */
	if (getppid() != parent)
		_exit(125);
	setenv("SHARDD_BACKEND", daemonfix_backend(), 1);
	snprintf(shardctl, sizeof(shardctl), "%s/shardctl", bin_dir());
	snprintf(charlm, sizeof(charlm), "%s/charlm", bin_dir());
	dup2(out, STDOUT_FILENO);
	execl(shardctl, shardctl, "run", "-n", ranks, "--standalone", "--", charlm, "--data",
	      SHARDD_SOURCE_DIR "/LICENSE", "--steps", "200", "--batch", "16", "--hidden", "24",
	      "--context", "6", "--embed", "5", "--seed", "3", "--dtype", dtype, "--json",
	      (char *)NULL);
	_exit(127);
}

/* "[0] {...}": rank 0's object for one step. */
static void take_line(struct losses *l, const char *line)
{
	json_t *j = strncmp(line, "[0] {", 5) == 0 ? json_loads(line + 4, 0, NULL) : NULL;
	json_t *step = json_object_get(j, "step"), *loss = json_object_get(j, "loss");

	if (json_is_integer(step) && json_is_real(loss)) {
		cr_assert_eq(json_integer_value(step), ++l->n, "steps come in order");
		cr_assert_leq(l->n, STEPS);
		l->loss[l->n] = json_real_value(loss);
	}
	json_decref(j);
}

static struct losses train(const char *ranks, const char *dtype)
{
	struct losses l = { 0 };
	pid_t parent = getpid(), pid;
	int fds[2], status;
	char line[1024];
	FILE *f;

	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	fflush(NULL);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0)
		exec_run(ranks, dtype, fds[1], parent);
	close(fds[1]);
	f = fdopen(fds[0], "r");
	cr_assert(f);
	while (fgets(line, sizeof(line), f))
		take_line(&l, line);
	fclose(f);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s ranks: status %d", ranks,
		  status);
	cr_assert_eq(l.n, STEPS, "%s ranks: %u steps", ranks, l.n);
	cr_assert_lt(l.loss[STEPS], 0.8 * l.loss[1], "%s ranks: it learns: %g to %g", ranks,
		     l.loss[1], l.loss[STEPS]);
	return l;
}

static void expect_close(const struct losses *one, const struct losses *other, const char *ranks)
{
	double worst = 0;

	for (unsigned i = 1; i <= STEPS; i++) {
		double off = fabs(other->loss[i] - one->loss[i]) / fabs(one->loss[i]);

		worst = off > worst ? off : worst;
		cr_expect_leq(off, 1e-6, "%s ranks, step %u: %.17g, with one %.17g", ranks, i,
			      other->loss[i], one->loss[i]);
	}
	printf("%s ranks against one: at most %.2g off\n", ranks, worst);
}

Test(parity, more_ranks_give_the_same_losses, .timeout = 600, .init = fdcheck_begin,
     .fini = fdcheck_end)
{
	struct losses one = train("1", "fp32"), two = train("2", "fp32"), four = train("4", "fp32");

	expect_close(&one, &two, "2");
	expect_close(&one, &four, "4");
}

static void expect_equal(const char *ranks, const char *dtype)
{
	struct losses first = train(ranks, dtype), again = train(ranks, dtype);

	cr_expect_eq(memcmp(first.loss, again.loss, sizeof(first.loss)), 0, "%s ranks, %s", ranks,
		     dtype);
}

Test(parity, the_same_run_twice_gives_the_same_bits, .timeout = 600, .init = fdcheck_begin,
     .fini = fdcheck_end)
{
	expect_equal("1", "fp32");
	expect_equal("2", "fp32");
	expect_equal("4", "bf16");
}
