/* shardctl job create|delete|drain|resize. */
#include <getopt.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "methods.h"
#include "shardd.pb-c.h"

/* ------------------------------------------------------------------- create */

/* --user */
struct job_owner {
	bool given;
	uint32_t uid, gid;
};

static int job_number_option(const char *name, uint32_t min, uint32_t *ret)
{
	uint64_t number;

	if (!format_parse_number(optarg, UINT32_MAX, &number) || number < min)
		return ctl_usage("--%s \"%s\" is not a whole number from %u to %u", name, optarg,
				 min, UINT32_MAX);
	*ret = (uint32_t)number;
	return CTL_OK;
}

static int job_lifetime_option(Shardd__V1__JobSpec *job, Shardd__V1__Lifetime lifetime)
{
	if (job->lifetime != SHARDD__V1__LIFETIME__LIFETIME_UNSPECIFIED &&
	    job->lifetime != lifetime)
		return ctl_usage("--keep and --ephemeral exclude each other: give one of them");
	job->lifetime = lifetime;
	return CTL_OK;
}

static int job_resume_option(Shardd__V1__JobSpec *job)
{
	if (strcmp(optarg, "applied") == 0)
		job->resume = SHARDD__V1__RESUME__RESUME_APPLIED;
	else if (strcmp(optarg, "committed") == 0)
		job->resume = SHARDD__V1__RESUME__RESUME_COMMITTED;
	else if (strcmp(optarg, "no-copy") == 0)
		job->resume = SHARDD__V1__RESUME__RESUME_NO_COPY;
	else
		return ctl_usage("--resume \"%s\" is not applied, committed or no-copy", optarg);
	return CTL_OK;
}

/* Seconds to milliseconds. */
static int job_seconds_option(const char *name, uint32_t *ret_ms)
{
	uint64_t seconds;

	if (!format_parse_number(optarg, UINT32_MAX / 1000, &seconds))
		return ctl_usage("--%s \"%s\" is not a whole number of seconds from 0 to %u", name,
				 optarg, UINT32_MAX / 1000);
	*ret_ms = (uint32_t)seconds * 1000;
	return CTL_OK;
}

/* --checkpoint-...: of a policy as that of `shardctl checkpoint policy`. */
static int job_checkpoint_option(Shardd__V1__CheckpointPolicy *p, int o)
{
	uint64_t number;

	switch (o) {
	case 'D':
		p->path = optarg;
		return CTL_OK;
	case 'S':
		if (format_parse_number(optarg, UINT64_MAX, &p->every_steps) && p->every_steps)
			return CTL_OK;
		return ctl_usage("--checkpoint-every-steps \"%s\" is not a whole number from 1",
				 optarg);
	case 'E':
		if (format_parse_number(optarg, UINT32_MAX, &p->every_s) && p->every_s)
			return CTL_OK;
		return ctl_usage("--checkpoint-every-s \"%s\" is not a whole number from 1 to %u",
				 optarg, UINT32_MAX);
	case 'K':
		if (!format_parse_number(optarg, UINT32_MAX, &number) || !number)
			return ctl_usage(
				"--checkpoint-keep \"%s\" is not a whole number from 1 to %u",
				optarg, UINT32_MAX);
		p->keep = (uint32_t)number;
		return CTL_OK;
	default:
		if (format_parse_bytes(optarg, &p->bytes_per_s) && p->bytes_per_s)
			return CTL_OK;
		return ctl_usage("--checkpoint-rate \"%s\" is not a number of bytes, such as 4096, "
				 "64M, 2G",
				 optarg);
	}
}

static int job_create_option(Shardd__V1__JobSpec *job, int o)
{
	switch (o) {
	case 'D':
	case 'S':
	case 'E':
	case 'K':
	case 'R':
		return job_checkpoint_option(job->checkpoints, o);
	case 'w':
		return job_number_option("world-size", 1, &job->world_size);
	case 'k':
		return job_lifetime_option(job, SHARDD__V1__LIFETIME__LIFETIME_KEEP);
	case 'e':
		return job_lifetime_option(job, SHARDD__V1__LIFETIME__LIFETIME_EPHEMERAL);
	case 'q':
		if (format_parse_bytes(optarg, &job->quota_bytes))
			return CTL_OK;
		return ctl_usage("--quota \"%s\" is not a number of bytes, such as 4096, 64M, 2G",
				 optarg);
	case 't':
		return job_number_option("ttl", 0, &job->ttl_s);
	case 'o':
		return job_number_option("op-timeout", 0, &job->op_timeout_ms);
	case 'a':
		job->allow_torn = true;
		return CTL_OK;
	case 'p':
		job->is_private = true;
		return CTL_OK;
	case 'r':
		return job_resume_option(job);
	case 'm':
		return job_number_option("min-ranks", 1, &job->min_ranks);
	case 'x':
		return job_number_option("max-ranks", 1, &job->max_ranks);
	case 'g':
		return job_seconds_option("join-grace", &job->join_grace_ms);
	case 'P':
		return ctl_priority(optarg, &job->priority);
	case 'W':
		return job_seconds_option("wait-for-memory", &job->wait_for_memory_ms);
	default:
		return CTL_USAGE;
	}
}

