"""Plain calls of the endpoint that a client rewarded: nothing is sampled, the reply is there."""

from trinity.data.experience import Experience
from trinity.explorer.workflows.base import Workflow, as_text


class TrafficWorkflow(Workflow):
    """Returns the recorded call of a task {id, reward}."""

    async def run(self) -> list[Experience]:
        call = await self.tools.recorded_call(self.cell("id"), float(self.cell("reward")))
        return [as_text(self.tools, call, {"response_tokens": float(call.response_length)})]
