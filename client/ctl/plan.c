/* shardctl plan: what a job takes, and whether it fits here. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/plan_bytes.h"

#define PLAN_ASK_MS 10000u
#define PLAN_UNITS  32u /* without --units */

enum plan_fit { PLAN_UNASKED, PLAN_FITS, PLAN_TIGHT, PLAN_TOO_LARGE };

/* What the command line says; what it does not is 0. */
struct plan_ask {
	uint64_t params, units, unit_params, trainable;
	uint64_t lora, hidden, layers,
		targets; /* rank of the matrices; size; how often; of how many matrices */
	uint64_t ranks, nodes, replicas, devices;
	char storage[8];
	const char *compute, *gradient, *optimizer, *resume, *backend;
	bool amsgrad, in_backward, clips;
};

/* ---------------------------------------------------------------- arguments */

static unsigned plan_dtype_bytes(const char *name)
{
	if (strcmp(name, "fp32") == 0)
		return 4;
	return strcmp(name, "bf16") == 0 || strcmp(name, "fp16") == 0 ? 2 : 0;
}

static int plan_take_dtypes(struct plan_ask *a, const char *text)
{
	const char *slash = strchr(text, '/');

	snprintf(a->storage, sizeof(a->storage), "fp32");
	a->compute = text;
	if (slash && slash - text < (long)sizeof(a->storage)) {
		snprintf(a->storage, sizeof(a->storage), "%.*s", (int)(slash - text), text);
		a->compute = slash + 1;
	}
	if (plan_dtype_bytes(a->storage) && plan_dtype_bytes(a->compute))
		return CTL_OK;
	return ctl_usage("--dtype \"%s\" is not COMPUTE or STORAGE/COMPUTE, of fp32, bf16 and fp16",
			 text);
}

static int plan_take_number(const char *option, const char *text, uint64_t max, uint64_t *ret)
{
	if (plan_bytes_parse(text, max, ret))
		return CTL_OK;
	return ctl_usage("--%s \"%s\" is not a whole number from 1 to %llu%s", option, text,
			 (unsigned long long)max, max == PLAN_MAX_PARAMS ? " (7e9, 7B, 350M)" : "");
}

enum plan_option {
	PLAN_O_PARAMS = 256,
	PLAN_O_UNITS,
	PLAN_O_UNIT_PARAMS,
	PLAN_O_TRAINABLE,
	PLAN_O_LORA,
	PLAN_O_HIDDEN,
	PLAN_O_LAYERS,
	PLAN_O_TARGETS,
	PLAN_O_RANKS,
	PLAN_O_NODES,
	PLAN_O_REPLICAS,
	PLAN_O_DEVICES,
	PLAN_O_DTYPE,
	PLAN_O_GRADIENT,
	PLAN_O_OPTIMIZER,
	PLAN_O_RESUME,
	PLAN_O_BACKEND,
	PLAN_O_AMSGRAD,
	PLAN_O_IN_BACKWARD,
	PLAN_O_CLIP,
};

static const struct option plan_options[] = {
	{ "params", required_argument, NULL, PLAN_O_PARAMS },
	{ "units", required_argument, NULL, PLAN_O_UNITS },
	{ "unit-params", required_argument, NULL, PLAN_O_UNIT_PARAMS },
	{ "trainable", required_argument, NULL, PLAN_O_TRAINABLE },
	{ "lora", required_argument, NULL, PLAN_O_LORA },
	{ "hidden", required_argument, NULL, PLAN_O_HIDDEN },
	{ "layers", required_argument, NULL, PLAN_O_LAYERS },
	{ "targets", required_argument, NULL, PLAN_O_TARGETS },
	{ "ranks", required_argument, NULL, PLAN_O_RANKS },
	{ "nodes", required_argument, NULL, PLAN_O_NODES },
	{ "replicas", required_argument, NULL, PLAN_O_REPLICAS },
	{ "devices", required_argument, NULL, PLAN_O_DEVICES },
	{ "dtype", required_argument, NULL, PLAN_O_DTYPE },
	{ "gradient-dtype", required_argument, NULL, PLAN_O_GRADIENT },
	{ "optimizer", required_argument, NULL, PLAN_O_OPTIMIZER },
	{ "resume", required_argument, NULL, PLAN_O_RESUME },
	{ "backend", required_argument, NULL, PLAN_O_BACKEND },
	{ "amsgrad", no_argument, NULL, PLAN_O_AMSGRAD },
	{ "in-backward", no_argument, NULL, PLAN_O_IN_BACKWARD },
	{ "clip", no_argument, NULL, PLAN_O_CLIP },
	{ 0 },
};

