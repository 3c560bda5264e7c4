/* The units of a job as a map: a cell for each, on a canvas, so that 10,000 of them stay quick. */
import {bytes, count, h, note, plural, ranges} from "./dom.js";

const NAMES = {
	empty: "no values yet",
	still: "sharded",
	gathered: "gathered",
	gradient: "has a gradient",
	both: "gathered, has a gradient"
};
const ORDER = ["empty", "still", "gathered", "gradient", "both"];

const view = {
	units: [],
	cursor: -1,
	columns: 1,
	cell: 8,
	width: 0,
	search: ""
};

function stateOf(u) {
	if (!u.initialised)
		return "empty";
	if (u.gathered_by.length)
		return u.has_gradient ? "both" : "gathered";
	return u.has_gradient ? "gradient" : "still";
}

function colours() {
	const style = getComputedStyle(document.documentElement);
	const of = (name) => style.getPropertyValue(name).trim();
	return {
		page: of("--page"),
		text: of("--text"),
		empty: of("--line"),
		still: of("--shard"),
		gathered: of("--full"),
		gradient: of("--grad"),
		both: of("--full")
	};
}

/* The form of a cell differs, too: hollow, filled, with a dot, with a bar, with both. */
function drawCell(g, state, x, y, s, c) {
	const size = s - 1;
	if (state === "empty") {
		g.strokeStyle = c.empty;
		g.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
		return;
	}
	g.fillStyle = c[state];
	g.fillRect(x, y, size, size);
	g.fillStyle = c.page;
	const third = Math.max(1, Math.floor(size / 3));
	if (state === "gathered" || state === "both")
		g.fillRect(x + third, y + third, size < 6 ? 1 : size - 2 * third,
			size < 6 ? 1 : size - 2 * third);
	if (state === "gradient" || state === "both")
		g.fillRect(x, y + size - Math.max(1, Math.floor(size / 4)), size,
			Math.max(1, Math.floor(size / 4)));
}

function layOut(width) {
	const n = view.units.length;
	view.width = width;
	view.cell =
		Math.max(5, Math.min(22, Math.floor(Math.sqrt((width * 300) / Math.max(1, n)))));
	view.columns = Math.max(1, Math.floor(width / view.cell));
}

export function paintUnits() {
	const canvas = document.getElementById("unit-map");
	if (!canvas)
		return;
	const width = Math.max(200, Math.floor(canvas.parentElement.clientWidth));
	layOut(width);
	const high = Math.ceil(view.units.length / view.columns) * view.cell + 2;
	const ratio = window.devicePixelRatio || 1;
	canvas.width = Math.round(width * ratio);
	canvas.height = Math.round(high * ratio);
	canvas.style.width = `${width}px`;
	canvas.style.height = `${high}px`;
	const g = canvas.getContext("2d");
	const c = colours();
	g.scale(ratio, ratio);
	for (let i = 0; i < view.units.length; i++)
		drawCell(g, stateOf(view.units[i]), (i % view.columns) * view.cell + 1,
			Math.floor(i / view.columns) * view.cell + 1, view.cell, c);
	if (view.cursor >= 0) {
		g.strokeStyle = c.text;
		g.lineWidth = 2;
		g.strokeRect((view.cursor % view.columns) * view.cell,
			Math.floor(view.cursor / view.columns) * view.cell, view.cell + 1,
			view.cell + 1);
	}
}

function details(u) {
	const passes =
		u.passes.filter((p) => p.state !== "IDLE").map((p) => `rank ${p.rank} ${p.state}`);
	const facts = [
		["Unit", `${u.unit}, ${NAMES[stateOf(u)]}`],
		["Elements", `${count(u.elements)}, ${count(u.shard_elements)} a shard`],
		[
			"Types",
			`stored ${u.storage_dtype}, computed ${u.compute_dtype}, gradient ${
				u.gradient_dtype}`
		],
		[
			"Shards",
			`${bytes(u.shard_bytes)}${
				u.full_bytes ? `, cast copy ${bytes(u.full_bytes)}` : ""}`
		],
		[
			"Layout",
			`${u.layout}, ${u.strategy}${
				u.shard_ranks ? `, over ${plural(u.shard_ranks, "rank")}` : ""}`
		],
		[
			"Gathered by",
			u.gathered_by.length ? `${u.gathered_by.length === 1 ? "rank" : "ranks"} ${
						       ranges(u.gathered_by)}` :
					       "nobody"
		],
		["Optimizer steps", count(u.optimizer_steps)]
	];
	if (u.guarded)
		facts.push(["Passes", passes.length ? passes.join(", ") : "none under way"]);
	if (u.copies)
		facts.push(["Copies", `${u.copies}, each on ${plural(u.copy_devices, "device")}`]);
	return [
		h("h4", null, u.name), h("dl", {class: "facts"}, facts.map(([k,
			v]) => h("div", {key: k}, h("dt", null, k), h("dd", null, v))))
	];
}

