/*
 * The page: it asks the daemon every 2 s, one request at a time, and draws what it says. It pauses
 * while it is hidden. The chosen job and the open sections are in location.hash. A token is kept
 * for this tab only.
 */
import {badge, clock, duration, h, note, patch, plural} from "./dom.js";
import {drawJob, drawJobs, hiddenNote, isHidden} from "./jobs.js";
import {drawMemory} from "./memory.js";
import {drawDevices, drawSaving, drawSessions, drawUsers} from "./more.js";
import {addEvents, drawEnded, drawEvents, endedPath, eventsPath} from "./past.js";
import {findProblems, LEVEL_WORDS, LEVELS} from "./problems.js";
import {drawPublications} from "./publications.js";
import {addSample, jobKey} from "./samples.js";
import {drawTimeline, resetTimeline, timelineLimit} from "./timeline.js";
import {drawUnits, paintUnits, resetUnits} from "./units.js";

const POLL_MS = 2000;
const PATIENCE_MS = 15000; /* for one answer */
const UNITS_MS = 4000;	   /* between two requests of units, or ten times what one takes */
const ENDED_MS = 10000;	   /* between two requests of jobs that have ended */
const TOKEN_KEY = "shardd-token";

const state = {
	status: null,
	at: 0,	    /* when it came, of performance.now() */
	came: null, /* the same as a date */
	version: "", /* of the daemon that this page is from */
	error: "",  /* of the last request */
	broken: "", /* an error of the page itself */
	needsToken: "",
	job: "",   /* the key of the job that was chosen; "": none was */
	shown: "", /* the key of the job that is shown */
	open: new Set(["jobs", "job", "memory"]),
	ops: null,
	units: null,
	unitsAt: -Infinity,
	unitsMs: 0,
	ended: null,
	endedAt: -Infinity,
	errors: {}, /* of a section */
};

/* ------------------------------------------------------------------------ the token */

let token = ""; /* also where the browser keeps none */

/* A header can carry these characters only. */
function isToken(text) {
	return /^[\x21-\x7e]+$/.test(text);
}

/* "": forget it. */
function keepToken(text) {
	token = text;
	try {
		if (text)
			sessionStorage.setItem(TOKEN_KEY, text);
		else
			sessionStorage.removeItem(TOKEN_KEY);
	} catch (e) {
		/* The browser keeps nothing for pages: a reload asks for the token again. */
	}
}

function readToken() {
	try {
		token = sessionStorage.getItem(TOKEN_KEY) || "";
	} catch (e) {
		token = "";
	}
}

/* Return: why it cannot be one, or "": it is kept. */
function takeToken(text) {
	if (!isToken(text))
		return "The token is empty, or it has blanks or characters that are not ASCII.";
	keepToken(text);
	return "";
}

/* ------------------------------------------------------------------------ the hash */

function decode(text) {
	try {
		return decodeURIComponent(text);
	} catch (e) {
		return text;
	}
}

function readHash() {
	const params = new URLSearchParams(location.hash.slice(1));
	/* URLSearchParams would make a blank of each "+", which base64 has. */
	const shown = /^#(?:.*&)?token=([^&]*)/.exec(location.hash);
	if (shown) {
		state.needsToken = takeToken(decode(shown[1]));
		params.delete("token");
		history.replaceState(null, "", `${location.pathname}#${params}`);
	}
	if (params.has("job"))
		state.job = params.get("job");
	if (params.has("open"))
		state.open = new Set(params.get("open").split(",").filter(Boolean));
}

function writeHash() {
	const params = new URLSearchParams();
	if (state.job)
		params.set("job", state.job);
	params.set("open", [...state.open].join(","));
	const hash = `#${params}`;
	if (hash !== location.hash)
		history.replaceState(null, "", hash);
}

/* ------------------------------------------------------------------------ requests */

