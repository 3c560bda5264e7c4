#include "gloofix.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "fdcheck.h"

/* ------------------------------------------------------------------------ the store */

static char folder[64];

static void gloofix_flatten(char *key)
{
	for (; *key; key++)
		*key = *key == '/' ? '_' : *key;
}

int gloofix_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	char part[168], path[160];
	FILE *f;

	(void)userdata;
	snprintf(path, sizeof(path), "%s/%s", folder, key);
	gloofix_flatten(path + strlen(folder) + 1);
	snprintf(part, sizeof(part), "%s.part", path);
	f = fopen(part, "we");
	if (!f)
		return -errno;
	fwrite(value, 1, bytes, f);
	fclose(f);
	return rename(part, path) ? -errno : 0;
}

long gloofix_get(void *userdata, const char *key, unsigned timeout_ms, void *value, size_t capacity)
{
	const struct timespec pause = { 0, 2000000 };
	char path[160];
	long got;

	(void)userdata;
	snprintf(path, sizeof(path), "%s/%s", folder, key);
	gloofix_flatten(path + strlen(folder) + 1);
	for (unsigned ms = 0; ms <= timeout_ms; ms += 2) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		if (fd >= 0) {
			got = read(fd, value, capacity);
			close(fd);
			return got;
		}
		nanosleep(&pause, NULL);
	}
	return -ETIMEDOUT;
}

/* One file for each member. */
int gloofix_exchange(void *userdata, struct comm_exchange *x, unsigned timeout_ms)
{
	const double end = gloofix_now_s() + timeout_ms / 1e3;
	char key[160];

	snprintf(key, sizeof(key), "%s/%u", x->key, x->member);
	if (gloofix_set(userdata, key, x->value, x->bytes) < 0)
		return -EIO;
	for (unsigned i = 0; i < x->size; i++) {
		const double left = end - gloofix_now_s();
		long got;

		snprintf(key, sizeof(key), "%s/%u", x->key, i);
		got = gloofix_get(userdata, key, left > 0 ? (unsigned)(left * 1e3) : 0,
				  (char *)x->all + i * x->bytes, x->bytes);
		x->missing = (int)i;
		if (got != (long)x->bytes)
			return got < 0 ? (int)got : -EPROTO;
	}
	return 0;
}

const struct comm_store gloofix_store = { .set = gloofix_set,
					  .get = gloofix_get,
					  .exchange = gloofix_exchange };

static int gloofix_remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

void gloofix_make_folder(void)
{
	snprintf(folder, sizeof(folder), "/tmp/test_gloo.XXXXXX");
	cr_assert_not_null(mkdtemp(folder));
}

void gloofix_remove_folder(void)
{
	nftw(folder, gloofix_remove_one, 4, FTW_DEPTH | FTW_PHYS);
}

/* ------------------------------------------------------------------------ one member */

void gloofix_on_ready(void *userdata, struct comm *comm, int status)
{
	struct gloofix *m = userdata;

	m->c = comm;
	m->status = status;
	m->ready = true;
}

static void gloofix_on_failed(void *userdata, struct comm *comm, const char *why)
{
	struct gloofix *m = userdata;

	(void)comm;
	EXPECT(*why);
	snprintf(m->why, sizeof(m->why), "%s", why);
	m->failed = true;
	m->n_failed++;
}

unsigned gloofix_reason_ms[GLOOFIX_MAX];

void gloofix_begin(struct gloofix *m, unsigned rank, unsigned size)
{
	const struct gloo_options options = { .address = "127.0.0.1",
					      .reason_ms = gloofix_reason_ms[rank] };

	signal(SIGPIPE, SIG_IGN);
	*m = (struct gloofix){ .rank = rank, .size = size, .descriptors = fdcheck_count() };
	looprun_init(&m->run);
	EXPECT(backend_fake_new(&m->run.queue, 0, &m->b) == 0);
	EXPECT(engine_gloo_new(&m->run.queue, &options, &m->e) == 0);
}

void gloofix_ask(struct gloofix *m, const char *prefix, unsigned rank, unsigned size,
		 unsigned connect_ms)
{
	struct comm_group group = { .size = size,
				    .member = rank,
				    .prefix = prefix,
				    .store = &gloofix_store,
				    .connect_ms = connect_ms };
	struct comm_options options = { .name = prefix,
					.devices = &m->b,
					.n_devices = 1,
					.group = &group,
					.ready = gloofix_on_ready,
					.failed = gloofix_on_failed,
					.userdata = m };

	m->ready = false;
	EXPECT(engine_comm_new(m->e, &options) == 0);
	EXPECT(!m->ready);
}

struct comm *gloofix_meet(struct gloofix *m, const char *prefix, unsigned rank, unsigned size)
{
	gloofix_ask(m, prefix, rank, size, 20000);
	looprun_flag(&m->run, &m->ready, 30);
	if (!m->c)
		fprintf(stderr, "%s: %s\n", prefix, engine_why(m->e));
	EXPECT(m->c && m->status == 0 && m->c->size == size && m->c->member == rank);
	return m->c;
}

static bool gloofix_has_left(void *arg)
{
	return engine_leaving(((struct gloofix *)arg)->e) == 0;
}

void gloofix_end(struct gloofix *m)
{
	if (m->e)
		looprun_until(&m->run, gloofix_has_left, m, 10);
	m->e = engine_close(m->e);
	m->b = backend_close(m->b);
	looprun_deinit(&m->run);
	EXPECT(fdcheck_count() == m->descriptors);
}

static void gloofix_on_done(struct comm_op *op, int status)
{
	struct waited *w = CONTAINER_OF(op, struct waited, op);

	EXPECT(!w->done);
	w->done = true;
	w->status = status;
}

struct waited gloofix_waited(void)
{
	return (struct waited){ .op = { .done = gloofix_on_done } };
}

void gloofix_expect(struct gloofix *m, struct waited *w, int status)
{
	looprun_flag(&m->run, &w->done, 20);
	if (w->status != status)
		fprintf(stderr, "member %u: status %d\n", m->rank, w->status);
	EXPECT(w->status == status);
}

/* --------------------------------------------------------------------------- processes */

pid_t gloofix_start(gloofix_scene scene, unsigned rank, unsigned size)
{
	pid_t pid = fork();

	if (pid == 0) {
		struct gloofix m;

		looprun_in_child();
		gloofix_begin(&m, rank, size);
		scene(&m);
		gloofix_end(&m);
		_exit(0);
	}
	return pid;
}

void gloofix_join(pid_t pid, bool killed)
{
	int status;

	cr_assert_eq(waitpid(pid, &status, 0), pid);
	if (killed)
		cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	else
		cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
}

void gloofix_play(gloofix_scene scene, unsigned size, bool killed)
{
	pid_t pids[GLOOFIX_MAX];

	gloofix_make_folder();
	for (unsigned i = 0; i < size; i++)
		pids[i] = gloofix_start(scene, i, size);
	for (unsigned i = 0; i < size; i++)
		gloofix_join(pids[i], killed && i == size - 1);
	gloofix_remove_folder();
}

double gloofix_now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void gloofix_sync(struct gloofix *m)
{
	char key[32], value[1];

	m->syncs++;
	snprintf(key, sizeof(key), "met/%u/%u", m->syncs, m->rank);
	EXPECT(gloofix_set(NULL, key, "x", 1) == 0);
	for (unsigned i = 0; i < m->size; i++) {
		snprintf(key, sizeof(key), "met/%u/%u", m->syncs, i);
		EXPECT(gloofix_get(NULL, key, 20000, value, sizeof(value)) == 1);
	}
}
