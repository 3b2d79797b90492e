"""From a forward to tokens: steps, captured loops, the scheduler, and what it keeps of requests."""
