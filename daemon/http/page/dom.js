/*
 * The document as a function of data: h() describes a node, patch() makes the document equal to the
 * description and leaves alone what already is, so that focus and selection survive. Data becomes
 * text nodes and attribute values only, never markup: names of jobs and units come from people who
 * may be hostile.
 */
const SVG = "http://www.w3.org/2000/svg";

/* A description of a node. @attrs: attributes; those that begin with "on" are handlers; key: which
 * one it is among its siblings. */
export function h(tag, attrs, ...children) {
	return {
		tag,
		attrs: attrs || {},
		children: children.flat(Infinity).filter(
			(c) => c !== null && c !== undefined && c !== false)
	};
}

function makeNode(spec, parent) {
	const svg = spec.tag === "svg" || parent.namespaceURI === SVG;
	const node =
		svg ? document.createElementNS(SVG, spec.tag) : document.createElement(spec.tag);
	node.shown = {};
	node.patchKey = spec.attrs.key;
	return node;
}

function setAttributes(node, attrs) {
	const before = node.shown || {};
	for (const name of Object.keys(before)) {
		if (name in attrs && attrs[name] !== false && attrs[name] !== null &&
			attrs[name] !== undefined)
			continue;
		if (name.startsWith("on"))
			node[name] = null;
		else
			node.removeAttribute(name);
	}
	for (const [name, value] of Object.entries(attrs)) {
		if (name === "key" || value === false || value === null || value === undefined)
			continue;
		if (name.startsWith("on"))
			node[name] = value;
		else if (before[name] !== value)
			node.setAttribute(name, value === true ? "" : String(value));
	}
	node.shown = attrs;
}

function fits(node, spec) {
	if (typeof spec !== "object")
		return node.nodeType === Node.TEXT_NODE;
	return node.nodeType === Node.ELEMENT_NODE && node.localName === spec.tag &&
		node.patchKey === spec.attrs.key;
}

function keyOf(spec) {
	return typeof spec === "object" ? spec.attrs.key : undefined;
}

/* Remove the nodes with a key that nobody wants any more. Return: the others, by key. */
function dropUnwanted(parent, wanted) {
	const keyed = new Map();
	for (let node = parent.firstChild; node; node = node.nextSibling)
		if (node.patchKey !== undefined)
			keyed.set(node.patchKey, node);
	if (!keyed.size)
		return keyed;
	const keys = new Set(wanted.map(keyOf));
	for (const [key, node] of keyed)
		if (!keys.has(key)) {
			keyed.delete(key);
			node.remove();
		}
	return keyed;
}

/* Bring @node, a later sibling of @at, before @at. A node that moves loses the focus and the
 * selection, so the others move if they are in @node. */
function bring(parent, node, at) {
	if (!node.contains(document.activeElement)) {
		parent.insertBefore(node, at);
		return;
	}
	const after = node.nextSibling;
	while (at !== node) {
		const next = at.nextSibling;
		parent.insertBefore(at, after);
		at = next;
	}
}

/* The node without a key that @spec describes: @at, or one of the @tooMany after it. */
function findPlain(spec, at, tooMany) {
	let node = at;
	for (let i = 0; node && (!i || i <= tooMany) && node.patchKey === undefined; i++) {
		if (fits(node, spec))
			return node;
		node = node.nextSibling;
	}
	return undefined;
}

/* Remove @from and its next siblings up to @to. Return: how many. */
function removeUpTo(from, to) {
	let n = 0;
	for (; from !== to; n++) {
		const next = from.nextSibling;
		from.remove();
		from = next;
	}
	return n;
}

function patchNode(node, spec) {
	if (typeof spec === "object") {
		setAttributes(node, spec.attrs);
		patch(node, spec.children);
	} else if (node.data !== String(spec)) {
		node.data = String(spec);
	}
}

/* Make the children of @parent equal to @specs: descriptions and texts. */
export function patch(parent, ...specs) {
	const wanted =
		specs.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);
	const keyed = dropUnwanted(parent, wanted);
	let at = parent.firstChild;
	let left = parent.childNodes.length; /* from @at on */
	let more = wanted.length; /* from @spec on */
	for (const spec of wanted) {
		const key = keyOf(spec);
		let node = key === undefined ? findPlain(spec, at, left - more) : keyed.get(key);
		more--;
		if (node && !fits(node, spec))
			node = undefined;
		if (node && key === undefined) {
			left -= removeUpTo(at, node);
			at = node;
		}
		if (!node) {
			node = typeof spec === "object" ? makeNode(spec, parent) :
							  document.createTextNode("");
			parent.insertBefore(node, at);
		} else {
			if (node !== at)
				bring(parent, node, at);
			at = node.nextSibling;
			left--;
		}
		keyed.delete(key);
		patchNode(node, spec);
	}
	removeUpTo(at, null);
}

