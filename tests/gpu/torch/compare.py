"""Read lines of train.py; do the losses agree? One line for each comparison, and 1 if one fails.

    compare.py FILE

The losses of shardd are those of PyTorch alone, or of FSDP2 with bf16, within a bound: the daemon's
AdamW has the arithmetic of PyTorch's on the processor, and that on a GPU fuses operations. The mean
of two and four ranks' losses is that of one's.
"""

import json
import statistics
import sys

BOUND = {False: 1e-5, True: 1e-3}  # relative; with bf16 a last bit is 2**-9


def runs(path):
    """Losses by (bf16, clip, engine, ranks): the mean over ranks, step by step; and times."""
    found, times = {}, {}
    with open(path) as lines:
        for line in lines:
            at = line.find('{"engine"')
            if at >= 0:
                run = json.loads(line[at:])
                key = run["bf16"], run["clip"], run["engine"], run["ranks"]
                found.setdefault(key, {})[run["rank"]] = run["losses"]
                times.setdefault(key, []).append(run["ms"])
    return {key: [statistics.fmean(step) for step in zip(*ranks.values())]
            for key, ranks in found.items() if len(ranks) == key[3]}, times


def main():
    found, times = runs(sys.argv[1])
    failed, compared = 0, 0
    for key, losses in sorted(found.items()):
        bf16, clip, engine, ranks = key
        peer = (bf16, clip, "fsdp2" if bf16 else "single", 1)
        if engine != "shardd" or peer not in found:
            continue
        compared += 1
        most = max(abs(a - b) / b for a, b in zip(losses, found[peer]))
        good = len(losses) == len(found[peer]) and most < BOUND[bf16] and losses[-1] < losses[0]
        failed += not good
        print(f"{'bf16' if bf16 else 'fp32'}{', clip' if clip else ''}, {ranks} ranks: losses "
              f"{losses[0]:.4f} to {losses[-1]:.4f}, at most {most:.2g} from {peer[2]}"
              f"{'' if good else ': TOO FAR'}; ms a step {min(times[key]):.1f}, {peer[2]} "
              f"{min(times[peer]):.1f}")
    sys.exit(failed > 0 or not compared)


if __name__ == "__main__":
    main()
