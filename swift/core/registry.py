"""A named collection that plugins add to and that answers a wrong name with the nearest right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from swift.core.errors import UsageError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects of one kind.

    >>> schedules: Registry[Callable] = Registry("learning-rate schedule")
    >>> @schedules.register("constant")
    ... def constant(step): return 1.0
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an object under `name`; a name can be taken once."""

        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"the {self.kind} {name!r} is registered already")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise UsageError(
                f"there is no {self.kind} called {name!r}",
                fix=" ".join(
                    filter(None, [did_you_mean(name, self._items), "known: " + ", ".join(sorted(self._items))])
                ),
            )
        return self._items[name]

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)
