// Vercel's ai with two tools: node vercel_agent.mjs compatible|openai|anthropic URL MODEL TASK
import { readFileSync, writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [api, url, name, task] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const providers = {
  compatible: () => createOpenAICompatible({ name: "outrider", baseURL, apiKey: "none" })(name),
  openai: () => createOpenAI({ baseURL, apiKey: "none" })(name),
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" })(name),
};

const result = streamText({
  model: providers[api](),
  prompt: task,
  stopWhen: isStepCount(5),
  tools: {
    read_file: tool({
      description: "Reads a file",
      inputSchema: z.object({ path: z.string() }),
      execute: async ({ path }) => readFileSync(path, "utf8"),
    }),
    edit_file: tool({
      description: "Replaces a text in a file",
      inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
      execute: async ({ path, old, new: text }) => {
        writeFileSync(path, readFileSync(path, "utf8").replaceAll(old, text));
        return "replaced";
      },
    }),
  },
});
console.log(await result.text);
