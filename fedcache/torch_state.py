"""The caller's torch state, such as gradients, default device and default dtype, changes no result of fedcache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def usual_torch_state() -> Iterator[None]:
    """Compute as in a fresh process, and give the caller's state back afterwards. Also works as a decorator.

    A notebook may have called ``torch.set_grad_enabled(False)`` or ``torch.set_default_device("cuda")``, or may train
    within ``torch.inference_mode()``. Methods that take gradients would fail there, and tensors would be made on
    another device than the one that fedcache computes on. Another default dtype draws other random numbers, and another
    precision of matrix products rounds otherwise.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # then nobody has changed its state
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this turns gradients on as well
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        # The context of a device slows every call of torch down, so it is entered only where it changes something.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