/* Those with a number. NULL: it is another one. */
static uint64_t *plan_number(struct plan_ask *a, int option, uint64_t *ret_max)
{
	*ret_max = PLAN_MAX_PARAMS;
	switch (option) {
	case PLAN_O_PARAMS:
		return &a->params;
	case PLAN_O_UNIT_PARAMS:
		return &a->unit_params;
	case PLAN_O_TRAINABLE:
		return &a->trainable;
	}
	*ret_max = PLAN_MAX_UNITS;
	switch (option) {
	case PLAN_O_UNITS:
		return &a->units;
	case PLAN_O_LORA:
		return &a->lora;
	case PLAN_O_HIDDEN:
		return &a->hidden;
	case PLAN_O_LAYERS:
		return &a->layers;
	case PLAN_O_TARGETS:
		return &a->targets;
	}
	*ret_max = PLAN_MAX_RANKS;
	switch (option) {
	case PLAN_O_RANKS:
		return &a->ranks;
	case PLAN_O_NODES:
		return &a->nodes;
	case PLAN_O_REPLICAS:
		return &a->replicas;
	case PLAN_O_DEVICES:
		return &a->devices;
	}
	return NULL;
}

static int plan_take_word(struct plan_ask *a, int option, const char *text)
{
	switch (option) {
	case PLAN_O_DTYPE:
		return plan_take_dtypes(a, text);
	case PLAN_O_GRADIENT:
		a->gradient = text;
		if (plan_dtype_bytes(text))
			return CTL_OK;
		return ctl_usage("--gradient-dtype \"%s\" is not fp32, bf16 or fp16", text);
	case PLAN_O_OPTIMIZER:
		a->optimizer = text;
		return CTL_OK;
	case PLAN_O_RESUME:
		a->resume = text;
		return CTL_OK;
	case PLAN_O_BACKEND:
		a->backend = text;
		if (strcmp(text, "host") == 0 || strcmp(text, "cuda") == 0)
			return CTL_OK;
		return ctl_usage("--backend \"%s\" is not host or cuda", text);
	case PLAN_O_AMSGRAD:
		a->amsgrad = true;
		return CTL_OK;
	case PLAN_O_IN_BACKWARD:
		a->in_backward = true;
		return CTL_OK;
	case PLAN_O_CLIP:
		a->clips = true;
		return CTL_OK;
	}
	return CTL_USAGE;
}

static int plan_parse(struct plan_ask *a, int argc, char **argv)
{
	int o, index, r = CTL_OK;

	plan_take_dtypes(a, "fp32");
	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "", plan_options, &index)) != -1) {
		uint64_t max, *number = plan_number(a, o, &max);

		if (o == '?')
			return CTL_USAGE;
		r = number ? plan_take_number(plan_options[index].name, optarg, max, number)
			   : plan_take_word(a, o, optarg);
	}
	if (r == CTL_OK && optind < argc)
		return ctl_usage("plan takes no argument \"%s\"", argv[optind]);
	if (r == CTL_OK && !a->params)
		return ctl_usage("plan needs --params N (7e9, 7B, 350M)");
	if (r == CTL_OK && !a->ranks)
		return ctl_usage("plan needs --ranks N");
	return r;
}

/* ---------------------------------------------------------------- the model */

