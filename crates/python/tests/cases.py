"""A small call of every op, made from its description.

Ops whose numbers mean something (positions, pages, lists of starts) say what theirs are; the others get random
values. A new op needs a line here only if zeros are no good for its whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from warpsmith._shapes import Sizes, apply, output_type
from warpsmith._spec import Op, Variant, all_ops
from warpsmith._torch.dtypes import BY_NAME

SIZES = {
    "hidden": 8, "num_tokens": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab": 11, "k": 8, "rows": 6,
    "cols": 5, "batch": 2, "q_len": 5, "kv_len": 7, "page_size": 4, "num_pages": 6, "max_pages": 3, "requests": 3,
    "max_pos": 16, "num_pairs": 2, "num_parts": 3, "num_slots": 4, "total": 8, "n": 6, "rotary_dim": 32, "levels": 1,
    "groups": 1, "columns": 11, "slots": 2, "heads": 8, "experts": 5, "top_k": 2, "shared_rows": 4, "x_rows": 6,
    "w_rows": 6, "index_rows": 6,
}  # fmt: skip
LEADING = [3]


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def q8_0(weights: torch.Tensor) -> torch.Tensor:
    """Weights ``[rows, blocks, 32]`` as the bytes of GGUF's q8_0 with scales of 1."""
    scales = torch.ones(*weights.shape[:2], 1, dtype=torch.float16).view(torch.uint8)
    return torch.cat((scales, weights.to(torch.int8).view(torch.uint8)), -1).flatten(1)


#: Values of arguments, by op and argument.
VALUES: dict[str, dict[str, Callable[[], torch.Tensor]]] = {
    "rope": {"positions": lambda: torch.randint(0, 16, (3, 6))},
    "rope_backward": {"positions": lambda: torch.randint(0, 16, (3, 6))},
    "qk_norm_rope": {"positions": lambda: torch.randint(0, 16, (3, 6))},
    "embedding": {"ids": lambda: torch.randint(0, 11, (3,))},
    "embedding_backward": {"ids": lambda: torch.randint(0, 11, (3,))},
    "cross_entropy": {"targets": lambda: torch.tensor([10, 0, 4])},
    "cross_entropy_backward": {"targets": lambda: torch.tensor([10, -100, 4])},
    "linear_cross_entropy": {"targets": lambda: torch.tensor([10, 0, 4])},
    "kl_div": {"targets": lambda: torch.tensor([-100, 0, 400])},
    "kl_div_backward": {"targets": lambda: torch.tensor([-100, 0, 400])},
    "kv_store": {"slots": lambda: torch.tensor([0, 5, -1, 23, 7, 8])},
    "qkv_store": {
        "slots": lambda: torch.tensor([0, 5, -1, 23, 7, 8]),
        "positions": lambda: torch.tensor([0, 5, 1, 15, 7, 8]),
    },
    "grouped_linear": {"counts": lambda: i32([6])},
    "grouped_linear_backward": {"counts": lambda: i32([6])},
    **{
        op: {"ids": lambda: i32([[0, 3], [4, 1], [2, 3]])}
        for op in ("moe_ffn", "moe_ffn_backward", "moe_route_backward")
    },
    "moe_losses": {"ids": lambda: i32([[0, 3], [4, 1], [2, 3]])},
    "kv_copy": {"pairs": lambda: torch.tensor([[0, 3], [1, -1]])},
    "merge_states": {"lses": lambda: torch.randn(3, 6, 4)},
    "paged_attention": {
        "q": lambda: torch.randn(3, 4, 32),
        "page_table": lambda: i32([[0, 1, 2], [3, 4, 5], [5, 0, 0]]),
        "kv_lens": lambda: i32([9, 12, 2]),
    },
    "penalize": {
        "ids": lambda: i32([[0, 3], [1, -1], [10, 4], [2, 0], [5, 6], [-1, 7]]),
        "counts": lambda: i32([[1, 0], [2, -1], [0, 3], [1, 1], [-1, 4], [0, 0]]),
        "repetition": lambda: torch.full((6,), 1.25),
    },
    "sample": {
        "seed": lambda: torch.arange(6),
        "temperature": lambda: torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 0.7]),
        "top_k": lambda: i32([0, 1, 3, 5, 0, 11]),
        "top_p": lambda: torch.linspace(0.1, 1.0, 6),
        "min_p": lambda: torch.full((6,), 0.05),
    },
    # Rows of two blocks of 32 weights: a scale of 1 and whole numbers.
    "linear_quant": {"x": lambda: torch.randn(3, 64), "w": lambda: q8_0(torch.randint(-8, 8, (6, 2, 32)))},
    "prefix_match": {"starts": lambda: i32([0, 5, 8]), "table": lambda: torch.full((4, 4), -1, dtype=torch.int32)},
}

