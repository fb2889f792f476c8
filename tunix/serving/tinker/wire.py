"""The protobuf messages of the Tinker protocol 0.38: the body of `forward_backward`, and what is computed by it and by
`asample`. All else of the protocol is JSON.

The schema is the table `SCHEMA`, of which protobuf makes classes when this module is imported: the SDK is not needed.
Byte arrays are little-endian and row-major.

Axes: T time, A alternatives (the targets of a position).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pydantic import Field, StrictInt

from tunix.errors import UserError
from tunix.serving.tinker.futures import Refusal

SCHEMA = """
ForwardBackwardRequest: 1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string, 5 loss_fn_config %double, \
6 forward_only bool, 7 loss_fn_config_v2 %LossConfigValue
LossConfigValue: 1 number |double, 2 text |string
Datum: 1 model_input *Chunk, 2 loss_fn_inputs %Tensor
Chunk: 1 encoded_text |EncodedText, 2 image |Opaque, 3 dmel |Opaque
EncodedText: 1 tokens bytes
Opaque:
Tensor: 1 dense |bytes, 2 sparse_csr |SparseCsr, 3 dtype int32, 4 shape *int64
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
ForwardBackwardOutput: 1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord, 3 metrics %double
ArrayRecord: 1 type_tag string, 2 fields %BatchedTensor, 3 num_datums int64
BatchedTensor: 1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape *int64
SampleResponse: 1 sequences *SampledSequence, 2 prompt_logprobs ?bytes
SampledSequence: 1 stop_reason int32, 2 tokens bytes, 3 logprobs ?bytes
"""
"""As `message_classes` reads it. Enums are numbers; of images and sounds, which are refused, and of messages that are
not read nothing more is known."""
DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8")}
"""The types of tensors in requests, by their numbers."""
FLOAT32 = 1
Id = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
"""A token id in JSON, of either door: what int32 holds."""


def message_classes(schema: str) -> dict[str, Any]:
    """The classes of messages by name.

    Args:
        schema: a line for each message, with its fields: number, name and type, after `*` where it is repeated, `%` for
            a map from strings, `|` for an alternative of the message's only choice, and `?` where absence is told apart
            from zero, e.g. `Chunk: 1 text |string, 2 shape *int64`.
    """
    kinds, package = descriptor_pb2.FieldDescriptorProto, "tunix"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for line in schema.strip().splitlines():
        name, _, listed = line.partition(":")
        message = file.message_type.add(name=name)
        if "|" in listed:  # before the choices of one that stand for `?`
            message.oneof_decl.add(name="choice")
        for number, label, mark, kind in re.findall(r"(\d+) (\w+) ([*%|?]?)(\w+)", listed):
            field = message.field.add(name=label, number=int(number), label=kinds.LABEL_OPTIONAL)
            target = field
            if mark == "%":
                entry = message.nested_type.add(name="".join(part.title() for part in label.split("_")) + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
                target = entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL)
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{name}.{entry.name}"
            if mark in ("*", "%"):
                field.label = kinds.LABEL_REPEATED
            elif mark == "|":
                field.oneof_index = 0
            elif mark == "?":
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{label}")
            if kind[0].isupper():
                target.type, target.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                target.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue]
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in names}


MESSAGES = message_classes(SCHEMA)


@dataclass(frozen=True)
class Datum:
    """One sequence of a training request."""

    tokens: np.ndarray
    """`[T]` int32: what the model reads."""
    inputs: Mapping[str, np.ndarray]
    """`[T]` or `[T A]` of what the loss reads, by name: at i of the target that follows `tokens[i]`."""


def parsed(body: bytes) -> Any:
    """The message `ForwardBackwardRequest` of a body; its data are read by `data_of`.

    Raises:
        Refusal: the body is no such message.
    """
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise Refusal(400, f"the body is no protobuf of a ForwardBackwardRequest: {error}") from None


def data_of(message: Any) -> list[Datum]:
    """The data of a `ForwardBackwardRequest`.

    Raises:
        UserError: a datum has another part than text, or a tensor does not fit its shape.
    """
    data = []
    for number, datum in enumerate(message.data):
        kinds = [chunk.WhichOneof("choice") for chunk in datum.model_input]
        if foreign := [kind for kind in kinds if kind != "encoded_text"]:
            raise UserError(
                f"datum {number}: model_input has {foreign[0] or 'an unknown part'}; only text is read here"
            )
        parts = [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input]
        inputs = {name: _tensor(x, f"datum {number}: {name}") for name, x in sorted(datum.loss_fn_inputs.items())}
        data.append(Datum(np.concatenate([np.zeros(0, np.int32), *parts]), inputs))
    return data


def _tensor(message: Any, where: str) -> np.ndarray:
    """A `Tensor` as a dense array.

    Raises:
        UserError: it has another type than float32 or int64, or its bytes do not fit its shape.
    """
    if (dtype := DTYPES.get(message.dtype)) is None:
        raise UserError(f"{where} has the type {message.dtype}; float32 ({FLOAT32}) and int64 (2) are read")
    shape = tuple(message.shape)
    try:
        if message.WhichOneof("choice") == "sparse_csr":
            csr = message.sparse_csr
            values, ends = np.frombuffer(csr.values, dtype), np.frombuffer(csr.crow_indices, "<i8")
            dense = np.zeros(shape, dtype)
            dense[np.repeat(np.arange(len(ends) - 1), np.diff(ends)), np.frombuffer(csr.col_indices, "<i8")] = values
            return dense
        flat = np.frombuffer(message.dense, dtype)
        return flat.reshape(shape) if shape else flat
    except (ValueError, IndexError) as error:
        raise UserError(f"{where} does not fit its shape {list(shape)}: {error}") from None


def config_of(message: Any) -> dict[str, float | str]:
    """The settings of the loss, by name."""
    if message.loss_fn_config_v2:
        return {
            name: x.text if x.WhichOneof("choice") == "text" else x.number
            for name, x in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def forward_backward_output(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """A serialised `ForwardBackwardOutput`.

    Args:
        outputs: of each datum float32 arrays `[T]` or `[T A]` by name, all of the same names.
        metrics: by names such as `loss:sum`; what follows the colon says how those of several requests are joined.
    """
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    # A record has data whose arrays have the same axes after the first.
    for shape, group in groupby(outputs, lambda arrays: next(iter(arrays.values())).shape[1:]):
        alike = list(group)
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(alike))
        for name in alike[0]:
            arrays = [x[name].astype("<f4") for x in alike]
            ends = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
            data = b"".join(array.tobytes() for array in arrays)
            batched = MESSAGES["BatchedTensor"](data=data, offsets=ends, dtype=FLOAT32, trailing_shape=shape)
            record.fields[name].CopyFrom(batched)
    return output.SerializeToString()
