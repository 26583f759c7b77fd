"""A GPT-2 trained with and without the patch, on the documents of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warpsmith
from device import DEVICE, generator

models = pytest.importorskip("models", reason="transformers is not installed")

DOCUMENTS = Path(__file__).parents[3] / "docs"
LENGTH, ROWS = 64, 8


def text() -> torch.Tensor:
    """The bytes of the documents."""
    files = sorted(DOCUMENTS.rglob("*.md"))
    assert files, f"no documents in {DOCUMENTS}"
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).to(DEVICE)


def train(steps: int, *, patched: bool) -> list[float]:
    """The losses of some steps, from the same weights on the same text."""
    model = models.make("gpt2", vocab_size=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    if patched:
        warpsmith.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, chosen = text(), generator(0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (ROWS,), generator=chosen)
        batch = torch.stack([data[start : start + LENGTH] for start in starts]).long()
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_first_steps_agree() -> None:
    plain, patched = train(4, patched=False), train(4, patched=True)
    assert patched == pytest.approx(plain, rel=1e-3)
    assert plain[-1] < plain[0]


@pytest.mark.slow
def test_the_same_loss_after_200_steps() -> None:
    plain, patched = train(200, patched=False), train(200, patched=True)
    # Of the last steps, because a single batch says little.
    last, last_patched = (sum(losses[-20:]) / 20 for losses in (plain, patched))
    assert last < 0.7 * plain[0], "it learns"
    assert last_patched == pytest.approx(last, rel=5e-3)
    print(f"loss {plain[0]:.3f} at first, {last:.4f} after 200 steps, {last_patched:.4f} with the patch")
