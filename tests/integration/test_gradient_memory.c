/*
 * Gradient and other buffers over deaths of the daemon, with shardd-holder: a process has the same
 * memory again, and no process gets what another one can still write to.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "fdcheck.h"

static void begin(void)
{
	fdcheck_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void end(void)
{
	if (trainfix.pid)
		daemonfix_stop(&trainfix);
	fdcheck_end();
}

TestSuite(gradient_memory, .init = begin, .fini = end, .timeout = 120);

enum { UNITS = 4, ELEMENTS = 300000, WORLD = 2, ROUNDS = 5, LARGE = 2 << 20 };

/* Mappings of memory of the daemon, their bytes, and the sum of the numbers of the files of buffers. */
struct held {
	unsigned mappings;
	uint64_t bytes, files;
};

static struct held held(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	unsigned long from, to, inode;
	struct held h = { 0 };
	char line[512];

	while (f && fgets(line, sizeof(line), f)) {
		if (!strstr(line, "memfd:shardd (") ||
		    sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) != 3)
			continue;
		h.mappings++;
		h.bytes += to - from;
		if (to - from < LARGE) /* the ring is another one each time */
			h.files += inode;
	}
	TRAINER_CHECK(f && fclose(f) == 0);
	return h;
}

static uint64_t status_number(const char *key)
{
	static const char *const args[] = { "status", NULL };
	json_t *s = daemonfix_ctl(&trainfix, args);
	uint64_t n = (uint64_t)json_integer_value(json_object_get(s, key));

	json_decref(s);
	return n;
}

/* ------------------------------------------------------------- the same process */

struct play {
	stage at[WORLD], go;
	pid_t pids[ROUNDS + 1]; /* of trainer 0 */
	bool same[WORLD];
};

/* All buffers at once, as a model whose gradients are all there; written by the trainer. */
static void take(shardd_client *c, const shardd_unit *units, float **at, float value)
{
	void *data;

	for (unsigned i = 0; i < UNITS; i++) {
		TRAIN_OK(shardd_gradient(c, units[i], &data, &train_err));
		at[i] = data;
		for (unsigned k = 0; k < ELEMENTS; k++)
			at[i][k] = value;
	}
}

static void reduce(shardd_client *c, const shardd_unit *units)
{
	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_reduce(c, units[i], &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
}

static void enter(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	const struct shardd_unit_spec like = { .size = sizeof(like),
					       .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	char name[16];

	train_join_as(c, t, SHARDD_KEEP);
	for (unsigned i = 0; i < UNITS; i++) {
		snprintf(name, sizeof(name), "u%u", i);
		units[i] = train_register(c, name, ELEMENTS, &like).unit;
	}
}

/* Taken in another order, buffers of one pool may change places. */
static bool all_in(float *const *now, float *const *before)
{
	for (unsigned i = 0; i < UNITS; i++) {
		unsigned k = 0;

		while (k < UNITS && now[i] != before[k])
			k++;
		if (k == UNITS)
			return false;
	}
	return true;
}

static int comes_back(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	float *before[UNITS], *now[UNITS];
	shardd_unit units[UNITS];
	struct held h;

	enter(c, t, units);
	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_init_seed(c, units[i], 1, &train_err));
	take(c, units, before, 1);
	reduce(c, units);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	h = held();
	p->same[t->rank] = true;
	for (unsigned round = 1; round <= ROUNDS; round++) {
		take(c, units, now, (float)round);
		stage_set(&p->at[t->rank], round);
		TRAINER_AWAIT(atomic_load(&p->go) >= round, 60);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		enter(c, t, units);
		take(c, units, now, 1);
		p->same[t->rank] = p->same[t->rank] && all_in(now, before);
		reduce(c, units);
		TRAIN_OK(shardd_commit(c, round + 1, NULL, 0, &train_err));
		TRAINER_CHECK(held().mappings == h.mappings && held().bytes == h.bytes &&
			      held().files == h.files);
	}
	stage_set(&p->at[t->rank], ROUNDS + 1);
	TRAINER_AWAIT(atomic_load(&p->go) == ROUNDS + 1, 60);
	train_leave(c);
	return 0;
}

static bool both_at(struct play *p, unsigned round)
{
	return atomic_load(&p->at[0]) >= round && atomic_load(&p->at[1]) >= round;
}

/* Neither the trainers nor the holder nor the accounts have more than before. */
Test(gradient_memory, a_process_has_it_again_after_each_death)
{
	struct play *p = trainer_shared(sizeof(*p));
	uint64_t bytes = 0, stored = 0;
	pid_t pids[WORLD];

	if (!train_on_host()) {
		train_not_here("memory of gradients that outlives the daemon");
		return;
	}
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, "job", r, WORLD, comes_back, p);
	for (unsigned round = 1; round <= ROUNDS; round++) {
		AWAIT(both_at(p, round), 60);
		if (round == 1) {
			bytes = daemonfix_bytes(&trainfix);
			stored = status_number("store_used");
		}
		cr_expect_eq(daemonfix_bytes(&trainfix), bytes, "round %u", round);
		cr_expect_eq(status_number("store_used"), stored, "round %u", round);
		cr_expect_eq(fail_quarantined(&trainfix), 0);
		daemonfix_replace_daemon(&trainfix, SIGKILL);
		stage_set(&p->go, round);
	}
	AWAIT(both_at(p, ROUNDS + 1), 60);
	cr_expect_eq(daemonfix_bytes(&trainfix), bytes);
	cr_expect_eq(status_number("store_used"), stored);
	cr_expect_eq(status_number("store_left_out"), 0);
	stage_set(&p->go, ROUNDS + 1);
	for (unsigned r = 0; r < WORLD; r++) {
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
		cr_expect(p->same[r], "rank %u has its buffers where they were", r);
	}
	AWAIT(status_number("store_used") < stored, 20);
}

