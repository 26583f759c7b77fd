"""The loss of patched models, which stores no logits, against that of unpatched ones."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

models = pytest.importorskip("models", reason="transformers is not installed")

#: Two of different results; one with a limit of logits; one whose head is its embedding.
NAMES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
}


def pair(name: str) -> tuple[Any, Any]:
    plain = models.make(name, **NAMES[name]).train()
    patched = copy.deepcopy(plain)
    warpsmith.patch(patched)
    return plain, patched


def labels(ids: torch.Tensor) -> torch.Tensor:
    found = ids.clone()
    found[0, :4], found[1, -1] = -100, -100
    return found


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"num_items_in_batch": 40},
    "accumulated_on_a_device": {"num_items_in_batch": torch.tensor(40)},
    "another_ignored_label": {"ignore_index": 7},
    "shifted_by_the_caller": {"shift_labels": None},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients(name: str, call: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens(2, 12)
    options = dict(CALLS[call])
    chosen = labels(ids)
    if "shift_labels" in options:
        options["shift_labels"] = chosen.roll(-1, 1)
    if "ignore_index" in options:
        chosen = ids.where(chosen >= 0, 7)
    found, expected = (model(ids, labels=chosen, **options) for model in (patched, plain))
    assert found.logits is None and expected.logits is not None and type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    found.loss.backward()
    expected.loss.backward()
    for one, other in zip(plain.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-4)


def test_a_batch_of_ignored_labels() -> None:
    ids = models.tokens()
    found, expected = (model(ids, labels=torch.full_like(ids, -100)).loss for model in pair("llama"))
    assert found.isnan() and expected.isnan()


@pytest.mark.parametrize("name", NAMES)
def test_under_autocast(name: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens(2, 12)
    exact = copy.deepcopy(plain).double()
    wide = exact(ids, labels=ids).loss
    wide.backward()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        losses = [model(ids, labels=ids).loss for model in (plain, patched)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1].double(), wide.double(), rtol=5e-3, atol=5e-3)
    errors = []
    for model in (plain, patched):
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        errors.append(sum(float((one.grad - other.grad).square().sum()) for one, other in pairs))
    assert errors[1] <= 1.5 * errors[0], errors


def test_calls_that_want_the_logits_have_them() -> None:
    plain, patched = pair("llama")
    ids = models.tokens()
    assert patched(ids).logits is not None
    assert patched(ids, labels=ids, logits_to_keep=ids.shape[1]).logits is not None
    assert patched(ids, labels=ids, return_dict=False)[1].shape == (*ids.shape, 96)
    found, expected = (model.eval()(ids, labels=ids) for model in (patched, plain))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_hidden_states_come_too() -> None:
    plain, patched = pair("llama")
    ids = models.tokens()
    found, expected = (model(ids, labels=ids, output_hidden_states=True) for model in (patched, plain))
    assert list(found) == [name for name in expected if name != "logits"]
    torch.testing.assert_close(found.hidden_states[-1], expected.hidden_states[-1], rtol=1e-4, atol=1e-4)


def test_a_head_that_is_more_than_a_product_is_called() -> None:
    plain, patched = pair("llama")
    ids, calls = models.tokens(), []
    patched.lm_head.register_forward_hook(lambda *_: calls.append(None))
    found = patched(ids, labels=ids)
    assert calls and found.logits is not None
    torch.testing.assert_close(found.loss, plain(ids, labels=ids).loss, rtol=1e-5, atol=1e-5)


def test_models_with_a_loss_of_their_own_keep_it() -> None:
    model = models.make("llama")
    model.loss_type = "ForMaskedLM"
    assert warpsmith.patch(model).left["loss"][1] == "it is ForMaskedLM"
    _, patched = pair("llama")
    patched.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 3
    ids = models.tokens()
    assert patched(ids, labels=ids).loss == 3


def test_a_frozen_head() -> None:
    plain, patched = pair("llama")
    ids = models.tokens()
    for model in (plain, patched):
        model.lm_head.weight.requires_grad_(False)
        model(ids, labels=ids).loss.backward()
        assert model.lm_head.weight.grad is None
    for one, other in zip(plain.model.parameters(), patched.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-4)


def test_a_whole_graph() -> None:
    _, patched = pair("llama")
    ids = models.tokens()
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    found, expected = (model(ids, labels=ids, use_cache=False).loss for model in (compiled, patched))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


#: What PyTorch would compute attention, norms, activations and losses with.
THEIRS = ("attention", "softmax", "nll_loss", "layer_norm", "rms_norm", "rsqrt", "silu", "gelu", "tanh", "pow")


class Calls(TorchDispatchMode):
    """Which ops are called, on the way back too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*models.NAMES, *models.OTHERS])
@pytest.mark.filterwarnings("error::warpsmith.FallbackWarning")
def test_a_step_runs_on_kernels_alone(name: str, dtype: torch.dtype) -> None:
    """Forward and backward: but for additions and plain products, nothing of PyTorch's, and no fallback."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gpt2" else {}
    model = models.make(name, **off).to(dtype).train()
    ids = models.tokens(2, 12)

    def step() -> tuple[set[str], list[str]]:
        """Ours and theirs."""
        with Calls() as calls:
            model(ids, labels=ids, use_cache=False).loss.backward()
        ours = {call.split(".")[1] for call in calls.names if "warpsmith" in call}
        return ours, [call for call in calls.names if "warpsmith" not in call and any(part in call for part in THEIRS)]

    ours, theirs = step()
    assert not ours and len(theirs) > 3, "before"
    warpsmith._sdpa.note.cache_clear()
    warpsmith.patch(model)
    ours, theirs = step()
    assert {"attention", "attention_backward", "linear_cross_entropy"} <= ours, ours
    assert not theirs, theirs
