/* shardctl checkpoint save|load|policy|inspect|verify|consolidate|prune. All but the first three work
 * on files alone. import and convert are in files of their own. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <limits.h>
#include <string.h>

#include "checkpoint/consolidate.h"
#include "checkpoint/folder.h"
#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/checkpoint_verbs.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "methods.h"
#include "shardd.pb-c.h"

static int checkpoint_fault(const struct fault *f)
{
	ctl_print_error(fault_code_name(f->code), "%s", f->text);
	return CTL_FAILED;
}

/* @path: the folder that the checkpoint of @step is in. */
static int checkpoint_step_fault(const char *path, uint64_t step, const struct fault *f)
{
	ctl_print_error(fault_code_name(f->code), "step %" PRIu64 " in '%s': %s", step, path,
			f->text);
	return CTL_FAILED;
}

struct checkpoint_args {
	const char *job, *path, *out, *root; /* borrowed from argv */
	uint64_t step, keep, rate, every_steps, every_s;
	bool has_step, has_keep, short_names;
};

static int checkpoint_option(struct checkpoint_args *a, int o)
{
	switch (o) {
	case 's':
		a->has_step = true;
		if (format_parse_number(optarg, UINT64_MAX, &a->step))
			return CTL_OK;
		return ctl_usage("--step \"%s\" is not a whole number", optarg);
	case 'k':
		a->has_keep = true;
		if (format_parse_number(optarg, UINT32_MAX, &a->keep) && a->keep)
			return CTL_OK;
		return ctl_usage("--keep \"%s\" is not a whole number from 1 to %u", optarg,
				 UINT32_MAX);
	case 'r':
		if (format_parse_bytes(optarg, &a->rate) && a->rate)
			return CTL_OK;
		return ctl_usage("--rate \"%s\" is not a number of bytes, such as 4096, 64M, 2G",
				 optarg);
	case 'o':
		a->out = optarg;
		return CTL_OK;
	case 'n':
		a->short_names = strcmp(optarg, "tensor") == 0;
		if (a->short_names || strcmp(optarg, "unit.tensor") == 0)
			return CTL_OK;
		return ctl_usage("--names \"%s\" is neither tensor nor unit.tensor", optarg);
	case 'e':
		if (format_parse_number(optarg, UINT64_MAX, &a->every_steps) && a->every_steps)
			return CTL_OK;
		return ctl_usage("--every-steps \"%s\" is not a whole number from 1", optarg);
	case 'E':
		if (format_parse_number(optarg, UINT32_MAX, &a->every_s) && a->every_s)
			return CTL_OK;
		return ctl_usage("--every-s \"%s\" is not a whole number from 1 to %u", optarg,
				 UINT32_MAX);
	case 'R':
		a->root = optarg;
		return CTL_OK;
	default:
		return CTL_USAGE;
	}
}

/* @options: of this verb. @takes: its arguments, for the error. */
static int checkpoint_parse(struct checkpoint_args *a, const struct option *options, bool with_job,
			    const char *takes, int argc, char **argv)
{
	int r = CTL_OK, o;

	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "", options, NULL)) != -1)
		r = checkpoint_option(a, o);
	if (r != CTL_OK)
		return r;
	if (argc - optind != 1 + with_job) {
		ctl_usage("checkpoint %s takes %s", argv[0], takes);
		return CTL_USAGE;
	}
	if (with_job)
		a->job = argv[optind++];
	a->path = argv[optind];
	return CTL_OK;
}

