/* shardctl checkpoint import: a safetensors file becomes a checkpoint. */
#include "ctl/checkpoint_verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/import.h"
#include "core/cleanup.h"
#include "ctl/format.h"

struct checkpoint_import_args {
	const char *file, *dir; /* borrowed from argv */
	struct import_options o;
	bool has_step;
};

static int checkpoint_import_option(struct checkpoint_import_args *a, int o)
{
	uint64_t ranks;

	switch (o) {
	case 's':
		a->has_step = true;
		if (format_parse_number(optarg, INT64_MAX, &a->o.step))
			return CTL_OK;
		return ctl_usage("--step \"%s\" is not a whole number", optarg);
	case 'w':
		if (!format_parse_number(optarg, UINT32_MAX, &ranks) || !ranks)
			return ctl_usage("--world-size \"%s\" is not a whole number from 1",
					 optarg);
		a->o.world_size = (uint32_t)ranks;
		return CTL_OK;
	case 'j':
		a->o.job = optarg;
		return *optarg ? CTL_OK : ctl_usage("--job is empty");
	default:
		return CTL_USAGE;
	}
}

static int checkpoint_import_parse(struct checkpoint_import_args *a, int argc, char **argv)
{
	static const struct option options[] = { { "step", required_argument, NULL, 's' },
						 { "world-size", required_argument, NULL, 'w' },
						 { "job", required_argument, NULL, 'j' },
						 { 0 } };
	int r = CTL_OK, o;

	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "", options, NULL)) != -1)
		r = checkpoint_import_option(a, o);
	if (r != CTL_OK)
		return r;
	if (argc - optind != 2) {
		ctl_usage(
			"checkpoint import takes a safetensors file, or - for stdin, and a folder");
		return CTL_USAGE;
	}
	a->file = argv[optind];
	a->dir = argv[optind + 1];
	return a->has_step ? CTL_OK : ctl_usage("checkpoint import needs --step N");
}

/* Return: a descriptor; -1: the error is printed. */
static int checkpoint_import_open(const char *path, int flags)
{
	int fd = strcmp(path, "-") == 0 ? dup(STDIN_FILENO) : open(path, flags | O_CLOEXEC);
	struct stat st;

	if (fd < 0)
		fprintf(stderr, "shardctl: %s: opening '%s': %s\n",
			errno == ENOENT ? "NOT_FOUND" : "FAILED_PRECONDITION", path,
			strerror(errno));
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISDIR(st.st_mode))
		return fd;
	fprintf(stderr,
		"shardctl: INVALID_ARGUMENT: '%s' is a folder: name the safetensors file in it\n",
		path);
	close(fd);
	return -1;
}

static int checkpoint_import_report(struct ctl *ctl, const struct index *x, const char *dir)
{
	uint64_t bytes = x->files[0].bytes;

	if (ctl->json)
		return ctl_print_json(json_pack("{s:I, s:I, s:I}", "step", (json_int_t)x->step,
						"pieces", (json_int_t)x->n_pieces, "bytes",
						(json_int_t)bytes));
	printf("step %" PRIu64 " of job %s in %s: %zu tensors, %s\n", x->step, x->job, dir,
	       x->n_pieces, format_bytes(bytes).text);
	return CTL_OK;
}

int checkpoint_import(struct ctl *ctl, int argc, char **argv)
{
	_cleanup_(fd_closep) int file = -1, dir = -1;
	struct checkpoint_import_args a = { .o.job = "imported" };
	struct index x = INDEX_NULL;
	struct fault f = FAULT_NULL;
	int r = checkpoint_import_parse(&a, argc, argv);

	if (r != CTL_OK)
		return r;
	a.o.name = a.file;
	file = checkpoint_import_open(a.file, O_RDONLY);
	dir = file >= 0 ? open(a.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	if (file >= 0 && dir < 0)
		fprintf(stderr, "shardctl: %s: opening '%s': %s\n",
			errno == ENOENT ? "NOT_FOUND" : "FAILED_PRECONDITION", a.dir,
			strerror(errno));
	if (dir < 0)
		return CTL_FAILED;
	if (import_file(dir, file, &a.o, &x, &f)) {
		ctl_print_error(fault_code_name(f.code), "%s", f.text);
		return CTL_FAILED;
	}
	r = checkpoint_import_report(ctl, &x, a.dir);
	index_deinit(&x);
	return r;
}
