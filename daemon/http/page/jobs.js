/* The jobs, and of the chosen one its ranks, which of them others wait for, and its rate. */
import {
	badge,
	bytes,
	count,
	duration,
	h,
	isStopped,
	note,
	percent,
	plural,
	processWords,
	ranges,
	rate,
	sentence,
	table
} from "./dom.js";
import {jobKey, rankShares, slowRank, stepRate, stepRates} from "./samples.js";

const STATE_LEVELS = {
	IDLE: "",
	FORMING: "warn",
	RUNNING: "ok",
	TORN: "bad",
	DRAINING: "busy",
	RESIZING: "busy",
	DELETED: ""
};
const RANK_LEVELS = {
	EMPTY: "warn",
	JOINED: "ok",
	STALE: "warn",
	LEFT: "",
	DEAD: "bad",
	ELSEWHERE: "ok"
};
const HELD_US = 1e6;   /* a rank that holds others up for longer is marked */
const MANY_RANKS = 16; /* from here on, the ranks are shown as a map, too */

/* The answer has only name, owner, state and memory of it: it is private, and another user's. */
export function isHidden(job) {
	return job.is_private && !job.ranks.length;
}

export function hiddenNote(job, what) {
	return note(`Job ${job.name} is private and belongs to user ${job.uid}: ` +
		`only its owner sees ${what}.`);
}

function joined(job) {
	return job.ranks.filter((r) => r.state === "JOINED" || r.state === "ELSEWHERE").length;
}

function checkpointText(job) {
	const c = job.checkpoint;
	if (!c)
		return "–";
	if (c.state === "WRITING")
		return badge(`WRITING ${percent(c.written, c.bytes)}`, "busy");
	if (c.state === "FAILED")
		return badge("FAILED", "bad");
	return badge(c.state === "DONE" ? `step ${count(c.step)}` : c.state,
		c.state === "DONE" ? "ok" : "busy");
}

function stallText(job) {
	if (!job.stall)
		return "–";
	const c = job.stall.culprit;
	return badge(`${duration(job.stall.wait_us)}${c && c.rank >= 0 ? `, rank ${c.rank}` : ""}`,
		"bad");
}

export function drawJobs(status, chosen, choose) {
	if (!status.jobs.length)
		return note("There is no job. Start one, for example: " +
			"shardctl run -n 2 -- charlm --data FILE");
	const columns = [
		{name: "Job"}, {name: "Owner", help: "user id", number: true}, {name: "State"},
		{name: "Step", help: "last committed step", number: true},
		{name: "Rate", help: "committed steps a second, of the last 10 s", number: true},
		{name: "Commits", help: "since this daemon has the job", number: true},
		{name: "Ranks", help: "joined, of all", number: true},
		{name: "Memory", number: true}, {name: "Checkpoint", help: "the last one"},
		{name: "Stalled", help: "for how long, and by whom"}
	];
	return table("Jobs", columns, status.jobs.map((job) => {
		const key = jobKey(job);
		const hidden = isHidden(job);
		const name = h("button", {
			type: "button",
			class: "link",
			"aria-pressed": String(key === chosen),
			onclick: () => choose(key)
		},
			job.name);
		return {
			key,
			current: key === chosen,
			class: job.stall && "row-bad",
			cells: [
				name, job.uid, badge(job.state, STATE_LEVELS[job.state]),
				job.has_commit ? count(job.step) : "–",
				hidden || !job.has_commit ? "–" : rate(stepRate(key)),
				job.counts ? count(job.counts.commits) : "–",
				hidden ? "–" : `${joined(job)} of ${job.world_size}`,
				bytes(job.used_bytes), checkpointText(job), stallText(job)
			]
		};
	}));
}

/* ------------------------------------------------------------------------ its rate */

function sparkline(job) {
	if (!job.has_commit)
		return note("The job has no commit yet, so it has no rate.");
	const rates = stepRates(jobKey(job));
	if (rates.length < 2)
		return note("The rate needs three answers of the daemon.");
	const [w, high] = [300, 44];
	const top = Math.max(...rates.map((r) => r.rate), 1e-9);
	const [from, to] = [rates[0].at, rates[rates.length - 1].at];
	const points =
		rates.map((r) => `${(((r.at - from) / Math.max(1, to - from)) * w).toFixed(1)},${
				  (high - 2 - (r.rate / top) * (high - 4)).toFixed(1)}`);
	const now = stepRate(jobKey(job));
	const label = `Steps a second in the last ${duration((to - from) * 1000)}: now ${
		rate(now)}, highest ${rate(top)}.`;
	return h("figure", {class: "rate"},
		h("svg", {
			class: "spark",
			viewBox: `0 0 ${w} ${high}`,
			preserveAspectRatio: "none",
			role: "img",
			"aria-label": label
		},
			h("path", {class: "axis", d: `M0 ${high - 1}h${w}`}),
			h("polyline", {class: "line", points: points.join(" ")})),
		h("figcaption", null, label));
}

