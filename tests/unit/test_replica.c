/* Parts of a job in memory: who pays for them, and where they are closed. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/closer.h"
#include "fdcheck.h"
#include "job/replica.h"
#include "nodefix.h"

#define MIB      (UINT64_C(1) << 20)
#define KEPT_MIB 16 /* of a machine with 512 MiB */

static struct nodefix n;
static struct job *job;

static void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 1, 0);
}

static void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(replica, .init = begin, .fini = end, .timeout = 30);

static struct replica *make(uint32_t part, uint64_t bytes)
{
	const struct replica_id id = { 3, 77, part, 4 };
	struct fault f = FAULT_NULL;
	struct replica *r = NULL;

	cr_assert_eq(replica_new(job, &id, bytes, &r, &f), 0, "%s", f.text);
	return r;
}

/* Threads of this process with the closer's name. */
static unsigned closers(void)
{
	DIR *d = opendir("/proc/self/task");
	unsigned found = 0;
	struct dirent *e;

	cr_assert(d);
	while ((e = readdir(d))) {
		char path[300], name[32] = "";
		FILE *f;

		snprintf(path, sizeof(path), "/proc/self/task/%.200s/comm", e->d_name);
		f = *e->d_name == '.' ? NULL : fopen(path, "re");
		if (!f)
			continue;
		if (fgets(name, sizeof(name), f) && strcmp(name, "shardd-close\n") == 0)
			found++;
		fclose(f);
	}
	closedir(d);
	return found;
}

/* The loop closed them, which takes long for gigabytes: it sent no pings meanwhile. */
Test(replica, its_memory_is_closed_by_another_thread)
{
	struct replica *r = make(0, 1 << 20);

	cr_expect_eq(closers(), 0);
	replica_ref(r);
	replica_drop(r);
	cr_expect_eq(closers(), 0, "somebody reads it");
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0);
	replica_unref(r);
	cr_expect_eq(closers(), 1);
	replica_drop(make(0, 1 << 20));
	cr_expect_eq(closers(), 1);
}

/* ------------------------------------------------------------------------------- room */

/* The machine has @mib available, besides what the daemon keeps for itself. */
static void machine_has(struct host_room *room, unsigned mib)
{
	static char path[64];
	FILE *f;

	snprintf(path, sizeof(path), "/tmp/shardd-replica-%d", getpid());
	f = fopen(path, "we");
	cr_assert(f);
	fprintf(f, "MemTotal: %u kB\nMemAvailable: %u kB\n", 512 * 1024, (mib + KEPT_MIB) * 1024);
	fclose(f);
	room->place.meminfo = path;
}

static void later(void)
{
	clock_fake(clock_now_us() + 1000000);
}

static void refuse(uint32_t part, uint64_t bytes)
{
	const struct replica_id id = { 3, 77, part, 4 };
	uint64_t used = job->quota.by_class[MEM_CONTROL];
	struct fault f = FAULT_NULL;
	struct replica *r;

	cr_expect_eq(replica_new(job, &id, bytes, &r, &f), FAULT_EXHAUSTED);
	cr_expect(strstr(f.text, "the machine has "), "%s", f.text);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], used);
}

/* A node without GPUs looked only at its accounts: the kernel would have ended the daemon. */
Test(replica, the_machine_must_have_room)
{
	static char data[10 * MIB];
	struct replica *a, *b;

	machine_has(node_room(&n.node), 20);
	refuse(0, 21 * MIB);
	a = make(0, 15 * MIB);
	refuse(1, 10 * MIB);
	later(); /* its bytes are not written, and count all the same */
	refuse(1, 10 * MIB);
	memset(data, 1, sizeof(data));
	cr_assert_eq(pwrite(a->fds[REPLICA_TENSORS], data, sizeof(data), 0), sizeof(data));
	later(); /* the file of this test does not say that the machine has 10 MiB less */
	b = make(1, 15 * MIB);
	refuse(2, MIB);
	replica_drop(b);
	later();
	replica_drop(make(2, 15 * MIB));
	replica_drop(a);
	unlink(node_room(&n.node)->place.meminfo);
}

/* Its pages counted as free twice between their end and that of the part: more could be promised than there was. */
Test(replica, what_is_closed_leaves_before_it_is_gone)
{
	static const char data[MIB] = { 1 };
	struct replica *r = make(0, MIB);
	struct stat st = { .st_size = 1 };
	int same = dup(r->fds[REPLICA_TENSORS]); /* keeps pages that only closing would free */

	cr_assert_geq(same, 0);
	cr_assert_eq(pwrite(same, data, sizeof(data), 0), sizeof(data));
	replica_drop(r);
	while (st.st_size)
		cr_assert_eq(fstat(same, &st), 0);
	cr_expect_eq(atomic_load(&node_room(&n.node)->leaving), 0);
	close(same);
}

/* ----------------------------------------------------------------------------- closing */

/* One item, and the thread that has closed it. */
struct item {
	struct closer_item item;
	pthread_t by;
	unsigned closed;
};

static void on_close(struct closer_item *item)
{
	struct item *x = (struct item *)item;

	x->by = pthread_self();
	x->closed++;
}

Test(replica, a_closer_closes_what_is_queued_before_it_ends)
{
	struct item items[20] = { 0 }, late = { 0 };
	struct closer c;

	closer_init(&c);
	for (unsigned i = 0; i < 20; i++)
		closer_add(&c, &items[i].item, on_close);
	closer_deinit(&c);
	for (unsigned i = 0; i < 20; i++)
		cr_expect(items[i].closed == 1 && !pthread_equal(items[i].by, pthread_self()));
	cr_expect_not(closer_is_open(&c));
	closer_add(&c, &late.item, on_close);
	cr_expect(late.closed == 1 && pthread_equal(late.by, pthread_self()));
	closer_deinit(&c);
}
