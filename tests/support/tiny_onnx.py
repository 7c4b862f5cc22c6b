"""Tiny ONNX files whose outputs can be worked by hand."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

TYPES = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "uint8": TensorProto.UINT8}


def whole(name, *numbers):
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def encoder(
    path, *, kind="float", layout="NCHW", batch="N", size=8, outputs="y", weight=2.0, external=False
):
    """An encoder whose map is ``weight`` times the three channels, twice: [r, g, b, r, g, b].

    Outputs by letter: ``m`` the map [N, 6, H, W] (or [N, H, W, 6]), ``y`` its mean over places [N, 6], ``t`` the places
    as tokens [N, HW, 6] (NCHW alone), ``s`` a scalar, ``b`` ``y`` less its mean over the batch, ``l`` ``y`` and the
    last image's added, ``z`` none of the six numbers.
    """
    first = layout == "NCHW"
    shape = [batch, 3, size, size] if first else [batch, size, size, 3]
    constants = [numpy_helper.from_array(np.float32(weight), "w")]
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Mul", ["f", "w"], ["d"])]
    nodes += [helper.make_node("Concat", ["d", "d"], ["m"], axis=1 if first else 3)]
    nodes += [
        helper.make_node("ReduceMean", ["m"], ["y"], axes=[2, 3] if first else [1, 2], keepdims=0)
    ]
    if "t" in outputs:
        constants += [whole("flat", 0, 6, -1)]
        nodes += [helper.make_node("Reshape", ["m", "flat"], ["u"])]
        nodes += [helper.make_node("Transpose", ["u"], ["t"], perm=[0, 2, 1])]
    if "s" in outputs:
        nodes += [helper.make_node("ReduceMean", ["m"], ["s"], keepdims=0)]
    if "b" in outputs:
        nodes += [helper.make_node("ReduceMean", ["y"], ["c"], axes=[0], keepdims=1)]
        nodes += [helper.make_node("Sub", ["y", "c"], ["b"])]
    if "l" in outputs:
        constants += [whole("last", -1)]
        nodes += [helper.make_node("Gather", ["y", "last"], ["e"], axis=0)]
        nodes += [helper.make_node("Add", ["y", "e"], ["l"])]
    if "z" in outputs:
        nodes += [helper.make_node("Slice", ["y", "zero", "zero", "one"], ["z"])]
        constants += [whole("zero", 0), whole("one", 1)]
    shapes = {
        "m": [batch, 6, size, size] if first else [batch, size, size, 6],
        "y": [batch, 6],
        "t": [batch, None, 6],
        "s": [],
        "b": [batch, 6],
        "l": [batch, 6],
        "z": [batch, 0],
    }
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TYPES[kind], shape)],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, shapes[o]) for o in outputs],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    save(
        model,
        str(path),
        save_as_external_data=external,
        size_threshold=0,
        location=f"{path.stem}.bin",
    )
    return path
