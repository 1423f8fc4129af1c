"""Many Generate calls on one gRPC stream (InferenceService.GenerateMany), between Tandem's own services.

A gRPC message costs a Python process far more than the token in it, however many streams there are. Here all that the
calls of one connection have to say at one moment leaves as one message. Each call keeps its own metadata, deadline,
cancellation, status and flow control.
"""

from tandem.many.client import ManyClient
from tandem.many.server import CallContext, ManyServer

__all__ = ["CallContext", "ManyClient", "ManyServer"]
