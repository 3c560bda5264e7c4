/* Publications of all jobs: newest generations, readers, and what was made of commits. */
import {badge, bytes, count, duration, h, note, percent, plural, table} from "./dom.js";
import {jobKey} from "./samples.js";

const MOST_LEASES = 200;

/* What readers can have; null: there is none. */
export function newest(p) {
	return p.generations.find((g) => g.state === "READY") || null;
}

function leases(p) {
	return p.generations.reduce((n, g) => n + g.leases.length, 0);
}

/* Steps that the job has committed since the newest generation @g of @p. */
export function lagOf(job, g) {
	return Math.max(0, job.step - g.step);
}

/* More behind than one that is made on time ever is. */
export function isLate(p, lag) {
	return p.every_steps > 0 && lag > p.every_steps;
}

function lagCell(job, p, g) {
	if (!g)
		return "–";
	const lag = lagOf(job, g);
	return isLate(p, lag) ? badge(count(lag), "warn") : count(lag);
}

/* What became of commits and requests. */
function madeCell(p) {
	return [
		`${count(p.made)} made`,
		p.dropped > 0 && `, ${count(p.dropped)} dropped unread`,
		p.skipped > 0 && [", ", badge(`${count(p.skipped)} skipped`, "warn")],
		p.waits_for_buffer && [", ", badge("waiting for a buffer", "warn")],
		p.buffer_waits > 0 &&
			`, ${count(p.buffer_waits)} waits for a buffer (${
				duration(p.buffer_waited_us)})`,
		p.failed > 0 && [", ", badge(`${count(p.failed)} failed`, "bad")]
	];
}

function deltasText(p) {
	if (!p.delta_percent)
		return "–";
	if (!p.deltas)
		return `0, ${count(p.not_deltas)} not made`;
	return `${count(p.deltas)}, ${percent(p.changed, p.compared)} changed, ${
		bytes(p.delta_bytes / p.deltas)} and ${duration(p.delta_us / p.deltas)} each${
		p.not_deltas ? `; ${count(p.not_deltas)} not made` : ""}`;
}

function row(job, p) {
	const g = newest(p);
	return {
		key: `${jobKey(job)} ${p.name}`,
		class: p.why && "row-bad",
		cells: [
			job.name, p.name, g ? count(g.number) : "–", g ? count(g.step) : "–",
			lagCell(job, p, g), count(p.readers), count(leases(p)), madeCell(p),
			deltasText(p), bytes(p.bytes),
			p.made ? duration(p.made_us / p.made) : "–", p.why || "–"
		]
	};
}

const COLUMNS = [
	{name: "Job"}, {name: "Publication"},
	{name: "Newest", help: "number of the newest generation", number: true},
	{name: "Step", help: "that it is of", number: true},
	{name: "Lag", help: "steps that the job has committed since", number: true},
	{name: "Readers", help: "that take generations without a call", number: true},
	{name: "Leases", help: "of generations, now", number: true},
	{
		name: "Generations",
		help: "since this daemon has the job. Skipped: no buffer was free. " +
			"Dropped: replaced before any reader leased them",
		wide: true
	},
	{name: "Deltas", wide: true}, {name: "Bytes", help: "of a generation", number: true},
	{name: "Time", help: "that one takes to make", number: true},
	{name: "Error", help: "why the last one was not made", wide: true}
];

function leaseRows(job, p) {
	return p.generations.flatMap((g) => g.leases.map((l, i) => ({
		key: `${jobKey(job)} ${p.name} ${g.number} ${i}`,
		cells: [
			job.name, p.name, count(g.number), count(g.step), String(l.pid),
			duration(l.held_ms * 1000),
			l.streams ? `a stream, ${bytes(l.sent_bytes)} sent` : "mapped memory"
		]
	})));
}

function drawLeases(rows) {
	if (!rows.length)
		return note("No process has a generation now.");
	return [
		table("Leases of generations",
			[
				{name: "Job"}, {name: "Publication"},
				{name: "Generation", number: true}, {name: "Step", number: true},
				{name: "Process", help: "pid", number: true},
				{name: "Held", number: true}, {name: "Reads"}
			],
			rows.slice(0, MOST_LEASES)),
		rows.length > MOST_LEASES &&
			note(`Not shown: ${plural(rows.length - MOST_LEASES, "lease")} more.`)
	];
}

export function drawPublications(status) {
	const all = status.jobs.flatMap((job) => job.publications.map((p) => [job, p]));
	if (!all.length)
		return note("No job has a publication.");
	return [
		table("Publications", COLUMNS, all.map(([job, p]) => row(job, p))),
		h("h3", null, "Leases"), drawLeases(all.flatMap(([job, p]) => leaseRows(job, p)))
	];
}
