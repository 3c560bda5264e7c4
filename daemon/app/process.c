#include "app/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <malloc.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "config/args.h"
#include "core/check.h"
#include "core/cleanup.h"

/* The table takes 8 bytes of kernel memory for each. */
#define PROCESS_FD_TABLE 65536

static int process_fill_standard_fds(void)
{
	int fd;

	do {
		fd = open("/dev/null", O_RDWR);
		if (fd < 0)
			return -errno;
	} while (fd <= STDERR_FILENO);
	fd_close(fd);
	return 0;
}

/* The loop uses epoll, not select: large descriptor numbers are fine. */
static void process_raise_fd_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= limit.rlim_max)
		return;
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit); /* refused: the soft limit does */
}

/* The kernel's table of descriptors grows when a higher number is taken, and waits about 10 ms for all
 * threads then. Before there are threads it does not wait, and it never shrinks. */
static void process_widen_fd_table(void)
{
	struct rlimit limit;
	int most = PROCESS_FD_TABLE;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < PROCESS_FD_TABLE)
		most = (int)limit.rlim_cur;
	fd_close(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, most - 1)); /* refused: it grows later */
}

/* The allocator reserves 64 MiB of address space for each new thread, up to eight arenas per core.
 * If the address space is limited, all threads share two such arenas. */
static void process_save_addresses(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
		mallopt(M_ARENA_MAX, 2);
}

int process_prepare(void)
{
	int r = process_fill_standard_fds();

	if (r < 0)
		return r;
	signal(SIGPIPE, SIG_IGN);
	process_raise_fd_limit();
	process_widen_fd_table();
	process_save_addresses();
	return 0;
}

/* Set before the signal handlers that read them are installed. */
static volatile sig_atomic_t start_stopped; /* by which signal */
static const char *volatile start_sentence;
static struct sigaction start_old[3];
static const int start_signals[] = { SIGTERM, SIGINT, SIGALRM };

static void process_start_on_signal(int signum)
{
	start_stopped = signum;
	start_sentence = "startup did not end after SIGTERM or SIGINT";
	alarm(START_STOP_S);
}

/* Something that should have ended hangs. All we can do is say so and exit. */
static void process_start_on_alarm(int signum)
{
	const char *parts[] = { "shardd: ", start_sentence, "\n" };

	(void)signum;
	for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
		if (write(STDERR_FILENO, parts[i], strlen(parts[i])) < 0)
			break;
	_exit(EXIT_INTERNAL);
}

void process_start_begin(void)
{
	struct sigaction stop = { .sa_handler = process_start_on_signal, .sa_flags = SA_RESTART };
	struct sigaction late = { .sa_handler = process_start_on_alarm };

	start_stopped = 0;
	start_sentence = "startup hangs";
	for (size_t i = 0; i < ARRAY_SIZE(start_signals); i++)
		sigaction(start_signals[i], start_signals[i] == SIGALRM ? &late : &stop,
			  &start_old[i]);
}

void process_start_end(void)
{
	alarm(0);
	for (size_t i = 0; i < ARRAY_SIZE(start_signals); i++)
		sigaction(start_signals[i], &start_old[i], NULL);
	if (start_stopped)
		raise(start_stopped);
}

void process_deadline(const char *sentence)
{
	if (!start_stopped)
		start_sentence = sentence;
	alarm(START_STOP_S);
}

void process_deadline_over(void)
{
	if (!start_stopped)
		alarm(0);
}

uint64_t process_watchdog_us(void)
{
	uint64_t us = 0;

	return sd_watchdog_enabled(0, &us) > 0 ? us : 0;
}

void process_notify_ready(void)
{
	sd_notify(0, "READY=1");
}

/* Newer service managers need the time to tell this reload from another. */
void process_notify_reloading(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64,
		   (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u);
}

void process_notify_stopping(void)
{
	sd_notify(0, "STOPPING=1");
}

void process_notify_for_good(void)
{
	sd_notify(0, "X_SHARDD_FOR_GOOD=1");
}

void process_notify_alive(void)
{
	sd_notify(0, "WATCHDOG=1");
}

void process_notify_status(const char *text)
{
	sd_notifyf(0, "STATUS=%s", text);
}
