#!/usr/bin/env python3
"""torch.optim on a CPU; see golden.py for what to install.

    venv/bin/python make_optim.py

writes optim.safetensors. "in/p" [element] and "in/g" [step, element] are where cases start and
the gradients they get, "in/wild/p" and "in/wild/g" the same with infinities, NaN and numbers
whose squares are infinite in them; "CASE/p", "CASE/m", "CASE/v", "CASE/vmax", "CASE/buf"
[step, element] what a case has after each step, which its metadata describes:

  optimizer  adamw, adam, sgd
  form       single (foreach=False), foreach, fused; f64: single with everything in double,
             rounded to fp32 after each step
  lr         one for each step; settings: as torch.optim names them
  input      in, in/wild
  scaler     0, or for a GradScaler 1; 2: its unscale_ is called before its step. Then the
             gradients of a step are CASE/g (scaled by CASE/scale, one element infinite where
             CASE/found is 1) and CASE/unscaled after the step; CASE/t is the optimizer's step
             counter after it. A step that is skipped is not counted. The scaler unscales (a
             multiplication by the inverse); but of fused with scaler 1 the optimizer does (a
             division).

MKL, whose sqrt torch uses in single and foreach on x86, is off by one unit for one number
in six: "single" and "foreach" run with numpy's correctly rounded sqrt instead, and
CASE/native is p as torch alone has it. fused has a correctly rounded sqrt of its own.
foreach gives the bits of single here, which this script asserts, so it is not stored.
"""

import itertools

import golden
import numpy as np
import torch

N = 61  # odd: bodies of vectors and tails
STEPS = 5
LR = (1.0, 0.5, 1.25, 0.1, 2.0)
ADAM = [  # lr, beta1, beta2, eps, weight decay
    (1e-3, 0.9, 0.999, 1e-8, 0.01),
    (3e-4, 0.9, 0.95, 1e-8, 0.0),
    (1e-2, 0.3, 0.9, 1e-6, 0.1),
    (1e-1, 0.0, 0.5, 1e-3, 0.5),
]
SGD = [  # lr, momentum, dampening, weight decay, nesterov
    (0.1, 0.0, 0.0, 0.0, False),
    (0.1, 0.0, 0.0, 0.01, False),
    (0.03, 0.9, 0.0, 0.0, False),
    (0.03, 0.9, 0.3, 0.1, False),
    (0.03, 0.9, 0.5, 0.0, False),
    (0.03, 0.95, 0.0, 0.1, True),
    (0.03, 0.9, 0.0, 0.0, True),
]


def numbers(shape, seed):
    """Normals of several sizes, zeros of both signs, and what is or becomes denormal."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 2, shape)
    x[..., ::11] = 0.0
    x[..., 5::23] = -0.0
    x[..., 3::17] *= 1e-21  # its square is denormal
    x[..., 7::19] *= 1e-37
    x[..., 9::29] *= 1e-42
    return torch.from_numpy(x.astype(np.float32))


WILD = (np.inf, -np.inf, np.nan, 3e38, -3e38, 2e19)


def wild(shape, seed):
    """With what is no number, or soon makes none, in every step or in one of them."""
    x = numbers(shape, seed)
    rows = x.view(-1, N)
    elements = iter(np.random.default_rng(seed).permutation(N))
    for value in WILD * 2:
        rows[:, next(elements)] = value
        rows[len(rows) // 2, next(elements)] = value
    rows[:, -2:] = torch.tensor(WILD[1:3])  # behind whole vectors
    return x


INPUTS = {"in": (numbers(N, 2000), numbers((STEPS, N), 2001)),
          "in/wild": (wild(N, 2002), wild((STEPS, N), 2003))}
INFINITE = (0, 0, 1, 0, 0)


def sqrt_rounded(tensor):
    return torch.from_numpy(np.sqrt(tensor.detach().numpy()))


class exact_sqrt:
    """In it torch's sqrt is correctly rounded."""

    def __enter__(self):
        self.before = torch.Tensor.sqrt, torch._foreach_sqrt
        torch.Tensor.sqrt = sqrt_rounded
        torch._foreach_sqrt = lambda tensors: [sqrt_rounded(t) for t in tensors]

    def __exit__(self, *_):
        torch.Tensor.sqrt, torch._foreach_sqrt = self.before


