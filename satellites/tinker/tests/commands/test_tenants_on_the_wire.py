"""Messages of the `tinker` client as bytes: the field numbers of its package are ours, and round trips keep values."""

import numpy as np
import pytest

from trinity.api.explorer.v1 import sampler_pb2
from trinity.api.tinker.v1 import tinker_pb2 as pb
from trinity.data.experience import SamplingParams
from trinity.runtime.errors import InvalidInput
from trinity.tinker.commands.samples import NO_LOGPROB, Sample, Sampled, Samples, Top
from trinity.tinker.commands.wire import (
    Datum,
    Forward,
    address_of,
    read_forward,
    read_output,
    read_samples,
    sample_from_proto,
    sample_to_proto,
    samples_to_proto,
    write_forward,
    write_output,
)

pytestmark = pytest.mark.core

# Number of each field in the client's descriptor `tinker_public` (0.38.0).
_FIELDS = {
    "ForwardBackwardRequest": {
        "model_id": 1, "seq_id": 2, "data": 3, "loss_fn": 4, "loss_fn_config": 5, "forward_only": 6,
        "loss_fn_config_v2": 7,
    },
    "LossConfigValue": {"number": 1, "text": 2},
    "Datum": {"model_input": 1, "loss_fn_inputs": 2, "model_input_spans": 3, "loss_fn_input_spans": 4},
    "Chunk": {"encoded_text": 1, "image": 2, "dmel": 3},
    "EncodedText": {"tokens": 1},
    "Tensor": {"dense": 1, "sparse_csr": 2, "dtype": 3, "shape": 4},
    "ForwardBackwardOutput": {"loss_fn_output_type": 1, "loss_fn_outputs": 2, "metrics": 3},
    "ArrayRecord": {"type_tag": 1, "fields": 2, "num_datums": 3},
    "BatchedTensor": {"data": 1, "offsets": 2, "dtype": 3, "trailing_shape": 4},
    "SampleResponse": {
        "sequences": 1, "prompt_logprobs": 2, "topk_prompt_logprobs": 3, "prompt_cache_hit_tokens": 4,
    },
    "SampledSequence": {"stop_reason": 1, "tokens": 2, "logprobs": 3, "topk_sampled_logprobs": 4},
    "TopkLogprobs": {"token_ids": 1, "logprobs": 2, "k": 3, "length": 4},
}  # fmt: skip


def test_fields_have_the_numbers_of_the_client() -> None:
    messages = pb.DESCRIPTOR.message_types_by_name
    assert {name: {f.name: f.number for f in one.fields} for name, one in messages.items()} == _FIELDS
    assert dict(pb.DType.items())["DTYPE_INT64"] == 2
    assert dict(pb.StopReason.items()) == {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1}


def test_a_request_comes_back_as_it_was() -> None:
    inputs = {"target_tokens": np.array([3, 4, 2**31]), "weights": np.array([0.5, -1, 0], np.float32)}
    sent = Forward("m:train:0", 7, (Datum(np.array([1, 2, 3]), inputs),), "ppo", {"a": 0.5, "b": "text"}, False)
    body = write_forward(sent)
    found = read_forward(body)
    assert (found.model_id, found.seq_id, found.loss, found.config, found.backward) == (
        "m:train:0",
        7,
        "ppo",
        sent.config,
        False,
    )
    assert found.data[0].tokens.tolist() == [1, 2, 3]
    for name, values in inputs.items():
        assert found.data[0].inputs[name].dtype == values.dtype
        assert found.data[0].inputs[name].tolist() == values.tolist()
    assert address_of(body) == ("m:train:0", 7, body)


def test_a_result_comes_back_as_it_was() -> None:
    logprobs = [np.array([-1.5, -2], np.float32), np.zeros(0, np.float32), np.array([-3], np.float32)]
    found, metrics = read_output(write_output(logprobs, {"loss:sum": 2.5}))
    assert [values.tolist() for values in found] == [[-1.5, -2.0], [], [-3.0]]
    assert metrics == {"loss:sum": 2.5}


def _weights(message: pb.ForwardBackwardRequest) -> pb.Tensor:
    return message.data[0].loss_fn_inputs["weights"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda message: message.data[0].model_input.add(image=b"x"), "image"),
        (lambda message: message.data[0].model_input.add(), "None"),
        (lambda message: message.data[0].model_input.add(encoded_text=pb.EncodedText(tokens=b"123")), "3 bytes"),
        (lambda message: _weights(message).MergeFrom(pb.Tensor(sparse_csr=b"")), "sparse"),
        (lambda message: _weights(message).MergeFrom(pb.Tensor(dense=b"1234", dtype=4)), "dtype"),
        (lambda message: _weights(message).MergeFrom(pb.Tensor(dense=b"1234", dtype=1, shape=[2])), "shape"),
    ],
)  # fmt: skip
def test_what_is_no_vector_of_text_is_refused(change, field) -> None:
    message = pb.ForwardBackwardRequest()
    message.data.add()
    change(message)
    with pytest.raises(InvalidInput, match=field):
        read_forward(message.SerializeToString())


def test_requests_for_samples_and_their_answers_come_back_as_they_were() -> None:
    asked = Sample(3, (1, 2), SamplingParams(n=2, stop=("a",), seed=0), (9,), True, 2, 1, 1, "alice")
    assert sample_from_proto(sample_to_proto(asked)) == asked
    top = Top(np.array([[1, 0]], np.int32), np.array([[-0.5, NO_LOGPROB]], np.float32))
    sequences = (
        Sampled(np.array([5], np.int32), np.array([-1.5], np.float32), True, top),
        Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), False),
    )
    sent = Samples(sequences, np.array([np.nan, -2], np.float32), top, 4)
    found = read_samples(samples_to_proto(sent).SerializeToString())
    assert (found.cached, [one.stopped for one in found.sequences]) == (4, [True, False])
    assert found.prompt_logprobs is not None and found.top_prompt is not None
    assert np.array_equal(found.prompt_logprobs, sent.prompt_logprobs, equal_nan=True)
    assert found.sequences[0].tokens.tolist() == [5] and found.sequences[0].logprobs.tolist() == [-1.5]
    assert found.sequences[0].top is not None and found.sequences[1].top is None
    assert (
        found.top_prompt.token_ids.tolist() == [[1, 0]] and found.top_prompt.logprobs.tolist() == top.logprobs.tolist()
    )
    bare = read_samples(samples_to_proto(Samples(sequences[1:])).SerializeToString())
    assert (bare.prompt_logprobs, bare.top_prompt) == (None, None)
    with pytest.raises(InvalidInput, match="top_p"):
        sample_from_proto(sampler_pb2.SampleRequest(prompt_token_ids=[1]))
