/* shardctl checkpoint convert. A Python program (shardd.torch.checkpoint) knows PyTorch's format, which is
 * made of pickles; this process becomes it. */
#include "ctl/checkpoint_verbs.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "ctl/format.h"

/* What the Python that was found is to do: say what is missing, else the work. The current folder is
 * no place to find modules in. */
static const char convert_program[] =
	"import sys\n"
	"sys.path[:] = [p for p in sys.path if p]\n"
	"def stop(what):\n"
	"    sys.exit('shardctl: FAILED_PRECONDITION: ' + what + ', or name another Python with "
	"--python PATH')\n"
	"try:\n"
	"    import torch.distributed.checkpoint\n"
	"except ImportError as e:\n"
	"    stop(f'{sys.executable} has no PyTorch with distributed checkpoints ({e}): install it "
	"(pip install torch)')\n"
	"try:\n"
	"    import shardd.torch.checkpoint as checkpoint\n"
	"except ImportError as e:\n"
	"    stop(f'{sys.executable} has no package shardd for PyTorch ({e}): install the wheel of "
	"deploy/wheel, or set PYTHONPATH to client/python')\n"
	"sys.exit(checkpoint.main(sys.argv[1:]))\n";

/* Options of the Python program are 'o' (with a value) and 'f'. */
static const struct option convert_options[] = { { "to", required_argument, NULL, 't' },
						 { "python", required_argument, NULL, 'p' },
						 { "step", required_argument, NULL, 's' },
						 { "root", required_argument, NULL, 'o' },
						 { "model-key", required_argument, NULL, 'o' },
						 { "optim-key", required_argument, NULL, 'o' },
						 { "alias", required_argument, NULL, 'o' },
						 { "no-optimizer", no_argument, NULL, 'f' },
						 { "optimizer-from", required_argument, NULL, 'o' },
						 { "like", required_argument, NULL, 'o' },
						 { "like-job", required_argument, NULL, 'o' },
						 { "unit", required_argument, NULL, 'o' },
						 { "leave-out", required_argument, NULL, 'o' },
						 { "allow-unstepped", no_argument, NULL, 'f' },
						 { "job", required_argument, NULL, 'o' },
						 { 0 } };

struct convert {
	const char *to, *python; /* borrowed from argv; NULL: not given */
	char **argv;             /* owned, with what it refers to: of the Python program */
	size_t n;
};

static void checkpoint_convert_deinit(struct convert *c)
{
	for (size_t i = 0; i < c->n; i++)
		free(c->argv[i]);
	free(c->argv);
}

/* Takes @argument. */
static int checkpoint_convert_push(struct convert *c, char *argument)
{
	char **argv = reallocarray(c->argv, c->n + 2, sizeof(*argv));

	if (argv)
		c->argv = argv;
	if (!argv || !argument) {
		free(argument);
		return ctl_broken();
	}
	argv[c->n++] = argument;
	argv[c->n] = NULL;
	return CTL_OK;
}

static int checkpoint_convert_push_option(struct convert *c, const char *name, const char *value)
{
	char *text;

	if (asprintf(&text, value ? "--%s=%s" : "--%s", name, value) < 0)
		return ctl_broken();
	return checkpoint_convert_push(c, text);
}

static int checkpoint_convert_option(struct convert *c, int o, const char *name)
{
	uint64_t step;

	switch (o) {
	case 't':
		c->to = optarg;
		if (strcmp(optarg, "dcp") == 0 || strcmp(optarg, "shardd") == 0)
			return CTL_OK;
		return ctl_usage("--to \"%s\" is neither dcp nor shardd", optarg);
	case 'p':
		c->python = optarg;
		return *optarg ? CTL_OK : ctl_usage("--python is empty");
	case 's':
		if (!format_parse_number(optarg, INT64_MAX, &step))
			return ctl_usage("--step \"%s\" is not a whole number", optarg);
		return checkpoint_convert_push_option(c, name, optarg);
	case 'o':
		return checkpoint_convert_push_option(c, name, optarg);
	case 'f':
		return checkpoint_convert_push_option(c, name, NULL);
	default:
		return CTL_USAGE;
	}
}

/* What the Python program gets in any case, before its options. */
static int checkpoint_convert_begin(struct convert *c, const struct ctl *ctl, const char *self)
{
	int r = checkpoint_convert_push(c, strdup("python3"));

	if (r == CTL_OK)
		r = checkpoint_convert_push(c, strdup("-c"));
	if (r == CTL_OK)
		r = checkpoint_convert_push(c, strdup(convert_program));
	if (r == CTL_OK)
		r = checkpoint_convert_push_option(c, "shardctl", self);
	if (r == CTL_OK && ctl->socket)
		r = checkpoint_convert_push_option(c, "socket", ctl->socket);
	if (r == CTL_OK && ctl->json)
		r = checkpoint_convert_push_option(c, "json", NULL);
	return r;
}

static int checkpoint_convert_parse(struct convert *c, int argc, char **argv)
{
	int r = CTL_OK, o, which = 0;

	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "", convert_options, &which)) != -1)
		r = checkpoint_convert_option(c, o, convert_options[which].name);
	if (r != CTL_OK)
		return r;
	if (argc - optind != 2)
		return ctl_usage("checkpoint convert takes the folder of a checkpoint, and the one "
				 "that it becomes");
	if (!c->to)
		return ctl_usage("checkpoint convert needs --to dcp or --to shardd");
	r = checkpoint_convert_push_option(c, "to", c->to);
	if (r == CTL_OK)
		r = checkpoint_convert_push(c, strdup("--"));
	for (int i = optind; r == CTL_OK && i < argc; i++)
		r = checkpoint_convert_push(c, strdup(argv[i]));
	return r;
}

/* A Python finds its virtual environment by the name that it is started with. Return: only on failure. */
static void checkpoint_convert_exec_python(struct convert *c, const char *python)
{
	char *name = strdup(python);

	if (!name)
		return;
	free(c->argv[0]);
	c->argv[0] = name;
	execvp(name, c->argv);
}

/* Python beside this program (of a virtual environment), else that of the PATH. @self: changed. */
static void checkpoint_convert_exec(struct convert *c, char *self)
{
	char *slash = strrchr(self, '/');

	setenv("PYTHONSAFEPATH", "1", 1);
	fflush(stdout);
	if (c->python) {
		checkpoint_convert_exec_python(c, c->python);
		return;
	}
	if (slash) {
		strcpy(slash + 1, "python3");
		checkpoint_convert_exec_python(c, self);
	}
	checkpoint_convert_exec_python(c, "python3");
}

int checkpoint_convert(struct ctl *ctl, int argc, char **argv)
{
	char self[PATH_MAX + 16];
	ssize_t n = readlink("/proc/self/exe", self, PATH_MAX - 1);
	struct convert c = { 0 };
	int r;

	if (n < 0)
		return ctl_broken();
	self[n] = '\0';
	r = checkpoint_convert_begin(&c, ctl, self);
	if (r == CTL_OK)
		r = checkpoint_convert_parse(&c, argc, argv);
	if (r == CTL_OK) {
		checkpoint_convert_exec(&c, self);
		fprintf(stderr,
			"shardctl: NOT_FOUND: running %s: %s: checkpoint convert needs Python with "
			"PyTorch: install both, or name another one with --python PATH\n",
			c.python ? c.python : "python3", strerror(errno));
		r = CTL_FAILED;
	}
	checkpoint_convert_deinit(&c);
	return r;
}