static int plan_take_optimizer(const struct plan_ask *a, struct plan_model *m)
{
	static const struct {
		const char *name;
		unsigned states;
	} kinds[] = { { "none", 0 }, { "sgd", 0 },   { "momentum", 1 },
		      { "adam", 2 }, { "adamw", 2 }, { "trainer", 0 } };
	const char *name = a->optimizer ? a->optimizer : "adamw";
	size_t i = 0;

	while (i < ARRAY_SIZE(kinds) && strcmp(kinds[i].name, name) != 0)
		i++;
	if (i == ARRAY_SIZE(kinds))
		return ctl_usage("--optimizer \"%s\" is not none, sgd, momentum, adam, adamw or "
				 "trainer",
				 name);
	m->states = kinds[i].states;
	m->external = strcmp(name, "trainer") == 0;
	if (a->amsgrad && m->states != 2)
		return ctl_usage("--amsgrad is for adam and adamw, not for %s", name);
	m->states += a->amsgrad;
	if (a->in_backward && (m->external || strcmp(name, "none") == 0))
		return ctl_usage("--in-backward: the daemon makes no step with --optimizer %s",
				 name);
	m->early = a->in_backward || m->external;
	if (a->clips && !m->early)
		return ctl_usage("--clip needs --in-backward or --optimizer trainer: otherwise "
				 "gradients stay until the step, clipped or not");
	if (strcmp(a->storage, "fp32") != 0 && !m->external && strcmp(name, "none") != 0)
		return ctl_usage(
			"the daemon steps fp32 only: with storage %s the optimizer is none or "
			"trainer, not %s; --dtype %s computes in %s and stores fp32",
			a->storage, name, a->compute, a->compute);
	return CTL_OK;
}

static int plan_take_resume(const struct plan_ask *a, struct plan_model *m)
{
	static const char *const words[] = { "applied", "committed", "no-copy" };

	for (size_t i = 0; a->resume && i < ARRAY_SIZE(words); i++) {
		m->resume = (enum plan_resume)i;
		if (strcmp(a->resume, words[i]) == 0)
			return CTL_OK;
	}
	if (!a->resume)
		return CTL_OK;
	return ctl_usage("--resume \"%s\" is not applied, committed or no-copy", a->resume);
}

/* Two matrices, of rank --lora, beside each square one that they adapt. */
static int plan_take_lora(const struct plan_ask *a, struct plan_model *m)
{
	uint64_t targets = a->targets ? a->targets : 4, each = 2 * a->lora * a->hidden, all;

	if (a->trainable)
		return ctl_usage("--lora and --trainable exclude each other");
	if (!a->hidden || !a->layers)
		return ctl_usage("--lora needs --hidden SIZE and --layers N");
	/* each is below 2^33, the rest below 2^32 */
	if (a->layers * targets > PLAN_MAX_PARAMS / each)
		return ctl_usage("--lora %llu of %llu layers has more than %llu parameters",
				 (unsigned long long)a->lora, (unsigned long long)a->layers,
				 (unsigned long long)PLAN_MAX_PARAMS);
	all = each * a->layers * targets;
	m->trained = all;
	m->frozen = a->params;
	return CTL_OK;
}

static int plan_take_params(const struct plan_ask *a, struct plan_model *m)
{
	if (a->lora)
		return plan_take_lora(a, m);
	if (a->hidden || a->layers || a->targets)
		return ctl_usage("--hidden, --layers and --targets are for --lora");
	if (a->trainable > a->params)
		return ctl_usage("--trainable %llu is more than --params %llu",
				 (unsigned long long)a->trainable, (unsigned long long)a->params);
	m->trained = a->trainable ? a->trainable : a->params;
	m->frozen = a->params - m->trained;
	return CTL_OK;
}

static int plan_take_units(const struct plan_ask *a, struct plan_model *m)
{
	uint64_t all = m->trained + m->frozen;
	uint64_t units = a->units ? a->units : all < PLAN_UNITS ? all : PLAN_UNITS;

	if (a->units && a->unit_params)
		return ctl_usage("--units and --unit-params exclude each other");
	if (a->unit_params)
		units = (all + a->unit_params - 1) / a->unit_params;
	if (units > PLAN_MAX_UNITS)
		return ctl_usage("--unit-params %llu makes %llu units; the most is %u",
				 (unsigned long long)a->unit_params, (unsigned long long)units,
				 PLAN_MAX_UNITS);
	if (units > all)
		return ctl_usage("--units %llu: there are only %llu parameters",
				 (unsigned long long)units, (unsigned long long)all);
	m->units = (uint32_t)units;
	return CTL_OK;
}

