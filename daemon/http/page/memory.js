/* Memory by owner: a bar for each device and each job, with the numbers beside it. */
import {bytes, h, note, percent, table} from "./dom.js";
import {jobKey} from "./samples.js";

const WIDTH = 1000;
const HEIGHT = 26;
const CLASSES = ["shard", "full", "grad", "control", "published"];
const CLASS_HELP = {
	shard: "parameters and optimizer state",
	full: "gathered copies",
	grad: "gradients and other buffers",
	control: "tables of the daemon",
	published: "generations of publications",
};

const open = new Set(); /* keys of rows whose numbers are shown */

function hatch(id) {
	return h("pattern", {
		id,
		width: "6",
		height: "6",
		patternUnits: "userSpaceOnUse",
		patternTransform: "rotate(45)"
	},
		h("rect", {width: "6", height: "6", class: "fill-quarantine"}),
		h("rect", {width: "2", height: "6", class: "fill-page"}));
}

/* @parts: [{ bytes, class, title }]; @marks: [{ bytes, title }]. */
function bar(id, whole, parts, marks, label) {
	let x = 0;
	const scale = whole > 0 ? WIDTH / whole : 0;
	const shapes = [];
	for (const p of parts) {
		const w = p.bytes * scale;
		/* What is in quarantine is counted in the classes, too. */
		if (p.class === "quarantine")
			x -= w;
		if (w > 0)
			shapes.push(h("rect", {
				x: x.toFixed(2),
				y: "0",
				width: Math.max(w, 1).toFixed(2),
				height: HEIGHT,
				class: `part ${p.class}`,
				fill: p.class === "quarantine" ? `url(#${id})` : null
			},
				h("title", null, `${p.title}: ${bytes(p.bytes)}`)));
		x += w;
	}
	for (const m of marks) {
		const at = Math.min(WIDTH - 2, m.bytes * scale);
		shapes.push(h("path", {
			class: "mark",
			d: `M${at.toFixed(1)} 0v${HEIGHT}`,
			"stroke-dasharray": m.dashed ? "4 3" : null
		},
			h("title", null, `${m.title}: ${bytes(m.bytes)}`)));
	}
	return h("svg", {
		class: "bar",
		viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
		preserveAspectRatio: "none",
		role: "img",
		"aria-label": label
	},
		h("defs", null, hatch(id)),
		h("rect", {width: WIDTH, height: HEIGHT, class: "free"}), shapes);
}

function classParts(classes, prefix) {
	return CLASSES.filter((c) => classes[c] > 0)
		.map((c) => ({bytes: classes[c], class: c, title: `${prefix}${c}`}));
}

/* Of the only device, the parts are of jobs; of one of several, it is not known which jobs have
 * them. */
function deviceParts(status, d) {
	let parts;
	if (status.devices.length === 1) {
		const jobs = [...status.jobs].sort((a, b) => b.used_bytes - a.used_bytes);
		parts = jobs.flatMap((j) => {
			const of = classParts(j.classes || {}, `job ${j.name}, `);
			if (of.length)
				of[0].class += " first";
			return of.length || !j.used_bytes ? of : [
				{bytes: j.used_bytes, class: "shard first", title: `job ${j.name}`}
			];
		});
	} else {
		parts = classParts(d.classes, "");
	}
	const known = parts.reduce((sum, p) => sum + p.bytes, 0);
	return [
		...parts, {
			bytes: Math.max(0, d.used_bytes - known),
			class: "overhead first",
			title: "jobs of others"
		},
		{bytes: d.quarantined_bytes, class: "quarantine", title: "in quarantine, of these"},
		{bytes: d.overhead_bytes, class: "overhead", title: "of the daemon itself"}
	];
}

function row(key, name, numbers, picture, details, redraw) {
	const shown = open.has(key);
	const id = `memory-${key.replace(/[^a-zA-Z0-9]/g, (c) => `_${c.charCodeAt(0)}`)}`;
	return h("div", {class: "memory-row", key},
		h("button", {
			type: "button",
			class: "memory-name",
			"aria-expanded": String(shown),
			"aria-controls": id,
			onclick: () => {
				if (shown)
					open.delete(key);
				else
					open.add(key);
				redraw();
			}
		},
			h("span", {class: "name"}, name), h("span", {class: "numbers"}, numbers)),
		picture, h("div", {id}, shown && details()));
}