/* ------------------------------------------------------------- one of them dies, too */

struct both {
	stage at[WORLD], go;
};

/* Rank 0 stays for all rounds; rank 1 is another process in each. */
static int stays_or_dies(const struct trainer *t)
{
	struct both *b = t->arg;
	shardd_client *c = train_connect(t);
	unsigned round = atomic_load(&b->go);
	shardd_unit units[UNITS];
	float *at[UNITS];

	for (;; round++) {
		int rc;

		enter(c, t, units);
		for (unsigned i = 0; round == 0 && i < UNITS; i++)
			TRAIN_OK(shardd_init_seed(c, units[i], 1, &train_err));
		take(c, units, at, 1);
		stage_set(&b->at[t->rank], round + 1);
		TRAINER_AWAIT(atomic_load(&b->go) > round, 60);
		if (round == ROUNDS)
			break;
		do /* until the rank that dies has died */
			rc = shardd_barrier(c, SHARDD_WORLD, &train_err);
		while (rc == 0);
		TRAINER_CHECK(rc == -SHARDD_ABORTED);
	}
	train_leave(c);
	return 0;
}

/* Descriptors of memory that the daemon has. */
static unsigned count_memory(void)
{
	pid_t daemon = daemonfix_daemon(&trainfix);
	char path[64], to[64];
	unsigned n = 0;

	for (int fd = 0; fd < 256; fd++) {
		ssize_t bytes;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)daemon, fd);
		bytes = readlink(path, to, sizeof(to) - 1);
		to[bytes < 0 ? 0 : bytes] = 0;
		n += strncmp(to, "/memfd:shardd (", 15) == 0;
	}
	return n;
}

Test(gradient_memory, nothing_is_left_of_a_rank_that_died_with_the_daemon)
{
	static const char *const delete[] = { "job", "delete", "job", NULL };
	struct both *b = trainer_shared(sizeof(*b));
	char out[512];
	pid_t pids[WORLD];

	if (!train_on_host()) {
		train_not_here("memory of gradients that outlives the daemon");
		return;
	}
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, "job", r, WORLD, stays_or_dies, b);
	for (unsigned round = 1; round <= ROUNDS; round++) {
		AWAIT(atomic_load(&b->at[0]) == round && atomic_load(&b->at[1]) == round, 60);
		kill(pids[1], SIGKILL);
		daemonfix_replace_daemon(&trainfix, SIGKILL);
		trainer_wait(pids[1], 60);
		stage_set(&b->go, round);
		pids[1] = trainer_start(&trainfix, "job", 1, WORLD, stays_or_dies, b);
	}
	AWAIT(atomic_load(&b->at[0]) == ROUNDS + 1 && atomic_load(&b->at[1]) == ROUNDS + 1, 60);
	stage_set(&b->go, ROUNDS + 1);
	for (unsigned r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, delete, out, sizeof(out)), 0, "%s", out);
	AWAIT(daemonfix_bytes(&trainfix) == 0, 20);
	AWAIT(count_memory() == 0, 20);
	AWAIT(status_number("store_used") == 4, 20); /* the journal, the redo file, the history */
}

