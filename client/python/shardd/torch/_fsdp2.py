"""What FSDP2's modules can beside what shardd.torch._wrap has: settings of reductions, and of
collectives, most of which are not here."""

from __future__ import annotations

from typing import Any

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ._tree import built, units_of
from ._unit import ShardedUnit


class Settings:
    """Methods of :class:`ShardedModule` that set how this module's own unit is reduced."""

    def _unit(self) -> ShardedUnit:
        raise NotImplementedError

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients of this module's own unit by @factor instead of by the number of ranks,
        in later reductions. Once the model is in the daemon this is collective; it then holds until
        a rank dies, and all ranks must set it again."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise InvalidArgument(f"the divide factor is {factor!r}, must be a number above 0",
                                  "factor")
        unit = _settable(self._unit(), "set_gradient_divide_factor")
        unit.set_factors(float(factor), unit.force_sum)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sums are divided afterwards, as FSDP2 does it for fp16: other bits, where the number of
        ranks is no power of two (collective once the model is in the daemon)."""
        unit = _settable(self._unit(), "set_force_sum_reduction_for_comms")
        unit.set_factors(unit.divide_factor, bool(enable))

    def reset_iter_state(self) -> None:
        """Clean up after an exception in forward or backward: release gathered units and drop
        gradients that are not reduced yet. Call it on the model. It is optional: the next forward
        does the same."""
        unit = self._unit()
        if unit.parent is not None:
            raise FailedPrecondition("reset_iter_state must be called on the model: this "
                                     f"{type(unit.module).__name__} is a part of one")
        tree = built(unit)
        if tree is not None:
            tree.release_all()
            for one in tree.units:
                one.forget_gradients()

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *,
                                         recurse: bool = True) -> None:
        """True: a trained parameter without a gradient has one of zeros, so it is stepped (its
        weight decay, its momentum) also if no rank has used it. Not before the unit was gathered
        for the first time. False, the default: it is stepped if some rank has used it, to which
        the others contribute 0. @recurse: also for the units inside. Unimplemented: after
        replicate."""
        if self._unit().replicated:
            raise Unimplemented("set_reduce_scatter_unused_params: DistributedDataParallel has no "
                                "such setting; give replicate find_unused_parameters=True",
                                "reduce_scatter_unused_params")
        for unit in units_of(self) if recurse else [self._unit()]:  # type: ignore[arg-type]
            unit.zeros = bool(reduce_scatter_unused_params)

    def set_post_optim_event(self, event: Any) -> None:
        """Does nothing: a gather waits for the step."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *,
                                             recurse: bool = True) -> None:
        """Does nothing: gradients are reduced from where they are. A number below 1 is
        InvalidArgument, what is not an int a TypeError, as in FSDP2."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is {max_input_buffers!r}, must be an int")
        if max_input_buffers < 1:
            raise InvalidArgument(f"max_input_buffers is {max_input_buffers}, must be at least 1",
                                  "max_input_buffers")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *,
                                          recurse: bool = True) -> None:
        """Does nothing: this process has no communicators."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Does nothing, as for the group."""

    def set_symm_mem_for_comm(self, backend: Any = None) -> None:
        """Does nothing, as for the group."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """Unimplemented: the daemon does the gathers."""
        _no_own("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Unimplemented: the daemon does the reductions."""
        _no_own("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Unimplemented: the daemon does the reductions."""
        _no_own("set_all_reduce_hook")


def _no_own(name: str) -> None:
    raise Unimplemented(f"{name}: the daemon does gathers and reductions, and runs none of your "
                        "code; a function of yours can reduce gradients as register_comm_hook's "
                        "hook", name)


def _settable(unit: ShardedUnit, name: str) -> ShardedUnit:
    if unit.replicated or unit.hook or unit.own_hook:
        raise Unimplemented(f"{name}: after replicate and with a communication hook gradients are "
                            "divided as DistributedDataParallel and FSDP1 do; multiply the loss",
                            "factor")
    return unit
