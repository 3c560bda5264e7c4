#include "config/args.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_CONFIG "/etc/shardd/shardd.yaml"

enum option_value { OPT_CONFIG = 256, OPT_SET, OPT_SOCKET, OPT_BACKEND, OPT_HTTP };

/* For a flag without a value, val is its action. */
static const struct option options[] = {
	{ "config", required_argument, NULL, OPT_CONFIG },
	{ "set", required_argument, NULL, OPT_SET },
	{ "socket", required_argument, NULL, OPT_SOCKET },
	{ "backend", required_argument, NULL, OPT_BACKEND },
	{ "http", required_argument, NULL, OPT_HTTP },
	{ "check-config", no_argument, NULL, ARGS_CHECK_CONFIG },
	{ "print-config", no_argument, NULL, ARGS_PRINT_CONFIG },
	{ "example-config", no_argument, NULL, ARGS_EXAMPLE_CONFIG },
	{ "version", no_argument, NULL, ARGS_VERSION },
	{ "help", no_argument, NULL, ARGS_HELP },
	{ NULL, 0, NULL, 0 },
};

static void args_add_setting(struct args *args, const char *key, const char *value)
{
	args->settings[args->n_settings++] = (struct args_setting){ key, value };
}

static int args_add_set(struct args *args, char *text, struct fault *f)
{
	char *equals = strchr(text, '=');

	if (!equals || equals == text)
		return fault_set(f, FAULT_INVALID, "--set", "--set '%.64s' is not KEY=VALUE", text);
	*equals = '\0';
	args_add_setting(args, text, equals + 1);
	return 0;
}

static int args_take_option(struct args *args, int opt, char *word, struct fault *f)
{
	switch (opt) {
	case OPT_CONFIG:
		args->config_path = optarg;
		return 0;
	case OPT_SET:
		return args_add_set(args, optarg, f);
	case OPT_SOCKET:
		args_add_setting(args, "socket", optarg);
		return 0;
	case OPT_BACKEND:
		args_add_setting(args, "backend", optarg);
		return 0;
	case OPT_HTTP:
		args_add_setting(args, "http", optarg);
		return 0;
	case ':':
		return fault_set(f, FAULT_INVALID, "argv", "option %.64s needs a value", word);
	case '?':
		return fault_set(
			f, FAULT_INVALID, "argv",
			"unknown or ambiguous option '%.64s', or an option that takes no value",
			word);
	default:
		args->action = (enum args_action)opt;
		return 0;
	}
}

int args_parse(struct args *args, int argc, char **argv, struct fault *f)
{
	int opt, r;

	*args = ARGS_NULL;
	args->settings = calloc((size_t)argc + 1, sizeof(*args->settings));
	if (!args->settings)
		return fault_errno(f, -ENOMEM, "command line");
	optind = 0; /* glibc: restart the scan, also when called a second time */
	opterr = 0;
	while ((opt = getopt_long(argc, argv, ":", options, NULL)) != -1) {
		r = args_take_option(args, opt, argv[optind - 1], f);
		if (r)
			return r;
	}
	if (optind < argc)
		return fault_set(f, FAULT_INVALID, "argv",
				 "unexpected argument '%.64s'; shardd takes only options",
				 argv[optind]);
	return 0;
}

void args_deinit(struct args *args)
{
	free(args->settings);
	*args = ARGS_NULL;
}

static int args_load_file(const struct args *args, struct config *c, struct fault *f)
{
	if (args->config_path)
		return config_load_file(c, args->config_path, f);
	/* only "there is none" is silent: a file that cannot be read is an error */
	if (access(DEFAULT_CONFIG, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR))
		return 0;
	return config_load_file(c, DEFAULT_CONFIG, f);
}

static int args_apply_settings(const struct args *args, struct config *c, struct fault *f)
{
	for (size_t i = 0; i < args->n_settings; i++) {
		struct fault why = FAULT_NULL;

		if (config_set(c, args->settings[i].key, args->settings[i].value, &why) != 0)
			return fault_set(f, why.code, why.field, "command line: %s", why.text);
	}
	return 0;
}

int args_config(const struct args *args, struct config *c, struct fault *f)
{
	struct config new;
	int r;

	config_default(&new);
	r = args_load_file(args, &new, f);
	if (!r)
		r = config_load_env(&new, f);
	if (!r)
		r = args_apply_settings(args, &new, f);
	if (!r)
		r = config_check(&new, f);
	if (!r)
		*c = new;
	return r;
}

void args_help(void)
{
	fputs("usage: shardd [OPTION]...\n"
	      "\n"
	      "Owns the memory of sharded training state on this machine and serves trainers.\n"
	      "\n"
	      "  --config FILE      configuration file (default " DEFAULT_CONFIG ",\n"
	      "                     if there is one)\n"
	      "  --socket PATH      path of the socket (the key socket)\n"
	      "  --backend NAME     host, cuda or auto (the key backend)\n"
	      "  --http ADDRESS     HOST:PORT or unix:PATH of metrics and dashboard (the key "
	      "http)\n"
	      "  --set KEY=VALUE    set any key; may be repeated\n"
	      "  --check-config     check the configuration and exit\n"
	      "  --print-config     print the effective configuration and exit\n"
	      "  --example-config   print every key with help and default and exit\n"
	      "  --version          print the version and exit\n"
	      "  --help             print this and exit\n"
	      "\n"
	      "Each of these overrides the ones before it: the defaults, the file, environment\n"
	      "variables (SHARDD_ and the key in capitals, such as SHARDD_LOG_LEVEL), the options\n"
	      "in their order.\n"
	      "\n"
	      "Signals: SIGTERM and SIGINT stop the daemon when the trainers have left or\n"
	      "drain_timeout_ms is over; a second signal stops it at once. SIGHUP reads the\n"
	      "configuration again and reopens the log.\n"
	      "\n"
	      "Exit codes:\n"
	      "  0  stopped on request\n"
	      "  1  internal failure\n"
	      "  2  wrong configuration or arguments\n"
	      "  3  another daemon already serves the socket\n"
	      "  4  the socket cannot be created: its path or permissions\n"
	      "  5  the backend cannot be started\n"
	      "  6  one of these, and state of the previous daemon is kept for this one\n"
	      "  7  handed over as requested: start the next daemon, which has the jobs\n",
	      stdout);
}
