"""Owns the way from what clients name as pictures to what the model reads, before a prompt is rendered."""

from __future__ import annotations

from dataclasses import replace

from outrider.chat.conversation import ChatRequest, MediaPart, Message, Part, PicturePart
from outrider.media.image_reader import PictureReader, ReadPicture
from outrider.media.limits import MediaLimits
from outrider.media.loader import MediaLoader, Wanted
from outrider.prompt_media import PromptMedia
from outrider.request import InvalidRequest


class Pictures:
    """A vision model's pictures: loaded once a request, off the event loop."""

    def __init__(self, reader: PictureReader, limits: MediaLimits) -> None:
        self._reader = reader
        self._loader: MediaLoader[ReadPicture] = MediaLoader(limits, reader.read)

    @property
    def placeholder(self) -> str:
        return self._reader.placeholder

    async def load(self, request: ChatRequest) -> ChatRequest:
        """The request with all its pictures read; the same request if it has none."""
        named = [part for m in request.messages for part in m.content if isinstance(part, MediaPart)]
        if not named:
            return request
        loaded = iter(await self._loader.load([_wanted(part) for part in named]))

        def read(part: Part) -> Part:
            return PicturePart(tuple(next(loaded))) if isinstance(part, MediaPart) else part

        messages: list[Message] = [
            replace(message, content=tuple(read(part) for part in message.content))
            for message in request.messages
        ]
        return replace(request, messages=messages)

    def place(self, prompt_ids: tuple[int, ...], pictures: tuple[ReadPicture, ...]) -> PromptMedia | None:
        return self._reader.place(prompt_ids, pictures) if pictures else None

    def close(self) -> None:
        self._loader.close()


def _wanted(part: MediaPart) -> Wanted:
    if part.kind == "audio":
        raise InvalidRequest("this model reads text and pictures, and a message holds audio")
    return Wanted(part.kind, part.source)
