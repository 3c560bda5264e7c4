#include "app/service.h"

#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <uv.h>

#include "app/process.h"
#include "app/server.h"
#include "core/check.h"
#include "core/env_names.h"
#include "core/log.h"
#include "core/log_journal.h"

#define STATUS_MS 5000

struct service {
	uv_loop_t loop;
	const struct args *args; /* borrowed */
	struct config started;   /* keys that cannot change are compared with these */
	struct config config;
	struct server *server; /* ends itself: see server_stop */
	uv_signal_t on_term, on_int, on_hup, on_usr1, on_usr2;
	uv_timer_t status, watchdog;
	char last_status[256];
	bool stopping;
	bool hands_over;
};

struct log_options service_log_options(const struct config *c)
{
	return (struct log_options){ .level = (enum log_level)log_level_parse(c->log.level),
				     .json = strcmp(c->log.format, "json") == 0,
				     .path = c->log.file,
				     .journal = log_journal_socket() };
}

static void service_send_status(uv_timer_t *timer)
{
	struct service *d = timer->data;
	char now[sizeof(d->last_status)] = "";

	if (!d->server)
		return; /* devices are being started */
	server_summary(d->server, now, sizeof(now));
	if (strcmp(now, d->last_status) == 0)
		return;
	memcpy(d->last_status, now, sizeof(now));
	process_notify_status(now);
}

/* No watchdog message while the gRPC thread (or the loop) hangs: then the service manager ends and
 * restarts us. */
static void service_send_alive(uv_timer_t *timer)
{
	struct service *d = timer->data;

	if (d->server && server_healthy(d->server))
		process_notify_alive();
}

/* Only the return is left: a signal that arrives now would only change the exit status, and lose
 * the last lines of the log. */
static void service_close_signal(uv_signal_t *handle)
{
	int signum = handle->signum;

	uv_close((uv_handle_t *)handle, NULL);
	signal(signum, SIG_IGN);
}

static void service_close_handles(struct service *d)
{
	service_close_signal(&d->on_term);
	service_close_signal(&d->on_int);
	service_close_signal(&d->on_hup);
	service_close_signal(&d->on_usr1);
	service_close_signal(&d->on_usr2);
	uv_close((uv_handle_t *)&d->status, NULL);
	uv_close((uv_handle_t *)&d->watchdog, NULL);
}

static void service_on_stopped(void *userdata)
{
	struct service *d = userdata;

	d->server = NULL;
	service_close_handles(d);
}

static void service_on_stop_signal(uv_signal_t *handle, int signum)
{
	struct service *d = handle->data;

	log_info("server", "%s signal=%d drain_timeout_ms=%u",
		 d->stopping ? "stopping at once" : "stopping", signum, d->config.drain_timeout_ms);
	if (!d->stopping)
		process_notify_stopping();
	d->stopping = true;
	if (!d->server)
		return; /* devices are being started: the daemon stops after that */
	server_stop(d->server, signum == SIGUSR1, d->config.drain_timeout_ms, service_on_stopped,
		    d);
}

/* The exit code asks the service manager, or the holder, for the next daemon. */
static void service_on_hand_over_signal(uv_signal_t *handle, int signum)
{
	struct service *d = handle->data;

	if (d->stopping || !d->server)
		return;
	if (!server_can_hand_over(d->server)) {
		log_error("server", "no handover: the daemon was started without a descriptor "
				    "store, so its jobs would end with it");
		return;
	}
	d->hands_over = true;
	service_on_stop_signal(handle, signum);
}

static void service_apply_config(struct service *d, const struct config *new)
{
	struct log_options options = service_log_options(new);
	char fixed[512];
	int r = log_reopen(&options);

	if (r < 0)
		log_error("server",
			  "log file not reopened, the old one stays in use log_file=\"%s\" "
			  "error=\"%s\"",
			  new->log.file, strerror(-r));
	if (config_fixed_changes(&d->started, new, fixed, sizeof(fixed)) > 0)
		log_warn("server", "these keys need a restart to change keys=%s", fixed);
	d->config = *new;
	server_reconfigure(d->server, new);
	log_info("server", "configuration reread");
}

