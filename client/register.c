/* Registering a model: from the structs of shardd.h to one message. */
#include <stdarg.h>
#include <stdlib.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/cleanup.h"
#include "methods.h"
#include "shardd.pb-c.h"
#include "wire.h"

static_assert((int)SHARDD_INIT_NORMAL == SHARDD__V1__INIT__KIND__KIND_NORMAL, "inits");
static_assert((int)SHARDD_ADAM == SHARDD__V1__OPTIMIZER__KIND__KIND_ADAM, "optimizers");
static_assert((int)SHARDD_OPTIM_REFERENCE_F64 ==
		      SHARDD__V1__OPTIMIZER__PROFILE__PROFILE_REFERENCE_F64,
	      "optimizer profiles");
static_assert((int)SHARDD_OPTIM_BY_TRAINER == SHARDD__V1__OPTIMIZER__WHEN__WHEN_BY_TRAINER, "when");
static_assert((int)SHARDD_LAYOUT_DIM0 == SHARDD__V1__LAYOUT__LAYOUT_DIM0, "layouts");
static_assert((int)SHARDD_HYBRID == SHARDD__V1__STRATEGY__STRATEGY_HYBRID, "strategies");
static_assert((int)SHARDD_PROFILE_DDP_BUCKET_VIEW ==
		      SHARDD__V1__REDUCE_PROFILE__REDUCE_PROFILE_DDP_BUCKET_VIEW,
	      "reduce profiles");
static_assert((int)SHARDD_DIV_RECIPROCAL == SHARDD__V1__DIV_MODE__DIV_MODE_RECIPROCAL, "division");
static_assert((int)SHARDD_RESHARD_AFTER_FORWARD_ONLY ==
		      SHARDD__V1__RESHARD__RESHARD_AFTER_FORWARD_ONLY,
	      "reshard");
static_assert((int)SHARDD_BUFFER_UINT8 == SHARDD__V1__BUFFER_DTYPE__BUFFER_DTYPE_UINT8,
	      "buffer dtypes");
static_assert((int)SHARDD_FP16 == SHARDD__V1__DTYPE__DTYPE_FP16, "dtypes");

/* The messages of one unit. Each unit uses the same memory. Names and shapes are borrowed from
 * the caller. */
struct unit {
	Shardd__V1__UnitSpec spec;
	Shardd__V1__Optimizer optimizer;
	Shardd__V1__TensorSpec *tensors;
	Shardd__V1__Init *inits;
	Shardd__V1__TensorOptimizer *settings;
	Shardd__V1__BufferSpec *buffers;
	size_t tensor_room, buffer_room;
};

/* A RegisterUnitsRequest, packed unit by unit: a model may have ten thousand. */
struct model {
	struct unit unit;
	uint8_t *bytes;
	size_t n;
	size_t room;
};

/* Key and length of an entry of a list, at most. */
#define ENTRY_BYTES 11u

static void register_model_deinit(struct model *m)
{
	free(m->unit.spec.tensors);
	free(m->unit.tensors);
	free(m->unit.inits);
	free(m->unit.settings);
	free(m->unit.spec.buffers);
	free(m->unit.buffers);
	free(m->bytes);
	*m = (struct model){ 0 };
}

/* Make the array at @at one of @n elements. What was there is lost. */
static bool register_renew(void *at, size_t n, size_t size)
{
	void **array = at;

	free(*array);
	*array = calloc(n, size);
	return *array;
}

__attribute__((format(printf, 2, 3))) static int register_is_null(struct shardd_error *err,
								  const char *format, ...)
{
	char field[96];
	va_list ap;

	va_start(ap, format);
	vsnprintf(field, sizeof(field), format, ap);
	va_end(ap);
	return error_set(err, SHARDD_INVALID_ARGUMENT, field, "%s is NULL", field);
}