STATE = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "vmax", "momentum_buffer": "buf"}


def round_all(p, state):
    """What fp32 can hold."""
    for t in (p.data, *(state[key] for key in STATE if state.get(key) is not None)):
        t.copy_(t.float())


def make(kind, lr, form, options, start):
    p = torch.nn.Parameter(start.double() if form == "f64" else start.clone())
    flags = {"foreach": form == "foreach"}
    if form == "fused":
        flags = {"fused": True}
    return p, kind([p], lr=lr, **flags, **options)


def step_rows(p, opt, rows):
    state = opt.state[p]
    rows.setdefault("p", []).append(p.detach().float().clone())
    for key, name in STATE.items():
        if state.get(key) is not None:
            rows.setdefault(name, []).append(state[key].float().clone())


def run(kind, lr, form, options, source="in"):
    start, gradients = INPUTS[source]
    p, opt = make(kind, lr, form, options, start)
    rows = {}
    for scale, g in zip(LR, gradients):
        opt.param_groups[0]["lr"] = lr * scale
        p.grad = g.to(p.dtype).clone()
        opt.step()
        if form == "f64":
            round_all(p, opt.state[p])
        step_rows(p, opt, rows)
    return {key: torch.stack(row) for key, row in rows.items()}


def run_unscaled(kind, lr, form, options):
    return run_scaled(kind, lr, form, options, True)