function deviceDetails(status, d) {
	const free = Math.max(0, d.capacity_bytes - d.used_bytes - d.overhead_bytes);
	const rows =
		deviceParts(status, d)
			.filter((p) => p.bytes > 0)
			.concat([{bytes: free, title: "free"}])
			.map((p, i) => ({
				key: `${i}`,
				cells: [p.title, bytes(p.bytes), percent(p.bytes, d.capacity_bytes)]
			}));
	return table(`Memory of device ${d.id}`,
		[
			{name: "Part"}, {name: "Bytes", number: true},
			{name: "Of the device", number: true}
		],
		rows);
}

function jobDetails(job) {
	if (!job.memory.length)
		return note(
			"This job belongs to another user and is private: only the sum is known.");
	return table(`Memory of job ${job.name}`,
		[
			{name: "Class"}, {name: "By its formula", number: true},
			{name: "In use", number: true}, {name: "Taken", number: true},
			{name: "Peak", number: true}
		],
		job.memory.map((m) => ({
			key: m.name,
			cells: [
				`${m.name} (${CLASS_HELP[m.name] || ""})`, bytes(m.formula_bytes),
				bytes(m.used_bytes), bytes(m.taken_bytes), bytes(m.peak_bytes)
			]
		})));
}

function legend() {
	const items = [
		...CLASSES.map((c) => [c, CLASS_HELP[c]]),
		["quarantine", "freed, but a process may hold it"],
		["overhead", "the daemon itself"], ["free", "free"]
	];
	return h("ul", {class: "legend"},
		items.map(([c, text]) => h("li", null,
				  h("svg", {
					  class: "swatch",
					  viewBox: "0 0 12 12",
					  "aria-hidden": "true"
				  },
					  h("defs", null, hatch(`legend-${c}`)), h("rect", {
						  width: "12",
						  height: "12",
						  class: `part ${c}`,
						  fill: c === "quarantine" ? `url(#legend-${c})` :
									     null
					  })),
				  c === text ? c : `${c}: ${text}`)));
}

export function drawMemory(status, redraw) {
	const whole = status.devices.reduce((sum, d) => sum + d.capacity_bytes, 0);
	const jobs = status.jobs.filter((j) => j.used_bytes > 0 || j.quota_bytes > 0)
			     .sort((a, b) => b.used_bytes - a.used_bytes);
	const scale = Math.max(1,
		...jobs.map(
			(j) => Math.max(j.used_bytes, j.peak_bytes,
				j.quota_bytes > 0 && j.quota_bytes <= whole ? j.quota_bytes : 0)));
	return [
		legend(),
		h("h3", null, "By device"),
		status.devices.map((d, i) => {
			const taken = d.used_bytes + d.overhead_bytes;
			const numbers = `${bytes(taken)} of ${bytes(d.capacity_bytes)}, ${
				percent(taken, d.capacity_bytes)}`;
			return row(`device ${d.id}`, d.id, numbers,
				bar(`hatch-d${i}`, d.capacity_bytes, deviceParts(status, d), [],
					`${d.id}: ${numbers}`),
				() => deviceDetails(status, d), redraw);
		}),
		h("h3", null, "By job"),
		jobs.length ?
			note(`All bars have the same scale: the whole width is ${bytes(scale)}. ` +
				"A dashed line is the peak, a solid line the quota.") :
			note("No job has memory."),
		jobs.map((j, i) => {
			const quota = j.quota_bytes > 0 ?
				`, quota ${bytes(j.quota_bytes)} (${
					percent(j.used_bytes, j.quota_bytes)} used)` :
				"";
			const numbers = `${bytes(j.used_bytes)}, ${
				percent(j.used_bytes,
					whole)} of all, peak ${bytes(j.peak_bytes)}${quota}`;
			const marks = [{bytes: j.peak_bytes, title: "peak", dashed: true}];
			if (j.quota_bytes > 0 && j.quota_bytes <= scale)
				marks.push({bytes: j.quota_bytes, title: "quota"});
			const parts = classParts(j.classes || {}, "");
			if (!parts.length)
				parts.push({bytes: j.used_bytes, class: "shard", title: "all"});
			parts.push({
				bytes: j.quarantined_bytes,
				class: "quarantine",
				title: "quarantine"
			});
			return row(`job ${jobKey(j)}`, j.name, numbers,
				bar(`hatch-j${i}`, scale, parts, marks, `${j.name}: ${numbers}`),
				() => jobDetails(j), redraw);
		}),
		note(`Beside it, rings of the processes: ${bytes(status.ring_bytes)}.`),
	];
}
