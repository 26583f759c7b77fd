"""What PyTorch's ops are in a fused graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from warpsmith._fuse.writer import Dim, Operand, Refused, Writer, dim_of, dims_of, plain, tensor_of, value_of

#: By the op's full name: adds its nodes; takes the op's arguments in the order of its schema. Returns the result's
#: name, or an operand where the shape is not simply that of PyTorch's result, or a tuple of them.
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}

#: Ops that cost nothing: they count as no work that is saved.
FREE = {
    "aten.alias.default",
    "aten.detach.default",
    "aten.expand.default",
    "aten.full.default",
    "aten.permute.default",
    "aten.scalar_tensor.default",
    "aten.transpose.int",
    "aten.unsqueeze.default",
}
#: Of those, the ones whose results are views. They are fused only where nothing outside needs them.
VIEWS = FREE - {"aten.full.default", "aten.scalar_tensor.default"}
#: Ops that give dimensions another order.
MOVES = {"aten.permute.default", "aten.transpose.int"}
#: Ops that may take tensors whose dimensions have another order than the graph's, as long as the last stays. They
#: compute each element, or each row, by itself.
ALIGNED: set[str] = set()


class Context:
    """A node that is being lowered."""

    def __init__(self, writer: Writer, node: fx.Node) -> None:
        self.writer = writer
        self.node = node
        self.op = writer.op

    @property
    def result(self) -> torch.Tensor:
        return tensor_of(self.node)

    def size(self, dims: Sequence[Dim]) -> Any:
        """The number of elements of a shape."""
        count = 1
        for dim in dims:
            if isinstance(dim, str):
                return self.op("size", shape=dims)
            count *= dim
        return float(count)


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[f"aten.{name}"] = function
        return function

    return register


def lower(writer: Writer, node: fx.Node) -> None:
    """Adds a node of PyTorch's graph to the fused one, or raises :class:`Refused`."""
    name = str(node.target)
    if name == "<built-in function getitem>":
        source, index = node.args
        several = writer.known(source) if isinstance(source, fx.Node) else None
        if not isinstance(several, tuple) or not isinstance(index, int):
            raise Refused("takes a part of what is not fused")
        writer.put(node, several[index])
        return
    source = writer.known(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if isinstance(source, Operand) and restores(node, source.dropped):
        whole = Operand(source.name, source.shape, source.dtype, plain(source.rank))
        writer.put(node, _settled(writer, whole, tensor_of(node), plain(source.rank)))
        return
    if name in MOVES:
        writer.put(node, _moved(writer, node))
        return
    function = RULES.get(name)
    if function is None:
        raise Refused("has no rule")
    context = Context(writer, node)
    arguments = _arguments(writer, node)
    dims = _order_of(arguments)
    if dims is not None:
        if name not in ALIGNED:
            raise Refused("takes what was transposed")
        arguments = [_aligned(writer, node, at, argument, dims) for at, argument in enumerate(arguments)]
    result = function(context, *arguments)
    value = value_of(node)
    if isinstance(result, tuple):
        several = tuple(_settled(writer, one, of, dims) for one, of in zip(result, value, strict=True))
        writer.put(node, several)
    else:
        writer.put(node, _settled(writer, result, tensor_of(node), dims))


def order_after(node: fx.Node) -> tuple[int, ...]:
    """Of an op of :data:`MOVES`, the dimension that each of its result's was."""
    rank = value_of(node).ndim
    if str(node.target) == "aten.permute.default":
        order = tuple(int(dim) % rank for dim in node.args[1])  # type: ignore[union-attr, arg-type]
    else:
        a, b = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
        order = tuple(b if dim == a else a if dim == b else dim for dim in range(rank))
    return order


def _moved(writer: Writer, node: fx.Node) -> Operand:
    order, source = order_after(node), node.args[0]
    assert isinstance(source, fx.Node)
    if order[-1] != len(order) - 1:
        raise Refused("moves the last dimension")
    known = writer.known(source)
    if known is None:
        # Seen in that order by the graph, an input costs nothing.
        return writer.input(source, order)
    operand = writer.operand(source)
    return Operand(operand.name, operand.shape, operand.dtype, tuple(operand.dims[dim] for dim in order))


def _order_of(arguments: list[Any]) -> tuple[int, ...] | None:
    """The order of the graph's dimensions in tensors that were transposed."""
    moved = [argument.dims for argument in arguments if isinstance(argument, Operand) and argument.is_moved]
    return max(moved, key=len, default=None)


def _aligned(writer: Writer, node: fx.Node, at: int, argument: Any, dims: tuple[int, ...]) -> Any:
    """An argument with its dimensions where those of a transposed tensor are."""
    if not isinstance(argument, Operand) or argument.dims == dims or argument.rank == 0:
        return argument
    source = node.args[at] if at < len(node.args) else None
    if not isinstance(source, fx.Node) or not writer.is_input(argument) or argument.is_moved:
        raise Refused("combines tensors whose dimensions have different orders")
    ahead = len(dims) - value_of(source).ndim
    if ahead < 0:
        raise Refused("combines what was transposed with more dimensions")
    seen: list[int | None] = [None] * len(dims)
    for dim, place in enumerate(dims):
        seen[place] = dim - ahead if dim >= ahead else None
    return writer.input(source, tuple(seen))


def _settled(
    writer: Writer, result: str | Operand | None, value: Any, dims: tuple[int, ...] | None = None
) -> Operand | None:
    """A result in the type that PyTorch gives it, under a name of its own."""
    if result is None or value is None:
        return None
    writer.settle(value.device)
    name = writer.op("cast", result, dtype=value.dtype)
    if isinstance(result, Operand):
        return Operand(name, result.shape, value.dtype, result.dims)
    if dims is None:
        return Operand(name, dims_of(value), value.dtype, plain(value.ndim))
    sizes = dims_of(value)
    return Operand(name, tuple(sizes[dims.index(place)] for place in range(len(dims))), value.dtype, dims)


def _arguments(writer: Writer, node: fx.Node) -> list[Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    values = []
    for at, parameter in enumerate(schema.arguments):
        if at < len(node.args):
            value: Any = node.args[at]
        else:
            value = node.kwargs.get(parameter.name, parameter.default_value)
        values.append(_argument(writer, value))
    return values


def _argument(writer: Writer, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    known = value_of(value)
    if isinstance(known, torch.SymInt):
        dim = dim_of(known)
        return dim if isinstance(dim, int) else Operand(writer.op("size", shape=[dim]), (), torch.float32, ())
    if isinstance(known, (int, float, bool)) and not isinstance(known, torch.SymFloat):
        return known
    return writer.operand(value)


def _last(x: Operand, dim: int) -> None:
    if x.rank == 0 or x.dims[dim] != x.rank - 1:
        raise Refused("works along another dimension than the last")


# One or two elements at a time.

UNARY = (
    "neg abs sign relu floor ceil trunc exp log log1p sqrt rsqrt reciprocal tanh sigmoid silu mish erf erfc sin cos "
    "isnan"
).split()
BINARY = "mul div maximum minimum lt le gt ge eq ne".split()
SYMBOLS = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}


def _unary(op: str) -> Rule:
    return lambda c, x: c.op(op, x)


def _binary(op: str) -> Rule:
    return lambda c, a, b: c.op(op, _number(c, a, b), _number(c, b, a))


def _number(c: Context, x: Any, other: Any) -> Any:
    """Symbolic sizes are floats in fused graphs, which is only right beside floats."""
    if isinstance(x, Operand) and x.name.startswith("t") and x.shape == () and isinstance(other, Operand):
        sized = any(node["name"] == x.name and node["op"] == "size" for node in c.writer.nodes)
        if sized and not other.dtype.is_floating_point:
            raise Refused("combines a symbolic size with whole numbers")
    return x


for _name in UNARY:
    rule(f"{_name}.default")(_unary(_name))
for _name in BINARY:
    rule(f"{_name}.Tensor", f"{_name}.Scalar", f"{_name}.default")(_binary(_name))
rule("round.default")(_unary("round"))
# Of real numbers, and fused graphs have no others.
rule("sgn.default")(_unary("sign"))
rule("logical_not.default")(_unary("not"))
rule("detach.default")(_unary("detach"))
rule("alias.default")(lambda c, x: x)


def _logical(op: str) -> Rule:
    def build(c: Context, a: Any, b: Any) -> str:
        operands = [x for x in (a, b) if isinstance(x, Operand)]
        if any(x.dtype is not torch.bool for x in operands):
            raise Refused("is fused for bools only")
        name: str = c.op(op, a, b)
        return name

    return build


for _name, _op in SYMBOLS.items():
    rule(f"{_name}.Tensor", f"{_name}.Scalar")(_logical(_op))
    rule(f"logical_{_op}.default")(_logical(_op))


@rule("bitwise_not.default")
def _not(c: Context, x: Operand) -> str:
    if x.dtype is not torch.bool:
        raise Refused("is fused for bools only")
    return c.op("not", x)


@rule("add.Tensor", "add.Scalar")
def _add(c: Context, a: Any, b: Any, alpha: Any) -> str:
    return c.op("add", _number(c, a, b), _scaled(c, _number(c, b, a), alpha))


@rule("sub.Tensor", "sub.Scalar")
def _sub(c: Context, a: Any, b: Any, alpha: Any) -> str:
    return c.op("sub", _number(c, a, b), _scaled(c, _number(c, b, a), alpha))


@rule("rsub.Tensor", "rsub.Scalar")
def _rsub(c: Context, a: Any, b: Any, alpha: Any) -> str:
    return c.op("sub", _number(c, b, a), _scaled(c, a, alpha))


def _scaled(c: Context, x: Any, alpha: Any) -> Any:
    if alpha == 1 and not isinstance(alpha, bool):
        return x
    if isinstance(x, Operand) and x.dtype is torch.bool:
        raise Refused("scales bools")
    return c.op("mul", x, alpha)


@rule("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(c: Context, a: Any, b: Any) -> str:
    if not c.result.is_floating_point() and b not in (1, 2, 3, 4):
        raise Refused("is a power of whole numbers")
    return c.op("pow", a, b)


@rule("gelu.default")
def _gelu(c: Context, x: Operand, approximate: str) -> str:
    return c.op("gelu" if approximate == "none" else "gelu_tanh", x)


@rule("softplus.default")
def _softplus(c: Context, x: Operand, beta: float, threshold: float) -> str:
    if (beta, threshold) != (1, 20):
        raise Refused("is fused with beta 1 and threshold 20 only")
    return c.op("softplus", x)


@rule("clamp.default", "clamp.Tensor")
def _clamp(c: Context, x: Operand, low: Any, high: Any) -> Any:
    result: Any = x
    if low is not None:
        result = c.op("maximum", result, low)
    return result if high is None else c.op("minimum", result, high)


@rule("clamp_min.default", "clamp_min.Tensor")
def _clamp_min(c: Context, x: Operand, low: Any) -> Any:
    return _clamp(c, x, low, None)


@rule("clamp_max.default", "clamp_max.Tensor")
def _clamp_max(c: Context, x: Operand, high: Any) -> Any:
    return _clamp(c, x, None, high)


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Context, condition: Operand, a: Any, b: Any) -> str:
    if condition.dtype is not torch.bool:
        raise Refused("has a condition that is no bool")
    return c.op("where", condition, a, b)


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Context, x: Operand, mask: Operand, value: Any) -> str:
    # A number beyond the type's range would be another one if it met the type as a wider one.
    return c.op("where", mask, c.op("cast", value, dtype=x.dtype), x)


# Other types, shapes and constants.


@rule("_to_copy.default")
def _to_copy(c: Context, x: Operand, *settings: Any) -> str:
    return c.op("cast", x, dtype=c.result.dtype)


def _convert(c: Context, x: Operand, dtype: torch.dtype) -> str:
    return c.op("cast", x, dtype=dtype)


RULES["prims.convert_element_type.default"] = _convert


@rule("clone.default")
def _clone(c: Context, x: Operand, memory_format: Any) -> Operand:
    return x


@rule("copy.default")
def _copy(c: Context, x: Operand, source: Operand, non_blocking: bool) -> str:
    return c.op("expand", c.op("cast", source, dtype=x.dtype), shape=x.shape)


@rule("expand.default")
def _expand(c: Context, x: Operand, size: Any, implicit: bool) -> str:
    return c.op("expand", x, shape=dims_of(c.result))


@rule("full.default", "scalar_tensor.default", "full_like.default")
def _full(c: Context, *arguments: Any) -> str:
    value = arguments[0] if c.node.target is torch.ops.aten.scalar_tensor.default else arguments[1]
    if not isinstance(value, (bool, int, float)):
        raise Refused("is filled with a symbolic number")
    return _filled(c, value)


@rule("zeros_like.default", "zeros.default")
def _zeros(c: Context, *arguments: Any) -> str:
    return _filled(c, 0)


@rule("ones_like.default", "ones.default")
def _ones(c: Context, *arguments: Any) -> str:
    return _filled(c, 1)


def _filled(c: Context, value: Any) -> str:
    result = c.result
    name = c.op("cast", value, dtype=result.dtype)
    return c.op("expand", name, shape=dims_of(result)) if result.ndim else name


# Along the last dimension.


def _reduced(c: Context, op: str, x: Operand, dims: Any, keepdim: bool) -> Operand:
    if x.rank == 0:
        raise Refused("reduces a tensor without dimensions")
    along = sorted({x.dims[dim] for dim in (dims or range(x.rank))})
    kept = tuple(1 if dim in along else size for dim, size in enumerate(x.shape))
    left = x.dims if keepdim else tuple(dim for dim in x.dims if dim not in along)
    if along == [x.rank - 1]:
        return Operand(c.op(op, x), kept, x.dtype, left)
    if op not in ("sum", "mean") or not x.dtype.is_floating_point:
        raise Refused("reduces other dimensions than the last")
    # What is in front can be left out; what is between stays with size 1.
    shape = kept
    if along == list(range(len(along))) and not keepdim:
        shape, left = x.shape[len(along) :], tuple(dim - len(along) for dim in left)
    total = c.op("sum_to", x, shape=shape)
    if op == "mean":
        total = c.op("div", total, c.size([x.shape[dim] for dim in along]))
    return Operand(total, shape, x.dtype, left)


@rule("sum.dim_IntList", "mean.dim")
def _sum(c: Context, x: Operand, dims: Any, keepdim: bool, dtype: Any) -> Operand:
    if dtype is not None and dtype != x.dtype:
        x = Operand(c.op("cast", x, dtype=dtype), x.shape, dtype, x.dims)
    op = "sum" if c.node.target is torch.ops.aten.sum.dim_IntList else "mean"
    return _reduced(c, op, x, dims, keepdim)


@rule("amax.default", "amin.default")
def _amax(c: Context, x: Operand, dims: Any, keepdim: bool) -> Operand:
    op = "max" if c.node.target is torch.ops.aten.amax.default else "min"
    return _reduced(c, op, x, dims, keepdim)


@rule("logsumexp.default")
def _logsumexp(c: Context, x: Operand, dims: Any, keepdim: bool) -> Operand:
    return _reduced(c, "logsumexp", x, dims, keepdim)


@rule("var.correction")
def _var(c: Context, x: Operand, dims: Any, correction: Any, keepdim: bool) -> Operand:
    result = _reduced(c, "var", x, dims, keepdim)
    correction = 1 if correction is None else correction
    if correction == 0:
        return result
    size = c.size([x.shape[-1]])
    factor = c.op("div", size, c.op("sub", size, float(correction)))
    return Operand(c.op("mul", result, factor), result.shape, x.dtype, result.dims)


def restores(node: fx.Node, dropped: tuple[int, ...]) -> bool:
    """Whether a node gives back the dimension that a reduction has dropped."""
    if str(node.target) != "aten.unsqueeze.default" or len(dropped) != 1:
        return False
    rank, dim = value_of(node).ndim, node.args[1]
    return isinstance(dim, int) and dim % rank == dropped[0]


@rule("_softmax.default", "_log_softmax.default")
def _softmax(c: Context, x: Operand, dim: int, half_to_float: bool) -> str:
    _last(x, dim)
    given: Any = c.op("cast", x, dtype=torch.float32) if half_to_float else x
    return c.op("softmax" if c.node.target is torch.ops.aten._softmax.default else "log_softmax", given)


@rule("_softmax_backward_data.default")
def _softmax_backward(c: Context, grad: Operand, y: Operand, dim: int, dtype: torch.dtype) -> str:
    _last(y, dim)
    product = c.op("mul", grad, y)
    return c.op("sub", product, c.op("mul", y, c.op("sum", product)))


@rule("_log_softmax_backward_data.default")
def _log_softmax_backward(c: Context, grad: Operand, y: Operand, dim: int, dtype: torch.dtype) -> str:
    _last(y, dim)
    return c.op("sub", grad, c.op("mul", c.op("exp", y), c.op("sum", grad)))


def _normalised(c: Context, x: Operand, shape: Any) -> None:
    if len(shape) != 1:
        raise Refused("normalises several dimensions")


@rule("native_layer_norm.default")
def _layer_norm(c: Context, x: Operand, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, ...]:
    _normalised(c, x, shape)
    wide = c.op("cast", x, dtype=torch.float32)
    mean = c.op("mean", wide)
    centred = c.op("sub", wide, mean)
    rstd = c.op("rsqrt", c.op("add", c.op("mean", c.op("square", centred)), eps))
    y = c.op("mul", centred, rstd)
    if weight is not None:
        y = c.op("mul", y, weight)
    if bias is not None:
        y = c.op("add", y, bias)
    return y, mean, rstd


@rule("native_layer_norm_backward.default")
def _layer_norm_backward(
    c: Context, grad: Operand, x: Operand, shape: Any, mean: Operand, rstd: Operand, weight: Any, bias: Any, wanted: Any
) -> tuple[Any, ...]:
    _normalised(c, x, shape)
    grad_wide = c.op("cast", grad, dtype=torch.float32)
    wide = c.op("cast", x, dtype=torch.float32)
    scaled = c.op("mul", c.op("sub", wide, mean), rstd)
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        inner = grad_wide if weight is None else c.op("mul", grad_wide, weight)
        along = c.op("mul", scaled, c.op("mean", c.op("mul", inner, scaled)))
        grad_x = c.op("mul", c.op("sub", c.op("sub", inner, c.op("mean", inner)), along), rstd)
    if wanted[1]:
        grad_weight = c.op("sum_to", c.op("mul", grad_wide, scaled), shape=x.shape[-1:])
    if wanted[2]:
        grad_bias = c.op("sum_to", grad_wide, shape=x.shape[-1:])
    return grad_x, grad_weight, grad_bias


# Rows of tables.


@rule("embedding.default")
def _embedding(c: Context, weight: Operand, ids: Operand, *settings: Any) -> str:
    name: str = c.op("gather", weight, ids)
    return name


RULES["_warpsmith.embedding.default"] = _embedding


# Derivatives.


@rule("silu_backward.default")
def _silu_backward(c: Context, grad: Operand, x: Operand) -> str:
    return c.op("mul", grad, c.op("d_silu", x))


@rule("gelu_backward.default")
def _gelu_backward(c: Context, grad: Operand, x: Operand, approximate: str) -> str:
    return c.op("mul", grad, c.op("d_gelu" if approximate == "none" else "d_gelu_tanh", x))


@rule("tanh_backward.default")
def _tanh_backward(c: Context, grad: Operand, y: Operand) -> str:
    return c.op("mul", grad, c.op("sub", 1.0, c.op("mul", y, y)))


@rule("sigmoid_backward.default")
def _sigmoid_backward(c: Context, grad: Operand, y: Operand) -> str:
    return c.op("mul", grad, c.op("mul", y, c.op("sub", 1.0, y)))


@rule("threshold_backward.default")
def _threshold_backward(c: Context, grad: Operand, x: Operand, threshold: Any) -> str:
    return c.op("where", c.op("le", x, threshold), 0.0, grad)


@rule("native_dropout_backward.default")
def _dropout_backward(c: Context, grad: Operand, mask: Operand, scale: float) -> str:
    return c.op("mul", c.op("mul", grad, mask), scale)


@rule("_fused_rms_norm.default")
def _rms_norm(c: Context, x: Operand, shape: Any, weight: Any, eps: float | None) -> tuple[Any, ...]:
    _normalised(c, x, shape)
    wide = c.op("cast", x, dtype=torch.float32)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = c.op("rsqrt", c.op("add", c.op("mean", c.op("square", wide)), eps))
    y = c.op("mul", wide, rstd)
    return y if weight is None else c.op("mul", y, weight), rstd


@rule("_fused_rms_norm_backward.default")
def _rms_norm_backward(
    c: Context, grad: Operand, x: Operand, shape: Any, rstd: Operand, weight: Any, wanted: Any
) -> tuple[Any, ...]:
    _normalised(c, x, shape)
    grad_wide = c.op("cast", grad, dtype=torch.float32)
    scaled = c.op("mul", c.op("cast", x, dtype=torch.float32), rstd)
    grad_x = grad_weight = None
    if wanted[0]:
        inner = grad_wide if weight is None else c.op("mul", grad_wide, weight)
        along = c.op("mul", scaled, c.op("mean", c.op("mul", inner, scaled)))
        grad_x = c.op("mul", c.op("sub", inner, along), rstd)
    if wanted[1] and weight is not None:
        grad_weight = c.op("sum_to", c.op("mul", grad_wide, scaled), shape=x.shape[-1:])
    return grad_x, grad_weight


# Rotary positions, which patterns before the gradients made one op of.


def _rotate_half(c: Context, x: Operand) -> str:
    name: str = c.op("rotate_half", x)
    return name


RULES["_warpsmith_fuse.rotate_half.default"] = _rotate_half


# What takes elements or rows one by one takes them in any order of the dimensions ahead.

_ALIGNED = (
    "add.Scalar add.Tensor clone.default div.Scalar div.Tensor gelu.default gelu_backward.default mean.dim mul.Scalar "
    "mul.Tensor pow.Tensor_Scalar sigmoid_backward.default silu_backward.default sub.Scalar sub.Tensor "
    "sum.dim_IntList tanh_backward.default where.ScalarOther where.ScalarSelf where.self _to_copy.default"
).split()
ALIGNED |= {f"aten.{_name}" for _name in _ALIGNED} | {f"aten.{_name}.default" for _name in UNARY}
ALIGNED.add("_warpsmith_fuse.rotate_half.default")
