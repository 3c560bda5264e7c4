/*
 * The last ops of a job, by rank: when each was announced, when its turn came (deps before), when
 * it started (peers before) and ended (run before). One element has the focus; keys move a cursor
 * from op to op.
 */
import {bytes, duration, h, note, plural} from "./dom.js";

const WIDTH = 1000;
const LABEL = 64;
const LANE = 12;
const MAX_LANES = 3;
const KEYS = "Keys: Left and Right go to the ops of a rank, Up and Down to another rank, + and - " +
	"(hyphen) zoom, Home and End go to the first and last op.";

/* The end of the picture: now, or if nothing is pending, the end of the last op. */
function lastOf(answer) {
	return answer.ops.some((o) => !o.finished_us) ?
		answer.now_us :
		Math.max(...answer.ops.map((o) => o.finished_us));
}

const view = {
	span: 0,    /* 0: all */
	end: 0,	    /* 0: the newest op; other values only while it is held */
	held: null, /* the answer that is shown; null: the newest one */
	cursor: null
};

export function timelineLimit(job) {
	return Math.min(2000, Math.max(200, 24 * job.ranks.length));
}

/* A new job is shown. */
export function resetTimeline() {
	Object.assign(view, {span: 0, end: 0, held: null, cursor: null});
}

function endOf(op, now) {
	return op.finished_us || now;
}

/* The parts of an op: [class, from, to]. */
function partsOf(op, now) {
	const end = endOf(op, now);
	const active = op.active_us || (op.started_us ? op.started_us : end);
	const started = op.started_us || end;
	const parts = [
		["deps", op.announced_us, Math.min(active, end)],
		["peers", Math.min(active, end), Math.min(started, end)]
	];
	if (op.started_us)
		parts.push([op.state === "FAILED" ? "failed" : "run", op.started_us, end]);
	else if (op.state === "FAILED")
		parts.push(["failed", end, end]);
	return parts.filter(([c, from, to]) => to > from || c === "failed");
}

/* Give each op a lane of its rank in which nothing overlaps it. */
function layOut(answer) {
	const ranks = new Map();
	const ops = [...answer.ops].sort((a, b) => a.announced_us - b.announced_us);
	for (const op of ops) {
		const r = ranks.get(op.rank) || {rank: op.rank, ends: [], ops: []};
		let lane = r.ends.findIndex((end) => end <= op.announced_us);
		if (lane < 0)
			lane = r.ends.length < MAX_LANES ? r.ends.length :
							   r.ends.indexOf(Math.min(...r.ends));
		r.ends[lane] = Math.max(r.ends[lane] || 0, endOf(op, answer.now_us));
		r.ops.push({op, lane});
		ranks.set(op.rank, r);
	}
	return [...ranks.values()].sort((a, b) => a.rank - b.rank);
}

function nameOf(op) {
	return `${op.op}${op.unit ? ` of ${op.unit}` : ""}`;
}

function details(op, now) {
	const facts = [
		["Rank", `${op.rank}, pid ${op.pid}`], ["State", op.state],
		["Group", op.group ? `${op.group}, number ${op.number}` : "none"],
		[
			"Waited for own ops (deps)",
			duration(
				(op.active_us || op.started_us || endOf(op, now)) - op.announced_us)
		],
		[
			"Waited for ranks, memory or a device (peers)",
			op.active_us ? duration((op.started_us || endOf(op, now)) - op.active_us) :
				       "–"
		],
		["Ran", op.started_us ? duration(endOf(op, now) - op.started_us) : "–"],
		["Began", `${duration(now - op.announced_us)} ago`]
	];
	if (op.bytes)
		facts.push(["Handed out", bytes(op.bytes)]);
	if (op.waits_for)
		facts.push(["Waits for", op.waits_for]);
	if (op.error)
		facts.push(["Error", op.error]);
	return [
		h("h4", null, nameOf(op)), h("dl", {class: "facts"}, facts.map(([k,
			v]) => h("div", {key: k}, h("dt", null, k), h("dd", null, String(v)))))
	];
}

/* ---------------------------------------------------------------------------- moves */

function span(answer) {
	const first = Math.min(...answer.ops.map((o) => o.announced_us));
	return Math.max(1000, lastOf(answer) - first);
}

