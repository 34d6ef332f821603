"""Converts the messages between the nodes of a trainer."""

from trinity.api.trainer.v1 import trainer_pb2 as pb
from trinity.runtime.errors import InvalidInput
from trinity.runtime.messages import from_message, to_message
from trinity.trainer.process.nodes import (
    Beat,
    Finished,
    FromNode,
    Leaving,
    Node,
    RankEnded,
    RankGroup,
    ToNode,
    Waiting,
)

_MOST_RANKS = 10_000


def from_node(message: pb.JoinNodeRequest) -> FromNode:
    """Raises InvalidInput for a message that no node sends."""
    match message.WhichOneof("part"):
        case "node":
            node = message.node
            if not node.name or not node.process or not 1 <= node.ranks <= _MOST_RANKS:
                raise InvalidInput("node", "must have a name, a process and 1 to 10,000 ranks")
            return from_message(Node, node, versions=dict(node.versions), config=dict(node.config))
        case "beat":
            return Beat()
        case "rank_ended":
            return from_message(RankEnded, message.rank_ended)
        case "leaving":
            return Leaving()
    raise InvalidInput("part", "is missing, or of a newer version of Trinity")


def to_first(message: FromNode) -> pb.JoinNodeRequest:
    match message:
        case Node():
            return pb.JoinNodeRequest(node=to_message(message, pb.Node))
        case RankEnded():
            return pb.JoinNodeRequest(rank_ended=to_message(message, pb.RankEnded))
        case Leaving():
            return pb.JoinNodeRequest(leaving=pb.NodeLeaving())
    return pb.JoinNodeRequest(beat=pb.NodeBeat())


def to_node(message: ToNode) -> pb.JoinNodeResponse:
    match message:
        case Waiting(text):
            return pb.JoinNodeResponse(waiting=text)
        case RankGroup(first_rank, world_size, port, secret):
            group = pb.RankGroup(first_rank=first_rank, world_size=world_size, store_port=port, store_secret=secret)
            return pb.JoinNodeResponse(group=group)
        case Finished():
            return pb.JoinNodeResponse(finished=pb.NodeFinished())
    return pb.JoinNodeResponse(beat=pb.NodeBeat())


def from_first(message: pb.JoinNodeResponse) -> ToNode:
    match message.WhichOneof("part"):
        case "waiting":
            return Waiting(message.waiting)
        case "group":
            group = message.group
            return RankGroup(group.first_rank, group.world_size, group.store_port, group.store_secret)
        case "finished":
            return Finished()
    return Beat()
