# Made by crates/python/stubs.py from the ops' descriptions.
"""The ops as functions."""

from typing import Any, Literal, Protocol, TypeVar, overload

import numpy.typing
import torch

from warpsmith._native import Tensor
from warpsmith._torch import Torch

class Array(Protocol):
    """An array of any library that speaks DLPack."""

    def __dlpack__(self) -> Any: ...

#: Tensors of PyTorch give tensors of PyTorch, arrays of numpy arrays of numpy.
Same = TypeVar("Same", torch.Tensor, numpy.typing.NDArray[Any], Tensor)

_torch: Torch | None
__all__ = [
    "rms_norm",
    "rms_norm_",
    "rms_norm_backward",
    "layer_norm",
    "layer_norm_",
    "layer_norm_backward",
    "softmax",
    "softmax_",
    "softmax_backward",
    "softmax_backward_",
    "rope",
    "rope_",
    "rope_backward",
    "rope_backward_",
    "qk_norm_rope",
    "qk_norm_rope_",
    "cast",
    "cast_",
    "copy",
    "activation",
    "activation_",
    "activation_backward",
    "activation_backward_",
    "add_gelu",
    "add_gelu_",
    "add_gelu_backward",
    "mul_add",
    "mul_add_",
    "mul_add_backward",
    "gated_act",
    "gated_act_backward",
    "gated_act_backward_",
    "embedding",
    "embedding_backward",
    "linear",
    "linear_",
    "linear_backward",
    "linear_quant",
    "linear_quant_",
    "grouped_linear",
    "grouped_linear_",
    "grouped_linear_backward",
    "moe_ffn",
    "moe_ffn_",
    "moe_ffn_backward",
    "argmax",
    "sample",
    "penalize",
    "prefix_match",
    "kv_store",
    "qkv_store",
    "kv_copy",
    "merge_states",
    "attention",
    "attention_backward",
    "paged_attention",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_backward_",
    "kl_div",
    "kl_div_backward",
    "kl_div_backward_",
    "moe_route",
    "moe_route_backward",
    "moe_losses",
    "moe_losses_backward",
    "moe_losses_backward_",
]

@overload
def rms_norm(x: Same, weight: Same | None = None, residual: None = None, *, eps: float = 1e-06) -> Same:
    """RMS normalisation of rows, with an optional residual added first.

    x: [..., hidden]
    weight: [hidden], multiplies the normalised row
    residual: [..., hidden], added to x first
    eps: added to the mean square

    Returns:
    out: [..., hidden]
    sum: [..., hidden], x + residual
    """
@overload
def rms_norm(x: Same, weight: Same | None = None, *, residual: Same, eps: float = 1e-06) -> tuple[Same, Same]: ...
@overload
def rms_norm(x: Same, weight: Same | None, residual: Same, *, eps: float = 1e-06) -> tuple[Same, Same]: ...
@overload
def rms_norm(x: Array, weight: Array | None = None, residual: Array | None = None, *, eps: float = 1e-06) -> Any: ...

def rms_norm_(x: Array, weight: Array | None = None, residual: Array | None = None, *, eps: float = 1e-06) -> None:
    """RMS normalisation of rows, with an optional residual added first, in place.

    x: [..., hidden]; becomes out
    weight: [hidden], multiplies the normalised row
    residual: [..., hidden], added to x first; becomes sum
    eps: added to the mean square
    """

@overload
def rms_norm_backward(x: Same, dout: Same, weight: Same | None = None, dsum: Same | None = None, *, eps: float = 1e-06, return_dweight: Literal[False] = False) -> Same:
    """Gradients of rms_norm with respect to x (and residual) and weight.

    x: [..., hidden], what was normalised: x, or the sum if a residual was added
    dout: [..., hidden], gradient of out
    weight: [hidden]
    dsum: [..., hidden], gradient of the sum from its other uses
    eps: as in the forward call
    return_dweight: whether to return dweight

    Returns:
    dx: [..., hidden], gradient of x and of residual
    dweight: [hidden], summed over rows in f32
    """
@overload
def rms_norm_backward(x: Same, dout: Same, weight: Same | None = None, dsum: Same | None = None, *, eps: float = 1e-06, return_dweight: Literal[True]) -> tuple[Same, Same]: ...
@overload
def rms_norm_backward(x: Array, dout: Array, weight: Array | None = None, dsum: Array | None = None, *, eps: float = 1e-06, return_dweight: bool = False) -> Any: ...

@overload
def layer_norm(x: Same, weight: Same | None = None, bias: Same | None = None, residual: None = None, *, eps: float = 1e-05) -> Same:
    """Layer normalisation of rows, with an optional residual added first.

    x: [..., hidden]
    weight: [hidden], multiplies the normalised row
    bias: [hidden], added at the end
    residual: [..., hidden], added to x first
    eps: added to the variance

    Returns:
    out: [..., hidden]
    sum: [..., hidden], x + residual
    """
@overload
def layer_norm(x: Same, weight: Same | None = None, bias: Same | None = None, *, residual: Same, eps: float = 1e-05) -> tuple[Same, Same]: ...
@overload
def layer_norm(x: Same, weight: Same | None, bias: Same | None, residual: Same, *, eps: float = 1e-05) -> tuple[Same, Same]: ...
@overload
def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, residual: Array | None = None, *, eps: float = 1e-05) -> Any: ...

def layer_norm_(x: Array, weight: Array | None = None, bias: Array | None = None, residual: Array | None = None, *, eps: float = 1e-05) -> None:
    """Layer normalisation of rows, with an optional residual added first, in place.

    x: [..., hidden]; becomes out
    weight: [hidden], multiplies the normalised row
    bias: [hidden], added at the end
    residual: [..., hidden], added to x first; becomes sum
    eps: added to the variance
    """

def layer_norm_backward(x: Array, dout: Array, weight: Array | None = None, dsum: Array | None = None, *, eps: float = 1e-05, return_dweight: bool = False, return_dbias: bool = False) -> Any:
    """Gradients of layer_norm with respect to x (and residual), weight and bias.

    x: [..., hidden], what was normalised: x, or the sum if a residual was added
    dout: [..., hidden], gradient of out
    weight: [hidden]
    dsum: [..., hidden], gradient of the sum from its other uses
    eps: as in the forward call
    return_dweight: whether to return dweight
    return_dbias: whether to return dbias

    Returns:
    dx: [..., hidden], gradient of x and of residual
    dweight: [hidden], summed over rows in f32
    dbias: [hidden], summed over rows in f32
    """

@overload
def softmax(x: Same, *, scale: float = 1.0) -> Same:
    """Softmax of scaled rows.

    x: [..., hidden]
    scale: multiplies x before the exponential

    Returns:
    out: [..., hidden], rows that sum to one
    """
@overload
def softmax(x: Array, *, scale: float = 1.0) -> Any: ...

def softmax_(x: Array, *, scale: float = 1.0) -> None:
    """Softmax of scaled rows, in place.

    x: [..., hidden]; becomes out
    scale: multiplies x before the exponential
    """

@overload
def softmax_backward(y: Same, dout: Same, *, scale: float = 1.0) -> Same:
    """Gradient of softmax with respect to x.

    y: [..., hidden], what softmax returned
    dout: [..., hidden], gradient of y
    scale: multiplies x before the exponential

    Returns:
    dx: [..., hidden], gradient of x
    """
@overload
def softmax_backward(y: Array, dout: Array, *, scale: float = 1.0) -> Any: ...

def softmax_backward_(y: Array, dout: Array, *, scale: float = 1.0) -> None:
    """Gradient of softmax with respect to x, in place.

    y: [..., hidden], what softmax returned
    dout: [..., hidden], gradient of y; becomes dx
    scale: multiplies x before the exponential
    """

@overload
def rope(x: Same, positions: Same, cos: Same | None = None, sin: Same | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0) -> Same:
    """Rotary position embedding of queries or keys.

    x: [..., num_tokens, num_heads, head_dim]
    positions: [..., num_tokens], i64 or i32
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    scale: factor on positions

    Returns:
    out: [..., num_tokens, num_heads, head_dim]
    """
