"""What the ops with a gradient compute, in PyTorch's own terms: judged in f64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F


def rms_norm(x: Any, weight: Any = None, residual: Any = None, *, eps: float = 1e-6) -> Any:
    total = x if residual is None else x + residual
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if residual is None else (out, total)


def layer_norm(x: Any, weight: Any = None, residual: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    total = x if residual is None else x + residual
    out = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return out if residual is None else (out, total)


def softmax(x: Any, *, scale: float = 1.0) -> Any:
    return torch.softmax(x * scale, -1)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "mish": F.mish,
}


def activation(x: Any, *, kind: str = "gelu") -> Any:
    return ACTIVATIONS[kind](x)


def add_gelu(x: Any, bias: Any, *, approximate: str = "none") -> Any:
    return F.gelu(x + bias, approximate=approximate)


def mul_add(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def gated_act(x: Any, *, act: str = "silu", layout: str = "split") -> Any:
    gate, up = x.chunk(2, -1) if layout == "split" else (x[..., 0::2], x[..., 1::2])
    return ACTIVATIONS[act](gate) * up


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    *,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    block_q: int = 0,
    block_kv: int = 0,
    return_lse: bool = False,
) -> Any:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    position = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])[None]
    seen = (key <= position) if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen & (key >= position - window) if window else seen
    seen = seen if mask is None else seen & (mask != 0)
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    if dropout:
        kept, factor = keeps(weights.shape, dropout, seed, offset)
        weights = weights * kept.to(weights) * factor
    out = (weights @ v).transpose(1, 2)
    return (out, scores.logsumexp(-1)) if return_lse else out


def keeps(shape: Any, dropout: float, seed: int, offset: int) -> tuple[torch.Tensor, float]:
    """Which probabilities ``[requests, heads, queries, keys]`` dropout keeps, and their factor: the definition, written
    down again."""
    golden, steps = np.uint64(0x9E3779B97F4A7C15), 1 << 16

    def mixed(z: Any) -> Any:
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)

    def stream(start: Any, number: Any) -> Any:
        return mixed(start + (number + np.uint64(1)) * golden)

    below = np.uint64(min(round(dropout * steps), steps - 1))
    requests, heads, queries, keys = np.ix_(*(np.arange(n, dtype=np.uint64) for n in shape))
    with np.errstate(over="ignore"):
        start = mixed(np.array([seed % 2**64], dtype=np.uint64) + golden)
        start = mixed(start + np.array([offset % 2**64], dtype=np.uint64) * golden)
        start = stream(start.reshape(1, 1, 1, 1), requests << np.uint64(32) | heads)
        eight, sixteen = np.uint64(8), np.uint64(16)
        cells = [index // sixteen * eight + index % eight for index in (queries, keys)]
        halves = [index // eight % np.uint64(2) for index in (queries, keys)]
        bits = stream(start, cells[0] << np.uint64(32) | cells[1])
        bits = bits >> (np.uint64(32) * halves[0] + sixteen * halves[1]) & np.uint64(steps - 1)
    return torch.from_numpy(bits >= below), steps / (steps - int(below))


def embedding(weight: Any, ids: Any) -> Any:
    return weight[ids]


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    act: str = "none",
    gate: str = "none",
    scale: float = 1.0,
    **_: Any,
) -> Any:
    out = x @ w.mT
    out = out if bias is None else out + bias
    if gate == "none":
        out = ACTIVATIONS[act](out)
    else:
        out = gated_act(out, act=act, layout="split" if gate == "halves" else "interleaved")
    out = out * scale
    return out if residual is None else out + residual


def rope(x: Any, positions: Any, cos: Any = None, sin: Any = None, *, theta: float = 10000.0, **_: Any) -> Any:
    half = x.shape[-1] // 2
    if cos is None:
        angles = positions[..., None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos(), angles.sin()
    else:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def qk_norm_rope(
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    positions: Any,
    cos: Any = None,
    sin: Any = None,
    *,
    eps: float = 1e-6,
    **options: Any,
) -> Any:
    normed = (rms_norm(q, q_weight, eps=eps), rms_norm(k, k_weight, eps=eps))
    return tuple(rope(heads, positions, cos, sin, **options) for heads in normed)


def losses(
    logits: Any, targets: Any, ignore_index: int, softcap: float, label_smoothing: float, z_loss: float
) -> tuple[Any, Any, Any]:
    """The loss and the lse of each row, and which of them count."""
    counted = targets != ignore_index
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = z.logsumexp(-1)
    own = z.gather(-1, targets.long().where(counted, 0)[..., None])[..., 0]
    loss = (1 - label_smoothing) * (lse - own) + label_smoothing * (lse - z.mean(-1)) + z_loss * lse.square()
    return loss.where(counted, 0), lse.where(counted, 0), counted


def reduced(losses: Any, count: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.sum() / count if reduction == "mean" else losses.sum()


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    return_count: bool = False,
) -> Any:
    rows, lse, counted = losses(logits, targets, ignore_index, softcap, label_smoothing, z_loss)
    count = counted.sum().to(logits.dtype)
    # What is kept for the gradient has none itself.
    more = [value.detach() for value, asked in ((lse, return_lse), (count, return_count)) if asked]
    loss = reduced(rows, count, reduction)
    return (loss, *more) if more else loss


def linear_cross_entropy(
    x: Any,
    w: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_count: bool = False,
    return_dx: bool = False,
    return_dw: bool = False,
) -> Any:
    rows, _, counted = losses(x @ w.T, targets, ignore_index, softcap, label_smoothing, z_loss)
    count = counted.sum().to(x.dtype)
    more = [count] if return_count else []
    for tensor, asked in ((x, return_dx), (w, return_dw)):
        if asked:
            more.append(torch.autograd.grad(rows.sum(), tensor, retain_graph=True)[0])
    loss = reduced(rows, count, reduction)
    return (loss, *more) if more else loss


def kl_div(
    student: Any,
    teacher: Any,
    targets: Any = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    direction: str = "forward",
    reduction: str = "mean",
    return_lse: bool = False,
    return_teacher_lse: bool = False,
    return_row_losses: bool = False,
    return_count: bool = False,
) -> Any:
    counted = torch.ones(student.shape[:-1], dtype=torch.bool) if targets is None else targets != ignore_index
    counted = counted.to(student.device)
    logs = [F.log_softmax(logits / temperature, -1) for logits in (student, teacher)]
    lses = [temperature * (logits / temperature).logsumexp(-1).where(counted, 0) for logits in (student, teacher)]
    other, weighing = logs if direction == "forward" else logs[::-1]
    rows = F.kl_div(other, weighing, reduction="none", log_target=True).sum(-1).where(counted, 0)
    count = counted.sum().to(student.dtype)
    asked = {
        "lse": (lses[0], return_lse),
        "teacher_lse": (lses[1], return_teacher_lse),
        "row_losses": (rows, return_row_losses),
        "count": (count, return_count),
    }
    # What is kept for the gradient has none itself.
    more = [value.detach() for value, wanted in asked.values() if wanted]
    loss = reduced(rows, count, reduction)
    return (loss, *more) if more else loss


def grouped_linear(
    x: Any, w: Any, counts: Any, bias: Any = None, *, act: str = "none", scale: float = 1.0, **plain: Any
) -> Any:
    groups = torch.repeat_interleave(torch.arange(len(counts)), counts)
    out = torch.einsum("rk,rnk->rn", x, w[groups])
    return scale * ACTIVATIONS[act](out if bias is None else out + bias[groups])


def moe_ffn(
    x: Any,
    w1: Any,
    w2: Any,
    ids: Any,
    weights: Any,
    b1: Any = None,
    b2: Any = None,
    shared_w1: Any = None,
    shared_w2: Any = None,
    residual: Any = None,
    *,
    act: str = "none",
    scale: float = 1.0,
    **plain: Any,
) -> Any:
    ids = ids.long()
    h = torch.einsum("...i,...kri->...kr", x, w1[ids])
    h = ACTIVATIONS[act](h if b1 is None else h + b1[ids])
    y = torch.einsum("...kr,...kor->...ko", h, w2[ids])
    out = (weights[..., None] * (y if b2 is None else y + b2[ids])).sum(-2)
    if shared_w1 is not None:
        out = out + ACTIVATIONS[act](x @ shared_w1.T) @ shared_w2.T
    return scale * out if residual is None else scale * out + residual


def moe_route(
    logits: Any,
    bias: Any = None,
    *,
    top_k: int = 2,
    scale: float = 1.0,
    return_counts: bool = False,
    return_order: bool = False,
    return_positions: bool = False,
    return_dropped: bool = False,
    **plain: Any,
) -> Any:
    scores = torch.softmax(logits, -1)
    ids = (scores if bias is None else scores + bias).topk(top_k).indices
    weights = scores.gather(-1, ids)
    counts = torch.bincount(ids.flatten(), minlength=logits.shape[-1])
    order = ids.flatten().argsort(stable=True)
    asked = {
        "counts": (counts, return_counts),
        "order": (order.view(ids.shape), return_order),
        "positions": (order.argsort().view(ids.shape), return_positions),
        "dropped": (torch.zeros_like(counts), return_dropped),
    }
    more = [value for value, wanted in asked.values() if wanted]
    return scale * weights / weights.sum(-1, keepdim=True), ids, *more


def moe_losses(
    logits: Any,
    ids: Any,
    *,
    return_load: bool = False,
    return_probability: bool = False,
    return_entropy: bool = False,
    **plain: Any,
) -> Any:
    experts = logits.shape[-1]
    load = F.one_hot(ids.long(), experts).flatten(0, -2).double().mean(0)
    p = torch.softmax(logits, -1).flatten(0, -2)
    mean = p.mean(0)
    losses = (
        experts * (load * mean).sum(),
        logits.logsumexp(-1).square().mean(),
        (mean - mean.mean()).square().mean() / mean.mean().square(),
    )
    # What tells how the experts are used has no gradient.
    statistics = (load, mean.detach(), torch.special.entr(p).sum(-1).mean().detach())
    asked = (return_load, return_probability, return_entropy)
    return *losses, *(value for value, wanted in zip(statistics, asked, strict=True) if wanted)
