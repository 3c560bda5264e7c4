/* Limits of control groups, of both versions, in trees of files that look like theirs. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "backend/cgroup.h"
#include "backend/host_memory.h"
#include "fdcheck.h"

TestSuite(cgroup, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

#define MIB         (UINT64_C(1) << 20)
#define V1_NO_LIMIT "9223372036854771712"

struct tree {
	char root[32];
	char self[64], meminfo[64];
};

static struct cgroup_place place(const struct tree *t)
{
	return (struct cgroup_place){ t->self, t->root };
}

static void write_file(const char *path, const char *text)
{
	FILE *file = fopen(path, "we");

	cr_assert_not_null(file);
	fprintf(file, "%s\n", text);
	fclose(file);
}

static void set(const struct tree *t, const char *group, const char *name, const char *value)
{
	char path[300];

	snprintf(path, sizeof(path), "%s%s/%s", t->root, group, name);
	write_file(path, value);
}

/* Groups "/a" and "/a/b" of both versions below a new folder; @self: /proc/self/cgroup. */
static void tree_begin(struct tree *t, const char *self)
{
	static const char *const groups[] = { "/a", "/a/b", "/memory", "/memory/a", "/memory/a/b" };
	char path[300];

	snprintf(t->root, sizeof(t->root), "/tmp/shardd-test-XXXXXX");
	cr_assert_not_null(mkdtemp(t->root));
	for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++) {
		snprintf(path, sizeof(path), "%s%s", t->root, groups[i]);
		cr_assert_eq(mkdir(path, 0700), 0);
	}
	snprintf(t->self, sizeof(t->self), "%s/self", t->root);
	snprintf(t->meminfo, sizeof(t->meminfo), "%s/meminfo", t->root);
	write_file(t->self, self);
}

static void tree_end(const struct tree *t)
{
	char command[64];

	snprintf(command, sizeof(command), "rm -r %s", t->root);
	cr_assert_eq(system(command), 0);
}

static uint64_t limit(const struct tree *t)
{
	const struct cgroup_place at = place(t);

	return cgroup_memory_limit(&at);
}

static uint64_t left(const struct tree *t)
{
	const struct cgroup_place at = place(t);

	return cgroup_memory_left(&at);
}

Test(cgroup, the_lowest_limit_counts)
{
	struct tree t;

	tree_begin(&t, "0::/a/b");
	cr_assert_eq(limit(&t), UINT64_MAX);
	set(&t, "/a/b", "memory.max", "max");
	cr_assert_eq(limit(&t), UINT64_MAX);
	set(&t, "/a", "memory.max", "1073741824");
	cr_assert_eq(limit(&t), 1073741824u);
	set(&t, "/a/b", "memory.max", "8192");
	cr_assert_eq(limit(&t), 8192u);
	set(&t, "", "memory.max", "4096");
	cr_assert_eq(limit(&t), 4096u, "what a container has at its root");
	write_file(t.self, "0::/");
	cr_assert_eq(limit(&t), 4096u);
	write_file(t.self, "0::/of/the/host");
	cr_assert_eq(limit(&t), 4096u, "groups that cannot be seen from here");
	tree_end(&t);
}

/* Above memory.high the kernel throttles the daemon: for us it is a limit like any other. */
Test(cgroup, the_soft_limit_of_version_2_counts)
{
	struct tree t;

	tree_begin(&t, "0::/a/b");
	set(&t, "/a/b", "memory.max", "8192");
	set(&t, "/a/b", "memory.high", "max");
	cr_assert_eq(limit(&t), 8192u);
	set(&t, "/a", "memory.high", "6000");
	cr_assert_eq(limit(&t), 6000u);
	set(&t, "/a", "memory.current", "5000");
	cr_assert_eq(left(&t), 1000u);
	tree_end(&t);
}