static int plan_model(const struct plan_ask *a, struct plan_model *ret)
{
	*ret = (struct plan_model){
		.storage_bytes = plan_dtype_bytes(a->storage),
		.compute_bytes = plan_dtype_bytes(a->compute),
		.gradient_bytes = plan_dtype_bytes(a->gradient ? a->gradient : a->compute),
		.casts = strcmp(a->storage, a->compute) != 0,
		.clips = a->clips,
	};
	if (plan_take_optimizer(a, ret) || plan_take_resume(a, ret) || plan_take_params(a, ret) ||
	    plan_take_units(a, ret))
		return CTL_USAGE;
	return CTL_OK;
}

static int plan_place(const struct plan_ask *a, bool is_cuda, struct plan_place *ret)
{
	uint64_t nodes = a->nodes ? a->nodes : 1, here = a->ranks / nodes;
	uint64_t devices = a->devices ? a->devices : is_cuda ? here : 1;

	if (a->ranks % nodes)
		return ctl_usage("--ranks %llu cannot be spread evenly over --nodes %llu",
				 (unsigned long long)a->ranks, (unsigned long long)nodes);
	if (here > PLAN_MAX_HERE)
		return ctl_usage("%llu ranks on a node are more than %u: give --nodes N",
				 (unsigned long long)here, PLAN_MAX_HERE);
	if (!is_cuda && devices > 1)
		return ctl_usage("--devices %llu: host memory is one device (--backend cuda)",
				 (unsigned long long)devices);
	if (here % devices)
		return ctl_usage("%llu ranks of a node cannot be spread evenly over %llu devices",
				 (unsigned long long)here, (unsigned long long)devices);
	if (a->replicas && a->ranks % a->replicas)
		return ctl_usage("--replicas %llu does not divide --ranks %llu",
				 (unsigned long long)a->replicas, (unsigned long long)a->ranks);
	*ret = (struct plan_place){ .ranks = (uint32_t)a->ranks,
				    .nodes = (uint32_t)nodes,
				    .replicas = a->replicas ? (uint32_t)a->replicas : 1,
				    .devices = (uint32_t)devices,
				    .is_staggered = !is_cuda };
	return CTL_OK;
}

/* ------------------------------------------------------------ does it fit */

/* The daemon, if one answers. */
static void plan_ask_daemon(struct ctl *ctl, Shardd__V1__GetStatusResponse **ret,
			    struct shardd_error *err)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	ProtobufCMessage *reply = NULL;

	if (rpc_client_connect(ctl->socket, 0, &ctl->rpc, err) < 0) {
		ctl->rpc = NULL;
		return;
	}
	if (rpc_client_call(ctl->rpc, "/shardd.v1.StatusService/GetStatus", &request.base,
			    &shardd__v1__get_status_response__descriptor, PLAN_ASK_MS, &reply,
			    err) == 0)
		*ret = (Shardd__V1__GetStatusResponse *)reply;
}

/* What is free for the caller, and where that is written. */
struct plan_room {
	uint64_t bytes;
	char of[192];
};

static void plan_room_lower(struct plan_room *room, uint64_t limit, uint64_t used, const char *of)
{
	uint64_t left = limit > used ? limit - used : 0;

	if (left >= room->bytes)
		return;
	room->bytes = left;
	snprintf(room->of, sizeof(room->of), "%.150s, %s of it used", of, format_bytes(used).text);
}

/* The devices that the job would be on have room for so much: the fullest one counts for all. */
static struct plan_room plan_find_room(const Shardd__V1__GetStatusResponse *s, uint32_t devices)
{
	struct plan_room room = { .bytes = UINT64_MAX };
	char of[96];

	for (size_t i = 0; i < s->n_devices && i < devices; i++) {
		const Shardd__V1__DeviceStatus *d = s->devices[i];

		snprintf(of, sizeof(of), "device %.40s has %s", d->id,
			 format_bytes(d->capacity_bytes).text);
		plan_room_lower(&room, d->capacity_bytes, d->used_bytes + d->overhead_bytes, of);
	}
	if (devices && room.bytes <= UINT64_MAX / devices)
		room.bytes *= devices;
	for (size_t i = 0; i < s->n_users; i++)
		for (size_t k = 0; s->users[i]->uid == geteuid() && k < s->users[i]->n_usage; k++) {
			const Shardd__V1__UserUsage *u = s->users[i]->usage[k];

			if (strcmp(u->name, "state_bytes") != 0 || u->limit == UINT64_MAX)
				continue;
			snprintf(of, sizeof(of), "your limit (max_state_bytes_per_user) is %s",
				 format_bytes(u->limit).text);
			plan_room_lower(&room, u->limit, u->used, of);
		}
	return room;
}

