/*
 * The page: it asks the daemon every 2 s, one request at a time, and draws what it says. It pauses
 * while it is hidden. The chosen job and the open sections are in location.hash. A token is kept
 * for this tab only.
 */
import {badge, clock, duration, h, note, patch, plural} from "./dom.js";
import {drawJob, drawJobs} from "./jobs.js";
import {drawMemory} from "./memory.js";
import {drawDevices, drawSaving, drawSessions, drawUsers} from "./more.js";
import {findProblems, LEVEL_WORDS, LEVELS} from "./problems.js";
import {addSample, jobKey} from "./samples.js";
import {drawTimeline, resetTimeline, timelineLimit} from "./timeline.js";
import {drawUnits, paintUnits} from "./units.js";

const POLL_MS = 2000;
const PATIENCE_MS = 15000; /* for one answer */
const UNITS_MS = 4000;	   /* between two requests of units, or ten times what one takes */
const TOKEN_KEY = "shardd-token";

const state = {
	status: null,
	at: 0,	    /* when it came, of performance.now() */
	came: null, /* the same as a date */
	error: "",  /* of the last request */
	needsToken: "",
	job: "",
	open: new Set(["jobs", "job", "memory"]),
	ops: null,
	units: null,
	unitsAt: -Infinity,
	unitsMs: 0,
	errors: {}, /* of a section */
};

/* ------------------------------------------------------------------------ the hash */

