"""Imported before PyTorch: ``--help`` of a script needs nothing but Python."""

import sys
from unittest.mock import MagicMock

if {"-h", "--help"} & set(sys.argv[1:]):
    for _name in ("llama_cpp", "numpy", "torch", "torch.nn", "torch.nn.functional"):
        sys.modules[_name] = MagicMock()
