"""A GPU that is pretended: tensors that say they are on ``cuda``, and refuse all that a real GPU would refuse.

Their numbers are computed on the CPU, so a run on the pretended GPU is the run on the CPU, and every operation on
tensors of two devices is an error, as it is on a real one. No CUDA is needed, and none is touched.
"""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

CUDA = torch.device("cuda", 0)

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
"""Operations whose tensors may be of both devices: copies, and indices on the CPU."""


class OnGpu(Tensor):
    """A tensor that says it is on ``cuda``; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, real):
        like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, like, real.requires_grad)
        made.held = real.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})

    def __repr__(self, **_):
        return f"OnGpu({self.held!r})"

    @property
    def device(self):
        """What a tensor on a GPU says."""
        return CUDA

    def new_tensor(self, data, **how):
        """A tensor of numbers of Python on the GPU."""
        return OnGpu(torch.tensor(data, dtype=how.get("dtype", self.dtype)))

    def tolist(self):
        """The numbers."""
        return self.held.tolist()

    def data_ptr(self):
        """Where the numbers lie, by which two names of one tensor are told."""
        return self.held.data_ptr()

    def numpy(self, **_):
        """Refused, as a GPU's memory is not numpy's."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __torch_function__ = torch._C._disabled_torch_function_impl


class Pretending(TorchDispatchMode):
    """Makes tensors that are asked for on ``cuda``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class Making(TorchFunctionMode):
    """Makes tensors of numbers of Python on ``cuda``, which torch does without asking a dispatch mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            func not in (torch.tensor, torch.as_tensor)
            or torch.device(kwargs.get("device") or "cpu").type != "cuda"
        ):
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor):  # only as_tensor takes one
            return args[0].to(**kwargs)
        return OnGpu(func(*args, **{k: v for k, v in kwargs.items() if k != "device"}))


def computed(func, args, kwargs):
    """The operation on the numbers; on the GPU where its tensors are there, or it is told to make one there."""
    if func is torch.ops.prim.device.default:
        return CUDA
    flat, spec = tree_flatten((args, kwargs))
    ours = [t for t in flat if isinstance(t, OnGpu)]
    others = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, OnGpu)]
    asked = kwargs.get("device")
    wanted = None if asked is None else torch.device(asked).type
    if func not in COPIES | INDEXED and ours and any(t.dim() for t in others):
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, found cuda and cpu"
        )
    if func in INDEXED and ours and not isinstance(args[0], OnGpu):
        raise RuntimeError(
            f"{func}: indices should be on the same device as the indexed tensor (cpu)"
        )
    if func is aten._local_scalar_dense.default:
        return func(args[0].held if ours else args[0])
    there = wanted in ("cuda", "meta") or (wanted is None and bool(ours))
    if func is aten.copy_.default:
        there = isinstance(args[0], OnGpu)
    if there and asked is not None:
        kwargs = {
            **kwargs,
            "device": "cpu",
            **({"pin_memory": False} if "pin_memory" in kwargs else {}),
        }
        flat, spec = tree_flatten((args, kwargs))
    real_args, real_kwargs = tree_unflatten(
        [t.held if isinstance(t, OnGpu) else t for t in flat], spec
    )
    out = func(*real_args, **real_kwargs)
    if not there:
        return out
    known = {id(t.held): t for t in ours}

    def there_too(t):
        return t if not isinstance(t, Tensor) else known[id(t)] if id(t) in known else OnGpu(t)

    return tree_map(there_too, out)


@contextmanager
def pretended_gpu():
    """In which tensors can be put on ``cuda``."""
    torch._C._ensureCUDADeviceGuardSet()  # without a GPU, one that does nothing
    begin, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
    try:
        with Making(), Pretending():
            yield
    finally:
        torch.cuda._lazy_init = begin
