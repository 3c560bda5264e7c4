/* What changed between answers: rates of steps, and how long ranks waited and were waited for.
 * Nothing is stored beyond the page. */
import {isNoLimit} from "./dom.js";

const KEPT = 90;	 /* answers: 3 minutes */
const WINDOW_MS = 10000; /* that a rate is about */

let instance = "";
const byJob = new Map();
const refused = new Map(); /* of users: "uid name" to { value, at } */

/* A job's key in this page and in the API: names are unique for each owner only. */
export function jobKey(job) {
	return `${job.uid}/${job.name}`;
}

function sampleOf(job, at) {
	return {
		at,
		step: job.has_commit ? job.step : 0,
		commits: (job.counts && job.counts.commits) || 0,
		failed: job.ops_failed,
		ranks: new Map(job.ranks.map(
			(r) => [r.rank,
				{waited: r.waited_us, late: r.late_us, session: r.session}])),
	};
}

function addJob(job, at) {
	const key = jobKey(job);
	const one = byJob.get(key) || {samples: [], failedAt: 0};
	const sample = sampleOf(job, at);
	const last = one.samples[one.samples.length - 1];

	if (last && (sample.commits < last.commits || sample.step < last.step))
		one.samples = [];
	if (last && sample.failed > last.failed)
		one.failedAt = at;
	one.samples.push(sample);
	if (one.samples.length > KEPT)
		one.samples.shift();
	one.seen = at;
	byJob.set(key, one);
}

/* @status: an answer; @at: when, in milliseconds. */
export function addSample(status, at) {
	const now = `${status.instance} ${status.pid}`;
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

/* The last sample and the one about @ms before. Return: null: there is no such pair. */
function pairOf(key, ms) {
	const one = byJob.get(key);
	if (!one || one.samples.length < 2)
		return null;
	const last = one.samples[one.samples.length - 1];
	let first = one.samples[one.samples.length - 2];
	for (const s of one.samples)
		if (last.at - s.at <= ms) {
			first = s === last ? first : s;
			break;
		}
	return {first, last, seconds: (last.at - first.at) / 1000};
}

/* Return: committed steps a second; null: not known yet. */
export function stepRate(key) {
	const p = pairOf(key, WINDOW_MS);
	return p && p.seconds > 0 ? (p.last.step - p.first.step) / p.seconds : null;
}

/* Rates between all answers that are kept, oldest first. */
export function stepRates(key) {
	const one = byJob.get(key);
	const rates = [];
	for (let i = 1; one && i < one.samples.length; i++) {
		const [a, b] = [one.samples[i - 1], one.samples[i]];
		rates.push({at: b.at, rate: ((b.step - a.step) * 1000) / Math.max(1, b.at - a.at)});
	}
	return rates;
}

/* Shares of the time, in the last seconds, in which a rank waited and in which others waited for
 * it. They may be more than 1, because ops overlap. Return: null: not known yet. */
export function rankShares(key, rank) {
	const p = pairOf(key, WINDOW_MS);
	const a = p && p.first.ranks.get(rank);
	const b = p && p.last.ranks.get(rank);
	if (!a || !b || !(p.seconds > 0) || b.waited < a.waited || b.late < a.late)
		return null;
	return {
		waited: (b.waited - a.waited) / 1e6 / p.seconds,
		late: (b.late - a.late) / 1e6 / p.seconds
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
			.filter((s) => s.share)
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

/* Did an op of the job fail since the page is open, within the last minute? */
export function failedLately(key, at) {
	const one = byJob.get(key);
	return Boolean(one && one.failedAt && at - one.failedAt < 60000);
}

/* Has the limit refused something within the last minute? */
export function refusedLately(uid, usage, at) {
	const r = refused.get(`${uid} ${usage.name}`);
	return Boolean(r && r.at && at - r.at < 60000);
}

export function isNearLimit(usage) {
	return !isNoLimit(usage.limit) && usage.limit > 0 && usage.used >= 0.9 * usage.limit;
}
