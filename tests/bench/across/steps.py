"""A trainer of one unit. After an error it joins again. Each step is a line of JSON: its number,
the seconds that it took, and when it ended.

usage: steps.py MIB STEPS WAIT_S
"""
import json
import sys
import time

import shardd


def main():
    mib, steps, wait = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    client = shardd.connect()
    found = client.join()
    adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=1e-3)
    tensor = shardd.TensorSpec("w", (mib << 18,), shardd.Init.UNIFORM, -1, 1)
    [unit] = client.register([shardd.UnitSpec("unit", [tensor], optimizer=adamw)])
    if not found.has_commit:
        unit.init_seed(1)
    step, bits = found.step if found.has_commit else 0, None
    while step < steps:
        try:
            began = time.monotonic()
            gradient = unit.gradient()
            with gradient.view() as to:
                bits = bits or bytes(to.cast("B").nbytes)
                to.cast("B")[:] = bits
            unit.reduce()
            time.sleep(wait)  # what forward and backward would take
            client.step()
            client.commit(step + 1)
            step += 1
            print(json.dumps({"step": step, "s": time.monotonic() - began, "at": time.time()}),
                  flush=True)
        except shardd.Aborted:
            step = client.rejoin().step
    client.leave()


if __name__ == "__main__":
    main()
