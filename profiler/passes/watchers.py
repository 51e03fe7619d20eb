"""Several watchers of one pass."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Watcher(Protocol):
    """What a pass tells: where it is, forwards and, as gradients arrive, backwards."""

    def before(self, index: int, given: Any) -> None:
        """Layer `index` runs next, on `given`."""

    def after(self, index: int, output: Any) -> None:
        """Layer `index` has run."""

    def backward_starts(self) -> None: ...

    def gradient(self, index: int, gradient: Tensor) -> None:
        """The gradient of layer `index`'s output is complete; the layer's own backward comes next."""

    def backward_ends(self) -> None: ...


class Together:
    """Tells several watchers of the same pass, each in the order given."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def before(self, index: int, given: Any) -> None:
        for watcher in self._watchers:
            watcher.before(index, given)

    def after(self, index: int, output: Any) -> None:
        for watcher in self._watchers:
            watcher.after(index, output)

    def backward_starts(self) -> None:
        for watcher in self._watchers:
            watcher.backward_starts()

    def gradient(self, index: int, gradient: Tensor) -> None:
        for watcher in self._watchers:
            watcher.gradient(index, gradient)

    def backward_ends(self) -> None:
        for watcher in self._watchers:
            watcher.backward_ends()
