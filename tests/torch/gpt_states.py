"""train_gpt.py as it is, which also saves the whole parameters of every step it commits: what
test_live.py runs as the trainer. The last argument is the folder."""

import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "python" / "examples"), str(ROOT / "client" / "python")]

import torch  # noqa: E402
import train_gpt  # noqa: E402

folder = pathlib.Path(sys.argv.pop())
plain_step = train_gpt.one_step


def save(model, engine, step):
    state = model.state_dict()  # collective
    if engine.rank == 0:
        part = folder / f"{step}.part"
        torch.save(state, part)
        os.rename(part, folder / f"{step}.pt")


def await_reader(engine):
    """Nobody begins before somebody looks: the other rank waits in its next collective."""
    until = time.monotonic() + 120
    while engine.rank == 0:
        client = engine.st.session()
        [job] = client.status(os.environ["SHARDD_JOB"])["jobs"]
        if job["publications"]:
            return
        if time.monotonic() > until:
            raise SystemExit("no reader has come")
        time.sleep(0.02)


def one_step(model, optimizer, text, options, engine, step):
    """The commit of this step follows; what it steps is not applied before the state is asked for,
    so that steps are applied and not committed while somebody may look."""
    if step == 0:
        await_reader(engine)
        save(model, engine, 0)
    loss = plain_step(model, optimizer, text, options, engine, step)
    save(model, engine, step + 1)
    return loss


train_gpt.one_step = one_step
train_gpt.main()
