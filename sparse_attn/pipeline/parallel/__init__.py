"""What a step is to one of several ranks: rows, context, experts, and what all ranks find together."""
