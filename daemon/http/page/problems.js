/* What is wrong now, from an answer to /api/v1/status: one sentence each, the worst first. */
import {
	bytes,
	clock,
	count,
	duration,
	isNoLimit,
	isStopped,
	percent,
	plural,
	ranges,
	sentence
} from "./dom.js";
import {isLate, lagOf, newest} from "./publications.js";
import {isNearLimit, jobKey, refusedLately, slowRank} from "./samples.js";

const RECENT_US = 60e6; /* so long is an op that failed wrong now */

const BAD = 0;
const WARN = 1;
const INFO = 2;

export const LEVELS = ["bad", "warn", "info"];
export const LEVEL_WORDS = ["Wrong", "Warning", "Note"];

/* What a process state means for the person who reads it. */
function adviceFor(state, pid, node) {
	switch (state) {
	case "T":
		return `The process is stopped (SIGSTOP, or Ctrl-Z). kill -CONT ${pid}${
			node ? ` on node ${node}` : ""} lets it go on.`;
	case "t":
		return "A debugger holds the process.";
	case "D":
		return "The process is in a sleep that cannot be interrupted: " +
			"a disk or a network file system does not answer.";
	case "R":
		return "The process runs: it computes, or it is in an endless loop. " +
			"py-spy or gdb shows where.";
	case "S":
		return "The process sleeps: it waits for something other than shardd. " +
			"py-spy or gdb shows where.";
	case "Z":
	case "X":
		return "The process is dead.";
	default:
		return "";
	}
}

/* @came: when the answer came. */
function since(us, came) {
	return us > 0 ? `since ${clock(new Date(came.getTime() - us / 1000))} (${duration(us)})` :
			"";
}

/* The rank that holds a job up, in words. */
function culpritWords(c) {
	if (!c || c.rank < 0)
		return "no single rank holds it up";
	const where = c.node ? ` on node ${c.node}` : "";
	return `rank ${c.rank}${c.pid ? ` (pid ${c.pid}${where})` : ""} holds it up`;
}

function onStall(job, came, add) {
	if (!job.stall)
		return;
	const c = job.stall.culprit;
	const who = culpritWords(c);
	const when = since(job.stall.wait_us, came);
	add(BAD, `stall ${who}`, `Job ${job.name} is STALLED ${when}: ${who}.`,
		[sentence(job.stall.text), c ? adviceFor(c.process_state, c.pid, c.node) : ""]);
}

/* A process that is stopped, and no stall names it yet. */
function onStopped(job, add) {
	const culprit = job.stall && job.stall.culprit ? job.stall.culprit.rank : -1;
	for (const r of job.ranks)
		if (isStopped(r) && r.rank !== culprit) {
			const waits = job.blame.some((b) => b.rank === r.rank);
			add(WARN, `stopped ${r.rank}`,
				`Job ${job.name}: the process of rank ${r.rank} (pid ${r.pid}) ` +
					`is stopped. ${
						waits ? "Others wait for it." :
							"No rank waits for it yet."}`,
				[adviceFor(r.process_state, r.pid, r.node)]);
		}
}

/* What happens after a rank has died. */
function afterDeath(job, joined) {
	if (job.elastic_wait) {
		const left = duration(job.elastic_left_ms * 1000);
		return `${job.elastic_wait}${job.elastic_left_ms ? ` (in ${left})` : ""}.`;
	}
	const next = joined ? "The others wait until it is started again." :
			      "No rank is left: the job waits until it is started again.";
	return `${next} The kernel's log says whether a process was killed for memory.`;
}

function onDead(job, add) {
	const dead = job.ranks.filter((r) => r.state === "DEAD").map((r) => r.rank);
	const joined = job.ranks.some((r) => ["JOINED", "STALE", "ELSEWHERE"].includes(r.state));
	if (!dead.length)
		return;
	const what = dead.length === 1 ? ["rank", "its process"] : ["ranks", "their processes"];
	add(joined || job.state === "TORN" ? BAD : WARN, `dead ${dead}`,
		`Job ${job.name} has lost ${what[0]} ${ranges(dead)}: ${what[1]} died.`,
		[afterDeath(job, joined)]);
}