static int job_check_checkpoints(const Shardd__V1__CheckpointPolicy *p)
{
	bool dir = *p->path, when = p->every_steps || p->every_s;

	if (!dir && (when || p->keep || p->bytes_per_s))
		return ctl_usage("--checkpoint-... needs --checkpoint-dir DIR");
	if (dir && !when)
		return ctl_usage("--checkpoint-dir needs --checkpoint-every-steps N or "
				 "--checkpoint-every-s S");
	return CTL_OK;
}

/* USER[:GROUP], whom the job is for: names or numbers. */
static int job_owner_option(char *given, struct job_owner *ret)
{
	char *colon = strchr(given, ':');
	const struct passwd *p;
	const struct group *g = NULL;
	uint64_t id;

	if (colon)
		*colon = '\0';
	p = getpwnam(given);
	if (!p && !format_parse_number(given, UINT32_MAX - 1, &id))
		return ctl_usage("--user \"%s\": there is no such user", given);
	ret->uid = p ? p->pw_uid : (uint32_t)id;
	p = p ? p : getpwuid(ret->uid);
	ret->gid = p ? p->pw_gid : 0;
	ret->given = true;
	if (!colon && !p)
		return ctl_usage("--user \"%s\": this machine does not know the user's group: give "
				 "--user UID:GID",
				 given);
	if (!colon)
		return CTL_OK;
	g = getgrnam(colon + 1);
	if (!g && !format_parse_number(colon + 1, UINT32_MAX - 1, &id))
		return ctl_usage("--user: there is no group \"%s\"", colon + 1);
	ret->gid = g ? g->gr_gid : (uint32_t)id;
	return CTL_OK;
}

/* Make NAME the owner's: UID/NAME. */
static int job_set_owner(const struct job_owner *owner, Shardd__V1__CreateJobRequest *request,
			 char name[CTL_JOB_MAX])
{
	char *given = request->job->name;

	if (!owner->given)
		return CTL_OK;
	if (strchr(given, '/'))
		return ctl_usage(
			"--user and the owner in \"%s\" exclude each other: give one of them",
			given);
	if (owner->uid == geteuid())
		return CTL_OK;
	if (!owner->gid)
		return ctl_usage("--user: group 0 is the superuser's: give --user USER:GROUP");
	snprintf(name, CTL_JOB_MAX, "%u/%.100s", owner->uid, given);
	request->job->name = name;
	request->gid = owner->gid;
	return CTL_OK;
}

/* @argv[0]: create. A job that is made by hand is kept unless an option says otherwise:
 * it exists before its trainers and after them. */
