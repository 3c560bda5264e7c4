#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/config.h"
#include "config/config_keys.h"
#include "core/cleanup.h"
#include "fdcheck.h"

#define TEST(name) Test(config, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
#define COUNT(a)   (sizeof(a) / sizeof((a)[0]))

static int load(struct config *c, const char *text, struct fault *f)
{
	*f = FAULT_NULL;
	return config_load_text(c, text, strlen(text), "test.yaml", f);
}

static int set(struct config *c, const char *key, const char *value)
{
	struct fault f = FAULT_NULL;

	return config_set(c, key, value, &f);
}

/* A whole file; the caller frees it. */
static char *slurp(const char *path)
{
	_cleanup_(fclosep) FILE *in = fopen(path, "r");
	char *text = calloc(1, 1 << 18);

	cr_assert_not_null(in, "%s", path);
	cr_assert_not_null(text);
	cr_assert_lt(fread(text, 1, (1 << 18) - 1, in), (1 << 18) - 1);
	return text;
}

/* What @write prints; the caller frees it. */
static char *printed(void (*write)(FILE *out))
{
	char *text = NULL;
	size_t bytes;
	FILE *out = open_memstream(&text, &bytes);

	cr_assert_not_null(out);
	write(out);
	fclose(out);
	return text;
}

TEST(defaults_are_those_documented)
{
	struct fault f = FAULT_NULL;
	struct config c;

	config_default(&c);
	cr_assert_str_eq(c.socket, "/run/shardd/shardd.sock");
	cr_assert_str_eq(c.socket_group, "");
	cr_assert_eq(c.socket_mode, 0660);
	cr_assert_str_eq(c.backend, "auto");
	cr_assert_eq(c.threads, 0);
	cr_assert_eq(c.memory_bytes, 0);
	cr_assert_eq(c.job_quota_bytes, 0);
	cr_assert_eq(c.ttl.job_s, 86400);
	cr_assert_eq(c.ttl.max_job_s, 7 * 86400);
	cr_assert_eq(c.ttl.uncommitted_s, 600);
	cr_assert_eq(c.op_timeout_ms, 600000);
	cr_assert_eq(c.stall_after_ms, 5000);
	cr_assert_eq(c.max_connections, 4096);
	cr_assert_eq(c.reserved_connections, 64);
	cr_assert_eq(c.per_user.max_connections, 2048);
	cr_assert_eq(c.per_user.max_unattached, 256);
	cr_assert_eq(c.per_user.max_sessions, 1024);
	cr_assert_eq(c.per_user.max_jobs, 64);
	cr_assert_eq(c.per_user.max_slabs, 8192);
	cr_assert_eq(c.per_user.max_state_bytes, 0);
	cr_assert_eq(c.per_user.max_daemon_bytes, 1u << 30);
	cr_assert_eq(c.per_user.max_message_bytes, 256u << 20);
	cr_assert_eq(c.per_user.max_fds, 256);
	cr_assert_eq(c.per_user.max_ops, 65536);
	cr_assert_eq(c.per_user.max_status_calls, 8);
	cr_assert_eq(c.per_user.n_limits, 0);
	cr_assert_eq(c.max_jobs, 256);
	cr_assert_eq(c.max_units_per_job, 100000);
	cr_assert_eq(c.max_world_size, 1024);
	cr_assert_eq(c.max_inflight_ops, 1024);
	cr_assert_eq(c.max_inflight_gathers, 64);
	cr_assert_eq(c.reduce_batch_bytes, 1048576);
	cr_assert_str_eq(c.prefault, "yes");
	cr_assert_eq(c.readers.stream_bytes_per_s, 0);
	cr_assert_eq(c.readers.stream_stall_ms, 30000);
	cr_assert_eq(c.grpc.header_bytes, 16384);
	cr_assert_eq(c.grpc.continuations, 4);
	cr_assert_eq(c.grpc.unattached_streams, 32);
	cr_assert_eq(c.grpc.unattached_bytes, 1u << 20);
	cr_assert_eq(c.grpc.connection_bytes, 128u << 20);
	cr_assert_eq(c.grpc.total_bytes, 1u << 30);
	cr_assert_eq(c.grpc.message_timeout_ms, 60000);
	cr_assert_eq(c.grpc.idle_timeout_ms, 60000);
	cr_assert_eq(c.grpc.resets_per_s, 250);
	cr_assert_eq(c.grpc.pings_per_s, 100);
	cr_assert_eq(c.grpc.settings_per_s, 5);
	cr_assert_eq(c.grpc.control_per_s, 1000);
	cr_assert_eq(c.max_message_bytes, 67108864);
	cr_assert_eq(c.hello_timeout_ms, 5000);
	cr_assert_eq(c.drain_timeout_ms, 10000);
	cr_assert_eq(c.records.ops, 4096);
	cr_assert_eq(c.records.jobs, 256);
	cr_assert_eq(c.records.events, 1024);
	cr_assert_eq(c.allow.n_uids, 0);
	cr_assert_eq(c.allow.n_gids, 0);
	cr_assert_str_eq(c.log.level, "info");
	cr_assert_str_eq(c.log.format, "text");
	cr_assert_str_eq(c.log.file, "");
	cr_assert_str_eq(c.coord.store, "none");
	cr_assert_eq(config_store(&c), CONFIG_STORE_NONE);
	cr_assert_str_eq(c.coord.node_name, "");
	cr_assert_str_eq(c.coord.cluster, "shardd");
	cr_assert_str_eq(c.coord.seeds, "");
	cr_assert_eq(c.coord.nodes, 0);
	cr_assert_str_eq(c.coord.dir, "/var/lib/shardd/etcd");
	cr_assert_eq(c.coord.client_port, 2379);
	cr_assert_eq(c.coord.peer_port, 2380);
	cr_assert_str_eq(c.peer.listen, "");
	cr_assert_str_eq(c.peer.insecure, "no");
	cr_assert_eq(config_check(&c, &f), 0);
}

