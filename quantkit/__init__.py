"""INT8 W8A8 quantization and weight conversion for large language models, proved step by step."""

__version__ = "0.1.0"
