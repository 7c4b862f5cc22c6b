"""Layers of a TFLite file, and the same file with another tensor as its output.

The interpreter gives what the graph declares as output, which of a classifier are scores; a feature is a tensor inside.
The declaration is a list of numbers of tensors. Another number in its place makes another output, for which the graph
is optimised as for any other: keeping all tensors for the sake of one would be slower by a multiple.

The schema's readers come with the interpreter's library. Files are untrusted: every number that leads on is compared
with how much there is, before it is followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word, unknown
from fedcache.optional import needed_library, reason

PENULTIMATE = "penultimate"
"""Word for what the classifier reads: the output of the layer before the last one with weights."""


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
            f"{path} is not loaded: it is no TFLite file, or a damaged one ({reason(error)}).",
            "Get the file again.",
        ) from error


def _graph(schema: Any, raw: bytes) -> Graph:
    if not schema.Model.ModelBufferHasIdentifier(raw, 0):
        raise ValueError("it does not hold the mark TFL3")
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
        lists = [
            [get(i) for i in range(_below(length, most))]
            for get, length in (
                (operation.Inputs, operation.InputsLength()),
                (operation.Outputs, operation.OutputsLength()),
            )
        ]
        read, made = (tuple(_below(t, counts[0]) for t in tensors if t != -1) for tensors in lists)
        layers.append(Layer(read, made))
    ends = [
        tuple(_below(get(i), counts[0]) for i in range(count))
        for get, count in ((main.Inputs, counts[2]), (main.Outputs, counts[3]))
    ]
    return Graph(
        tuple(names), frozenset(weights), frozenset(constants), tuple(layers), ends[0], ends[1]
    )


def _below(number: int, end: int) -> int:
    if not 0 <= number < end:
        raise ValueError(f"{number} where there are {end}")
    return number


def chosen_tensor(graph: Graph, name: str, asked: str | None) -> int:
    """The number of the output asked for: a tensor by name, ``penultimate``, or the only output. UsageError else."""
    if asked == PENULTIMATE:
        return graph.penultimate(name)
    computed = {graph.names[t]: t for layer in graph.layers for t in layer.outputs}
    outputs = [graph.names[t] for t in graph.outputs]
    if asked is None and len(outputs) == 1:
        return graph.outputs[0]
    listed = ", ".join(outputs[:20])
    hint = f"--recipe {shell_word(name)}:output={PENULTIMATE} is what the classifier reads; outputs: {listed}"
    if asked is None:
        raise UsageError(f"{name} has {len(outputs)} outputs, and none was chosen.", hint)
    if asked not in computed:
        raise unknown(f"output of {name}", asked, computed, hint=hint)
    return computed[asked]


def with_output(raw: bytes, tensor: int, name: str) -> bytes:
    """The file with a tensor as its first output."""
    schema = needed_library("ai_edge_litert.schema_py_generated", name, "tflite")
    changed = bytearray(raw)
    outputs = schema.Model.GetRootAs(changed, 0).Subgraphs(0).OutputsAsNumpy()
    outputs[0] = tensor  # a view of the bytes
    return bytes(changed)
