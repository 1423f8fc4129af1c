"""One module per family of endpoints."""

from gateway.routes import chat, completions, models, ops, tokenize

ROUTERS = (ops.router, models.router, chat.router, completions.router, tokenize.router)
