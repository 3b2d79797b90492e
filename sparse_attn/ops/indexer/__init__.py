"""The lightning indexer: its queries, its key cache, and the scores of one against the other."""
