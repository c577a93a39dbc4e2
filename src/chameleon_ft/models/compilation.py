"""Compilation of layers by `torch.compile`.

All layers are run by one compiled function, of which torch keeps a version for each that computes something else. So
equal layers share one, whatever built them. Shapes are either all fixed or all variable: torch's own choice, fixed at
first and variable after a change, depends on what a process has run before, so that holders of a layer would compute
with other roundings. Dropout draws what it draws without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from chameleon_ft.job.computation import Compile
from chameleon_ft.side_outputs import UNCOMPILED
from chameleon_ft.trees import mapped

_INDUCTOR: Final = "inductor"
# Versions: a job may have many layers that are not alike, and each is run with and without gradients.
_MAX_VERSIONS: Final = 512


def runner(compile_: Compile) -> Callable[..., Any]:
    """Return a function that runs a layer: (layer, input, fields by keyword) -> output."""
    if not compile_.is_on:
        return _run
    compiled = _compiled(compile_)

    def run(module: nn.Module, boundary: Any, **fields: Tensor) -> Any:
        # In one form for a layer, wherever it is in a hop, or there would be versions for several.
        if torch.is_grad_enabled():
            boundary = mapped(Tensor.contiguous, boundary)
        else:
            boundary = mapped(lambda leaf: leaf.detach().contiguous(), boundary)
        return compiled(module, boundary, **fields)

    return run


def missing_compiler(compile_: Compile, *, on_accelerator: bool) -> str:
    """Return why layers cannot be compiled on this host, as the rest of a sentence; empty if they can."""
    if not compile_.is_on:
        return ""
    if compile_.backend not in torch._dynamo.list_backends(exclude_tags=()):
        return f'torch has no backend "{compile_.backend}"; there are {", ".join(torch._dynamo.list_backends())}'
    if compile_.backend != _INDUCTOR:
        return ""
    if on_accelerator:
        return "" if torch.utils._triton.has_triton() else "triton, which compiles for this device, is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler; install g++, or name another one in the environment as CXX"
    return ""


def tell_of_compilations(tell: Callable[[], None]) -> None:
    """Call `tell` whenever something is compiled from now on."""
    torch._dynamo.callback.callback_handler.register_start_callback(lambda _: tell())


@cache
def _compiled(compile_: Compile) -> Callable[..., Any]:
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, name, _MAX_VERSIONS)
    for function in UNCOMPILED:
        # Or there would be a version for each number that they get.
        torch._dynamo.decorators.skip(function)
    return torch.compile(
        _run,
        dynamic=compile_.shapes == "dynamic",
        backend=compile_.backend,
        options={"fallback_random": True} if compile_.backend == _INDUCTOR else None,
    )


def _run(module: nn.Module, boundary: Any, **fields: Tensor) -> Any:
    return module(boundary, **fields)