/* Return: a descriptor of the folder of checkpoints; -1: the error is printed. */
static int checkpoint_dir(const struct checkpoint_args *a)
{
	int fd = open(a->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		ctl_print_error(errno == ENOENT ? "NOT_FOUND" : "FAILED_PRECONDITION",
				"opening '%s': %s", a->path, strerror(errno));
	return fd;
}

static int checkpoint_newest(int dir, const char *path, uint64_t *ret, struct fault *f)
{
	_cleanup_(freep) uint64_t *steps = NULL;
	size_t n = 0;

	if (folder_list(dir, &steps, &n, f))
		return f->code;
	if (!n && strstr(path, "step-"))
		return fault_set(f, FAULT_NOT_FOUND, NULL,
				 "there is no checkpoint in '%s': name the folder that has the "
				 "step-... folders; --step chooses one of them",
				 path);
	if (!n)
		return fault_set(f, FAULT_NOT_FOUND, NULL, "there is no checkpoint in '%s'", path);
	*ret = steps[n - 1];
	return 0;
}

/* Open the checkpoint of --step, or the newest one, and read its index. @ret: empty before. Return:
 * its descriptor; -1: the error is printed. */
static int checkpoint_open(const struct checkpoint_args *a, struct index *ret)
{
	_cleanup_(fd_closep) int dir = checkpoint_dir(a), fd = -1;
	uint64_t step = a->step;
	struct fault f = FAULT_NULL;

	if (dir < 0)
		return -1;
	if (!a->has_step && checkpoint_newest(dir, a->path, &step, &f)) {
		checkpoint_fault(&f);
		return -1;
	}
	fd = folder_open(dir, step, &f);
	if (!f.code)
		save_read(fd, ret, &f);
	if (!f.code)
		return STEAL_FD(fd);
	checkpoint_step_fault(a->path, step, &f);
	return -1;
}

static uint64_t checkpoint_bytes(const struct index *x)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < x->n_files; i++)
		bytes += x->files[i].bytes;
	return bytes;
}

/* What was done with @x, in a line or as JSON. */
static int checkpoint_report(struct ctl *ctl, const struct index *x, const char *done)
{
	if (ctl->json)
		return ctl_print_json(json_pack(
			"{s:o, s:I, s:I, s:I, s:I}", "job", json_from_text(x->job), "step",
			(json_int_t)x->step, "world_size", (json_int_t)x->world_size, "pieces",
			(json_int_t)x->n_pieces, "bytes", (json_int_t)checkpoint_bytes(x)));
	printf("step %" PRIu64 " of job %s %s: %zu tensors, %s\n", x->step, x->job, done,
	       x->n_pieces, format_bytes(checkpoint_bytes(x)).text);
	return CTL_OK;
}

/* ------------------------------------------------------------------------------ verbs */

