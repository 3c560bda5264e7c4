/*
 * The files of checkpoints: what is written is read again, what is damaged is refused, and whenever
 * a save ends or is killed, the checkpoints before it are whole and nothing of it stays for long.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "crc32c.h"
#include "checkpoint/draft.h"
#include "checkpoint/folder.h"
#include "checkpoint/save.h"
#include "core/cleanup.h"
#include "fdcheck.h"

static char base[64];
static int dir = -1;

static void setup(void)
{
	fdcheck_begin();
	snprintf(base, sizeof(base), "/tmp/shardd-checkpoint-XXXXXX");
	cr_assert(mkdtemp(base));
	dir = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	cr_assert_geq(dir, 0);
}

static void remove_tree(const char *path)
{
	DIR *d = opendir(path);
	struct dirent *e;

	while (d && (e = readdir(d))) {
		char sub[512];

		snprintf(sub, sizeof(sub), "%s/%s", path, e->d_name);
		if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlink(sub) < 0)
			remove_tree(sub);
	}
	if (d)
		closedir(d);
	rmdir(path);
}

static void teardown(void)
{
	dir = fd_close(dir);
	remove_tree(base);
	fdcheck_end();
}

TestSuite(checkpoint_files, .init = setup, .fini = teardown, .timeout = 60);

/* ------------------------------------------------------------------------ checksums */

Test(checkpoint_files, checksum_is_crc32c)
{
	unsigned char buf[67];

	cr_assert_eq(crc32c_add(0, "123456789", 9), 0xe3069283u);
	cr_assert_eq(crc32c_add_plain(0, "123456789", 9), 0xe3069283u);
	cr_assert_eq(crc32c_add(0, "", 0), 0);
	for (unsigned i = 0; i < sizeof(buf); i++)
		buf[i] = (unsigned char)(i * 37 + 5);
	for (size_t n = 0; n <= sizeof(buf); n++) {
		uint32_t parts = crc32c_add(crc32c_add(0, buf, n), buf + n, sizeof(buf) - n);

		cr_assert_eq(crc32c_add(0, buf, n), crc32c_add_plain(0, buf, n), "%zu", n);
		cr_assert_eq(parts, crc32c_add_plain(0, buf, sizeof(buf)), "%zu", n);
	}
}

/* Long ones are summed in lanes side by side, where the processor has an instruction for it. */
Test(checkpoint_files, checksum_of_many_bytes)
{
	enum { BYTES = 100003 };
	unsigned char *buf = malloc(BYTES);

	cr_assert(buf);
	for (size_t i = 0; i < BYTES; i++)
		buf[i] = (unsigned char)(i * i >> 3 ^ i);
	for (size_t n = 0; n + 12288 < BYTES; n += 997) {
		uint32_t begun = (uint32_t)(n * 2654435761u);

		for (size_t bytes = 12287; bytes <= 12289; bytes++)
			cr_assert_eq(crc32c_add(begun, buf + n % 16, bytes),
				     crc32c_add_plain(begun, buf + n % 16, bytes));
		cr_assert_eq(crc32c_add(begun, buf + n, BYTES - n),
			     crc32c_add_plain(begun, buf + n, BYTES - n), "%zu", n);
	}
	free(buf);
}

/* --------------------------------------------------------------------------- headers */

static int file_of(const char *header, uint64_t said, size_t data)
{
	int fd = memfd_create("tensors", MFD_CLOEXEC);
	size_t n = strlen(header);

	cr_assert_geq(fd, 0);
	cr_assert_eq(write(fd, &said, sizeof(said)), (ssize_t)sizeof(said));
	cr_assert_eq(write(fd, header, n), (ssize_t)n);
	cr_assert_eq(ftruncate(fd, (off_t)(sizeof(said) + n + data)), 0);
	return fd;
}

