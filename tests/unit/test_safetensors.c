/*
 * The reader of the golden vectors (lib/safetensors.h): it says no to every file that is not
 * one, and finds what is in those that are.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "safetensors.h"

/* A file in memory: @header behind a prefix that says @said bytes, then @data zero bytes. */
static int make(const char *header, uint64_t said, size_t data)
{
	int fd = memfd_create("safetensors", MFD_CLOEXEC);
	size_t n = strlen(header);

	cr_assert_geq(fd, 0);
	cr_assert_eq(write(fd, &said, sizeof(said)), (ssize_t)sizeof(said));
	cr_assert_eq(write(fd, header, n), (ssize_t)n);
	cr_assert_eq(ftruncate(fd, (off_t)(sizeof(said) + n + data)), 0);
	return fd;
}

static struct safetensors *open_fd(int fd, const char **ret_why)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return safetensors_open(path, ret_why);
}

static const struct bad {
	const char *header; /* whose length is a multiple of 8 or does not matter */
	size_t data;
	const char *why;
} bads[] = {
	{ "", 0, "not a JSON object" },
	{ "[1]", 0, "not a JSON object" },
	{ "{\"a\":", 0, "not a JSON object" },
	{ "{\"a\":1,\"a\":1}", 0, "not a JSON object" },
	{ "{\"__metadata__\":1}", 0, "not an object" },
	{ "{\"__metadata__\":{\"a\":1}}", 0, "else than strings" },
	{ "{\"a\":1}", 0, "dtype" },
	{ "{\"a\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype" },
	{ "{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype" },
	{ "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
	  "shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],"
	  "\"data_offsets\":[0,4]}}",
	  4, "shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],"
	  "\"data_offsets\":[0,0]}}",
	  0, "bytes of the shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "data_offsets" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "data_offsets" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "data_offsets" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 4, "data_offsets" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"b\":1}}", 4,
	  "data_offsets" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4,
	  "bytes of the shape" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}    ", 8,
	  "behind the last" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}    ", 8, "between" },
	{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
	  "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
	  8, "overlap" },
	{ "{\"b\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]},"
	  "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}} ",
	  6, "aligned" },
};

/* The length of each header is a multiple of 2 or 4 by blanks, so that data is aligned
 * wherever alignment is not the point. */
static int make_padded(const char *header, size_t data)
{
	char text[512];
	int n = snprintf(text, sizeof(text), "%s", header);

	cr_assert_lt((size_t)n + 8, sizeof(text));
	while (n % 8)
		text[n++] = ' ';
	text[n] = 0;
	return make(text, (uint64_t)n, data);
}

Test(safetensors, refuses_what_is_not_one, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	for (size_t i = 0; i < sizeof(bads) / sizeof(bads[0]); i++) {
		_cleanup_(fd_closep) int fd = make_padded(bads[i].header, bads[i].data);
		const char *why = "";

		cr_assert_null(open_fd(fd, &why), "%s", bads[i].header);
		cr_assert_not_null(strstr(why, bads[i].why), "%s: %s", bads[i].header, why);
	}
}

Test(safetensors, refuses_lengths_beyond_the_file, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	static const uint64_t said[] = { 3, 1000, UINT64_MAX, UINT64_MAX - 7 };

	for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
		_cleanup_(fd_closep) int fd = make("{}", said[i], 0);
		const char *why = "";

		cr_assert_null(open_fd(fd, &why));
		cr_assert_str_eq(why, "header longer than the file");
	}
}

Test(safetensors, refuses_short_and_missing_files, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	_cleanup_(fd_closep) int fd = memfd_create("short", MFD_CLOEXEC);
	const char *why = "";

	cr_assert_null(open_fd(fd, &why));
	cr_assert_str_eq(why, "too short for a header");
	cr_assert_null(safetensors_open("/nowhere/at/all", &why));
	cr_assert_str_eq(why, "cannot be opened");
}

Test(safetensors, finds_tensors_and_what_is_said, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	_cleanup_(fd_closep) int fd = make_padded(
		"{\"__metadata__\":{\"x\":\"one\",\"y\":\"two\"},"
		"\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
		"\"empty\":{\"dtype\":\"F16\",\"shape\":[0,5],\"data_offsets\":[24,24]},"
		"\"one\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[24,26]}}",
		26);
	const char *why = "", *name, *about;
	_cleanup_(safetensors_freep) struct safetensors *f = open_fd(fd, &why);
	struct safetensors_tensor t;
	void *iter = NULL;

	cr_assert_not_null(f, "%s", why);
	cr_assert(safetensors_tensor(f, "a", &t));
	cr_assert(t.dtype == DTYPE_FP32 && t.dims == 2 && t.shape[1] == 3 && t.elements == 6);
	cr_assert(safetensors_tensor(f, "empty", &t));
	cr_assert(t.dtype == DTYPE_FP16 && t.elements == 0);
	cr_assert(safetensors_tensor(f, "one", &t));
	cr_assert(t.dtype == DTYPE_BF16 && t.dims == 0 && t.elements == 1);
	cr_assert_not(safetensors_tensor(f, "b", &t));
	cr_assert_not(safetensors_tensor(f, "__metadata__", &t));
	cr_assert(safetensors_next(f, &iter, &name, &about));
	cr_assert_str_eq(name, "x");
	cr_assert_str_eq(about, "one");
	cr_assert(safetensors_next(f, &iter, &name, &about));
	cr_assert_str_eq(about, "two");
	cr_assert_not(safetensors_next(f, &iter, &name, &about));
}