@overload
def rope(x: Array, positions: Array, cos: Array | None = None, sin: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0) -> Any: ...

def rope_(x: Array, positions: Array, cos: Array | None = None, sin: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0) -> None:
    """Rotary position embedding of queries or keys, in place.

    x: [..., num_tokens, num_heads, head_dim]; becomes out
    positions: [..., num_tokens], i64 or i32
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    scale: factor on positions
    """

@overload
def rope_backward(dout: Same, positions: Same, cos: Same | None = None, sin: Same | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0) -> Same:
    """Gradient of rope with respect to x.

    dout: [..., num_tokens, num_heads, head_dim], gradient of out
    positions: [..., num_tokens], i64 or i32
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    scale: factor on positions

    Returns:
    dx: [..., num_tokens, num_heads, head_dim], gradient of x
    """
@overload
def rope_backward(dout: Array, positions: Array, cos: Array | None = None, sin: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0) -> Any: ...

def rope_backward_(dout: Array, positions: Array, cos: Array | None = None, sin: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0) -> None:
    """Gradient of rope with respect to x, in place.

    dout: [..., num_tokens, num_heads, head_dim], gradient of out; becomes dx
    positions: [..., num_tokens], i64 or i32
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    scale: factor on positions
    """

@overload
def qk_norm_rope(q: Same, k: Same, q_weight: Same, k_weight: Same, positions: Same, cos: Same | None = None, sin: Same | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0, eps: float = 1e-06) -> tuple[Same, Same]:
    """RMS normalisation of the heads of queries and keys, then their rotary embedding.

    q: [..., num_tokens, num_heads, head_dim]
    k: [..., num_tokens, num_kv_heads, head_dim]
    q_weight: [head_dim], of the norm; f32 too
    k_weight: [head_dim], of the norm
    positions: [..., num_tokens], i64 or i32
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    scale: factor on positions
    eps: added to the mean square where heads are normalised

    Returns:
    q_out: [..., num_tokens, num_heads, head_dim]
    k_out: [..., num_tokens, num_kv_heads, head_dim]
    """
@overload
def qk_norm_rope(q: Array, k: Array, q_weight: Array, k_weight: Array, positions: Array, cos: Array | None = None, sin: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0, eps: float = 1e-06) -> Any: ...

def qk_norm_rope_(q: Array, k: Array, q_weight: Array, k_weight: Array, positions: Array, cos: Array | None = None, sin: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, scale: float = 1.0, eps: float = 1e-06) -> None:
    """RMS normalisation of the heads of queries and keys, then their rotary embedding, in place.

    q: [..., num_tokens, num_heads, head_dim]; becomes q_out
    k: [..., num_tokens, num_kv_heads, head_dim]; becomes k_out
    q_weight: [head_dim], of the norm; f32 too
    k_weight: [head_dim], of the norm
    positions: [..., num_tokens], i64 or i32
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    scale: factor on positions
    eps: added to the mean square where heads are normalised
    """

@overload
def cast(x: Same, scale: Same | None = None, *, to: Literal['f32', 'f16', 'bf16', 'f8e4m3', 'f8e5m2'] = 'f32', inverse: bool = False) -> Same:
    """Conversion between floating types, with an optional scale.

    x: [..., hidden], f32 or f16 or bf16 or f8e4m3 or f8e5m2
    scale: [1] or [...], f32: one for all, or one a row
    to: type of `out` where it is allocated for the call (f32, f16, bf16, f8e4m3, f8e5m2)
    inverse: divide by the scale instead of multiplying

    Returns:
    out: [..., hidden], f32 or f16 or bf16 or f8e4m3 or f8e5m2: of the type to cast to
    """
@overload
def cast(x: Array, scale: Array | None = None, *, to: Literal['f32', 'f16', 'bf16', 'f8e4m3', 'f8e5m2'] = 'f32', inverse: bool = False) -> Any: ...

def cast_(x: Array, scale: Array | None = None, *, to: Literal['f32', 'f16', 'bf16', 'f8e4m3', 'f8e5m2'] = 'f32', inverse: bool = False) -> None:
    """Conversion between floating types, with an optional scale, in place.

    x: [..., hidden], f32 or f16 or bf16 or f8e4m3 or f8e5m2; becomes out
    scale: [1] or [...], f32: one for all, or one a row
    to: type of `out` where it is allocated for the call (f32, f16, bf16, f8e4m3, f8e5m2)
    inverse: divide by the scale instead of multiplying
    """

@overload
def copy(x: Same, *, order: Literal['kept', 'swapped'] = 'kept') -> Same:
    """A copy of a tensor in another memory layout.

    x: [...] or [..., rows, cols], any type
    order: of the last two dimensions (kept, swapped)

    Returns:
    out: [...] or [..., cols, rows], contiguous where it is allocated for the call
    """
@overload
def copy(x: Array, *, order: Literal['kept', 'swapped'] = 'kept') -> Any: ...

@overload
def activation(x: Same, *, kind: Literal['gelu', 'gelu_tanh', 'silu', 'relu', 'mish'] = 'gelu') -> Same:
    """An activation function of each element: gelu, gelu_tanh, silu, relu or mish.

    x: [..., hidden]
    kind: the function (gelu, gelu_tanh, silu, relu, mish)

    Returns:
    out: [..., hidden]
    """
@overload
def activation(x: Array, *, kind: Literal['gelu', 'gelu_tanh', 'silu', 'relu', 'mish'] = 'gelu') -> Any: ...

def activation_(x: Array, *, kind: Literal['gelu', 'gelu_tanh', 'silu', 'relu', 'mish'] = 'gelu') -> None:
    """An activation function of each element: gelu, gelu_tanh, silu, relu or mish, in place.

    x: [..., hidden]; becomes out
    kind: the function (gelu, gelu_tanh, silu, relu, mish)
    """

@overload
def activation_backward(x: Same, dout: Same, *, kind: Literal['gelu', 'gelu_tanh', 'silu', 'relu', 'mish'] = 'gelu') -> Same:
    """Gradient of activation with respect to x.

    x: [..., hidden], input of the forward call
    dout: [..., hidden], gradient of out
    kind: as in the forward call (gelu, gelu_tanh, silu, relu, mish)

    Returns:
    dx: [..., hidden], gradient of x
    """
@overload
def activation_backward(x: Array, dout: Array, *, kind: Literal['gelu', 'gelu_tanh', 'silu', 'relu', 'mish'] = 'gelu') -> Any: ...

def activation_backward_(x: Array, dout: Array, *, kind: Literal['gelu', 'gelu_tanh', 'silu', 'relu', 'mish'] = 'gelu') -> None:
    """Gradient of activation with respect to x, in place.

    x: [..., hidden], input of the forward call
    dout: [..., hidden], gradient of out; becomes dx
    kind: as in the forward call (gelu, gelu_tanh, silu, relu, mish)
    """

@overload
def add_gelu(x: Same, bias: Same, *, approximate: Literal['none', 'tanh'] = 'none') -> Same:
    """GELU of the sum of rows and a bias.

    x: [..., hidden]
    bias: [hidden], added to every row
    approximate: none for the exact function, tanh for its tanh form (none, tanh)

    Returns:
    out: [..., hidden]
    """
@overload
def add_gelu(x: Array, bias: Array, *, approximate: Literal['none', 'tanh'] = 'none') -> Any: ...

def add_gelu_(x: Array, bias: Array, *, approximate: Literal['none', 'tanh'] = 'none') -> None:
    """GELU of the sum of rows and a bias, in place.

    x: [..., hidden]; becomes out
    bias: [hidden], added to every row
    approximate: none for the exact function, tanh for its tanh form (none, tanh)
    """

@overload
def add_gelu_backward(x: Same, bias: Same, dout: Same, *, approximate: Literal['none', 'tanh'] = 'none', return_dbias: Literal[False] = False) -> Same:
    """Gradients of add_gelu with respect to x and bias.

    x: [..., hidden], of the forward call
    bias: [hidden], of the forward call
    dout: [..., hidden], gradient of out
    approximate: none for the exact function, tanh for its tanh form (none, tanh)
    return_dbias: whether to return dbias

    Returns:
    dx: [..., hidden], gradient of x
    dbias: [hidden], gradient of bias: dx summed over rows in f32
    """