static int checkpoint_save(struct ctl *ctl, int argc, char **argv)
{
	static const struct option options[] = { { "rate", required_argument, NULL, 'r' }, { 0 } };
	Shardd__V1__CheckpointRequest request = SHARDD__V1__CHECKPOINT_REQUEST__INIT;
	const Shardd__V1__CheckpointResponse *saved;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	_cleanup_(freep) char *path = NULL;
	struct checkpoint_args a = { 0 };
	char buf[CTL_JOB_MAX], said[CTL_JOB_MAX];
	int r = checkpoint_parse(&a, options, true, "a job and a folder", argc, argv);

	if (r == CTL_OK)
		r = ctl_job_name(a.job, buf, &request.job);
	if (r != CTL_OK)
		return r;
	path = ctl_absolute(a.path);
	if (!path)
		return ctl_broken();
	request.path = path;
	request.bytes_per_s = a.rate;
	r = ctl_call_long(ctl, METHOD_Checkpoint, &request.base,
			  &shardd__v1__checkpoint_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	saved = (const Shardd__V1__CheckpointResponse *)reply;
	printf("step %" PRIu64 " of job %s saved in %s: %s\n", saved->step,
	       ctl_said_job(request.job, said), path, format_bytes(saved->bytes).text);
	if (saved->buffers_as_left)
		puts("buffers of its units are as its trainers have left them, not of that commit");
	return CTL_OK;
}

static int checkpoint_send_policy(struct ctl *ctl, const struct checkpoint_args *a,
				  Shardd__V1__CheckpointPolicy *policy)
{
	Shardd__V1__SetCheckpointsRequest request = SHARDD__V1__SET_CHECKPOINTS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	char buf[CTL_JOB_MAX], said[CTL_JOB_MAX];
	int r = ctl_job_name(a->job, buf, &request.job);

	request.policy = policy;
	if (r == CTL_OK)
		r = ctl_call(ctl, METHOD_SetCheckpoints, &request.base,
			     &shardd__v1__set_checkpoints_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	if (policy)
		printf("checkpoints of job %s go to %s\n", ctl_said_job(request.job, said),
		       policy->path);
	else
		printf("job %s has no policy: only checkpoint save makes checkpoints of it\n",
		       ctl_said_job(request.job, said));
	return CTL_OK;
}

static int checkpoint_policy(struct ctl *ctl, int argc, char **argv)
{
	static const struct option options[] = { { "every-steps", required_argument, NULL, 'e' },
						 { "every-s", required_argument, NULL, 'E' },
						 { "keep", required_argument, NULL, 'k' },
						 { "rate", required_argument, NULL, 'r' },
						 { 0 } };
	Shardd__V1__CheckpointPolicy policy = SHARDD__V1__CHECKPOINT_POLICY__INIT;
	_cleanup_(freep) char *path = NULL;
	struct checkpoint_args a = { 0 };
	int r = checkpoint_parse(&a, options, true, "a job and a folder, or off", argc, argv);

	if (r != CTL_OK)
		return r;
	if (strcmp(a.path, "off") == 0 && (a.every_steps || a.every_s || a.keep || a.rate))
		return ctl_usage("checkpoint policy JOB off takes no options");
	if (strcmp(a.path, "off") == 0)
		return checkpoint_send_policy(ctl, &a, NULL);
	if (!a.every_steps && !a.every_s)
		return ctl_usage("checkpoint policy needs --every-steps N or --every-s S");
	path = ctl_absolute(a.path);
	if (!path)
		return ctl_broken();
	policy.path = path;
	policy.every_steps = a.every_steps;
	policy.every_s = a.every_s;
	policy.keep = (uint32_t)a.keep;
	policy.bytes_per_s = a.rate;
	return checkpoint_send_policy(ctl, &a, &policy);
}

static const struct option checkpoint_step_option[] = { { "step", required_argument, NULL, 's' },
							{ 0 } };

static int checkpoint_load(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__LoadCheckpointRequest request = SHARDD__V1__LOAD_CHECKPOINT_REQUEST__INIT;
	const Shardd__V1__LoadCheckpointResponse *loaded;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	_cleanup_(freep) char *path = NULL;
	struct checkpoint_args a = { 0 };
	char buf[CTL_JOB_MAX], said[CTL_JOB_MAX];
	int r = checkpoint_parse(&a, checkpoint_step_option, true, "a job and a folder", argc,
				 argv);

	if (r == CTL_OK)
		r = ctl_job_name(a.job, buf, &request.job);
	if (r != CTL_OK)
		return r;
	path = ctl_absolute(a.path);
	if (!path)
		return ctl_broken();
	request.path = path;
	request.step = a.step;
	if (a.has_step)
		request.optional_step_case =
			SHARDD__V1__LOAD_CHECKPOINT_REQUEST__OPTIONAL_STEP_STEP;
	r = ctl_call_long(ctl, METHOD_LoadCheckpoint, &request.base,
			  &shardd__v1__load_checkpoint_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	loaded = (const Shardd__V1__LoadCheckpointResponse *)reply;
	if (loaded->world_size)
		printf("step %" PRIu64 " of %u ranks loaded into job %s: %s\n", loaded->step,
		       loaded->world_size, ctl_said_job(request.job, said),
		       format_bytes(loaded->bytes).text);
	else /* import was not told */
		printf("step %" PRIu64 " loaded into job %s: %s\n", loaded->step,
		       ctl_said_job(request.job, said), format_bytes(loaded->bytes).text);
	if (loaded->blobs_left_out)
		printf("%u blobs are of ranks that the job does not have: left out\n",
		       loaded->blobs_left_out);
	if (loaded->buffers_left_out)
		printf("%u buffers are of ranks that the job does not have: left out\n",
		       loaded->buffers_left_out);
	if (loaded->buffers_missing)
		printf("the checkpoint has no buffers: %u buffers of the job's units are as they "
		       "were before\n",
		       loaded->buffers_missing);
	return CTL_OK;
}

static void checkpoint_shape(struct table *t, const struct index_piece *p)
{
	char text[TENSOR_FILE_MAX_DIMS * 21 + 1] = "";
	size_t n = 0;

	for (uint32_t i = 0; i < p->dims; i++)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%" PRIu64, i ? "x" : "",
				      p->shape[i]);
	table_cell(t, "%s", p->dims ? text : "scalar");
}

static int checkpoint_print_pieces(struct ctl *ctl, const struct index *x)
{
	static const struct table_column columns[] = {
		{ "UNIT", false },    { "TENSOR", false }, { "ARRAY", false },
		{ "DTYPE", false },   { "SHAPE", false },  { "FROM", true },
		{ "ELEMENTS", true }, { "FILE", false },   { "CRC32C", false },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	if (!t)
		return ctl_broken();
	for (size_t i = 0; i < x->n_pieces; i++) {
		const struct index_piece *p = &x->pieces[i];

		table_cell(t, "%s", p->unit);
		table_cell(t, "%s", p->tensor);
		table_cell(t, "%s", index_array_name((enum index_array)p->array));
		table_cell(t, "%s", tensor_type_name((enum tensor_type)p->type));
		checkpoint_shape(t, p);
		table_cell(t, "%" PRIu64, p->begin);
		table_cell(t, "%" PRIu64, p->elements);
		table_cell(t, "%s", x->files[p->file].name);
		table_cell(t, "%08" PRIx32, p->crc);
	}
	return ctl_print_table(ctl, NULL, t);
}

static int checkpoint_print_index(const struct index *x)
{
	_cleanup_(freep) char *text = NULL;
	struct fault f = FAULT_NULL;

	if (index_encode(x, &text, &f))
		return checkpoint_fault(&f);
	return ctl_print_json(json_loads(text, 0, NULL));
}

/* The number of ranks of a checkpoint that was imported may not be known. */
static void checkpoint_print_head(const struct index *x)
{
	printf("step %" PRIu64 " of job %s, ", x->step, x->job);
	if (x->world_size)
		printf("%" PRIu32 " %s, ", x->world_size, x->world_size == 1 ? "rank" : "ranks");
	printf("%s in %zu %s\n", format_bytes(checkpoint_bytes(x)).text, x->n_files,
	       x->n_files == 1 ? "file" : "files");
}

static int checkpoint_inspect(struct ctl *ctl, int argc, char **argv)
{
	_cleanup_(fd_closep) int fd = -1;
	struct checkpoint_args a = { 0 };
	struct index x = INDEX_NULL;
	int r = checkpoint_parse(&a, checkpoint_step_option, false, "a folder", argc, argv);

	if (r != CTL_OK)
		return r;
	fd = checkpoint_open(&a, &x);
	if (fd < 0)
		return CTL_FAILED;
	if (ctl->json) {
		r = checkpoint_print_index(&x);
	} else {
		checkpoint_print_head(&x);
		r = checkpoint_print_pieces(ctl, &x);
	}
	index_deinit(&x);
	return r;
}

static int checkpoint_verify(struct ctl *ctl, int argc, char **argv)
{
	_cleanup_(fd_closep) int fd = -1;
	struct checkpoint_args a = { 0 };
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	struct fault f = FAULT_NULL;
	int r = checkpoint_parse(&a, checkpoint_step_option, false, "a folder", argc, argv);

	if (r != CTL_OK)
		return r;
	fd = checkpoint_open(&a, &x);
	if (fd < 0)
		return CTL_FAILED;
	r = save_verify(fd, &x, &p, &f) ? checkpoint_step_fault(a.path, x.step, &f)
					: checkpoint_report(ctl, &x, "is whole");
	index_deinit(&x);
	return r;
}

static int checkpoint_consolidate(struct ctl *ctl, int argc, char **argv)
{
	static const struct option options[] = { { "step", required_argument, NULL, 's' },
						 { "out", required_argument, NULL, 'o' },
						 { "names", required_argument, NULL, 'n' },
						 { "root", required_argument, NULL, 'R' },
						 { 0 } };
	_cleanup_(fd_closep) int fd = -1;
	struct consolidate_options o;
	struct checkpoint_args a = { 0 };
	struct index x = INDEX_NULL;
	struct fault f = FAULT_NULL;
	uint64_t bytes = 0;
	int r = checkpoint_parse(&a, options, false, "a folder", argc, argv);

	if (r != CTL_OK)
		return r;
	if (!a.out)
		return ctl_usage("checkpoint consolidate needs --out FILE");
	fd = checkpoint_open(&a, &x);
	if (fd < 0)
		return CTL_FAILED;
	o = (struct consolidate_options){ a.out, a.short_names, a.root };
	if (consolidate(fd, &x, &o, &bytes, &f))
		r = checkpoint_step_fault(a.path, x.step, &f);
	else if (ctl->json)
		r = ctl_print_json(json_pack("{s:I, s:I}", "step", (json_int_t)x.step, "bytes",
					     (json_int_t)bytes));
	else
		printf("step %" PRIu64 " of job %s in %s: %s\n", x.step, x.job, a.out,
		       format_bytes(bytes).text);
	index_deinit(&x);
	return r;
}

static int checkpoint_prune(struct ctl *ctl, int argc, char **argv)
{
	static const struct option options[] = { { "keep", required_argument, NULL, 'k' }, { 0 } };
	_cleanup_(fd_closep) int dir = -1;
	struct checkpoint_args a = { 0 };
	struct fault f = FAULT_NULL;
	size_t removed = 0, left = 0;
	int r = checkpoint_parse(&a, options, false, "a folder", argc, argv);

	if (r != CTL_OK)
		return r;
	if (!a.has_keep)
		return ctl_usage("checkpoint prune needs --keep N");
	dir = checkpoint_dir(&a);
	if (dir < 0)
		return CTL_FAILED;
	if (folder_prune(dir, a.keep, &removed, &left, &f))
		return checkpoint_fault(&f);
	if (ctl->json)
		return ctl_print_json(json_pack("{s:I, s:I}", "removed", (json_int_t)removed,
						"leftovers", (json_int_t)left));
	printf("%zu %s removed, %zu %s of processes that were killed\n", removed,
	       removed == 1 ? "checkpoint" : "checkpoints", left,
	       left == 1 ? "leftover" : "leftovers");
	return CTL_OK;
}

int ctl_checkpoint(struct ctl *ctl, int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(struct ctl *ctl, int argc, char **argv);
	} verbs[] = {
		{ "save", checkpoint_save },     { "load", checkpoint_load },
		{ "policy", checkpoint_policy }, { "inspect", checkpoint_inspect },
		{ "verify", checkpoint_verify }, { "consolidate", checkpoint_consolidate },
		{ "prune", checkpoint_prune },   { "convert", checkpoint_convert },
		{ "import", checkpoint_import },
	};

	for (size_t i = 0; argc > 1 && i < ARRAY_SIZE(verbs); i++)
		if (strcmp(argv[1], verbs[i].name) == 0)
			return verbs[i].run(ctl, argc - 1, argv + 1);
	return ctl_usage("checkpoint takes save, load, policy, inspect, verify, consolidate, "
			 "convert, import or prune");
}
