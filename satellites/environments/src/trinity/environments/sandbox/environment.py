"""Tasks in a shell: commands and files in a sandbox, judged by tests in Harbor's form."""

import json
import math
import zlib
from contextlib import closing
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.game import ToolGame, Turn, TurnRules, Unsolvable
from trinity.environments.replies import Reply, ReplyFormat, between, thought
from trinity.environments.sandbox import docker, runtimes
from trinity.environments.sandbox.harbor import Harbor
from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import BubblewrapSandbox, File, Output, Sandbox, problem, put, require
from trinity.runtime.errors import Conflict
from trinity.runtime.leases import containers_allowed, most_mib
from trinity.sdk.environment import Description, Observation

_MOST_STATE_BYTES = 512 * 1024
_MOST_RESTORED_BYTES = 64 * 1024**2
_COUNTED = ("steps", "total_reward", "counts", "_measured", "_last_actions", "last_text", "calls", "errors")
_REWARD = "/logs/verifier/reward"
_READ_REWARD = f"cat {_REWARD}.txt 2>/dev/null || cat {_REWARD}.json"
_TEXT = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": what, "parameters": {"type": "object", "properties": has, "required": list(has)}}
    for name, what, has in (
        ("run", "Run a command of the shell bash and wait for its end.", {"command": _TEXT}),
        ("write_file", "Write a file, whose folders are made.", {"path": _TEXT, "content": _TEXT}),
        ("read_file", "Read the beginning of a file.", {"path": _TEXT}),
        ("submit", "Say that the task is done. Then the tests run.", {}),
    )
]
_ENDED = {
    "time": "it ran longer than {0.command_seconds:g} s",
    "memory": "the processes used more than {0.memory_mib} MiB",
    "processes": "there were more than {0.processes} processes",
}