TEST(units_are_understood)
{
	static const struct {
		const char *key, *value;
		uint64_t is;
	} cases[] = {
		{ "memory_bytes", "64MiB", 64ull << 20 },
		{ "memory_bytes", "1 GiB", 1ull << 30 },
		{ "memory_bytes", "2TiB", 2ull << 40 },
		{ "memory_bytes", "2048KiB", 2048ull << 10 },
		{ "memory_bytes", "1048576", 1048576 },
		{ "memory_bytes", "1048576B", 1048576 },
		{ "memory_bytes", "0", 0 },
		{ "op_timeout_ms", "500ms", 500 },
		{ "op_timeout_ms", "5s", 5000 },
		{ "op_timeout_ms", "3min", 180000 },
		{ "op_timeout_ms", "2h", 7200000 },
		{ "op_timeout_ms", "1d", 86400000 },
		{ "op_timeout_ms", "77", 77 },
		{ "job_ttl_s", "77", 77 },
		{ "job_ttl_s", "2h", 7200 },
		{ "socket_mode", "0600", 0600 },
		{ "socket_mode", "0o640", 0640 },
		{ "socket_mode", "777", 0777 },
		{ "threads", "16", 16 },
	};

	for (size_t i = 0; i < COUNT(cases); i++) {
		const struct config_key *k = config_key_find(cases[i].key);
		struct config c;
		uint64_t is;

		config_default(&c);
		cr_assert_eq(set(&c, cases[i].key, cases[i].value), 0, "%s", cases[i].value);
		is = k->bytes == 8 ? *(uint64_t *)config_key_field(&c, k)
				   : *(uint32_t *)config_key_field(&c, k);
		cr_assert_eq(is, cases[i].is, "%s: %s", cases[i].key, cases[i].value);
	}
}

TEST(wrong_values_are_refused_with_field_and_value)
{
	static const struct {
		const char *key, *value;
	} cases[] = {
		{ "threads", "" },
		{ "threads", "-1" },
		{ "threads", "+1" },
		{ "threads", " 1" },
		{ "threads", "1x" },
		{ "threads", "1s" },
		{ "threads", "0x10" },
		{ "threads", "1025" },
		{ "threads", "4294967296" },
		{ "threads", "99999999999999999999999999" },
		{ "memory_bytes", "1" },
		{ "memory_bytes", "64mib" },
		{ "memory_bytes", "64 MiB x" },
		{ "memory_bytes", "1.5GiB" },
		{ "memory_bytes", "18446744073709551615TiB" },
		{ "memory_bytes", "1025000TiB" },
		{ "op_timeout_ms", "0" },
		{ "op_timeout_ms", "31d" },
		{ "op_timeout_ms", "5sec" },
		{ "job_ttl_s", "500ms" },
		{ "job_ttl_s", "0" },
		{ "socket_mode", "999" },
		{ "socket_mode", "01000" },
		{ "socket_mode", "0o" },
		{ "socket_mode", "66" },
		{ "socket_mode", "rw" },
		{ "socket_mode", "-660" },
		{ "backend", "rocm" },
		{ "backend", "" },
		{ "backend", "host|auto" },
		{ "backend", "Host" },
		{ "log_level", "loud" },
		{ "log_format", "xml" },
		{ "log_file", "relative" },
		{ "log_file", "~" },
		{ "socket", "" },
		{ "socket", "/a\nb" },
		{ "allow_uids", "no such user" },
		{ "allow_uids", "4294967295" },
		{ "allow_uids", "1,-1" },
		{ "allow_uids", "12x" },
		{ "allow_gids", "0x1" },
		{ "max_message_bytes", "2GiB" },
		{ "flight_recorder_ops", "0" },
		{ "history_jobs", "4097" },
		{ "recent_events", "1" },
		{ "coord", "" },
		{ "coord_dir", "" },
		{ "coord_dir", "etcd" },
		{ "coord_ca", "ca.pem" },
		{ "coord_client_port", "0" },
		{ "coord_peer_port", "65536" },
		{ "coord_seeds", "a=\"b\"" },
		{ "coord_seeds", "a=\\b" },
		{ "coord_seeds", "a=\tb" },
		{ "peer_insecure", "true" },
		{ "data_interface", "an-interface-too-long" },
	};

	for (size_t i = 0; i < COUNT(cases); i++) {
		struct fault f = FAULT_NULL;
		struct config c, before;

		config_default(&c);
		before = c;
		cr_assert_eq(config_set(&c, cases[i].key, cases[i].value, &f), FAULT_INVALID,
			     "%s: %s", cases[i].key, cases[i].value);
		cr_assert_str_eq(f.field, cases[i].key);
		cr_assert_eq(strncmp(f.text, cases[i].key, strlen(cases[i].key)), 0, "%s", f.text);
		cr_assert_not_null(strstr(f.text, " must "), "%s", f.text);
		cr_assert_eq(memcmp(&c, &before, sizeof(c)), 0);
	}
}