/* ------------------------------------------------------------------------- numbers */

export function bytes(n) {
	const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
	let i = 0;
	let value = Number(n) || 0;
	while (value >= 1024 && i + 1 < units.length) {
		value /= 1024;
		i++;
	}
	return `${i && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[i]}`;
}

/* A number with its thousands apart. */
export function count(n) {
	return String(Math.round(Number(n) || 0)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function duration(us) {
	const s = (Number(us) || 0) / 1e6;
	if (s === 0)
		return "0 s";
	if (s < 1e-3)
		return `${Math.round(s * 1e6)} µs`;
	if (s < 1)
		return `${(s * 1e3).toFixed(s < 0.1 ? 1 : 0)} ms`;
	if (s < 120)
		return `${s.toFixed(s < 10 ? 1 : 0)} s`;
	if (s < 7200)
		return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
	if (s < 172800)
		return `${Math.floor(s / 3600)} h ${Math.floor((s / 60) % 60)} min`;
	return `${Math.floor(s / 86400)} d ${Math.floor((s / 3600) % 24)} h`;
}

export function percent(part, whole) {
	if (!(whole > 0))
		return "0 %";
	const value = (100 * part) / whole;
	return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export function rate(perSecond) {
	if (perSecond === null)
		return "–";
	return `${
		perSecond >= 100 ? Math.round(perSecond) :
				   perSecond.toFixed(perSecond >= 10 ? 1 : 2)} /s`;
}

export function clock(date) {
	return [date.getHours(), date.getMinutes(), date.getSeconds()]
		.map((n) => String(n).padStart(2, "0"))
		.join(":");
}

/* A limit of 2^64 - 1 or 2^63 - 1 is none. */
export function isNoLimit(limit) {
	return limit === null || limit >= 2 ** 62;
}

/* A text as a sentence: errors of the daemon begin with a small letter, and have no full stop. */
export function sentence(text) {
	return text ?
		`${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` :
		"";
}

/* The number in words, with the noun. */
export function plural(n, noun) {
	return `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/* [0, 1, 2, 5] as "0-2, 5". */
export function ranges(numbers) {
	const parts = [];
	for (const n of numbers) {
		const last = parts[parts.length - 1];
		if (last && last[1] === n - 1)
			last[1] = n;
		else
			parts.push([n, n]);
	}
	return parts.map(([a, b]) => (a === b ? `${a}` :
					 b === a + 1 ? `${a}, ${b}` :
						       `${a}-${b}`))
		.join(", ");
}

const PROCESS_WORDS = {
	R: "runs",
	S: "sleeps",
	D: "sleeps, uninterruptible",
	T: "stopped",
	t: "stopped by a debugger",
	Z: "dead, not collected",
	X: "dead",
	I: "idle",
};

export function isStopped(rank) {
	return rank.process_state === "T" || rank.process_state === "t";
}

export function processWords(state) {
	return state ? `${PROCESS_WORDS[state] || "?"} (${state})` : "";
}

/* ------------------------------------------------------------------------- tables */

/* @columns: { name, help }, and of its cells number, wide or slim; @rows: { key, cells, class,
 * current }. A cell is a text or a description. */
export function table(caption, columns, rows) {
	return h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
		h("table", null, h("caption", {class: "hidden"}, caption),
			h("thead", null,
				h("tr", null,
					columns.map((c) => h("th", {
						scope: "col",
						class: c.number && "number",
						title: c.help
					},
							    c.name)))),
			h("tbody", null,
				rows.map((row) => h("tr", {
					key: String(row.key),
					class: row.class,
					"aria-current": row.current && "true"
				},
						 row.cells.map(
							 (cell, i) => h(i === 0 ? "th" : "td", {
								 scope: i === 0 && "row",
								 class: columns[i].number ?
									 "number" :
									 columns[i].wide ?
									 "wide" :
									 columns[i].slim && "slim"
							 },
								 cell)))))));
}

/* A state in words, with a sign before it; the colour only repeats it. @level: ok, busy, warn, bad
 * or "". */
export function badge(text, level) {
	const signs = {ok: "●", busy: "◐", warn: "▲", bad: "✖"};
	return h("span", {class: `badge ${level || "plain"}`},
		h("span", {"aria-hidden": "true"}, signs[level] || "○"), ` ${text}`);
}

export function note(text) {
	return h("p", {class: "note"}, text);
}