static int job_parse_create(Shardd__V1__JobSpec *job, struct job_owner *owner,
			    char name[CTL_JOB_MAX], int argc, char **argv)
{
	static const struct option options[] = {
		{ "world-size", required_argument, NULL, 'w' },
		{ "keep", no_argument, NULL, 'k' },
		{ "ephemeral", no_argument, NULL, 'e' },
		{ "quota", required_argument, NULL, 'q' },
		{ "ttl", required_argument, NULL, 't' },
		{ "op-timeout", required_argument, NULL, 'o' },
		{ "allow-torn", no_argument, NULL, 'a' },
		{ "private", no_argument, NULL, 'p' },
		{ "resume", required_argument, NULL, 'r' },
		{ "min-ranks", required_argument, NULL, 'm' },
		{ "max-ranks", required_argument, NULL, 'x' },
		{ "join-grace", required_argument, NULL, 'g' },
		{ "priority", required_argument, NULL, 'P' },
		{ "wait-for-memory", required_argument, NULL, 'W' },
		{ "user", required_argument, NULL, 'u' },
		{ "checkpoint-dir", required_argument, NULL, 'D' },
		{ "checkpoint-every-steps", required_argument, NULL, 'S' },
		{ "checkpoint-every-s", required_argument, NULL, 'E' },
		{ "checkpoint-keep", required_argument, NULL, 'K' },
		{ "checkpoint-rate", required_argument, NULL, 'R' },
		{ 0 },
	};
	int r = CTL_OK;
	int o;

	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "", options, NULL)) != -1)
		r = o == 'u' ? job_owner_option(optarg, owner) : job_create_option(job, o);
	if (r != CTL_OK)
		return r;
	if (argc - optind != 1)
		return ctl_usage("job create takes the name of one job");
	if (!job->world_size)
		return ctl_usage("job create needs --world-size N");
	if (job->join_grace_ms && !job->max_ranks)
		return ctl_usage("--join-grace needs --min-ranks N and --max-ranks N");
	r = job_check_checkpoints(job->checkpoints);
	if (r != CTL_OK)
		return r;
	r = ctl_job_name(argv[optind], name, &job->name);
	if (r != CTL_OK)
		return r;
	if (job->lifetime == SHARDD__V1__LIFETIME__LIFETIME_UNSPECIFIED)
		job->lifetime = SHARDD__V1__LIFETIME__LIFETIME_KEEP;
	return CTL_OK;
}

