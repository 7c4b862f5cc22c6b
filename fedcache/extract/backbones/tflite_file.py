"""``tflite:FILE``: an image encoder as one TFLite file, computed by LiteRT (extra ``tflite``) on the CPU.

Quantised inputs get the pixels, which is what their scale and zero point mean; quantised outputs are multiplied out by
the file's. Three files have names: MobileNetV2 (Sandler et al., arXiv:1801.04381) trained on ImageNet, and on the birds
and the insects of iNaturalist, so that differently trained backbones of one width are available offline. The feature is
what their classifiers read, 1,280 wide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights
from fedcache.extract.backbones.own import Choice, output_of, tried, unchanged_bytes
from fedcache.extract.backbones.own_files import SIZE, FileEncoder, ImageInput, derived, on_the_cpu
from fedcache.extract.backbones.rows import PENULTIMATE
from fedcache.extract.recipe import Recipe
from fedcache.optional import needed_library, reason
from fedcache.plugins import TFLITE

# Layers of a TFLite file, and the same file with another tensor as its output. The interpreter gives the tensor that
# the graph declares as output, which for a classifier are scores; a feature is a tensor inside. The declaration is a
# list of numbers of tensors: another number makes another output, for which the graph is optimised as for any other.
# The schema's readers come with the interpreter's library. Files are untrusted: every number that leads on is compared
# with the number of entries, before it is followed.


@dataclass(frozen=True)
class Layer:
    """One operation of a graph; tensors by number."""

    inputs: tuple[int, ...]  # without the optional ones that are left out
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """The main graph of a file."""

    names: tuple[str, ...]  # of the tensors
    weights: frozenset[int]  # tensors with constant numbers on two axes or more
    constants: frozenset[int]  # all tensors whose numbers are in the file
    layers: tuple[Layer, ...]  # in the order in which they are computed
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def penultimate(self, name: str) -> int:
        """The tensor that the last layer with weights reads, going back from the first output; UsageError without."""
        # Walk back from the first output, through the first input of each layer that is no constant.
        makers = {tensor: layer for layer in self.layers for tensor in layer.outputs}
        at = self.outputs[0]
        for _ in self.layers:
            layer = makers.get(at)
            if layer is None:
                break
            read = [tensor for tensor in layer.inputs if tensor not in self.constants]
            if not read:
                break
            at = read[0]
            if any(tensor in self.weights for tensor in layer.inputs):
                if at in self.inputs:
                    break
                return at
        raise UsageError(
            f"{name} has no layer before a classifier.",
            f"--recipe {shell_word(name)}:output={shell_word(self.names[self.outputs[0]])}",
        )


def read_graph(raw: bytes, path: Path, name: str) -> Graph:
    """The main graph of a file; MachineError for bytes that are none."""
    schema = needed_library("ai_edge_litert.schema_py_generated", name, "tflite")
    try:
        return _graph(schema, raw)
    except FedcacheError:
        raise
    except Exception as error:
        # the reader is fed untrusted bytes: whatever it raises means the same
        raise MachineError(
            f"{path} is not loaded: it is not a TFLite file, or it is damaged ({reason(error)}).",
            "Get the file again.",
        ) from error


def _graph(schema: Any, raw: bytes) -> Graph:
    if not schema.Model.ModelBufferHasIdentifier(raw, 0):
        raise ValueError("it does not contain the mark TFL3")
    model = schema.Model.GetRootAs(raw, 0)
    main = model.Subgraphs(0)
    most = len(raw) // 4  # every entry of every list takes four bytes at least
    counts = (
        main.TensorsLength(),
        main.OperatorsLength(),
        main.InputsLength(),
        main.OutputsLength(),
    )
    if max(counts) > most or min(counts) < 1:
        raise ValueError(f"lists of {counts} entries in {len(raw)} bytes")
    names = []
    weights = set()
    constants = set()
    for number in range(counts[0]):
        tensor = main.Tensors(number)
        names.append((tensor.Name() or b"").decode("utf-8", "replace"))
        if model.Buffers(_below(tensor.Buffer(), model.BuffersLength())).DataLength():
            constants.add(number)
            if tensor.ShapeLength() > 1:
                weights.add(number)
    layers = []
    for number in range(counts[1]):
        operation = main.Operators(number)
        # -1 stands for an operand that was left out.
        read = [operation.Inputs(i) for i in range(_below(operation.InputsLength(), most))]
        made = [operation.Outputs(i) for i in range(_below(operation.OutputsLength(), most))]
        inputs = tuple(_below(t, counts[0]) for t in read if t != -1)
        outputs = tuple(_below(t, counts[0]) for t in made if t != -1)
        layers.append(Layer(inputs, outputs))
    inputs = tuple(_below(main.Inputs(i), counts[0]) for i in range(counts[2]))
    outputs = tuple(_below(main.Outputs(i), counts[0]) for i in range(counts[3]))
    return Graph(
        tuple(names), frozenset(weights), frozenset(constants), tuple(layers), inputs, outputs
    )


def _below(number: int, end: int) -> int:
    if not 0 <= number < end:
        raise ValueError(f"{number} where there are {end}")
    return number


def chosen_tensor(graph: Graph, name: str, requested: str | None) -> int:
    """The number of the output requested: a tensor by name, ``penultimate``, or the only output. UsageError else."""
    if requested == PENULTIMATE:
        return graph.penultimate(name)
    computed = {graph.names[t]: t for layer in graph.layers for t in layer.outputs}
    outputs = [graph.names[t] for t in graph.outputs]
    if requested is None and len(outputs) == 1:
        return graph.outputs[0]
    listed = ", ".join(outputs[:20])
    hint = (
        f"--recipe {shell_word(name)}:output={PENULTIMATE} selects the input of the classifier; outputs: "
        f"{listed}"
    )
    if requested is None:
        raise UsageError(f"{name} has {len(outputs)} outputs, but none was chosen.", hint)
    if requested not in computed:
        raise unknown(f"output of {name}", requested, computed, hint=hint)
    return computed[requested]


def with_output(raw: bytes, tensor: int, name: str) -> bytes:
    """The file with a tensor as its first output."""
    schema = needed_library("ai_edge_litert.schema_py_generated", name, "tflite")
    changed = bytearray(raw)
    outputs = schema.Model.GetRootAs(changed, 0).Subgraphs(0).OutputsAsNumpy()
    outputs[0] = tensor  # a view of the bytes
    return bytes(changed)


TYPES = ("uint8", "int8", "float32")


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``tflite:FILE``; raises as ``derived``."""
    return derived(
        name,
        TFLITE,
        choice,
        provider="tflite_file",
        norm="half",
        given=lambda path, bare: (
            _Opened(bare, path, "", None, choice.size or SIZE, 1, any_output=True).given
        ),
        opened=lambda path, bare, output, size: _encoder(
            bare, path, "", output, Recipe(bare, "", size=size), 1
        ),
    )


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The encoder of the file whose sha256 is that of ``weights``, with as many threads as torch has."""
    import torch

    on_the_cpu(backbone.name, device, dtype)
    path = weights.file(backbone.name)
    threads = torch.get_num_threads()
    encoder = _encoder(backbone.name, path, weights.sha256, output_of(recipe), recipe, threads)
    return tried(encoder, backbone, recipe)


class TfliteEncoder(FileEncoder):
    """An encoder over an interpreter."""

    interpreter: Any
    at: tuple[int, int]  # numbers of the tensors that are input and output
    scale: float  # of a quantised output; 0 for one of floats
    zero: int

    def compute(self, images: NDArray[Any]) -> NDArray[Any]:
        """See ``FileEncoder.compute``."""
        self.interpreter.set_tensor(self.at[0], images)
        self.interpreter.invoke()
        out: NDArray[Any] = self.interpreter.get_tensor(self.at[1])
        if self.scale:
            return (out.astype(np.float32) - self.zero) * np.float32(self.scale)
        return out


class _Opened:
    """A file in an interpreter, with the output requested."""

    def __init__(
        self,
        name: str,
        path: Path,
        sha256: str,
        requested: str | None,
        size: int,
        threads: int,
        *,
        any_output: bool = False,
    ) -> None:
        raw = unchanged_bytes(path, sha256)
        self.graph: Graph = read_graph(raw, path, name)
        first = self.graph.outputs[0]
        self.tensor = first
        if not any_output:
            self.tensor = chosen_tensor(self.graph, name, requested)
        self.output = self.graph.names[self.tensor]
        if requested is not None:
            self.output = requested
        changed = raw
        if self.tensor != first:
            changed = with_output(raw, self.tensor, name)
        self.interpreter = _interpreter(name, path, changed, threads)
        self.given, self.index = _input(name, _details(path, self.interpreter.get_input_details))
        try:
            if None in self.given.shape[1:]:
                self.interpreter.resize_tensor_input(self.index, [1, size, size, 3])
            with _quiet():
                self.interpreter.allocate_tensors()
        except Exception as error:
            raise UsageError(
                f"{name} cannot process images of {size} px: {reason(error)}",
                f"Give the size it was made for:  --recipe {shell_word(name)}:size=N",
            ) from error


def _encoder(
    name: str, path: Path, sha256: str, requested: str | None, recipe: Recipe, threads: int
) -> TfliteEncoder:
    """The encoder of a file; UsageError for an output that it does not have or that is quantised by channel."""
    opened = _Opened(name, path, sha256, requested, recipe.size, threads)
    given = opened.given
    outputs = [opened.graph.names[t] for t in opened.graph.outputs]
    encoder = TfliteEncoder(name, given, [*outputs, PENULTIMATE], opened.output, recipe)
    (detail, *_) = _details(path, opened.interpreter.get_output_details)
    scales = detail["quantization_parameters"]["scales"]
    if len(scales) > 1 or np.dtype(detail["dtype"]).kind not in "iuf":
        raise UsageError(
            f"The output {encoder.output} of {name} has {len(scales)} scales or is no number ({detail['dtype']}).",
            f"--recipe {shell_word(name)}:output={PENULTIMATE}",
        )
    encoder.interpreter = opened.interpreter
    encoder.at = (opened.index, detail["index"])
    encoder.scale = float(detail["quantization"][0])
    encoder.zero = int(detail["quantization"][1])
    return encoder


def _details(path: Path, details: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The details of tensors by an interpreter. Raises MachineError if it fails on the file."""
    try:
        return details()
    except Exception as error:  # names that are no text, and whatever else a damaged file may hold
        raise MachineError(
            f"{path} is not loaded: it is damaged ({reason(error)}).", "Get the file again."
        ) from error