static int register_tensor_convert(const struct shardd_tensor *from, size_t unit, size_t index,
				   Shardd__V1__TensorSpec *to, Shardd__V1__Init *init,
				   struct shardd_error *err)
{
	if (!from->name || (from->dims && !from->shape))
		return register_is_null(err, "units[%zu].tensors[%zu].%s", unit, index,
					from->name ? "shape" : "name");
	shardd__v1__init__init(init);
	init->kind = (Shardd__V1__Init__Kind)(from->init ? from->init : SHARDD_INIT_CONSTANT);
	init->a = from->init ? from->a : 0;
	init->b = from->init ? from->b : 0;
	shardd__v1__tensor_spec__init(to);
	to->name = (char *)from->name;
	to->shape = (uint64_t *)from->shape;
	to->n_shape = from->dims;
	to->init = init;
	to->frozen = from->frozen;
	to->alias_of = (char *)(from->alias_of ? from->alias_of : "");
	to->strides = (uint64_t *)from->strides;
	to->n_strides = from->strides ? from->dims : 0;
	to->alias_unit = (char *)(from->alias_unit ? from->alias_unit : "");
	return 0;
}

static void register_settings_convert(const struct shardd_tensor *from,
				      Shardd__V1__TensorOptimizer *to)
{
	shardd__v1__tensor_optimizer__init(to);
	if (from->has_weight_decay) {
		to->optional_weight_decay_case =
			SHARDD__V1__TENSOR_OPTIMIZER__OPTIONAL_WEIGHT_DECAY_WEIGHT_DECAY;
		to->weight_decay = from->weight_decay;
	}
	if (from->has_lr_factor) {
		to->optional_lr_factor_case =
			SHARDD__V1__TENSOR_OPTIMIZER__OPTIONAL_LR_FACTOR_LR_FACTOR;
		to->lr_factor = from->lr_factor;
	}
}

static int register_tensor_room(struct unit *u, size_t n)
{
	if (n <= u->tensor_room)
		return 0;
	u->tensor_room = 0;
	if (!register_renew(&u->tensors, n, sizeof(*u->tensors)) ||
	    !register_renew(&u->inits, n, sizeof(*u->inits)) ||
	    !register_renew(&u->settings, n, sizeof(*u->settings)) ||
	    !register_renew(&u->spec.tensors, n, sizeof(*u->spec.tensors)))
		return -1;
	u->tensor_room = n;
	return 0;
}

static int register_buffer_room(struct unit *u, size_t n)
{
	if (n <= u->buffer_room)
		return 0;
	u->buffer_room = 0;
	if (!register_renew(&u->buffers, n, sizeof(*u->buffers)) ||
	    !register_renew(&u->spec.buffers, n, sizeof(*u->spec.buffers)))
		return -1;
	u->buffer_room = n;
	return 0;
}

static int register_tensors_convert(const struct shardd_unit_spec *from, size_t index,
				    struct unit *u, struct shardd_error *err)
{
	size_t n = from->n_tensors;
	int r = 0;

	if (register_tensor_room(u, n + 1) < 0)
		return error_memory(err);
	u->spec.n_tensors = n;
	for (size_t i = 0; i < n && r == 0; i++) {
		u->spec.tensors[i] = &u->tensors[i];
		r = register_tensor_convert(&from->tensors[i], index, i, &u->tensors[i],
					    &u->inits[i], err);
		register_settings_convert(&from->tensors[i], &u->settings[i]);
		u->tensors[i].optimizer = &u->settings[i];
	}
	return r;
}

static int register_buffers_convert(const struct shardd_unit_spec *from, size_t index,
				    struct unit *u, struct shardd_error *err)
{
	size_t n = from->n_buffers;

