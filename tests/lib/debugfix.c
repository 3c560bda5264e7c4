#include "debugfix.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { TEXT = 4096 };

struct told *told_new(void)
{
	struct told *told = trainer_shared(sizeof(*told));

	told->fd = memfd_create("stderr", MFD_CLOEXEC);
	cr_assert_geq(told->fd, 0);
	return told;
}

void told_free(struct told *told)
{
	close(told->fd);
	munmap(told, sizeof(*told));
}

void debugfix_host_only(void)
{
	if (!train_on_host())
		cr_skip_test("memory of a GPU cannot be protected");
}

void debugfix_delete(const char *job)
{
	const char *const args[] = { "job", "delete", "--force", job, NULL };

	json_decref(daemonfix_ctl(&trainfix, args));
}

const char *told_text(const struct told *told)
{
	static char text[TEXT];
	ssize_t n = pread(told->fd, text, sizeof(text) - 1, 0);

	cr_assert_geq(n, 0);
	text[n] = '\0';
	return text;
}

bool told_nothing(const struct told *told)
{
	return !strstr(told_text(told), "shardd:");
}

void debugfix_on(const struct told *told)
{
	const struct rlimit none = { 0, 0 };

	setrlimit(RLIMIT_CORE, &none);
	signal(SIGSEGV, SIG_DFL); /* not the report of a sanitizer */
	TRAINER_CHECK(setenv("SHARDD_DEBUG", "1", 1) == 0);
	if (told->no_ring)
		TRAINER_CHECK(setenv("SHARDD_RING", "off", 1) == 0);
	TRAINER_CHECK(dup2(told->fd, STDERR_FILENO) == STDERR_FILENO);
}

shardd_client *debugfix_join(const struct trainer *t)
{
	debugfix_on(t->arg);
	return train_join(t);
}

void debugfix_read(struct told *told, const void *at)
{
	volatile char byte;

	told->at = (void *)at;
	byte = *(const volatile char *)at;
	(void)byte;
	told->survived = true;
}

void debugfix_clear(void *at, size_t bytes)
{
	memset(at, 0, bytes);
}

void debugfix_write(struct told *told, void *at)
{
	told->at = at;
	*(volatile char *)at = 1;
	told->survived = true;
}

void debugfix_run_quietly(uint32_t world, trainer_fn fn)
{
	struct told *told = told_new();

	trainfix_run(world, fn, told);
	cr_assert(told_nothing(told), "%s", told_text(told));
	told_free(told);
}