@overload
def add_gelu_backward(x: Same, bias: Same, dout: Same, *, approximate: Literal['none', 'tanh'] = 'none', return_dbias: Literal[True]) -> tuple[Same, Same]: ...
@overload
def add_gelu_backward(x: Array, bias: Array, dout: Array, *, approximate: Literal['none', 'tanh'] = 'none', return_dbias: bool = False) -> Any: ...

@overload
def mul_add(a: Same, b: Same, c: Same) -> Same:
    """Fused multiply-add: a * b + c.

    a: [..., hidden]
    b: [..., hidden]
    c: [..., hidden]

    Returns:
    out: [..., hidden]
    """
@overload
def mul_add(a: Array, b: Array, c: Array) -> Any: ...

def mul_add_(a: Array, b: Array, c: Array) -> None:
    """Fused multiply-add: a * b + c, in place.

    a: [..., hidden]
    b: [..., hidden]
    c: [..., hidden]; becomes out
    """

def mul_add_backward(a: Array, b: Array, dout: Array, *, return_da: bool = False, return_db: bool = False) -> Any:
    """Gradients of mul_add with respect to a and b; that of c is dout.

    a: [..., hidden], of the forward call
    b: [..., hidden], of the forward call
    dout: [..., hidden], gradient of out, and of c
    return_da: whether to return da
    return_db: whether to return db

    Returns:
    da: [..., hidden], gradient of a
    db: [..., hidden], gradient of b
    """

@overload
def gated_act(x: Same, *, act: Literal['silu', 'gelu', 'gelu_tanh', 'relu'] = 'silu', layout: Literal['split', 'interleaved'] = 'split') -> Same:
    """An activation of one half of each row times the other half: SwiGLU, GeGLU, ReGLU.

    x: [..., 2 * hidden], gate and up
    act: the function applied to the gate (silu, gelu, gelu_tanh, relu)
    layout: how gate and up share a row (split, interleaved)

    Returns:
    out: [..., hidden], act(gate) * up
    """
@overload
def gated_act(x: Array, *, act: Literal['silu', 'gelu', 'gelu_tanh', 'relu'] = 'silu', layout: Literal['split', 'interleaved'] = 'split') -> Any: ...

@overload
def gated_act_backward(x: Same, dout: Same, *, act: Literal['silu', 'gelu', 'gelu_tanh', 'relu'] = 'silu', layout: Literal['split', 'interleaved'] = 'split') -> Same:
    """Gradient of gated_act with respect to its packed input.

    x: [..., 2 * hidden], input of the forward call
    dout: [..., hidden], gradient of out
    act: the function applied to the gate (silu, gelu, gelu_tanh, relu)
    layout: how gate and up share a row (split, interleaved)

    Returns:
    dx: [..., 2 * hidden], gradient of x, packed as x is
    """
@overload
def gated_act_backward(x: Array, dout: Array, *, act: Literal['silu', 'gelu', 'gelu_tanh', 'relu'] = 'silu', layout: Literal['split', 'interleaved'] = 'split') -> Any: ...

def gated_act_backward_(x: Array, dout: Array, *, act: Literal['silu', 'gelu', 'gelu_tanh', 'relu'] = 'silu', layout: Literal['split', 'interleaved'] = 'split') -> None:
    """Gradient of gated_act with respect to its packed input, in place.

    x: [..., 2 * hidden], input of the forward call; becomes dx
    dout: [..., hidden], gradient of out
    act: the function applied to the gate (silu, gelu, gelu_tanh, relu)
    layout: how gate and up share a row (split, interleaved)
    """

@overload
def embedding(weight: Same, ids: Same) -> Same:
    """Rows of a table, looked up by id.

    weight: [vocab, hidden], the table
    ids: [...], i64 or i32: rows of weight

    Returns:
    out: [..., hidden]
    """
@overload
def embedding(weight: Array, ids: Array) -> Any: ...

@overload
def embedding_backward(ids: Same, dout: Same, *, vocab: int = 32768) -> Same:
    """Gradient of embedding with respect to weight.

    ids: [...], i64 or i32: of the forward call
    dout: [..., hidden], gradient of out
    vocab: rows of dweight

    Returns:
    dweight: [vocab, hidden], gradient of weight, summed in f32 in the order of the ids
    """
@overload
def embedding_backward(ids: Array, dout: Array, *, vocab: int = 32768) -> Any: ...