function onState(job, add) {
	const last = job.has_commit ? ` (last commit: step ${count(job.step)})` : "";
	if (job.state === "TORN")
		add(BAD, "torn",
			`Job ${job.name} is TORN: a trainer died between two commits${last}.`,
			["Nobody knows which step its parameters belong to, so it refuses to go " +
				"on: load a checkpoint, or initialise all units again."]);
	for (const node of job.nodes)
		if (node.error)
			add(BAD, `node ${node.name}`,
				`Job ${job.name}: node ${
					node.name} does not say what its ranks do: ${node.error}`,
				[]);
	const missing = job.ranks.filter((r) => r.state === "EMPTY" || r.state === "STALE")
				.map((r) => r.rank);
	if (job.state === "FORMING" && missing.length)
		add(WARN, `forming ${missing}`,
			`Job ${job.name} waits for ${missing.length === 1 ? "rank" : "ranks"} ${
				ranges(missing)}, ` +
				`which ${missing.length === 1 ? "has" : "have"} not joined.`,
			[sentence(job.waits)]);
	else if (job.waits)
		add(WARN, "waits", `Job ${job.name}: ranks that join wait: ${job.waits}.`, []);
	if (job.memory_wait) {
		const m = job.memory_wait;
		add(WARN, "memory",
			`Job ${job.name} waits for memory: number ${m.position} in the line, for ${
				bytes(m.bytes)}.`,
			[sentence(m.why), `It gives up in ${duration(m.left_ms * 1000)}.`]);
	}
	if (job.elastic_wait && !job.ranks.some((r) => r.state === "DEAD"))
		add(INFO, "elastic",
			`Job ${job.name} changes its number of ranks: ${job.elastic_wait}.`, []);
	if (job.waits_for_reader)
		add(WARN, "reader",
			`Job ${job.name}: changes of parameters wait for ${job.waits_for_reader}.`,
			[]);
	if (job.state === "RESIZING" || job.state === "DRAINING" || job.state === "DELETED")
		add(INFO, job.state, `Job ${job.name} is ${job.state}.`, []);
}

/* Ops that failed long ago say nothing of now. */
function onFailedOps(job, add) {
	if (!job.last_error || !job.ops_failed)
		return;
	const recent = job.last_error_us < RECENT_US;
	const differ = /differ/.test(job.last_error);
	const failed = `${plural(job.ops_failed, "op")} failed${
		job.ops_failed === 1 ? "" : ", the last one"} ${duration(job.last_error_us)} ago.`;
	add(recent ? BAD : INFO, "ops failed",
		recent && differ ?
			`Job ${job.name}: the ranks do not run the same program. ${failed}` :
			`Job ${job.name}: ${failed}`,
		[`The last error: ${sentence(job.last_error)}`]);
}

function onSaving(job, add) {
	const c = job.checkpoint;
	if (c && c.state === "FAILED")
		add(BAD, "checkpoint", `Job ${job.name}: the last checkpoint failed.`, [
			`${c.path}: ${c.error}`,
			/No space|ENOSPC|quota/i.test(c.error) ?
				"The disk is full: free space there, or let the policy keep " +
					"fewer checkpoints." :
				""
		]);
	if (job.replica && job.replica.error)
		add(WARN, "replica",
			`Job ${job.name}: copies on other nodes are not made: ${job.replica.error}`,
			[]);
}

/* Readers that hold an old generation, in words. */
function holders(p, g) {
	const old = p.generations.filter((one) => one.number !== g.number)
			    .flatMap((one) => one.leases.map((l) => l.pid));
	const pids = [...new Set(old)];
	const who = pids.length === 1 ? "process" : "processes";
	const which = pids.slice(0, 4).join(", ") + (pids.length > 4 ? ", …" : "");
	return pids.length ? `Older generations are leased by ${who} ${which}.` : "";
}

/* Readers see weights of an old step: the newest is @g. */
function onLag(job, p, g, add) {
	const due = p.every_steps === 1 ? "every step" : `every ${count(p.every_steps)} steps`;
	const behind = plural(lagOf(job, g), "step");
	const skipped = `${plural(p.skipped, "generation")} skipped so far because ` +
		"no buffer was free.";
	add(WARN, `publication ${p.name}`,
		`Job ${job.name}: publication ${p.name} is ${behind} behind; ` +
			`a generation is due ${due}.`,
		[
			p.why ? `The last generation was not made: ${sentence(p.why)}` : "",
			p.skipped ? `${skipped} ${holders(p, g)}` : ""
		]);
}

function onPublications(job, add) {
	for (const p of job.publications) {
		const g = newest(p);
		if (g && isLate(p, lagOf(job, g)))
			onLag(job, p, g, add);
		else if (p.why)
			add(WARN, `publication ${p.name}`,
				`Job ${job.name}: the last generation of publication ${
					p.name} was not made.`,
				[sentence(p.why)]);
	}
}

function onQuota(job, add) {
	if (job.quota_bytes > 0 && job.used_bytes >= 0.9 * job.quota_bytes)
		add(WARN, "quota",
			`Job ${job.name} uses ${
				percent(job.used_bytes, job.quota_bytes)} of its quota: ` +
				`${bytes(job.used_bytes)} of ${bytes(job.quota_bytes)}.`,
			[]);
}

function onSlow(job, add) {
	const slow = job.stall || job.state !== "RUNNING" ? null : slowRank(job);
	if (slow)
		add(WARN, `slow ${slow.rank}`,
			`Job ${job.name}: rank ${slow.rank} (pid ${
				slow.pid}) is slow: others waited for it during ` +
				`${Math.round(100 * Math.min(1, slow.late))} % of the last ${
					Math.round(slow.seconds)} s.`,
			[]);
}

