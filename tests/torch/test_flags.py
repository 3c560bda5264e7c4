"""The tables of flags in docs/semantics.md leave nothing out: every argument and public method
of the five systems, as they are installed, is named in the table of its system, and every test
that a row names is there. PyTorch/XLA cannot be installed everywhere: its names are those of the
constructor that was read for this project.

Prints one line of TAP a system.
"""

import fnmatch
import inspect
import os
import re
import sys
import warnings

warnings.simplefilter("ignore")

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
PAGE = os.path.join(ROOT, "docs", "semantics.md")

XLA = """module reshard_after_forward flatten_parameters execute_sharding_on_init
optimization_barrier_in_forward optimization_barrier_in_backward mark_step_on_finalization
disable_reshard_on_root compute_dtype buffer_dtype fp32_reduce_scatter sharding_groups
sharding_rank sharding_world_size on_neuron _shard_size_multiple _pin_layout_in_all_reduce
_pin_layout_in_all_gather _pin_layout_in_reduce_scatter _debug_dummy_forward_pass _debug_msg
_debug_print _debug_dummy_all_gather_op _debug_dummy_all_reduce_op _debug_dummy_reduce_scatter_op
_debug_dummy_optimization_barrier_op shard_param_on_dim_0 auto_wrap_policy auto_wrapper_callable
param_init_fn _use_xla_patched_linear reduce_scatter_bucket_size_mb coalesce_all_gather_ops
set_gradient_divide_factors clip_grad_norm_ no_sync assert_state get_shard_metadata
get_original_names_and_sharded_parameters params_with_grad""".split()


# ---------------------------------------------------------------- the page


def sections():
    """Heading -> rows of its table, each a list of cells."""
    rows = {}
    heading = None
    with open(PAGE, encoding="utf-8") as page:
        for line in page:
            if line.startswith("#"):
                heading = line.lstrip("#").strip()
            elif line.startswith("|") and heading and not line.startswith("| ---"):
                cells = [c.strip() for c in line.strip().strip("|").split("|")]
                rows.setdefault(heading, []).append(cells)
    return rows


def named(rows):
    """What the first cells name in `code`, * standing for anything."""
    spans = (span for row in rows for span in re.findall(r"`([^`]+)`", row[0]))
    return {name for span in spans for name in re.findall(r"[A-Za-z_*][\w*]*", span)}


def tests_of(rows):
    return {t for row in rows for t in re.findall(r"`(test_\w+)`", row[-1])}


def missing_tests(rows):
    there = {name.rsplit(".", 1)[0] for _, _, names in os.walk(os.path.join(ROOT, "tests"))
             for name in names}
    return sorted(tests_of(rows) - there)


# ---------------------------------------------------------------- the systems


def arguments(fn):
    return [n for n in inspect.signature(fn).parameters if n not in ("self", "args", "kwargs")]


def methods(cls):
    return [n for n, v in vars(cls).items()
            if not n.startswith("_") and (callable(v) or isinstance(
                v, (property, staticmethod, classmethod)))]


def functions(module):
    return [n for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__ and n[0] != "_"]


def of_fairscale():
    from fairscale.nn import FullyShardedDataParallel
    return arguments(FullyShardedDataParallel.__init__) + methods(FullyShardedDataParallel)


def of_fsdp1():
    from torch.distributed import fsdp
    from torch.distributed.algorithms._comm_hooks import default_hooks
    enums = [e.name for e in (*fsdp.ShardingStrategy, *fsdp.BackwardPrefetch)]
    fsdp1 = fsdp.FullyShardedDataParallel
    return (arguments(fsdp1.__init__) + methods(fsdp1) + arguments(fsdp.MixedPrecision) +
            arguments(fsdp.CPUOffload) + enums + functions(default_hooks) +
            arguments(default_hooks.DefaultState) + arguments(default_hooks.LowPrecisionState) +
            arguments(fsdp1.summon_full_params) + arguments(fsdp1.clip_grad_norm_))


def of_ddp():
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks
    from torch.distributed.algorithms.join import Join, Joinable, JoinHook
    from torch.nn.parallel import DistributedDataParallel
    ddp = DistributedDataParallel
    return (arguments(ddp.__init__) + methods(ddp) + arguments(ddp.join) +
            arguments(Join.__init__) + methods(Join) + methods(Joinable) + methods(JoinHook) +
            functions(default_hooks) + [t.name for t in DDPCommHookType])


def of_fsdp2():
    from torch.distributed import fsdp
    return (arguments(fsdp.fully_shard) + methods(fsdp.FSDPModule) +
            arguments(fsdp.MixedPrecisionPolicy) + arguments(fsdp.CPUOffloadPolicy) +
            arguments(fsdp.FSDPModule.set_reshard_after_backward) + methods(fsdp.UnshardHandle) +
            ["register_fsdp_forward_method", "share_comm_ctx"])


SYSTEMS = {
    "fairscale FullyShardedDataParallel": of_fairscale,
    "PyTorch/XLA XlaFullyShardedDataParallel": lambda: XLA,
    "The communication hooks of FSDP": of_fsdp1,
    "DistributedDataParallel": of_ddp,
    "FSDP2: fully_shard": of_fsdp2,
}


def check(page, title, names_of):
    rows = next(rows for heading, rows in page.items() if heading.startswith(title))
    patterns = named(rows)
    left_out = sorted({n for n in names_of()
                       if not any(fnmatch.fnmatchcase(n, p) for p in patterns)})
    problems = [f"`{n}` is not in the table" for n in left_out]
    problems += [f"the table names {t}, which is not there" for t in missing_tests(rows)]
    return problems


def main():
    page = sections()
    failed = False
    print(f"1..{len(SYSTEMS)}")
    for n, (title, names_of) in enumerate(SYSTEMS.items(), 1):
        try:
            problems = check(page, title, names_of)
        except ImportError as e:  # tests/run installs them all
            problems = [str(e)]
        for problem in problems:
            print(f"# {problem}")
        print(f"{'not ok' if problems else 'ok'} {n} - {title}")
        failed = failed or bool(problems)
    return 1 if failed else 0


sys.exit(main())