static void service_on_reload_signal(uv_signal_t *handle, int signum)
{
	struct service *d = handle->data;
	struct fault f = FAULT_NULL;
	struct config new;

	(void)signum;
	if (d->stopping || !d->server)
		return;
	process_notify_reloading();
	if (args_config(d->args, &new, &f) != 0)
		log_error("server",
			  "configuration not reread, the old one stays in effect key=%s why=\"%s\"",
			  *f.field ? f.field : "none", f.text);
	else
		service_apply_config(d, &new);
	process_notify_ready();
}

static void service_add_signal(struct service *d, uv_signal_t *handle, uv_signal_cb fn, int signum)
{
	CHECK(uv_signal_init(&d->loop, handle) == 0);
	handle->data = d;
	CHECK(uv_signal_start(handle, fn, signum) == 0);
}

static void service_add_timer(struct service *d, uv_timer_t *handle, uv_timer_cb fn, uint64_t ms)
{
	CHECK(uv_timer_init(&d->loop, handle) == 0);
	handle->data = d;
	if (ms)
		CHECK(uv_timer_start(handle, fn, ms, ms) == 0);
}

static void service_add_handles(struct service *d)
{
	uint64_t watchdog_us = process_watchdog_us();
	sigset_t usr1;

	service_add_signal(d, &d->on_term, service_on_stop_signal, SIGTERM);
	service_add_signal(d, &d->on_int, service_on_stop_signal, SIGINT);
	service_add_signal(d, &d->on_hup, service_on_reload_signal, SIGHUP);
	/* from shardd-holder, which ends too, or a Shutdown call: no successor follows */
	service_add_signal(d, &d->on_usr1, service_on_stop_signal, SIGUSR1);
	/* from ourselves: a HandOver call */
	service_add_signal(d, &d->on_usr2, service_on_hand_over_signal, SIGUSR2);
	sigemptyset(&usr1);
	sigaddset(&usr1, SIGUSR1);
	pthread_sigmask(SIG_UNBLOCK, &usr1, NULL); /* shardd-holder has blocked it */
	service_add_timer(d, &d->status, service_send_status, STATUS_MS);
	/* half of it; rounded up, so that an interval below 2 ms still means a timer */
	service_add_timer(d, &d->watchdog, service_send_alive, (watchdog_us / 2 + 999) / 1000);
}

static int service_exit_code_of(const struct fault *f)
{
	if (f->code == FAULT_STATE)
		return EXIT_IN_USE;
	if (strcmp(f->field, "journal") == 0)
		return EXIT_STATE;
	if (strncmp(f->field, "socket", 6) == 0)
		return EXIT_SOCKET;
	if (strcmp(f->field, "backend") == 0)
		return EXIT_BACKEND;
	if (f->code == FAULT_INVALID)
		return EXIT_CONFIG;
	return strcmp(f->field, "engine") == 0 ? EXIT_BACKEND : EXIT_INTERNAL;
}

static void service_on_started(struct service *d, bool inherited)
{
	log_info("server", "ready version=%s socket=\"%s\" inherited=%s", SHARDD_VERSION,
		 d->config.socket, inherited ? "yes" : "no");
	service_send_status(&d->status);
	process_notify_ready();
}

static int service_on_refused(struct service *d, const struct fault *f)
{
	int code = service_exit_code_of(f);

	log_error("server", "cannot start: %s exit_code=%d", f->text, code);
	process_notify_status(f->text);
	service_close_handles(d);
	return code;
}

static void service_warn_unknown(const char *name, const char *nearest, void *userdata)
{
	(void)userdata;
	log_warn("server", "unknown environment variable name=%.64s nearest=%s", name,
		 nearest ? nearest : "none");
}

int service_run(const struct args *args, const struct config *config, struct inherited *in,
		struct fault *f)
{
	struct service d = { .args = args, .started = *config, .config = *config };
	bool inherited = in->socket >= 0;
	int code = EXIT_STOPPED;

	CHECK(uv_loop_init(&d.loop) == 0);
	service_add_handles(&d);
	env_names_unknown(service_warn_unknown, NULL);
	process_start_begin();
	if (server_new(&d.loop, config, in, &d.server, f) == 0)
		service_on_started(&d, inherited);
	else
		code = service_on_refused(&d, f);
	process_start_end();
	if (d.server && d.stopping)
		server_stop(d.server, false, 0, service_on_stopped, &d);
	uv_run(&d.loop, UV_RUN_DEFAULT);
	CHECK(!d.server);
	CHECK(uv_loop_close(&d.loop) == 0);
	return d.hands_over && code == EXIT_STOPPED ? EXIT_HANDED_OVER : code;
}
