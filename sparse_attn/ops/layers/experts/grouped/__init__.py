"""Any number of rows: sorted by expert, two grouped products."""