/* The largest jobs, in words. */
function largest(status) {
	const jobs = status.jobs.filter((j) => j.used_bytes > 0)
			     .sort((a, b) => b.used_bytes - a.used_bytes)
			     .slice(0, 3);
	return jobs.length ?
		`Most of it: ${
			jobs.map((j) => `job ${j.name} ${bytes(j.used_bytes)}`).join(", ")}.` :
		"";
}

function onDevices(status, add) {
	for (const d of status.devices) {
		const taken = d.used_bytes + d.overhead_bytes;
		if (d.lost)
			add(BAD, `lost ${d.id}`, `Device ${d.id} is lost: ${d.lost}`, []);
		if (d.capacity_bytes > 0 && taken >= 0.9 * d.capacity_bytes)
			add(taken >= 0.98 * d.capacity_bytes ? BAD : WARN, `full ${d.id}`,
				`Memory of device ${d.id} is ` +
					`${percent(taken, d.capacity_bytes)} full: ${
						bytes(taken)} of ${bytes(d.capacity_bytes)}.`,
				[largest(status)]);
		if (d.quarantined_bytes > 0)
			add(WARN, `quarantine ${d.id}`,
				`${bytes(d.quarantined_bytes)} of device ${
					d.id} is in quarantine: freed, but a ` +
					"process may still hold it.",
				["shardctl memory names the processes."]);
	}
	for (const c of status.comms)
		if (c.state === "BROKEN")
			add(BAD, `comm ${c.name}`, `Communicator ${c.name} is BROKEN. ${c.detail}`,
				[]);
}

function onDaemon(status, add) {
	const cluster = status.cluster;
	if (cluster && cluster.state !== "IN")
		add(BAD, "cluster",
			`Node ${cluster.node} is no member of cluster ${cluster.name} (${
				cluster.state})` +
				`${cluster.why ? `: ${cluster.why}` : ""}.`,
			[]);
	if (status.draining)
		add(WARN, "draining",
			"The daemon drains: it is about to stop, and admits no new jobs.", []);
	if (status.cordon)
		add(WARN, "cordon",
			`New jobs are refused: user ${status.cordon.uid} has cordoned the node ` +
				`(${new Date(status.cordon.unix_s * 1000).toLocaleString()}).`,
			["shardctl uncordon ends that."]);
	if (status.store_left_out > 0)
		add(WARN, "store",
			`${plural(status.store_left_out, "slab")} would end with the daemon: ` +
				"the store is nearly full.",
			[]);
	if (status.log_dropped > 0)
		add(INFO, "log",
			`${plural(status.log_dropped, "log line")} ${
				status.log_dropped === 1 ? "was" : "were"} dropped.`,
			[]);
}

function onUsers(status, at, add) {
	for (const group of status.groups)
		for (const u of group.usage)
			if (isNearLimit(u))
				add(WARN, `group ${group.gid} ${u.name}`,
					`The members of group ${group.gid} are near a limit: ${
						u.name} ${shownUsage(u)} together.`,
					[]);
	for (const user of status.users)
		for (const u of user.usage) {
			const refuses = refusedLately(user.uid, u, at);
			if (!refuses && !isNearLimit(u))
				continue;
			add(refuses ? BAD : WARN, `user ${user.uid} ${u.name}`,
				`User ${user.uid} ${
					refuses ? "is refused requests" : "is near a limit"}: ` +
					`${u.name} ${shownUsage(u)}${
						u.refused ? `, ${count(u.refused)} refused` : ""}.`,
				[]);
		}
}

export function shownUsage(u) {
	const show = /bytes/.test(u.name) ? bytes : count;
	return isNoLimit(u.limit) ? show(u.used) : `${show(u.used)} of ${show(u.limit)}`;
}

/* @at: when the answer came, as samples.js has it; @came: the same as a date.
 * Return: [{ level, key, text, more: [text], job }], worst first. */
export function findProblems(status, at, came) {
	const list = [];
	const adder = (job) => (level, key, text, more) => list.push({
		level,
		key: `${job ? jobKey(job) : ""} ${key}`,
		text,
		more: more.filter(Boolean),
		job: job && jobKey(job)
	});

	for (const look of [(job, add) => onStall(job, came, add), onStopped, onDead,
				  onFailedOps, onState, onSaving, onPublications,
				  onSlow, onQuota])
		for (const job of status.jobs)
			look(job, adder(job));
	onDevices(status, adder(null));
	onDaemon(status, adder(null));
	onUsers(status, at, adder(null));
	return list.map((p, i) => [p, i])
		.sort((a, b) => a[0].level - b[0].level || a[1] - b[1])
		.map(([p]) => p);
}
