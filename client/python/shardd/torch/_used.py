"""A step uses the gradients up, while PyTorch keeps them until zero_grad(). A program that relies
on this gets one warning: it reads p.grad after the step, goes on to the next backward, which
PyTorch would add to what is there, or steps again."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.rpartition(".")[0]


def _outside(*packages: str) -> tuple[str, str, int]:
    """Of the first frame that is of none of @packages: its module, its function, and how many
    frames away from the caller it is."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(packages):
        frame, depth = frame.f_back, depth + 1
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name, depth


class Used:
    """Of one model. ``there``: gradients of before the last step are there for PyTorch, and not
    here."""

    def __init__(self) -> None:
        self.there = False
        self._told = False

    def read(self, name: str) -> None:
        """The program looks for the gradient of @name, and gets None. PyTorch looks, too, in
        zero_grad() of a module around."""
        if not self.there:
            return
        module, function, _ = _outside(_PACKAGE)
        if function == "zero_grad":
            self.there = False
        elif not module.startswith("torch."):
            self.tell(f"p.grad of '{name}' is read after the step, which has used the gradient up, "
                      "so it is None; read it between backward and the step")

    def backward(self) -> None:
        """One begins."""
        if self.there:
            self.tell("backward was called after a step without zero_grad() between: PyTorch would "
                      "add the new gradients to those of before; here the step has used them up, "
                      "so they begin at zero. Call zero_grad() after each step")
        self.there = False

    def step(self) -> None:
        """One is made, without a backward since the last one."""
        if self.there:
            self.tell("step() was called twice without a backward between: PyTorch would step with "
                      "the same gradients again; here the first step has used them up, and the "
                      "second one changes nothing")

    def tell(self, what: str) -> None:
        """Warn of it, where the program is."""
        if not self._told:
            self._told = True
            warnings.warn(what, UserWarning, stacklevel=_outside(_PACKAGE, "torch.")[2])


__all__ = ["Used"]
