"""Training on two processes, and ops on tensors that are spread over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warpsmith
from torch import distributed, nn

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="PyTorch without gloo"),
]

PROCESSES = 2


def on_both(folder: Path) -> None:
    """Forks, and does all work in both processes as a group."""
    import torch.distributed.fsdp
    import warpsmith.distributed  # noqa: F401

    torch.set_num_threads(1)
    child = os.fork()
    rank = 0 if child else 1
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=PROCESSES)
    works = {"ddp": with_ddp, "fsdp": with_fsdp, "shards": with_shards}
    torch.save({name: work(rank) for name, work in works.items()}, folder / f"{rank}.pt")
    distributed.destroy_process_group()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Model(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = warpsmith.nn.RMSNorm(32)
        self.mlp = warpsmith.nn.GatedMLP(32, 48)
        self.qkv = warpsmith.nn.FusedLinear(32, 96)
        self.attention = warpsmith.nn.FlashAttention(causal=True)
        self.out = warpsmith.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x))[:, :, None].chunk(3, -1)
        x = x + self.attention(q, k, v).flatten(2)
        return self.out(x + self.mlp(x))


def batch() -> torch.Tensor:
    return torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(1))


def targets() -> torch.Tensor:
    return torch.randint(0, 48, (4, 40), generator=torch.Generator().manual_seed(3))


def expected() -> dict[str, torch.Tensor]:
    model = Model()
    model(batch()).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def part(rank: int) -> torch.Tensor:
    return batch().chunk(PROCESSES)[rank]


def with_ddp(rank: int) -> dict[str, torch.Tensor]:
    model = nn.parallel.DistributedDataParallel(Model())
    model(part(rank)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


def with_fsdp(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    fully_shard(model.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(part(rank)).square().mean().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def with_shards(rank: int) -> dict[str, Any]:
    import warpsmith.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    x = distribute_tensor(batch(), mesh, [Shard(0)]).requires_grad_()
    weights = [torch.randn(32, generator=torch.Generator().manual_seed(2)), torch.randn(48, 32) * 0 + 0.1]
    norm, matrix = (distribute_tensor(weight, mesh, [Replicate()]).requires_grad_() for weight in weights)
    normed = warpsmith.rms_norm(x, norm)
    product = warpsmith.linear(normed, matrix, act="silu")
    assert normed.placements == product.placements == (Shard(0),), (normed.placements, product.placements)
    product.square().sum().backward()
    found = {"out": product.full_tensor(), "grads": [tensor.grad.full_tensor() for tensor in (x, norm, matrix)]}
    # The loss of a head, on both.
    x = distribute_tensor(batch(), mesh, [Replicate()]).requires_grad_()
    matrix.grad = None
    warpsmith.linear_cross_entropy(x, matrix, distribute_tensor(targets(), mesh, [Replicate()])).backward()
    found["head"] = [tensor.grad.full_tensor() for tensor in (x, matrix)]
    # By the second dimension, and what works element by element.
    x = distribute_tensor(batch(), mesh, [Shard(1)])
    for name, call in BY_ROW.items():
        result = call(x)
        assert result.placements == (Shard(1),), (name, result.placements)
        found[name] = result.full_tensor()
    return found


BY_ROW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": warpsmith.layer_norm,
    "activation": lambda x: warpsmith.activation(x, kind="gelu"),
    "gated_act": warpsmith.gated_act,
    "softmax": warpsmith.softmax,
    "mul_add": lambda x: warpsmith.mul_add(x, x, x),
}


@pytest.fixture
def found(tmp_path: Path, run_python: Callable[..., str]) -> list[dict[str, Any]]:
    """What each of two processes of a group found."""
    here = str(Path(__file__).parent)
    run_python(
        f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {here!r})
        import test_distributed
        test_distributed.on_both(Path({str(tmp_path)!r}))
        """
    )
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES)]


def test_on_two_processes(found: list[dict[str, Any]]) -> None:
    """All in one: to start the two takes longer than their work."""
    whole = expected()
    x = batch().requires_grad_()
    norm = torch.randn(32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    matrix = torch.full((48, 32), 0.1).requires_grad_()
    product = warpsmith.linear(warpsmith.rms_norm(x, norm), matrix, act="silu")
    product.square().sum().backward()
    head = [batch().requires_grad_(), matrix.detach().clone().requires_grad_()]
    warpsmith.linear_cross_entropy(*head, targets()).backward()
    for results in found:
        for kind in ("ddp", "fsdp"):
            assert results[kind].keys() == whole.keys()
            for name, grad in results[kind].items():
                torch.testing.assert_close(grad, whole[name], rtol=1e-4, atol=1e-6)
        shards = results["shards"]
        torch.testing.assert_close(shards["out"], product.detach())
        for one, other in zip(shards["grads"], (x, norm, matrix), strict=True):
            torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-5)
        for one, other in zip(shards["head"], head, strict=True):
            torch.testing.assert_close(one, other.grad)
        for name, call in BY_ROW.items():
            torch.testing.assert_close(shards[name], call(batch()))
