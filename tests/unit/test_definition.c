/* What nodes compare of a unit. */
#include <criterion/criterion.h>

#include "fdcheck.h"
#include "store/state.h"
#include "unit/definition.h"

TestSuite(definition, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30);

static uint64_t shape[] = { 4, 3 }, turned[] = { 3, 4 };

static void unit_begin(state_unit *u, state_tensor *t, state_tensor **list, state_optimizer *o)
{
	shardd__state__v1__unit__init(u);
	shardd__state__v1__tensor__init(t);
	shardd__state__v1__optimizer__init(o);
	t->name = (char *)"w";
	t->shape = shape;
	t->n_shape = 2;
	*list = t;
	u->name = (char *)"layer";
	u->optimizer = o;
	u->tensors = list;
	u->n_tensors = 1;
}

Test(definition, differs_where_the_unit_does)
{
	state_tensor t, *list;
	state_optimizer o;
	uint64_t first;
	state_unit u;

	unit_begin(&u, &t, &list, &o);
	first = definition_hash(&u);
	cr_assert_eq(definition_hash(&u), first);
	t.shape = turned;
	cr_assert_neq(definition_hash(&u), first, "the shape");
	t.shape = shape;
	t.frozen = true;
	cr_assert_neq(definition_hash(&u), first, "frozen");
	t.frozen = false;
	u.compute_dtype++;
	cr_assert_neq(definition_hash(&u), first, "a type");
	u.compute_dtype--;
	u.divide_factor = 2;
	cr_assert_neq(definition_hash(&u), first, "the divisor");
	u.divide_factor = 0;
	u.name = (char *)"other";
	cr_assert_neq(definition_hash(&u), first, "the name");
}

Test(definition, is_not_of_what_training_changes)
{
	state_tensor t, *list;
	state_optimizer o;
	uint64_t first;
	state_unit u;

	unit_begin(&u, &t, &list, &o);
	first = definition_hash(&u);
	o.lr = 0.5;
	t.missed = 3;
	u.initialised = true;
	cr_assert_eq(definition_hash(&u), first);
}
