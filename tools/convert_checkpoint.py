"""Turn a checkpoint that fedcache refuses into safetensors. This RUNS code from the checkpoint.

fedcache never opens such files: a pickle or a TorchScript archive can do whatever its author wanted. If you trust
the source, run this where nothing can be lost - a container without network and without your home directory:

    python tools/convert_checkpoint.py RN50.pt RN50.safetensors --i-trust-this-file
    fedcache backbones import RN50.safetensors --as clip-rn50

It needs torch and safetensors only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def tensors_of(path: Path) -> dict[str, Any]:
    """Every tensor of the checkpoint by name, executing what the file asks for."""
    import torch

    try:
        loaded: Any = torch.jit.load(str(path), map_location="cpu").state_dict()
    except RuntimeError:  # not TorchScript
        loaded = torch.load(path, map_location="cpu", weights_only=False)
    if isinstance(loaded, torch.nn.Module):
        loaded = loaded.state_dict()
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and wrapper in loaded:
            inner = loaded[wrapper]
            loaded = inner.state_dict() if isinstance(inner, torch.nn.Module) else inner
            break
    if not isinstance(loaded, Mapping):
        raise SystemExit(f"{path} holds a {type(loaded).__name__}, not a state_dict or a module.")
    named = {str(k).removeprefix("module."): v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
    if not named:
        raise SystemExit(f"{path} holds no tensors.")
    left_out = [str(k) for k, v in loaded.items() if not isinstance(v, torch.Tensor)]
    if left_out:
        print(f"left out, no tensors: {', '.join(left_out)}", file=sys.stderr)
    # Half precision is storage, not meaning; copies because safetensors refuses tensors that share memory.
    return {k: (v.float() if v.is_floating_point() else v).detach().clone().contiguous() for k, v in named.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="a name ending in .safetensors")
    parser.add_argument("--i-trust-this-file", action="store_true", help="required: code in the file will run")
    options = parser.parse_args(arguments)
    if not options.i_trust_this_file:
        parser.error("code inside the checkpoint would run; add --i-trust-this-file, in a sandbox")
    if options.out.suffix != ".safetensors":
        parser.error(f"{options.out} does not end in .safetensors")
    if options.out.exists():
        parser.error(f"{options.out} exists")

    from safetensors.torch import save_file

    tensors = tensors_of(options.checkpoint)
    save_file(tensors, options.out)
    print(f"{len(tensors)} tensors, {options.out.stat().st_size:,} bytes: {options.out}")


if __name__ == "__main__":
    main()
