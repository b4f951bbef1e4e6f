"""Makes the backend known to Dynamo by its name where the package is on the path, but not installed.

An installed package is found by its entry point, without an import. A checkout has none, so importing the package puts
the name into Dynamo's registry: at once if there is one already, otherwise when Dynamo is first imported. Until then
nothing but a finder waits for it, since importing this package must not import Dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from types import ModuleType

GROUP, NAME, VALUE = "torch_dynamo_backends", "dsv4_piecewise", "dsv4_compile.backend:dsv4_piecewise"
_REGISTRY = "torch._dynamo.backends.registry"


def register_backend_name() -> None:
    """Let `torch.compile(model, backend="dsv4_piecewise")` find the backend; it is imported when it is first used."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _add_name(registry)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _add_name(registry: ModuleType) -> None:
    # what an entry point becomes there; that of an installed package takes its place, which is the same
    registry._BACKENDS.setdefault(NAME, EntryPoint(NAME, VALUE, GROUP))


class _Waiting(MetaPathFinder):
    """Waits for Dynamo's registry to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AddsName(spec.loader)
        return spec


class _AddsName(Loader):
    """Loads the registry as it would be, and adds the name."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "it is being imported by its spec"
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _add_name(module)