class Shell(ToolGame):
    """A task that is done with commands and files in a sandbox. Reward: what its tests write, at the end.

    A row is a task in Harbor's form: {"instruction", "config", "environment", "tests", "solution"}, as a taskset's
    folder of such tasks gives it. A reply holds <tool_call>{"name", "arguments"}</tool_call>; a lenient one may have a
    block between triple backticks instead, which is run. After `submit`, or the last step, tests/test.sh runs and
    writes /logs/verifier/reward.txt, or reward.json.
    """

    description = Description(
        "sandbox",
        "A task in a shell, judged by tests.",
        max_parallel_episodes=64,
        step_timeout_seconds=240,
        reset_timeout_seconds=120,
        snapshots=True,
    )
    unplayable = staticmethod(lambda: "" if containers_allowed() or runtimes.allowed() else problem())
    isolation = "thread"
    defaults = TurnRules(max_steps=20, list_actions=False)
    tools = TOOLS

    @staticmethod
    def read_row(task: dict[str, Any], args: dict[str, Any]) -> None:
        """Raises InvalidInput for a row that cannot be played, as `trinity check` asks for each."""
        _task_of(Arguments(task, "task"), args.get("backend", "bubblewrap"))

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self._given = task, args, seed
        return super().reset(task, args, seed)

    def snapshot(self) -> bytes:
        """Returns the row, its arguments, what was counted, and the files. Empty if these take more than 512 KiB, while
        a process runs on, and for sandboxes elsewhere."""
        files = self._sandbox.pack(_MOST_STATE_BYTES)
        counted = {name: getattr(self, name) for name in _COUNTED}
        state = zlib.compress(json.dumps([self._given, counted, files]).encode()) if files else b""
        return state if len(state) <= _MOST_STATE_BYTES else b""

    def restore(self, state: bytes) -> None:
        """Begins the task in a new sandbox, which gets the files of the state."""
        given, counted, files = json.loads(zlib.decompressobj().decompress(state, _MOST_RESTORED_BYTES))
        self.reset(*given)
        assert isinstance(self._sandbox, BubblewrapSandbox)
        self._sandbox.unpack(files)
        vars(self).update({name: counted[name] for name in _COUNTED})

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self._on_limit = args.choice("on_limit", "end", ("end", "continue"))
        backend = args.text("backend", "bubblewrap")
        here = backend == "bubblewrap"
        self._task = _task_of(task, backend)
        self._limits = limits_of(self._task, args)
        self.goal = self._task.instruction
        self._sandbox = self.held.enter_context(closing(self._start(backend)))
        if here:
            put(self._sandbox, self._task.files)
            self._run('mkdir -p -- "$1"', [self._task.workdir], cwd="/")
        self._run(f"mkdir -p {_REWARD.rpartition('/')[0]} /tests", cwd="/")
        place = self._task.workdir or "the image's folder"
        return (
            f"{self.goal}\n\nYou work in {place}. Use these tools:\n{json.dumps(TOOLS)}\n"
            'Call one with <tool_call>{"name": "...", "arguments": {...}}</tool_call> and wait for its result. '
            "Call submit when the task is done."
        )

    def _start(self, backend: str) -> Sandbox:
        if backend == "bubblewrap":
            require()
            return BubblewrapSandbox(self._limits, self._task.folders)
        if backend == "docker":
            docker.check_allowed()
            return docker.DockerSandbox(self._limits, self._task.image or docker.build(self._task.context))
        return runtimes.HarborSandbox(self._limits, backend, runtimes.options_of(backend), self._task)

    def read(self, reply: str) -> Reply:
        if len(reply) > self.rules.max_reply_characters:
            return super().read(reply)
        rest = reply.rpartition("</think>")[2]
        call = between(rest, "<tool_call>", "</tool_call>")
        if call is None and self.rules.reply_format != ReplyFormat.STRICT and (script := _fenced(rest)):
            call = json.dumps({"name": "run", "arguments": {"command": script}})
        if call is None or not call.strip():
            return Reply(problem="there is no <tool_call> in the reply")
        return Reply(call.strip(), thought(reply))

    def refusal(self, action: str) -> str:
        return self.parse_call(action)[2]

    def arguments_problem(self, name: str, given: Any) -> str:
        wanted: list[str] = next(tool["parameters"]["required"] for tool in TOOLS if tool["name"] == name)
        if not isinstance(given, dict) or sorted(given) != sorted(wanted):
            return f"`arguments` of {name} must have {', '.join(wanted) or 'nothing'}"
        if not all(isinstance(value, str) and "\0" not in value for value in given.values()):
            return f"`arguments` of {name} must be texts without NUL"
        if name != "write_file" and sum(map(len, given.values())) > 100_000:
            return f"`arguments` of {name} are longer than 100000 characters"
        return ""

    def play(self, action: str) -> Turn:
        name, given, _ = self.parse_call(action)
        if name == "submit":
            return self._judged("")
        output = self._call(name, given)
        turn = self.called(output_text(output, self._limits), output.code != 0)
        if output.ended in ("memory", "processes") and self._on_limit == "end":
            return Turn(turn.text, done=True, metrics={**turn.metrics, f"limit_{output.ended}": 1.0})
        return turn

    def _turn(self, reply: Reply) -> tuple[Turn, str]:
        """The tests judge what the last step left, whatever it was."""
        turn, problem = super()._turn(reply)
        if not turn.done and self.steps >= self.rules.max_steps:
            return self._judged(f"{turn.text}\n{self.limit_text()}\n"), problem
        return turn, problem

    def _call(self, name: str, given: dict[str, str]) -> Output:
        if name == "run":
            return self._run(given["command"])
        if name == "read_file":
            return self._run('cat -- "$1"', [given["path"]])
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        return self._run(script, [given["path"]], given["content"].encode("utf-8", "replace"))

    def _run(self, script: str, words: list[str] | None = None, stdin: bytes = b"", cwd: str = "") -> Output:
        argv = ["bash", "-c", script, "bash", *(words or [])]
        return self._sandbox.run(argv, stdin=stdin, cwd=cwd or self._task.workdir, env=self._task.env)

    def _judged(self, before: str) -> Turn:
        """Run the tests, once nothing of the policy runs any more.

        Raises Conflict where they end well without a reward: a task whose tests are broken is no failure of the policy.
        """
        clear = ["bash", "-c", f"find /tests /logs -mindepth 1 -delete; mkdir -p {_REWARD.rpartition('/')[0]}"]
        if (cleared := self._sandbox.run(clear, cwd="/", alone=True)).code:
            return Turn(f"{before}The tests could not run: {output_text(cleared, self._limits)}", 0.0, True, False)
        put(self._sandbox, self._task.tests)
        tests = self._sandbox.run(
            ["bash", "/tests/test.sh"],
            seconds=self._task.verifier_seconds,
            cwd=self._task.workdir,
            env={**self._task.env, **self._task.verifier_env},
        )
        reward = self._reward(tests)
        success = reward >= 1
        text = "The tests passed." if success else f"The tests gave {reward:g}."
        return Turn(before + text, reward, True, success, {**self.tool_metrics(), "score": reward})

    def _reward(self, tests: Output) -> float:
        """0 where the tests were ended, or failed before they wrote one: what they try may end them."""
        found = self._sandbox.run(["bash", "-c", _READ_REWARD], cwd="/", alone=True)
        try:
            value = json.loads(found.text)
            reward = float(value["reward"] if isinstance(value, dict) else value)
        except (ValueError, TypeError, KeyError, RecursionError):
            reward = math.nan
        if tests.ended or (tests.code and not math.isfinite(reward)):
            return 0.0
        if not math.isfinite(reward):
            wrote = found.text.strip()[:200] if not found.code else "nothing"
            what = f"tests/test.sh wrote {wrote!r} as its reward, must be a number in {_REWARD}.txt"
            raise Conflict(f"sandbox: {what}; it said: {tests.text[-500:]}")
        return reward

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """Write solution/ to /solution and run it."""
        solution = _task_of(Arguments(task, "task"), args.get("backend", "bubblewrap")).solution
        if "/solution/solve.sh" not in solution:
            raise Unsolvable("the task has no solution/solve.sh")
        calls: list[tuple[str, dict[str, str]]] = []
        for path, file in solution.items():
            calls.append(("write_file", {"path": path, "content": _text(file)}))
        calls += [("run", {"command": "bash /solution/solve.sh"}), ("submit", {})]
        return [f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls]


