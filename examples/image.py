"""Draws a red circle and asks a server about it, through OpenAI's client.

    outrider serve outrider-vision-135m
    python examples/image.py                 # or: python examples/image.py photo.jpg "What is it?"

Needs `pip install openai pillow`. OPENAI_BASE_URL names another server. The questions say
"picture", the word that the model was trained with.
"""

import base64
import io
import os
import sys
from pathlib import Path

from openai import OpenAI
from PIL import Image, ImageDraw


def red_circle() -> bytes:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 196, 196), fill="red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def ask(client: OpenAI, image: bytes, question: str) -> str:
    url = "data:;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=48,
    )
    return answer.choices[0].message.content or ""


if __name__ == "__main__":
    server = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    file, *questions = sys.argv[1:] or [None]
    image = red_circle() if file is None else Path(file).read_bytes()
    for question in questions or ["What shape is in the picture?", "What color is it?"]:
        print(question, ask(server, image, question))
