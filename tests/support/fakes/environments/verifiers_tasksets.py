"""A taskset of verifiers' v1 interface for the tests: a package as verifiers finds it by name."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumTaskConfig(vf.TaskConfig):
    tools: bool = False


class SumsConfig(vf.TasksetConfig):
    """kind: sums, picture (a container image), broken (set-up fails), unscored (a reward raises)."""

    kind: str = "sums"
    task: SumTaskConfig = SumTaskConfig()


class SumsData(vf.TaskData):
    answer: str
    kind: str


class Adding(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class SumTask(vf.Task[SumsData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Adding(vf.ToolsetConfig())] if config.tools else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.kind == "broken":
            raise RuntimeError("the machine is gone")

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.kind == "unscored":
            raise ValueError("no score for this")
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 10)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        image = "debian" if self.config.kind == "picture" else None
        for n in range(1, 4):
            data = SumsData(
                prompt=f"What is {n} + {n}?",
                system_prompt="Answer with a number.",
                answer=str(2 * n),
                kind=self.config.kind,
                image=image,
            )
            yield SumTask(data, self.config.task)


if __name__ == "__main__":
    Adding.run()
