"""What TensorBoard's event files hold of a step: numbers, and texts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as TensorBoardSummary
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto


def numbers_event(step: int, numbers: Mapping[str, float]) -> Event:
    """Numbers of a step by their tags."""
    values = [TensorBoardSummary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
    return Event(wall_time=time.time(), step=step, summary=TensorBoardSummary(value=values))


def texts_event(step: int, tag: str, texts: Mapping[str, str]) -> Event:
    """Texts under their names, for TensorBoard's page of texts, which reads Markdown."""
    text = "\n\n".join(f"{name}:\n\n{_quoted(said)}" for name, said in texts.items())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    value = TensorBoardSummary.Value(tag=tag, metadata=metadata, tensor=tensor)
    return Event(wall_time=time.time(), step=step, summary=TensorBoardSummary(value=[value]))


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