/* Return: the answer. Throws an Error whose text is for people; needsToken: it is about a token. */
async function ask(path) {
	const abort = new AbortController();
	const timer = setTimeout(() => abort.abort(), PATIENCE_MS);
	let response;
	let body;
	try {
		response = await fetch(path, {
			cache: "no-store",
			credentials: "omit",
			signal: abort.signal,
			headers: token ? {Authorization: `Bearer ${token}`} : {}
		});
		body = await response.text();
	} catch (e) {
		throw new Error(abort.signal.aborted ? `no answer within ${PATIENCE_MS / 1000} s` :
						       "no connection");
	} finally {
		clearTimeout(timer);
	}
	let answer = null;
	try {
		answer = JSON.parse(body);
	} catch (e) {
		answer = null;
	}
	if (response.ok && answer)
		return answer;
	const text = answer && answer.message ? answer.message :
						`HTTP status ${response.status} without a text`;
	const error = new Error(text);
	error.needsToken = response.status === 401;
	throw error;
}

/* Ask for a section. @isWanted: is the answer still wanted when it is there? */
async function askFor(name, path, isWanted, done) {
	try {
		const answer = await ask(path);
		if (!isWanted())
			return;
		done(answer);
		delete state.errors[name];
	} catch (e) {
		if (isWanted())
			state.errors[name] = e.message;
	}
}

/* Only of a job that has a name, and whose inside the user may see. */
async function askAboutJob(job) {
	const key = jobKey(job);
	const path = `job=${encodeURIComponent(key)}`;
	const isWanted = () => state.shown === key;
	if (isHidden(job) || job.state === "DELETED")
		return;
	if (state.open.has("timeline"))
		await askFor("timeline", `/api/v1/ops?${path}&limit=${timelineLimit(job)}`,
			isWanted, (answer) => {
				state.ops = answer;
			});
	if (state.open.has("units") &&
		performance.now() - state.unitsAt >= Math.max(UNITS_MS, 10 * state.unitsMs)) {
		const begun = performance.now();
		state.unitsAt = begun;
		await askFor("units", `/api/v1/units?${path}`, isWanted, (answer) => {
			state.units = answer;
			state.unitsAt = performance.now();
			state.unitsMs = state.unitsAt - begun;
		});
	}
}

async function askMore() {
	const job = chosenJob();
	const always = () => true;
	if (job)
		await askAboutJob(job);
	if (state.open.has("events"))
		await askFor("events", eventsPath(job), always, (a) => addEvents(chosenJob(), a));
	if (state.open.has("ended") && performance.now() - state.endedAt >= ENDED_MS) {
		state.endedAt = performance.now();
		await askFor("ended", endedPath(), always, (answer) => {
			state.ended = answer;
		});
	}
}

/* A daemon of another version has another page. */
function isOtherVersion(status) {
	state.version = state.version || status.version;
	return state.version !== status.version;
}

async function askAll() {
	const status = await ask("/api/v1/status?units=no");
	if (isOtherVersion(status)) {
		location.reload();
		return;
	}
	addSample(status, performance.now());
	state.status = status;
	state.at = performance.now();
	state.came = new Date();
	showChosen();
	await askMore();
}

let timer = 0;
let busy = false;

/* Whatever happens, the page asks again. */
async function poll() {
	clearTimeout(timer);
	timer = 0;
	if (busy || document.hidden || state.needsToken)
		return;
	busy = true;
	try {
		await askAll();
		state.error = "";
	} catch (e) {
		state.error = e.message;
		if (e.needsToken) {
			/* A reload asks without it: who is known by the uid needs none. */
			state.needsToken = `The daemon answers: ${e.message}`;
			keepToken("");
		}
	} finally {
		busy = false;
		if (!timer)
			timer = setTimeout(poll, POLL_MS);
	}
	draw();
}

function pollNow() {
	if (!busy)
		poll();
}

/* --------------------------------------------------------------------------- choice */

function chosenJob() {
	const jobs = state.status ? state.status.jobs : [];
	const chosen = jobs.find((j) => jobKey(j) === state.job);
	/* Nothing is chosen: one with a stall, else one that runs, else the first one. */
	return chosen ||
		(state.job ? null :
			     jobs.find((j) => j.stall) || jobs.find((j) => j.state === "RUNNING") ||
					jobs.find((j) => j.state !== "DELETED") || jobs[0] || null);
}

