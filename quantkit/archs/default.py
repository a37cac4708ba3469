"""The default record: common Hugging Face names and nothing else (Llama, Mistral, Qwen, Mixtral, Qwen-MoE)."""

from quantkit.archs.base import Architecture

ARCHITECTURE = Architecture(name="default")
