/* What has happened: the latest events, of all jobs or of the chosen one, and jobs that
 * have ended. */
import {badge, bytes, clock, count, duration, h, note, plural, sentence, table} from "./dom.js";
import {jobKey} from "./samples.js";

const MOST_EVENTS = 200; /* that are kept and shown */
const FIRST_EVENTS = 100;
const MOST_ENDED = 100;

const EVENT_LEVELS = {
	DIED: "bad",
	EPOCH_ENDED: "warn",
	STALL: "bad",
	STALL_ENDED: "ok",
	FORMED: "ok",
	CHECKPOINT: "ok",
	CHECKPOINT_FAILED: "bad",
	DRAIN: "busy",
	DEVICE_LOST: "bad"
};

const END_WORDS = {
	DELETED: "deleted",
	FINISHED: "finished: all ranks have left",
	EXPIRED: "expired: no trainer came back in time",
	CRASHED: "a trainer died, and none came back in time",
	REPLACED: "a new job took its name",
	UNUSED: "its first rank could not join"
};

const view = {
	onlyJob: false,
	/* of the events: the job that they are of ("": all), and where the next ones begin */
	of: "",
	run: 0,
	last: 0,
	events: [], /* oldest first */
	known: false
};

/* The job whose events are shown; "": all. */
function wantedJob(job) {
	return view.onlyJob && job && job.state !== "DELETED" ? jobKey(job) : "";
}

/* @job: the chosen one. Return: the path of the events that are not known yet. */
export function eventsPath(job) {
	const of = wantedJob(job);
	if (of !== view.of)
		Object.assign(view, {of, run: 0, last: 0, events: [], known: false});
	const params = new URLSearchParams();
	if (of)
		params.set("job", of);
	if (view.last) {
		params.set("after", view.last);
		params.set("run", view.run);
	} else {
		params.set("limit", FIRST_EVENTS);
	}
	return `/api/v1/events?${params}`;
}

/* @answer: of eventsPath(@job). */
export function addEvents(job, answer) {
	if (wantedJob(job) !== view.of)
		return;
	/* Another run of the daemon has other numbers, and sends its latest events. */
	if (answer.run !== view.run)
		view.events = [];
	view.events = [...view.events, ...answer.events].slice(-MOST_EVENTS);
	Object.assign(view, {run: answer.run, last: answer.last, known: true});
}

export function endedPath() {
	return `/api/v1/history?limit=${MOST_ENDED}`;
}

/* Of today the time, of other days with the date: 2026-11-28 04:39:54. */
function when(ms, now) {
	const date = new Date(ms);
	const day = [date.getFullYear(), date.getMonth() + 1, date.getDate()]
			    .map((n) => String(n).padStart(2, "0"))
			    .join("-");
	const time = clock(date);
	return h("time", {datetime: date.toISOString()},
		date.toDateString() === now.toDateString() ? time : `${day} ${time}`);
}

function eventRow(e, now) {
	return {
		key: e.id,
		cells: [
			when(e.unix_ms, now), `${e.uid}/${e.job}`,
			badge(e.kind.replace("_", " "), EVENT_LEVELS[e.kind] || ""),
			e.rank >= 0 ? `${e.rank}${e.pid ? `, pid ${e.pid}` : ""}` : "–",
			e.text || "–"
		]
	};
}

function choice(job, changed) {
	return h("p", null, h("label", null, h("input", {
		type: "checkbox",
		id: "only-job",
		checked: view.onlyJob,
		onchange: (e) => {
			view.onlyJob = e.target.checked;
			changed();
		}
	}),
				 job ? ` Only job ${job.name}` : " Only the chosen job"));
}

/* @now: when the last answer came; @changed: called when others are wanted. */
export function drawEvents(job, now, changed) {
	const columns = [
		{name: "When", slim: true}, {name: "Job"}, {name: "Event"}, {name: "Rank"},
		{name: "Text", wide: true}
	];
	let list = note("The events are being fetched.");
	if (view.known && wantedJob(job) === view.of)
		list = view.events.length ?
			table("Events", columns,
				[...view.events].reverse().map((e) => eventRow(e, now))) :
			note("Nothing has happened since the daemon's start.");
	return [choice(job, changed), list];
}

function endedCells(j, now) {
	const began = j.began_unix_s, hidden = j.is_private && !j.world_size;
	return [
		j.name, String(j.uid), when(j.ended_unix_s * 1000, now),
		`${END_WORDS[j.end] || j.end}${j.torn ? ", TORN" : ""}`,
		began ? duration((j.ended_unix_s - began) * 1e6) : "–",
		hidden ? "–" : count(j.world_size), j.has_commit ? count(j.step) : "–",
		bytes(j.peak_bytes), hidden ? "hidden: private" : sentence(j.last_error) || "–"
	];
}

/* @answer: of endedPath. */
export function drawEnded(answer, now) {
	if (!answer)
		return note("The jobs are being fetched.");
	if (!answer.jobs.length)
		return note("No job has ended.");
	return [
		table("Jobs that have ended",
			[
				{name: "Job"}, {name: "Owner", help: "user id", number: true},
				{name: "Ended"}, {name: "Why", wide: true},
				{name: "After", help: "since it was created", number: true},
				{name: "Ranks", number: true},
				{name: "Step", help: "last committed step", number: true},
				{name: "Peak memory", number: true},
				{name: "Last error", wide: true}
			],
			answer.jobs.map((j) => ({key: j.id, cells: endedCells(j, now)}))),
		answer.next > 0 &&
			note(`These are the latest ${plural(answer.jobs.length, "job")}. ` +
				"shardctl history shows the others.")
	];
}
