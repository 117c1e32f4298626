"""The HTTP face: OpenAI's and Anthropic's APIs over one chat service.

Owns JSON shapes, status codes, streaming, limits and metrics. Must not know templates, token ids or MLX:
it translates requests into `outrider.chat.conversation` and renders `outrider.chat.events`.
"""
