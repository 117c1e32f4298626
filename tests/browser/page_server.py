"""A real HTTP server with scripted answers, in this process, for the tests of the web page."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from fake_backend import CALLS, FACTS, THOUGHT, USAGE, FakeBackend, FakeTokenizer, settings

from outrider.api.app import Server, create_server
from outrider.chat.conversation import ChatRequest
from outrider.chat.events import ChatEvent, Finished, TextDelta, TokenDetail, TokenOrigins
from outrider.engine.sequence import TokenOrigin
from patience import wait_until

END = Finished("stop", USAGE)
MARKDOWN = """## Two planets

| planet | km |
|:--|--:|
| Earth | 12,742 |
| Mars | 6,779 |

```python
def ratio(a: float, b: float) -> float:
    return a / b  # the larger one first
```

Earth is **almost twice** as wide, see [the source](https://example.org/planets)."""
HOSTILE = """<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>

[a link](javascript:window.hacked=1) ![a picture](https://example.org/leak.png)

<b onclick="window.hacked=1">bold</b> <style>body { display: none }</style>

```html"><img src=x onerror=window.hacked=1>
<svg onload="window.hacked = 1"></svg>
```"""
NUM_LONG = 30_000  # words of an answer that no test waits for: two minutes


def pieces(text: str, size: int = 12) -> tuple[ChatEvent, ...]:
    return tuple(TextDelta(text[i : i + size]) for i in range(0, len(text), size))


def origins() -> tuple[ChatEvent, ...]:
    drafts = [("head", 1), ("head", 2), ("ngram", 1), ("forced", 1), ("prediction", 2)]
    kinds = [("plain", None), *drafts[:2], ("bonus", None), *drafts[2:]]
    details = [TokenDetail(i, TokenOrigin(name, place), -0.3) for i, (name, place) in enumerate(kinds)]
    return (TokenOrigins(tuple(details)), TextDelta("abcdefg"))


def answer(request: ChatRequest) -> Sequence[ChatEvent]:
    """By the last message, so that a test says what it wants to see."""
    last = request.messages[-1]
    if request.params.token_origins:
        return (*origins(), END)
    if last.role == "tool":
        return (*pieces(f"The tool said: {last.text}"), END)
    match last.text:
        case "markdown":
            return (*pieces(MARKDOWN), END)
        case "hostile":
            return (*pieces(HOSTILE), END)
        case "long":
            return (*(TextDelta(f"word{i} ") for i in range(NUM_LONG)), END)
        case "think":
            return THOUGHT
        case "call":
            return CALLS
        case _:
            num_answers = sum(message.role == "user" for message in request.messages)
            return (*pieces(f"Answer {num_answers} to: {last.text}"), END)


async def short_pause() -> None:
    await asyncio.sleep(0.004)


@dataclass
class PageServer:
    """One that can be stopped and started again on the same port."""

    made: Server
    backend: FakeBackend
    port: int = 0
    _server: uvicorn.Server | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = server = uvicorn.Server(uvicorn.Config(self.made.app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        self._threads.append(thread)
        wait_until(lambda: server.started)

    def stop(self) -> None:
        """At once: streams are cut off."""
        assert self._server is not None
        self._server.force_exit = self._server.should_exit = True
        self._threads[-1].join()


@contextmanager
def page_server(**changes: Any) -> Iterator[PageServer]:
    backend = FakeBackend(answer=answer, gate=short_pause)
    facts = replace(FACTS, reads_images=True, max_context=8192)
    made = create_server(backend, facts, FakeTokenizer(), settings(**changes), cache_budget_bytes=1 << 30)
    with served(PageServer(made, backend)) as running:
        yield running


@contextmanager
def served(site: PageServer) -> Iterator[PageServer]:
    site.start()
    try:
        yield site
    finally:
        with suppress(RuntimeError):
            site.stop()
