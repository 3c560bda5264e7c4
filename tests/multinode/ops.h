/*
 * What the parts of the program multinode_ops share (ops.c). It is one rank: it runs ops and prints a hash
 * of what it has read after each. All numbers are multiples of small powers of two, so that sums are exact,
 * in whatever order they are made: the hashes are those of the same ranks on one node.
 *
 * Each function ends the process when an op fails, with the error.
 */
#ifndef SHARDD_TESTS_MULTINODE_OPS_H
#define SHARDD_TESTS_MULTINODE_OPS_H

#include <shardd/shardd.h>
#include <stdio.h>
#include <stdlib.h>

#define OK(call)                                                                            \
	do {                                                                                \
		int ok_ = (call);                                                           \
                                                                                            \
		if (ok_ < 0) {                                                              \
			printf("%s: %s: %s\n", #call, shardd_code_name(ok_), ops.err.text); \
			exit(1);                                                            \
		}                                                                           \
	} while (0)

#define OPS_COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum { ROWS = 12, WIDTH = 4, DENSE = 40, STEPS = 3, TENSORS = 3 };

/* Of the unit that ops_make makes: "dense", "rows", "last". */
enum { ELEMENTS = 2 * DENSE + ROWS * WIDTH };

struct ops {
	struct shardd_error err;
	shardd_client *client;
	struct shardd_membership me;
	uint64_t step; /* the last that was committed */
	bool on_gpu;
};

extern struct ops ops;

/* With it parameters stay multiples of powers of two. */
extern const struct shardd_optimizer ops_sgd;

/* Print a hash of @bytes at @data, which is this process's memory. */
void ops_say(const char *what, const void *data, size_t bytes);

/* The same of memory that an op has handed out. */
void ops_show(const char *what, const void *memory, size_t bytes);

/* Of this rank, in this step: a multiple of 1/4 from -2 to 1.75. */
float ops_number(uint64_t i, uint64_t salt);

/* @n such numbers into memory that an op has handed out. */
void ops_fill(void *memory, uint64_t n, uint64_t salt);

/* The same in BF16, which has room for them. */
void ops_fill_bf16(void *memory, uint64_t n, uint64_t salt);

/* Register a unit: @spec without its name and tensors. */
struct shardd_unit_info ops_register(const char *name, struct shardd_unit_spec spec);

/* The same, and rank @root's numbers are its parameters. All ranks of its group call it. */
struct shardd_unit_info ops_make_from(const char *name, struct shardd_unit_spec spec,
				      uint32_t root);

/* The same from rank 0. */
struct shardd_unit_info ops_make(const char *name, struct shardd_unit_spec spec);

/* Print a hash of the tensors of @u at @memory, which an op has handed out: @size bytes an element. Where they
 * are there depends on the devices. */
void ops_show_tensors(const char *what, const struct shardd_unit_info *u, const void *memory,
		      size_t size);

/* This rank's numbers as the tensors of @u. */
void ops_fill_tensors(const struct shardd_unit_info *u, void *memory, enum shardd_dtype dtype);

/* Gather, and print a hash of the tensors: @size bytes an element. */
void ops_look_as(const char *what, const struct shardd_unit_info *u, size_t size);

/* The same in FP32. */
void ops_look(const char *what, const struct shardd_unit_info *u);

/* This rank's numbers into the gradient buffer. */
void ops_fill_gradient(const struct shardd_unit_info *u);

/* The same, and reduce them. */
void ops_reduce(const struct shardd_unit_info *u);

/* Commit the next step. */
void ops_commit(void);

/* Step, commit, look. */
void ops_end_step(const char *what, const struct shardd_unit_info *u);

/* A buffer of this session, with numbers. @ret_values: the memory. */
uint64_t ops_buffer(uint64_t bytes, void **ret_values);

/* Rows 0, 1... of this rank, as many as its number says. @rows: room for 3. Return: how many. */
size_t ops_rows_of(int64_t *rows);

/* The parts, in ops_*.c. All ranks run the same ones. */
void ops_ddp(void);
void ops_readers(void);
void ops_own(void);
void ops_sparse(void);
void ops_gradients(void);
void ops_clips(void);
void ops_plans(void);
void ops_replicas(void);
void ops_types(void);
void ops_groups(void);
void ops_buffers(void);
void ops_passes(void);
void ops_units(void);
void ops_converts(void);
void ops_shards(void);
void ops_refused(void);

#endif
