"""Ollama's routes: chat, generate, embed, models."""
