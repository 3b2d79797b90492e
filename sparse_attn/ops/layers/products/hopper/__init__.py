"""Few rows on Hopper: codes stream through shared memory, and every CTA takes as many of them (stream-K)."""
