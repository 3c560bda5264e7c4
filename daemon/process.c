#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "core/cleanup.h"

static int fill_standard_fds(void)
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

/* The loop uses epoll, no select: large numbers are fine. */
static void raise_fd_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= limit.rlim_max)
		return;
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit); /* refused: the soft limit does */
}

int process_prepare(void)
{
	int r = fill_standard_fds();

	if (r < 0)
		return r;
	signal(SIGPIPE, SIG_IGN);
	raise_fd_limit();
	return 0;
}

int process_inherited_socket(int *ret_fd, struct fault *f)
{
	int n = sd_listen_fds(1);

	if (n < 0)
		return fault_errno(f, n, "LISTEN_FDS");
	if (n > 1)
		return fault_set(f, FAULT_INVALID, "LISTEN_FDS",
				 "the service manager passed %d descriptors; it must be exactly "
				 "one listening Unix stream socket",
				 n);
	if (n == 1 && sd_is_socket(SD_LISTEN_FDS_START, AF_UNIX, SOCK_STREAM, 1) <= 0)
		return fault_set(f, FAULT_INVALID, "LISTEN_FDS",
				 "the descriptor the service manager passed is no listening Unix "
				 "stream socket");
	*ret_fd = n == 1 ? SD_LISTEN_FDS_START : -1;
	return 0;
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

/* The time is what newer service managers need to tell this reload from another. */
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

void process_notify_alive(void)
{
	sd_notify(0, "WATCHDOG=1");
}

void process_notify_status(const char *text)
{
	sd_notifyf(0, "STATUS=%s", text);
}