#define T(dtype, shape, offsets) \
	"{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static const struct bad_header {
	const char *header;
	size_t data;
	const char *why;
} bad_headers[] = {
	{ "", 0, "not a JSON object" },
	{ "[1]", 0, "not a JSON object" },
	{ "{\"a\":", 0, "not a JSON object" },
	{ "{\"a\":1,\"a\":1}", 0, "not a JSON object" },
	{ "{\"a\":1}", 0, "dtype" },
	{ "{\"a\":\"\xff\"}", 0, "not a JSON object" },
	{ T("\"I8\"", "[1]", "[0,1]"), 1, "dtype" },
	{ T("7", "[1]", "[0,4]"), 4, "dtype" },
	{ T("\"none\"", "[1]", "[0,0]"), 0, "dtype" },
	{ T("\"F32\"", "4", "[0,4]"), 4, "shape" },
	{ T("\"F32\"", "[-1]", "[0,4]"), 4, "something else than numbers" },
	{ T("\"F32\"", "[1.0]", "[0,4]"), 4, "something else than numbers" },
	{ T("\"F32\"", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
	    "[0,4]"),
	  4, "at most 32" },
	{ T("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4, "bytes of its shape" },
	{ T("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "bytes of its shape" },
	{ T("\"F32\"", "[2]", "[0,4]"), 4, "bytes of its shape" },
	{ T("\"F32\"", "[1]", "[0]"), 4, "not inside" },
	{ T("\"F32\"", "[1]", "[4,0]"), 4, "not inside" },
	{ T("\"F32\"", "[1]", "[0,4]"), 3, "not inside" },
	{ T("\"F32\"", "[1]", "[-4,0]"), 4, "not inside" },
	{ T("\"F32\"", "[1]", "[0,4]"), 5, "in no tensor" },
	{ T("\"F32\"", "[1]", "[4,8]"), 8, "in no tensor" },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
	  "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
	  6, "overlap" },
};

Test(checkpoint_files, refuses_files_that_are_no_safetensors)
{
	for (size_t i = 0; i < sizeof(bad_headers) / sizeof(bad_headers[0]); i++) {
		const struct bad_header *b = &bad_headers[i];
		_cleanup_(fd_closep) int fd = file_of(b->header, strlen(b->header), b->data);
		struct tensor_list l = TENSOR_LIST_NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(tensor_list_read(fd, "x", &l, &f), FAULT_LOST, "%s", b->header);
		cr_assert(strstr(f.text, b->why), "%s: %s", b->header, f.text);
		cr_assert_null(l.entries);
	}
}

Test(checkpoint_files, refuses_headers_longer_than_the_file)
{
	static const uint64_t said[] = { 3, TENSOR_FILE_MAX_HEADER + 1ull, UINT64_MAX,
					 UINT64_MAX - 7, (uint64_t)1 << 63 };

	for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
		_cleanup_(fd_closep) int fd = file_of("{}", said[i], 0);
		struct tensor_list l = TENSOR_LIST_NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(tensor_list_read(fd, "x", &l, &f), FAULT_LOST);
		cr_assert(strstr(f.text, "header is longer"), "%s", f.text);
	}
}

Test(checkpoint_files, headers_are_aligned_and_read_again)
{
	struct tensor_list l = TENSOR_LIST_NULL, again = TENSOR_LIST_NULL;
	const uint64_t odd[] = { 3 }, none[] = { 0, 5 };
	struct fault f = FAULT_NULL;
	const struct tensor_entry *e;
	char *header;
	size_t bytes;
	int fd;

	cr_assert_eq(tensor_list_add(&l, "u8", TENSOR_UINT8, odd, 1, &f), 0);
	cr_assert_eq(tensor_list_add(&l, "f32", TENSOR_FP32, odd, 1, &f), 0);
	cr_assert_eq(tensor_list_add(&l, "bf16", TENSOR_BF16, odd, 1, &f), 0);
	cr_assert_eq(tensor_list_add(&l, "\"quoted\"\n", TENSOR_INT64, NULL, 0, &f), 0);
	cr_assert_eq(tensor_list_add(&l, "empty", TENSOR_FP64, none, 2, &f), 0);
	cr_assert_eq(tensor_list_encode(&l, &header, &bytes, &f), 0, "%s", f.text);
	cr_assert_eq(bytes % 8, 0);
	cr_assert_eq(tensor_list_bytes(&l), 8 + 12 + 6 + 3);
	fd = memfd_create("tensors", MFD_CLOEXEC);
	cr_assert_eq(write(fd, header, bytes), (ssize_t)bytes);
	cr_assert_eq(ftruncate(fd, (off_t)(bytes + tensor_list_bytes(&l))), 0);
	cr_assert_eq(tensor_list_read(fd, "x", &again, &f), 0, "%s", f.text);
	cr_assert_eq(again.n, 5);
	cr_assert_eq(again.data_at, bytes);
	e = tensor_list_find(&again, "f32");
	cr_assert(e && e->begin == 8 && e->bytes == 12 && e->dims == 1 && e->shape[0] == 3);
	e = tensor_list_find(&again, "\"quoted\"\n");
	cr_assert(e && e->begin == 0 && e->dims == 0 && e->type == TENSOR_INT64);
	cr_assert_null(tensor_list_find(&again, "f3"));
	free(header);
	close(fd);
	tensor_list_deinit(&l);
	tensor_list_deinit(&again);
}

Test(checkpoint_files, impossible_tensors_are_not_listed)
{
	struct tensor_list l = TENSOR_LIST_NULL;
	const uint64_t large[] = { 1ull << 40, 1ull << 40 }, one[] = { 1 };
	struct fault f = FAULT_NULL;
	char *header;
	size_t bytes;

	cr_assert_eq(tensor_list_add(&l, "a", TENSOR_FP32, large, 2, &f), FAULT_INVALID);
	f = FAULT_NULL;
	cr_assert_eq(tensor_list_add(&l, "__metadata__", TENSOR_FP32, one, 1, &f), FAULT_INVALID);
	f = FAULT_NULL;
	cr_assert_eq(tensor_list_add(&l, "b", TENSOR_FP32, one, 1, &f), 0);
	cr_assert_eq(tensor_list_add(&l, "b", TENSOR_FP32, one, 1, &f), 0);
	cr_assert_eq(tensor_list_encode(&l, &header, &bytes, &f), FAULT_INVALID);
	cr_assert(strstr(f.text, "two tensors have the name 'b'"), "%s", f.text);
	f = FAULT_NULL;
	l.n--;
	free(l.entries[1].key);
	cr_assert_eq(tensor_list_add(&l, "\xff", TENSOR_FP32, one, 1, &f), 0);
	cr_assert_eq(tensor_list_encode(&l, &header, &bytes, &f), FAULT_INVALID);
	cr_assert(strstr(f.text, "UTF-8"), "%s", f.text);
	tensor_list_deinit(&l);
}

/* ---------------------------------------------------------------------- checkpoints */

#define ROWS 700
#define COLS 1000 /* more than a chunk has */

/* The element's bytes are functions of its place, so that no two pieces are alike. */
struct model {
	struct index *x;
	unsigned char *buf;
	int kill_at; /* the call of fill that is the last; -1: none */
	int calls;
};

static void fill(const struct index_piece *p, uint64_t offset, unsigned char *buf, size_t n)
{
	uint64_t from = p->begin * tensor_type_bytes(p->type) + offset;
	unsigned salt = (unsigned)strlen(p->tensor) * 7u + p->array * 31u + p->rank * 3u;

	for (size_t i = 0; i < n; i++)
		buf[i] = (unsigned char)((from + i) * 2654435761u >> 9) ^ (unsigned char)salt;
}

static const void *model_data(void *arg, size_t piece, uint64_t offset, size_t bytes,
			      struct fault *f)
{
	struct model *m = arg;

	(void)f;
	if (m->calls++ == m->kill_at)
		raise(SIGKILL);
	fill(&m->x->pieces[piece], offset, m->buf, bytes);
	return m->buf;
}

static void add(struct index *x, const char *tensor, enum index_array array, enum tensor_type type,
		uint64_t rows, uint64_t begin, uint64_t elements, uint32_t file)
{
	uint64_t shape[] = { rows, COLS };
	struct fault f = FAULT_NULL;
	struct index_piece p = { .unit = (char *)(uintptr_t) "layer/0",
				 .tensor = (char *)(uintptr_t)tensor,
				 .array = (uint8_t)array,
				 .type = (uint8_t)type,
				 .dims = 2,
				 .shape = shape,
				 .begin = begin,
				 .elements = elements,
				 .file = file };

	cr_assert_eq(index_add(x, &p, &f), 0, "%s", f.text);
}

/* A tensor in two pieces on two devices, with its optimizer state, one in one piece, and a blob. */
static void model_index(struct index *x, uint64_t step)
{
	uint64_t blob[] = { 5 };
	struct index_piece p = { .unit = (char *)(uintptr_t) "",
				 .tensor = (char *)(uintptr_t) "",
				 .array = INDEX_BLOB,
				 .type = TENSOR_UINT8,
				 .rank = 1,
				 .dims = 1,
				 .shape = blob,
				 .elements = 5 };
	struct fault f = FAULT_NULL;

	cr_assert_eq(index_init(x, "job", step, 2, &f), 0);
	cr_assert_eq(index_add_file(x, "shard-00000.safetensors", &f), 0);
	cr_assert_eq(index_add_file(x, "shard-00001.safetensors", &f), 0);
	for (int a = INDEX_PARAM; a <= INDEX_EXP_AVG_SQ; a++) {
		add(x, "weight", (enum index_array)a, TENSOR_FP32, ROWS, 350001, 349999, 1);
		add(x, "weight", (enum index_array)a, TENSOR_FP32, ROWS, 0, 350001, 0);
	}
	add(x, "bias@1", INDEX_PARAM, TENSOR_BF16, 1, 0, COLS, 0);
	cr_assert_eq(index_add(x, &p, &f), 0);
}

static int save(uint64_t step, struct model *m, struct fault *f)
{
	const struct save_options o = { 0 };
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	int r;

	model_index(&x, step);
	m->x = &x;
	m->buf = malloc(SAVE_CHUNK_BYTES);
	r = save_write(dir, &x, &o, model_data, m, &p, f);
	free(m->buf);
	index_deinit(&x);
	return r;
}

static void save_well(uint64_t step)
{
	struct model m = { .kill_at = -1 };
	struct fault f = FAULT_NULL;

	cr_assert_eq(save(step, &m, &f), 0, "%s", f.text);
}

static int verify(uint64_t step, struct fault *f)
{
	_cleanup_(fd_closep) int fd = folder_open(dir, step, f);
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	int r = fd < 0 ? (int)f->code : save_read(fd, &x, f);

	if (r == 0)
		r = save_verify(fd, &x, &p, f);
	index_deinit(&x);
	return r;
}

/* Names in the folder, hidden ones too. */
static unsigned names(void)
{
	DIR *d = opendir(base);
	struct dirent *e;
	unsigned n = 0;

	while ((e = readdir(d)))
		n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
	closedir(d);
	return n;
}

Test(checkpoint_files, what_is_saved_is_read_again)
{
	_cleanup_(fd_closep) int fd = -1;
	struct fault f = FAULT_NULL;
	struct index x = INDEX_NULL;
	unsigned char *want = malloc(SAVE_CHUNK_BYTES), *have = malloc(SAVE_CHUNK_BYTES);

	save_well(7);
	cr_assert_eq(verify(7, &f), 0, "%s", f.text);
	fd = folder_open(dir, 7, &f);
	cr_assert_eq(save_read(fd, &x, &f), 0, "%s", f.text);
	cr_assert_str_eq(x.job, "job");
	cr_assert_eq(x.step, 7);
	cr_assert_eq(x.world_size, 2);
	cr_assert_eq(x.n_pieces, 8);
	for (size_t i = 0; i < x.n_pieces; i++) {
		const struct index_piece *p = &x.pieces[i];
		int file = save_open_file(fd, &x, p->file, &f);
		size_t n = index_piece_bytes(p);

		cr_assert_eq(save_read_piece(&x, file, p, 0, have, n, &f), 0);
		fill(p, 0, want, n);
		cr_assert_arr_eq(have, want, n, "%s", p->key);
		close(file);
	}
	free(want);
	free(have);
	index_deinit(&x);
}

Test(checkpoint_files, a_step_is_saved_once)
{
	struct model m = { .kill_at = -1 };
	struct fault f = FAULT_NULL;

	save_well(7);
	cr_assert_eq(save(7, &m, &f), FAULT_STATE);
	cr_assert(strstr(f.text, "step-000000000007"), "%s", f.text);
	cr_assert_eq(m.calls, 0);
	cr_assert_eq(names(), 1);
}

Test(checkpoint_files, every_damaged_byte_is_found)
{
	static const char *const files[] = { "index.json", "shard-00000.safetensors",
					     "shard-00001.safetensors" };
	char path[256];

	save_well(1);
	for (size_t i = 0; i < 3; i++) {
		_cleanup_(fd_closep) int fd = -1;
		off_t end, step;

		snprintf(path, sizeof(path), "%s/step-000000000001/%s", base, files[i]);
		fd = open(path, O_RDWR | O_CLOEXEC);
		end = lseek(fd, 0, SEEK_END);
		step = i == 0 ? 1 : end / 13;
		for (off_t at = 0; at < end; at += step) {
			struct fault f = FAULT_NULL;
			unsigned char c, d;

			cr_assert_eq(pread(fd, &c, 1, at), 1);
			if (i == 0 && (c == ' ' || c == '\n'))
				continue; /* white space of JSON says nothing */
			d = c ^ 1;
			cr_assert_eq(pwrite(fd, &d, 1, at), 1);
			cr_assert_neq(verify(1, &f), 0, "%s at %ld", files[i], (long)at);
			cr_assert_eq(pwrite(fd, &c, 1, at), 1);
		}
	}
	cr_assert_eq(verify(1, &(struct fault){ 0 }), 0);
}

Test(checkpoint_files, missing_short_and_foreign_files_are_found)
{
	struct fault f = FAULT_NULL;
	char path[256], other[256];

	save_well(1);
	snprintf(path, sizeof(path), "%s/step-000000000001/shard-00001.safetensors", base);
	snprintf(other, sizeof(other), "%s/step-000000000001/shard-00000.safetensors", base);
	cr_assert_eq(truncate(path, 5000000), 0);
	cr_assert_eq(verify(1, &f), FAULT_LOST);
	cr_assert(strstr(f.text, "shard-00001"), "%s", f.text);
	f = FAULT_NULL;
	cr_assert_eq(unlink(path), 0);
	cr_assert_eq(verify(1, &f), FAULT_LOST);
	cr_assert(strstr(f.text, "is missing"), "%s", f.text);
	f = FAULT_NULL;
	cr_assert_eq(symlink(other, path), 0);
	cr_assert_neq(verify(1, &f), 0);
	f = FAULT_NULL;
	cr_assert_eq(unlink(path), 0);
	cr_assert_eq(mkfifo(path, 0600), 0);
	cr_assert_eq(verify(1, &f), FAULT_LOST);
	cr_assert(strstr(f.text, "not a regular file"), "%s", f.text);
	f = FAULT_NULL;
	cr_assert_eq(verify(2, &f), FAULT_NOT_FOUND);
}

/* Killed at each piece of data: what was there before is whole, and the next save removes the rest. */
Test(checkpoint_files, a_killed_save_leaves_the_one_before)
{
	struct model counted = { .kill_at = -1 };
	struct fault f = FAULT_NULL;

	cr_assert_eq(save(1, &counted, &f), 0);
	cr_assert_geq(counted.calls, 8);
	for (int at = 0; at < counted.calls; at++) {
		struct model m = { .kill_at = at };
		pid_t pid = fork();
		int status;

		if (pid == 0) {
			save(2, &m, &f);
			_exit(0);
		}
		cr_assert_eq(waitpid(pid, &status, 0), pid);
		cr_assert(WIFSIGNALED(status));
		cr_assert_eq(names(), 2);
		cr_assert_eq(verify(1, &f), 0, "%s", f.text);
		cr_assert_eq(verify(2, &(struct fault){ 0 }), FAULT_NOT_FOUND);
		f = FAULT_NULL;
	}
	save_well(2);
	cr_assert_eq(names(), 2);
	cr_assert_eq(verify(2, &f), 0, "%s", f.text);
}

static const void *cancelling_data(void *arg, size_t piece, uint64_t offset, size_t bytes,
				   struct fault *f)
{
	struct save_progress *p = arg;
	static unsigned char zeros[SAVE_CHUNK_BYTES];

	(void)piece;
	(void)offset;
	(void)bytes;
	(void)f;
	atomic_store(&p->cancel, true);
	return zeros;
}

Test(checkpoint_files, a_cancelled_save_leaves_nothing)
{
	const struct save_options o = { .bytes_per_s = 1 }; /* it would never end */
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	struct fault f = FAULT_NULL;

	model_index(&x, 3);
	cr_assert_eq(save_write(dir, &x, &o, cancelling_data, &p, &p, &f), FAULT_CANCELLED);
	cr_assert_eq(names(), 0);
	index_deinit(&x);
}

static const void *failing_data(void *arg, size_t piece, uint64_t offset, size_t bytes,
				struct fault *f)
{
	(void)arg;
	(void)piece;
	(void)offset;
	(void)bytes;
	fault_set(f, FAULT_EXHAUSTED, NULL, "no memory for the copy");
	return NULL;
}

Test(checkpoint_files, a_save_without_data_fails_with_its_cause)
{
	const struct save_options o = { 0 };
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	struct fault f = FAULT_NULL;

	model_index(&x, 3);
	cr_assert_eq(save_write(dir, &x, &o, failing_data, NULL, &p, &f), FAULT_EXHAUSTED);
	cr_assert_str_eq(f.text, "no memory for the copy");
	cr_assert_eq(names(), 0);
	index_deinit(&x);
}

/* Mounts of this process alone, also for a user who is not root. */
static bool own_mounts(void)
{
	uid_t uid = getuid();

	if (unshare(CLONE_NEWNS) < 0) {
		_cleanup_(fd_closep) int map = -1;

		if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
			return false;
		map = open("/proc/self/uid_map", O_WRONLY | O_CLOEXEC);
		if (map < 0 || dprintf(map, "0 %u 1", uid) < 0)
			return false;
	}
	return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* In a child. Return: its exit code: 77 where it may not mount. */
static int save_on_small_disk(unsigned kib)
{
	struct model m = { .kill_at = -1 };
	struct fault f = FAULT_NULL;
	char size[32];

	snprintf(size, sizeof(size), "size=%uk", kib);
	if (!own_mounts() || mount("none", base, "tmpfs", 0, size) < 0)
		return 77;
	close(dir);
	dir = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (save(2, &m, &f) != FAULT_EXHAUSTED || !strstr(f.text, "No space left")) {
		fprintf(stderr, "a save on %u KiB: %s\n", kib, f.text);
		return 1;
	}
	return names() == 0 ? 0 : 2;
}

Test(checkpoint_files, a_full_disk_is_an_error_and_leaves_nothing)
{
	for (unsigned kib = 4; kib < 8000; kib += 1300) {
		pid_t pid = fork();
		int status;

		if (pid == 0)
			_exit(save_on_small_disk(kib));
		cr_assert_eq(waitpid(pid, &status, 0), pid);
		cr_assert(WIFEXITED(status));
		if (WEXITSTATUS(status) == 77)
			cr_skip_test("no user namespaces here");
		cr_assert_eq(WEXITSTATUS(status), 0, "%u KiB", kib);
	}
}

/* -------------------------------------------------------------------------- folders */

Test(checkpoint_files, prune_keeps_the_newest)
{
	struct fault f = FAULT_NULL;
	size_t removed, left, n;
	uint64_t *steps;

	for (uint64_t step = 8; step <= 11; step++)
		save_well(step);
	cr_assert_eq(folder_prune(dir, 2, &removed, &left, &f), 0, "%s", f.text);
	cr_assert_eq(removed, 2);
	cr_assert_eq(left, 0);
	cr_assert_eq(folder_list(dir, &steps, &n, &f), 0);
	cr_assert(n == 2 && steps[0] == 10 && steps[1] == 11);
	free(steps);
	cr_assert_eq(folder_prune(dir, 5, &removed, &left, &f), 0);
	cr_assert_eq(removed, 0);
	cr_assert_eq(names(), 2);
}

Test(checkpoint_files, what_is_being_saved_is_no_leftover)
{
	struct folder_new n = FOLDER_NEW_NULL;
	struct fault f = FAULT_NULL;
	size_t left;

	cr_assert_eq(folder_begin(dir, 5, &n, &f), 0);
	cr_assert_eq(mkdirat(dir, ".saving-000000000004-00000000", 0777), 0);
	cr_assert_eq(mkdirat(dir, ".removing-step-000000000004-00000000", 0777), 0);
	cr_assert_eq(mkdirat(dir, "another", 0777), 0);
	cr_assert_eq(folder_tidy(dir, &left, &f), 0);
	cr_assert_eq(left, 2);
	cr_assert_eq(names(), 2);
	cr_assert_eq(folder_commit(&n, &f), 0, "%s", f.text);
	folder_abandon(&n);
	cr_assert_eq(names(), 2);
}

Test(checkpoint_files, of_two_saves_of_a_step_one_fails)
{
	struct folder_new a = FOLDER_NEW_NULL, b = FOLDER_NEW_NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(folder_begin(dir, 5, &a, &f), 0);
	cr_assert_eq(folder_begin(dir, 5, &b, &f), 0);
	cr_assert_eq(folder_commit(&b, &f), 0);
	cr_assert_eq(folder_commit(&a, &f), FAULT_STATE);
	folder_abandon(&a);
	folder_abandon(&b);
	cr_assert_eq(names(), 1);
}

Test(checkpoint_files, only_whole_names_are_checkpoints)
{
	uint64_t step;

	cr_assert(folder_step_of("step-000000000012", &step) && step == 12);
	cr_assert(folder_step_of("step-1234567890123", &step) && step == 1234567890123u);
	cr_assert_not(folder_step_of("step-12", &step));
	cr_assert_not(folder_step_of("step-00000000001x", &step));
	cr_assert_not(folder_step_of("step--00000000001", &step));
	cr_assert_not(folder_step_of("step-99999999999999999999", &step));
	cr_assert_not(folder_step_of(".saving-000000000001-00000000", &step));
}

/* --------------------------------------------------------------------------- the index */

static int decode(const char *text, struct fault *f)
{
	struct index x = INDEX_NULL;
	int r = index_decode(text, strlen(text), &x, f);

	index_deinit(&x);
	return r;
}

/* @inner with the right checksum: what is refused then is not refused because of that. */
static int decode_inner(const char *inner, struct fault *f)
{
	char *text = NULL;
	int r;

	cr_assert_gt(asprintf(&text, "{\"crc32c\":\"%08x\",\"checkpoint\":%s}",
			      crc32c_add(0, inner, strlen(inner)), inner),
		     0);
	r = decode(text, f);
	free(text);
	return r;
}

#define INNER(created, files, pieces)                                        \
	"{\"created_unix_s\":" created ",\"files\":" files                   \
	",\"format\":\"shardd-checkpoint\",\"job\":\"j\",\"pieces\":" pieces \
	",\"step\":1,\"version\":1,\"world_size\":1}"
#define FILES "[{\"bytes\":1,\"name\":\"a\"}]"
#define PIECE(array, begin, crc, dtype, elements, file, key, shape)                               \
	"{\"array\":\"" array "\",\"begin\":" begin ",\"crc32c\":\"" crc "\",\"dtype\":\"" dtype  \
	"\",\"elements\":" elements ",\"file\":\"" file "\",\"key\":\"" key "\",\"shape\":" shape \
	",\"steps\":0,\"tensor\":\"t\",\"unit\":\"u\"}"
#define GOOD PIECE("param", "0", "00000000", "F32", "6", "a", "param/u/t", "[2,3]")

Test(checkpoint_files, refuses_indexes_with_impossible_values)
{
	static const char *const bad[] = {
		"[]",
		"{}",
		INNER("-1", FILES, "[]"),
		INNER("0", "1", "[]"),
		INNER("0", "[1]", "[]"),
		INNER("0", "[{\"bytes\":1,\"name\":\"../a\"}]", "[]"),
		INNER("0", "[{\"bytes\":1,\"name\":\"..\"}]", "[]"),
		INNER("0", "[{\"bytes\":1,\"name\":\"index.json\"}]", "[]"),
		INNER("0", "[{\"bytes\":-1,\"name\":\"a\"}]", "[]"),
		INNER("0", "[{\"bytes\":1,\"name\":\"a\"},{\"bytes\":1,\"name\":\"a\"}]", "[]"),
		INNER("0", FILES, "1"),
		INNER("0", FILES, "[1]"),
		INNER("0", FILES, "[" GOOD "," GOOD "]"),
		INNER("0", FILES,
		      "[" PIECE("grad", "0", "00000000", "F32", "6", "a", "param/u/t",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "00000000", "F32", "5", "a", "param/u/t@0",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "1", "00000000", "F32", "5", "a", "param/u/t@1",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "00000000", "F32", "7", "a", "param/u/t@0",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "0000000", "F32", "6", "a", "param/u/t",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "00000000", "F31", "6", "a", "param/u/t",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "00000000", "F32", "6", "b", "param/u/t",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "00000000", "F32", "6", "a", "param/u/s",
				"[2,3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "0", "00000000", "F32", "6", "a", "param/u/t",
				"[-2,-3]") "]"),
		INNER("0", FILES,
		      "[" PIECE("param", "9223372036854775807", "00000000", "F32",
				"9223372036854775807", "a", "param/u/t@9223372036854775807",
				"[4294967296,4294967296]") "]"),
	};
	struct fault f = FAULT_NULL;

	cr_assert_eq(decode_inner(INNER("0", FILES, "[" GOOD "]"), &f), 0, "%s", f.text);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		f = FAULT_NULL;
		cr_assert_eq(decode_inner(bad[i], &f), FAULT_LOST, "%s", bad[i]);
		cr_assert_not(strstr(f.text, "checksum"), "%s", bad[i]);
	}
}

/* Many pieces, whose texts fill several chunks; the draft's own texts may go before the index. */
Test(checkpoint_files, an_index_of_a_draft_is_the_one_that_was_noted)
{
	struct index noted = INDEX_NULL, added = INDEX_NULL;
	_cleanup_(freep) char *a = NULL, *b = NULL;
	struct draft d = DRAFT_NULL;
	struct fault f = FAULT_NULL;

	model_index(&noted, 7);
	model_index(&added, 7);
	for (unsigned i = 0; i < 9000; i++) {
		const uint64_t shape[] = { i, 2 };
		char unit[32], tensor[64];
		struct index_piece p = { .unit = unit,
					 .tensor = tensor,
					 .array = i % 3,
					 .type = TENSOR_FP32,
					 .dims = i % 2 ? 2 : 0,
					 .shape = (uint64_t *)(uintptr_t)shape,
					 .elements = i % 2 ? 2 * i : 1 };

		snprintf(unit, sizeof(unit), "unit.%u", i / 100);
		snprintf(tensor, sizeof(tensor), "a tensor with a longer name %u", i);
		d.unit_from = i % 100 ? unit : NULL; /* else the address says nothing here */
		d.tensor_from = NULL;
		cr_assert_eq(draft_add(&d, &p), 0);
		cr_assert_eq(index_add(&added, &p, &f), 0, "%s", f.text);
	}
	cr_assert_eq(draft_finish(&d, &noted, &f), 0, "%s", f.text);
	draft_deinit(&d);
	draft_deinit(&d);
	cr_assert_eq(index_encode(&noted, &a, &f), 0, "%s", f.text);
	cr_assert_eq(index_encode(&added, &b, &f), 0, "%s", f.text);
	cr_expect_str_eq(a, b);
	index_deinit(&noted);
	index_deinit(&added);
}

Test(checkpoint_files, refuses_other_versions_and_wrong_checksums)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(decode("", &f), FAULT_LOST);
	f = FAULT_NULL;
	cr_assert_eq(decode("{\"crc32c\":\"00000000\",\"checkpoint\":" INNER("0", FILES, "[]") "}",
			    &f),
		     FAULT_LOST);
	cr_assert(strstr(f.text, "checksum"), "%s", f.text);
	f = FAULT_NULL;
	cr_assert_eq(decode_inner("{\"format\":\"shardd-checkpoint\",\"version\":2}", &f),
		     FAULT_UNIMPLEMENTED);
	cr_assert(strstr(f.text, "version 2"), "%s", f.text);
}