static enum plan_fit plan_judge(const struct plan *plan, const struct plan_place *p,
				const Shardd__V1__GetStatusResponse *s, char *why, size_t bytes)
{
	static const char *const verdicts[] = {
		[PLAN_FITS] = "it fits",
		[PLAN_TIGHT] = "it fits if not all units are gathered, or have gradients, at once",
		[PLAN_TOO_LARGE] = "it does not fit",
	};
	struct plan_room room = plan_find_room(s, p->devices);
	enum plan_fit fit;

	if (s->n_devices < p->devices) {
		snprintf(why, bytes, "it does not fit: the daemon has %zu devices, not %u",
			 s->n_devices, p->devices);
		return PLAN_TOO_LARGE;
	}
	fit = plan->all.most <= room.bytes    ? PLAN_FITS
	      : plan->all.least <= room.bytes ? PLAN_TIGHT
					      : PLAN_TOO_LARGE;
	snprintf(why, bytes, "%s: a node needs %s to %s, and %s are free (%s)", verdicts[fit],
		 format_bytes(plan->all.least).text, format_bytes(plan->all.most).text,
		 format_bytes(room.bytes).text, room.of);
	return fit;
}

/* ---------------------------------------------------------------- output */

static void plan_cells(struct table *t, const struct plan_bytes *b, uint32_t ranks)
{
	const uint64_t values[] = { b->least, b->most, (b->least + ranks - 1) / ranks,
				    (b->most + ranks - 1) / ranks };

	for (size_t i = 0; i < ARRAY_SIZE(values); i++) {
		if (values[i])
			table_cell(t, "%s", format_bytes(values[i]).text);
		else
			table_cell(t, "-");
	}
}