@overload
def linear(x: Same, w: Same, bias: Same | None = None, residual: Same | None = None, x_scale: Same | None = None, w_scale: Same | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, scaling: Literal['tensor', 'row', 'block'] = 'tensor', precision: Literal['auto', 'full', 'tf32'] = 'auto', to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', tolerance: float = 0.0) -> Same:
    """Matrix product with fused bias, activation, gate, scale and residual.

    x: [..., k], f32 or f16 or bf16 or f8e4m3 or f8e5m2
    w: [..., rows, k], one matrix, or one for each of x; n rows, with a gate 2n
    bias: [rows], of the result's type
    residual: [..., n], of the result's type, added last
    x_scale: [1], [...] or [..., ceil(k / 128)], f32: scales of an 8-bit x
    w_scale: [1], [..., rows] or [..., ceil(rows / 128), ceil(k / 128)], f32: scales of an 8-bit w
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w (none, halves, interleaved)
    scale: factor before the residual is added
    scaling: what shares a scale of x and w (tensor, row, block)
    precision: of f32 products; auto is full unless the tolerance allows less (auto, full, tf32)
    to: type of `out` where it is allocated for the call; auto: that of x, bf16 for 8-bit inputs (auto, f32, f16, bf16)
    tolerance: what precision=auto may be off, of the sum of the absolute products; from 0.002 f32 is cut to TF32. 0: as if left out

    Returns:
    out: [..., n], f32 or f16 or bf16
    """
@overload
def linear(x: Array, w: Array, bias: Array | None = None, residual: Array | None = None, x_scale: Array | None = None, w_scale: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, scaling: Literal['tensor', 'row', 'block'] = 'tensor', precision: Literal['auto', 'full', 'tf32'] = 'auto', to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', tolerance: float = 0.0) -> Any: ...

def linear_(x: Array, w: Array, residual: Array, bias: Array | None = None, x_scale: Array | None = None, w_scale: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, scaling: Literal['tensor', 'row', 'block'] = 'tensor', precision: Literal['auto', 'full', 'tf32'] = 'auto', to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', tolerance: float = 0.0) -> None:
    """Matrix product with fused bias, activation, gate, scale and residual, in place.

    x: [..., k], f32 or f16 or bf16 or f8e4m3 or f8e5m2
    w: [..., rows, k], one matrix, or one for each of x; n rows, with a gate 2n
    residual: [..., n], of the result's type, added last; becomes out
    bias: [rows], of the result's type
    x_scale: [1], [...] or [..., ceil(k / 128)], f32: scales of an 8-bit x
    w_scale: [1], [..., rows] or [..., ceil(rows / 128), ceil(k / 128)], f32: scales of an 8-bit w
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w (none, halves, interleaved)
    scale: factor before the residual is added
    scaling: what shares a scale of x and w (tensor, row, block)
    precision: of f32 products; auto is full unless the tolerance allows less (auto, full, tf32)
    to: type of `out` where it is allocated for the call; auto: that of x, bf16 for 8-bit inputs (auto, f32, f16, bf16)
    tolerance: what precision=auto may be off, of the sum of the absolute products; from 0.002 f32 is cut to TF32. 0: as if left out
    """

def linear_backward(x: Array, w: Array, dout: Array, z: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', scale: float = 1.0, precision: Literal['auto', 'full', 'tf32'] = 'auto', tolerance: float = 0.0, return_dx: bool = False, return_dw: bool = False, return_dbias: bool = False) -> Any:
    """Gradients of linear with respect to its input, weight and bias.

    x: [..., k], input of the forward call
    w: [n, k], its weight
    dout: [..., n], gradient of its result
    z: [..., n], what its activation was applied to, if it had one
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    scale: factor of the forward result
    precision: of f32 products; auto is full unless the tolerance allows less (auto, full, tf32)
    tolerance: what precision=auto may be off, of the sum of the absolute products; from 0.002 f32 is cut to TF32. 0: as if left out
    return_dx: whether to return dx
    return_dw: whether to return dw
    return_dbias: whether to return dbias

    Returns:
    dx: [..., k], gradient of x
    dw: [n, k], gradient of w
    dbias: [n], gradient of the bias
    """

@overload
def linear_quant(x: Same, w: Same, bias: Same | None = None, residual: Same | None = None, *, format: Literal['q8_0', 'q4_0', 'q4_1', 'q5_0', 'q5_1', 'q4_k', 'q5_k', 'q6_k', 'q2_k', 'q3_k', 'iq4_nl', 'iq4_xs', 'mxfp4'] = 'q8_0', act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', precision: Literal['auto', 'full'] = 'auto', tolerance: float = 0.0) -> Same:
    """Matrix product with a weight in the quantised blocks of GGUF, activations rounded to 8 bits.

    x: [..., k]
    w: [rows, bytes], u8: rows of blocks; n rows, with a gate 2n
    bias: [rows], of the result's type
    residual: [..., n], of the result's type, added last
    format: of the blocks of w (q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q2_k, q3_k, iq4_nl, iq4_xs, mxfp4)
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w (none, halves, interleaved)
    scale: factor before the residual is added
    to: type of `out` where it is allocated for the call; auto: that of x (auto, f32, f16, bf16)
    precision: auto: activations rounded to 8 bits, with a scale for each 32; full: as they are (CPU only) (auto, full)
    tolerance: what activations may be off with precision=auto, of the largest of 32; below 1/254 it is full. 0: as if left out

    Returns:
    out: [..., n], f32 or f16 or bf16
    """
@overload
def linear_quant(x: Array, w: Array, bias: Array | None = None, residual: Array | None = None, *, format: Literal['q8_0', 'q4_0', 'q4_1', 'q5_0', 'q5_1', 'q4_k', 'q5_k', 'q6_k', 'q2_k', 'q3_k', 'iq4_nl', 'iq4_xs', 'mxfp4'] = 'q8_0', act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', precision: Literal['auto', 'full'] = 'auto', tolerance: float = 0.0) -> Any: ...

def linear_quant_(x: Array, w: Array, residual: Array, bias: Array | None = None, *, format: Literal['q8_0', 'q4_0', 'q4_1', 'q5_0', 'q5_1', 'q4_k', 'q5_k', 'q6_k', 'q2_k', 'q3_k', 'iq4_nl', 'iq4_xs', 'mxfp4'] = 'q8_0', act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', precision: Literal['auto', 'full'] = 'auto', tolerance: float = 0.0) -> None:
    """Matrix product with a weight in the quantised blocks of GGUF, activations rounded to 8 bits, in place.

    x: [..., k]
    w: [rows, bytes], u8: rows of blocks; n rows, with a gate 2n
    residual: [..., n], of the result's type, added last; becomes out
    bias: [rows], of the result's type
    format: of the blocks of w (q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q2_k, q3_k, iq4_nl, iq4_xs, mxfp4)
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w (none, halves, interleaved)
    scale: factor before the residual is added
    to: type of `out` where it is allocated for the call; auto: that of x (auto, f32, f16, bf16)
    precision: auto: activations rounded to 8 bits, with a scale for each 32; full: as they are (CPU only) (auto, full)
    tolerance: what activations may be off with precision=auto, of the largest of 32; below 1/254 it is full. 0: as if left out
    """

@overload
def grouped_linear(x: Same, w: Same, counts: Same, index: Same | None = None, bias: Same | None = None, row_scale: Same | None = None, residual: Same | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0) -> Same:
    """Products of rows that are sorted by group with the matrix of their group.

    x: [x_rows, k], sorted by group, unless an index says where
    w: [groups, w_rows, k], n rows for each group, with a gate 2 n
    counts: [groups], i32: rows of each group
    index: [index_rows], i64 or i32: the row of x that each row is made from, -1 for zeros
    bias: [groups, w_rows], added to the products
    row_scale: [rows], a factor of each row, in f32 or the type of x
    residual: [rows, n], added last
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w (none, halves, interleaved)
    scale: factor before the residual is added

    Returns:
    out: [rows, n]
    """
@overload
def grouped_linear(x: Array, w: Array, counts: Array, index: Array | None = None, bias: Array | None = None, row_scale: Array | None = None, residual: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0) -> Any: ...

def grouped_linear_(x: Array, w: Array, counts: Array, residual: Array, index: Array | None = None, bias: Array | None = None, row_scale: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0) -> None:
    """Products of rows that are sorted by group with the matrix of their group, in place.

    x: [x_rows, k], sorted by group, unless an index says where
    w: [groups, w_rows, k], n rows for each group, with a gate 2 n
    counts: [groups], i32: rows of each group
    residual: [rows, n], added last; becomes out
    index: [index_rows], i64 or i32: the row of x that each row is made from, -1 for zeros
    bias: [groups, w_rows], added to the products
    row_scale: [rows], a factor of each row, in f32 or the type of x
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w (none, halves, interleaved)
    scale: factor before the residual is added
    """

def grouped_linear_backward(x: Array, w: Array, counts: Array, dout: Array, z: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', scale: float = 1.0, return_dx: bool = False, return_dw: bool = False, return_dbias: bool = False) -> Any:
    """Gradients of grouped_linear with respect to its input, weights and biases.

    x: [rows, k], input of the forward call
    w: [groups, n, k], its weights
    counts: [groups], i32: rows of each group
    dout: [rows, n], gradient of its result
    z: [rows, n], what its activation was applied to, if it had one
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    scale: factor of the forward result
    return_dx: whether to return dx
    return_dw: whether to return dw
    return_dbias: whether to return dbias

    Returns:
    dx: [rows, k], gradient of x
    dw: [groups, n, k], gradient of w
    dbias: [groups, n], gradient of the biases
    """

@overload
def moe_ffn(x: Same, w1: Same, w2: Same, ids: Same, weights: Same, b1: Same | None = None, b2: Same | None = None, shared_w1: Same | None = None, shared_w2: Same | None = None, residual: Same | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0) -> Same:
    """The experts of a mixture: both products, activation, gate and the weighted sum.

    x: [..., hidden], tokens
    w1: [experts, rows, hidden], ffn rows for each expert, with a gate 2 ffn
    w2: [experts, hidden, ffn], of the second product
    ids: [..., top_k], i64 or i32: experts of each token, -1 for none
    weights: [..., top_k], of their results, in f32 or the type of x
    b1: [experts, rows], added to the first product
    b2: [experts, hidden], added to the second
    shared_w1: [shared_rows, hidden], w1 of the expert that all tokens are sent to
    shared_w2: [hidden, shared_ffn], its w2
    residual: [..., hidden], added last
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w1 (none, halves, interleaved)
    scale: factor before the residual is added

    Returns:
    out: [..., hidden]
    """
@overload
def moe_ffn(x: Array, w1: Array, w2: Array, ids: Array, weights: Array, b1: Array | None = None, b2: Array | None = None, shared_w1: Array | None = None, shared_w2: Array | None = None, residual: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0) -> Any: ...

def moe_ffn_(x: Array, w1: Array, w2: Array, ids: Array, weights: Array, residual: Array, b1: Array | None = None, b2: Array | None = None, shared_w1: Array | None = None, shared_w2: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0) -> None:
    """The experts of a mixture: both products, activation, gate and the weighted sum, in place.

    x: [..., hidden], tokens
    w1: [experts, rows, hidden], ffn rows for each expert, with a gate 2 ffn
    w2: [experts, hidden, ffn], of the second product
    ids: [..., top_k], i64 or i32: experts of each token, -1 for none
    weights: [..., top_k], of their results, in f32 or the type of x
    residual: [..., hidden], added last; becomes out
    b1: [experts, rows], added to the first product
    b2: [experts, hidden], added to the second
    shared_w1: [shared_rows, hidden], w1 of the expert that all tokens are sent to
    shared_w2: [hidden, shared_ffn], its w2
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w1 (none, halves, interleaved)
    scale: factor before the residual is added
    """

def moe_ffn_backward(x: Array, w1: Array, w2: Array, ids: Array, weights: Array, dout: Array, b1: Array | None = None, shared_w1: Array | None = None, shared_w2: Array | None = None, b2: Array | None = None, *, act: Literal['none', 'gelu', 'gelu_tanh', 'silu', 'relu'] = 'none', gate: Literal['none', 'halves', 'interleaved'] = 'none', scale: float = 1.0, return_dx: bool = False, return_dw1: bool = False, return_dw2: bool = False, return_dweights: bool = False, return_db1: bool = False, return_db2: bool = False, return_dshared_w1: bool = False, return_dshared_w2: bool = False) -> Any:
    """Gradients of moe_ffn with respect to all its inputs.

    x: [..., hidden], tokens
    w1: [experts, rows, hidden], of the forward call
    w2: [experts, hidden, ffn], of the forward call
    ids: [..., top_k], i64 or i32: experts of each token, -1 for none
    weights: [..., top_k], of their results
    dout: [..., hidden], gradient of the result
    b1: [experts, rows], if the forward call had it
    shared_w1: [shared_rows, hidden], the same
    shared_w2: [hidden, shared_ffn], the same
    b2: [experts, hidden], the same
    act: the activation (none, gelu, gelu_tanh, silu, relu)
    gate: act(gate) * up, and how their rows share w1 (none, halves, interleaved)
    scale: factor of the forward result
    return_dx: whether to return dx
    return_dw1: whether to return dw1
    return_dw2: whether to return dw2
    return_dweights: whether to return dweights
    return_db1: whether to return db1
    return_db2: whether to return db2
    return_dshared_w1: whether to return dshared_w1
    return_dshared_w2: whether to return dshared_w2

    Returns:
    dx: [..., hidden], gradient of x
    dw1: [experts, rows, hidden], gradient of w1
    dw2: [experts, hidden, ffn], gradient of w2
    dweights: [..., top_k], gradient of weights
    db1: [experts, rows], gradient of b1
    db2: [experts, hidden], gradient of b2
    dshared_w1: [shared_rows, hidden], gradient of shared_w1
    dshared_w2: [hidden, shared_ffn], gradient of shared_w2
    """

@overload
def argmax(x: Same, *, to: Literal['i32', 'i64'] = 'i32') -> Same:
    """Index of the largest element of each row.

    x: [..., n]
    to: type of `out` where it is allocated for the call (i32, i64)

    Returns:
    out: [...], i32 or i64: the lowest index of equal ones
    """
@overload
def argmax(x: Array, *, to: Literal['i32', 'i64'] = 'i32') -> Any: ...

@overload
def sample(logits: Same, seed: Same | float, position: Same | float, temperature: Same | float | None = None, top_k: Same | float | None = None, top_p: Same | float | None = None, min_p: Same | float | None = None, raw: Same | None = None, *, vocab: int = 0, return_logprob: Literal[False] = False) -> Same:
    """One token drawn for each row of logits, with its log-probability.

    logits: [rows, columns]
    seed: [rows], i64: of the row's noise; or one number for all
    position: [rows], i64: of the token in its text; or one number for all
    temperature: [rows], f32: 0: the largest logit; or one number for all
    top_k: [rows], i32: how many tokens remain; 0: all; or one number for all
    top_p: [rows], f32: how much probability remains; or one number for all
    min_p: [rows], f32: least share of the largest probability; or one number for all
    raw: [rows, columns], logits that logprob is of
    vocab: columns that exist; 0: all
    return_logprob: whether to return logprob

    Returns:
    token: [rows], i32: -1 where there is none
    logprob: [rows], f32: of the token
    """
@overload
def sample(logits: Same, seed: Same | float, position: Same | float, temperature: Same | float | None = None, top_k: Same | float | None = None, top_p: Same | float | None = None, min_p: Same | float | None = None, raw: Same | None = None, *, vocab: int = 0, return_logprob: Literal[True]) -> tuple[Same, Same]: ...
@overload
def sample(logits: Array, seed: Array | float, position: Array | float, temperature: Array | float | None = None, top_k: Array | float | None = None, top_p: Array | float | None = None, min_p: Array | float | None = None, raw: Array | None = None, *, vocab: int = 0, return_logprob: bool = False) -> Any: ...

def penalize(ids: Array, counts: Array, logits: Array, bias: Array | None = None, repetition: Array | float | None = None, presence: Array | float | None = None, frequency: Array | float | None = None) -> None:
    """Penalties and biases for listed tokens, on logits in place.

    ids: [rows, slots], i32: tokens; -1 to skip
    counts: [rows, slots], i32: occurrences in the output; -1: in no text
    logits: [rows, columns]; changed
    bias: [rows, slots], f32: added to the logits
    repetition: [rows], f32: divides positive logits; or one number for all
    presence: [rows], f32: subtracted once; or one number for all
    frequency: [rows], f32: subtracted for each occurrence; or one number for all
    """

@overload
def prefix_match(table: Same, edge_tokens: Same, edge_pages: Same, tokens: Same, starts: Same, *, max_pages: int = 256, seed: int = 0) -> tuple[Same, Same, Same]:
    """Longest prefix of each sequence that a radix tree holds.

    table: [num_slots, 4], i32: parent, child, first page and pages of each edge
    edge_tokens: [num_pages, page_size], i32
    edge_pages: [num_pages], i32
    tokens: [total], i32: the sequences, one after the other
    starts: [batch + 1], i32: where they start, and where the last ends
    max_pages: columns of `pages`
    seed: seed of the hash by which the table was filled

    Returns:
    matched: [batch], i32: tokens that match
    nodes: [batch], i32: the node in whose edge the match ends
    pages: [batch, max_pages], i32: the pages of the match, then -1
    """
@overload
def prefix_match(table: Array, edge_tokens: Array, edge_pages: Array, tokens: Array, starts: Array, *, max_pages: int = 256, seed: int = 0) -> Any: ...

def kv_store(k: Array, v: Array, slots: Array, k_cache: Array, v_cache: Array, positions: Array | None = None, cos: Array | None = None, sin: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, position_scale: float = 1.0, to: Literal['auto', 'f8e4m3', 'f8e5m2'] = 'auto') -> None:
    """Stores keys and values in a paged cache, with optional rope and 8-bit cast.

    k: [num_tokens, num_kv_heads, head_dim]
    v: [num_tokens, num_kv_heads, head_dim]
    slots: [num_tokens], i64 or i32: page * page_size + place in it, -1 to skip
    k_cache: [num_pages, page_size, num_kv_heads, head_dim], of the type of k, or 8-bit; changed
    v_cache: [num_pages, page_size, num_kv_heads, head_dim]; changed
    positions: [num_tokens], i64 or i32: keys are rotated if given
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    k_scale: [1 or num_kv_heads], f32: what keys are divided by
    v_scale: [1 or num_kv_heads], f32: what values are divided by
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    position_scale: factor on positions
    to: type of the caches where they are made for a test; auto: that of k (auto, f8e4m3, f8e5m2)
    """

def qkv_store(slots: Array, qkv: Array, k_cache: Array, v_cache: Array, positions: Array | None = None, cos: Array | None = None, sin: Array | None = None, q_weight: Array | None = None, k_weight: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None, *, layout: Literal['half', 'interleaved'] = 'half', theta: float = 10000.0, rotary_dim: int = 0, position_scale: float = 1.0, eps: float = 1e-06, to: Literal['auto', 'f8e4m3', 'f8e5m2'] = 'auto') -> None:
    """Norm and rope of packed queries and keys; keys and values into a paged cache.

    slots: [num_tokens], i64 or i32: page * page_size + place in it, -1 to skip
    qkv: [num_tokens, heads, head_dim], queries, keys, values; queries are changed; changed
    k_cache: [num_pages, page_size, num_kv_heads, head_dim], of the type of qkv, or 8-bit; changed
    v_cache: [num_pages, page_size, num_kv_heads, head_dim]; changed
    positions: [num_tokens], i64 or i32: queries and keys are rotated if given
    cos: [max_pos, rotary_dim / 2], f32: given with sin
    sin: [max_pos, rotary_dim / 2], f32
    q_weight: [head_dim], heads are normalised if given
    k_weight: [head_dim]
    k_scale: [1 or num_kv_heads], f32: what keys are divided by, with 8-bit caches
    v_scale: [1 or num_kv_heads], f32: what values are divided by
    layout: which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (half, interleaved)
    theta: base of the frequencies
    rotary_dim: elements of a head that are rotated; 0 for all
    position_scale: factor on positions
    eps: added to the mean square where heads are normalised
    to: type of the caches where they are made for a test; auto: that of qkv (auto, f8e4m3, f8e5m2)
    """

def kv_copy(pairs: Array, cache: Array) -> None:
    """Copies of whole KV cache pages, all layers at once.

    pairs: [num_pairs, 2], i64 or i32: source and destination pages, -1 to skip
    cache: [..., num_pages, page_size, num_kv_heads, head_dim], any type; changed
    """

@overload
def merge_states(outs: Same, lses: Same, counts: Same | float | None = None, *, to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', return_lse: Literal[False] = False) -> Same:
    """Combines attention over parts of a context into attention over all of it.

    outs: [num_parts, num_tokens, num_heads, head_dim]
    lses: [num_parts, num_tokens, num_heads], f32: minus infinity for an empty part
    counts: [num_tokens], i32: how many parts a token has; or one number for all
    to: type of `out` where it is allocated for the call; auto: that of outs (auto, f32, f16, bf16)
    return_lse: whether to return lse

    Returns:
    out: [num_tokens, num_heads, head_dim], f32 or f16 or bf16
    lse: [num_tokens, num_heads], f32
    """
@overload
def merge_states(outs: Same, lses: Same, counts: Same | float | None = None, *, to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', return_lse: Literal[True]) -> tuple[Same, Same]: ...
@overload
def merge_states(outs: Array, lses: Array, counts: Array | float | None = None, *, to: Literal['auto', 'f32', 'f16', 'bf16'] = 'auto', return_lse: bool = False) -> Any: ...

@overload
def attention(q: Same, k: Same, v: Same, q_starts: Same | None = None, kv_starts: Same | None = None, mask: Same | None = None, bias: Same | None = None, sinks: Same | float | None = None, *, causal: bool = False, window: int = 0, softcap: float = 0.0, scale: float | None = None, dropout: float = 0.0, seed: int = 0, offset: int = 0, block_q: int = 0, block_kv: int = 0, return_lse: Literal[False] = False) -> Same:
    """Softmax attention of queries over keys and values, in linear memory.

    q: [batch, q_len, num_heads, head_dim]
    k: [batch, kv_len, num_kv_heads, head_dim]
    v: [batch, kv_len, num_kv_heads, head_dim]
    q_starts: [requests + 1], i32: where each request's queries begin, and the end
    kv_starts: [requests + 1], i32: the same of keys; given with q_starts
    mask: [1 or batch, 1 or num_heads, q_len, kv_len], bool or u8: keys that are seen
    bias: [1 or batch, 1 or num_heads, q_len, kv_len], f32 or of the type of q: added to scores
    sinks: [num_heads], f32: a score without a value; or one number for all
    causal: queries see keys up to their own position, counted from the end
    window: keys before a query's own position that it sees at most; 0 for all
    softcap: limit that scores approach; 0 for none
    scale: factor of the scores; left out, 1 / sqrt(head_dim)
    dropout: share of probabilities that do not count, from 0 to below 1; the others count for more
    seed: decides what dropout drops
    offset: with another number, the same seed drops others
    block_q: rows of queries that are worked on at a time: 16, 64, 128, 192 or 256; 0 to let the kernel choose
    block_kv: keys that are worked on at a time: 32, 64, 80, 96 or 128; 0 to let the kernel choose
    return_lse: whether to return lse

    Returns:
    out: [batch, q_len, num_heads, head_dim]
    lse: [batch, num_heads, q_len], f32: logarithm of the sum of exponentials
    """
@overload
def attention(q: Same, k: Same, v: Same, q_starts: Same | None = None, kv_starts: Same | None = None, mask: Same | None = None, bias: Same | None = None, sinks: Same | float | None = None, *, causal: bool = False, window: int = 0, softcap: float = 0.0, scale: float | None = None, dropout: float = 0.0, seed: int = 0, offset: int = 0, block_q: int = 0, block_kv: int = 0, return_lse: Literal[True]) -> tuple[Same, Same]: ...
@overload
def attention(q: Array, k: Array, v: Array, q_starts: Array | None = None, kv_starts: Array | None = None, mask: Array | None = None, bias: Array | None = None, sinks: Array | float | None = None, *, causal: bool = False, window: int = 0, softcap: float = 0.0, scale: float | None = None, dropout: float = 0.0, seed: int = 0, offset: int = 0, block_q: int = 0, block_kv: int = 0, return_lse: bool = False) -> Any: ...

def attention_backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, q_starts: Array | None = None, kv_starts: Array | None = None, mask: Array | None = None, bias: Array | None = None, sinks: Array | float | None = None, dlse: Array | None = None, *, causal: bool = False, window: int = 0, softcap: float = 0.0, scale: float | None = None, dropout: float = 0.0, seed: int = 0, offset: int = 0, return_dbias: bool = False, return_dsinks: bool = False) -> Any:
    """Gradients of attention with respect to its inputs, in linear memory.

    q: [batch, q_len, num_heads, head_dim]
    k: [batch, kv_len, num_kv_heads, head_dim]
    v: [batch, kv_len, num_kv_heads, head_dim]
    out: [batch, q_len, num_heads, head_dim], result of the forward call
    lse: [batch, num_heads, q_len], f32: its other result
    dout: [batch, q_len, num_heads, head_dim], gradient of out
    q_starts: [requests + 1], i32: where each request's queries begin, and the end
    kv_starts: [requests + 1], i32: the same of keys; given with q_starts
    mask: [1 or batch, 1 or num_heads, q_len, kv_len], bool or u8: keys that are seen
    bias: [bias_batch, bias_heads, q_len, kv_len], f32 or of the type of q: added to scores; 1 or batch, and 1 or num_heads
    sinks: [num_heads], f32: a score without a value; or one number for all
    dlse: [batch, num_heads, q_len], f32: gradient of lse
    causal: that of the forward call
    window: that of the forward call; 0 for all keys
    softcap: that of the forward call; 0 for none
    scale: that of the forward call; left out, 1 / sqrt(head_dim)
    dropout: that of the forward call; 0 for none
    seed: that of the forward call
    offset: that of the forward call
    return_dbias: whether to return dbias
    return_dsinks: whether to return dsinks

    Returns:
    dq: [batch, q_len, num_heads, head_dim], gradient of q
    dk: [batch, kv_len, num_kv_heads, head_dim], gradient of k
    dv: [batch, kv_len, num_kv_heads, head_dim], gradient of v
    dbias: [bias_batch, bias_heads, q_len, kv_len], f32: gradient of bias
    dsinks: [num_heads], f32: gradient of sinks
    """

@overload
def paged_attention(q: Same, k_pages: Same, v_pages: Same, page_table: Same, kv_lens: Same, q_starts: Same | None = None, k_scale: Same | None = None, v_scale: Same | None = None, sinks: Same | float | None = None, group_starts: Same | None = None, prefix_lens: Same | None = None, *, causal: bool = True, window: int = 0, softcap: float = 0.0, scale: float | None = None, always_share: bool = False, return_lse: Literal[False] = False) -> Same:
    """Attention over a paged cache of keys and values, for many requests.

    q: [num_tokens, num_heads, head_dim]
    k_pages: [num_pages, page_size, num_kv_heads, head_dim], of the type of q, or 8-bit
    v_pages: [num_pages, page_size, num_kv_heads, head_dim]
    page_table: [requests, max_pages], i32: the pages of each request
    kv_lens: [requests], i32: keys of each request, new ones included
    q_starts: [requests + 1], i32: where each request's queries begin, and the end; evenly if left out
    k_scale: [1 or num_kv_heads], f32: factor of an 8-bit cache's keys
    v_scale: [1 or num_kv_heads], f32: factor of an 8-bit cache's values
    sinks: [num_heads], f32: a score without a value; or one number for all
    group_starts: [levels, groups + 1], i32: the requests that begin with the same pages
    prefix_lens: [levels, groups], i32: keys that all of a group have; given with group_starts
    causal: queries see no keys after their own
    window: keys before its own that a query sees; 0 for all
    softcap: scores become softcap * tanh(score / softcap); 0 for none
    scale: factor of scores; left out, 1 / sqrt(head_dim)
    always_share: read shared prefixes once for a group even if that is not expected to be faster
    return_lse: whether to return lse

    Returns:
    out: [num_tokens, num_heads, head_dim]
    lse: [num_tokens, num_heads], f32: logarithm of the sum of exponentials
    """
@overload
def paged_attention(q: Same, k_pages: Same, v_pages: Same, page_table: Same, kv_lens: Same, q_starts: Same | None = None, k_scale: Same | None = None, v_scale: Same | None = None, sinks: Same | float | None = None, group_starts: Same | None = None, prefix_lens: Same | None = None, *, causal: bool = True, window: int = 0, softcap: float = 0.0, scale: float | None = None, always_share: bool = False, return_lse: Literal[True]) -> tuple[Same, Same]: ...
@overload
def paged_attention(q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lens: Array, q_starts: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None, sinks: Array | float | None = None, group_starts: Array | None = None, prefix_lens: Array | None = None, *, causal: bool = True, window: int = 0, softcap: float = 0.0, scale: float | None = None, always_share: bool = False, return_lse: bool = False) -> Any: ...

def cross_entropy(logits: Array, targets: Array, *, ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: Literal['mean', 'sum', 'none'] = 'mean', return_lse: bool = False, return_count: bool = False) -> Any:
    """Cross-entropy of logits against targets.

    logits: [..., vocab]
    targets: [...], i64 or i32: columns, or ignore_index
    ignore_index: the target of rows that do not count
    softcap: bounds logits by softcap * tanh(logit / softcap); 0: none
    label_smoothing: how much of the target is spread over the vocabulary, from 0 to 1
    z_loss: factor of the square of lse in the loss
    reduction: of the losses of rows (mean, sum, none)
    return_lse: whether to return lse
    return_count: whether to return count

    Returns:
    loss: [] or [...], f32: one number unless reduction=none
    lse: [...], f32: logarithm of the sum of exponentials
    count: [], f32: rows that are not ignored
    """

@overload
def cross_entropy_backward(logits: Same, targets: Same, lse: Same, count: Same, dloss: Same, *, ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: Literal['mean', 'sum', 'none'] = 'mean') -> Same:
    """Gradient of cross_entropy with respect to the logits.

    logits: [..., vocab], those of the forward call
    targets: [...], i64 or i32: those of the forward call
    lse: [...], f32: what it returned
    count: [], f32: what it returned
    dloss: [] or [...], f32: gradient of the loss
    ignore_index: the target of rows that do not count
    softcap: bounds logits by softcap * tanh(logit / softcap); 0: none
    label_smoothing: how much of the target is spread over the vocabulary, from 0 to 1
    z_loss: factor of the square of lse in the loss
    reduction: of the losses of rows (mean, sum, none)

    Returns:
    dlogits: [..., vocab], gradient of the logits
    """
@overload
def cross_entropy_backward(logits: Array, targets: Array, lse: Array, count: Array, dloss: Array, *, ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: Literal['mean', 'sum', 'none'] = 'mean') -> Any: ...

def cross_entropy_backward_(logits: Array, targets: Array, lse: Array, count: Array, dloss: Array, *, ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: Literal['mean', 'sum', 'none'] = 'mean') -> None:
    """Gradient of cross_entropy with respect to the logits, in place.

    logits: [..., vocab], those of the forward call; becomes dlogits
    targets: [...], i64 or i32: those of the forward call
    lse: [...], f32: what it returned
    count: [], f32: what it returned
    dloss: [] or [...], f32: gradient of the loss
    ignore_index: the target of rows that do not count
    softcap: bounds logits by softcap * tanh(logit / softcap); 0: none
    label_smoothing: how much of the target is spread over the vocabulary, from 0 to 1
    z_loss: factor of the square of lse in the loss
    reduction: of the losses of rows (mean, sum, none)
    """

def linear_cross_entropy(x: Array, w: Array, targets: Array, *, ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: Literal['mean', 'sum'] = 'mean', return_count: bool = False, return_dx: bool = False, return_dw: bool = False) -> Any:
    """Cross-entropy of the logits of a head, and its gradients, in parts.

    x: [..., hidden], hidden states
    w: [vocab, hidden], weight of the head
    targets: [...], i64 or i32: rows of w, or ignore_index
    ignore_index: the target of rows that do not count
    softcap: bounds logits by softcap * tanh(logit / softcap); 0: none
    label_smoothing: how much of the target is spread over the vocabulary, from 0 to 1
    z_loss: factor of the square of lse in the loss
    reduction: of the losses of rows (mean, sum)
    return_count: whether to return count
    return_dx: whether to return dx
    return_dw: whether to return dw

    Returns:
    loss: [], f32
    count: [], f32: rows that are not ignored
    dx: [..., hidden], gradient of the sum of losses with respect to x
    dw: [vocab, hidden], gradient of the sum of losses with respect to w
    """

@overload
def linear_cross_entropy_backward(dx_sum: Same, count: Same, dloss: Same, dw_sum: None = None, *, reduction: Literal['mean', 'sum'] = 'mean') -> Same:
    """Gradients of linear_cross_entropy, from those of the sum of losses.

    dx_sum: [..., hidden], dx of the forward call
    count: [], f32: what it returned
    dloss: [], f32: gradient of the loss
    dw_sum: [vocab, hidden], dw of the forward call
    reduction: that of the forward call (mean, sum)

    Returns:
    dx: [..., hidden], gradient of x
    dw: [vocab, hidden], gradient of w
    """
@overload
def linear_cross_entropy_backward(dx_sum: Same, count: Same, dloss: Same, *, dw_sum: Same, reduction: Literal['mean', 'sum'] = 'mean') -> tuple[Same, Same]: ...
@overload
def linear_cross_entropy_backward(dx_sum: Same, count: Same, dloss: Same, dw_sum: Same, *, reduction: Literal['mean', 'sum'] = 'mean') -> tuple[Same, Same]: ...
@overload
def linear_cross_entropy_backward(dx_sum: Array, count: Array, dloss: Array, dw_sum: Array | None = None, *, reduction: Literal['mean', 'sum'] = 'mean') -> Any: ...

def linear_cross_entropy_backward_(dx_sum: Array, count: Array, dloss: Array, dw_sum: Array | None = None, *, reduction: Literal['mean', 'sum'] = 'mean') -> None:
    """Gradients of linear_cross_entropy, from those of the sum of losses, in place.

    dx_sum: [..., hidden], dx of the forward call; becomes dx
    count: [], f32: what it returned
    dloss: [], f32: gradient of the loss
    dw_sum: [vocab, hidden], dw of the forward call; becomes dw
    reduction: that of the forward call (mean, sum)
    """

def kl_div(student: Array, teacher: Array, targets: Array | None = None, *, ignore_index: int = -100, temperature: float = 1.0, direction: Literal['forward', 'reverse'] = 'forward', reduction: Literal['mean', 'sum', 'none'] = 'mean', return_lse: bool = False, return_teacher_lse: bool = False, return_row_losses: bool = False, return_count: bool = False) -> Any:
    """Kullback-Leibler divergence of two rows of logits, for distillation.

    student: [..., vocab], logits
    teacher: [..., vocab], logits
    targets: [...], i64 or i32: ignore_index where a row does not count
    ignore_index: the target of rows that do not count; all others do
    temperature: divides all logits
    direction: forward: of the teacher from the student; reverse: of the student from the teacher (forward, reverse)
    reduction: of the losses of rows (mean, sum, none)
    return_lse: whether to return lse
    return_teacher_lse: whether to return teacher_lse
    return_row_losses: whether to return row_losses
    return_count: whether to return count

    Returns:
    loss: [] or [...], f32: one number unless reduction=none
    lse: [...], f32: temperature ln(sum(exp(student / temperature)))
    teacher_lse: [...], f32: that of the teacher
    row_losses: [...], f32: losses before they are reduced
    count: [], f32: rows that are not ignored
    """

@overload
def kl_div_backward(student: Same, teacher: Same, lse: Same, teacher_lse: Same, row_losses: Same, count: Same, dloss: Same, targets: Same | None = None, *, ignore_index: int = -100, temperature: float = 1.0, direction: Literal['forward', 'reverse'] = 'forward', reduction: Literal['mean', 'sum', 'none'] = 'mean') -> Same:
    """Gradient of kl_div with respect to the student's logits.

    student: [..., vocab], those of the forward call
    teacher: [..., vocab], those of the forward call
    lse: [...], f32: what it returned
    teacher_lse: [...], f32: what it returned
    row_losses: [...], f32: what it returned
    count: [], f32: what it returned
    dloss: [] or [...], f32: gradient of the loss
    targets: [...], i64 or i32: those of the forward call
    ignore_index: the target of rows that do not count; all others do
    temperature: divides all logits
    direction: forward: of the teacher from the student; reverse: of the student from the teacher (forward, reverse)
    reduction: of the losses of rows (mean, sum, none)

    Returns:
    dstudent: [..., vocab], gradient of student
    """
@overload
def kl_div_backward(student: Array, teacher: Array, lse: Array, teacher_lse: Array, row_losses: Array, count: Array, dloss: Array, targets: Array | None = None, *, ignore_index: int = -100, temperature: float = 1.0, direction: Literal['forward', 'reverse'] = 'forward', reduction: Literal['mean', 'sum', 'none'] = 'mean') -> Any: ...

def kl_div_backward_(student: Array, teacher: Array, lse: Array, teacher_lse: Array, row_losses: Array, count: Array, dloss: Array, targets: Array | None = None, *, ignore_index: int = -100, temperature: float = 1.0, direction: Literal['forward', 'reverse'] = 'forward', reduction: Literal['mean', 'sum', 'none'] = 'mean') -> None:
    """Gradient of kl_div with respect to the student's logits, in place.

    student: [..., vocab], those of the forward call; becomes dstudent
    teacher: [..., vocab], those of the forward call
    lse: [...], f32: what it returned
    teacher_lse: [...], f32: what it returned
    row_losses: [...], f32: what it returned
    count: [], f32: what it returned
    dloss: [] or [...], f32: gradient of the loss
    targets: [...], i64 or i32: those of the forward call
    ignore_index: the target of rows that do not count; all others do
    temperature: divides all logits
    direction: forward: of the teacher from the student; reverse: of the student from the teacher (forward, reverse)
    reduction: of the losses of rows (mean, sum, none)
    """

def moe_route(logits: Array, bias: Array | float | None = None, *, top_k: int = 2, score: Literal['softmax', 'sigmoid'] = 'softmax', normalize: bool = True, scale: float = 1.0, groups: int = 1, top_groups: int = 0, group_score: Literal['sum', 'max'] = 'sum', noise: float = 0.0, seed: int = 0, capacity: int = 0, return_counts: bool = False, return_order: bool = False, return_positions: bool = False, return_dropped: bool = False) -> Any:
    """Experts of each token, their weights, and the order of tokens by expert.

    logits: [..., experts]
    bias: [experts], f32: added to scores for the choice only; or one number for all
    top_k: experts that each token gets
    score: from logits to scores; softmax is over all experts (softmax, sigmoid)
    normalize: divide the weights of a token by their sum
    scale: factor of all weights
    groups: equal groups that the experts are in
    top_groups: groups that a token's experts may be from; 0: all
    group_score: of a group: the sum of its two largest scores, or the largest (sum, max)
    noise: standard deviation of the noise that is added to logits for the choice
    seed: of the noise
    capacity: most tokens of an expert; 0: any number
    return_counts: whether to return counts
    return_order: whether to return order
    return_positions: whether to return positions
    return_dropped: whether to return dropped

    Returns:
    weights: [..., top_k], f32
    ids: [..., top_k], i32: experts, by falling score
    counts: [experts], i32: tokens that each expert keeps
    order: [..., top_k], i32: slots by expert, then by token; -1 behind them
    positions: [..., top_k], i32: of slots in `order`; -1 if dropped
    dropped: [experts], i32: tokens beyond the capacity
    """

@overload
def moe_route_backward(logits: Same, ids: Same, weights: Same, dweights: Same, *, score: Literal['softmax', 'sigmoid'] = 'softmax', normalize: bool = True, scale: float = 1.0) -> Same:
    """Gradient of moe_route with respect to the logits.

    logits: [..., experts], those of the forward call
    ids: [..., top_k], i32: what it returned
    weights: [..., top_k], f32: what it returned
    dweights: [..., top_k], f32: gradient of the weights
    score: from logits to scores; softmax is over all experts (softmax, sigmoid)
    normalize: divide the weights of a token by their sum
    scale: factor of all weights

    Returns:
    dlogits: [..., experts], gradient of the logits
    """
@overload
def moe_route_backward(logits: Array, ids: Array, weights: Array, dweights: Array, *, score: Literal['softmax', 'sigmoid'] = 'softmax', normalize: bool = True, scale: float = 1.0) -> Any: ...

def moe_losses(logits: Array, ids: Array, *, score: Literal['softmax', 'sigmoid'] = 'softmax', return_load: bool = False, return_probability: bool = False, return_entropy: bool = False) -> Any:
    """Losses of a mixture of experts' router, and how its experts are used.

    logits: [..., experts]
    ids: [..., top_k], i32: experts, as moe_route returns them
    score: from logits to scores; softmax is over all experts (softmax, sigmoid)
    return_load: whether to return load
    return_probability: whether to return probability
    return_entropy: whether to return entropy

    Returns:
    load_balance: [], f32: 1 where everything is even
    z_loss: [], f32: mean of the squares of lse
    importance: [], f32: squared variation of the probabilities
    load: [experts], f32: part of the slots of each expert
    probability: [experts], f32: mean of each expert's
    entropy: [], f32: mean of the tokens' distributions
    """

@overload
def moe_losses_backward(logits: Same, load: Same | float, probability: Same | float, dload_balance: Same, dz_loss: Same, dimportance: Same, *, score: Literal['softmax', 'sigmoid'] = 'softmax') -> Same:
    """Gradient of moe_losses with respect to the logits.

    logits: [..., experts], those of the forward call
    load: [experts], f32: what it returned; or one number for all
    probability: [experts], f32: what it returned; or one number for all
    dload_balance: [], f32: gradient of load_balance
    dz_loss: [], f32: gradient of z_loss
    dimportance: [], f32: gradient of importance
    score: from logits to scores; softmax is over all experts (softmax, sigmoid)

    Returns:
    dlogits: [..., experts], gradient of the logits
    """
@overload
def moe_losses_backward(logits: Array, load: Array | float, probability: Array | float, dload_balance: Array, dz_loss: Array, dimportance: Array, *, score: Literal['softmax', 'sigmoid'] = 'softmax') -> Any: ...

def moe_losses_backward_(logits: Array, load: Array | float, probability: Array | float, dload_balance: Array, dz_loss: Array, dimportance: Array, *, score: Literal['softmax', 'sigmoid'] = 'softmax') -> None:
    """Gradient of moe_losses with respect to the logits, in place.

    logits: [..., experts], those of the forward call; becomes dlogits
    load: [experts], f32: what it returned; or one number for all
    probability: [experts], f32: what it returned; or one number for all
    dload_balance: [], f32: gradient of load_balance
    dz_loss: [], f32: gradient of z_loss
    dimportance: [], f32: gradient of importance
    score: from logits to scores; softmax is over all experts (softmax, sigmoid)
    """