/* ------------------------------------------------------------- another process */

struct heirs {
	stage holds, go, has, written, read, end;
};

static void fill(uint32_t *at, uint32_t value)
{
	for (unsigned i = 0; i < ELEMENTS; i++)
		at[i] = value;
}

/* It keeps its mapping and does not come back. */
static int keeps_its_buffer(const struct trainer *t)
{
	struct heirs *h = t->arg;
	shardd_client *c;
	shardd_unit u;
	void *g;

	setenv("SHARDD_RECONNECT_MS", "0", 1);
	c = train_connect(t);
	train_join_as(c, t, SHARDD_KEEP);
	u = train_zero_unit(c, "u", ELEMENTS, NULL);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	TRAIN_OK(shardd_gradient(c, u, &g, &train_err));
	fill(g, 0x01010101u);
	stage_set(&h->holds, 1);
	TRAINER_AWAIT(atomic_load(&h->has) == 1, 60);
	fill(g, UINT32_MAX); /* into what is quarantined */
	stage_set(&h->written, 1);
	TRAINER_AWAIT(atomic_load(&h->end) == 1, 60);
	_exit(0);
}

static int takes_its_place(const struct trainer *t)
{
	struct heirs *h = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit u;
	void *g;

	train_join_as(c, t, SHARDD_KEEP);
	u = train_register(c, "u", ELEMENTS, NULL).unit;
	TRAIN_OK(shardd_gradient(c, u, &g, &train_err));
	for (unsigned i = 0; i < ELEMENTS; i++)
		TRAINER_CHECK(((const uint32_t *)g)[i] !=
			      0x01010101u); /* what the other one wrote */
	fill(g, 0);
	stage_set(&h->has, 1);
	TRAINER_AWAIT(atomic_load(&h->written) == 1, 60);
	for (unsigned i = 0; i < ELEMENTS; i++)
		TRAINER_CHECK(((const uint32_t *)g)[i] == 0);
	stage_set(&h->read, 1);
	TRAINER_AWAIT(atomic_load(&h->go) == 1, 60);
	shardd_close(c);
	return 0;
}

Test(gradient_memory, a_successor_gets_none_of_a_process_that_lives)
{
	struct heirs *h = trainer_shared(sizeof(*h));
	pid_t first, second;
	uint64_t before;

	if (!train_on_host()) {
		train_not_here("memory of gradients that outlives the daemon");
		return;
	}
	first = trainer_start(&trainfix, "job", 0, 1, keeps_its_buffer, h);
	AWAIT(atomic_load(&h->holds) == 1, 60);
	before = daemonfix_bytes(&trainfix);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_eq(daemonfix_bytes(&trainfix), before, "it is charged still");
	cr_expect_geq(fail_quarantined(&trainfix), ELEMENTS * sizeof(float));
	second = trainer_start(&trainfix, "job", 0, 1, takes_its_place, h);
	AWAIT(atomic_load(&h->read) == 1, 60);
	cr_expect_geq(fail_quarantined(&trainfix), ELEMENTS * sizeof(float));
	daemonfix_replace_daemon(&trainfix, SIGKILL); /* and the next one knows of both */
	AWAIT(fail_quarantined(&trainfix) >= ELEMENTS * sizeof(float), 10);
	stage_set(&h->end, 1);
	cr_assert_eq(trainer_wait(first, 60), 0);
	stage_set(&h->go, 1);
	cr_assert_eq(trainer_wait(second, 60), 0);
	AWAIT(fail_quarantined(&trainfix) == 0, 20);
}

/* ------------------------------------------------------------- a store that is nearly full */

enum { FEW_FDS = 200, BUFFERS = 80, BUFFER_BYTES = 1 << 20 };

