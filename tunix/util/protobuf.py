"""Classes of protobuf messages from a table of their fields, without a compiler of schemas."""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


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
