"""A custom weight loader for SGLang. A server that was started with
``--custom-weight-loader shardd.engines.sglang.load_weights`` loads the newest generation from the
daemon's shared memory. The manual is docs/engines.md.

An update request of SGLang contains tensors by name. A request of shardd contains one tensor
without elements. Its name is a text that says what to load.
"""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import InUse, InvalidArgument
from ..live import Generation
from ._weights import (
    Exchange,
    Held,
    Weights,
    bits,
    checked,
    copy_parameters,
    log,
    patch_parameters,
    placed,
    tensors,
)

#: The value of ``--custom-weight-loader`` and ``load_format``.
LOADER = "shardd.engines.sglang.load_weights"

_MARK = "shardd:"
_FIELDS: dict[str, Any] = {"job": None, "publication": "engine", "socket": None, "number": 0,
                           "step": 0, "wait": 60.0, "names": "checkpoint", "complete": True,
                           "copy": False, "patches": False}
_open: dict[tuple[str, str, str | None], Weights] = {}


class Taken(Held):
    """Which generation a model has, and its ``source``. ``plain``: names of tensors whose
    values are unchanged in the parameter with the same name."""

    def __init__(self, source: tuple[Any, ...], plain: set[str]) -> None:
        super().__init__()
        self.source, self.plain = source, plain


_held: WeakKeyDictionary[Any, Taken] = WeakKeyDictionary()


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise InvalidArgument(f"a request has no {', '.join(unknown)}; it has {', '.join(_FIELDS)}",
                              unknown[0])
    found = {**_FIELDS, **given}
    checked("the request", **found)
    return found


def named_tensors(job: str, **options: Any) -> list[tuple[str, Any]]:
    """Return the argument for ``Engine.update_weights_from_tensor`` with ``load_format=LOADER``.

    @options: ``publication``: each rank replaces ``{tp_rank}`` and ``{pp_rank}`` with its own
    ranks. ``socket``: of the daemon on the engine's machine. ``number``, ``step``: the minimum that
    the newest generation must have. ``wait``: seconds to wait for it. ``names``: ``checkpoint``:
    the model's own ``load_weights`` accepts the names; ``parameters``: the tensors are copied into
    the parameters with their names, and with ``complete`` (the default) every parameter must be
    present. ``copy``: the model gets copies. ``patches``: if the model has the previous generation,
    only the changes are written.
    """
    import torch

    return [(_MARK + json.dumps(_fields({"job": job, **options})), torch.empty(0))]


def http_request(job: str, tp_size: int = 1, flush_cache: bool = True,
                 **options: Any) -> dict[str, Any]:
    """Return the JSON to POST to ``/update_weights_from_tensor``, between ``/begin_weight_update``
    and ``/end_weight_update``, for a server with @tp_size ranks of tensor parallelism. @options: of
    :func:`named_tensors`. This needs SGLang's package, which defines the format."""
    from sglang.srt.utils import MultiprocessingSerializer

    one = MultiprocessingSerializer.serialize(named_tensors(job, **options), output_str=True)
    return {"serialized_named_tensors": [one] * tp_size, "load_format": LOADER,
            "flush_cache": flush_cache}


def update(engine: Any, job: str, flush_cache: bool = True, **options: Any) -> None:
    """Perform a whole update of @engine (sglang.Engine). @options: of :func:`named_tensors`.
    RuntimeError: SGLang refused the update."""
    request = named_tensors(job, **options)
    _answer(engine.begin_weight_update(), "begin_weight_update")
    try:
        _answer(engine.update_weights_from_tensor(request, load_format=LOADER,
                                                  flush_cache=flush_cache),
                "update_weights_from_tensor")
    finally:
        engine.end_weight_update()


def _answer(answer: Any, what: str) -> None:
    """Check an answer of SGLang: (success, message), or an object that has both."""
    success, message = (answer if isinstance(answer, tuple) else
                        (getattr(answer, "success", True), getattr(answer, "message", "")))
    if not success:
        raise RuntimeError(f"SGLang refused {what}: {message}")


