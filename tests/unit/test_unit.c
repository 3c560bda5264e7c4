/* Units: bytes and layout from the record, and the comparison of two of them. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"

TestSuite(unit, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

static struct unit *make(state_unit *spec, uint32_t ranks)
{
	static struct device device;
	const struct unit_place place = { (struct device *[]){ &device }, 1, 1, 0 };
	struct layout l;
	struct unit *u = NULL;

	cr_assert(unit_layout(spec, ranks, &l));
	cr_assert_eq(unit_new(3, spec, &l, &place, &u), 0);
	return u;
}

Test(unit, bytes_follow_the_layout)
{
	state_unit *spec = nodefix_spec("u", 1000);
	struct unit *u;

	spec->shard_multiple = 128;
	spec->compute_dtype = DTYPE_BF16;
	spec->gradient_dtype = DTYPE_FP16;
	u = make(spec, 3);
	cr_expect_eq(u->id, 3);
	cr_expect_eq(u->layout.padded, 384 * 3);
	cr_expect_eq(unit_array_bytes(&u->layout, 1), 384 * 3 * 4);
	cr_expect_eq(unit_shard_bytes(u), 4 * unit_array_bytes(&u->layout, 1));
	cr_expect_eq(unit_full_bytes(u), 2000);
	cr_expect_eq(unit_gradient_bytes(u), 2000);
	cr_expect_not(unit_is_direct(u));
	unit_free(u);
	spec->shard_multiple = 1;
	u = make(spec, 3);
	cr_expect_eq(u->layout.padded, 334 * 3);
	cr_expect_eq(unit_array_bytes(&u->layout, 1), 4096, "up to a multiple of POOL_ALIGN");
	unit_free(u);
	state_unit_free(spec);
	unit_free(NULL);
}

Test(unit, optimizer_state_is_what_the_optimizer_needs)
{
	state_unit *spec = nodefix_spec("u", 1);

	cr_expect_eq(unit_state_arrays(spec), 2);
	spec->optimizer->kind = OPTIM_SGD;
	cr_expect_eq(unit_state_arrays(spec), 0);
	spec->optimizer->momentum = 0.5;
	cr_expect_eq(unit_state_arrays(spec), 1);
	spec->optimizer->kind = OPTIM_NONE;
	cr_expect_eq(unit_state_arrays(spec), 0);
	state_unit_free(spec);
}

Test(unit, with_equal_dtypes_the_shards_themselves_are_handed_out)
{
	state_unit *spec = nodefix_spec("u", 1000);
	struct unit *u = make(spec, 3);

	u->parts[0].params = (struct region){ NULL, 512, unit_array_bytes(&u->layout, 1) };
	cr_expect(unit_is_direct(u));
	cr_expect_eq(unit_direct_region(u, u->parts).offset, 512);
	cr_expect_eq(unit_direct_region(u, u->parts).bytes, 4000, "without the padding");
	unit_free(u);
	state_unit_free(spec);
}

Test(unit, elements_of_all_tensors_count_and_must_fit)
{
	const uint64_t most = LAYOUT_MAX_ELEMENTS, pair[] = { 3, 4 };
	state_unit *spec = nodefix_spec("u", 1000);
	struct layout l;
	uint64_t n = 0;

	CHECK(state_unit_add_tensor(spec, state_tensor_new("b", pair, 2)) == 0);
	cr_expect(unit_elements(spec, &n));
	cr_expect_eq(n, 1012);
	CHECK(state_unit_add_tensor(spec, state_tensor_new("c", &most, 1)) == 0);
	cr_expect_not(unit_elements(spec, &n));
	cr_expect_not(unit_layout(spec, 1, &l));
	cr_expect_eq(n, 1012, "it was written to");
	state_unit_free(spec);
	spec = state_unit_new("empty");
	cr_expect_not(unit_elements(spec, &n));
	state_unit_free(spec);
}

/* -------------------------------------------------------------- comparison */

