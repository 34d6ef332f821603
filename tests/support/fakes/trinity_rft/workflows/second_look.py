"""A conversation of two turns as one experience."""

from trinity.common.workflows import WORKFLOWS, MultiTurnWorkflow


@WORKFLOWS.register_module("second_look")
class SecondLook(MultiTurnWorkflow):
    def run(self):
        return [self.converse(self.run_id_base + index) for index in range(self.repeat_times)]

    def converse(self, number):
        messages = [{"role": "user", "content": self.task.task_desc}]
        for follow_up in ("Look again.", ""):
            (reply,) = self.model.chat(messages, n=1)
            messages.append({"role": "assistant", "content": reply.response_text})
            if follow_up:
                messages.append({"role": "user", "content": follow_up})
        parts = self.task.reward_fn(**self.task.reward_fn_args)(response=reply.response_text, truth=self.task.truth)
        made = self.process_messages_to_experience(messages, sum(parts.values()), {"turns": 2, "style": "plain"})
        made.eid.run = number
        return made