/* -------------------------------------------------------- ranks that others wait for */

function waiting(job) {
	return job.ranks.filter((r) => r.op && r.op_waits_for).map((r) => r.rank);
}

function arrow(from, to, label, index, held) {
	const id = `arrow-${index}`;
	return h("svg", {
		class: "blame",
		viewBox: "0 0 460 58",
		role: "img",
		"aria-label": `${from} for ${to}, ${label}`
	},
		h("defs", null,
			h("marker", {
				id,
				viewBox: "0 0 8 8",
				refX: "7",
				refY: "4",
				markerWidth: "8",
				markerHeight: "8",
				orient: "auto"
			},
				h("path", {class: "arrow-head", d: "M0 0L8 4L0 8z"}))),
		h("rect", {class: "node", x: "1", y: "13", width: "150", height: "32", rx: "6"}),
		h("text", {x: "76", y: "33", "text-anchor": "middle"}, from),
		h("path", {class: "arrow", d: "M153 29H286", "marker-end": `url(#${id})`}),
		h("text", {class: "small", x: "220", y: "22", "text-anchor": "middle"}, label),
		h("rect", {
			class: held ? "node culprit" : "node",
			x: "290",
			y: "6",
			width: "168",
			height: "46",
			rx: "6"
		}),
		h("text", {class: "strong", x: "374", y: "26", "text-anchor": "middle"}, to[0]),
		h("text", {class: "small", x: "374", y: "43", "text-anchor": "middle"}, to[1]));
}