def _input(name: str, inputs: list[dict[str, Any]]) -> tuple[ImageInput, int]:
    """The one input of images, and the number of its tensor; UsageError for others."""
    shown = "; ".join(
        f"{i['name']} {np.dtype(i['dtype'])} {list(i['shape_signature'])}" for i in inputs[:5]
    )
    if inputs:
        shape = tuple(int(d) if d > 0 else None for d in inputs[0]["shape_signature"])
    else:
        shape = ()
    if inputs:
        dtype = np.dtype(inputs[0]["dtype"])
    else:
        dtype = np.dtype(object)
    if (
        len(inputs) != 1
        or str(dtype) not in TYPES
        or len(shape) != 4
        or 3 not in (shape[1], shape[3])
    ):
        raise UsageError(
            f"{name} takes {shown or 'nothing'}, expected one input of images, [N, H, W, 3] or [N, 3, H, W], of "
            f"{', '.join(TYPES)}.",
            "Convert the image encoder alone, with one input.",
        )
    batch = int(inputs[0]["shape"][0])  # one where any number will do
    return ImageInput(inputs[0]["name"], (batch, *shape[1:]), dtype), int(inputs[0]["index"])


def _interpreter(name: str, path: Path, raw: bytes, threads: int) -> Any:
    """An interpreter of the bytes of a file; MachineError for what it refuses."""
    library = needed_library("ai_edge_litert.interpreter", name, "tflite")
    try:
        with _quiet():
            return library.Interpreter(model_content=raw, num_threads=threads)
    except Exception as error:
        # the parser is fed untrusted bytes: whatever it raises means the same
        raise MachineError(
            f"{path} is not loaded: LiteRT cannot load it ({reason(error)}).",
            "Get or convert the file again; `pip install -U ai-edge-litert` if it needs a newer version.",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of what native code writes to stderr is seen: each interpreter says there what it is optimised with."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