	if (register_buffer_room(u, n + 1) < 0)
		return error_memory(err);
	for (size_t i = 0; i < n; i++) {
		const struct shardd_buffer *b = &from->buffers[i];

		if (!b->name || (b->dims && !b->shape))
			return register_is_null(err, "units[%zu].buffers[%zu].%s", index, i,
						b->name ? "shape" : "name");
		shardd__v1__buffer_spec__init(&u->buffers[i]);
		u->buffers[i].name = (char *)b->name;
		u->buffers[i].shape = (uint64_t *)b->shape;
		u->buffers[i].n_shape = b->dims;
		u->buffers[i].dtype = (Shardd__V1__BufferDtype)b->dtype;
		u->spec.buffers[i] = &u->buffers[i];
	}
	u->spec.n_buffers = n;
	return 0;
}

static bool register_optimizer_is_default(const struct shardd_optimizer *o)
{
	return !o->complete && o->beta1 == 0 && o->beta2 == 0 && o->eps == 0;
}

/* { .eps = 1e-6 } says nothing of the betas, and 0 is not what was meant. */
static int register_optimizer_check_zeros(const struct shardd_optimizer *o, size_t index,
					  struct shardd_error *err)
{
	const char *name = o->beta1 == 0   ? "beta1"
			   : o->beta2 == 0 ? "beta2"
			   : o->eps == 0   ? "eps"
					   : NULL;
	char field[96];

	if (!name || o->complete || register_optimizer_is_default(o))
		return 0;
	snprintf(field, sizeof(field), "units[%zu].optimizer.%s", index, name);
	return error_set(
		err, SHARDD_INVALID_ARGUMENT, field,
		"%s is 0, but not all of beta1, beta2 and eps are: initialise the optimizer "
		"with %s, or set complete if 0 is meant",
		field, o->kind == SHARDD_ADAM ? "SHARDD_ADAM_DEFAULTS" : "SHARDD_ADAMW_DEFAULTS");
}

/* A setting that the kind does not use would change nothing. */
static int register_optimizer_check(const struct shardd_optimizer *o, size_t index,
				    struct shardd_error *err)
{
	bool adam = o->kind == SHARDD_ADAM || o->kind == SHARDD_ADAMW;
	bool sgd = o->kind == SHARDD_SGD;
	const struct {
		const char *name;
		bool is_set, is_used;
	} fields[] = {
		{ "momentum", o->momentum != 0, sgd }, { "dampening", o->dampening != 0, sgd },
		{ "nesterov", o->nesterov, sgd },      { "beta1", o->beta1 != 0, adam },
		{ "beta2", o->beta2 != 0, adam },      { "eps", o->eps != 0, adam },
		{ "amsgrad", o->amsgrad, adam },       { "complete", o->complete, adam },
	};
	char field[96];

	if (!adam && !sgd)
		return 0;
	for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) {
		if (!fields[i].is_set || fields[i].is_used)
			continue;
		snprintf(field, sizeof(field), "units[%zu].optimizer.%s", index, fields[i].name);
		return error_set(err, SHARDD_INVALID_ARGUMENT, field,
				 "%s is set, but %s does not use it: leave it 0", field,
				 sgd ? "SHARDD_SGD" : "SHARDD_ADAM and SHARDD_ADAMW");
	}
	return adam ? register_optimizer_check_zeros(o, index, err) : 0;
}

static void register_optimizer_convert(const struct shardd_optimizer *from,
				       Shardd__V1__Optimizer *to)
{
	shardd__v1__optimizer__init(to);
	to->kind = (Shardd__V1__Optimizer__Kind)from->kind;
	to->lr = from->lr;
	to->weight_decay = from->weight_decay;
	to->momentum = from->momentum;
	to->nesterov = from->nesterov;
	to->beta1 = from->beta1;
	to->beta2 = from->beta2;
	to->eps = from->eps;
	to->profile = (Shardd__V1__Optimizer__Profile)from->profile;
	to->when = (Shardd__V1__Optimizer__When)from->when;
	to->amsgrad = from->amsgrad;
	to->maximize = from->maximize;
	to->dampening = from->dampening;
	if (from->kind >= SHARDD_ADAMW && register_optimizer_is_default(from)) {
		to->beta1 = 0.9;
		to->beta2 = 0.999;
		to->eps = 1e-8;
	}
}