def _task_of(row: Arguments, backend: str) -> Harbor:
    """Raises InvalidInput naming the part of a row that this backend cannot play."""
    task = Harbor.read(row, builds=backend != "bubblewrap")
    if backend not in ("bubblewrap", "docker"):
        runtimes.check_task(backend, task)
    return task


def limits_of(task: Harbor, args: Arguments) -> Limits:
    """Returns the limits by the arguments, else by the task, within those of the operator."""
    of_task = {"memory_mib": task.memory_mib, "disk_mib": task.disk_mib}
    most = most_mib()
    for name, low in (("memory_mib", 32), ("disk_mib", 1)):
        if name not in args and (asked := of_task[name]):
            args.values[name] = max(low, min(asked, most))
    return Limits.read(args)


def output_text(output: Output, limits: Limits) -> str:
    """Returns the policy's view of a command."""
    text = output.text.rstrip("\n")
    if output.cut:
        text += f"\n[cut after {limits.output_bytes} bytes]"
    if output.ended:
        return f"{text}\n[ended: {_ENDED[output.ended].format(limits)}]".lstrip("\n")
    return f"{text}\n[exit code {output.code}]".lstrip("\n") if output.code or not text else text


def _fenced(text: str) -> str:
    """The last block between triple backticks, without its language."""
    block = between(text, "```", "```")
    if block is None:
        return ""
    first, newline, rest = block.partition("\n")
    return (rest if newline and first.strip() in ("", "bash", "sh", "shell") else block).strip()


def _text(file: File) -> str:
    try:
        return file.data.decode()
    except UnicodeDecodeError:
        raise Unsolvable("a file of solution/ is no text") from None
