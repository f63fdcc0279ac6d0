"""An expert computation outside the package, in one file: the reference, which says how often it was called."""

from __future__ import annotations

from typing import Any, ClassVar

from carpool.experts import ReferenceExperts, register


@register
class Counting(ReferenceExperts):
    name = "counting"
    calls: ClassVar[list[str]] = []

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.calls.append("forward")
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("backward")
        return super().backward(*args, **kwargs)
