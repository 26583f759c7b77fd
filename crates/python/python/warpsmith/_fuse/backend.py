"""The backend of `torch.compile`."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from warpsmith._fuse.patterns import simplify
from warpsmith._fuse.products import shorten
from warpsmith._fuse.program import Program, fuse_graph, rewrite
from warpsmith._fuse.writer import hint_of, value_of
from warpsmith._native import FusedCall
from warpsmith.errors import ArgumentError, FallbackWarning

#: Ops that are replaced by simpler ones before anything is fused. Others stay as they are: what PyTorch has a kernel
#: for, and what fused graphs have a rule for.
DECOMPOSED = (
    "addcdiv addcmul elu elu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh "
    "hardtanh_backward leaky_relu leaky_relu_backward lerp mish_backward mse_loss mse_loss_backward rsub "
    "smooth_l1_loss smooth_l1_loss_backward softplus_backward"
).split()

_listeners: list[Callable[[str, Program], None]] = []


@contextmanager
def listening(listener: Callable[[str, Program], None]) -> Iterator[None]:
    """Tells a listener what becomes of each graph that is compiled."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _compiler(kind: str) -> Callable[..., Any]:
    def compile_graph(module: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        _drop_detached(module.graph)
        _keep_written_inputs(module.graph)
        shorten(module.graph)
        program = fuse_graph(module.graph)
        _warn_of_devices(program)
        _compile_ahead(program)
        for listener in list(_listeners):
            listener(kind, program)
        new = rewrite(program, module)
        if hasattr(torch.fx.graph, "_BoxedCodeGen"):
            forward = type(new).forward

            def run(arguments: list[Any]) -> Any:
                return forward(new, arguments)
        else:

            def run(arguments: list[Any]) -> Any:
                given = tuple(arguments)
                arguments.clear()
                return new.forward(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_graph


def _drop_detached(graph: fx.Graph) -> None:
    """Leaves out `detach`, which says nothing in graphs that are not derived again. The partitioner knows no rule for
    it and would save what it could compute again. What a graph returns stays: whether it is a view matters there.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        if all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _partition(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """What is saved for the backward pass, and what is computed again: by bytes."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    _drop_detached(module.graph)
    module.recompile()
    return min_cut_rematerialization_partition(module, inputs, **settings)


def _keep_written_inputs(graph: fx.Graph) -> None:
    """Saves copies of inputs that the graph writes and that the backward pass needs as they were. PyTorch's partitioner
    saves the inputs themselves, and the gradient would be wrong.
    """
    written = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    (output,) = graph.find_nodes(op="output")
    saved = [node for node in output.all_input_nodes if node.op == "placeholder" and node in written]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in saved:
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        output.replace_input_with(node, copy)


def _compile_ahead(program: Program) -> None:
    """Starts the compiler for kernels on GPUs, which works while PyTorch prepares the first call."""
    for kernel in program.kernels:
        if kernel.device == "cpu" or not isinstance(kernel.call, FusedCall):
            continue
        if not _waits_at_exit:
            _waits_at_exit.append(True)
            atexit.register(FusedCall.finish_compiling)
        kernel.call.compile_ahead([_form(value_of(node)) for node in kernel.inputs])


_waits_at_exit: list[bool] = []


def _form(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    return [hint_of(size) for size in tensor.shape], [hint_of(stride) for stride in tensor.stride()]


_warned: set[str] = set()


def _warn_of_devices(program: Program) -> None:
    for reason in program.refused.values():
        device = reason.removeprefix("is on ")
        if device != reason and device not in _warned and device != "meta":
            _warned.add(device)
            text = f"fused kernels run on the CPU and on CUDA; on {device}, PyTorch runs op by op"
            warnings.warn(text, FallbackWarning, 2)


_made: list[Callable[..., Any]] = []


def _backend() -> Callable[..., Any]:
    """Made when it is first needed: what it needs takes a while to import."""
    if not _made:
        from torch._decomp import get_decompositions
        from torch._dynamo.backends.common import aot_autograd

        packets = [getattr(torch.ops.aten, name) for name in DECOMPOSED if hasattr(torch.ops.aten, name)]
        _made.append(
            aot_autograd(
                fw_compiler=_compiler("forward"),
                bw_compiler=_compiler("backward"),
                inference_compiler=_compiler("inference"),
                partition_fn=_partition,
                decompositions=get_decompositions(packets),
                keep_inference_input_mutations=True,
            )
        )
    return _made[0]


def compile_backend(module: fx.GraphModule, inputs: list[Any], **settings: Any) -> Callable[..., Any]:
    """Compiles a graph for ``torch.compile(model, backend="warpsmith")``: chains of small ops become fused kernels,
    forward and backward; PyTorch runs the rest.
    """
    for name, value in settings.items():
        if value not in (None, "default", {}):
            raise ArgumentError(
                f"torch.compile: backend warpsmith has no `{name}`, got {value!r}",
                op="fuse",
                argument=name,
                expected="nothing",
                got=repr(value),
            )
    given = (value for value in inputs if isinstance(value, torch.Tensor))
    simplify(module, torch.is_grad_enabled() and any(value.requires_grad for value in given))
    compiled: Callable[..., Any] = _backend()(module, inputs)
    return compiled
