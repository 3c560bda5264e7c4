/* Devices and communicators, checkpoints and replicas, users, sessions. */
import {badge, bytes, count, duration, h, isNoLimit, note, percent, plural, table} from "./dom.js";
import {isHidden} from "./jobs.js";
import {shownUsage} from "./problems.js";
import {isNearLimit, jobKey} from "./samples.js";

const MOST_SESSIONS = 500;

export function drawDevices(status) {
	return [
		table("Devices",
			[
				{name: "Device"}, {name: "State"}, {name: "Memory", number: true},
				{name: "Kernels"}, {name: "Order"},
				{name: "Description", wide: true}
			],
			status.devices.map((d) => ({
				key: d.id,
				cells: [
					d.id,
					d.lost ? badge(`lost: ${d.lost}`, "bad") :
						 badge("works", "ok"),
					bytes(d.capacity_bytes), d.kernels,
					`${d.order}${d.mode ? `, ${d.mode}` : ""}`,
					`${d.backend}, ${d.detail}${d.uuid ? `, ${d.uuid}` : ""}`
				]
			}))),
		h("h3", null, "Communicators"),
		status.comms.length ?
			table("Communicators",
				[
					{name: "Name"}, {name: "Engine"}, {name: "State"},
					{name: "Devices", wide: true}, {name: "Gather"},
					{name: "Memory", number: true}, {name: "Ops", number: true},
					{name: "Detail", wide: true}
				],
				status.comms.map((c, i) => ({
					key: `${i} ${c.name}`,
					cells: [
						c.name, c.engine,
						badge(c.state,
							c.state === "BROKEN"	    ? "bad" :
								c.state === "READY" ? "ok" :
										      "busy"),
						c.devices.join(", "), c.gather,
						bytes(c.memory_bytes), count(c.ops),
						c.detail || "–"
					]
				}))) :
			note("There are none."),
	];
}

function policyText(p) {
	if (!p)
		return "–";
	const when = [
		p.every_steps ? `each ${plural(p.every_steps, "step")}` : "",
		p.every_s ? `each ${duration(p.every_s * 1e6)}` : ""
	].filter(Boolean).join(", ");
	return `${when || "never"}, keep ${p.keep || "all"}${
		p.bytes_per_s ? `, ${bytes(p.bytes_per_s)}/s` : ""}, in ${p.path}`;
}

function checkpointRow(job) {
	const c = job.checkpoint;
	const level = {DONE: "ok", FAILED: "bad", WRITING: "busy", WAITING: "busy"};
	const done = c ?
		[
			badge(c.state, level[c.state]),
			c.state === "WAITING" ? "–" : count(c.step),
			c.state === "WRITING" ? `${bytes(c.written)} of ${bytes(c.bytes)}, ${
							percent(c.written, c.bytes)}` :
						bytes(c.bytes),
			`${c.path}${c.error ? `: ${c.error}` : ""}${
				c.waits_for ? `, waits for ${c.waits_for}` : ""}`
		] :
					      [badge("none", ""), "–", "–", "–"];
	const counts = job.counts || {checkpoints: 0, checkpoints_failed: 0};
	return {
		key: jobKey(job),
		class: c && c.state === "FAILED" && "row-bad",
		cells: [
			job.name, ...done,
			`${count(counts.checkpoints)}, ${count(counts.checkpoints_failed)} failed`,
			policyText(job.checkpoints)
		]
	};
}

function replicaText(r) {
	return [
		r.has_step ? `step ${count(r.step)}` : "no copy yet",
		r.busy ? "a later one is being made" : "", r.error
	].filter(Boolean)
		.join(", ");
}

export function drawSaving(status) {
	const jobs = status.jobs.filter((j) => !isHidden(j));
	const replicas = jobs.filter((j) => j.replica);
	if (!jobs.length)
		return note("There is no job.");
	return [
		table("Checkpoints",
			[
				{name: "Job"}, {name: "Last"}, {name: "Step", number: true},
				{name: "Bytes", number: true},
				{name: "Folder and error", wide: true}, {name: "Made so far"},
				{name: "Policy", wide: true}
			],
			jobs.map(checkpointRow)),
		h("h3", null, "Replicas on other nodes"),
		replicas.length ? table("Replicas",
					  [
						  {name: "Job"}, {name: "Copies"},
						  {name: "Bytes here", number: true}
					  ],
					  replicas.map((j) => ({
						  key: jobKey(j),
						  cells: [
							  j.name,
							  badge(replicaText(j.replica),
								  j.replica.error ? "bad" : "ok"),
							  bytes(j.replica.bytes)
						  ]
					  }))) :
				  note("No job keeps parts for other nodes."),
	];
}

/* A row of the usage of @who, a user or a group. */
function usageRow(who, u) {
	const show = /bytes/.test(u.name) ? bytes : count;
	return {
		key: `${who} ${u.name}`,
		class: isNearLimit(u) && "row-bad",
		cells: [
			`${who} ${u.name}`, shownUsage(u),
			isNoLimit(u.limit) ? "no limit" :
					     h("span", null, h("meter", {
						     min: "0",
						     max: String(u.limit),
						     value: String(u.used),
						     "aria-hidden": "true"
					     }),
						     ` ${percent(u.used, u.limit)}`),
			show(u.peak), u.refused ? badge(count(u.refused), "warn") : "0"
		]
	};
}

export function drawUsers(status) {
	const users = status.users.flatMap((user) =>
		user.usage.filter((u) => u.used || u.peak || u.refused)
			.map((u) => usageRow(user.uid, u)));
	const inUse = (u) => u.used || u.peak || u.refused || !isNoLimit(u.limit);
	const groups = status.groups.flatMap((group) =>
		group.usage.filter(inUse).map((u) => usageRow(`@${group.gid}`, u)));
	return [
		note("Kinds that a user has never used are left out. Lines with an @ are of a " +
			"group: what its members use together."),
		table("Usage of users and groups",
			[
				{name: "User and kind"}, {name: "In use", number: true},
				{name: "Of the limit"}, {name: "Peak", number: true},
				{name: "Refused", number: true}
			],
			[...users, ...groups])
	];
}

export function drawSessions(status) {
	const rows = status.sessions.slice(0, MOST_SESSIONS).map((s) => ({
		key: s.session,
		cells: [
			count(s.session), `${s.pid}`, s.client_name || "–",
			s.job ? `${s.job_uid}/${s.job}` : "–", s.rank >= 0 ? `${s.rank}` : "–",
			duration(s.age_s * 1e6), count(s.ops_total), count(s.pending_ops),
			bytes(s.held_bytes),
			s.ring ? `ring, ${plural(s.ring.submissions, "submission")}, full ${
					 plural(s.ring.full, "time")}` :
				 "gRPC"
		]
	}));
	if (!rows.length)
		return note("No process is attached.");
	return [
		table("Sessions",
			[
				{name: "Session", slim: true}, {name: "pid", number: true},
				{name: "Program"}, {name: "Job"}, {name: "Rank", number: true},
				{name: "Age", number: true}, {name: "Ops", number: true},
				{name: "Pending", number: true}, {name: "Buffers", number: true},
				{name: "Calls go over"}
			],
			rows),
		status.sessions.length > MOST_SESSIONS ?
			note(`Not shown: ${
				plural(status.sessions.length - MOST_SESSIONS, "session")} more.`) :
			null
	];
}
