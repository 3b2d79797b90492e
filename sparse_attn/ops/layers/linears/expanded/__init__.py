"""The product of many rows, before which codes are expanded to bf16."""