function drawBlame(job) {
	if (!job.blame.length)
		return note("No rank waits for another one now.");
	const all = waiting(job);
	return h("ol", {class: "blames"}, job.blame.map((b, i) => {
		const who = job.blame.length === 1 && all.length === b.holds && all.length ?
			`${all.length === 1 ? "rank" : "ranks"} ${ranges(all)}` :
			plural(b.holds, "rank");
		const short = who.length <= 14 ? who : plural(b.holds, "rank");
		const doing = [
			b.pid ? `pid ${b.pid}` : "",
			processWords(b.process_state).replace(/ \(.*/, ""), b.node
		].filter(Boolean).join(", ");
		return h("li", {key: `${i}`},
			b.rank >= 0 &&
				arrow(`${short} ${b.holds === 1 ? "waits" : "wait"}`,
					[`rank ${b.rank}`, doing.slice(0, 26) || " "],
					duration(b.wait_us), i, b.wait_us > HELD_US),
			h("p", null, sentence(b.text), who !== short ? ` Waiting: ${who}.` : ""));
	}));
}

/* -------------------------------------------------------------------------- ranks */

/* What a rank's square in the map says: a class, a sign and a word. */
function rankLook(job, r) {
	const held = job.blame.some((b) => b.rank === r.rank && b.wait_us > HELD_US);
	if (r.state === "DEAD")
		return ["bad", "✖", "dead"];
	if (held)
		return ["bad", "!", "holding others up"];
	if (isStopped(r))
		return ["warn", "‖", "stopped"];
	if (r.state !== "JOINED" && r.state !== "ELSEWHERE")
		return ["plain", "○", r.state.toLowerCase()];
	if (r.op && r.op_waits_for)
		return ["warn", "…", "waiting"];
	return ["ok", "●", r.op ? "running an op" : "computing"];
}

function drawMap(job) {
	const [size, gap] = [30, 4];
	const columns = 16;
	const rows = Math.ceil(job.ranks.length / columns);
	const tally = new Map();
	const squares = job.ranks.map((r, i) => {
		const [look, sign, word] = rankLook(job, r);
		const known = tally.get(word) || {sign, n: 0, look};
		known.n++;
		tally.set(word, known);
		return h("g", {
			transform: `translate(${(i % columns) * (size + gap)} ${
				Math.floor(i / columns) * (size + gap)})`
		},
			h("title", null, `rank ${r.rank}: ${word}`),
			h("rect", {class: `rank ${look}`, width: size, height: size, rx: "3"}),
			h("text", {class: "small", x: size / 2, y: "13", "text-anchor": "middle"},
				String(r.rank)),
			h("text", {class: "small", x: size / 2, y: "26", "text-anchor": "middle"},
				sign));
	});
	const text = [...tally].map(([word, t]) => `${t.sign} ${t.n} ${word}`).join(", ");
	return h("figure", null,
		h("svg", {
			class: "ranks",
			viewBox: `0 0 ${columns * (size + gap)} ${rows * (size + gap)}`,
			role: "img",
			"aria-label": `Ranks: ${text}`
		},
			squares),
		h("figcaption", null, text));
}

function share(value) {
	return value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`;
}

function opCells(r) {
	if (r.op)
		return [
			`${r.op}${r.op_on ? ` of ${r.op_on}` : ""}${
				r.op_number ? `, number ${r.op_number}` : ""}`,
			r.op_waits_for || "runs", duration(r.op_us)
		];
	if (r.state === "JOINED" || r.state === "ELSEWHERE")
		return [
			`none; last: ${r.last_op || "none"}`, "–",
			r.idle_us ? duration(r.idle_us) : "–"
		];
	return ["–", "–", "–"];
}

function drawRanks(job) {
	const columns = [
		{name: "Rank", slim: true}, {name: "State"},
		{name: "Process", help: "pid, and what the kernel says of it"},
		{name: "Op", help: "the pending op that it waits in, or its last one", wide: true},
		{name: "Waits for", wide: true},
		{name: "Since", help: "the op came, or ended", number: true}, {
			name: "Waits",
			help: "share of the last 10 s in which its ops waited",
			number: true
		},
		{
			name: "Waited for",
			help: "share of the last 10 s in which other ranks waited for it: " +
				"high for a slow rank",
			number: true
		},
		{name: "Device"}
	];
	const key = jobKey(job);
	const slow = job.stall ? null : slowRank(job);
	return table(`Ranks of job ${job.name}`, columns, job.ranks.map((r) => {
		const shares = rankShares(key, r.rank) || {};
		const [look, , word] = rankLook(job, r);
		const words = processWords(r.process_state);
		const process = r.pid ?
			[
				`${r.pid}${r.node ? ` on ${r.node}` : ""} `,
				isStopped(r) ? badge(words, look) : words
			] :
			"–";
		return {
			key: r.rank,
			class: look === "bad" && "row-bad",
			cells: [
				String(r.rank),
				badge(r.state === "JOINED" && (look === "bad" || isStopped(r)) ?
						`JOINED, ${word}` :
						r.state,
					look === "bad" || isStopped(r) ? look :
									 RANK_LEVELS[r.state]),
				process, ...opCells(r), share(shares.waited),
				slow && slow.rank === r.rank ? badge(share(shares.late), "warn") :
							       share(shares.late),
				r.device || "–"
			]
		};
	}));
}

/* -------------------------------------------------------------------------- facts */

function facts(job) {
	const list = [
		["State", job.state], ["World size", job.world_size], ["Epoch", count(job.epoch)],
		["Lifetime", job.lifetime], ["Units", count(job.unit_count)],
		["Ops", `${count(job.ops_total)}, ${count(job.ops_failed)} failed`]
	];
	if (job.uncommitted)
		list.push(["Changes after the commit", count(job.uncommitted)]);
	if (job.max_ranks)
		list.push(["Elastic", `${job.min_ranks} to ${job.max_ranks} ranks`]);
	if (job.counts)
		list.push(["Deaths", count(job.counts.deaths)], [
			"Stalls",
			`${count(job.counts.stalls)}, ${duration(job.counts.stalled_us)} in all`
		]);
	if (job.loading)
		list.push([
			"Loads",
			`${job.loading.path}: ${percent(job.loading.read, job.loading.bytes)}`
		]);
	for (const n of job.nodes)
		list.push([
			`Node ${n.name}`,
			`${n.ranks === 1 ? `rank ${n.first}` :
					   `ranks ${n.first}-${n.first + n.ranks - 1}`}${
				n.leads ? ", leads" : ""}${
				n.here ? ", here" : ""}${n.error ? `, ${n.error}` : ""}`
		]);
	return h("dl", {class: "facts"},
		list.map(([name, value]) => h("div", {key: name}, h("dt", null, name),
				 h("dd", null, String(value)))));
}

export function drawJob(job) {
	if (isHidden(job))
		return hiddenNote(job, "more than its name, owner, state and memory");
	if (job.state === "DELETED")
		return [
			note("This job is deleted: it has no name any more, and exists until no " +
				"process has its memory mapped."),
			facts(job)
		];
	return [
		facts(job),
		sparkline(job),
		job.last_error &&
			h("p", {class: "error"},
				`The last error, ${duration(job.last_error_us)} ago: ${
					sentence(job.last_error)}`),
		h("h3", null, "Ranks that others wait for"),
		drawBlame(job),
		h("h3", null, "Ranks"),
		job.ranks.length >= MANY_RANKS && drawMap(job),
		drawRanks(job),
	];
}