/* Units of another job are shown. */
export function resetUnits() {
	Object.assign(view, {units: [], cursor: -1});
}

function moveTo(index, redraw) {
	view.cursor = Math.max(0, Math.min(view.units.length - 1, index));
	redraw();
}

function onKey(event, redraw) {
	const page = view.columns * 8;
	const steps = {
		ArrowLeft: -1,
		ArrowRight: 1,
		ArrowUp: -view.columns,
		ArrowDown: view.columns,
		PageUp: -page,
		PageDown: page
	};
	if (event.ctrlKey || event.altKey || event.metaKey)
		return;
	if (event.key === "Home")
		moveTo(0, redraw);
	else if (event.key === "End")
		moveTo(view.units.length - 1, redraw);
	else if (event.key in steps)
		moveTo(view.cursor < 0 ? 0 : view.cursor + steps[event.key], redraw);
	else
		return;
	event.preventDefault();
}

function onPoint(event, redraw) {
	const column = Math.floor((event.offsetX - 1) / view.cell);
	const index = Math.floor((event.offsetY - 1) / view.cell) * view.columns + column;
	if (column >= 0 && column < view.columns && index >= 0 && index < view.units.length &&
		index !== view.cursor)
		moveTo(index, redraw);
}

/* The next unit whose name has the text. */
function find(redraw) {
	const n = view.units.length;
	for (let i = 1; i <= n && view.search; i++) {
		const at = (Math.max(-1, view.cursor) + i + n) % n;
		if (view.units[at].name.includes(view.search)) {
			moveTo(at, redraw);
			return;
		}
	}
}

function legend(tally) {
	return h("ul", {class: "legend"},
		ORDER.map((s) => h("li", null,
				  h("svg", {
					  class: "swatch",
					  viewBox: "0 0 12 12",
					  "aria-hidden": "true"
				  },
					  h("rect", {
						  class: `unit ${s}`,
						  x: "0.5",
						  y: "0.5",
						  width: "11",
						  height: "11"
					  }),
					  (s === "gathered" || s === "both") && h("rect", {
						  class: "fill-page",
						  x: "4",
						  y: "4",
						  width: "4",
						  height: "4"
					  }),
					  (s === "gradient" || s === "both") && h("rect", {
						  class: "fill-page",
						  x: "0",
						  y: "9",
						  width: "12",
						  height: "3"
					  })),
				  `${NAMES[s]}: ${count(tally[s] || 0)}`)));
}

/* @answer: of /api/v1/units. The canvas is painted afterwards: paintUnits. */
export function drawUnits(answer, redraw) {
	if (!answer)
		return note("The units are being fetched.");
	view.units = answer.units || [];
	if (!view.units.length)
		return note("The job has no units.");
	const tally = {};
	for (const u of view.units)
		tally[stateOf(u)] = (tally[stateOf(u)] || 0) + 1;
	if (view.cursor >= view.units.length)
		view.cursor = -1;
	const chosen = view.units[view.cursor];
	return [
		legend(tally),
		h("p", {class: "buttons"},
			h("label", {"for": "unit-search"}, "Find a unit by its name "),
			h("input", {
				id: "unit-search",
				type: "search",
				spellcheck: "false",
				oninput: (e) => {
					view.search = e.target.value;
				},
				onkeydown: (e) => {
					if (e.key === "Enter")
						find(redraw);
				}
			}),
			h("button", {type: "button", onclick: () => find(redraw)}, "Next")),
		h("div", {class: "map"}, h("canvas", {
			id: "unit-map",
			tabindex: "0",
			role: "img",
			"aria-label": `${plural(view.units.length, "unit")}: ${
					      ORDER.filter((s) => tally[s])
						      .map((s) => `${tally[s]} ${NAMES[s]}`)
						      .join("; ")}. ` +
				"Arrow keys choose one.",
			onkeydown: (e) => onKey(e, redraw),
			onmousemove: (e) => onPoint(e, redraw),
			onclick: (e) => onPoint(e, redraw)
		})),
		h("div", {class: "details", "aria-live": "polite"},
			chosen ? details(chosen) :
				 note("Point at a cell, or use the arrow keys on the map.")),
	];
}