TEST(an_unknown_key_is_refused)
{
	struct fault f = FAULT_NULL;
	struct config c;

	config_default(&c);
	cr_assert_eq(config_set(&c, "treads", "1", &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "treads");
	cr_assert_not_null(strstr(f.text, "'treads'"));
}

TEST(text_that_does_not_fit_is_refused)
{
	char text[4096];
	struct config c;

	config_default(&c);
	memset(text, 'a', sizeof(text));
	text[0] = '/';
	text[108] = '\0'; /* a socket address holds 107 and the 0 */
	cr_assert_eq(set(&c, "socket", text), FAULT_INVALID);
	text[107] = '\0';
	cr_assert_eq(set(&c, "socket", text), 0);
	cr_assert_str_eq(c.socket, text);
	memset(text + 1, 'b', sizeof(text) - 2);
	text[sizeof(text) - 1] = '\0';
	cr_assert_eq(set(&c, "log_file", text), FAULT_INVALID);
	cr_assert_eq(set(&c, "socket_group", text), FAULT_INVALID);
	cr_assert_eq(set(&c, "backend", text), FAULT_INVALID);
	cr_assert_eq(set(&c, "allow_uids", text), FAULT_INVALID);
	cr_assert_eq(set(&c, "threads", text), FAULT_INVALID);
}

TEST(lists_take_names_and_numbers)
{
	struct config c;

	config_default(&c);
	cr_assert_eq(set(&c, "allow_uids", "root, 1000,4294967294"), 0);
	cr_assert_eq(c.allow.n_uids, 3);
	cr_assert_eq(c.allow.uids[0], 0);
	cr_assert_eq(c.allow.uids[1], 1000);
	cr_assert_eq(c.allow.uids[2], 4294967294u);
	cr_assert_eq(set(&c, "allow_gids", "root"), 0);
	cr_assert_eq(c.allow.n_gids, 1);
	cr_assert_eq(c.allow.gids[0], 0);
	cr_assert_eq(set(&c, "allow_uids", ""), 0);
	cr_assert_eq(c.allow.n_uids, 0);
}

TEST(limits_of_users_are_bounded)
{
	char text[CONFIG_VALUE_MAX + 256] = "", back[CONFIG_VALUE_MAX];
	struct config c, again;

	config_default(&c);
	config_default(&again);
	for (int i = 0; i < CONFIG_MAX_IDS; i++)
		snprintf(text + strlen(text), 80, "%s@%u:max_message_bytes=9223372036854775807",
			 i ? "," : "", 4294967294u - (unsigned)i);
	cr_assert_eq(set(&c, "user_limits", text), 0);
	config_key_format(&c, config_key_find("user_limits"), back);
	cr_assert_eq(set(&again, "user_limits", back), 0);
	cr_expect_eq(memcmp(&c, &again, sizeof(c)), 0);
	strcat(text, ",1:max_jobs=1");
	cr_expect_eq(set(&c, "user_limits", text), FAULT_INVALID);
	cr_expect_eq(c.per_user.n_limits, CONFIG_MAX_IDS);
}

TEST(lists_are_bounded)
{
	char text[4096] = "0";
	struct config c;

	config_default(&c);
	for (int i = 1; i < CONFIG_MAX_IDS; i++)
		snprintf(text + strlen(text), 16, ",%d", i);
	cr_assert_eq(set(&c, "allow_gids", text), 0);
	cr_assert_eq(c.allow.n_gids, CONFIG_MAX_IDS);
	strcat(text, ",64");
	cr_assert_eq(set(&c, "allow_gids", text), FAULT_INVALID);
	cr_assert_eq(c.allow.n_gids, CONFIG_MAX_IDS);
}

TEST(a_file_sets_what_it_names_and_nothing_else)
{
	struct config c, expected;
	struct fault f;

	config_default(&c);
	config_default(&expected);
	cr_assert_eq(load(&c,
			  "# a comment\n"
			  "socket: \"/tmp/with blank\"\n"
			  "socket_mode: 0600\n"
			  "memory_bytes: 64MiB   # another\n"
			  "allow_uids: [0, 'root']\n"
			  "allow_gids:\n"
			  "  - 7\n"
			  "log_file: ''\n",
			  &f),
		     0, "%s", f.text);
	strcpy(expected.socket, "/tmp/with blank");
	expected.socket_mode = 0600;
	expected.memory_bytes = 64ull << 20;
	expected.allow.n_uids = 2;
	expected.allow.n_gids = 1;
	expected.allow.gids[0] = 7;
	cr_assert_str_eq(c.socket, expected.socket);
	memcpy(expected.socket, c.socket, sizeof(c.socket));
	cr_assert_eq(memcmp(&c, &expected, sizeof(c)), 0);
}

TEST(an_empty_file_changes_nothing)
{
	static const char *const texts[] = { "", "\n", "# nothing\n", "{}" };
	struct config c, before;
	struct fault f;

	config_default(&c);
	before = c;
	for (size_t i = 0; i < COUNT(texts); i++) {
		cr_assert_eq(load(&c, texts[i], &f), 0, "%s", f.text);
		cr_assert_eq(memcmp(&c, &before, sizeof(c)), 0);
	}
}

TEST(a_wrong_file_is_refused_with_name_line_and_reason)
{
	static const struct {
		const char *text, *where, *what;
	} cases[] = {
		{ "socket: /a\nthread: 5\n", "test.yaml, line 2: ", "unknown key 'thread'" },
		{ "socket: /a\n\nthreads: x\n", "test.yaml, line 3: ", "threads is 'x'" },
		{ "threads: [1]\n", "test.yaml, line 1: ", "not a list" },
		{ "threads: {a: 1}\n", "test.yaml, line 1: ", "not a list" },
		{ "\n\nallow_uids: 5\n", "test.yaml, line 3: ", "must be a list" },
		{ "user_limits: 5\n", "test.yaml, line 1: ", "such as [\"alice:max_jobs=8\"]" },
		{ "coord_seeds: a\n", "test.yaml, line 1: ", "such as [a, b]" },
		{ "allow_uids: [[1]]\n", "test.yaml, line 1: ", "not a list" },
		{ "user_limits: [a: b]\n", "test.yaml, line 1: ", "an entry of user_limits must" },
		{ "user_limits: ['0:max_jobs=3 4']\n", "test.yaml, line 1: ", "one USER:LIMIT" },
		{ "allow_uids: ['1,2']\n", "test.yaml, line 1: ", "comma" },
		{ "allow_uids: ['']\n", "test.yaml, line 1: ", "empty" },
		{ "threads: 1\nsocket: /a\nthreads: 2\n", "test.yaml, line 3: ", "already" },
		{ "socket: &x /a\nlog_file: *x\n", "test.yaml, line 2: ", "aliases" },
		{ "threads:\n", "test.yaml, line 1: ", "threads is ''" },
		{ "threads: ~\n", "test.yaml, line 1: ", "threads is '~'" },
		{ "- threads\n", "test.yaml: ", "key: value" },
		{ "just words\n", "test.yaml: ", "key: value" },
		{ "\tthreads: 1\n", "test.yaml: ", "cannot start any token" },
		{ "threads: 1\n---\nthreads: 2\n", "test.yaml: ", "documents" },
		{ "threads: 'open\n", "test.yaml, line 1: ", "found unexpected end" },
		{ "\xff\xfe\xff", "test.yaml: ", "" },
	};

	for (size_t i = 0; i < COUNT(cases); i++) {
		struct config c, before;
		struct fault f;

		config_default(&c);
		before = c;
		cr_assert_eq(load(&c, cases[i].text, &f), FAULT_INVALID, "%s", cases[i].text);
		cr_assert_eq(strncmp(f.text, cases[i].where, strlen(cases[i].where)), 0, "%s",
			     f.text);
		cr_assert_not_null(strstr(f.text, cases[i].what), "%s", f.text);
		cr_assert_eq(memcmp(&c, &before, sizeof(c)), 0);
	}
}

TEST(a_late_error_leaves_earlier_keys_of_the_file_unset)
{
	struct config c;
	struct fault f;

	config_default(&c);
	cr_assert_eq(load(&c, "threads: 7\nlog_level: loud\n", &f), FAULT_INVALID);
	cr_assert_eq(c.threads, 0);
}

/* Each alias would double what the parser builds. */
TEST(a_bomb_of_aliases_is_refused)
{
	struct config c;
	struct fault f;

	config_default(&c);
	cr_assert_eq(load(&c,
			  "allow_uids: &a [1, 1, 1]\n"
			  "allow_gids: [*a, *a, *a]\n",
			  &f),
		     FAULT_INVALID);
	cr_assert_not_null(strstr(f.text, "aliases"), "%s", f.text);
}

TEST(deep_nesting_is_refused)
{
	static char text[200000];
	struct config c;
	struct fault f;

	config_default(&c);
	memset(text, '[', sizeof(text) - 1);
	cr_assert_eq(load(&c, text, &f), FAULT_INVALID);
	memcpy(text, "allow_uids: ", 12);
	cr_assert_eq(load(&c, text, &f), FAULT_INVALID);
}

TEST(a_huge_file_is_refused)
{
	static char text[300 * 1024];
	struct config c;
	struct fault f;

	config_default(&c);
	memset(text, '#', sizeof(text) - 1);
	cr_assert_eq(load(&c, text, &f), FAULT_INVALID);
	cr_assert_not_null(strstr(f.text, "larger than"));
}

TEST(too_long_a_list_is_refused)
{
	char text[4096] = "allow_uids: [0";
	struct config c;
	struct fault f;

	config_default(&c);
	for (int i = 0; i < CONFIG_MAX_IDS; i++)
		strcat(text, ",0");
	strcat(text, "]\n");
	cr_assert_eq(load(&c, text, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "allow_uids");
}

TEST(files_that_are_not_there_or_no_files_are_told_apart)
{
	char path[] = "/tmp/shardd-config-XXXXXX";
	struct fault f = FAULT_NULL;
	struct config c;
	int fd = mkstemp(path);

	config_default(&c);
	cr_assert_eq(write(fd, "threads: 3\n", 11), 11);
	close(fd);
	cr_assert_eq(config_load_file(&c, path, &f), 0);
	cr_assert_eq(c.threads, 3);
	unlink(path);
	cr_assert_eq(config_load_file(&c, path, &f), FAULT_NOT_FOUND);
	cr_assert_not_null(strstr(f.text, path));
	f = FAULT_NULL;
	cr_assert_eq(config_load_file(&c, "/tmp", &f), FAULT_NOT_FOUND);
	f = FAULT_NULL;
	cr_assert_eq(config_load_file(&c, "/dev/zero", &f), FAULT_NOT_FOUND);
	cr_assert_eq(c.threads, 3);
}

TEST(a_file_that_may_not_be_read_is_denied)
{
	char path[] = "/tmp/shardd-config-XXXXXX";
	struct fault f = FAULT_NULL;
	struct config c;

	config_default(&c);
	close(mkstemp(path));
	chmod(path, 0);
	if (geteuid() == 0) /* root may read everything; this process ends with the test */
		cr_assert_eq(seteuid(65534), 0);
	cr_assert_eq(config_load_file(&c, path, &f), FAULT_DENIED);
	if (getuid() == 0)
		cr_assert_eq(seteuid(0), 0);
	unlink(path);
}

TEST(the_environment_sets_every_key)
{
	struct fault f = FAULT_NULL;
	struct config c;

	config_default(&c);
	setenv("SHARDD_SOCKET", "/tmp/env.sock", 1);
	setenv("SHARDD_LOG_LEVEL", "debug", 1);
	setenv("SHARDD_ALLOW_GIDS", "5,6", 1);
	setenv("SHARDD_JOB", "not a key of ours", 1);
	cr_assert_eq(config_load_env(&c, &f), 0, "%s", f.text);
	cr_assert_str_eq(c.socket, "/tmp/env.sock");
	cr_assert_str_eq(c.log.level, "debug");
	cr_assert_eq(c.allow.n_gids, 2);
	setenv("SHARDD_THREADS", "many", 1);
	cr_assert_eq(config_load_env(&c, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "threads");
	cr_assert_not_null(strstr(f.text, "SHARDD_THREADS"));
}

TEST(a_quota_above_the_memory_is_refused)
{
	struct fault f = FAULT_NULL;
	struct config c;

	config_default(&c);
	cr_assert_eq(set(&c, "job_quota_bytes", "2GiB"), 0);
	cr_assert_eq(config_check(&c, &f), 0);
	cr_assert_eq(set(&c, "memory_bytes", "1GiB"), 0);
	cr_assert_eq(config_check(&c, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "job_quota_bytes");
}

TEST(roots_of_checkpoints_are_absolute)
{
	struct fault f = FAULT_NULL;
	struct config c;

	config_default(&c);
	cr_assert_eq(set(&c, "checkpoint_roots", ":/srv/a::/srv/b:"), 0);
	cr_assert_eq(config_check(&c, &f), 0);
	cr_assert_eq(set(&c, "checkpoint_roots", "/srv/a:b"), 0);
	cr_assert_eq(config_check(&c, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "checkpoint_roots");
	cr_assert_not_null(strstr(f.text, "'b'"));
}

TEST(keys_that_cannot_change_are_named)
{
	struct config a, b;
	char names[64];

	config_default(&a);
	b = a;
	cr_assert_eq(config_fixed_changes(&a, &b, names, sizeof(names)), 0);
	cr_assert_str_eq(names, "");
	cr_assert_eq(set(&b, "log_level", "debug"), 0);
	cr_assert_eq(set(&b, "allow_uids", "1"), 0);
	cr_assert_eq(config_fixed_changes(&a, &b, names, sizeof(names)), 0);
	cr_assert_eq(set(&b, "threads", "2"), 0);
	cr_assert_eq(set(&b, "socket", "/b"), 0);
	cr_assert_eq(config_fixed_changes(&a, &b, names, sizeof(names)), 2);
	cr_assert_str_eq(names, "socket,threads");
	cr_assert_eq(config_fixed_changes(&a, &b, names, 4), 2);
	cr_assert_str_eq(names, "soc");
}

TEST(fixed_keys_keep_what_is_running)
{
	struct config running, new;
	char names[64];

	config_default(&running);
	new = running;
	cr_assert_eq(set(&new, "threads", "2"), 0);
	cr_assert_eq(set(&new, "socket", "/b"), 0);
	cr_assert_eq(set(&new, "max_jobs", "7"), 0);
	config_keep_fixed(&new, &running);
	cr_expect_eq(config_fixed_changes(&running, &new, names, sizeof(names)), 0);
	cr_expect_eq(new.threads, running.threads);
	cr_expect_str_eq(new.socket, running.socket);
	cr_expect_eq(new.max_jobs, 7);
}

TEST(what_is_written_reads_back_the_same)
{
	_cleanup_(freep) char *text = NULL;
	struct fault f = FAULT_NULL;
	struct config c, again;
	size_t bytes;
	FILE *out;

	config_default(&c);
	cr_assert_eq(set(&c, "socket", "/tmp/a \"quoted\" \\ path: #1"), 0);
	cr_assert_eq(set(&c, "allow_uids", "1,2,3"), 0);
	cr_assert_eq(set(&c, "user_limits",
			 "1:max_jobs=2,@5:max_state_bytes=1GiB,@5:total_state_bytes=2GiB,"
			 "@5:priority=3,@5:worker_weight=7"),
		     0);
	cr_assert_eq(set(&c, "socket_mode", "0007"), 0);
	cr_assert_eq(set(&c, "op_timeout_ms", "1234"), 0);
	cr_assert_eq(set(&c, "memory_bytes", "1048577"), 0);
	cr_assert_eq(set(&c, "coord_seeds", "a=[::1]:1:2, b=h"), 0);
	cr_assert_str_eq(c.coord.seeds, "a=[::1]:1:2,b=h");
	out = open_memstream(&text, &bytes);
	config_write(&c, out);
	fclose(out);
	config_default(&again);
	cr_assert_eq(config_load_text(&again, text, bytes, "again", &f), 0, "%s", f.text);
	cr_assert_eq(memcmp(&c, &again, sizeof(c)), 0);
}

TEST(the_example_is_the_defaults)
{
	_cleanup_(freep) char *text = printed(config_write_example);
	struct config c, defaults;
	struct fault f;

	config_default(&defaults);
	config_default(&c);
	for (size_t i = 0; i < config_n_keys; i++)
		if (config_keys[i].type == CONFIG_COUNT)
			*(uint32_t *)config_key_field(&c, &config_keys[i]) = 12345;
	cr_assert_eq(load(&c, text, &f), 0, "%s", f.text);
	cr_assert_eq(memcmp(&c, &defaults, sizeof(c)), 0);
}

TEST(the_shipped_example_is_the_printed_one)
{
	_cleanup_(freep) char *text = printed(config_write_example);
	_cleanup_(freep) char *file = slurp(SHARDD_SOURCE_DIR "/deploy/shardd.yaml.example");

	cr_assert_str_eq(file, text, "write it again: shardd --example-config");
}

/* Several nodes: values by "key value" lines; 127.0.0.1 needs no certificates. */
static int check_nodes(const char *lines, struct config *ret, struct fault *f)
{
	char text[1024], *save = NULL;

	snprintf(text, sizeof(text), "%s", lines);
	config_default(ret);
	*f = FAULT_NULL;
	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
		char *value = strchr(line, ' ');

		*value = '\0';
		cr_assert_eq(config_set(ret, line, value + 1, f), 0, "%s", f->text);
	}
	return config_check(ret, f);
}

#define TLS   "peer_ca /a\npeer_cert /c\npeer_key /k\n"
#define LOCAL "peer_listen 127.0.0.1:7400\nnode_name a\n"

TEST(keys_of_several_nodes_are_checked_together)
{
	static const struct {
		const char *lines, *field, *what; /* no field: allowed */
	} cases[] = {
		{ "coord embedded\n" LOCAL "coord_seeds a=127.0.0.1", NULL, NULL },
		{ "coord embedded\ncoord_nodes 3\npeer_listen 0.0.0.0:7400\npeer_advertise "
		  "n-1:7400\n"
		  "node_name x-1\ncoord_seeds dns:shardd\n" TLS "peer_allow x-0,x-1,x-2",
		  NULL, NULL },
		{ "coord etcd://h:2379\n" LOCAL, NULL, NULL },
		{ "coord etcd://h:2379,[::1]:5\npeer_listen 10.0.0.1:7400\npeer_insecure yes\n"
		  "node_name a",
		  NULL, NULL },
		{ "coord etcd://h:2379\n" LOCAL "coord_ca /none/ca.pem", "coord_ca",
		  "which cannot be read" },
		{ "coord etcd://h:2379\n" LOCAL "coord_ca /dev/null", "coord_ca",
		  "which has no text in PEM form" },
		{ TLS "peer_allow a\npeer_listen 0.0.0.0:1\npeer_advertise h:1", "peer_listen",
		  "coord is none" },
		{ TLS, "peer_ca", "coord is none" },
		{ "data_interface eth0", "data_interface", "coord is none" },
		{ "data_address 10.0.0.1", "data_address", "coord is none" },
		{ "recorded_order no", "recorded_order", "coord is none" },
		{ "replicas 1", "replicas", "coord is none" },
		{ "order ranks", "order", "coord is none" },
		{ "coord_seeds a=h", "coord_seeds", "unless coord is embedded" },
		{ "coord_ca /a", "coord_ca", "unless coord is etcd" },
		{ "coord_nodes 3", "coord_nodes", "it must be 0 unless" },
		{ "coord etcd://h:1\n" LOCAL "coord_etcd /e", "coord_etcd",
		  "unless coord is embedded" },
		{ "coord etcd://h:1\n" LOCAL "coord_nodes 3", "coord_nodes", "it must be 0" },
		{ "coord_dir /e", "coord_dir", "it must be /var/lib/shardd/etcd unless coord is" },
		{ "coord etcd://h:1\n" LOCAL "coord_dir /e", "coord_dir",
		  "unless coord is embedded" },
		{ "coord etcd://h:1\n" LOCAL "coord_client_port 1", "coord_client_port",
		  "'1', and coord is etcd://h:1; it must be 2379" },
		{ "coord etcd://h:1\n" LOCAL "coord_peer_port 1", "coord_peer_port", "2380" },
		{ "node_name a", "node_name", "coord is none; it must be empty" },
		{ "cluster a", "cluster", "coord is none; it must be shardd" },
		{ "peer_insecure yes", "peer_insecure", "coord is none; it must be no" },
		{ "coord etcd", "coord", "it must be none" },
		{ "coord etcd://", "coord", "it must be none" },
		{ "coord etcd://h", "coord", "it must be none" },
		{ "coord etcd://h:1,", "coord", "it must be none" },
		{ "coord etcd://0.0.0.0:1", "coord", "it must be none" },
		{ "coord etcd://http://h:1", "coord", "it must be none" },
		{ "coord Embedded", "coord", "it must be none" },
		{ "cluster a/b", "cluster", "letters, digits" },
		{ "node_name a/b", "node_name", "letters, digits" },
		{ "coord embedded\nnode_name a\ncoord_seeds a=h", "peer_listen", "is empty" },
		{ "coord etcd://h:1\nnode_name a\npeer_listen localhost:7400", "peer_listen",
		  "must be ADDRESS:PORT" },
		{ "coord etcd://h:1\nnode_name a\npeer_listen 10.0.0.1", "peer_listen",
		  "must be ADDRESS:PORT" },
		{ "coord etcd://h:1\nnode_name a\npeer_listen 10.0.0.1:7400", "peer_cert",
		  "must be set unless peer_insecure" },
		{ "coord etcd://h:1\nnode_name a\npeer_listen 0.0.0.0:7400\n" TLS, "peer_advertise",
		  "is empty, and peer_listen is" },
		{ "peer_listen [::]:7400", "peer_advertise", "is empty, and peer_listen is" },
		{ "peer_advertise 0.0.0.0:7400", "peer_advertise", "other nodes reach" },
		{ "peer_advertise h", "peer_advertise", "must be HOST:PORT" },
		{ "peer_cert /c", "peer_key", "peer_cert is set" },
		{ "peer_key /k", "peer_cert", "peer_key is set" },
		{ "peer_ca /a", "peer_cert", "peer_ca is set" },
		{ "peer_cert /c\npeer_key /k", "peer_ca", "peer_cert is set" },
		{ TLS "peer_insecure yes", "peer_insecure", "must be no" },
		{ "peer_allow a", "peer_allow", "without certificates" },
		{ TLS "peer_allow a,b/c", "peer_allow", "'b/c'" },
		{ "coord_user u", "coord_password_file", "coord_user is set" },
		{ "coord_password_file /p", "coord_user", "coord_password_file is set" },
		{ "coord_cert /c", "coord_key", "coord_cert is set" },
		{ "coord_cert /c\ncoord_key /k", "coord_ca", "coord_cert is set" },
		{ "data_interface eth0\ndata_address 10.0.0.1", "data_interface", "one of them" },
		{ "data_interface a/b", "data_interface", "name of a network" },
		{ "data_address 0.0.0.0", "data_address", "address or a host name" },
		{ "data_address h:1", "data_address", "without a port" },
		{ "coord embedded\n" LOCAL, "coord_seeds", "must list the nodes" },
		{ "coord embedded\n" LOCAL "coord_seeds a", "coord_seeds", "no '='" },
		{ "coord embedded\n" LOCAL "coord_seeds a=h\ncoord_nodes 3", "coord_seeds",
		  "must have 3" },
		{ "coord embedded\n" LOCAL "coord_seeds dns:s\ncoord_nodes 3", "node_name",
		  "'-' and a number" },
		{ "coord embedded\n" LOCAL "coord_seeds a=h\ncoord_peer_port 2379",
		  "coord_peer_port", "another port" },
		{ "coord embedded\n" LOCAL "coord_seeds a=h\ncoord_ca /a", "coord_ca",
		  "must be empty unless coord is etcd" },
		{ "coord etcd://h:1\n" LOCAL "coord_seeds a=h", "coord_seeds",
		  "must be empty unless coord is embedded" },
		{ "coord etcd://h:1\n" LOCAL "coord_user u\ncoord_password_file /no/such",
		  "coord_password_file", "no such file" },
		{ "coord etcd://h:1\n" LOCAL "coord_user u\ncoord_password_file /dev/null",
		  "coord_password_file", "regular file" },
	};

	for (size_t i = 0; i < COUNT(cases); i++) {
		struct config c;
		struct fault f;
		int r = check_nodes(cases[i].lines, &c, &f);

		if (!cases[i].field) {
			cr_expect_eq(r, 0, "%s\n%s", cases[i].lines, f.text);
			continue;
		}
		cr_expect_neq(r, 0, "%s", cases[i].lines);
		cr_expect_str_eq(f.field, cases[i].field, "%s: %s", cases[i].lines, f.text);
		cr_expect(strstr(f.text, cases[i].what), "%s: %s", cases[i].lines, f.text);
	}
}

TEST(a_node_has_the_name_of_its_host_by_default)
{
	char name[NAME_BYTES], host[HOSTPORT_HOST_BYTES] = "";
	struct config c;
	struct fault f;

	cr_assert_eq(gethostname(host, sizeof(host) - 1), 0);
	host[strcspn(host, ".")] = '\0';
	check_nodes("", &c, &f);
	if (name_is_good(host)) {
		cr_assert_eq(config_node_name(&c, name, &f), 0);
		cr_expect_str_eq(name, host);
	}
	check_nodes("node_name other", &c, &f);
	cr_assert_eq(config_node_name(&c, name, &f), 0);
	cr_expect_str_eq(name, "other");
}

TEST(what_the_keys_of_several_nodes_mean)
{
	struct config_endpoints e;
	struct hostport at;
	struct seeds s;
	struct config c;
	struct fault f;
	char host[HOSTPORT_HOST_BYTES];

	cr_assert_eq(check_nodes("coord etcd://h:2379,[::1]:5\n" LOCAL, &c, &f), 0, "%s", f.text);
	cr_assert_eq(config_endpoints(&c, &e, &f), 0);
	cr_assert_eq(e.n, 2);
	cr_expect_str_eq(e.list[0], "h:2379");
	cr_expect_str_eq(e.list[1], "[::1]:5");
	config_data_address(&c, host);
	cr_expect_str_eq(host, "127.0.0.1");
	cr_assert_eq(check_nodes("coord embedded\n" LOCAL "peer_advertise here:9\n"
				 "coord_seeds b=h,a=g:1:2\ncoord_client_port 7\ndata_address d",
				 &c, &f),
		     0, "%s", f.text);
	config_peer_advertise(&c, &at);
	cr_expect_str_eq(at.host, "here");
	cr_expect_eq(at.port, 9);
	config_data_address(&c, host);
	cr_expect_str_eq(host, "d");
	cr_assert_eq(config_seeds(&c, &s, &f), 0);
	cr_assert_eq(s.n, 1);
	cr_expect_str_eq(s.members[0].node, "b");
	cr_expect_eq(s.members[0].client_port, 7);
	cr_expect_eq(s.members[0].peer_port, 2380);
}

static int read_password(const char *contents, mode_t mode, char *ret, struct fault *f)
{
	char path[] = "/tmp/shardd-config-XXXXXX", lines[256];
	struct config c;
	int fd = mkstemp(path), r;

	cr_assert_eq(write(fd, contents, strlen(contents)), (ssize_t)strlen(contents));
	cr_assert_eq(fchmod(fd, mode), 0);
	close(fd);
	snprintf(lines, sizeof(lines),
		 "coord etcd://h:1\n" LOCAL "coord_user u\ncoord_password_file %s", path);
	r = check_nodes(lines, &c, f);
	if (r == 0)
		r = config_password(&c, ret, f);
	unlink(path);
	return r;
}

TEST(a_password_is_one_line_that_others_may_not_read)
{
	char password[CONFIG_SECRET_BYTES], text[300];
	struct fault f;

	cr_assert_eq(read_password("secret word\n", 0640, password, &f), 0, "%s", f.text);
	cr_expect_str_eq(password, "secret word");
	cr_assert_eq(read_password("x", 0600, password, &f), 0, "%s", f.text);
	cr_expect_str_eq(password, "x");
	cr_expect_eq(read_password("x", 0604, password, &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "other users have access"), "%s", f.text);
	cr_expect_eq(read_password("x", 0602, password, &f), FAULT_INVALID);
	cr_expect_eq(read_password("", 0600, password, &f), FAULT_INVALID);
	cr_expect_eq(read_password("\n", 0600, password, &f), FAULT_INVALID);
	cr_expect_eq(read_password("a\nb\n", 0600, password, &f), FAULT_INVALID);
	memset(text, 'a', sizeof(text));
	text[255] = '\0';
	cr_expect_eq(read_password(text, 0600, password, &f), 0, "%s", f.text);
	text[255] = 'a';
	text[256] = '\0';
	cr_expect_eq(read_password(text, 0600, password, &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "one line"), "%s", f.text);
}

TEST(lists_of_words_come_from_files_too)
{
	struct config c;
	struct fault f;

	config_default(&c);
	cr_assert_eq(load(&c, "coord_seeds: [\"a=[::1]:1:2\", b=h]\npeer_allow:\n  - a\n  - b\n",
			  &f),
		     0, "%s", f.text);
	cr_expect_str_eq(c.coord.seeds, "a=[::1]:1:2,b=h");
	cr_expect_str_eq(c.peer.allow, "a,b");
	cr_expect_eq(load(&c, "coord_seeds: a=h\n", &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "must be a list"), "%s", f.text);
}

/* A key of the man page is a paragraph's head, with \- for - and its default. */
TEST(the_man_page_has_every_key)
{
	_cleanup_(freep) char *man = slurp(SHARDD_SOURCE_DIR "/docs/man/shardd.8");

	for (size_t i = 0; i < config_n_keys; i++) {
		char head[128];

		snprintf(head, sizeof(head), "\n.BR %s \" (default: ", config_keys[i].name);
		cr_assert_not_null(strstr(man, head), "%s", config_keys[i].name);
	}
}

TEST(every_key_is_complete)
{
	for (size_t i = 0; i < config_n_keys; i++) {
		const struct config_key *k = &config_keys[i];

		cr_assert_not_null(k->by_default, "%s", k->name);
		cr_assert_gt(strlen(k->help), 5, "%s", k->name);
		cr_assert_eq(config_key_find(k->name), k);
		cr_assert((config_key_is_list(k) && k->type != CONFIG_WORDS) ==
				  (k->count_offset != 0),
			  "%s", k->name);
		cr_assert((k->type == CONFIG_CHOICE) == (k->choices != NULL), "%s", k->name);
	}
}