static void register_choices_convert(const struct shardd_unit_spec *from, Shardd__V1__UnitSpec *to)
{
	to->layout = (Shardd__V1__Layout)from->layout;
	to->strategy = (Shardd__V1__Strategy)from->strategy;
	to->shard_ranks = from->shard_ranks;
	to->reduce_dtype = (Shardd__V1__Dtype)from->reduce_dtype;
	to->reduce_profile = (Shardd__V1__ReduceProfile)from->reduce_profile;
	to->divide_factor = from->divide_factor;
	to->force_sum = from->force_sum;
	to->div_mode = (Shardd__V1__DivMode)from->div_mode;
	to->reshard = (Shardd__V1__Reshard)from->reshard;
	to->guarded = from->guarded;
}

static int register_unit_convert(const struct shardd_unit_spec *from, size_t index, struct unit *u,
				 struct shardd_error *err)
{
	enum shardd_dtype storage = from->storage_dtype ? from->storage_dtype : SHARDD_FP32;
	enum shardd_dtype compute = from->compute_dtype ? from->compute_dtype : storage;
	Shardd__V1__TensorSpec **tensors = u->spec.tensors;
	Shardd__V1__BufferSpec **buffers = u->spec.buffers;
	int r;

	shardd__v1__unit_spec__init(&u->spec);
	u->spec.tensors = tensors;
	u->spec.buffers = buffers;
	if (!from->name || (from->n_tensors && !from->tensors) ||
	    (from->n_buffers && !from->buffers))
		return register_is_null(err, "units[%zu].%s", index,
					from->name ? "tensors" : "name");
	u->spec.name = (char *)from->name;
	u->spec.group = from->group;
	u->spec.storage_dtype = (Shardd__V1__Dtype)storage;
	u->spec.compute_dtype = (Shardd__V1__Dtype)compute;
	u->spec.gradient_dtype =
		(Shardd__V1__Dtype)(from->gradient_dtype ? from->gradient_dtype : compute);
	u->spec.shard_multiple = from->shard_multiple;
	u->spec.pre_divide = from->pre_divide;
	u->spec.post_divide = from->post_divide;
	r = register_optimizer_check(&from->optimizer, index, err);
	if (r < 0)
		return r;
	register_optimizer_convert(&from->optimizer, &u->optimizer);
	u->spec.optimizer = &u->optimizer;
	register_choices_convert(from, &u->spec);
	r = register_tensors_convert(from, index, u, err);
	return r < 0 ? r : register_buffers_convert(from, index, u, err);
}

/* Element @i of an array whose elements may be longer than those we know. */
static const struct shardd_unit_spec *register_spec_at(const struct shardd_unit_spec *units,
						       size_t i)
{
	return (const struct shardd_unit_spec *)((const char *)units + i * units->size);
}

static int register_unit_check_size(const struct shardd_unit_spec *units, size_t i,
				    struct shardd_error *err)
{
	const struct shardd_unit_spec *from = register_spec_at(units, i);
	char field[96];
	int r;

	if (i && from->size == units->size && from->size == sizeof(*from))
		return 0;
	snprintf(field, sizeof(field), "units[%zu].size", i);
	r = client_check_size(from, sizeof(*from), field, err);
	if (r == 0 && from->size != units->size)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, field,
			      "%s is %zu, but units[0].size is %zu", field, from->size,
			      units->size);
	return r;
}

/* Append the unit that was converted. */
static int register_unit_pack(struct model *m, struct shardd_error *err)
{
	size_t bytes = protobuf_c_message_get_packed_size(&m->unit.spec.base);
	size_t room = m->room ? m->room : 4096;
	uint8_t *grown;

	while (room - m->n < bytes + ENTRY_BYTES)
		room *= 2;
	if (room > m->room) {
		grown = realloc(m->bytes, room);
		if (!grown)
			return error_memory(err);
		m->bytes = grown;
		m->room = room;
	}
	m->n += wire_entry(m->bytes + m->n, 1, bytes);
	m->n += protobuf_c_message_pack(&m->unit.spec.base, m->bytes + m->n);
	return 0;
}

