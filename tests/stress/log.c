/* Many threads log while the output is reopened, for the thread sanitizer: every line
 * is written or counted as dropped. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/check.h"
#include "core/log.h"

#define THREADS 4
#define EACH    20000
#define REOPENS 50

static void *log_many(void *arg)
{
	for (int i = 0; i < EACH; i++)
		log_info("stress", "line=%d of=%p", i, arg);
	return NULL;
}

static uint64_t count_lines(const char *path)
{
	FILE *in = fopen(path, "r");
	uint64_t n = 0;
	int c;

	CHECK(in);
	while ((c = getc(in)) != EOF)
		n += c == '\n';
	fclose(in);
	return n;
}

int main(void)
{
	char path[] = "/tmp/shardd-stress-log-XXXXXX";
	int fd = mkstemp(path);
	struct log_options options = { .level = LOG_INFO, .path = path };
	pthread_t threads[THREADS];
	uint64_t written;

	CHECK(fd >= 0);
	close(fd);
	CHECK(log_open(&options) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, log_many, NULL) == 0);
	for (int i = 0; i < REOPENS; i++) {
		options.json = i % 2;
		CHECK(log_reopen(&options) == 0);
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	log_close();
	written = count_lines(path);
	unlink(path);
	CHECK(written > 0);
	CHECK(written + log_dropped() == (uint64_t)THREADS * EACH);
	printf("log ok written=%llu dropped=%llu\n", (unsigned long long)written,
	       (unsigned long long)log_dropped());
	return 0;
}