/* What is known of a job is forgotten when another one is shown, also when nobody has chosen it:
 * without a choice, it is the one that needs attention most. */
function showChosen() {
	const job = chosenJob();
	const key = job ? jobKey(job) : "";
	if (key === state.shown)
		return;
	state.shown = key;
	state.ops = null;
	state.units = null;
	state.unitsAt = -Infinity;
	delete state.errors.timeline;
	delete state.errors.units;
	resetTimeline();
	resetUnits();
}

function choose(key) {
	state.job = key;
	state.open.add("job");
	writeHash();
	draw();
	pollNow();
}

function onToggle(id, open) {
	if (open === state.open.has(id))
		return;
	if (open)
		state.open.add(id);
	else
		state.open.delete(id);
	writeHash();
	draw();
	if (open && ["timeline", "units", "events", "ended"].includes(id))
		pollNow();
}

/* -------------------------------------------------------------------------- drawing */

function drawHead() {
	const s = state.status;
	const node = s.cluster ? `on node ${s.cluster.node}` : "";
	const lost = s.devices.filter((d) => d.lost).length;
	const health = s.draining ? badge("DRAINING", "warn") :
		s.cordon	  ? badge("SERVING, cordoned", "warn") :
				    badge("SERVING", "ok");
	patch(document.getElementById("node"), node);
	patch(document.getElementById("facts"), health,
		` Version ${s.version}, pid ${s.pid}, up ${duration(s.uptime_s * 1e6)}. `,
		s.cluster && `Cluster ${s.cluster.name}: ${s.cluster.state}. `,
		`${plural(s.jobs.length, "job")}, ${plural(s.sessions.length, "session")}, `,
		`${plural(s.devices.length, "device")}`, lost ? `, ${lost} lost` : "",
		`. Last answer ${clock(state.came)}.`);
}

function banner(text, more) {
	return h("p", {class: "banner", role: "alert"}, badge(text, "bad"), ` ${more}`);
}

function drawConnection() {
	const since = state.came ? `No answer since ${clock(state.came)}: ` : "No answer yet: ";
	patch(document.getElementById("connection"),
		state.error && !state.needsToken &&
			banner(`${since}${state.error}.`,
				`${state.status ? "What follows is from then. " : ""}` +
					"The page goes on asking."),
		state.broken &&
			banner(`This page has an error: ${state.broken}.`,
				"Load it again. If that does not help: shardctl status."));
}

let askedForToken = false;

function drawToken() {
	const form = document.getElementById("token-form");
	form.hidden = !state.needsToken;
	if (state.needsToken)
		document.getElementById("token-text").textContent = state.needsToken;
	if (state.needsToken && !askedForToken)
		document.getElementById("token-input").focus();
	askedForToken = Boolean(state.needsToken);
}

function drawProblems() {
	const problems = findProblems(state.status, state.at, state.came);
	const worst = problems.length ? `${plural(problems.length, "problem")}. ${
						problems[0].text.replace(/ since .*?\)/, "")}` :
					"No problems.";
	const live = document.getElementById("live");
	/* The key has no numbers that change all the time, so it is spoken only when something
	 * changes. */
	const key = problems.map((p) => p.key).join("\n");
	if (live.dataset.key !== key || !live.textContent) {
		live.dataset.key = key;
		live.textContent = worst;
	}
	document.title = problems.some((p) => p.level === 0) ? "✖ shardd" :
		problems.some((p) => p.level === 1)	     ? "▲ shardd" :
							       "shardd";
	patch(document.getElementById("problems"),
		problems.length ?
			h("ol", {class: "problems"},
				problems.map(
					(p) => h("li", {key: p.key, class: LEVELS[p.level]},
						h("strong", null,
							badge(LEVEL_WORDS[p.level],
								["bad", "warn", ""][p.level]),
							` ${p.text}`),
						p.more.map((m) => h("p", null, m)),
						p.job && p.job !== state.shown &&
							state.status.jobs.length > 1 &&
							h("p", null,
								h("button", {
									type: "button",
									class: "link",
									onclick: () => choose(p.job)
								},
									"Show this job"))))) :
			h("p", null, badge("Nothing is wrong.", "ok")));
}

