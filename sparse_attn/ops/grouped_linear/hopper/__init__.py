"""Few rows on Hopper: the weight's codes stream through shared memory, and every SM takes as many of them (stream-K)."""
