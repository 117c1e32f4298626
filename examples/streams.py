"""Three streams on one event loop; one of them is aborted half-way."""

import asyncio

from outrider import LLM, SamplingParams


async def follow(llm: LLM, name: str, question: str, abort_after: int | None = None) -> None:
    prompt = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    stream = llm.async_engine.submit(prompt, SamplingParams(max_tokens=48, temperature=0))
    text, tokens = "", 0
    async for delta in stream:
        text, tokens = text + delta.text, tokens + len(delta.token_ids)
        if abort_after is not None and tokens >= abort_after:
            stream.abort()
    print(f"{name}: {text}")


async def main() -> None:
    with LLM() as llm:
        await asyncio.gather(
            follow(llm, "first", "Why is the sky blue?"),
            follow(llm, "second", "Name three rivers."),
            follow(llm, "third", "Tell me a long story.", abort_after=10),
        )


asyncio.run(main())
