"""Text, media and document blocks of the Messages API: their JSON fields, and the parts that they become.

Must not know which message a block is in: blocks of thinking and of tools are in messages_request.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from outrider.api.errors import refused
from outrider.api.limits import MESSAGES, AtMost, Word
from outrider.api.request_fields import RequestModel, one_of_types
from outrider.chat.conversation import MediaPart, Part, TextPart


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str


class BlockSource(RequestModel):
    type: Word
    media_type: Word | None = None
    data: str | None = None
    url: str | None = None
    content: str | Annotated[list[TextBlock], AtMost(MESSAGES)] | None = None


class MediaBlock(RequestModel):
    """Videos and audio are not in Anthropic's API: they have the sources of images. Audio is refused."""

    type: Literal["image", "video", "audio"]
    source: BlockSource = Field(json_schema_extra=one_of_types(url=["url"], base64=["data", "media_type"]))


class DocumentBlock(RequestModel):
    type: Literal["document"]
    source: BlockSource = Field(json_schema_extra=one_of_types(text=["data"], content=["content"]))
    title: str | None = None
    context: str | None = None


def text_parts(content: str | Sequence[TextBlock]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(TextPart(block.text) for block in content)


def part_of(block: TextBlock | MediaBlock | DocumentBlock, where: str) -> Part:
    if isinstance(block, TextBlock):
        return TextPart(block.text)
    if isinstance(block, MediaBlock):
        return _media(block, where)
    return _document(block, where)


def _media(block: MediaBlock, where: str) -> MediaPart:
    kind, source = block.type, block.source
    if source.type == "url" and source.url is not None:
        return MediaPart(kind, source.url)
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        return MediaPart(kind, f"data:{source.media_type};base64,{source.data}")
    raise refused(
        where,
        f"the source of the {kind} must be of type base64, with data and media_type, or of type url, with "
        f"url; this one is of type {source.type!r}",
    )


def _document(block: DocumentBlock, where: str) -> TextPart:
    """A text document becomes a text part, under its title and context."""
    source = block.source
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and source.content is not None:
        content = source.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
    else:
        raise refused(
            where,
            "a document source must be of type text, with data, or of type content, with content; "
            f"this one is of type {source.type!r}",
        )
    lines = [line for line in (block.title, block.context) if line]
    return TextPart("\n".join([*lines, text]))
