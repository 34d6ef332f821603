// Everything a provider needs, for environments written in JavaScript: `serve` and `attach`, as the Python SDK has them.
// An environment is a class with reset(task, args, seed), step(text) and, if it holds anything, close(); reset and step
// return {observation, reward, done, info, metrics} or a promise of it. docs/environments.md has the contract.

import os from 'node:os';
import path from 'node:path';
import { randomUUID } from 'node:crypto';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const VERSION = 2;
const MAX_TEXT_BYTES = 1024 * 1024;
const OPTIONS = {
  'grpc.max_receive_message_length': 64 * 1024 * 1024,
  'grpc.max_send_message_length': 64 * 1024 * 1024,
  'grpc.keepalive_time_ms': 15000,
  'grpc.keepalive_timeout_ms': 10000,
  'grpc.keepalive_permit_without_calls': 1,
};
const PROTOS = process.env.TRINITY_PROTOS ?? path.join(path.dirname(fileURLToPath(import.meta.url)), '../../proto');
const definition = loader.loadSync('trinity/api/environment/v1/environment.proto', {
  includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true,
});
const { EnvironmentService } = grpc.loadPackageDefinition(definition).trinity.api.environment.v1;
const { status } = grpc;

export class Refused extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

// What the client is told: a code of our own, or INTERNAL with the error's text.
const failure = (error) => ({
  code: error instanceof Refused ? error.code : status.INTERNAL,
  message: error instanceof Refused ? error.message : `${error.name}: ${error.message}`,
});

function object(text, field) {
  let value;
  try {
    value = JSON.parse(text || '{}');
  } catch (error) {
    throw new Refused(status.INVALID_ARGUMENT, `${field}: is not JSON: ${error.message}`);
  }
  if (value === null || typeof value !== 'object' || Array.isArray(value)) {
    throw new Refused(status.INVALID_ARGUMENT, `${field}: must be a JSON object`);
  }
  return value;
}

class Arena {
  constructor(environments) {
    this.kinds = new Map(environments.map((kind) => [kind.description.name, kind]));
    this.open = new Map(environments.map((kind) => [kind.description.name, 0]));
  }

  descriptions() {
    return [...this.kinds.values()].map((kind) => ({ step_timeout_seconds: 10, ...kind.description }));
  }
}

// One episode: takes a reset, then actions, one at a time; gives answers, or throws Refused.
class Episode {
  constructor(arena) {
    this.arena = arena;
    this.turn = -1;
  }

  async reset(reset) {
    if (this.turn >= 0) throw new Refused(status.INVALID_ARGUMENT, 'reset: came twice');
    const kind = this.arena.kinds.get(reset.environment);
    if (!kind) throw new Refused(status.NOT_FOUND, `reset.environment: no environment is named ${reset.environment}`);
    const limit = kind.description.max_parallel_episodes ?? 0;
    if (limit && this.arena.open.get(reset.environment) >= limit) {
      throw new Refused(status.RESOURCE_EXHAUSTED, `${reset.environment} plays ${limit} episodes, its limit`);
    }
    this.arena.open.set(reset.environment, this.arena.open.get(reset.environment) + 1);
    this.name = reset.environment;
    this.turn = 0;
    const task = object(reset.task_json, 'reset.task_json');
    const args = object(reset.args_json, 'reset.args_json');
    this.environment = new kind();
    return this.answer(await this.environment.reset(task, args, BigInt(reset.seed)));
  }

  async step(action) {
    if (this.turn < 0) throw new Refused(status.INVALID_ARGUMENT, 'reset: is missing; it must be the first message');
    if (this.done) throw new Refused(status.FAILED_PRECONDITION, 'action: the episode is done');
    this.turn += 1;
    if (action.turn !== this.turn) {
      throw new Refused(status.INVALID_ARGUMENT, `action.turn: is ${action.turn}, must be ${this.turn}`);
    }
    if (Buffer.byteLength(action.text) > MAX_TEXT_BYTES) {
      throw new Refused(status.INVALID_ARGUMENT, `action.text: is longer than ${MAX_TEXT_BYTES} bytes`);
    }
    return this.answer(await this.environment.step(action.text));
  }

