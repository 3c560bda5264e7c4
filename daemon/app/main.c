/* shardd: the arguments select the action, the exit code tells how it ended. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "app/inherited.h"
#include "app/process.h"
#include "app/server.h"
#include "app/refuse.h"
#include "app/service.h"
#include "backend/backend_impl.h"
#include "config/args.h"
#include "config/config.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "core/log_format.h"
#include "core/log_journal.h"
#include "core/threads.h"

struct shardd {
	struct args args;
	struct config config;
};

static int main_complain(struct fault *f)
{
	log_clean(f->text);
	fprintf(stderr, "%sshardd: %s\n",
		log_journal_socket() ? log_format_priority(LOG_ERROR) : "", f->text);
	return EXIT_CONFIG;
}

static int main_complain_of_log(const struct shardd *d, int error, struct fault *f)
{
	fault_set(f, FAULT_INVALID, "log_file", "log_file '%s' cannot be opened: %s",
		  d->config.log.file, strerror(-error));
	return main_complain(f);
}

/* What reading the configuration does not tell. */
static int main_check(const struct shardd *d)
{
	struct fault f = FAULT_NULL;
	int r = log_check_path(d->config.log.file);

	if (r < 0)
		return main_complain_of_log(d, r, &f);
	puts("configuration is valid");
	return EXIT_STOPPED;
}

/* With state of a previous daemon, this one is started again, and its clients wait. */
static void main_tell_clients(struct inherited *in, const struct fault *why,
			      const struct config *config)
{
	int fd = in->socket;

	if (fd < 0 || !why->code || inherited_has_state(in))
		return;
	in->socket = -1;
	refuse_clients(fd, why, config);
}

/* The configuration is wrong. */
static int main_refuse(struct fault *why)
{
	struct fault f = FAULT_NULL;
	struct inherited in;
	int code = main_complain(why);

	if (inherited_take(&in, &f) == 0)
		main_tell_clients(&in, why, NULL);
	inherited_deinit(&in);
	return code;
}

static int main_run(struct shardd *d)
{
	struct log_options options = service_log_options(&d->config);
	struct fault f = FAULT_NULL;
	struct inherited in;
	int code, r;

	if (inherited_take(&in, &f) != 0) {
		inherited_deinit(&in);
		return main_complain(&f);
	}
	if (threads_probe(server_threads(&d->config), &f) != 0) {
		inherited_deinit(&in);
		main_complain(&f);
		return EXIT_INTERNAL;
	}
	r = log_open(&options);
	if (r < 0) {
		code = main_complain_of_log(d, r, &f);
		main_tell_clients(&in, &f, &d->config);
		inherited_deinit(&in);
		return code;
	}
	code = service_run(&d->args, &d->config, &in, &f);
	main_tell_clients(&in, &f, &d->config);
	inherited_deinit(&in);
	if (code == EXIT_STOPPED || code == EXIT_HANDED_OVER)
		log_info("server", "stopped");
	log_close();
	return code;
}

/* Actions that need no configuration. Return: whether the action is done. */
static bool main_print_text(const struct args *args)
{
	if (args->action == ARGS_HELP)
		args_help();
	else if (args->action == ARGS_VERSION)
		puts("shardd " SHARDD_VERSION);
	else if (args->action == ARGS_EXAMPLE_CONFIG)
		config_write_example(stdout);
	else
		return false;
	return true;
}

static int main_act(struct shardd *d)
{
	struct fault f = FAULT_NULL;

	if (main_print_text(&d->args))
		return EXIT_STOPPED;
	if (args_config(&d->args, &d->config, &f) != 0)
		return d->args.action == ARGS_RUN ? main_refuse(&f) : main_complain(&f);
	if (d->args.action == ARGS_PRINT_CONFIG)
		config_write(&d->config, stdout);
	else if (d->args.action == ARGS_CHECK_CONFIG)
		return main_check(d);
	else
		return main_run(d);
	return EXIT_STOPPED;
}

/* The service manager, or the holder, tries again for as long as it has the state. Tries that follow
 * each other at once would fill the log. */
static void main_pause(void)
{
	fputs("shardd: the state of the previous daemon stays in its store; start again in 2 s\n",
	      stderr);
	sleep(2);
}

int main(int argc, char **argv)
{
	static struct shardd d;
	struct fault f = FAULT_NULL;
	bool left = inherited_is_announced();
	int code;

	/* the daemon starts itself with this argument, to measure how two processes share a GPU */
	if (argc == 3 && strcmp(argv[1], "--gpu-overlap-child") == 0)
		return backend_cuda_overlap_child(argv[2]);
	code = process_prepare();

	if (code < 0) {
		fprintf(stderr, "shardd: /dev/null cannot be opened: %s\n", strerror(-code));
		return EXIT_INTERNAL;
	}
	code = args_parse(&d.args, argc, argv, &f) ? main_complain(&f) : main_act(&d);
	args_deinit(&d.args);
	if (left && code != EXIT_STOPPED && code != EXIT_HANDED_OVER) {
		main_pause();
		code = EXIT_STATE;
	}
	if (fflush(stdout) != 0 || ferror(stdout))
		return EXIT_INTERNAL;
	return code;
}