Test(cgroup, what_is_left_is_of_the_group_that_has_the_least)
{
	struct tree t;

	tree_begin(&t, "0::/a/b");
	set(&t, "/a/b", "memory.current", "1000");
	set(&t, "/a", "memory.current", "6000");
	cr_assert_eq(left(&t), UINT64_MAX, "no limit");
	set(&t, "/a/b", "memory.max", "4096");
	cr_assert_eq(left(&t), 3096u);
	set(&t, "/a", "memory.max", "8192");
	cr_assert_eq(left(&t), 2192u, "of the one above");
	set(&t, "/a", "memory.stat", "anon 1\ninactive_file 500\nactive_file 5");
	cr_assert_eq(left(&t), 2697u, "file pages are free");
	set(&t, "/a", "memory.current", "9000");
	set(&t, "/a", "memory.stat", "inactive_file 0");
	cr_assert_eq(left(&t), 0u, "over the limit");
	tree_end(&t);
}

/* Version 1 was not looked at: in a container of 600 MB the daemon took the machine's memory for
 * its own, and was killed. */
Test(cgroup, limits_of_version_1_count)
{
	struct tree t;

	tree_begin(&t, "9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/");
	set(&t, "/memory/a/b", "memory.limit_in_bytes", V1_NO_LIMIT);
	set(&t, "/memory/a", "memory.limit_in_bytes", V1_NO_LIMIT);
	cr_assert_eq(limit(&t), UINT64_MAX, "its largest number is none");
	set(&t, "/memory/a", "memory.limit_in_bytes", "629145600");
	cr_assert_eq(limit(&t), 629145600u);
	set(&t, "/memory/a", "memory.usage_in_bytes", "600000000");
	cr_assert_eq(left(&t), 29145600u);
	set(&t, "/memory/a", "memory.stat",
	    "inactive_file 7\ntotal_inactive_file 1000\ntotal_active_file 100");
	cr_assert_eq(left(&t), 29146700u, "with the groups below it");
	tree_end(&t);
}

/* The container's group is the root of what is mounted, and the one above is in memory.stat only. */
Test(cgroup, version_1_tells_the_limit_of_groups_out_of_sight)
{
	struct tree t;

	tree_begin(&t, "4:memory:/docker/0123");
	set(&t, "/memory", "memory.limit_in_bytes", V1_NO_LIMIT);
	set(&t, "/memory", "memory.usage_in_bytes", "300");
	set(&t, "/memory", "memory.stat", "cache 1\nhierarchical_memory_limit 1000");
	cr_assert_eq(limit(&t), 1000u);
	cr_assert_eq(left(&t), 700u);
	tree_end(&t);
}

Test(cgroup, both_versions_beside_each_other)
{
	struct tree t;

	tree_begin(&t, "4:memory:/a\n0::/a");
	set(&t, "/memory/a", "memory.limit_in_bytes", "5000");
	set(&t, "/a", "memory.max", "6000");
	cr_assert_eq(limit(&t), 5000u);
	set(&t, "/a", "memory.max", "4000");
	cr_assert_eq(limit(&t), 4000u);
	write_file(t.self, "not a line of the kernel\n4:memory\n0:");
	cr_assert_eq(limit(&t), UINT64_MAX);
	tree_end(&t);
	cr_assert_eq(limit(&t), UINT64_MAX, "no such file");
}

Test(cgroup, the_machine_and_its_groups_together)
{
	struct tree t;
	struct host_memory m;
	struct host_memory_place at;

	tree_begin(&t, "0::/a");
	at = (struct host_memory_place){ t.meminfo, place(&t) };
	cr_assert_lt(host_memory_read(&at, &m), 0);
	write_file(t.meminfo, "MemTotal:  2097152 kB\nMemFree: 5 kB\nMemAvailable:  1048576 kB");
	cr_assert_eq(host_memory_read(&at, &m), 0);
	cr_assert_eq(host_memory_total(&m), 2048 * MIB);
	cr_assert_eq(host_memory_left(&m), 1024 * MIB);
	cr_assert_eq(host_memory_share(&m) / MIB, 1638, "four fifths");
	cr_assert_eq(host_memory_reserve(&m), 64 * MIB);
	set(&t, "/a", "memory.max", "209715200");
	set(&t, "/a", "memory.current", "104857600");
	cr_assert_eq(host_memory_read(&at, &m), 0);
	cr_assert_eq(host_memory_total(&m), 200 * MIB);
	cr_assert_eq(host_memory_left(&m), 100 * MIB);
	cr_assert_eq(host_memory_share(&m), 160 * MIB);
	cr_assert_eq(host_memory_reserve(&m), 16 * MIB);
	tree_end(&t);
}