def run_scaled(kind, lr, form, options, unscale=False):
    """With loss scaling: the third step is skipped, the scale halves then and grows later."""
    start, gradients = INPUTS["in"]
    p, opt = make(kind, lr, form, options, start)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0 * 2.0**14, growth_interval=2,
                                  growth_factor=1.5, backoff_factor=0.5)
    rows = {"scale": [], "t": [], "found": []}
    scaler.scale(torch.zeros(1))
    for scale, g, inf in zip(LR, gradients, INFINITE):
        opt.param_groups[0]["lr"] = lr * scale
        p.grad = g * scaler.get_scale()
        if inf:
            p.grad[N // 2] = np.inf
        rows["scale"].append(torch.tensor(scaler.get_scale()))
        rows.setdefault("g", []).append(p.grad.clone())
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        rows["found"].append(torch.tensor(float(inf)))
        rows["t"].append(torch.as_tensor(opt.state[p].get("step", -1.0)).clone().float())
        rows.setdefault("unscaled", []).append(p.grad.clone())
        step_rows(p, opt, rows)
    return {key: torch.stack(row) for key, row in rows.items()}


def add(tensors, about, case, rows, **settings):
    for key, rows_of in rows.items():
        tensors["%s/%s" % (case, key)] = rows_of
    about[case] = golden.settings(**settings)


def both_sqrt(function, kind, lr, form, options, *source):
    """Rows with a correctly rounded sqrt, and p with torch's own beside them."""
    with exact_sqrt():
        rows = function(kind, lr, form, options, *source)
        if form == "single":
            other = function(kind, lr, "foreach", options, *source)
            assert all(golden.same(rows[key], other[key]) for key in rows if key != "unscaled")
    if form == "single":
        rows["native"] = function(kind, lr, form, options, *source)["p"]
    return rows


KINDS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def adam_case(tensors, about, name, form, i, amsgrad, maximize, source="in"):
    lr, b1, b2, eps, wd = ADAM[i]
    options = dict(betas=(b1, b2), eps=eps, weight_decay=wd, amsgrad=amsgrad, maximize=maximize)
    rows = both_sqrt(run, KINDS[name], lr, form, options, source)
    case = "%s/%s/%d%s%s%s" % (name, form, i, "/amsgrad" * amsgrad, "/maximize" * maximize,
                               source.removeprefix("in"))
    add(tensors, about, case, rows, optimizer=name, form=form, input=source,
        lr=":".join(repr(lr * s) for s in LR), beta1=b1, beta2=b2, eps=eps,
        weight_decay=wd, amsgrad=int(amsgrad), maximize=int(maximize), scaler=0)


def adam_cases(tensors, about):
    choices = itertools.product(KINDS, range(len(ADAM)), (False, True), (False, True))
    for name, i, amsgrad, maximize in choices:
        for form in ("single", "fused", "f64"):
            if form != "f64" or not (amsgrad or maximize):
                adam_case(tensors, about, name, form, i, amsgrad, maximize)
    for name, form in itertools.product(KINDS, ("single", "fused", "f64")):
        adam_case(tensors, about, name, form, 0, False, False, "in/wild")
        if form != "f64":
            adam_case(tensors, about, name, form, 2, True, False, "in/wild")
            adam_case(tensors, about, name, form, 2, False, True, "in/wild")


def sgd_case(tensors, about, form, i, maximize, source="in"):
    lr, momentum, dampening, wd, nesterov = SGD[i]
    options = dict(momentum=momentum, dampening=dampening, weight_decay=wd,
                   nesterov=nesterov, maximize=maximize)
    rows = both_sqrt(run, torch.optim.SGD, lr, form, options, source)
    rows.pop("native", None)  # no square roots
    case = "sgd/%s/%d%s%s" % (form, i, "/maximize" * maximize, source.removeprefix("in"))
    add(tensors, about, case, rows, optimizer="sgd", form=form, input=source,
        lr=":".join(repr(lr * s) for s in LR), momentum=momentum, dampening=dampening,
        weight_decay=wd, nesterov=int(nesterov), maximize=int(maximize), scaler=0)


def sgd_cases(tensors, about):
    forms = "single", "fused"
    for i, maximize, form in itertools.product(range(len(SGD)), (False, True), forms):
        sgd_case(tensors, about, form, i, maximize)
    for i, form in itertools.product((0, 3, 5), forms):
        sgd_case(tensors, about, form, i, i == 3, "in/wild")


def scaled_cases(tensors, about):
    lr, b1, b2, eps, wd = ADAM[0]
    options = dict(betas=(b1, b2), eps=eps, weight_decay=wd)
    for form, scaler in (("single", 1), ("fused", 1), ("fused", 2)):
        rows = both_sqrt(run_unscaled if scaler == 2 else run_scaled, torch.optim.AdamW, lr, form,
                         options)
        add(tensors, about, "scaled/adamw/%s/%d" % (form, scaler), rows, optimizer="adamw",
            form=form, input="in", lr=":".join(repr(lr * s) for s in LR), beta1=b1, beta2=b2,
            eps=eps, weight_decay=wd, amsgrad=0, maximize=0, scaler=scaler)
    options = dict(momentum=0.9, weight_decay=0.1)
    rows = both_sqrt(run_scaled, torch.optim.SGD, 0.03, "single", options)
    rows.pop("native")
    add(tensors, about, "scaled/sgd/single", rows, optimizer="sgd", form="single",
        input="in", lr=":".join(repr(0.03 * s) for s in LR), momentum=0.9, dampening=0.0,
        weight_decay=0.1, nesterov=0, maximize=0, scaler=1)


def main():
    torch.set_num_threads(1)
    tensors, about = {}, {}
    for source, (start, gradients) in INPUTS.items():
        tensors.update({source + "/p": start, source + "/g": gradients})
    adam_cases(tensors, about)
    sgd_cases(tensors, about)
    scaled_cases(tensors, about)
    golden.save("optim.safetensors", tensors, about)


if __name__ == "__main__":
    main()
