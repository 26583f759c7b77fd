"""The ops as functions, made from their descriptions when the package is imported.

They take tensors of PyTorch, arrays of numpy, and whatever else speaks DLPack. An op that may work in place has a
second function, whose name ends with an underscore.
"""

from __future__ import annotations

from warpsmith._functions import functions
from warpsmith._spec import all_ops

try:
    import torch as _torch_library
except ImportError:
    _torch = None
else:
    del _torch_library
    from warpsmith._torch import register

    _torch = register()

__all__: list[str] = []

for _op in all_ops().values():
    for _name, _function in functions(_op, _torch).items():
        globals()[_name] = _function
        __all__.append(_name)
del _op, _name, _function