function readHash() {
	const params = new URLSearchParams(location.hash.slice(1));
	const token = params.get("token");
	if (token) {
		sessionStorage.setItem(TOKEN_KEY, token);
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
	const token = sessionStorage.getItem(TOKEN_KEY);
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
		const error = new Error(abort.signal.aborted ?
				`no answer within ${PATIENCE_MS / 1000} s` :
				"no connection");
		error.gone = true;
		throw error;
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

async function askMore() {
	const job = chosenJob();
	if (!job || !job.ranks.length)
		return;
	const key = encodeURIComponent(jobKey(job));
	const ask1 = async (name, path, done) => {
		try {
			const answer = await ask(path);
			if (chosenJob() && jobKey(chosenJob()) === jobKey(job))
				done(answer);
			delete state.errors[name];
		} catch (e) {
			state.errors[name] = e.message;
		}
	};
	if (state.open.has("timeline"))
		await ask1(
			"timeline", `/api/v1/ops?job=${key}&limit=${timelineLimit(job)}`, (a) => {
				state.ops = a;
			});
	if (state.open.has("units") &&
		performance.now() - state.unitsAt >= Math.max(UNITS_MS, 10 * state.unitsMs)) {
		const begun = performance.now();
		await ask1("units", `/api/v1/units?job=${key}`, (a) => {
			state.units = a;
		});
		state.unitsAt = performance.now();
		state.unitsMs = state.unitsAt - begun;
	}
}

let timer = 0;
let busy = false;

async function poll() {
	clearTimeout(timer);
	timer = 0;
	if (busy || document.hidden || state.needsToken)
		return;
	busy = true;
	try {
		const status = await ask("/api/v1/status?units=no");
		state.status = status;
		state.at = performance.now();
		state.came = new Date();
		state.error = "";
		addSample(status, state.at);
		await askMore();
	} catch (e) {
		state.error = e.message;
		if (e.needsToken) {
			/* A reload asks without it: who is known by the uid needs none. */
			state.needsToken = e.message;
			sessionStorage.removeItem(TOKEN_KEY);
		}
	}
	busy = false;
	draw();
	if (!timer)
		timer = setTimeout(poll, POLL_MS);
}

function pollNow() {
	if (!busy)
		poll();
}

/* --------------------------------------------------------------------------- choice */

function chosenJob() {
	const jobs = state.status ? state.status.jobs : [];
	const chosen = jobs.find((j) => jobKey(j) === state.job);
	/* Nothing is chosen: the first one, one with one with a stall before those that run. */
	return chosen ||
		(state.job ? null :
			     jobs.find((j) => j.stall) || jobs.find((j) => j.state === "RUNNING") ||
					jobs[0] || null);
}

function forget() {
	state.ops = null;
	state.units = null;
	state.unitsAt = -Infinity;
	resetTimeline();
}

function choose(key) {
	if (key !== state.job) {
		state.job = key;
		forget();
	}
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
	if (open && (id === "timeline" || id === "units"))
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

function drawConnection() {
	const box = document.getElementById("connection");
	if (!state.error || state.needsToken) {
		patch(box);
		return;
	}
	const since = state.came ? `No answer since ${clock(state.came)}: ` : "No answer yet: ";
	patch(box,
		h("p", {class: "banner", role: "alert"}, badge(`${since}${state.error}.`, "bad"),
			state.status ? " What follows is from then. The page goes on asking." :
				       " The page goes on asking."));
}

let askedForToken = false;

function drawToken() {
	const form = document.getElementById("token-form");
	form.hidden = !state.needsToken;
	if (state.needsToken)
		document.getElementById("token-text").textContent =
			`The daemon answers: ${state.needsToken}`;
	if (state.needsToken && !askedForToken)
		document.getElementById("token-input").focus();
	askedForToken = Boolean(state.needsToken);
}

function drawProblems() {
	const problems = findProblems(state.status, state.at);
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
						p.job && p.job !== state.job &&
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

function section(id, title, draws) {
	const open = state.open.has(id);
	return h("details", {key: id, id, open, ontoggle: (e) => onToggle(id, e.target.open)},
		h("summary", null, h("h2", null, title)), h("div", {class: "body"}, open && [
			state.errors[id] &&
				h("p", {class: "error"}, `The daemon answers: ${state.errors[id]}`),
			draws()
		]));
}

function drawMain() {
	const s = state.status;
	const job = chosenJob();
	const key = job ? jobKey(job) : "";
	const none = () => note(state.job && s.jobs.length ?
			`There is no job ${state.job} any more. Choose another one.` :
			"There is no job.");
	const name = job ? ` of job ${job.name}` : "";
	patch(document.getElementById("main-content"),
		section("jobs", "Jobs", () => drawJobs(s, key, choose)),
		section("job", job ? `Job ${job.name}` : "Job",
			() => (job ? drawJob(job) : none())),
		section("timeline", `Timeline${name}`,
			() => (job && job.ranks.length ? drawTimeline(state.ops, drawMain) :
							 none())),
		section("units", `Units and shards${name}`,
			() => (job && job.ranks.length ? drawUnits(state.units, drawMain) :
							 none())),
		section("memory", "Memory", () => drawMemory(s, drawMain)),
		section("devices", "Devices and communicators", () => drawDevices(s)),
		section("saving", "Checkpoints and replicas", () => drawSaving(s)),
		section("users", "Users and limits", () => drawUsers(s)),
		section("sessions", "Sessions", () => drawSessions(s)));
	if (state.open.has("units"))
		paintUnits();
}

function draw() {
	drawToken();
	drawConnection();
	document.getElementById("all").hidden = !state.status || Boolean(state.needsToken);
	if (!state.status || state.needsToken)
		return;
	drawHead();
	drawProblems();
	drawMain();
}

/* ---------------------------------------------------------------------------- begin */

function begin() {
	readHash();
	document.getElementById("token-form").addEventListener("submit", (e) => {
		e.preventDefault();
		const input = document.getElementById("token-input");
		sessionStorage.setItem(TOKEN_KEY, input.value.trim());
		input.value = "";
		state.needsToken = "";
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
		const job = state.job;
		readHash();
		if (job !== state.job)
			forget();
		draw();
		pollNow();
	});
	window.addEventListener("resize", () => {
		if (state.open.has("units"))
			paintUnits();
	});
	matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintUnits);
	poll();
}

begin();
