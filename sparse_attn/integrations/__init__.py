"""Other libraries' models on the operators of this one. Each integration imports its library where it is registered."""