/* Every way in which two units may differ, and the word that names it. */
static void set_group(state_unit *u)
{
	u->group = 2;
}
static void set_compute(state_unit *u)
{
	u->compute_dtype = DTYPE_BF16;
}
static void set_gradient(state_unit *u)
{
	u->gradient_dtype = DTYPE_FP16;
}
static void set_multiple(state_unit *u)
{
	u->shard_multiple = 128;
}
static void set_pre(state_unit *u)
{
	u->pre_divide = 3;
}
static void set_post(state_unit *u)
{
	u->post_divide = 3;
}
static void set_kind(state_unit *u)
{
	u->optimizer->kind = OPTIM_SGD;
}
static void set_lr(state_unit *u)
{
	u->optimizer->lr = 3;
}
static void set_decay(state_unit *u)
{
	u->optimizer->weight_decay = 3;
}
static void set_momentum(state_unit *u)
{
	u->optimizer->momentum = 3;
}
static void set_nesterov(state_unit *u)
{
	u->optimizer->nesterov = true;
}
static void set_beta1(state_unit *u)
{
	u->optimizer->beta1 = 0.5;
}
static void set_beta2(state_unit *u)
{
	u->optimizer->beta2 = 0.5;
}
static void set_eps(state_unit *u)
{
	u->optimizer->eps = 0.5;
}
static void set_name(state_unit *u)
{
	u->tensors[0]->name[0] = 'X';
}
static void set_shape(state_unit *u)
{
	u->tensors[0]->shape[0] = 11;
}
static void set_dims(state_unit *u)
{
	u->tensors[0]->n_shape = 0;
}
static void set_init(state_unit *u)
{
	u->tensors[0]->init_kind = FILL_NORMAL;
}
static void set_init_a(state_unit *u)
{
	u->tensors[0]->init_a = 9;
}
static void set_init_b(state_unit *u)
{
	u->tensors[0]->init_b = 9;
}

static void add_tensor(state_unit *u)
{
	CHECK(state_unit_add_tensor(u, state_tensor_new("more", NULL, 0)) == 0);
}

Test(unit, the_first_difference_is_named)
{
	static const struct {
		void (*change)(state_unit *u);
		const char *words;
	} cases[] = {
		{ set_group, "group 0, not 2" },
		{ set_compute, "compute_dtype fp32, not bf16" },
		{ set_gradient, "gradient_dtype fp32, not fp16" },
		{ set_multiple, "shard_multiple 1, not 128" },
		{ set_pre, "pre_divide 0, not 3" },
		{ set_post, "post_divide 0, not 3" },
		{ add_tensor, "1, not 2" },
		{ set_kind, "optimizer kind" },
		{ set_lr, "optimizer.lr" },
		{ set_decay, "optimizer.weight_decay 0, not 3" },
		{ set_momentum, "optimizer.momentum 0, not 3" },
		{ set_nesterov, "optimizer.nesterov 0, not 1" },
		{ set_beta1, "optimizer.beta1" },
		{ set_beta2, "optimizer.beta2" },
		{ set_eps, "optimizer.eps" },
		{ set_name, "'weight', not 'Xeight'" },
		{ set_dims, "dimensions: 1, not 0" },
		{ set_shape, "dimension 0 of tensor 'weight' being 10, not 11" },
		{ set_init, "initialiser" },
		{ set_init_a, "initialiser" },
		{ set_init_b, "initialiser" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		state_unit *a = nodefix_spec("layer", 10), *b = nodefix_spec("layer", 10);
		struct fault f = FAULT_NULL;

		cr_assert(unit_same_spec(a, b, &f));
		cr_assert(!f.code);
		cases[i].change(b);
		cr_expect_not(unit_same_spec(a, b, &f), "case %zu", i);
		cr_expect_eq(f.code, FAULT_STATE);
		cr_expect(strstr(f.text, cases[i].words), "case %zu: %s", i, f.text);
		cr_expect(strstr(f.text, "unit 'layer'"));
		state_unit_free(a);
		state_unit_free(b);
	}
}

Test(unit, progress_is_no_difference)
{
	state_unit *a = nodefix_spec("u", 10), *b = nodefix_spec("u", 10);
	struct fault f = FAULT_NULL;

	a->initialised = true;
	a->optimizer->steps = 100;
	a->tensors[0]->missed = 3;
	cr_expect(unit_same_spec(a, b, &f));
	state_unit_free(a);
	state_unit_free(b);
}