/* An error of the page in a part of it must not end the rest. */
function attempt(draws) {
	try {
		return draws();
	} catch (e) {
		console.error(e);
		return h("p", {class: "error"}, `This part cannot be shown: ${e.message}.`);
	}
}

function section(id, title, draws) {
	const open = state.open.has(id);
	return h("details", {key: id, id, open, ontoggle: (e) => onToggle(id, e.target.open)},
		h("summary", null, h("h2", null, title)), h("div", {class: "body"}, open && [
			state.errors[id] &&
				h("p", {class: "error"}, `The daemon answers: ${state.errors[id]}`),
			attempt(draws)
		]));
}

/* What is shown of the job; @what: of it that its owner sees only. */
function ofJob(job, what, draws) {
	const n = state.status.jobs.length;
	if (!job)
		return note(state.job && n ?
				`There is no job ${state.job} any more. Choose another one.` :
				"There is no job.");
	if (what && isHidden(job))
		return hiddenNote(job, what);
	if (what && job.state === "DELETED")
		return note("The job is deleted: it has no ops and units any more.");
	return draws();
}

function drawMain() {
	const s = state.status;
	const job = chosenJob();
	const name = job ? ` of job ${job.name}` : "";
	patch(document.getElementById("main-content"),
		section("jobs", "Jobs", () => drawJobs(s, state.shown, choose)),
		section("job", job ? `Job ${job.name}` : "Job",
			() => ofJob(job, "", () => drawJob(job))),
		section("timeline", `Timeline${name}`,
			() => ofJob(job, "its ops", () => drawTimeline(state.ops, redraw))),
		section("units", `Units and shards${name}`,
			() => ofJob(job, "its units", () => drawUnits(state.units, redraw))),
		section("memory", "Memory", () => drawMemory(s, redraw)),
		section("devices", "Devices and communicators", () => drawDevices(s)),
		section("saving", "Checkpoints and replicas", () => drawSaving(s)),
		section("publications", "Publications", () => drawPublications(s)),
		section("events", "Events", () => drawEvents(job, state.came, refetch)),
		section("ended", "Jobs that have ended", () => drawEnded(state.ended, state.came)),
		section("users", "Users and limits", () => drawUsers(s)),
		section("sessions", "Sessions", () => drawSessions(s)));
	if (state.open.has("units"))
		paintUnits();
}

/* As attempt, of what is in no section. What the page shows may be old then, so it says so. */
function guard(draws) {
	try {
		draws();
	} catch (e) {
		console.error(e);
		state.broken = e.message;
	}
}

function redraw() {
	guard(drawMain);
	drawConnection();
}

function refetch() {
	redraw();
	pollNow();
}

function draw() {
	state.broken = "";
	drawToken();
	document.getElementById("all").hidden = !state.status || Boolean(state.needsToken);
	if (state.status && !state.needsToken) {
		showChosen();
		guard(drawHead);
		guard(drawProblems);
		guard(drawMain);
	}
	drawConnection();
}

/* ---------------------------------------------------------------------------- begin */

function begin() {
	readToken();
	readHash();
	document.getElementById("token-form").addEventListener("submit", (e) => {
		e.preventDefault();
		const input = document.getElementById("token-input");
		state.needsToken = takeToken(input.value.trim());
		input.value = "";
		draw();
		pollNow();
	});
	document.getElementById("skip").addEventListener("click", (e) => {
		e.preventDefault();
		document.getElementById("main-content").focus();
	});
	document.addEventListener("visibilitychange", () => {
		if (!document.hidden)
			pollNow();
	});
	window.addEventListener("hashchange", () => {
		readHash();
		draw();
		pollNow();
	});
	window.addEventListener("resize", () => {
		if (state.open.has("units"))
			paintUnits();
	});
	matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintUnits);
	draw();
	poll();
}

begin();
