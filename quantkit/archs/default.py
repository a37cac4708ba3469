"""The default record: common Hugging Face names and nothing else (Llama, Mistral, Phi-3, Qwen, Mixtral, Qwen-MoE)."""

from quantkit.archs.base import Architecture

ARCHITECTURE = Architecture(name="default")