/* While new ops come, the end stays the newest one: what is older leaves the picture. */
function zoom(factor, answer) {
	const all = span(answer);
	const now = view.span || all;
	const end = view.end || lastOf(answer);
	const next = Math.min(all, Math.max(200, now * factor));
	if (!view.held) {
		view.span = next < all ? next : 0;
		return;
	}
	const cursor = answer.ops.find((o) => o.id === view.cursor);
	const middle =
		cursor ? (cursor.announced_us + endOf(cursor, answer.now_us)) / 2 : end - now / 2;
	view.span = next;
	view.end = Math.min(lastOf(answer), middle + next / 2);
}

function pan(share, answer) {
	hold(answer);
	const now = view.span || span(answer);
	view.end = Math.min(lastOf(answer), (view.end || lastOf(answer)) + share * now);
}

/* Show the newest ops again. */
function follow() {
	Object.assign(view, {end: 0, held: null, cursor: null});
}

/* Look at the same ops again and again: the next answers wait. */
function hold(answer) {
	if (!view.held)
		view.held = answer;
}

function select(op, answer) {
	view.cursor = op.id;
	hold(answer);
	const width = view.span || span(answer);
	const end = view.end || lastOf(answer);
	if (op.announced_us < end - width || op.announced_us > end)
		view.end = Math.min(lastOf(answer), op.announced_us + width / 2);
}

function move(key, ranks, answer) {
	let at = ranks.findIndex((r) => r.ops.some((o) => o.op.id === view.cursor));
	if (at < 0) {
		const last = ranks[0].ops[ranks[0].ops.length - 1];
		select(last.op, answer);
		return;
	}
	let i = ranks[at].ops.findIndex((o) => o.op.id === view.cursor);
	const from = ranks[at].ops[i].op.announced_us;
	if (key === "ArrowLeft")
		i = Math.max(0, i - 1);
	else if (key === "ArrowRight")
		i = Math.min(ranks[at].ops.length - 1, i + 1);
	else if (key === "Home")
		i = 0;
	else if (key === "End")
		i = ranks[at].ops.length - 1;
	else {
		at = Math.min(ranks.length - 1, Math.max(0, at + (key === "ArrowUp" ? -1 : 1)));
		i = ranks[at].ops.findIndex((o) => o.op.announced_us >= from);
		if (i < 0)
			i = ranks[at].ops.length - 1;
	}
	select(ranks[at].ops[i].op, answer);
}

function onKey(event, ranks, answer, redraw) {
	if (event.ctrlKey || event.altKey || event.metaKey)
		return;
	if (event.key === "+" || event.key === "=")
		zoom(0.5, answer);
	else if (event.key === "-")
		zoom(2, answer);
	else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(
			 event.key))
		move(event.key, ranks, answer);
	else
		return;
	event.preventDefault();
	redraw();
}

/* ---------------------------------------------------------------------------- shapes */

function scaleMarks(from, to, x, y) {
	const marks = [];
	const step = 10 ** Math.floor(Math.log10((to - from) / 2));
	const each = (to - from) / step > 10 ? 5 * step : (to - from) / step > 5 ? 2 * step : step;
	/* Times are distances from the end of what is shown. */
	for (let back = 0; back <= to - from; back += each) {
		const at = x(to - back);
		if (at < LABEL + 30)
			break;
		marks.push(h("path", {class: "grid", d: `M${at.toFixed(1)} 16V${y}`}),
			h("text", {
				class: "small",
				x: at.toFixed(1),
				y: "11",
				"text-anchor": back ? "middle" : "end"
			},
				back ? `−${duration(back)}` : "end"));
	}
	return marks;
}