static int register_model_convert(const struct shardd_unit_spec *units, size_t n, struct model *m,
				  struct shardd_error *err)
{
	int r = 0;

	for (size_t i = 0; i < n && r == 0; i++) {
		r = register_unit_check_size(units, i, err);
		if (r == 0)
			r = register_unit_convert(register_spec_at(units, i), i, &m->unit, err);
		if (r == 0)
			r = register_unit_pack(m, err);
	}
	return r;
}

/* Where the reply goes. */
struct registered {
	struct shardd_client *c;
	const struct shardd_unit_spec *units;
	size_t n;
	struct shardd_unit_info *ret; /* NULL: not wanted */
};

static int register_take_units(const struct registered *to,
			       const Shardd__V1__RegisterUnitsResponse *reply,
			       struct shardd_error *err)
{
	if (reply->n_units != to->n)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon returned %zu units for %zu requested ones",
				 reply->n_units, to->n);
	for (size_t i = 0; i < to->n && to->ret; i++)
		to->ret[i] = (struct shardd_unit_info){
			.unit = reply->units[i]->unit,
			.elements = reply->units[i]->elements,
			.shard_elements = reply->units[i]->shard_elements,
			.initialised = reply->units[i]->initialised,
			.optimizer_steps = reply->units[i]->optimizer_steps,
			.gradient_elements = reply->units[i]->gradient_elements,
			.packed_elements = reply->units[i]->packed_elements,
		};
	for (size_t i = 0; i < to->n && to->c->debug; i++) {
		const struct shardd_unit_spec *spec = register_spec_at(to->units, i);

		debug_unit(to->c->debug, reply->units[i]->unit, spec->name, spec->group);
	}
	return places_take(&to->c->places, reply->units, to->n, err);
}

static int register_take_reply(const uint8_t *bytes, size_t n, void *userdata,
			       struct shardd_error *err)
{
	struct wire_arena arena = WIRE_ARENA_NULL;
	ProtobufCAllocator allocator = wire_allocator(&arena);
	Shardd__V1__RegisterUnitsResponse *reply =
		shardd__v1__register_units_response__unpack(&allocator, n, bytes);
	int r = reply ? register_take_units(userdata, reply, err) : RPC_E_REPLY;

	if (!reply && arena.failed)
		r = error_memory(err);
	wire_arena_deinit(&arena);
	return r;
}

static int register_call(struct registered *to, const struct model *model, struct shardd_error *err)
{
	struct shardd_client *c = to->c;
	struct link *l = client_use_link(c);
	struct shardd_error e = { 0 };
	uint32_t link;
	uint32_t timeout_ms = CLIENT_CALL_TIMEOUT_MS + c->wait_for_memory_ms;
	int r = rpc_client_call_packed(l->rpc, METHOD_RegisterUnits, model->bytes, model->n,
				       &shardd__v1__register_units_response__descriptor,
				       timeout_ms > c->wait_for_memory_ms ? timeout_ms : UINT32_MAX,
				       register_take_reply, to, &e);

	link = l->number;
	client_unuse_link(c, l);
	r = call_after_loss(c, link, r, &e);
	if (r < 0 && err)
		*err = e;
	return r;
}

int shardd_register(shardd_client *c, const struct shardd_unit_spec *units, size_t n,
		    struct shardd_unit_info *ret, struct shardd_error *err)
{
	struct registered to = { c, units, n, ret };
	_cleanup_(register_model_deinit) struct model model = { 0 };
	int r = client_check(c, err);

	if (r == 0 && n && !units)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "units", "units is NULL");
	if (r == 0)
		r = register_model_convert(units, n, &model, err);
	if (r == 0)
		r = client_check_bytes(c, model.n, err);
	if (r == 0)
		r = call_check_epoch(c, err);
	return r < 0 ? r : register_call(&to, &model, err);
}
