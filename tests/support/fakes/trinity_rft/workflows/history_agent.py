"""An agent on OpenAI's client; its experiences are those of the history."""

from trinity.common.workflows import WORKFLOWS, Workflow


def solve(client, question, temperature):
    done = client.chat.completions.create(
        model=client.model_path, messages=[{"role": "user", "content": question}], temperature=temperature
    )
    return done.choices[0].message.content


@WORKFLOWS.register_module("history_agent")
class HistoryAgent(Workflow):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client()
        self.reward_fn = task.reward_fn(**task.reward_fn_args)

    def run(self):
        answer = solve(self.client, self.task.task_desc, self.task.rollout_args.temperature)
        reward = sum(self.reward_fn(response=answer, truth=self.task.truth).values())
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics["accuracy"] = reward
        return experiences