static int plan_print_table(struct ctl *ctl, const struct plan *plan, uint32_t here)
{
	static const struct table_column columns[] = {
		{ "WHAT", false },     { "CLASS", false },     { "NODE LEAST", true },
		{ "NODE MOST", true }, { "RANK LEAST", true }, { "RANK MOST", true },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (unsigned i = 0; t && i < _PLAN_ITEMS; i++) {
		if (!plan->items[i].most)
			continue;
		table_cell(t, "%s", plan_bytes_name((enum plan_item)i));
		table_cell(t, "%s", plan_bytes_class_name(plan_bytes_class((enum plan_item)i)));
		plan_cells(t, &plan->items[i], here);
	}
	if (t) {
		table_cell(t, "all");
		table_cell(t, "-");
		plan_cells(t, &plan->all, here);
	}
	return ctl_print_table(ctl, NULL, t);
}

static int plan_print(struct ctl *ctl, const struct plan_model *m, const struct plan_place *p,
		      const struct plan *plan, const char *why)
{
	static const char *const notes[] = {
		"least: one unit at a time is gathered and has gradients, and no checkpoint is "
		"written",
		"most: all units at once are gathered and have gradients, each rank stores 64 KiB "
		"with a commit, and a "
		"checkpoint copies all of the state",
		"not included: activations and all else that the trainers allocate themselves; "
		"buffers of units; rounding of memory to pages of 4 KiB (a GPU: 2 MiB)",
	};
	int r;

	ctl_print_sentence(ctl, 0,
			   "%llu parameters, %llu of them trained, in %u units; %u ranks in %u "
			   "replica%s on %u "
			   "node%s with %u device%s each (%s)",
			   (unsigned long long)(m->trained + m->frozen),
			   (unsigned long long)m->trained, m->units, p->ranks, p->replicas,
			   p->replicas == 1 ? "" : "s", p->nodes, p->nodes == 1 ? "" : "s",
			   p->devices, p->devices == 1 ? "" : "s",
			   p->is_staggered ? "host" : "cuda");
	r = plan_print_table(ctl, plan, p->ranks / p->nodes);
	for (size_t i = 0; i < ARRAY_SIZE(notes); i++)
		ctl_print_sentence(ctl, 0, "%s", notes[i]);
	return ctl_print_sentence(ctl, 0, "%s", why) == CTL_OK ? r : CTL_FAILED;
}

static json_t *plan_json_bytes(const struct plan_bytes *b)
{
	return json_pack("{s:I,s:I}", "least_bytes", (json_int_t)b->least, "most_bytes",
			 (json_int_t)b->most);
}

static json_t *plan_json_items(const struct plan *plan)
{
	json_t *all = json_array();

	for (unsigned i = 0; i < _PLAN_ITEMS; i++) {
		json_t *item = plan_json_bytes(&plan->items[i]);

		json_object_set_new(item, "name", json_string(plan_bytes_name((enum plan_item)i)));
		json_object_set_new(
			item, "class",
			json_string(plan_bytes_class_name(plan_bytes_class((enum plan_item)i))));
		json_array_append_new(all, item);
	}
	return all;
}

static json_t *plan_json_classes(const struct plan *plan)
{
	struct plan_bytes sums[_PLAN_CLASSES] = { 0 };
	json_t *all = json_object();

	for (unsigned i = 0; i < _PLAN_ITEMS; i++) {
		struct plan_bytes *sum = &sums[plan_bytes_class((enum plan_item)i)];

		sum->least += plan->items[i].least;
		sum->most += plan->items[i].most;
	}
	for (unsigned c = 0; c < _PLAN_CLASSES; c++)
		json_object_set_new(all, plan_bytes_class_name((enum plan_class)c),
				    plan_json_bytes(&sums[c]));
	return all;
}

static int plan_print_json(const struct plan_model *m, const struct plan_place *p,
			   const struct plan *plan, enum plan_fit fit, const char *why)
{
	json_t *fits = fit == PLAN_UNASKED ? json_null() : json_boolean(fit != PLAN_TOO_LARGE);

	return ctl_print_json(json_pack(
		"{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o?,s:o?,s:o?,s:o?,s:o?}", "params",
		(json_int_t)(m->trained + m->frozen), "trained", (json_int_t)m->trained, "units",
		(json_int_t)m->units, "ranks", (json_int_t)p->ranks, "nodes", (json_int_t)p->nodes,
		"replicas", (json_int_t)p->replicas, "devices", (json_int_t)p->devices,
		"ranks_of_a_node", (json_int_t)(p->ranks / p->nodes), "node",
		plan_json_bytes(&plan->all), "items", plan_json_items(plan), "classes",
		plan_json_classes(plan), "fits", fits, "text", json_from_text(why)));
}

int ctl_plan(struct ctl *ctl, int argc, char **argv)
{
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	struct shardd_error err = { 0 };
	struct plan_ask ask = { 0 };
	struct plan_model model;
	struct plan_place place;
	struct plan plan;
	enum plan_fit fit = PLAN_UNASKED;
	char why[512];
	int r = plan_parse(&ask, argc, argv);

	if (r == CTL_OK)
		r = plan_model(&ask, &model);
	if (r != CTL_OK)
		return r;
	plan_ask_daemon(ctl, &s, &err);
	if (!ask.backend)
		ask.backend = s && s->n_devices ? s->devices[0]->backend : "host";
	r = plan_place(&ask, strcmp(ask.backend, "cuda") == 0, &place);
	if (r != CTL_OK)
		return r;
	plan_bytes(&model, &place, &plan);
	if (!s)
		snprintf(why, sizeof(why),
			 "whether it fits is not known: no daemon was asked (%.300s)", err.text);
	else if (!s->n_devices || strcmp(s->devices[0]->backend, ask.backend) != 0)
		snprintf(why, sizeof(why),
			 "whether it fits is not known: the daemon's devices are not %s",
			 ask.backend);
	else
		fit = plan_judge(&plan, &place, s, why, sizeof(why));
	r = ctl->json ? plan_print_json(&model, &place, &plan, fit, why)
		      : plan_print(ctl, &model, &place, &plan, why);
	return r == CTL_OK && fit == PLAN_TOO_LARGE ? CTL_FAILED : r;
}
