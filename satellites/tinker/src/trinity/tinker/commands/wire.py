"""Reads and writes the protobuf bodies of the `tinker` client: a forward_backward and its result, and samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from trinity.api.explorer.v1 import sampler_pb2
from trinity.api.tinker.v1 import tinker_pb2 as pb
from trinity.runtime.errors import InvalidInput
from trinity.runtime.messages import from_message, to_message
from trinity.tinker.commands.samples import Sample, Sampled, Samples, Top

_FLOAT, _INT = "<f4", "<i8"
_DTYPES = {pb.DTYPE_FLOAT32: _FLOAT, pb.DTYPE_INT64: _INT, pb.DTYPE_INT32: "<i4"}


@dataclass(frozen=True)
class Datum:
    """One sequence of N tokens, int64 [N]. `inputs`: the loss's tensors by name, int64 or float32 [N]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Forward:
    """A forward pass of one model over some sequences; `backward` accumulates the loss's gradient."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float | str]
    backward: bool


def address_of(body: bytes) -> tuple[str, int, bytes]:
    """Returns model id, seq_id and the body in its canonical form, which is equal for equal requests.

    Raises InvalidInput for bytes that are no such message.
    """
    message = _parsed(body)
    return message.model_id, message.seq_id, message.SerializeToString(deterministic=True)


def read_forward(body: bytes) -> Forward:
    """Raises InvalidInput for bytes that are no such message, and for data that is neither text nor a vector."""
    message = _parsed(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = tuple(_datum(index, datum) for index, datum in enumerate(message.data))
    return Forward(message.model_id, message.seq_id, data, message.loss_fn, config, not message.forward_only)


def write_forward(forward: Forward) -> bytes:
    """Writes what the client sends."""
    message = pb.ForwardBackwardRequest(
        model_id=forward.model_id, seq_id=forward.seq_id, loss_fn=forward.loss, forward_only=not forward.backward
    )
    for name, value in forward.config.items():
        target = message.loss_fn_config_v2[name]
        if isinstance(value, str):
            target.text = value
        else:
            target.number = value
    for datum in forward.data:
        made = message.data.add()
        made.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            is_float = values.dtype.kind == "f"
            tensor = made.loss_fn_inputs[name]
            tensor.dtype = pb.DTYPE_FLOAT32 if is_float else pb.DTYPE_INT64
            tensor.dense = values.astype(_FLOAT if is_float else _INT).tobytes()
            tensor.shape.extend(values.shape)
    return message.SerializeToString(deterministic=True)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Writes the log-probabilities of each sequence's targets, float32, and the metrics."""
    lengths = [0, *(4 * len(values) for values in logprobs)]
    field = pb.BatchedTensor(
        data=b"".join(values.astype(_FLOAT).tobytes() for values in logprobs),
        offsets=np.cumsum(lengths).astype(_INT).tobytes(),
        dtype=pb.DTYPE_FLOAT32,
    )
    record = pb.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": field}, num_datums=len(logprobs))
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    return output.SerializeToString(deterministic=True)


def read_output(body: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Reads what write_output wrote."""
    output = pb.ForwardBackwardOutput.FromString(body)
    found = []
    for record in output.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, _INT) // 4
        found += np.split(np.frombuffer(field.data, _FLOAT), offsets[1:-1])
    return found, dict(output.metrics)


def sample_to_proto(sample: Sample) -> sampler_pb2.SampleRequest:
    return to_message(sample, sampler_pb2.SampleRequest)


def sample_from_proto(message: sampler_pb2.SampleRequest) -> Sample:
    """Raises InvalidInput for a setting that is out of range."""
    return from_message(Sample, message)


def samples_to_proto(samples: Samples) -> pb.SampleResponse:
    """Makes the message that the client reads."""
    found = samples.prompt_logprobs
    return pb.SampleResponse(
        sequences=[
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_STOP if one.stopped else pb.STOP_REASON_LENGTH,
                tokens=one.tokens.astype("<i4").tobytes(),
                logprobs=one.logprobs.astype(_FLOAT).tobytes(),
                topk_sampled_logprobs=_top_to_proto(one.top),
            )
            for one in samples.sequences
        ],
        prompt_logprobs=None if found is None else found.astype(_FLOAT).tobytes(),
        topk_prompt_logprobs=_top_to_proto(samples.top_prompt),
        prompt_cache_hit_tokens=samples.cached,
    )


def samples_from_proto(message: pb.SampleResponse) -> Samples:
    """Reads what samples_to_proto wrote."""
    sequences = tuple(
        Sampled(
            np.frombuffer(one.tokens, "<i4"),
            np.frombuffer(one.logprobs, _FLOAT),
            one.stop_reason == pb.STOP_REASON_STOP,
            _top_from_proto(one.topk_sampled_logprobs) if one.HasField("topk_sampled_logprobs") else None,
        )
        for one in message.sequences
    )
    prompt = np.frombuffer(message.prompt_logprobs, _FLOAT) if message.HasField("prompt_logprobs") else None
    top = _top_from_proto(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None
    return Samples(sequences, prompt, top, message.prompt_cache_hit_tokens)


def read_samples(body: bytes) -> Samples:
    """Reads the body that a client gets."""
    return samples_from_proto(pb.SampleResponse.FromString(body))


def _top_to_proto(top: Top | None) -> pb.TopkLogprobs | None:
    if top is None:
        return None
    length, k = top.token_ids.shape
    ids, logprobs = top.token_ids.astype("<i4").tobytes(), top.logprobs.astype(_FLOAT).tobytes()
    return pb.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=k, length=length)


def _top_from_proto(message: pb.TopkLogprobs) -> Top:
    shape = message.length, message.k
    return Top(
        np.frombuffer(message.token_ids, "<i4").reshape(shape),
        np.frombuffer(message.logprobs, _FLOAT).reshape(shape),
    )


def _parsed(body: bytes) -> pb.ForwardBackwardRequest:
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidInput("body", f"is no forward_backward request: {error}") from None


def _datum(index: int, datum: pb.Datum) -> Datum:
    place = f"data[{index}]"
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise InvalidInput(f"{place}.model_input", f"has a chunk of kind {kind}; only text is trained here")
        parts.append(_array(f"{place}.model_input", chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    inputs = {name: _tensor(f"{place}.loss_fn_inputs.{name[:100]}", one) for name, one in datum.loss_fn_inputs.items()}
    return Datum(tokens, inputs)


def _tensor(place: str, tensor: pb.Tensor) -> np.ndarray:
    if tensor.WhichOneof("layout") == "sparse_csr":
        raise InvalidInput(place, "is sparse; only dense vectors are read")
    if tensor.dtype not in _DTYPES:
        raise InvalidInput(place, f"has dtype {tensor.dtype}; must be float32 or int64")
    values = _array(place, tensor.dense, _DTYPES[tensor.dtype])
    shape = tuple(tensor.shape)
    if shape and shape != values.shape:
        raise InvalidInput(
            place, f"has shape {list(shape)} and {len(values)} elements; must be a vector of all of them"
        )
    return values.astype(np.float32 if tensor.dtype == pb.DTYPE_FLOAT32 else np.int64)


def _array(place: str, data: bytes, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidInput(place, f"has {len(data)} bytes, no multiple of {size}")
    return np.frombuffer(data, dtype)
