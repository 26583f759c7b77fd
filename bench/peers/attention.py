"""Attention and the operations on its cache in other libraries."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from .common import DTYPES, Case, Work, flashinfer, random_like
from .memory import rotated

# Scores that attention in separate steps may leave in memory.
MOST_SCORES = 1 << 29
# Requests that are worth calling attention for one by one.
MOST_REQUESTS = 32


def kv_store(case: Case, device: str) -> Work | None:
    if "cos" in case.given or case.option("rotary_dim", "0") != "0":
        return None
    names = ("num_tokens", "num_kv_heads", "head_dim", "page_size", "num_pages")
    tokens, heads, dim, page_size, pages = (case.size(name) for name in names)
    normal = random_like(case, device)
    to = DTYPES.get(case.option("to", "auto"), DTYPES[case.dtype])
    rope, eight_bit = "positions" in case.given, to.itemsize == 1
    interleaved = case.option("layout", "half") == "interleaved"
    theta, limit = case.number("theta", 10000.0), torch.finfo(to).max
    frequencies = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    # Torch cannot index 8-bit floats; bytes are moved in their place.
    stored = torch.uint8 if eight_bit else to

    def fresh():
        slots = torch.randperm(pages * page_size, device=device)[:tokens]
        caches = [torch.zeros(pages * page_size, heads, dim, device=device, dtype=stored) for _ in range(2)]
        scale = torch.rand(1, device=device) + 0.5
        return (
            normal(tokens, heads, dim),
            normal(tokens, heads, dim),
            slots,
            torch.arange(tokens, device=device),
            scale,
            *caches,
        )

    def cast(x, scale):
        return (x.float() / scale).clamp(-limit, limit).to(to).view(torch.uint8) if eight_bit else x

    def call(k, v, slots, positions, scale, k_cache, v_cache):
        if rope:
            k = rotated(k, positions, frequencies, interleaved)
        k_cache[slots] = cast(k, scale)
        v_cache[slots] = cast(v, scale)

    calls = {"torch": call}
    library = flashinfer(device)
    if library and not rope and not eight_bit and case.dtype != "f32":
        # It finds a token's page by request and position: one request whose pages are in random order.
        count = -(-tokens // page_size)
        indices = torch.randperm(pages, device=device)[:count].int()
        indptr = torch.tensor([0, count], device=device, dtype=torch.int32)
        last = torch.tensor([tokens - (count - 1) * page_size], device=device, dtype=torch.int32)
        batch = torch.zeros(tokens, device=device, dtype=torch.int32)
        at = torch.arange(tokens, device=device, dtype=torch.int32)

        def append(k, v, slots, positions, scale, k_cache, v_cache):
            paged = tuple(cache.view(pages, page_size, heads, dim) for cache in (k_cache, v_cache))
            library.append_paged_kv_cache(k, v, batch, at, paged, indices, indptr, last)

        calls["flashinfer"] = append
    return Work(fresh, calls, call)


def kv_copy(case: Case, device: str) -> Work:
    names = ("num_pairs", "num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim")
    pairs, layers, pages, page_size, heads, dim = (case.size(name) for name in names)
    eight_bit = DTYPES[case.dtype].itemsize == 1
    dtype = torch.uint8 if eight_bit else DTYPES[case.dtype]

    def fresh():
        chosen = torch.randperm(pages, device=device)[: 2 * pairs]
        cache = torch.zeros(layers, pages, page_size, heads, dim, device=device, dtype=dtype)
        return cache, chosen[:pairs], chosen[pairs:]

    def call(cache, source, target):
        cache[:, target] = cache[:, source]

    def copy(cache, source, target):
        cache.index_copy_(1, target, cache.index_select(1, source))

    return Work(fresh, {"torch": call, "torch.index_copy_": copy}, call)


def merge_states(case: Case, device: str) -> Work | None:
    if "counts" in case.given:
        return None
    tokens, parts, heads, dim = (case.size(name) for name in ("num_tokens", "num_parts", "num_heads", "head_dim"))
    normal = random_like(case, device)
    to = DTYPES.get(case.option("to", "auto"), DTYPES[case.dtype])

    def fresh():
        return normal(parts, tokens, heads, dim), torch.randn(parts, tokens, heads, device=device)

    def call(outs, lses):
        lse = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - lse)
        return (weights[..., None] * outs.float()).sum(0).to(to), lse

    calls = {"torch": call}
    library = flashinfer(device)
    if library and to == DTYPES[case.dtype] and parts == 2:
        calls["flashinfer"] = lambda outs, lses: library.merge_state(outs[0], lses[0], outs[1], lses[1])
    return Work(fresh, calls, call)


def attention(case: Case, device: str) -> Work | None:
    batch, q_len, kv_len = (case.size(name) for name in ("batch", "q_len", "kv_len"))
    heads, kv_heads, dim = (case.size(name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    causal = case.option("causal", "false") == "true" and q_len > 1
    others = {"window", "softcap", "scale", "dropout"} & case.values.keys()
    # Elsewhere the first query is at the first key.
    if case.given or others or (causal and q_len != kv_len):
        return None
    normal = random_like(case, device)

    def fresh():
        return normal(batch, q_len, heads, dim), *(normal(batch, kv_len, kv_heads, dim) for _ in range(2))

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    def call(q, k, v, *_):
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    if device == "cpu":
        # There PyTorch is up to twice as fast where the tokens of a head follow each other: it gets copies that do.
        def both_layouts():
            tensors = fresh()
            return *tensors, *(x.transpose(1, 2).contiguous() for x in tensors)

        return Work(both_layouts, {"torch": call, "torch (head by head)": lambda *tensors: attend(*tensors[3:])})

    from torch.nn.attention import SDPBackend, sdpa_kernel

    def on(backend):
        def chosen(q, k, v):
            with sdpa_kernel(backend):
                return call(q, k, v)

        return chosen

    if case.dtype == "f32":
        return Work(
            fresh, {"torch (efficient)": on(SDPBackend.EFFICIENT_ATTENTION)} if heads == kv_heads else {"torch": call}
        )
    calls = {"torch (flash)": on(SDPBackend.FLASH_ATTENTION), "torch (cudnn)": on(SDPBackend.CUDNN_ATTENTION)}
    library = flashinfer(device)
    if library and batch == 1 and q_len > 1 and dim in (64, 128, 256):

        def prefill(q, k, v):
            return library.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=causal, backend="fa3")

        calls["flashinfer (fa3)"] = prefill
    # With all scores in memory: as PyTorch does it, in f32, and in the element type.
    if q_len > 1 and batch * heads * q_len * kv_len <= MOST_SCORES:
        hidden = torch.ones(q_len, kv_len, device=device, dtype=torch.bool).triu(1) if causal else None

        def unfused(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            k, v = (x.repeat_interleave(heads // kv_heads, 1) if heads != kv_heads else x for x in (k, v))
            scores = q @ k.transpose(-1, -2) * dim**-0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            return (scores.softmax(-1) @ v).transpose(1, 2)

        calls |= {"torch (math)": on(SDPBackend.MATH), "torch (unfused)": unfused}
    return Work(fresh, calls)


def attention_backward(case: Case, device: str) -> Work | None:
    """The backward pass alone. Only the deterministic kind sums the gradients of queries in a fixed order."""
    batch, q_len, kv_len = (case.size(name) for name in ("batch", "q_len", "kv_len"))
    heads, kv_heads, dim = (case.size(name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    causal = case.option("causal", "false") == "true" and q_len > 1
    others = {"window", "softcap", "scale", "dropout"} & case.values.keys()
    if case.given or others or (causal and q_len != kv_len):
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    normal = random_like(case, device)
    sizes = [(q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)]

    def fresh():
        inputs = [normal(batch, length, count, dim).transpose(1, 2).requires_grad_() for length, count in sizes]
        return normal(batch, q_len, heads, dim).transpose(1, 2), *inputs

    def gradients(backend, deterministic=False):
        graphs: dict[int, torch.Tensor] = {}

        def call(dout, *inputs):
            if id(dout) not in graphs:
                with sdpa_kernel(backend):
                    graphs[id(dout)] = F.scaled_dot_product_attention(
                        *inputs, is_causal=causal, enable_gqa=heads != kv_heads
                    )
            torch.use_deterministic_algorithms(deterministic)
            try:
                return torch.autograd.grad(graphs[id(dout)], inputs, dout, retain_graph=True)
            finally:
                torch.use_deterministic_algorithms(False)

        return call

    if device == "cpu":
        return Work(fresh, {"torch": gradients(list(SDPBackend.__members__.values()))})
    if case.dtype == "f32":
        if heads != kv_heads:
            return None
        return Work(fresh, {"torch (efficient)": gradients(SDPBackend.EFFICIENT_ATTENTION)})
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    calls = {
        "torch (flash)": gradients(flash),
        "torch (flash, deterministic)": gradients(flash, deterministic=True),
        "torch (cudnn)": gradients(cudnn),
    }
    return Work(fresh, calls)


def paged_attention(case: Case, device: str) -> Work | None:
    if "k_scale" in case.given:
        return None
    requests, q_len = case.size("requests"), case.size("q_len")
    heads, kv_heads, dim = case.size("num_heads"), case.size("num_kv_heads"), case.size("head_dim")
    page, prefix = case.size("page_size"), case.size("prefix_len")
    normal = random_like(case, device)
    # FlashInfer merges parts of heads of these sizes only; with others its kernels take the GPU from the process.
    library = flashinfer(device) if case.dtype != "f32" and dim in (64, 128, 256, 512) else None
    lengths = case.kv_lens(requests)
    mixed, longest = len(set(lengths)) > 1, max(lengths)
    pages = [-(-keys // page) for keys in lengths]
    shared = prefix // page
    own = [count - shared for count in pages]
    # Of single queries, fa3 is 3 to 13 times slower than fa2, and takes minutes to compile.
    backends = (["fa2"] + ["fa3"] * (q_len > 1) + ["cascade"] * ("group_starts" in case.given)) if library else []

    def ints(values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    def starts(counts: list[int]) -> torch.Tensor:
        return ints([0, *itertools.accumulate(counts)])

    def plans(kv: torch.Tensor) -> dict[str, object]:
        """FlashInfer's wrappers, planned for this cache; planning is not timed."""
        last = ints([(keys - 1) % page + 1 for keys in lengths])
        # In random order, as Warpsmith's.
        order = torch.randperm(len(kv), device=device).int()
        prefix_pages, own_pages = order[:shared], order[shared:]
        table = torch.cat([part for mine in own_pages.split(own) for part in (prefix_pages, mine)])
        space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        sizes, types = (heads, kv_heads, dim, page), {"q_data_type": kv.dtype, "kv_data_type": kv.dtype}
        queries = starts([q_len] * requests)

        def plan(backend: str) -> object:
            if backend == "cascade":
                wrapper = library.MultiLevelCascadeAttentionWrapper(2, space, "NHD")
                wrapper.plan(
                    [ints([0, requests * q_len]), queries],
                    [ints([0, shared]), starts(own)],
                    [prefix_pages, own_pages],
                    [ints([page]), last],
                    *sizes,
                    q_data_type=kv.dtype,
                )
            elif q_len == 1:
                wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                    space, "NHD", use_tensor_cores=True, backend=backend
                )
                wrapper.plan(starts(pages), table, last, *sizes, **types)
            else:
                wrapper = library.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
                wrapper.plan(queries, starts(pages), table, last, *sizes, causal=True, **types)
            return wrapper

        made = {}
        for backend in backends:
            try:
                made[backend] = plan(backend)
            except Exception as error:  # what one of them lacks, another may have
                made[backend] = error
        return made

    def side_by_side(kv: torch.Tensor) -> list[torch.Tensor]:
        """The keys and values of each request without pages, padded to the longest."""
        out = [kv.new_zeros(requests, longest, kv_heads, dim) for _ in range(2)]
        for r, part in enumerate(kv.split(own)):
            for side, target in enumerate(out):
                target[r, : lengths[r]] = part[:, side].reshape(-1, kv_heads, dim)[: lengths[r]]
        return [x.transpose(1, 2).contiguous() for x in out]

    def run(backend: str):
        def call(q, k, v, kv, made, _):
            if isinstance(made[backend], Exception):
                raise made[backend]
            return made[backend].run(q, kv)

        return call

    def one_by_one(kv: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """The keys and values of each request without pages."""
        parts = [part.unbind(1) for part in kv.split(own)]
        flat = [[x.reshape(-1, kv_heads, dim)[:keys] for x in part] for part, keys in zip(parts, lengths, strict=True)]
        return [tuple(x.transpose(0, 1)[None].contiguous() for x in part) for part in flat]

    # PyTorch has no pages: it gets the same keys and values side by side, if they do not become far more that way; and,
    # of few requests with different lengths, one after the other.
    padded = not shared and requests * longest <= 4 * sum(lengths)
    alone = mixed and q_len == 1 and not shared and (requests <= MOST_REQUESTS or device == "cpu")

    def fresh():
        q = normal(requests * q_len, heads, dim)
        kv = normal(shared + sum(own), 2, page, kv_heads, dim)
        k, v = side_by_side(kv) if padded else (None, None)
        return q, k, v, kv, plans(kv) if library else {}, one_by_one(kv) if alone else []

    seen = (torch.arange(longest, device=device) < ints(lengths)[:, None])[:, None, None] if mixed else None

    def attend(q, k, v, *_):
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q_len, longest) if q_len > 1 else seen
        queries = q.view(requests, q_len, heads, dim).transpose(1, 2)
        return F.scaled_dot_product_attention(queries, k, v, mask, enable_gqa=heads != kv_heads)

    def attend_alone(q, k, v, kv, made, parts):
        gqa = heads != kv_heads
        each = zip(q.view(requests, 1, heads, 1, dim).unbind(0), parts, strict=True)
        return torch.cat([F.scaled_dot_product_attention(one, k, v, enable_gqa=gqa) for one, (k, v) in each])

    calls = {"torch (padded)" if mixed else "torch": attend} if padded else {}
    calls |= {"torch (one by one)": attend_alone} if alone else {}
    calls |= {f"flashinfer {backend}": run(backend) for backend in backends}
    return Work(fresh, calls) if calls else None
