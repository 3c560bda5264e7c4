"""Models of PyTorch over nodes. With the interpreter of tests/run --with-torch only."""

import json
import pathlib
import sys

import lab
from lab import ROOT, Failed, Lab, Process, environment, wait_for
from training import SHAPES, TWO, Training

HERE = pathlib.Path(__file__).parent
GPT = ROOT / "client/python/examples/train_gpt.py"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--batch", "12",
         "--json"]
STEPS = 6
PATIENCE_S = 200  # six interpreters import PyTorch


class Torch(Training):
    """A Python program @argv in place of charlm: rank 0 prints its losses, from step 0 on."""

    def __init__(self, x, shape, argv, job):
        self.argv = argv
        super().__init__(x, shape, steps=STEPS, job=job)

    def command(self, rank):
        return [sys.executable, "-B", *self.argv]

    def lines(self):
        return [line for line in super().lines() if "loss" in line]

    def finish(self):
        wait_for(lambda: self.check() or all(p.code == 0 for p in self.ranks.values()),
                 f"the end of job {self.job}", PATIENCE_S)
        return whole(self.losses())


def whole(losses):
    if sorted(losses) != list(range(STEPS)):
        raise Failed(f"losses of steps {sorted(losses)}")
    return losses


def gpt(x):
    text = pathlib.Path(x.folder, "gpt-text")
    text.write_bytes((ROOT / "README.md").read_bytes())
    return [GPT, "--data", text, *SMALL, "--steps", str(STEPS)]


def alike(losses, alone, shape):
    """Within what sums in another order give: each sample is part of the same step."""
    for step, loss in losses.items():
        if abs(loss - alone[step]) > 1e-6 * abs(alone[step]):
            raise Failed(f"{shape}: step {step} has loss {loss}, {alone[step]} alone")


def trains_on_shapes(name, program):
    """@program(lab): what a rank runs, over each of the shapes and on one node."""
    with Lab(4) as x:
        x.nodes["alone"] = lab.Node(x, "alone", 20)
        x.nodes["alone"].start_alone()
        argv = program(x)
        alone = Torch(x, (("alone", 2),), argv, f"{name}-one").finish()
        for shape in SHAPES:
            alike(Torch(x, shape, argv, f"{name}-many").finish(), alone, shape)


def gpt_trains():
    """A GPT under fully_shard gives the losses of one node, over two, three and four nodes."""
    trains_on_shapes("gpt", gpt)


def llama_trains():
    """A Llama of transformers gives the losses of one node, over two, three and four nodes."""
    trains_on_shapes("llama", lambda _: [HERE / "llama.py", str(STEPS)])


def hsdp_trains():
    """A Llama whose parameters the ranks of a node share, and whose nodes are replicas (HSDP), has
    the losses of one node."""
    with Lab(2) as x:
        x.nodes["alone"] = lab.Node(x, "alone", 20)
        x.nodes["alone"].start_alone()
        script = HERE / "llama.py"
        alone = Torch(x, (("alone", 2),), [script, str(STEPS)], "one").finish()
        t = Torch(x, TWO, [script, str(STEPS), "2"], "hsdp")
        def registered():
            t.check()
            return (x["a"].ctl("units", "hsdp", check=False) or {"units": []})["units"]
        units = wait_for(registered, "the job has units", PATIENCE_S)
        wrong = [u for u in units if (u["strategy"], u["shard_ranks"]) != ("hybrid", 2)]
        if wrong:
            raise Failed(f"units {wrong}")
        alike(t.finish(), alone, "HSDP")


def torchrun_trains():
    """torchrun on two nodes starts the script as it is, and the losses are those of one node."""
    with Lab(2) as x:
        x.nodes["alone"] = lab.Node(x, "alone", 20)
        x.nodes["alone"].start_alone()
        argv = gpt(x)
        alone = Torch(x, (("alone", 2),), argv, "one").finish()
        agents = []
        for number, (name, ranks) in enumerate(TWO):
            node = x[name]
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", len(TWO),
                       "--nproc-per-node", ranks, "--node-rank", number,
                       "--master-addr", x[TWO[0][0]].address, "--master-port", 29500, *argv]
            env = environment(SHARDD_SOCKET=node.socket, PYTHONPATH=str(ROOT / "client/python"),
                              PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
            agents.append(Process(name, command, f"{x.folder}/torchrun-{name}.log", env))
        for agent in agents:
            if agent.wait(PATIENCE_S):
                raise Failed(f"{agent.log.name}: {agent.text()[-1500:]}")
        lines = "".join(agent.text() for agent in agents).splitlines()
        alike(whole(losses_in(lines)), alone, "torchrun")


def losses_in(lines):
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return {line["step"]: line["loss"] for line in found if "loss" in line}


TORCH = [gpt_trains, llama_trains, hsdp_trains, torchrun_trains]
