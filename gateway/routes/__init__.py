"""One module per family of endpoints."""

from gateway.routes import chat, completions, embeddings, live, messages, models, ops, responses, tokenize

ROUTERS = (
    ops.router,
    models.router,
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    embeddings.router,
    tokenize.router,
    live.router,
)
