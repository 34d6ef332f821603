"""Learns sums of two digits through `trinity tinker`: by SFT on answers of which a quarter are wrong, then by RL.

    TINKER_BASE_URL=http://127.0.0.1:8090 TINKER_API_KEY=... python examples/tinker/sums.py

Prints the accuracy of greedy answers before, between and after.
"""

import random

import tinker

SUMS = [(a, b) for a in range(10) for b in range(10)]
SFT_STEPS, RL_STEPS, GROUP = 160, 20, 8


def main() -> None:
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base, rank=32, seed=1).result()
    tokenizer = client.get_tokenizer()
    newline, rng = tokenizer.encode("\n"), random.Random(0)

    def prompt(a: int, b: int) -> list[int]:
        return tokenizer.encode(f"{a}+{b}=")

    def datum(question: list[int], answer: list[int], **inputs: list[float]) -> tinker.Datum:
        """Makes a sequence whose loss reads `inputs` of the answer's tokens, and zeros before."""
        before, tokens = len(question) - 1, question + answer
        padded = {name: [0.0] * before + values for name, values in inputs.items()}
        return tinker.Datum(tinker.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **padded})

    def sample(chosen: list[tuple[int, int]], count: int, temperature: float) -> list:
        """Samples answers by the newest weights. Returns each sum's sequences, and 1 for each right one."""
        sampler = client.save_weights_and_get_sampling_client().result()
        how = tinker.SamplingParams(max_tokens=4, temperature=temperature, stop=newline)
        futures = [sampler.sample(tinker.ModelInput.from_ints(prompt(a, b)), count, how) for a, b in chosen]
        groups = [future.result().sequences for future in futures]
        return [
            (group, [float(tokenizer.decode(one.tokens) == f"{a + b}\n") for one in group])
            for (a, b), group in zip(chosen, groups, strict=True)
        ]

    def step(data: list[tinker.Datum], loss: str, rate: float) -> float:
        gradient = client.forward_backward(data, loss)
        client.optim_step(tinker.AdamParams(learning_rate=rate)).result()
        return gradient.result().metrics["loss:sum"] / len(data)

    def accuracy() -> float:
        return sum(right for _, (right,) in sample(SUMS, 1, 0.0)) / len(SUMS)

    print(f"accuracy {accuracy():.2f}", flush=True)
    for number in range(SFT_STEPS):
        data = []
        for a, b in rng.sample(SUMS, 50):
            answer = tokenizer.encode(str(a + b if rng.random() < 0.75 else (a + b + 3) % 19)) + newline
            data.append(datum(prompt(a, b), answer, weights=[1.0] * len(answer)))
        loss = step(data, "cross_entropy", 3e-3)
        if number % 40 == 0:
            print(f"SFT step {number}, loss {loss:.3f}", flush=True)
    print(f"accuracy {accuracy():.2f} after SFT", flush=True)
    client = service.create_training_client_from_state(client.save_state("sft").result().path).result()
    for number in range(RL_STEPS):
        chosen, data, rewards = rng.sample(SUMS, 40), [], []
        for (a, b), (group, right) in zip(chosen, sample(chosen, GROUP, 1.0), strict=True):
            rewards += right
            for one, reward in zip(group, right, strict=True):
                if advantage := reward - sum(right) / GROUP:
                    numbers = {"logprobs": one.logprobs, "advantages": [advantage] * len(one.tokens)}
                    data.append(datum(prompt(a, b), one.tokens, **numbers))
        if data:
            step(data, "importance_sampling", 1e-3)
        print(f"RL step {number}, reward {sum(rewards) / len(rewards):.3f}", flush=True)
    print(f"accuracy {accuracy():.2f} after RL", flush=True)


if __name__ == "__main__":
    main()