#: Options that are not their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "embedding_backward": {"vocab": 11},
    "prefix_match": {"max_pages": 3},
    "linear_quant": {"format": "q8_0"},
}


class Case:
    """Arguments of a call."""

    def __init__(self, op: Op, variant: Variant, tensors: list[torch.Tensor | None], options: dict[str, Any]) -> None:
        self.op, self.variant, self.tensors, self.options = op, variant, tensors, options

    def __iter__(self) -> Any:
        return iter((self.tensors, self.options))

    def named(self) -> dict[str, torch.Tensor | None]:
        return {self.op.args[given.arg].name: t for given, t in zip(self.variant.tensors, self.tensors, strict=True)}


def shape(op: Op, index: int, options: list[Any]) -> list[int]:
    sizes = Sizes(op, options, lambda *_: None)
    form = sizes.forms(op.args[index])[-1]
    sizes.sizes = {name: size for name, size in SIZES.items() if name not in op.derived}
    rest = [dim.size if dim.kind == "number" else apply(dim, sizes.lookup(dim.name)) for dim in form.dims]
    return [*(LEADING if form.leading == "rows" else []), *rest]


def make(op: Op, variant: Variant, *, optional: bool = False, dtype: str = "f32") -> Case:
    """A call; with ``optional``, all optional arguments are given and all outputs asked for."""
    torch.manual_seed(0)
    options = [OPTIONS.get(op.name, {}).get(attr.name, attr.default) for attr in op.attrs]
    types: list[str | None] = [None] * len(op.args)
    tensors: list[torch.Tensor | None] = []
    for index, arg in enumerate(op.args):
        types[index] = dtype if arg.dtype.kind == "one_of" and dtype in arg.dtype.types else None
    for index in range(len(op.args)):
        if types[index] is None:
            types[index] = output_type(op, index, types, options)
    for given in variant.tensors:
        arg = op.args[given.arg]
        if given.optional and not optional:
            tensors.append(None)
            continue
        value = VALUES.get(op.name, {}).get(arg.name)
        torch_type = BY_NAME[types[given.arg] or dtype]
        if value is not None:
            tensors.append(value() if not torch_type.is_floating_point else value().to(torch_type))
        elif torch_type.is_floating_point:
            tensors.append(torch.randn(shape(op, given.arg, options)).to(torch_type))
        else:
            tensors.append(torch.zeros(shape(op, given.arg, options), dtype=torch_type))
    switches = dict.fromkeys(variant.wanted.values(), optional or op.name.endswith("_backward"))
    if op.name == "attention_backward" and not optional:
        switches = dict.fromkeys(switches, False)  # Those are gradients of optional inputs.
    if op.name == "moe_ffn_backward" and not optional:
        missing = ("return_db1", "return_db2", "return_dshared_w1", "return_dshared_w2")
        switches |= {name: False for name in missing if name in switches}
    named = {attr.name: value for attr, value in zip(op.attrs, options, strict=True)}
    return Case(op, variant, tensors, named | switches)


def with_gradient(op: Op, *, optional: bool = False, dtype: str = "f32") -> Case:
    """A call that has a gradient: as :func:`make`, without the arguments with which there is none."""
    assert op.gradient is not None
    case = make(op, op.variants[0], optional=optional, dtype=dtype)
    for at, given in enumerate(case.variant.tensors):
        only_for_results = op.args[given.arg].optional and op.name in ("linear", "grouped_linear")
        if given.arg in op.gradient.without or (only_for_results and given.arg not in op.gradient.results):
            case.tensors[at] = None
    return case


def returned(found: Any) -> list[torch.Tensor]:
    """All that a call returned: one tensor, or those that were asked for."""
    return [one for one in (found if isinstance(found, tuple) else (found,)) if one is not None]


def assert_all_close(found: Any, expected: Any, tolerance: float) -> None:
    """Whether two calls returned the same: real numbers but for a tolerance, whole numbers exactly."""
    ones, others = returned(found), returned(expected)
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(one.long(), other.long())


ALL = [(op, variant) for op in all_ops().values() for variant in op.variants]
IDS = [variant.name for _, variant in ALL]
#: Ops whose optional arguments do not all go together.
EXCLUSIVE = ("linear", "grouped_linear", "paged_attention", "attention", "attention_backward", "kv_store", "qkv_store")
