// Calls a Tandem cluster from Node: npm ci && node client.mjs [HOST:PORT]
import { fileURLToPath } from "node:url";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const here = path.dirname(fileURLToPath(import.meta.url));
const protos = path.join(here, "..", "..", "protos");

const definition = protoLoader.loadSync(
  ["tandem/v1/generation.proto", "google/rpc/status.proto", path.join(here, "error_details.proto")],
  {
    includeDirs: [protos, path.join(protos, "third_party")],
    keepCase: true, // max_tokens, as in the protos, not maxTokens
    longs: String, // a seed is 64 bit: more than a JavaScript number holds
    enums: String,
  },
);
const { tandem } = grpc.loadPackageDefinition(definition);

// gRPC's own retries, for a gateway that starts, drains or has lost its scheduler. A stream is retried until its first
// message.
const retries = {
  methodConfig: [
    {
      name: [{ service: "tandem.v1.GenerationService" }],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: "0.2s",
        maxBackoff: "5s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};

export function connect(target) {
  return new tandem.v1.GenerationService(target, grpc.credentials.createInsecure(), {
    "grpc.service_config": JSON.stringify(retries),
    "grpc.max_receive_message_length": -1, // log-probabilities of a long prompt are more than the default of 4 MiB
    "grpc.keepalive_time_ms": 10_000, // notices a gateway that was cut off in the middle of a stream
  });
}

// Without a deadline a call waits as long as it takes.
const within = (seconds) => ({ deadline: Date.now() + seconds * 1000 });

// What an error of the cluster carries, by message name: { ErrorInfo: { reason, … }, BadRequest: { … } }.
export function detailsOf(error) {
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (bytes === undefined) return {};
  const found = {};
  for (const { type_url, value } of definition["google.rpc.Status"].deserialize(bytes).details) {
    const name = type_url.split("/").pop();
    if (definition[name] !== undefined) found[name.split(".").pop()] = definition[name].deserialize(value);
  }
  return found;
}

// The whole answer at once. The same seed always gives the same answer.
async function unary(client) {
  const request = {
    text: "Once upon a time",
    sampling: { temperature: 0.7, seed: "1" },
    stop: { max_tokens: 32, ignore_eos: true },
  };
  const response = await new Promise((resolve, reject) =>
    client.Generate(request, within(60), (error, answer) => (error ? reject(error) : resolve(answer))),
  );
  console.log("unary:", JSON.stringify(response.choices[0].text));
}

// A conversation, rendered with the model's own template; text as it comes. A stream is an async iterable.
async function chat(client) {
  const request = {
    chat: { messages: [{ role: "user", content: "Why is the sky blue?" }] },
    sampling: { temperature: 0 },
    stop: { max_tokens: 32 },
  };
  process.stdout.write("chat: ");
  for await (const { deltas, usage } of client.GenerateStream(request, within(60))) {
    for (const delta of deltas) process.stdout.write(delta.text);
    // On the last message only.
    if (usage) {
      const { prompt_tokens, completion_tokens } = usage;
      console.log(`\nusage: ${prompt_tokens} prompt tokens, ${completion_tokens} completion tokens`);
    }
  }
}

// As many tokens as the context holds.
const longStory = { text: "A very long story:", stop: { ignore_eos: true } };

// No more than so many seconds, the waiting included. What came until then is yours.
async function deadline(client) {
  let numTokens = 0;
  try {
    for await (const { deltas } of client.GenerateStream(longStory, within(1)))
      for (const delta of deltas) numTokens += delta.token_ids.length;
  } catch (error) {
    console.log(`deadline: ${grpc.status[error.code]} after ${numTokens ? "some" : "no"} tokens`);
  }
}

// The cluster stops at the next step and has its memory back.
async function cancel(client) {
  const call = client.GenerateStream(longStory);
  let numTokens = 0;
  try {
    for await (const { deltas } of call) {
      for (const delta of deltas) numTokens += delta.token_ids.length;
      if (numTokens >= 5) call.cancel();
    }
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
    console.log("cancelled after 5 tokens or a few more");
  }
}

// Every error of the cluster carries an ErrorInfo, and most one detail more.
async function wrongField(client) {
  const request = { text: "Once upon a time", sampling: { temperature: -1 } };
  await new Promise((resolve) =>
    client.Generate(request, within(10), (error) => {
      const { ErrorInfo, BadRequest } = detailsOf(error);
      for (const { field, description } of BadRequest.field_violations)
        console.log(`error: ${grpc.status[error.code]} ${ErrorInfo.reason} ${field}: ${description}`);
      resolve();
    }),
  );
}

const client = connect(process.argv[2] ?? "127.0.0.1:50051");
try {
  await unary(client);
  await chat(client);
  await deadline(client);
  await cancel(client);
  await wrongField(client);
} finally {
  client.close();
}