function shapesOf(ranks, answer, from, to, lane, redraw) {
	const x = (t) => LABEL + ((t - from) / (to - from)) * (WIDTH - LABEL);
	const shapes = [];
	let y = 18;
	for (const r of ranks) {
		const lanes = Math.max(1, r.ends.length);
		shapes.push(h("text",
			{class: "small", x: "0", y: (y + (lanes * lane) / 2 + 4).toFixed(1)},
			`rank ${r.rank}`));
		for (const {op, lane: l} of r.ops) {
			const end = endOf(op, answer.now_us);
			if (end < from || op.announced_us > to)
				continue;
			const top = y + l * lane;
			const parts = partsOf(op, answer.now_us).map(([c, a, b]) => {
				const left = Math.max(LABEL, x(a));
				return h("rect", {
					class: `op ${c}`,
					x: left.toFixed(2),
					y: top,
					height: lane - 2,
					width: Math.max(c === "failed" ? 3 : 0.8,
							   Math.min(WIDTH, x(b)) - left)
						       .toFixed(2),
					fill: c === "peers" ? "url(#peers)" : null
				});
			});
			if (op.id === view.cursor)
				parts.push(h("rect", {
					class: "cursor",
					x: (Math.max(LABEL, x(op.announced_us)) - 2).toFixed(2),
					y: top - 2,
					height: lane + 2,
					width: (Math.max(2,
							Math.min(WIDTH, x(end)) -
								Math.max(LABEL,
									x(op.announced_us))) +
						4).toFixed(2)
				}));
			shapes.push(h("g", {
				key: String(op.id),
				onclick: () => {
					select(op, answer);
					redraw();
				}
			},
				h("title", null,
					`${nameOf(op)}, ${duration(end - op.announced_us)}`),
				parts));
		}
		y += lanes * lane + 3;
	}
	return [y, scaleMarks(from, to, x, y), shapes];
}

function picture(ranks, answer, redraw) {
	const to = Math.min(lastOf(answer), view.end || lastOf(answer));
	const from = to - (view.span || span(answer));
	const lane = ranks.length > 24 ? 9 : LANE;
	const [high, marks, shapes] = shapesOf(ranks, answer, from, to, lane, redraw);
	return h("div", {class: "scroll"},
		h("svg", {
			class: "timeline",
			viewBox: `0 0 ${WIDTH} ${high + 2}`,
			tabindex: "0",
			role: "group",
			"aria-label": `Ops of ${plural(ranks.length, "rank")}. ${KEYS}`,
			onkeydown: (e) => onKey(e, ranks, answer, redraw)
		},
			h("defs", null,
				h("pattern", {
					id: "peers",
					width: "5",
					height: "5",
					patternUnits: "userSpaceOnUse",
					patternTransform: "rotate(45)"
				},
					h("rect", {width: "5", height: "5", class: "fill-peers"}),
					h("rect",
						{width: "1.5", height: "5", class: "fill-page"}))),
			marks, shapes));
}

function legend() {
	const items = [
		["deps", "waits for ops of its own rank"],
		["peers", "waits for other ranks, memory or a device"], ["run", "runs"],
		["failed", "failed"]
	];
	return h("ul", {class: "legend"},
		items.map(([c, text]) => h("li", null,
				  h("svg", {
					  class: "swatch",
					  viewBox: "0 0 12 12",
					  "aria-hidden": "true"
				  },
					  h("rect", {
						  class: `op ${c}`,
						  width: "12",
						  height: "12",
						  fill: c === "peers" ? "url(#peers)" : null
					  })),
				  `${c}: ${text}`)));
}

function button(text, label, act, redraw) {
	return h("button", {
		type: "button",
		"aria-label": label,
		onclick: () => {
			act();
			redraw();
		}
	},
		text);
}

/* @latest: the answer of /api/v1/ops. */
export function drawTimeline(latest, redraw) {
	const answer = view.held || latest;
	if (!answer)
		return note("The ops are being fetched.");
	if (!answer.ops.length)
		return note("The flight recorder has no op of this job.");
	const ranks = layOut(answer);
	const chosen = answer.ops.find((o) => o.id === view.cursor);
	return [
		h("p", {class: "buttons"}, button("+", "Zoom in", () => zoom(0.5, answer), redraw),
			button("−", "Zoom out", () => zoom(2, answer), redraw),
			button("◀", "Earlier", () => pan(-0.5, answer), redraw),
			button("▶", "Later", () => pan(0.5, answer), redraw),
			button("All", "Show all ops", () => Object.assign(view, {span: 0, end: 0}),
				redraw),
			button(view.held ? "Follow" : "Hold",
				view.held ? "Follow the newest ops" : "Hold this picture",
				() => {
					if (view.held)
						follow();
					else
						hold(answer);
				},
				redraw),
			h("span", null,
				` ${duration(view.span || span(answer))} shown, ${
					plural(answer.ops.length,
						"op")}${view.held ? ", held" : ""}`)),
		legend(),
		picture(ranks, answer, redraw),
		h("div", {class: "details", "aria-live": "polite"},
			chosen ? details(chosen, answer.now_us) :
				 note(`Choose an op to see its times. ${KEYS}`)),
		answer.pending_left_out > 0 &&
			note(`Not shown: ${plural(answer.pending_left_out, "pending op")} more.`),
	];
}
