"""DeepSeek Sparse Attention as pure functions on torch.compile."""

__version__ = "0.1.0"
