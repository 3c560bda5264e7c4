"""Is PyTorch there, and new enough? Imported before what uses it."""

from __future__ import annotations

_NEEDED = "shardd.torch needs PyTorch 2.13 or newer"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(f"{_NEEDED}, which is not installed: pip install torch",
                              name="torch") from None

if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
    raise ImportError(f"{_NEEDED}, and this is {torch.__version__}: pip install --upgrade torch",
                      name="torch")
