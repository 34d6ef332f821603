"""Members that join, leave, hang and die while versions are made: one function a case, each on a run of its own."""

import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import obstore

from chaos.striking import case, in_a_broadcast, meanwhile
from chaos.versions.audit import names_both_numbers
from chaos.versions.run import FOLDER, GROUP, OTHER, S3, WeightsRun, check
from chaos.versions.world import LEASE_SECONDS, TENSORS, bucket
from trinity.api.sync.v1 import sync_pb2 as pb

ALL = (FOLDER, S3, GROUP)
_DIED_SECONDS = LEASE_SECONDS + 5


@case("three transports at once give the same version, the same canary and the same log-probabilities")
def three_transports(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    for _ in range(4):  # on S3: whole, difference, difference, whole
        run.until_serve(version := run.publish())
        for name, transport in ((FOLDER, "folder"), (S3, "s3"), (GROUP, "collective-gloo")):
            run.came_by(name, transport)
        errors = {name: member.canary_max_error for name, member in run.members().items()}
        check(len(set(errors.values())) == 1, f"canaries of version {version} differ: {errors}")
        time.sleep(chance.uniform(0, 0.2))
    for name in ALL:
        run.generate(name, 20)


@case("a newcomer serves the LIVE version by storage, and no member waits for it")
def join_in_the_middle(run: WeightsRun, chance: random.Random) -> None:
    run.open(FOLDER, GROUP)
    for _ in range(chance.randint(1, 4)):  # this number of differences is to be applied, or none
        run.until_serve(run.publish())
    version = run.publish(after_tensor=in_a_broadcast(chance, lambda: run.add(S3)))
    run.until_serve(version, [FOLDER, GROUP])
    run.until_serve(version)
    run.came_by(S3, "s3")
    run.until_serve(run.publish())


@case("two newcomers at once both serve the LIVE version, and enter the group at its next epoch")
def two_join_at_once(run: WeightsRun, chance: random.Random) -> None:
    run.open(GROUP)
    run.until_serve(run.publish())
    version = run.publish(after_tensor=in_a_broadcast(chance, lambda: (run.add(FOLDER), run.add(OTHER))))
    run.until_serve(version)
    run.until_serve(run.publish())
    run.came_by(OTHER, "collective-gloo")


@case("kill -9 of a member while it loads: the others serve the version, and it comes back whole")
def kill_during_a_load(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    run.until_serve(run.publish())
    victim, tensor = chance.choice(ALL), chance.randrange(TENSORS)
    member = run.explorers[victim]
    since = len(member.noted)

    def strike() -> None:
        member.until_noted(lambda mark: mark["what"] == "loading" and mark["tensor"] >= tensor, since)
        member.kill()

    with meanwhile(strike):
        version = run.publish()
    run.until_serve(version, [name for name in ALL if name != victim], _DIED_SECONDS)
    run.add(victim)
    run.until_serve(version)
    run.until_serve(run.publish())


@case("kill -9 of a member during a fetch from S3: the others serve the version, and it fetches all of it again")
def kill_during_a_fetch(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    run.until_serve(run.publish())
    s3, member = run.world.s3, run.explorers[S3]
    since = len(member.noted)

    def strike() -> None:
        member.until_noted(lambda mark: mark["what"] == "fetching", since)
        time.sleep(chance.uniform(0, 0.3))
        member.kill()
        s3.go_on()

    def held(publish: Callable[[], Any]) -> Any:
        s3.hold()  # connections are taken, and no byte comes
        return publish()

    run.maker.before_publishing(held)
    try:
        with meanwhile(strike):
            version = run.publish()
    finally:
        s3.go_on()
    run.until_serve(version, [FOLDER, GROUP], _DIED_SECONDS)
    run.add(S3)
    run.until_serve(version)
    run.until_serve(run.publish())


@case("kill -9 of a member during a collective: no one else waits beyond the deadline, the next epoch is without it")
def kill_during_a_collective(run: WeightsRun, chance: random.Random) -> None:
    run.open(GROUP, OTHER, S3)
    run.until_serve(run.publish())
    victim, other = chance.sample([GROUP, OTHER], 2)
    version = run.publish(after_tensor=in_a_broadcast(chance, run.explorers[victim].kill))
    run.until_serve(version, [other, S3], 2 * run.world.deadline + _DIED_SECONDS)
    run.until_serve(run.publish(), [other, S3])
    run.came_by(other, "collective-gloo")
    run.add(victim)
    run.until_serve(run.maker.version)
    run.until_serve(run.publish())


@case("SIGSTOP of a member during a collective: the others go on within the deadline, it comes back by storage",
      at_once=4)  # fmt: skip
def stop_during_a_collective(run: WeightsRun, chance: random.Random) -> None:
    run.open(GROUP, OTHER, FOLDER)
    run.until_serve(run.publish())
    begin, stopped, others = time.monotonic(), run.explorers[OTHER], [GROUP, FOLDER]
    version = run.publish(after_tensor=in_a_broadcast(chance, stopped.hold))
    while time.monotonic() - begin < run.world.stop_seconds:
        run.until_serve(version, others, 2 * run.world.deadline + _DIED_SECONDS)
        time.sleep(1.5)
        version = run.publish()
    run.until_serve(version, others)
    run.came_by(GROUP, "collective-gloo")
    stopped.go_on()
    run.until_serve(version)
    run.came_by(OTHER, "s3")
    run.until_serve(run.publish())


@case("sync killed with -9 during Publish and rollback: each is done once, and one version is LIVE")
def sync_killed(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    run.until_serve(run.publish())

    def struck(call: Callable[[], Any]) -> Any:
        answers: list[Any] = []
        with meanwhile(lambda: answers.append(call())):
            time.sleep(chance.uniform(0, 0.03))
            run.world.restart_sync()  # here: it ends with the thread that starts it
        return answers[0]

    for _ in range(2):
        run.maker.before_publishing(struck)
        version = run.publish(limit=40)
        run.until_serve(version)
    done = struck(lambda: _patiently(lambda: run.rollback(version - 1)))
    check((done.number, list(done.withdrawn)) == (1, [version]), f"the rollback became {done}")
    run.until_serve(version - 1)
    run.until_serve(run.publish(limit=40))


def _patiently(call: Callable[[], Any]) -> Any:
    end = time.monotonic() + 30
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            check(time.monotonic() < end, f"sync does not answer: {error}")
        time.sleep(0.05)


@case("a damaged shard is found before any member pauses, and no engine loads it")
def damaged_shard(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    good = run.publish()
    run.until_serve(good)
    on_s3 = chance.random() < 0.5
    paused = {name: run.loads_of(name) for name in ALL}

    def damaged(publish: Callable[[], Any]) -> Any:
        (_damage_object if on_s3 else _damage_file)(run, good + 1, chance)
        return publish()

    run.maker.before_publishing(damaged)
    bad = run.publish()
    if on_s3:  # the other places are whole
        run.until_serve(bad, [FOLDER, GROUP])
        told = run.until(lambda: run.members()[S3].failure, 10, "the S3 member says why it has not got it")
        check(("v" in told and "checksum" in told) or "bytes" in told, f"the S3 member says: {told}")
        check(run.loads_of(S3) == paused[S3], "the S3 member's engine was paused for damaged files")
    else:
        about = run.versions()[bad]
        check(about.state == pb.VERSION_STATE_REJECTED and "safetensors" in about.reason, f"sync says {about.reason}")
        check(paused == {name: run.loads_of(name) for name in ALL}, "an engine was paused for damaged files")
    for _ in range(3):  # what rests on the damaged difference is of no use either, up to the next whole version
        version = run.publish()
        run.until_serve(version, [FOLDER, GROUP])
    run.until_serve(version)


def _damage_file(run: WeightsRun, version: int, chance: random.Random) -> None:
    path = chance.choice(sorted((run.folder / f"weights/v{version}").glob("*.safetensors")))
    path.write_bytes(_with_another_bit(path.read_bytes(), chance))


def _damage_object(run: WeightsRun, version: int, chance: random.Random) -> None:
    listed = obstore.list(bucket(), f"{run.folder.name}/{run.run}/v{version}").collect()
    key = chance.choice(sorted(item["path"] for item in listed if not item["path"].endswith("manifest.pb")))
    obstore.put(bucket(), key, _with_another_bit(bytes(obstore.get(bucket(), key).bytes()), chance))


def _with_another_bit(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


@case("wrong weights with right checksums are rejected by the canary, with both numbers, and serve nowhere")
def wrong_weights(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    for _ in range(chance.randint(1, 3)):
        run.until_serve(good := run.publish())
    bad = run.publish(canary=run.maker.canary(run.maker.weights_of(good)))  # the trainer says these are the old ones
    about = run.until(
        lambda: (v := run.versions()[bad]).state == pb.VERSION_STATE_REJECTED and v, _DIED_SECONDS, "the verdict"
    )
    check(names_both_numbers(about), f"one of {about.measured} is not in {about.reason}")
    run.until_serve(good)
    for name in ALL:
        versions = {span.version for span in run.generate(name, 20).spans}
        check(versions == {good}, f"{name} answered by {versions} after version {bad} was rejected")
    run.until_serve(run.publish())


@case("a response over two updates has three spans, and each is what its own version gives")
def spans_over_updates(run: WeightsRun, chance: random.Random) -> None:
    run.open(*ALL)
    run.until_serve(first := run.publish())
    name, found = chance.choice(ALL), []
    with meanwhile(lambda: found.append(run.generate(name, 700))):
        for _ in range(2):
            time.sleep(chance.uniform(0.3, 0.8))
            run.until_serve(run.publish())
    versions = [span.version for span in found[0].spans]
    check(versions == [first, first + 1, first + 2], f"the spans are of {versions}, not of {first} to {first + 2}")
