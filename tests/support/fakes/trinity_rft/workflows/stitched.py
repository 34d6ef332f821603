"""Two replies that the workflow puts together by itself: what stands between them is not trained."""

import torch

from trinity.common.experience import EID, Experience
from trinity.common.models import ModelWrapper
from trinity.common.workflows import WORKFLOWS, Task, Workflow


@WORKFLOWS.register_module("stitched")
class Stitched(Workflow):
    can_repeat = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def run(self):
        return [self.stitch(index) for index in range(self.repeat_times)]

    def stitch(self, index):
        (first,) = self.model.chat([{"role": "user", "content": self.task.task_desc}])
        question = self.task.workflow_args.get("then", "Sure?")
        messages = [
            {"role": "user", "content": self.task.task_desc},
            {"role": "assistant", "content": first.response_text},
            {"role": "user", "content": question},
        ]
        (second,) = self.model.chat(messages)
        told = second.prompt_length - len(first.tokens)
        mask = torch.cat(
            [torch.ones(first.response_length), torch.zeros(told), torch.ones(second.response_length)]
        ).bool()
        return Experience(
            eid=EID(run=index + self.run_id_base),
            tokens=second.tokens,
            prompt_length=first.prompt_length,
            action_mask=mask,
            reward=float(len(second.response_text or "")),
            response_text=f"{first.response_text} / {second.response_text}",
        )
