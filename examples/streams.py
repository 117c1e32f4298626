"""Three chats on one event loop. They share every step. One of them is aborted after ten pieces of text."""

import asyncio

from outrider import LLM, SamplingParams
from outrider.chat.conversation import ChatRequest
from outrider.chat.events import TextDelta
from outrider.chat.message_dicts import messages_from_dicts
from outrider.chat.service import ChatService


async def follow(chat: ChatService, name: str, question: str, abort_after: int | None = None) -> None:
    messages = messages_from_dicts([{"role": "user", "content": question}])
    stream = await chat.start(ChatRequest(messages, SamplingParams(max_tokens=48, temperature=0)))
    texts = []
    async for event in stream:
        if isinstance(event, TextDelta):
            texts.append(event.text)
            if len(texts) == abort_after:
                stream.abort()
    print(f"{name}: {''.join(texts)}")


async def main() -> None:
    with LLM() as llm:
        chat = ChatService(llm.async_engine, llm.renderer)
        await asyncio.gather(
            follow(chat, "first", "Why is the sky blue?"),
            follow(chat, "second", "Name three rivers."),
            follow(chat, "third", "Tell me a long story.", abort_after=10),
        )
        chat.close()


asyncio.run(main())
