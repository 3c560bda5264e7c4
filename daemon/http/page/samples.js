/* What changed between answers: rates of steps, and how long ranks waited and were waited for.
 * Nothing is stored beyond the page. */
import {isNoLimit} from "./dom.js";

const KEPT = 90;	 /* answers: 3 minutes */
const WINDOW_MS = 10000; /* that a rate is about */

let instance = "";
const byJob = new Map();
const refused = new Map(); /* of users: "uid name" to { value, at } */

/* A job's key in this page and, of one that is not DELETED, in the API: names are unique for each
 * owner only, and a DELETED job may have the name of one that lives. */
export function jobKey(job) {
	return job.deletedKey || `${job.uid}/${job.name}`;
}

/* Give the DELETED jobs of an answer keys that no other job can have. */
function tellDeletedApart(jobs) {
	const seen = new Map();
	for (const job of jobs)
		if (job.state === "DELETED") {
			const name = `${job.uid}/${job.name}`;
			const n = (seen.get(name) || 0) + 1;
			seen.set(name, n);
			job.deletedKey = `deleted ${n} ${name}`;
		}
}

/* What a rank on another node has waited is not known until its node has answered; nobody is an
 * EMPTY one. */
function isTold(r) {
	return r.state !== "ELSEWHERE" && r.state !== "EMPTY";
}

/* Ranks are compared with those of their node, so of one that is alone there it is not known
 * whether others wait for it. */
function isAlone(job, r) {
	return job.nodes.some(
		(n) => n.ranks === 1 && n.first === r.rank && job.ranks.length > 1);
}

function sampleOf(job, at) {
	return {
		at,
		series: 0, /* steps of one series are compared */
		step: job.has_commit ? job.step : null,
		commits: (job.counts && job.counts.commits) || 0,
		ranks: new Map(job.ranks.filter(isTold).map((r) => [r.rank, {
			waited: r.waited_us,
			late: isAlone(job, r) ? null : r.late_us
		}])),
	};
}

/* Does the step of @b not go on from that of @a? The first commit of a job that resumes, and a
 * checkpoint that is loaded, bring a number that says nothing of the rate. */
function isJump(a, b) {
	return b.step < a.step || (a.step === null && b.step !== null) ||
		(b.step !== a.step && b.commits === a.commits);
}

function addJob(job, at) {
	const key = jobKey(job);
	const one = byJob.get(key) || {samples: []};
	const sample = sampleOf(job, at);
	const last = one.samples[one.samples.length - 1];

	if (last && sample.commits < last.commits)
		one.samples = []; /* another job of this name */
	else if (last)
		sample.series = last.series + (isJump(last, sample) ? 1 : 0);
	one.samples.push(sample);
	if (one.samples.length > KEPT)
		one.samples.shift();
	one.seen = at;
	byJob.set(key, one);
}

/* @status: an answer; @at: when, in milliseconds. */
export function addSample(status, at) {
	const now = `${status.instance} ${status.pid}`;
	tellDeletedApart(status.jobs);
	if (now !== instance) {
		byJob.clear();
		refused.clear();
		instance = now;
	}
	for (const job of status.jobs)
		addJob(job, at);
	for (const [key, one] of byJob)
		if (one.seen !== at)
			byJob.delete(key);
	for (const user of status.users)
		for (const u of user.usage) {
			const key = `${user.uid} ${u.name}`;
			const old = refused.get(key);
			refused.set(key, {
				value: u.refused,
				at: old && u.refused > old.value ? at :
					old			 ? old.at :
								   0
			});
		}
}

/* The last sample and, of those for which @fits, the one about @ms before. Return: null: there is
 * no such pair. */
function pairOf(key, ms, fits = () => true) {
	const one = byJob.get(key);
	if (!one || one.samples.length < 2)
		return null;
	const last = one.samples[one.samples.length - 1];
	const before = one.samples.slice(0, -1).filter((s) => fits(s, last));
	if (!before.length)
		return null;
	const first = before.find((s) => last.at - s.at <= ms) || before[before.length - 1];
	return {first, last, seconds: (last.at - first.at) / 1000};
}

function isSameSeries(a, b) {
	return a.series === b.series;
}

/* Return: committed steps a second; null: not known yet. */
export function stepRate(key) {
	const p = pairOf(key, WINDOW_MS, isSameSeries);
	return p && p.seconds > 0 && p.last.step !== null ?
		(p.last.step - p.first.step) / p.seconds :
		null;
}

/* Rates between all answers that are kept, oldest first. */
export function stepRates(key) {
	const one = byJob.get(key);
	const rates = [];
	for (let i = 1; one && i < one.samples.length; i++) {
		const [a, b] = [one.samples[i - 1], one.samples[i]];
		if (isSameSeries(a, b) && b.step !== null)
			rates.push({
				at: b.at,
				rate: ((b.step - a.step) * 1000) / Math.max(1, b.at - a.at)
			});
	}
	return rates;
}

/* Shares of the time, in the last seconds, in which a rank waited and in which others waited for
 * it (null: not known). They may be more than 1, because ops overlap. Return: null: not known
 * yet. */
export function rankShares(key, rank) {
	const p = pairOf(key, WINDOW_MS);
	const a = p && p.first.ranks.get(rank);
	const b = p && p.last.ranks.get(rank);
	if (!a || !b || !(p.seconds > 0))
		return null;
	const late = a.late === null || b.late === null ? null : b.late - a.late;
	if (b.waited < a.waited || late < 0)
		return null; /* another process */
	return {
		waited: (b.waited - a.waited) / 1e6 / p.seconds,
		late: late === null ? null : late / 1e6 / p.seconds
	};
}

/* The rank that others wait for most, if it is clear. Return: { rank, late, seconds } or null. */
export function slowRank(job) {
	const key = jobKey(job);
	const p = pairOf(key, WINDOW_MS);
	if (!p || p.seconds < 3.5 || job.ranks.length < 2)
		return null;
	const shares =
		job.ranks.map((r) => ({rank: r.rank, pid: r.pid, share: rankShares(key, r.rank)}))
			.filter((s) => s.share && s.share.late !== null)
			.sort((a, b) => b.share.late - a.share.late);
	if (!shares.length || shares[0].share.late < 0.3)
		return null;
	if (shares.length > 1 && shares[0].share.late < 2.5 * shares[1].share.late)
		return null;
	return {
		rank: shares[0].rank,
		pid: shares[0].pid,
		late: shares[0].share.late,
		seconds: p.seconds
	};
}

/* Has the limit refused something within the last minute? */
export function refusedLately(uid, usage, at) {
	const r = refused.get(`${uid} ${usage.name}`);
	return Boolean(r && r.at && at - r.at < 60000);
}

export function isNearLimit(usage) {
	return !isNoLimit(usage.limit) && usage.limit > 0 && usage.used >= 0.9 * usage.limit;
}