static int job_create(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__CreateJobRequest request = SHARDD__V1__CREATE_JOB_REQUEST__INIT;
	Shardd__V1__JobSpec job = SHARDD__V1__JOB_SPEC__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	Shardd__V1__CheckpointPolicy checkpoints = SHARDD__V1__CHECKPOINT_POLICY__INIT;
	_cleanup_(freep) char *path = NULL;
	struct job_owner owner = { 0 };
	char name[CTL_JOB_MAX], said[CTL_JOB_MAX];
	int r;

	request.job = &job;
	job.checkpoints = &checkpoints;
	r = job_parse_create(&job, &owner, name, argc, argv);
	if (r == CTL_OK)
		r = job_set_owner(&owner, &request, name);
	if (r == CTL_OK && *checkpoints.path) {
		path = ctl_absolute(checkpoints.path);
		if (!path)
			return ctl_broken();
		checkpoints.path = path;
	} else {
		job.checkpoints = NULL;
	}
	if (r == CTL_OK)
		r = ctl_call(ctl, METHOD_CreateJob, &request.base,
			     &shardd__v1__create_job_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	printf("job %s %s\n", ctl_said_job(job.name, said),
	       ((const Shardd__V1__CreateJobResponse *)reply)->created ? "created"
								       : "exists already");
	return CTL_OK;
}

/* ------------------------------------------------------------ delete, drain */

/* Return: CTL_FAILED: there are some. */
static int job_print_missed(const char *verb, const char *job, Shardd__V1__MissedNode **missed,
			    size_t n)
{
	for (size_t i = 0; i < n; i++)
		fprintf(stderr,
			"shardctl: UNAVAILABLE: node %s has not done it: %s; do it there when it "
			"runs, if it still has the job: shardctl job %s %s\n",
			missed[i]->node, missed[i]->why, verb, job);
	return n ? CTL_FAILED : CTL_OK;
}

static int job_delete(struct ctl *ctl, int argc, char **argv)
{
	static const struct option options[] = {
		{ "force", no_argument, NULL, 'f' },
		{ 0 },
	};
	Shardd__V1__DeleteJobRequest request = SHARDD__V1__DELETE_JOB_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Shardd__V1__DeleteJobResponse *d;
	char name[CTL_JOB_MAX], said[CTL_JOB_MAX];
	int r, o;

	while ((o = ctl_getopt(argc, argv, "", options, NULL)) != -1) {
		if (o != 'f')
			return CTL_USAGE;
		request.force = true;
	}
	if (argc - optind != 1)
		return ctl_usage("job delete takes the name of one job");
	r = ctl_job_name(argv[optind], name, &request.job);
	if (r == CTL_OK)
		r = ctl_call(ctl, METHOD_DeleteJob, &request.base,
			     &shardd__v1__delete_job_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	d = (const Shardd__V1__DeleteJobResponse *)reply;
	if (ctl->json)
		r = ctl_print_json(json_from_message(reply));
	else
		printf("job %s deleted, %s freed\n", ctl_said_job(request.job, said),
		       format_bytes(d->freed_bytes).text);
	return r == CTL_OK ? job_print_missed("delete", ctl_said_job(request.job, said), d->missed,
					      d->n_missed)
			   : r;
}

static int job_drain(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__DrainJobRequest request = SHARDD__V1__DRAIN_JOB_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Shardd__V1__DrainJobResponse *d;
	char name[CTL_JOB_MAX], said[CTL_JOB_MAX];
	int r;

	if (argc != 2 || argv[1][0] == '-')
		return ctl_usage("job drain takes the name of one job");
	r = ctl_job_name(argv[1], name, &request.job);
	if (r == CTL_OK)
		r = ctl_call(ctl, METHOD_DrainJob, &request.base,
			     &shardd__v1__drain_job_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	d = (const Shardd__V1__DrainJobResponse *)reply;
	if (ctl->json)
		r = ctl_print_json(json_from_message(reply));
	else
		printf("job %s is draining: %u %s told to commit and leave\n",
		       ctl_said_job(request.job, said), d->ranks,
		       d->ranks == 1 ? "trainer was" : "trainers were");
	return r == CTL_OK ? job_print_missed("drain", ctl_said_job(request.job, said), d->missed,
					      d->n_missed)
			   : r;
}

/* ------------------------------------------------------------------- resize */

static void job_print_resized(const Shardd__V1__ResizeJobRequest *request,
			      const Shardd__V1__ResizeJobResponse *r)
{
	char said[CTL_JOB_MAX];

	printf("job %s has %u %s now, %u before: %s copied, %u %s in place\n",
	       ctl_said_job(request->job, said), request->world_size,
	       request->world_size == 1 ? "rank" : "ranks", r->from_world_size,
	       format_bytes(r->moved_bytes).text, r->units_in_place,
	       r->units_in_place == 1 ? "unit stayed" : "units stayed");
	if (r->blobs_left_out)
		printf("%u %s of ranks that the job no longer has: dropped\n", r->blobs_left_out,
		       r->blobs_left_out == 1 ? "blob" : "blobs");
}

/* @argv[0]: resize; an option may come before, between or behind JOB and N. */
static int job_parse_resize(Shardd__V1__ResizeJobRequest *request, char name[CTL_JOB_MAX], int argc,
			    char **argv)
{
	static const struct option options[] = {
		{ "timeout", required_argument, NULL, 't' },
		{ 0 },
	};
	uint32_t seconds = 0;
	uint64_t n;
	int o;

	while ((o = ctl_getopt(argc, argv, "", options, NULL)) != -1)
		if (o != 't' || job_number_option("timeout", 0, &seconds) != CTL_OK)
			return CTL_USAGE;
	if (seconds > UINT32_MAX / 1000)
		return ctl_usage("--timeout %u is more than %u seconds", seconds,
				 UINT32_MAX / 1000);
	request->timeout_ms = seconds * 1000;
	if (argc - optind != 2)
		return ctl_usage("job resize takes the name of one job and a number of ranks");
	if (!format_parse_number(argv[optind + 1], UINT32_MAX, &n) || !n)
		return ctl_usage("job resize: \"%s\" is not a number of ranks, 1 or more",
				 argv[optind + 1]);
	request->world_size = (uint32_t)n;
	return ctl_job_name(argv[optind], name, &request->job);
}

static int job_resize(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__ResizeJobRequest request = SHARDD__V1__RESIZE_JOB_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	char name[CTL_JOB_MAX];
	int r = job_parse_resize(&request, name, argc, argv);

	if (r == CTL_OK)
		r = ctl_call_long(ctl, METHOD_ResizeJob, &request.base,
				  &shardd__v1__resize_job_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	job_print_resized(&request, (const Shardd__V1__ResizeJobResponse *)reply);
	return CTL_OK;
}

int ctl_job(struct ctl *ctl, int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(struct ctl *ctl, int argc, char **argv);
	} verbs[] = {
		{ "create", job_create },
		{ "delete", job_delete },
		{ "drain", job_drain },
		{ "resize", job_resize },
	};

	for (size_t i = 0; argc > 1 && i < ARRAY_SIZE(verbs); i++)
		if (strcmp(argv[1], verbs[i].name) == 0)
			return verbs[i].run(ctl, argc - 1, argv + 1);
	return ctl_usage("job takes create, delete, drain or resize");
}