  answer({ observation, reward = 0, done = false, info, metrics = {} }) {
    this.done = done;
    return { observation, reward, done, info_json: info ? JSON.stringify(info) : '', metrics, turn: this.turn };
  }

  close() {
    if (this.name === undefined) return;
    this.arena.open.set(this.name, this.arena.open.get(this.name) - 1);
    this.name = undefined;
    this.environment?.close?.();
  }
}

// Listen at an address that the run's YAML names. Returns the port.
export function serve(environments, address) {
  const arena = new Arena(environments);
  const server = new grpc.Server(OPTIONS);
  server.addService(EnvironmentService.service, {
    Describe: (call, reply) => reply(null, { environments: arena.descriptions(), protocol_version: VERSION }),
    Episode: (call) => {
      const episode = new Episode(arena);
      let last = Promise.resolve(); // answers come in the order of the messages
      const close = () => { last = last.then(() => episode.close()); };
      call.on('data', (request) => {
        last = last.then(async () => {
          call.write(await (request.message === 'reset' ? episode.reset(request.reset) : episode.step(request.action)));
        }).catch((error) => {
          const { code, message } = failure(error);
          episode.close();
          call.emit('error', { code, details: message });
        });
      });
      call.on('end', () => { close(); last.then(() => call.end()); });
      call.on('cancelled', close);
    },
  });
  return new Promise((resolve, reject) => {
    server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error, port) => {
      if (error) reject(error);
      else resolve(port);
    });
  });
}

const FINAL = new Set([
  status.UNAUTHENTICATED, status.PERMISSION_DENIED, status.ALREADY_EXISTS, status.FAILED_PRECONDITION,
  status.INVALID_ARGUMENT, status.UNIMPLEMENTED,
]);

// Stay attached to a run's environment service; a lost connection is made again. Rejects if the service refuses.
export async function attach(environments, address, { token = '', name, onAttached = () => {} } = {}) {
  const instance = randomUUID();
  const provider = name || `${os.hostname()}-${process.pid}-${instance.slice(0, 6)}`;
  let pause = 200;
  for (;;) {
    const arena = new Arena(environments);
    const offer = { protocol_version: VERSION, token, provider, instance, environments: arena.descriptions() };
    const client = new EnvironmentService(address, grpc.credentials.createInsecure(), OPTIONS);
    const accepted = () => { pause = 200; onAttached(provider); };
    const error = await new Promise((ended) => { attachOnce(client, arena, offer, accepted, ended); });
    client.close();
    if (error && FINAL.has(error.code)) throw new Error(error.message);
    console.error(`not attached to ${address}, again in ${pause} ms: ${error?.message ?? 'the stream ended'}`);
    await new Promise((later) => { setTimeout(later, pause * (0.5 + Math.random() / 2)); });
    pause = Math.min(2 * pause, 10000);
  }
}

function attachOnce(client, arena, offer, accepted, ended) {
  const stream = client.Attach();
  const episodes = new Map();
  const end = (error) => {
    for (const { episode } of episodes.values()) episode.close();
    episodes.clear();
    ended(error);
  };
  stream.on('error', end);
  stream.on('end', () => end());
  stream.on('data', (response) => {
    if (response.accepted) accepted();
    for (const one of response.calls) take(one);
  });
  stream.write({ offer });

  // Calls of one id come one at a time: the service waits for the reply to each.
  async function take(one) {
    if (one.call === 'close') {
      episodes.get(one.id)?.episode.close();
      episodes.delete(one.id);
      return;
    }
    try {
      if (one.call === 'reset') episodes.set(one.id, { episode: new Episode(arena) });
      const open = episodes.get(one.id);
      if (!open) throw new Refused(status.INVALID_ARGUMENT, 'call: is of no episode that is open here');
      const response = await (one.call === 'reset' ? open.episode.reset(one.reset) : open.episode.step(one.action));
      if (episodes.get(one.id) === open) stream.write({ replies: [{ id: one.id, response }] });
    } catch (error) {
      episodes.get(one.id)?.episode.close();
      episodes.delete(one.id);
      stream.write({ replies: [{ id: one.id, failure: failure(error) }] });
    }
  }
}
