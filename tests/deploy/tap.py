"""TAP lines for the tests of this folder: ok - name, not ok - name, with what was wrong."""
import sys
import time
import traceback


class Skip(Exception):
    pass


def run(*tests):
    """Run functions in order; the first line of their doc string is the test's name."""
    failed = 0
    for test in tests:
        name = test.__doc__.strip().splitlines()[0].rstrip(".")
        begun = time.monotonic()
        try:
            test()
        except Skip as why:
            print(f"ok - {name} # SKIP {why}", flush=True)
        except Exception:
            failed += 1
            print(f"not ok - {name}")
            said = traceback.format_exc().splitlines(True)
            print("".join("  " + line for line in said), flush=True)
        else:
            print(f"ok - {name} # {time.monotonic() - begun:.1f} s", flush=True)
    print(f"1..{len(tests)}")
    sys.exit(1 if failed else 0)
