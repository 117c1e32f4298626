"""The HTTP server: OpenAI's and Anthropic's APIs over one chat service.

Owns JSON formats, status codes, streaming, limits and metrics. Must not know chat templates or MLX: it
translates requests into `outrider.chat.conversation` and renders `outrider.chat.events`.
"""
