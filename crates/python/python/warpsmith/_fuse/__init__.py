"""Fusion: functions and models whose chains of small ops become single kernels."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from warpsmith._fuse.function import FusedFunction, fuse
from warpsmith._fuse.fuser import FusedKernel, FusionPlan, GraphPlan, OperatorFuser

__all__ = ["FusedFunction", "FusedKernel", "FusionPlan", "GraphPlan", "OperatorFuser", "fuse", "register_backend"]

_REGISTRY = "torch._dynamo.backends.registry"


class _WhenImported(MetaPathFinder):
    """Registers the backend when PyTorch's registry is imported, which takes seconds and may never be needed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(registry: ModuleType) -> None:
    from warpsmith._fuse.backend import compile_backend

    if "warpsmith" not in registry._COMPILER_FNS:
        registry.register_backend(compile_backend, name="warpsmith")


def register_backend() -> None:
    """Makes ``torch.compile(..., backend="warpsmith")`` known, now or as soon as PyTorch can be told. Where the
    package is installed, its entry point does that; trees of its sources have none.
    """
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _register(registry)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())
