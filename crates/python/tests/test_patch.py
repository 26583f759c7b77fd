"""Patched models of transformers against unpatched ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE
from torch._dynamo import lookup_backend
from warpsmith import _sdpa

models = pytest.importorskip("models", reason="transformers is not installed")
from transformers import DynamicCache, StaticCache  # noqa: E402


@pytest.fixture(params=models.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for op in ("rms_norm", "layer_norm", "linear", "attention", "rope", "qk_norm_rope"):
        real = getattr(warpsmith.ops, op)
        monkeypatch.setattr(warpsmith.ops, op, lambda *a, real=real, op=op, **k: calls.append(op) or real(*a, **k))
    # Usual calls of attention go straight to the kernel.
    direct = _sdpa.ATTENTION
    monkeypatch.setattr(_sdpa, "ATTENTION", lambda *a, **k: calls.append("attention") or direct(*a, **k))
    return calls


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    plain = models.make(name, **options)
    patched = copy.deepcopy(plain)
    warpsmith.patch(patched)
    return plain, patched


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_logits(name: str, kernel_calls: list[str]) -> None:
    plain, patched = pair(name)
    kernel_calls.clear()
    ids = models.tokens()
    close(patched(ids).logits, plain(ids).logits)
    rotations = {"qwen3": ["qk_norm_rope"] * 2, "llama": ["rope"] * 4, "gpt2": []}[name]
    products = {"qwen3": 6, "llama": 6, "gpt2": 4}[name]
    assert kernel_calls.count("rms_norm") + kernel_calls.count("layer_norm") == 5
    assert [call for call in kernel_calls if "rope" in call] == rotations
    assert kernel_calls.count("linear") == products and kernel_calls.count("attention") == 2


@torch.no_grad()
def test_left_padding_is_not_seen(name: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens(3, 8)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :5] = 0, 0
    found, expected = (model(ids, attention_mask=mask).logits for model in (patched, plain))
    seen = mask.bool()
    close(found[seen], expected[seen])
    other = ids.clone()
    other[~seen] = 7
    close(patched(other, attention_mask=mask).logits[seen], found[seen], 1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_caches(name: str, kind: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens(2, 10)
    expected = plain(ids).logits
    if kind == "static":
        cache = StaticCache(config=patched.config, max_cache_len=16)
    else:
        cache = DynamicCache(config=patched.config)
    found = [patched(ids[:, :6], past_key_values=cache).logits]
    found += [patched(ids[:, at : at + 1], past_key_values=cache).logits for at in range(6, 8)]
    # Several at once after a prefix.
    found.append(patched(ids[:, 8:], past_key_values=cache).logits)
    close(torch.cat(found, 1), expected)


def test_generation(name: str) -> None:
    plain, patched = pair(name)
    ids, mask = models.tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    for cache in (None, "static"):
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
        if cache is not None:
            options["cache_implementation"] = cache
        assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))


@torch.no_grad()
def test_sliding_windows() -> None:
    options = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    plain, patched = pair("qwen3", **options)
    ids = models.tokens(2, 12)
    expected = plain(ids).logits
    close(patched(ids).logits, expected)
    assert (models.make("qwen3")(ids).logits - expected).abs().max() > 1e-2, "the window matters"


def test_gradients(name: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens()
    for model in (plain, patched):
        model(ids, labels=ids).loss.backward()
    for (one_name, one), (other_name, other) in zip(plain.named_parameters(), patched.named_parameters(), strict=True):
        assert one_name == other_name
        close(other.grad, one.grad, 1e-3)


def test_checkpointing(name: str) -> None:
    plain, patched = pair(name)
    patched.gradient_checkpointing_enable()
    ids = models.tokens()
    for model in (plain, patched):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(ids, labels=ids).loss.backward()
    for one, other in zip(plain.parameters(), patched.parameters(), strict=True):
        close(other.grad, one.grad, 1e-3)


@torch.no_grad()
def test_autocast(name: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens()
    expected = plain.double()(ids).logits
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = patched(ids).logits
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 0.03, error


@torch.no_grad()
def test_half_precision_is_judged_against_double(name: str) -> None:
    plain = models.make(name).bfloat16()
    patched = copy.deepcopy(plain)
    warpsmith.patch(patched)
    ids = models.tokens()
    errors = [
        (model(ids).logits.double() - copy.deepcopy(plain).double()(ids).logits).abs() for model in (plain, patched)
    ]
    assert errors[1].mean() <= 1.2 * errors[0].mean(), [error.mean() for error in errors]


# Llama's code is Qwen3's without two norms.
@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
@torch.no_grad()
def test_whole_graphs(name: str) -> None:
    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lookup_backend("aot_eager")(graph, inputs)

    _, patched = pair(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 1})
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend=keep, fullgraph=True)
    for length in (9, 5):
        ids = models.tokens(2, length)
        close(compiled(ids, use_cache=False).logits, patched(ids).logits, 1e-5)
    # Norms are left to the compiler. The second graph is for any length.
    ours = [target for target in found if target.startswith("warpsmith")]
    calls = [sum(name in target for target in ours) for name in ("norm", "linear", "attention")]
    assert calls == [0, 2 * (2 if name == "gpt2" else 3), 2], found


@torch.no_grad()
def test_hidden_states_are_returned(name: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens()
    found, expected = (model(ids, output_hidden_states=True).hidden_states for model in (patched, plain))
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_unpatching_restores_exactly(name: str) -> None:
    model = models.make(name)
    before = dict(model.named_modules())
    attention, parameters = model.config._attn_implementation, dict(model.named_parameters())
    ids = models.tokens()
    expected = model(ids).logits
    report = warpsmith.patch(model)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(model.get_parameter(key) is value for key, value in parameters.items())
    assert warpsmith.patch(model) is report, "patching twice changes nothing"
    assert any(model.get_submodule(path) is not module for path, module in before.items())
    warpsmith.unpatch(model)
    assert list(before) == [path for path, _ in model.named_modules()]
    assert all(model.get_submodule(path) is module for path, module in before.items())
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, expected)
    assert vars(model).keys() == vars(models.make(name)).keys()
    warpsmith.unpatch(model)


def test_unpatched_models_have_the_parameters_of_now(name: str) -> None:
    model = models.make(name)
    warpsmith.patch(model)
    state = {key: value + 0.1 for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.train()
    warpsmith.unpatch(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_reports(name: str) -> None:
    model = models.make(name)
    report = warpsmith.patch(model)
    assert report.swapped["attention"] == ("sdpa", "warpsmith.sdpa")
    kinds = {was for was, _ in report.swapped.values()}
    norms = {"qwen3": "Qwen3RMSNorm", "llama": "LlamaRMSNorm", "gpt2": "LayerNorm"}[name]
    assert norms in kinds and any("MLP" in kind for kind in kinds)
    assert "lm_head" in report.left and all(why for _, why in report.left.values())
    assert norms in repr(report) and "lm_head" not in repr(report) and "<td>" in report._repr_html_()


def test_what_cannot_be_swapped_is_left() -> None:
    model = models.make("llama", hidden_act="tanh")
    first = model.model.layers[0]
    first.input_layernorm.register_forward_hook(lambda *_: None)
    report = warpsmith.patch(model)
    assert report.left["model.layers.0.mlp"] == ("LlamaMLP", "no kernel has its activation tanh")
    assert report.left["model.layers.0.input_layernorm"][1] == "it has hooks"
    assert "model.layers.1.input_layernorm" in report.swapped
    eager = models.make("llama", attn_implementation="eager", output_attentions=True)
    assert "attention weights" in warpsmith.patch(eager).left["attention"][1]
    assert eager(models.tokens()).attentions is not None


def test_other_models_are_refused() -> None:
    with pytest.raises(warpsmith.UnsupportedError, match=r"expected a model of transformers.*qwen3.*got Linear"):
        warpsmith.patch(torch.nn.Linear(3, 4))


def test_other_instances_are_not_touched(name: str) -> None:
    plain, patched = pair(name)
    kinds = {type(module).__module__ for module in plain.modules()}
    assert not any(kind.startswith("warpsmith") for kind in kinds)
    assert plain.config._attn_implementation == "sdpa" and patched.config._attn_implementation == "warpsmith"


def test_saving_copying_and_moving(name: str, tmp_path: Path) -> None:
    plain, patched = pair(name)
    ids = models.tokens()
    patched.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).to(DEVICE)
    close(loaded(ids).logits, plain(ids).logits)
    twin = copy.deepcopy(patched)
    close(twin(ids).logits, plain(ids).logits)
    warpsmith.unpatch(twin)
    close(twin(ids).logits, plain(ids).logits)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    close(patched(ids).logits, plain(ids).logits)
    close(patched.double()(ids).logits, plain.double()(ids).logits, 1e-6)
    tied = models.make(name, tie_word_embeddings=True)
    warpsmith.patch(tied)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