def _wanted(given: Any) -> dict[str, Any]:
    """Return the fields of the request. InvalidArgument: it is not a request of shardd."""
    names = [name for name, _ in given]
    if len(names) != 1 or not names[0].startswith(_MARK):
        raise InvalidArgument("the tensors of this request are not what shardd.engines.sglang."
                              f"named_tensors() makes: {names[:3]}", "named_tensors")
    try:
        said = json.loads(names[0][len(_MARK):])
    except ValueError as error:
        raise InvalidArgument(f"the request is no JSON: {error}", "named_tensors") from error
    if not isinstance(said, dict):
        raise InvalidArgument("the request is no JSON object", "named_tensors")
    return _fields(said)


def _ranks() -> tuple[int, int, Exchange | None]:
    """The ranks of tensor and pipeline parallelism, and the exchange with the other ranks."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    groups = [group for size, group in ((parallel.tp_size, "tp_group"),
                                        (parallel.pp_size, "pp_group")) if size > 1]

    def exchange(mine: Any) -> list[Any]:
        every = [mine]
        for name in groups:
            group = getattr(parallel, name)
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, every, group=group.cpu_group)
            every = [one for part in parts for one in part]
        return every

    return parallel.tp_rank, parallel.pp_rank, exchange if groups else None


def load_weights(model: Any, named_tensors: Any) -> None:
    """SGLang calls this on each rank, with its model and the tensors of the request.

    An exception ends SGLang's scheduler and with it the server: SGLang cannot refuse a custom load.
    Publish the generation before you request the update.
    """
    import torch

    wanted = _wanted(named_tensors)
    tp_rank, pp_rank, exchange = _ranks()
    key = (wanted["job"], placed(wanted["publication"], tp_rank, pp_rank), wanted["socket"])
    if key not in _open:
        _open[key] = Weights(*key)
    weights = _open[key]
    found = weights.acquire(wanted["number"], wanted["step"], wanted["wait"], exchange)
    number, step = found.number, found.step
    try:
        how = _load(model, found, wanted, (*key, wanted["names"]))
        del found
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # copies may still read the generation
    except BaseException:
        weights.close()
        del _open[key]
        raise
    try:
        weights.release()
    except InUse as error:
        raise RuntimeError(f"the model keeps tensors that it was given ({error}): say copy=True in "
                           "the request") from error
    log.info("%s generation %d (step %d) of '%s'", how, number, step, weights.publication)


def _load(model: Any, found: Generation, wanted: dict[str, Any], source: tuple[Any, ...]) -> str:
    """@source: the origin of @found. Return: what was done, for the log."""
    held = _held.pop(model, None)  # after a failure no delta can be applied
    if wanted["patches"] and held is not None and held.source == source:
        done = _patch(model, found, held, wanted)
        if done:
            held.note(model, found.number)
            _held[model] = held
            return done
    is_own = wanted["names"] == "parameters"
    if is_own:
        copy_parameters(model, found, wanted["complete"])
    else:
        model.load_weights(tensors(found, wanted["copy"]))
    # post_load_weights changes the loaded values
    if wanted["patches"] and not hasattr(model, "post_load_weights"):
        held = Taken(source, set(found) if is_own else _plain(model, found))
        held.note(model, found.number)
        _held[model] = held
    return "loaded"


def _plain(model: Any, found: Generation) -> set[str]:
    """Names of the tensors whose values are unchanged in the parameter with the same name. The
    model's loader joins, cuts or converts the others."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_there(name: str, seen: Any) -> bool:
        to = parameters.get(name)
        return (to is not None and to.shape == seen.shape and to.is_contiguous()
                and bool((bits(to) == bits(seen.to(to.device, to.dtype))).all()))

    return {name for name, seen in tensors(found) if is_there(name, seen)}


def _patch(model: Any, found: Generation, held: Taken, wanted: dict[str, Any]) -> str:
    """Write the changes. A changed tensor that is not in ``held.plain`` is loaded as a whole.
    Return: what was done; "": the whole of @found must be loaded."""
    changes = held.changes(model, found, True)
    if changes is None:
        return ""
    here = [change for change in changes if change.name in held.plain]
    others = {change.name for change in changes} - held.plain
    try:
        patch_parameters(model, here)
        if others:
            model.load_weights((name, seen) for name, seen in tensors(found, wanted["copy"])
                               if name in others)
    except Exception as error:
        log.warning("patches of generation %d failed (%s: %s): all of it is loaded", found.number,
                    type(error).__name__, error)
        return ""
    written = sum(len(change.indices) for change in here)
    return f"wrote {written} values and loaded {len(others)} tensors of"


__all__ = ["LOADER", "http_request", "load_weights", "named_tensors", "update"]