static int has_many_buffers(const struct trainer *t)
{
	struct heirs *h = t->arg;
	shardd_client *c = train_connect(t);
	uint64_t id;
	void *data;

	train_join_as(c, t, SHARDD_KEEP);
	train_zero_unit(c, "u", 16, NULL);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	for (unsigned i = 0; i < BUFFERS; i++)
		TRAIN_OK(shardd_alloc(c, BUFFER_BYTES, &id, &data, &train_err));
	train_register(c, "later", 16, NULL); /* there is room for shards */
	stage_set(&h->holds, 1);
	TRAINER_AWAIT(atomic_load(&h->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	train_join_as(c, t, SHARDD_KEEP);
	for (unsigned i = 0; i < BUFFERS; i++) {
		TRAIN_OK(shardd_alloc(c, BUFFER_BYTES, &id, &data, &train_err));
		memset(data, 1, BUFFER_BYTES);
	}
	train_leave(c);
	return 0;
}

static void begin_with_few(void)
{
	struct rlimit few = { FEW_FDS, FEW_FDS };

	cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
	begin();
}

TestSuite(gradient_memory_few, .init = begin_with_few, .fini = end, .timeout = 120);

/* It ends with the daemon, as all of it did. */
Test(gradient_memory_few, what_the_store_has_no_room_for_is_said)
{
	static const char *const args[] = { "status", NULL };
	struct heirs *h = trainer_shared(sizeof(*h));
	char out[4096];
	pid_t pid;

	if (!train_on_host()) {
		train_not_here("memory of gradients that outlives the daemon");
		return;
	}
	pid = trainer_start(&trainfix, "job", 0, 1, has_many_buffers, h);
	AWAIT(atomic_load(&h->holds) == 1, 60);
	cr_expect_gt(status_number("store_left_out"), 0);
	cr_expect_lt(status_number("store_used"), status_number("store_max"));
	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0);
	cr_expect(strstr(out, "which is nearly full: "), "%s", out);
	cr_expect(fail_logged(&trainfix, "the descriptor store is nearly full"));
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&h->go, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
}

/* ------------------------------------------------------------- a daemon that has less */

enum { SHARD_ELEMENTS = 4 << 20 };

static char config[64];

static void write_config(unsigned mib)
{
	FILE *f = fopen(config, "we");

	cr_assert(f && fprintf(f, "memory_bytes: %u\n", mib << 20) > 0 && fclose(f) == 0);
}

static void begin_with_config(void)
{
	static const char *args[] = { "--config", config, NULL };

	snprintf(config, sizeof(config), "/tmp/shardd-memory-%d.yaml", getpid());
	write_config(200);
	fdcheck_begin();
	daemonfix_start_held(&trainfix, args);
}

static void end_with_config(void)
{
	unlink(config);
	end();
}

/* In a second job, which comes after that of has_many_buffers. */
static int has_shards(const struct trainer *t)
{
	struct heirs *h = t->arg;
	shardd_client *c = train_connect(t);

	train_join_as(c, t, SHARDD_KEEP);
	train_zero_unit(c, "u", SHARD_ELEMENTS, NULL);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	stage_set(&h->has, 1);
	TRAINER_AWAIT(atomic_load(&h->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	train_join_as(c, t, SHARDD_KEEP);
	TRAINER_CHECK(train_register(c, "u", SHARD_ELEMENTS, NULL).initialised);
	train_leave(c);
	return 0;
}

static int has_buffers(const struct trainer *t)
{
	struct heirs *h = t->arg;
	shardd_client *c = train_connect(t);
	uint64_t id;
	void *data;

	train_join_as(c, t, SHARDD_KEEP);
	for (unsigned i = 0; i < BUFFERS; i++)
		TRAIN_OK(shardd_alloc(c, BUFFER_BYTES, &id, &data, &train_err));
	stage_set(&h->holds, 1);
	TRAINER_AWAIT(atomic_load(&h->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	train_join_as(c, t, SHARDD_KEEP);
	train_leave(c);
	return 0;
}

TestSuite(gradient_memory_config, .init = begin_with_config, .fini = end_with_config,
	  .timeout = 120);

/* The spare memory of one job does not take the place of another one's parameters. */
Test(gradient_memory_config, a_daemon_with_less_memory_has_all_shards)
{
	struct heirs *h = trainer_shared(sizeof(*h));
	pid_t first, second;

	if (!train_on_host()) {
		train_not_here("memory of gradients that outlives the daemon");
		return;
	}
	first = trainer_start(&trainfix, "first", 0, 1, has_buffers, h);
	AWAIT(atomic_load(&h->holds) == 1, 60);
	second = trainer_start(&trainfix, "second", 0, 1, has_shards, h);
	AWAIT(atomic_load(&h->has) == 1, 60);
	write_config(80);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&h->go, 1);
	cr_assert_eq(trainer_wait(first, 60), 0);
	cr_assert_eq(trainer_wait(second, 60), 0);
}
