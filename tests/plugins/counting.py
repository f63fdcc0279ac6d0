"""An expert computation outside the package, in one file: the reference, which says how often it was called."""

from __future__ import annotations

from typing import Any, ClassVar

from carpool.experts import ExpertFunction, ReferenceExperts, register


@register
class Counting(ReferenceExperts):
    name = "counting"
    options = ("label",)
    calls: ClassVar[list[str]] = []

    def __init__(self, function: ExpertFunction, label: str = "") -> None:
        super().__init__(function)
        self.label = label

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.calls.append(f"forward{self.label}")
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("backward")
        return super().backward(*args, **kwargs)
