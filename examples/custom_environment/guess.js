// The game of guess.py in JavaScript.
//
// From the project's root, for a run that reaches it, and to reach a run (token: TRINITY_ENVIRONMENT_ATTACH_TOKEN):
//
//     npm install --prefix examples/custom_environment
//     node examples/custom_environment/guess.js serve 0.0.0.0:7010
//     node examples/custom_environment/guess.js attach 10.0.0.5:7002 my-guesses

import grpc from '@grpc/grpc-js';
import { Refused, attach, serve } from './provider.js';

class Guess {
  static description = {
    name: 'guess', summary: 'Guess a number; each answer says higher or lower.', max_parallel_episodes: 256,
    deterministic: true,
  };

  reset(task, args, seed) {
    const highest = task.highest ?? 10;
    if (!Number.isInteger(highest) || highest < 1) {
      throw new Refused(grpc.status.INVALID_ARGUMENT, `task.highest: is ${highest}, must be an integer of at least 1`);
    }
    // The same seed must give the same episode, in every language that plays this game.
    const rest = (seed * 7919n + 13n) % BigInt(highest);
    this.number = Number(rest < 0n ? rest + BigInt(highest) : rest) + 1;
    this.left = args.guesses ?? 5;
    return { observation: `I think of a number from 1 to ${highest}. Reply with <answer>number</answer>.` };
  }

  step(text) {
    this.left -= 1;
    const found = /<answer>\s*([0-9]{1,9})\s*<\/answer>/.exec(text.slice(0, 10000));
    const right = found !== null && Number(found[1]) === this.number;
    let observation = 'There is no <answer>number</answer> in the reply.';
    if (right) observation = 'Right.';
    else if (found) observation = Number(found[1]) < this.number ? 'Higher.' : 'Lower.';
    const metrics = { success: Number(right), guesses_left: this.left };
    return { observation, reward: Number(right), done: right || this.left <= 0, metrics };
  }
}

const [mode, address, name] = process.argv.slice(2);
if (mode === 'serve') {
  const port = await serve([Guess], address);
  console.log(`serving at port ${port}`);
} else {
  const token = process.env.TRINITY_ENVIRONMENT_ATTACH_TOKEN ?? '';
  const onAttached = (provider) => console.log(`attached as ${provider}`);
  await attach([Guess], address, { token, name, onAttached }).catch((error) => {
    console.error(error.message);
    process.exit(1);
  });
}
