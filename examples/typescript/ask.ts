/**
 * Asks a Lookonce decoder about a picture, with nothing but gRPC and the stubs generated from `protos/`.
 *
 *     npm run ask -- 127.0.0.1:50051 picture.png "What is in the picture?"
 *
 * It sends the picture's SHA-256 first, and the file only if the server does not know the picture. If the server has no
 * room, it waits for as long as the server says and tries again.
 */

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { credentials, Metadata, status, type ServiceError } from "@grpc/grpc-js";

import { ErrorInfo, RetryInfo, Status } from "./gen/typescript/google/rpc/errors.js";
import { ImageSource } from "./gen/typescript/lookonce/common/v1/common.js";
import {
  DecoderServiceClient,
  GenerateStreamRequest,
  type GenerateStreamResponse,
  Role,
  type Usage,
} from "./gen/typescript/lookonce/decoder/v1/decoder_service.js";

/** Time for all attempts together, milliseconds. */
const TIMEOUT_MS = 60_000;
const MAX_TOKENS = 64;
const ERROR_DOMAIN = "lookonce";

/** Prints the answer while it is generated; returns the counts of its tokens. Throws a ServiceError if it fails. */
async function ask(decoder: DecoderServiceClient, picture: Buffer, question: string): Promise<Usage | undefined> {
  const deadline = Date.now() + TIMEOUT_MS;
  const digest = createHash("sha256").update(picture).digest();
  let image = ImageSource.fromPartial({ source: { $case: "key", value: { digest } } });
  for (;;) {
    let hasText = false;
    try {
      const stream = decoder.generateStream(request(image, question), new Metadata(), { deadline });
      for await (const { event } of stream as AsyncIterable<GenerateStreamResponse>) {
        if (event?.$case === "delta") {
          process.stdout.write(event.value.text);
          hasText = true;
        } else if (event?.$case === "finished") {
          process.stdout.write("\n");
          return event.value.usage;
        }
      }
      throw new Error("the stream ended without its last message");
    } catch (error) {
      // An attempt that has printed a part of the answer is not repeated: another one would begin again.
      if (!isServiceError(error) || hasText) throw error;
      const { reason, pauseMs } = explain(error);
      if (reason === "EMBEDDING_NOT_CACHED" && image.source?.$case === "key") {
        console.error("The server does not know the picture: it gets the file.");
        image = ImageSource.fromPartial({ source: { $case: "data", value: picture }, expectedDigest: digest });
      } else if (pauseMs !== undefined && Date.now() + pauseMs < deadline) {
        console.error(`The server is busy: next attempt in ${pauseMs / 1000} s.`);
        await sleep(pauseMs);
      } else {
        throw error;
      }
    }
  }
}

/** Returns the request for one question about one image. */
function request(image: ImageSource, question: string): GenerateStreamRequest {
  const parts = [{ part: { $case: "image", value: image } }, { part: { $case: "text", value: question } }] as const;
  return GenerateStreamRequest.fromPartial({
    params: {
      prompt: { $case: "chat", value: { messages: [{ role: Role.ROLE_USER, parts: [...parts] }] } },
      sampling: { maxTokens: MAX_TOKENS },
    },
  });
}

/**
 * Returns the reason in a failed call's status, and the pause in milliseconds that the server asks for, if it does.
 * Statuses of gRPC itself, for example when nothing listens, have no reason: it is the name of their code.
 */
function explain(error: ServiceError): { reason: string; pauseMs?: number } {
  let reason: string = status[error.code];
  let pauseMs: number | undefined;
  const [details] = error.metadata.get("grpc-status-details-bin");
  for (const { typeUrl, value } of details instanceof Buffer ? Status.decode(details).details : []) {
    if (typeUrl.endsWith("/google.rpc.ErrorInfo")) {
      const info = ErrorInfo.decode(value);
      if (info.domain === ERROR_DOMAIN) reason = info.reason;
    } else if (typeUrl.endsWith("/google.rpc.RetryInfo")) {
      const { retryDelay } = RetryInfo.decode(value);
      if (retryDelay) pauseMs = Number(retryDelay.seconds) * 1000 + retryDelay.nanos / 1e6;
    }
  }
  return { reason, pauseMs };
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "metadata" in error;
}

async function main(): Promise<number> {
  const [target, picture, question] = process.argv.slice(2);
  if (target === undefined || picture === undefined || question === undefined) {
    console.error('usage: npm run ask -- HOST:PORT PICTURE "QUESTION"');
    return 2;
  }
  const decoder = new DecoderServiceClient(target, credentials.createInsecure());
  try {
    const usage = await ask(decoder, readFileSync(picture), question);
    console.error(
      `Image rows: ${usage?.encodedImageTokens} encoded, ${usage?.cachedImageTokens} from the shared cache, ` +
        `${usage?.skippedImageTokens} skipped.`,
    );
    return 0;
  } catch (error) {
    if (!isServiceError(error)) throw error;
    console.error(`${explain(error).reason}: ${error.details}`);
    return 1;
  } finally {
    decoder.close();
  }
}

process.exitCode = await main();
