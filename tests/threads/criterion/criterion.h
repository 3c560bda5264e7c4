/*
 * As much of Criterion as tests of threads use, for the thread sanitizer: with that Criterion's own processes
 * cannot begin, since its shared memory has no place beside the sanitizer's. A test is a child of the runner
 * (runner.c).
 */
#ifndef SHARDD_TESTS_THREADS_CRITERION_H
#define SHARDD_TESTS_THREADS_CRITERION_H

#include <stdbool.h>
#include <string.h>

struct threads_options {
	bool unused;
	void (*init)(void);
	void (*fini)(void);
	double timeout; /* s */
};

struct threads_test {
	const char *suite, *name; /* @name: NULL: a suite */
	void (*run)(void);
	struct threads_options o;
};

#define THREADS_ENTRY(symbol)                                                            \
	static const struct threads_test symbol;                                         \
	__attribute__((used, section("threads_tests"))) static const struct threads_test \
		*const symbol##_entry = &symbol;                                         \
	static const struct threads_test symbol

#define Test(a, b, ...)                                                                        \
	static void a##_##b##_run(void);                                                       \
	THREADS_ENTRY(                                                                         \
		a##_##b##_test) = { #a, #b, a##_##b##_run, { .unused = false, __VA_ARGS__ } }; \
	static void a##_##b##_run(void)
#define TestSuite(a, ...) \
	THREADS_ENTRY(a##_suite) = { #a, NULL, NULL, { .unused = false, __VA_ARGS__ } }

/* The rest is the message, which may be missing. */
void threads_check(bool good, bool fatal, const char *file, int line, const char *what,
		   const char *format, ...) __attribute__((format(printf, 6, 7)));
void threads_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void threads_skip(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

#define THREADS_CHECK(fatal, good, what, ...) \
	threads_check((good), (fatal), __FILE__, __LINE__, what, "" __VA_ARGS__)

#define cr_assert(x, ...)          THREADS_CHECK(true, !!(x), #x, __VA_ARGS__)
#define cr_assert_not(x, ...)      THREADS_CHECK(true, !(x), "!" #x, __VA_ARGS__)
#define cr_assert_null(x, ...)     THREADS_CHECK(true, !(x), "!" #x, __VA_ARGS__)
#define cr_assert_not_null(x, ...) THREADS_CHECK(true, !!(x), #x, __VA_ARGS__)
#define cr_assert_eq(a, b, ...)    THREADS_CHECK(true, (a) == (b), #a " == " #b, __VA_ARGS__)
#define cr_assert_neq(a, b, ...)   THREADS_CHECK(true, (a) != (b), #a " != " #b, __VA_ARGS__)
#define cr_assert_lt(a, b, ...)    THREADS_CHECK(true, (a) < (b), #a " < " #b, __VA_ARGS__)
#define cr_assert_leq(a, b, ...)   THREADS_CHECK(true, (a) <= (b), #a " <= " #b, __VA_ARGS__)
#define cr_assert_gt(a, b, ...)    THREADS_CHECK(true, (a) > (b), #a " > " #b, __VA_ARGS__)
#define cr_assert_geq(a, b, ...)   THREADS_CHECK(true, (a) >= (b), #a " >= " #b, __VA_ARGS__)
#define cr_assert_str_eq(a, b, ...) \
	THREADS_CHECK(true, strcmp((a), (b)) == 0, #a " is " #b, __VA_ARGS__)
#define cr_expect(x, ...)        THREADS_CHECK(false, !!(x), #x, __VA_ARGS__)
#define cr_expect_not(x, ...)    THREADS_CHECK(false, !(x), "!" #x, __VA_ARGS__)
#define cr_expect_null(x, ...)   THREADS_CHECK(false, !(x), "!" #x, __VA_ARGS__)
#define cr_expect_eq(a, b, ...)  THREADS_CHECK(false, (a) == (b), #a " == " #b, __VA_ARGS__)
#define cr_expect_neq(a, b, ...) THREADS_CHECK(false, (a) != (b), #a " != " #b, __VA_ARGS__)
#define cr_expect_lt(a, b, ...)  THREADS_CHECK(false, (a) < (b), #a " < " #b, __VA_ARGS__)
#define cr_expect_leq(a, b, ...) THREADS_CHECK(false, (a) <= (b), #a " <= " #b, __VA_ARGS__)
#define cr_expect_gt(a, b, ...)  THREADS_CHECK(false, (a) > (b), #a " > " #b, __VA_ARGS__)
#define cr_expect_geq(a, b, ...) THREADS_CHECK(false, (a) >= (b), #a " >= " #b, __VA_ARGS__)
#define cr_expect_str_eq(a, b, ...) \
	THREADS_CHECK(false, strcmp((a), (b)) == 0, #a " is " #b, __VA_ARGS__)
#define cr_expect_arr_eq(a, b, bytes, ...) \
	THREADS_CHECK(false, memcmp((a), (b), (bytes)) == 0, #a " is " #b, __VA_ARGS__)
#define cr_log_info(...)  threads_note("" __VA_ARGS__)
#define cr_skip_test(...) threads_skip("" __VA_ARGS__)
#define cr_skip           cr_skip_test

#endif
