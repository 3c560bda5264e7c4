"""A buffer of a session."""

from __future__ import annotations

from ._session import Session
from .memory import Memory


class Buffer:
    """A buffer of this session, for init, all_reduce and broadcast. ``memory``: its bytes as
    elements of the requested type. A context manager: freed at the end."""

    def __init__(self, client: Session, number: int, memory: Memory) -> None:
        self._client, self.id, self.memory = client, number, memory

    def free(self) -> None:
        """Free it. InUse: something still uses it. Calling this twice is allowed."""
        if not self.memory.released:
            self.memory._mapped.end()
            self._client.do("free", self.id)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
