"""ComfyUI nodes for a Tandem server, or any that speaks OpenAI's chat API. Copy this folder to custom_nodes/."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
